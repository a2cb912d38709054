//! Leases: verified, renewed and given back, only ever under their token (P5).

use std::time::Duration;

use super::Harness;
use super::steps::*;
use crate::lease::{HeldLease, LeaseToken};
use crate::store::{EventState, LEASE_ENDED, Renewal, Settled, Store};

fn other_token(row: i64) -> HeldLease {
    HeldLease {
        row,
        token: LeaseToken::random(),
    }
}

async fn remaining<H: Harness>(h: &H, lease: HeldLease) -> Option<Duration> {
    let verified = h.store().verify(&[lease]).await.unwrap();
    assert!(verified.len() <= 1);
    verified.first().map(|verified| verified.remaining)
}

async fn renew<H: Harness>(h: &H, lease: HeldLease, by: Duration) -> Renewal {
    let answers = h.store().renew(&[lease], by).await.unwrap();
    assert_eq!(answers.len(), 1);
    answers[0]
}

/// A lease that is in its row is found, with the event's id and what is left of it.
pub async fn a_held_lease_is_verified<H: Harness>(h: &H) {
    let token = LeaseToken::random();
    let answers = insert(h.store(), &[born_leased(token)]).await;
    let id = inserted(&answers[0]);
    let lease = HeldLease {
        row: id.row(),
        token,
    };
    let verified = h.store().verify(&[lease]).await.unwrap();
    assert_eq!(verified.len(), 1);
    assert_eq!(verified[0].lease, lease);
    assert_eq!(verified[0].id, id);
    assert_eq!(verified[0].created_at, record(h, id.row()).await.created_at);
    let remaining = verified[0].remaining;
    assert!(
        remaining > Duration::from_secs(3_000) && remaining <= Duration::from_secs(3_600),
        "of an hour: {remaining:?}"
    );
}

/// P1: the lease of a row that was rolled back is not verified, so its handler never runs.
pub async fn a_rolled_back_lease_is_not_verified<H: Harness>(h: &H) {
    let token = LeaseToken::random();
    let mut tx = h.store().begin().await.unwrap();
    let answers = h.store().insert(&mut tx, &[born_leased(token)]).await;
    let row = inserted(&answers.unwrap()[0]).row();
    h.store().rollback(tx).await.unwrap();
    assert_eq!(remaining(h, HeldLease { row, token }).await, None);
}

/// What is not held under the token asked for is missing from the answer; the rest is not.
pub async fn verification_leaves_out_what_is_not_held<H: Harness>(h: &H) {
    let all = publish_all(h, &[event(), event(), event()]).await;
    let claimed = claim(h, &request(10)).await;
    record_outcome(h, claimed[1].lease(), processed()).await;
    let asked = [
        other_token(all[0]),
        claimed[1].lease(),
        claimed[2].lease(),
        other_token(1_000_000),
    ];
    let verified = h.store().verify(&asked).await.unwrap();
    assert_eq!(verified.len(), 1);
    assert_eq!(verified[0].lease, claimed[2].lease());
}

/// P7: of a lease that ended and that nobody took over, nothing is left.
pub async fn an_expired_lease_has_nothing_left<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let lease = claim_one(h).await.lease();
    h.expire_lease(row).await;
    assert_eq!(remaining(h, lease).await, Some(Duration::ZERO));
    let taken_over = claim_one(h).await.lease();
    assert_eq!(remaining(h, lease).await, None);
    assert!(remaining(h, taken_over).await > Some(Duration::ZERO));
}

/// A renewal moves the end of the lease, counted from now and not from the old end.
pub async fn a_renewal_moves_the_end_of_the_lease<H: Harness>(h: &H) {
    publish(h, event()).await;
    let lease = claim_one(h).await.lease();
    assert_eq!(renew(h, lease, 10 * HOUR).await, Renewal::Renewed);
    let longer = remaining(h, lease).await.unwrap();
    assert!(longer > 9 * HOUR && longer <= 10 * HOUR, "{longer:?}");
    assert_eq!(renew(h, lease, 2 * HOUR).await, Renewal::Renewed);
    let shorter = remaining(h, lease).await.unwrap();
    assert!(shorter > HOUR && shorter <= 2 * HOUR, "{shorter:?}");
}

/// P6: a renewal costs nothing and changes nothing else.
pub async fn a_renewal_changes_nothing_else<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let lease = claim_one(h).await.lease();
    let before = record(h, row).await;
    assert_eq!(renew(h, lease, 2 * HOUR).await, Renewal::Renewed);
    assert_eq!(record(h, row).await, before);
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
}

/// P5: a lease that ended and that nobody took over can be renewed, and is exclusive again.
pub async fn an_expired_lease_that_nobody_took_can_be_renewed<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let lease = claim_one(h).await.lease();
    h.expire_lease(row).await;
    assert_eq!(renew(h, lease, HOUR).await, Renewal::Renewed);
    assert!(remaining(h, lease).await.unwrap() > Duration::from_secs(3_000));
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    let record = record(h, row).await;
    assert_eq!(record.attempts, 1);
    assert_eq!(record.failures, []);
}

