//! The events this process holds, and who may still settle each of them.
//!
//! Several parties may want to end a run: the handler with its result, the watchdog when the
//! handler blocks beyond its timeout, a renewal that finds the lease lost, a shutdown whose grace
//! is over. They all ask this table, and the first one wins.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::engine::settler::{About, Waiter};
use crate::lease::{HeldLease, LeaseToken};
use crate::registry::Entry;

/// Whether a handler begins.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Start {
    Begins,
    /// The run was ended before: then it must not begin.
    IsOver,
    /// Its lease is over, or nearly: somebody else may have the event before the handler returns.
    TooLate,
}

/// One event of this process, from its claim until its outcome is stored.
pub(crate) struct Holding {
    /// Until when this process acts on the lease.
    pub(crate) trusted_until: Instant,
    /// When the lease should be extended.
    pub(crate) renew_at: Instant,
    /// When a handler that is still running must be blocking its thread, and one that has not begun
    /// to run has found no thread.
    pub(crate) overdue_at: Instant,
    /// Stops the run.
    pub(crate) interrupt: CancellationToken,
    /// What is needed to turn a result into an outcome.
    pub(crate) run: Run,
    /// Bounds how many events a process holds.
    pub(crate) slot: OwnedSemaphorePermit,
}

/// What is needed to turn the result of a run into an outcome.
#[derive(Clone)]
pub(crate) struct Run {
    pub(crate) about: About,
    pub(crate) entry: Arc<Entry>,
    pub(crate) waiter: Waiter,
    /// Whether the handler has begun. Until then nothing has happened that an attempt could be
    /// charged for.
    pub(crate) started: bool,
}

enum State {
    Running(Holding),
    /// There is an outcome, or a decision to give it back, on its way to the store.
    Ending {
        trusted_until: Instant,
        renew_at: Instant,
        _slot: OwnedSemaphorePermit,
    },
}

#[derive(Default)]
pub(crate) struct Held {
    states: Mutex<HashMap<HeldLease, State>>,
    changed: Notify,
}

impl Held {
    pub(crate) fn begin(&self, lease: HeldLease, holding: Holding) {
        self.lock().insert(lease, State::Running(holding));
        self.changed.notify_waiters();
    }

    /// The handler begins now, if its lease is to be trusted for longer than `margin`.
    pub(crate) fn start(
        &self,
        lease: HeldLease,
        overdue_after: Duration,
        margin: Duration,
    ) -> Start {
        let now = Instant::now();
        match self.lock().get_mut(&lease) {
            Some(State::Running(running)) if running.trusted_until <= now + margin => {
                Start::TooLate
            }
            Some(State::Running(running)) => {
                running.overdue_at = now + overdue_after;
                running.run.started = true;
                Start::Begins
            }
            Some(State::Ending { .. }) | None => Start::IsOver,
        }
    }

    /// Takes the right to end the run of `lease`. `None` if somebody else had it first.
    pub(crate) fn end_run(&self, lease: HeldLease) -> Option<Run> {
        let mut states = self.lock();
        let (next, won) = match states.remove(&lease)? {
            State::Running(running) => {
                running.interrupt.cancel();
                let ending = State::Ending {
                    trusted_until: running.trusted_until,
                    renew_at: running.renew_at,
                    _slot: running.slot,
                };
                (ending, Some(running.run))
            }
            ending @ State::Ending { .. } => (ending, None),
        };
        states.insert(lease, next);
        drop(states);
        self.changed.notify_waiters();
        won
    }

    /// Forgets `lease`: its outcome is stored, or it is somebody else's now. Stops the run, if
    /// there still is one. `false` if it was forgotten already.
    pub(crate) fn forget(&self, lease: HeldLease) -> bool {
        let state = self.lock().remove(&lease);
        if let Some(State::Running(running)) = &state {
            running.interrupt.cancel();
        }
        self.changed.notify_waiters();
        state.is_some()
    }

    pub(crate) fn is_running(&self, lease: HeldLease) -> bool {
        matches!(self.lock().get(&lease), Some(State::Running(_)))
    }

