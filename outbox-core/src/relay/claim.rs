//! The claim loop: as many due events as can start now, whenever there may be some.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::engine::split::{self, Place};
use crate::engine::{Start, wait};
use crate::lane::Lane;
use crate::lease::LeaseToken;
use crate::outcome::ErrorText;
use crate::registry::{Claimable, HandlerKey};
use crate::relay::RelayParts;
use crate::relay::alone;
use crate::relay::low_water::{Around, Marks};
use crate::store::{ClaimRequest, Claimed, KnownEvent, LowWater, Pass, Store, StoreError};

/// The shortest pause of the poll, right after activity.
const POLL_MIN: Duration = Duration::from_millis(50);

/// How long a claim waits for more permits when only a few are free: under load, a claim per
/// finished handler would cost a round trip per event.
const GATHER: Duration = Duration::from_millis(2);

/// Runs until the relay stops.
pub(crate) async fn run<S: Store>(parts: Arc<RelayParts<S>>) {
    let mut claimer = Claimer::default();
    let mut poll = Poll::new(parts.poll);
    let mut pause = wait::Pause::new(Duration::from_millis(50), Duration::from_secs(5));
    loop {
        let Some(room) = claimer.gather(&parts, parts.batch).await else {
            return;
        };
        let Some(asking) = parts.shared.may_ask() else {
            return;
        };
        let found = match room {
            Room::Beside(capacity) => claimer.claim(&parts, capacity).await,
            Room::Alone(room) => claimer.claim_alone(&parts, room).await,
        };
        drop(asking);
        match found {
            Ok(found) => {
                pause.reset();
                if found.rows > 0 {
                    poll.reset();
                }
                if !found.more {
                    poll.wait(&parts).await;
                }
            }
            Err(error) => {
                parts.shared.counters.store_errors.one();
                let delay = pause.next();
                tracing::warn!(
                    error = %ErrorText::from(&error),
                    retry_in = ?delay,
                    "events could not be claimed"
                );
                stoppable(&parts, tokio::time::sleep(delay)).await;
            }
        }
    }
}

pub(super) type Capacity = Vec<Place>;

/// Waits until something can start, and takes what is free for up to `batch`. `None` once the relay
/// stops.
async fn gather<S: Store>(parts: &RelayParts<S>, batch: NonZeroU32) -> Option<Capacity> {
    let (permits, slots) = (&parts.permits, &parts.shared.slots);
    let first = async {
        // Neither semaphore is ever closed.
        let permit = Arc::clone(permits).acquire_owned().await.ok()?;
        let slot = Arc::clone(slots).acquire_owned().await.ok()?;
        Some((permit, slot))
    };
    let first = stoppable(parts, first).await??;
    let half = parts.concurrency.get() / 2;
    if permits.available_permits() + 1 < half as usize {
        // Given back at once: it only waits until that many are free.
        let _ = tokio::time::timeout(GATHER, permits.acquire_many(half - 1)).await;
    }
    let mut capacity = vec![first];
    while capacity.len() < batch.get() as usize {
        let Some(place) = free_place(parts) else {
            break;
        };
        capacity.push(place);
    }
    Some(capacity)
}

fn free_place<S: Store>(parts: &RelayParts<S>) -> Option<Place> {
    let permit = Arc::clone(&parts.permits).try_acquire_owned().ok()?;
    let slot = Arc::clone(&parts.shared.slots).try_acquire_owned().ok()?;
    Some((permit, slot))
}

#[derive(Default)]
pub(super) struct Found {
    pub(super) rows: usize,
    /// Whether a claim took as many as it asked for.
    pub(super) full: bool,
    /// Whether to look again at once: there may be more to claim.
    pub(super) more: bool,
    /// Whether something was left to be claimed again, for want of room.
    pub(super) left: bool,
}

