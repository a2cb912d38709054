//! A store in memory, which keeps every promise of [`Store`] but one: it forgets.

mod claim;
mod connection;
mod database;
mod dead_letter;
mod exclusive;
mod faults;
mod order;
mod settle;
mod split;
#[cfg(test)]
mod tests;
mod wakeups;

use std::collections::BTreeSet;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;
use uuid::Uuid;

use crate::cadence::Cadence;
use crate::dead_letter::{
    DeadLetterChange, DeadLetterChunk, DeadLetterRows, DeadLetterScan, DeadLettersChanged,
};
use crate::lease::HeldLease;
use crate::lock::LockId;
use crate::stats::StoreStats;
use crate::store::{
    BlockedKey, ClaimRequest, Claimed, EventRecord, EventRef, Existing, Insertion, NewEvent, Part,
    Pass, Pause, PauseRef, Renewal, Settled, Settlement, Split, SplitRow, Store, StoreError,
    StoreErrorKind, SweepChunk, SweepRequest, Upkeep, Verified, Watched,
};

pub use connection::{MemoryConnection, MemoryTx, Savepoint};
pub use exclusive::MemoryExclusive;
pub use faults::{Hold, Operation};
pub use wakeups::MemoryWakeups;

use connection::MemoryPart;
use database::{Committed, Database};
use exclusive::Holders;
use faults::Faults;
use wakeups::Bell;

/// A [`Store`] in memory, for tests of an application and of the framework.
///
/// Clones share one database, as the processes of an application do. It is gone with the last
/// clone.
///
/// There is one writing transaction at a time: [`begin`](Store::begin) waits for the end of the
/// one before, as SQLite's `BEGIN IMMEDIATE` does, and gives up after 30 seconds. Everything else
/// sees what was committed and waits for nobody.
///
/// # Time is Tokio's
///
/// Leases, delays, backoffs and retention follow [`tokio::time::Instant`], and
/// [`advance`](Self::advance) moves them on by themselves. Paused time is that of one runtime: for
/// `tokio::time::advance` to move them, the outbox has to be built with
/// [`on_current_runtime`](crate::OutboxBuilder::on_current_runtime), or its background, on a thread of
/// its own, goes by a clock that was not paused. The times in the rows count from a fixed day and
/// never from the wall clock. [`expire_lease`](Self::expire_lease), [`make_due`](Self::make_due) and
/// [`expire_retention`](Self::expire_retention) move a single row without moving the clock.
///
/// # What can be made to fail
///
/// [`fail_next`](Self::fail_next), [`lose_answers`](Self::lose_answers),
/// [`unreachable`](Self::unreachable), [`hold`](Self::hold), [`lock_row`](Self::lock_row) and the
/// two `refuse_..` methods are what databases and networks do.
/// [`calls`](Self::calls) and [`wait_for_calls`](Self::wait_for_calls) tell what was asked.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    base: Instant,
    /// How far ahead of Tokio's clock the database's is.
    ahead: Mutex<Duration>,
    writer: Arc<tokio::sync::Mutex<()>>,
    database: Mutex<Database>,
    faults: Faults,
    bell: Bell,
    exclusive: Arc<Holders>,
    /// The cadences whose lock another instance has.
    passes: Mutex<BTreeSet<Cadence>>,
}

impl MemoryStore {
    /// Creates an empty database.
    #[must_use]
    pub fn new() -> Self {
        Self {
            shared: Arc::new(Shared {
                base: Instant::now(),
                ahead: Mutex::default(),
                writer: Arc::default(),
                database: Mutex::new(Database::new(Uuid::new_v4())),
                faults: Faults::default(),
                bell: Bell::default(),
                exclusive: Arc::default(),
                passes: Mutex::default(),
            }),
        }
    }

    /// The UUID that every [`EventId`](crate::EventId) of this database carries.
    #[must_use]
    pub fn installation(&self) -> Uuid {
        self.shared.database().installation
    }

