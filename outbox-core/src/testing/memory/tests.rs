//! What the contract cannot see: time, failures on request, and wake-ups.

use std::num::NonZeroU32;
use std::time::Duration;

use futures_util::FutureExt as _;

use super::*;
use crate::event::{BehindDead, Priority};
use crate::lease::LeaseToken;
use crate::outcome::{ErrorText, Outcome};
use crate::store::{EventState, ExclusiveLock as _, KnownEvent, LowWater, Wakeups as _};

const MINUTE: Duration = Duration::from_secs(60);

const PASS: Pass = Pass {
    cadence: Cadence::Maintenance,
    statement_limit: MINUTE,
};

fn event() -> NewEvent {
    NewEvent {
        name: "order.paid",
        version: NonZeroU32::MIN,
        payload: "{}".to_owned(),
        headers: None,
        dedup_key: None,
        fingerprint: None,
        ordering_key: None,
        behind_dead: BehindDead::Block,
        priority: Priority::Normal,
        max_attempts: NonZeroU32::new(3).unwrap(),
        delay: Duration::ZERO,
        expires_in: None,
        retention: MINUTE,
        key_retention: MINUTE,
        lease: None,
    }
}

fn request() -> ClaimRequest<'static> {
    ClaimRequest {
        reserved: 0,
        limit: NonZeroU32::new(10).unwrap(),
        lease: MINUTE,
        token: LeaseToken::random(),
        instance: "a",
        events: &[KnownEvent {
            handler: None,
            name: "order.paid",
            newest_version: NonZeroU32::MIN,
        }],
        low_water: LowWater::BEGINNING,
        freed: &[],
    }
}

async fn publish(store: &MemoryStore, event: NewEvent) {
    let mut tx = store.begin().await.unwrap();
    store.insert(&mut tx, &[event]).await.unwrap();
    store.commit(tx).await.unwrap();
}

async fn claim(store: &MemoryStore) -> Vec<HeldLease> {
    let claimed = store.claim(&request()).await.unwrap();
    claimed.iter().map(Claimed::lease).collect()
}

async fn settle(
    store: &MemoryStore,
    lease: HeldLease,
    outcome: Outcome,
) -> Result<(), StoreErrorKind> {
    match store.settle(&[Settlement { lease, outcome }]).await {
        Ok(answers) => {
            assert_eq!(answers, [Settled::Recorded]);
            Ok(())
        }
        Err(error) => Err(error.kind()),
    }
}

