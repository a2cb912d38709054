//! The settings of one outbox, checked once.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::DURATION_MAX;
use crate::backoff::Backoff;
use crate::registry::BuildError;

/// The shortest lease: below it a single slow round trip would lose every claim.
pub const LEASE_MIN: Duration = Duration::from_secs(1);

/// The longest lease: how long an event of a crashed process may wait to be taken over.
pub const LEASE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// The longest instance name that is stored, in bytes.
pub const INSTANCE_MAX: usize = 128;

/// The most events one process may run or hold back at once, whatever it is told.
pub(crate) const CONCURRENCY_MAX: u32 = 10_000;

/// The lease a row is born with: how long its event waits if the publishing process dies between
/// its commit and the dispatch.
const INLINE_LEASE: Duration = Duration::from_secs(15);

/// What a builder collects, before it is checked.
#[derive(Clone, Debug)]
pub(crate) struct Draft {
    pub(crate) instance: String,
    pub(crate) lease: Duration,
    pub(crate) timeout: Duration,
    pub(crate) backoff: Backoff,
    pub(crate) max_attempts: u32,
    pub(crate) retention: Duration,
    pub(crate) dedup_retention: Duration,
    pub(crate) payload_max: usize,
    pub(crate) inline: InlineDraft,
    pub(crate) threads: Threads,
    /// Whether other processes are woken, and wake this one.
    pub(crate) notifications: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct InlineDraft {
    pub(crate) on: bool,
    pub(crate) concurrency: u32,
    pub(crate) queue: u32,
    pub(crate) lease: Option<Duration>,
}

/// Where the loops of an outbox run: claim, renew, settle, inline dispatch, sweep.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Threads {
    /// On a thread of their own, which no handler can block.
    Own,
    /// On the runtime that started them.
    Caller,
}

impl Default for Draft {
    fn default() -> Self {
        Self {
            instance: default_instance(),
            lease: Duration::from_secs(60),
            timeout: Duration::from_secs(30),
            backoff: Backoff::DEFAULT,
            max_attempts: 10,
            retention: Duration::from_secs(7 * 24 * 60 * 60),
            dedup_retention: Duration::from_secs(24 * 60 * 60),
            payload_max: 1024 * 1024,
            inline: InlineDraft {
                on: true,
                concurrency: 16,
                queue: 1_024,
                lease: None,
            },
            threads: Threads::Own,
            notifications: true,
        }
    }
}

/// Settings that have been checked. Later code trusts them.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) instance: Arc<str>,
    pub(crate) lease: Duration,
    pub(crate) timeout: Duration,
    pub(crate) backoff: Backoff,
    pub(crate) max_attempts: NonZeroU32,
    pub(crate) retention: Duration,
    pub(crate) dedup_retention: Duration,
    pub(crate) payload_max: usize,
    pub(crate) inline: InlineSettings,
    pub(crate) threads: Threads,
    /// Whether other processes are woken, and wake this one.
    pub(crate) notifications: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct InlineSettings {
    /// Whether rows are born leased. Off, only what is asked for is dispatched inline.
    pub(crate) on: bool,
    pub(crate) concurrency: NonZeroU32,
    pub(crate) queue: NonZeroU32,
    /// The lease a row is born with. Renewed to the full one if its handler takes long.
    pub(crate) lease: Duration,
}

/// The longest pause between two looks at what is held.
const MARGIN_MAX: Duration = Duration::from_millis(500);

impl Settings {
    /// How often this process looks whether a lease it holds has ended, and how long before its end it
    /// stops acting on it. The same, so that no run is found only after the end.
    pub(crate) fn lease_margin(&self) -> Duration {
        std::cmp::min(self.inline.lease / 6, MARGIN_MAX)
    }
}

