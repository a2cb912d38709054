//! Taking rows: claims and the sweep.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::SystemTime;

use super::database::{Database, Row};
use crate::lease::LeaseToken;
use crate::settings::LEASE_MAX;
use crate::store::{
    ClaimRequest, Claimed, Exhausted, LEASE_ENDED, SweepChunk, SweepRequest, Unhandled, is_known,
};

impl Database {
    pub(super) fn claim(&mut self, request: &ClaimRequest<'_>, now: SystemTime) -> Vec<Claimed> {
        let (mut waited, mut others): (Vec<_>, Vec<_>) = self
            .rows
            .values()
            .filter(|row| self.is_claimable(row, request, now))
            .partition(|row| row.columns.due_at.is_some());
        others.retain(|row| {
            let number = row.columns.id.row();
            number >= request.low_water.of(row.columns.priority) || request.freed.contains(&number)
        });

        let limit = request.limit.get() as usize;
        waited.sort_by_key(|row| first_claimed(row));
        let beyond_reserve = waited.split_off(waited.len().min(request.reserved as usize));
        others.extend(beyond_reserve);
        others.sort_by_key(|row| first_claimed(row));

        let chosen = waited.iter().chain(&others).take(limit);
        let chosen: Vec<i64> = chosen.map(|row| row.columns.id.row()).collect();
        self.take_over(&chosen, request, now)
    }

    pub(super) fn claim_rows(
        &mut self,
        rows: &[i64],
        request: &ClaimRequest<'_>,
        now: SystemTime,
    ) -> Vec<Claimed> {
        let chosen = rows.iter().filter_map(|number| self.rows.get(number));
        let chosen = chosen.filter(|row| self.is_claimable(row, request, now));
        let mut chosen: Vec<i64> = chosen.map(|row| row.columns.id.row()).collect();
        chosen.sort_unstable();
        chosen.dedup();
        chosen.truncate(request.limit.get() as usize);
        self.take_over(&chosen, request, now)
    }

    pub(super) fn sweep(&mut self, request: &SweepRequest<'_>, now: SystemTime) -> SweepChunk {
        let scan = request.scan.get() as usize;
        let mut chunk = SweepChunk::default();
        let mut unhandled: BTreeMap<(&str, Option<&str>, NonZeroU32), u64> = BTreeMap::new();
        let mut looked_at = 0;

        let rows = self.rows.range_mut(request.after.saturating_add(1)..);
        for (number, row) in rows.filter(|(_, row)| row.is_unsettled()).take(scan) {
            looked_at += 1;
            chunk.next = Some(*number);
            let latest_end = now + LEASE_MAX;
            if row.lease_ends_at.is_some_and(|end| end > latest_end) {
                row.lease_ends_at = Some(latest_end);
                chunk.cut_leases += 1;
            }
            if row.is_free(now) && !row.has_attempt_left() {
                let holder = row.columns.claimed_by.clone();
                let holder = holder.as_deref().unwrap_or(request.instance);
                hold(row, request.token, holder, now + request.lease);
                chunk
                    .exhausted
                    .extend(row.claimed(now).map(|row| Exhausted {
                        id: row.id,
                        token: row.token,
                        name: row.name,
                        handler: row.handler,
                        origin: row.origin,
                        attempt: row.attempt,
                        max_attempts: row.max_attempts,
                    }));
            }
            let (name, version) = (row.columns.name.as_str(), row.columns.version);
            let handler = row.columns.handler.as_deref();
            if !is_known(request.events, name, version, handler) {
                *unhandled.entry((name, handler, version)).or_default() += 1;
            }
        }

        if looked_at < scan {
            chunk.next = None;
        }
        chunk.unhandled = unhandled
            .into_iter()
            .map(|((name, handler, version), rows)| Unhandled {
                name: name.to_owned(),
                handler: handler.map(str::to_owned),
                version,
                rows,
            })
            .collect();
        chunk
    }

    /// What is locked is passed over, as `SKIP LOCKED` does.
    fn is_claimable(&self, row: &Row, request: &ClaimRequest<'_>, now: SystemTime) -> bool {
        row.is_free(now)
            && row.has_attempt_left()
            && is_known(
                request.events,
                &row.columns.name,
                row.columns.version,
                row.columns.handler.as_deref(),
            )
            && !self.locked.contains(&row.columns.id.row())
            && !self.is_blocked(row)
            && !self.is_paused(row)
    }

    fn take_over(
        &mut self,
        rows: &[i64],
        request: &ClaimRequest<'_>,
        now: SystemTime,
    ) -> Vec<Claimed> {
        let mut claimed = Vec::with_capacity(rows.len());
        for number in rows {
            if let Some(row) = self.rows.get_mut(number) {
                if row.columns.lease_token.is_some() {
                    row.add_failure(LEASE_ENDED, now);
                }
                row.columns.attempts += 1;
                hold(row, request.token, request.instance, now + request.lease);
                claimed.extend(row.claimed(now));
            }
        }
        claimed
    }
}

fn first_claimed(row: &Row) -> impl Ord + use<> {
    (Reverse(row.columns.priority), row.columns.id.row())
}

fn hold(row: &mut Row, token: LeaseToken, instance: &str, until: SystemTime) {
    row.columns.lease_token = Some(token);
    row.columns.claimed_by = Some(instance.to_owned());
    row.lease_ends_at = Some(until);
}
