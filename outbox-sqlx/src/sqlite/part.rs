//! Parts of a caller's transaction: savepoints.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};
use std::thread::Thread;

use outbox_core::store::{Part, StoreError};
use sqlx::{Connection, Sqlite, SqliteConnection, Transaction};

use super::code::sqlite_error;
use crate::part::{NeverDropped, Savepoint};

/// Sets a savepoint. What sqlx does not know to be in a transaction, because its `BEGIN` was sent
/// as a statement, is refused by SQLite.
pub(super) async fn begin<'c>(
    connection: &'c mut SqliteConnection,
) -> Result<Box<dyn Part<SqliteConnection> + 'c>, StoreError> {
    let savepoint = savepoint(connection).await;
    Ok(Box::new(Savepoint {
        transaction: savepoint.map_err(|error| sqlite_error("set a savepoint", error))?,
        failed: |doing, error| sqlite_error(doing, error),
    }))
}

/// A savepoint of sqlx's, whose beginning may be dropped.
pub(super) async fn savepoint(
    connection: &mut SqliteConnection,
) -> Result<Transaction<'_, Sqlite>, sqlx::Error> {
    NeverDropped::new(connection.begin(), finish).await
}

/// Brings a future to its end here and now.
///
/// Where a `begin` would be dropped: the connection's thread would undo it, and the drop once more.
/// That thread has nothing else to do, and sets a savepoint in microseconds.
fn finish<F: Future>(mut future: Pin<Box<F>>) {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    while future.as_mut().poll(&mut context).is_pending() {
        std::thread::park();
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
