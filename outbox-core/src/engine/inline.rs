//! Dispatch right after the commit: the queue between a commit and its handlers.
//!
//! The rows were *born leased*: this process has held them since their INSERT, so nothing has to
//! be claimed. But whether they exist is known only to the database. A rolled-back savepoint
//! removed some, an aborted transaction (whose COMMIT answers without an error) all, and a slow
//! transaction may have used up the lease; and an earlier event of the same ordering key may not be
//! settled. So before any handler is called, one statement asks for
//! all that can start now which of them are there, under their token, and for how long.
//!
//! The queue is bounded where it fills: a place is reserved when the row is written, and a publish
//! that finds none free writes its row unleased, for the relay. A commit therefore never meets a
//! full queue, and nothing has to be given back because of one.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::Instant;

use crate::engine::settler::Waiter;
use crate::engine::split::{self, Place};
use crate::engine::{Shared, Start, wait};
use crate::event::{EventId, Priority};
use crate::lease::{HeldLease, LeaseToken};
use crate::outcome::ErrorText;
use crate::store::{ClaimRequest, Claimed, LowWater, Renewal, Store, Verified};

/// The most rows of one verification.
const BATCH_MAX: usize = 256;

/// What is handed to the dispatcher.
pub(crate) enum Handover {
    /// The transaction has committed, as far as its process knows.
    Committed(Vec<BornLeased>),
    /// Nobody knows whether it has: the rows are given back, uncharged, if they exist.
    Unknown(Vec<BornLeased>),
    /// Rows that somebody wants dispatched now, although they were not born leased.
    Asked(Vec<Asked>),
    /// Answers when nothing handed over before it is queued any more. Sent once stopping.
    Flush(oneshot::Sender<()>),
}

/// A row to be claimed by its number.
pub(crate) struct Asked {
    row: i64,
    waiter: Waiter,
    _place: OwnedSemaphorePermit,
}

impl Asked {
    pub(crate) fn new(
        event: EventId,
        place: OwnedSemaphorePermit,
        waiter: mpsc::Sender<()>,
    ) -> Self {
        Self {
            row: event.row(),
            waiter: Some(waiter),
            _place: place,
        }
    }
}

/// A row that this process has held since its INSERT.
pub(crate) struct BornLeased {
    pub(crate) id: EventId,
    pub(crate) token: LeaseToken,
    pub(crate) name: &'static str,
    pub(crate) version: NonZeroU32,
    pub(crate) payload: String,
    pub(crate) headers: Option<String>,
    pub(crate) ordering_key: Option<String>,
    pub(crate) priority: Priority,
    pub(crate) max_attempts: NonZeroU32,
    pub(crate) waiter: Waiter,
    /// Its place in the queue, free again once its handler starts.
    pub(crate) _place: OwnedSemaphorePermit,
}

impl BornLeased {
    fn lease(&self) -> HeldLease {
        HeldLease {
            row: self.id.row(),
            token: self.token,
        }
    }

    fn into_claimed(self, verified: &Verified) -> (Claimed, Waiter) {
        let claimed = Claimed {
            id: verified.id,
            token: self.token,
            name: self.name.to_owned(),
            handler: None,
            origin: None,
            version: self.version,
            payload: self.payload,
            headers: self.headers,
            ordering_key: self.ordering_key,
            priority: self.priority,
            waited: false,
            attempt: NonZeroU32::MIN,
            max_attempts: self.max_attempts,
            created_at: verified.created_at,
            expired: verified.expired,
            lapsed: 0,
        };
        (claimed, self.waiter)
    }
}

struct Queued {
    born: BornLeased,
    since: Instant,
}

/// Asks the store whether this process may settle what it dispatches. A role that may only publish
/// would run handlers and could never record that they ran.
pub(crate) async fn check<S: Store>(shared: Arc<Shared<S>>) {
    if let Err(error) = shared.store.check().await
        && !error.is_transient()
    {
        shared.inline_refused.store(true, Ordering::Relaxed);
        tracing::error!(
            error = %ErrorText::from(&error),
            "no inline dispatch in this process, since it could not settle: events are left to the \
             relays"
        );
    }
}