    /// Moves the trust window: the lease was extended by a statement sent at `sent_at`.
    pub(crate) fn extend(&self, held: HeldLease, sent_at: Instant, lease: Duration) {
        let mut states = self.lock();
        let (trusted_until, renew_at) = match states.get_mut(&held) {
            Some(State::Running(running)) => (&mut running.trusted_until, &mut running.renew_at),
            Some(State::Ending {
                trusted_until,
                renew_at,
                ..
            }) => (trusted_until, renew_at),
            None => return,
        };
        *trusted_until = sent_at + lease;
        *renew_at = renewal_after(sent_at, lease);
    }

    /// Has the leases of these rows, and of those that were split from them, extended at the next turn:
    /// that is how a run hears that its event is not this process's any more.
    pub(crate) fn renew_now(&self, rows: &[i64]) {
        let now = Instant::now();
        for (lease, state) in self.lock().iter_mut() {
            if let State::Running(running) = state
                && (rows.contains(&lease.row)
                    || running
                        .run
                        .about
                        .origin
                        .is_some_and(|row| rows.contains(&row)))
            {
                running.renew_at = now;
            }
        }
    }

    /// Leases to be extended, in the order of their rows: all writers lock rows in that order.
    pub(crate) fn to_renew(&self) -> Vec<HeldLease> {
        let now = Instant::now();
        self.select(|state| match state {
            State::Running(running) => running.renew_at <= now,
            State::Ending { renew_at, .. } => *renew_at <= now,
        })
    }

    /// Runs whose trust window has passed, or will before `margin` has.
    pub(crate) fn distrusted(&self, margin: Duration) -> Vec<HeldLease> {
        let then = Instant::now() + margin;
        self.select(|state| matches!(state, State::Running(run) if run.trusted_until <= then))
    }

    /// Runs that neither ended at their timeout nor could be dropped then.
    pub(crate) fn overdue(&self) -> Vec<HeldLease> {
        let now = Instant::now();
        self.select(|state| matches!(state, State::Running(run) if run.overdue_at <= now))
    }

    pub(crate) fn running(&self) -> Vec<HeldLease> {
        self.select(|state| matches!(state, State::Running(_)))
    }

    pub(crate) fn all(&self) -> Vec<HeldLease> {
        self.select(|_| true)
    }

    /// Asks every run to stop.
    pub(crate) fn interrupt_all(&self) {
        for state in self.lock().values() {
            if let State::Running(running) = state {
                running.interrupt.cancel();
            }
        }
    }

    /// Until when a lease is trusted. `None` once it is forgotten.
    pub(crate) fn trusted_until(&self, lease: HeldLease) -> Option<Instant> {
        match self.lock().get(&lease)? {
            State::Running(running) => Some(running.trusted_until),
            State::Ending { trusted_until, .. } => Some(*trusted_until),
        }
    }

    /// Waits until nothing is running. Outcomes may still be on their way.
    pub(crate) async fn none_running(&self) {
        self.wait_for(|held| held.running().is_empty()).await;
    }

    /// Waits until nothing is held.
    pub(crate) async fn empty(&self) {
        self.wait_for(|held| held.lock().is_empty()).await;
    }

    /// Waits until something is held.
    pub(crate) async fn not_empty(&self) {
        self.wait_for(|held| !held.lock().is_empty()).await;
    }

    /// Waits until nothing is held under this token: what was is stored, or lost.
    pub(crate) async fn none_under(&self, token: LeaseToken) {
        self.wait_for(|held| held.lock().keys().all(|lease| lease.token != token))
            .await;
    }

