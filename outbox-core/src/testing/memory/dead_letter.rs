//! Dead letters, and the counts of everything.

use std::time::{Duration, SystemTime};

use super::database::{Database, Row};
use crate::dead_letter::{
    DeadLetter, DeadLetterChange, DeadLetterChunk, DeadLetterFilter, DeadLetterRows,
    DeadLetterScan, DeadLettersChanged,
};
use crate::stats::StoreStats;
use crate::store::EventState;

impl Database {
    pub(super) fn dead_letters(
        &self,
        scan: &DeadLetterScan<'_>,
        now: SystemTime,
    ) -> DeadLetterChunk {
        let mut chunk = DeadLetterChunk::default();
        let below = self.rows.range(..scan.beyond).rev();
        let dead = below.filter(|(_, row)| row.is_dead());
        for (looked_at, (number, row)) in (0..).zip(dead) {
            if looked_at == scan.scan.get() || chunk.found.len() == scan.limit.get() as usize {
                return chunk;
            }
            chunk.next = Some(*number);
            if row.is_meant(scan.filter, now) {
                chunk.found.push(row.dead_letter());
            }
        }
        chunk.next = None;
        chunk
    }

    pub(super) fn change_dead_letters(
        &mut self,
        rows: DeadLetterRows<'_>,
        change: DeadLetterChange,
        now: SystemTime,
    ) -> DeadLettersChanged {
        let changed = match rows {
            DeadLetterRows::Numbered(rows) => {
                let dead = |row: &&i64| self.rows.get(row).is_some_and(Row::is_dead);
                let mut rows: Vec<i64> = rows.iter().filter(dead).copied().collect();
                rows.sort_unstable();
                rows.dedup();
                DeadLettersChanged { rows, next: None }
            }
            DeadLetterRows::Matching(scan) => self.matching(&scan, now),
        };
        let mut wait = match change {
            DeadLetterChange::Requeue { delay, .. } => delay,
            _ => Duration::ZERO,
        };
        for number in &changed.rows {
            self.change_one(*number, change, wait, now);
            if let DeadLetterChange::Requeue { spacing, .. } = change {
                wait += spacing;
            }
        }
        changed
    }

    fn matching(&self, scan: &DeadLetterScan<'_>, now: SystemTime) -> DeadLettersChanged {
        let mut found = DeadLettersChanged::default();
        let above = self.rows.range(scan.beyond.saturating_add(1)..);
        let dead = above.filter(|(_, row)| row.is_dead());
        for (looked_at, (number, row)) in (0..).zip(dead) {
            if looked_at == scan.scan.get() || found.rows.len() == scan.limit.get() as usize {
                return found;
            }
            found.next = Some(*number);
            if row.is_meant(scan.filter, now) && !self.locked.contains(number) {
                found.rows.push(*number);
            }
        }
        found.next = None;
        found
    }

    fn change_one(
        &mut self,
        number: i64,
        change: DeadLetterChange,
        wait: Duration,
        now: SystemTime,
    ) {
        let Some(row) = self.rows.get_mut(&number) else {
            return;
        };
        match change {
            DeadLetterChange::Requeue { .. } => row.requeue(wait, now),
            DeadLetterChange::Discard => {
                row.end(EventState::Discarded, row.retention, now);
                self.leave(number, now);
            }
            DeadLetterChange::Purge => {
                row.end(EventState::Discarded, Duration::ZERO, now);
                self.leave(number, now);
            }
        }
    }

    pub(super) fn stats(&self, now: SystemTime) -> StoreStats {
        let mut stats = StoreStats {
            exact: true,
            ..StoreStats::default()
        };
        for row in self.rows.values() {
            let name = row.columns.name.clone();
            if row.is_dead() {
                stats.events.entry(name).or_default().dead += 1;
            } else if row.is_unsettled() {
                let counts = stats.events.entry(name).or_default();
                let due = row.columns.due_at.is_none_or(|due_at| due_at <= now);
                if row.is_leased(now) {
                    counts.in_progress += 1;
                } else if !due && row.failed {
                    counts.retrying += 1;
                } else if !due {
                    counts.waiting += 1;
                } else if !row.has_attempt_left() {
                    counts.exhausted += 1;
                } else {
                    counts.due += 1;
                    let since = row.columns.due_at.unwrap_or(row.columns.created_at);
                    let age = now.duration_since(since).unwrap_or_default();
                    stats.oldest_due = stats.oldest_due.max(Some(age));
                }
            }
        }
        stats
    }
}

impl Row {
    fn is_dead(&self) -> bool {
        self.columns.state == EventState::DeadLetter
    }

    fn is_meant(&self, filter: &DeadLetterFilter, now: SystemTime) -> bool {
        let columns = &self.columns;
        let age = columns
            .settled_at
            .and_then(|at| now.duration_since(at).ok())
            .unwrap_or_default();
        let error = columns.last_error.as_deref().unwrap_or_default();
        filter.event_asked().is_none_or(|name| name == columns.name)
            && filter
                .handler_asked()
                .is_none_or(|handler| Some(handler) == columns.handler.as_deref())
            && filter
                .reason_asked()
                .is_none_or(|reason| Some(reason) == columns.dead_reason)
            && filter.least_age().is_none_or(|least| age > least)
            && filter.greatest_age().is_none_or(|greatest| age <= greatest)
            && filter.error_asked().is_none_or(|text| error.contains(text))
    }

    fn requeue(&mut self, wait: Duration, now: SystemTime) {
        let columns = &mut self.columns;
        columns.state = EventState::Pending;
        columns.attempts = 0;
        columns.claimed_by = None;
        columns.dead_reason = None;
        columns.settled_at = None;
        columns.due_at = Some(now + wait);
        columns.expires_at = None;
        self.failed = false;
    }

    fn dead_letter(&self) -> DeadLetter {
        let columns = &self.columns;
        let mut letter = DeadLetter::new(
            columns.id,
            columns.name.clone(),
            columns.version,
            columns.max_attempts,
            columns.created_at,
            columns.settled_at.unwrap_or(columns.created_at),
        );
        letter.reason_text = columns
            .dead_reason
            .map(|reason| reason.as_str().to_owned())
            .unwrap_or_default();
        letter.last_error = columns.last_error.clone().unwrap_or_default();
        letter.attempts = columns.attempts;
        letter.claimed_by = columns.claimed_by.clone();
        letter.dedup_key = columns.dedup_key.clone();
        letter.handler = columns.handler.clone();
        letter.origin = columns.origin;
        letter
    }
}
