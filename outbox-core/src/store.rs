//! The contract between the framework and a database.
//!
//! A store keeps rows and answers questions about them. It decides nothing: retry or dead, how
//! long to wait, what is poison comes to it as an [`Outcome`]. The promises that concern it are
//! numbered in [`Store`]; the contract suite in `testing::contract` checks each of them on every
//! store.
//!
//! One long file, because whoever writes a store reads the trait and every type it speaks of
//! together.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::ops::DerefMut;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use crate::cadence::Cadence;
use crate::dead_letter::{
    DeadLetterChange, DeadLetterChunk, DeadLetterRows, DeadLetterScan, DeadLettersChanged,
};
use crate::event::{BehindDead, EventId, Priority};
use crate::fingerprint::Fingerprint;
use crate::lease::{HeldLease, LeaseToken};
use crate::lock::LockId;
use crate::outcome::{DeadReason, ErrorText, Outcome};
use crate::stats::StoreStats;

/// Keeps the rows of an outbox.
///
/// This trait is not stable: it is public so that a store can live in a crate of its own, and it
/// changes whenever the framework needs it to. Implementors run
/// `testing::contract` against it.
///
/// What every store promises, by the number used throughout docs and tests:
///
/// - **P1, P2** [`insert`](Self::insert) writes through the caller's connection and nothing else.
///   It begins, commits and rolls back nothing, so an event lives or dies with the transaction.
/// - **P3** A dedup key, scoped by event name, lets one event in. Concurrent inserts of one key
///   wait for each other's commit; the loser learns the winner's id, state and output, and nobody
///   is told "duplicate" because of a row that never committed.
/// - **P4** A claim is exclusive until its lease ends, takes no more rows than asked, and does not
///   wait for another claim.
/// - **P5** Every write that ends, extends or gives back a claim names the lease token. Where the
///   row no longer has it, nothing changes.
/// - **P6** A claim adds 1 to `attempts`; a row born leased has 1 from its insert; a release takes
///   1 back. `attempts` never exceeds `max_attempts`.
/// - **P7** An expired lease makes the row due again for [`claim`](Self::claim) while an attempt
///   is left, and visible to [`sweep`](Self::sweep) when none is.
/// - **P12** [`claim`](Self::claim) touches only rows that are [`known`](is_known): of a name it was
///   given, and of no later version than was given with it.
/// - **P13** Every time stored or compared is the database's own.
/// - **P17** [`purge`](Self::purge) removes only what is settled and past its retention. A key is kept
///   while any part of its event is unsettled or dead.
///
/// A method that takes a [`Pass`] is one chunk of a cadence, in a transaction of its own that first
/// asks for the lock of that cadence. It answers `None`, and has done nothing, if another instance
/// has the lock. Where the store has one writer at a time, nobody ever has.
///
/// Every method but those of a publisher's transaction ([`begin`](Self::begin),
/// [`commit`](Self::commit), [`rollback`](Self::rollback), [`insert`](Self::insert),
/// [`begin_part`](Self::begin_part), [`settle_through`](Self::settle_through),
/// [`lock_entity`](Self::lock_entity)) comes back within the store's own statement deadline, with a
/// transient error if the database does not answer, and is never dropped half way by the framework.
pub trait Store: Clone + Send + Sync + 'static {
    /// The connection a publish writes through.
    type Connection: Send;

    /// A transaction of the caller.
    type Tx<'t>: DerefMut<Target = Self::Connection> + Send;

    /// A subscription to wake-ups from other processes. [`NoWakeups`] where there are none.
    type Wakeups: Wakeups;

    /// A lock that one instance has, for longer than a transaction.
    type Exclusive: ExclusiveLock;

    /// Begins a transaction on the application's connections, in the isolation level that
    /// publishing is promised under (PostgreSQL: READ COMMITTED; SQLite: IMMEDIATE).
    fn begin(&self) -> impl Future<Output = Result<Self::Tx<'static>, StoreError>> + Send;

    /// Commits a transaction that [`begin`](Self::begin) began.
    ///
    /// `Ok` does not prove that the rows exist: PostgreSQL answers the COMMIT of an aborted
    /// transaction without an error. An error does not prove that they do not.
    fn commit(&self, tx: Self::Tx<'static>) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Rolls back a transaction that [`begin`](Self::begin) began.
    fn rollback(
        &self,
        tx: Self::Tx<'static>,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Begins a part of the caller's transaction that can be undone by itself: a savepoint.
    ///
    /// Dropped half way, it leaves the transaction as it was, and never without one.
    fn begin_part<'c>(
        &self,
        connection: &'c mut Self::Connection,
    ) -> impl Future<Output = Result<Box<dyn Part<Self::Connection> + 'c>, StoreError>> + Send;

    /// Inserts events through the caller's connection, with one statement for any number of them
    /// (and a second one when a dedup key is taken). Answers in input order.
    ///
    /// Rows get ascending numbers in input order, and no number is given twice to rows that commit.
    /// (SQLite gives a number again if the transaction that drew it rolled back.) Keys are taken in
    /// sorted order, so that two batches with the same keys do not deadlock. Of two events of the
    /// batch with the same name and key the first is inserted and the second is a duplicate of it
    /// ([`earlier_in_batch`]).
    ///
    /// Events of one ordering key get their numbers in the order in which their transactions commit:
    /// the key is locked before a number is drawn, until the transaction ends, several keys in
    /// sorted order. (Where there is one writer at a time, no lock is needed.)
    fn insert(
        &self,
        connection: &mut Self::Connection,
        events: &[NewEvent],
    ) -> impl Future<Output = Result<Vec<Insertion>, StoreError>> + Send;

    /// Records outcomes as [`settle`](Self::settle) does, through the caller's connection: they
    /// live and die with the caller's transaction. With an error it is open which of them were
    /// recorded, and the caller undoes the part or the transaction that they are in.
    fn settle_through(
        &self,
        connection: &mut Self::Connection,
        settlements: &[Settlement],
    ) -> impl Future<Output = Result<Vec<Settled>, StoreError>> + Send;

    /// Locks an ordering key until the caller's transaction ends, as an insert of an event with this
    /// key does, and answers whether nothing [blocks it](blocks_later): whether an event inserted
    /// now would be its first.
    fn lock_ordering_key(
        &self,
        connection: &mut Self::Connection,
        key: &str,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Cancels an event that is not settled, through the caller's connection, and answers what was
    /// found: the id, and the state it was in *before*. `None` if there is no such event.
    ///
    /// A row that is unsettled, held by somebody or not, is kept as `cancelled` for its retention,
    /// and its key for the key's, as those of a processed event are. Whoever held it finds its lease
    /// lost. What is settled or dead is left as it is.
    ///
    /// Rows that were [split](Self::split) from it are cancelled with it, also those that a split adds
    /// while this waits for it; the answer is in progress if one of them was. The number of a part
    /// that is not the first means that part alone.
    fn cancel(
        &self,
        connection: &mut Self::Connection,
        event: &EventRef,
    ) -> impl Future<Output = Result<Option<Existing>, StoreError>> + Send;

    /// Takes a lock that the caller's transaction keeps until it ends, and waits for whoever has
    /// it. The namespace is none of [`RESERVED_NAMESPACES`](crate::lock::RESERVED_NAMESPACES).
    ///
    /// On PostgreSQL `pg_advisory_xact_lock(namespace, id)`, whose keys are no key of a
    /// single-argument lock. On SQLite the write lock of the file, which every transaction that
    /// wrote has already.
    fn lock_entity(
        &self,
        connection: &mut Self::Connection,
        namespace: i32,
        id: LockId,
    ) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Makes sure that this process can work with the database: the schema's version, and the
    /// rights, proven by a row that is inserted, claimed, settled and rolled back.
    fn check(&self) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Claims due rows of the given events: first as many due retries and delays as are reserved
    /// for them, then whatever is due, all by priority, then number (rows that waited: due time).
    ///
    /// A row that is [blocked](blocks_later) by an earlier one of its ordering key, or [paused](Pause),
    /// is not claimed, here and wherever rows are claimed. The [`freed`](ClaimRequest::freed) rows
    /// are looked at, whatever the low-water marks.
    ///
    /// Rows come back in no particular order.
    fn claim(
        &self,
        request: &ClaimRequest<'_>,
    ) -> impl Future<Output = Result<Vec<Claimed>, StoreError>> + Send;

    /// A claim in a pass.
    fn claim_in(
        &self,
        pass: Pass,
        request: &ClaimRequest<'_>,
    ) -> impl Future<Output = Result<Option<Vec<Claimed>>, StoreError>> + Send;

    /// Claims those of the given rows that are due and of the given events. What is leased,
    /// settled, waiting for its due time or out of attempts is left alone.
    fn claim_rows(
        &self,
        rows: &[i64],
        request: &ClaimRequest<'_>,
    ) -> impl Future<Output = Result<Vec<Claimed>, StoreError>> + Send;

    /// Answers which of the leases are still in their rows, how much of each is left, and what
    /// speaks against starting a handler now. Leases that are not in their rows are missing from the
    /// answer; the order is the store's.
    ///
    /// Asked for rows born leased before their handlers run: a rolled-back savepoint removed some,
    /// an aborted transaction all.
    fn verify(
        &self,
        leases: &[HeldLease],
    ) -> impl Future<Output = Result<Vec<Verified>, StoreError>> + Send;

    /// Extends leases to end `lease` from now. Answers in input order.
    ///
    /// A row that somebody has locked is skipped, not waited for: [`Renewal::Unknown`].
    fn renew(
        &self,
        leases: &[HeldLease],
        lease: Duration,
    ) -> impl Future<Output = Result<Vec<Renewal>, StoreError>> + Send;

    /// Gives each handler of an event a row of its own, before any of them runs. Answers in input
    /// order, with the rows in the order of the parts; `None`, and nothing is changed, where the row
    /// is not held any more or belongs to one handler already.
    ///
    /// The row itself becomes the first part's: it keeps its number and its dedup key. The others
    /// get numbers of their own, and [`origin`](Claimed::origin) names the row they were split from;
    /// they have no dedup key. All else is the same in each: payload, headers, priority, ordering
    /// key, deadline, attempts and failures. A part that is held is so under the token of the row,
    /// for as long. One that is not, because it was not asked to be or is [paused](Pause), is due at
    /// once, its attempt given back.
    ///
    /// All or nothing: with an error, nothing was split or it is unknown.
    fn split(
        &self,
        splits: &[Split],
    ) -> impl Future<Output = Result<Vec<Option<Vec<SplitRow>>>, StoreError>> + Send;

    /// Records outcomes and ends the claims. Answers in input order.
    ///
    /// All or nothing: with an error, nothing was recorded or it is unknown, and the same call may
    /// be repeated (what was recorded answers [`Settled::LeaseLost`] then). An error of kind
    /// [`Data`](StoreErrorKind::Data) or [`Locked`](StoreErrorKind::Locked) is some row's fault;
    /// the framework then cuts the batch until that row is alone.
    fn settle(
        &self,
        settlements: &[Settlement],
    ) -> impl Future<Output = Result<Vec<Settled>, StoreError>> + Send;

    /// Gives claims back: the row is due at once and the attempt is not charged. Answers in input
    /// order. Never asked for what a sweep has claimed, since that charged nothing.
    fn release(
        &self,
        leases: &[HeldLease],
    ) -> impl Future<Output = Result<Vec<Settled>, StoreError>> + Send;

    /// Looks at one chunk of the unsettled rows, in the order of their numbers.
    ///
    /// Claims, without charging an attempt and whatever their names, due rows with no attempt left
    /// (as a rule their lease has expired), and counts rows that this process does not
    /// [know](is_known).
    /// `claimed_by` still names the last holder, if there was one: it is the one that failed.
    ///
    /// A lease that ends later than [`LEASE_MAX`](crate::settings::LEASE_MAX) from now cannot have
    /// been given by this database's clock. It is cut to end then, and its token stays: whoever
    /// holds it has at least as long as any lease may last.
    fn sweep(
        &self,
        pass: Pass,
        request: &SweepRequest<'_>,
    ) -> impl Future<Output = Result<Option<SweepChunk>, StoreError>> + Send;

    /// Removes up to `limit` settled events and dedup keys that are past their retention, and
    /// answers how many it removed.
    fn purge(
        &self,
        pass: Pass,
        limit: NonZeroU32,
    ) -> impl Future<Output = Result<Option<u64>, StoreError>> + Send;

    /// Makes or drops one partition of what is kept of settled events: drops one whose day is past,
    /// or makes one for a day between today and `ahead` from now. A store without partitions
    /// answers [`Upkeep::Done`].
    ///
    /// Waits for a lock for a tenth of a second at most, and gives an error of kind
    /// [`Locked`](StoreErrorKind::Locked) then, or [`Denied`](StoreErrorKind::Denied) where this
    /// role may not. Nothing but this depends on it: what has no partition of its own day is kept
    /// in the default partition, and removed by [`purge`](Self::purge).
    fn upkeep(
        &self,
        pass: Pass,
        ahead: Duration,
    ) -> impl Future<Output = Result<Option<Upkeep>, StoreError>> + Send;

    /// Reads one chunk of the dead letters, downwards from the newest number, without payloads.
    fn dead_letters(
        &self,
        scan: &DeadLetterScan<'_>,
    ) -> impl Future<Output = Result<DeadLetterChunk, StoreError>> + Send;

    /// Changes dead letters, upwards from the oldest number, in one transaction.
    ///
    /// Two callers may do it at once: each dead letter is changed by one of them.
    fn change_dead_letters(
        &self,
        rows: DeadLetterRows<'_>,
        change: DeadLetterChange,
    ) -> impl Future<Output = Result<DeadLettersChanged, StoreError>> + Send;

    /// Pauses what `pause` names, or resumes it. Answers whether anything changed.
    fn set_paused(
        &self,
        pause: &PauseRef,
        paused: bool,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// What is paused, by event name and handler.
    fn paused(&self) -> impl Future<Output = Result<Vec<Pause>, StoreError>> + Send;

    /// Counts what there is, at a cost that does not grow with the tables.
    fn stats(&self) -> impl Future<Output = Result<StoreStats, StoreError>> + Send;

    /// Takes the lock `name` for this instance. `None` if another one has it.
    ///
    /// It is freed by [`ExclusiveLock::release`], and by the database when the process that has it
    /// dies.
    fn try_exclusive(
        &self,
        name: &str,
        instance: &str,
    ) -> impl Future<Output = Result<Option<Self::Exclusive>, StoreError>> + Send;

    /// Reads what has become of events. Answers in input order; `None` where nothing of an event is
    /// kept any more.
    ///
    /// An event that has left every table is still known by its dedup key, if it is given and still
    /// that event's.
    fn look_up(
        &self,
        events: &[Watched],
    ) -> impl Future<Output = Result<Vec<Option<Existing>>, StoreError>> + Send;

    /// The ordering keys that an event which has failed or is dead [blocks](blocks_later) others of,
    /// or would: at most `limit` of them, the longest blocked first.
    fn blocked_keys(
        &self,
        limit: NonZeroU32,
    ) -> impl Future<Output = Result<Vec<BlockedKey>, StoreError>> + Send;

    /// The first unsettled row of each of these ordering keys, in their stored form. Keys without one
    /// are missing from the answer, which has no particular order.
    ///
    /// Asked after something of these keys was settled, and never on the way of a claim: a key of
    /// which nothing waits, as most are, costs a look-up here.
    fn next_in_order(
        &self,
        keys: &[String],
    ) -> impl Future<Output = Result<Vec<i64>, StoreError>> + Send;

    /// A number that no row which is committed by now is above, as a rule the highest one drawn.
    ///
    /// Asked before a look from the beginning, if the last one was long: what that look finds no use
    /// for is not walked over again by the claims after it.
    fn newest(&self) -> impl Future<Output = Result<i64, StoreError>> + Send;

    /// Reads everything known about one event. `None` if the row is gone, or never was.
    fn find(
        &self,
        row: i64,
    ) -> impl Future<Output = Result<Option<EventRecord>, StoreError>> + Send;

    /// Subscribes to wake-ups from other processes. `None` if the store has none.
    fn listen(&self) -> impl Future<Output = Result<Option<Self::Wakeups>, StoreError>> + Send;

    /// Wakes the relays of other processes. A hint: it may be lost.
    fn notify(&self) -> impl Future<Output = Result<(), StoreError>> + Send;
}

/// A part of a transaction of the caller's.
///
/// Dropping it undoes it before the next statement goes through the connection.
///
/// A trait object, because a transaction type with a lifetime in the signature of a generic `async
/// fn` makes futures of which the compiler cannot see that they are `Send`.
#[async_trait]
pub trait Part<C: Send>: Send {
    /// The connection, inside of the part.
    fn connection(&mut self) -> &mut C;

    /// Keeps it in its transaction. With an error it is undone.
    async fn keep(self: Box<Self>) -> Result<(), StoreError>;

    /// Undoes it.
    async fn undo(self: Box<Self>) -> Result<(), StoreError>;
}

/// A lock that one instance has.
///
/// Dropping it frees it too, at the latest when its lease or its connection ends.
pub trait ExclusiveLock: Send + 'static {
    /// Proves that the lock is still had, and keeps it. `false` if it is lost. With an error it is
    /// unknown, and the framework asks again until
    /// [`EXCLUSIVE_LEASE`](crate::lock::EXCLUSIVE_LEASE) is nearly over. A call that takes too
    /// long is dropped half way; the lock then counts as lost, and is released.
    fn keep(&mut self) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Frees it.
    fn release(self) -> impl Future<Output = Result<(), StoreError>> + Send;
}

/// A subscription to wake-ups.
pub trait Wakeups: Send + 'static {
    /// Waits for the next wake-up. Runs whatever heartbeat the subscription needs to notice that
    /// its connection is gone.
    ///
    /// After an error the subscription is dropped and a new one is made.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses at most one wake-up.
    fn next(&mut self) -> impl Future<Output = Result<(), StoreError>> + Send;
}

