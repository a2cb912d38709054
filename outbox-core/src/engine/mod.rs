//! What runs in the background of one outbox, whether it only publishes or also relays.
//!
//! Runs of handlers come from two sides: rows born leased, after their commit ([`inline`]), and
//! rows that a relay claims. From then on they share everything: the table of what is held
//! ([`held`]), the renewal ([`keeper`]) and the settlement ([`settler`]).
//!
//! The loops run on a thread of their own and the handlers on the application's runtime. That is
//! the only way to keep leases alive while a handler blocks every thread it can get.

pub(crate) mod awaited;
pub(crate) mod freed;
pub(crate) mod held;
pub(crate) mod inline;
pub(crate) mod settler;

mod keeper;
mod shutdown;
pub(crate) mod split;
mod transactional;
pub(crate) mod wait;
pub(crate) mod wake;

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::counters::Counters;
use crate::dispatch::{self, Failure, Finding};
use crate::engine::awaited::Awaited;
use crate::engine::freed::Freed;
use crate::engine::held::{Held, Holding, Run, renewal_after};
use crate::engine::settler::{About, Ending, Waiter};
use crate::engine::wake::Wake;
use crate::event::EventId;
use crate::handler::Delivery;
use crate::lane::Entered;
use crate::lease::HeldLease;
use crate::middleware;
use crate::outcome::Outcome;
use crate::registry::{Entry, ErasedHandler, Registry, Runner, Transactional};
use crate::settings::{Settings, Threads};
use crate::settled::Hooks;
use crate::store::{Claimed, Store, StoreError, StoreErrorKind};
use crate::version::PayloadError;

use shutdown::Deadlines;
pub use shutdown::ShutdownError;

/// How long after its timeout a handler is taken to block its thread: until then the timeout
/// itself may still drop it.
const OVERDUE_AFTER: Duration = Duration::from_millis(250);

/// The most events a process holds from claim to stored outcome, those that run included.
const SLOTS: usize = 10_000;

/// What every loop works with.
pub(crate) struct Shared<S: Store> {
    pub(crate) store: S,
    pub(crate) registry: Arc<Registry>,
    pub(crate) transactional: Arc<Transactional<S::Connection>>,
    pub(crate) settings: Arc<Settings>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) hooks: Arc<Hooks>,
    pub(crate) held: Held,
    pub(crate) wake: Wake,
    /// Ordering keys whose next event may be below the relay's marks.
    pub(crate) freed: Freed,
    /// Events whose end is waited for.
    pub(crate) awaited: Awaited,
    /// No new runs: a shutdown has begun.
    pub(crate) stopping: CancellationToken,
    /// Calls whose answer may be rows that this process then holds.
    asking: TaskTracker,
    /// Rows of which a shutdown could not store what became of them.
    pub(crate) unstored: Mutex<Vec<i64>>,
    /// This role may not settle, so nothing is born leased.
    pub(crate) inline_refused: AtomicBool,
    /// The loops end.
    pub(crate) closing: CancellationToken,
    /// Bounds what is held: a slot is taken at the claim and freed when the outcome is stored.
    pub(crate) slots: Arc<Semaphore>,
    endings: mpsc::UnboundedSender<Ending>,
    /// When a shutdown stops waiting for handlers, and when for the store.
    deadlines: OnceLock<Deadlines>,
    /// Where handlers run.
    handlers: Handle,
}

/// A claimed event, and what it takes to run it.
pub(crate) struct Start {
    pub(crate) claimed: Claimed,
    pub(crate) trusted_until: Instant,
    /// The permit is kept until the handler returns, the slot until the outcome is stored.
    pub(crate) place: split::Place,
    pub(crate) waiter: Waiter,
}

