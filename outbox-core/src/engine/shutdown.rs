//! Ending without losing or charging anything: stop claiming, let handlers finish, give the rest
//! back, and return when that is stored.

use std::fmt;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::engine::Engine;
use crate::engine::inline::Handover;
use crate::store::Store;

/// The part of the grace period that is kept for storing what the handlers came to: a fifth, at
/// most this.
const STORING_MAX: Duration = Duration::from_secs(2);

impl<S: Store> Engine<S> {
    /// Drains what this process holds, within `grace`.
    ///
    /// Leases are renewed until the very end: the keeper stops only when the outbox closes.
    pub(crate) async fn drain(&self, grace: Duration) -> Result<(), ShutdownError> {
        let shared = &self.shared;
        let deadline = Instant::now() + grace;
        let storing = std::cmp::min(grace / 5, STORING_MAX);
        shared.stopping.cancel();
        // A second shutdown keeps the deadline of the first.
        let _ = shared.deadline.set(deadline);
        let handlers_until = deadline - storing;
        // First, so that whatever the dispatcher has begun to start is running by now.
        let (emptied, is_empty) = oneshot::channel();
        let _ = self.inline.send(Handover::Flush(emptied));
        let _ = tokio::time::timeout_at(handlers_until, is_empty).await;
        let finished = tokio::time::timeout_at(handlers_until, shared.held.none_running())
            .await
            .is_ok();
        if !finished {
            shared.held.interrupt_all();
            // Dropped at their next await, which for most is now. Those that block their thread
            // are given back although they still run: they were told to stop, and their result
            // will be refused.
            let dropped = handlers_until + storing / 2;
            if tokio::time::timeout_at(dropped, shared.held.none_running())
                .await
                .is_err()
            {
                for lease in shared.held.running() {
                    if let Some(run) = shared.held.end_run(lease) {
                        shared.release(lease, run.waiter);
                    }
                }
            }
        }
        let _ = tokio::time::timeout_at(deadline, shared.flush()).await;
        let unsettled: Vec<i64> = shared
            .held
            .all()
            .into_iter()
            .map(|lease| lease.row)
            .collect();
        if unsettled.is_empty() {
            Ok(())
        } else {
            Err(ShutdownError { unsettled })
        }
    }
}

/// A shutdown reached its deadline before everything was stored.
///
/// Nothing is lost: the leases of these events expire, and they are due again for any instance. A
/// handler that had succeeded runs again.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ShutdownError {
    unsettled: Vec<i64>,
}

impl ShutdownError {
    /// The row numbers of the events whose outcome is not stored.
    #[must_use]
    pub fn unsettled(&self) -> &[i64] {
        &self.unsettled
    }
}

impl fmt::Display for ShutdownError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the shutdown's grace period ended before {} outcomes were stored; their leases expire",
            self.unsettled.len()
        )
    }
}

impl std::error::Error for ShutdownError {}
