//! The rows and keys themselves.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::num::NonZeroU32;
use std::time::{Duration, SystemTime};

use uuid::Uuid;

use crate::event::{BehindDead, EventId};
use crate::fingerprint::Fingerprint;
use crate::lease::HeldLease;
use crate::outcome::{DeadReason, EXPIRED, Outcome};
use crate::store::{
    ATTEMPTS_KEPT, Claimed, EventRecord, EventState, Existing, Failure, LEASE_ENDED, NewEvent,
    PauseRef, Watched,
};

/// What was committed.
#[derive(Debug)]
pub(super) struct Database {
    pub(super) installation: Uuid,
    pub(super) rows: BTreeMap<i64, Row>,
    pub(super) keys: HashMap<(String, String), Key>,
    pub(super) locked: BTreeSet<i64>,
    pub(super) paused: BTreeMap<PauseRef, SystemTime>,
    /// What was ever committed, for tests that ask.
    pub(super) log: Vec<Committed>,
    last_number: i64,
}

/// An event as it was published.
#[derive(Clone, Debug)]
pub(crate) struct Committed {
    pub(crate) name: String,
    pub(crate) version: NonZeroU32,
    pub(crate) payload: String,
}

/// One event, settled or not.
#[derive(Clone, Debug)]
pub(super) struct Row {
    /// Its `state` says only whether it is settled, and how; [`Row::state`] says the rest.
    pub(super) columns: EventRecord,
    pub(super) lease_ends_at: Option<SystemTime>,
    pub(super) fingerprint: Option<Fingerprint>,
    pub(super) behind_dead: BehindDead,
    /// Whether its last outcome was a retry.
    pub(super) failed: bool,
    pub(super) retention: Duration,
    pub(super) key_retention: Duration,
    /// When a processed event may be removed.
    pub(super) kept_until: Option<SystemTime>,
}

/// What a dedup key remembers.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) id: EventId,
    pub(super) fingerprint: Option<Fingerprint>,
    /// Since its event was settled for good.
    pub(super) settled: Option<SettledKey>,
}

/// What a dedup key remembers of an event that nothing more will happen to.
#[derive(Debug)]
pub(super) struct SettledKey {
    pub(super) state: EventState,
    pub(super) output: Option<String>,
    pub(super) kept_until: SystemTime,
}

impl Database {
    pub(super) fn new(installation: Uuid) -> Self {
        Self {
            installation,
            rows: BTreeMap::new(),
            keys: HashMap::new(),
            locked: BTreeSet::new(),
            paused: BTreeMap::new(),
            log: Vec::new(),
            last_number: 0,
        }
    }

    pub(super) fn newest(&self) -> i64 {
        self.last_number
    }

    /// The next number. It is used up even if its transaction rolls back, as a sequence's is.
    pub(super) fn next_id(&mut self) -> EventId {
        self.last_number += 1;
        EventId::new(self.installation, self.last_number)
    }

    pub(super) fn add(&mut self, row: Row, now: SystemTime) {
        let id = row.columns.id;
        let ended = row.kept_until.is_some();
        self.log.push(Committed {
            name: row.columns.name.clone(),
            version: row.columns.version,
            payload: row.columns.payload.clone(),
        });
        if let Some(key) = row.key() {
            let fresh = Key {
                id,
                fingerprint: row.fingerprint,
                settled: None,
            };
            self.keys.insert(key, fresh);
        }
        self.rows.insert(id.row(), row);
        if ended {
            self.leave(id.row(), now);
        }
    }

    pub(super) fn holder(&self, name: &str, key: &str, now: SystemTime) -> Option<Existing> {
        let key = self.keys.get(&(name.to_owned(), key.to_owned()))?;
        if let Some(row) = self.rows.get(&key.id.row()) {
            return Some(row.existing(now));
        }
        let settled = key.settled.as_ref()?;
        Some(Existing {
            id: key.id,
            state: settled.state,
            output: settled.output.clone(),
            fingerprint: key.fingerprint,
        })
    }