/// What a claim loop, or a pass, remembers from one round to the next.
#[derive(Default)]
pub(super) struct Claimer {
    /// Where to begin looking, for each kind of share.
    marks: HashMap<Option<HandlerKey>, Marks>,
    reserve: Reserve,
    pub(super) turns: Turns,
    /// Events to be run alone. As many as were claimed at once, at most.
    suspects: Vec<i64>,
}

/// Room for what is claimed next.
pub(super) enum Room {
    Beside(Capacity),
    Alone(alone::Room),
}

impl Claimer {
    /// Waits for room, for one event to be run alone if there are any. `None` once the relay stops.
    pub(super) async fn gather<S: Store>(
        &mut self,
        parts: &RelayParts<S>,
        batch: NonZeroU32,
    ) -> Option<Room> {
        if self.suspects.is_empty() {
            gather(parts, batch).await.map(Room::Beside)
        } else {
            alone::gather(parts).await.map(Room::Alone)
        }
    }

    /// Claims one of the suspects and runs it to its end. Those that cannot be claimed are somebody
    /// else's by now, or not due.
    pub(super) async fn claim_alone<S: Store>(
        &mut self,
        parts: &RelayParts<S>,
        room: alone::Room,
    ) -> Result<Found, StoreError> {
        let shared = &parts.shared;
        let request = request(
            parts,
            NonZeroU32::MIN,
            &mut self.reserve,
            LowWater::BEGINNING,
        );
        let trusted_until = Instant::now() + request.lease;
        shared.counters.claims.one();
        let claimed = shared.store.claim_rows(&self.suspects, &request).await?;
        let rows: HashSet<i64> = claimed.iter().map(|claimed| claimed.id.row()).collect();
        self.suspects
            .retain(|row| !rows.is_empty() && !rows.contains(row));
        let mut capacity = vec![room.place];
        let left = start_all(parts, claimed, &mut capacity, trusted_until).await;
        // Room is held until here for it alone.
        let ended = shared.held.none_under(request.token);
        let _ = tokio::time::timeout(alone::at_most(shared), stoppable(parts, ended)).await;
        drop(room.others);
        Ok(Found {
            rows: rows.len(),
            full: false,
            more: true,
            left,
        })
    }

    /// Claims and starts what there is room for: one statement for all handlers without a limit of
    /// their own, and one for each of the others.
    async fn claim<S: Store>(
        &mut self,
        parts: &RelayParts<S>,
        mut capacity: Capacity,
    ) -> Result<Found, StoreError> {
        let mut freed = parts.shared.freed.take(capacity.len());
        let mut found = self.claim_shares(parts, &mut capacity, &mut freed).await;
        if found.as_ref().map_or(true, |found| found.full) {
            // There may have been no room for them.
            parts.shared.freed.put_back(freed);
        }
        if let Ok(found) = &mut found {
            found.more |= !parts.shared.freed.is_empty();
        }
        found
    }

    async fn claim_shares<S: Store>(
        &mut self,
        parts: &RelayParts<S>,
        capacity: &mut Capacity,
        freed: &mut Vec<i64>,
    ) -> Result<Found, StoreError> {
        let mut found = Found::default();
        let claimable = parts.shared.registry.claimable();
        for share in self.turns.next(claimable, capacity.len()) {
            let Some(limit) = limit(std::cmp::min(share.limit, capacity.len())) else {
                // Without room for the rest, there is no telling whether there is more of it.
                found.full = true;
                found.more = true;
                break;
            };
            let of_share = self.claim_share(parts, None, &share, limit, capacity, freed);
            let Some(of_share) = of_share.await? else {
                continue;
            };
            found.rows += of_share.rows;
            found.full |= of_share.full;
            found.more |= of_share.more;
        }
        Ok(found)
    }

