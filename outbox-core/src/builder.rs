//! Everything an outbox can be told before it runs: its handlers and its settings.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use crate::backoff::Backoff;
use crate::counters::Counters;
use crate::coverage::{HandlersOf, Register, SetOf};
use crate::engine::Parts;
use crate::event_set::{AnyEvent, EventOf};
use crate::handler::{Handler, TransactionalHandler};
use crate::handler_options::HandlerOptions;
#[cfg(feature = "tower")]
use crate::middleware::Returned;
#[cfg(feature = "tower")]
use crate::middleware::tower::{Dispatch, Layered, RunService};
use crate::middleware::{ErasedMiddleware, Middleware};
use crate::outbox::Outbox;
use crate::registry::{BuildError, Registration, Registry, Runner, Transactional, transactional};
use crate::settings::{Draft, Threads};
use crate::settled::{DeadEvent, Hooks, SettledEvent, UndecodableEvent};
use crate::store::Store;

/// Collects handlers and settings.
///
/// `Set` says which events the outbox accepts, and `Handlers`, which [`on`](Self::on) fills in,
/// which of them have a handler so far. Without a closed set both are left out: `OutboxBuilder<S>`.
#[must_use]
pub struct OutboxBuilder<S: Store, Set = AnyEvent, Handlers = ()> {
    store: S,
    draft: Draft,
    registrations: Vec<Registration>,
    transactional: Transactional<S::Connection>,
    middleware: Vec<Arc<dyn ErasedMiddleware>>,
    hooks: Hooks,
    types: PhantomData<fn(Set, Handlers)>,
}

impl<S: Store, Set, Handlers> OutboxBuilder<S, Set, Handlers> {
    pub(crate) fn new(store: S) -> Self {
        Self {
            store,
            draft: Draft::default(),
            registrations: Vec::new(),
            transactional: Transactional::new(),
            middleware: Vec::new(),
            hooks: Hooks::default(),
            types: PhantomData,
        }
    }

    /// Registers the handler of one event type: a [`Handler`], or a closure
    /// `|event: E| async move { .. }`.
    ///
    /// If the outbox has a closed set, the event must be a member of it. A member that nobody
    /// publishes any more stays in the set, with its handler, until its last row is settled.
    pub fn on<E: EventOf<Set>, H: Handler<E>>(
        self,
        handler: H,
    ) -> OutboxBuilder<S, Set, Handlers::Registered>
    where
        Handlers: Register<E::Place>,
    {
        self.on_with(HandlerOptions::new(), handler)
    }

    /// Registers one of several handlers of an event type, under a name of its own:
    /// [`on_with`](Self::on_with) says what follows from that.
    pub fn on_named<E: EventOf<Set>, H: Handler<E>>(
        self,
        name: &'static str,
        handler: H,
    ) -> OutboxBuilder<S, Set, Handlers::Registered>
    where
        Handlers: Register<E::Place>,
    {
        self.on_with(HandlerOptions::named(name), handler)
    }

