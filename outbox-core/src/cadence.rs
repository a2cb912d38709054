//! The three cadences: what is looked for when nobody said that there is anything to find.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;

/// One of the three rhythms in which a relay looks for what claims and wake-ups missed.
///
/// A *pass* of a cadence runs in chunks, each a transaction of its own. On PostgreSQL each chunk
/// first takes an advisory lock of the cadence, and an instance that does not get it ends its pass:
/// somebody else is at it. Nothing depends on which instance that is.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Cadence {
    /// Every 5 minutes: leases that ended with no attempt left become dead letters, leases that no
    /// relay can have given are cut, events that nobody here handles are counted, whatever is due
    /// is dispatched, and some of what is past its retention is removed.
    Sweep,
    /// Every hour: whatever is due is dispatched, whatever the wake-ups said.
    Backstop,
    /// Every day: whatever is due is dispatched, in bigger batches; everything past its retention
    /// is removed, partitions are made ahead, and statistics are logged.
    Maintenance,
}

impl Cadence {
    /// All three, the most frequent first.
    pub const ALL: [Self; 3] = [Self::Sweep, Self::Backstop, Self::Maintenance];

    /// `sweep`, `backstop` or `maintenance`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Sweep => "sweep",
            Self::Backstop => "backstop",
            Self::Maintenance => "maintenance",
        }
    }
}

impl fmt::Display for Cadence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What one pass did.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct PassReport {
    /// Events claimed and handed to their handlers.
    pub dispatched: u64,
    /// Events found with no attempt left, which became dead letters.
    pub exhausted: u64,
    /// Leases that ended later than any lease can, and were cut.
    pub cut_leases: u64,
    /// How many unsettled events of each name this process leaves alone: it has no handler for the
    /// name, does not have the one they were split for, or reads no version as late as theirs.
    pub unhandled: BTreeMap<String, u64>,
    /// Of the names in `unhandled`, the handlers that events were split for and that are not here,
    /// with how many wait for each: a handler was removed, or got another name.
    pub missing_handlers: BTreeMap<(String, String), u64>,
    /// Of the names in `unhandled`, those that have a handler here, and the newest version found.
    pub later_versions: BTreeMap<String, NonZeroU32>,
    /// Settled events and dedup keys removed.
    pub purged: u64,
    /// Partitions of the history made or dropped.
    pub partitions: u64,
    /// Whether the pass ended early because another instance was at it.
    pub stood_down: bool,
}
