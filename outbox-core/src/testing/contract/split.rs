//! Several handlers of one event: each gets a row of its own before any of them runs.

use std::time::Duration;

use super::Harness;
use super::steps::*;
use crate::dead_letter::{DeadLetterFilter, DeadLetterScan};
use crate::lease::HeldLease;
use crate::outcome::DeadReason;
use crate::store::{
    ClaimRequest, Claimed, EventState, Existing, Insertion, KnownEvent, NewEvent, Settled, Split,
    SplitPart, SplitRow, Store,
};

const EMAIL: &str = "email";
const LEDGER: &str = "ledger";

fn part(handler: &'static str) -> SplitPart {
    SplitPart {
        handler,
        max_attempts: None,
        held: true,
    }
}

fn left(handler: &'static str) -> SplitPart {
    SplitPart {
        held: false,
        ..part(handler)
    }
}

async fn split<H: Harness>(h: &H, lease: HeldLease, parts: &[SplitPart]) -> Option<Vec<SplitRow>> {
    let split = Split {
        lease,
        parts: parts.to_vec(),
    };
    let mut answers = h.store().split(&[split]).await.unwrap();
    assert_eq!(answers.len(), 1);
    answers.remove(0)
}

/// Publishes, claims and splits one event, and answers the leases of its parts.
async fn publish_and_split<H: Harness>(
    h: &H,
    event: NewEvent,
    parts: &[SplitPart],
) -> Vec<HeldLease> {
    publish(h, event).await;
    let lease = claim_one(h).await.lease();
    let rows = split(h, lease, parts).await.unwrap();
    rows.iter()
        .map(|row| HeldLease {
            row: row.row,
            token: lease.token,
        })
        .collect()
}

const fn of(handler: Option<&'static str>) -> KnownEvent {
    KnownEvent {
        handler,
        ..known(PAID)
    }
}

/// A claim of whatever belongs to `events`.
async fn claim_of<H: Harness>(h: &H, events: &[KnownEvent]) -> Vec<Claimed> {
    claim(
        h,
        &ClaimRequest {
            events,
            ..request(10)
        },
    )
    .await
}

async fn rows_of<H: Harness>(h: &H, events: &[KnownEvent]) -> Vec<i64> {
    rows(&claim_of(h, events).await)
}

/// The first part keeps the row's number, the others have their own; all are held under its token.
pub async fn each_part_is_a_row_held_under_the_same_token<H: Harness>(h: &H) {
    let whole = publish(h, event()).await;
    let lease = claim_one(h).await.lease();
    let parts = split(h, lease, &[part(LEDGER), part(EMAIL)]).await.unwrap();
    assert_eq!(parts.len(), 2);
    assert_eq!(parts[0].row, whole);
    assert!(parts[1].row > whole);
    for row in &parts {
        assert_eq!((row.held, row.max_attempts), (true, count(3)));
        let record = record(h, row.row).await;
        assert_eq!((record.state, record.attempts), (EventState::InProgress, 1));
        assert_eq!(record.lease_token, Some(lease.token));
        assert_eq!(record.claimed_by.as_deref(), Some("a"));
    }
    let all = [of(None), of(Some(EMAIL)), of(Some(LEDGER))];
    assert_eq!(rows_of(h, &all).await, NOTHING);
}

