//! One pass of a cadence: what no claim finds, what wake-ups missed, and what is past its time.
//!
//! Each chunk is a transaction of its own, so what was done stays done when a later chunk fails.
//! Another instance that is at the same cadence ends the pass: that it does not get the lock of a
//! chunk is not an error, and nothing is lost by it.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::cadence::{Cadence, PassReport};
use crate::engine::settler::{About, Ending};
use crate::lane::Lane;
use crate::lease::LeaseToken;
use crate::outcome::{DeadReason, ErrorText, Outcome};
use crate::relay::RelayParts;
use crate::relay::claim::{self, Capacity, Claimer, Room, stoppable};
use crate::settings::LEASE_MAX;
use crate::store::{
    LEASE_ENDED, Pass, Store, StoreError, StoreErrorKind, SweepChunk, SweepRequest, Unhandled,
    Upkeep,
};

/// How many rows one chunk of a sweep looks at: a few milliseconds.
const SCAN: NonZeroU32 = NonZeroU32::new(5_000).expect("not zero");

/// How many settled events and keys one statement removes: some ten milliseconds.
const PURGE: NonZeroU32 = NonZeroU32::new(1_000).expect("not zero");

/// How many such statements a sweep sends, so that the daily pass does not meet a whole day's. What
/// is left waits for the next.
const PURGES_OF_A_SWEEP: u32 = 100;

/// A chunk that is too slow is not made smaller than this: something else is wrong then.
const CHUNK_MIN: u32 = 50;

/// How far ahead partitions are made at most: a table with more of them is slow to plan for. What
/// is kept for longer is in the default partition, and removed in chunks.
const AHEAD_MAX: Duration = Duration::from_secs(400 * 24 * 60 * 60);

/// A day's partition has to be there when the first event that expires on that day is settled. A
/// pass that could not make it has this long to try again.
const AHEAD_MARGIN: Duration = Duration::from_secs(2 * 24 * 60 * 60);

/// What one round of claims in a pass has found.
#[derive(Default)]
struct Round {
    /// Whether there may be more to claim.
    more: bool,
    /// The ways to handlers with a limit of their own that have no room for more.
    full: Vec<Arc<Lane>>,
}

/// Why a pass ends before its end.
enum Cut {
    /// The relay stops.
    Stopped,
    /// Another instance is at it.
    StoodDown,
    Failed(StoreError),
}

impl From<StoreError> for Cut {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

pub(super) async fn run<S: Store>(
    parts: &RelayParts<S>,
    cadence: Cadence,
) -> Result<PassReport, StoreError> {
    let rhythm = parts.rhythm(cadence);
    let mut running = Running {
        parts,
        pass: Pass {
            cadence,
            statement_limit: rhythm.statement_limit,
        },
        batch: rhythm.batch,
        every: rhythm.every,
        begun: Instant::now(),
        report: PassReport::default(),
    };
    let end = match cadence {
        Cadence::Sweep => running.sweep().await,
        Cadence::Backstop => running.dispatch_due().await,
        Cadence::Maintenance => running.maintain().await,
    };
    let mut report = running.report;
    match end {
        Err(Cut::Failed(error)) => return Err(error),
        Err(Cut::StoodDown) => report.stood_down = true,
        Err(Cut::Stopped) | Ok(()) => {}
    }
    tracing::debug!(
        %cadence,
        dispatched = report.dispatched,
        exhausted = report.exhausted,
        purged = report.purged,
        stood_down = report.stood_down,
        "pass ended"
    );
    Ok(report)
}

struct Running<'a, S: Store> {
    parts: &'a RelayParts<S>,
    pass: Pass,
    batch: NonZeroU32,
    every: Duration,
    begun: Instant,
    report: PassReport,
}

