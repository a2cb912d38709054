//! Exclusive locks: one instance has one, for longer than a transaction.
//!
//! A session has the lock, so it has a connection to itself. One of a pool would be handed on with
//! the lock still on it, and be given away while the lock is had. The server frees the lock when
//! the session ends: at once when the process dies, and within half a minute when its host does.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use outbox_core::store::{ExclusiveLock, StoreError, StoreErrorKind};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, Row};
use tokio::time::timeout;

use super::PgStore;
use super::query::Query;
use super::session::session;
use super::sqlstate::failed;

const DOING: &str = "take an exclusive lock";

/// Takes the lock `($1, $2)` if it is free, and lets `pg_stat_activity` say that it is `$3` who
/// has it.
pub(super) const TRY: &str = "
    SELECT
        pg_catalog.pg_try_advisory_lock($1, $2),
        pg_catalog.set_config('application_name', 'outbox ' || $3, false)
";

/// As `TRY`, in a transaction that lasts as long as the lock: behind a pooler nothing else keeps
/// its server.
///
/// - It takes back what would end such a transaction. `transaction_timeout` came with
///   PostgreSQL 17, so it is set where it is.
/// - It has no snapshot and no transaction id while it waits, so that it keeps no vacuum from its
///   work.
pub(super) const TRY_IN_TRANSACTION: &str = "
    SELECT
        pg_catalog.pg_try_advisory_xact_lock($1, $2),
        pg_catalog.set_config('application_name', 'outbox ' || $3, true),
        (
            SELECT count(pg_catalog.set_config(name, '0', true))
            FROM pg_catalog.pg_settings
            WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')
        )
";

/// Says whether this session has the lock `($1, $2)`.
///
/// - It asks for the lock and not only for an answer: where a pooler hands on a session that was
///   thought to be our own, the answer comes from another one.
/// - `objsubid = 2` is the form with two arguments, and its numbers are shown without a sign.
pub(super) const IS_HAD: &str = "
    SELECT FROM pg_catalog.pg_locks
    WHERE locktype = 'advisory'
    AND pid = pg_catalog.pg_backend_pid()
    AND classid = $1::bigint::oid
    AND objid = $2::bigint::oid
    AND objsubid = 2
    AND granted
";

/// Frees the lock `($1, $2)`.
pub(super) const FREE: &str = "SELECT pg_catalog.pg_advisory_unlock($1, $2)";

/// - A server asks a silent host after 10 seconds whether it is there, and gives it up 15 later.
/// - Nothing else is idle for as long as this session.
const KEEPALIVE: &str = "
    SET tcp_keepalives_idle = 10;
    SET tcp_keepalives_interval = 5;
    SET tcp_keepalives_count = 3;
    SET idle_session_timeout = 0
";

/// An exclusive lock on PostgreSQL, on a connection of its own.
///
/// Dropping it closes the connection, and the server frees the lock as soon as it notices. The same
/// becomes of it when a call of one of its methods is dropped half way.
pub struct PgExclusive {
    store: PgStore,
    /// `None` once the connection failed: with its session the lock is gone.
    connection: Option<PgConnection>,
    lock: (i32, i32),
}

impl fmt::Debug for PgExclusive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgExclusive").finish_non_exhaustive()
    }
}

pub(super) async fn try_exclusive(
    store: &PgStore,
    name: &str,
    instance: &str,
) -> Result<Option<PgExclusive>, StoreError> {
    let lock = store.names().exclusive_lock(name);
    let sql = if store.is_behind_pooler() {
        &store.sql().exclusive_try_in_transaction
    } else {
        &store.sql().exclusive_try
    };
    let take = Query::new(sql).bind(lock.0).bind(lock.1).bind(instance);
    let taking = async {
        let mut connection = connect(store).await?;
        let rows = take.fetch(&mut connection, false).await?;
        let had = match rows.first() {
            Some(row) => row.try_get(0)?,
            None => false,
        };
        if had {
            return Ok(Some(connection));
        }
        connection.close().await?;
        Ok(None)
    };
    let connection = within(store.deadline(), DOING, taking).await?;
    Ok(connection.map(|connection| PgExclusive {
        store: store.clone(),
        connection: Some(connection),
        lock,
    }))
}

async fn connect(store: &PgStore) -> Result<PgConnection, sqlx::Error> {
    let options = store.pool().connect_options();
    let mut connection = PgConnection::connect_with(&options).await?;
    let settings = if store.is_behind_pooler() {
        store.begin_sql()
    } else {
        format!("{}; {KEEPALIVE}", session(store.deadline())).into()
    };
    let settings = sqlx::raw_sql(AssertSqlSafe(settings));
    connection.execute(settings).await?;
    Ok(connection)
}

impl ExclusiveLock for PgExclusive {
    /// Whatever keeps the connection from answering in time is a lost lock: the server may have
    /// ended the session already, and it will when the connection is closed.
    async fn keep(&mut self) -> Result<bool, StoreError> {
        // Taken out, so that it is closed if this is dropped half way.
        let Some(mut connection) = self.connection.take() else {
            return Ok(false);
        };
        let doing = "keep an exclusive lock";
        let had = self.fetch(&mut connection, self.is_had(), doing).await;
        if had.is_ok_and(|rows| !rows.is_empty()) {
            self.connection = Some(connection);
        }
        Ok(self.connection.is_some())
    }

    async fn release(mut self) -> Result<(), StoreError> {
        let Some(mut connection) = self.connection.take() else {
            return Ok(());
        };
        let doing = "free an exclusive lock";
        if self.store.is_behind_pooler() {
            let freed = async { connection.execute("ROLLBACK").await.map(drop) };
            within(self.store.deadline(), doing, freed).await?;
        } else {
            self.fetch(&mut connection, self.free(), doing).await?;
        }
        within(self.store.deadline(), doing, connection.close()).await
    }
}

impl PgExclusive {
    fn is_had(&self) -> Query {
        let unsigned = |number: i32| i64::from(number.cast_unsigned());
        Query::new(&self.store.sql().exclusive_is_had)
            .bind(unsigned(self.lock.0))
            .bind(unsigned(self.lock.1))
    }

    fn free(&self) -> Query {
        Query::new(&self.store.sql().exclusive_free)
            .bind(self.lock.0)
            .bind(self.lock.1)
    }

    async fn fetch(
        &self,
        connection: &mut PgConnection,
        query: Query,
        doing: &'static str,
    ) -> Result<Vec<PgRow>, StoreError> {
        let asked = query.fetch(connection, self.store.keeps_statements());
        within(self.store.deadline(), doing, asked).await
    }
}

async fn within<T>(
    deadline: Duration,
    doing: &'static str,
    work: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, StoreError> {
    match timeout(deadline, work).await {
        Ok(result) => result.map_err(|error| failed(doing, error)),
        Err(_) => Err(StoreError::new(StoreErrorKind::TimedOut, doing)),
    }
}
