//! How many runs one handler may begin now: its own limit, and its circuit breaker.
//!
//! Nothing here sleeps or asks a database. The relay asks how much room there is before it claims,
//! and whoever starts a run enters the lane.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::dispatch::{Cause, Finding};
use crate::handler::Verdict;
use crate::handler_options::CircuitBreaker;
use crate::registry::HandlerKey;

/// The way to one handler.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    permits: Option<Arc<Semaphore>>,
    breaker: Option<Mutex<Breaker>>,
}

/// How many runs may begin.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Room {
    /// As many as the process has room for.
    Any,
    /// This many.
    Only(usize),
}

/// A run that is in its lane. Dropped when the handler has returned.
#[derive(Debug)]
pub(crate) struct Entered {
    _permit: Option<OwnedSemaphorePermit>,
    /// It is the one run that an open breaker lets through.
    _trial: Option<Trial>,
}

#[derive(Debug)]
struct Trial {
    lane: Arc<Lane>,
    number: u64,
}

#[derive(Debug)]
struct Breaker {
    /// Whose it is, for the log.
    of: HandlerKey,
    settings: CircuitBreaker,
    state: State,
    trials: u64,
}

#[derive(Debug)]
enum State {
    Closed { failures: u32 },
    Open { until: Instant },
    Trial { number: u64 },
}

impl Lane {
    pub(crate) fn new(
        of: HandlerKey,
        concurrency: Option<usize>,
        breaker: Option<CircuitBreaker>,
    ) -> Self {
        Self {
            permits: concurrency.map(|runs| Arc::new(Semaphore::new(runs))),
            breaker: breaker.map(|settings| {
                Mutex::new(Breaker {
                    of,
                    settings,
                    state: State::Closed { failures: 0 },
                    trials: 0,
                })
            }),
        }
    }

    pub(crate) fn room(&self) -> Room {
        let limit = self
            .permits
            .as_ref()
            .map(|permits| permits.available_permits());
        let of_breaker = match self.breaker().as_deref() {
            None => Room::Any,
            Some(breaker) => breaker.room(),
        };
        match (limit, of_breaker) {
            (None, room) => room,
            (Some(limit), Room::Any) => Room::Only(limit),
            (Some(limit), Room::Only(room)) => Room::Only(std::cmp::min(limit, room)),
        }
    }

    pub(crate) fn has_breaker(&self) -> bool {
        self.breaker.is_some()
    }

    /// Whether the end of a run makes room.
    pub(crate) fn has_limit(&self) -> bool {
        self.permits.is_some()
    }

    /// Waits until a run has ended, if there are as many as may be. An open breaker is not waited for.
    pub(crate) async fn has_room(&self) {
        if let Some(permits) = &self.permits {
            // Never closed. Given back at once: it is only looked at.
            let _ = permits.acquire().await;
        }
    }