/// A part has all that the whole had, its handler's name, and where it comes from.
pub async fn a_part_has_what_the_whole_had<H: Harness>(h: &H) {
    let event = NewEvent {
        headers: Some(r#"{"tenant":"7"}"#.to_owned()),
        dedup_key: Some("k".to_owned()),
        ordering_key: Some("o".to_owned()),
        expires_in: Some(HOUR),
        ..of_version(2)
    };
    let parts = publish_and_split(h, event, &[part(LEDGER), part(EMAIL)]).await;
    let first = record(h, parts[0].row).await;
    let second = record(h, parts[1].row).await;
    assert_eq!(first.handler.as_deref(), Some(LEDGER));
    assert_eq!(
        (first.origin, first.dedup_key.as_deref()),
        (None, Some("k"))
    );
    assert_eq!(second.handler.as_deref(), Some(EMAIL));
    assert_eq!((second.origin, second.dedup_key), (Some(first.id), None));
    assert_eq!(second.payload, first.payload);
    assert_eq!(second.headers, first.headers);
    assert_eq!(second.version, count(2));
    assert_eq!(second.ordering_key.as_deref(), Some("o"));
    assert_eq!(second.priority, first.priority);
    assert_eq!(second.created_at, first.created_at);
    assert_eq!(second.expires_at, first.expires_at);
}

/// Each ends by itself: one processed, one retried, one dead.
pub async fn parts_end_by_themselves<H: Harness>(h: &H) {
    let parts = [part(LEDGER), part(EMAIL), part("audit")];
    let leases = publish_and_split(h, event(), &parts).await;
    record_outcome(h, leases[0], processed()).await;
    record_outcome(h, leases[1], retry("no route")).await;
    record_outcome(h, leases[2], dead(DeadReason::Permanent, "no")).await;
    let mut states = Vec::new();
    for lease in &leases {
        states.push(record(h, lease.row).await.state);
    }
    let expected = [
        EventState::Processed,
        EventState::Failed,
        EventState::DeadLetter,
    ];
    assert_eq!(states, expected);
}

/// A part that is not held is due at once, and nothing was charged.
pub async fn a_part_that_is_not_held_is_due_uncharged<H: Harness>(h: &H) {
    let parts = publish_and_split(h, event(), &[left(LEDGER), part(EMAIL), left("audit")]).await;
    for row in [parts[0].row, parts[2].row] {
        let record = record(h, row).await;
        assert_eq!((record.state, record.attempts), (EventState::Pending, 0));
        assert_eq!((record.lease_token, record.claimed_by), (None, None));
    }
    let claimed = claim_of(h, &[of(Some(LEDGER)), of(Some("audit"))]).await;
    assert_eq!(rows(&claimed), [parts[0].row, parts[2].row]);
    assert_eq!(claimed[0].handler.as_deref(), Some(LEDGER));
    assert_eq!(claimed[0].origin, None);
    assert_eq!(claimed[1].handler.as_deref(), Some("audit"));
    assert_eq!(claimed[1].origin, Some(parts[0].row));
    assert_eq!(claimed[1].attempt, count(1));
}

/// P12: a claim takes the rows of the handlers it names, and of no others.
pub async fn a_claim_takes_the_rows_of_the_handlers_it_names<H: Harness>(h: &H) {
    let parts = publish_and_split(h, event(), &[left(LEDGER), left(EMAIL)]).await;
    let whole = publish(h, event()).await;
    assert_eq!(rows_of(h, &[of(Some("other"))]).await, NOTHING);
    assert_eq!(rows_of(h, &[of(Some(EMAIL))]).await, [parts[1].row]);
    assert_eq!(rows_of(h, &[of(None)]).await, [whole]);
    let by_number = ClaimRequest {
        events: &[of(None)],
        ..request(10)
    };
    let claimed = h.store().claim_rows(&[parts[0].row], &by_number).await;
    assert!(claimed.unwrap().is_empty());
    assert_eq!(
        rows_of(h, &[of(None), of(Some(LEDGER))]).await,
        [parts[0].row]
    );
}

/// P12: of a handler's rows, too, those of a later version are left alone.
pub async fn a_part_of_a_later_version_is_left_alone<H: Harness>(h: &H) {
    publish_and_split(h, of_version(3), &[left(LEDGER)]).await;
    let older = KnownEvent {
        newest_version: count(2),
        ..of(Some(LEDGER))
    };
    assert_eq!(rows_of(h, &[older]).await, NOTHING);
    assert_eq!(rows_of(h, &[of(Some(LEDGER))]).await.len(), 1);
}

/// A handler's own limit of attempts holds for its part alone.
pub async fn a_part_can_have_a_limit_of_attempts_of_its_own<H: Harness>(h: &H) {
    let own = |handler, attempts| SplitPart {
        max_attempts: Some(count(attempts)),
        ..part(handler)
    };
    publish(h, event()).await;
    let lease = claim_one(h).await.lease();
    let parts = [own(LEDGER, 1), own(EMAIL, 9), part("audit")];
    let split = split(h, lease, &parts).await.unwrap();
    let limits: Vec<u32> = split.iter().map(|row| row.max_attempts.get()).collect();
    assert_eq!(limits, [1, 9, 3]);
    assert_eq!(record(h, split[1].row).await.max_attempts, count(9));
    h.expire_lease(split[0].row).await;
    assert_eq!(rows_of(h, &[of(Some(LEDGER))]).await, NOTHING);
}

/// A limit is never less than what has been charged: the constraint between them is the store's.
pub async fn a_parts_limit_covers_what_was_charged_before<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    for _ in 0..2 {
        claim_one(h).await;
        h.expire_lease(row).await;
    }
    let lease = claim_one(h).await.lease();
    let own = SplitPart {
        max_attempts: Some(count(1)),
        ..part(LEDGER)
    };
    let rows = split(h, lease, &[own]).await.unwrap();
    assert_eq!(rows[0].max_attempts, count(3));
    let record = record(h, row).await;
    assert_eq!((record.attempts, record.failures.len()), (3, 2));
}

