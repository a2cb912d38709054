//! Events of one ordering key are handled one after the other, in the order of their commits.

use std::time::Duration;

use super::Harness;
use super::steps::*;
use crate::event::{BehindDead, EventId, Priority};
use crate::lease::{HeldLease, LeaseToken};
use crate::outcome::{DeadReason, Outcome};
use crate::store::{
    BLOCKED_COUNT_MAX, BlockedKey, ClaimRequest, EventState, LowWater, NewEvent, Settled, Store,
    Verified,
};

fn ordered(key: &str) -> NewEvent {
    NewEvent {
        ordering_key: Some(key.to_owned()),
        ..event()
    }
}

fn skipping(key: &str) -> NewEvent {
    NewEvent {
        behind_dead: BehindDead::Skip,
        ..ordered(key)
    }
}

async fn verify<H: Harness>(h: &H, lease: HeldLease) -> Verified {
    let verified = h.store().verify(&[lease]).await.unwrap();
    assert_eq!(verified.len(), 1);
    verified[0]
}

async fn blocked<H: Harness>(h: &H) -> Vec<BlockedKey> {
    h.store().blocked_keys(count(100)).await.unwrap()
}

/// Claims the only row that is not blocked, and buries it.
async fn bury_first<H: Harness>(h: &H, row: i64) {
    let head = claim_one(h).await;
    assert_eq!(head.id.row(), row);
    record_outcome(h, head.lease(), dead(DeadReason::Permanent, "no")).await;
}

/// Of each key the first is claimed, and what has no key is in nobody's way.
pub async fn only_the_first_of_each_key_is_claimed<H: Harness>(h: &H) {
    let events = [
        ordered("k"),
        ordered("k"),
        ordered("j"),
        event(),
        ordered("j"),
    ];
    let rows = publish_all(h, &events).await;
    assert_eq!(claim_up_to(h, 10).await, [rows[0], rows[2], rows[3]]);
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
}

/// A claim says which key its event is the first of.
pub async fn a_claim_tells_the_key<H: Harness>(h: &H) {
    publish(h, ordered("k \u{e9}")).await;
    assert_eq!(claim_one(h).await.ordering_key.as_deref(), Some("k \u{e9}"));
    publish(h, event()).await;
    assert_eq!(claim_one(h).await.ordering_key, None);
}

/// Keys are one order over event names: the second waits, although it is of another type.
pub async fn a_key_orders_events_of_all_types<H: Harness>(h: &H) {
    let shipped = NewEvent {
        name: SHIPPED,
        ..ordered("k")
    };
    let rows = publish_all(h, &[shipped, ordered("k")]).await;
    assert_eq!(
        claim_up_to(h, 10).await,
        NOTHING,
        "nobody here handles the first"
    );
    let both = ClaimRequest {
        events: &[known(PAID), known(SHIPPED)],
        ..request(10)
    };
    assert_eq!(super::steps::rows(&claim(h, &both).await), [rows[0]]);
}

/// The next one is due when the one before is processed.
pub async fn the_next_is_due_when_the_one_before_is_processed<H: Harness>(h: &H) {
    let rows = publish_all(h, &[ordered("k"), ordered("k"), ordered("k")]).await;
    for row in rows {
        let first = claim_one(h).await;
        assert_eq!(first.id.row(), row);
        record_outcome(h, first.lease(), processed()).await;
    }
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
}

/// It waits while the one before waits for its retry, and while that runs again.
pub async fn the_next_waits_for_a_retry<H: Harness>(h: &H) {
    let rows = publish_all(h, &[ordered("k"), ordered("k")]).await;
    let first = claim_one(h).await;
    record_outcome(h, first.lease(), retry("no")).await;
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    h.make_due(rows[0]).await;
    assert_eq!(claim_up_to(h, 10).await, [rows[0]]);
    h.expire_lease(rows[0]).await;
    assert_eq!(claim_up_to(h, 10).await, [rows[0]]);
}