/// The wake-ups of a store that has none.
#[derive(Debug)]
pub enum NoWakeups {}

impl Wakeups for NoWakeups {
    async fn next(&mut self) -> Result<(), StoreError> {
        match *self {}
    }
}

/// A row to insert. Everything in it has been checked: no text contains U+0000, the payload is
/// within its limit, and no duration exceeds [`DURATION_MAX`](crate::DURATION_MAX).
#[derive(Clone, Debug)]
pub struct NewEvent {
    /// The event type's stable name.
    pub name: &'static str,
    /// The version of the payload's shape.
    pub version: NonZeroU32,
    /// JSON text. What goes in comes out unchanged, to the byte.
    pub payload: String,
    /// A JSON object of strings, or nothing.
    pub headers: Option<String>,
    /// In its stored form ([`stored_key`](crate::key::stored_key)).
    pub dedup_key: Option<String>,
    /// Kept with the dedup key. `None` without one.
    pub fingerprint: Option<Fingerprint>,
    /// In its stored form.
    pub ordering_key: Option<String>,
    /// What becomes of later events of its ordering key should it end as a dead letter. Stored with
    /// it.
    pub behind_dead: BehindDead,
    /// Which of two due events is claimed first.
    pub priority: Priority,
    /// After how many attempts the event becomes a dead letter.
    pub max_attempts: NonZeroU32,
    /// How long the event is not due. Zero: it is due at once.
    pub delay: Duration,
    /// How long from now the event is worth handling. `None`: for ever. Longer than the delay.
    pub expires_in: Option<Duration>,
    /// How long the event is kept once it is processed. Zero: not at all.
    pub retention: Duration,
    /// How long its dedup key is kept, with the final state and output, once it is processed.
    pub key_retention: Duration,
    /// The lease it is born with, already charged with attempt 1. Never together with a delay.
    pub lease: Option<BornLease>,
}

