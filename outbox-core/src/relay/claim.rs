//! The claim loop: as many due events as can start now, whenever there may be some.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use crate::engine::{Start, wait};
use crate::lease::LeaseToken;
use crate::outcome::ErrorText;
use crate::relay::RelayParts;
use crate::relay::low_water::Marks;
use crate::store::{ClaimRequest, Claimed, LowWater, Store, StoreError};

/// The shortest pause of the poll, right after activity.
const POLL_MIN: Duration = Duration::from_millis(50);

/// How long a claim waits for more permits when only a few are free: under load, a claim per
/// finished handler would cost a round trip per event.
const GATHER: Duration = Duration::from_millis(2);

/// Runs until the relay stops.
pub(crate) async fn run<S: Store>(parts: Arc<RelayParts<S>>) {
    let mut marks = Marks::new();
    let mut reserve = Reserve::default();
    let mut poll = Poll::new(parts.poll);
    let mut pause = wait::Pause::new(Duration::from_millis(50), Duration::from_secs(5));
    loop {
        let Some(capacity) = gather(&parts, parts.batch).await else {
            return;
        };
        let Some(asking) = parts.shared.may_ask() else {
            return;
        };
        let found = claim(&parts, capacity, &mut marks, &mut reserve).await;
        drop(asking);
        match found {
            Ok(found) => {
                pause.reset();
                if found.rows > 0 {
                    poll.reset();
                }
                // Fewer than asked for, and looked for from the beginning: nothing is due that we
                // could take. (After a look from the marks, one from the beginning comes first.)
                if found.rows < found.asked && found.everywhere {
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

/// Permits to run, each with a slot to hold what runs.
pub(super) type Capacity = Vec<(OwnedSemaphorePermit, OwnedSemaphorePermit)>;

/// Waits until something can start, and takes what is free for up to `batch`. `None` once the relay
/// stops.
pub(super) async fn gather<S: Store>(parts: &RelayParts<S>, batch: NonZeroU32) -> Option<Capacity> {
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
        let (Ok(permit), Ok(slot)) = (
            Arc::clone(permits).try_acquire_owned(),
            Arc::clone(slots).try_acquire_owned(),
        ) else {
            break;
        };
        capacity.push((permit, slot));
    }
    Some(capacity)
}

struct Found {
    asked: usize,
    rows: usize,
    /// Whether the claim looked from the beginning.
    everywhere: bool,
}

async fn claim<S: Store>(
    parts: &RelayParts<S>,
    capacity: Capacity,
    marks: &mut Marks,
    reserve: &mut Reserve,
) -> Result<Found, StoreError> {
    let shared = &parts.shared;
    let asked = capacity.len();
    let look = marks.look();
    let request = request(parts, asked, reserve, look.from);
    // Read before the statement is sent, so that a slow round trip shortens the time we trust the
    // lease and never stretches it.
    let trusted_until = Instant::now() + request.lease;
    shared.counters.claims.one();
    let claimed = shared.store.claim(&request).await?;
    marks.learn(look, &claimed, asked);
    let found = Found {
        asked,
        rows: claimed.len(),
        everywhere: look.full,
    };
    start_all(parts, claimed, capacity, trusted_until);
    Ok(found)
}

/// The claim of up to `asked` rows, under a new token.
pub(super) fn request<'a, S: Store>(
    parts: &'a RelayParts<S>,
    asked: usize,
    reserve: &mut Reserve,
    low_water: LowWater,
) -> ClaimRequest<'a> {
    let settings = &parts.shared.settings;
    let limit = u32::try_from(asked)
        .ok()
        .and_then(NonZeroU32::new)
        .unwrap_or(NonZeroU32::MIN);
    ClaimRequest {
        limit,
        reserved: reserve.of(limit),
        lease: settings.lease,
        token: LeaseToken::random(),
        instance: &settings.instance,
        events: parts.shared.registry.known(),
        low_water,
    }
}

/// Starts a handler for everything that was claimed.
pub(super) fn start_all<S: Store>(
    parts: &RelayParts<S>,
    claimed: Vec<Claimed>,
    mut capacity: Capacity,
    trusted_until: Instant,
) {
    let shared = &parts.shared;
    shared.counters.claimed.add(claimed.len());
    for claimed in claimed {
        match capacity.pop() {
            Some((permit, slot)) => {
                shared.start(Start {
                    claimed,
                    trusted_until,
                    permit,
                    slot,
                    waiter: None,
                });
            }
            // A store that took more than it was asked for: given back, not run beyond the limit.
            None => shared.release(claimed.lease(), None),
        }
    }
}

/// How much of each claim is for due retries and delays: a quarter, so that neither they nor new
/// events wait for the end of a backlog of the others.
///
/// What a small claim's quarter lacks of a whole row is carried over to the next one. Rounded up,
/// a relay that claims one row at a time would take nothing but retries while there are any;
/// rounded down, none until everything of a higher priority is done.
#[derive(Debug, Default)]
pub(super) struct Reserve {
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
