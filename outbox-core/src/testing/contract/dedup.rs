//! P3: a dedup key, scoped by event name, lets one event in.

use std::time::Duration;

use super::Harness;
use super::steps::*;
use crate::fingerprint::Fingerprint;
use crate::lease::LeaseToken;
use crate::outcome::DeadReason;
use crate::store::{EventState, Existing, Insertion, NewEvent, Store};

/// Publishes `event` again and answers what its publisher is told.
async fn told<H: Harness>(h: &H, event: &NewEvent) -> (i64, EventState, Option<String>) {
    let answers = insert(h.store(), std::slice::from_ref(event)).await;
    match &answers[0] {
        Insertion::Existing(existing) => {
            (existing.id.row(), existing.state, existing.output.clone())
        }
        Insertion::Inserted(id) => panic!("the key was free: {id}"),
    }
}

/// P3: a duplicate inserts nothing.
pub async fn a_duplicate_is_not_inserted<H: Harness>(h: &H) {
    let row = publish(h, keyed("k")).await;
    assert_eq!(told(h, &keyed("k")).await, (row, EventState::Pending, None));
    assert_eq!(claim_up_to(h, 10).await, [row]);
}

/// P3: the duplicate is told the whole id.
pub async fn a_duplicate_is_told_the_id<H: Harness>(h: &H) {
    let first = insert(h.store(), &[keyed("k")]).await;
    let second = insert(h.store(), &[keyed("k")]).await;
    let expected = Existing {
        id: inserted(&first[0]),
        state: EventState::Pending,
        output: None,
        fingerprint: None,
    };
    assert_eq!(second, [Insertion::Existing(expected)]);
}

/// P3: equal keys of different event names have nothing to do with each other.
pub async fn keys_are_scoped_by_event_name<H: Harness>(h: &H) {
    let paid = publish(h, keyed("k")).await;
    let shipped = publish(
        h,
        NewEvent {
            name: SHIPPED,
            ..keyed("k")
        },
    )
    .await;
    assert_ne!(paid, shipped);
}

/// Events without a key are never duplicates.
pub async fn unkeyed_events_are_never_duplicates<H: Harness>(h: &H) {
    let rows = publish_all(h, &[event(), event()]).await;
    assert_eq!(claim_up_to(h, 10).await, rows);
}

/// Keys are compared as they are: case, trailing blanks and the form of a character count.
pub async fn keys_are_compared_to_the_byte<H: Harness>(h: &H) {
    let keys = ["key", "Key", "key ", "ke\u{301}y", "k\u{e9}y", "k%y", ""];
    let rows = publish_all(h, &keys.map(keyed)).await;
    assert_eq!(claim_up_to(h, 10).await, rows);
    assert_eq!(told(h, &keyed("")).await.0, rows[6]);
    assert_eq!(told(h, &keyed("key ")).await.0, rows[2]);
}

/// P3: of two equal keys in one batch the first is inserted, and answers come in input order.
pub async fn duplicates_in_a_batch_are_answered_in_input_order<H: Harness>(h: &H) {
    let old = insert(h.store(), &[keyed("old")]).await;
    let old = inserted(&old[0]);
    let batch = [
        keyed("old"),
        event(),
        keyed("new"),
        keyed("another"),
        keyed("new"),
        keyed("old"),
    ];
    let answers = insert(h.store(), &batch).await;

    let pending = |id| {
        Insertion::Existing(Existing {
            id,
            state: EventState::Pending,
            output: None,
            fingerprint: None,
        })
    };
    assert_eq!(answers.len(), 6);
    assert_eq!(answers[0], pending(old));
    assert!(matches!(answers[1], Insertion::Inserted(_)));
    let new = inserted(&answers[2]);
    assert!(matches!(answers[3], Insertion::Inserted(_)));
    assert_eq!(answers[4], pending(new));
    assert_eq!(answers[5], pending(old));
    assert_eq!(claim_up_to(h, 10).await.len(), 4);
}