/// The lease of a row that is inserted with one.
#[derive(Clone, Debug)]
pub struct BornLease {
    /// The token of the publishing statement.
    pub token: LeaseToken,
    /// How long it lasts, counted by the database from the statement and not from the beginning
    /// of the transaction.
    pub duration: Duration,
    /// The publishing instance.
    pub instance: Arc<str>,
}

/// For every event, the position of the first earlier one in `events` with the same name and
/// dedup key. Only events where this is `None` are inserted.
#[must_use]
pub fn earlier_in_batch(events: &[NewEvent]) -> Vec<Option<usize>> {
    let mut first: HashMap<(&str, &str), usize> = HashMap::new();
    events
        .iter()
        .enumerate()
        .map(|(position, event)| {
            let key = event.dedup_key.as_deref()?;
            match first.entry((event.name, key)) {
                std::collections::hash_map::Entry::Occupied(earlier) => Some(*earlier.get()),
                std::collections::hash_map::Entry::Vacant(free) => {
                    free.insert(position);
                    None
                }
            }
        })
        .collect()
}

/// What became of one event of an insert.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Insertion {
    /// The row was inserted.
    Inserted(EventId),
    /// The dedup key is taken.
    Existing(Existing),
}

/// The event that holds a dedup key.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Existing {
    /// Its id.
    pub id: EventId,
    /// What has become of it so far.
    pub state: EventState,
    /// What its handler returned, as JSON. Only a processed event has one.
    pub output: Option<String>,
    /// What was published with its dedup key. `None` for an event without one.
    pub fingerprint: Option<Fingerprint>,
}

