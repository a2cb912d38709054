//! Parts of a transaction that are undone by themselves, and outcomes that are recorded in one.

use super::Harness;
use super::steps::*;
use crate::lease::{HeldLease, LeaseToken};
use crate::store::{EventState, Settled, Settlement, Store};

/// P1: what a part inserted is there once its transaction has committed, and not before.
pub async fn a_part_that_is_kept_lives_with_its_transaction<H: Harness>(h: &H) {
    let store = h.store();
    let mut tx = store.begin().await.unwrap();
    let mut part = store.begin_part(&mut tx).await.unwrap();
    let kept = inserted(&store.insert(part.connection(), &[event()]).await.unwrap()[0]).row();
    part.keep().await.unwrap();
    store.commit(tx).await.unwrap();
    assert_eq!(claim_up_to(h, 10).await, [kept]);

    let mut tx = store.begin().await.unwrap();
    let mut part = store.begin_part(&mut tx).await.unwrap();
    store.insert(part.connection(), &[event()]).await.unwrap();
    part.keep().await.unwrap();
    store.rollback(tx).await.unwrap();
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
}

/// P1: what a part did is gone, what was done around it is not.
pub async fn a_part_that_is_rolled_back_leaves_the_rest<H: Harness>(h: &H) {
    let store = h.store();
    let mut tx = store.begin().await.unwrap();
    let before = inserted(&store.insert(&mut tx, &[keyed("before")]).await.unwrap()[0]).row();
    let mut part = store.begin_part(&mut tx).await.unwrap();
    store
        .insert(part.connection(), &[keyed("part")])
        .await
        .unwrap();
    part.undo().await.unwrap();
    let after = inserted(&store.insert(&mut tx, &[keyed("part")]).await.unwrap()[0]).row();
    store.commit(tx).await.unwrap();
    assert_eq!(claim_up_to(h, 10).await, [before, after]);
}

/// P1: dropping a part undoes it before the next statement.
pub async fn a_part_that_is_dropped_leaves_the_rest<H: Harness>(h: &H) {
    let store = h.store();
    let mut tx = store.begin().await.unwrap();
    let before = inserted(&store.insert(&mut tx, &[keyed("before")]).await.unwrap()[0]).row();
    let mut part = store.begin_part(&mut tx).await.unwrap();
    store
        .insert(part.connection(), &[keyed("part")])
        .await
        .unwrap();
    drop(part);
    let after = inserted(&store.insert(&mut tx, &[keyed("part")]).await.unwrap()[0]).row();
    store.commit(tx).await.unwrap();
    assert_eq!(claim_up_to(h, 10).await, [before, after]);
}

/// P1: an event that was settled in its own transaction is processed when that commits, and never
/// was when it rolls back.
pub async fn an_outcome_lives_and_dies_with_its_transaction<H: Harness>(h: &H) {
    for commits in [true, false] {
        let store = h.store();
        let token = LeaseToken::random();
        let mut event = keyed(if commits { "kept" } else { "undone" });
        event.lease = born_leased(token).lease;
        let mut tx = store.begin().await.unwrap();
        let row = inserted(&store.insert(&mut tx, &[event]).await.unwrap()[0]).row();
        let settlement = Settlement {
            lease: HeldLease { row, token },
            outcome: processed_with("7"),
        };
        let answers = store.settle_through(&mut tx, &[settlement]).await.unwrap();
        assert_eq!(answers, [Settled::Recorded]);
        if commits {
            store.commit(tx).await.unwrap();
            let record = record(h, row).await;
            assert_eq!(record.state, EventState::Processed);
            assert_eq!(record.output.as_deref(), Some("7"));
        } else {
            store.rollback(tx).await.unwrap();
            assert_eq!(find(h, row).await, None);
        }
        assert_eq!(claim_up_to(h, 10).await, NOTHING);
    }
}

