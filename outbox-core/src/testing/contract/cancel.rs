//! A cancelled event never runs again, whatever the running handler reports.

use std::time::Duration;

use uuid::Uuid;

use super::Harness;
use super::steps::*;
use crate::event::EventId;
use crate::outcome::DeadReason;
use crate::store::{
    EventRef, EventState, Existing, Insertion, NewEvent, Renewal, Settled, Store, Watched,
};

fn by_key(key: &str) -> EventRef {
    EventRef::Key {
        name: PAID.to_owned(),
        key: key.to_owned(),
    }
}

async fn cancel<H: Harness>(h: &H, event: &EventRef) -> Option<Existing> {
    let mut tx = h.store().begin().await.unwrap();
    let found = h.store().cancel(&mut tx, event).await.unwrap();
    h.store().commit(tx).await.unwrap();
    found
}

async fn state<H: Harness>(h: &H, row: i64) -> EventState {
    record(h, row).await.state
}

/// A waiting event is not claimed any more, and is kept as cancelled.
pub async fn a_cancelled_event_is_not_claimed<H: Harness>(h: &H) {
    let rows = publish_all(h, &[event(), delayed(), event()]).await;
    for row in &rows[..2] {
        let found = cancel(h, &by_row(h, *row).await).await.unwrap();
        assert_eq!((found.id.row(), found.state), (*row, EventState::Pending));
        assert_eq!(state(h, *row).await, EventState::Cancelled);
    }
    h.make_due(rows[1]).await;
    assert_eq!(claim_up_to(h, 10).await, [rows[2]]);
}

/// One that waits for its retry is cancelled as well.
pub async fn a_failed_event_can_be_cancelled<H: Harness>(h: &H) {
    let row = publish_and_settle(h, event(), retry("no")).await;
    let found = cancel(h, &by_row(h, row).await).await.unwrap();
    assert_eq!(found.state, EventState::Failed);
    let kept = record(h, row).await;
    assert_eq!(kept.state, EventState::Cancelled);
    assert_eq!(kept.attempts, 1);
    assert_eq!(kept.last_error.as_deref(), Some("no"));
    assert!(kept.settled_at.is_some());
}

/// P5: whoever holds it has lost its lease, so that no outcome of its handler counts.
pub async fn a_running_event_can_be_cancelled_and_its_outcome_is_refused<H: Harness>(h: &H) {
    for outcome in [
        processed_with("7"),
        retry("no"),
        dead(DeadReason::Permanent, "no"),
    ] {
        let row = publish(h, event()).await;
        let held = claim_one(h).await.lease();
        let found = cancel(h, &by_row(h, row).await).await.unwrap();
        assert_eq!(found.state, EventState::InProgress);
        let renewals = h.store().renew(&[held], HOUR).await.unwrap();
        assert_eq!(renewals, [Renewal::Lost]);
        assert_eq!(settle(h, held, outcome).await, Settled::LeaseLost);
        assert_eq!(release(h, held).await, Settled::LeaseLost);
        let kept = record(h, row).await;
        assert_eq!((kept.state, kept.output), (EventState::Cancelled, None));
    }
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
}

/// A cancellation lives and dies with its transaction.
pub async fn a_cancellation_that_rolls_back_has_not_happened<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let event = by_row(h, row).await;
    let mut tx = h.store().begin().await.unwrap();
    let found = h.store().cancel(&mut tx, &event).await.unwrap();
    assert!(found.is_some());
    h.store().rollback(tx).await.unwrap();
    assert_eq!(state(h, row).await, EventState::Pending);
    assert_eq!(claim_up_to(h, 10).await, [row]);
}

/// A transaction can cancel what it has published itself.
pub async fn a_transaction_can_cancel_its_own_event<H: Harness>(h: &H) {
    let mut tx = h.store().begin().await.unwrap();
    let answers = h.store().insert(&mut tx, &[keyed("k")]).await.unwrap();
    let id = inserted(&answers[0]);
    let found = h.store().cancel(&mut tx, &by_key("k")).await.unwrap();
    h.store().commit(tx).await.unwrap();
    assert_eq!(found.map(|found| found.id), Some(id));
    assert_eq!(state(h, id.row()).await, EventState::Cancelled);
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
}

/// What has ended is left as it is, and its state is told.
pub async fn what_has_ended_is_not_cancelled<H: Harness>(h: &H) {
    let done = publish_and_settle(h, keyed("done"), processed_with("7")).await;
    let buried = bury(h, keyed("dead"), DeadReason::Permanent, "no").await;
    for (event, row, expected) in [
        (by_row(h, done).await, done, EventState::Processed),
        (by_key("done"), done, EventState::Processed),
        (by_row(h, buried).await, buried, EventState::DeadLetter),
        (by_key("dead"), buried, EventState::DeadLetter),
    ] {
        let found = cancel(h, &event).await.unwrap();
        assert_eq!((found.id.row(), found.state), (row, expected));
        assert_eq!(state(h, row).await, expected);
    }
}

