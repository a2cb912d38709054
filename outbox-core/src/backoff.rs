//! When a failed event is tried again.
//!
//! This module is arithmetic only. It never sleeps, reads a clock or draws a random number: the
//! caller supplies the jitter, and the store turns the delay into a due time with the database's
//! clock. That is what lets the tests below be a table.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

/// An exponential backoff with a ceiling.
///
/// The wait after failed attempt `n` is `min(base × 2^(n-1), max)`, shortened at random by up to
/// `jitter` of itself so that events which failed together do not return together. Jitter never
/// lengthens a wait, so `max` is a true ceiling.
///
/// Defaults to 30 seconds, doubling, at most 30 minutes, with a jitter of 0.2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    base: Duration,
    max: Duration,
    jitter: f64,
}

impl Backoff {
    /// 30 s, 1 min, 2 min … 30 min, each shortened by up to a fifth.
    pub const DEFAULT: Self = Self {
        base: Duration::from_secs(30),
        max: Duration::from_secs(30 * 60),
        jitter: 0.2,
    };

    /// Creates a schedule that starts at `base`, never waits longer than `max`, and shortens a
    /// wait by up to the fraction `jitter` (0 to 1).
    ///
    /// # Errors
    ///
    /// Returns [`InvalidBackoff`] if `base` is zero or longer than `max`, if `max` is over
    /// [`DURATION_MAX`](crate::DURATION_MAX), or if `jitter` is not within 0 to 1.
    pub const fn new(base: Duration, max: Duration, jitter: f64) -> Result<Self, InvalidBackoff> {
        if base.is_zero() {
            return Err(InvalidBackoff::ZeroBase);
        }
        if base.as_nanos() > max.as_nanos() {
            return Err(InvalidBackoff::BaseAboveMax { base, max });
        }
        if max.as_nanos() > crate::DURATION_MAX.as_nanos() {
            return Err(InvalidBackoff::MaxTooLong { max });
        }
        // Written so that NaN fails too.
        if !(jitter >= 0.0 && jitter <= 1.0) {
            return Err(InvalidBackoff::Jitter { jitter });
        }
        Ok(Self { base, max, jitter })
    }

    /// Returns how long to wait after failed attempt number `attempt`.
    ///
    /// `sample` is a random number from `0.0..1.0`; anything else is taken as the nearest of the
    /// two.
    #[must_use]
    pub fn delay_after(&self, attempt: NonZeroU32, sample: f64) -> Duration {
        // Saturating, because attempt numbers are read back from the database: a row with an
        // absurd one must wait `max`, not panic the relay.
        let factor = 2_u32.saturating_pow(attempt.get() - 1);
        let full = self.base.saturating_mul(factor);
        let full = if full > self.max { self.max } else { full };
        // Saturating, because the product is rounded and may exceed the whole by a nanosecond.
        full.saturating_sub(full.mul_f64(self.jitter * sample.clamp(0.0, 1.0)))
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Arguments that make no backoff.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum InvalidBackoff {
    /// The first wait would be zero: a failing event would be tried in a busy loop.
    ZeroBase,
    /// The first wait is longer than the longest.
    BaseAboveMax {
        /// The first wait asked for.
        base: Duration,
        /// The longest wait asked for.
        max: Duration,
    },
    /// The longest wait is over [`DURATION_MAX`](crate::DURATION_MAX).
    MaxTooLong {
        /// The longest wait asked for.
        max: Duration,
    },
    /// The jitter is not a fraction.
    Jitter {
        /// The jitter asked for.
        jitter: f64,
    },
}

impl fmt::Display for InvalidBackoff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroBase => f.write_str("a backoff must start above zero"),
            Self::BaseAboveMax { base, max } => {
                write!(
                    f,
                    "a backoff cannot start at {base:?} and wait at most {max:?}"
                )
            }
            Self::MaxTooLong { max } => {
                write!(
                    f,
                    "a backoff cannot wait {max:?}; the limit is {:?}",
                    crate::DURATION_MAX
                )
            }
            Self::Jitter { jitter } => {
                write!(f, "a jitter is a fraction from 0 to 1, not {jitter}")
            }
        }
    }
}

impl std::error::Error for InvalidBackoff {}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[track_caller]
    fn check(attempt: u32, sample: f64, expected: Duration) {
        let backoff = Backoff::new(30 * SECOND, 1_800 * SECOND, 0.5).unwrap();
        let attempt = NonZeroU32::new(attempt).unwrap();
        assert_eq!(
            backoff.delay_after(attempt, sample),
            expected,
            "attempt {attempt}"
        );
    }

    #[test]
    fn doubles_until_the_ceiling() {
        check(1, 0.0, 30 * SECOND);
        check(2, 0.0, 60 * SECOND);
        check(3, 0.0, 120 * SECOND);
        check(6, 0.0, 960 * SECOND);
        check(7, 0.0, 1_800 * SECOND);
        check(31, 0.0, 1_800 * SECOND);
        check(64, 0.0, 1_800 * SECOND);
        check(1_100, 0.0, 1_800 * SECOND);
        check(u32::MAX, 0.0, 1_800 * SECOND);
    }

    #[test]
    fn jitter_only_shortens() {
        check(2, 0.5, 45 * SECOND);
        check(2, -3.0, 60 * SECOND);
        check(2, 9.0, 30 * SECOND);
    }

    #[test]
    fn a_jitter_of_all_of_it_leaves_nothing_and_does_not_panic() {
        for n in 0..5_000 {
            let base = Duration::new(100_000_000 + u64::from(n), 123_456_789 + n);
            let backoff = Backoff::new(base, base, 1.0).unwrap();
            assert!(backoff.delay_after(NonZeroU32::MIN, 1.0) < SECOND);
        }
    }

    #[test]
    fn a_schedule_that_cannot_be_kept_is_refused() {
        assert_eq!(
            Backoff::new(Duration::ZERO, SECOND, 0.0),
            Err(InvalidBackoff::ZeroBase)
        );
        assert_eq!(
            Backoff::new(2 * SECOND, SECOND, 0.0),
            Err(InvalidBackoff::BaseAboveMax {
                base: 2 * SECOND,
                max: SECOND
            })
        );
        assert_eq!(
            Backoff::new(SECOND, SECOND, 1.5),
            Err(InvalidBackoff::Jitter { jitter: 1.5 })
        );
        assert!(Backoff::new(SECOND, SECOND, f64::NAN).is_err());
        assert!(Backoff::new(SECOND, Duration::MAX, 0.0).is_err());
    }
}
