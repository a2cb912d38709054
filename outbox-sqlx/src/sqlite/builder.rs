//! The settings of a store, and what they may be.

use std::time::Duration;

use outbox_core::store::{StoreError, StoreErrorKind};
use sqlx::sqlite::SqlitePool;

use super::sql::Table;
use super::{DEFAULT_DEADLINE, SqliteStore};

/// The settings of a [`SqliteStore`]. Made by [`SqliteStore::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct SqliteStoreBuilder {
    pool: SqlitePool,
    table: String,
    deadline: Duration,
}

impl SqliteStoreBuilder {
    pub(super) fn new(pool: SqlitePool) -> Self {
        Self {
            pool,
            table: Table::default().as_str().to_owned(),
            deadline: DEFAULT_DEADLINE,
        }
    }

    /// The table of unsettled events; all other names begin with it.
    ///
    /// 1 to 50 bytes without U+0000 that do not begin with `sqlite_`. It is quoted, so anything
    /// else may be in it. Defaults to `outbox_events`.
    pub fn table(mut self, name: impl Into<String>) -> Self {
        self.table = name.into();
        self
    }

    /// How long one call may take, the wait for a connection and for the write lock included.
    ///
    /// More than zero. The busy timeout of the pool's connections should be shorter, so that SQLite
    /// itself says why it did not get the lock. Defaults to 10 seconds.
    pub fn statement_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Makes the store. Nothing is sent to the database.
    ///
    /// # Errors
    ///
    /// An error of kind [`Config`](StoreErrorKind::Config) if a setting is outside its bounds.
    pub fn build(self) -> Result<SqliteStore, StoreError> {
        if self.deadline.is_zero() {
            return Err(StoreError::new(
                StoreErrorKind::Config,
                "the statement deadline is zero",
            ));
        }
        Ok(SqliteStore::assemble(
            self.pool,
            Table::new(&self.table)?,
            self.deadline,
        ))
    }
}