/// Neither a delay nor a priority moves an event before an earlier one of its key.
pub async fn neither_delay_nor_priority_changes_the_order<H: Harness>(h: &H) {
    let late = NewEvent {
        delay: HOUR,
        ..ordered("k")
    };
    let urgent = NewEvent {
        priority: Priority::Critical,
        ..ordered("k")
    };
    let rows = publish_all(h, &[late, urgent]).await;
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    h.make_due(rows[0]).await;
    assert_eq!(claim_up_to(h, 10).await, [rows[0]]);
}

/// A claim by number refuses it too, and so does one with a reserve for what waited.
pub async fn no_claim_takes_a_blocked_row<H: Harness>(h: &H) {
    let second = NewEvent {
        delay: HOUR,
        ..ordered("k")
    };
    let rows = publish_all(h, &[ordered("k"), second]).await;
    h.make_due(rows[1]).await;
    let by_number = h.store().claim_rows(&rows[1..], &request(10)).await;
    assert!(by_number.unwrap().is_empty());
    assert_eq!(claim_with_reserve(h, 1, 1).await, [rows[0]]);
    assert_eq!(claim_with_reserve(h, 1, 1).await, NOTHING);
    let in_pass = h.store().claim_in(pass(), &request(10)).await.unwrap();
    assert!(in_pass.unwrap().is_empty());
}

/// Behind a dead letter nothing of its key is claimed, until a person has dealt with it.
pub async fn a_dead_letter_blocks_its_key<H: Harness>(h: &H) {
    let rows = publish_all(h, &[ordered("k"), ordered("k")]).await;
    bury_first(h, rows[0]).await;
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    let later = publish_all(h, &[ordered("k"), ordered("j")]).await;
    assert_eq!(claim_up_to(h, 10).await, [later[1]]);
    discard(h, rows[0]).await;
    assert_eq!(claim_up_to(h, 10).await, [rows[1]]);
}

/// A requeued dead letter is the first of its key again, when its time comes.
pub async fn a_requeued_dead_letter_is_the_first_again<H: Harness>(h: &H) {
    let rows = publish_all(h, &[ordered("k"), ordered("k")]).await;
    bury_first(h, rows[0]).await;
    requeue(h, rows[0]).await;
    assert_eq!(claim_up_to(h, 10).await, [rows[0]]);
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
}

/// Behind a dead letter that was published with `skip`, its key goes on.
pub async fn a_key_goes_on_behind_a_dead_letter_that_is_skipped<H: Harness>(h: &H) {
    let rows = publish_all(h, &[skipping("k"), ordered("k"), ordered("k")]).await;
    bury_first(h, rows[0]).await;
    // Its own declaration counts, not that of the events behind it.
    bury_first(h, rows[1]).await;
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
}

/// A dead letter is in the way of later events only.
pub async fn a_dead_letter_blocks_nothing_that_came_before_it<H: Harness>(h: &H) {
    let rows = publish_all(h, &[skipping("k"), ordered("k")]).await;
    bury_first(h, rows[0]).await;
    bury_first(h, rows[1]).await;
    requeue(h, rows[0]).await;
    assert_eq!(claim_up_to(h, 10).await, [rows[0]]);
}

/// A row born leased tells when it is verified that it is blocked, and can be given back uncharged.
pub async fn a_row_born_leased_behind_another_is_found_blocked<H: Harness>(h: &H) {
    let token = LeaseToken::random();
    let born = |key: &str| NewEvent {
        ordering_key: Some(key.to_owned()),
        ..born_leased(token)
    };
    let rows = publish_all(h, &[born("k"), born("k"), born("j")]).await;
    let leases: Vec<HeldLease> = rows
        .iter()
        .map(|row| HeldLease { row: *row, token })
        .collect();
    let mut answers = Vec::new();
    for lease in &leases {
        answers.push(verify(h, *lease).await.blocked);
    }
    assert_eq!(answers, [false, true, false]);

    assert_eq!(release(h, leases[1]).await, Settled::Recorded);
    assert_eq!(record(h, rows[1]).await.attempts, 0);
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    record_outcome(h, leases[0], processed()).await;
    assert_eq!(claim_up_to(h, 10).await, [rows[1]]);
}

