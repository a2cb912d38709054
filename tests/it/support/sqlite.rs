//! A SQLite database of its own for one test.

use std::path::{Path, PathBuf};
use std::time::Duration;

use outbox_sqlx::SqliteStore;
use sqlx::SqlitePool;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use tempfile::TempDir;

/// A database file, and a pool on it. The file is removed when this value is dropped.
pub(crate) struct SqliteDb {
    pool: SqlitePool,
    path: PathBuf,
    // A directory, because SQLite puts its log and its shared memory beside the file.
    _directory: TempDir,
}

impl SqliteDb {
    /// A database with the outbox installed.
    pub(crate) async fn new() -> Self {
        let db = Self::empty().await;
        prepare(&db.pool).await;
        db
    }

    /// A database with nothing in it.
    pub(crate) async fn empty() -> Self {
        let directory = tempfile::tempdir().expect("make a temporary directory");
        let path = directory.path().join("outbox.db");
        let pool = SqlitePoolOptions::new()
            .max_connections(4)
            .connect_with(Self::options_for(&path))
            .await
            .expect("open a new SQLite file");
        Self {
            pool,
            path,
            _directory: directory,
        }
    }

    /// A few connections, as an outbox should have them.
    pub(crate) fn pool(&self) -> SqlitePool {
        self.pool.clone()
    }

    /// The file, for another process.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// How [`pool`](Self::pool) opens it, for a pool that is to differ.
    pub(crate) fn options(&self) -> SqliteConnectOptions {
        Self::options_for(&self.path)
    }

    fn options_for(path: &Path) -> SqliteConnectOptions {
        SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            // With `Normal` a power cut can take the last commits back.
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(Duration::from_secs(5))
    }
}

/// Installs the outbox.
async fn prepare(pool: &SqlitePool) {
    SqliteStore::new(pool.clone())
        .migrate()
        .await
        .expect("migrate a new SQLite file");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::support::SqliteDb;

    #[tokio::test]
    async fn a_sqlite_database_is_durable_and_lets_readers_in() {
        let db = SqliteDb::new().await;
        let journal: String = sqlx::query_scalar("PRAGMA journal_mode")
            .fetch_one(&db.pool())
            .await
            .unwrap();
        let synchronous: i64 = sqlx::query_scalar("PRAGMA synchronous")
            .fetch_one(&db.pool())
            .await
            .unwrap();
        assert_eq!((journal.as_str(), synchronous), ("wal", 2));
    }

    #[tokio::test]
    async fn a_second_pool_sees_what_the_first_committed() {
        let db = SqliteDb::empty().await;
        sqlx::query("CREATE TABLE t (n INTEGER)")
            .execute(&db.pool())
            .await
            .unwrap();
        let other = SqlitePool::connect_with(db.options()).await.unwrap();
        let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM t")
            .fetch_one(&other)
            .await
            .unwrap();
        assert_eq!(rows, 0);
    }

    #[tokio::test]
    async fn nothing_is_left_of_a_dropped_sqlite_database() {
        let db = SqliteDb::new().await;
        let path = db.path().to_owned();
        assert!(path.exists());
        drop(db);
        assert!(!path.parent().unwrap().exists());
    }
}
