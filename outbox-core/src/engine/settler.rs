//! From outcomes to stored rows: gathered, in batches, until they are recorded.
//!
//! The wait for company is counted from the first outcome of a batch, so a lone event is settled
//! at once and a busy relay settles hundreds with one statement. Nothing is acknowledged early:
//! an event is held, and its lease renewed, until the store has answered.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::time::Instant;

use crate::engine::{Shared, wait};
use crate::event::EventId;
use crate::lease::HeldLease;
use crate::outcome::{ErrorText, Outcome};
use crate::settled::SettledEvent;
use crate::store::{Claimed, Exhausted, Settled, Settlement, Store, StoreErrorKind};

/// How long the first outcome of a batch waits for others.
const LINGER: Duration = Duration::from_millis(2);

/// The most outcomes of one statement.
const BATCH_MAX: usize = 500;

/// Into how many parts a batch with a culprit in it is cut. Each level costs one wait for a lock.
const PARTS: usize = 8;

/// The pause between two tries of rows that are locked.
const PARKED_FOR: Duration = Duration::from_secs(1);

/// How often a bare outcome may be refused before its lease is left to expire.
const REFUSALS_MAX: u32 = 3;

/// What a settled event is reported as.
#[derive(Clone, Debug)]
pub(crate) struct About {
    pub(crate) id: EventId,
    /// The number of the row that it was split from.
    pub(crate) origin: Option<i64>,
    pub(crate) name: Arc<str>,
    pub(crate) handler: Option<Arc<str>>,
    pub(crate) attempt: NonZeroU32,
    pub(crate) max_attempts: NonZeroU32,
    /// The next event of this key waits for it.
    pub(crate) ordering_key: Option<String>,
}

impl About {
    pub(crate) fn exhausted(row: &Exhausted) -> Self {
        Self {
            id: row.id,
            origin: row.origin,
            name: row.name.as_str().into(),
            handler: row.handler.as_deref().map(Arc::from),
            attempt: row.attempt,
            max_attempts: row.max_attempts,
            // The dead letter blocks its key, as a rule.
            ordering_key: None,
        }
    }

    pub(crate) fn claimed(claimed: &Claimed) -> Self {
        Self {
            id: claimed.id,
            origin: claimed.origin,
            name: claimed.name.as_str().into(),
            handler: claimed.handler.as_deref().map(Arc::from),
            attempt: claimed.attempt,
            max_attempts: claimed.max_attempts,
            ordering_key: claimed.ordering_key.clone(),
        }
    }
}

/// Something to write under a lease token.
pub(crate) enum Ending {
    /// A run, or a sweep, came to an outcome.
    Settle {
        lease: HeldLease,
        about: About,
        outcome: Outcome,
        at: Instant,
        waiter: Waiter,
    },
    /// The claim goes back, uncharged.
    Release {
        lease: HeldLease,
        at: Instant,
        waiter: Waiter,
    },
    /// Answers when everything sent before it is stored, given up or, unless this is a shutdown,
    /// parked.
    Flush(oneshot::Sender<()>),
}

/// Dropped when the event it belongs to is settled, given back or lost.
pub(crate) type Waiter = Option<mpsc::Sender<()>>;

type Pending = (Settlement, About, Waiter);

/// Runs until the outbox closes.
pub(crate) async fn run<S: Store>(
    shared: Arc<Shared<S>>,
    endings: Arc<Mutex<mpsc::UnboundedReceiver<Ending>>>,
) {
    // Uncontended: there is one settler, and after a panic its successor.
    let mut endings = endings.lock().await;
    let mut parked = Parked::default();
    loop {
        let first = tokio::select! {
            () = shared.closing.cancelled() => return,
            first = endings.recv() => first,
            pending = parked.next() => {
                let waiting = parked.pending.len();
                settle(&shared, vec![pending], &mut parked).await;
                if parked.pending.len() == waiting {
                    // It was no longer locked, so the others may not be either.
                    parked.wake();
                }
                continue;
            }
        };
        let Some(first) = first else { return };
        let batch = gather(first, &mut endings).await;
        record(&shared, batch, &mut parked).await;
    }
}

/// Outcomes of rows that somebody has locked: an operator's open transaction, for instance.
///
/// They are tried again one at a time and with a pause, because each try waits for its lock, and
/// everybody else's outcomes wait behind it.
#[derive(Default)]
struct Parked {
    pending: VecDeque<Pending>,
    next_at: Option<Instant>,
}

impl Parked {
    fn park(&mut self, pending: Pending) {
        self.pending.push_back(pending);
        self.next_at = Some(Instant::now() + PARKED_FOR);
    }

    fn wake(&mut self) {
        self.next_at = (!self.pending.is_empty()).then(Instant::now);
    }

