//! The sweep: P7, and P12's report of what nobody here handles.

use std::collections::BTreeMap;

use super::Harness;
use super::steps::*;
use crate::lease::LeaseToken;
use crate::outcome::DeadReason;
use crate::settings::LEASE_MAX;
use crate::store::{ClaimRequest, EventState, Exhausted, NewEvent, Renewal, Settled, Store};

fn swept(rows: &[Exhausted]) -> Vec<i64> {
    rows.iter().map(|row| row.id.row()).collect()
}

/// What a whole sweep found, in chunks of `scan` rows.
struct Sweep {
    exhausted: Vec<Exhausted>,
    unhandled: BTreeMap<(String, u32), u64>,
    chunks: u32,
}

async fn sweep<H: Harness>(h: &H, scan: u32) -> Sweep {
    let mut sweep = Sweep {
        exhausted: Vec::new(),
        unhandled: BTreeMap::new(),
        chunks: 0,
    };
    let mut after = 0;
    loop {
        let chunk = sweep_chunk(h, &sweep_after(after, scan)).await;
        sweep.chunks += 1;
        sweep.exhausted.extend(chunk.exhausted);
        for unhandled in chunk.unhandled {
            let key = (unhandled.name, unhandled.version.get());
            *sweep.unhandled.entry(key).or_default() += unhandled.rows;
        }
        match chunk.next {
            None => return sweep,
            Some(next) => {
                assert!(next > after, "the cursor moves on");
                after = next;
            }
        }
        assert!(sweep.chunks < 100, "a sweep ends");
    }
}

/// Rows with one attempt each, whose only lease has ended.
async fn exhausted<H: Harness>(h: &H, rows: usize) -> Vec<i64> {
    let rows = publish_all(h, &vec![with_attempts(1); rows]).await;
    assert_eq!(claim_up_to(h, 100).await, rows);
    for row in &rows {
        h.expire_lease(*row).await;
    }
    rows
}

/// P6, P7: a lease that ended with no attempt left is found, claimed uncharged, and made a dead
/// letter.
pub async fn a_sweep_claims_what_is_out_of_attempts<H: Harness>(h: &H) {
    let row = exhausted(h, 1).await[0];
    let request = sweep_after(0, 100);
    let chunk = sweep_chunk(h, &request).await;
    assert_eq!(swept(&chunk.exhausted), [row]);
    let claimed = &chunk.exhausted[0];
    assert_eq!(claimed.token, request.token);
    assert_eq!(claimed.attempt.get(), 1);
    assert_eq!(claimed.max_attempts.get(), 1);
    let held = record(h, row).await;
    assert_eq!(held.state, EventState::InProgress);
    assert_eq!(held.attempts, 1);
    assert_eq!(held.claimed_by.as_deref(), Some("a"), "the one that failed");

    let outcome = dead(DeadReason::LeaseExpired, "nobody came back");
    record_outcome(h, claimed.lease(), outcome).await;
    let settled = record(h, row).await;
    assert_eq!(settled.state, EventState::DeadLetter);
    assert_eq!(settled.dead_reason, Some(DeadReason::LeaseExpired));
    assert_eq!(settled.attempts, 1);
    assert_eq!(settled.failures.len(), 1, "one attempt failed once");
    assert_eq!(settled.failures[0].attempt, 1);
    assert_eq!(settled.failures[0].instance, "a");
    assert_eq!(settled.failures[0].error, "nobody came back");
}

/// P5: the process whose last lease was swept away cannot settle any more.
pub async fn a_swept_lease_is_lost_to_its_holder<H: Harness>(h: &H) {
    let row = publish(h, with_attempts(1)).await;
    let lease = claim_one(h).await.lease();
    h.expire_lease(row).await;
    let chunk = sweep_chunk(h, &sweep_after(0, 100)).await;
    assert_eq!(swept(&chunk.exhausted), [row]);
    assert_eq!(settle(h, lease, processed()).await, Settled::LeaseLost);
}

/// P4: what one sweep holds, the next does not take, until that lease has ended too.
pub async fn a_swept_row_is_held_until_its_lease_ends<H: Harness>(h: &H) {
    let row = exhausted(h, 1).await[0];
    assert_eq!(swept(&sweep(h, 100).await.exhausted), [row]);
    assert_eq!(swept(&sweep(h, 100).await.exhausted), NOTHING);
    h.expire_lease(row).await;
    assert_eq!(swept(&sweep(h, 100).await.exhausted), [row]);
    assert_eq!(record(h, row).await.attempts, 1);
}

/// P12's exception: what is out of attempts needs no handler to become a dead letter.
pub async fn a_sweep_takes_what_is_out_of_attempts_whatever_its_name<H: Harness>(h: &H) {
    let event = NewEvent {
        name: ALERT,
        max_attempts: count(1),
        ..event()
    };
    let row = publish(h, event).await;
    let by_name = ClaimRequest {
        events: &[known(ALERT)],
        ..request(10)
    };
    assert_eq!(rows(&claim(h, &by_name).await), [row]);
    h.expire_lease(row).await;
    let exhausted = sweep(h, 100).await.exhausted;
    assert_eq!(swept(&exhausted), [row]);
    assert_eq!(exhausted[0].name, "alert.raised");
}

