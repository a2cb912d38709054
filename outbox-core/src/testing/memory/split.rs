//! Rows of one handler each, and handlers that are paused.

use std::time::SystemTime;

use super::database::{Database, Row};
use crate::event::EventId;
use crate::store::{Pause, PauseRef, Split, SplitPart, SplitRow};

impl Database {
    pub(super) fn split(&mut self, splits: &[Split]) -> Vec<Option<Vec<SplitRow>>> {
        splits.iter().map(|split| self.split_one(split)).collect()
    }

    fn split_one(&mut self, split: &Split) -> Option<Vec<SplitRow>> {
        let whole = self.held(split.lease)?.clone();
        if whole.columns.handler.is_some() {
            return None;
        }
        let mut rows = Vec::with_capacity(split.parts.len());
        for (position, part) in split.parts.iter().enumerate() {
            let mut row = whole.clone();
            if position > 0 {
                row.columns.origin = Some(whole.columns.id);
                row.columns.id = self.next_id();
                row.columns.dedup_key = None;
                row.fingerprint = None;
            }
            row.become_part(part);
            if !part.held || self.is_paused(&row) {
                row.give_back();
            }
            rows.push(SplitRow {
                row: row.columns.id.row(),
                max_attempts: row.columns.max_attempts,
                held: row.columns.lease_token.is_some(),
            });
            self.rows.insert(row.columns.id.row(), row);
        }
        Some(rows)
    }

    /// What is unsettled of an event: its own row, and those that were split from it.
    pub(super) fn unsettled_rows_of(&self, event: EventId) -> impl Iterator<Item = &Row> {
        let rows = self.rows.values();
        rows.filter(move |row| {
            row.is_unsettled() && (row.columns.id == event || row.is_part_of(event))
        })
    }

    pub(super) fn set_paused(&mut self, pause: &PauseRef, paused: bool, now: SystemTime) -> bool {
        if !paused {
            return self.paused.remove(pause).is_some();
        }
        let changed = !self.paused.contains_key(pause);
        self.paused.entry(pause.clone()).or_insert(now);
        changed
    }

    pub(super) fn pauses(&self) -> Vec<Pause> {
        let paused = self.paused.iter();
        let pause = |(of, since): (&PauseRef, &SystemTime)| Pause {
            of: of.clone(),
            since: *since,
        };
        paused.map(pause).collect()
    }

    pub(super) fn is_paused(&self, row: &Row) -> bool {
        let of = |handler| PauseRef {
            name: row.columns.name.clone(),
            handler,
        };
        let handler = row.columns.handler.clone();
        self.paused.contains_key(&of(None))
            || (handler.is_some() && self.paused.contains_key(&of(handler)))
    }
}

impl Row {
    fn become_part(&mut self, part: &SplitPart) {
        let columns = &mut self.columns;
        columns.handler = Some(part.handler.to_owned());
        if let Some(own) = part.max_attempts {
            let charged = columns.attempts.try_into().unwrap_or(own);
            columns.max_attempts = std::cmp::max(own, charged);
        }
    }

    pub(super) fn is_part_of(&self, event: EventId) -> bool {
        self.columns.origin == Some(event)
    }

    /// Nothing more will happen to it.
    pub(super) fn has_ended(&self) -> bool {
        self.kept_until.is_some()
    }
}
