//! The outbox an application holds: what it publishes through, and what its handlers hang on.

use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::builder::OutboxBuilder;
use crate::counters::Snapshot;
use crate::dispatch::{self, Finding};
use crate::engine::inline::{Asked, Handover};
use crate::engine::{Engine, Parts, ShutdownError};
use crate::event::{EventId, OutboxEvent};
use crate::event_set::{AnyEvent, EventOf, EventSet};
use crate::handler::Delivery;
use crate::middleware::{self, Succeeded};
use crate::outcome::ErrorText;
use crate::publish::{self, PublishError, PublishOptions, Published};
use crate::registry::{Entry, Registry, Runner, Transactional};
use crate::relay::RelayBuilder;
use crate::settings::Settings;
use crate::stats::Stats;
use crate::store::{BlockedKey, EventRecord, NewEvent, Store, StoreError};
use crate::transaction::OutboxTx;

/// The most keys that [`Outbox::blocked_keys`] lists.
pub const BLOCKED_KEYS_MAX: NonZeroU32 = NonZeroU32::new(1_000).unwrap();

/// Publishes events and dispatches them.
///
/// Cheap to clone: all clones are one outbox. It can be built anywhere; what runs in the background
/// starts with the first [`begin`](Self::begin), [`dispatch`](Self::dispatch) or relay, on the
/// runtime of that call, where its handlers then run.
///
/// When the last clone is dropped, its background loops end after the database call they are in.
/// What is held then is taken over by another instance once its lease expires; call
/// [`shutdown`](Self::shutdown) first to leave nothing waiting.
///
/// `Set` says which events it accepts: any, or those of a [closed set](crate::EventSet). It is left
/// out where there is none: `Outbox<S>`.
pub struct Outbox<S: Store, Set = AnyEvent> {
    inner: Arc<Inner<S>>,
    set: PhantomData<fn(Set)>,
}

struct Inner<S: Store> {
    parts: Parts<S>,
    /// Free places between a publish and its inline dispatch.
    places: Arc<Semaphore>,
    engine: OnceLock<Engine<S>>,
    /// Held while the engine is started, so that it is started once.
    starting: Mutex<()>,
    relay: Mutex<Option<CancellationToken>>,
    /// Held by [`Outbox::ask_alone`].
    asking: tokio::sync::Mutex<()>,
}

impl<S: Store> Outbox<S> {
    /// Starts an outbox on `store` that accepts every event.
    pub fn builder(store: S) -> OutboxBuilder<S> {
        OutboxBuilder::new(store)
    }

    /// Starts an outbox on `store` that accepts the events of a closed set and no other, and is not
    /// built while one of them has no handler.
    ///
    /// ```
    /// # use outbox_core::testing::MemoryStore;
    /// # use outbox_core::{HandlerError, Outbox, OutboxEvent, OutboxEvents};
    /// # use serde::{Deserialize, Serialize};
    /// # #[derive(Serialize, Deserialize, OutboxEvent)] struct OrderPaid;
    /// # #[derive(Serialize, Deserialize, OutboxEvent)] struct AlertRaised;
    /// #[derive(OutboxEvents)]
    /// enum ShopEvents {
    ///     OrderPaid(OrderPaid),
    ///     AlertRaised(AlertRaised),
    /// }
    ///
    /// struct Shop {
    ///     outbox: Outbox<MemoryStore, ShopEvents>,
    /// }
    ///
    /// # let store = MemoryStore::new();
    /// let outbox = Outbox::builder_of::<ShopEvents>(store)
    ///     .on(|_: OrderPaid| async { Ok::<_, HandlerError>(()) })
    ///     .on(|_: AlertRaised| async { Ok::<_, HandlerError>(()) })
    ///     .build()?;
    /// let shop = Shop { outbox };
    /// # Ok::<_, outbox_core::BuildError>(())
    /// ```
    pub fn builder_of<Set: EventSet>(store: S) -> OutboxBuilder<S, Set, Set::Unhandled> {
        OutboxBuilder::new(store)
    }
}

impl<S: Store, Set> Outbox<S, Set> {
    pub(crate) fn assemble(parts: Parts<S>) -> Self {
        let queue = parts.settings.inline.queue.get();
        let inner = Inner {
            parts,
            places: Arc::new(Semaphore::new(queue as usize)),
            engine: OnceLock::new(),
            starting: Mutex::new(()),
            relay: Mutex::new(None),
            asking: tokio::sync::Mutex::default(),
        };
        Self {
            inner: Arc::new(inner),
            set: PhantomData,
        }
    }

