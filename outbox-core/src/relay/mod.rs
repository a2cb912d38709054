//! The relay: claims due events on any number of instances, runs their handlers, settles.
//!
//! Its loops are [`claim`], [`listen`], and [`cadence`] three times; what a cadence does is in
//! [`pass`]. What a claimed event goes through from there is the business of
//! [`engine`](crate::engine), which inline dispatch shares.

mod alone;
mod cadence;
mod claim;
mod listen;
mod low_water;
mod pass;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::cadence::{Cadence, PassReport};
use crate::engine::{Engine, Shared, ShutdownError};
use crate::outbox::Outbox;
use crate::outcome::ErrorText;
use crate::registry::BuildError;
use crate::settings;
use crate::store::{Store, StoreError, StoreErrorKind};

/// Configures a relay. See [`Outbox::relay`].
#[must_use = "a relay does nothing until it is started"]
pub struct RelayBuilder<S: Store> {
    outbox: Outbox<S>,
    draft: Draft,
}

#[derive(Clone, Copy, Debug)]
struct Draft {
    concurrency: u32,
    batch: u32,
    poll: Duration,
    cadences_only: bool,
    rhythms: [RhythmDraft; 3],
}

/// How often a cadence runs, and how much it does at once, before it is checked.
#[derive(Clone, Copy, Debug)]
struct RhythmDraft {
    every: Duration,
    batch: u32,
    statement_limit: Duration,
}

impl RhythmDraft {
    const fn new(every: Duration, batch: u32) -> Self {
        Self {
            every,
            batch,
            statement_limit: Duration::from_secs(5),
        }
    }
}

/// How often a cadence runs, and how much it does at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rhythm {
    pub(crate) every: Duration,
    pub(crate) batch: NonZeroU32,
    pub(crate) statement_limit: Duration,
}

/// What the loops of a relay work with.
pub(crate) struct RelayParts<S: Store> {
    pub(crate) shared: Arc<Shared<S>>,
    pub(crate) concurrency: NonZeroU32,
    /// One for each handler that may run. Here, so that a claim loop which is started again after a
    /// panic does not have them twice.
    pub(crate) permits: Arc<Semaphore>,
    pub(crate) batch: NonZeroU32,
    pub(crate) poll: Duration,
    rhythms: [Rhythm; 3],
    pub(crate) upkeep: UpkeepDue,
    /// No more claims.
    pub(crate) stop: CancellationToken,
}

impl<S: Store> RelayParts<S> {
    pub(crate) fn rhythm(&self, cadence: Cadence) -> Rhythm {
        self.rhythms[cadence as usize]
    }
}

/// Whether a daily pass has left partitions to the sweeps.
#[derive(Debug, Default)]
pub(crate) struct UpkeepDue(AtomicBool);

