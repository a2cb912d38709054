//! Counting: near the truth, at a cost that does not grow.

use super::*;

async fn fill(pool: &PgPool, rows: u32) {
    run(
        pool,
        &format!(
            "INSERT INTO outbox.outbox_events
                 (name, version, payload, priority, max_attempts, retention, due_at)
             SELECT
                 CASE n % 4 WHEN 0 THEN 'alert.raised' ELSE '{NAME}' END, 1,
                 '{{}}', n % 4, 5, interval '0',
                 CASE WHEN n % 2 = 0 THEN now() + interval '1 hour' END
             FROM generate_series(1, {rows}) AS n"
        ),
    )
    .await;
}

/// How many pages the statement touches.
async fn pages(store: &PgStore) -> u64 {
    let mut session = session(store, "force_generic_plan", "stats", "").await;
    let explain = "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) EXECUTE it";
    let rows = session.fetch_all(explain).await.unwrap();
    let plan: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    // The first one is that of the whole statement.
    let buffers = plan.iter().find(|line| line.contains("Buffers: shared"));
    let buffers = buffers.unwrap_or_else(|| panic!("{plan:#?}"));
    let mut pages = 0;
    for word in buffers.split_whitespace() {
        for kind in ["hit=", "read="] {
            if let Some(n) = word.strip_prefix(kind) {
                pages += n.parse::<u64>().unwrap();
            }
        }
    }
    pages
}

#[tokio::test]
async fn a_large_outbox_is_counted_from_a_sample() {
    let (_db, store) = installed().await;
    fill(store.pool(), 300_000).await;
    let size = "SELECT pg_relation_size('outbox.outbox_events') / 8192";
    assert!(number(store.pool(), size).await > 8_000);

    let stats = store.stats().await.unwrap();
    assert!(!stats.exact);
    assert!(stats.oldest_due.is_some());
    let near = |count: u64, truth: u64| {
        assert!(
            count.abs_diff(truth) < truth / 5,
            "{count} is not near {truth}: {stats:?}"
        );
    };
    near(stats.events["alert.raised"].waiting, 75_000);
    near(stats.events[NAME].waiting, 75_000);
    near(stats.events[NAME].due, 150_000);
    // Of more than 8,000: the sample, and the heads of the indexes.
    let pages = pages(&store).await;
    assert!(pages < 7_000, "{pages} pages");
}

#[tokio::test]
async fn a_small_outbox_is_counted_exactly() {
    let (_db, store) = installed().await;
    fill(store.pool(), 2_000).await;
    let stats = store.stats().await.unwrap();
    assert!(stats.exact);
    assert_eq!(stats.events["alert.raised"].waiting, 500);
    assert_eq!(stats.events[NAME].waiting, 500);
    assert_eq!(stats.events[NAME].due, 1_000);
}

#[tokio::test]
async fn counting_keeps_to_its_indexes_in_every_state_of_the_table() {
    let (_db, store) = installed().await;
    for state in STATES {
        run(store.pool(), state).await;
        let mut session = session(&store, "force_generic_plan", "stats", "").await;
        let rows = session.fetch_all("EXPLAIN EXECUTE it").await.unwrap();
        let plan: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        let plan = plan.join("\n");
        assert!(!plan.contains("Seq Scan"), "{state}:\n{plan}");
        assert!(!plan.contains("Bitmap"), "{state}:\n{plan}");
        for index in ["outbox_events_ready", "outbox_events_waiting"] {
            assert_eq!(plan.matches(index).count(), 4, "{state}:\n{plan}");
        }
    }
}
