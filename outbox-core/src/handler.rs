//! What runs when an event is dispatched, and what it is told.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::time::{Duration, SystemTime};

use tokio_util::sync::CancellationToken;

use crate::event::{EventId, OutboxEvent};

/// Handles events of type `E`.
///
/// Implement it on a struct that holds what the handler needs, or register a closure
/// `|event: E| async move { .. }`; both go to
/// [`OutboxBuilder::on`](crate::OutboxBuilder::on).
///
/// ```
/// # use outbox_core::{Delivery, Handler, HandlerError, OutboxEvent};
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize)] struct ReceiptId(String);
/// # #[derive(Serialize, Deserialize)] struct OrderPaid { order_id: u64 }
/// # impl OutboxEvent for OrderPaid { type Output = ReceiptId; const NAME: &'static str = "order.paid"; }
/// # struct Mailer;
/// # impl Mailer { async fn send(&self, _: u64, _: String) -> Result<String, std::io::Error> { Ok(String::new()) } }
/// struct SendReceipt { mailer: Mailer }
///
/// impl Handler<OrderPaid> for SendReceipt {
///     async fn handle(&self, event: OrderPaid, delivery: &Delivery) -> Result<ReceiptId, HandlerError> {
///         let key = delivery.event_id().to_string();
///         Ok(ReceiptId(self.mailer.send(event.order_id, key).await?))
///     }
/// }
/// ```
///
/// # An event can be handled more than once
///
/// The guarantee is *at least once*: a process can die after the effect and before the outcome is
/// stored, and a lease can expire while the handler runs. Make the effect idempotent with
/// [`Delivery::event_id`], which is the same for every attempt.
///
/// # A handler can be dropped at any await
///
/// When it overruns its timeout, when its lease is lost, and when a shutdown's grace period ends,
/// [`Delivery::cancelled`] fires and the future is dropped at its next await. A handler that
/// blocks its thread cannot be stopped: its late result is refused, and it may overlap the retry.
///
/// A panic is a failed attempt, as an error is.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not handle `{E}`",
    label = "not a handler of `{E}`",
    note = "implement `Handler<{E}>` for it, or pass a closure `|event: {E}| async move {{ .. }}` \
            that returns `Result<<{E} as OutboxEvent>::Output, _>`"
)]
pub trait Handler<E: OutboxEvent>: Send + Sync + 'static {
    /// Handles one event.
    ///
    /// What it returns is stored with the row and told to whoever publishes the same dedup key
    /// again.
    ///
    /// # Errors
    ///
    /// Any error is a failed attempt: the event is due again after its backoff, or becomes a dead
    /// letter if this was its last attempt. [`HandlerError::retry_after`] asks for a delay of its
    /// own and [`HandlerError::permanent`] gives up at once.
    fn handle(
        &self,
        event: E,
        delivery: &Delivery,
    ) -> impl Future<Output = Result<E::Output, HandlerError>> + Send;
}

impl<E, F, Fut, Err> Handler<E> for F
where
    E: OutboxEvent,
    F: Fn(E) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<E::Output, Err>> + Send,
    Err: Into<HandlerError>,
{
    async fn handle(&self, event: E, _: &Delivery) -> Result<E::Output, HandlerError> {
        self(event).await.map_err(Into::into)
    }
}

/// Handles events of type `E` with writes to this database, through a connection of type `C` (the
/// store's own: `PgConnection`, `SqliteConnection`) that is inside a transaction.
///
/// Registered with [`OutboxBuilder::on_transactional`](crate::OutboxBuilder::on_transactional), it is
/// given a transaction of its own, which also settles the event. In
/// [`OutboxTx::dispatch_uncommitted_with`](crate::OutboxTx::dispatch_uncommitted_with) it is given the
/// caller's, inside a savepoint. Either way, if it fails, panics, overruns its timeout or is dropped,
/// what it wrote is undone, and nothing else.
///
/// It must not commit or roll back, and has to leave the transaction usable: one that returns `Ok`
/// although a statement of it failed, in a way that PostgreSQL aborts the transaction for, has
/// failed.
///
/// # Begin nothing on the connection
///
/// A `begin()` of the handler's own on `connection` is a savepoint, and one that is dropped while it
/// is being set, because the handler overran its timeout, makes sqlx roll the *caller's* transaction
/// back. The commit then is an error, but on PostgreSQL what the caller sends before it is kept, one
/// statement at a time.
pub trait TransactionalHandler<C, E: OutboxEvent>: Send + Sync {
    /// Handles one event.
    ///
    /// # Errors
    ///
    /// Any error is a failed attempt, as with a [`Handler`].
    fn handle(
        &self,
        event: E,
        connection: &mut C,
        delivery: &Delivery,
    ) -> impl Future<Output = Result<E::Output, HandlerError>> + Send;
}

