//! Passes: work that one instance does at a time, in chunks.

use outbox_core::store::{Pass, StoreError, StoreErrorKind};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Executor, Row};
use tokio::time::{Instant, timeout_at};

use super::PgStore;
use super::query::Query;
use super::session::Own;
use super::sqlstate::failed;

/// Takes the lock of a cadence if it is free, and bounds the statements that follow.
///
/// - `try`: whoever does not get the lock leaves the work to whoever has it.
/// - `xact`: the lock ends with the chunk's transaction. A session lock would stay on a pooled
///   connection.
/// - The form with two arguments has a key space of its own, in which no single-argument lock of
///   the application can be.
const LOCK: &str = "
    SELECT
        pg_catalog.pg_try_advisory_xact_lock({namespace}, {id}),
        pg_catalog.set_config('statement_timeout', '{statement_timeout}', true)
";

/// One chunk of a pass: a transaction that has the cadence's lock.
///
/// Dropped without a commit, or after an error, it closes its connection, and with that the
/// transaction.
pub(super) struct Chunk<'s> {
    store: &'s PgStore,
    connection: Own,
    doing: &'static str,
    until: Instant,
}

impl<'s> Chunk<'s> {
    /// Begins a chunk, in one round trip. `None` if another instance has the lock.
    pub(super) async fn begin(
        store: &'s PgStore,
        pass: Pass,
        doing: &'static str,
    ) -> Result<Option<Self>, StoreError> {
        let until = Instant::now() + store.deadline();
        let connection = store.acquire(doing, until).await?;
        let mut chunk = Self {
            store,
            connection,
            doing,
            until,
        };
        let begun = chunk.send(begin_sql(store, pass)).await?;
        let locked = match begun.first() {
            Some(row) => row.try_get(0).map_err(|error| failed(doing, error))?,
            None => false,
        };
        if locked {
            return Ok(Some(chunk));
        }
        chunk.end("ROLLBACK").await?;
        Ok(None)
    }

    /// Asks one statement.
    pub(super) async fn ask(&mut self, query: Query) -> Result<Vec<PgRow>, StoreError> {
        let persistent = self.store.keeps_statements();
        let asked = query.fetch(self.connection.get(), persistent);
        match timeout_at(self.until, asked).await {
            Ok(answer) => answer.map_err(|error| failed(self.doing, error)),
            Err(_) => Err(StoreError::new(StoreErrorKind::TimedOut, self.doing)),
        }
    }

    pub(super) async fn commit(self) -> Result<(), StoreError> {
        self.end("COMMIT").await
    }

    async fn end(mut self, how: &str) -> Result<(), StoreError> {
        self.send(how.to_owned()).await?;
        self.connection.keep();
        Ok(())
    }

    /// Sends statements without arguments, in one message.
    async fn send(&mut self, sql: String) -> Result<Vec<PgRow>, StoreError> {
        let script = sqlx::raw_sql(AssertSqlSafe(sql));
        let sent = self.connection.get().fetch_all(script);
        match timeout_at(self.until, sent).await {
            Ok(answer) => answer.map_err(|error| failed(self.doing, error)),
            Err(_) => Err(StoreError::new(StoreErrorKind::TimedOut, self.doing)),
        }
    }
}

fn begin_sql(store: &PgStore, pass: Pass) -> String {
    let (namespace, id) = store.names().cadence_lock(pass.cadence);
    let limit = std::cmp::min(pass.statement_limit, store.deadline());
    // Zero would be no limit at all.
    let limit = std::cmp::max(limit.as_millis(), 1);
    let lock = LOCK
        .replace("{namespace}", &namespace.to_string())
        .replace("{id}", &id.to_string())
        .replace("{statement_timeout}", &limit.to_string());
    format!("{}; {lock}", store.begin_sql())
}
