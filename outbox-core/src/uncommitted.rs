//! Dispatch before the commit: the handler runs inside the caller's transaction, and what becomes
//! of the event is recorded in it.

use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::dispatch::{self, Cause, Failure, Finding};
use crate::event::{EventId, OutboxEvent};
use crate::event_set::EventOf;
use crate::handler::{Delivery, HandlerError, TransactionalHandler, Verdict};
use crate::lease::{HeldLease, LeaseToken};
use crate::middleware::{self, ErasedMiddleware, Succeeded};
use crate::outbox::no_answer;
use crate::outcome::{DeadReason, ErrorText, Outcome};
use crate::publish::{Duplicate, PublishError, PublishOptions, Published};
use crate::registry::{self, Entry, Runner, Transactional};
use crate::store::{BornLease, NewEvent, Settled, Settlement, Store, StoreError};
use crate::transaction::OutboxTx;

impl<S: Store, Set> OutboxTx<S, Set> {
    /// Publishes an event and runs its handler at once, before the transaction commits.
    ///
    /// If the handler succeeds, the event is recorded as processed in this transaction, so that
    /// after the commit nothing is left to do. If it fails, panics or overruns its timeout, the
    /// transaction goes on: the event is in it, its attempt 1 has failed, and once committed it is
    /// due at once, or when the handler has asked for. A permanent failure, or that of an only
    /// attempt, makes it a dead letter.
    ///
    /// For handing over to a broker where a message about something that never happened does no
    /// harm, or where the receiver asks before it acts. For a handler that writes to this database,
    /// use [`dispatch_uncommitted_with`](Self::dispatch_uncommitted_with).
    ///
    /// # The effect can happen for a transaction that rolls back
    ///
    /// What the handler did outside of this database is done when this returns. If the transaction
    /// then fails to commit, it was done for nothing, and nobody will know of the event. Inline
    /// dispatch, which waits for the commit, does not have this, and costs the caller nothing: use
    /// it unless the effect must have happened before the commit.
    ///
    /// # The transaction waits for the handler
    ///
    /// It keeps its locks, and its connection, for as long as the handler takes.
    ///
    /// An event without a handler here, or whose handlers have names, in an outbox that is shutting down, or behind an earlier one
    /// of its ordering key, is published as [`publish`](Self::publish) does, and left to the relays:
    /// nothing has started, nothing is charged.
    ///
    /// Besides the INSERT it sends a savepoint (on PostgreSQL with an empty statement before it), its
    /// end, and the settlement. Neither hooks nor counters hear of it, since nothing is stored before
    /// the commit.
    ///
    /// # Errors
    ///
    /// Returns [`PublishError`]; that the handler failed is not an error but
    /// [`Uncommitted::Failed`] or [`Uncommitted::Dead`]. After the `Store` variant, roll back: it is
    /// open what of the event is in the transaction.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the handler. What it wrote through its connection is undone before
    /// the next statement; the event stays, and [`commit`](Self::commit) records the attempt as
    /// failed, due at once, or the event as a dead letter if it was the only one.
    ///
    /// Dropped before the handler has begun, it is open whether the event was inserted, and its
    /// first lease may have to end first. Dropped after it has ended, either nothing is undone and
    /// the event is processed, or the transaction may be of no use any more: its next statement and
    /// its commit then fail.
    pub async fn dispatch_uncommitted<E: EventOf<Set>>(
        &mut self,
        event: &E,
    ) -> Result<Uncommitted<E>, PublishError> {
        let entry = self
            .outbox()
            .registry()
            .reading(E::NAME, E::VERSION)
            .and_then(|handlers| handlers.unnamed())
            .cloned();
        let Some(entry) = entry.filter(|_| !self.outbox().is_stopping()) else {
            return Ok(match self.publish(event).await? {
                Published::Duplicate(duplicate) => Uncommitted::Duplicate(duplicate),
                Published::KeyReused(earlier) => Uncommitted::KeyReused(earlier),
                published => Uncommitted::Left(published.event_id()),
            });
        };
        let timeout = entry.timeout;
        let registered = Registered {
            entry,
            transactional: Arc::clone(self.outbox().transactional()),
        };
        self.run_uncommitted(event, timeout, &registered).await
    }

