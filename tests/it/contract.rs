//! The store contract on both databases. (The store in memory passes it in its own crate.)

mod postgres {
    use std::time::Duration;

    use outbox_core::testing::contract::Harness;
    use outbox_sqlx::PgStore;
    use sqlx::PgPool;

    use crate::support::{PgDb, eventually};

    struct Postgres {
        db: PgDb,
        store: PgStore,
    }

    impl Postgres {
        async fn new() -> Self {
            let db = PgDb::new().await;
            let store = PgStore::new(db.pool());
            Self { db, store }
        }

        async fn execute(&self, sql: &'static str, row: i64) {
            let pool: PgPool = self.db.pool();
            sqlx::query(sql).bind(row).execute(&pool).await.unwrap();
        }
    }

    impl Harness for Postgres {
        type Store = PgStore;

        fn store(&self) -> &PgStore {
            &self.store
        }

        async fn another_store(&self) -> PgStore {
            PgStore::new(PgPool::connect_lazy_with(self.db.options()))
        }

        async fn expire_lease(&self, row: i64) {
            self.execute(
                "UPDATE outbox.outbox_events SET lease_expires_at = clock_timestamp() WHERE id = $1",
                row,
            )
            .await;
        }

        async fn make_due(&self, row: i64) {
            self.execute(
                "UPDATE outbox.outbox_events SET due_at = clock_timestamp() \
                 WHERE id = $1 AND due_at IS NOT NULL",
                row,
            )
            .await;
        }

        async fn expire_retention(&self, row: i64) {
            self.execute(
                "UPDATE outbox.outbox_events_history SET expires_at = clock_timestamp() \
                 WHERE id = $1",
                row,
            )
            .await;
            self.execute(
                "UPDATE outbox.outbox_events_keys SET expires_at = clock_timestamp() \
                 WHERE event_id = $1 AND expires_at IS NOT NULL",
                row,
            )
            .await;
        }

        async fn set_lease(&self, row: i64, remaining: Duration) {
            sqlx::query(
                "UPDATE outbox.outbox_events \
                 SET lease_expires_at = clock_timestamp() + make_interval(secs => $2) \
                 WHERE id = $1",
            )
            .bind(row)
            .bind(remaining.as_secs_f64())
            .execute(&self.db.pool())
            .await
            .unwrap();
        }

        async fn expire(&self, row: i64) {
            self.execute(
                "UPDATE outbox.outbox_events SET expires_at = clock_timestamp() WHERE id = $1",
                row,
            )
            .await;
        }

        async fn age_dead_letter(&self, row: i64, age: Duration) {
            sqlx::query(
                "UPDATE outbox.outbox_events_dead \
                 SET settled_at = settled_at - make_interval(secs => $2) WHERE id = $1",
            )
            .bind(row)
            .bind(age.as_secs_f64())
            .execute(&self.db.pool())
            .await
            .unwrap();
        }

        async fn end_dropped_exclusive(&self, _name: &str) {
            let pool = self.db.pool();
            eventually(Duration::from_secs(10), || async {
                // Those of two numbers, whose first one spells `ov`.
                sqlx::query_scalar(
                    "SELECT NOT EXISTS (SELECT FROM pg_locks JOIN pg_database AS db \
                     ON db.oid = database WHERE datname = current_database() \
                     AND locktype = 'advisory' AND objsubid = 2 \
                     AND classid::bigint >> 16 = x'6f76'::bigint)",
                )
                .fetch_one(&pool)
                .await
                .unwrap()
            })
            .await;
        }

        async fn publisher_waits(&self) {
            let pool = self.db.pool();
            eventually(Duration::from_secs(10), || async {
                sqlx::query_scalar(
                    "SELECT EXISTS (SELECT FROM pg_stat_activity \
                     WHERE datname = current_database() AND wait_event_type = 'Lock')",
                )
                .fetch_one(&pool)
                .await
                .unwrap()
            })
            .await;
        }
    }

    outbox_core::store_contract!(Postgres::new().await);
}

mod sqlite {
    use std::time::Duration;