/// P5: without the token nothing is split.
pub async fn a_split_is_fenced<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let stale = claim_one(h).await.lease();
    h.expire_lease(row).await;
    let fresh = claim_one(h).await.lease();
    assert_eq!(split(h, stale, &[part(LEDGER), part(EMAIL)]).await, None);
    assert_eq!(record(h, row).await.handler, None);
    assert_eq!(
        rows_of(h, &[of(Some(EMAIL)), of(Some(LEDGER))]).await,
        NOTHING
    );
    assert_eq!(settle(h, fresh, processed()).await, Settled::Recorded);
}

/// What belongs to one handler is not split again.
pub async fn a_part_is_not_split_again<H: Harness>(h: &H) {
    let parts = publish_and_split(h, event(), &[part(LEDGER), part(EMAIL)]).await;
    for lease in parts {
        assert_eq!(split(h, lease, &[part(LEDGER), part(EMAIL)]).await, None);
    }
}

/// One statement splits many, and answers in input order.
pub async fn many_rows_are_split_at_once<H: Harness>(h: &H) {
    let whole = publish_all(h, &[event(), event(), event()]).await;
    let claimed = claim(h, &request(10)).await;
    let lost = HeldLease {
        row: whole[1],
        token: crate::lease::LeaseToken::random(),
    };
    let leases = [claimed[2].lease(), lost, claimed[0].lease()];
    let splits = leases.map(|lease| Split {
        lease,
        parts: vec![part(LEDGER), left(EMAIL)],
    });
    let answers = h.store().split(&splits).await.unwrap();
    let first = |at: usize| answers[at].as_ref().map(|rows| rows[0].row);
    assert_eq!(
        [first(0), first(1), first(2)],
        [Some(whole[2]), None, Some(whole[0])]
    );
    let of_email = claim_of(h, &[of(Some(EMAIL))]).await;
    let mut origins: Vec<_> = of_email.iter().map(|claimed| claimed.origin).collect();
    origins.sort_unstable();
    assert_eq!(origins, [Some(whole[0]), Some(whole[2])]);
}

/// P3: the state and the output of the first part are what a duplicate is told.
pub async fn a_duplicate_is_told_of_the_first_part<H: Harness>(h: &H) {
    let parts = publish_and_split(h, keyed("k"), &[part(LEDGER), part(EMAIL)]).await;
    let told = async || match insert(h.store(), &[keyed("k")]).await.remove(0) {
        Insertion::Existing(existing) => (existing.id.row(), existing.state, existing.output),
        Insertion::Inserted(id) => panic!("the key was free: {id}"),
    };
    record_outcome(h, parts[1], processed_with("2")).await;
    assert_eq!(told().await, (parts[0].row, EventState::InProgress, None));
    record_outcome(h, parts[0], processed_with("1")).await;
    let output = Some("1".to_owned());
    assert_eq!(told().await, (parts[0].row, EventState::Processed, output));
}