    /// The same outbox, for what publishes nothing and need not know what would be accepted.
    pub(crate) fn untyped(&self) -> Outbox<S> {
        Outbox {
            inner: Arc::clone(&self.inner),
            set: PhantomData,
        }
    }

    /// Begins a transaction of the outbox, on the application's connections.
    ///
    /// What is published through it is dispatched in this process right after its
    /// [`commit`](OutboxTx::commit). It states the isolation level under which a duplicate does
    /// not abort a transaction: READ COMMITTED on PostgreSQL, IMMEDIATE on SQLite.
    ///
    /// # Errors
    ///
    /// Returns the store's error if no connection was to be had.
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future begins nothing that is kept.
    pub async fn begin(&self) -> Result<OutboxTx<S, Set>, StoreError> {
        self.engine()?;
        let tx = self.inner.parts.store.begin().await?;
        Ok(OutboxTx::new(self.untyped(), tx))
    }

    /// Publishes an event through the caller's transaction.
    ///
    /// One statement, and a second one where a dedup key is taken. (The first publish of a process
    /// on PostgreSQL also reads the installation's UUID, through the same connection.) It begins,
    /// commits and rolls back nothing: the event lives or dies with `tx`. A relay takes it once it
    /// is committed; to have it dispatched at once, hand the answer to
    /// [`dispatch`](Self::dispatch) after the commit, or publish through [`begin`](Self::begin).
    ///
    /// # A second publish of a key waits for the first one's commit
    ///
    /// While another transaction has published the same dedup key and is still open, this call
    /// waits for it: only its end tells whether the key is taken. Two transactions that publish
    /// two keys in opposite order can deadlock; the database then aborts one of them and
    /// [`PublishError::is_transient`] is true.
    ///
    /// # Errors
    ///
    /// Returns [`PublishError`]. All but its `Store` variant leave the transaction usable.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves it open whether the row was inserted. Roll back.
    pub async fn publish<E: EventOf<Set>>(
        &self,
        tx: &mut S::Tx<'_>,
        event: &E,
    ) -> Result<Published<E>, PublishError> {
        self.publish_with(tx, event, &PublishOptions::default())
            .await
    }

    /// Publishes an event with options, as [`publish`](Self::publish) does.
    ///
    /// # Errors
    ///
    /// As [`publish`](Self::publish).
    ///
    /// # Cancel safety
    ///
    /// As [`publish`](Self::publish).
    pub async fn publish_with<E: EventOf<Set>>(
        &self,
        tx: &mut S::Tx<'_>,
        event: &E,
        options: &PublishOptions,
    ) -> Result<Published<E>, PublishError> {
        let row = publish::prepare(event, options, &self.inner.parts.settings)?;
        let mut answers = self.insert(tx, &[row]).await?;
        self.expect_work();
        answers
            .pop()
            .ok_or_else(|| PublishError::Store(no_answer()))
    }

