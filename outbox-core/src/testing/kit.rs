//! What a test of an application says in one line: what was published, and that it was handled.
//!
//! Nothing here runs in the background: a test says when events are handled and when time passes.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime};

use super::MemoryStore;
use crate::event::{EventId, OutboxEvent};
use crate::outbox::Outbox;
use crate::publish;
use crate::settings::Draft;
use crate::store::{EventRecord, EventState};

/// The most events that one call hands to the inline queue at a time.
const BATCH: usize = 256;

/// How many rounds, or waits, one call makes before it takes the application for one that never
/// comes to an end: a handler that publishes the event it handles, for instance.
const ROUNDS: usize = 10_000;

impl MemoryStore {
    /// Every committed event of a type, in the order of its commit, whatever has become of it since.
    ///
    /// Those published under a former name of the type are among them, brought to its present
    /// version. They are remembered here, for tests, also where nothing of the event is kept.
    ///
    /// # Panics
    ///
    /// Panics if one of them cannot be decoded: no handler could have been given it either.
    #[must_use]
    #[track_caller]
    pub fn published<E: OutboxEvent>(&self) -> Vec<E> {
        let mut events = Vec::new();
        for published in self.log() {
            if published.name == E::NAME || E::ALIASES.contains(&published.name.as_str()) {
                match E::decode(published.version, &published.payload) {
                    Ok(event) => events.push(event),
                    Err(error) => panic!(
                        "an event `{}` was published that `{}` cannot decode: {error:?}\n{}",
                        published.name,
                        std::any::type_name::<E>(),
                        published.payload
                    ),
                }
            }
        }
        events
    }

    /// What was published, by name, for a message.
    fn summary(&self) -> String {
        let mut counts = BTreeMap::<String, usize>::new();
        for published in self.log() {
            *counts.entry(published.name).or_default() += 1;
        }
        let counts: Vec<String> = counts
            .iter()
            .map(|(name, count)| format!("{count} of `{name}`"))
            .collect();
        match &counts[..] {
            [] => "nothing was published".to_owned(),
            counts => format!("published were {}", counts.join(", ")),
        }
    }
}

/// The one event of type `E` that was published and committed.
///
/// ```
/// use outbox_core::testing::{MemoryStore, assert_published};
/// # use outbox_core::{Outbox, OutboxEvent};
/// # use serde::{Deserialize, Serialize};
///
/// #[derive(Debug, PartialEq, Serialize, Deserialize, OutboxEvent)]
/// struct OrderPaid {
///     order_id: u64,
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = MemoryStore::new();
/// let outbox = Outbox::builder(store.clone()).build()?;
/// let mut tx = outbox.begin().await?;
/// tx.publish(&OrderPaid { order_id: 7 }).await?;
/// tx.commit().await?;
/// assert_eq!(assert_published::<OrderPaid>(&store), OrderPaid { order_id: 7 });
/// # Ok(())
/// # }
/// ```
///
/// # Panics
///
/// Panics if none was, or several were, and says what was published instead.
/// [`MemoryStore::published`] is for any other number.
#[track_caller]
#[expect(
    clippy::must_use_candidate,
    reason = "that there is one can be all a test says"
)]
pub fn assert_published<E: OutboxEvent>(store: &MemoryStore) -> E {
    let mut published = store.published::<E>();
    assert!(
        published.len() == 1,
        "one event `{}` was expected; {}",
        E::NAME,
        store.summary()
    );
    published.remove(0)
}

/// Makes sure that no event of type `E` was published and committed.
///
/// # Panics
///
/// Panics if one was, and says what was published.
#[track_caller]
pub fn assert_not_published<E: OutboxEvent>(store: &MemoryStore) {
    assert!(
        store.published::<E>().is_empty(),
        "no event `{}` was expected; {}",
        E::NAME,
        store.summary()
    );
}

/// Makes sure that an event comes out of a row as it went in.
///
/// Handlers never get the value that was published, but what is read back from its JSON, in tests as
/// in production. So a field that is skipped, or read differently than written, shows in a test of
/// the handler too; this shows it in one line, for each event type.
///
/// ```
/// use outbox_core::testing::assert_survives;
/// # use outbox_core::OutboxEvent;
/// # use serde::{Deserialize, Serialize};
///
/// #[derive(Debug, PartialEq, Serialize, Deserialize, OutboxEvent)]
/// struct OrderPaid {
///     order_id: u64,
/// }
///
/// assert_survives(&OrderPaid { order_id: 7 });
/// ```
///
/// # Panics
///
/// Panics if publishing would refuse it, if it cannot be decoded, or if what is decoded is not equal,
/// and shows both.
#[track_caller]
pub fn assert_survives<E: OutboxEvent + PartialEq + fmt::Debug>(event: &E) {
    let json = match publish::payload(event, Draft::default().payload_max) {
        Ok(json) => json,
        Err(error) => panic!("it could not be published: {error}\n{event:?}"),
    };
    match E::decode(E::VERSION, &json) {
        Ok(decoded) => assert!(
            decoded == *event,
            "it came back as another one\n went in: {event:?}\ncame out: {decoded:?}\n as JSON: {json}"
        ),
        Err(error) => panic!("it could not be decoded: {error:?}\n{json}"),
    }
}

/// What [`run_until_idle`] and [`run_until_settled`] have seen handled.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Ran {
    /// Events that were processed.
    pub processed: u64,
    /// Attempts that failed and are followed by another one.
    pub retried: u64,
    /// Events that became dead letters.
    pub dead: u64,
}

