//! Claims: P4 (exclusive, bounded), P6 (attempts), P7 (expired leases) and P12 (names).

use std::collections::BTreeSet;

use super::Harness;
use super::steps::*;
use crate::event::Priority;
use crate::lease::LeaseToken;
use crate::outcome::DeadReason;
use crate::store::{
    ClaimRequest, EventState, KnownEvent, LEASE_ENDED, LowWater, NewEvent, Settled, Store,
};

/// A claim hands over what its handler needs, and leaves its mark in the row.
pub async fn a_claim_hands_over_the_event<H: Harness>(h: &H) {
    let event = NewEvent {
        version: count(2),
        headers: Some(r#"{"traceparent":"00-ab-cd-01"}"#.to_owned()),
        priority: Priority::Low,
        max_attempts: count(8),
        ..event()
    };
    let answers = insert(h.store(), &[event]).await;
    let id = inserted(&answers[0]);
    let request = request(10);
    let claimed = claim(h, &request).await.remove(0);

    assert_eq!(claimed.id, id);
    assert_eq!(claimed.token, request.token);
    assert_eq!(claimed.name, "order.paid");
    assert_eq!(claimed.version.get(), 2);
    assert_eq!(claimed.payload, r#"{"order_id":7}"#);
    let headers: serde_json::Value =
        serde_json::from_str(claimed.headers.as_deref().unwrap()).unwrap();
    assert_eq!(headers, serde_json::json!({"traceparent": "00-ab-cd-01"}));
    assert_eq!(claimed.priority, Priority::Low);
    assert!(!claimed.waited);
    assert_eq!(claimed.attempt.get(), 1);
    assert_eq!(claimed.max_attempts.get(), 8);

    let record = record(h, id.row()).await;
    assert_eq!(claimed.created_at, record.created_at);
    assert_eq!(record.state, EventState::InProgress);
    assert_eq!(record.attempts, 1);
    assert_eq!(record.lease_token, Some(request.token));
    assert_eq!(record.claimed_by.as_deref(), Some("a"));
    assert_eq!(record.failures, []);
}

/// P4: a claim takes no more than it asked for.
pub async fn a_claim_takes_no_more_than_its_limit<H: Harness>(h: &H) {
    let rows = publish_all(h, &vec![event(); 20]).await;
    assert_eq!(claim_up_to(h, 3).await, rows[..3]);
    let mut held = 0;
    for row in &rows {
        held += u32::from(record(h, *row).await.lease_token.is_some());
    }
    assert_eq!(held, 3, "what is held is what was handed over");
    assert_eq!(claim_up_to(h, 4).await, rows[3..7]);
    assert_eq!(claim_up_to(h, 100).await, rows[7..]);
    assert_eq!(claim_up_to(h, 100).await, NOTHING);
}

/// The higher priority goes first, and within one the lower number.
pub async fn priority_goes_before_number<H: Harness>(h: &H) {
    let events = [
        Priority::Low,
        Priority::Normal,
        Priority::Critical,
        Priority::High,
        Priority::Critical,
        Priority::Normal,
    ];
    let rows = publish_all(h, &events.map(of_priority)).await;
    let mut order = Vec::new();
    for _ in 0..6 {
        order.extend(claim_up_to(h, 1).await);
    }
    let expected = [2, 4, 3, 1, 5, 0].map(|position: usize| rows[position]);
    assert_eq!(order, expected);
}

/// The limit cuts off the lowest priority.
pub async fn a_batch_prefers_the_higher_priority<H: Harness>(h: &H) {
    let low = publish_all(h, &[Priority::Low; 3].map(of_priority)).await;
    let high = publish_all(h, &[Priority::High; 3].map(of_priority)).await;
    assert_eq!(claim_up_to(h, 4).await, [low[0], high[0], high[1], high[2]]);
}

/// P12: an event whose name the claimer does not know is neither claimed nor charged nor touched.
pub async fn unknown_names_are_left_alone<H: Harness>(h: &H) {
    let unknown = NewEvent {
        priority: Priority::Critical,
        ..named(ALERT)
    };
    let rows = publish_all(h, &[unknown, event(), named(SHIPPED)]).await;
    let before = record(h, rows[0]).await;
    assert_eq!(claim_up_to(h, 10).await, [rows[1]]);
    let all = h.store().claim_rows(&rows, &request(10)).await.unwrap();
    assert_eq!(self::rows(&all), NOTHING);
    assert_eq!(record(h, rows[0]).await, before);

    let both = ClaimRequest {
        events: &[known(SHIPPED), known(ALERT)],
        ..request(10)
    };
    let claimed = claim(h, &both).await;
    assert_eq!(self::rows(&claimed), [rows[0], rows[2]]);
}

/// P12: an event of a later version than the claimer reads is neither claimed nor charged nor
/// touched, whichever kind of claim it is; every earlier version is claimed.
pub async fn later_versions_are_left_alone<H: Harness>(h: &H) {
    let later = NewEvent {
        priority: Priority::Critical,
        ..of_version(4)
    };
    let latest = of_version(i32::MAX.unsigned_abs());
    let waiting = NewEvent {
        delay: HOUR,
        ..of_version(4)
    };
    let events = [later, latest, waiting, of_version(1), of_version(3)];
    let rows = publish_all(h, &events).await;
    h.make_due(rows[2]).await;
    let mut before = Vec::new();
    for row in &rows[..3] {
        before.push(record(h, *row).await);
    }

    let by_number = h.store().claim_rows(&rows, &request(1)).await.unwrap();
    assert_eq!(self::rows(&by_number), [rows[3]]);
    assert_eq!(release(h, by_number[0].lease()).await, Settled::Recorded);
    assert_eq!(claim_with_reserve(h, 2, 2).await, [rows[3], rows[4]]);
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    let in_a_pass = h.store().claim_in(pass(), &request(10)).await.unwrap();
    assert_eq!(self::rows(&in_a_pass.unwrap()), NOTHING);
    let by_number = h.store().claim_rows(&rows, &request(10)).await.unwrap();
    assert_eq!(self::rows(&by_number), NOTHING);
    for (row, before) in rows.iter().zip(before) {
        assert_eq!(record(h, *row).await, before);
    }
}

/// P12: each name has a newest version of its own, and whoever reads a later one takes the rest.
pub async fn each_name_is_claimed_up_to_its_own_version<H: Harness>(h: &H) {
    let versions = |name| {
        [1, 2, 3].map(|version| NewEvent {
            name,
            ..of_version(version)
        })
    };
    let paid = publish_all(h, &versions(PAID)).await;
    let shipped = publish_all(h, &versions(SHIPPED)).await;
    let up_to = |paid: u32, shipped: u32| {
        [(PAID, paid), (SHIPPED, shipped)].map(|(name, version)| KnownEvent {
            handler: None,
            name,
            newest_version: count(version),
        })
    };
    let older = ClaimRequest {
        events: &up_to(2, 1),
        ..request(10)
    };
    let claimed = rows(&claim(h, &older).await);
    assert_eq!(claimed, [paid[0], paid[1], shipped[0]]);
    let newer = ClaimRequest {
        events: &up_to(1, u32::MAX),
        ..request(10)
    };
    assert_eq!(rows(&claim(h, &newer).await), shipped[1..]);
}

/// P12: who knows no name claims nothing.
pub async fn no_names_claim_nothing<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let nothing = ClaimRequest {
        events: &[],
        ..request(10)
    };
    assert_eq!(rows(&claim(h, &nothing).await), NOTHING);
    assert_eq!(record(h, row).await.attempts, 0);
}

/// A low-water mark hides what is due at once below it, at its own priority and no other.
pub async fn a_low_water_mark_bounds_one_priority<H: Harness>(h: &H) {
    let priorities = [Priority::Normal, Priority::High, Priority::Normal];
    let rows = publish_all(h, &priorities.map(of_priority)).await;
    let mut low_water = LowWater::BEGINNING;
    low_water.raise(Priority::Normal, rows[2]);
    let bounded = ClaimRequest {
        low_water,
        ..request(10)
    };
    let claimed = claim(h, &bounded).await;
    assert_eq!(self::rows(&claimed), [rows[1], rows[2]]);
    assert_eq!(claim_up_to(h, 10).await, [rows[0]]);
}

/// A low-water mark hides no retry and no delay.
pub async fn a_low_water_mark_never_hides_a_waiting_row<H: Harness>(h: &H) {
    let failed = publish_and_settle(h, event(), retry("no route")).await;
    let waiting = publish(h, delayed()).await;
    h.make_due(failed).await;
    h.make_due(waiting).await;
    let mut low_water = LowWater::BEGINNING;
    low_water.raise(Priority::Normal, waiting + 1_000);
    let bounded = ClaimRequest {
        low_water,
        ..request(10)
    };
    assert_eq!(rows(&claim(h, &bounded).await), [failed, waiting]);
}

/// P8: a failed event is not claimed before it is due.
pub async fn a_retry_waits_for_its_due_time<H: Harness>(h: &H) {
    let row = publish_and_settle(h, event(), retry("no route")).await;
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    h.make_due(row).await;
    let claimed = claim_one(h).await;
    assert_eq!(claimed.id.row(), row);
    assert!(claimed.waited);
    assert_eq!(claimed.attempt.get(), 2);
}

/// What is reserved is for due retries and delays, whatever else is due before them.
pub async fn a_reserved_part_of_a_batch_is_for_waiting_rows<H: Harness>(h: &H) {
    let waiting = NewEvent {
        priority: Priority::Low,
        ..delayed()
    };
    let waiting = publish_all(h, &vec![waiting; 5]).await;
    for row in &waiting {
        h.make_due(*row).await;
    }
    let ready = publish_all(h, &vec![of_priority(Priority::Critical); 20]).await;

    let first = claim_with_reserve(h, 8, 2).await;
    assert_eq!(first[..2], waiting[..2]);
    assert_eq!(first[2..], ready[..6]);
    let second = claim_with_reserve(h, 1, 1).await;
    assert_eq!(second, waiting[2..3]);
    // With nothing reserved, priority alone decides.
    let third = claim_with_reserve(h, 5, 0).await;
    assert_eq!(third, ready[6..11]);
}

/// The reserve, too, goes to the higher priority first.
pub async fn the_reserve_goes_by_priority<H: Harness>(h: &H) {
    let waiting = [Priority::Low, Priority::High, Priority::Low, Priority::High];
    let waiting = waiting.map(|priority| NewEvent {
        priority,
        ..delayed()
    });
    let waiting = publish_all(h, &waiting).await;
    for row in &waiting {
        h.make_due(*row).await;
    }
    let ready = publish_all(h, &vec![of_priority(Priority::Critical); 6]).await;
    let claimed = claim_with_reserve(h, 8, 2).await;
    assert_eq!(claimed, [&[waiting[1], waiting[3]], &ready[..]].concat());
}

/// What the reserve does not use is anybody's, and beyond the reserve priority decides.
pub async fn waiting_rows_compete_at_their_priority<H: Harness>(h: &H) {
    let waiting = NewEvent {
        priority: Priority::High,
        ..delayed()
    };
    let waiting = publish_all(h, &vec![waiting; 5]).await;
    for row in &waiting {
        h.make_due(*row).await;
    }
    let ready = publish_all(h, &vec![event(); 4]).await;
    let claimed = claim_with_reserve(h, 8, 2).await;
    assert_eq!(claimed, [&waiting[..], &ready[..3]].concat());
}

/// Without due rows that waited, the whole batch is for the others, and the other way round.
pub async fn a_reserve_that_nobody_needs_is_used<H: Harness>(h: &H) {
    let waiting = publish_all(h, &vec![delayed(); 4]).await;
    let ready = publish_all(h, &vec![event(); 4]).await;
    assert_eq!(claim_up_to(h, 4).await, ready);
    for row in &waiting {
        h.make_due(*row).await;
    }
    assert_eq!(claim_up_to(h, 4).await, waiting);
}

/// P4: while a lease lasts, the row is nobody else's.
pub async fn a_claim_is_exclusive_while_its_lease_lasts<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let claimed = claim_one(h).await;
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    let by_number = h.store().claim_rows(&[row], &request(10)).await.unwrap();
    assert_eq!(rows(&by_number), NOTHING);
    let record = record(h, row).await;
    assert_eq!(record.lease_token, Some(claimed.token));
    assert_eq!(record.attempts, 1);
}

