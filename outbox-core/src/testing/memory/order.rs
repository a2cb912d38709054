//! What waits for what: ordering keys, and events that are cancelled.

use std::num::NonZeroU32;
use std::time::SystemTime;

use super::database::{Database, Row};
use crate::event::EventId;
use crate::store::{BLOCKED_COUNT_MAX, BlockedKey, EventRef, EventState, blocks_later};

impl Database {
    /// The first unsettled row of an ordering key.
    pub(super) fn first_of(&self, key: &str) -> Option<i64> {
        let rows = self.rows.values();
        let of_key = rows.filter(|row| row.is_unsettled() && row.has_ordering_key(key));
        let first = of_key.min_by_key(|row| (row.place(), row.columns.id))?;
        Some(first.columns.id.row())
    }

    /// Whether an earlier event of its ordering key keeps it from being handled.
    pub(super) fn is_blocked(&self, row: &Row) -> bool {
        let Some(key) = row.columns.ordering_key.as_deref() else {
            return false;
        };
        let mut others = self.rows.values();
        others.any(|other| {
            other.place() < row.place() && other.has_ordering_key(key) && other.blocks_later()
        })
    }

    pub(super) fn cancel(&mut self, number: i64, now: SystemTime) {
        if let Some(row) = self.rows.get_mut(&number)
            && row.is_unsettled()
        {
            row.cancel(now);
            self.leave(number, now);
        }
    }

    pub(super) fn blocked_keys(&self, limit: NonZeroU32, now: SystemTime) -> Vec<BlockedKey> {
        let mut blocked: Vec<BlockedKey> = self
            .rows
            .values()
            .filter_map(|head| self.blocked_by(head, now))
            .collect();
        blocked.sort_by_key(|key| (std::cmp::Reverse(key.blocked_for), key.head));
        blocked.truncate(limit.get() as usize);
        blocked
    }

    fn blocked_by(&self, head: &Row, now: SystemTime) -> Option<BlockedKey> {
        let columns = &head.columns;
        let key = columns.ordering_key.clone()?;
        let state = head.state(now);
        let is_cause = matches!(state, EventState::Failed | EventState::DeadLetter);
        if !is_cause || !head.blocks_later() || self.is_blocked(head) {
            return None;
        }
        let since = columns.settled_at.unwrap_or(columns.created_at);
        let waiting = self.rows.values().filter(|row| {
            row.place() > head.place() && row.is_unsettled() && row.has_ordering_key(&key)
        });
        let waiting = (0..BLOCKED_COUNT_MAX).zip(waiting).count();

        let mut blocked = BlockedKey::new(key.clone(), columns.id, columns.name.clone(), state);
        blocked.attempts = columns.attempts;
        blocked.blocked_for = now.duration_since(since).unwrap_or_default();
        blocked.dead_reason = columns.dead_reason.map(|reason| reason.as_str().to_owned());
        blocked.last_error = columns.last_error.clone().unwrap_or_default();
        blocked.waiting = u32::try_from(waiting).unwrap_or(BLOCKED_COUNT_MAX);
        Some(blocked)
    }
}

impl Row {
    /// Where it stands in the order of its key.
    fn place(&self) -> EventId {
        self.columns.origin.unwrap_or(self.columns.id)
    }

    pub(super) fn has_ordering_key(&self, key: &str) -> bool {
        self.columns.ordering_key.as_deref() == Some(key)
    }

    pub(super) fn blocks_later(&self) -> bool {
        blocks_later(self.columns.state, self.behind_dead)
    }

    pub(super) fn is(&self, event: &EventRef) -> bool {
        match event {
            EventRef::Id(id) => self.columns.id == *id,
            EventRef::Key { name, key } => {
                self.columns.name == *name && self.columns.dedup_key.as_deref() == Some(key)
            }
        }
    }

    pub(super) fn cancel(&mut self, now: SystemTime) {
        self.end_lease();
        self.columns.due_at = None;
        self.end(EventState::Cancelled, self.retention, now);
    }
}