    /// Every committed event, settled or not, by number. An event that was processed with a
    /// retention of zero is not among them.
    #[must_use]
    pub fn records(&self) -> Vec<EventRecord> {
        let now = self.shared.now();
        let database = self.shared.database();
        database.rows.values().map(|row| row.record(now)).collect()
    }

    /// The time of the database.
    #[must_use]
    pub fn now(&self) -> SystemTime {
        self.shared.now()
    }

    /// Moves the clock of the database on, and Tokio's not: leases end, and what waits for a retry or
    /// a delay is due.
    ///
    /// For a test in which nothing runs meanwhile. A process measures its own leases by Tokio's clock,
    /// so to one that holds an event this is what a database whose clock jumps is: its lease may end
    /// before it expects that. Another outbox can then claim the event, and the result of the first run
    /// is refused; if nobody has, it still counts. Under paused time, and with
    /// [`on_current_runtime`](crate::OutboxBuilder::on_current_runtime), `tokio::time::advance` moves
    /// both clocks.
    pub fn advance(&self, by: Duration) {
        *lock(&self.shared.ahead) += by;
    }

    /// Every event that was committed, in that order.
    pub(crate) fn log(&self) -> Vec<Committed> {
        self.shared.database().log.clone()
    }

    /// How many events were ever committed.
    pub(crate) fn committed(&self) -> usize {
        self.shared.database().log.len()
    }

    /// The events that are not settled, by number.
    pub(crate) fn unsettled(&self) -> Vec<EventRecord> {
        let now = self.shared.now();
        let database = self.shared.database();
        let rows = database.rows.values().filter(|row| row.is_unsettled());
        rows.map(|row| row.record(now)).collect()
    }

    /// Whether `instance` holds anything. Looked for from the latest row on, where it mostly is: this
    /// is asked after each call.
    pub(crate) fn is_holding(&self, instance: &str) -> bool {
        let now = self.shared.now();
        let database = self.shared.database();
        let mut rows = database.rows.values().rev();
        rows.any(|row| {
            row.columns.claimed_by.as_deref() == Some(instance)
                && row.is_unsettled()
                && row.is_leased(now)
        })
    }

    /// Looks after each call to the store until `condition` holds.
    pub(crate) async fn wait_until(&self, condition: impl Fn(&Self) -> bool) {
        self.shared.faults.after_each_call(|| condition(self)).await;
    }

    /// Ends the lease of `row` now, without anybody being told. Does nothing to a row that has
    /// none.
    pub fn expire_lease(&self, row: i64) {
        let now = self.shared.now();
        if let Some(row) = self.shared.database().rows.get_mut(&row) {
            row.lease_ends_at = row.lease_ends_at.map(|_| now);
        }
    }

    /// Makes a row due now that waits for a retry or a delay.
    pub fn make_due(&self, row: i64) {
        let now = self.shared.now();
        if let Some(row) = self.shared.database().rows.get_mut(&row) {
            row.columns.due_at = row.columns.due_at.map(|_| now);
        }
    }

    /// Ends the retention of a processed event and of its dedup key now. It takes a
    /// [`purge`](Store::purge) to remove them.
    pub fn expire_retention(&self, row: i64) {
        let now = self.shared.now();
        self.shared.database().expire_retention(row, now);
    }

    /// Makes the lease of `row` end in `remaining`, without anybody being told. Does nothing to a
    /// row that has none.
    pub fn set_lease(&self, row: i64, remaining: Duration) {
        let end = self.shared.now() + remaining;
        if let Some(row) = self.shared.database().rows.get_mut(&row) {
            row.lease_ends_at = row.lease_ends_at.map(|_| end);
        }
    }

    /// Ends the time in which an unsettled row is worth handling now. Does nothing to a row that was
    /// published without a deadline.
    pub fn expire(&self, row: i64) {
        let now = self.shared.now();
        if let Some(row) = self.shared.database().rows.get_mut(&row) {
            row.columns.expires_at = row.columns.expires_at.map(|_| now);
        }
    }