    /// Waits until the next one may be tried. For ever if there is none.
    async fn next(&mut self) -> Pending {
        match self.next_at {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
        // Nothing is awaited from here on, so dropping this future loses none.
        self.next_at = (self.pending.len() > 1).then(|| Instant::now() + PARKED_FOR);
        match self.pending.pop_front() {
            Some(pending) => pending,
            None => std::future::pending().await,
        }
    }
}

async fn gather(first: Ending, endings: &mut mpsc::UnboundedReceiver<Ending>) -> Vec<Ending> {
    let deadline = match &first {
        Ending::Settle { at, .. } | Ending::Release { at, .. } => *at + LINGER,
        Ending::Flush(_) => Instant::now(),
    };
    let mut batch = vec![first];
    while batch.len() < BATCH_MAX {
        let next = match endings.try_recv() {
            Ok(next) => next,
            Err(_) => match tokio::time::timeout_at(deadline, endings.recv()).await {
                Ok(Some(next)) => next,
                Ok(None) | Err(_) => break,
            },
        };
        let flush = matches!(next, Ending::Flush(_));
        batch.push(next);
        if flush {
            break;
        }
    }
    batch
}

async fn record<S: Store>(shared: &Shared<S>, batch: Vec<Ending>, parked: &mut Parked) {
    let mut settlements = Vec::new();
    let mut releases = Vec::new();
    let mut flushes = Vec::new();
    for ending in batch {
        match ending {
            Ending::Settle {
                lease,
                about,
                outcome,
                waiter,
                ..
            } => {
                settlements.push((Settlement { lease, outcome }, about, waiter));
            }
            Ending::Release { lease, waiter, .. } => releases.push((lease, waiter)),
            Ending::Flush(done) => flushes.push(done),
        }
    }
    // Rows are locked in this order by every writer, so that two of them cannot deadlock.
    settlements.sort_unstable_by_key(|(settlement, ..)| settlement.lease);
    settle(shared, settlements, parked).await;
    release(shared, releases).await;
    if !flushes.is_empty() && shared.stopping.is_cancelled() {
        // A last try: there is no later one.
        for pending in std::mem::take(parked).pending {
            settle(shared, vec![pending], parked).await;
        }
    }
    for done in flushes {
        // Whoever asked may have given up waiting.
        let _ = done.send(());
    }
}

/// Settles a batch. What one row can make fail fails for that row alone: where one is refused or
/// locked, the batch is cut into parts until the culprit is alone.
async fn settle<S: Store>(shared: &Shared<S>, batch: Vec<Pending>, parked: &mut Parked) {
    let mut batches = VecDeque::from([batch]);
    while let Some(mut batch) = batches.pop_front() {
        if batch.is_empty() {
            continue;
        }
        let settlements: Vec<Settlement> = batch
            .iter()
            .map(|(settlement, ..)| settlement.clone())
            .collect();
        match attempt(shared, &settlements).await {
            Recorded::Answers(answers) => report(shared, batch, &answers),
            Recorded::GivenUp => give_up(shared, batch),
            Recorded::Refused | Recorded::Locked if batch.len() > 1 => {
                let part = batch.len().div_ceil(PARTS);
                while !batch.is_empty() {
                    let rest = batch.split_off(std::cmp::min(part, batch.len()));
                    batches.push_back(std::mem::replace(&mut batch, rest));
                }
            }
            Recorded::Refused => {
                let bare = batch.into_iter().map(without_content).collect();
                batches.push_back(bare);
            }
            Recorded::Locked => batch.into_iter().for_each(|pending| parked.park(pending)),
        }
    }
}

enum Recorded {
    Answers(Vec<Settled>),
    /// Some row of the batch carries what the database does not take.
    Refused,
    /// Some row of the batch is locked by somebody.
    Locked,
    /// None of the leases can still be ours, or the database takes nothing at all of it.
    GivenUp,
}

async fn attempt<S: Store>(shared: &Shared<S>, settlements: &[Settlement]) -> Recorded {
    let mut pause = wait::Pause::new(Duration::from_millis(20), Duration::from_secs(2));
    let mut refusals = 0;
    loop {
        shared.counters.settlements.one();
        let error = match shared.store.settle(settlements).await {
            Ok(answers) => return Recorded::Answers(answers),
            Err(error) => error,
        };
        shared.counters.store_errors.one();
        let at_fault = match error.kind() {
            // Nobody else can have claimed it either, so its token counts for as long as it takes.
            StoreErrorKind::Locked if !shared.past_deadline() => Some(Recorded::Locked),
            // Before it is asked what is worth it: a sweep's rows are not held, and one that is
            // refused must not take the others of its batch with it.
            StoreErrorKind::Data | StoreErrorKind::Other
                if !is_bare(settlements) && !shared.past_deadline() =>
            {
                Some(Recorded::Refused)
            }
            _ if !is_worth_it(shared, settlements) => Some(Recorded::GivenUp),
            // There is nothing in it but the fact, and the database does not take that either: a
            // trigger of somebody's, perhaps. Others must not wait for it.
            StoreErrorKind::Data | StoreErrorKind::Other => {
                refusals += 1;
                (refusals == REFUSALS_MAX).then_some(Recorded::GivenUp)
            }
            _ => None,
        };
        let delay = pause.next();
        if let Some(recorded) = at_fault {
            tracing::warn!(
                events = settlements.len(),
                error = %ErrorText::from(&error),
                "outcomes were not recorded"
            );
            return recorded;
        }
        tracing::warn!(
            events = settlements.len(),
            error = %ErrorText::from(&error),
            retry_in = ?delay,
            "outcomes could not be recorded yet"
        );
        shared.sleep_unless_past_deadline(delay).await;
    }
}

/// Whether the row may still have our token: for as long again as the lease, since nobody may have
/// claimed it yet.
fn is_worth_it<S: Store>(shared: &Shared<S>, settlements: &[Settlement]) -> bool {
    let trusted = settlements
        .iter()
        .filter_map(|settlement| shared.held.trusted_until(settlement.lease));
    let until = trusted.max().map(|until| until + shared.settings.lease);
    !shared.past_deadline() && until.is_some_and(|until| Instant::now() < until)
}

/// Whether there is nothing left in it that could be refused for what it says.
fn is_bare(settlements: &[Settlement]) -> bool {
    match settlements {
        [one] => match &one.outcome {
            Outcome::Processed { output } => output.is_none(),
            Outcome::Retry { error, .. } | Outcome::Dead { error, .. } => {
                error.as_str() == UNRECORDABLE
            }
            Outcome::Expired | Outcome::Discarded { .. } => true,
        },
        _ => false,
    }
}

const UNRECORDABLE: &str = "the error text was refused by the database";

/// The same outcome without what the handler put into it, so that it can be recorded after all.
fn without_content((settlement, about, waiter): Pending) -> Pending {
    let outcome = match settlement.outcome {
        Outcome::Processed { .. } => {
            tracing::error!(
                event_id = %about.id,
                event_name = %about.name,
                "the output was refused by the database; the event is processed without it"
            );
            Outcome::Processed { output: None }
        }
        Outcome::Retry { after, .. } => Outcome::Retry {
            after,
            error: ErrorText::new(&UNRECORDABLE),
        },
        Outcome::Dead { reason, .. } => Outcome::Dead {
            reason,
            error: ErrorText::new(&UNRECORDABLE),
        },
        // Nothing of it is stored.
        bare @ (Outcome::Expired | Outcome::Discarded { .. }) => bare,
    };
    (
        Settlement {
            lease: settlement.lease,
            outcome,
        },
        about,
        waiter,
    )
}

fn report<S: Store>(shared: &Shared<S>, batch: Vec<Pending>, answers: &[Settled]) {
    for ((settlement, about, waiter), answer) in batch.into_iter().zip(answers) {
        match answer {
            Settled::Recorded => recorded(shared, settlement.lease, &about, &settlement.outcome),
            Settled::LeaseLost => lost(shared, settlement.lease, &about),
        }
        drop(waiter);
    }
}

/// Lets go of an event whose outcome is stored, and says so.
pub(super) fn recorded<S: Store>(
    shared: &Shared<S>,
    lease: HeldLease,
    about: &About,
    outcome: &Outcome,
) {
    count_and_log(shared, about, outcome);
    shared.held.forget(lease);
    if let Some(key) = &about.ordering_key {
        free_next(shared, key, outcome);
    }
    shared.awaited.settled(lease.row, outcome);
    shared.hooks.settled(&SettledEvent::new(about, outcome));
}

/// Has the relays told of the next event of the key, if this one is not in its way any more.
fn free_next<S: Store>(shared: &Shared<S>, key: &str, outcome: &Outcome) {
    if !matches!(outcome, Outcome::Retry { .. }) {
        shared.freed.add(key);
    }
}

/// Lets go of an event that is somebody else's by now.
pub(super) fn lost<S: Store>(shared: &Shared<S>, lease: HeldLease, about: &About) {
    shared.held.forget(lease);
    shared.counters.lease_lost.one();
    tracing::warn!(
        event_id = %about.id,
        event_name = %about.name,
        attempt = about.attempt,
        "the lease was lost before the outcome could be recorded; nothing was changed"
    );
}

fn count_and_log<S: Store>(shared: &Shared<S>, about: &About, outcome: &Outcome) {
    match outcome {
        Outcome::Processed { .. } => {
            shared.counters.processed.one();
            tracing::debug!(
                event_id = %about.id,
                event_name = %about.name,
                handler = about.handler.as_deref(),
                attempt = about.attempt,
                "event processed"
            );
        }
        Outcome::Retry { after, error } => {
            shared.counters.retried.one();
            tracing::warn!(
                event_id = %about.id,
                event_name = %about.name,
                handler = about.handler.as_deref(),
                attempt = about.attempt,
                max_attempts = about.max_attempts,
                retry_in = ?after,
                %error,
                "attempt failed"
            );
        }
        Outcome::Dead { reason, error } => {
            shared.counters.dead.one();
            tracing::error!(
                event_id = %about.id,
                event_name = %about.name,
                handler = about.handler.as_deref(),
                attempt = about.attempt,
                max_attempts = about.max_attempts,
                %reason,
                %error,
                "event is a dead letter"
            );
        }
        Outcome::Expired => {
            shared.counters.dead.one();
            tracing::error!(
                event_id = %about.id,
                event_name = %about.name,
                handler = about.handler.as_deref(),
                "event is a dead letter: it expired before a handler was started"
            );
        }
        Outcome::Discarded { error } => {
            shared.counters.discarded.one();
            tracing::error!(
                event_id = %about.id,
                event_name = %about.name,
                handler = about.handler.as_deref(),
                attempt = about.attempt,
                %error,
                "event discarded: its payload cannot be decoded"
            );
        }
    }
}

fn give_up<S: Store>(shared: &Shared<S>, batch: Vec<Pending>) {
    for (settlement, about, _waiter) in batch {
        shared.held.forget(settlement.lease);
        if shared.past_deadline() {
            shared.not_stored([settlement.lease.row]);
        }
        shared.counters.unrecorded.one();
        tracing::error!(
            event_id = %about.id,
            event_name = %about.name,
            attempt = about.attempt,
            "the outcome could not be recorded in time; the lease expires and the event is due again"
        );
    }
}

/// Gives claims back. A row that stays locked is left to its lease, so that the others need not
/// wait for it.
async fn release<S: Store>(shared: &Shared<S>, mut releases: Vec<(HeldLease, Waiter)>) {
    releases.sort_unstable_by_key(|(lease, _)| *lease);
    let give_up_at = Instant::now() + shared.settings.lease;
    let mut batches = VecDeque::from([releases]);
    while let Some(mut batch) = batches.pop_front() {
        if batch.is_empty() {
            continue;
        }
        let leases: Vec<HeldLease> = batch.iter().map(|(lease, _)| *lease).collect();
        match attempt_release(shared, &leases, give_up_at).await {
            Recorded::Answers(answers) => {
                let released = answers.iter().filter(|a| **a == Settled::Recorded).count();
                shared.counters.released.add(released);
                shared.counters.lease_lost.add(answers.len() - released);
                forget_all(shared, &leases);
                shared.wake.local();
            }
            Recorded::Locked if batch.len() > 1 => {
                let rest = batch.split_off(batch.len() / 2);
                batches.push_back(batch);
                batches.push_back(rest);
            }
            Recorded::Locked | Recorded::Refused | Recorded::GivenUp => {
                tracing::warn!(
                    events = leases.len(),
                    "claims could not be given back; their leases expire"
                );
                shared.counters.unrecorded.add(leases.len());
                forget_all(shared, &leases);
                if shared.past_deadline() {
                    shared.not_stored(leases.iter().map(|lease| lease.row));
                }
            }
        }
    }
}

async fn attempt_release<S: Store>(
    shared: &Shared<S>,
    leases: &[HeldLease],
    give_up_at: Instant,
) -> Recorded {
    let mut pause = wait::Pause::new(Duration::from_millis(20), Duration::from_secs(2));
    loop {
        let error = match shared.store.release(leases).await {
            Ok(answers) => return Recorded::Answers(answers),
            Err(error) => error,
        };
        shared.counters.store_errors.one();
        if error.kind() == StoreErrorKind::Locked {
            return Recorded::Locked;
        }
        if Instant::now() >= give_up_at || shared.past_deadline() {
            return Recorded::GivenUp;
        }
        let delay = pause.next();
        tracing::warn!(
            events = leases.len(),
            error = %ErrorText::from(&error),
            retry_in = ?delay,
            "claims could not be given back yet"
        );
        shared.sleep_unless_past_deadline(delay).await;
    }
}

fn forget_all<S: Store>(shared: &Shared<S>, leases: &[HeldLease]) {
    for lease in leases {
        shared.held.forget(*lease);
    }
}
