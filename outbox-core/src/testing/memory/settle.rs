//! What is written under a lease token, and what retention removes.

use std::num::NonZeroU32;
use std::time::{Duration, SystemTime};

use super::database::Database;
use crate::lease::HeldLease;
use crate::store::{Renewal, Settled, Settlement, Verified};

impl Database {
    pub(super) fn verify(&mut self, leases: &[HeldLease], now: SystemTime) -> Vec<Verified> {
        let mut verified = Vec::new();
        for lease in leases {
            if let Some(row) = self.held(*lease).cloned() {
                let left = row
                    .lease_ends_at
                    .and_then(|end| end.duration_since(now).ok());
                verified.push(Verified {
                    lease: *lease,
                    id: row.columns.id,
                    created_at: row.columns.created_at,
                    remaining: left.unwrap_or(Duration::ZERO),
                    expired: row.is_expired(now),
                    blocked: self.is_blocked(&row) || self.is_paused(&row),
                });
            }
        }
        verified
    }

    pub(super) fn renew(&mut self, leases: &[HeldLease], until: SystemTime) -> Vec<Renewal> {
        let mut answers = Vec::with_capacity(leases.len());
        for lease in leases {
            answers.push(if self.locked.contains(&lease.row) {
                Renewal::Unknown
            } else if let Some(row) = self.held(*lease) {
                row.lease_ends_at = Some(until);
                Renewal::Renewed
            } else {
                Renewal::Lost
            });
        }
        answers
    }

    pub(super) fn is_locked(&self, leases: impl IntoIterator<Item = HeldLease>) -> bool {
        let mut rows = leases.into_iter().map(|lease| lease.row);
        rows.any(|row| self.locked.contains(&row))
    }

    pub(super) fn settle(&mut self, settlements: &[Settlement], now: SystemTime) -> Vec<Settled> {
        settlements
            .iter()
            .map(|settlement| self.settle_one(settlement, now))
            .collect()
    }

    fn settle_one(&mut self, settlement: &Settlement, now: SystemTime) -> Settled {
        let Some(row) = self.held(settlement.lease) else {
            return Settled::LeaseLost;
        };
        row.settle(&settlement.outcome, now);
        if row.kept_until.is_some() {
            self.leave(settlement.lease.row, now);
        }
        Settled::Recorded
    }

    pub(super) fn release(&mut self, leases: &[HeldLease]) -> Vec<Settled> {
        let mut answers = Vec::with_capacity(leases.len());
        for lease in leases {
            answers.push(if let Some(row) = self.held(*lease) {
                row.give_back();
                Settled::Recorded
            } else {
                Settled::LeaseLost
            });
        }
        answers
    }

    pub(super) fn purge(&mut self, limit: NonZeroU32, now: SystemTime) -> u64 {
        let mut left = limit.get();
        let mut removed = 0;
        let mut may_remove = |expired: bool| {
            let remove = expired && left > 0;
            left -= u32::from(remove);
            removed += u64::from(remove);
            remove
        };
        self.rows
            .retain(|_, row| !may_remove(row.kept_until.is_some_and(|until| until <= now)));
        // After the rows: a key outlives its event.
        let rows = &self.rows;
        self.keys.retain(|_, key| {
            let kept = rows.contains_key(&key.id.row())
                || rows
                    .values()
                    .any(|row| row.is_part_of(key.id) && !row.has_ended());
            let expired = key
                .settled
                .as_ref()
                .is_some_and(|settled| settled.kept_until <= now);
            !may_remove(expired && !kept)
        });
        removed
    }
}
