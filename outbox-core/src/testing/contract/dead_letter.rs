//! Dead letters: listed, requeued, discarded, purged; by one operator or by two at once.

use std::time::Duration;

use super::Harness;
use super::steps::*;
use crate::dead_letter::{
    DeadLetter, DeadLetterChange, DeadLetterFilter, DeadLetterRows, DeadLetterScan,
};
use crate::event::Priority;
use crate::outcome::DeadReason;
use crate::store::{ClaimRequest, EventState, Insertion, LowWater, NewEvent, Store};

const REQUEUE: DeadLetterChange = DeadLetterChange::Requeue {
    delay: Duration::ZERO,
    spacing: Duration::ZERO,
};

fn scan(filter: &DeadLetterFilter, beyond: i64, scan: u32, limit: u32) -> DeadLetterScan<'_> {
    DeadLetterScan {
        filter,
        beyond,
        scan: count(scan),
        limit: count(limit),
    }
}

fn numbers(found: &[DeadLetter]) -> Vec<i64> {
    found.iter().map(|letter| letter.id.row()).collect()
}

async fn listed<H: Harness>(h: &H, filter: &DeadLetterFilter) -> Vec<i64> {
    let scan = scan(filter, i64::MAX, 1_000, 1_000);
    let chunk = h.store().dead_letters(&scan).await.unwrap();
    assert_eq!(chunk.next, None);
    numbers(&chunk.found)
}

async fn change<H: Harness>(h: &H, rows: &[i64], change: DeadLetterChange) -> Vec<i64> {
    let rows = DeadLetterRows::Numbered(rows);
    let changed = h.store().change_dead_letters(rows, change).await.unwrap();
    assert_eq!(changed.next, None);
    changed.rows
}

async fn buried<H: Harness>(h: &H, n: usize) -> Vec<i64> {
    let mut all = Vec::with_capacity(n);
    for _ in 0..n {
        all.push(bury(h, event(), DeadReason::Permanent, "no").await);
    }
    all
}

/// A page begins beyond the last row of the one before, whatever has died meanwhile.
pub async fn dead_letters_are_listed_newest_first_in_pages<H: Harness>(h: &H) {
    let all = buried(h, 5).await;
    publish(h, event()).await;
    let filter = DeadLetterFilter::all();
    let first = h
        .store()
        .dead_letters(&scan(&filter, i64::MAX, 100, 2))
        .await
        .unwrap();
    assert_eq!(numbers(&first.found), [all[4], all[3]]);
    let next = first.next.expect("there are more");
    bury(h, named(ALERT), DeadReason::Permanent, "later").await;
    let second = h
        .store()
        .dead_letters(&scan(&filter, next, 100, 2))
        .await
        .unwrap();
    assert_eq!(numbers(&second.found), [all[2], all[1]]);
    let next = second.next.expect("there are more");
    let last = h
        .store()
        .dead_letters(&scan(&filter, next, 100, 2))
        .await
        .unwrap();
    assert_eq!(numbers(&last.found), [all[0]]);
    assert_eq!(last.next, None);
}

/// What a list shows is what the row says.
pub async fn a_list_says_everything_but_the_payload<H: Harness>(h: &H) {
    let version = count(3);
    let row = bury(
        h,
        NewEvent {
            version,
            ..keyed("order:7")
        },
        DeadReason::Permanent,
        "no such user",
    )
    .await;
    let filter = DeadLetterFilter::all();
    let chunk = h
        .store()
        .dead_letters(&scan(&filter, i64::MAX, 10, 10))
        .await
        .unwrap();
    let [letter] = &chunk.found[..] else {
        panic!("one dead letter: {chunk:?}");
    };
    let record = record(h, row).await;
    assert_eq!(letter.id, record.id);
    assert_eq!(letter.name, "order.paid");
    assert_eq!(letter.version, version);
    assert_eq!(letter.reason(), Some(DeadReason::Permanent));
    assert_eq!(letter.last_error, "no such user");
    assert_eq!(letter.attempts, 1);
    assert_eq!(letter.max_attempts, count(3));
    assert_eq!(letter.claimed_by.as_deref(), Some("a"));
    assert_eq!(letter.dedup_key.as_deref(), Some("order:7"));
    assert_eq!(letter.published_at, record.created_at);
    assert_eq!(Some(letter.died_at), record.settled_at);
}