    /// Publishes an event and runs `handler` at once, with this transaction's connection.
    ///
    /// As [`dispatch_uncommitted`](Self::dispatch_uncommitted), for a handler whose only effect is
    /// in this database: its writes and the settlement commit with the transaction or not at all,
    /// and where it fails, only its own are undone. The event gets the timeout of its type, or the
    /// outbox's. Where the handler fails, the event waits for a relay, and that runs the handler
    /// *registered* for it.
    ///
    /// ```
    /// use outbox_core::{Delivery, HandlerError, OutboxEvent, OutboxTx, Store, TransactionalHandler};
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize)] struct OrderPaid { order_id: i64 }
    /// # impl OutboxEvent for OrderPaid { type Output = (); const NAME: &'static str = "order.paid"; }
    /// struct BookRevenue;
    ///
    /// impl<C: Send> TransactionalHandler<C, OrderPaid> for BookRevenue {
    ///     async fn handle(&self, event: OrderPaid, connection: &mut C, _: &Delivery) -> Result<(), HandlerError> {
    ///         // A write through `connection` goes here.
    ///         # let _ = (event, connection);
    ///         Ok(())
    ///     }
    /// }
    ///
    /// # async fn f<S: Store>(mut tx: OutboxTx<S>, event: OrderPaid) -> Result<(), Box<dyn std::error::Error>> {
    /// let booked = tx.dispatch_uncommitted_with(&event, &BookRevenue).await?;
    /// # let _ = booked;
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # A statement that is under way is waited for
    ///
    /// A handler that overran its timeout is dropped at once, but the database finishes the
    /// statement it was in before it undoes it. Set a `statement_timeout` for what must be shorter.
    ///
    /// # Errors
    ///
    /// As [`dispatch_uncommitted`](Self::dispatch_uncommitted).
    ///
    /// # Cancel safety
    ///
    /// As [`dispatch_uncommitted`](Self::dispatch_uncommitted).
    pub async fn dispatch_uncommitted_with<E, H>(
        &mut self,
        event: &E,
        handler: &H,
    ) -> Result<Uncommitted<E>, PublishError>
    where
        E: EventOf<Set>,
        H: TransactionalHandler<S::Connection, E>,
    {
        let timeout = E::TIMEOUT.unwrap_or(self.outbox().settings().timeout);
        let handler = Given {
            handler,
            event: PhantomData::<fn(E)>,
        };
        self.run_uncommitted(event, timeout, &handler).await
    }

    async fn run_uncommitted<E: OutboxEvent>(
        &mut self,
        event: &E,
        timeout: Duration,
        handler: &impl Run<S::Connection>,
    ) -> Result<Uncommitted<E>, PublishError> {
        let mut rows = self
            .outbox()
            .prepare_all([event], &PublishOptions::default())?;
        let first = rows.first().ok_or_else(nothing)?;
        let is_first = match &first.ordering_key {
            Some(key) => {
                let store = self.outbox().store().clone();
                store.lock_ordering_key(self.parts()?.0, key).await?
            }
            None => true,
        };
        let token = LeaseToken::random();
        // The lease matters only if this is dropped and the transaction committed behind our back.
        let settings = self.outbox().settings();
        let lease = is_first.then(|| BornLease {
            token,
            duration: settings.inline.lease,
            instance: Arc::clone(&settings.instance),
        });
        rows.first_mut().ok_or_else(nothing)?.lease = lease;
        let id = match self.insert_held(&rows).await? {
            Published::Inserted(id) => id,
            Published::Duplicate(duplicate) => return Ok(Uncommitted::Duplicate(duplicate)),
            Published::KeyReused(earlier) => return Ok(Uncommitted::KeyReused(earlier)),
        };
        if !is_first {
            return Ok(Uncommitted::Left(id));
        }
        let row = rows.first().ok_or_else(nothing)?;
        let lease = HeldLease {
            row: id.row(),
            token,
        };
        let (outcome, output) = self.run_in_part(id, lease, row, timeout, handler).await?;
        self.answer(id, row.name, outcome, output)
    }

    /// Runs the handler in a savepoint, and records what came of it. Answers with the outcome and
    /// the handler's output, which may be too large to be kept.
    ///
    /// A success is recorded in the savepoint too, so that it is kept together with what the handler
    /// wrote, or not at all, wherever this is dropped. A failure is recorded once that is undone, and
    /// so is a success that a middleware has made of one.
    async fn run_in_part(
        &mut self,
        id: EventId,
        lease: HeldLease,
        row: &NewEvent,
        timeout: Duration,
        handler: &impl Run<S::Connection>,
    ) -> Result<(Outcome, String), StoreError> {
        let outbox = self.outbox().clone();
        let (store, settings) = (outbox.store(), outbox.settings());
        let (tx, abandoned) = self.parts()?;
        let dropped = Finding::Failed {
            cause: Cause::Run,
            error: ErrorText::new(&"its dispatch before the commit was dropped"),
        };
        let unless_dropped = Abandoned {
            settlement: Some(Settlement {
                lease,
                outcome: outcome(dropped, row, settings),
            }),
            abandoned,
        };
        let mut part = store.begin_part(&mut *tx).await?;
        let middleware = outbox.registry().middleware();
        let succeeded = Succeeded::default();
        let handling = Handling {
            handler,
            middleware,
            succeeded: &succeeded,
        };
        let finding = run(handling, part.connection(), id, row, timeout).await?;
        let output = match &finding {
            Finding::Done(output) => output.clone(),
            Finding::Failed { .. } => String::new(),
        };
        let mut ended = outcome(finding, row, settings);
        if succeeded.get()
            && let Outcome::Processed { .. } = ended
        {
            match record(store, part.connection(), lease, &ended).await {
                Ok(()) => {
                    part.keep().await?;
                    unless_dropped.disarm();
                    return Ok((ended, output));
                }
                Err(error) if error.is_transient() => return Err(error),
                // A statement of the handler's had failed, and it did not mind: PostgreSQL does.
                Err(error) => {
                    let finding = Finding::Failed {
                        cause: Cause::Run,
                        error: ErrorText::of_chain(&error),
                    };
                    ended = outcome(finding, row, settings);
                }
            }
        }
        part.undo().await?;
        record(store, tx, lease, &ended).await?;
        unless_dropped.disarm();
        Ok((ended, output))
    }

    fn answer<E: OutboxEvent>(
        &mut self,
        id: EventId,
        name: &'static str,
        outcome: Outcome,
        output: String,
    ) -> Result<Uncommitted<E>, PublishError> {
        match outcome {
            Outcome::Processed { .. } => {
                self.count_settled();
                Ok(Uncommitted::Processed(Handled::new(id, output)))
            }
            Outcome::Retry { error, .. } => {
                tracing::warn!(
                    event_id = %id,
                    event_name = name,
                    %error,
                    "attempt failed before the commit"
                );
                Ok(Uncommitted::Failed {
                    event_id: id,
                    error: error.to_string(),
                })
            }
            Outcome::Dead { reason, error } => {
                tracing::error!(
                    event_id = %id,
                    event_name = name,
                    %reason,
                    %error,
                    "event is a dead letter if its transaction commits"
                );
                self.count_settled();
                Ok(Uncommitted::Dead {
                    event_id: id,
                    reason,
                    error: error.to_string(),
                })
            }
            Outcome::Expired | Outcome::Discarded { .. } => Err(PublishError::Store(no_answer())),
        }
    }

    /// Records, before the commit, that dispatches were dropped half way.
    pub(crate) async fn settle_abandoned(&mut self) -> Result<(), StoreError> {
        let store = self.outbox().store().clone();
        let (tx, abandoned) = self.parts()?;
        let settlements = std::mem::take(abandoned);
        if !settlements.is_empty() {
            // A savepoint of the caller's may have undone their rows: there is nothing to settle
            // then.
            store.settle_through(tx, &settlements).await?;
        }
        Ok(())
    }
}