/// P4: concurrent claims take disjoint rows, and together all of them.
pub async fn concurrent_claims_are_disjoint<H: Harness>(h: &H) {
    let all = publish_all(h, &vec![event(); 100]).await;
    let claimers = (0..8).map(|_| async {
        let mut mine = Vec::new();
        loop {
            let claimed = claim_up_to(h, 5).await;
            if claimed.is_empty() {
                return mine;
            }
            mine.extend(claimed);
        }
    });
    let mut claimed = futures_util::future::join_all(claimers).await.concat();
    // A claim may find nothing because the rows are locked by others which then take fewer.
    claimed.extend(claim_up_to(h, 100).await);
    assert_eq!(claimed.len(), 100, "each row once");
    let claimed: BTreeSet<i64> = claimed.into_iter().collect();
    assert_eq!(claimed, all.into_iter().collect());
}

/// P4: a claim by number and a claim by priority take disjoint rows as well.
pub async fn both_kinds_of_claim_are_disjoint<H: Harness>(h: &H) {
    let other = h.another_store().await;
    let all = publish_all(h, &vec![event(); 20]).await;
    let by_number = request(20);
    let (by_number, mut claimed) =
        tokio::join!(other.claim_rows(&all, &by_number), claim_up_to(h, 20));
    claimed.extend(rows(&by_number.unwrap()));
    claimed.extend(claim_up_to(h, 20).await);
    claimed.sort_unstable();
    assert_eq!(claimed, all, "each row once");
}

