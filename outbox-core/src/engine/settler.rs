//! From outcomes to stored rows: gathered, in batches, until they are recorded.
//!
//! The wait for company is counted from the first outcome of a batch, so a lone event is settled
//! at once and a busy relay settles hundreds with one statement. Nothing is acknowledged early:
//! an event is held, and its lease renewed, until the store has answered.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::engine::{Shared, wait};
use crate::event::EventId;
use crate::lease::HeldLease;
use crate::outcome::{ErrorText, Outcome};
use crate::settled::SettledEvent;
use crate::store::{Claimed, Settled, Settlement, Store, StoreErrorKind};

/// How long the first outcome of a batch waits for others.
const LINGER: Duration = Duration::from_millis(2);

/// The most outcomes of one statement.
const BATCH_MAX: usize = 500;

/// What a settled event is reported as.
#[derive(Clone, Debug)]
pub(crate) struct About {
    pub(crate) id: EventId,
    pub(crate) name: Arc<str>,
    pub(crate) attempt: NonZeroU32,
    pub(crate) max_attempts: NonZeroU32,
}

impl About {
    pub(crate) fn claimed(claimed: &Claimed) -> Self {
        Self {
            id: claimed.id,
            name: claimed.name.as_str().into(),
            attempt: claimed.attempt,
            max_attempts: claimed.max_attempts,
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
    /// Answers when everything sent before it is stored or given up.
    Flush(oneshot::Sender<()>),
}

/// Dropped when the event it belongs to is settled, given back or lost.
pub(crate) type Waiter = Option<mpsc::Sender<()>>;

type Pending = (Settlement, About, Waiter);

/// Runs until the outbox closes.
pub(crate) async fn run<S: Store>(
    shared: Arc<Shared<S>>,
    mut endings: mpsc::UnboundedReceiver<Ending>,
) {
    loop {
        let first = tokio::select! {
            () = shared.closing.cancelled() => return,
            first = endings.recv() => first,
        };
        let Some(first) = first else { return };
        let batch = gather(first, &mut endings).await;
        record(&shared, batch).await;
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

async fn record<S: Store>(shared: &Shared<S>, batch: Vec<Ending>) {
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
    settle(shared, settlements).await;
    release(shared, releases).await;
    for done in flushes {
        // Whoever asked may have given up waiting.
        let _ = done.send(());
    }
}

/// Settles a batch. What one row can make fail fails for that row alone: on a data error the
/// batch is halved until the culprit is alone.
async fn settle<S: Store>(shared: &Shared<S>, batch: Vec<Pending>) {
    let mut batches = VecDeque::from([batch]);
    while let Some(batch) = batches.pop_front() {
        if batch.is_empty() {
            continue;
        }
        let settlements: Vec<Settlement> = batch
            .iter()
            .map(|(settlement, ..)| settlement.clone())
            .collect();
        match attempt(shared, &settlements).await {
            Recorded::Answers(answers) => report(shared, batch, &answers),
            Recorded::Refused if batch.len() == 1 => {
                batches.extend(
                    batch
                        .into_iter()
                        .map(|pending| vec![without_content(pending)]),
                );
            }
            Recorded::Refused => {
                let mut left = batch;
                let right = left.split_off(left.len() / 2);
                batches.push_back(left);
                batches.push_back(right);
            }
            Recorded::GivenUp => give_up(shared, batch),
        }
    }
}

enum Recorded {
    Answers(Vec<Settled>),
    /// Some row of the batch carries what the database does not take.
    Refused,
    /// None of the leases can still be ours.
    GivenUp,
}

async fn attempt<S: Store>(shared: &Shared<S>, settlements: &[Settlement]) -> Recorded {
    let mut pause = wait::Backoff::new(Duration::from_millis(20), Duration::from_secs(2));
    loop {
        shared.counters.settlements.one();
        match shared.store.settle(settlements).await {
            Ok(answers) => return Recorded::Answers(answers),
            Err(error) => {
                shared.counters.store_errors.one();
                if error.kind() == StoreErrorKind::Data && !is_bare(settlements) {
                    tracing::warn!(
                        events = settlements.len(),
                        error = %ErrorText::from(&error),
                        "an outcome was refused by the database; looking for the one at fault"
                    );
                    return Recorded::Refused;
                }
                let held = settlements
                    .iter()
                    .filter_map(|s| shared.held.trusted_until(s.lease));
                // As long again as the lease: nobody may have claimed the row since, and then its
                // token still counts.
                let worth_it = held
                    .max()
                    .is_some_and(|t| Instant::now() < t + shared.settings.lease);
                if !worth_it || shared.past_deadline() {
                    return Recorded::GivenUp;
                }
                let delay = pause.next();
                tracing::warn!(
                    events = settlements.len(),
                    error = %ErrorText::from(&error),
                    retry_in = ?delay,
                    "outcomes could not be recorded yet"
                );
                shared.sleep_unless_past_deadline(delay).await;
            }
        }
    }
}

/// Whether there is nothing left in it that could be refused for what it says.
fn is_bare(settlements: &[Settlement]) -> bool {
    match settlements {
        [one] => match &one.outcome {
            Outcome::Processed { output } => output.is_none(),
            Outcome::Retry { error, .. } | Outcome::Dead { error, .. } => {
                error.as_str() == UNRECORDABLE
            }
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
        shared.held.forget(settlement.lease);
        match answer {
            Settled::Recorded => {
                count_and_log(shared, &about, &settlement.outcome);
                shared
                    .hooks
                    .settled(&SettledEvent::new(&about, &settlement.outcome));
            }
            Settled::LeaseLost => {
                shared.counters.lease_lost.one();
                tracing::warn!(
                    event_id = %about.id,
                    event_name = %about.name,
                    attempt = about.attempt,
                    "the lease was lost before the outcome could be recorded; nothing was changed"
                );
            }
        }
        drop(waiter);
    }
}

fn count_and_log<S: Store>(shared: &Shared<S>, about: &About, outcome: &Outcome) {
    match outcome {
        Outcome::Processed { .. } => {
            shared.counters.processed.one();
            tracing::debug!(
                event_id = %about.id,
                event_name = %about.name,
                attempt = about.attempt,
                "event processed"
            );
        }
        Outcome::Retry { after, error } => {
            shared.counters.retried.one();
            tracing::warn!(
                event_id = %about.id,
                event_name = %about.name,
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
                attempt = about.attempt,
                max_attempts = about.max_attempts,
                %reason,
                %error,
                "event is a dead letter"
            );
        }
    }
}

fn give_up<S: Store>(shared: &Shared<S>, batch: Vec<Pending>) {
    for (settlement, about, _waiter) in batch {
        // In a shutdown the table keeps it, so that the error can name it.
        if !shared.past_deadline() {
            shared.held.forget(settlement.lease);
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

async fn release<S: Store>(shared: &Shared<S>, mut releases: Vec<(HeldLease, Waiter)>) {
    if releases.is_empty() {
        return;
    }
    releases.sort_unstable_by_key(|(lease, _)| *lease);
    let leases: Vec<HeldLease> = releases.iter().map(|(lease, _)| *lease).collect();
    let mut pause = wait::Backoff::new(Duration::from_millis(20), Duration::from_secs(2));
    let give_up_at = Instant::now() + shared.settings.lease;
    loop {
        match shared.store.release(&leases).await {
            Ok(answers) => {
                let released = answers.iter().filter(|a| **a == Settled::Recorded).count();
                shared.counters.released.add(released);
                shared.counters.lease_lost.add(answers.len() - released);
                for lease in &leases {
                    shared.held.forget(*lease);
                }
                shared.wake.local();
                return;
            }
            Err(error) => {
                shared.counters.store_errors.one();
                let out_of_time = Instant::now() >= give_up_at || shared.past_deadline();
                tracing::warn!(
                    events = leases.len(),
                    error = %ErrorText::from(&error),
                    "claims could not be given back{}",
                    if out_of_time { "; their leases expire" } else { " yet" }
                );
                if out_of_time {
                    shared.counters.unrecorded.add(leases.len());
                    if !shared.past_deadline() {
                        for lease in &leases {
                            shared.held.forget(*lease);
                        }
                    }
                    return;
                }
                shared.sleep_unless_past_deadline(pause.next()).await;
            }
        }
    }
}
