//! How long a loop waits after its store failed: growing, and jittered so that many instances do
//! not come back in step.

use std::time::Duration;

/// A wait that doubles from `first` to `max`.
#[derive(Debug)]
pub(crate) struct Pause {
    next: Duration,
    first: Duration,
    max: Duration,
}

impl Pause {
    pub(crate) fn new(first: Duration, max: Duration) -> Self {
        Self {
            next: first,
            first,
            max,
        }
    }

    /// The next wait: between half of it and all of it.
    pub(crate) fn next(&mut self) -> Duration {
        let full = self.next;
        self.next = std::cmp::min(full * 2, self.max);
        full.mul_f64(0.5 + 0.5 * fastrand::f64())
    }

    /// Starts over: the store has answered.
    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }
}
