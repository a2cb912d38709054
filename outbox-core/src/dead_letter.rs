//! Dead letters: what a person can see of them, and do about them.
//!
//! In one file, because whoever reads what an operator can do wants to see what a store is asked
//! for it.

use std::fmt;
use std::num::{NonZeroU32, ParseIntError};
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::event::EventId;
use crate::outbox::Outbox;
use crate::outcome::DeadReason;
use crate::store::{EventRecord, EventState, Store, StoreError};

/// The dead letters of an outbox. See [`Outbox::dead_letters`].
///
/// Every change is safe against another operator, or another process, doing the same: each dead
/// letter is changed once, and whoever comes second is told so.
#[derive(Clone, Debug)]
pub struct DeadLetters<S: Store> {
    outbox: Outbox<S>,
}

impl<S: Store, Set> Outbox<S, Set> {
    /// The events that nobody will try again unless a person asks: to be looked at, requeued,
    /// discarded.
    ///
    /// Needs no relay and no handlers, so a tool of its own can do it. See `docs/operations.md` for
    /// what to do when.
    ///
    /// ```
    /// use outbox_core::{DeadLetterFilter, Outbox, Requeue, Store};
    ///
    /// # async fn f<S: Store>(outbox: Outbox<S>) -> Result<(), Box<dyn std::error::Error>> {
    /// // The gateway was down; it is back. Ten a second, so that it stays up.
    /// let filter = DeadLetterFilter::all().event("order.paid").error_contains("gateway");
    /// let mut page = outbox.dead_letters().list(&filter, None, 20).await?;
    /// for letter in &page.letters {
    ///     println!("{} {}: {}", letter.id, letter.reason_text, letter.last_error);
    /// }
    /// let requeued = outbox
    ///     .dead_letters()
    ///     .requeue_all(&filter, Requeue::per_second(10))
    ///     .await?;
    /// println!("{requeued} requeued");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn dead_letters(&self) -> DeadLetters<S> {
        DeadLetters {
            outbox: self.untyped(),
        }
    }
}

impl<S: Store> DeadLetters<S> {
    /// Lists dead letters without their payloads, the newest event first.
    ///
    /// At most `limit` of them (cut to [`PAGE_MAX`]), from where the page before ended. What dies or
    /// leaves meanwhile neither moves what is left nor shows anything twice.
    ///
    /// # Errors
    ///
    /// Returns the store's error.
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime, as all of these methods do.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing but the answer.
    pub async fn list(
        &self,
        filter: &DeadLetterFilter,
        after: Option<DeadLetterCursor>,
        limit: u32,
    ) -> Result<DeadLetterPage, StoreError> {
        if filter.means_none() {
            return Ok(DeadLetterPage {
                letters: Vec::new(),
                next: None,
            });
        }
        let limit = std::cmp::min(limit, PAGE_MAX);
        let mut letters = Vec::new();
        let mut beyond = after.map_or(i64::MAX, |DeadLetterCursor(row)| row);
        loop {
            let left = limit.saturating_sub(u32::try_from(letters.len()).unwrap_or(u32::MAX));
            let Some(left) = NonZeroU32::new(left) else {
                let next = Some(DeadLetterCursor(beyond));
                return Ok(DeadLetterPage { letters, next });
            };
            let filter = filter.clone();
            let chunk = self
                .outbox
                .ask_alone(move |store| async move {
                    let scan = DeadLetterScan {
                        filter: &filter,
                        beyond,
                        scan: SCAN,
                        limit: left,
                    };
                    store.dead_letters(&scan).await
                })
                .await?;
            letters.extend(chunk.found);
            match chunk.next {
                Some(next) => beyond = next,
                None => {
                    return Ok(DeadLetterPage {
                        letters,
                        next: None,
                    });
                }
            }
        }
    }

    /// Reads a dead letter with its payload and its last
    /// [`ATTEMPTS_KEPT`](crate::store::ATTEMPTS_KEPT) failed attempts. `None` if it is none (any
    /// more): [`Outbox::find`] reads every event.
    ///
    /// # Errors
    ///
    /// Returns the store's error.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing but the answer.
    pub async fn get(&self, id: EventId) -> Result<Option<EventRecord>, StoreError> {
        let found = self.outbox.find(id).await?;
        Ok(found.filter(|record| record.state == EventState::DeadLetter))
    }

    /// Gives a dead letter a new life: due at once, under the same id and dedup key, with all its
    /// attempts to come. What failed before stays in its record.
    ///
    /// # Errors
    ///
    /// Returns the store's error. Nothing has changed then, or the answer was lost.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves it open whether it was requeued. Requeue it again.
    pub async fn requeue(&self, id: EventId) -> Result<Changed, StoreError> {
        let changed = self.change(id, DeadLetterChange::AT_ONCE).await?;
        self.outbox.wake();
        Ok(changed)
    }