/// So does one behind a dead letter.
pub async fn a_row_born_leased_behind_a_dead_letter_is_found_blocked<H: Harness>(h: &H) {
    let rows = publish_all(h, &[ordered("k")]).await;
    bury_first(h, rows[0]).await;
    let token = LeaseToken::random();
    let born = NewEvent {
        ordering_key: Some("k".to_owned()),
        ..born_leased(token)
    };
    let row = publish(h, born).await;
    assert!(verify(h, HeldLease { row, token }).await.blocked);
}

/// What is next of a key is its first unsettled row: of those that wait, and of those that run.
pub async fn the_first_unsettled_row_of_a_key_is_next<H: Harness>(h: &H) {
    let rows = publish_all(h, &[ordered("k"), ordered("k"), ordered("j"), event()]).await;
    let next = async |keys: &[&str]| {
        let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        let mut next = h.store().next_in_order(&keys).await.unwrap();
        next.sort_unstable();
        next
    };
    assert_eq!(next(&[]).await, NOTHING);
    assert_eq!(next(&["nobody's"]).await, NOTHING);
    assert_eq!(next(&["k", "nobody's", "j"]).await, [rows[0], rows[2]]);
    let first = claim(h, &request(1)).await;
    assert_eq!(next(&["k"]).await, [rows[0]]);
    record_outcome(h, first[0].lease(), processed()).await;
    assert_eq!(next(&["k"]).await, [rows[1]]);
    let second = claim(h, &request(1)).await;
    record_outcome(h, second[0].lease(), dead(DeadReason::Permanent, "no")).await;
    assert_eq!(next(&["k"]).await, NOTHING);
}

/// No row is above the newest number, whatever became of it.
pub async fn no_row_is_above_the_newest<H: Harness>(h: &H) {
    assert!(h.store().newest().await.unwrap() >= 0);
    let rows = publish_all(h, &[event(), event()]).await;
    let newest = h.store().newest().await.unwrap();
    assert!(newest >= rows[1]);
    let claimed = claim(h, &request(10)).await;
    for one in &claimed {
        record_outcome(h, one.lease(), processed()).await;
    }
    let row = publish(h, event()).await;
    assert!(h.store().newest().await.unwrap() >= row);
}

/// A row that is next is found below the low-water mark, and no other one.
pub async fn the_next_of_a_freed_key_is_found_below_the_mark<H: Harness>(h: &H) {
    let rows = publish_all(h, &[ordered("k"), ordered("k"), ordered("j"), event()]).await;
    let mut mark = LowWater::BEGINNING;
    mark.raise(Priority::Normal, rows[3]);
    let from_mark = |freed| ClaimRequest {
        low_water: mark,
        freed,
        ..request(10)
    };
    assert_eq!(
        super::steps::rows(&claim(h, &from_mark(&[])).await),
        [rows[3]]
    );
    let (first, both, second) = ([rows[0], 1_000_000], [rows[0], rows[1]], [rows[1]]);
    let found = claim(h, &from_mark(&first)).await;
    assert_eq!(super::steps::rows(&found), [rows[0]]);
    // It is blocked: whoever asked for it did so too soon.
    assert_eq!(claim(h, &from_mark(&both)).await.len(), 0);
    record_outcome(h, found[0].lease(), processed()).await;
    let found = claim(h, &from_mark(&second)).await;
    assert_eq!(super::steps::rows(&found), [rows[1]]);
}