impl<S: Store> Shared<S> {
    /// Starts the handler of a claimed event on the application's runtime.
    pub(crate) fn start(self: &Arc<Self>, start: Start) {
        let Start {
            claimed,
            trusted_until,
            place: (permit, slot),
            waiter,
        } = start;
        let lease = claimed.lease();
        let handlers = self.registry.reading(&claimed.name, claimed.version);
        let entry = handlers.and_then(|handlers| match claimed.handler.as_deref() {
            // Whose it is matters no more.
            None if claimed.expired => handlers.all().first(),
            handler => handlers.of(handler),
        });
        let Some(entry) = entry else {
            // Claims name the events there are handlers for, so this is a store's mistake; the
            // event is given back uncharged to whoever knows it.
            tracing::error!(event_name = %claimed.name, version = %claimed.version, "claimed an event without a handler");
            self.release(lease, waiter);
            return;
        };
        if self.stopping.is_cancelled() {
            // It was asked for before.
            self.release(lease, waiter);
            return;
        }
        let entered = match claimed.expired {
            true => None,
            false => match entry.lane.enter() {
                Some(entered) => Some(entered),
                // It had room when the event was claimed.
                None => return self.release(lease, waiter),
            },
        };
        // From what is left of it, because a row is born with a shorter lease than a claim gives.
        let now = Instant::now();
        let renew_at = renewal_after(now, trusted_until.saturating_duration_since(now));
        let interrupt = CancellationToken::new();
        let run = Run {
            about: About::claimed(&claimed),
            entry: Arc::clone(entry),
            waiter,
            started: false,
        };
        let overdue_after = entry.timeout + OVERDUE_AFTER;
        self.held.begin(
            lease,
            Holding {
                trusted_until,
                renew_at,
                overdue_at: now + overdue_after,
                interrupt: interrupt.clone(),
                run,
                slot,
            },
        );
        let Some(entered) = entered else {
            self.expire(lease);
            return;
        };
        let entry = Arc::clone(entry);
        let unfinished = Unfinished {
            shared: Arc::clone(self),
            lease,
        };
        self.handlers.spawn(async move {
            let _permit = permit;
            let _entered = Leaving {
                shared: Arc::clone(&unfinished.shared),
                limited: entry.lane.has_limit(),
                entered: Some(entered),
            };
            let shared = &unfinished.shared;
            if !shared.may_begin(lease, &entry) {
                return;
            }
            let finding = match (&entry.runner, shared.transactional.get(&entry.key())) {
                (Runner::Plain(handler), _) => {
                    run_claimed(shared, &**handler, &entry, &claimed, &interrupt).await
                }
                (Runner::Transactional, Some(handler)) => {
                    transactional::run(shared, &**handler, &entry, &claimed, &interrupt).await
                }
                // The builder puts them in together. Given back by `unfinished`.
                (Runner::Transactional, None) => None,
            };
            if let Some(finding) = finding {
                let finding = shared.hooks.undecodable(finding, &claimed);
                shared.finish(lease, finding);
            }
        });
    }

    /// Whether the handler may begin now, from when its time is counted. If it may not because its
    /// lease is nearly over, the event is given back.
    fn may_begin(&self, lease: HeldLease, entry: &Entry) -> bool {
        let overdue_after = entry.timeout + OVERDUE_AFTER;
        let margin = self.settings.lease_margin();
        let start = self.held.start(lease, overdue_after, margin);
        if start == held::Start::TooLate {
            self.give_back_late(lease);
        }
        start == held::Start::Begins
    }

    /// The answer to its claim, or a thread for its handler, came when the lease was nearly over.
    fn give_back_late(&self, lease: HeldLease) {
        if let Some(run) = self.held.end_run(lease) {
            tracing::warn!(
                event_id = %run.about.id,
                event_name = %run.about.name,
                "an event goes back: its lease was nearly over before its handler could begin"
            );
            self.release(lease, run.waiter);
        }
    }

    /// Ends what nobody is to run any more. It was held until here, so that a backlog of it takes no
    /// more slots than runs do, and its outcome is tried again for as long.
    fn expire(&self, lease: HeldLease) {
        if let Some(run) = self.held.end_run(lease) {
            self.end(Ending::Settle {
                lease,
                about: run.about,
                outcome: Outcome::Expired,
                at: Instant::now(),
                waiter: run.waiter,
            });
        }
    }

    /// Ends a run with its result, unless somebody else has ended it before.
    fn finish(&self, lease: HeldLease, finding: Finding) {
        match self.held.end_run(lease) {
            Some(run) => self.settle(lease, run, finding),
            None => self.refuse_late_result(lease),
        }
    }