    /// Requeues all dead letters that the filter means, the oldest event first, and answers how many
    /// there were.
    ///
    /// In transactions of a few hundred, each of which stays done if a later one fails. Each dead
    /// letter is met once: one that dies again meanwhile is not requeued twice. What another
    /// operator is changing is left to them. A rate becomes due times in the rows, so it holds
    /// without this process.
    ///
    /// # Errors
    ///
    /// Returns [`BulkError`], which says how many had been requeued.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves done what was done. Run it again for the rest.
    pub async fn requeue_all(
        &self,
        filter: &DeadLetterFilter,
        requeue: Requeue,
    ) -> Result<u64, BulkError> {
        let begun = Instant::now();
        let requeued = self
            .change_all(filter, |before| DeadLetterChange::Requeue {
                delay: requeue.wait_of(before).saturating_sub(begun.elapsed()),
                spacing: requeue.spacing,
            })
            .await;
        self.outbox.wake();
        requeued
    }

    /// Decides that nobody will try a dead letter again.
    ///
    /// It is kept as [`Discarded`](EventState::Discarded) for the event's retention. Its dedup key
    /// is kept for the key's own: until then the same key is a duplicate, afterwards a new event.
    ///
    /// # Errors
    ///
    /// Returns the store's error. Nothing has changed then, or the answer was lost.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves it open whether it was discarded. Discard it again.
    pub async fn discard(&self, id: EventId) -> Result<Changed, StoreError> {
        self.change(id, DeadLetterChange::Discard).await
    }

    /// Discards all dead letters that the filter means, and answers how many there were. As
    /// [`requeue_all`](Self::requeue_all) goes about it.
    ///
    /// # Errors
    ///
    /// Returns [`BulkError`], which says how many had been discarded.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves done what was done. Run it again for the rest.
    pub async fn discard_all(&self, filter: &DeadLetterFilter) -> Result<u64, BulkError> {
        self.change_all(filter, |_| DeadLetterChange::Discard).await
    }

    /// Removes the dead letters that have been dead for longer than `age`, payloads and all, and
    /// answers how many there were. Their dedup keys are kept, for their retention.
    ///
    /// Nothing does this by itself: clean-up never removes a dead letter. As
    /// [`requeue_all`](Self::requeue_all) goes about it.
    ///
    /// # Errors
    ///
    /// Returns [`BulkError`], which says how many had been removed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves done what was done. Run it again for the rest.
    pub async fn purge(&self, age: Duration) -> Result<u64, BulkError> {
        let filter = DeadLetterFilter::all().older_than(age);
        self.change_all(&filter, |_| DeadLetterChange::Purge).await
    }

    async fn change(&self, id: EventId, change: DeadLetterChange) -> Result<Changed, StoreError> {
        // Row numbers repeat from database to database; the id says which one is meant.
        let before = match self.outbox.find(id).await? {
            None => return Ok(Changed::NotFound),
            Some(record) => record.state,
        };
        if before != EventState::DeadLetter {
            return Ok(Changed::NotDead(before));
        }
        let row = id.row();
        let changed = self
            .outbox
            .ask_alone(move |store| async move {
                let rows = DeadLetterRows::Numbered(&[row]);
                store.change_dead_letters(rows, change).await
            })
            .await?;
        if changed.rows.is_empty() {
            // Somebody was faster.
            let state = self.outbox.find(id).await?.map(|record| record.state);
            return Ok(state.map_or(Changed::NotFound, Changed::NotDead));
        }
        tracing::info!(event_id = %id, ?change, "dead letter changed");
        Ok(Changed::Done)
    }

    async fn change_all(
        &self,
        filter: &DeadLetterFilter,
        change: impl Fn(u64) -> DeadLetterChange,
    ) -> Result<u64, BulkError> {
        if filter.means_none() {
            return Ok(0);
        }
        let mut changed = 0;
        let mut beyond = 0;
        loop {
            let filter = filter.clone();
            let this = change(changed);
            let chunk = self
                .outbox
                .ask_alone(move |store| async move {
                    let rows = DeadLetterRows::Matching(DeadLetterScan {
                        filter: &filter,
                        beyond,
                        scan: SCAN,
                        limit: CHUNK,
                    });
                    store.change_dead_letters(rows, this).await
                })
                .await
                .map_err(|error| BulkError { changed, error })?;
            changed += u64::try_from(chunk.rows.len()).unwrap_or(u64::MAX);
            match chunk.next {
                Some(next) => beyond = next,
                None => break,
            }
        }
        tracing::info!(changed, "dead letters changed");
        Ok(changed)
    }
}

/// The most dead letters of one page.
pub const PAGE_MAX: u32 = 1_000;

