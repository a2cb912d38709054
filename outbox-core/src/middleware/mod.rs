//! What runs around each run of a handler: timing, tenancy, a rate limit.
//!
//! A [`Middleware`] is told which event it is, and is given the rest of the way to the handler. It
//! sees neither the payload nor the type of the event: what concerns one type belongs in its handler.
//!
//! # How long it took
//!
//! ```
//! use std::time::Instant;
//!
//! use outbox_core::middleware::{Middleware, Next, Returned, RunError};
//! use outbox_core::Delivery;
//!
//! struct Timing;
//!
//! impl Middleware for Timing {
//!     async fn around(&self, delivery: &Delivery, next: Next<'_>) -> Result<Returned, RunError> {
//!         let began = Instant::now();
//!         let result = next.run().await;
//!         println!("{} took {:?}, ok: {}", delivery.event_name(), began.elapsed(), result.is_ok());
//!         result
//!     }
//! }
//! ```
//!
//! # Whose it is
//!
//! ```
//! # use outbox_core::middleware::{Middleware, Next, Returned, RunError};
//! # use outbox_core::{Delivery, HandlerError};
//! tokio::task_local! {
//!     static TENANT: String;
//! }
//!
//! struct Tenancy;
//!
//! impl Middleware for Tenancy {
//!     async fn around(&self, delivery: &Delivery, next: Next<'_>) -> Result<Returned, RunError> {
//!         let Some(tenant) = delivery.headers().get("tenant") else {
//!             return Err(HandlerError::permanent("an event without a tenant").into());
//!         };
//!         TENANT.scope(tenant.clone(), next.run()).await
//!     }
//! }
//! ```
//!
//! What is dispatched directly, or before its commit, has no headers.
//!
//! # How many a second
//!
//! In this process, over all events. While one waits, it is held: it takes one of the relay's places,
//! and one that waits for longer than its handler's timeout has failed.
//!
//! ```
//! # use std::time::Duration;
//! # use outbox_core::middleware::{Middleware, Next, Returned, RunError};
//! # use outbox_core::Delivery;
//! struct TenPerSecond {
//!     ticks: tokio::sync::Mutex<tokio::time::Interval>,
//! }
//!
//! impl Middleware for TenPerSecond {
//!     async fn around(&self, _: &Delivery, next: Next<'_>) -> Result<Returned, RunError> {
//!         self.ticks.lock().await.tick().await;
//!         next.run().await
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let mut ticks = tokio::time::interval(Duration::from_millis(100));
//! // Otherwise those of a quiet hour would all be caught up at once.
//! ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
//! let limit = TenPerSecond { ticks: ticks.into() };
//! # let _ = limit;
//! # }
//! ```
//!
//! # What holds for it
//!
//! It is part of the run: its time counts towards the handler's timeout, it is dropped with the
//! handler at any await, and a panic, or blocking its thread, is a failed attempt of that event alone.
//! It runs for every dispatch: by relay, inline, before the commit, and directly; and for each handler
//! of an event that has several. An error of its own counts for a handler's circuit breaker as the
//! handler's would.
//!
//! # A success in place of an error
//!
//! A middleware can answer [`Returned::nothing`] for a handler that failed, or that it dropped. The
//! event is processed then. What a [`TransactionalHandler`](crate::TransactionalHandler) wrote before
//! it failed is undone all the same: it may be half of what was to be written.

#[cfg(feature = "tower")]
pub mod tower;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;

use crate::dispatch::Failure;
use crate::handler::{Delivery, HandlerError};

/// Runs around each run of a handler. See [the module](self).
///
/// Registered with [`OutboxBuilder::middleware`](crate::OutboxBuilder::middleware). The one that is
/// registered first is the outermost.
pub trait Middleware: Send + Sync + 'static {
    /// Runs what is around one run, and the run itself with [`Next::run`].
    ///
    /// # Errors
    ///
    /// An error is a failed attempt, whether the handler was called or not. That of
    /// [`Next::run`] is passed on as it is, or replaced. One of its own is a retry, or made of a
    /// [`HandlerError`], which can ask for a delay, or give up.
    fn around(
        &self,
        delivery: &Delivery,
        next: Next<'_>,
    ) -> impl Future<Output = Result<Returned, RunError>> + Send;
}

/// The rest of the way to the handler.
///
/// It can be run once. Dropped without being run, the handler is not called.
#[must_use = "without `run` the handler is not called"]
pub struct Next<'a> {
    rest: &'a [Arc<dyn ErasedMiddleware>],
    delivery: &'a Delivery,
    handling: Handling<'a>,
}

type Handling<'a> = Pin<Box<dyn Future<Output = Result<String, Failure>> + Send + 'a>>;

impl Next<'_> {
    /// Runs the rest, and the handler in the end.
    ///
    /// # Errors
    ///
    /// Returns what the handler did not succeed for, or what a middleware further in made of it.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the handler's.
    pub async fn run(self) -> Result<Returned, RunError> {
        match self.rest.split_first() {
            Some((first, rest)) => {
                let next = Next { rest, ..self };
                let delivery = next.delivery;
                first.around(delivery, next).await
            }
            None => self.handling.await.map(Returned).map_err(RunError),
        }
    }
}

impl fmt::Debug for Next<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Next")
            .field("delivery", &self.delivery)
            .finish_non_exhaustive()
    }
}

/// What a handler returned.
///
/// Its `Debug` does not show it: what an application stores does not belong in its logs.
pub struct Returned(String);

