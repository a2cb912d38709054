//! Rows, files and connections that fail.

use super::*;

#[tokio::test]
async fn a_batch_that_one_row_makes_fail_records_nothing() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    execute(
        &db.pool(),
        "CREATE TRIGGER picky BEFORE INSERT ON outbox_events_history WHEN NEW.output = 'bad'
        BEGIN SELECT RAISE(ABORT, 'not this one'); END",
    )
    .await;
    publish(&store, &[keyed("a"), keyed("b")]).await;
    let claimed = claim(&store, 2).await;
    let settlements: Vec<Settlement> = claimed
        .iter()
        .zip(["good", "bad"])
        .map(|(claimed, output)| Settlement {
            lease: claimed.lease(),
            outcome: processed(Some(output)),
        })
        .collect();

    let error = store.settle(&settlements).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Data);
    assert_eq!(
        store.settle(&settlements[..1]).await.unwrap(),
        [Settled::Recorded]
    );
    assert_eq!(
        settle(&store, &claimed[1], processed(None)).await,
        Settled::Recorded
    );
}

/// SQLite ends the transaction, and sqlx does not notice.
#[tokio::test]
async fn a_connection_whose_transaction_ended_behind_its_back_is_replaced() {
    let db = SqliteDb::new().await;
    installed(&db).await;
    let options = db.pool().connect_options().as_ref().clone();
    let pool = sqlx::sqlite::SqlitePoolOptions::new()
        .max_connections(1)
        .connect_with(options)
        .await
        .unwrap();
    let store = SqliteStore::new(pool);
    let spoil = async || {
        let mut tx = store.begin().await.unwrap();
        sqlx::query("UPDATE OR ROLLBACK outbox_events_schema SET one = 2")
            .execute(&mut *tx)
            .await
            .unwrap_err();
        store.commit(tx).await.unwrap_err();
    };

    spoil().await;
    publish_one(&store, event()).await;
    spoil().await;
    let error = store.claim(&request(1)).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    claim_one(&store).await;
}

#[tokio::test]
async fn a_file_that_cannot_be_opened_is_unreachable() {
    let db = SqliteDb::new().await;
    let nowhere = db.path().with_file_name("missing").join("outbox.db");
    let error = SqliteStore::open(&nowhere).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unreachable);
    assert!(error.to_string().contains("missing"), "{error}");
}

#[tokio::test]
async fn a_path_that_is_no_file_is_refused() {
    for path in ["", ":memory:"] {
        let error = SqliteStore::open(path).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Config);
    }
}

#[tokio::test]
async fn settings_outside_their_bounds_are_refused() {
    let db = SqliteDb::new().await;
    for builder in [
        SqliteStore::builder(db.pool()).table(""),
        SqliteStore::builder(db.pool()).table("sqlite_events"),
        SqliteStore::builder(db.pool()).table("a\0b"),
        SqliteStore::builder(db.pool()).table("x".repeat(51)),
        SqliteStore::builder(db.pool()).statement_deadline(Duration::ZERO),
    ] {
        let error = builder.build().unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Config, "{error}");
    }
}

#[tokio::test]
async fn dropped_calls_leave_no_transaction_behind() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let rows = publish_rows(&store, &vec![event(); 50]).await;
    for n in 0..200_u32 {
        let request = request(1);
        let call = store.claim(&request);
        // Polled a few times, then dropped wherever it has got to.
        let mut call = Box::pin(call);
        for _ in 0..n % 7 {
            let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(call.as_mut().poll(cx)));
            if polled.await.is_ready() {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
    // Every connection still writes, and what it writes stays.
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let store = store.clone();
        tasks.spawn(async move { publish_one(&store, event()).await });
    }
    let new = tasks.join_all().await;
    assert_eq!(new.iter().collect::<HashSet<_>>().len(), 8);
    for row in rows.into_iter().chain(new) {
        record(&store, row).await;
    }
}

/// Dropping the call would leave SQLite at it, with the write lock.
#[tokio::test]
async fn a_statement_of_a_pass_that_takes_too_long_is_stopped() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let row = publish_one(&store, event()).await;
    settle(&store, &claim_one(&store).await, processed(None)).await;
    for sql in [
        "UPDATE outbox_events_history SET expires_at = 1",
        "CREATE VIEW endless AS
            WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT 1 FROM n) SELECT i FROM n",
        "CREATE TRIGGER slow BEFORE DELETE ON outbox_events_history
            BEGIN SELECT count(*) FROM endless; END",
    ] {
        execute(&db.pool(), sql).await;
    }
    let hasty = Pass {
        statement_limit: Duration::from_millis(50),
        ..pass()
    };
    let error = store.purge(hasty, number(10)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TimedOut, "{error}");

    // The lock is free, whichever connection writes next, and a pass leaves no limit behind.
    execute(&db.pool(), "DROP TRIGGER slow").await;
    for _ in 0..8 {
        publish_one(&store, event()).await;
    }
    assert_eq!(record(&store, row).await.state, EventState::Processed);
    assert_eq!(store.purge(hasty, number(10)).await.unwrap(), Some(1));
}