    use outbox_core::testing::contract::Harness;
    use outbox_sqlx::SqliteStore;
    use sqlx::SqlitePool;
    use sqlx::query::Query;
    use sqlx::sqlite::SqliteArguments;

    use crate::support::SqliteDb;

    struct Sqlite {
        db: SqliteDb,
        store: SqliteStore,
    }

    impl Sqlite {
        async fn new() -> Self {
            let db = SqliteDb::new().await;
            let store = store_on(db.pool());
            Self { db, store }
        }

        /// In microseconds, as the columns have it; a millisecond back, because that is how fine
        /// SQLite's clock is.
        async fn execute(&self, sql: &'static str, row: i64) {
            self.run(sqlx::query(sql).bind(row)).await;
        }

        async fn execute_with(&self, sql: &'static str, row: i64, span: Duration) {
            let micros = i64::try_from(span.as_micros()).unwrap();
            self.run(sqlx::query(sql).bind(row).bind(micros)).await;
        }

        async fn run(&self, query: Query<'_, sqlx::Sqlite, SqliteArguments>) {
            let mut tx = self.db.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
            query.execute(&mut *tx).await.unwrap();
            tx.commit().await.unwrap();
        }
    }

    /// With a short deadline: a case in which a claim meets an open transaction waits for it.
    fn store_on(pool: SqlitePool) -> SqliteStore {
        SqliteStore::builder(pool)
            .statement_deadline(Duration::from_secs(3))
            .build()
            .unwrap()
    }

    impl Harness for Sqlite {
        type Store = SqliteStore;

        fn store(&self) -> &SqliteStore {
            &self.store
        }

        async fn another_store(&self) -> SqliteStore {
            store_on(SqlitePool::connect_lazy_with(self.db.options()))
        }

        async fn expire_lease(&self, row: i64) {
            self.execute(
                "UPDATE outbox_events SET lease_expires_at = \
                 CAST(unixepoch('subsec') * 1000000 AS INTEGER) - 1000 WHERE id = ?1",
                row,
            )
            .await;
        }

        async fn make_due(&self, row: i64) {
            self.execute(
                "UPDATE outbox_events SET due_at = \
                 CAST(unixepoch('subsec') * 1000000 AS INTEGER) - 1000 \
                 WHERE id = ?1 AND due_at IS NOT NULL",
                row,
            )
            .await;
        }

        async fn expire_retention(&self, row: i64) {
            self.execute(
                "UPDATE outbox_events_history SET expires_at = \
                 CAST(unixepoch('subsec') * 1000000 AS INTEGER) - 1000 WHERE id = ?1",
                row,
            )
            .await;
            self.execute(
                "UPDATE outbox_events_keys SET expires_at = \
                 CAST(unixepoch('subsec') * 1000000 AS INTEGER) - 1000 \
                 WHERE event_id = ?1 AND expires_at IS NOT NULL",
                row,
            )
            .await;
        }

        async fn set_lease(&self, row: i64, remaining: Duration) {
            self.execute_with(
                "UPDATE outbox_events SET lease_expires_at = \
                 CAST(unixepoch('subsec') * 1000000 AS INTEGER) + ?2 \
                 WHERE id = ?1 AND lease_token IS NOT NULL",
                row,
                remaining,
            )
            .await;
        }

        async fn expire(&self, row: i64) {
            self.execute(
                "UPDATE outbox_events SET expires_at = \
                 CAST(unixepoch('subsec') * 1000000 AS INTEGER) - 1000 WHERE id = ?1",
                row,
            )
            .await;
        }

        async fn age_dead_letter(&self, row: i64, age: Duration) {
            self.execute_with(
                "UPDATE outbox_events_dead SET settled_at = settled_at - ?2 WHERE id = ?1",
                row,
                age,
            )
            .await;
        }

        async fn end_dropped_exclusive(&self, name: &str) {
            let query = sqlx::query(
                "UPDATE outbox_events_locks SET expires_at = \
                 CAST(unixepoch('subsec') * 1000000 AS INTEGER) - 1000 WHERE name = ?1",
            )
            .bind(name);
            self.run(query).await;
        }
    }

    outbox_core::store_contract!(Sqlite::new().await);
}