/// P6, P7: an expired lease makes the row due again, and the attempt that it cost is on record.
pub async fn an_expired_lease_makes_the_row_due_again<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let first = claim_one_as(h, "a").await;
    h.expire_lease(row).await;
    assert_eq!(record(h, row).await.state, EventState::Pending);

    let second = claim_one_as(h, "b").await;
    assert_ne!(second.token, first.token);
    assert_eq!(second.attempt.get(), 2);
    assert!(!second.waited);

    let record = record(h, row).await;
    assert_eq!(record.state, EventState::InProgress);
    assert_eq!(record.attempts, 2);
    assert_eq!(record.claimed_by.as_deref(), Some("b"));
    assert_eq!(record.failures.len(), 1);
    assert_eq!(record.failures[0].attempt, 1);
    assert_eq!(record.failures[0].instance, "a");
    assert_eq!(record.failures[0].error, LEASE_ENDED);
    assert!(record.failures[0].at >= record.created_at);
}

/// P6: so does the lease that a row was born with.
pub async fn an_expired_birth_lease_makes_the_row_due_again<H: Harness>(h: &H) {
    let row = publish(h, born_leased(LeaseToken::random())).await;
    h.expire_lease(row).await;
    let claimed = claim_one(h).await;
    assert_eq!(claimed.attempt.get(), 2);
    let failures = record(h, row).await.failures;
    assert_eq!(failures.len(), 1);
    assert_eq!(failures[0].attempt, 1);
    assert_eq!(failures[0].instance, "publisher");
    assert_eq!(failures[0].error, LEASE_ENDED);
}