/// What became of an event that was dispatched before its commit. It is true only once the
/// transaction has committed.
#[derive(Debug)]
#[must_use]
pub enum Uncommitted<E: OutboxEvent> {
    /// Its handler succeeded, and it is recorded as processed.
    Processed(Handled<E>),
    /// Its handler failed. It waits for a relay.
    Failed {
        /// Its id.
        event_id: EventId,
        /// The stored error text.
        error: String,
    },
    /// Its handler failed for good. It is a dead letter.
    Dead {
        /// Its id.
        event_id: EventId,
        /// Why.
        reason: DeadReason,
        /// The stored error text.
        error: String,
    },
    /// No handler was started. It waits for a relay, uncharged.
    Left(EventId),
    /// An event with the same dedup key is known already. Nothing was inserted, and no handler was
    /// started.
    Duplicate(Duplicate<E>),
    /// As a duplicate, but what was published with the key before is
    /// [something else](Published::KeyReused).
    KeyReused(Duplicate<E>),
}

/// An event that was handled before its commit.
pub struct Handled<E: OutboxEvent> {
    event_id: EventId,
    output: String,
    event: PhantomData<fn(E)>,
}

impl<E: OutboxEvent> Handled<E> {
    fn new(event_id: EventId, output: String) -> Self {
        Self {
            event_id,
            output,
            event: PhantomData,
        }
    }

    /// The event's id.
    #[must_use]
    pub fn event_id(&self) -> EventId {
        self.event_id
    }

    /// What the handler returned.
    ///
    /// # Errors
    ///
    /// Returns serde's error if the type does not read what it wrote.
    pub fn output(&self) -> Result<E::Output, serde_json::Error> {
        serde_json::from_str(&self.output)
    }
}

