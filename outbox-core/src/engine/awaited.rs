//! The events whose end callers of this process wait for, wherever they run.
//!
//! What this process settles itself is answered at once. For what others settle, one statement asks
//! about all of them, at a pace that slows down: a hundred callers that wait for one event cost what
//! one does.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use crate::engine::{Shared, wait};
use crate::outcome::{ErrorText, Outcome};
use crate::store::{EventState, Existing, Store, StoreError, Watched};

/// The most events of one question.
const BATCH_MAX: usize = 500;

const ASK_FIRST: Duration = Duration::from_millis(10);
const ASK_AT_LEAST: Duration = Duration::from_millis(250);

/// How an event ended. `None` if nothing of it is kept.
pub(crate) type Ended = Option<(EventState, Option<String>)>;

type Answer = Result<Ended, StoreError>;

/// Bounded by its callers: each of them waits in a future of its own.
#[derive(Debug, Default)]
pub(crate) struct Awaited {
    /// By row, because each settlement of this process looks for its own.
    waiting: Mutex<HashMap<i64, Vec<Waiter>>>,
    added: Notify,
}

#[derive(Debug)]
struct Waiter {
    event: Watched,
    answer: oneshot::Sender<Answer>,
}

impl Awaited {
    /// Comes back with how the event ended once it has. An error means that the outbox has closed.
    pub(crate) fn add(&self, event: Watched) -> oneshot::Receiver<Answer> {
        let (answer, receiver) = oneshot::channel();
        let row = event.row;
        let waiter = Waiter { event, answer };
        self.lock().entry(row).or_default().push(waiter);
        self.added.notify_one();
        receiver
    }

    /// Tells those who wait for this row what has just been stored of it.
    pub(crate) fn settled(&self, row: i64, outcome: &Outcome) {
        let ended = match outcome {
            Outcome::Processed { output } => (EventState::Processed, output.clone()),
            Outcome::Dead { .. } | Outcome::Expired => (EventState::DeadLetter, None),
            Outcome::Discarded { .. } => (EventState::Discarded, None),
            Outcome::Retry { .. } => return,
        };
        let waiters = self.lock().remove(&row);
        for waiter in waiters.unwrap_or_default() {
            // Whoever asked may have given up waiting.
            let _ = waiter.answer.send(Ok(Some(ended.clone())));
        }
    }

    /// The events that somebody still waits for.
    fn events(&self) -> Vec<Watched> {
        let mut events = HashSet::new();
        self.lock().retain(|_, waiters| {
            waiters.retain(|waiter| !waiter.answer.is_closed());
            events.extend(waiters.iter().map(|waiter| waiter.event.clone()));
            !waiters.is_empty()
        });
        events.into_iter().collect()
    }

    fn answer(&self, event: &Watched, answer: impl Fn() -> Answer) {
        let mut waiting = self.lock();
        let Some(waiters) = waiting.get_mut(&event.row) else {
            return;
        };
        for waiter in waiters.extract_if(.., |waiter| waiter.event == *event) {
            // Whoever asked may have given up waiting.
            let _ = waiter.answer.send(answer());
        }
        if waiters.is_empty() {
            waiting.remove(&event.row);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i64, Vec<Waiter>>> {
        // Nothing that runs under this lock panics; were it to, the table is still consistent.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks until the outbox closes.
pub(crate) async fn run<S: Store>(shared: Arc<Shared<S>>) {
    let mut pause = wait::Pause::new(ASK_FIRST, ASK_AT_LEAST);
    // Somebody may wait already, if this was started again.
    let mut ask_at = Some(Instant::now());
    loop {
        tokio::select! {
            () = shared.closing.cancelled() => return,
            // Its end may be there already. Not sooner than after the first pause, however many come:
            // each question is about all that are waited for.
            () = shared.awaited.added.notified() => {
                pause.reset();
                let soon = Instant::now() + pause.next();
                ask_at = Some(ask_at.map_or(soon, |at| std::cmp::min(at, soon)));
            }
            () = until(ask_at) => {
                let events = shared.awaited.events();
                for batch in events.chunks(BATCH_MAX) {
                    ask(&shared, batch).await;
                }
                ask_at = (!events.is_empty()).then(|| Instant::now() + pause.next());
            }
        }
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

async fn ask<S: Store>(shared: &Shared<S>, events: &[Watched]) {
    match shared.store.look_up(events).await {
        Ok(found) => {
            for (event, found) in events.iter().zip(found) {
                match found {
                    Some(existing) if !has_ended(existing.state) => {}
                    found => {
                        let ended = found.map(|Existing { state, output, .. }| (state, output));
                        shared.awaited.answer(event, || Ok(ended.clone()));
                    }
                }
            }
        }
        Err(error) => {
            shared.counters.store_errors.one();
            if error.is_transient() {
                tracing::debug!(
                    error = %ErrorText::from(&error),
                    "awaited events could not be looked up yet"
                );
                return;
            }
            // Waiting does not mend it.
            for event in events {
                let same = || StoreError::new(error.kind(), "look up an awaited event");
                shared.awaited.answer(event, || {
                    Err(same().with_source(ErrorText::from(&error).to_string()))
                });
            }
        }
    }
}

fn has_ended(state: EventState) -> bool {
    match state {
        EventState::Pending | EventState::InProgress | EventState::Failed => false,
        EventState::Processed
        | EventState::DeadLetter
        | EventState::Discarded
        | EventState::Cancelled => true,
    }
}
