//! The events whose end callers of this process wait for, wherever they run.
//!
//! What this process settles itself is answered at once. For what others settle, one statement asks
//! about all of them, at a pace that slows down: a hundred callers that wait for one event cost what
//! one does.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};

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
    waiting: Mutex<HashMap<Watched, Vec<oneshot::Sender<Answer>>>>,
    added: Notify,
}

impl Awaited {
    /// Comes back with how the event ended once it has. An error means that the outbox has closed.
    pub(crate) fn add(&self, event: Watched) -> oneshot::Receiver<Answer> {
        let (sender, receiver) = oneshot::channel();
        self.lock().entry(event).or_default().push(sender);
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
        let mut waiting = self.lock();
        if waiting.is_empty() {
            return;
        }
        let events: Vec<Watched> = waiting.keys().filter(|e| e.row == row).cloned().collect();
        for event in events {
            for sender in waiting.remove(&event).unwrap_or_default() {
                // Whoever asked may have given up waiting.
                let _ = sender.send(Ok(Some(ended.clone())));
            }
        }
    }

    /// The events that somebody still waits for.
    fn events(&self) -> Vec<Watched> {
        let mut waiting = self.lock();
        waiting.retain(|_, senders| {
            senders.retain(|sender| !sender.is_closed());
            !senders.is_empty()
        });
        waiting.keys().cloned().collect()
    }

    fn answer(&self, event: &Watched, answer: impl Fn() -> Answer) {
        for sender in self.lock().remove(event).unwrap_or_default() {
            // Whoever asked may have given up waiting.
            let _ = sender.send(answer());
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Watched, Vec<oneshot::Sender<Answer>>>> {
        // Nothing that runs under this lock panics; were it to, the table is still consistent.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks until the outbox closes.
pub(crate) async fn run<S: Store>(shared: Arc<Shared<S>>) {
    loop {
        tokio::select! {
            () = shared.closing.cancelled() => return,
            () = shared.awaited.added.notified() => {}
        }
        let mut pause = wait::Pause::new(ASK_FIRST, ASK_AT_LEAST);
        loop {
            let events = shared.awaited.events();
            if events.is_empty() {
                break;
            }
            for batch in events.chunks(BATCH_MAX) {
                ask(&shared, batch).await;
            }
            tokio::select! {
                () = shared.closing.cancelled() => return,
                () = tokio::time::sleep(pause.next()) => {}
                // Its end may be there already.
                () = shared.awaited.added.notified() => pause.reset(),
            }
        }
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
