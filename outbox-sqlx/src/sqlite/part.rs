//! Parts of a caller's transaction: savepoints.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use outbox_core::store::{Part, StoreError};
use sqlx::{Connection, Sqlite, SqliteConnection, Transaction};

use super::code::sqlite_error;
use crate::part::Savepoint;

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
    Whole::new(connection.begin()).await
}

/// A future that is brought to its end where it would be dropped before it.
///
/// sqlx's `begin`, dropped before it has an answer, is undone twice: by the connection's thread, and
/// by the drop. In a transaction the second time undoes all of it. What the caller sends next would
/// be in none, and kept one statement at a time. The thread that is waited for has nothing else to
/// do, and sets a savepoint in microseconds.
struct Whole<F: Future> {
    /// `None` once it has ended.
    future: Option<Pin<Box<F>>>,
}

impl<F: Future> Whole<F> {
    fn new(future: F) -> Self {
        Self {
            future: Some(Box::pin(future)),
        }
    }
}

impl<F: Future> Future for Whole<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let Some(future) = &mut self.future else {
            return Poll::Pending;
        };
        let polled = future.as_mut().poll(context);
        if polled.is_ready() {
            self.future = None;
        }
        polled
    }
}

impl<F: Future> Drop for Whole<F> {
    fn drop(&mut self) {
        let Some(mut future) = self.future.take() else {
            return;
        };
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        while future.as_mut().poll(&mut context).is_pending() {
            std::thread::park();
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