/// P3, P17: a key lasts while any part of its event is unsettled or dead.
pub async fn a_key_lasts_as_long_as_any_part<H: Harness>(h: &H) {
    let event = NewEvent {
        retention: Duration::ZERO,
        ..keyed("k")
    };
    let parts = [part(LEDGER), part(EMAIL), part("audit")];
    let parts = publish_and_split(h, event.clone(), &parts).await;
    let is_taken = async || {
        let mut tx = h.store().begin().await.unwrap();
        let answers = h
            .store()
            .insert(&mut tx, std::slice::from_ref(&event))
            .await
            .unwrap();
        h.store().rollback(tx).await.unwrap();
        matches!(answers[0], Insertion::Existing(_))
    };
    record_outcome(h, parts[0], processed()).await;
    h.expire_retention(parts[0].row).await;
    purge(h).await;
    assert!(is_taken().await, "two parts are unsettled");
    record_outcome(h, parts[1], processed()).await;
    record_outcome(h, parts[2], dead(DeadReason::Permanent, "no")).await;
    purge(h).await;
    assert!(is_taken().await, "one part is dead");
    discard(h, parts[2].row).await;
    purge(h).await;
    assert!(!is_taken().await);
}

/// P9: a dead letter names its handler, can be found by it, and comes back as that handler's.
pub async fn a_dead_letter_names_its_handler<H: Harness>(h: &H) {
    let parts = publish_and_split(h, event(), &[part(LEDGER), part(EMAIL)]).await;
    for lease in &parts {
        record_outcome(h, *lease, dead(DeadReason::Permanent, "no")).await;
    }
    let filter = DeadLetterFilter::all().handler(EMAIL);
    let scan = DeadLetterScan {
        filter: &filter,
        beyond: i64::MAX,
        scan: count(100),
        limit: count(100),
    };
    let found = h.store().dead_letters(&scan).await.unwrap().found;
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].id.row(), parts[1].row);
    assert_eq!(found[0].handler.as_deref(), Some(EMAIL));
    assert_eq!(found[0].origin.map(|id| id.row()), Some(parts[0].row));
    let kept = record(h, parts[1].row).await;
    assert_eq!(kept.handler.as_deref(), Some(EMAIL));

    requeue(h, parts[1].row).await;
    let claimed = claim_of(h, &[of(Some(EMAIL)), of(None)]).await;
    assert_eq!(rows(&claimed), [parts[1].row]);
    assert_eq!(claimed[0].handler.as_deref(), Some(EMAIL));
    assert_eq!(claimed[0].origin, Some(parts[0].row));
}

/// A processed part is kept under its handler's name.
pub async fn a_processed_part_is_kept_with_its_handler<H: Harness>(h: &H) {
    let parts = publish_and_split(h, event(), &[part(LEDGER), part(EMAIL)]).await;
    record_outcome(h, parts[1], processed_with("2")).await;
    let kept = record(h, parts[1].row).await;
    assert_eq!(kept.handler.as_deref(), Some(EMAIL));
    assert_eq!(kept.origin.map(|id| id.row()), Some(parts[0].row));
    assert_eq!(kept.output.as_deref(), Some("2"));
}

/// P12: a sweep reports the rows of handlers that are not here, by their names.
pub async fn a_sweep_reports_rows_of_handlers_that_are_not_here<H: Harness>(h: &H) {
    publish_and_split(h, event(), &[left(LEDGER), left(EMAIL)]).await;
    let chunk = sweep_chunk(h, &sweep_after(0, 100)).await;
    let mut found: Vec<_> = chunk
        .unhandled
        .iter()
        .map(|of| (of.name.as_str(), of.handler.as_deref(), of.rows))
        .collect();
    found.sort_unstable();
    assert_eq!(found, [(PAID, Some(EMAIL), 1), (PAID, Some(LEDGER), 1)]);
}

/// P7: a part whose lease ended with no attempt left is the sweep's, with its handler.
pub async fn an_exhausted_part_is_swept_with_its_handler<H: Harness>(h: &H) {
    let parts = publish_and_split(h, with_attempts(1), &[part(LEDGER), part(EMAIL)]).await;
    h.expire_lease(parts[1].row).await;
    let chunk = sweep_chunk(h, &sweep_after(0, 100)).await;
    assert_eq!(chunk.exhausted.len(), 1);
    assert_eq!(chunk.exhausted[0].id.row(), parts[1].row);
    assert_eq!(chunk.exhausted[0].handler.as_deref(), Some(EMAIL));
    assert_eq!(chunk.exhausted[0].origin, Some(parts[0].row));
}