impl Draft {
    pub(crate) fn check(self) -> Result<Settings, BuildError> {
        if self.instance.is_empty()
            || self.instance.len() > INSTANCE_MAX
            || self.instance.contains('\0')
        {
            return Err(BuildError::InvalidInstance {
                instance: self.instance,
            });
        }
        let lease = bounded("lease", self.lease, LEASE_MIN, LEASE_MAX)?;
        let timeout = duration("handler_timeout", self.timeout, Duration::from_millis(1))?;
        let inline_lease = self
            .inline
            .lease
            .unwrap_or(std::cmp::min(lease, INLINE_LEASE));
        let inline_lease = bounded("inline_lease", inline_lease, LEASE_MIN, lease)?;
        let inline = InlineSettings {
            on: self.inline.on,
            concurrency: count("inline_concurrency", self.inline.concurrency)?,
            queue: count("inline_queue", self.inline.queue)?,
            lease: inline_lease,
        };
        if self.payload_max == 0 {
            return Err(BuildError::InvalidCount {
                setting: "max_payload_bytes",
                value: 0,
                max: u32::MAX,
            });
        }
        Ok(Settings {
            instance: self.instance.into(),
            lease,
            timeout,
            backoff: self.backoff,
            max_attempts: attempts("max_attempts", self.max_attempts)?,
            retention: duration("retention", self.retention, Duration::ZERO)?,
            dedup_retention: duration("dedup_retention", self.dedup_retention, Duration::ZERO)?,
            payload_max: self.payload_max,
            inline,
            threads: self.threads,
            notifications: self.notifications,
        })
    }
}

/// A count from 1 to [`CONCURRENCY_MAX`].
pub(crate) fn count(setting: &'static str, value: u32) -> Result<NonZeroU32, BuildError> {
    at_most(CONCURRENCY_MAX, setting, value)
}

/// A number of attempts that fits the column.
pub(crate) fn attempts(setting: &'static str, value: u32) -> Result<NonZeroU32, BuildError> {
    at_most(i32::MAX.unsigned_abs(), setting, value)
}

fn at_most(max: u32, setting: &'static str, value: u32) -> Result<NonZeroU32, BuildError> {
    NonZeroU32::new(value)
        .filter(|count| count.get() <= max)
        .ok_or(BuildError::InvalidCount {
            setting,
            value,
            max,
        })
}

/// A span from `min` to [`DURATION_MAX`].
fn duration(setting: &'static str, value: Duration, min: Duration) -> Result<Duration, BuildError> {
    bounded(setting, value, min, DURATION_MAX)
}

/// A span from `min` to `max`.
pub(crate) fn bounded(
    setting: &'static str,
    value: Duration,
    min: Duration,
    max: Duration,
) -> Result<Duration, BuildError> {
    if value < min || value > max {
        return Err(BuildError::InvalidDuration {
            setting,
            value,
            min,
            max,
        });
    }
    Ok(value)
}

/// How much of the host's name is kept, so that an instance name stays within its limit.
const HOST_MAX: usize = 100;

/// `<host>:<process id>`, as an operator reads it in `claimed_by`.
///
/// It tells people where to look. Nothing is decided by it, so two containers with the same host
/// name and process id do no harm.
fn default_instance() -> String {
    let host = gethostname::gethostname()
        .to_string_lossy()
        .replace('\0', "");
    let host = match host.floor_char_boundary(HOST_MAX) {
        0 => "host",
        end => &host[..end],
    };
    format!("{host}:{}", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_refused(change: impl FnOnce(&mut Draft), expected: &str) {
        let mut draft = Draft::default();
        change(&mut draft);
        assert_eq!(draft.check().unwrap_err().to_string(), expected);
    }

    #[test]
    fn defaults_are_valid() {
        assert!(Draft::default().check().is_ok());
    }

    #[test]
    fn a_refused_setting_is_repeated_in_the_error() {
        check_refused(
            |d| d.max_attempts = 0,
            "`max_attempts` cannot be 0: it must be from 1 to 2147483647",
        );
        check_refused(
            |d| d.lease = Duration::from_millis(10),
            "`lease` cannot be 10ms: it must be from 1s to 86400s",
        );
        check_refused(
            |d| d.inline.concurrency = 0,
            "`inline_concurrency` cannot be 0: it must be from 1 to 10000",
        );
        check_refused(
            |d| d.instance = String::new(),
            "an instance name has 1 to 128 bytes and no U+0000, unlike \"\"",
        );
    }
}