/// Runs until the outbox closes.
pub(crate) async fn run<S: Store>(
    shared: Arc<Shared<S>>,
    handovers: Arc<Mutex<mpsc::UnboundedReceiver<Handover>>>,
) {
    // Uncontended: there is one dispatcher, and after a panic its successor.
    let mut handovers = handovers.lock().await;
    let inline = shared.settings.inline;
    let mut dispatcher = Dispatcher {
        stale_after: inline.lease / 2,
        shared,
        permits: Arc::new(Semaphore::new(inline.concurrency.get() as usize)),
        queue: VecDeque::new(),
        asked: VecDeque::new(),
    };
    let mut pause = wait::Pause::new(Duration::from_millis(20), Duration::from_secs(2));
    loop {
        let next = tokio::select! {
            () = dispatcher.shared.closing.cancelled() => return,
            next = dispatcher.next(&mut handovers) => next,
        };
        match next {
            Next::Handover(None) => return,
            Next::Handover(Some(handover)) => dispatcher.take(handover),
            Next::Stale => {}
            Next::Capacity(first) => {
                // Whatever else was handed over meanwhile shares the statement.
                while let Ok(handover) = handovers.try_recv() {
                    dispatcher.take(handover);
                }
                match dispatcher.dispatch(first).await {
                    Ok(()) => pause.reset(),
                    Err(error) => {
                        let shared = &dispatcher.shared;
                        shared.counters.store_errors.one();
                        let delay = pause.next();
                        tracing::warn!(
                            error = %ErrorText::from(&error),
                            retry_in = ?delay,
                            "committed events could not be verified yet"
                        );
                        shared.sleep_unless_past_deadline(delay).await;
                    }
                }
            }
        }
        dispatcher.give_back_stale();
    }
}

enum Next {
    Handover(Option<Handover>),
    /// A handler can start.
    Capacity(Place),
    /// The oldest of the queue has waited too long.
    Stale,
}

struct Dispatcher<S: Store> {
    shared: Arc<Shared<S>>,
    permits: Arc<Semaphore>,
    queue: VecDeque<Queued>,
    asked: VecDeque<Asked>,
    /// How long a row may wait in the queue. Past it the row goes back, uncharged: its lease would
    /// end here, and the attempt it was born with be spent on nothing.
    stale_after: Duration,
}

impl<S: Store> Dispatcher<S> {
    async fn next(&self, handovers: &mut mpsc::UnboundedReceiver<Handover>) -> Next {
        if self.queue.is_empty() && self.asked.is_empty() {
            return Next::Handover(handovers.recv().await);
        }
        let stale_at = self
            .queue
            .front()
            .map(|oldest| oldest.since + self.stale_after);
        let stale = async {
            match stale_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let shutdown = async {
            match self.shared.stopping.is_cancelled() {
                // What is queued is given back as stale.
                true => std::future::pending().await,
                false => self.shared.stopping.cancelled().await,
            }
        };
        let capacity = async {
            // Neither semaphore is ever closed.
            let permit = Arc::clone(&self.permits).acquire_owned().await.ok()?;
            let slot = Arc::clone(&self.shared.slots).acquire_owned().await.ok()?;
            Some((permit, slot))
        };
        tokio::select! {
            biased;
            () = shutdown => Next::Stale,
            capacity = capacity => match capacity {
                Some(capacity) => Next::Capacity(capacity),
                None => Next::Handover(None),
            },
            () = stale => Next::Stale,
            handover = handovers.recv() => Next::Handover(handover),
        }
    }

    fn take(&mut self, handover: Handover) {
        let since = Instant::now();
        match handover {
            Handover::Committed(born) => {
                self.queue
                    .extend(born.into_iter().map(|born| Queued { born, since }));
            }
            Handover::Unknown(born) => {
                for born in born {
                    self.shared.release(born.lease(), born.waiter);
                }
            }
            Handover::Asked(asked) => self.asked.extend(asked),
            Handover::Flush(emptied) => {
                self.give_back_stale();
                // Whoever asked may have given up waiting.
                let _ = emptied.send(());
            }
        }
    }

    fn give_back_stale(&mut self) {
        let stopping = self.shared.stopping.is_cancelled();
        if stopping {
            self.asked.clear();
        }
        while let Some(oldest) = self.queue.front() {
            if !stopping && oldest.since.elapsed() < self.stale_after {
                return;
            }
            if let Some(Queued { born, .. }) = self.queue.pop_front() {
                self.shared.release(born.lease(), born.waiter);
            }
        }
    }

    /// Starts as many as there is capacity for. With an error, what was not started is still queued.
    async fn dispatch(&mut self, first: Place) -> Result<(), crate::StoreError> {
        let shared = Arc::clone(&self.shared);
        let Some(_asking) = shared.may_ask() else {
            return Ok(());
        };
        let mut capacity = self.capacity(first);
        let count = std::cmp::min(capacity.len(), self.queue.len());
        if count > 0 {
            let batch: Vec<Queued> = self.queue.drain(..count).collect();
            self.verify_and_start(batch, &mut capacity).await?;
        }
        let count = std::cmp::min(capacity.len(), self.asked.len());
        if count > 0 {
            let asked: Vec<Asked> = self.asked.drain(..count).collect();
            self.claim_and_start(asked, capacity).await?;
        }
        Ok(())
    }

    /// `first` and as much as can be had without waiting.
    fn capacity(&self, first: Place) -> Vec<Place> {
        let wanted = std::cmp::min(self.queue.len() + self.asked.len(), BATCH_MAX);
        let mut capacity = vec![first];
        while capacity.len() < wanted {
            let Some(place) = self.free_place() else {
                break;
            };
            capacity.push(place);
        }
        capacity
    }

    fn free_place(&self) -> Option<Place> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        let slot = Arc::clone(&self.shared.slots).try_acquire_owned().ok()?;
        Some((permit, slot))
    }

