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
/// comes to an end: a handler that asks for a retry at once, for instance.
const ROUNDS: usize = 10_000;

/// How many rounds in a row may have nothing to do but what was published in the one before. Far fewer,
/// because a round takes milliseconds, and no application has such a chain.
const FOLLOWING: usize = 1_000;

/// How many events may be published during one call. Rounds do not bound a handler that publishes the
/// event it handles and has it dispatched inline: each is under way before the one before has ended,
/// and all of them are one round.
const PUBLISHED: usize = 10_000;

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
/// [`assert_published_times`] is for any other number.
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

/// The events of type `E` that were published and committed, `times` of them, in the order of their
/// commit.
///
/// # Panics
///
/// Panics if it was another number, and says what was published.
#[track_caller]
#[expect(
    clippy::must_use_candidate,
    reason = "how many there are can be all a test says"
)]
pub fn assert_published_times<E: OutboxEvent>(store: &MemoryStore, times: usize) -> Vec<E> {
    let published = store.published::<E>();
    assert!(
        published.len() == times,
        "{times} of event `{}` were expected; {}",
        E::NAME,
        store.summary()
    );
    published
}

/// The one event of type `E` that was published and committed and is as `condition` says. Others may
/// have been published beside it.
///
/// ```
/// # use outbox_core::testing::{MemoryStore, assert_published_where};
/// # use outbox_core::{Outbox, OutboxEvent};
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Debug, Serialize, Deserialize, OutboxEvent)]
/// # struct OrderPaid { order_id: u64, cents: u64 }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let store = MemoryStore::new();
/// # let outbox = Outbox::builder(store.clone()).build()?;
/// let mut tx = outbox.begin().await?;
/// tx.publish(&OrderPaid { order_id: 7, cents: 990 }).await?;
/// tx.publish(&OrderPaid { order_id: 8, cents: 100 }).await?;
/// tx.commit().await?;
/// let paid = assert_published_where(&store, |paid: &OrderPaid| paid.order_id == 7);
/// assert_eq!(paid.cents, 990);
/// # Ok(())
/// # }
/// ```
///
/// # Panics
///
/// Panics if none is, or several are, and shows all of that type.
#[track_caller]
pub fn assert_published_where<E: OutboxEvent + fmt::Debug>(
    store: &MemoryStore,
    condition: impl Fn(&E) -> bool,
) -> E {
    let (mut matching, others): (Vec<E>, Vec<E>) =
        store.published::<E>().into_iter().partition(condition);
    assert!(
        matching.len() == 1,
        "one such event `{}` was expected; {}\n such: {matching:?}\nother: {others:?}",
        E::NAME,
        store.summary()
    );
    matching.remove(0)
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

/// What the rows of an event type say of it, on one line: its name, its version and its former names.
///
/// A test that compares it with a literal fails when one of them changes, by a rename of the type for
/// instance, before rows of the old name are left without a handler.
///
/// ```
/// use outbox_core::testing::pinned;
/// # use outbox_core::OutboxEvent;
/// # use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize, OutboxEvent)]
/// #[outbox(alias = "order.settled")]
/// struct OrderPaid {
///     order_id: u64,
/// }
///
/// #[derive(Serialize, Deserialize, OutboxEvent)]
/// struct AlertRaised;
///
/// assert_eq!(
///     [pinned::<OrderPaid>(), pinned::<AlertRaised>()],
///     ["order.paid v1 (alias order.settled)", "alert.raised v1"],
/// );
/// ```
#[must_use]
pub fn pinned<E: OutboxEvent>() -> String {
    let mut aliases = E::ALIASES.to_vec();
    aliases.sort_unstable();
    let (name, version) = (E::NAME, E::VERSION);
    match &aliases[..] {
        [] => format!("{name} v{version}"),
        aliases => format!("{name} v{version} (alias {})", aliases.join(", ")),
    }
}

/// What [`run_until_idle`] and [`run_until_settled`] have seen handled, and what they have left.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Ran {
    /// Events that were processed.
    pub processed: u64,
    /// Attempts that failed and are followed by another one.
    pub retried: u64,
    /// Events that became dead letters.
    pub dead: u64,
    /// Events that could not be decoded and were removed, as the application has asked for.
    pub discarded: u64,
    /// Events with a handler here that are left because a retry or a delay is not due.
    pub not_due: u64,
    /// Events that are left because they have no handler here.
    pub unhandled: u64,
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
/// An outbox is told from another one by its [`instance`](crate::OutboxBuilder::instance) name. In a
/// test with several, each needs its own: what another one of the same name holds is waited for as if
/// it were held here.
///
/// # Panics
///
/// Panics if there is no end to it: if more than 10,000 events are published meanwhile, 1,000 rounds in
/// a row handle nothing but what the one before has published, or something is still due after 10,000
/// rounds. And outside of a Tokio runtime.
pub async fn run_until_idle<Set>(outbox: &Outbox<MemoryStore, Set>) -> Ran {
    let outbox = outbox.untyped();
    idle(&outbox, &mut Bound::new(&outbox)).await
}

/// Handles everything there is: as [`run_until_idle`], with the store's clock moved on to the next
/// retry or delayed event whenever nothing is due, until all has ended that can.
///
/// So an event that always fails has become a dead letter when this returns, in no time. The clock is
/// moved for nothing else: what another instance holds is left, though its lease would end, and so is
/// what waits for a person, a sweep, or a circuit breaker, which goes by Tokio's clock.
///
/// # Panics
///
/// As [`run_until_idle`], with these numbers for the whole call, and if something still waits after
/// 10,000 waits.
pub async fn run_until_settled<Set>(outbox: &Outbox<MemoryStore, Set>) -> Ran {
    let outbox = outbox.untyped();
    let mut bound = Bound::new(&outbox);
    let mut ran = Ran::default();
    for _ in 0..ROUNDS {
        ran = idle(&outbox, &mut bound).await.after(ran);
        match wait_for_the_next(&outbox) {
            Some(wait) => outbox.store().advance(wait),
            None => return ran,
        }
    }
    panic!("events still wait after {ROUNDS} waits: has one of them no last attempt?");
}

/// What tells that a call does not come to an end.
struct Bound {
    /// How many events were committed before it.
    committed: usize,
    /// The last row of the rounds before.
    newest: i64,
    following: usize,
}

impl Bound {
    fn new(outbox: &Outbox<MemoryStore>) -> Self {
        Self {
            committed: outbox.store().committed(),
            newest: 0,
            following: 0,
        }
    }

    fn is_passed(&self, store: &MemoryStore) -> bool {
        store.committed() - self.committed > PUBLISHED
    }

    /// Comes before the round that handles `due`.
    fn begin_round(&mut self, due: &[(EventId, u32)]) {
        let rows = || due.iter().map(|(id, _)| id.row());
        match rows().all(|row| row > self.newest) {
            true => self.following += 1,
            false => self.following = 0,
        }
        self.newest = rows().fold(self.newest, std::cmp::max);
        assert!(
            self.following <= FOLLOWING,
            "{FOLLOWING} rounds had only what the one before has published: does a handler publish \
             what it handles?"
        );
    }
}

/// Runs until nothing is due.
async fn idle(outbox: &Outbox<MemoryStore>, bound: &mut Bound) -> Ran {
    // What was settled before is not counted; what is under way is.
    let before = ended(outbox);
    settle_what_is_under_way(outbox, bound).await;
    let mut last = Vec::new();
    for _ in 0..ROUNDS {
        let due = due(outbox);
        // What was due before, and is still, at the same attempt, is not to be had now.
        if due.is_empty() || due == last {
            return left(outbox, ended(outbox).since(before));
        }
        bound.begin_round(&due);
        for batch in due.chunks(BATCH) {
            match outbox.dispatch(batch.iter().map(|(id, _)| *id)) {
                Ok(dispatching) => dispatching.settled().await,
                Err(error) => panic!("the outbox could not be started: {error}"),
            }
        }
        settle_what_is_under_way(outbox, bound).await;
        last = due;
    }
    panic!("events are still due after {ROUNDS} rounds: does a handler ask for a retry at once?");
}

/// Waits until this process holds nothing: neither what it was born with nor what it has claimed.
async fn settle_what_is_under_way(outbox: &Outbox<MemoryStore>, bound: &Bound) {
    let instance = &*outbox.settings().instance;
    let settled = async {
        let nothing_is_held = |store: &MemoryStore| !store.is_holding(instance);
        outbox.store().wait_until(nothing_is_held).await;
        if let Ok(engine) = outbox.engine() {
            // And until it is counted.
            engine.shared.flush().await;
            engine.shared.held.empty().await;
        }
    };
    tokio::select! {
        () = outbox.store().wait_until(|store| bound.is_passed(store)) => panic!(
            "over {PUBLISHED} events were published meanwhile: does a handler publish what it handles?"
        ),
        () = settled => {}
    }
}

fn ended(outbox: &Outbox<MemoryStore>) -> Ran {
    let counters = outbox.counters();
    Ran {
        processed: counters.processed,
        retried: counters.retried,
        dead: counters.dead,
        discarded: counters.discarded,
        ..Ran::default()
    }
}

/// What `ran` has left.
fn left(outbox: &Outbox<MemoryStore>, mut ran: Ran) -> Ran {
    let now = outbox.store().now();
    for record in outbox.store().unsettled() {
        if !has_handler(outbox, &record) {
            ran.unhandled += 1;
        } else if record.due_at.is_some_and(|due_at| due_at > now) {
            ran.not_due += 1;
        }
    }
    ran
}

impl Ran {
    fn since(self, before: Self) -> Self {
        Self {
            processed: self.processed - before.processed,
            retried: self.retried - before.retried,
            dead: self.dead - before.dead,
            discarded: self.discarded - before.discarded,
            ..self
        }
    }

    /// Both together. What is left is what the later one has left.
    fn after(self, earlier: Self) -> Self {
        Self {
            processed: self.processed + earlier.processed,
            retried: self.retried + earlier.retried,
            dead: self.dead + earlier.dead,
            discarded: self.discarded + earlier.discarded,
            ..self
        }
    }
}

/// The events that are due and have a handler here, blocked and paused ones among them, and their
/// attempts: one that has failed and is due at once has been had.
fn due(outbox: &Outbox<MemoryStore>) -> Vec<(EventId, u32)> {
    let now = outbox.store().now();
    let records = outbox.store().unsettled();
    let due = records.iter().filter(|record| {
        is_ours(outbox, record)
            && record.state != EventState::InProgress
            && record.due_at.is_none_or(|due_at| due_at <= now)
    });
    due.map(|record| (record.id, record.attempts)).collect()
}

/// How long until something is due that waits for nothing but time.
fn wait_for_the_next(outbox: &Outbox<MemoryStore>) -> Option<Duration> {
    let now = outbox.store().now();
    let records = outbox.store().unsettled();
    let waits = records.iter().filter(|record| is_ours(outbox, record));
    let later = |at: SystemTime| at.duration_since(now).ok().filter(|wait| !wait.is_zero());
    waits.filter_map(|record| later(record.due_at?)).min()
}

/// Whether it has a handler here, and an attempt left.
fn is_ours(outbox: &Outbox<MemoryStore>, record: &EventRecord) -> bool {
    has_handler(outbox, record) && record.attempts < record.max_attempts.get()
}

fn has_handler(outbox: &Outbox<MemoryStore>, record: &EventRecord) -> bool {
    let handlers = outbox.registry().reading(&record.name, record.version);
    handlers.is_some_and(|handlers| {
        record.handler.is_none() || handlers.of(record.handler.as_deref()).is_some()
    })
}