impl UpkeepDue {
    pub(crate) fn is_pending(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn put_off(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn done(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl<S: Store> RelayBuilder<S> {
    pub(crate) fn new(outbox: Outbox<S>) -> Self {
        let draft = Draft {
            concurrency: 16,
            batch: 100,
            poll: Duration::from_secs(1),
            cadences_only: false,
            rhythms: [
                RhythmDraft::new(Duration::from_secs(5 * 60), 100),
                RhythmDraft::new(HOUR, 100),
                RhythmDraft::new(DAY, 1_000),
            ],
        };
        Self { outbox, draft }
    }

    /// Sets how many handlers run at once.
    ///
    /// Defaults to 16. From 1 to 10,000. Handlers that wait for a network want more; those that
    /// compute want no more than there are cores.
    pub fn concurrency(mut self, handlers: u32) -> Self {
        self.draft.concurrency = handlers;
        self
    }

    /// Sets the most events one claim takes. It takes no more than can start at once either.
    ///
    /// Defaults to 100. From 1 to 10,000.
    pub fn batch(mut self, events: u32) -> Self {
        self.draft.batch = events;
        self
    }

    /// Sets the longest pause between two looks at an idle outbox.
    ///
    /// It is how late a retry, a delayed event or an event whose lease has ended can be, since
    /// nobody sends a wake-up when one comes due, and how late any event can be when its wake-up is
    /// lost.
    ///
    /// Defaults to 1 second. From 10 ms to 1 hour. After activity the relay looks every 50 ms at
    /// first (or at this interval, if it is shorter) and doubles the pause up to this.
    pub fn poll_interval(mut self, interval: Duration) -> Self {
        self.draft.poll = interval;
        self
    }

    /// Sets how often a [sweep](Cadence::Sweep) begins.
    ///
    /// Defaults to 5 minutes. From 100 ms to 24 hours. The first one comes after a random part of
    /// it, at most 10 seconds.
    pub fn sweep_interval(mut self, interval: Duration) -> Self {
        self.draft.rhythms[Cadence::Sweep as usize].every = interval;
        self
    }

    /// Sets how often a [backstop](Cadence::Backstop) begins.
    ///
    /// Defaults to 1 hour. From 100 ms to 7 days. The first one comes after a random part of it, at
    /// most a minute.
    pub fn backstop_interval(mut self, interval: Duration) -> Self {
        self.draft.rhythms[Cadence::Backstop as usize].every = interval;
        self
    }

    /// Sets how often [maintenance](Cadence::Maintenance) begins.
    ///
    /// Defaults to 24 hours. From 100 ms to 7 days. The first one comes after a random part of it,
    /// at most 2 minutes.
    pub fn maintenance_interval(mut self, interval: Duration) -> Self {
        self.draft.rhythms[Cadence::Maintenance as usize].every = interval;
        self
    }

    /// Sets the most events that one chunk of a cadence's pass claims. It takes no more than can
    /// start at once either.
    ///
    /// Defaults to 100, and for maintenance to 1,000. From 1 to 10,000.
    pub fn pass_batch(mut self, cadence: Cadence, events: u32) -> Self {
        self.draft.rhythms[cadence as usize].batch = events;
        self
    }

    /// Sets how long a statement of a cadence's pass may take before the database is told to cancel
    /// it. Looking at rows and removing them is then tried again with half as many, down to 50. What
    /// cannot be made smaller cuts the pass short; what its earlier chunks did stays done, and the
    /// next pass goes on.
    ///
    /// Defaults to 5 seconds. From 10 ms to 1 hour. Beyond the store's own deadline it has no
    /// effect.
    pub fn pass_statement_limit(mut self, cadence: Cadence, limit: Duration) -> Self {
        self.draft.rhythms[cadence as usize].statement_limit = limit;
        self
    }

    /// Neither polls nor listens: only the passes of the three cadences look for what is due.
    ///
    /// For an application whose events are dispatched inline and which wants next to no load on its
    /// database when nothing has failed. What inline dispatch did not handle then waits for the
    /// next sweep, retries included: set [`sweep_interval`](Self::sweep_interval) to what may be
    /// waited for.
    ///
    /// Defaults to polling.
    pub fn cadences_only(mut self) -> Self {
        self.draft.cadences_only = true;
        self
    }

    /// Starts the relay. Handlers run on the runtime this is called from.
    ///
    /// First the store is checked: its schema's version and this role's rights. A database that
    /// cannot be reached does not stop a relay, now or later: it is logged, and tried again, with
    /// growing pauses of at most 5 seconds, until it answers. Nor does anything else: a right that
    /// is taken away may be given back.
    ///
    /// # Errors
    ///
    /// Returns [`RelayError`] if a setting is out of bounds, if the outbox has no handlers or has a
    /// relay already, or if the check found something that waiting does not mend.
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future starts nothing.
    pub async fn start(self) -> Result<Relay<S>, RelayError> {
        let Self { outbox, draft } = self;
        let concurrency = settings::count("concurrency", draft.concurrency)?;
        let batch = settings::count("batch", draft.batch)?;
        let poll = settings::bounded("poll_interval", draft.poll, Duration::from_millis(10), HOUR)?;
        let rhythms = draft.rhythms()?;
        if outbox.registry().known().is_empty() {
            return Err(RelayError::NoHandlers);
        }
        let stop = outbox
            .take_relay_place()
            .ok_or(RelayError::AlreadyRunning)?;
        // Given back on every way out but the last one.
        let place = stop.clone().drop_guard();
        let engine = outbox.engine()?;
        if engine.shared.stopping.is_cancelled() {
            return Err(RelayError::ShutDown);
        }
        check(engine).await?;
        let parts = Arc::new(RelayParts {
            shared: Arc::clone(&engine.shared),
            concurrency,
            permits: Arc::new(Semaphore::new(concurrency.get() as usize)),
            batch,
            poll,
            rhythms,
            upkeep: UpkeepDue::default(),
            stop: place.disarm(),
        });
        let passes = Cadence::ALL.map(|cadence| {
            let (ask, asked) = mpsc::channel(1);
            let asked = Arc::new(tokio::sync::Mutex::new(asked));
            let parts = Arc::clone(&parts);
            engine.spawn_loop(cadence.as_str(), move |_| {
                cadence::run(Arc::clone(&parts), cadence, Arc::clone(&asked))
            });
            ask
        });
        if !draft.cadences_only {
            let for_claims = Arc::clone(&parts);
            engine.spawn_loop("claim", move |_| claim::run(Arc::clone(&for_claims)));
            if engine.shared.settings.notifications {
                engine.spawn_loop("listen", move |_| listen::run(Arc::clone(&parts)));
            }
        }
        Ok(Relay {
            outbox,
            stop,
            passes,
        })
    }
}

impl Draft {
    fn rhythms(&self) -> Result<[Rhythm; 3], BuildError> {
        let [sweep, backstop, maintenance] = self.rhythms;
        Ok([
            sweep.check("sweep_interval", DAY)?,
            backstop.check("backstop_interval", 7 * DAY)?,
            maintenance.check("maintenance_interval", 7 * DAY)?,
        ])
    }
}

impl RhythmDraft {
    fn check(self, interval: &'static str, longest: Duration) -> Result<Rhythm, BuildError> {
        let limit = self.statement_limit;
        Ok(Rhythm {
            every: settings::bounded(interval, self.every, Duration::from_millis(100), longest)?,
            batch: settings::count("pass_batch", self.batch)?,
            statement_limit: settings::bounded(
                "pass_statement_limit",
                limit,
                Duration::from_millis(10),
                HOUR,
            )?,
        })
    }
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

const HOUR: Duration = Duration::from_secs(60 * 60);

async fn check<S: Store>(engine: &Engine<S>) -> Result<(), RelayError> {
    match engine.ask(|store| async move { store.check().await }).await {
        Ok(()) => Ok(()),
        Err(error) if error.is_transient() => {
            tracing::warn!(
                error = %ErrorText::from(&error),
                "the database does not answer; the relay starts and keeps trying"
            );
            Ok(())
        }
        Err(error) => Err(RelayError::Store(error)),
    }
}

impl<S: Store> fmt::Debug for RelayBuilder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelayBuilder")
            .field("settings", &self.draft)
            .finish_non_exhaustive()
    }
}

/// A running relay.
///
/// Dropping it stops claiming; what it has claimed is finished and settled as long as the process
/// lives. Call [`shutdown`](Self::shutdown) to wait for that.
pub struct Relay<S: Store> {
    outbox: Outbox<S>,
    stop: CancellationToken,
    passes: [mpsc::Sender<cadence::Asked>; 3],
}

impl<S: Store> Relay<S> {
    /// Runs a pass of a cadence now, and says what it did. The next regular one comes a whole
    /// interval later.
    ///
    /// For operators, and for tests that do not want to wait. It returns when everything due has
    /// been handed to its handlers; their outcomes come later. If a pass is under way already, this
    /// one begins after it.
    ///
    /// # Errors
    ///
    /// Returns the store's error if the pass was cut short by one: what its earlier chunks did stays
    /// done. Also once the relay has stopped.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing but the report.
    pub async fn pass(&self, cadence: Cadence) -> Result<PassReport, StoreError> {
        let (asked, report) = oneshot::channel();
        let stopped =
            || StoreError::new(StoreErrorKind::Other, "run a pass: the relay has stopped");
        let ask = &self.passes[cadence as usize];
        ask.send(asked).await.map_err(|_| stopped())?;
        report.await.map_err(|_| stopped())?
    }

    /// Stops claiming, lets handlers finish within `grace`, gives the rest back uncharged, and
    /// returns when that is stored. It ends the outbox's inline dispatch too: see
    /// [`Outbox::shutdown`].
    ///
    /// # Errors
    ///
    /// Returns [`ShutdownError`] with the events whose outcome could not be stored within `grace`.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the relay stopped and its runs to their leases.
    pub async fn shutdown(self, grace: Duration) -> Result<(), ShutdownError> {
        self.stop.cancel();
        self.outbox.shutdown(grace).await
    }
}

impl<S: Store> Drop for Relay<S> {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl<S: Store> fmt::Debug for Relay<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay")
            .field("outbox", &self.outbox)
            .finish_non_exhaustive()
    }
}

/// Why a relay did not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum RelayError {
    /// A setting is out of its bounds.
    Setting(BuildError),
    /// The outbox has no handlers, so its relay would claim nothing.
    NoHandlers,
    /// This outbox has a relay already. Raise its concurrency instead.
    AlreadyRunning,
    /// The outbox was shut down.
    ShutDown,
    /// The check at the start failed.
    Store(StoreError),
}

impl fmt::Display for RelayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Setting(error) => fmt::Display::fmt(error, f),
            Self::NoHandlers => f.write_str("a relay needs an outbox with at least one handler"),
            Self::AlreadyRunning => f.write_str("this outbox has a relay already"),
            Self::ShutDown => f.write_str("this outbox was shut down"),
            Self::Store(error) => write!(f, "the relay cannot start: {error}"),
        }
    }
}

impl std::error::Error for RelayError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // Their texts are part of ours, so what is next is what they come from.
            Self::Store(error) => error.source(),
            _ => None,
        }
    }
}

impl From<BuildError> for RelayError {
    fn from(error: BuildError) -> Self {
        Self::Setting(error)
    }
}

impl From<StoreError> for RelayError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
