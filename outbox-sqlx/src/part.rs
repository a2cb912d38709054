//! A part of a caller's transaction: a savepoint, on either database.

use std::pin::Pin;
use std::task::{Context, Poll};

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

/// A future that is not simply dropped before its end.
///
/// sqlx's `begin`, dropped before it has an answer, undoes the transaction around the savepoint: what
/// the caller sends next would be in none, and kept one statement at a time. What is to be done with
/// it instead is for each database to say.
pub(crate) struct NeverDropped<F> {
    /// `None` once it has ended.
    future: Option<Pin<Box<F>>>,
    instead: fn(Pin<Box<F>>),
}

impl<F: Future> NeverDropped<F> {
    pub(crate) fn new(future: F, instead: fn(Pin<Box<F>>)) -> Self {
        Self {
            future: Some(Box::pin(future)),
            instead,
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
            (self.instead)(future);
        }
    }
}