/// Why a handler did not succeed, and what follows from it.
///
/// Every [`std::error::Error`] turns into a retry through `?`. For what is none, such as
/// `anyhow::Error`, there is `.map_err(HandlerError::retry)?`. The text of the error and of its
/// sources is stored, cut to [`ERROR_TEXT_MAX`](crate::outcome::ERROR_TEXT_MAX) bytes.
pub struct HandlerError {
    verdict: Verdict,
    error: Box<dyn std::error::Error + Send + Sync>,
}

/// What a handler's error asks for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Verdict {
    Retry,
    RetryAfter(Duration),
    Permanent,
}

impl HandlerError {
    /// Fails this attempt: the event is tried again after its backoff.
    #[must_use]
    pub fn retry(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self {
            verdict: Verdict::Retry,
            error: error.into(),
        }
    }

    /// Fails this attempt and asks for a delay of its own, as a `Retry-After` header does.
    ///
    /// A delay over [`DURATION_MAX`](crate::DURATION_MAX) is cut to it. It does not change how
    /// many attempts are left.
    #[must_use]
    pub fn retry_after(
        delay: Duration,
        error: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self {
            verdict: Verdict::RetryAfter(std::cmp::min(delay, crate::DURATION_MAX)),
            error: error.into(),
        }
    }

    /// Gives up: the event becomes a dead letter at once, whatever attempts are left.
    #[must_use]
    pub fn permanent(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self {
            verdict: Verdict::Permanent,
            error: error.into(),
        }
    }

    pub(crate) fn verdict(&self) -> Verdict {
        self.verdict
    }

    pub(crate) fn as_error(&self) -> &(dyn std::error::Error + 'static) {
        self.error.as_ref()
    }
}

// This is why `HandlerError` is not itself an `Error`: the two would overlap.
impl<E: std::error::Error + Send + Sync + 'static> From<E> for HandlerError {
    fn from(error: E) -> Self {
        Self::retry(error)
    }
}

impl fmt::Debug for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandlerError")
            .field("verdict", &self.verdict)
            .field("error", &self.error)
            .finish()
    }
}

impl fmt::Display for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

/// What a handler is told about the run it is in.
#[derive(Clone, Debug)]
pub struct Delivery {
    pub(crate) event_id: EventId,
    /// The row that its own was split from, or its own.
    pub(crate) origin: EventId,
    pub(crate) event_name: &'static str,
    pub(crate) handler: Option<&'static str>,
    pub(crate) version: NonZeroU32,
    pub(crate) attempt: NonZeroU32,
    pub(crate) max_attempts: NonZeroU32,
    pub(crate) first_published_at: Option<SystemTime>,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) cancelled: CancellationToken,
}

impl Delivery {
    /// The event's id: the same for every attempt, on every instance, and unique across
    /// databases. Hand it to a broker as its dedup id, or keep it beside an effect to recognise a
    /// redelivery.
    ///
    /// Where an event has several handlers, each has an id of its own, so that their effects are not
    /// taken for one another.
    #[must_use]
    pub fn event_id(&self) -> EventId {
        self.event_id
    }

    /// The id that the publisher was given: the same for all handlers of the event.
    #[must_use]
    pub fn origin(&self) -> EventId {
        self.origin
    }

    /// The name that this handler is registered under, if it has one.
    #[must_use]
    pub fn handler(&self) -> Option<&'static str> {
        self.handler
    }

    /// The stable name of the event's type. Its present one, whatever name its row was published
    /// under.
    #[must_use]
    pub fn event_name(&self) -> &'static str {
        self.event_name
    }

    /// The version that the payload was published in. The event has been brought to the present one.
    #[must_use]
    pub fn version(&self) -> NonZeroU32 {
        self.version
    }

    /// Which attempt this is, from 1. Anything above 1 may be a redelivery after the effect. So may 1: a
    /// dead letter that is requeued begins again. And any number can come twice, because a run that a
    /// shutdown cut short is not counted. To tell a repeat, use the [event id](Self::event_id).
    #[must_use]
    pub fn attempt(&self) -> NonZeroU32 {
        self.attempt
    }

    /// After how many attempts the event becomes a dead letter.
    #[must_use]
    pub fn max_attempts(&self) -> NonZeroU32 {
        self.max_attempts
    }

    /// When the event was published, by the database's clock. The same for every attempt.
    ///
    /// `None` for an event that was dispatched directly and has no row, or before its commit.
    #[must_use]
    pub fn first_published_at(&self) -> Option<SystemTime> {
        self.first_published_at
    }

    /// The headers it was published with, `traceparent` for instance.
    #[must_use]
    pub fn headers(&self) -> &BTreeMap<String, String> {
        &self.headers
    }

    /// Fires when this run should stop: it overran its timeout, its lease was lost, or a
    /// shutdown's grace period is over. The handler's future is dropped at its next await; pass
    /// a clone on to work that the handler has spawned.
    #[must_use]
    pub fn cancelled(&self) -> &CancellationToken {
        &self.cancelled
    }
}
