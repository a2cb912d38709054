//! What runs in the background of one outbox, whether it only publishes or also relays.
//!
//! Runs of handlers come from two sides: rows born leased, after their commit ([`inline`]), and
//! rows that a relay claims. From then on they share everything: the table of what is held
//! ([`held`]), the renewal ([`keeper`]) and the settlement ([`settler`]).
//!
//! The loops run on a thread of their own and the handlers on the application's runtime. That is
//! the only way to keep leases alive while a handler blocks every thread it can get.

pub(crate) mod held;
pub(crate) mod inline;
pub(crate) mod settler;

mod keeper;
mod shutdown;
pub(crate) mod wait;
pub(crate) mod wake;

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::counters::Counters;
use crate::dispatch::{self, Failure};
use crate::engine::held::{Held, Holding, Run, renewal_after};
use crate::engine::settler::{About, Ending, Waiter};
use crate::engine::wake::Wake;
use crate::handler::Delivery;
use crate::lease::HeldLease;
use crate::registry::Registry;
use crate::settings::{Settings, Threads};
use crate::settled::Hooks;
use crate::store::{Claimed, Store, StoreError, StoreErrorKind};

pub use shutdown::ShutdownError;

/// How long after its timeout a handler is taken to block its thread: until then the timeout
/// itself may still drop it.
const OVERDUE_AFTER: Duration = Duration::from_millis(250);

/// The most events a process holds from claim to stored outcome, beyond those it runs.
const SLOTS: usize = 10_000;

/// What every loop works with.
pub(crate) struct Shared<S> {
    pub(crate) store: S,
    pub(crate) registry: Arc<Registry>,
    pub(crate) settings: Arc<Settings>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) hooks: Arc<Hooks>,
    pub(crate) held: Held,
    pub(crate) wake: Wake,
    /// No new runs: a shutdown has begun.
    pub(crate) stopping: CancellationToken,
    /// This role may not settle, so nothing is born leased.
    pub(crate) inline_refused: AtomicBool,
    /// The loops end.
    pub(crate) closing: CancellationToken,
    /// Bounds what is held: a slot is taken at the claim and freed when the outcome is stored.
    pub(crate) slots: Arc<Semaphore>,
    endings: mpsc::UnboundedSender<Ending>,
    /// When a shutdown stops waiting for the store.
    deadline: OnceLock<Instant>,
    /// Where handlers run.
    handlers: Handle,
}

/// A claimed event, and what it takes to run it.
pub(crate) struct Start {
    pub(crate) claimed: Claimed,
    pub(crate) trusted_until: Instant,
    /// Bounds the handlers that run at once. Kept until the handler returns.
    pub(crate) permit: OwnedSemaphorePermit,
    /// Bounds what is held. Kept until the outcome is stored.
    pub(crate) slot: OwnedSemaphorePermit,
    pub(crate) waiter: Waiter,
}