    fn refuse_late_result(&self, lease: HeldLease) {
        self.counters.late_results.one();
        tracing::warn!(
            row = lease.row,
            "a handler's result came too late and was refused"
        );
    }

    /// Ends a run that its timeout could not drop.
    fn finish_overdue(&self, lease: HeldLease) {
        let Some(run) = self.held.end_run(lease) else {
            return;
        };
        let limit = run.entry.timeout;
        if run.started {
            tracing::error!(
                event_name = run.entry.name,
                timeout = ?limit,
                "a handler blocks its thread beyond its timeout; it keeps its permit until it returns"
            );
            self.settle(lease, run, Err(Failure::TimedOut(limit)).into());
        } else {
            // Nothing has happened that an attempt could be charged for.
            tracing::error!(
                event_name = run.entry.name,
                waited = ?limit,
                "no thread was free to run a handler: others block them all; its event goes back"
            );
            self.release(lease, run.waiter);
        }
    }

    fn settle(&self, lease: HeldLease, run: Run, finding: Finding) {
        run.entry.lane.report(&finding);
        let Run {
            about,
            entry,
            waiter,
            ..
        } = run;
        let outcome = dispatch::decide(
            finding,
            about.attempt,
            about.max_attempts,
            &entry.backoff,
            fastrand::f64(),
        );
        self.end(Ending::Settle {
            lease,
            about,
            outcome,
            at: Instant::now(),
            waiter,
        });
    }

    /// In a shutdown: what became of these rows could not be stored, and the caller must be told.
    pub(crate) fn not_stored(&self, rows: impl IntoIterator<Item = i64>) {
        let mut unstored = self.unstored.lock().unwrap_or_else(PoisonError::into_inner);
        unstored.extend(rows);
    }

    /// To be held from before the store is asked for rows until they are held, or given back: a
    /// shutdown waits for it. `None` once one has begun.
    pub(crate) fn may_ask(&self) -> Option<TaskTrackerToken> {
        // In this order: either the shutdown sees the token, or we see the shutdown.
        let asking = self.asking.token();
        (!self.stopping.is_cancelled()).then_some(asking)
    }

    /// Gives a claim back, uncharged.
    pub(crate) fn release(&self, lease: HeldLease, waiter: Waiter) {
        self.end(Ending::Release {
            lease,
            at: Instant::now(),
            waiter,
        });
    }

    /// Sends something to be written. What is under way is bounded by `slots`, by the places of the
    /// inline queue and by the chunks of a sweep, which are taken before and freed after.
    pub(crate) fn end(&self, ending: Ending) {
        // The settler is gone only when the outbox has closed; then the lease expires.
        let _ = self.endings.send(ending);
    }

    pub(crate) fn past_deadline(&self) -> bool {
        self.closing.is_cancelled()
            || self
                .deadlines
                .get()
                .is_some_and(|at| Instant::now() >= at.given_up)
    }

    /// Waits until everything sent before is stored or given up.
    pub(crate) async fn flush(&self) {
        let (stored, is_stored) = oneshot::channel();
        self.end(Ending::Flush(stored));
        // An error means that the outbox has closed.
        let _ = is_stored.await;
    }

    pub(crate) async fn sleep_unless_past_deadline(&self, delay: Duration) {
        let until = Instant::now() + delay;
        let until = self
            .deadlines
            .get()
            .map_or(until, |at| std::cmp::min(until, at.given_up));
        tokio::select! {
            () = self.closing.cancelled() => {}
            () = tokio::time::sleep_until(until) => {}
        }
    }
}

/// Travels with a run until its handler has returned.
struct Leaving<S: Store> {
    shared: Arc<Shared<S>>,
    limited: bool,
    entered: Option<Entered>,
}

impl<S: Store> Drop for Leaving<S> {
    fn drop(&mut self) {
        // In this order: the relay is woken to find the room that this makes.
        self.entered = None;
        if self.limited {
            self.shared.wake.local();
        }
    }
}