fn processed(output: &str) -> Outcome {
    Outcome::Processed {
        output: Some(output.to_owned()),
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_ends_when_its_time_has_passed() {
    let store = MemoryStore::new();
    publish(&store, event()).await;
    assert_eq!(claim(&store).await.len(), 1);
    tokio::time::advance(MINUTE - Duration::from_millis(1)).await;
    assert_eq!(claim(&store).await.len(), 0);
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(claim(&store).await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_delay_and_a_backoff_follow_tokio_time() {
    let store = MemoryStore::new();
    let delayed = NewEvent {
        delay: MINUTE,
        ..event()
    };
    publish(&store, delayed).await;
    assert_eq!(claim(&store).await.len(), 0);
    tokio::time::advance(MINUTE).await;
    let leases = claim(&store).await;
    let retry = Outcome::Retry {
        after: 2 * MINUTE,
        error: ErrorText::new(&"no route"),
    };
    settle(&store, leases[0], retry).await.unwrap();
    tokio::time::advance(MINUTE).await;
    assert_eq!(claim(&store).await.len(), 0);
    tokio::time::advance(MINUTE).await;
    assert_eq!(claim(&store).await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn retention_follows_tokio_time() {
    let store = MemoryStore::new();
    publish(&store, event()).await;
    let leases = claim(&store).await;
    settle(&store, leases[0], processed("1")).await.unwrap();
    tokio::time::advance(MINUTE - Duration::from_millis(1)).await;
    assert_eq!(store.purge(PASS, NonZeroU32::MIN).await.unwrap(), Some(0));
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(store.purge(PASS, NonZeroU32::MIN).await.unwrap(), Some(1));
    assert_eq!(store.records(), []);
}

#[tokio::test(start_paused = true)]
async fn a_transaction_that_never_ends_makes_the_next_one_time_out() {
    let store = MemoryStore::new();
    let first = store.begin().await.unwrap();
    let error = store.begin().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TimedOut);
    drop(first);
    store.begin().await.unwrap();
}

#[tokio::test]
async fn a_savepoint_takes_back_what_came_after_it() {
    let store = MemoryStore::new();
    let mut tx = store.begin().await.unwrap();
    store.insert(&mut tx, &[event()]).await.unwrap();
    let savepoint = tx.savepoint();
    let keyed = NewEvent {
        dedup_key: Some("k".to_owned()),
        ..event()
    };
    store
        .insert(&mut tx, std::slice::from_ref(&keyed))
        .await
        .unwrap();
    tx.rollback_to(savepoint);
    let again = store.insert(&mut tx, &[keyed]).await.unwrap();
    store.commit(tx).await.unwrap();
    assert!(matches!(again[0], Insertion::Inserted(_)));
    assert_eq!(store.records().len(), 2);
}

#[tokio::test]
async fn an_aborted_transaction_commits_nothing_and_says_nothing() {
    let store = MemoryStore::new();
    let mut tx = store.begin().await.unwrap();
    store.insert(&mut tx, &[event()]).await.unwrap();
    tx.abort();
    store.commit(tx).await.unwrap();
    assert_eq!(store.records(), []);
}

#[tokio::test]
async fn a_planned_failure_comes_before_the_work() {
    let store = MemoryStore::new();
    publish(&store, event()).await;
    store.fail_next(Operation::Claim, StoreErrorKind::Conflict, 2);
    for _ in 0..2 {
        let error = store.claim(&request()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Conflict);
    }
    assert_eq!(store.records()[0].attempts, 0);
    assert_eq!(claim(&store).await.len(), 1);
    assert_eq!(store.calls(Operation::Claim), 3);
    assert_eq!(store.calls(Operation::Settle), 0);
}

#[tokio::test]
async fn a_lost_answer_comes_after_the_work() {
    let store = MemoryStore::new();
    let mut tx = store.begin().await.unwrap();
    store.insert(&mut tx, &[event()]).await.unwrap();
    store.lose_answers(Operation::Commit, 1);
    let error = store.commit(tx).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TimedOut);
    assert_eq!(store.records().len(), 1);
    publish(&store, event()).await;
    assert_eq!(store.records().len(), 2);
}

#[tokio::test]
async fn an_unreachable_store_does_nothing_until_it_is_back() {
    let store = MemoryStore::new();
    let mut tx = store.begin().await.unwrap();
    store.insert(&mut tx, &[event()]).await.unwrap();
    store.unreachable(true);
    let error = store.commit(tx).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unreachable);
    store.unreachable(false);
    assert_eq!(store.records(), []);
    publish(&store, event()).await;
    assert_eq!(store.records().len(), 1);
}

#[tokio::test]
async fn a_refused_value_fails_its_whole_batch() {
    let store = MemoryStore::new();
    publish(&store, event()).await;
    publish(&store, event()).await;
    store.refuse_output_containing("bad");
    store.refuse_error_containing("worse");
    let leases = claim(&store).await;
    let outcomes = [processed("\"bad\""), processed("\"good\"")];
    let batch: Vec<_> = leases
        .iter()
        .zip(outcomes)
        .map(|(lease, outcome)| Settlement {
            lease: *lease,
            outcome,
        })
        .collect();
    let error = store.settle(&batch).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Data);
    assert_eq!(store.records()[1].state, EventState::InProgress);

    settle(&store, leases[1], processed("\"good\""))
        .await
        .unwrap();
    let retry = |error: &str| Outcome::Retry {
        after: MINUTE,
        error: ErrorText::new(&error),
    };
    let refused = settle(&store, leases[0], retry("worse")).await;
    assert_eq!(refused, Err(StoreErrorKind::Data));
    settle(&store, leases[0], retry("bad")).await.unwrap();
}

#[tokio::test]
async fn a_locked_row_cannot_be_renewed_for_now() {
    let store = MemoryStore::new();
    publish(&store, event()).await;
    let leases = claim(&store).await;
    store.lock_row(leases[0].row);
    assert_eq!(
        store.renew(&leases, MINUTE).await.unwrap(),
        [Renewal::Unknown]
    );
    store.unlock_row(leases[0].row);
    assert_eq!(
        store.renew(&leases, MINUTE).await.unwrap(),
        [Renewal::Renewed]
    );
}

#[tokio::test]
async fn a_held_call_does_nothing_until_it_is_let_go() {
    let store = MemoryStore::new();
    publish(&store, event()).await;
    let hold = store.hold(Operation::Claim);
    let claiming = tokio::spawn({
        let store = store.clone();
        async move { claim(&store).await }
    });
    hold.arrived(1).await;
    assert_eq!(store.records()[0].attempts, 0);
    assert_eq!(store.calls(Operation::Claim), 0);
    drop(hold);
    store.wait_for_calls(Operation::Claim, 1).await;
    assert_eq!(claiming.await.unwrap().len(), 1);
    assert_eq!(claim(&store).await, []);
}

#[tokio::test]
async fn wakeups_are_off_unless_asked_for() {
    let store = MemoryStore::new();
    assert!(store.listen().await.unwrap().is_none());
    store.notify().await.unwrap();
}

#[tokio::test]
async fn a_notification_wakes_every_subscription_of_every_clone() {
    let store = MemoryStore::new().with_wakeups();
    let mut first = store.listen().await.unwrap().unwrap();
    let mut second = store.clone().listen().await.unwrap().unwrap();
    store.notify().await.unwrap();
    store.notify().await.unwrap();
    first.next().await.unwrap();
    second.next().await.unwrap();

    let again = first.next().now_or_never();
    assert!(again.is_none(), "two that came together are one");
}

#[tokio::test]
async fn a_broken_subscription_says_so_and_can_be_replaced() {
    let store = MemoryStore::new().with_wakeups();
    let mut broken = store.listen().await.unwrap().unwrap();
    store.break_subscriptions();
    let error = broken.next().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unreachable);
    let mut replaced = store.listen().await.unwrap().unwrap();
    store.notify().await.unwrap();
    replaced.next().await.unwrap();
}

#[tokio::test]
async fn a_pass_stands_down_while_another_instance_is_at_its_cadence() {
    let store = MemoryStore::new();
    store.begin_pass_elsewhere(Cadence::Maintenance);
    assert_eq!(store.purge(PASS, NonZeroU32::MIN).await.unwrap(), None);
    let sweep = Pass {
        cadence: Cadence::Sweep,
        ..PASS
    };
    assert_eq!(store.purge(sweep, NonZeroU32::MIN).await.unwrap(), Some(0));
    store.end_pass_elsewhere(Cadence::Maintenance);
    assert_eq!(store.purge(PASS, NonZeroU32::MIN).await.unwrap(), Some(0));
}

#[tokio::test]
async fn a_broken_exclusive_lock_is_lost_and_free() {
    let store = MemoryStore::new();
    let mut first = store.try_exclusive("report", "a").await.unwrap().unwrap();
    store.break_exclusive("report");
    assert!(!first.keep().await.unwrap());
    let mut second = store.try_exclusive("report", "b").await.unwrap().unwrap();
    // The first one does not free what is the second one's.
    first.release().await.unwrap();
    assert!(second.keep().await.unwrap());
}