impl Returned {
    /// In place of what a handler returns, by a middleware that did not call it: the event is
    /// processed, without an output.
    ///
    /// Whoever dispatched it directly, or before its commit, and expects an output other than `()`, is
    /// told that there is none to be read: [`DirectError::Failed`](crate::DirectError::Failed), or an
    /// error of [`Handled::output`](crate::Handled::output).
    #[must_use]
    pub fn nothing() -> Self {
        Self("null".to_owned())
    }

    /// As JSON.
    #[must_use]
    pub fn as_json(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Returned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Returned").finish_non_exhaustive()
    }
}

/// Why a run did not succeed.
///
/// Every [`std::error::Error`] turns into one that is a retry through `?`, as with a [`HandlerError`],
/// and so does a [`HandlerError`], which keeps what it asks for. The other way round is no `?`: to
/// make a retry of whatever it was, say `HandlerError::retry(error)`.
pub struct RunError(Failure);

impl RunError {
    /// What the handler, or a middleware, returned. `None` where the handler was not called because
    /// its event cannot be decoded, and where what it returned cannot be encoded.
    #[must_use]
    pub fn handler_error(&self) -> Option<&HandlerError> {
        match &self.0 {
            Failure::Handler(error) => Some(error),
            _ => None,
        }
    }

    /// Whether the payload is not what the event type reads. No attempt can read it, so the event
    /// becomes a dead letter, unless a middleware makes another error of it.
    #[must_use]
    pub fn is_undecodable(&self) -> bool {
        matches!(self.0, Failure::Undecodable(_))
    }
}

impl From<HandlerError> for RunError {
    fn from(error: HandlerError) -> Self {
        Self(Failure::Handler(error))
    }
}

impl fmt::Debug for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RunError").field(&self.0.text()).finish()
    }
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0.text(), f)
    }
}

// This is why `RunError` is not itself an `Error`: the two would overlap. Were it one, a `?` in a
// function that returns `HandlerError` would make a retry of what is permanent, or undecodable.
impl<E: std::error::Error + Send + Sync + 'static> From<E> for RunError {
    fn from(error: E) -> Self {
        HandlerError::from(error).into()
    }
}

impl From<RunError> for BoxError {
    fn from(error: RunError) -> Self {
        Box::new(Boxed(error))
    }
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A [`RunError`] among errors that can be any.
struct Boxed(RunError);

impl fmt::Debug for Boxed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for Boxed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl std::error::Error for Boxed {}

/// A middleware whose future is boxed.
#[async_trait]
pub(crate) trait ErasedMiddleware: Send + Sync {
    async fn around(&self, delivery: &Delivery, next: Next<'_>) -> Result<Returned, RunError>;
}

#[async_trait]
impl<M: Middleware> ErasedMiddleware for M {
    async fn around(&self, delivery: &Delivery, next: Next<'_>) -> Result<Returned, RunError> {
        Middleware::around(self, delivery, next).await
    }
}

/// Runs `handling` inside of all of them. Nothing is boxed where there are none.
pub(crate) async fn around(
    middleware: &[Arc<dyn ErasedMiddleware>],
    delivery: &Delivery,
    handling: impl Future<Output = Result<String, Failure>> + Send,
) -> Result<String, Failure> {
    if middleware.is_empty() {
        return handling.await;
    }
    let next = Next {
        rest: middleware,
        delivery,
        handling: Box::pin(handling),
    };
    match next.run().await {
        Ok(Returned(output)) => Ok(output),
        Err(RunError(failure)) => Err(failure),
    }
}

/// Whether the handler itself succeeded, whatever the middleware around it makes of its end. Only then
/// is what it wrote complete.
#[derive(Default)]
pub(crate) struct Succeeded(AtomicBool);

impl Succeeded {
    pub(crate) async fn watch(
        &self,
        handling: impl Future<Output = Result<String, Failure>> + Send,
    ) -> Result<String, Failure> {
        let result = handling.await;
        // The task that polls this is the one that asks, so nothing has to be ordered.
        self.0.store(result.is_ok(), Ordering::Relaxed);
        result
    }

    pub(crate) fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::handler::Verdict;

    #[track_caller]
    fn check(error: impl Into<RunError>, verdict: Verdict) {
        let error = error.into();
        assert_eq!(error.to_string(), "down");
        assert_eq!(error.handler_error().unwrap().verdict(), verdict);
    }

    #[test]
    fn any_error_is_a_retry_and_a_handlers_keeps_what_it_asks_for() {
        check(std::io::Error::other("down"), Verdict::Retry);
        check(HandlerError::permanent("down"), Verdict::Permanent);
        let delay = Duration::from_secs(7);
        check(
            HandlerError::retry_after(delay, "down"),
            Verdict::RetryAfter(delay),
        );
    }

    #[test]
    fn a_retry_can_be_made_of_whatever_it_was() {
        let permanent = RunError::from(HandlerError::permanent("down"));
        check(HandlerError::retry(permanent), Verdict::Retry);
    }

    #[test]
    fn what_a_handler_returned_is_not_shown() {
        let returned = Returned("\"secret\"".to_owned());
        assert_eq!(format!("{returned:?}"), "Returned { .. }");
    }

    #[tokio::test]
    async fn only_what_has_ended_well_has_succeeded() {
        let succeeded = Succeeded::default();
        drop(succeeded.watch(std::future::pending()));
        let error = HandlerError::retry("down");
        let failing = succeeded.watch(async { Err(Failure::Handler(error)) });
        assert!(failing.await.is_err());
        assert!(!succeeded.get());
        let ending = succeeded.watch(async { Ok("null".to_owned()) });
        assert!(ending.await.is_ok());
        assert!(succeeded.get());
    }
}
