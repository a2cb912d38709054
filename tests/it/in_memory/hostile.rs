//! Handlers and hooks whose values bite when they are shown or dropped, and runtimes that block or
//! end.

use std::fmt;
use std::time::Duration;

use outbox_core::testing::{MemoryStore, Operation};
use outbox_core::{
    Backoff, EventState, HandlerError, Outbox, OutboxEvent, SettledResult, StoreErrorKind,
};

use super::builder;
use crate::events::{Step, Ticked, publish_for_relays, scripted, settled};

/// Panics when it is dropped, unless somebody else's panic is on its way.
#[derive(Debug)]
struct DropBomb;

impl Drop for DropBomb {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            panic!("in drop");
        }
    }
}

impl fmt::Display for DropBomb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bomb")
    }
}

impl std::error::Error for DropBomb {}

#[tokio::test(start_paused = true)]
async fn p11_an_error_whose_drop_panics_is_a_failed_attempt() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Err(HandlerError::retry(DropBomb))));
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder.build().unwrap();
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let _relay = outbox.relay().start().await.unwrap();
    let outcome = outcomes.recv().await.unwrap();
    assert!(
        matches!(outcome.result, SettledResult::Retry { .. }),
        "{outcome:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn p11_a_panic_whose_payload_panics_in_its_drop_is_a_failed_attempt() {
    let store = MemoryStore::new();
    let (builder, mut outcomes) = settled(builder(&store).on(|_: Ticked| async {
        std::panic::panic_any(DropBomb);
        #[allow(unreachable_code, reason = "it says what the handler would return")]
        Ok::<_, HandlerError>(())
    }));
    let outbox = builder.build().unwrap();
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let _relay = outbox.relay().start().await.unwrap();
    let outcome = outcomes.recv().await.unwrap();
    assert_eq!(outcome.attempt, 1);
    assert!(
        matches!(outcome.result, SettledResult::Retry { .. }),
        "{outcome:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_hook_whose_panic_panics_does_not_stop_settlement() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let builder = builder(&store)
        .on(handler)
        .on_settled(|_| std::panic::panic_any(DropBomb));
    let (builder, mut outcomes) = settled(builder);
    let outbox = builder.build().unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    for n in 0..3 {
        publish_for_relays(&outbox, &Ticked { n }).await;
        outcomes.recv().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn p18_an_outcome_that_is_always_refused_does_not_stop_the_others() {
    let store = MemoryStore::new();
    // The text that replaces the error, too.
    store.refuse_error_containing("refused");
    let (handler, _runs) = scripted(|run| match run.n {
        0 => Step::Return(Err(HandlerError::permanent("refused"))),
        _ => Step::Return(Ok(())),
    });
    let outbox = builder(&store).on(handler).build().unwrap();
    publish_for_relays(&outbox, &Ticked { n: 0 }).await;
    let _relay = outbox.relay().start().await.unwrap();
    store.wait_for_calls(Operation::Settle, 1).await;
    for n in 1..=20 {
        publish_for_relays(&outbox, &Ticked { n }).await;
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(outbox.counters().processed, 20);
}

/// One worker thread, blocked by another event's handler: this one's never begins, so it is neither
/// charged nor run after it was given back.
#[test]
fn p11_an_event_whose_handler_found_no_thread_is_not_charged() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let (blocked, is_blocked) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let store = MemoryStore::new();
    let no_wait = Backoff::new(Duration::from_millis(1), Duration::from_millis(1), 0.0).unwrap();
    let outbox = Outbox::builder(store.clone())
        .lease(Duration::from_secs(1))
        .handler_timeout(Duration::from_millis(50))
        .max_attempts(2)
        .backoff(no_wait)
        .on(move |event: Ticked| {
            let blocked = blocked.clone();
            if event.n == 0 {
                blocked.send(()).unwrap();
                released.lock().unwrap().recv().unwrap();
            }
            async { Ok::<_, HandlerError>(()) }
        })
        .build()
        .unwrap();
    runtime.block_on(async {
        let relay = outbox.relay();
        let relay = relay
            .poll_interval(Duration::from_millis(20))
            .start()
            .await
            .unwrap();
        publish_for_relays(&outbox, &Ticked { n: 0 }).await;
        is_blocked.recv().unwrap();
        let victim = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
        // It is claimed and given back, again and again.
        store.wait_for_calls(Operation::Release, 3).await;
        let record = store
            .records()
            .into_iter()
            .find(|record| record.id == victim)
            .unwrap();
        assert!(record.failures.is_empty(), "{record:?}");
        assert_ne!(record.state, EventState::DeadLetter);
        release.send(()).unwrap();
        drop(relay);
    });
}

/// Handlers' runtime is gone while the outbox lives: it gives back what it holds and claims nothing.
#[test]
fn an_outbox_whose_runtime_has_ended_does_not_take_events_from_others() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = Outbox::builder(store.clone()).on(handler).build().unwrap();
    let gone = tokio::runtime::Runtime::new().unwrap();
    let _relay = gone.block_on(async { outbox.relay().start().await.unwrap() });
    gone.shutdown_background();

    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        publish_for_relays(&outbox, &Ticked { n: 1 }).await;
        store.wait_for_calls(Operation::Release, 1).await;
    });
    let record = store.records().pop().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Pending, 0));
    assert!(runs.try_recv().is_err());
    assert!(outbox.counters().released <= 2, "{:?}", outbox.counters());
}

#[tokio::test(start_paused = true)]
async fn a_settlement_that_fails_for_a_reason_unknown_ends_with_its_lease() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    store.fail_next(Operation::Settle, StoreErrorKind::Other, 3);
    let _relay = outbox.relay().start().await.unwrap();
    assert_eq!(runs.recv().await.unwrap().delivery.attempt().get(), 1);
    assert_eq!(runs.recv().await.unwrap().delivery.attempt().get(), 2);
}

/// An output that cannot be written as JSON.
#[derive(Clone, Debug, serde::Deserialize)]
struct Unwritable;

impl serde::Serialize for Unwritable {
    fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("it has no shape"))
    }
}

#[derive(Clone, Debug, serde::Deserialize, serde::Serialize)]
struct Shapeless;

impl OutboxEvent for Shapeless {
    type Output = Unwritable;
    const NAME: &'static str = "shapeless";
}

#[tokio::test(start_paused = true)]
async fn p11_an_output_that_is_no_json_is_a_failed_attempt() {
    let store = MemoryStore::new();
    let (builder, mut outcomes) =
        settled(builder(&store).on(|_: Shapeless| async { Ok::<_, HandlerError>(Unwritable) }));
    let outbox = builder.build().unwrap();
    publish_for_relays(&outbox, &Shapeless).await;
    let _relay = outbox.relay().start().await.unwrap();
    match outcomes.recv().await.unwrap().result {
        SettledResult::Retry { error, .. } => {
            assert!(error.contains("it has no shape"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}