/// P7: a retry whose lease ended is due again as well: its due time is past.
pub async fn an_expired_lease_of_a_retry_makes_it_due_again<H: Harness>(h: &H) {
    let row = publish_and_settle(h, event(), retry("no route")).await;
    h.make_due(row).await;
    claim_one(h).await;
    h.expire_lease(row).await;
    let claimed = claim_one(h).await;
    assert_eq!(claimed.attempt.get(), 3);
    let failures = record(h, row).await.failures;
    let errors: Vec<_> = failures
        .iter()
        .map(|failure| failure.error.as_str())
        .collect();
    assert_eq!(errors, ["no route", LEASE_ENDED]);
}

/// P6, P7: with its last attempt spent, an event is never claimed again.
pub async fn a_row_without_an_attempt_left_is_not_claimed<H: Harness>(h: &H) {
    let row = publish(h, with_attempts(2)).await;
    claim_one(h).await;
    h.expire_lease(row).await;
    assert_eq!(claim_one(h).await.attempt.get(), 2);
    h.expire_lease(row).await;

    let before = record(h, row).await;
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    let by_number = h.store().claim_rows(&[row], &request(10)).await.unwrap();
    assert_eq!(rows(&by_number), NOTHING);
    assert_eq!(record(h, row).await, before);
    assert_eq!(before.attempts, 2);
}

