//! What has become of an event, typed, and waiting for its end.

use std::fmt;

use serde::de::DeserializeOwned;

use crate::event_set::EventOf;
use crate::outbox::Outbox;
use crate::publish::Published;
use crate::store::{EventState, Store, StoreError, StoreErrorKind};

/// What has become of an event, with what its handler returned.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Progress<O> {
    /// It waits for its handler, or for the next attempt.
    Waiting,
    /// A handler has been given it.
    InProgress,
    /// Its handler succeeded and returned this. `None` where the output was too large to be kept.
    Processed(Option<O>),
    /// It is a dead letter: nobody will try again unless a person asks.
    Dead,
    /// A person, or a policy, decided that nobody will.
    Discarded,
    /// It was cancelled.
    Cancelled,
    /// Nothing of it is kept any more, or its transaction has not committed.
    Gone,
}

impl<O: DeserializeOwned> Progress<O> {
    pub(crate) fn of(state: EventState, output: Option<&str>) -> Result<Self, OutputError> {
        Ok(match state {
            EventState::Pending | EventState::Failed => Self::Waiting,
            EventState::InProgress => Self::InProgress,
            EventState::Processed => Self::Processed(match output {
                Some(json) => Some(serde_json::from_str(json).map_err(OutputError)?),
                // `null` is not stored; a type that reads it has an output all the same.
                None => serde_json::from_str("null").ok(),
            }),
            EventState::DeadLetter => Self::Dead,
            EventState::Discarded => Self::Discarded,
            EventState::Cancelled => Self::Cancelled,
        })
    }
}

/// A stored output that does not read as the event's output type.
#[derive(Debug)]
pub struct OutputError(serde_json::Error);

impl fmt::Display for OutputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the stored output does not read as the event's output type")
    }
}

impl std::error::Error for OutputError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// Why the end of an event could not be waited for.
#[derive(Debug)]
#[non_exhaustive]
pub enum WaitError {
    /// It was processed, and its stored output is not an `E::Output`.
    Output(OutputError),
    /// The background could not be started, has ended, or may not read what has become of events.
    /// While the database is merely unreachable, the wait goes on.
    Store(StoreError),
}

impl fmt::Display for WaitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Output(error) => fmt::Display::fmt(error, f),
            Self::Store(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl std::error::Error for WaitError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Output(error) => error.source(),
            Self::Store(error) => error.source(),
        }
    }
}

impl From<StoreError> for WaitError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl<S: Store, Set> Outbox<S, Set> {
    /// Waits until an event has ended, wherever it is handled, and answers how: never
    /// [`Waiting`](Progress::Waiting) or [`InProgress`](Progress::InProgress).
    ///
    /// For what was published in a transaction that has committed. An event that no handler can take
    /// is waited for as long as it takes: put a timeout around it.
    ///
    /// What this process settles is answered at once. For what others settle, the background asks
    /// the database, with one statement for all that are waited for, at first after 10 ms and then
    /// less often, at last every quarter of a second.
    ///
    /// An event without a retention leaves nothing behind but its dedup key. The publisher of a
    /// [`Duplicate`](Published::Duplicate) finds its end there. The publisher that was told
    /// [`Inserted`](Published::Inserted) may be answered [`Gone`](Progress::Gone), where another
    /// process handles the event.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use outbox_core::{Outbox, OutboxEvent, Progress, Published, Store};
    /// # use outbox_core::{AnyEvent, EventOf};
    ///
    /// /// Answers a request with an idempotency key: all that have the same one get the same receipt.
    /// async fn pay<S: Store, E>(outbox: &Outbox<S>, payment: &E) -> Result<String, Box<dyn std::error::Error>>
    /// where
    ///     E: OutboxEvent<Output = String>,
    /// {
    ///     let mut tx = outbox.begin().await?;
    ///     let published = tx.publish(payment).await?;
    ///     tx.commit().await?;
    ///     if let Published::KeyReused(_) = published {
    ///         return Err("the key belongs to another payment".into());
    ///     }
    ///     let end = tokio::time::timeout(Duration::from_secs(5), outbox.wait_for(&published));
    ///     match end.await?? {
    ///         Progress::Processed(Some(receipt)) => Ok(receipt),
    ///         other => Err(format!("not paid: {other:?}").into()),
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns [`WaitError`].
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing but the wait.
    pub async fn wait_for<E: EventOf<Set>>(
        &self,
        published: &Published<E>,
    ) -> Result<Progress<E::Output>, WaitError> {
        let ended = self.engine()?.shared.awaited.add(published.watched());
        let ended = ended.await.map_err(|_| {
            StoreError::new(
                StoreErrorKind::Other,
                "wait for an event: the outbox has closed",
            )
        })?;
        match ended? {
            Some((state, output)) => {
                Progress::of(state, output.as_deref()).map_err(WaitError::Output)
            }
            None => Ok(Progress::Gone),
        }
    }
}
