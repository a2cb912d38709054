//! How much waits, and for how long.

use std::collections::BTreeMap;
use std::time::Duration;

/// What an outbox holds at this moment. See [`Outbox::stats`](crate::Outbox::stats).
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Stats {
    /// By event name: every name of which there is an unsettled event or a dead letter.
    pub events: BTreeMap<String, EventCounts>,
    /// How long the event that has been due the longest has been due. `None` if nothing is due.
    ///
    /// This is the lag: what to alert on. Events in progress are not counted.
    pub oldest_due: Option<Duration>,
    /// Whether everything was counted. If not, the tables were too large to be read in one cheap
    /// statement, and the counts are what the store says they are then: estimates from a sample on
    /// PostgreSQL, lower bounds on SQLite.
    pub exact: bool,
    /// The names, of those in `events`, that have no handler in this process. (Events of a known
    /// name but a later version are not told apart here; [`PassReport`](crate::PassReport) does.)
    pub unhandled: Vec<String>,
}

impl Stats {
    /// The counts of all event names together.
    #[must_use]
    pub fn total(&self) -> EventCounts {
        total(&self.events)
    }
}

fn total(events: &BTreeMap<String, EventCounts>) -> EventCounts {
    let mut total = EventCounts::default();
    for counts in events.values() {
        total.add(counts);
    }
    total
}

/// The events of one name, each counted once.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct EventCounts {
    /// A claim may take it now. The backlog.
    pub due: u64,
    /// It was published with a delay, or requeued at a rate, and is not due yet.
    pub waiting: u64,
    /// It failed, and its retry is not due yet.
    pub retrying: u64,
    /// Somebody holds it under a lease that has not ended.
    pub in_progress: u64,
    /// Its last attempt ended without an outcome: the next sweep makes it a dead letter.
    pub exhausted: u64,
    /// It is a dead letter.
    pub dead: u64,
}

impl EventCounts {
    /// Adds `other` to these.
    pub fn add(&mut self, other: &Self) {
        self.due += other.due;
        self.waiting += other.waiting;
        self.retrying += other.retrying;
        self.in_progress += other.in_progress;
        self.exhausted += other.exhausted;
        self.dead += other.dead;
    }

    /// All that are not settled.
    #[must_use]
    pub fn unsettled(&self) -> u64 {
        self.due + self.waiting + self.retrying + self.in_progress + self.exhausted
    }
}

/// What a store answers to [`Store::stats`](crate::Store::stats).
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct StoreStats {
    /// By event name.
    pub events: BTreeMap<String, EventCounts>,
    /// How long the longest due event has been due.
    pub oldest_due: Option<Duration>,
    /// Whether everything was counted.
    pub exact: bool,
}

impl StoreStats {
    /// The counts of all event names together.
    #[must_use]
    pub fn total(&self) -> EventCounts {
        total(&self.events)
    }
}
