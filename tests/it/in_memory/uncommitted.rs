//! Dispatch before the commit: what commits with its transaction, and what happens although it
//! does not.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use outbox_core::testing::{MemoryConnection, MemoryStore, Operation};
use outbox_core::{
    DeadReason, Delivery, EventState, HandlerError, Outbox, OutboxTx, StoreErrorKind,
    TransactionalHandler, Uncommitted,
};

use super::builder;
use crate::events::{OrderPaid, Step, Ticked, Unhandled, scripted};

/// An outbox whose handler does as `script` says, and the number of its runs.
fn with(
    store: &MemoryStore,
    script: impl Fn() -> Step + Send + Sync + 'static,
) -> (Outbox<MemoryStore>, Arc<AtomicU32>) {
    let runs = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&runs);
    let (handler, _) = scripted(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        script()
    });
    (builder(store).on(handler).build().unwrap(), runs)
}

#[tokio::test(start_paused = true)]
async fn a_success_is_recorded_with_the_transaction_and_nothing_is_left_to_do() {
    let store = MemoryStore::new();
    let outbox = builder(&store)
        .on(|event: OrderPaid| async move { Ok::<_, HandlerError>(format!("r-{}", event.order)) })
        .build()
        .unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let done = tx
        .dispatch_uncommitted(&OrderPaid { order: 7 })
        .await
        .unwrap();
    let Uncommitted::Processed(handled) = done else {
        panic!("{done:?}");
    };
    assert_eq!(handled.output().unwrap(), "r-7");
    tx.commit().await.unwrap();
    let record = outbox.find(handled.event_id()).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Processed, 1));
    assert_eq!(record.output.as_deref(), Some("\"r-7\""));
    assert_eq!(store.calls(Operation::Verify), 0);
    assert_eq!(store.calls(Operation::Settle), 0);

    let mut tx = outbox.begin().await.unwrap();
    let again = tx
        .dispatch_uncommitted(&OrderPaid { order: 7 })
        .await
        .unwrap();
    let Uncommitted::Duplicate(duplicate) = again else {
        panic!("{again:?}");
    };
    assert_eq!(duplicate.output().unwrap().as_deref(), Some("r-7"));
}