    /// Leaves in `freed`, which is in order, what it has not claimed of it. `None` if another instance
    /// does the pass.
    pub(super) async fn claim_share<S: Store>(
        &mut self,
        parts: &RelayParts<S>,
        pass: Option<Pass>,
        share: &Share<'_>,
        limit: NonZeroU32,
        capacity: &mut Capacity,
        freed: &mut Vec<i64>,
    ) -> Result<Option<Found>, StoreError> {
        let shared = &parts.shared;
        let asked = limit.get() as usize;
        let marks = self.marks.entry(share.of).or_default();
        let mut look = marks.look();
        if marks.asks_for_pauses(look) {
            marks.learn_pauses(shared.store.paused().await?);
            look = marks.look();
        }
        let around = if marks.asks_around(look) {
            Some(Around {
                newest: shared.store.newest().await?,
                paused: shared.store.paused().await?,
            })
        } else {
            None
        };
        let request = ClaimRequest {
            events: &share.events,
            freed,
            ..request(parts, limit, &mut self.reserve, look.from)
        };
        // Read before the statement is sent, so that a slow round trip shortens the time we trust
        // the lease and never stretches it.
        let sent_at = Instant::now();
        let trusted_until = sent_at + request.lease;
        shared.counters.claims.one();
        let mut claimed = match pass {
            None => shared.store.claim(&request).await?,
            Some(pass) => match shared.store.claim_in(pass, &request).await? {
                Some(claimed) => claimed,
                None => return Ok(None),
            },
        };
        let full = claimed.len() >= asked;
        let took = sent_at.elapsed();
        marks.learn(look, &claimed, freed, asked, took, around);
        let suspects = alone::give_back_suspects(shared, &mut claimed).await;
        let left_alone = !suspects.is_empty();
        self.suspects.extend(suspects);
        let rows = claimed.len();
        if !freed.is_empty() {
            let rows: HashSet<i64> = claimed.iter().map(|claimed| claimed.id.row()).collect();
            freed.retain(|row| !rows.contains(row));
        }
        let left = start_all(parts, claimed, capacity, trusted_until).await;
        Ok(Some(Found {
            rows,
            full,
            // Fewer than asked for, and looked for from the beginning: nothing is due that we could
            // take. (After a look from the marks, one from the beginning comes first, unless the last
            // one was long and not long ago.)
            more: full || left_alone || (!look.full && marks.look().full),
            left,
        }))
    }
}

/// What one claim of a round is for.
pub(super) struct Share<'a> {
    /// The handler, if it has a limit of its own.
    of: Option<HandlerKey>,
    pub(super) events: Cow<'a, [KnownEvent]>,
    pub(super) limit: usize,
    /// Where its limit is.
    pub(super) lane: Option<Arc<Lane>>,
}

/// Whose claim of a round comes first: each in turn, so that none takes all the room every time.
#[derive(Default)]
pub(super) struct Turns {
    first: usize,
}

impl Turns {
    pub(super) fn next<'a>(
        &mut self,
        claimable: Claimable<'a>,
        room: usize,
    ) -> impl Iterator<Item = Share<'a>> + use<'a> {
        let mut shares = Vec::with_capacity(1 + claimable.limited.len());
        if !claimable.open.is_empty() {
            shares.push(Share {
                of: None,
                events: claimable.open,
                limit: room,
                lane: None,
            });
        }
        shares.extend(claimable.limited.into_iter().map(|limited| Share {
            of: Some(limited.of),
            events: Cow::Owned(limited.events),
            limit: limited.room,
            lane: Some(limited.lane),
        }));
        if !shares.is_empty() {
            self.first = (self.first + 1) % shares.len();
            shares.rotate_left(self.first);
        }
        shares.into_iter()
    }
}

pub(super) fn limit(rows: usize) -> Option<NonZeroU32> {
    u32::try_from(rows).ok().and_then(NonZeroU32::new)
}

