//! Parts of a caller's transaction: savepoints.

use std::pin::Pin;
use std::task::{Context, Poll};

use outbox_core::store::{Part, StoreError, StoreErrorKind};
use sqlx::{Connection, Executor, PgConnection};

use super::sqlstate::failed;
use crate::part::Savepoint;

const DOING: &str = "set a savepoint";

/// Sets a savepoint. Dropping the future half way leaves one that nobody goes back to, which changes
/// nothing.
pub(super) async fn begin<'c>(
    connection: &'c mut PgConnection,
) -> Result<Box<dyn Part<PgConnection> + 'c>, StoreError> {
    if !connection.is_in_transaction() {
        // sqlx would begin one, and to keep the part would be to commit everything.
        let why = "the connection is in no transaction that sqlx has begun";
        return Err(StoreError::new(StoreErrorKind::Other, DOING).with_source(why));
    }
    // When a SAVEPOINT fails, sqlx rolls the whole transaction back and forgets that there was one:
    // what the caller sends next would be kept, one statement at a time. In a transaction that an
    // error has aborted it always fails, so such a one is found out first.
    let usable = (&mut *connection).execute("SELECT").await;
    usable.map_err(|error| failed(DOING, error))?;
    let savepoint = NeverDropped::new(connection.begin()).await;
    Ok(Box::new(Savepoint {
        transaction: savepoint.map_err(|error| failed(DOING, error))?,
        failed,
    }))
}

/// A future that is forgotten where it would be dropped before its end.
///
/// sqlx's `begin`, dropped before it has an answer, undoes what it takes for the transaction it has
/// just begun: in a transaction, that is the whole of it. What the caller sends next would be in
/// none, and kept one statement at a time. Forgotten, all that is left is a savepoint on the server.
struct NeverDropped<F> {
    /// `None` once it has ended.
    future: Option<Pin<Box<F>>>,
}

impl<F: Future> NeverDropped<F> {
    fn new(future: F) -> Self {
        Self {
            future: Some(Box::pin(future)),
        }
    }
}

impl<F: Future> Future for NeverDropped<F> {
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

impl<F> Drop for NeverDropped<F> {
    fn drop(&mut self) {
        if let Some(future) = self.future.take() {
            std::mem::forget(future);
        }
    }
}