/// P5: with another token a renewal changes nothing.
pub async fn a_stale_token_cannot_renew<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let stale = claim_one(h).await.lease();
    h.expire_lease(row).await;
    let current = claim_one(h).await.lease();
    assert_eq!(renew(h, stale, 10 * HOUR).await, Renewal::Lost);
    assert!(remaining(h, current).await.unwrap() <= HOUR);
}

/// P5: answers come in input order, and one lost lease costs the others nothing.
pub async fn renewals_are_answered_in_input_order<H: Harness>(h: &H) {
    publish_all(h, &vec![event(); 4]).await;
    let claimed = claim(h, &request(10)).await;
    record_outcome(h, claimed[2].lease(), processed()).await;
    let asked = [
        claimed[3].lease(),
        other_token(claimed[0].id.row()),
        claimed[2].lease(),
        claimed[1].lease(),
        other_token(1_000_000),
        claimed[0].lease(),
    ];
    let answers = h.store().renew(&asked, 2 * HOUR).await.unwrap();
    assert_eq!(
        answers,
        [
            Renewal::Renewed,
            Renewal::Lost,
            Renewal::Lost,
            Renewal::Renewed,
            Renewal::Lost,
            Renewal::Renewed,
        ]
    );
}

/// P6: what is given back is due at once and costs nothing.
pub async fn a_released_row_is_due_and_uncharged<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    for _ in 0..5 {
        let claimed = claim_one(h).await;
        assert_eq!(claimed.attempt.get(), 1);
        assert_eq!(release(h, claimed.lease()).await, Settled::Recorded);
    }
    let record = record(h, row).await;
    assert_eq!(record.state, EventState::Pending);
    assert_eq!(record.attempts, 0);
    assert_eq!(record.lease_token, None);
    assert_eq!(record.failures, []);
}

/// P6: a row born leased that is given back has no attempt charged.
pub async fn a_released_birth_lease_is_uncharged<H: Harness>(h: &H) {
    let token = LeaseToken::random();
    let row = publish(h, born_leased(token)).await;
    assert_eq!(
        release(h, HeldLease { row, token }).await,
        Settled::Recorded
    );
    let released = record(h, row).await;
    assert_eq!(released.attempts, 0);
    assert_eq!(released.state, EventState::Pending);
    assert_eq!(claim_one(h).await.attempt.get(), 1);
}

/// P6, P7: a retry that is given back is due at once, as it was.
pub async fn a_released_retry_is_still_due<H: Harness>(h: &H) {
    let row = publish_and_settle(h, event(), retry("no route")).await;
    h.make_due(row).await;
    let claimed = claim_one(h).await;
    assert_eq!(release(h, claimed.lease()).await, Settled::Recorded);
    assert_eq!(record(h, row).await.attempts, 1);
    let again = claim_one(h).await;
    assert_eq!(again.id.row(), row);
    assert_eq!(again.attempt.get(), 2);
}

/// P7: a lease that ended can still be given back while nobody has taken the row over.
pub async fn an_expired_lease_that_nobody_took_can_be_released<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let lease = claim_one(h).await.lease();
    h.expire_lease(row).await;
    assert_eq!(release(h, lease).await, Settled::Recorded);
    assert_eq!(claim_one(h).await.attempt.get(), 1);
    assert_eq!(record(h, row).await.failures, []);
}

/// P5: with another token nothing is given back.
pub async fn a_stale_token_cannot_release<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let stale = claim_one(h).await.lease();
    h.expire_lease(row).await;
    claim_one(h).await;
    let before = record(h, row).await;
    assert_eq!(release(h, stale).await, Settled::LeaseLost);
    assert_eq!(record(h, row).await, before);
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    assert_eq!(before.failures[0].error, LEASE_ENDED);
}

/// P6: what is given back twice is uncharged once.
pub async fn a_second_release_is_lost<H: Harness>(h: &H) {
    let row = publish_and_settle(h, event(), retry("no route")).await;
    h.make_due(row).await;
    let lease = claim_one(h).await.lease();
    assert_eq!(release(h, lease).await, Settled::Recorded);
    assert_eq!(release(h, lease).await, Settled::LeaseLost);
    assert_eq!(record(h, row).await.attempts, 1);
}

/// P5: answers come in input order.
pub async fn releases_are_answered_in_input_order<H: Harness>(h: &H) {
    let all = publish_all(h, &vec![event(); 3]).await;
    let claimed = claim(h, &request(10)).await;
    let asked = [
        claimed[2].lease(),
        other_token(claimed[1].id.row()),
        other_token(1_000_000),
        claimed[0].lease(),
    ];
    let answers = h.store().release(&asked).await.unwrap();
    assert_eq!(
        answers,
        [
            Settled::Recorded,
            Settled::LeaseLost,
            Settled::LeaseLost,
            Settled::Recorded,
        ]
    );
    assert_eq!(claim_up_to(h, 10).await, [all[0], all[2]]);
}