/// Says which event is meant.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum EventRef {
    /// By its id. One of another database means no event here, although the number does.
    Id(EventId),
    /// By its name and dedup key.
    Key {
        /// The event name.
        name: String,
        /// The key, in its stored form.
        key: String,
    },
}

/// An event that somebody waits for.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Watched {
    /// Its number.
    pub row: i64,
    /// Its name and its dedup key in stored form, if it has one.
    pub key: Option<(String, String)>,
}

/// Whether an event of this state, published with this `behind_dead`, keeps later ones of its
/// ordering key from being handled: those with a higher number. The number of a row that was split
/// from another one counts as that one's, so that parts of one event do not wait for each other, and
/// later events wait for all of them.
///
/// An event waits while an earlier one of its key is unsettled, whatever the delay or the priority
/// of either, and while an earlier one is a dead letter that was published with
/// [`BehindDead::Block`].
#[must_use]
pub fn blocks_later(state: EventState, behind_dead: BehindDead) -> bool {
    match state {
        EventState::Pending | EventState::InProgress | EventState::Failed => true,
        EventState::DeadLetter => behind_dead == BehindDead::Block,
        EventState::Processed | EventState::Discarded | EventState::Cancelled => false,
    }
}

/// An ordering key whose first event has failed or is dead.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct BlockedKey {
    /// The key, in its stored form.
    pub ordering_key: String,
    /// The event that later ones wait for.
    pub head: EventId,
    /// Its event name.
    pub name: String,
    /// [`Failed`](EventState::Failed): it waits for its retry. [`DeadLetter`](EventState::DeadLetter):
    /// it waits for a person.
    pub state: EventState,
    /// How many attempts were charged.
    pub attempts: u32,
    /// For how long: since its publish if it has failed, since its settlement if it is dead.
    pub blocked_for: Duration,
    /// Why it is dead, as it is stored. `None` while it is not.
    pub dead_reason: Option<String>,
    /// What went wrong last.
    pub last_error: String,
    /// How many unsettled events wait behind it, counted up to [`BLOCKED_COUNT_MAX`].
    pub waiting: u32,
}