/// How many dead letters one statement looks at: a few milliseconds.
const SCAN: NonZeroU32 = NonZeroU32::new(2_000).expect("not zero");

/// How many one statement changes.
const CHUNK: NonZeroU32 = NonZeroU32::new(200).expect("not zero");

/// A page of dead letters.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeadLetterPage {
    /// The newest event first.
    pub letters: Vec<DeadLetter>,
    /// Where the next page begins. `None` after the last.
    pub next: Option<DeadLetterCursor>,
}

/// A place in the list of dead letters. Its text can be handed to a browser and parsed again.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct DeadLetterCursor(i64);

impl fmt::Display for DeadLetterCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl FromStr for DeadLetterCursor {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        text.parse().map(Self)
    }
}

/// How fast requeued events become due.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[must_use]
pub struct Requeue {
    spacing: Duration,
}

impl Requeue {
    /// All at once.
    pub const fn at_once() -> Self {
        Self {
            spacing: Duration::ZERO,
        }
    }

    /// So many a second. Zero is taken for one.
    pub const fn per_second(events: u32) -> Self {
        let events = if events == 0 { 1 } else { events };
        Self {
            spacing: Duration::from_nanos(1_000_000_000 / events as u64),
        }
    }

    /// So many a minute. Zero is taken for one.
    pub const fn per_minute(events: u32) -> Self {
        let events = if events == 0 { 1 } else { events };
        Self {
            spacing: Duration::from_nanos(60_000_000_000 / events as u64),
        }
    }

    /// When the next one is due, after so many.
    fn wait_of(self, before: u64) -> Duration {
        let before = u32::try_from(before).unwrap_or(u32::MAX);
        std::cmp::min(self.spacing.saturating_mul(before), crate::DURATION_MAX / 2)
    }
}

/// What became of a change to one dead letter.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[must_use]
pub enum Changed {
    /// It was done.
    Done,
    /// Nothing was done: the event is no dead letter, any more or at all. It runs, waits, was
    /// processed, or another operator was faster.
    NotDead(EventState),
    /// Nothing was done: there is no such event in this database.
    NotFound,
}

/// A change to many dead letters was cut short.
#[derive(Debug)]
pub struct BulkError {
    changed: u64,
    error: StoreError,
}

impl BulkError {
    /// How many had been changed, and stay so.
    #[must_use]
    pub fn changed(&self) -> u64 {
        self.changed
    }

    /// What the store reported.
    #[must_use]
    pub fn error(&self) -> &StoreError {
        &self.error
    }
}

impl fmt::Display for BulkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "cut short after {} dead letters: {}",
            self.changed, self.error
        )
    }
}

impl std::error::Error for BulkError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        // Its text is part of ours.
        self.error.source()
    }
}

/// A dead letter in a list: everything but its payload, which can be large.
/// [`DeadLetters::get`](crate::DeadLetters::get) reads that too.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct DeadLetter {
    /// Its event's id.
    pub id: EventId,
    /// The event name.
    pub name: String,
    /// The handler that gave up on it, if its event has several.
    pub handler: Option<String>,
    /// The id of the event that it was split from, if that is another row.
    pub origin: Option<EventId>,
    /// The version of the payload's shape.
    pub version: NonZeroU32,
    /// Why it is dead, as stored: [`reason`](Self::reason) reads it.
    pub reason_text: String,
    /// What went wrong last.
    pub last_error: String,
    /// How many attempts were charged.
    pub attempts: u32,
    /// How many it was allowed.
    pub max_attempts: NonZeroU32,
    /// The instance that held it last.
    pub claimed_by: Option<String>,
    /// Its dedup key, in its stored form.
    pub dedup_key: Option<String>,
    /// When it was published.
    pub published_at: SystemTime,
    /// When it became a dead letter.
    pub died_at: SystemTime,
}

impl DeadLetter {
    /// A dead letter with what every one has; its other fields are public.
    #[must_use]
    pub fn new(
        id: EventId,
        name: String,
        version: NonZeroU32,
        max_attempts: NonZeroU32,
        published_at: SystemTime,
        died_at: SystemTime,
    ) -> Self {
        Self {
            id,
            name,
            handler: None,
            origin: None,
            version,
            reason_text: String::new(),
            last_error: String::new(),
            attempts: 0,
            max_attempts,
            claimed_by: None,
            dedup_key: None,
            published_at,
            died_at,
        }
    }

    /// Why it is dead. `None` if a later release wrote a reason that this one does not know.
    #[must_use]
    pub fn reason(&self) -> Option<DeadReason> {
        self.reason_text.parse().ok()
    }
}

/// Which dead letters are meant. The default means all; each condition narrows it.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[must_use]
pub struct DeadLetterFilter {
    event: Option<String>,
    handler: Option<String>,
    reason: Option<DeadReason>,
    older_than: Option<Duration>,
    newer_than: Option<Duration>,
    error_contains: Option<String>,
}

