//! What one handler is told apart from its event type: its name, its limits, its circuit breaker.

use std::time::Duration;

use crate::backoff::Backoff;

/// The longest handler name, in bytes.
pub const HANDLER_NAME_MAX: usize = 64;

/// How one handler is registered, where that differs from what its event type says.
///
/// ```
/// use std::time::Duration;
///
/// use outbox_core::{CircuitBreaker, HandlerOptions};
///
/// let email = HandlerOptions::named("email")
///     .max_attempts(3)
///     .timeout(Duration::from_secs(5))
///     .concurrency(4)
///     .circuit_breaker(CircuitBreaker::after(5).open_for(Duration::from_secs(30)));
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct HandlerOptions {
    pub(crate) name: Option<&'static str>,
    pub(crate) primary: bool,
    pub(crate) max_attempts: Option<u32>,
    pub(crate) backoff: Option<Backoff>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) concurrency: Option<u32>,
    pub(crate) breaker: Option<CircuitBreaker>,
}

impl HandlerOptions {
    /// For the only handler of an event type.
    pub fn new() -> Self {
        Self::default()
    }

    /// For one of several handlers of an event type, under a name of its own.
    ///
    /// The name is stored with rows and dead letters: 1 to [`HANDLER_NAME_MAX`] bytes of `a-z`,
    /// `0-9`, `.`, `_` and `-`. Rows find their handler by it, so after a change of the name the rows
    /// of the old one wait, and sweeps report them.
    pub fn named(name: &'static str) -> Self {
        Self {
            name: Some(name),
            ..Self::default()
        }
    }

    /// Makes its output the one that is kept for the event's dedup key, and told to whoever
    /// publishes the key again. Without it, that is the output of the handler registered first.
    pub fn primary(mut self) -> Self {
        self.primary = true;
        self
    }

    /// Sets how often it may be started before its part of the event becomes a dead letter. Only for
    /// a handler with a name.
    ///
    /// Defaults to what is in the row: what the event type says, or the publishing outbox.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = Some(attempts);
        self
    }

    /// Sets the wait between its attempts. Defaults to what the event type says, or the outbox.
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = Some(backoff);
        self
    }

    /// Sets how long one run of it may take. Defaults to what the event type says, or the outbox.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Bounds how many runs of it this process has at once, inline and by relay.
    ///
    /// Defaults to no bound of its own. From 1. Its events are claimed by a statement of their own,
    /// and never more of them than can start.
    pub fn concurrency(mut self, runs: u32) -> Self {
        self.concurrency = Some(runs);
        self
    }

    /// Stops giving it events while what it depends on fails. Defaults to none.
    pub fn circuit_breaker(mut self, breaker: CircuitBreaker) -> Self {
        self.breaker = Some(breaker);
        self
    }
}

/// When a handler is given no events for a while, because what it depends on is failing.
///
/// After a number of failures in a row the breaker *opens*: this process claims nothing for the
/// handler, so that no attempts are spent. After a while it lets one event through. If that succeeds
/// the breaker closes, and if it fails it stays open for as long again.
///
/// A failure is an error that asks for a retry, a panic, or an overrun timeout. A permanent error is
/// none: something has answered. Each process has a breaker of its own and learns by itself.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[must_use]
pub struct CircuitBreaker {
    pub(crate) failures: u32,
    pub(crate) open_for: Duration,
}

impl CircuitBreaker {
    /// Opens after this many failures in a row, for 30 seconds. From 1.
    pub const fn after(failures: u32) -> Self {
        Self {
            failures,
            open_for: Duration::from_secs(30),
        }
    }

    /// Sets how long it stays open. Up to a day.
    pub const fn open_for(mut self, span: Duration) -> Self {
        self.open_for = span;
        self
    }
}

/// Whether `name` may be a handler name.
pub(crate) fn is_handler_name(name: &str) -> bool {
    name.len() <= HANDLER_NAME_MAX && crate::event::is_event_name(name)
}
