//! P5: no settlement without the lease token, whoever else is at work.

use super::Harness;
use super::steps::*;
use crate::outcome::{DeadReason, Outcome};
use crate::store::{EventState, Settled, Settlement, Store};

/// Publishes one event, lets `a` lose its lease to `b`, and checks that `outcome` of `a` changes
/// nothing and that `b` can go on.
async fn check_stale<H: Harness>(h: &H, outcome: Outcome) {
    let row = publish(h, keyed(&format!("{outcome:?}"))).await;
    let stale = claim_one_as(h, "a").await.lease();
    h.expire_lease(row).await;
    let current = claim_one_as(h, "b").await.lease();

    let before = record(h, row).await;
    assert_eq!(settle(h, stale, outcome).await, Settled::LeaseLost);
    assert_eq!(record(h, row).await, before);
    assert_eq!(claim_up_to(h, 10).await, NOTHING);

    record_outcome(h, current, processed_with("7")).await;
    let after = record(h, row).await;
    assert_eq!(after.state, EventState::Processed);
    assert_eq!(after.claimed_by.as_deref(), Some("b"));
    assert_eq!(after.output.as_deref(), Some("7"));
}

/// P5: a process that lost its lease cannot report success.
pub async fn a_stale_token_cannot_settle_as_processed<H: Harness>(h: &H) {
    check_stale(h, processed_with("\"stale\"")).await;
}

/// P5: nor can it bring about a retry.
pub async fn a_stale_token_cannot_settle_as_retry<H: Harness>(h: &H) {
    check_stale(h, retry("stale")).await;
}

/// P5: nor can it write a dead letter.
pub async fn a_stale_token_cannot_settle_as_dead<H: Harness>(h: &H) {
    check_stale(h, dead(DeadReason::Permanent, "stale")).await;
}

/// P5: a lease that ended and that nobody took over still settles: the token decides.
pub async fn an_expired_lease_that_nobody_took_can_settle<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let lease = claim_one(h).await.lease();
    h.expire_lease(row).await;
    record_outcome(h, lease, processed()).await;
    let record = record(h, row).await;
    assert_eq!(record.state, EventState::Processed);
    assert_eq!(record.attempts, 1);
}

/// P5: a settlement that is repeated, because its answer was lost, answers `LeaseLost`.
pub async fn a_second_settlement_is_lost<H: Harness>(h: &H) {
    for (outcome, state) in [
        (processed_with("7"), EventState::Processed),
        (retry("no route"), EventState::Failed),
        (dead(DeadReason::Permanent, "no"), EventState::DeadLetter),
    ] {
        let row = publish(h, event()).await;
        let lease = claim_one(h).await.lease();
        record_outcome(h, lease, outcome.clone()).await;
        let before = record(h, row).await;
        assert_eq!(before.state, state);
        assert_eq!(settle(h, lease, outcome).await, Settled::LeaseLost);
        assert_eq!(settle(h, lease, processed()).await, Settled::LeaseLost);
        assert_eq!(release(h, lease).await, Settled::LeaseLost);
        assert_eq!(record(h, row).await, before);
    }
}

/// P5: a released row cannot be settled under the token that gave it back.
pub async fn a_released_row_cannot_be_settled<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let lease = claim_one(h).await.lease();
    release(h, lease).await;
    assert_eq!(settle(h, lease, processed()).await, Settled::LeaseLost);
    assert_eq!(record(h, row).await.state, EventState::Pending);
}

/// P5, P18: two processes that settle the same leases, in opposite orders, do not deadlock, and
/// each lease is recorded for one of them.
pub async fn of_two_concurrent_settlements_one_is_recorded<H: Harness>(h: &H) {
    let other = h.another_store().await;
    publish_all(h, &vec![event(); 50]).await;
    let claimed = claim(h, &request(50)).await;
    let up: Vec<_> = claimed
        .iter()
        .map(|row| Settlement {
            lease: row.lease(),
            outcome: processed(),
        })
        .collect();
    let down: Vec<_> = up.iter().cloned().rev().collect();
    let (first, second) = tokio::join!(h.store().settle(&up), other.settle(&down));
    let (first, mut second) = (first.unwrap(), second.unwrap());
    second.reverse();
    for (first, second) in first.into_iter().zip(second) {
        let recorded = [first, second]
            .into_iter()
            .filter(|answer| *answer == Settled::Recorded);
        assert_eq!(recorded.count(), 1);
    }
}

/// P5: a renewal beside a settlement disturbs neither: afterwards the event is settled.
pub async fn a_renewal_does_not_disturb_a_settlement<H: Harness>(h: &H) {
    let other = h.another_store().await;
    let all = publish_all(h, &vec![event(); 20]).await;
    let claimed = claim(h, &request(50)).await;
    let leases: Vec<_> = claimed.iter().map(|row| row.lease()).collect();
    let batch: Vec<_> = leases
        .iter()
        .map(|lease| Settlement {
            lease: *lease,
            outcome: processed(),
        })
        .collect();
    let (renewed, settled) = tokio::join!(other.renew(&leases, HOUR), h.store().settle(&batch));
    assert_eq!(renewed.unwrap().len(), 20);
    assert_eq!(settled.unwrap(), [Settled::Recorded; 20]);
    for row in all {
        assert_eq!(record(h, row).await.state, EventState::Processed);
    }
}
