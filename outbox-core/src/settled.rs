//! What the hook is told about every outcome that was stored.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::dispatch::panic_text;
use crate::engine::settler::About;
use crate::event::EventId;
use crate::outcome::{DeadReason, Outcome};

/// An outcome that has been stored, as [`OutboxBuilder::on_settled`](crate::OutboxBuilder::on_settled)
/// reports it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SettledEvent {
    /// The event's id.
    pub event_id: EventId,
    /// Its event name.
    pub event_name: Arc<str>,
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
        };
        Self {
            event_id: about.id,
            event_name: Arc::clone(&about.name),
            attempt: about.attempt.get(),
            result,
        }
    }
}

type Hook = Box<dyn Fn(&SettledEvent) + Send + Sync>;

/// The application's own functions that are told what happens.
#[derive(Default)]
pub(crate) struct Hooks {
    settled: Vec<Hook>,
}

impl Hooks {
    pub(crate) fn add_settled(&mut self, hook: impl Fn(&SettledEvent) + Send + Sync + 'static) {
        self.settled.push(Box::new(hook));
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
}
