//! The relay: claims due events on any number of instances, runs their handlers, settles.
//!
//! Its three loops are [`claim`], [`listen`] and [`sweep`]. What a claimed event goes through from
//! there is the business of [`engine`](crate::engine), which inline dispatch shares.

mod claim;
mod listen;
mod low_water;
mod sweep;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::engine::{Engine, Shared, ShutdownError};
use crate::outbox::Outbox;
use crate::outcome::ErrorText;
use crate::registry::BuildError;
use crate::settings;
use crate::store::{Store, StoreError};

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
    sweep: Duration,
}

/// What the loops of a relay work with.
pub(crate) struct RelayParts<S> {
    pub(crate) shared: Arc<Shared<S>>,
    pub(crate) concurrency: NonZeroU32,
    /// One for each handler that may run. Here, so that a claim loop which is started again after a
    /// panic does not have them twice.
    pub(crate) permits: Arc<Semaphore>,
    pub(crate) batch: NonZeroU32,
    pub(crate) poll: Duration,
    pub(crate) sweep: Duration,
    /// No more claims.
    pub(crate) stop: CancellationToken,
}

impl<S: Store> RelayBuilder<S> {
    pub(crate) fn new(outbox: Outbox<S>) -> Self {
        let draft = Draft {
            concurrency: 16,
            batch: 100,
            poll: Duration::from_secs(1),
            sweep: Duration::from_secs(5 * 60),
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

    /// Sets how often the relay looks for what nobody else would find: leases that ended with no
    /// attempt left, events of unknown types, and what is past its retention.
    ///
    /// Defaults to 5 minutes. From 100 ms to 24 hours. The first sweep comes after a random part
    /// of it, at most 10 seconds.
    pub fn sweep_interval(mut self, interval: Duration) -> Self {
        self.draft.sweep = interval;
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
        let sweep = settings::bounded(
            "sweep_interval",
            draft.sweep,
            Duration::from_millis(100),
            24 * HOUR,
        )?;
        if outbox.registry().names().is_empty() {
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
            sweep,
            stop: place.disarm(),
        });
        let for_claims = Arc::clone(&parts);
        engine.spawn_loop("claim", move |_| claim::run(Arc::clone(&for_claims)));
        let for_sweeps = Arc::clone(&parts);
        engine.spawn_loop("sweep", move |_| sweep::run(Arc::clone(&for_sweeps)));
        if engine.shared.settings.notifications {
            engine.spawn_loop("listen", move |_| listen::run(Arc::clone(&parts)));
        }
        Ok(Relay { outbox, stop })
    }
}

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
}

impl<S: Store> Relay<S> {
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
