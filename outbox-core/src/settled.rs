//! What hooks are told: every outcome that was stored, and events that are about to be discarded.

use std::fmt;
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::dispatch::{Cause, Finding, panic_text};
use crate::engine::settler::About;
use crate::event::EventId;
use crate::outcome::{DeadReason, EXPIRED, Outcome};
use crate::store::Claimed;

/// An outcome that has been stored, as [`OutboxBuilder::on_settled`](crate::OutboxBuilder::on_settled)
/// reports it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SettledEvent {
    /// The event's id.
    pub event_id: EventId,
    /// Its event name.
    pub event_name: Arc<str>,
    /// The handler it belongs to, if its event has several.
    pub handler: Option<Arc<str>>,
    /// Which attempt came to this outcome.
    pub attempt: u32,
    /// What was stored.
    pub result: SettledResult,
}

/// What was stored.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum SettledResult {
    /// The handler succeeded.
    Processed,
    /// The attempt failed, and another one follows after this wait.
    Retry {
        /// How long the event is not due.
        after: Duration,
        /// The stored error text.
        error: String,
    },
    /// The event is a dead letter.
    DeadLetter {
        /// Why.
        reason: DeadReason,
        /// The stored error text.
        error: String,
    },
    /// The event could not be decoded, and is gone because
    /// [`discard_undecodable`](crate::OutboxBuilder::discard_undecodable) said so.
    Discarded {
        /// Why it could not be decoded.
        error: String,
    },
}

impl SettledEvent {
    pub(crate) fn new(about: &About, outcome: &Outcome) -> Self {
        let result = match outcome {
            Outcome::Processed { .. } => SettledResult::Processed,
            Outcome::Retry { after, error } => SettledResult::Retry {
                after: *after,
                error: error.to_string(),
            },
            Outcome::Dead { reason, error } => SettledResult::DeadLetter {
                reason: *reason,
                error: error.to_string(),
            },
            Outcome::Expired => SettledResult::DeadLetter {
                reason: DeadReason::Expired,
                error: EXPIRED.to_owned(),
            },
            Outcome::Discarded { error } => SettledResult::Discarded {
                error: error.to_string(),
            },
        };
        Self {
            event_id: about.id,
            event_name: Arc::clone(&about.name),
            handler: about.handler.clone(),
            attempt: about.attempt.get(),
            result,
        }
    }
}

/// An event that has become a dead letter, as
/// [`OutboxBuilder::on_dead_letter`](crate::OutboxBuilder::on_dead_letter) reports it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeadEvent {
    /// The event's id.
    pub event_id: EventId,
    /// Its event name.
    pub event_name: Arc<str>,
    /// The handler that gave up on it, if its event has several.
    pub handler: Option<Arc<str>>,
    /// Its last attempt.
    pub attempt: u32,
    /// Why it is dead.
    pub reason: DeadReason,
    /// The stored error text.
    pub error: String,
}

/// An event that cannot be decoded and is about to be discarded, as
/// [`OutboxBuilder::discard_undecodable`](crate::OutboxBuilder::discard_undecodable) gives it away.
///
/// Its `Debug` does not show the payload.
#[derive(Clone)]
#[non_exhaustive]
pub struct UndecodableEvent {
    /// The event's id.
    pub event_id: EventId,
    /// Its event name.
    pub event_name: String,
    /// The version of the payload's shape.
    pub version: NonZeroU32,
    /// The payload, as JSON text.
    pub payload: String,
    /// The headers, as JSON text.
    pub headers: Option<String>,
    /// Why it cannot be decoded.
    pub error: String,
}

impl fmt::Debug for UndecodableEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UndecodableEvent")
            .field("event_id", &self.event_id)
            .field("event_name", &self.event_name)
            .field("version", &self.version)
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}

type SettledHook = Box<dyn Fn(&SettledEvent) + Send + Sync>;
type UndecodableHook = Box<dyn Fn(&UndecodableEvent) + Send + Sync>;

/// The application's own functions that are told what happens.
#[derive(Default)]
pub(crate) struct Hooks {
    settled: Vec<SettledHook>,
    undecodable: Option<UndecodableHook>,
}

impl Hooks {
    pub(crate) fn add_settled(&mut self, hook: impl Fn(&SettledEvent) + Send + Sync + 'static) {
        self.settled.push(Box::new(hook));
    }

    pub(crate) fn add_dead_letter(&mut self, hook: impl Fn(&DeadEvent) + Send + Sync + 'static) {
        self.add_settled(move |event| {
            if let SettledResult::DeadLetter { reason, error } = &event.result {
                hook(&DeadEvent {
                    event_id: event.event_id,
                    event_name: Arc::clone(&event.event_name),
                    handler: event.handler.clone(),
                    attempt: event.attempt,
                    reason: *reason,
                    error: error.clone(),
                });
            }
        });
    }

    pub(crate) fn set_undecodable(
        &mut self,
        hook: impl Fn(&UndecodableEvent) + Send + Sync + 'static,
    ) {
        self.undecodable = Some(Box::new(hook));
    }

    /// Tells every hook. One that panics is logged and changes nothing.
    pub(crate) fn settled(&self, event: &SettledEvent) {
        for hook in &self.settled {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| hook(event))) {
                let text = panic_text(panic);
                tracing::error!(event_id = %event.event_id, panic = text, "a settled hook panicked");
            }
        }
    }

    /// Gives an event that cannot be decoded away, where the application wants it discarded, and
    /// says so in the finding. If the hook panics, the event becomes a dead letter after all:
    /// nobody has it.
    pub(crate) fn undecodable(&self, finding: Finding, claimed: &Claimed) -> Finding {
        let (
            Some(hook),
            Finding::Failed {
                cause: Cause::Undecodable,
                error,
            },
        ) = (&self.undecodable, &finding)
        else {
            return finding;
        };
        let event = UndecodableEvent {
            event_id: claimed.id,
            event_name: claimed.name.clone(),
            version: claimed.version,
            payload: claimed.payload.clone(),
            headers: claimed.headers.clone(),
            error: error.to_string(),
        };
        match catch_unwind(AssertUnwindSafe(|| hook(&event))) {
            Ok(()) => Finding::Failed {
                cause: Cause::Discard,
                error: error.clone(),
            },
            Err(panic) => {
                let text = panic_text(panic);
                tracing::error!(
                    event_id = %claimed.id,
                    panic = text,
                    "the hook for undecodable events panicked; the event becomes a dead letter"
                );
                finding
            }
        }
    }
}