    /// Publishes any number of events of one type with one statement, and answers in their order.
    ///
    /// Nothing is inserted if one of them is refused. Of two with the same dedup key the second is
    /// a duplicate of the first.
    ///
    /// # Errors
    ///
    /// As [`publish`](Self::publish).
    ///
    /// # Cancel safety
    ///
    /// As [`publish`](Self::publish).
    pub async fn publish_all<'e, E: EventOf<Set>>(
        &self,
        tx: &mut S::Tx<'_>,
        events: impl IntoIterator<Item = &'e E>,
    ) -> Result<Vec<Published<E>>, PublishError> {
        let rows = self.prepare_all(events, &PublishOptions::default())?;
        let answers = self.insert(tx, &rows).await?;
        self.expect_work();
        Ok(answers)
    }

    /// Dispatches committed events now, in this process, instead of at the relay's next turn.
    ///
    /// For events published through the caller's own transaction, after its commit. Returns at
    /// once; [`Dispatching::settled`] waits. An event that is not due, is held by somebody, is
    /// settled, or has no handler here is left alone, and so is one whose transaction did not
    /// commit. What finds the inline queue full is left to the relays.
    ///
    /// ```
    /// # use outbox_core::{Outbox, OutboxEvent, Store};
    /// # async fn f<S: Store, E: OutboxEvent>(outbox: Outbox<S>, mut tx: S::Tx<'static>, event: E) -> Result<(), Box<dyn std::error::Error>> {
    /// let published = outbox.publish(&mut tx, &event).await?;
    /// outbox.store().commit(tx).await?;
    /// outbox.dispatch(published)?.settled().await;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns an error if the background could not be started.
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    pub fn dispatch(
        &self,
        events: impl IntoIterator<Item = EventId>,
    ) -> Result<Dispatching, StoreError> {
        let (waiter, dispatching) = Dispatching::new();
        let asked: Vec<Asked> = events
            .into_iter()
            .map_while(|event| {
                let place = Arc::clone(&self.inner.places).try_acquire_owned().ok()?;
                Some(Asked::new(event, place, waiter.clone()))
            })
            .collect();
        if !asked.is_empty() {
            // Fails only once the outbox has closed; then its rows are the relay's.
            let _ = self.engine()?.inline.send(Handover::Asked(asked));
        }
        Ok(dispatching)
    }

    /// Runs the handler of `event` here and now, without a row.
    ///
    /// For what must not be consistent with anything: a cache to warm, a nudge. It is not retried,
    /// not deduplicated and not kept; if the process dies it is gone. The handler gets the event
    /// as it would be read back from a row, its own timeout, attempt 1 of 1, and an event id that
    /// is new with every call.
    ///
    /// # Errors
    ///
    /// Returns [`DirectError`] if there is no handler, the event cannot be written as JSON, or the
    /// handler failed, panicked or overran its timeout. Where there are several, all of them run, side
    /// by side; the output is that of the primary one, and the error that of the first that failed.
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the handler's.
    pub async fn dispatch_directly<E: EventOf<Set>>(
        &self,
        event: &E,
    ) -> Result<E::Output, DirectError> {
        let Parts {
            registry, settings, ..
        } = &self.inner.parts;
        let Some(handlers) = registry.reading(E::NAME, E::VERSION) else {
            return Err(DirectError::NoHandler { event: E::NAME });
        };
        let payload =
            publish::payload(event, settings.payload_max).map_err(DirectError::Invalid)?;
        let origin = EventId::new(uuid::Uuid::new_v4(), 0);
        let runs = (0..).zip(handlers.all());
        let runs = runs.map(|(n, entry)| {
            let id = EventId::new(origin.installation(), n);
            self.run_directly::<E>(entry, id, origin, &payload)
        });
        let outputs = futures_util::future::join_all(runs).await;
        let mut outputs = outputs.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(outputs.swap_remove(0))
    }

    async fn run_directly<E: OutboxEvent>(
        &self,
        entry: &Entry,
        event_id: EventId,
        origin: EventId,
        payload: &str,
    ) -> Result<E::Output, DirectError> {
        let interrupt = CancellationToken::new();
        let delivery = Delivery {
            event_id,
            origin,
            event_name: entry.name,
            handler: entry.handler,
            version: E::VERSION,
            attempt: NonZeroU32::MIN,
            max_attempts: NonZeroU32::MIN,
            first_published_at: None,
            headers: std::collections::BTreeMap::new(),
            cancelled: interrupt.child_token(),
        };
        // So that work the handler has spawned hears of it when the caller drops this future.
        let _stop = interrupt.clone().drop_guard();
        let failed = |error| DirectError::Failed {
            event: E::NAME,
            error,
        };
        let finding = match &entry.runner {
            Runner::Plain(handler) => {
                let handling = handler.run(payload, &delivery);
                let handling =
                    middleware::around(self.registry().middleware(), &delivery, handling);
                dispatch::run(handling, entry.timeout, &delivery, &interrupt).await
            }
            Runner::Transactional => self
                .run_in_transaction(entry, payload, &delivery, &interrupt)
                .await
                .map_err(|error| failed(ErrorText::from(&error)))?,
        };
        match finding {
            Some(Finding::Done(output)) => serde_json::from_str(&output).map_err(|error| {
                let text = format_args!("the handler's output cannot be read back: {error}");
                failed(ErrorText::new(&text))
            }),
            Some(Finding::Failed { error, .. }) => Err(failed(error)),
            None => Err(failed(ErrorText::new(&"interrupted"))),
        }
    }

    /// Runs a handler that takes a transaction, and commits what it wrote if it succeeds.
    async fn run_in_transaction(
        &self,
        entry: &Entry,
        payload: &str,
        delivery: &Delivery,
        interrupt: &CancellationToken,
    ) -> Result<Option<Finding>, StoreError> {
        let Some(handler) = self.inner.parts.transactional.get(&entry.key()) else {
            return Ok(None);
        };
        let mut tx = self.store().begin().await?;
        let succeeded = Succeeded::default();
        let handling = succeeded.watch(handler.run(payload, &mut tx, delivery));
        let handling = middleware::around(self.registry().middleware(), delivery, handling);
        let finding = dispatch::run(handling, entry.timeout, delivery, interrupt).await;
        match finding {
            Some(Finding::Done(_)) if succeeded.get() => self.store().commit(tx).await?,
            _ => self.store().rollback(tx).await?,
        }
        Ok(finding)
    }

    /// The handlers that take a transaction.
    pub(crate) fn transactional(&self) -> &Arc<Transactional<S::Connection>> {
        &self.inner.parts.transactional
    }

    /// A relay of this outbox, to be configured and started.
    pub fn relay(&self) -> RelayBuilder<S> {
        RelayBuilder::new(self.untyped())
    }

    /// Tells the relays of all processes that something may be due.
    ///
    /// A hint that saves up to one poll interval after the commit of the caller's own transaction;
    /// [`OutboxTx::commit`] does it by itself. Outside of a transaction and off the publisher's
    /// path: at most one notification per 2 ms leaves the process, and none before its background
    /// has started.
    pub fn wake(&self) {
        if let Some(engine) = self.inner.engine.get() {
            engine.shared.wake.everyone();
        }
    }

    /// Reads everything known about an event: its state, attempts, errors, output.
    ///
    /// `None` if it is gone (past its retention, rolled back) or belongs to another database.
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
    /// Dropping the future loses nothing but the answer.
    pub async fn find(&self, id: EventId) -> Result<Option<EventRecord>, StoreError> {
        let found = self
            .ask_alone(move |store| async move { store.find(id.row()).await })
            .await?;
        Ok(found.filter(|record| record.id == id))
    }

    /// Counts what waits, and for how long.
    ///
    /// At a cost that does not grow with the tables: where they are too large to be counted,
    /// [`Stats::exact`] is `false`. Fit for a metrics endpoint that is asked every few seconds.
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
    /// Dropping the future loses nothing but the answer.
    pub async fn stats(&self) -> Result<Stats, StoreError> {
        let counted = self
            .ask_alone(|store| async move { store.stats().await })
            .await?;
        let unhandled = counted.events.keys();
        let unhandled = unhandled.filter(|name| self.registry().get(name).is_none());
        Ok(Stats {
            unhandled: unhandled.cloned().collect(),
            events: counted.events,
            oldest_due: counted.oldest_due,
            exact: counted.exact,
        })
    }

    /// Lists the ordering keys that are blocked by an event that has failed or is dead, the longest
    /// blocked first: at most [`BLOCKED_KEYS_MAX`].
    ///
    /// A key whose first event waits for its retry frees itself. One with a dead letter at its head
    /// waits for a person: [`requeue`](crate::DeadLetters::requeue) has it handled again, and
    /// [`discard`](crate::DeadLetters::discard) lets the key go on without it. One at whose head is
    /// an event that nobody handles is not listed: sweeps report it.
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
    /// Dropping the future loses nothing but the answer.
    pub async fn blocked_keys(&self) -> Result<Vec<BlockedKey>, StoreError> {
        self.ask_alone(|store| async move { store.blocked_keys(BLOCKED_KEYS_MAX).await })
            .await
    }

    /// Asks the store something for a person or a tool: one question at a time, so that they leave
    /// the store's connections to the renewal.
    pub(crate) async fn ask_alone<T, F>(
        &self,
        question: impl FnOnce(S) -> F + Send + 'static,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
        T: Send + 'static,
    {
        let engine = self.engine()?;
        let _one_at_a_time = self.inner.asking.lock().await;
        engine.ask(question).await
    }

    /// What this outbox has done in this process since it was built.
    #[must_use]
    pub fn counters(&self) -> Snapshot {
        self.inner.parts.counters.snapshot()
    }

    /// The store it was built on.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.inner.parts.store
    }

    /// Ends inline dispatch, and the relay if there is one, without losing or charging anything.
    ///
    /// From now on nothing is claimed and events are published unleased, for other instances.
    /// Handlers that run may finish within `grace`, their leases renewed; the last fifth of it (at
    /// most 2 s) is kept for storing their outcomes. Whatever has not finished by then is told to
    /// stop and given back uncharged. Running it twice is harmless.
    ///
    /// # Errors
    ///
    /// Returns [`ShutdownError`] with the events whose outcome could not be stored within `grace`.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the outbox stopped and its runs to their leases.
    pub async fn shutdown(&self, grace: Duration) -> Result<(), ShutdownError> {
        match self.inner.engine.get() {
            Some(engine) => engine.drain(grace).await,
            None => Ok(()),
        }
    }

    pub(crate) fn prepare_all<'e, E: OutboxEvent>(
        &self,
        events: impl IntoIterator<Item = &'e E>,
        options: &PublishOptions,
    ) -> Result<Vec<NewEvent>, PublishError> {
        let settings = &self.inner.parts.settings;
        events
            .into_iter()
            .map(|event| publish::prepare(event, options, settings))
            .collect()
    }

    async fn insert<E: OutboxEvent>(
        &self,
        connection: &mut S::Connection,
        rows: &[NewEvent],
    ) -> Result<Vec<Published<E>>, PublishError> {
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let answers = self.inner.parts.store.insert(connection, rows).await?;
        let answers = answers.into_iter().zip(rows);
        Ok(answers
            .map(|(answer, row)| Published::of(answer, row))
            .collect())
    }

    /// The caller commits soon, we do not see when: the relay polls at its shortest interval for a
    /// while. A claim at once would come too early, and once per publish.
    fn expect_work(&self) {
        if let Some(engine) = self.inner.engine.get() {
            engine.shared.wake.expect();
        }
    }

    /// Lets runs in this process hear soon that their events were cancelled.
    pub(crate) fn tell_cancelled(&self, rows: &[i64]) {
        // Without a background nothing runs.
        if let Some(engine) = self.inner.engine.get()
            && !rows.is_empty()
        {
            engine.shared.held.renew_now(rows);
        }
    }

    /// Whether a shutdown has begun.
    pub(crate) fn is_stopping(&self) -> bool {
        let engine = self.inner.engine.get();
        engine.is_some_and(|engine| engine.shared.stopping.is_cancelled())
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.inner.parts.settings
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.inner.parts.registry
    }

    pub(crate) fn places(&self) -> &Arc<Semaphore> {
        &self.inner.places
    }

    /// The background, started if it was not.
    pub(crate) fn engine(&self) -> Result<&Engine<S>, StoreError> {
        if let Some(engine) = self.inner.engine.get() {
            return Ok(engine);
        }
        let _starting = self
            .inner
            .starting
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(engine) = self.inner.engine.get() {
            return Ok(engine);
        }
        let engine = Engine::start(&self.inner.parts)?;
        Ok(self.inner.engine.get_or_init(|| engine))
    }

    /// Takes the place of this outbox's one relay. `None` while another one has it.
    pub(crate) fn take_relay_place(&self) -> Option<CancellationToken> {
        let mut place = self
            .inner
            .relay
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if place
            .as_ref()
            .is_some_and(|running| !running.is_cancelled())
        {
            return None;
        }
        let stop = CancellationToken::new();
        *place = Some(stop.clone());
        Some(stop)
    }
}