/// Handles everything that is due now, and what handlers publish meanwhile, until nothing is due that
/// has a handler here.
///
/// It needs no relay and waits for nothing but handlers: a retry, or a delayed event, is not due until
/// time passes. What is paused, blocked by its ordering key, held by somebody or without a handler is
/// left. Events of a transaction that was just committed are waited for, since they are being
/// dispatched already.
///
/// ```
/// use std::time::Duration;
///
/// use outbox_core::testing::{MemoryStore, run_until_idle};
/// use outbox_core::{HandlerError, Outbox, OutboxEvent};
/// # use serde::{Deserialize, Serialize};
///
/// # #[derive(Serialize, Deserialize, OutboxEvent)]
/// # struct OrderPaid { order_id: u64 }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = MemoryStore::new();
/// let outbox = Outbox::builder(store.clone())
///     .on(|event: OrderPaid| async move {
///         match event.order_id {
///             13 => Err(HandlerError::retry("not today")),
///             _ => Ok(()),
///         }
///     })
///     .build()?;
/// let mut tx = outbox.begin().await?;
/// tx.publish_all(&[OrderPaid { order_id: 7 }, OrderPaid { order_id: 13 }]).await?;
/// tx.commit().await?;
///
/// let ran = run_until_idle(&outbox).await;
/// assert_eq!((ran.processed, ran.retried), (1, 1));
///
/// // The retry is due after its backoff.
/// store.advance(Duration::from_secs(30));
/// assert_eq!(run_until_idle(&outbox).await.retried, 1);
/// # Ok(())
/// # }
/// ```
///
/// # Panics
///
/// Panics if there is no end to it, after 10,000 rounds, and outside of a Tokio runtime.
pub async fn run_until_idle<Set>(outbox: &Outbox<MemoryStore, Set>) -> Ran {
    let outbox = outbox.untyped();
    // What was settled before is not counted; what is under way is.
    let before = ended(&outbox);
    settle_what_is_under_way(&outbox).await;
    let mut last = Vec::new();
    for _ in 0..ROUNDS {
        let due = due(&outbox);
        // What was due before, and is still, is not to be had now.
        if due.is_empty() || due == last {
            return ended(&outbox).since(before);
        }
        for batch in due.chunks(BATCH) {
            match outbox.dispatch(batch.iter().copied()) {
                Ok(dispatching) => dispatching.settled().await,
                Err(error) => panic!("the outbox could not be started: {error}"),
            }
        }
        settle_what_is_under_way(&outbox).await;
        last = due;
    }
    panic!("events are still due after {ROUNDS} rounds: does a handler publish what it handles?");
}

/// Handles everything there is: as [`run_until_idle`], with the store's clock moved on to the next
/// retry or delayed event whenever nothing is due, until all has ended that can.
///
/// So an event that always fails has become a dead letter when this returns, in no time.
///
/// # Panics
///
/// As [`run_until_idle`].
pub async fn run_until_settled<Set>(outbox: &Outbox<MemoryStore, Set>) -> Ran {
    let mut ran = Ran::default();
    for _ in 0..ROUNDS {
        let this_time = run_until_idle(outbox).await;
        ran.processed += this_time.processed;
        ran.retried += this_time.retried;
        ran.dead += this_time.dead;
        match wait_for_the_next(&outbox.untyped()) {
            Some(wait) => outbox.store().advance(wait),
            None => return ran,
        }
    }
    panic!("events still wait after {ROUNDS} waits: does a handler publish what it handles?");
}

/// Waits until this process holds nothing: neither what it was born with nor what it has claimed.
async fn settle_what_is_under_way(outbox: &Outbox<MemoryStore>) {
    let instance = &*outbox.settings().instance;
    let held_here = |record: &EventRecord| {
        record.state == EventState::InProgress && record.claimed_by.as_deref() == Some(instance)
    };
    let nothing_is_held = |store: &MemoryStore| !store.records().iter().any(held_here);
    outbox.store().wait_until(nothing_is_held).await;
    if let Ok(engine) = outbox.engine() {
        // And until it is counted.
        engine.shared.flush().await;
        engine.shared.held.empty().await;
    }
}

fn ended(outbox: &Outbox<MemoryStore>) -> Ran {
    let counters = outbox.counters();
    Ran {
        processed: counters.processed,
        retried: counters.retried,
        dead: counters.dead,
    }
}

impl Ran {
    fn since(self, before: Self) -> Self {
        Self {
            processed: self.processed - before.processed,
            retried: self.retried - before.retried,
            dead: self.dead - before.dead,
        }
    }
}

/// The events that are due and have a handler here, blocked and paused ones among them.
fn due(outbox: &Outbox<MemoryStore>) -> Vec<EventId> {
    let now = outbox.store().now();
    let records = outbox.store().records();
    let due = records.iter().filter(|record| {
        is_ours(outbox, record)
            && record.state != EventState::InProgress
            && record.due_at.is_none_or(|due_at| due_at <= now)
    });
    due.map(|record| record.id).collect()
}

/// How long until something is due that waits for nothing but time.
fn wait_for_the_next(outbox: &Outbox<MemoryStore>) -> Option<Duration> {
    let now = outbox.store().now();
    let records = outbox.store().records();
    let waits = records.iter().filter(|record| is_ours(outbox, record));
    let later = |at: SystemTime| at.duration_since(now).ok().filter(|wait| !wait.is_zero());
    waits.filter_map(|record| later(record.due_at?)).min()
}

fn is_ours(outbox: &Outbox<MemoryStore>, record: &EventRecord) -> bool {
    let handlers = outbox.registry().reading(&record.name, record.version);
    let is_known = handlers.is_some_and(|handlers| {
        record.handler.is_none() || handlers.of(record.handler.as_deref()).is_some()
    });
    is_known
        && record.attempts < record.max_attempts.get()
        && matches!(
            record.state,
            EventState::Pending | EventState::Failed | EventState::InProgress
        )
}