/// P2, P3: a transaction meets the key that it took itself.
pub async fn a_transaction_meets_its_own_key<H: Harness>(h: &H) {
    let mut tx = h.store().begin().await.unwrap();
    let first = h.store().insert(&mut tx, &[keyed("k")]).await.unwrap();
    let second = h.store().insert(&mut tx, &[keyed("k")]).await.unwrap();
    h.store().commit(tx).await.unwrap();
    let expected = Existing {
        id: inserted(&first[0]),
        state: EventState::Pending,
        output: None,
        fingerprint: None,
    };
    assert_eq!(second, [Insertion::Existing(expected)]);
}

/// P2: a duplicate does not cost the caller its transaction.
pub async fn a_duplicate_leaves_the_transaction_usable<H: Harness>(h: &H) {
    publish_and_settle(h, keyed("k"), processed()).await;
    let mut tx = h.store().begin().await.unwrap();
    h.store().insert(&mut tx, &[event()]).await.unwrap();
    let duplicate = h.store().insert(&mut tx, &[keyed("k")]).await.unwrap();
    h.store().insert(&mut tx, &[event()]).await.unwrap();
    h.store().commit(tx).await.unwrap();
    assert!(matches!(duplicate[0], Insertion::Existing(_)));
    assert_eq!(claim_up_to(h, 10).await.len(), 2);
}

/// P3: a duplicate of a claimed event is told that it is in progress.
pub async fn a_duplicate_is_told_that_the_event_is_in_progress<H: Harness>(h: &H) {
    let row = publish(h, keyed("k")).await;
    claim_one(h).await;
    let expected = (row, EventState::InProgress, None);
    assert_eq!(told(h, &keyed("k")).await, expected);
}

/// P3: as is a duplicate of one that was born leased, in the same batch too.
pub async fn a_duplicate_of_a_born_leased_event_is_told_so<H: Harness>(h: &H) {
    let event = NewEvent {
        dedup_key: Some("k".to_owned()),
        ..born_leased(LeaseToken::random())
    };
    let answers = insert(h.store(), &[event.clone(), event.clone()]).await;
    let id = inserted(&answers[0]);
    let in_progress = Insertion::Existing(Existing {
        id,
        state: EventState::InProgress,
        output: None,
        fingerprint: None,
    });
    assert_eq!(answers[1], in_progress);
    assert_eq!(insert(h.store(), &[event]).await, [in_progress]);
}

/// P3, P7: an event whose lease has ended is pending.
pub async fn a_duplicate_of_an_expired_lease_is_told_pending<H: Harness>(h: &H) {
    let row = publish(h, keyed("k")).await;
    claim_one(h).await;
    h.expire_lease(row).await;
    assert_eq!(told(h, &keyed("k")).await, (row, EventState::Pending, None));
}

/// P3: a duplicate of an event that waits for its retry is told that it failed.
pub async fn a_duplicate_is_told_that_the_event_failed<H: Harness>(h: &H) {
    let row = publish_and_settle(h, keyed("k"), retry("no route")).await;
    assert_eq!(told(h, &keyed("k")).await, (row, EventState::Failed, None));
}

