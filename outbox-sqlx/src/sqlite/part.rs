//! Parts of a caller's transaction: savepoints.

use std::pin::Pin;

use outbox_core::store::{Part, StoreError};
use sqlx::{Connection, Sqlite, SqliteConnection, Transaction};

use super::code::sqlite_error;

/// A savepoint, as sqlx keeps it: dropped, it is rolled back before the next statement.
struct SqlitePart<'c> {
    savepoint: Transaction<'c, Sqlite>,
}

/// Sets a savepoint. What sqlx does not know to be in a transaction, because its `BEGIN` was sent
/// as a statement, is refused by SQLite.
pub(super) async fn begin<'c>(
    connection: &'c mut SqliteConnection,
) -> Result<Box<dyn Part<SqliteConnection> + 'c>, StoreError> {
    let savepoint = connection.begin().await;
    let savepoint = savepoint.map_err(|error| sqlite_error("set a savepoint", error))?;
    Ok(Box::new(SqlitePart { savepoint }))
}

type Ending<'a> = Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send + 'a>>;

impl Part<SqliteConnection> for SqlitePart<'_> {
    fn connection(&mut self) -> &mut SqliteConnection {
        &mut self.savepoint
    }

    fn keep<'a>(self: Box<Self>) -> Ending<'a>
    where
        Self: 'a,
    {
        Box::pin(async move {
            let kept = self.savepoint.commit().await;
            kept.map_err(|error| sqlite_error("keep a part of a transaction", error))
        })
    }

    fn undo<'a>(self: Box<Self>) -> Ending<'a>
    where
        Self: 'a,
    {
        Box::pin(async move {
            let undone = self.savepoint.rollback().await;
            undone.map_err(|error| sqlite_error("undo a part of a transaction", error))
        })
    }
}
