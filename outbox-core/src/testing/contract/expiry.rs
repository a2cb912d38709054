//! Events that are not worth handling for ever.

use std::time::Duration;

use super::Harness;
use super::steps::*;
use crate::lease::{HeldLease, LeaseToken};
use crate::outcome::{DeadReason, EXPIRED, Outcome};
use crate::store::{ClaimRequest, EventState, NewEvent, Store};

fn perishable() -> NewEvent {
    NewEvent {
        expires_in: Some(HOUR),
        ..event()
    }
}

/// A claim says whether its event still is worth handling, by the database's clock.
pub async fn a_claim_tells_whether_its_event_has_expired<H: Harness>(h: &H) {
    let rows = publish_all(h, &[perishable(), perishable(), event()]).await;
    h.expire(rows[1]).await;
    let claimed = claim(h, &request(10)).await;
    let expired: Vec<bool> = claimed.iter().map(|claimed| claimed.expired).collect();
    assert_eq!(expired, [false, true, false]);
}

/// So does a claim by number.
pub async fn a_claim_by_number_tells_whether_its_event_has_expired<H: Harness>(h: &H) {
    let row = publish(h, perishable()).await;
    h.expire(row).await;
    let claimed = h.store().claim_rows(&[row], &request(1)).await.unwrap();
    assert!(claimed[0].expired);
}

/// So does the verification of a row born leased.
pub async fn a_verification_tells_whether_its_event_has_expired<H: Harness>(h: &H) {
    let token = LeaseToken::random();
    let born = NewEvent {
        expires_in: Some(HOUR),
        ..born_leased(token)
    };
    let row = publish(h, born).await;
    let lease = HeldLease { row, token };
    assert!(!h.store().verify(&[lease]).await.unwrap()[0].expired);
    h.expire(row).await;
    assert!(h.store().verify(&[lease]).await.unwrap()[0].expired);
}

/// The deadline is shown while the event is unsettled.
///
/// A store may read its clock once for `created_at` and once for the deadline: two readings in one
/// statement of PostgreSQL are a microsecond apart now and then.
pub async fn the_deadline_is_shown<H: Harness>(h: &H) {
    let rows = publish_all(h, &[perishable(), event()]).await;
    let kept = record(h, rows[0]).await;
    let lifetime = kept
        .expires_at
        .expect("a deadline")
        .duration_since(kept.created_at)
        .expect("a deadline after the publication");
    assert!(
        lifetime.abs_diff(HOUR) < Duration::from_secs(1),
        "{lifetime:?}"
    );
    assert_eq!(record(h, rows[1]).await.expires_at, None);
}

/// P9: an expired event is a dead letter of its own reason, and no attempt was charged: its handler
/// was not started.
pub async fn an_expired_event_is_a_dead_letter_without_a_charge<H: Harness>(h: &H) {
    let row = publish(h, perishable()).await;
    let held = claim_one(h).await.lease();
    record_outcome(h, held, retry("no route")).await;
    h.make_due(row).await;
    h.expire(row).await;
    let held = claim_one(h).await.lease();
    record_outcome(h, held, Outcome::Expired).await;

    let buried = record(h, row).await;
    assert_eq!(buried.state, EventState::DeadLetter);
    assert_eq!(buried.dead_reason, Some(DeadReason::Expired));
    assert_eq!(buried.attempts, 1, "the one that failed");
    assert_eq!(buried.last_error.as_deref(), Some(EXPIRED));
    assert_eq!(buried.failures.len(), 1);
    assert_eq!(buried.failures[0].error, "no route");
}

/// P5: without the token nothing expires.
pub async fn an_expiry_is_fenced<H: Harness>(h: &H) {
    let row = publish(h, perishable()).await;
    let stale = claim_one(h).await.lease();
    h.expire_lease(row).await;
    claim_one(h).await;
    let answer = settle(h, stale, Outcome::Expired).await;
    assert_eq!(answer, crate::store::Settled::LeaseLost);
    assert_eq!(record(h, row).await.state, EventState::InProgress);
}

/// P12: an expired event that nobody here handles waits for whoever does.
pub async fn an_expired_event_of_an_unknown_type_is_left_alone<H: Harness>(h: &H) {
    let unknown = NewEvent {
        name: ALERT,
        ..perishable()
    };
    let row = publish(h, unknown).await;
    h.expire(row).await;
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    assert!(
        sweep_chunk(h, &sweep_after(0, 100))
            .await
            .exhausted
            .is_empty()
    );
    assert_eq!(record(h, row).await.state, EventState::Pending);
}

/// P9: a person who requeues it wants it handled: the deadline is gone.
pub async fn a_requeued_event_does_not_expire_again<H: Harness>(h: &H) {
    let row = publish(h, perishable()).await;
    h.expire(row).await;
    let held = claim_one(h).await.lease();
    record_outcome(h, held, Outcome::Expired).await;
    requeue(h, row).await;
    let again = claim_one(h).await;
    assert!(!again.expired);
    assert_eq!(again.attempt, count(1));
    assert_eq!(record(h, row).await.expires_at, None);
}

/// One statement settles expired events beside others.
pub async fn expired_events_are_settled_beside_others<H: Harness>(h: &H) {
    let rows = publish_all(h, &[perishable(), event(), event()]).await;
    let claimed = claim(h, &ClaimRequest { ..request(10) }).await;
    let outcomes = [
        Outcome::Expired,
        processed(),
        dead(DeadReason::Permanent, "no"),
    ];
    let settlements: Vec<_> = claimed
        .iter()
        .zip(outcomes)
        .map(|(claimed, outcome)| crate::store::Settlement {
            lease: claimed.lease(),
            outcome,
        })
        .collect();
    let answers = h.store().settle(&settlements).await.unwrap();
    assert_eq!(answers, [crate::store::Settled::Recorded; 3]);
    let mut reasons = Vec::new();
    for row in rows {
        reasons.push(record(h, row).await.dead_reason);
    }
    let expected = [Some(DeadReason::Expired), None, Some(DeadReason::Permanent)];
    assert_eq!(reasons, expected);
}