/// P3: a duplicate of a processed event is told its result.
pub async fn a_duplicate_is_told_the_output<H: Harness>(h: &H) {
    let outcome = processed_with(r#""receipt-7 𝄞""#);
    let row = publish_and_settle(h, keyed("k"), outcome).await;
    let output = Some(r#""receipt-7 𝄞""#.to_owned());
    let expected = (row, EventState::Processed, output);
    assert_eq!(told(h, &keyed("k")).await, expected);
}

/// P3: a handler that returned nothing leaves nothing to tell.
pub async fn a_duplicate_of_an_event_without_output_is_told_none<H: Harness>(h: &H) {
    let row = publish_and_settle(h, keyed("k"), processed()).await;
    let expected = (row, EventState::Processed, None);
    assert_eq!(told(h, &keyed("k")).await, expected);
}

/// P3: state and output last as long as the key, even where nothing of the event is kept.
pub async fn a_key_outlives_an_event_that_is_not_kept<H: Harness>(h: &H) {
    let event = NewEvent {
        retention: Duration::ZERO,
        ..keyed("k")
    };
    let row = publish_and_settle(h, event.clone(), processed_with("7")).await;
    assert_eq!(find(h, row).await, None);
    let expected = (row, EventState::Processed, Some("7".to_owned()));
    assert_eq!(told(h, &event).await, expected);
    purge(h).await;
    assert_eq!(told(h, &event).await, expected);
}

/// P3, P17: a key lasts until its event has left every table, however short its own retention.
pub async fn a_key_lasts_as_long_as_its_event<H: Harness>(h: &H) {
    let event = NewEvent {
        key_retention: Duration::ZERO,
        ..keyed("k")
    };
    let row = publish_and_settle(h, event.clone(), processed_with("7")).await;
    purge(h).await;
    let expected = (row, EventState::Processed, Some("7".to_owned()));
    assert_eq!(told(h, &event).await, expected);
    assert_eq!(find(h, row).await.map(|record| record.id.row()), Some(row));
}

/// P3, P9: a dead letter keeps its key.
pub async fn a_duplicate_is_told_of_the_dead_letter<H: Harness>(h: &H) {
    let outcome = dead(DeadReason::Permanent, "no such customer");
    let row = publish_and_settle(h, keyed("k"), outcome).await;
    purge(h).await;
    let expected = (row, EventState::DeadLetter, None);
    assert_eq!(told(h, &keyed("k")).await, expected);
}

/// P17: past its retention a key is free again.
pub async fn a_key_is_free_again_after_its_retention<H: Harness>(h: &H) {
    let first = publish_and_settle(h, keyed("k"), processed_with("7")).await;
    h.expire_retention(first).await;
    assert!(purge(h).await >= 1);
    assert_eq!(find(h, first).await, None);

    let second = publish(h, keyed("k")).await;
    assert!(second > first);
    assert_eq!(
        told(h, &keyed("k")).await,
        (second, EventState::Pending, None)
    );
}

/// P3, in this order:
///
/// 1. The winner inserts the key and does not commit.
/// 2. The loser inserts the same key and waits.
/// 3. The winner commits.
///
/// The loser learns the winner's id: it may not be told before the commit, for there is nothing
/// to tell, and it may not be inserted.
pub async fn a_loser_waits_for_the_commit_and_learns_the_id<H: Harness>(h: &H) {
    let other = h.another_store().await;
    let mut tx = h.store().begin().await.unwrap();
    let won = h.store().insert(&mut tx, &[keyed("k")]).await.unwrap();

    let loser = [keyed("k")];
    let (lost, ()) = tokio::join!(insert(&other, &loser), async {
        h.publisher_waits().await;
        h.store().commit(tx).await.unwrap();
    });
    let expected = Existing {
        id: inserted(&won[0]),
        state: EventState::Pending,
        output: None,
        fingerprint: None,
    };
    assert_eq!(lost, [Insertion::Existing(expected)]);
}

/// P3: as above, but the winner rolls back. Nobody may be told "duplicate" on account of a row
/// that never committed, or the event would be lost.
pub async fn a_waiting_loser_is_inserted_when_the_winner_rolls_back<H: Harness>(h: &H) {
    let other = h.another_store().await;
    let mut tx = h.store().begin().await.unwrap();
    h.store().insert(&mut tx, &[keyed("k")]).await.unwrap();

    let loser = [keyed("k")];
    let (answers, ()) = tokio::join!(insert(&other, &loser), async {
        h.publisher_waits().await;
        h.store().rollback(tx).await.unwrap();
    });
    let row = inserted(&answers[0]).row();
    assert_eq!(claim_up_to(h, 10).await, [row]);
}

/// P3: of many concurrent publishers of one key, one is inserted and all others learn its id.
pub async fn one_of_many_concurrent_publishers_wins<H: Harness>(h: &H) {
    let event = [keyed("k")];
    let publishers = (0..8).map(|_| insert(h.store(), &event));
    let answers = futures_util::future::join_all(publishers).await;

    let is_inserted = |answer: &&Insertion| matches!(answer, Insertion::Inserted(_));
    let winners: Vec<_> = answers.iter().flatten().filter(is_inserted).collect();
    assert_eq!(winners.len(), 1, "{answers:?}");
    let winner = inserted(winners[0]);
    for answer in answers.iter().flatten() {
        match answer {
            Insertion::Inserted(id) => assert_eq!(*id, winner),
            Insertion::Existing(existing) => assert_eq!(existing.id, winner),
        }
    }
    assert_eq!(claim_up_to(h, 10).await, [winner.row()]);
}

/// P3: two batches that name the same keys in different orders do not deadlock.
pub async fn batches_with_equal_keys_do_not_deadlock<H: Harness>(h: &H) {
    let keys: Vec<String> = (0..50).map(|n| format!("key-{n:02}")).collect();
    let up: Vec<NewEvent> = keys.iter().map(|key| keyed(key)).collect();
    let down: Vec<NewEvent> = keys.iter().rev().map(|key| keyed(key)).collect();
    let (first, second) = tokio::join!(insert(h.store(), &up), insert(h.store(), &down));
    let all = [first, second].concat();
    let inserted = all
        .iter()
        .filter(|answer| matches!(answer, Insertion::Inserted(_)));
    assert_eq!(inserted.count(), 50);
    assert_eq!(claim_up_to(h, 100).await.len(), 50);
}

/// P3: at no moment of its settlement is an event in neither place for its duplicate.
pub async fn a_duplicate_finds_an_event_that_is_being_settled<H: Harness>(h: &H) {
    for round in 0..20 {
        let event = keyed(&format!("key-{round}"));
        let row = publish(h, event.clone()).await;
        let lease = claim_one(h).await.lease();
        let ((found, state, output), ()) = tokio::join!(
            told(h, &event),
            record_outcome(h, lease, processed_with("7"))
        );
        assert_eq!(found, row);
        match state {
            EventState::InProgress => assert_eq!(output, None),
            EventState::Processed => assert_eq!(output.as_deref(), Some("7")),
            other => panic!("neither in progress nor processed: {other}"),
        }
    }
}

/// P3: a duplicate is told what was published with the key, wherever its event is.
pub async fn a_duplicate_is_told_the_fingerprint<H: Harness>(h: &H) {
    let of = |payload| Some(Fingerprint::of(count(1), payload));
    let first = NewEvent {
        fingerprint: of("1"),
        retention: Duration::ZERO,
        ..keyed("k")
    };
    let second = NewEvent {
        fingerprint: of("2"),
        ..keyed("k")
    };
    let third = NewEvent {
        fingerprint: of("3"),
        ..keyed("new")
    };
    let told = |answer: &Insertion| match answer {
        Insertion::Existing(existing) => existing.fingerprint,
        Insertion::Inserted(id) => panic!("the key was free: {id}"),
    };
    publish(h, first.clone()).await;
    assert_eq!(
        told(&insert(h.store(), std::slice::from_ref(&second)).await[0]),
        of("1")
    );
    let batch = [third, keyed("new"), second.clone()];
    let answers = insert(h.store(), &batch).await;
    assert_eq!(
        told(&answers[1]),
        of("3"),
        "of the one before it in the batch"
    );
    assert_eq!(told(&answers[2]), of("1"));
    let held = claim(h, &request(1)).await.remove(0).lease();
    record_outcome(h, held, processed()).await;
    assert_eq!(told(&insert(h.store(), &[second]).await[0]), of("1"));
}
