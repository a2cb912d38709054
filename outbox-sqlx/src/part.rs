//! A part of a caller's transaction: a savepoint, on either database.

use std::pin::Pin;

use outbox_core::store::{Part, StoreError};
use sqlx::{Database, Transaction};

/// A savepoint, as sqlx keeps it: dropped, it is rolled back before the next statement.
///
/// One that is dropped while it is being kept may have ended already. The rollback then fails, and
/// with it the whole transaction: nothing of it is kept by accident.
pub(crate) struct Savepoint<'c, DB: Database> {
    pub(crate) transaction: Transaction<'c, DB>,
    /// Turns what sqlx reports while doing something into what the framework branches on.
    pub(crate) failed: fn(&'static str, sqlx::Error) -> StoreError,
}

type Ending<'a> = Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send + 'a>>;

impl<DB: Database> Part<DB::Connection> for Savepoint<'_, DB> {
    fn connection(&mut self) -> &mut DB::Connection {
        &mut self.transaction
    }

    fn keep<'a>(self: Box<Self>) -> Ending<'a>
    where
        Self: 'a,
    {
        Box::pin(async move {
            let kept = self.transaction.commit().await;
            kept.map_err(|error| (self.failed)("keep a part of a transaction", error))
        })
    }

    fn undo<'a>(self: Box<Self>) -> Ending<'a>
    where
        Self: 'a,
    {
        Box::pin(async move {
            let undone = self.transaction.rollback().await;
            undone.map_err(|error| (self.failed)("undo a part of a transaction", error))
        })
    }
}