/// The hazard in the name: the handler ran, and its event never was.
#[tokio::test(start_paused = true)]
async fn the_effect_happens_although_the_transaction_rolls_back() {
    let store = MemoryStore::new();
    let (outbox, effects) = with(&store, || Step::Return(Ok(())));
    let mut tx = outbox.begin().await.unwrap();
    let done = tx.dispatch_uncommitted(&Ticked { n: 1 }).await.unwrap();
    assert!(matches!(done, Uncommitted::Processed(_)));
    tx.rollback().await.unwrap();
    assert_eq!(effects.load(Ordering::Relaxed), 1);
    assert!(store.records().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_failure_was_attempt_1_and_is_due_at_once_after_the_commit() {
    let failures: [fn() -> Step; 3] = [
        || Step::Return(Err(HandlerError::retry("down"))),
        || Step::Panic,
        || Step::Hang,
    ];
    for (fail, text) in failures.into_iter().zip([
        "down",
        "the handler panicked: as asked",
        "the handler overran its timeout of 30s",
    ]) {
        let store = MemoryStore::new();
        let (outbox, _) = with(&store, fail);
        let mut tx = outbox.begin().await.unwrap();
        let failed = tx.dispatch_uncommitted(&Ticked { n: 1 }).await.unwrap();
        let Uncommitted::Failed { event_id, error } = failed else {
            panic!("{failed:?}");
        };
        assert_eq!(error, text);
        tx.commit().await.unwrap();
        let record = outbox.find(event_id).await.unwrap().unwrap();
        assert_eq!((record.state, record.attempts), (EventState::Failed, 1));
        assert_eq!(record.due_at, Some(store.now()), "due at once");
        assert_eq!(record.failures[0].error, text);
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_may_still_ask_for_a_delay_or_give_up() {
    let store = MemoryStore::new();
    let (outbox, _) = with(&store, || {
        Step::Return(Err(HandlerError::retry_after(
            Duration::from_secs(90),
            "429",
        )))
    });
    let mut tx = outbox.begin().await.unwrap();
    let failed = tx.dispatch_uncommitted(&Ticked { n: 1 }).await.unwrap();
    let Uncommitted::Failed { event_id, .. } = failed else {
        panic!("{failed:?}");
    };
    tx.commit().await.unwrap();
    let record = outbox.find(event_id).await.unwrap().unwrap();
    assert_eq!(record.due_at, Some(store.now() + Duration::from_secs(90)));

    let (outbox, _) = with(&store, || Step::Return(Err(HandlerError::permanent("no"))));
    let mut tx = outbox.begin().await.unwrap();
    let dead = tx.dispatch_uncommitted(&Ticked { n: 2 }).await.unwrap();
    let Uncommitted::Dead {
        event_id, reason, ..
    } = dead
    else {
        panic!("{dead:?}");
    };
    assert_eq!(reason, DeadReason::Permanent);
    tx.commit().await.unwrap();
    assert!(outbox.dead_letters().get(event_id).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn without_a_handler_nothing_has_started_and_nothing_is_charged() {
    let store = MemoryStore::new();
    let (outbox, _) = with(&store, || Step::Return(Ok(())));
    let mut tx = outbox.begin().await.unwrap();
    let left = tx.dispatch_uncommitted(&Unhandled).await.unwrap();
    let Uncommitted::Left(id) = left else {
        panic!("{left:?}");
    };
    tx.commit().await.unwrap();
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Pending, 0));
}

#[tokio::test(start_paused = true)]
async fn a_relay_takes_what_failed_as_soon_as_it_is_committed() {
    let store = MemoryStore::new();
    let runs = AtomicU32::new(0);
    let (handler, mut seen) = scripted(move |_| match runs.fetch_add(1, Ordering::Relaxed) {
        0 => Step::Return(Err(HandlerError::retry("down"))),
        _ => Step::Return(Ok(())),
    });
    let outbox = builder(&store).on(handler).build().unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let failed = tx.dispatch_uncommitted(&Ticked { n: 1 }).await.unwrap();
    assert!(matches!(failed, Uncommitted::Failed { .. }));
    let begun = tokio::time::Instant::now();
    tx.commit().await.unwrap();
    seen.recv().await.unwrap();
    let second = seen.recv().await.unwrap();
    assert_eq!(second.delivery.attempt().get(), 2);
    assert!(
        begun.elapsed() < Duration::from_millis(100),
        "{:?}",
        begun.elapsed()
    );
}

/// Does as it is told, with the connection at hand.
struct Told(fn() -> Step);

impl TransactionalHandler<MemoryConnection, Ticked> for Told {
    async fn handle(
        &self,
        _: Ticked,
        _: &mut MemoryConnection,
        _: &Delivery,
    ) -> Result<(), HandlerError> {
        match (self.0)() {
            Step::Return(result) => result,
            Step::Take(time) => {
                tokio::time::sleep(time).await;
                Ok(())
            }
            Step::Hang => std::future::pending().await,
            Step::Panic => panic!("as asked"),
        }
    }
}

async fn begin(store: &MemoryStore) -> (Outbox<MemoryStore>, OutboxTx<MemoryStore>) {
    let (outbox, _) = with(store, || Step::Return(Ok(())));
    let tx = outbox.begin().await.unwrap();
    (outbox, tx)
}

/// As a web framework spawns it: the future is `Send`.
#[tokio::test(start_paused = true)]
async fn a_handler_with_the_connection_can_be_run_in_a_spawned_task() {
    let store = MemoryStore::new();
    let (_, mut tx) = begin(&store).await;
    let spawned = tokio::spawn(async move {
        let told = Told(|| Step::Return(Ok(())));
        let done = tx.dispatch_uncommitted_with(&Ticked { n: 1 }, &told).await;
        let other = tx.dispatch_uncommitted(&Ticked { n: 2 }).await;
        assert!(matches!(other.unwrap(), Uncommitted::Processed(_)));
        tx.commit().await.unwrap();
        done.unwrap()
    });
    assert!(matches!(spawned.await.unwrap(), Uncommitted::Processed(_)));
}

#[tokio::test(start_paused = true)]
async fn a_dispatch_that_is_dropped_half_way_is_a_failed_attempt_of_its_event() {
    let store = MemoryStore::new();
    let (outbox, mut tx) = begin(&store).await;
    let dropped = tokio::time::timeout(
        Duration::from_secs(1),
        tx.dispatch_uncommitted_with(&Ticked { n: 1 }, &Told(|| Step::Hang)),
    )
    .await;
    assert!(dropped.is_err());
    tx.commit().await.unwrap();
    let records = store.records();
    assert_eq!(records.len(), 1);
    assert_eq!(
        (records[0].state, records[0].attempts),
        (EventState::Failed, 1)
    );
    assert_eq!(records[0].due_at, Some(store.now()));
    assert_eq!(
        records[0].last_error.as_deref(),
        Some("its dispatch before the commit was dropped")
    );
    drop(outbox);
}

#[tokio::test(start_paused = true)]
async fn an_only_attempt_that_is_dropped_half_way_makes_a_dead_letter() {
    let store = MemoryStore::new();
    let outbox = builder(&store).max_attempts(1).build().unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let dropped = tokio::time::timeout(
        Duration::from_secs(1),
        tx.dispatch_uncommitted_with(&Ticked { n: 1 }, &Told(|| Step::Hang)),
    )
    .await;
    assert!(dropped.is_err());
    tx.commit().await.unwrap();
    let records = store.records();
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].state, EventState::DeadLetter);
    assert_eq!(
        records[0].last_error.as_deref(),
        Some("its dispatch before the commit was dropped")
    );
}

#[tokio::test(start_paused = true)]
async fn an_outbox_that_shuts_down_starts_no_handler_before_a_commit() {
    let store = MemoryStore::new();
    let (outbox, runs) = with(&store, || Step::Return(Ok(())));
    let mut tx = outbox.begin().await.unwrap();
    outbox.shutdown(Duration::from_secs(1)).await.unwrap();
    let left = tx.dispatch_uncommitted(&Ticked { n: 1 }).await.unwrap();
    assert!(matches!(left, Uncommitted::Left(_)));
    tx.commit().await.unwrap();
    assert_eq!(runs.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn a_settlement_that_fails_is_an_error_of_the_publish() {
    let store = MemoryStore::new();
    let (outbox, mut tx) = begin(&store).await;
    store.fail_next(Operation::SettleThrough, StoreErrorKind::Conflict, 1);
    let error = tx.dispatch_uncommitted(&Ticked { n: 1 }).await.unwrap_err();
    assert!(error.is_transient());
    tx.rollback().await.unwrap();
    assert!(store.records().is_empty());
    drop(outbox);
}