impl BlockedKey {
    /// A key blocked by `head`, with nothing known about it yet; the fields are public.
    #[must_use]
    pub fn new(ordering_key: String, head: EventId, name: String, state: EventState) -> Self {
        Self {
            ordering_key,
            head,
            name,
            state,
            attempts: 0,
            blocked_for: Duration::ZERO,
            dead_reason: None,
            last_error: String::new(),
            waiting: 0,
        }
    }
}

/// Up to how many events behind a blocked key are counted.
pub const BLOCKED_COUNT_MAX: u32 = 1_000;

/// What has become of an event.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum EventState {
    /// Waiting to be handled: due, or not due yet. Also an event whose lease has expired.
    Pending,
    /// Held under a lease that has not ended.
    InProgress,
    /// Its last attempt failed and it waits for its retry.
    Failed,
    /// A handler succeeded.
    Processed,
    /// Nobody will try again unless a person asks.
    DeadLetter,
    /// A person, or a policy that the application switched on, decided that nobody will.
    Discarded,
    /// The application has taken it back before it was settled.
    Cancelled,
}

impl EventState {
    /// The word that the view for people shows: `pending`, `in_progress`, `failed`, `processed`,
    /// `dead_letter`, `discarded`, `cancelled`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::InProgress => "in_progress",
            Self::Failed => "failed",
            Self::Processed => "processed",
            Self::DeadLetter => "dead_letter",
            Self::Discarded => "discarded",
            Self::Cancelled => "cancelled",
        }
    }

    /// The state that [`as_str`](Self::as_str) writes as `text`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [
            Self::Pending,
            Self::InProgress,
            Self::Failed,
            Self::Processed,
            Self::DeadLetter,
            Self::Discarded,
            Self::Cancelled,
        ]
        .into_iter()
        .find(|state| state.as_str() == text)
    }
}

impl fmt::Display for EventState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What to claim.
#[derive(Clone, Debug)]
pub struct ClaimRequest<'a> {
    /// The most rows to take.
    pub limit: NonZeroU32,
    /// How many of them are for due retries and delays first, whatever else is due, while there
    /// are any. At most the limit.
    pub reserved: u32,
    /// How long the leases last.
    pub lease: Duration,
    /// The token of this claim.
    pub token: LeaseToken,
    /// Who claims: visible in the row.
    pub instance: &'a str,
    /// What this process has handlers for.
    pub events: &'a [KnownEvent],
    /// Where to begin looking.
    pub low_water: LowWater,
    /// Rows that were [next in order](Store::next_in_order) lately, and may be below the marks.
    pub freed: &'a [i64],
}

/// Rows that this process has a handler for. Former names have one of their own.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct KnownEvent {
    /// The event name.
    pub name: &'static str,
    /// The handler that the rows belong to. `None`: rows that belong to all handlers of their event,
    /// as they do until they are [split](Store::split).
    pub handler: Option<&'static str>,
    /// The newest version this process reads. It reads every earlier one, too, or knows that it
    /// never will.
    pub newest_version: NonZeroU32,
}