impl<S: Store> Running<'_, S> {
    async fn sweep(&mut self) -> Result<(), Cut> {
        self.look_at_all().await?;
        self.purge(PURGES_OF_A_SWEEP).await?;
        // Only what a daily pass could not do: a table was locked.
        if self.parts.upkeep.is_pending() {
            self.upkeep().await?;
        }
        self.dispatch_due().await
    }

    async fn maintain(&mut self) -> Result<(), Cut> {
        // A partition that is dropped need not be emptied first.
        self.upkeep().await?;
        self.purge(u32::MAX).await?;
        self.log_statistics().await?;
        self.dispatch_due().await
    }

    /// Walks over every unsettled row, whatever its name.
    async fn look_at_all(&mut self) -> Result<(), Cut> {
        let shared = &self.parts.shared;
        let mut after = 0;
        let mut scan = SCAN;
        loop {
            self.parts.go_on()?;
            let _asking = shared.may_ask().ok_or(Cut::Stopped)?;
            let request = SweepRequest {
                after,
                scan,
                lease: shared.settings.lease,
                token: LeaseToken::random(),
                instance: &shared.settings.instance,
                events: shared.registry.known(),
            };
            let chunk = match shared.store.sweep(self.pass, &request).await {
                Err(error) if is_too_slow(&error, &mut scan) => continue,
                chunk => chunk?.ok_or(Cut::StoodDown)?,
            };
            let next = chunk.next;
            self.take_in(chunk).await;
            match next {
                Some(next) => after = next,
                None => break,
            }
        }
        self.warn_of_unhandled();
        Ok(())
    }

    fn warn_of_unhandled(&self) {
        for ((name, handler), waiting) in &self.report.missing_handlers {
            tracing::warn!(
                event_name = name.as_str(),
                handler = handler.as_str(),
                waiting,
                "events wait for a handler that is not here: it was removed, or got another name"
            );
        }
        for (name, waiting) in &self.report.unhandled {
            let name = name.as_str();
            let missing = self.report.missing_handlers.iter();
            let of_name = missing.filter(|((of, _), _)| of == name);
            let waiting = waiting - of_name.map(|(_, rows)| rows).sum::<u64>();
            if waiting == 0 {
                continue;
            }
            match self.report.later_versions.get(name) {
                Some(version) => tracing::warn!(
                    event_name = name,
                    %version,
                    waiting,
                    "events of a later version than this process reads wait"
                ),
                None => tracing::warn!(
                    event_name = name,
                    waiting,
                    "events of a type that has no handler here wait"
                ),
            }
        }
    }

    async fn take_in(&mut self, chunk: SweepChunk) {
        let shared = &self.parts.shared;
        let exhausted = chunk.exhausted.len();
        for row in chunk.exhausted {
            // Nothing runs, so nothing is held: were this process to die here, the lease would
            // end and the next sweep find the row again.
            shared.end(Ending::Settle {
                lease: row.lease(),
                about: About::exhausted(&row),
                outcome: Outcome::Dead {
                    reason: DeadReason::LeaseExpired,
                    error: ErrorText::new(&LEASE_ENDED),
                },
                at: Instant::now(),
                waiter: None,
            });
        }
        if exhausted > 0 {
            // One chunk is under way at a time, whatever there is to bury.
            shared.flush().await;
        }
        if chunk.cut_leases > 0 {
            tracing::warn!(
                leases = chunk.cut_leases,
                longest = ?LEASE_MAX,
                "leases ended later than any lease can; they were cut. Was the clock of the \
                 database put back?"
            );
        }
        self.report.exhausted += count(exhausted);
        self.report.cut_leases += chunk.cut_leases;
        for Unhandled {
            name,
            handler,
            version,
            rows,
        } in chunk.unhandled
        {
            let handlers = shared.registry.get(&name);
            let missing = handler.filter(|handler| {
                handlers.is_none_or(|handlers| handlers.of(Some(handler)).is_none())
            });
            if let Some(handler) = missing {
                let missing = (name.clone(), handler);
                *self.report.missing_handlers.entry(missing).or_default() += rows;
            } else if handlers.is_some() {
                let newest = self.report.later_versions.entry(name.clone());
                let newest = newest.or_insert(version);
                *newest = std::cmp::max(*newest, version);
            }
            *self.report.unhandled.entry(name).or_default() += rows;
        }
    }

    /// Claims from the beginning until nothing is due any more, as fast as handlers can take it; at
    /// the longest until the next pass is due, which has more to do than that. So it comes last.
    async fn dispatch_due(&mut self) -> Result<(), Cut> {
        let mut claimer = Claimer::default();
        let until = self.begun + self.every;
        while Instant::now() < until {
            // Handlers can keep all permits for longer than that.
            let gathering = claimer.gather(self.parts, self.batch);
            let Ok(gathered) = tokio::time::timeout_at(until, gathering).await else {
                break;
            };
            let room = gathered.ok_or(Cut::Stopped)?;
            let shared = &self.parts.shared;
            let _asking = shared.may_ask().ok_or(Cut::Stopped)?;
            let mut capacity = match room {
                Room::Beside(capacity) => capacity,
                Room::Alone(room) => {
                    let found = claimer.claim_alone(self.parts, room).await?;
                    self.report.dispatched += count(found.rows);
                    continue;
                }
            };
            // What is next in order is looked for by this pass alone, if there is no claim loop.
            let mut freed = shared.freed.take(capacity.len());
            let round = self.claim_shares(&mut claimer, &mut capacity, &mut freed);
            let round = round.await;
            if round.as_ref().map_or(true, |round| round.more) {
                shared.freed.put_back(freed);
            }
            let round = round?;
            if !round.more && shared.freed.is_empty() {
                break;
            }
            if !round.full.is_empty() {
                // So are those that wait for a handler with a limit.
                let room = round.full.iter().map(|lane| lane.has_room());
                let room = futures_util::future::join_all(room);
                let _ = tokio::time::timeout_at(until, stoppable(self.parts, room)).await;
            }
        }
        Ok(())
    }

    async fn claim_shares(
        &mut self,
        claimer: &mut Claimer,
        capacity: &mut Capacity,
        freed: &mut Vec<i64>,
    ) -> Result<Round, Cut> {
        let mut round = Round::default();
        let claimable = self.parts.shared.registry.claimable();
        for share in claimer.turns.next(claimable, capacity.len()) {
            let Some(limit) = claim::limit(std::cmp::min(share.limit, capacity.len())) else {
                round.more = true;
                break;
            };
            let pass = Some(self.pass);
            let found = claimer.claim_share(self.parts, pass, &share, limit, capacity, freed);
            let found = found.await?.ok_or(Cut::StoodDown)?;
            self.report.dispatched += count(found.rows);
            round.more |= found.more || found.left;
            round.full.extend(share.lane.filter(|_| found.full));
        }
        Ok(round)
    }

    async fn purge(&mut self, statements: u32) -> Result<(), Cut> {
        let mut limit = PURGE;
        for _ in 0..statements {
            self.parts.go_on()?;
            let begun = Instant::now();
            let purged = match self.parts.shared.store.purge(self.pass, limit).await {
                Err(error) if is_too_slow(&error, &mut limit) => continue,
                purged => purged?.ok_or(Cut::StoodDown)?,
            };
            self.report.purged += purged;
            if purged < u64::from(limit.get()) {
                break;
            }
            // As long again belongs to the others: where there is one writer at a time, a publisher
            // that looks for the lock now and then would find it taken for as long as this lasts.
            stoppable(self.parts, tokio::time::sleep(begun.elapsed())).await;
        }
        Ok(())
    }

    /// Makes and drops partitions, one at a time. That it cannot be done now, or not by this role,
    /// stops nothing: everything goes into the default partition and is removed in chunks.
    async fn upkeep(&mut self) -> Result<(), Cut> {
        let shared = &self.parts.shared;
        let retention = std::cmp::max(
            shared.settings.retention,
            shared.registry.longest_retention(),
        );
        let ahead = std::cmp::min(retention.saturating_add(AHEAD_MARGIN), AHEAD_MAX);
        loop {
            self.parts.go_on()?;
            match shared.store.upkeep(self.pass, ahead).await {
                Ok(None) => return Err(Cut::StoodDown),
                Ok(Some(Upkeep::Done)) => {
                    self.parts.upkeep.done();
                    return Ok(());
                }
                Ok(Some(Upkeep::Changed)) => self.report.partitions += 1,
                Err(error) if error.kind() == StoreErrorKind::Denied => {
                    self.parts.upkeep.done();
                    tracing::warn!(
                        error = %ErrorText::from(&error),
                        "this role may not make and drop the partitions of the history; unless \
                         another one does, what is past its retention is removed row by row"
                    );
                    return Ok(());
                }
                Err(error) => {
                    self.parts.upkeep.put_off();
                    tracing::warn!(
                        error = %ErrorText::from(&error),
                        "a partition of the history could not be made or dropped; the next sweep \
                         tries again"
                    );
                    return Ok(());
                }
            }
        }
    }

    async fn log_statistics(&self) -> Result<(), Cut> {
        let stats = self.parts.shared.store.stats().await?;
        let total = stats.total();
        tracing::info!(
            due = total.due,
            waiting = total.waiting,
            retrying = total.retrying,
            in_progress = total.in_progress,
            dead = total.dead,
            oldest_due = ?stats.oldest_due,
            exact = stats.exact,
            "daily statistics"
        );
        Ok(())
    }
}

impl<S: Store> RelayParts<S> {
    fn go_on(&self) -> Result<(), Cut> {
        let stopped = self.stop.is_cancelled()
            || self.shared.stopping.is_cancelled()
            || self.shared.closing.is_cancelled();
        if stopped { Err(Cut::Stopped) } else { Ok(()) }
    }
}

/// Whether a chunk took longer than its statements may, and is to be tried again with half of it:
/// the database may be busy, or its rows large.
fn is_too_slow(error: &StoreError, size: &mut NonZeroU32) -> bool {
    let half = NonZeroU32::new(size.get() / 2).filter(|half| half.get() >= CHUNK_MIN);
    match half {
        Some(half) if error.kind() == StoreErrorKind::TimedOut => {
            tracing::debug!(
                from = size,
                to = half,
                "a chunk of a pass was too slow; halved"
            );
            *size = half;
            true
        }
        _ => false,
    }
}

fn count(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}