/// P4: a claim takes no more rows than asked, those below the marks included.
pub async fn freed_rows_count_towards_the_limit<H: Harness>(h: &H) {
    let rows = publish_all(h, &[ordered("a"), ordered("b"), event(), event()]).await;
    let mut mark = LowWater::BEGINNING;
    mark.raise(Priority::Normal, rows[2]);
    let from_mark = ClaimRequest {
        low_water: mark,
        freed: &[rows[0], rows[1]],
        ..request(3)
    };
    let found = super::steps::rows(&claim(h, &from_mark).await);
    assert_eq!(found, [rows[0], rows[1], rows[2]]);
}

/// In this order:
///
/// 1. The first transaction publishes and does not commit.
/// 2. The second one publishes the same key.
/// 3. The first one commits, then the second.
///
/// Had the second got its number without waiting for the first, and the first one's been higher,
/// it would be handled before what committed earlier.
pub async fn numbers_of_a_key_are_in_the_order_of_the_commits<H: Harness>(h: &H) {
    let other = h.another_store().await;
    let mut first = h.store().begin().await.unwrap();
    let one = h.store().insert(&mut first, &[ordered("k")]).await.unwrap();

    let second = [ordered("k")];
    let (two, three) = tokio::join!(insert(&other, &second), async {
        h.publisher_waits().await;
        let three = h.store().insert(&mut first, &[ordered("k")]).await.unwrap();
        h.store().commit(first).await.unwrap();
        three
    });
    let [one, two, three] = [&one, &two, &three].map(|answer| inserted(&answer[0]).row());
    assert!(one < three && three < two, "{one}, {three}, {two}");
}

/// Two batches that name the same keys in different orders do not deadlock.
pub async fn batches_with_equal_ordering_keys_do_not_deadlock<H: Harness>(h: &H) {
    let up: Vec<NewEvent> = (0..50).map(|n| ordered(&format!("{n:02}"))).collect();
    let down: Vec<NewEvent> = up.iter().rev().cloned().collect();
    tokio::join!(insert(h.store(), &up), insert(h.store(), &down));
    assert_eq!(claim_up_to(h, 100).await.len(), 50);
}

/// A batch keeps its own order, and answers in it.
pub async fn a_batch_of_one_key_is_in_input_order<H: Harness>(h: &H) {
    let events = [ordered("b"), ordered("a"), event(), ordered("b")];
    let rows = publish_all(h, &events).await;
    assert!(rows.is_sorted(), "{rows:?}");
    assert_eq!(claim_up_to(h, 10).await, rows[..3]);
}

/// A key can be asked before anything of it is published: it is locked from then on.
pub async fn a_locked_key_tells_whether_anything_blocks_it<H: Harness>(h: &H) {
    async fn is_free<H: Harness>(h: &H, key: &str) -> bool {
        let mut tx = h.store().begin().await.unwrap();
        let free = h.store().lock_ordering_key(&mut tx, key).await.unwrap();
        h.store().rollback(tx).await.unwrap();
        free
    }
    assert!(is_free(h, "k").await);
    let row = publish(h, ordered("k")).await;
    assert!(!is_free(h, "k").await);
    assert!(is_free(h, "j").await);
    bury_first(h, row).await;
    assert!(!is_free(h, "k").await);
    discard(h, row).await;
    assert!(is_free(h, "k").await);
    let row = publish(h, skipping("k")).await;
    bury_first(h, row).await;
    assert!(is_free(h, "k").await);

    let mut tx = h.store().begin().await.unwrap();
    h.store().insert(&mut tx, &[ordered("k")]).await.unwrap();
    let free = h.store().lock_ordering_key(&mut tx, "k").await.unwrap();
    assert!(!free, "its own event is first");
    h.store().rollback(tx).await.unwrap();
}

