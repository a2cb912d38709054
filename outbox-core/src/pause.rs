//! Pausing events and handlers on all instances, and resuming them.

use std::fmt;

use crate::outbox::Outbox;
use crate::store::{Pause, PauseRef, Store, StoreError};

/// Pauses and resumes: what [`Outbox::pauses`] gives.
///
/// A pause is kept in the database and holds for every instance, also for those that start later,
/// until it is resumed. From the moment it is stored no claim takes an event of what is paused, and
/// no inline dispatch starts one; what runs by then may finish. Nothing is lost and nothing is
/// charged: its events wait.
///
/// Names are those of events and handlers as they are stored. A pause of an event that this process
/// has a handler for includes its former names.
///
/// ```
/// # use outbox_core::{Outbox, OutboxEvent, Store};
/// # async fn f<S: Store, OrderPaid: OutboxEvent>(outbox: Outbox<S>) -> Result<(), Box<dyn std::error::Error>> {
/// outbox.pauses().pause(OrderPaid::NAME).await?;
/// for pause in outbox.pauses().list().await? {
///     println!("{} is paused since {:?}", pause.of.name, pause.since);
/// }
/// outbox.pauses().resume(OrderPaid::NAME).await?;
/// # Ok(()) }
/// ```
pub struct Pauses<S: Store> {
    outbox: Outbox<S>,
}

impl<S: Store, Set> Outbox<S, Set> {
    /// Pauses events and handlers on all instances, and resumes them.
    #[must_use]
    pub fn pauses(&self) -> Pauses<S> {
        Pauses {
            outbox: self.untyped(),
        }
    }
}

impl<S: Store> Pauses<S> {
    /// Pauses an event, with all its handlers. Answers whether it was not paused before.
    ///
    /// # Errors
    ///
    /// Returns the store's error.
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves it open whether it is paused. Running it twice is harmless.
    pub async fn pause(&self, event: &str) -> Result<bool, StoreError> {
        self.set(event, None, true).await
    }

    /// Pauses one handler of an event; its other handlers go on. Answers whether it was not paused
    /// before.
    ///
    /// # Errors
    ///
    /// As [`pause`](Self::pause).
    ///
    /// # Panics
    ///
    /// As [`pause`](Self::pause).
    ///
    /// # Cancel safety
    ///
    /// As [`pause`](Self::pause).
    pub async fn pause_handler(&self, event: &str, handler: &str) -> Result<bool, StoreError> {
        self.set(event, Some(handler), true).await
    }

    /// Resumes an event. A handler of it that was paused by itself stays so. Answers whether it was
    /// paused.
    ///
    /// # Errors
    ///
    /// As [`pause`](Self::pause).
    ///
    /// # Panics
    ///
    /// As [`pause`](Self::pause).
    ///
    /// # Cancel safety
    ///
    /// As [`pause`](Self::pause).
    pub async fn resume(&self, event: &str) -> Result<bool, StoreError> {
        self.set(event, None, false).await
    }

    /// Resumes one handler of an event. Answers whether it was paused.
    ///
    /// # Errors
    ///
    /// As [`pause`](Self::pause).
    ///
    /// # Panics
    ///
    /// As [`pause`](Self::pause).
    ///
    /// # Cancel safety
    ///
    /// As [`pause`](Self::pause).
    pub async fn resume_handler(&self, event: &str, handler: &str) -> Result<bool, StoreError> {
        self.set(event, Some(handler), false).await
    }

    /// Lists what is paused, by event name and handler.
    ///
    /// # Errors
    ///
    /// As [`pause`](Self::pause).
    ///
    /// # Panics
    ///
    /// As [`pause`](Self::pause).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing but the answer.
    pub async fn list(&self) -> Result<Vec<Pause>, StoreError> {
        let asked = |store: S| async move { store.paused().await };
        self.outbox.ask_alone(asked).await
    }

    async fn set(
        &self,
        event: &str,
        handler: Option<&str>,
        paused: bool,
    ) -> Result<bool, StoreError> {
        let mut changed = false;
        for name in self.outbox.registry().names_of(event) {
            let pause = PauseRef {
                name,
                handler: handler.map(str::to_owned),
            };
            changed |= self
                .outbox
                .ask_alone(move |store| async move { store.set_paused(&pause, paused).await })
                .await?;
        }
        if !paused {
            self.outbox.wake();
        }
        Ok(changed)
    }
}

impl<S: Store> fmt::Debug for Pauses<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pauses").finish_non_exhaustive()
    }
}