/// P16: a chunk looks at as many as it is asked to, whether they are meant or not.
pub async fn a_list_looks_at_no_more_than_it_is_asked_to<H: Harness>(h: &H) {
    let wanted = bury(h, named(ALERT), DeadReason::Permanent, "no").await;
    let others = buried(h, 3).await;
    let filter = DeadLetterFilter::all().event("alert.raised");
    let chunk = h
        .store()
        .dead_letters(&scan(&filter, i64::MAX, 2, 10))
        .await
        .unwrap();
    assert_eq!(numbers(&chunk.found), NOTHING);
    assert_eq!(chunk.next, Some(others[1]));
    let chunk = h
        .store()
        .dead_letters(&scan(&filter, others[1], 2, 10))
        .await
        .unwrap();
    assert_eq!(numbers(&chunk.found), [wanted]);
    let end = match chunk.next {
        None => return,
        Some(next) => h
            .store()
            .dead_letters(&scan(&filter, next, 2, 10))
            .await
            .unwrap(),
    };
    assert_eq!(numbers(&end.found), NOTHING);
    assert_eq!(end.next, None);
}

/// Each condition narrows what is meant.
pub async fn a_filter_narrows_by_name_reason_age_and_error<H: Harness>(h: &H) {
    let paid = bury(h, event(), DeadReason::Permanent, "no such user").await;
    let alert = bury(h, named(ALERT), DeadReason::Undecodable, "missing field").await;
    let old = bury(
        h,
        event(),
        DeadReason::AttemptsExhausted,
        "gateway timed out",
    )
    .await;
    h.age_dead_letter(old, 2 * DAY).await;
    let all = DeadLetterFilter::all;
    assert_eq!(listed(h, &all()).await, [old, alert, paid]);
    assert_eq!(listed(h, &all().event("order.paid")).await, [old, paid]);
    assert_eq!(listed(h, &all().event("order")).await, NOTHING);
    assert_eq!(
        listed(h, &all().reason(DeadReason::Undecodable)).await,
        [alert]
    );
    assert_eq!(listed(h, &all().older_than(DAY)).await, [old]);
    assert_eq!(listed(h, &all().newer_than(DAY)).await, [alert, paid]);
    assert_eq!(listed(h, &all().error_contains("such")).await, [paid]);
    let both = all().event("order.paid").error_contains("timed");
    assert_eq!(listed(h, &both).await, [old]);
}

/// What is searched for is text: no pattern, no SQL, no difference forgiven.
pub async fn an_error_is_searched_to_the_letter<H: Harness>(h: &H) {
    let odd = bury(h, event(), DeadReason::Permanent, r"100% of 'it' \ gone_").await;
    bury(h, event(), DeadReason::Permanent, "100 of it gone").await;
    let all = DeadLetterFilter::all;
    for text in ["%", "_", "'it'", r"\", "100% of"] {
        assert_eq!(
            listed(h, &all().error_contains(text)).await,
            [odd],
            "{text}"
        );
    }
    assert_eq!(listed(h, &all().error_contains("GONE")).await, NOTHING);
}