/// A blocked key is listed with its first event, its cause and how many wait.
pub async fn blocked_keys_are_listed_with_their_cause<H: Harness>(h: &H) {
    let rows = publish_all(h, &[ordered("dead"), ordered("dead"), ordered("dead")]).await;
    bury_first(h, rows[0]).await;
    let failed = publish_all(h, &[ordered("failed"), ordered("failed")]).await;
    let first = claim_one(h).await;
    record_outcome(h, first.lease(), retry("no route")).await;
    publish_all(h, &[ordered("fine"), event()]).await;

    let mut found = blocked(h).await;
    found.sort_by_key(|key| key.head);
    assert_eq!(found.len(), 2, "{found:?}");
    let id = |row| EventId::new(found[0].head.installation(), row);
    let short = |key: &BlockedKey| key.blocked_for < Duration::from_secs(60);
    assert!(found.iter().all(short), "{found:?}");
    let named =
        |key: &str, row, state| BlockedKey::new(key.to_owned(), id(row), PAID.to_owned(), state);
    let mut expected = named("dead", rows[0], EventState::DeadLetter);
    expected.attempts = 1;
    expected.dead_reason = Some("permanent".to_owned());
    expected.last_error = "no".to_owned();
    expected.waiting = 2;
    expected.blocked_for = found[0].blocked_for;
    assert_eq!(found[0], expected);
    let mut expected = named("failed", failed[0], EventState::Failed);
    expected.attempts = 1;
    expected.last_error = "no route".to_owned();
    expected.waiting = 1;
    expected.blocked_for = found[1].blocked_for;
    assert_eq!(found[1], expected);
}

/// The longest blocked comes first, and no more are listed than asked for.
pub async fn the_longest_blocked_key_is_listed_first<H: Harness>(h: &H) {
    let mut rows = Vec::new();
    for key in ["a", "b", "c"] {
        let row = publish(h, ordered(key)).await;
        bury_first(h, row).await;
        rows.push(row);
    }
    h.age_dead_letter(rows[1], HOUR).await;
    let found = h.store().blocked_keys(count(1)).await.unwrap();
    let keys: Vec<_> = found.iter().map(|key| key.ordering_key.as_str()).collect();
    assert_eq!(keys, ["b"]);
    assert!(found[0].blocked_for >= HOUR);
    assert_eq!(blocked(h).await.len(), 3);
}

/// What is skipped, or behind another one, is no cause; a key is listed once, with its first.
pub async fn only_the_first_cause_of_a_key_is_listed<H: Harness>(h: &H) {
    let skipped = publish(h, skipping("skipped")).await;
    bury_first(h, skipped).await;
    let first = publish(h, skipping("k")).await;
    bury_first(h, first).await;
    let second = publish(h, ordered("k")).await;
    bury_first(h, second).await;
    requeue(h, first).await;
    let claimed = claim_one(h).await;
    record_outcome(h, claimed.lease(), retry("again")).await;

    let found = blocked(h).await;
    let heads: Vec<i64> = found.iter().map(|key| key.head.row()).collect();
    assert_eq!(heads, [first]);
    assert_eq!(found[0].state, EventState::Failed);
}

/// Not more are counted than it says.
pub async fn events_behind_a_blocked_key_are_counted_up_to_a_limit<H: Harness>(h: &H) {
    let row = publish(h, ordered("k")).await;
    bury_first(h, row).await;
    let many = BLOCKED_COUNT_MAX as usize + 5;
    publish_all(h, &vec![ordered("k"); many]).await;
    assert_eq!(blocked(h).await[0].waiting, BLOCKED_COUNT_MAX);
}

/// A settled event is in nobody's way, however it ended.
pub async fn what_is_settled_blocks_nothing<H: Harness>(h: &H) {
    let discarded = Outcome::Discarded {
        error: crate::outcome::ErrorText::new(&"unreadable"),
    };
    for outcome in [processed(), discarded] {
        publish_and_settle(h, ordered("k"), outcome).await;
    }
    let cancelled = publish(h, ordered("k")).await;
    cancel_row(h, cancelled).await;
    let row = publish(h, ordered("k")).await;
    assert_eq!(claim_up_to(h, 10).await, [row]);
}