/// Whether `events` has this name with this handler, and reads this version of it.
#[must_use]
pub fn is_known(
    events: &[KnownEvent],
    name: &str,
    version: NonZeroU32,
    handler: Option<&str>,
) -> bool {
    events.iter().any(|event| {
        event.name == name && event.handler == handler && version <= event.newest_version
    })
}

/// A row to be split.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Split {
    /// The row, and the token that must still be in it.
    pub lease: HeldLease,
    /// At least one.
    pub parts: Vec<SplitPart>,
}

/// One handler's part of a row.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SplitPart {
    /// The handler's name.
    pub handler: &'static str,
    /// After how many attempts the part becomes a dead letter. `None`: as the row. Never less than
    /// what has been charged already.
    pub max_attempts: Option<NonZeroU32>,
    /// Whether this process runs it now.
    pub held: bool,
}

/// The row of one part.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SplitRow {
    /// Its number.
    pub row: i64,
    /// After how many attempts it becomes a dead letter.
    pub max_attempts: NonZeroU32,
    /// Whether it is held under the token of the row it was split from.
    pub held: bool,
}

/// What is paused, or is to be.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PauseRef {
    /// The event name.
    pub name: String,
    /// One of its handlers. `None`: the event, with all of them.
    pub handler: Option<String>,
}

/// An event or a handler that is paused, on all instances: its rows wait.
///
/// A row is paused if its event is, or if it belongs to a handler that is. A row that belongs to all
/// handlers of its event is not paused by the pause of one of them: it is split, and the part of that
/// one waits.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Pause {
    /// What is paused.
    pub of: PauseRef,
    /// Since when.
    pub since: SystemTime,
}

/// Per priority level, a lower bound for the row numbers a claim looks at.
///
/// A hint that keeps a claim from walking over everything that was settled, leased or put off
/// since the database was last vacuumed. It bounds only rows that are due at once, never retries
/// and delays. Correctness does not depend on it: once a second, and whenever a claim finds
/// nothing, the relay looks from the beginning, because a lower number may commit later and a
/// lease may end.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LowWater([i64; 4]);

impl LowWater {
    /// Looks at everything.
    pub const BEGINNING: Self = Self([0; 4]);

    /// The smallest number to look at among rows of `priority`.
    #[must_use]
    pub fn of(&self, priority: Priority) -> i64 {
        self.0[slot(priority)]
    }

    /// Raises the bound of `priority` to `row`, unless it is higher already.
    pub fn raise(&mut self, priority: Priority, row: i64) {
        let bound = &mut self.0[slot(priority)];
        *bound = std::cmp::max(*bound, row);
    }
}

fn slot(priority: Priority) -> usize {
    match priority {
        Priority::Low => 0,
        Priority::Normal => 1,
        Priority::High => 2,
        Priority::Critical => 3,
    }
}

/// A row that this process holds under a lease.
#[derive(Clone, Debug)]
pub struct Claimed {
    /// Its id, stable over every redelivery.
    pub id: EventId,
    /// The token under which it is held.
    pub token: LeaseToken,
    /// The event type's stable name.
    pub name: String,
    /// The handler that the row belongs to. `None`: to all of its event.
    pub handler: Option<String>,
    /// The number of the row that it was split from.
    pub origin: Option<i64>,
    /// The version of the payload's shape.
    pub version: NonZeroU32,
    /// JSON text.
    pub payload: String,
    /// A JSON object of strings, or nothing.
    pub headers: Option<String>,
    /// The key whose next event waits for this one, in its stored form.
    pub ordering_key: Option<String>,
    /// Its priority, and with it the low-water mark it raises.
    pub priority: Priority,
    /// Whether it waited for a due time (a retry or a delay) before this claim.
    pub waited: bool,
    /// Which attempt this claim is.
    pub attempt: NonZeroU32,
    /// After how many attempts it becomes a dead letter.
    pub max_attempts: NonZeroU32,
    /// When it was published.
    pub created_at: SystemTime,
    /// It is not worth handling any more.
    pub expired: bool,
    /// How many of the last two attempts before this one ended with their lease and without an
    /// outcome: those directly before it, and only in a row.
    pub lapsed: u32,
}

impl Claimed {
    /// The row and its token.
    #[must_use]
    pub fn lease(&self) -> HeldLease {
        HeldLease {
            row: self.id.row(),
            token: self.token,
        }
    }
}

/// A lease that was found in its row.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Verified {
    /// The row and token asked for.
    pub lease: HeldLease,
    /// The event's id.
    pub id: EventId,
    /// When it was published.
    pub created_at: SystemTime,
    /// How much of the lease is left, by the database's clock. Zero when it has expired and nobody
    /// has claimed the row since.
    pub remaining: Duration,
    /// It is not worth handling any more.
    pub expired: bool,
    /// It must not be started now: it is [blocked](blocks_later) by an earlier one of its ordering
    /// key, or [paused](Pause).
    pub blocked: bool,
}

/// What became of one lease of a renewal.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Renewal {
    /// It was extended.
    Renewed,
    /// The row is gone, or held under another token.
    Lost,
    /// The row is locked, so nobody can tell.
    Unknown,
}