/// Travels with a run. Dropped without a result, because the run was interrupted or its runtime is
/// gone, it gives the claim back, unless the event is no longer ours.
struct Unfinished<S: Store> {
    shared: Arc<Shared<S>>,
    lease: HeldLease,
}

impl<S: Store> Drop for Unfinished<S> {
    fn drop(&mut self) {
        let Some(run) = self.shared.held.end_run(self.lease) else {
            return;
        };
        if !run.started && !self.shared.stopping.is_cancelled() {
            // Nobody has ended it and it never began: its runtime is gone. Were this process to go
            // on, it would claim everything there is and give it back again, as fast as it can.
            tracing::error!(
                "the runtime that handlers run on has ended; this outbox claims nothing any more"
            );
            self.shared.stopping.cancel();
        }
        self.shared.release(self.lease, run.waiter);
    }
}

/// Runs the handler of a claimed event. `None` when it was interrupted.
async fn run_claimed<S: Store>(
    shared: &Shared<S>,
    handler: &dyn ErasedHandler,
    entry: &Entry,
    claimed: &Claimed,
    interrupt: &CancellationToken,
) -> Option<Finding> {
    let delivery = match delivery(entry, claimed, interrupt) {
        Ok(delivery) => delivery,
        Err(undecodable) => return Some(undecodable),
    };
    let handling = handler.run(&claimed.payload, &delivery);
    let handling = middleware::around(shared.registry.middleware(), &delivery, handling);
    dispatch::run(handling, entry.timeout, &delivery, interrupt).await
}

/// What the handler of a claimed event is told. An error if its headers cannot be read.
fn delivery(
    entry: &Entry,
    claimed: &Claimed,
    interrupt: &CancellationToken,
) -> Result<Delivery, Finding> {
    let headers = decode_headers(claimed.headers.as_deref()).map_err(|source| {
        let version = claimed.version;
        let error = PayloadError::Unreadable { version, source };
        Finding::from(Err(Failure::Undecodable(error)))
    })?;
    Ok(Delivery {
        event_id: claimed.id,
        origin: match claimed.origin {
            Some(row) => EventId::new(claimed.id.installation(), row),
            None => claimed.id,
        },
        event_name: entry.name,
        handler: entry.handler,
        version: claimed.version,
        attempt: claimed.attempt,
        max_attempts: claimed.max_attempts,
        first_published_at: Some(claimed.created_at),
        headers,
        // A child, so that a handler which cancels its own token does not count as stopped.
        cancelled: interrupt.child_token(),
    })
}

fn decode_headers(headers: Option<&str>) -> Result<BTreeMap<String, String>, serde_json::Error> {
    headers.map_or_else(|| Ok(BTreeMap::new()), serde_json::from_str)
}

/// The loops of one outbox. Dropping it ends them.
pub(crate) struct Engine<S: Store> {
    pub(crate) shared: Arc<Shared<S>>,
    pub(crate) inline: mpsc::UnboundedSender<inline::Handover>,
    home: Handle,
    loops: TaskTracker,
}

/// What an engine is made from.
pub(crate) struct Parts<S: Store> {
    pub(crate) store: S,
    pub(crate) registry: Arc<Registry>,
    pub(crate) transactional: Arc<Transactional<S::Connection>>,
    pub(crate) settings: Arc<Settings>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) hooks: Arc<Hooks>,
}

