//! What the cases do, in one line each.

use std::num::NonZeroU32;
use std::time::Duration;

use super::Harness;
use crate::cadence::Cadence;
use crate::dead_letter::{DeadLetterChange, DeadLetterRows};
use crate::event::{BehindDead, EventId, Priority};
use crate::lease::{HeldLease, LeaseToken};
use crate::outcome::{DeadReason, ErrorText, Outcome};
use crate::store::{
    BornLease, ClaimRequest, Claimed, EventRecord, EventRef, Insertion, KnownEvent, LowWater,
    NewEvent, Pass, Settled, Settlement, Store, SweepChunk, SweepRequest,
};

pub(super) const PAID: &str = "order.paid";
pub(super) const SHIPPED: &str = "order.shipped";
pub(super) const ALERT: &str = "alert.raised";

/// What the claims and sweeps of these cases know, unless they say otherwise: `order.paid`, up to
/// version 3.
pub(super) const KNOWN: [KnownEvent; 1] = [known(PAID)];

pub(super) const fn known(name: &'static str) -> KnownEvent {
    KnownEvent {
        name,
        handler: None,
        newest_version: NonZeroU32::new(3).unwrap(),
    }
}

/// No rows.
pub(super) const NOTHING: [i64; 0] = [];

pub(super) const HOUR: Duration = Duration::from_secs(3_600);
pub(super) const DAY: Duration = Duration::from_secs(86_400);

/// An unkeyed `order.paid`, due at once, with 3 attempts, kept for a day.
pub(super) fn event() -> NewEvent {
    NewEvent {
        name: PAID,
        version: NonZeroU32::MIN,
        payload: r#"{"order_id":7}"#.to_owned(),
        headers: None,
        dedup_key: None,
        fingerprint: None,
        ordering_key: None,
        behind_dead: BehindDead::Block,
        priority: Priority::Normal,
        max_attempts: count(3),
        delay: Duration::ZERO,
        expires_in: None,
        retention: DAY,
        key_retention: DAY,
        lease: None,
    }
}

pub(super) fn named(name: &'static str) -> NewEvent {
    NewEvent { name, ..event() }
}

pub(super) fn of_version(version: u32) -> NewEvent {
    NewEvent {
        version: count(version),
        ..event()
    }
}

pub(super) fn keyed(key: &str) -> NewEvent {
    NewEvent {
        dedup_key: Some(key.to_owned()),
        ..event()
    }
}

pub(super) fn of_priority(priority: Priority) -> NewEvent {
    NewEvent {
        priority,
        ..event()
    }
}

pub(super) fn with_attempts(max_attempts: u32) -> NewEvent {
    NewEvent {
        max_attempts: count(max_attempts),
        ..event()
    }
}

pub(super) fn delayed() -> NewEvent {
    NewEvent {
        delay: HOUR,
        ..event()
    }
}

/// Held by `publisher` for an hour.
pub(super) fn born_leased(token: LeaseToken) -> NewEvent {
    NewEvent {
        lease: Some(BornLease {
            token,
            duration: HOUR,
            instance: "publisher".into(),
        }),
        ..event()
    }
}

pub(super) fn count(n: u32) -> NonZeroU32 {
    NonZeroU32::new(n).expect("cases count from 1")
}

pub(super) fn processed() -> Outcome {
    Outcome::Processed { output: None }
}

pub(super) fn processed_with(output: &str) -> Outcome {
    Outcome::Processed {
        output: Some(output.to_owned()),
    }
}

/// A retry in an hour.
pub(super) fn retry(error: &str) -> Outcome {
    Outcome::Retry {
        after: HOUR,
        error: ErrorText::new(&error),
    }
}

pub(super) fn dead(reason: DeadReason, error: &str) -> Outcome {
    Outcome::Dead {
        reason,
        error: ErrorText::new(&error),
    }
}

/// Inserts `events` in a transaction of their own, which commits.
pub(super) async fn insert<S: Store>(store: &S, events: &[NewEvent]) -> Vec<Insertion> {
    let mut tx = store.begin().await.unwrap();
    let answers = store.insert(&mut tx, events).await.unwrap();
    store.commit(tx).await.unwrap();
    answers
}

/// Publishes events none of which is a duplicate, and answers their row numbers.
pub(super) async fn publish_all<H: Harness>(h: &H, events: &[NewEvent]) -> Vec<i64> {
    let answers = insert(h.store(), events).await;
    answers
        .iter()
        .map(|answer| inserted(answer).row())
        .collect()
}

pub(super) async fn publish<H: Harness>(h: &H, event: NewEvent) -> i64 {
    publish_all(h, &[event]).await[0]
}

#[track_caller]
pub(super) fn inserted(answer: &Insertion) -> EventId {
    match answer {
        Insertion::Inserted(id) => *id,
        Insertion::Existing(existing) => panic!("a duplicate of {existing:?}"),
    }
}

/// A claim of `order.paid` by instance `a`, for an hour, under a new token, with nothing reserved.
pub(super) fn request(limit: u32) -> ClaimRequest<'static> {
    ClaimRequest {
        limit: count(limit),
        reserved: 0,
        lease: HOUR,
        token: LeaseToken::random(),
        instance: "a",
        events: &KNOWN,
        low_water: LowWater::BEGINNING,
        freed: &[],
    }
}

/// Claims and sorts by row, since a claim answers in no particular order.
pub(super) async fn claim<H: Harness>(h: &H, request: &ClaimRequest<'_>) -> Vec<Claimed> {
    let mut claimed = h.store().claim(request).await.unwrap();
    claimed.sort_by_key(|claimed| claimed.id.row());
    claimed
}

/// The rows that a claim of at most `limit` takes, in ascending order.
pub(super) async fn claim_up_to<H: Harness>(h: &H, limit: u32) -> Vec<i64> {
    rows(&claim(h, &request(limit)).await)
}