impl<S: Store, Set> Clone for Outbox<S, Set> {
    fn clone(&self) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
            set: PhantomData,
        }
    }
}

impl<S: Store, Set> fmt::Debug for Outbox<S, Set> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox")
            .field("instance", &self.inner.parts.settings.instance)
            .field("events", &self.inner.parts.registry.known())
            .finish_non_exhaustive()
    }
}

pub(crate) fn no_answer() -> StoreError {
    StoreError::new(
        crate::store::StoreErrorKind::Other,
        "publish: the store gave no answer",
    )
}

/// Events on their way to their handlers.
///
/// Dropping it changes nothing: the dispatch does not belong to it.
#[derive(Debug)]
pub struct Dispatching {
    pending: mpsc::Receiver<()>,
}

impl Dispatching {
    pub(crate) fn new() -> (mpsc::Sender<()>, Self) {
        let (sender, pending) = mpsc::channel(1);
        (sender, Self { pending })
    }

    /// Waits until every event dispatched inline has an outcome that is stored, or has been left to
    /// a relay.
    ///
    /// Which of the two is told by [`Outbox::find`]. Events that were not dispatched inline are not
    /// waited for.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing but the wait.
    pub async fn settled(mut self) {
        // Nothing is ever sent; the channel closes when the last event lets go of its sender.
        while self.pending.recv().await.is_some() {}
    }
}

/// Why a direct dispatch failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum DirectError {
    /// No handler is registered for the event.
    NoHandler {
        /// The event name.
        event: &'static str,
    },
    /// The event cannot be written as JSON within the payload limit.
    Invalid(PublishError),
    /// The handler failed, panicked or overran its timeout.
    Failed {
        /// The event name.
        event: &'static str,
        /// What went wrong.
        error: ErrorText,
    },
}

impl fmt::Display for DirectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoHandler { event } => write!(f, "event `{event}` has no handler"),
            Self::Invalid(error) => fmt::Display::fmt(error, f),
            Self::Failed { event, error } => {
                write!(f, "the direct dispatch of `{event}` failed: {error}")
            }
        }
    }
}

impl std::error::Error for DirectError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Invalid(error) => error.source(),
            _ => None,
        }
    }
}