/// P7, P12: a sweep touches nothing that is leased, due, waiting or settled.
pub async fn a_sweep_leaves_everything_else_alone<H: Harness>(h: &H) {
    let mut all = vec![
        publish_and_settle(h, event(), processed()).await,
        publish_and_settle(h, event(), dead(DeadReason::Permanent, "no")).await,
        publish_and_settle(h, event(), retry("no route")).await,
    ];
    // Its last attempt, which still lasts.
    all.push(publish(h, with_attempts(1)).await);
    claim_one(h).await;
    // An expired lease, with attempts left.
    all.push(publish(h, born_leased(LeaseToken::random())).await);
    h.expire_lease(all[4]).await;
    all.extend(publish_all(h, &[event(), delayed(), with_attempts(1), named(ALERT)]).await);

    let mut before = Vec::new();
    for row in &all {
        before.push(record(h, *row).await);
    }
    assert_eq!(swept(&sweep(h, 100).await.exhausted), NOTHING);
    for (row, before) in all.iter().zip(before) {
        assert_eq!(record(h, *row).await, before);
    }
}

/// P12: rows that nobody here handles are counted by name; known and settled ones are
/// not.
pub async fn a_sweep_counts_what_nobody_here_handles<H: Harness>(h: &H) {
    let waiting = NewEvent {
        name: ALERT,
        ..delayed()
    };
    let events = [
        named(ALERT),
        event(),
        named(SHIPPED),
        named(ALERT),
        named(SHIPPED),
        waiting,
    ];
    let all = publish_all(h, &events).await;
    // Two that were settled elsewhere, which nobody waits for any more.
    publish_all(h, &[named(ALERT), named(ALERT)]).await;
    let by_name = ClaimRequest {
        events: &[known(ALERT)],
        ..request(10)
    };
    let claimed = claim(h, &by_name).await;
    assert_eq!(claimed.len(), 4);
    for lease in [claimed[0].lease(), claimed[1].lease()] {
        assert_eq!(release(h, lease).await, Settled::Recorded);
    }
    assert_eq!(rows(&claimed[..2]), [all[0], all[3]]);
    record_outcome(h, claimed[2].lease(), processed()).await;
    record_outcome(h, claimed[3].lease(), dead(DeadReason::Permanent, "no")).await;

    let expected = BTreeMap::from([
        (("alert.raised".to_owned(), 1), 3),
        (("order.shipped".to_owned(), 1), 2),
    ]);
    assert_eq!(sweep(h, 100).await.unhandled, expected);
    assert_eq!(sweep(h, 2).await.unhandled, expected);
}

/// P12: so are rows of a later version than is read here, each version for itself, whether they are
/// due or not.
pub async fn a_sweep_counts_what_is_of_a_later_version<H: Harness>(h: &H) {
    let waiting = NewEvent {
        delay: HOUR,
        ..of_version(5)
    };
    let unknown = NewEvent {
        name: ALERT,
        ..of_version(2)
    };
    let events = [1, 3, 4, 4].map(of_version);
    publish_all(h, &events).await;
    publish_all(h, &[waiting, unknown]).await;
    let expected = BTreeMap::from([
        (("alert.raised".to_owned(), 2), 1),
        (("order.paid".to_owned(), 4), 2),
        (("order.paid".to_owned(), 5), 1),
    ]);
    assert_eq!(sweep(h, 100).await.unhandled, expected);
    assert_eq!(sweep(h, 2).await.unhandled, expected);
}

/// P7, P16: small chunks cover every row once, and no chunk is larger than asked.
pub async fn a_sweep_covers_everything_in_chunks<H: Harness>(h: &H) {
    let all = exhausted(h, 10).await;
    let first = sweep_chunk(h, &sweep_after(0, 3)).await;
    let mut taken = swept(&first.exhausted);
    taken.sort_unstable();
    assert_eq!(taken, all[..3]);
    assert_eq!(first.next, Some(all[2]));

    let rest = sweep(h, 3).await;
    let mut taken = swept(&rest.exhausted);
    taken.sort_unstable();
    assert_eq!(taken, all[3..]);
    assert!(rest.chunks >= 4, "10 rows in chunks of 3: {}", rest.chunks);
}

/// An outbox with nothing in it is swept at once.
pub async fn an_empty_outbox_is_swept_in_one_chunk<H: Harness>(h: &H) {
    let chunk = sweep_chunk(h, &sweep_after(0, 100)).await;
    assert_eq!(swept(&chunk.exhausted), NOTHING);
    assert_eq!(chunk.unhandled, []);
    assert_eq!(chunk.next, None);
}

/// P7: no row is invisible to both. A retry that was recorded although no attempt was left is
/// out of reach for a claim, so once it is due the sweep finds it.
pub async fn a_retry_without_an_attempt_left_is_swept<H: Harness>(h: &H) {
    let row = publish_and_settle(h, with_attempts(1), retry("no route")).await;
    assert_eq!(swept(&sweep(h, 100).await.exhausted), NOTHING, "it waits");
    h.make_due(row).await;
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    let exhausted = sweep(h, 100).await.exhausted;
    assert_eq!(swept(&exhausted), [row]);
    assert_eq!(exhausted[0].attempt.get(), 1);
}

/// P7: a lease that ends later than any lease can is cut, once, and not taken from its holder.
pub async fn a_lease_beyond_all_bounds_is_cut<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let claimed = claim_one(h).await;
    h.set_lease(row, 30 * DAY).await;
    assert_eq!(sweep_chunk(h, &sweep_after(0, 100)).await.cut_leases, 1);
    assert_eq!(sweep_chunk(h, &sweep_after(0, 100)).await.cut_leases, 0);

    let left = h.store().verify(&[claimed.lease()]).await.unwrap();
    assert_eq!(left.len(), 1, "the token is still in the row");
    assert!(left[0].remaining <= LEASE_MAX);
    assert!(left[0].remaining > LEASE_MAX / 2);
    let renewed = h.store().renew(&[claimed.lease()], HOUR).await.unwrap();
    assert_eq!(renewed, [Renewal::Renewed]);
    record_outcome(h, claimed.lease(), processed()).await;
}