/// An outcome to record.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Settlement {
    /// The row, and the token that must still be in it.
    pub lease: HeldLease,
    /// What to record.
    pub outcome: Outcome,
}

/// What became of one write under a lease token.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Settled {
    /// It was recorded.
    Recorded,
    /// The row no longer has that token: nothing was changed.
    LeaseLost,
}

/// The pass that a chunk belongs to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Pass {
    /// Whose lock the chunk takes.
    pub cadence: Cadence,
    /// How long a statement of the chunk may take, if that is shorter than the store's own
    /// deadline.
    pub statement_limit: Duration,
}

/// What a step of upkeep did.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Upkeep {
    /// A partition was made or dropped; there may be more to do.
    Changed,
    /// There is nothing to do.
    Done,
}

/// Which chunk to sweep.
#[derive(Clone, Debug)]
pub struct SweepRequest<'a> {
    /// Look at rows with a higher number than this. 0 for the first chunk.
    pub after: i64,
    /// How many rows to look at.
    pub scan: NonZeroU32,
    /// The lease of what is claimed, until it is settled as dead.
    pub lease: Duration,
    /// The token of this claim.
    pub token: LeaseToken,
    /// Who sweeps.
    pub instance: &'a str,
    /// What this process has handlers for.
    pub events: &'a [KnownEvent],
}

/// What one chunk of a sweep found.
#[derive(Clone, Debug, Default)]
pub struct SweepChunk {
    /// Rows whose lease had expired with no attempt left, now held under the sweep's token.
    pub exhausted: Vec<Exhausted>,
    /// The rows that this process does not know, by name, handler and version.
    pub unhandled: Vec<Unhandled>,
    /// How many leases were cut that ended later than any lease can.
    pub cut_leases: u64,
    /// Where the next chunk begins. `None` after the last.
    pub next: Option<i64>,
}

/// Rows that a sweep left alone because this process has no handler for them.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Unhandled {
    /// Their event name.
    pub name: String,
    /// The handler that they belong to, if it is one.
    pub handler: Option<String>,
    /// The version of their payloads.
    pub version: NonZeroU32,
    /// How many there are.
    pub rows: u64,
}

/// A row with no attempt left, held until it is settled as dead. Without its payload: no handler
/// runs, and a chunk of large ones would fill memory with what nobody reads.
#[derive(Clone, Debug)]
pub struct Exhausted {
    /// Its id.
    pub id: EventId,
    /// The token of the sweep.
    pub token: LeaseToken,
    /// The event type's stable name.
    pub name: String,
    /// The handler that the row belongs to, if it is one.
    pub handler: Option<String>,
    /// The number of the row that it was split from.
    pub origin: Option<i64>,
    /// Which attempt was its last.
    pub attempt: NonZeroU32,
    /// After how many attempts it becomes a dead letter.
    pub max_attempts: NonZeroU32,
}

impl Exhausted {
    /// The row and its token.
    #[must_use]
    pub fn lease(&self) -> HeldLease {
        HeldLease {
            row: self.id.row(),
            token: self.token,
        }
    }
}

/// Everything the outbox knows about one event, wherever it is kept.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct EventRecord {
    /// Its id.
    pub id: EventId,
    /// The event type's stable name.
    pub name: String,
    /// The handler that the row belongs to, if it was split among several.
    pub handler: Option<String>,
    /// The id of the event that it was split from, if that is another row.
    pub origin: Option<EventId>,
    /// The version of the payload's shape.
    pub version: NonZeroU32,
    /// JSON text.
    pub payload: String,
    /// A JSON object of strings, or nothing.
    pub headers: Option<String>,
    /// The publisher's key, in its stored form.
    pub dedup_key: Option<String>,
    /// The ordering key, in its stored form.
    pub ordering_key: Option<String>,
    /// Its priority.
    pub priority: Priority,
    /// What has become of it.
    pub state: EventState,
    /// How many attempts were charged.
    pub attempts: u32,
    /// After how many it becomes a dead letter.
    pub max_attempts: NonZeroU32,
    /// The token in the row, whether its lease has ended or not.
    pub lease_token: Option<LeaseToken>,
    /// The instance that holds it, or held it last once it is settled.
    pub claimed_by: Option<String>,
    /// When it is due, if it waits for a retry or a delay.
    pub due_at: Option<SystemTime>,
    /// Until when it is worth handling, while it is not settled.
    pub expires_at: Option<SystemTime>,
    /// When it was published.
    pub created_at: SystemTime,
    /// When it was settled.
    pub settled_at: Option<SystemTime>,
    /// What went wrong last.
    pub last_error: Option<String>,
    /// Why it is a dead letter.
    pub dead_reason: Option<DeadReason>,
    /// What its handler returned, as JSON.
    pub output: Option<String>,
    /// Its last failed attempts, oldest first, at most [`ATTEMPTS_KEPT`].
    pub failures: Vec<Failure>,
}

impl EventRecord {
    /// A record with what every event has; the rest is empty and its fields are public.
    #[must_use]
    pub fn new(
        id: EventId,
        name: String,
        version: NonZeroU32,
        payload: String,
        state: EventState,
        max_attempts: NonZeroU32,
        created_at: SystemTime,
    ) -> Self {
        Self {
            id,
            name,
            handler: None,
            origin: None,
            version,
            payload,
            headers: None,
            dedup_key: None,
            ordering_key: None,
            priority: Priority::Normal,
            state,
            attempts: 0,
            max_attempts,
            lease_token: None,
            claimed_by: None,
            due_at: None,
            expires_at: None,
            created_at,
            settled_at: None,
            last_error: None,
            dead_reason: None,
            output: None,
            failures: Vec::new(),
        }
    }
}