    pub(super) fn look_up(&self, event: &Watched, now: SystemTime) -> Option<Existing> {
        if let Some(row) = self.rows.get(&event.row) {
            return Some(row.existing(now));
        }
        let (name, key) = event.key.as_ref()?;
        let holder = self.holder(name, key, now);
        holder.filter(|holder| holder.id.row() == event.row)
    }

    /// Lets the key remember what became of its event, and the row go where nothing of it is kept.
    pub(super) fn leave(&mut self, number: i64, now: SystemTime) {
        let Some(row) = self.rows.get(&number) else {
            return;
        };
        if let Some(key) = row.key().and_then(|key| self.keys.get_mut(&key)) {
            key.settled = Some(SettledKey {
                state: row.columns.state,
                output: row.columns.output.clone(),
                kept_until: now + row.key_retention,
            });
        }
        if row.kept_until.is_some_and(|until| until <= now) {
            self.rows.remove(&number);
        }
    }

    /// The unsettled row that is held under this lease, ended or not.
    pub(super) fn held(&mut self, lease: HeldLease) -> Option<&mut Row> {
        self.rows
            .get_mut(&lease.row)
            .filter(|row| row.is_unsettled() && row.columns.lease_token == Some(lease.token))
    }

    pub(super) fn expire_retention(&mut self, number: i64, now: SystemTime) {
        if let Some(row) = self.rows.get_mut(&number) {
            row.kept_until = row.kept_until.map(|_| now);
        }
        for key in self.keys.values_mut() {
            if key.id.row() == number
                && let Some(settled) = &mut key.settled
            {
                settled.kept_until = now;
            }
        }
    }
}

impl Row {
    pub(super) fn new(id: EventId, event: &NewEvent, now: SystemTime) -> Self {
        let mut columns = EventRecord::new(
            id,
            event.name.to_owned(),
            event.version,
            event.payload.clone(),
            EventState::Pending,
            event.max_attempts,
            now,
        );
        columns.headers = event.headers.clone();
        columns.dedup_key = event.dedup_key.clone();
        columns.ordering_key = event.ordering_key.clone();
        columns.priority = event.priority;
        columns.due_at = (!event.delay.is_zero()).then(|| now + event.delay);
        columns.expires_at = event.expires_in.map(|span| now + span);
        let mut row = Self {
            columns,
            lease_ends_at: None,
            fingerprint: event.fingerprint,
            behind_dead: event.behind_dead,
            failed: false,
            retention: event.retention,
            key_retention: event.key_retention,
            kept_until: None,
        };
        if let Some(lease) = &event.lease {
            row.columns.attempts = 1;
            row.columns.lease_token = Some(lease.token);
            row.columns.claimed_by = Some(lease.instance.to_string());
            row.lease_ends_at = Some(now + lease.duration);
        }
        row
    }

    pub(super) fn key(&self) -> Option<(String, String)> {
        let key = self.columns.dedup_key.clone()?;
        Some((self.columns.name.clone(), key))
    }

    pub(super) fn existing(&self, now: SystemTime) -> Existing {
        Existing {
            id: self.columns.id,
            state: self.state(now),
            output: self.columns.output.clone(),
            fingerprint: self.fingerprint,
        }
    }

    pub(super) fn record(&self, now: SystemTime) -> EventRecord {
        EventRecord {
            state: self.state(now),
            ..self.columns.clone()
        }
    }

    pub(super) fn is_unsettled(&self) -> bool {
        self.columns.state == EventState::Pending
    }

    pub(super) fn is_leased(&self, now: SystemTime) -> bool {
        self.lease_ends_at.is_some_and(|end| end > now)
    }

    /// Neither settled nor leased nor waiting. It may be out of attempts.
    pub(super) fn is_free(&self, now: SystemTime) -> bool {
        self.is_unsettled()
            && !self.is_leased(now)
            && self.columns.due_at.is_none_or(|due_at| due_at <= now)
    }

    pub(super) fn is_expired(&self, now: SystemTime) -> bool {
        self.columns.expires_at.is_some_and(|end| end <= now)
    }

    pub(super) fn has_attempt_left(&self) -> bool {
        self.columns.attempts < self.columns.max_attempts.get()
    }

