//! Ending without losing or charging anything: stop claiming, let handlers finish, give the rest
//! back, and return when that is stored.

use std::fmt;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::DURATION_MAX;
use crate::engine::Engine;
use crate::engine::inline::Handover;
use crate::store::Store;

/// The part of the grace period that is kept for storing what the handlers came to: a fifth, at
/// most this.
const STORING_MAX: Duration = Duration::from_secs(2);

/// When a shutdown stops waiting for what. Set by the first one; a second one keeps them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadlines {
    /// Handlers that still run are told to stop.
    pub(crate) finished: Instant,
    /// Those that did not stop are given back all the same.
    pub(crate) dropped: Instant,
    /// The settler gives up what it could not store, a little before the end so that it can still
    /// say what that was.
    pub(crate) given_up: Instant,
    /// The shutdown returns.
    pub(crate) ended: Instant,
}

impl Deadlines {
    fn within(grace: Duration) -> Self {
        let grace = std::cmp::min(grace, DURATION_MAX);
        let storing = std::cmp::min(grace / 5, STORING_MAX);
        let ended = Instant::now() + grace;
        let finished = ended - storing;
        Self {
            finished,
            dropped: finished + storing / 2,
            given_up: ended - storing / 10,
            ended,
        }
    }
}

impl<S: Store> Engine<S> {
    /// Drains what this process holds, within `grace`.
    ///
    /// Leases are renewed until the very end, and no longer: what is not stored by then is let go.
    pub(crate) async fn drain(&self, grace: Duration) -> Result<(), ShutdownError> {
        let shared = &self.shared;
        let at = *shared.deadlines.get_or_init(|| Deadlines::within(grace));
        shared.stopping.cancel();
        // First what is on its way to being held, so that it is held, or given back, by now.
        let (emptied, is_empty) = oneshot::channel();
        let _ = self.inline.send(Handover::Flush(emptied));
        shared.asking.close();
        let arrived = async { (is_empty.await, shared.asking.wait().await) };
        let answered = tokio::time::timeout_at(at.finished, arrived).await.is_ok();
        let none_running = shared.held.none_running();
        if tokio::time::timeout_at(at.finished, none_running)
            .await
            .is_err()
        {
            shared.held.interrupt_all();
            // Dropped at their next await, which for most is now. Those that block their thread
            // are given back although they still run: they were told to stop, and their result
            // will be refused.
            let none_running = shared.held.none_running();
            let _ = tokio::time::timeout_at(at.dropped, none_running).await;
            for lease in shared.held.running() {
                if let Some(run) = shared.held.end_run(lease) {
                    shared.release(lease, run.waiter);
                }
            }
        }
        let stored = async {
            shared.flush().await;
            // A run announces its end a moment before its outcome is sent, and a row that is locked
            // is tried again.
            shared.held.empty().await;
        };
        let flushed = tokio::time::timeout_at(at.ended, stored).await.is_ok();

        let held = shared.held.all();
        // Nobody renews them from here on: their leases end.
        for lease in &held {
            shared.held.forget(*lease);
        }
        shared.not_stored(held.into_iter().map(|lease| lease.row));
        let unstored = &mut *shared
            .unstored
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut unsettled = std::mem::take(unstored);
        unsettled.sort_unstable();
        unsettled.dedup();
        if answered && flushed && unsettled.is_empty() {
            Ok(())
        } else {
            Err(ShutdownError { unsettled })
        }
    }
}

/// A shutdown reached its deadline before everything was stored.
///
/// Nothing is lost: the leases of these events end, and they are due again for any instance. A
/// handler that had succeeded runs again.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ShutdownError {
    unsettled: Vec<i64>,
}

impl ShutdownError {
    /// The row numbers of the events whose outcome, or whose return, is known not to be stored.
    ///
    /// There may be more: of a claim that the database had not answered by then, nobody here knows
    /// what it took. The list is empty when that is all.
    #[must_use]
    pub fn unsettled(&self) -> &[i64] {
        &self.unsettled
    }
}

impl fmt::Display for ShutdownError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.unsettled.is_empty() {
            return f
                .write_str("the shutdown's grace period ended before the database had answered");
        }
        write!(
            f,
            "the shutdown's grace period ended before what became of {} events was stored; their \
             leases end",
            self.unsettled.len()
        )
    }
}

impl std::error::Error for ShutdownError {}
