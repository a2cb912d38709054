//! The schema, the view, and where a database can live.

use super::*;

#[tokio::test]
async fn ten_migrations_at_once_install_once() {
    let db = SqliteDb::new().await;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..10 {
        let path = db.path().to_owned();
        tasks.spawn(async move {
            // A pool each, as processes have.
            let store = SqliteStore::open(path).await.unwrap();
            let store = SqliteStore::builder(store.pool().clone())
                .table("at_once")
                .build()
                .unwrap();
            store.migrate().await.unwrap();
            store.migrate().await.unwrap();
            store.check().await.unwrap();
            n
        });
    }
    assert_eq!(tasks.join_all().await.len(), 10);
    let pool = db.pool();
    assert_eq!(count(&pool, "SELECT count(*) FROM at_once_schema").await, 1);
    assert_eq!(count(&pool, "SELECT count(*) FROM at_once_all").await, 0);
}

#[tokio::test]
async fn a_schema_that_is_missing_older_or_newer_is_named() {
    let db = SqliteDb::new().await;
    let pool = db.pool();
    let store = SqliteStore::builder(pool.clone())
        .table("fresh")
        .build()
        .unwrap();

    let error = store.check().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::SchemaMissing);
    assert!(error.to_string().contains("needs version 1"), "{error}");
    let error = store.claim(&request(1)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::SchemaMissing);

    store.migrate().await.unwrap();
    store.check().await.unwrap();
    for (version, kind) in [
        (0, StoreErrorKind::SchemaOlder),
        (2, StoreErrorKind::SchemaNewer),
    ] {
        execute(
            &pool,
            format!("UPDATE fresh_schema SET version = {version}"),
        )
        .await;
        let error = store.check().await.unwrap_err();
        assert_eq!(error.kind(), kind);
        let text = error.to_string();
        assert!(
            text.contains(&format!("version {version} is installed")),
            "{text}"
        );
        assert!(text.contains("needs version 1"), "{text}");
        assert!(!error.is_transient());
    }
    let error = store.migrate().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::SchemaNewer);
}

#[tokio::test]
async fn a_check_leaves_no_trace() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    store.check().await.unwrap();
    store.check().await.unwrap();
    assert_eq!(
        count(&db.pool(), "SELECT count(*) FROM outbox_events_all").await,
        0
    );
    assert_eq!(publish_one(&store, event()).await, 1);
}

#[tokio::test]
async fn a_read_only_database_is_denied() {
    let db = SqliteDb::new().await;
    installed(&db).await;
    let options = db.pool().connect_options().as_ref().clone().read_only(true);
    let store = SqliteStore::new(SqlitePool::connect_with(options).await.unwrap());
    let error = store.check().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Denied, "{error:?}");
}

#[tokio::test]
async fn several_outboxes_under_odd_names_live_in_one_file() {
    let db = SqliteDb::new().await;
    let names = [
        "outbox_events",
        "billing events",
        "a\"b'; DROP TABLE x; --",
        "größe",
        "{keys}",
        "select",
        "%_?1",
    ];
    for name in names {
        let store = SqliteStore::builder(db.pool()).table(name).build().unwrap();
        store.migrate().await.unwrap();
        store.check().await.unwrap();
        let row = publish_one(&store, keyed("k")).await;
        assert_eq!(row, 1, "{name}");
        let claimed = claim_one(&store).await;
        settle(&store, &claimed, processed(None)).await;
        existing(&publish(&store, &[keyed("k")]).await[0]);
        assert_eq!(record(&store, row).await.state, EventState::Processed);
    }
}

#[tokio::test]
async fn the_printed_sql_installs_what_migrate_would() {
    let db = SqliteDb::new().await;
    let store = SqliteStore::builder(db.pool())
        .table("by_hand")
        .build()
        .unwrap();
    let mut tx = store.begin().await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(store.migration_sql()))
        .execute(&mut *tx)
        .await
        .unwrap();
    store.commit(tx).await.unwrap();
    store.check().await.unwrap();
    store.migrate().await.unwrap();
}

#[tokio::test]
async fn two_installations_give_different_ids_and_a_renewed_one_new_ones() {
    let db = SqliteDb::new().await;
    let other = SqliteDb::new().await;
    let store = installed(&db).await;
    let mine = inserted(&publish(&store, &[event()]).await[0]);
    let theirs = inserted(&publish(&installed(&other).await, &[event()]).await[0]);
    assert_ne!(mine.installation(), theirs.installation());

    // Another process has the store open while it is renewed.
    let elsewhere = SqliteStore::open(db.path()).await.unwrap();
    store.renew_installation().await.unwrap();
    let renewed = claim_one(&elsewhere).await.id;
    assert_eq!(renewed.row(), mine.row());
    assert_ne!(renewed.installation(), mine.installation());
}

#[tokio::test]
async fn one_connection_in_memory_is_enough() {
    let pool = sqlx::sqlite::SqlitePoolOptions::new()
        .max_connections(1)
        .connect("sqlite::memory:")
        .await
        .unwrap();
    let store = SqliteStore::builder(pool)
        .statement_deadline(Duration::from_millis(100))
        .build()
        .unwrap();
    store.migrate().await.unwrap();
    let row = publish_one(&store, event()).await;

    // The application holds the connection: the relay waits, and the database is still there.
    let tx = store.begin().await.unwrap();
    let error = store.claim(&request(1)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TimedOut);
    store.rollback(tx).await.unwrap();
    assert_eq!(claim_one(&store).await.id.row(), row);
}

#[tokio::test]
async fn the_view_tells_the_story_in_words() {
    let db = SqliteDb::new().await;
    let store = installed(&db).await;
    let pool = db.pool();
    publish(&store, &vec![event(); 6]).await;
    let mut claimed = claim(&store, 5).await;
    claimed.sort_by_key(|claimed| claimed.id);
    settle(&store, &claimed[0], processed(Some("1"))).await;
    settle(&store, &claimed[1], dead("never")).await;
    settle(&store, &claimed[2], retry(LEASE, "no")).await;
    let expired = claimed[3].id.row();
    execute(
        &pool,
        format!("UPDATE outbox_events SET lease_expires_at = 1 WHERE id = {expired}"),
    )
    .await;
    let story: Vec<(String, String)> =
        sqlx::query_as("SELECT status, priority FROM outbox_events_all ORDER BY id")
            .fetch_all(&pool)
            .await
            .unwrap();
    let words: Vec<&str> = story.iter().map(|(status, _)| status.as_str()).collect();
    assert_eq!(
        words,
        [
            "processed",
            "dead_letter",
            "failed",
            "pending",
            "in_progress",
            "pending"
        ]
    );
    assert!(story.iter().all(|(_, priority)| priority == "normal"));

    let readable: (String, String, Option<String>) = sqlx::query_as(
        "SELECT created_utc, settled_utc, last_error FROM outbox_events_all WHERE dead_reason = 'permanent'",
    )
    .fetch_one(&pool)
    .await
    .unwrap();
    assert_eq!(readable.0.len(), "2026-01-31 12:00:00.000".len());
    assert!(readable.1 >= readable.0);
    assert_eq!(readable.2.as_deref(), Some("never"));
}