    /// Enters. `None` if there is no room.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Entered> {
        let permit = match &self.permits {
            Some(permits) => Some(Arc::clone(permits).try_acquire_owned().ok()?),
            None => None,
        };
        let trial = match self.breaker() {
            None => None,
            Some(mut breaker) => match breaker.room() {
                Room::Any => None,
                Room::Only(0) => return None,
                Room::Only(_) => {
                    breaker.trials += 1;
                    let number = breaker.trials;
                    breaker.state = State::Trial { number };
                    Some(Trial {
                        lane: Arc::clone(self),
                        number,
                    })
                }
            },
        };
        Some(Entered {
            _permit: permit,
            _trial: trial,
        })
    }

    /// Notes what came of a run. A success closes the breaker, whichever run it came from.
    pub(crate) fn report(&self, finding: &Finding) {
        let Some(mut breaker) = self.breaker() else {
            return;
        };
        match finding {
            Finding::Failed {
                cause: Cause::Run | Cause::Handler(Verdict::Retry | Verdict::RetryAfter(_)),
                ..
            } => breaker.fail(),
            Finding::Failed {
                cause: Cause::Undecodable | Cause::Discard,
                ..
            } => {}
            Finding::Done(_) | Finding::Failed { .. } => {
                breaker.state = State::Closed { failures: 0 };
            }
        }
    }

    fn breaker(&self) -> Option<MutexGuard<'_, Breaker>> {
        let breaker = self.breaker.as_ref()?;
        Some(breaker.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Breaker {
    fn room(&self) -> Room {
        match self.state {
            State::Closed { .. } => Room::Any,
            State::Open { until } if Instant::now() >= until => Room::Only(1),
            State::Open { .. } | State::Trial { .. } => Room::Only(0),
        }
    }

    fn fail(&mut self) {
        match &mut self.state {
            State::Closed { failures } => {
                *failures += 1;
                if *failures >= self.settings.failures {
                    self.open();
                }
            }
            // One that was under way when it opened.
            State::Open { .. } => {}
            State::Trial { .. } => self.open(),
        }
    }

    fn open(&mut self) {
        let until = Instant::now() + self.settings.open_for;
        self.state = State::Open { until };
        tracing::warn!(
            event_name = self.of.0,
            handler = self.of.1,
            open_for = ?self.settings.open_for,
            "a handler fails again and again; it is given no events for a while"
        );
    }
}

impl Drop for Trial {
    /// A trial without a result, because it was interrupted or lost its lease, has shown nothing:
    /// the next event is one.
    fn drop(&mut self) {
        if let Some(mut breaker) = self.lane.breaker()
            && matches!(breaker.state, State::Trial { number } if number == self.number)
        {
            let until = Instant::now();
            breaker.state = State::Open { until };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::outcome::ErrorText;

    const OPEN_FOR: Duration = Duration::from_secs(30);

    fn with_breaker() -> Arc<Lane> {
        let breaker = CircuitBreaker::after(2).open_for(OPEN_FOR);
        Arc::new(Lane::new(("ping", None), None, Some(breaker)))
    }

    fn failed(cause: Cause) -> Finding {
        Finding::Failed {
            cause,
            error: ErrorText::new(&"no"),
        }
    }

    fn done() -> Finding {
        Finding::Done("null".to_owned())
    }

    #[test]
    fn a_lane_without_settings_has_any_room() {
        let lane = Arc::new(Lane::default());
        assert_eq!(lane.room(), Room::Any);
        assert!(lane.enter().is_some());
        assert_eq!(lane.room(), Room::Any);
    }

    #[test]
    fn a_limit_counts_the_runs_that_have_not_returned() {
        let lane = Arc::new(Lane::new(("ping", None), Some(2), None));
        assert_eq!(lane.room(), Room::Only(2));
        let first = lane.enter().unwrap();
        let _second = lane.enter().unwrap();
        assert_eq!(lane.room(), Room::Only(0));
        assert!(lane.enter().is_none());
        drop(first);
        assert_eq!(lane.room(), Room::Only(1));
    }

    #[tokio::test(start_paused = true)]
    async fn failures_in_a_row_open_it_and_a_success_between_them_does_not() {
        let lane = with_breaker();
        for finding in [failed(Cause::Run), done(), failed(Cause::Run)] {
            lane.report(&finding);
        }
        assert_eq!(lane.room(), Room::Any);
        lane.report(&failed(Cause::Handler(Verdict::Retry)));
        assert_eq!(lane.room(), Room::Only(0));
        assert!(lane.enter().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn what_has_answered_is_no_failure() {
        let lane = with_breaker();
        for _ in 0..3 {
            lane.report(&failed(Cause::Run));
            lane.report(&failed(Cause::Handler(Verdict::Permanent)));
        }
        assert_eq!(lane.room(), Room::Any);
        // Nobody was asked.
        lane.report(&failed(Cause::Run));
        lane.report(&failed(Cause::Undecodable));
        lane.report(&failed(Cause::Run));
        assert_eq!(lane.room(), Room::Only(0));
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_while_one_run_is_let_through_and_decides() {
        let lane = with_breaker();
        lane.report(&failed(Cause::Run));
        lane.report(&failed(Cause::Run));
        tokio::time::advance(OPEN_FOR).await;
        assert_eq!(lane.room(), Room::Only(1));
        let trial = lane.enter().unwrap();
        assert_eq!(lane.room(), Room::Only(0));
        lane.report(&failed(Cause::Run));
        drop(trial);
        assert_eq!(lane.room(), Room::Only(0), "open for as long again");

        tokio::time::advance(OPEN_FOR).await;
        let trial = lane.enter().unwrap();
        lane.report(&done());
        drop(trial);
        assert_eq!(lane.room(), Room::Any);
    }

    #[tokio::test(start_paused = true)]
    async fn a_trial_without_a_result_is_followed_by_another() {
        let lane = with_breaker();
        lane.report(&failed(Cause::Run));
        lane.report(&failed(Cause::Run));
        tokio::time::advance(OPEN_FOR).await;
        drop(lane.enter().unwrap());
        assert_eq!(lane.room(), Room::Only(1));
    }
}
