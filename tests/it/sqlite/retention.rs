//! What is swept and purged, and what no row can be.

use super::*;

async fn sweep(store: &SqliteStore, after: i64, scan: u32) -> SweepChunk {
    let request = SweepRequest {
        after,
        scan: number(scan),
        lease: LEASE,
        token: LeaseToken::random(),
        instance: "sweeper",
        events: &[KNOWN],
    };
    let chunk = store.sweep(pass(), &request).await.unwrap();
    chunk.expect("nobody else has the lock")
}

async fn purge(store: &SqliteStore, limit: u32) -> u64 {
    let removed = store.purge(pass(), number(limit)).await.unwrap();
    removed.expect("nobody else has the lock")
}

#[tokio::test]
async fn every_row_the_constraints_allow_is_the_claims_or_the_sweeps() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let pool = db.pool();
    let mut allowed = 0;
    for attempts in 0..=2 {
        for lease in [
            "lease_token = NULL, lease_expires_at = NULL, claimed_by = NULL",
            "lease_token = 't', lease_expires_at = 1, claimed_by = 'a'",
        ] {
            for due in ["NULL", "1"] {
                let row = publish_one(
                    &store,
                    NewEvent {
                        max_attempts: number(2),
                        ..event()
                    },
                )
                .await;
                let set = format!(
                    "UPDATE outbox_events
                    SET attempts = {attempts}, due_at = {due}, {lease} WHERE id = {row}"
                );
                if sqlx::query(AssertSqlSafe(set))
                    .execute(&pool)
                    .await
                    .is_err()
                {
                    claim_one(&store).await;
                    continue;
                }
                allowed += 1;
                let claimed = claim(&store, 10).await.len();
                let swept = sweep(&store, 0, 1_000).await.exhausted.len();
                assert_eq!(
                    claimed + swept,
                    1,
                    "attempts {attempts}, {lease}, due {due}"
                );
            }
        }
    }
    assert_eq!(allowed, 10);
}

/// A lease that no relay can have given hides a row from both until it ends; so a sweep cuts it.
#[tokio::test]
async fn every_row_with_an_overlong_lease_comes_back_once_it_is_cut() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    for attempts in 1..=2 {
        for due in ["NULL", "1"] {
            let event = NewEvent {
                max_attempts: number(2),
                ..event()
            };
            let row = publish_one(&store, event).await;
            execute(
                &db.pool(),
                format!(
                    "UPDATE outbox_events
                    SET attempts = {attempts}, due_at = {due}, lease_token = 't',
                        lease_expires_at = 9000000000000000, claimed_by = 'a'
                    WHERE id = {row}"
                ),
            )
            .await;
            let chunk = sweep(&store, 0, 1_000).await;
            assert_eq!((chunk.cut_leases, chunk.exhausted.len()), (1, 0));
            assert_eq!(claim(&store, 10).await.len(), 0);
            let moved = format!(
                "UPDATE outbox_events SET lease_expires_at = lease_expires_at - {DAY} - 1000000
                WHERE id = {row}"
            );
            execute(&db.pool(), moved).await;
            let claimed = claim(&store, 10).await.len();
            let chunk = sweep(&store, 0, 1_000).await;
            assert_eq!(claimed + chunk.exhausted.len(), 1, "{attempts}, {due}");
            assert_eq!(chunk.cut_leases, 0);
        }
    }
}

/// In microseconds, as the columns have it.
const DAY: i64 = 86_400_000_000;

#[tokio::test]
async fn a_purge_removes_only_what_is_past_its_retention() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let pool = db.pool();
    let ids = publish_rows(
        &store,
        &[
            keyed("old"),
            keyed("young"),
            keyed("dead"),
            keyed("failed"),
            keyed("held"),
        ],
    )
    .await;
    let mut claimed = claim(&store, 5).await;
    claimed.sort_by_key(|claimed| claimed.id);
    settle(&store, &claimed[0], processed(None)).await;
    settle(&store, &claimed[1], processed(None)).await;
    settle(&store, &claimed[2], dead("never")).await;
    settle(&store, &claimed[3], retry(Duration::ZERO, "no")).await;
    assert_eq!(purge(&store, 100).await, 0);

    // The key has ended and its event's row has not: it waits for the row.
    execute(
        &pool,
        "UPDATE outbox_events_keys SET expires_at = 1 WHERE key = 'old'",
    )
    .await;
    assert_eq!(purge(&store, 100).await, 0);
    execute(
        &pool,
        format!(
            "UPDATE outbox_events_history SET expires_at = 1 WHERE id = {}",
            ids[0]
        ),
    )
    .await;
    assert_eq!(purge(&store, 1).await, 1);
    assert_eq!(store.find(ids[0]).await.unwrap(), None);
    assert_eq!(purge(&store, 1).await, 1);
    assert_eq!(purge(&store, 1).await, 0);

    for row in &ids[1..] {
        record(&store, *row).await;
    }
    inserted(&publish(&store, &[keyed("old")]).await[0]);
    for key in ["young", "dead", "failed", "held"] {
        existing(&publish(&store, &[keyed(key)]).await[0]);
    }
}

#[tokio::test]
async fn constraints_refuse_mixed_states() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let pool = db.pool();
    publish_one(&store, event()).await;
    settle(&store, &claim_one(&store).await, processed(None)).await;
    publish_one(&store, keyed("k")).await;
    for (table, set) in [
        ("outbox_events", "lease_token = 't'"),
        ("outbox_events", "lease_expires_at = 1"),
        ("outbox_events", "claimed_by = 'a'"),
        (
            "outbox_events",
            "lease_token = 't', lease_expires_at = 1, claimed_by = 'a'",
        ),
        ("outbox_events", "attempts = -1"),
        ("outbox_events", "attempts = max_attempts + 1"),
        ("outbox_events", "max_attempts = 0"),
        ("outbox_events", "priority = 4"),
        ("outbox_events", "version = 0"),
        ("outbox_events", "failures = 'x'"),
        ("outbox_events", "failures = '{}'"),
        ("outbox_events", "due_at = 'soon'"),
        ("outbox_events_keys", "expires_at = 1"),
        ("outbox_events_keys", "state = 'processed'"),
        ("outbox_events_keys", "state = 'bored'"),
        ("outbox_events_keys", "state = 'dead_letter', output = '1'"),
        ("outbox_events_keys", "state = 'discarded'"),
        (
            "outbox_events_keys",
            "state = 'discarded', expires_at = 1, output = '1'",
        ),
        ("outbox_events_history", "state = 'dead_letter'"),
    ] {
        let error = sqlx::query(AssertSqlSafe(format!("UPDATE {table} SET {set}")))
            .execute(&pool)
            .await
            .expect_err(set);
        assert!(
            error.to_string().contains("onstraint") || error.to_string().contains("cannot store"),
            "{set}: {error}"
        );
    }
}
