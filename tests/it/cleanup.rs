//! A million settled rows are removed under load: no statement is long, and no publisher waits.
//!
//! What bounds them here is the databases themselves. The relay has them cancel any statement of
//! the pass that takes longer than 200 ms, and the pass would then be cut short; the publishers'
//! sessions on PostgreSQL give up a lock they do not get in a tenth of a second.

use std::time::Duration;

use outbox_core::{Cadence, HandlerError, Outbox, Store};
use outbox_sqlx::{PgStore, SqliteStore};
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::SqlitePoolOptions;
use sqlx::{AssertSqlSafe, Executor};
use tokio::sync::{mpsc, watch};

use crate::events::Ticked;
use crate::support::{PgDb, SqliteDb, within};

/// The longest that a statement of the pass may take.
const STATEMENT: Duration = Duration::from_millis(200);

/// How long the whole may take on a busy machine before the test gives up.
const LIMIT: Duration = Duration::from_secs(300);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_million_settled_rows_are_cleaned_up_under_load_on_postgresql() {
    let db = PgDb::new().await;
    // Half a million whose day is past, half a million of today, and as many keys as can wait.
    let fill = "
        SET TimeZone = 'UTC';
        DO $$ DECLARE day date := current_date - 3; BEGIN
            EXECUTE format(
                'CREATE TABLE outbox.%I PARTITION OF outbox.outbox_events_history
                     FOR VALUES FROM (%L) TO (%L)',
                'outbox_events_history_' || to_char(day, 'YYYYMMDD'),
                day::timestamptz, (day + 1)::timestamptz);
        END $$;
        INSERT INTO outbox.outbox_events_history
            (id, state, name, version, payload, priority, attempts, max_attempts, created_at,
             settled_at, expires_at)
        SELECT 100000000 + n, 'processed', 'ticked', 1, '{\"n\":1}', 1, 1, 5, now(), now(),
            CASE WHEN n > 500000 THEN (current_date - 3)::timestamptz
                 ELSE now() - interval '1 minute' END + n * interval '1 microsecond'
        FROM generate_series(1, 1000000) AS n;
        INSERT INTO outbox.outbox_events_keys (name, key, event_id, retention, state, expires_at)
        SELECT 'ticked', n::text, 100000000 + n, '1 day', 'processed', now() - interval '1 minute'
        FROM generate_series(1, 100000) AS n;
        RESET TimeZone";
    let publishers = PgPoolOptions::new()
        .max_connections(4)
        .connect_lazy_with(db.options().options([("lock_timeout", "100ms")]));
    let store = PgStore::new(publishers);
    within(LIMIT, async {
        db.pool().execute(AssertSqlSafe(fill)).await.unwrap();
        let purged = clean_up(store).await;
        assert!((500_000..=600_000).contains(&purged.rows), "{purged:?}");
        assert!(purged.partitions >= 1, "{purged:?}");
        let left: i64 = sqlx::query_scalar(
            "SELECT (SELECT count(*) FROM outbox.outbox_events_history WHERE expires_at < now())
                + (SELECT count(*) FROM outbox.outbox_events_keys)",
        )
        .fetch_one(&db.pool())
        .await
        .unwrap();
        assert_eq!(left, 0);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_million_settled_rows_are_cleaned_up_under_load_on_sqlite() {
    let db = SqliteDb::new().await;
    let fill = "
        WITH RECURSIVE numbers (n) AS (
            SELECT 100000001 UNION ALL SELECT n + 1 FROM numbers WHERE n < 101000000
        )
        INSERT INTO outbox_events_history
            (id, state, name, version, payload, priority, attempts, max_attempts, created_at,
             settled_at, expires_at, failures)
        SELECT n, 'processed', 'ticked', 1, '{\"n\":1}', 1, 1, 5, 1, 1, n, '[]' FROM numbers";
    // There is one writer at a time. The pass leaves the others every other turn; on a machine that
    // is busy with more than this test, one can come late all the same.
    let publishers = SqlitePoolOptions::new()
        .max_connections(6)
        .connect_lazy_with(db.options().busy_timeout(LIMIT / 5));
    let store = SqliteStore::builder(publishers)
        .statement_deadline(LIMIT / 4)
        .build()
        .unwrap();
    within(LIMIT, async {
        store.migrate().await.unwrap();
        db.pool().execute(fill).await.unwrap();
        let purged = clean_up(store).await;
        assert!((500_000..=1_000_000).contains(&purged.rows), "{purged:?}");
        let left: i64 =
            sqlx::query_scalar("SELECT count(*) FROM outbox_events_history WHERE id > 100000000")
                .fetch_one(&db.pool())
                .await
                .unwrap();
        assert_eq!(left, 0);
    })
    .await;
}

#[derive(Debug)]
struct Purged {
    rows: u64,
    partitions: u64,
}

/// Runs one pass of maintenance while four publishers publish as fast as they can and a relay
/// handles what they publish.
async fn clean_up<S: Store>(store: S) -> Purged {
    let (done, mut handled) = mpsc::unbounded_channel();
    let outbox = Outbox::builder(store)
        .on(move |event: Ticked| {
            let _ = done.send(event.n);
            async { Ok::<_, HandlerError>(()) }
        })
        .build()
        .unwrap();
    let relay = outbox
        .relay()
        .pass_statement_limit(Cadence::Maintenance, STATEMENT)
        .pass_statement_limit(Cadence::Sweep, STATEMENT)
        .start()
        .await
        .unwrap();
    let (stop, stopped) = watch::channel(false);
    let publishers: Vec<_> = (0..4)
        .map(|_| tokio::spawn(publish_until(outbox.clone(), stopped.clone())))
        .collect();

    let mut purged = Purged {
        rows: 0,
        partitions: 0,
    };
    // A regular first sweep may take its share before, and another pass finds what is left.
    loop {
        let report = relay.pass(Cadence::Maintenance).await.unwrap();
        purged.rows += report.purged;
        purged.partitions += report.partitions;
        if report.purged == 0 && !report.stood_down {
            break;
        }
    }
    stop.send(true).unwrap();
    let mut published = 0;
    for publisher in publishers {
        published += publisher.await.unwrap();
    }
    for _ in 0..published {
        handled.recv().await.unwrap();
    }
    relay.shutdown(Duration::from_secs(30)).await.unwrap();
    assert!(handled.try_recv().is_err(), "an event ran twice");
    assert!(published > 100, "{published} is no load");
    purged
}

/// Publishes, one event a transaction. An error, a lock that was not had in time among them, fails
/// the test.
async fn publish_until<S: Store>(outbox: Outbox<S>, stopped: watch::Receiver<bool>) -> u64 {
    let mut n = 0;
    while !*stopped.borrow() {
        let mut tx = outbox.begin().await.unwrap();
        let _ = tx.publish(&Ticked { n }).await.unwrap();
        tx.commit().await.unwrap();
        n += 1;
    }
    n
}