/// P5: without the token nothing is recorded, in whatever transaction.
pub async fn an_outcome_through_a_transaction_is_fenced<H: Harness>(h: &H) {
    let store = h.store();
    let token = LeaseToken::random();
    let mut tx = store.begin().await.unwrap();
    let row = inserted(&store.insert(&mut tx, &[born_leased(token)]).await.unwrap()[0]).row();
    let stale = Settlement {
        lease: HeldLease {
            row,
            token: LeaseToken::random(),
        },
        outcome: processed(),
    };
    let answers = store.settle_through(&mut tx, &[stale]).await.unwrap();
    assert_eq!(answers, [Settled::LeaseLost]);
    store.commit(tx).await.unwrap();
    assert_eq!(record(h, row).await.state, EventState::InProgress);
}

/// What a handler did is undone, and that it failed is recorded: the event is due at once.
pub async fn a_failed_part_can_be_recorded_as_a_retry<H: Harness>(h: &H) {
    let store = h.store();
    let token = LeaseToken::random();
    let mut tx = store.begin().await.unwrap();
    let row = inserted(&store.insert(&mut tx, &[born_leased(token)]).await.unwrap()[0]).row();
    let mut part = store.begin_part(&mut tx).await.unwrap();
    store
        .insert(part.connection(), &[keyed("by the handler")])
        .await
        .unwrap();
    part.undo().await.unwrap();
    let settlement = Settlement {
        lease: HeldLease { row, token },
        outcome: crate::outcome::Outcome::Retry {
            after: std::time::Duration::ZERO,
            error: crate::outcome::ErrorText::new(&"down"),
        },
    };
    let answers = store.settle_through(&mut tx, &[settlement]).await.unwrap();
    assert_eq!(answers, [Settled::Recorded]);
    store.commit(tx).await.unwrap();
    let claimed = claim_one(h).await;
    assert_eq!((claimed.id.row(), claimed.attempt.get()), (row, 2));
    assert_eq!(record(h, row).await.last_error.as_deref(), Some("down"));
}

/// A claimed event that is settled in a caller's transaction is processed once that commits. Until
/// then, and after a rollback, it is its holder's.
pub async fn an_outcome_of_a_claimed_event_lives_and_dies_with_the_callers_transaction<
    H: Harness,
>(
    h: &H,
) {
    let store = h.store();
    let row = publish(h, keyed("k")).await;
    let lease = claim_one(h).await.lease();
    let settlement = || Settlement {
        lease,
        outcome: processed_with("7"),
    };
    let mut tx = store.begin().await.unwrap();
    let answers = store
        .settle_through(&mut tx, &[settlement()])
        .await
        .unwrap();
    assert_eq!(answers, [Settled::Recorded]);
    store.rollback(tx).await.unwrap();
    assert_eq!(record(h, row).await.state, EventState::InProgress);

    let mut tx = store.begin().await.unwrap();
    let answers = store
        .settle_through(&mut tx, &[settlement()])
        .await
        .unwrap();
    assert_eq!(answers, [Settled::Recorded]);
    assert_eq!(record(h, row).await.state, EventState::InProgress);
    store.commit(tx).await.unwrap();
    let record = record(h, row).await;
    assert_eq!(record.state, EventState::Processed);
    assert_eq!(record.output.as_deref(), Some("7"));
    assert_eq!(settle(h, lease, processed()).await, Settled::LeaseLost);
}

/// P5: whoever has lost the lease loses what its transaction wrote.
pub async fn an_outcome_through_a_transaction_comes_too_late_for_a_lost_lease<H: Harness>(h: &H) {
    let store = h.store();
    let row = publish(h, event()).await;
    let lost = claim_one(h).await.lease();
    h.expire_lease(row).await;
    let next = claim_one_as(h, "b").await.lease();
    let mut tx = store.begin().await.unwrap();
    let settlement = Settlement {
        lease: lost,
        outcome: processed(),
    };
    let answers = store.settle_through(&mut tx, &[settlement]).await.unwrap();
    assert_eq!(answers, [Settled::LeaseLost]);
    store.commit(tx).await.unwrap();
    record_outcome(h, next, processed()).await;
}