impl<E: OutboxEvent> fmt::Debug for Handled<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handled")
            .field("event_id", &self.event_id)
            .finish_non_exhaustive()
    }
}

/// A handler, and what is around it.
struct Handling<'a, H> {
    handler: &'a H,
    middleware: &'a [Arc<dyn ErasedMiddleware>],
    succeeded: &'a Succeeded,
}

/// Runs the handler, within its time.
async fn run<C: Send>(
    handling: Handling<'_, impl Run<C>>,
    connection: &mut C,
    id: EventId,
    row: &NewEvent,
    timeout: Duration,
) -> Result<Finding, StoreError> {
    let interrupt = CancellationToken::new();
    let delivery = Delivery {
        event_id: id,
        origin: id,
        event_name: row.name,
        handler: None,
        version: row.version,
        attempt: NonZeroU32::MIN,
        max_attempts: row.max_attempts,
        first_published_at: None,
        headers: std::collections::BTreeMap::new(),
        cancelled: interrupt.child_token(),
    };
    let Handling {
        handler,
        middleware,
        succeeded,
    } = handling;
    let handling = succeeded.watch(handler.run(&row.payload, connection, &delivery));
    let handling = middleware::around(middleware, &delivery, handling);
    let finding = dispatch::run(handling, timeout, &delivery, &interrupt).await;
    finding.ok_or_else(no_answer)
}

async fn record<S: Store>(
    store: &S,
    connection: &mut S::Connection,
    lease: HeldLease,
    outcome: &Outcome,
) -> Result<(), StoreError> {
    let settlements = [Settlement {
        lease,
        outcome: outcome.clone(),
    }];
    let answers = store.settle_through(connection, &settlements).await?;
    match answers[..] {
        [Settled::Recorded] => Ok(()),
        _ => Err(no_answer()),
    }
}

/// What a finding means for an event whose transaction has not committed: as after a commit, but a
/// failure is due at once, unless the handler asked for a delay. The next attempt comes after the
/// commit, when whatever made this one fail may be over.
fn outcome(finding: Finding, row: &NewEvent, settings: &crate::settings::Settings) -> Outcome {
    let asks_for_delay = matches!(
        finding,
        Finding::Failed {
            cause: Cause::Handler(Verdict::RetryAfter(_)),
            ..
        }
    );
    let attempt = NonZeroU32::MIN;
    let outcome = dispatch::decide(finding, attempt, row.max_attempts, &settings.backoff, 0.0);
    match outcome {
        Outcome::Retry { error, .. } if !asks_for_delay => Outcome::Retry {
            after: Duration::ZERO,
            error,
        },
        outcome => outcome,
    }
}

/// Notes what is to be recorded of a dispatch that is dropped before its end.
struct Abandoned<'a> {
    settlement: Option<Settlement>,
    abandoned: &'a mut Vec<Settlement>,
}

impl Abandoned<'_> {
    fn disarm(mut self) {
        self.settlement = None;
    }
}

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        self.abandoned.extend(self.settlement.take());
    }
}

/// A handler that takes JSON and a connection.
trait Run<C>: Sync {
    fn run(
        &self,
        payload: &str,
        connection: &mut C,
        delivery: &Delivery,
    ) -> impl Future<Output = Result<String, Failure>> + Send;
}

/// The handler of the registry. A plain one has no use for the connection.
struct Registered<C> {
    entry: Arc<Entry>,
    transactional: Arc<Transactional<C>>,
}

impl<C: Send> Run<C> for Registered<C> {
    async fn run(
        &self,
        payload: &str,
        connection: &mut C,
        delivery: &Delivery,
    ) -> Result<String, Failure> {
        match (
            &self.entry.runner,
            self.transactional.get(&self.entry.key()),
        ) {
            (Runner::Plain(handler), _) => handler.run(payload, delivery).await,
            (Runner::Transactional, Some(handler)) => {
                handler.run(payload, connection, delivery).await
            }
            // The builder puts them in together.
            (Runner::Transactional, None) => Err(Failure::Handler(HandlerError::retry(
                "its handler is not there",
            ))),
        }
    }
}

struct Given<'a, H, E> {
    handler: &'a H,
    event: PhantomData<fn(E)>,
}

impl<C, E, H> Run<C> for Given<'_, H, E>
where
    C: Send,
    E: OutboxEvent,
    H: TransactionalHandler<C, E>,
{
    async fn run(
        &self,
        payload: &str,
        connection: &mut C,
        delivery: &Delivery,
    ) -> Result<String, Failure> {
        registry::handle::<C, E, H>(self.handler, payload, connection, delivery).await
    }
}

fn nothing() -> PublishError {
    PublishError::Store(no_answer())
}
