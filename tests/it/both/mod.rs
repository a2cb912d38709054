//! The same scenarios on PostgreSQL and on SQLite: what an application sees, with the background
//! on its own thread, real connections and the databases' own clocks.
//!
//! A scenario is a function over a [`Database`]; [`on_both_databases!`] makes two tests of it.

mod cadences;
mod cancel;
mod costs;
mod dead_letters;
mod dispatch;
mod fan_out;
mod idempotency;
mod middleware;
mod order;
mod publish;
mod relay;
mod transactional;
mod uncommitted;
mod versions;

use std::future::Future;
use std::ops::DerefMut;
use std::time::Duration;

use outbox_core::{Outbox, OutboxBuilder, Store};
use outbox_sqlx::PgStore;
use outbox_sqlx::SqliteStore;
use sqlx::{PgConnection, SqliteConnection};

use crate::support::{PgDb, SqliteDb};

/// How long anything may take on a busy machine before a test gives up.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A database with an installed outbox and a table `orders (id bigint primary key, paid boolean)`.
pub(crate) trait Database: Send + Sync + Sized + 'static {
    type Store: Store;

    fn new() -> impl Future<Output = Self> + Send;

    /// A store with connections of its own, as another process has them.
    fn store(&self) -> Self::Store;

    /// Inserts an unpaid order through the caller's transaction. Fails if there is one already.
    fn insert_order(
        connection: &mut <Self::Store as Store>::Connection,
        id: i64,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    fn orders(&self) -> impl Future<Output = Vec<i64>> + Send;

    /// Runs a statement about row `$1` of the outbox on a connection of its own.
    fn execute(&self, sql: &'static str, row: i64) -> impl Future<Output = ()> + Send;

    /// How often each status occurs in the view for people, by status.
    fn summary(&self) -> impl Future<Output = Vec<(String, i64)>> + Send;

    /// The status of the event with this dedup key.
    fn status_of(&self, key: &str) -> impl Future<Output = Option<String>> + Send;

    fn outbox(&self) -> OutboxBuilder<Self::Store> {
        Outbox::builder(self.store())
    }

    fn expire_lease(&self, row: i64) -> impl Future<Output = ()> + Send {
        self.execute(Self::EXPIRE_LEASE, row)
    }

    fn make_due(&self, row: i64) -> impl Future<Output = ()> + Send {
        self.execute(Self::MAKE_DUE, row)
    }

    /// Ends the time in which a row is worth handling.
    fn expire(&self, row: i64) -> impl Future<Output = ()> + Send {
        self.execute(Self::EXPIRE, row)
    }

    /// Makes a dead letter two days older.
    fn age_dead_letter(&self, row: i64) -> impl Future<Output = ()> + Send {
        self.execute(Self::AGE_DEAD_LETTER, row)
    }

    const EXPIRE_LEASE: &'static str;
    const MAKE_DUE: &'static str;
    const EXPIRE: &'static str;
    const AGE_DEAD_LETTER: &'static str;
    const BREAK_PAYLOAD: &'static str;
}

pub(crate) struct Postgres(pub(crate) PgDb);

impl Database for Postgres {
    type Store = PgStore;

    const EXPIRE_LEASE: &'static str =
        "UPDATE outbox.outbox_events SET lease_expires_at = clock_timestamp() WHERE id = $1";
    const MAKE_DUE: &'static str = "UPDATE outbox.outbox_events SET due_at = clock_timestamp() \
         WHERE id = $1 AND due_at IS NOT NULL";
    const EXPIRE: &'static str = "UPDATE outbox.outbox_events SET expires_at = clock_timestamp() \
         WHERE id = $1 AND expires_at IS NOT NULL";
    const AGE_DEAD_LETTER: &'static str = "UPDATE outbox.outbox_events_dead \
         SET settled_at = settled_at - interval '2 days' WHERE id = $1";
    const BREAK_PAYLOAD: &'static str =
        "UPDATE outbox.outbox_events SET payload = '[null]' WHERE id = $1";

    async fn new() -> Self {
        let db = PgDb::new().await;
        sqlx::query("CREATE TABLE orders (id bigint PRIMARY KEY, paid boolean NOT NULL)")
            .execute(&db.pool())
            .await
            .unwrap();
        Self(db)
    }

    fn store(&self) -> PgStore {
        let pool = sqlx::postgres::PgPoolOptions::new().max_connections(5);
        PgStore::new(pool.connect_lazy_with(self.0.options()))
    }

    async fn insert_order(connection: &mut PgConnection, id: i64) -> Result<(), sqlx::Error> {
        let insert = sqlx::query("INSERT INTO orders VALUES ($1, false)").bind(id);
        insert.execute(connection).await.map(|_| ())
    }

    async fn orders(&self) -> Vec<i64> {
        let orders = sqlx::query_scalar("SELECT id FROM orders ORDER BY id");
        orders.fetch_all(&self.0.pool()).await.unwrap()
    }

    async fn execute(&self, sql: &'static str, row: i64) {
        sqlx::query(sql)
            .bind(row)
            .execute(&self.0.pool())
            .await
            .unwrap();
    }

    async fn summary(&self) -> Vec<(String, i64)> {
        let summary = "SELECT status, count(*) FROM outbox.outbox_events_all GROUP BY 1 ORDER BY 1";
        sqlx::query_as(summary)
            .fetch_all(&self.0.pool())
            .await
            .unwrap()
    }

    async fn status_of(&self, key: &str) -> Option<String> {
        let status = "SELECT status FROM outbox.outbox_events_all WHERE dedup_key = $1";
        let status = sqlx::query_scalar(status).bind(key);
        status.fetch_optional(&self.0.pool()).await.unwrap()
    }
}

pub(crate) struct Sqlite(pub(crate) SqliteDb);

impl Database for Sqlite {
    type Store = SqliteStore;

    const EXPIRE_LEASE: &'static str = "UPDATE outbox_events SET lease_expires_at = \
         CAST(unixepoch('subsec') * 1000000 AS INTEGER) - 1000 WHERE id = $1";
    const MAKE_DUE: &'static str = "UPDATE outbox_events SET due_at = \
         CAST(unixepoch('subsec') * 1000000 AS INTEGER) - 1000 \
         WHERE id = $1 AND due_at IS NOT NULL";
    const EXPIRE: &'static str = "UPDATE outbox_events SET expires_at = \
         CAST(unixepoch('subsec') * 1000000 AS INTEGER) - 1000 \
         WHERE id = $1 AND expires_at IS NOT NULL";
    const AGE_DEAD_LETTER: &'static str = "UPDATE outbox_events_dead \
         SET settled_at = settled_at - 2 * 86400000000 WHERE id = $1";
    const BREAK_PAYLOAD: &'static str = "UPDATE outbox_events SET payload = '[null]' WHERE id = $1";

    async fn new() -> Self {
        let db = SqliteDb::new().await;
        sqlx::query("CREATE TABLE orders (id INTEGER PRIMARY KEY, paid INTEGER NOT NULL) STRICT")
            .execute(&db.pool())
            .await
            .unwrap();
        Self(db)
    }

    fn store(&self) -> SqliteStore {
        let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(5);
        SqliteStore::new(pool.connect_lazy_with(self.0.options()))
    }

    async fn insert_order(connection: &mut SqliteConnection, id: i64) -> Result<(), sqlx::Error> {
        let insert = sqlx::query("INSERT INTO orders VALUES ($1, 0)").bind(id);
        insert.execute(connection).await.map(|_| ())
    }

    async fn orders(&self) -> Vec<i64> {
        let orders = sqlx::query_scalar("SELECT id FROM orders ORDER BY id");
        orders.fetch_all(&self.0.pool()).await.unwrap()
    }

    async fn execute(&self, sql: &'static str, row: i64) {
        sqlx::query(sql)
            .bind(row)
            .execute(&self.0.pool())
            .await
            .unwrap();
    }

    async fn summary(&self) -> Vec<(String, i64)> {
        let summary = "SELECT status, count(*) FROM outbox_events_all GROUP BY 1 ORDER BY 1";
        sqlx::query_as(summary)
            .fetch_all(&self.0.pool())
            .await
            .unwrap()
    }

    async fn status_of(&self, key: &str) -> Option<String> {
        let status = "SELECT status FROM outbox_events_all WHERE dedup_key = $1";
        let status = sqlx::query_scalar(status).bind(key);
        status.fetch_optional(&self.0.pool()).await.unwrap()
    }
}

/// Makes a test on PostgreSQL and one on SQLite of every scenario.
macro_rules! on_both_databases {
    ($($scenario:ident)+) => {
        mod postgres {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $scenario() {
                    let db = <$crate::both::Postgres as $crate::both::Database>::new().await;
                    $crate::support::within($crate::both::LIMIT, super::$scenario(&db)).await;
                }
            )+
        }

        mod sqlite {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $scenario() {
                    let db = <$crate::both::Sqlite as $crate::both::Database>::new().await;
                    $crate::support::within($crate::both::LIMIT, super::$scenario(&db)).await;
                }
            )+
        }
    };
}
pub(crate) use on_both_databases;

/// The connection inside a transaction of the store's own kind.
pub(crate) fn connection<'a, S: Store>(tx: &'a mut S::Tx<'_>) -> &'a mut S::Connection {
    tx.deref_mut()
}
