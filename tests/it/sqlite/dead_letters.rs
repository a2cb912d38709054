//! What is done to dead letters, and to their keys.

use outbox_core::dead_letter::{
    DeadLetterChange, DeadLetterFilter, DeadLetterRows, DeadLetterScan, DeadLettersChanged,
};

use super::*;

const REQUEUE: DeadLetterChange = DeadLetterChange::Requeue {
    delay: Duration::ZERO,
    spacing: Duration::ZERO,
};

async fn bury(store: &SqliteStore, event: NewEvent) -> i64 {
    let row = publish_one(store, event).await;
    let claimed = claim_one(store).await;
    assert_eq!(settle(store, &claimed, dead("no")).await, Settled::Recorded);
    row
}

async fn change(store: &SqliteStore, rows: &[i64], change: DeadLetterChange) -> DeadLettersChanged {
    let rows = DeadLetterRows::Numbered(rows);
    store.change_dead_letters(rows, change).await.unwrap()
}

/// State, output, and whether it ends.
async fn key(db: &SqliteDb, key: &str) -> (Option<String>, Option<String>, bool) {
    sqlx::query_as(
        "SELECT state, output, expires_at IS NOT NULL FROM outbox_events_keys WHERE key = ?1",
    )
    .bind(key)
    .fetch_one(&db.pool())
    .await
    .unwrap()
}

#[tokio::test]
async fn a_key_follows_its_event_through_death_and_back() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let row = bury(&store, keyed("k")).await;
    let dead = Some("dead_letter".to_owned());
    assert_eq!(key(&db, "k").await, (dead, None, false));
    assert_eq!(change(&store, &[row], REQUEUE).await.rows, [row]);
    assert_eq!(key(&db, "k").await, (None, None, false));
    let claimed = claim_one(&store).await;
    settle(
        &store,
        &claimed,
        Outcome::Discarded {
            error: ErrorText::new(&"odd"),
        },
    )
    .await;
    let discarded = Some("discarded".to_owned());
    assert_eq!(key(&db, "k").await, (discarded, None, true));
    assert_eq!(store.find(row).await.unwrap(), None);
}

/// Where a person deleted the key of a dead letter, another event may have it.
#[tokio::test]
async fn a_dead_letter_whose_key_is_anothers_is_passed_over_and_the_rest_is_requeued() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let robbed = bury(&store, keyed("k")).await;
    let other = bury(&store, keyed("other")).await;
    execute(&db.pool(), "DELETE FROM outbox_events_keys WHERE key = 'k'").await;
    let thief = publish_one(&store, keyed("k")).await;

    let changed = change(&store, &[robbed, other], REQUEUE).await;
    assert_eq!(changed.rows, [other]);
    assert_eq!(record(&store, robbed).await.state, EventState::DeadLetter);
    assert_eq!(rows(&claim(&store, 10).await), [other, thief]);
    // To discard it leaves the other event's key alone.
    change(&store, &[robbed], DeadLetterChange::Discard).await;
    assert_eq!(key(&db, "k").await, (None, None, false));
    assert_eq!(record(&store, robbed).await.state, EventState::Discarded);
}

#[tokio::test]
async fn a_wait_beyond_all_bounds_is_a_long_one() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let all = [bury(&store, event()).await, bury(&store, event()).await];
    let far = DeadLetterChange::Requeue {
        delay: Duration::ZERO,
        spacing: Duration::MAX,
    };
    assert_eq!(change(&store, &all, far).await.rows, all);
    assert_eq!(rows(&claim(&store, 10).await), all[..1]);
    assert!(record(&store, all[1]).await.due_at.is_some());
}

/// A reason of a later release is shown as it is stored, and does not hide the others.
#[tokio::test]
async fn a_reason_that_is_not_known_is_listed() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    bury(&store, event()).await;
    execute(&db.pool(), "UPDATE outbox_events_dead SET reason = 'bored'").await;
    bury(&store, event()).await;
    let filter = DeadLetterFilter::all();
    let scan = DeadLetterScan {
        filter: &filter,
        beyond: i64::MAX,
        scan: number(10),
        limit: number(10),
    };
    let found = store.dead_letters(&scan).await.unwrap().found;
    let reasons: Vec<_> = found.iter().map(|letter| letter.reason()).collect();
    assert_eq!(reasons, [Some(DeadReason::Permanent), None]);
    assert_eq!(found[1].reason_text, "bored");
}

#[tokio::test]
async fn the_view_shows_what_was_discarded() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let row = bury(&store, event()).await;
    change(&store, &[row], DeadLetterChange::Discard).await;
    let shown: (String, Option<String>) =
        sqlx::query_as("SELECT status, last_error FROM outbox_events_all")
            .fetch_one(&db.pool())
            .await
            .unwrap();
    assert_eq!(shown, ("discarded".to_owned(), Some("no".to_owned())));
}