/// P9: a requeued event is due at once, uncharged, under its own id, with what it carries.
pub async fn a_requeued_event_is_due_with_a_fresh_budget<H: Harness>(h: &H) {
    let event = NewEvent {
        headers: Some(r#"{"tenant":"7"}"#.to_owned()),
        max_attempts: count(1),
        ..event()
    };
    let row = bury(h, event, DeadReason::AttemptsExhausted, "no").await;
    let before = record(h, row).await;
    // Whatever a claim has seen meanwhile, nobody passes over it.
    let mut low_water = LowWater::BEGINNING;
    low_water.raise(Priority::Normal, row + 100);
    assert_eq!(change(h, &[row], REQUEUE).await, [row]);
    let after = record(h, row).await;
    assert_eq!(after.state, EventState::Pending);
    assert_eq!((after.id, after.attempts), (before.id, 0));
    let lag = h.store().stats().await.unwrap().oldest_due;
    assert!(lag < Some(HOUR), "counted from the requeue: {lag:?}");
    assert_eq!((after.dead_reason, after.settled_at), (None, None));
    assert_eq!(
        (&after.payload, &after.headers),
        (&before.payload, &before.headers)
    );
    assert_eq!(after.created_at, before.created_at);
    let behind_the_mark = ClaimRequest {
        low_water,
        ..request(10)
    };
    let claimed = claim(h, &behind_the_mark).await.remove(0);
    assert_eq!((claimed.id.row(), claimed.attempt.get()), (row, 1));
    record_outcome(h, claimed.lease(), processed()).await;
    assert_eq!(record(h, row).await.state, EventState::Processed);
}

/// P3, P9: what happened before is still there to be read, and the key is still taken.
pub async fn a_requeued_event_keeps_its_failures_and_its_key<H: Harness>(h: &H) {
    let row = bury(h, keyed("k"), DeadReason::Permanent, "no such user").await;
    change(h, &[row], REQUEUE).await;
    let record = record(h, row).await;
    assert_eq!(record.failures.len(), 1);
    assert_eq!(record.last_error.as_deref(), Some("no such user"));
    let again = insert(h.store(), &[keyed("k")]).await;
    assert!(
        matches!(&again[0], Insertion::Existing(e) if e.id.row() == row && e.state == EventState::Pending),
        "{again:?}"
    );
    // And the key follows it to its end.
    let claimed = claim_one(h).await;
    record_outcome(h, claimed.lease(), processed_with("7")).await;
    let again = insert(h.store(), &[keyed("k")]).await;
    assert!(
        matches!(&again[0], Insertion::Existing(e) if e.output.as_deref() == Some("7")),
        "{again:?}"
    );
}

/// A rate is due times: nobody has to be there to keep it.
pub async fn requeued_events_are_spaced<H: Harness>(h: &H) {
    let all = buried(h, 3).await;
    let spaced = DeadLetterChange::Requeue {
        delay: Duration::ZERO,
        spacing: HOUR,
    };
    assert_eq!(change(h, &all, spaced).await, all);
    assert_eq!(claim_up_to(h, 10).await, [all[0]]);
    let (second, third) = (record(h, all[1]).await, record(h, all[2]).await);
    assert_eq!(second.state, EventState::Pending);
    let (second, third) = (second.due_at.unwrap(), third.due_at.unwrap());
    assert_eq!(third.duration_since(second).unwrap(), HOUR);
}

/// A walk goes upwards and meets each once, even one that dies again behind it.
pub async fn a_walk_requeues_each_matching_dead_letter_once<H: Harness>(h: &H) {
    let mut all = buried(h, 3).await;
    let other = bury(h, named(ALERT), DeadReason::Permanent, "no").await;
    all.extend(buried(h, 2).await);
    let filter = DeadLetterFilter::all().event("order.paid");
    let mut walked = Vec::new();
    let mut beyond = 0;
    for _ in 0..10 {
        let rows = DeadLetterRows::Matching(scan(&filter, beyond, 100, 2));
        let changed = h.store().change_dead_letters(rows, REQUEUE).await.unwrap();
        assert!(changed.rows.len() <= 2, "{changed:?}");
        for claimed in claim(h, &request(10)).await {
            record_outcome(h, claimed.lease(), dead(DeadReason::Permanent, "again")).await;
        }
        walked.extend(changed.rows);
        match changed.next {
            Some(next) => beyond = next,
            None => break,
        }
    }
    assert_eq!(walked, all);
    assert_eq!(record(h, other).await.state, EventState::DeadLetter);
}

/// An operator's list may be old: whatever has become of a row since, nothing is done to it.
pub async fn only_dead_letters_can_be_changed<H: Harness>(h: &H) {
    let done = publish_and_settle(h, event(), processed()).await;
    let failed = publish_and_settle(h, event(), retry("no")).await;
    let held = publish(h, event()).await;
    let claimed = claim_one(h).await;
    assert_eq!(claimed.id.row(), held);
    let waiting = publish(h, event()).await;
    let all = [done, failed, held, waiting, 1_000_000];
    for action in [REQUEUE, DeadLetterChange::Discard, DeadLetterChange::Purge] {
        assert_eq!(change(h, &all, action).await, NOTHING);
    }
    for (row, state) in [
        (done, EventState::Processed),
        (failed, EventState::Failed),
        (held, EventState::InProgress),
        (waiting, EventState::Pending),
    ] {
        assert_eq!(record(h, row).await.state, state);
    }
    record_outcome(h, claimed.lease(), processed()).await;
}

/// A discarded dead letter is no dead letter any more, and is kept, as discarded, for the event's
/// retention.
pub async fn a_discarded_dead_letter_is_kept_for_its_retention<H: Harness>(h: &H) {
    let row = bury(h, event(), DeadReason::Permanent, "no such user").await;
    assert_eq!(change(h, &[row], DeadLetterChange::Discard).await, [row]);
    let record = record(h, row).await;
    assert_eq!(record.state, EventState::Discarded);
    assert_eq!(record.payload, event().payload);
    assert_eq!(record.last_error.as_deref(), Some("no such user"));
    assert_eq!(record.dead_reason, Some(DeadReason::Permanent));
    assert_eq!(listed(h, &DeadLetterFilter::all()).await, NOTHING);
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    assert_eq!(change(h, &[row], REQUEUE).await, NOTHING);
    assert_eq!(purge(h).await, 0);
    h.expire_retention(row).await;
    assert_eq!(purge(h).await, 1);
    assert_eq!(find(h, row).await, None);
}

/// Nothing is kept of an event that is to be kept for no time.
pub async fn a_discarded_dead_letter_without_retention_is_gone<H: Harness>(h: &H) {
    let event = NewEvent {
        retention: Duration::ZERO,
        ..keyed("k")
    };
    let row = bury(h, event, DeadReason::Permanent, "no").await;
    change(h, &[row], DeadLetterChange::Discard).await;
    assert_eq!(find(h, row).await, None);
    let again = insert(h.store(), &[keyed("k")]).await;
    assert!(
        matches!(&again[0], Insertion::Existing(e) if e.id.row() == row && e.state == EventState::Discarded),
        "{again:?}"
    );
}

/// A key lives until its event has left every table and its own retention has passed.
pub async fn the_key_of_a_discarded_dead_letter_is_free_after_its_retention<H: Harness>(h: &H) {
    let row = bury(h, keyed("k"), DeadReason::Permanent, "no").await;
    assert_eq!(purge(h).await, 0);
    change(h, &[row], DeadLetterChange::Discard).await;
    let again = insert(h.store(), &[keyed("k")]).await;
    assert!(
        matches!(&again[0], Insertion::Existing(e) if e.state == EventState::Discarded),
        "{again:?}"
    );
    h.expire_retention(row).await;
    assert_eq!(purge(h).await, 2);
    let again = insert(h.store(), &[keyed("k")]).await;
    assert!(matches!(again[0], Insertion::Inserted(_)));
}

/// P17: a person may remove dead letters by age. Their keys are kept, as those of the discarded.
pub async fn a_purged_dead_letter_is_gone_and_its_key_is_kept<H: Harness>(h: &H) {
    let young = bury(h, keyed("young"), DeadReason::Permanent, "no").await;
    let old = bury(h, keyed("old"), DeadReason::Permanent, "no").await;
    h.age_dead_letter(old, 2 * DAY).await;
    let filter = DeadLetterFilter::all().older_than(DAY);
    let rows = DeadLetterRows::Matching(scan(&filter, 0, 100, 100));
    let purged = h
        .store()
        .change_dead_letters(rows, DeadLetterChange::Purge)
        .await
        .unwrap();
    assert_eq!(purged.rows, [old]);
    assert_eq!(find(h, old).await, None);
    assert_eq!(record(h, young).await.state, EventState::DeadLetter);
    let again = insert(h.store(), &[keyed("old")]).await;
    assert!(
        matches!(&again[0], Insertion::Existing(e) if e.id.row() == old && e.state == EventState::Discarded),
        "{again:?}"
    );
    h.expire_retention(old).await;
    assert_eq!(purge(h).await, 1);
}

/// Two operators requeue the same rows at once: each is requeued by one of them, and neither fails.
pub async fn two_operators_change_each_dead_letter_once<H: Harness>(h: &H) {
    let all = buried(h, 20).await;
    let other = h.another_store().await;
    let filter = DeadLetterFilter::all();
    let rows = DeadLetterRows::Matching(scan(&filter, 0, 100, 100));
    let (by_number, by_filter) = tokio::join!(
        h.store()
            .change_dead_letters(DeadLetterRows::Numbered(&all), REQUEUE),
        other.change_dead_letters(rows, REQUEUE),
    );
    let mut changed = by_number.unwrap().rows;
    changed.extend(by_filter.unwrap().rows);
    changed.sort_unstable();
    assert_eq!(changed, all);
    assert_eq!(claim_up_to(h, 100).await, all);
}
