//! A connection for one call: its transaction, its deadline, and what becomes of it afterwards.

use std::future::Future;
use std::time::Instant;

use outbox_core::store::{Pass, StoreError, StoreErrorKind};
use sqlx::pool::PoolConnection;
use sqlx::sqlite::SqlitePool;
use sqlx::{Connection, Sqlite, SqliteConnection, Transaction};

use super::SqliteStore;
use super::code::sqlite_error;

/// Takes the write lock at once. A deferred transaction takes it at its first write, and is refused
/// if somebody wrote after its first read, however long it would have waited.
pub(super) const BEGIN: &str = "BEGIN IMMEDIATE";

impl SqliteStore {
    /// Runs `work` in a write transaction of its own, within the deadline.
    pub(super) async fn write<T>(
        &self,
        doing: &'static str,
        work: impl AsyncFnOnce(&mut SqliteConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, StoreError> {
        let transaction = self.transaction(
            doing,
            End::Commit,
            async move |connection: &mut SqliteConnection| {
                work(connection)
                    .await
                    .map_err(|error| sqlite_error(doing, error))
            },
        );
        self.within(doing, transaction).await
    }

    /// Runs `work` as a chunk of a pass: a write transaction, whose statements SQLite stops at the
    /// pass's limit. That counts from when the write lock is had: the wait for it is nobody's long
    /// statement.
    ///
    /// The write lock of the file is the lock of every cadence, and who has it is waited for. So no
    /// other instance is ever at it: the answer is never `None`.
    pub(super) async fn write_in<T>(
        &self,
        pass: Pass,
        doing: &'static str,
        work: impl AsyncFnOnce(&mut SqliteConnection) -> Result<T, sqlx::Error>,
    ) -> Result<Option<T>, StoreError> {
        // An interrupted write is rolled back by SQLite itself, and its connection must be closed
        // then, which would be the end of a database in memory.
        let interrupts = !self.inner.in_memory;
        let work = async move |connection: &mut SqliteConnection| {
            if interrupts {
                stop_statements_at(connection, Instant::now() + pass.statement_limit).await?;
            }
            let answer = work(connection).await;
            if interrupts {
                // Before the commit, which is not to be stopped half way.
                connection.lock_handle().await?.remove_progress_handler();
            }
            answer
        };
        let transaction = self.transaction(
            doing,
            End::Commit,
            async move |connection: &mut SqliteConnection| {
                work(connection)
                    .await
                    .map_err(|error| sqlite_error(doing, error))
            },
        );
        self.within(doing, transaction).await.map(Some)
    }

    /// Runs `work` in a transaction that holds the write lock from its beginning.
    pub(super) async fn transaction<T>(
        &self,
        doing: &'static str,
        end: End,
        work: impl AsyncFnOnce(&mut SqliteConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let failed = |error| sqlite_error(doing, error);
        let mut lent = self.lend().await.map_err(failed)?;
        let mut tx = match lent.connection.begin_with(BEGIN).await {
            Ok(tx) => tx,
            Err(error) => {
                // SQLite's own answer, that somebody else is writing for instance, leaves nothing
                // behind on the connection.
                lent.keep |= matches!(error, sqlx::Error::Database(_));
                return Err(failed(error));
            }
        };
        let answer = work(&mut tx).await;
        let ended = match (&answer, end) {
            (Ok(_), End::Commit) => tx.commit().await,
            (Ok(_), End::Rollback) | (Err(_), _) => tx.rollback().await,
        };
        lent.keep |= ended.is_ok();
        // What made the work fail says more than that the rollback failed after it.
        let answer = answer?;
        ended.map_err(failed)?;
        Ok(answer)
    }

    /// Runs `read` on a connection of its own, within the deadline.
    pub(super) async fn read<T>(
        &self,
        doing: &'static str,
        read: impl AsyncFnOnce(&mut SqliteConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, StoreError> {
        let answer = async move {
            let mut lent = self.lend().await?;
            let answer = read(&mut lent.connection).await;
            lent.keep = true;
            answer
        };
        let answer = async move { answer.await.map_err(|error| sqlite_error(doing, error)) };
        self.within(doing, answer).await
    }

    async fn lend(&self) -> Result<Lent, sqlx::Error> {
        Ok(Lent {
            connection: self.inner.pool.acquire().await?,
            keep: self.inner.in_memory,
        })
    }

    /// Begins a transaction of the application.
    ///
    /// Where SQLite has rolled a transaction back by itself, sqlx goes on counting it, and whoever
    /// is given that connection next cannot begin. Our own transactions close such a connection;
    /// the pool's `begin` gives it back. So one of ours is tried, and then the pool once more.
    pub(super) async fn begin_for_caller(
        &self,
        doing: &'static str,
    ) -> Result<Transaction<'static, Sqlite>, StoreError> {
        let mut begun = self.inner.pool.begin_with(BEGIN).await;
        if matches!(begun, Err(sqlx::Error::InvalidSavePointStatement)) {
            let nothing = async |_: &mut SqliteConnection| Ok(());
            // What it answers does not matter: it met the connection, and closed it, or another.
            let _ = self.transaction(doing, End::Rollback, nothing).await;
            begun = self.inner.pool.begin_with(BEGIN).await;
        }
        begun.map_err(|error| sqlite_error(doing, error))
    }

    /// Gives `call` no longer than the deadline.
    pub(super) async fn within<T>(
        &self,
        doing: &'static str,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        tokio::time::timeout(self.inner.deadline, call)
            .await
            .unwrap_or_else(|elapsed| {
                Err(StoreError::new(StoreErrorKind::TimedOut, doing).with_source(elapsed))
            })
    }
}

/// Lets SQLite stop whatever statement is running on the connection at `end`.
///
/// Dropping the call would not: the connection's thread goes on, and so does the write lock.
async fn stop_statements_at(
    connection: &mut SqliteConnection,
    end: Instant,
) -> Result<(), sqlx::Error> {
    connection
        .lock_handle()
        .await?
        .set_progress_handler(STEPS_BETWEEN_LOOKS, move || Instant::now() < end);
    Ok(())
}

/// How many steps of SQLite's machine a statement runs between two looks at the clock: a fraction
/// of a millisecond.
const STEPS_BETWEEN_LOOKS: i32 = 10_000;

/// How a transaction ends whose work succeeded.
#[derive(Clone, Copy)]
pub(super) enum End {
    Commit,
    Rollback,
}

/// A connection that goes back to the pool only if what it was lent for was seen to end.
///
/// A deadline that elapses and a caller who goes away drop it in the middle of something. sqlx
/// then queues a rollback; but a connection that hangs has not run it yet, and one whose
/// transaction SQLite has already rolled back itself (a full disk) counts as inside a transaction
/// for ever. Closing it lets the pool open a good one.
struct Lent {
    connection: PoolConnection<Sqlite>,
    /// Also set where closing would be the end of the database itself.
    keep: bool,
}

impl Drop for Lent {
    fn drop(&mut self) {
        if !self.keep {
            self.connection.close_on_drop();
        }
    }
}

/// Whether the database lives only as long as its connections.
pub(super) fn is_in_memory(pool: &SqlitePool) -> bool {
    let options = pool.connect_options();
    let file = options.get_filename().to_string_lossy();
    file.is_empty() || file == ":memory:" || file.starts_with("file:sqlx-in-memory-")
}