    /// Registers a handler with options of its own: a name, limits, a circuit breaker.
    ///
    /// # Several handlers of one event
    ///
    /// An event type can have several handlers, if each has a name. Publishing still writes one row.
    /// The first process that takes it gives each handler a row of its own, before any of them runs,
    /// and from there on they have nothing to do with each other: each has its own attempts, backoff,
    /// timeout and dead letter. One that fails, or kills the process, never makes the others run
    /// again.
    ///
    /// Which handlers an event has is decided then, by that process: a handler that is added in a new
    /// release gets what is split from then on. What was split for a handler that no process has any
    /// more waits, and sweeps report it.
    ///
    /// Each handler's [`Delivery::event_id`](crate::Delivery::event_id) is its own, so that two of
    /// them can use it as the key of their effects.
    /// [`Delivery::origin`](crate::Delivery::origin) is the id that the publisher was given. All
    /// handlers return the event's output; the one that is kept, and told to whoever publishes the
    /// dedup key again, is that of the first registered, or of the
    /// [primary](HandlerOptions::primary) one.
    ///
    /// ```
    /// # use outbox_core::testing::MemoryStore;
    /// # use outbox_core::{HandlerError, HandlerOptions, Outbox, OutboxEvent};
    /// # use serde::{Deserialize, Serialize};
    /// #[derive(Serialize, Deserialize, OutboxEvent)]
    /// struct OrderPaid {
    ///     order_id: u64,
    /// }
    ///
    /// let outbox = Outbox::builder(MemoryStore::new())
    ///     .on_named("ledger", |_: OrderPaid| async { Ok::<_, HandlerError>(()) })
    ///     .on_with(HandlerOptions::named("email").max_attempts(3), |_: OrderPaid| async {
    ///         Ok::<_, HandlerError>(())
    ///     })
    ///     .build()?;
    /// # Ok::<_, outbox_core::BuildError>(())
    /// ```
    pub fn on_with<E: EventOf<Set>, H: Handler<E>>(
        mut self,
        options: HandlerOptions,
        handler: H,
    ) -> OutboxBuilder<S, Set, Handlers::Registered>
    where
        Handlers: Register<E::Place>,
    {
        let registration = Registration::new::<E>(options, handler);
        self.registrations.push(registration);
        self.registered()
    }

    /// Registers a handler that writes to this database through a transaction, which settles its
    /// event, too: see [`TransactionalHandler`].
    ///
    /// What it wrote and that the event is processed commit together, and only while this process
    /// has the event's lease. So its effect *in this database* happens exactly once. Any other effect
    /// it has can happen more than once, as with every handler, and can happen without the commit.
    ///
    /// # A transaction is open while it runs
    ///
    /// It is taken from the application's connections, so `concurrency` is bounded by their number,
    /// and it keeps its locks. On SQLite it has the write lock of the file for all that time, and
    /// every other writer waits: keep it short. Where none is to be had, the event goes back,
    /// uncharged.
    pub fn on_transactional<E: EventOf<Set>, H>(
        self,
        handler: H,
    ) -> OutboxBuilder<S, Set, Handlers::Registered>
    where
        Handlers: Register<E::Place>,
        H: TransactionalHandler<S::Connection, E> + 'static,
    {
        self.on_transactional_with(HandlerOptions::new(), handler)
    }

    /// Registers such a handler with options of its own, as [`on_with`](Self::on_with) does.
    pub fn on_transactional_with<E: EventOf<Set>, H>(
        mut self,
        options: HandlerOptions,
        handler: H,
    ) -> OutboxBuilder<S, Set, Handlers::Registered>
    where
        Handlers: Register<E::Place>,
        H: TransactionalHandler<S::Connection, E> + 'static,
    {
        let handler = transactional::<_, E, _>(handler);
        let key = (E::NAME, options.name);
        self.registrations
            .push(Registration::of::<E>(options, Runner::Transactional));
        self.transactional.insert(key, handler);
        self.registered()
    }

    fn registered<Registered>(self) -> OutboxBuilder<S, Set, Registered> {
        OutboxBuilder {
            store: self.store,
            draft: self.draft,
            registrations: self.registrations,
            transactional: self.transactional,
            middleware: self.middleware,
            hooks: self.hooks,
            types: PhantomData,
        }
    }

    /// Runs `middleware` around each run of a handler. The one that is added first is the outermost.
    pub fn middleware(mut self, middleware: impl Middleware) -> Self {
        self.middleware.push(Arc::new(middleware));
        self
    }