/// Parts of one event do not wait for each other, and later events of its ordering key wait for all
/// of them.
pub async fn a_key_waits_for_all_parts_of_an_event<H: Harness>(h: &H) {
    let ordered = NewEvent {
        ordering_key: Some("k".to_owned()),
        ..event()
    };
    publish(h, ordered.clone()).await;
    let lease = claim_one(h).await.lease();
    let second = publish(h, ordered).await;
    let parts = split(h, lease, &[part(LEDGER), left(EMAIL), left("audit")])
        .await
        .unwrap();
    let others = [of(Some(EMAIL)), of(Some("audit"))];
    let claimed = claim_of(h, &others).await;
    assert_eq!(rows(&claimed), [parts[1].row, parts[2].row]);
    record_outcome(h, lease, processed()).await;
    assert_eq!(rows_of(h, &[of(None)]).await, NOTHING);
    record_outcome(h, claimed[0].lease(), processed()).await;
    record_outcome(h, claimed[1].lease(), dead(DeadReason::Permanent, "no")).await;
    assert_eq!(rows_of(h, &[of(None)]).await, NOTHING, "one part is dead");
    discard(h, parts[2].row).await;
    assert_eq!(rows_of(h, &[of(None)]).await, [second]);
}

/// P12: a row that somebody has written under the name of an event and a handler is neither's.
pub async fn a_name_that_looks_like_a_handler_is_left_alone<H: Harness>(h: &H) {
    let row = publish(h, named("order.paid/email")).await;
    let both = [of(None), of(Some(EMAIL))];
    assert_eq!(rows_of(h, &both).await, NOTHING);
    assert_eq!(record(h, row).await.attempts, 0);
}

/// P6: a part can be given back as any claim.
pub async fn a_part_can_be_given_back<H: Harness>(h: &H) {
    let parts = publish_and_split(h, event(), &[part(LEDGER), part(EMAIL)]).await;
    assert_eq!(release(h, parts[1]).await, Settled::Recorded);
    let claimed = claim_of(h, &[of(Some(EMAIL))]).await;
    assert_eq!(
        (rows(&claimed), claimed[0].attempt),
        (vec![parts[1].row], count(1))
    );
}

async fn cancel<H: Harness>(h: &H, row: i64) -> Option<Existing> {
    let event = by_row(h, row).await;
    let mut tx = h.store().begin().await.unwrap();
    let found = h.store().cancel(&mut tx, &event).await;
    h.store().commit(tx).await.unwrap();
    found.unwrap()
}

/// Whoever cancels an event means all of it: its parts are cancelled, held or not.
pub async fn a_cancellation_is_of_all_parts<H: Harness>(h: &H) {
    let parts = publish_and_split(h, keyed("k"), &[left(EMAIL), part(LEDGER)]).await;
    let found = cancel(h, parts[0].row).await.unwrap();
    assert_eq!(
        (found.id.row(), found.state),
        (parts[0].row, EventState::InProgress)
    );
    for lease in &parts {
        assert_eq!(record(h, lease.row).await.state, EventState::Cancelled);
    }
    assert!(
        rows_of(h, &[of(Some(EMAIL)), of(Some(LEDGER))])
            .await
            .is_empty()
    );
    assert_eq!(settle(h, parts[1], processed()).await, Settled::LeaseLost);
    let again = cancel(h, parts[0].row).await.unwrap();
    assert_eq!(again.state, EventState::Cancelled);
}

/// A part that has ended stays as it is, and the others are cancelled.
pub async fn a_cancellation_leaves_parts_that_have_ended<H: Harness>(h: &H) {
    let parts = publish_and_split(h, keyed("k"), &[part(EMAIL), left(LEDGER)]).await;
    record_outcome(h, parts[0], processed()).await;
    let found = cancel(h, parts[0].row).await.unwrap();
    assert_eq!(found.state, EventState::Pending);
    assert_eq!(record(h, parts[0].row).await.state, EventState::Processed);
    assert_eq!(record(h, parts[1].row).await.state, EventState::Cancelled);
}

/// The id of a part means that part alone.
pub async fn a_part_can_be_cancelled_by_itself<H: Harness>(h: &H) {
    let parts = publish_and_split(h, event(), &[left(EMAIL), left(LEDGER)]).await;
    let found = cancel(h, parts[1].row).await.unwrap();
    assert_eq!(found.id.row(), parts[1].row);
    assert_eq!(
        rows_of(h, &[of(Some(EMAIL)), of(Some(LEDGER))]).await,
        [parts[0].row]
    );
}
