//! Counts with a bound.

use super::*;

/// Rows by hand: publishing this many would be the test's time.
async fn fill(db: &SqliteDb, rows: u32, priority: u8, due_at: &str, lease: &str) {
    execute(
        &db.pool(),
        format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
            INSERT INTO outbox_events (
                name, version, priority, payload, attempts, max_attempts, due_at, lease_token,
                lease_expires_at, claimed_by, created_at, retention, key_retention
            )
            SELECT
                '{NAME}', 1, {priority}, '{{}}', 1, 5, {due_at}, {lease},
                unixepoch() * 1000000 - 60000000, 0, 0
            FROM n"
        ),
    )
    .await;
}

const LEASED: &str = "'t', 9000000000000000, 'a'";
const FREE: &str = "NULL, NULL, NULL";
const MINUTE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn more_than_is_counted_is_a_lower_bound() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    fill(&db, 49_999, 1, "NULL", FREE).await;
    let stats = store.stats().await.unwrap();
    assert_eq!((stats.events[NAME].due, stats.exact), (49_999, true));
    fill(&db, 2, 1, "NULL", FREE).await;
    let stats = store.stats().await.unwrap();
    assert_eq!((stats.events[NAME].due, stats.exact), (50_000, false));
}

/// The first 50,000 are all held. What is due comes later, by number: it is found in the indexes.
#[tokio::test]
async fn the_lag_is_seen_beyond_what_is_counted() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    fill(&db, 50_000, 1, "NULL", LEASED).await;
    let stats = store.stats().await.unwrap();
    assert_eq!((stats.exact, stats.oldest_due), (false, None));
    // An hour over due, by its retry; and a minute, of the lowest priority.
    fill(&db, 1, 0, "NULL", FREE).await;
    let lag = store.stats().await.unwrap().oldest_due.unwrap();
    assert!((MINUTE..2 * MINUTE).contains(&lag), "{lag:?}");
    fill(&db, 1, 3, "unixepoch() * 1000000 - 3600000000", FREE).await;
    let lag = store.stats().await.unwrap().oldest_due.unwrap();
    assert!((60 * MINUTE..61 * MINUTE).contains(&lag), "{lag:?}");
}