    /// Runs a layer of `tower` around each run of a handler, in the order of all
    /// [middleware](Self::middleware).
    ///
    /// It is applied once, and the service it gives is cloned for each run: what its clones share, a
    /// concurrency limit for instance, holds for all runs together. An error of a layer's own is a
    /// retry; one that came from further in goes on as it is.
    #[cfg(feature = "tower")]
    pub fn layer<L>(self, layer: L) -> Self
    where
        L: tower_layer::Layer<RunService>,
        L::Service: tower_service::Service<Dispatch, Response = Returned> + Clone + Send + 'static,
        <L::Service as tower_service::Service<Dispatch>>::Error:
            Into<Box<dyn std::error::Error + Send + Sync>>,
        <L::Service as tower_service::Service<Dispatch>>::Future: Send,
    {
        self.middleware(Layered::new(&layer))
    }

    /// Names this process in the rows it holds (`claimed_by`) and in recorded failures.
    ///
    /// Defaults to `<host>:<process id>`. At most
    /// [`INSTANCE_MAX`](crate::settings::INSTANCE_MAX) bytes.
    pub fn instance(mut self, name: impl Into<String>) -> Self {
        self.draft.instance = name.into();
        self
    }

    /// Sets how long a claim is valid unless it is renewed: how long an event waits when the
    /// process that holds it dies.
    ///
    /// Defaults to 60 seconds. From 1 second to 24 hours, and no shorter than any handler's
    /// timeout.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.draft.lease = lease;
        self
    }

    /// Sets how long one run of a handler may take, for event types that do not say.
    ///
    /// Defaults to 30 seconds. At most the lease.
    pub fn handler_timeout(mut self, timeout: Duration) -> Self {
        self.draft.timeout = timeout;
        self
    }

    /// Sets the wait between attempts, for event types that do not say.
    ///
    /// Defaults to [`Backoff::DEFAULT`]: 30 s, 1 min, 2 min … 30 min, shortened at random by up to
    /// a fifth.
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.draft.backoff = backoff;
        self
    }

    /// Sets after how many attempts an event becomes a dead letter, for event types that do not
    /// say. Stored with each row at its publish.
    ///
    /// Defaults to 10, which at the default backoff spans about two hours. From 1. An event with a
    /// single attempt is never dispatched inline: were the process to die between its commit and
    /// its handler, the attempt would be spent on nothing.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.draft.max_attempts = attempts;
        self
    }

    /// Sets how long processed events are kept, for event types that do not say. Stored with each
    /// row at its publish.
    ///
    /// Defaults to 7 days. Zero keeps nothing but the dedup key.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.draft.retention = retention;
        self
    }

    /// Sets how long a dedup key is kept, with the final state and the output, once its event is
    /// processed: after that the same key is a new event.
    ///
    /// Defaults to 1 day, and is never shorter than the event's own retention. While an event is
    /// unsettled or dead its key is kept whatever this says.
    pub fn dedup_retention(mut self, retention: Duration) -> Self {
        self.draft.dedup_retention = retention;
        self
    }

    /// Sets the largest payload, in bytes of JSON.
    ///
    /// Defaults to 1 MiB. A larger one is refused before any SQL is sent.
    pub fn max_payload_bytes(mut self, bytes: usize) -> Self {
        self.draft.payload_max = bytes;
        self
    }

    /// Leaves everything that is published to the relays.
    ///
    /// Defaults to inline dispatch of what is published through [`Outbox::begin`].
    pub fn without_inline_dispatch(mut self) -> Self {
        self.draft.inline.on = false;
        self
    }

    /// Sets how many handlers run at once in inline dispatch, beside those of a relay.
    ///
    /// Defaults to 16. From 1 to 10,000.
    pub fn inline_concurrency(mut self, handlers: u32) -> Self {
        self.draft.inline.concurrency = handlers;
        self
    }

    /// Sets how many events may be between their publish and their inline dispatch. While they
    /// are, what is published goes to the relays.
    ///
    /// Defaults to 1,024. From 1 to 10,000.
    pub fn inline_queue(mut self, events: u32) -> Self {
        self.draft.inline.queue = events;
        self
    }

    /// Sets the lease that a row to be dispatched inline is born with: how long its event waits if
    /// this process dies right after the commit. It is renewed to the full lease if its handler
    /// takes long, and an event that has waited for half of it goes to the relays.
    ///
    /// Defaults to 15 seconds, or the lease if that is shorter. From 1 second to the lease.
    pub fn inline_lease(mut self, lease: Duration) -> Self {
        self.draft.inline.lease = Some(lease);
        self
    }

    /// Neither wakes the relays of other processes nor lets them wake this one's. Everything still
    /// arrives, by polling.
    ///
    /// Defaults to wake-ups, where the store has any.
    pub fn without_notifications(mut self) -> Self {
        self.draft.notifications = false;
        self
    }

    /// Runs the background on the runtime that starts it instead of on a thread of its own.
    ///
    /// # A handler that blocks then stops the renewal
    ///
    /// A handler that blocks the runtime's threads for longer than a lease loses the leases of
    /// everything this process holds. Meant for tests with paused time, and for targets without
    /// threads.
    pub fn on_current_runtime(mut self) -> Self {
        self.draft.threads = Threads::Caller;
        self
    }

    /// Adds a function that is called after each outcome that was stored.
    ///
    /// It is called on the background's thread and must not block. One that panics is logged and
    /// changes nothing. It is not called for outcomes that could not be stored.
    pub fn on_settled(mut self, hook: impl Fn(&SettledEvent) + Send + Sync + 'static) -> Self {
        self.hooks.add_settled(hook);
        self
    }

    /// Adds a function that is called after each dead letter that this process stored.
    ///
    /// As [`on_settled`](Self::on_settled), for dead letters alone: a place to page somebody. A dead
    /// letter of another instance is reported there.
    pub fn on_dead_letter(mut self, hook: impl Fn(&DeadEvent) + Send + Sync + 'static) -> Self {
        self.hooks.add_dead_letter(hook);
        self
    }

    /// Has events removed that cannot be decoded, instead of kept as dead letters. Nothing of them
    /// is kept but the dedup key, for its retention.
    ///
    /// Defaults to dead letters of the reason `undecodable`. The hook is given each event first,
    /// and is where to put it if anybody may still want it. It runs on the handlers' runtime, must
    /// not block, and can be given an event more than once: when the removal could not be stored,
    /// the event is claimed again. If it panics, the event becomes a dead letter after all. What
    /// cannot be decoded before its commit
    /// ([`dispatch_uncommitted`](crate::OutboxTx::dispatch_uncommitted)) is not given to it, and is a
    /// dead letter. A second call replaces the first hook.
    pub fn discard_undecodable(
        mut self,
        hook: impl Fn(&UndecodableEvent) + Send + Sync + 'static,
    ) -> Self {
        self.hooks.set_undecodable(hook);
        self
    }

    /// Checks everything that was collected.
    ///
    /// If the outbox has a closed set, this compiles only once each member has a handler.
    ///
    /// # Errors
    ///
    /// Returns [`BuildError`] if several handlers were registered for one event name and not each
    /// has a name of its own, if an alias is a name or an alias of another event, if a handler may
    /// run longer than the lease, or if a setting is out of its bounds.
    pub fn build<Members>(self) -> Result<Outbox<S, Set>, BuildError>
    where
        Set: SetOf<Members>,
        Handlers: HandlersOf<Members>,
    {
        let settings = self.draft.check()?;
        let registry = Registry::build(self.registrations, self.middleware, &settings)?;
        Ok(Outbox::assemble(Parts {
            store: self.store,
            registry: Arc::new(registry),
            transactional: Arc::new(self.transactional),
            settings: Arc::new(settings),
            counters: Arc::new(Counters::default()),
            hooks: Arc::new(self.hooks),
        }))
    }
}

impl<S: Store, Set, Handlers> fmt::Debug for OutboxBuilder<S, Set, Handlers> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboxBuilder")
            .field("settings", &self.draft)
            .finish_non_exhaustive()
    }
}