/// As [`claim_up_to`], with `reserved` of them for rows that waited.
pub(super) async fn claim_with_reserve<H: Harness>(h: &H, limit: u32, reserved: u32) -> Vec<i64> {
    let request = ClaimRequest {
        reserved,
        ..request(limit)
    };
    rows(&claim(h, &request).await)
}

/// Claims what must be the only due row.
pub(super) async fn claim_one<H: Harness>(h: &H) -> Claimed {
    claim_one_as(h, "a").await
}

pub(super) async fn claim_one_as<H: Harness>(h: &H, instance: &str) -> Claimed {
    let request = ClaimRequest {
        instance,
        ..request(10)
    };
    let mut claimed = claim(h, &request).await;
    assert_eq!(claimed.len(), 1, "one row is due: {claimed:?}");
    claimed.remove(0)
}

pub(super) fn rows(claimed: &[Claimed]) -> Vec<i64> {
    claimed.iter().map(|claimed| claimed.id.row()).collect()
}

pub(super) async fn settle<H: Harness>(h: &H, lease: HeldLease, outcome: Outcome) -> Settled {
    let settlement = Settlement { lease, outcome };
    let answers = h.store().settle(&[settlement]).await.unwrap();
    assert_eq!(answers.len(), 1);
    answers[0]
}

/// Settles, and makes sure that it was recorded.
pub(super) async fn record_outcome<H: Harness>(h: &H, lease: HeldLease, outcome: Outcome) {
    assert_eq!(settle(h, lease, outcome).await, Settled::Recorded);
}

/// Publishes, claims and settles one event, and answers its row.
pub(super) async fn publish_and_settle<H: Harness>(
    h: &H,
    event: NewEvent,
    outcome: Outcome,
) -> i64 {
    let row = publish(h, event).await;
    let claimed = claim_one(h).await;
    assert_eq!(claimed.id.row(), row);
    record_outcome(h, claimed.lease(), outcome).await;
    row
}

pub(super) async fn release<H: Harness>(h: &H, lease: HeldLease) -> Settled {
    let answers = h.store().release(&[lease]).await.unwrap();
    assert_eq!(answers.len(), 1);
    answers[0]
}

pub(super) async fn find<H: Harness>(h: &H, row: i64) -> Option<EventRecord> {
    h.store().find(row).await.unwrap()
}

pub(super) async fn record<H: Harness>(h: &H, row: i64) -> EventRecord {
    find(h, row).await.expect("the row exists")
}

/// A sweep by instance `sweeper`, which knows `order.paid` alone.
pub(super) fn sweep_after(after: i64, scan: u32) -> SweepRequest<'static> {
    SweepRequest {
        after,
        scan: count(scan),
        lease: HOUR,
        token: LeaseToken::random(),
        instance: "sweeper",
        events: &KNOWN,
    }
}

/// The pass that chunks of these cases belong to. Nobody else has its lock.
pub(super) fn pass() -> Pass {
    Pass {
        cadence: Cadence::Sweep,
        statement_limit: Duration::from_secs(5),
    }
}

pub(super) async fn sweep_chunk<H: Harness>(h: &H, request: &SweepRequest<'_>) -> SweepChunk {
    let chunk = h.store().sweep(pass(), request).await.unwrap();
    chunk.expect("nobody else has the lock")
}

/// Publishes, claims and buries one event, and answers its row.
pub(super) async fn bury<H: Harness>(
    h: &H,
    event: NewEvent,
    reason: DeadReason,
    error: &str,
) -> i64 {
    let name = event.name;
    let row = publish(h, event).await;
    let by_name = ClaimRequest {
        events: &[known(name)],
        ..request(10)
    };
    let claimed = claim(h, &by_name).await;
    assert_eq!(rows(&claimed), [row]);
    record_outcome(h, claimed[0].lease(), dead(reason, error)).await;
    row
}

/// Purges until nothing is left to remove.
pub(super) async fn purge<H: Harness>(h: &H) -> u64 {
    let mut total = 0;
    loop {
        let removed = h.store().purge(pass(), count(100)).await.unwrap().unwrap();
        if removed == 0 {
            return total;
        }
        total += removed;
    }
}

/// Requeues a dead letter, due at once.
pub(super) async fn requeue<H: Harness>(h: &H, row: i64) {
    change_dead_letter(h, row, DeadLetterChange::AT_ONCE).await;
}

pub(super) async fn discard<H: Harness>(h: &H, row: i64) {
    change_dead_letter(h, row, DeadLetterChange::Discard).await;
}

async fn change_dead_letter<H: Harness>(h: &H, row: i64, change: DeadLetterChange) {
    let rows = DeadLetterRows::Numbered(&[row]);
    let changed = h.store().change_dead_letters(rows, change).await.unwrap();
    assert_eq!(changed.rows, [row]);
}

/// The event of this row number.
pub(super) async fn by_row<H: Harness>(h: &H, row: i64) -> EventRef {
    let mut tx = h.store().begin().await.unwrap();
    let answers = h.store().insert(&mut tx, &[event()]).await.unwrap();
    h.store().rollback(tx).await.unwrap();
    let other = inserted(&answers[0]);
    EventRef::Id(EventId::new(other.installation(), row))
}

/// Cancels an unsettled event, in a transaction of its own.
pub(super) async fn cancel_row<H: Harness>(h: &H, row: i64) {
    let event = by_row(h, row).await;
    let mut tx = h.store().begin().await.unwrap();
    let found = h.store().cancel(&mut tx, &event).await.unwrap();
    h.store().commit(tx).await.unwrap();
    assert_eq!(found.map(|found| found.id.row()), Some(row));
}