    async fn wait_for(&self, condition: impl Fn(&Self) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Registered before the look, so that a change between the two is not missed.
            changed.as_mut().enable();
            if condition(self) {
                return;
            }
            changed.await;
        }
    }

    fn select(&self, wanted: impl Fn(&State) -> bool) -> Vec<HeldLease> {
        let states = self.lock();
        let mut leases: Vec<HeldLease> = states
            .iter()
            .filter(|(_, state)| wanted(state))
            .map(|(lease, _)| *lease)
            .collect();
        drop(states);
        leases.sort_unstable();
        leases
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<HeldLease, State>> {
        // Nothing that runs under this lock panics; were it to, the table is still consistent.
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A lease is extended when a third of it is used up, so that two renewals may fail before it is
/// in danger.
pub(crate) fn renewal_after(sent_at: Instant, lease: Duration) -> Instant {
    sent_at + lease / 3
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use tokio::sync::Semaphore;

    use super::*;
    use crate::lease::LeaseToken;

    const LEASE: Duration = Duration::from_secs(9);

    #[derive(serde::Serialize, serde::Deserialize)]
    struct Ping;

    impl crate::OutboxEvent for Ping {
        type Output = ();
        const NAME: &'static str = "ping";
    }

    fn run() -> Run {
        let settings = crate::settings::Draft::default().check().unwrap();
        let handler = |_: Ping| async { Ok::<_, crate::HandlerError>(()) };
        let registration =
            crate::registry::Registration::new::<Ping>(crate::HandlerOptions::new(), handler);
        let registry =
            crate::registry::Registry::build(vec![registration], Vec::new(), &settings).unwrap();
        let about = About {
            id: crate::EventId::new(uuid::Uuid::nil(), 1),
            name: "ping".into(),
            origin: None,
            handler: None,
            attempt: NonZeroU32::MIN,
            max_attempts: NonZeroU32::MIN,
            ordering_key: None,
        };
        Run {
            about,
            entry: Arc::clone(registry.get("ping").unwrap().unnamed().unwrap()),
            waiter: None,
            started: true,
        }
    }

    fn held_one() -> (Held, HeldLease, CancellationToken) {
        let held = Held::default();
        let lease = HeldLease {
            row: 1,
            token: LeaseToken::random(),
        };
        let interrupt = CancellationToken::new();
        let now = Instant::now();
        let holding = Holding {
            trusted_until: now + LEASE,
            renew_at: renewal_after(now, LEASE),
            overdue_at: now + Duration::from_secs(5),
            interrupt: interrupt.clone(),
            run: run(),
            slot: Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap(),
        };
        held.begin(lease, holding);
        (held, lease, interrupt)
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_first_may_end_a_run() {
        let (held, lease, interrupt) = held_one();
        assert!(held.end_run(lease).is_some());
        assert!(interrupt.is_cancelled());
        assert!(held.end_run(lease).is_none());
        assert_eq!(held.running(), []);
        assert_eq!(
            held.all(),
            [lease],
            "it is held until its outcome is stored"
        );
        assert!(held.forget(lease));
        assert!(held.end_run(lease).is_none());
        assert!(!held.forget(lease));
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_moves_the_trust_window() {
        let (held, lease, _) = held_one();
        assert_eq!(held.to_renew(), []);
        tokio::time::advance(LEASE / 3).await;
        assert_eq!(held.to_renew(), [lease]);
        held.extend(lease, Instant::now(), LEASE);
        assert_eq!(held.to_renew(), []);
        tokio::time::advance(LEASE - Duration::from_millis(1)).await;
        assert_eq!(held.distrusted(Duration::ZERO), []);
        assert_eq!(held.distrusted(Duration::from_millis(1)), [lease]);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(held.distrusted(Duration::ZERO), [lease]);
    }

    /// F02: no handler begins on a lease that is over, and none that could not be stopped in time.
    #[tokio::test(start_paused = true)]
    async fn a_run_does_not_begin_when_its_lease_is_nearly_over() {
        let margin = Duration::from_millis(500);
        let (held, lease, _) = held_one();
        tokio::time::advance(LEASE - margin - Duration::from_millis(1)).await;
        assert_eq!(held.start(lease, LEASE, margin), Start::Begins);
        let (held, lease, _) = held_one();
        tokio::time::advance(LEASE - margin).await;
        assert_eq!(held.start(lease, LEASE, margin), Start::TooLate);
        assert_eq!(held.running(), [lease], "somebody has to give it back");
        held.end_run(lease);
        assert_eq!(held.start(lease, LEASE, margin), Start::IsOver);
    }
}