/// Cancelling twice is harmless, and what nobody published is not found.
pub async fn a_second_cancellation_is_told_of_the_first<H: Harness>(h: &H) {
    let row = publish(h, keyed("k")).await;
    cancel(h, &by_key("k")).await;
    for event in [by_key("k"), by_row(h, row).await] {
        let found = cancel(h, &event).await.unwrap();
        assert_eq!((found.id.row(), found.state), (row, EventState::Cancelled));
    }
    assert_eq!(cancel(h, &by_key("nobody's")).await, None);
    assert_eq!(cancel(h, &by_row(h, row + 1_000).await).await, None);
}

/// Numbers repeat from database to database. An id of another one is nobody's here: it does not cancel
/// the event that happens to have its number.
pub async fn an_id_of_another_database_cancels_nothing<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let elsewhere = EventId::new(Uuid::new_v4(), row);
    assert_eq!(cancel(h, &EventRef::Id(elsewhere)).await, None);
    assert_eq!(claim_up_to(h, 10).await, [row]);
}

/// P3: the key of a cancelled event lives on for its retention, so that a client's retry of the
/// request that led to it does not bring it back.
pub async fn a_cancelled_events_key_lives_on<H: Harness>(h: &H) {
    let event = NewEvent {
        retention: Duration::ZERO,
        ..keyed("k")
    };
    let row = publish(h, event.clone()).await;
    assert!(cancel(h, &by_key("k")).await.is_some());
    assert_eq!(find(h, row).await, None, "its own retention is zero");
    purge(h).await;
    let again = insert(h.store(), &[event]).await;
    let Insertion::Existing(existing) = &again[0] else {
        panic!("the key was free");
    };
    assert_eq!(
        (existing.id.row(), existing.state),
        (row, EventState::Cancelled)
    );
    let found = cancel(h, &by_key("k")).await.map(|found| found.state);
    assert_eq!(found, Some(EventState::Cancelled));
}

/// P17: past its retention nothing of it is left.
pub async fn a_cancelled_event_is_purged_after_its_retention<H: Harness>(h: &H) {
    let row = publish(h, keyed("k")).await;
    cancel(h, &by_key("k")).await;
    purge(h).await;
    assert_eq!(state(h, row).await, EventState::Cancelled);
    h.expire_retention(row).await;
    assert!(purge(h).await >= 1);
    assert_eq!(find(h, row).await, None);
    assert_eq!(cancel(h, &by_key("k")).await, None);
}

/// Events that somebody waits for are looked up where they are: in input order, and by their key
/// where nothing else of them is kept.
pub async fn watched_events_are_found_wherever_they_are<H: Harness>(h: &H) {
    let watched = |row, key: Option<&str>| Watched {
        row,
        key: key.map(|key| (PAID.to_owned(), key.to_owned())),
    };
    let unkept = NewEvent {
        retention: Duration::ZERO,
        ..keyed("unkept")
    };
    let gone = NewEvent {
        retention: Duration::ZERO,
        ..event()
    };
    let unkept = publish_and_settle(h, unkept, processed_with("1")).await;
    let gone = publish_and_settle(h, gone, processed_with("2")).await;
    let kept = publish_and_settle(h, event(), processed_with("3")).await;
    let buried = bury(h, keyed("dead"), DeadReason::Permanent, "no").await;
    let failed = publish_and_settle(h, event(), retry("no")).await;
    let cancelled = publish(h, event()).await;
    cancel_row(h, cancelled).await;
    let running = publish(h, event()).await;
    claim_one(h).await;
    let waiting = publish(h, keyed("waiting")).await;

    let asked = [
        watched(waiting, Some("waiting")),
        watched(unkept, Some("unkept")),
        watched(gone, None),
        watched(kept, None),
        watched(buried, Some("dead")),
        watched(failed, None),
        watched(cancelled, None),
        watched(running, None),
        // The key is another event's.
        watched(gone, Some("unkept")),
        watched(waiting, Some("waiting")),
    ];
    let found = h.store().look_up(&asked).await.unwrap();
    let found: Vec<_> = found
        .into_iter()
        .map(|found| found.map(|found| (found.id.row(), found.state, found.output)))
        .collect();
    let told = |row, state, output: Option<&str>| Some((row, state, output.map(str::to_owned)));
    let expected = [
        told(waiting, EventState::Pending, None),
        told(unkept, EventState::Processed, Some("1")),
        None,
        told(kept, EventState::Processed, Some("3")),
        told(buried, EventState::DeadLetter, None),
        told(failed, EventState::Failed, None),
        told(cancelled, EventState::Cancelled, None),
        told(running, EventState::InProgress, None),
        None,
        told(waiting, EventState::Pending, None),
    ];
    assert_eq!(found, expected);
}