/// The claim of up to `limit` rows, under a new token.
fn request<'a, S: Store>(
    parts: &'a RelayParts<S>,
    limit: NonZeroU32,
    reserve: &mut Reserve,
    low_water: LowWater,
) -> ClaimRequest<'a> {
    let settings = &parts.shared.settings;
    ClaimRequest {
        limit,
        reserved: reserve.of(limit),
        lease: settings.lease,
        token: LeaseToken::random(),
        instance: &settings.instance,
        events: parts.shared.registry.known(),
        low_water,
        freed: &[],
    }
}

/// Starts the handlers of everything that was claimed. Answers whether something was left to be
/// claimed again, for want of room.
async fn start_all<S: Store>(
    parts: &RelayParts<S>,
    claimed: Vec<Claimed>,
    capacity: &mut Capacity,
    trusted_until: Instant,
) -> bool {
    let shared = &parts.shared;
    shared.counters.claimed.add(claimed.len());
    let mut starts = Vec::with_capacity(claimed.len());
    for claimed in claimed {
        match capacity.pop() {
            Some(place) => starts.push(Start {
                claimed,
                trusted_until,
                place,
                waiter: None,
            }),
            // A store that took more than it was asked for: given back, not run beyond the limit.
            None => shared.release(claimed.lease(), None),
        }
    }
    split::start_all(shared, starts, || free_place(parts)).await
}

/// How much of each claim is for due retries and delays: a quarter, so that neither they nor new
/// events wait for the end of a backlog of the others.
///
/// What a small claim's quarter lacks of a whole row is carried over to the next one. Rounded up,
/// a relay that claims one row at a time would take nothing but retries while there are any;
/// rounded down, none until everything of a higher priority is done.
#[derive(Debug, Default)]
struct Reserve {
    quarters: u32,
}

impl Reserve {
    fn of(&mut self, limit: NonZeroU32) -> u32 {
        self.quarters += limit.get();
        let whole = self.quarters / 4;
        self.quarters %= 4;
        whole
    }
}

/// The pause of an idle relay: it doubles up to the configured interval, and ends early when
/// somebody says that something is due.
#[derive(Debug)]
struct Poll {
    next: Duration,
    min: Duration,
    max: Duration,
}

impl Poll {
    fn new(max: Duration) -> Self {
        let min = std::cmp::min(POLL_MIN, max);
        Self {
            next: min,
            min,
            max,
        }
    }

    fn reset(&mut self) {
        self.next = self.min;
    }

    async fn wait<S: Store>(&mut self, parts: &RelayParts<S>) {
        let mut until = Instant::now() + self.next;
        self.next = std::cmp::min(self.next * 2, self.max);
        loop {
            tokio::select! {
                () = parts.stop.cancelled() => return,
                () = parts.shared.stopping.cancelled() => return,
                () = parts.shared.closing.cancelled() => return,
                () = parts.shared.wake.woken() => {
                    self.reset();
                    return;
                }
                () = parts.shared.wake.expected() => {
                    self.reset();
                    until = std::cmp::min(until, Instant::now() + self.min);
                }
                () = tokio::time::sleep_until(until) => return,
            }
        }
    }
}

/// Waits for `future` unless the relay stops first.
pub(super) async fn stoppable<S: Store, T>(
    parts: &RelayParts<S>,
    future: impl Future<Output = T>,
) -> Option<T> {
    tokio::select! {
        biased;
        () = parts.stop.cancelled() => None,
        () = parts.shared.stopping.cancelled() => None,
        () = parts.shared.closing.cancelled() => None,
        value = future => Some(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_is_reserved_whatever_the_size_of_the_claims() {
        let mut reserve = Reserve::default();
        let mut of = |limit| reserve.of(NonZeroU32::new(limit).unwrap());
        assert_eq!([of(1), of(1), of(1), of(1)], [0, 0, 0, 1]);
        assert_eq!([of(100), of(8)], [25, 2]);
        assert_eq!([of(3), of(3), of(3), of(3)], [0, 1, 1, 1]);
    }
}