    /// Makes a dead letter older by `age`.
    pub fn age_dead_letter(&self, row: i64, age: Duration) {
        if let Some(row) = self.shared.database().rows.get_mut(&row) {
            row.columns.settled_at = row.columns.settled_at.map(|at| at - age);
        }
    }

    /// Takes the lock of a cadence, as another instance that is at its pass does.
    pub fn begin_pass_elsewhere(&self, cadence: Cadence) {
        lock(&self.shared.passes).insert(cadence);
    }

    /// Ends what [`begin_pass_elsewhere`](Self::begin_pass_elsewhere) began.
    pub fn end_pass_elsewhere(&self, cadence: Cadence) {
        lock(&self.shared.passes).remove(&cadence);
    }

    /// Ends the lock that an instance has by this name, as a lost connection does.
    pub fn break_exclusive(&self, name: &str) {
        self.shared.exclusive.break_lock(name);
    }

    /// Runs a chunk of a pass, unless another instance has the lock of its cadence.
    async fn run_in<T>(
        &self,
        operation: Operation,
        pass: Pass,
        chunk: impl FnOnce(&mut Database, SystemTime) -> T + Send,
    ) -> Result<Option<T>, StoreError> {
        self.run(operation, |database, now| {
            let elsewhere = lock(&self.shared.passes).contains(&pass.cadence);
            Ok((!elsewhere).then(|| chunk(database, now)))
        })
        .await
    }

    async fn run<T>(
        &self,
        operation: Operation,
        statement: impl FnOnce(&mut Database, SystemTime) -> Result<T, StoreError> + Send,
    ) -> Result<T, StoreError> {
        self.shared.faults.before(operation).await?;
        let answer = statement(&mut self.shared.database(), self.shared.now());
        self.shared.faults.after(operation)?;
        answer
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl Shared {
    fn now(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + FIRST_DAY + self.base.elapsed() + *lock(&self.ahead)
    }

    fn database(&self) -> MutexGuard<'_, Database> {
        lock(&self.database)
    }
}

impl Store for MemoryStore {
    type Connection = MemoryConnection;
    type Tx<'t> = MemoryTx<'t>;
    type Wakeups = MemoryWakeups;
    type Exclusive = MemoryExclusive;

    async fn begin(&self) -> Result<MemoryTx<'static>, StoreError> {
        self.shared.faults.before(Operation::Begin).await?;
        let waiting = Arc::clone(&self.shared.writer).lock_owned();
        let writer = tokio::time::timeout(BEGIN_DEADLINE, waiting).await;
        self.shared.faults.after(Operation::Begin)?;
        let writer = writer.map_err(|_| Operation::Begin.error(StoreErrorKind::TimedOut))?;
        Ok(MemoryTx::new(writer))
    }

    async fn commit(&self, tx: MemoryTx<'static>) -> Result<(), StoreError> {
        self.run(Operation::Commit, |database, now| {
            tx.apply(database, now);
            Ok(())
        })
        .await
    }

    async fn rollback(&self, tx: MemoryTx<'static>) -> Result<(), StoreError> {
        self.run(Operation::Rollback, |_, _| {
            drop(tx);
            Ok(())
        })
        .await
    }

