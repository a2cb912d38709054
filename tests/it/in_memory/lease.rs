//! Leases that are renewed, lost, or held by a handler that blocks.

use std::time::Duration;

use outbox_core::testing::{MemoryStore, Operation};
use outbox_core::{EventState, SettledResult};

use super::builder;
use crate::events::{Step, Ticked, publish_for_relays, scripted, settled};

const LEASE: Duration = Duration::from_secs(30);

#[tokio::test(start_paused = true)]
async fn p4_a_handler_that_takes_longer_than_its_claim_is_renewed_and_runs_once() {
    let store = MemoryStore::new();
    store.fail_next(Operation::Renew, outbox_core::StoreErrorKind::Conflict, 2);
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(29)));
    let (builder_, mut outcomes) = settled(builder(&store).on(handler).lease(LEASE));
    let outbox = builder_.build().unwrap();
    let (other, mut other_runs) = scripted(|_| Step::Return(Ok(())));
    let elsewhere = builder(&store)
        .on(other)
        .instance("elsewhere")
        .build()
        .unwrap();
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;

    let _relay = outbox.relay().start().await.unwrap();
    runs.recv().await.unwrap();
    let _elsewhere = elsewhere.relay().start().await.unwrap();
    assert_eq!(
        outcomes.recv().await.unwrap().result,
        SettledResult::Processed
    );
    assert!(other_runs.try_recv().is_err());
    assert!(store.calls(Operation::Renew) >= 3);
    assert_eq!(outbox.counters().lease_lost, 0);
}

#[tokio::test(start_paused = true)]
async fn p5_a_lost_lease_cancels_the_run_and_its_result_changes_nothing() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(20)));
    let outbox = builder(&store).on(handler).lease(LEASE).build().unwrap();
    let (other, mut other_runs) = scripted(|_| Step::Return(Ok(())));
    let (builder_, mut outcomes) = settled(builder(&store).on(other).instance("elsewhere"));
    let elsewhere = builder_.build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;

    let relay = outbox.relay().start().await.unwrap();
    let run = runs.recv().await.unwrap();
    drop(relay);
    // Time stood still for the first process; its lease ended meanwhile.
    store.expire_lease(id.row());
    let _elsewhere = elsewhere.relay().start().await.unwrap();
    assert_eq!(other_runs.recv().await.unwrap().delivery.attempt().get(), 2);
    assert_eq!(
        outcomes.recv().await.unwrap().result,
        SettledResult::Processed
    );

    run.delivery.cancelled().cancelled().await;
    assert_eq!(outbox.counters().lease_lost, 1);
    assert_eq!(outbox.counters().processed, 0);
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Processed, 2));
    assert_eq!(record.claimed_by.as_deref(), Some("elsewhere"));
}

#[tokio::test(start_paused = true)]
async fn a_run_is_cancelled_before_its_lease_ends_if_it_cannot_be_renewed() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Hang);
    let outbox = builder(&store)
        .on(handler)
        .lease(LEASE)
        .handler_timeout(LEASE)
        .build()
        .unwrap();
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let _relay = outbox.relay().start().await.unwrap();
    let run = runs.recv().await.unwrap();
    let claimed = tokio::time::Instant::now();

    store.unreachable(true);
    run.delivery.cancelled().cancelled().await;
    assert!(
        claimed.elapsed() <= LEASE + Duration::from_millis(500),
        "{:?}",
        claimed.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_locked_row_is_not_a_lost_lease() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(29)));
    let (builder, mut outcomes) = settled(builder(&store).on(handler).lease(LEASE));
    let outbox = builder.build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let _relay = outbox.relay().start().await.unwrap();
    runs.recv().await.unwrap();
    store.lock_row(id.row());

    store.wait_for_calls(Operation::Renew, 2).await;
    store.unlock_row(id.row());
    assert_eq!(
        outcomes.recv().await.unwrap().result,
        SettledResult::Processed
    );
    assert_eq!(outbox.counters().lease_lost, 0);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_is_never_answered_does_not_keep_a_run_from_being_cancelled() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Hang);
    let outbox = builder(&store)
        .on(handler)
        .lease(LEASE)
        .handler_timeout(LEASE)
        .build()
        .unwrap();
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let _relay = outbox.relay().start().await.unwrap();
    let run = runs.recv().await.unwrap();
    let claimed = tokio::time::Instant::now();

    let _silence = store.hold(Operation::Renew);
    run.delivery.cancelled().cancelled().await;
    assert!(
        claimed.elapsed() <= LEASE + Duration::from_millis(500),
        "{:?}",
        claimed.elapsed()
    );
}