/// A claim by number takes the rows it names and no others.
pub async fn a_claim_by_number_takes_those_rows_only<H: Harness>(h: &H) {
    let all = publish_all(h, &vec![event(); 4]).await;
    let request = request(10);
    let asked = [all[3], 1_000_000, all[1]];
    let mut claimed = h.store().claim_rows(&asked, &request).await.unwrap();
    claimed.sort_by_key(|row| row.id.row());
    assert_eq!(rows(&claimed), [all[1], all[3]]);
    assert_eq!(claimed[0].token, request.token);
    assert_eq!(claimed[0].attempt.get(), 1);
    assert_eq!(claimed[0].payload, r#"{"order_id":7}"#);
    assert_eq!(claim_up_to(h, 10).await, [all[0], all[2]]);
}

/// A claim by number leaves alone what is leased, waiting or settled, and takes what is due again.
pub async fn a_claim_by_number_takes_only_what_is_due<H: Harness>(h: &H) {
    let processed_row = publish_and_settle(h, event(), processed()).await;
    let dead_row = publish_and_settle(h, event(), dead(DeadReason::Permanent, "no")).await;
    let failed = publish_and_settle(h, event(), retry("no route")).await;
    let due = publish_and_settle(h, event(), retry("no route")).await;
    h.make_due(due).await;
    let leased = publish(h, born_leased(LeaseToken::random())).await;
    let expired = publish(h, born_leased(LeaseToken::random())).await;
    h.expire_lease(expired).await;
    let waiting = publish(h, delayed()).await;
    let ready = publish(h, event()).await;

    let asked = [
        processed_row,
        dead_row,
        failed,
        due,
        leased,
        expired,
        waiting,
        ready,
    ];
    let mut claimed = h.store().claim_rows(&asked, &request(10)).await.unwrap();
    claimed.sort_by_key(|row| row.id.row());
    assert_eq!(rows(&claimed), [due, expired, ready]);
    assert_eq!(claimed[0].attempt.get(), 2);
    assert_eq!(claimed[1].attempt.get(), 2);
    assert_eq!(claimed[2].attempt.get(), 1);
    let failures = record(h, expired).await.failures;
    assert_eq!(failures[0].error, LEASE_ENDED);
}

/// A claim tells how often the lease has ended without an outcome just before it, up to twice.
pub async fn a_claim_tells_of_the_leases_that_ended_before_it<H: Harness>(h: &H) {
    let event = NewEvent {
        max_attempts: count(9),
        ..event()
    };
    let row = publish(h, event).await;
    for lapsed in [0, 1, 2, 2] {
        assert_eq!(claim_one(h).await.lapsed, lapsed);
        h.expire_lease(row).await;
    }
    // Given back, it is the same attempt again.
    let claimed = claim_one(h).await;
    assert_eq!(claimed.lapsed, 2);
    assert_eq!(
        h.store().release(&[claimed.lease()]).await.unwrap(),
        [Settled::Recorded]
    );
    let claimed = claim_one(h).await;
    assert_eq!(claimed.lapsed, 2);
    record_outcome(h, claimed.lease(), retry("no route")).await;
    h.make_due(row).await;
    assert_eq!(claim_one(h).await.lapsed, 0);
    h.expire_lease(row).await;
    assert_eq!(claim_one(h).await.lapsed, 1);
}

/// In a pass, too, a claim begins to look at the low-water marks.
pub async fn a_claim_in_a_pass_begins_at_the_marks<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let mut low_water = LowWater::BEGINNING;
    low_water.raise(Priority::Normal, row + 100);
    let request = ClaimRequest {
        low_water,
        ..request(10)
    };
    let claimed = h.store().claim_in(pass(), &request).await.unwrap();
    assert_eq!(rows(&claimed.unwrap()), NOTHING);
    let request = ClaimRequest {
        low_water: LowWater::BEGINNING,
        ..request
    };
    let claimed = h.store().claim_in(pass(), &request).await.unwrap();
    assert_eq!(rows(&claimed.unwrap()), [row]);
}

/// P4, P6, P12: a claim in a pass is charged, exclusive, bounded, and of the given names.
pub async fn a_claim_in_a_pass_is_a_claim<H: Harness>(h: &H) {
    let all = publish_all(h, &[event(), named(ALERT), event(), event()]).await;
    let claimed = h.store().claim_in(pass(), &request(2)).await.unwrap();
    let mut claimed = claimed.unwrap();
    claimed.sort_by_key(|claimed| claimed.id.row());
    assert_eq!(rows(&claimed), [all[0], all[2]]);
    assert_eq!(claimed[0].attempt.get(), 1);
    assert_eq!(claim_up_to(h, 10).await, [all[3]]);
    record_outcome(h, claimed[0].lease(), processed()).await;
}