    /// Records a failure of the current attempt and keeps the last ones.
    pub(super) fn add_failure(&mut self, error: &str, now: SystemTime) {
        let failures = &mut self.columns.failures;
        failures.push(Failure {
            attempt: self.columns.attempts,
            at: now,
            instance: self.columns.claimed_by.clone().unwrap_or_default(),
            error: error.to_owned(),
        });
        let surplus = failures.len().saturating_sub(ATTEMPTS_KEPT);
        failures.drain(..surplus);
        self.columns.last_error = Some(error.to_owned());
    }

    /// Writes down an outcome and ends the lease.
    pub(super) fn settle(&mut self, outcome: &Outcome, now: SystemTime) {
        self.end_lease();
        self.columns.due_at = None;
        match outcome {
            Outcome::Processed { output } => {
                self.columns.output.clone_from(output);
                self.end(EventState::Processed, self.retention, now);
            }
            Outcome::Retry { after, error } => {
                self.add_failure(error.as_str(), now);
                self.failed = true;
                self.columns.due_at = Some(now + *after);
            }
            Outcome::Dead { reason, error } => {
                self.add_failure(error.as_str(), now);
                self.bury(*reason, now);
            }
            Outcome::Expired => {
                self.columns.attempts = self.columns.attempts.saturating_sub(1);
                self.columns.last_error = Some(EXPIRED.to_owned());
                self.bury(DeadReason::Expired, now);
            }
            Outcome::Discarded { .. } => self.end(EventState::Discarded, Duration::ZERO, now),
        }
    }

    fn bury(&mut self, reason: DeadReason, now: SystemTime) {
        self.columns.state = EventState::DeadLetter;
        self.columns.dead_reason = Some(reason);
        self.columns.settled_at = Some(now);
        self.columns.expires_at = None;
    }

    /// Nothing more will happen to it.
    pub(super) fn end(&mut self, state: EventState, retention: Duration, now: SystemTime) {
        self.columns.state = state;
        self.columns.settled_at = Some(now);
        self.columns.expires_at = None;
        self.kept_until = Some(now + retention);
    }

    /// Ends the lease and takes its attempt back.
    pub(super) fn give_back(&mut self) {
        self.end_lease();
        self.columns.claimed_by = None;
        self.columns.attempts = self.columns.attempts.saturating_sub(1);
    }

    pub(super) fn end_lease(&mut self) {
        self.columns.lease_token = None;
        self.lease_ends_at = None;
    }

    /// The row as its claimer gets it. `None` where it is not held, or no attempt was charged.
    pub(super) fn claimed(&self, now: SystemTime) -> Option<Claimed> {
        let columns = &self.columns;
        Some(Claimed {
            id: columns.id,
            token: columns.lease_token?,
            name: columns.name.clone(),
            handler: columns.handler.clone(),
            origin: columns.origin.map(EventId::row),
            version: columns.version,
            payload: columns.payload.clone(),
            headers: columns.headers.clone(),
            ordering_key: columns.ordering_key.clone(),
            priority: columns.priority,
            waited: columns.due_at.is_some(),
            attempt: columns.attempts.try_into().ok()?,
            max_attempts: columns.max_attempts,
            created_at: columns.created_at,
            expired: self.is_expired(now),
            lapsed: self.lapsed(),
        })
    }

    fn lapsed(&self) -> u32 {
        let mut latest = self.columns.failures.iter().rev();
        let mut lapses = |attempt| {
            latest
                .next()
                .is_some_and(|last| last.error == LEASE_ENDED && last.attempt == attempt)
        };
        let attempts = self.columns.attempts;
        match attempts.checked_sub(1).is_some_and(&mut lapses) {
            true => 1 + u32::from(attempts.checked_sub(2).is_some_and(lapses)),
            false => 0,
        }
    }

    pub(super) fn state(&self, now: SystemTime) -> EventState {
        if !self.is_unsettled() {
            self.columns.state
        } else if self.is_leased(now) {
            EventState::InProgress
        } else if self.failed && self.columns.lease_token.is_none() {
            EventState::Failed
        } else {
            EventState::Pending
        }
    }
}
