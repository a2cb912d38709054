//! An event that ends its process, again and again, and those that ran beside it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use outbox_core::store::EventState;
use outbox_core::testing::MemoryStore;
use outbox_core::{DeadReason, HandlerError, Outbox};

use super::unreliable::{Process, Unreliable};
use super::{LEASE, SWEEP, TIMEOUT};
use crate::events::{Ticked, publish_for_relays};

const POISON: u64 = 3;
const EVENTS: u64 = 20;

/// More than enough lives: each attempt of one event may end one.
const LIVES: u64 = 20;

fn outbox(store: &MemoryStore, process: &Process, running: &Arc<AtomicU64>) -> Outbox<Unreliable> {
    let (killed, running) = (process.clone(), Arc::clone(running));
    Outbox::builder(Unreliable::new(store, process))
        .on_current_runtime()
        .lease(LEASE)
        .handler_timeout(TIMEOUT)
        .max_attempts(4)
        .on(move |event: Ticked| {
            let (killed, running) = (killed.clone(), Arc::clone(&running));
            async move {
                running.fetch_add(1, Ordering::Relaxed);
                // Until all that were claimed together have begun.
                tokio::time::sleep(TIMEOUT / 10).await;
                if event.n == POISON {
                    killed.stop();
                    std::future::pending::<()>().await;
                }
                tokio::time::sleep(TIMEOUT / 10).await;
                running.fetch_sub(1, Ordering::Relaxed);
                Ok::<_, HandlerError>(())
            }
        })
        .build()
        .unwrap()
}

/// F19, F20, F21: a supervisor starts the process again, as often as it ends. At the end the event at
/// fault is dead, and says why; nobody else has paid for it with more than attempts.
#[tokio::test(start_paused = true)]
async fn an_event_that_ends_its_process_dies_alone() {
    for cadences_only in [false, true] {
        let store = MemoryStore::new();
        let calm = Process::new(0);
        calm.calm_down();
        let publisher = outbox(&store, &calm, &Arc::default());
        for n in 0..EVENTS {
            publish_for_relays(&publisher, &Ticked { n }).await;
        }
        let mut ended = 0;
        // Dropped, they would still do something.
        let mut over = Vec::new();
        let mut beside = Vec::new();
        while store
            .records()
            .iter()
            .any(|record| !matches!(record.state, EventState::Processed | EventState::DeadLetter))
        {
            assert!(ended < LIVES, "{:#?}", store.records());
            let (process, running) = (Process::new(ended), Arc::default());
            process.calm_down();
            let outbox = outbox(&store, &process, &running);
            let relay = outbox.relay().sweep_interval(SWEEP).concurrency(8);
            let relay = match cadences_only {
                true => relay.cadences_only(),
                false => relay,
            };
            let relay = relay.start().await.unwrap();
            tokio::select! {
                () = process.stopped().cancelled() => {
                    ended += 1;
                    beside.push(running.load(Ordering::Relaxed) - 1);
                }
                () = tokio::time::sleep(10 * SWEEP) => {}
            }
            process.stop();
            over.push((relay, outbox));
            tokio::time::sleep(LEASE).await;
        }
        assert!(beside[0] > 0, "nothing ran beside it");
        assert_eq!(beside.last(), Some(&0), "{beside:?}");
        for record in store.records() {
            if record.payload.contains(&format!(":{POISON}}}")) {
                assert_eq!(record.state, EventState::DeadLetter, "{record:#?}");
                assert_eq!(record.dead_reason, Some(DeadReason::LeaseExpired));
                assert_eq!(record.attempts, 4);
                assert_eq!(ended, 4, "each of its attempts ended a process");
            } else {
                assert_eq!(record.state, EventState::Processed, "{record:#?}");
                assert!(record.attempts <= 3, "{record:#?}");
            }
        }
    }
}