    async fn verify_and_start(
        &mut self,
        batch: Vec<Queued>,
        capacity: &mut Vec<Place>,
    ) -> Result<(), crate::StoreError> {
        let leases: Vec<HeldLease> = batch.iter().map(|queued| queued.born.lease()).collect();
        let asked_at = Instant::now();
        self.shared.counters.verifications.one();
        let verified = match self.shared.store.verify(&leases).await {
            Ok(verified) => verified,
            Err(error) => {
                for queued in batch.into_iter().rev() {
                    self.queue.push_front(queued);
                }
                return Err(error);
            }
        };
        let short = self.shared.settings.inline.lease / 2;
        let to_renew: Vec<HeldLease> = verified
            .iter()
            .filter(|v| v.remaining < short)
            .map(|v| v.lease)
            .collect();
        let renewed = self.renew(&to_renew).await;
        let mut starts = Vec::new();
        for queued in batch {
            let lease = queued.born.lease();
            let found = verified.iter().find(|verified| verified.lease == lease);
            let Some(verified) = found else {
                self.shared.counters.vanished.one();
                tracing::warn!(
                    event_id = %queued.born.id,
                    event_name = queued.born.name,
                    "a committed transaction has no such event: the database rolled it back, or \
                     the lease ended first; it is not dispatched"
                );
                continue;
            };
            if verified.blocked {
                // Its turn comes when the earlier event is settled, and that wakes the relays.
                self.shared.release(lease, queued.born.waiter);
                continue;
            }
            let trusted_until = if verified.remaining >= short {
                asked_at + verified.remaining
            } else if renewed.contains(&lease) {
                asked_at + self.shared.settings.lease
            } else {
                // Not ours any more, or not to be had now: whoever holds it, or the relay once the
                // lease has ended, goes on.
                self.shared.release(lease, queued.born.waiter);
                continue;
            };
            let Some(place) = capacity.pop() else {
                self.shared.release(lease, queued.born.waiter);
                continue;
            };
            let Queued { born, .. } = queued;
            let (claimed, waiter) = born.into_claimed(verified);
            self.shared.counters.claimed.one();
            starts.push(Start {
                claimed,
                trusted_until,
                place,
                waiter,
            });
        }
        self.start_all(starts, capacity).await;
        Ok(())
    }

    async fn start_all(&self, starts: Vec<Start>, spare: &mut Vec<Place>) {
        let more = || spare.pop().or_else(|| self.free_place());
        split::start_all(&self.shared, starts, more).await;
    }

    async fn renew(&self, leases: &[HeldLease]) -> Vec<HeldLease> {
        if leases.is_empty() {
            return Vec::new();
        }
        self.shared.counters.renewals.one();
        let mut leases = leases.to_vec();
        leases.sort_unstable();
        match self
            .shared
            .store
            .renew(&leases, self.shared.settings.lease)
            .await
        {
            Ok(answers) => leases
                .iter()
                .zip(answers)
                .filter(|(_, answer)| *answer == Renewal::Renewed)
                .map(|(lease, _)| *lease)
                .collect(),
            Err(error) => {
                self.shared.counters.store_errors.one();
                tracing::warn!(error = %ErrorText::from(&error), "leases could not be renewed");
                Vec::new()
            }
        }
    }

    async fn claim_and_start(
        &mut self,
        asked: Vec<Asked>,
        mut capacity: Vec<Place>,
    ) -> Result<(), crate::StoreError> {
        let settings = &self.shared.settings;
        let mut rows: Vec<i64> = asked.iter().map(|asked| asked.row).collect();
        rows.sort_unstable();
        let request = ClaimRequest {
            limit: limit(capacity.len()),
            reserved: 0,
            lease: settings.lease,
            token: LeaseToken::random(),
            instance: &settings.instance,
            events: self.shared.registry.known(),
            low_water: LowWater::BEGINNING,
            freed: &[],
        };
        let trusted_until = Instant::now() + settings.lease;
        self.shared.counters.claims.one();
        let claimed = match self.shared.store.claim_rows(&rows, &request).await {
            Ok(claimed) => claimed,
            Err(error) => {
                self.asked.extend(asked);
                return Err(error);
            }
        };
        self.shared.counters.claimed.add(claimed.len());
        let mut starts = Vec::new();
        for claimed in claimed {
            let row = claimed.id.row();
            let waiter = asked
                .iter()
                .find(|asked| asked.row == row)
                .and_then(|asked| asked.waiter.clone());
            match capacity.pop() {
                Some(place) => starts.push(Start {
                    claimed,
                    trusted_until,
                    place,
                    waiter,
                }),
                None => self.shared.release(claimed.lease(), waiter),
            }
        }
        self.start_all(starts, &mut capacity).await;
        Ok(())
    }
}

fn limit(capacity: usize) -> NonZeroU32 {
    u32::try_from(capacity)
        .ok()
        .and_then(NonZeroU32::new)
        .unwrap_or(NonZeroU32::MIN)
}
