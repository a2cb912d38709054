//! Taking an event back before it is handled.

use crate::event::EventId;
use crate::event_set::EventOf;
use crate::key::stored_key;
use crate::outbox::Outbox;
use crate::store::{EventRef, EventState, Existing, Store, StoreError};
use crate::transaction::OutboxTx;

/// What a cancellation found. It is true only once the transaction has committed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Cancellation {
    /// The event was waiting. No handler will be given it.
    Cancelled(EventId),
    /// A handler had been given it, and has it until it hears of this. Whatever it reports is
    /// refused, and no other attempt follows; what it has done outside of the outbox is done.
    CancelledInProgress(EventId),
    /// It had ended before, like this. Nothing was changed. A dead letter can be
    /// [discarded](crate::DeadLetters::discard).
    TooLate(EventId, EventState),
    /// There is no such event, or nothing of it is kept any more.
    NotFound,
}

impl Cancellation {
    fn of(found: Option<&Existing>) -> Self {
        match found {
            None => Self::NotFound,
            Some(&Existing { id, state, .. }) => match state {
                EventState::Pending | EventState::Failed => Self::Cancelled(id),
                EventState::InProgress => Self::CancelledInProgress(id),
                ended => Self::TooLate(id, ended),
            },
        }
    }
}

impl<S: Store, Set> Outbox<S, Set> {
    /// Cancels an event through the caller's transaction: it lives or dies with it.
    ///
    /// An event that is not settled is kept as [`Cancelled`](EventState::Cancelled) for its
    /// retention, and its dedup key for the key's: publishing the key again does not bring it back.
    /// One whose handler is running is cancelled too. The handler hears of it
    /// ([`Delivery::cancelled`](crate::Delivery::cancelled), and its future is dropped) when its
    /// process next extends the lease, within a third of its length.
    ///
    /// It waits for whoever is storing an outcome of the event. Running it twice is harmless.
    ///
    /// # Errors
    ///
    /// Returns the store's error. On PostgreSQL the caller's transaction is aborted then.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves it open whether the event was cancelled. Roll back.
    pub async fn cancel(
        &self,
        tx: &mut S::Tx<'_>,
        event: EventId,
    ) -> Result<Cancellation, StoreError> {
        let found = self.store().cancel(tx, &EventRef::Id(event)).await?;
        Ok(Cancellation::of(found.as_ref()))
    }

    /// Cancels the event of a type that holds a dedup key, as [`cancel`](Self::cancel) does.
    ///
    /// # Errors
    ///
    /// As [`cancel`](Self::cancel).
    ///
    /// # Cancel safety
    ///
    /// As [`cancel`](Self::cancel).
    pub async fn cancel_by_key<E: EventOf<Set>>(
        &self,
        tx: &mut S::Tx<'_>,
        dedup_key: impl Into<String>,
    ) -> Result<Cancellation, StoreError> {
        let event = by_key::<E>(dedup_key.into());
        let found = self.store().cancel(tx, &event).await?;
        Ok(Cancellation::of(found.as_ref()))
    }
}

impl<S: Store, Set> OutboxTx<S, Set> {
    /// Cancels an event in this transaction, as [`Outbox::cancel`] does.
    ///
    /// ```
    /// # use outbox_core::{Cancellation, EventId, Outbox, Store};
    /// # async fn f<S: Store>(outbox: Outbox<S>, reminder: EventId) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut tx = outbox.begin().await?;
    /// if let Cancellation::TooLate(_, state) = tx.cancel(reminder).await? {
    ///     println!("the reminder is {state} already");
    /// }
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// A handler of this process that is running it hears of it within seconds of the commit: a twelfth
    /// of the lease, and half a second.
    ///
    /// # Errors
    ///
    /// As [`Outbox::cancel`].
    ///
    /// # Cancel safety
    ///
    /// As [`Outbox::cancel`].
    pub async fn cancel(&mut self, event: EventId) -> Result<Cancellation, StoreError> {
        self.cancel_one(&EventRef::Id(event)).await
    }

    /// Cancels the event of a type that holds a dedup key, as [`cancel`](Self::cancel) does.
    ///
    /// # Errors
    ///
    /// As [`Outbox::cancel`].
    ///
    /// # Cancel safety
    ///
    /// As [`Outbox::cancel`].
    pub async fn cancel_by_key<E: EventOf<Set>>(
        &mut self,
        dedup_key: impl Into<String>,
    ) -> Result<Cancellation, StoreError> {
        self.cancel_one(&by_key::<E>(dedup_key.into())).await
    }

    async fn cancel_one(&mut self, event: &EventRef) -> Result<Cancellation, StoreError> {
        let store = self.outbox().store().clone();
        let found = store.cancel(self.parts()?.0, event).await?;
        let cancellation = Cancellation::of(found.as_ref());
        if let Cancellation::Cancelled(id) | Cancellation::CancelledInProgress(id) = cancellation {
            self.count_cancelled(id);
        }
        Ok(cancellation)
    }
}

fn by_key<E: crate::OutboxEvent>(dedup_key: String) -> EventRef {
    EventRef::Key {
        name: E::NAME.to_owned(),
        key: stored_key(dedup_key),
    }
}
