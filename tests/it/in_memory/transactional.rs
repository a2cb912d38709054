//! Handlers that write through a transaction, which settles their event, too.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use outbox_core::testing::{MemoryConnection, MemoryStore, Operation};
use outbox_core::{
    BuildError, Delivery, EventState, HandlerError, Outbox, OutboxBuilder, SettledEvent,
    SettledResult, StoreErrorKind, TransactionalHandler, Uncommitted,
};
use tokio::sync::mpsc;

use super::builder;
use crate::events::{OrderPaid, Step, Ticked, publish_for_relays, settled};

/// Does as its script says for each attempt, and counts its runs.
struct Told {
    script: fn(u32) -> Step,
    runs: Arc<AtomicU32>,
}

impl TransactionalHandler<MemoryConnection, Ticked> for Told {
    async fn handle(
        &self,
        _: Ticked,
        _: &mut MemoryConnection,
        delivery: &Delivery,
    ) -> Result<(), HandlerError> {
        self.runs.fetch_add(1, Ordering::Relaxed);
        match (self.script)(delivery.attempt().get()) {
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

type Outcomes = mpsc::UnboundedReceiver<SettledEvent>;

fn told(
    builder: OutboxBuilder<MemoryStore>,
    script: fn(u32) -> Step,
) -> (Outbox<MemoryStore>, Outcomes, Arc<AtomicU32>) {
    let runs = Arc::new(AtomicU32::new(0));
    let handler = Told {
        script,
        runs: Arc::clone(&runs),
    };
    let (builder, outcomes) = settled(builder);
    let outbox = builder.on_transactional(handler).build().unwrap();
    (outbox, outcomes, runs)
}

#[tokio::test(start_paused = true)]
async fn a_success_is_settled_in_the_handlers_own_transaction() {
    let store = MemoryStore::new();
    let (outbox, mut outcomes, _) = told(builder(&store), |_| Step::Return(Ok(())));
    let relayed = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let relay = outbox.relay().start().await.unwrap();
    let outcome = outcomes.recv().await.unwrap();
    assert_eq!((outcome.event_id, outcome.attempt), (relayed, 1));
    assert_eq!(outcome.result, SettledResult::Processed);

    // And so it is where the event is dispatched inline.
    let mut tx = outbox.begin().await.unwrap();
    let inline = tx.publish(&Ticked { n: 2 }).await.unwrap().event_id();
    tx.commit().await.unwrap().settled().await;
    assert_eq!(outcomes.recv().await.unwrap().event_id, inline);
    relay.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!(outbox.counters().processed, 2);
    assert_eq!(store.calls(Operation::SettleThrough), 2);
    assert_eq!(store.calls(Operation::Settle), 0);
    let states = store.records().into_iter().map(|record| record.state);
    assert!(
        states
            .into_iter()
            .all(|state| state == EventState::Processed)
    );
}

#[tokio::test(start_paused = true)]
async fn p11_a_failure_is_a_failed_attempt_and_its_transaction_is_rolled_back() {
    let failures: [fn(u32) -> Step; 3] = [
        |attempt| match attempt {
            1 => Step::Return(Err(HandlerError::retry("down"))),
            _ => Step::Return(Ok(())),
        },
        |attempt| match attempt {
            1 => Step::Panic,
            _ => Step::Return(Ok(())),
        },
        |attempt| match attempt {
            1 => Step::Hang,
            _ => Step::Return(Ok(())),
        },
    ];
    for script in failures {
        let store = MemoryStore::new();
        let (outbox, mut outcomes, _) = told(builder(&store), script);
        publish_for_relays(&outbox, &Ticked { n: 1 }).await;
        let _relay = outbox.relay().start().await.unwrap();
        let first = outcomes.recv().await.unwrap();
        assert!(
            matches!(first.result, SettledResult::Retry { .. }),
            "{first:?}"
        );
        let second = outcomes.recv().await.unwrap();
        assert_eq!(
            (second.result, second.attempt),
            (SettledResult::Processed, 2)
        );
        assert_eq!(store.calls(Operation::Rollback), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn p5_a_lost_lease_loses_the_transaction_with_it() {
    let store = MemoryStore::new();
    let (outbox, _, runs) = told(builder(&store), |_| Step::Take(Duration::from_secs(10)));
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let _relay = outbox.relay().start().await.unwrap();
    store.wait_for_calls(Operation::Begin, 2).await;
    store.expire_lease(id.row());
    let other = outbox_core::store::ClaimRequest {
        limit: std::num::NonZeroU32::MIN,
        reserved: 0,
        lease: Duration::from_secs(3_600),
        token: outbox_core::lease::LeaseToken::random(),
        instance: "other",
        events: &[outbox_core::store::KnownEvent {
            name: "ticked",
            handler: None,
            newest_version: std::num::NonZeroU32::MIN,
        }],
        low_water: outbox_core::store::LowWater::BEGINNING,
        freed: &[],
    };
    let claimed = outbox_core::Store::claim(&store, &other).await.unwrap();
    assert_eq!(claimed.len(), 1);
    store.wait_for_calls(Operation::SettleThrough, 1).await;
    store.wait_for_calls(Operation::Rollback, 1).await;
    assert_eq!(outbox.counters().lease_lost, 1);
    assert_eq!(outbox.counters().processed, 0);
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::InProgress, 2));
}

#[tokio::test(start_paused = true)]
async fn a_commit_that_fails_is_a_failed_attempt() {
    let store = MemoryStore::new();
    let (outbox, mut outcomes, _) = told(builder(&store), |_| Step::Return(Ok(())));
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    store.fail_next(Operation::Commit, StoreErrorKind::Conflict, 1);
    let _relay = outbox.relay().start().await.unwrap();
    let first = outcomes.recv().await.unwrap();
    assert!(
        matches!(&first.result, SettledResult::Retry { error, .. }
            if error.starts_with("what the handler wrote was not committed: transaction conflict")),
        "{first:?}"
    );
    assert_eq!(
        outcomes.recv().await.unwrap().result,
        SettledResult::Processed
    );
}

/// P7: a connection that never answers its COMMIT does not keep the event in progress for ever.
#[tokio::test(start_paused = true)]
async fn p7_a_commit_that_never_comes_back_is_given_up_after_a_lease() {
    let store = MemoryStore::new();
    let (outbox, mut outcomes, _) = told(builder(&store), |_| Step::Return(Ok(())));
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let black_hole = store.hold(Operation::Commit);
    let _relay = outbox.relay().start().await.unwrap();
    black_hole.arrived(1).await;
    let outcome = outcomes.recv().await.unwrap();
    assert!(
        matches!(&outcome.result, SettledResult::Retry { error, .. }
            if error.contains("no answer from the database in time")),
        "{outcome:?}"
    );
    drop(black_hole);
    assert_eq!(
        outcomes.recv().await.unwrap().result,
        SettledResult::Processed
    );
}

/// Nobody knows whether it committed: the row does, and it is not run again.
#[tokio::test(start_paused = true)]
async fn a_commit_whose_answer_is_lost_is_not_repeated() {
    let store = MemoryStore::new();
    let (outbox, _, runs) = told(builder(&store), |_| Step::Return(Ok(())));
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    store.lose_answers(Operation::Commit, 1);
    let relay = outbox.relay().start().await.unwrap();
    store.wait_for_calls(Operation::Settle, 1).await;
    relay.shutdown(Duration::from_secs(5)).await.unwrap();
    assert_eq!(outbox.counters().lease_lost, 1);
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Processed, 1));
}

#[tokio::test(start_paused = true)]
async fn p6_without_a_transaction_nothing_has_started_and_nothing_is_charged() {
    let store = MemoryStore::new();
    let (outbox, mut outcomes, runs) = told(builder(&store), |_| Step::Return(Ok(())));
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    store.fail_next(Operation::Begin, StoreErrorKind::Unreachable, 1);
    let _relay = outbox.relay().start().await.unwrap();
    let outcome = outcomes.recv().await.unwrap();
    assert_eq!(
        (outcome.result, outcome.attempt),
        (SettledResult::Processed, 1)
    );
    assert_eq!(outbox.counters().released, 1);
    assert_eq!(runs.load(Ordering::Relaxed), 1);
}

/// The application's pool has no connection to give for longer than the handler may take.
#[tokio::test(start_paused = true)]
async fn p6_a_transaction_that_is_long_in_coming_costs_no_attempt() {
    let store = MemoryStore::new();
    let builder = builder(&store).handler_timeout(Duration::from_secs(2));
    let (outbox, mut outcomes, runs) = told(builder, |_| Step::Return(Ok(())));
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let waiting = store.hold(Operation::Begin);
    let relay = outbox.relay().start().await.unwrap();
    waiting.arrived(1).await;
    store.wait_for_calls(Operation::Release, 1).await;
    assert_eq!(runs.load(Ordering::Relaxed), 0);
    drop(waiting);
    let outcome = outcomes.recv().await.unwrap();
    assert!(matches!(outcome.result, SettledResult::Processed));
    assert_eq!(outcome.attempt, 1);
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    relay.shutdown(Duration::from_secs(1)).await.unwrap();
}

/// A connection that does not answer a rollback keeps the handler's permit no longer than a lease.
#[tokio::test(start_paused = true)]
async fn p11_a_rollback_that_never_comes_back_is_given_up_after_a_lease() {
    let store = MemoryStore::new();
    let builder = builder(&store)
        .lease(Duration::from_secs(10))
        .handler_timeout(Duration::from_secs(2));
    let failing = |_| Step::Return(Err(HandlerError::retry("no")));
    let (outbox, mut outcomes, runs) = told(builder, failing);
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let _hung = store.hold(Operation::Rollback);
    let _relay = outbox.relay().concurrency(1).start().await.unwrap();
    let outcome = tokio::time::timeout(Duration::from_secs(15), outcomes.recv());
    let outcome = outcome.await.unwrap().unwrap();
    assert!(matches!(outcome.result, SettledResult::Retry { .. }));
    assert_eq!(runs.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn it_is_given_the_callers_transaction_before_a_commit_and_one_of_its_own_directly() {
    let store = MemoryStore::new();
    let (outbox, _, runs) = told(builder(&store), |_| Step::Return(Ok(())));
    let mut tx = outbox.begin().await.unwrap();
    let done = tx.dispatch_uncommitted(&Ticked { n: 1 }).await.unwrap();
    assert!(matches!(done, Uncommitted::Processed(_)), "{done:?}");
    tx.commit().await.unwrap();
    assert_eq!(store.calls(Operation::Begin), 1);

    outbox.dispatch_directly(&Ticked { n: 2 }).await.unwrap();
    assert_eq!(store.calls(Operation::Begin), 2);
    assert_eq!(store.calls(Operation::Commit), 2);
    assert_eq!(runs.load(Ordering::Relaxed), 2);
}

#[test]
fn an_event_has_one_handler_of_whatever_kind() {
    let store = MemoryStore::new();
    let runs = Arc::default();
    let script = |_| Step::Return(Ok(()));
    let error = builder(&store)
        .on(|_: OrderPaid| async { Ok::<_, HandlerError>(String::new()) })
        .on(|_: Ticked| async { Ok::<_, HandlerError>(()) })
        .on_transactional(Told { script, runs })
        .build()
        .unwrap_err();
    assert!(matches!(
        error,
        BuildError::DuplicateHandler {
            event: "ticked",
            ..
        }
    ));
}