    async fn begin_part<'c>(
        &self,
        connection: &'c mut MemoryConnection,
    ) -> Result<Box<dyn Part<MemoryConnection> + 'c>, StoreError> {
        self.run(Operation::BeginPart, |_, _| {
            let part: Box<dyn Part<MemoryConnection> + 'c> =
                Box::new(MemoryPart::begin(connection));
            Ok(part)
        })
        .await
    }

    async fn insert(
        &self,
        connection: &mut MemoryConnection,
        events: &[NewEvent],
    ) -> Result<Vec<Insertion>, StoreError> {
        self.run(Operation::Insert, |database, now| {
            Ok(connection.insert(database, events, now))
        })
        .await
    }

    async fn settle_through(
        &self,
        connection: &mut MemoryConnection,
        settlements: &[Settlement],
    ) -> Result<Vec<Settled>, StoreError> {
        self.run(Operation::SettleThrough, |database, now| {
            if self.shared.faults.refuses(settlements) {
                return Err(Operation::SettleThrough.error(StoreErrorKind::Data));
            }
            Ok(connection.settle(database, settlements, now))
        })
        .await
    }

    /// There is one writing transaction at a time, so whoever has one has every key.
    async fn lock_ordering_key(
        &self,
        connection: &mut MemoryConnection,
        key: &str,
    ) -> Result<bool, StoreError> {
        self.run(Operation::LockOrderingKey, |database, _| {
            Ok(connection.is_first(database, key))
        })
        .await
    }

    async fn cancel(
        &self,
        connection: &mut MemoryConnection,
        event: &EventRef,
    ) -> Result<Option<Existing>, StoreError> {
        self.run(Operation::Cancel, |database, now| {
            Ok(connection.cancel(database, event, now))
        })
        .await
    }

    /// There is one writing transaction at a time, so whoever has one has every lock.
    async fn lock_entity(
        &self,
        _connection: &mut MemoryConnection,
        _namespace: i32,
        _id: LockId,
    ) -> Result<(), StoreError> {
        self.run(Operation::LockEntity, |_, _| Ok(())).await
    }

    async fn check(&self) -> Result<(), StoreError> {
        self.run(Operation::Check, |_, _| Ok(())).await
    }

    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<Vec<Claimed>, StoreError> {
        self.run(Operation::Claim, |database, now| {
            Ok(database.claim(request, now))
        })
        .await
    }

    async fn claim_in(
        &self,
        pass: Pass,
        request: &ClaimRequest<'_>,
    ) -> Result<Option<Vec<Claimed>>, StoreError> {
        self.run_in(Operation::ClaimIn, pass, |database, now| {
            database.claim(request, now)
        })
        .await
    }

    async fn claim_rows(
        &self,
        rows: &[i64],
        request: &ClaimRequest<'_>,
    ) -> Result<Vec<Claimed>, StoreError> {
        self.run(Operation::ClaimRows, |database, now| {
            Ok(database.claim_rows(rows, request, now))
        })
        .await
    }

    async fn verify(&self, leases: &[HeldLease]) -> Result<Vec<Verified>, StoreError> {
        self.run(Operation::Verify, |database, now| {
            Ok(database.verify(leases, now))
        })
        .await
    }

    async fn renew(
        &self,
        leases: &[HeldLease],
        lease: Duration,
    ) -> Result<Vec<Renewal>, StoreError> {
        self.run(Operation::Renew, |database, now| {
            Ok(database.renew(leases, now + lease))
        })
        .await
    }

    async fn split(&self, splits: &[Split]) -> Result<Vec<Option<Vec<SplitRow>>>, StoreError> {
        self.run(Operation::Split, |database, _| {
            if database.is_locked(splits.iter().map(|split| split.lease)) {
                return Err(Operation::Split.error(StoreErrorKind::Locked));
            }
            Ok(database.split(splits))
        })
        .await
    }

    async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>, StoreError> {
        self.run(Operation::Settle, |database, now| {
            if self.shared.faults.refuses(settlements) {
                return Err(Operation::Settle.error(StoreErrorKind::Data));
            }
            if database.is_locked(settlements.iter().map(|settlement| settlement.lease)) {
                return Err(Operation::Settle.error(StoreErrorKind::Locked));
            }
            Ok(database.settle(settlements, now))
        })
        .await
    }

    async fn release(&self, leases: &[HeldLease]) -> Result<Vec<Settled>, StoreError> {
        self.run(Operation::Release, |database, _| {
            if database.is_locked(leases.iter().copied()) {
                return Err(Operation::Release.error(StoreErrorKind::Locked));
            }
            Ok(database.release(leases))
        })
        .await
    }

    async fn sweep(
        &self,
        pass: Pass,
        request: &SweepRequest<'_>,
    ) -> Result<Option<SweepChunk>, StoreError> {
        self.run_in(Operation::Sweep, pass, |database, now| {
            database.sweep(request, now)
        })
        .await
    }

    async fn purge(&self, pass: Pass, limit: NonZeroU32) -> Result<Option<u64>, StoreError> {
        self.run_in(Operation::Purge, pass, |database, now| {
            database.purge(limit, now)
        })
        .await
    }

    async fn upkeep(&self, pass: Pass, _ahead: Duration) -> Result<Option<Upkeep>, StoreError> {
        self.run_in(Operation::Upkeep, pass, |_, _| Upkeep::Done)
            .await
    }

    async fn dead_letters(&self, scan: &DeadLetterScan<'_>) -> Result<DeadLetterChunk, StoreError> {
        self.run(Operation::DeadLetters, |database, now| {
            Ok(database.dead_letters(scan, now))
        })
        .await
    }

    async fn change_dead_letters(
        &self,
        rows: DeadLetterRows<'_>,
        change: DeadLetterChange,
    ) -> Result<DeadLettersChanged, StoreError> {
        self.run(Operation::ChangeDeadLetters, |database, now| {
            Ok(database.change_dead_letters(rows, change, now))
        })
        .await
    }

    async fn set_paused(&self, pause: &PauseRef, paused: bool) -> Result<bool, StoreError> {
        self.run(Operation::SetPaused, |database, now| {
            Ok(database.set_paused(pause, paused, now))
        })
        .await
    }

    async fn paused(&self) -> Result<Vec<Pause>, StoreError> {
        self.run(Operation::Paused, |database, _| Ok(database.pauses()))
            .await
    }

    async fn stats(&self) -> Result<StoreStats, StoreError> {
        self.run(Operation::Stats, |database, now| Ok(database.stats(now)))
            .await
    }

    async fn try_exclusive(
        &self,
        name: &str,
        _instance: &str,
    ) -> Result<Option<MemoryExclusive>, StoreError> {
        self.run(Operation::TryExclusive, |_, _| {
            Ok(MemoryExclusive::take(self, name))
        })
        .await
    }

    async fn look_up(&self, events: &[Watched]) -> Result<Vec<Option<Existing>>, StoreError> {
        self.run(Operation::LookUp, |database, now| {
            let events = events.iter();
            Ok(events.map(|event| database.look_up(event, now)).collect())
        })
        .await
    }

    async fn blocked_keys(&self, limit: NonZeroU32) -> Result<Vec<BlockedKey>, StoreError> {
        self.run(Operation::BlockedKeys, |database, now| {
            Ok(database.blocked_keys(limit, now))
        })
        .await
    }

    async fn next_in_order(&self, keys: &[String]) -> Result<Vec<i64>, StoreError> {
        self.run(Operation::NextInOrder, |database, _| {
            let firsts = keys.iter().filter_map(|key| database.first_of(key));
            Ok(firsts.collect())
        })
        .await
    }

    async fn newest(&self) -> Result<i64, StoreError> {
        self.run(Operation::Newest, |database, _| Ok(database.newest()))
            .await
    }

    async fn find(&self, row: i64) -> Result<Option<EventRecord>, StoreError> {
        self.run(Operation::Find, |database, now| {
            Ok(database.rows.get(&row).map(|row| row.record(now)))
        })
        .await
    }

    async fn listen(&self) -> Result<Option<MemoryWakeups>, StoreError> {
        self.run(Operation::Listen, |_, _| Ok(self.shared.bell.subscribe()))
            .await
    }

    fn notify(&self) -> impl Future<Output = Result<(), StoreError>> + Send {
        self.run(Operation::Notify, |_, _| {
            self.shared.bell.ring();
            Ok(())
        })
    }
}

/// A test that panicked while it held a lock must not hide its panic behind a second one.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The first of January 2025.
const FIRST_DAY: Duration = Duration::from_secs(1_735_689_600);

const BEGIN_DEADLINE: Duration = Duration::from_secs(30);