impl DeadLetterFilter {
    /// All dead letters.
    pub fn all() -> Self {
        Self::default()
    }

    /// Only events of this name.
    pub fn event(mut self, name: impl Into<String>) -> Self {
        self.event = Some(name.into());
        self
    }

    /// Only those of the handler of this name.
    pub fn handler(mut self, name: impl Into<String>) -> Self {
        self.handler = Some(name.into());
        self
    }

    /// Only those that died for this reason.
    pub fn reason(mut self, reason: DeadReason) -> Self {
        self.reason = Some(reason);
        self
    }

    /// Only those that have been dead for longer than this, by the database's clock.
    pub fn older_than(mut self, age: Duration) -> Self {
        self.older_than = Some(age);
        self
    }

    /// Only those that have been dead for no longer than this, by the database's clock.
    pub fn newer_than(mut self, age: Duration) -> Self {
        self.newer_than = Some(age);
        self
    }

    /// Only those whose last error contains this text, letter for letter.
    pub fn error_contains(mut self, text: impl Into<String>) -> Self {
        self.error_contains = Some(text.into());
        self
    }

    /// No stored text contains U+0000, and PostgreSQL refuses to be asked for one.
    fn means_none(&self) -> bool {
        let texts = [&self.event, &self.handler, &self.error_contains];
        texts.into_iter().flatten().any(|text| text.contains('\0'))
    }

    /// The event name asked for.
    #[must_use]
    pub fn event_asked(&self) -> Option<&str> {
        self.event.as_deref()
    }

    /// The handler asked for.
    #[must_use]
    pub fn handler_asked(&self) -> Option<&str> {
        self.handler.as_deref()
    }

    /// The reason asked for.
    #[must_use]
    pub fn reason_asked(&self) -> Option<DeadReason> {
        self.reason
    }

    /// The least age asked for.
    #[must_use]
    pub fn least_age(&self) -> Option<Duration> {
        self.older_than
    }

    /// The greatest age asked for.
    #[must_use]
    pub fn greatest_age(&self) -> Option<Duration> {
        self.newer_than
    }

    /// The text asked for.
    #[must_use]
    pub fn error_asked(&self) -> Option<&str> {
        self.error_contains.as_deref()
    }
}

/// One chunk of a walk over the dead letters, for a store.
#[derive(Clone, Copy, Debug)]
pub struct DeadLetterScan<'a> {
    /// Which of them are meant.
    pub filter: &'a DeadLetterFilter,
    /// Where the chunk begins: beyond this row number, which is not looked at again. A list goes
    /// downwards and begins at [`i64::MAX`], a change goes upwards and begins at 0.
    pub beyond: i64,
    /// How many dead letters to look at, whether they are meant or not.
    pub scan: NonZeroU32,
    /// How many of them to answer with, or to change.
    pub limit: NonZeroU32,
}

/// A chunk of a list.
#[derive(Clone, Debug, Default)]
pub struct DeadLetterChunk {
    /// By number, the newest event first.
    pub found: Vec<DeadLetter>,
    /// Where the next chunk begins. `None` if nothing is left to look at.
    pub next: Option<i64>,
}

/// Which dead letters to change, for a store.
#[derive(Clone, Copy, Debug)]
pub enum DeadLetterRows<'a> {
    /// Those of these numbers that are dead letters. Waits for somebody who is changing one.
    Numbered(&'a [i64]),
    /// The chunk of a walk. Passes over those that somebody is changing.
    Matching(DeadLetterScan<'a>),
}

/// What to do with dead letters, for a store.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DeadLetterChange {
    /// Back among the unsettled events, under the same number, with no attempt charged, no lease,
    /// and its failures kept. The first row of the chunk, by number, is due after `delay`, each
    /// other one `spacing` after the one before it. All of them get a due time, so that their lag
    /// counts from now and not from their publish, and no low-water mark passes them over.
    Requeue {
        /// The wait of the first.
        delay: Duration,
        /// The wait from one to the next.
        spacing: Duration,
    },
    /// Kept for the event's retention as [`Discarded`](crate::EventState::Discarded), and its
    /// dedup key for the key's.
    Discard,
    /// Removed. Its dedup key is kept, as that of a discarded event, for the key's retention.
    Purge,
}

impl DeadLetterChange {
    /// Back, and due at once.
    pub const AT_ONCE: Self = Self::Requeue {
        delay: Duration::ZERO,
        spacing: Duration::ZERO,
    };
}

/// What became of a change, for a store.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct DeadLettersChanged {
    /// The numbers of the rows that were changed, ascending.
    pub rows: Vec<i64>,
    /// Where the next chunk of a walk begins. `None` if nothing is left to look at.
    pub next: Option<i64>,
}