impl<S: Store> Shared<S> {
    /// Starts the handler of a claimed event on the application's runtime.
    pub(crate) fn start(self: &Arc<Self>, start: Start) {
        let Start {
            claimed,
            trusted_until,
            permit,
            slot,
            waiter,
        } = start;
        let lease = claimed.lease();
        let Some(entry) = self.registry.get(&claimed.name) else {
            // Claims name the events there are handlers for, so this is a store's mistake; the
            // event is given back uncharged to whoever knows it.
            tracing::error!(event_name = %claimed.name, "claimed an event without a handler");
            self.release(lease, waiter);
            return;
        };
        // From what is left of it, because a row is born with a shorter lease than a claim gives.
        let now = Instant::now();
        let renew_at = renewal_after(now, trusted_until.saturating_duration_since(now));
        let interrupt = CancellationToken::new();
        let run = Run {
            about: About::claimed(&claimed),
            entry: Arc::clone(entry),
            waiter,
        };
        self.held.begin(
            lease,
            Holding {
                trusted_until,
                renew_at,
                overdue_at: now + entry.timeout + OVERDUE_AFTER,
                interrupt: interrupt.clone(),
                run,
                slot,
            },
        );
        let headers = match decode_headers(claimed.headers.as_deref()) {
            Ok(headers) => headers,
            Err(error) => return self.finish(lease, Err(Failure::Undecodable(error))),
        };
        let delivery = Delivery {
            event_id: claimed.id,
            event_name: entry.name,
            attempt: claimed.attempt,
            max_attempts: claimed.max_attempts,
            first_published_at: Some(claimed.created_at),
            headers,
            // A child, so that a handler which cancels its own token does not count as stopped.
            cancelled: interrupt.child_token(),
        };
        let entry = Arc::clone(entry);
        let unfinished = Unfinished {
            shared: Arc::clone(self),
            lease,
        };
        self.handlers.spawn(async move {
            let _permit = permit;
            if let Some(result) =
                dispatch::run(&entry, &claimed.payload, &delivery, &interrupt).await
            {
                unfinished.shared.finish(lease, result);
            }
        });
    }

    /// Ends a run with its result, unless somebody else has ended it before.
    fn finish(&self, lease: HeldLease, result: Result<String, Failure>) {
        match self.held.end_run(lease) {
            Some(run) => self.settle(lease, run, result),
            None => {
                self.counters.late_results.one();
                tracing::warn!(
                    row = lease.row,
                    "a handler's result came too late and was refused"
                );
            }
        }
    }

    /// Ends a run that its timeout could not drop.
    fn finish_overdue(&self, lease: HeldLease) {
        if let Some(run) = self.held.end_run(lease) {
            let limit = run.entry.timeout;
            tracing::error!(
                event_name = run.entry.name,
                timeout = ?limit,
                "a handler blocks its thread beyond its timeout; it keeps its permit until it returns"
            );
            self.settle(lease, run, Err(Failure::TimedOut(limit)));
        }
    }

    fn settle(&self, lease: HeldLease, run: Run, result: Result<String, Failure>) {
        let Run {
            about,
            entry,
            waiter,
        } = run;
        let outcome = dispatch::decide(
            result,
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
        self.closing.is_cancelled() || self.deadline.get().is_some_and(|d| Instant::now() >= *d)
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
            .deadline
            .get()
            .map_or(until, |deadline| std::cmp::min(until, *deadline));
        tokio::select! {
            () = self.closing.cancelled() => {}
            () = tokio::time::sleep_until(until) => {}
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
        if let Some(Run { waiter, .. }) = self.shared.held.end_run(self.lease) {
            self.shared.release(self.lease, waiter);
        }
    }
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
pub(crate) struct Parts<S> {
    pub(crate) store: S,
    pub(crate) registry: Arc<Registry>,
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
            settings: Arc::clone(&parts.settings),
            counters: Arc::clone(&parts.counters),
            hooks: Arc::clone(&parts.hooks),
            held: Held::default(),
            wake: Wake::default(),
            stopping: CancellationToken::new(),
            inline_refused: AtomicBool::new(false),
            closing: CancellationToken::new(),
            slots: Arc::new(Semaphore::new(SLOTS)),
            endings,
            deadline: OnceLock::new(),
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
        engine.spawn(settler::run(Arc::clone(&engine.shared), to_settle));
        engine.spawn(inline::run(Arc::clone(&engine.shared), handovers));
        if parts.settings.inline.on && !parts.registry.names().is_empty() {
            engine.spawn(inline::check(Arc::clone(&engine.shared)));
        }
        engine.spawn_loop("renewal", keeper::renew_leases);
        engine.spawn_loop("watch", keeper::watch_runs);
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
            let mut pause = wait::Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
            while let Err(panic) = AssertUnwindSafe(run(Arc::clone(&shared)))
                .catch_unwind()
                .await
            {
                let text = dispatch::panic_text(panic.as_ref());
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