impl<S: Store> Engine<S> {
    /// Starts the loops. Handlers run on the runtime this is called from.
    pub(crate) fn start(parts: &Parts<S>) -> Result<Self, StoreError> {
        let handlers = Handle::current();
        let (endings, to_settle) = mpsc::unbounded_channel();
        let (inline, handovers) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            store: parts.store.clone(),
            registry: Arc::clone(&parts.registry),
            transactional: Arc::clone(&parts.transactional),
            settings: Arc::clone(&parts.settings),
            counters: Arc::clone(&parts.counters),
            hooks: Arc::clone(&parts.hooks),
            held: Held::default(),
            wake: Wake::default(),
            freed: Freed::default(),
            awaited: Awaited::default(),
            stopping: CancellationToken::new(),
            asking: TaskTracker::new(),
            unstored: Mutex::default(),
            inline_refused: AtomicBool::new(false),
            closing: CancellationToken::new(),
            slots: Arc::new(Semaphore::new(SLOTS)),
            endings,
            deadlines: OnceLock::new(),
            handlers: handlers.clone(),
        });
        let loops = TaskTracker::new();
        let home = match parts.settings.threads {
            Threads::Caller => handlers,
            Threads::Own => own_thread(shared.closing.clone(), loops.clone())?,
        };
        let engine = Self {
            shared,
            inline,
            home,
            loops,
        };
        let to_settle = Arc::new(tokio::sync::Mutex::new(to_settle));
        engine.spawn_loop("settlement", move |shared| {
            settler::run(shared, Arc::clone(&to_settle))
        });
        let handovers = Arc::new(tokio::sync::Mutex::new(handovers));
        engine.spawn_loop("inline", move |shared| {
            inline::run(shared, Arc::clone(&handovers))
        });
        if parts.settings.inline.on && !parts.registry.known().is_empty() {
            engine.spawn(inline::check(Arc::clone(&engine.shared)));
        }
        engine.spawn_loop("renewal", keeper::renew_leases);
        engine.spawn_loop("watch", keeper::watch_runs);
        engine.spawn_loop("awaited", awaited::run);
        engine.spawn_loop("order", freed::run);
        if engine.shared.settings.notifications {
            engine.spawn_loop("notifier", wake::run);
        }
        Ok(engine)
    }

    /// Runs a loop until it returns. One that panics is started again: the mistake is a store's or
    /// ours, and an outbox that has silently stopped is worse than one that repeats itself.
    pub(crate) fn spawn_loop<F>(
        &self,
        name: &'static str,
        run: impl Fn(Arc<Shared<S>>) -> F + Send + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let shared = Arc::clone(&self.shared);
        self.spawn(async move {
            let mut pause = wait::Pause::new(Duration::from_millis(100), Duration::from_secs(5));
            while let Err(panic) = AssertUnwindSafe(run(Arc::clone(&shared)))
                .catch_unwind()
                .await
            {
                let text = dispatch::panic_text(panic);
                tracing::error!(
                    r#loop = name,
                    panic = text,
                    "a loop panicked; it is started again"
                );
                shared.sleep_unless_past_deadline(pause.next()).await;
            }
        });
    }

    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.home.spawn(self.loops.track_future(task));
    }

    /// Asks the store something on the loops' runtime, to which its connections belong, and in a
    /// task of its own: dropping a database call half way is not safe, and the caller of this may
    /// be dropped.
    pub(crate) async fn ask<T, F>(
        &self,
        question: impl FnOnce(S) -> F + Send + 'static,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
        T: Send + 'static,
    {
        let store = self.shared.store.clone();
        let task = self
            .loops
            .track_future(async move { question(store).await });
        self.home.spawn(task).await.unwrap_or_else(|_| {
            Err(StoreError::new(
                StoreErrorKind::Other,
                "ask the store: the outbox has closed",
            ))
        })
    }
}

impl<S: Store> Drop for Engine<S> {
    fn drop(&mut self) {
        self.shared.closing.cancel();
        self.loops.close();
    }
}

/// How long loops may take to end the call they are in once the outbox has closed.
const CLOSE_WITHIN: Duration = Duration::from_secs(15);

/// A thread with a runtime of its own, which lives until the outbox closes and its loops have
/// ended the calls they were in.
fn own_thread(closing: CancellationToken, loops: TaskTracker) -> Result<Handle, StoreError> {
    let doing = "start the outbox's own thread";
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| StoreError::new(StoreErrorKind::Other, doing).with_source(error))?;
    let handle = runtime.handle().clone();
    std::thread::Builder::new()
        .name("outbox".to_owned())
        .spawn(move || {
            runtime.block_on(async {
                closing.cancelled().await;
                // Past that, a call hangs in spite of its deadline; it must not keep the process.
                let _ = tokio::time::timeout(CLOSE_WITHIN, loops.wait()).await;
            });
        })
        .map_err(|error| StoreError::new(StoreErrorKind::Other, doing).with_source(error))?;
    Ok(handle)
}