/// How many failed attempts a row keeps.
pub const ATTEMPTS_KEPT: usize = 10;

/// One failed attempt.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Failure {
    /// Which attempt.
    pub attempt: u32,
    /// When it was recorded.
    pub at: SystemTime,
    /// The instance that held the lease.
    pub instance: String,
    /// What went wrong. For a lease that ended without an outcome, [`LEASE_ENDED`].
    pub error: String,
}

/// The error text of an attempt whose lease ended without an outcome.
///
/// Recorded by the claim that takes the row over.
pub const LEASE_ENDED: &str = "the lease ended without an outcome";

/// Why a store could not do what it was asked.
///
/// Its text says what was being done; the database's own error is its
/// [`source`](std::error::Error::source).
pub struct StoreError {
    kind: StoreErrorKind,
    doing: Cow<'static, str>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// What a program can branch on.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The database could not be reached, closed the connection, or is starting or stopping.
    Unreachable,
    /// The database did not answer within the deadline. What was asked may or may not have been
    /// done.
    TimedOut,
    /// A lock on a row was not had in time. Nothing was done.
    Locked,
    /// A deadlock or a serialization failure: the transaction has to be run again.
    Conflict,
    /// A value was refused: what the row carries is at fault, not the database.
    Data,
    /// The outbox is not installed in this schema.
    SchemaMissing,
    /// The schema is of an earlier release: run `migrate()`.
    SchemaOlder,
    /// The schema is of a later release than this program.
    SchemaNewer,
    /// The role lacks a right, or row-level security hides rows from it.
    Denied,
    /// A setting of the store itself is not valid: a name, for instance.
    Config,
    /// Anything else.
    Other,
}

impl StoreError {
    /// An error met while `doing` something: ``claim events``, lower case.
    #[must_use]
    pub fn new(kind: StoreErrorKind, doing: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind,
            doing: doing.into(),
            source: None,
        }
    }

    /// Adds the error it came from.
    #[must_use]
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.source = Some(source.into());
        self
    }

    /// What a program can branch on.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Whether the same call may succeed later: the transaction, or the whole statement where
    /// there is none, has to be run again.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(
            self.kind,
            StoreErrorKind::Unreachable
                | StoreErrorKind::TimedOut
                | StoreErrorKind::Locked
                | StoreErrorKind::Conflict
        )
    }
}

impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreError")
            .field("kind", &self.kind)
            .field("doing", &self.doing)
            .field("source", &self.source)
            .finish()
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            StoreErrorKind::Config => return write!(f, "invalid store setting: {}", self.doing),
            StoreErrorKind::Unreachable => f.write_str("database unreachable")?,
            StoreErrorKind::TimedOut => f.write_str("no answer from the database in time")?,
            StoreErrorKind::Locked => f.write_str("a row was locked for too long")?,
            StoreErrorKind::Conflict => f.write_str("transaction conflict")?,
            StoreErrorKind::Data => f.write_str("a value was refused by the database")?,
            StoreErrorKind::SchemaMissing => {
                f.write_str("the outbox is not installed: run `migrate()`")?;
            }
            StoreErrorKind::SchemaOlder => {
                f.write_str("the outbox schema is older than this program: run `migrate()`")?;
            }
            StoreErrorKind::SchemaNewer => {
                f.write_str("the outbox schema is newer than this program: use a later release")?;
            }
            StoreErrorKind::Denied => f.write_str("not permitted by the database")?,
            StoreErrorKind::Other => f.write_str("the store failed")?,
        }
        write!(f, " (while trying to {})", self.doing)
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

/// Turns an error into a text that can be stored. Here, so that stores need not know the rules.
impl From<&StoreError> for ErrorText {
    fn from(error: &StoreError) -> Self {
        Self::of_chain(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &'static str, key: Option<&str>) -> NewEvent {
        NewEvent {
            name,
            version: NonZeroU32::MIN,
            payload: "{}".to_owned(),
            headers: None,
            dedup_key: key.map(str::to_owned),
            fingerprint: None,
            ordering_key: None,
            behind_dead: BehindDead::Block,
            priority: Priority::Normal,
            max_attempts: NonZeroU32::MIN,
            delay: Duration::ZERO,
            expires_in: None,
            retention: Duration::ZERO,
            key_retention: Duration::ZERO,
            lease: None,
        }
    }

    #[test]
    fn the_first_of_equal_keys_in_a_batch_is_the_one_inserted() {
        let events = [
            event("a", Some("k")),
            event("b", Some("k")),
            event("a", None),
            event("a", Some("k")),
            event("a", None),
            event("a", Some("k")),
        ];
        assert_eq!(
            earlier_in_batch(&events),
            [None, None, None, Some(0), None, Some(0)]
        );
    }

    #[test]
    fn a_low_water_mark_only_rises() {
        let mut mark = LowWater::BEGINNING;
        mark.raise(Priority::High, 9);
        mark.raise(Priority::High, 4);
        assert_eq!(mark.of(Priority::High), 9);
        assert_eq!(mark.of(Priority::Normal), 0);
    }
}
