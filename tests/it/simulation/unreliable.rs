//! A process that may stop, freeze or lose its connection between any two steps, and its store.

use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use outbox_core::dead_letter::{
    DeadLetterChange, DeadLetterChunk, DeadLetterRows, DeadLetterScan, DeadLettersChanged,
};
use outbox_core::lease::HeldLease;
use outbox_core::lock::LockId;
use outbox_core::stats::StoreStats;
use outbox_core::store::{
    BlockedKey, ClaimRequest, Claimed, EventRecord, EventRef, Existing, Insertion, NewEvent, Part,
    Pass, Pause, PauseRef, Renewal, Settled, Settlement, Split, SplitRow, Store, StoreError,
    StoreErrorKind, SweepChunk, SweepRequest, Upkeep, Verified, Watched,
};
use outbox_core::testing::MemoryStore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The chances, in ten thousand, of what may happen at a step.
const STOPS: u32 = 60;
const FREEZES: u32 = 40;
const IS_SLOW: u32 = 400;
const FAILS: u32 = 300;

/// Longer than a lease, so that it can be lost.
const FREEZE_MAX: Duration = Duration::from_secs(25);
const SLOW_MAX: Duration = Duration::from_secs(4);

/// One process of the simulation.
#[derive(Clone)]
pub(crate) struct Process {
    inner: Arc<Inner>,
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stopped at {:?}", self.stopped_at())
    }
}

struct Inner {
    random: Mutex<fastrand::Rng>,
    state: Mutex<State>,
    stopped: CancellationToken,
}

#[derive(Debug, Default)]
struct State {
    calm: bool,
    leaves_at: Option<Instant>,
    stopped_at: Option<Instant>,
    frozen_until: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Connection {
    Works,
    /// What is asked does not arrive.
    FailsBefore,
    /// What is asked is done, and the answer does not arrive.
    FailsAfter,
}

impl Process {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            inner: Arc::new(Inner {
                random: Mutex::new(fastrand::Rng::with_seed(seed)),
                state: Mutex::default(),
                stopped: CancellationToken::new(),
            }),
        }
    }

    /// Nothing happens to it any more.
    pub(crate) fn calm_down(&self) {
        self.state().calm = true;
    }

    /// As a `kill -9` does: nothing of it goes on.
    pub(crate) fn stop(&self) {
        let mut state = self.state();
        if !self.inner.stopped.is_cancelled() {
            state.stopped_at = Some(Instant::now());
            self.inner.stopped.cancel();
        }
    }

    /// From here on it shuts down: what it has begun and not ended, it gives back.
    pub(crate) fn leave(&self) {
        self.state().leaves_at = Some(Instant::now());
    }

    pub(crate) fn leaves_at(&self) -> Option<Instant> {
        self.state().leaves_at
    }

    pub(crate) fn stopped(&self) -> &CancellationToken {
        &self.inner.stopped
    }

    pub(crate) fn stopped_at(&self) -> Option<Instant> {
        self.state().stopped_at
    }

    /// A place where the process may stop, freeze or be slow. Answers whether it goes on; one that has
    /// stopped does nothing after this but wait for ever.
    #[must_use]
    pub(crate) async fn step(&self) -> bool {
        self.misfortune();
        if self.happens(IS_SLOW) {
            let pause = self.below(SLOW_MAX);
            tokio::time::sleep(pause).await;
        }
        while let Some(until) = self.thaws_at() {
            tokio::time::sleep_until(until).await;
        }
        !self.inner.stopped.is_cancelled()
    }

    fn thaws_at(&self) -> Option<Instant> {
        self.state()
            .frozen_until
            .filter(|until| *until > Instant::now())
    }

    fn misfortune(&self) {
        if self.happens(STOPS) {
            self.stop();
        } else if self.happens(FREEZES) {
            let until = Instant::now() + self.below(FREEZE_MAX);
            self.state().frozen_until = Some(until);
        }
    }

    fn connection(&self) -> Connection {
        if !self.happens(FAILS) {
            Connection::Works
        } else if self.random().bool() {
            Connection::FailsBefore
        } else {
            Connection::FailsAfter
        }
    }

    fn happens(&self, in_ten_thousand: u32) -> bool {
        !self.state().calm && self.random().u32(0..10_000) < in_ten_thousand
    }

    fn below(&self, max: Duration) -> Duration {
        max.mul_f64(self.random().f64())
    }

    fn random(&self) -> MutexGuard<'_, fastrand::Rng> {
        self.inner.random.lock().unwrap()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap()
    }
}

/// The database that all processes share, as one of them reaches it.
#[derive(Clone, Debug)]
pub(crate) struct Unreliable {
    database: MemoryStore,
    process: Process,
}

impl Unreliable {
    pub(crate) fn new(database: &MemoryStore, process: &Process) -> Self {
        Self {
            database: database.clone(),
            process: process.clone(),
        }
    }

    async fn ask<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        if !self.process.step().await {
            // With what it has of a transaction, which the database rolls back.
            drop(call);
            return std::future::pending().await;
        }
        let connection = self.process.connection();
        if connection == Connection::FailsBefore {
            return Err(lost());
        }
        let answer = call.await;
        if !self.process.step().await {
            drop(answer);
            return std::future::pending().await;
        }
        if connection == Connection::FailsAfter {
            return Err(lost());
        }
        answer
    }
}

fn lost() -> StoreError {
    StoreError::new(StoreErrorKind::Unreachable, "ask over a lost connection")
}

impl Store for Unreliable {
    type Connection = <MemoryStore as Store>::Connection;
    type Tx<'t> = <MemoryStore as Store>::Tx<'t>;
    type Wakeups = <MemoryStore as Store>::Wakeups;
    type Exclusive = <MemoryStore as Store>::Exclusive;

    async fn begin(&self) -> Result<Self::Tx<'static>, StoreError> {
        self.ask(self.database.begin()).await
    }

    async fn commit(&self, tx: Self::Tx<'static>) -> Result<(), StoreError> {
        self.ask(self.database.commit(tx)).await
    }

    async fn rollback(&self, tx: Self::Tx<'static>) -> Result<(), StoreError> {
        self.ask(self.database.rollback(tx)).await
    }

    async fn begin_part<'c>(
        &self,
        connection: &'c mut Self::Connection,
    ) -> Result<Box<dyn Part<Self::Connection> + 'c>, StoreError> {
        self.ask(self.database.begin_part(connection)).await
    }

    async fn insert(
        &self,
        connection: &mut Self::Connection,
        events: &[NewEvent],
    ) -> Result<Vec<Insertion>, StoreError> {
        self.ask(self.database.insert(connection, events)).await
    }

    async fn settle_through(
        &self,
        connection: &mut Self::Connection,
        settlements: &[Settlement],
    ) -> Result<Vec<Settled>, StoreError> {
        self.ask(self.database.settle_through(connection, settlements))
            .await
    }

    async fn lock_ordering_key(
        &self,
        connection: &mut Self::Connection,
        key: &str,
    ) -> Result<bool, StoreError> {
        self.ask(self.database.lock_ordering_key(connection, key))
            .await
    }

    async fn cancel(
        &self,
        connection: &mut Self::Connection,
        event: &EventRef,
    ) -> Result<Option<Existing>, StoreError> {
        self.ask(self.database.cancel(connection, event)).await
    }

    async fn lock_entity(
        &self,
        connection: &mut Self::Connection,
        namespace: i32,
        id: LockId,
    ) -> Result<(), StoreError> {
        self.ask(self.database.lock_entity(connection, namespace, id))
            .await
    }

    async fn check(&self) -> Result<(), StoreError> {
        self.ask(self.database.check()).await
    }

    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<Vec<Claimed>, StoreError> {
        self.ask(self.database.claim(request)).await
    }

    async fn claim_in(
        &self,
        pass: Pass,
        request: &ClaimRequest<'_>,
    ) -> Result<Option<Vec<Claimed>>, StoreError> {
        self.ask(self.database.claim_in(pass, request)).await
    }

    async fn claim_rows(
        &self,
        rows: &[i64],
        request: &ClaimRequest<'_>,
    ) -> Result<Vec<Claimed>, StoreError> {
        self.ask(self.database.claim_rows(rows, request)).await
    }

    async fn verify(&self, leases: &[HeldLease]) -> Result<Vec<Verified>, StoreError> {
        self.ask(self.database.verify(leases)).await
    }

    async fn renew(
        &self,
        leases: &[HeldLease],
        lease: Duration,
    ) -> Result<Vec<Renewal>, StoreError> {
        self.ask(self.database.renew(leases, lease)).await
    }

    async fn split(&self, splits: &[Split]) -> Result<Vec<Option<Vec<SplitRow>>>, StoreError> {
        self.ask(self.database.split(splits)).await
    }

    async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>, StoreError> {
        self.ask(self.database.settle(settlements)).await
    }

    async fn release(&self, leases: &[HeldLease]) -> Result<Vec<Settled>, StoreError> {
        self.ask(self.database.release(leases)).await
    }

    async fn sweep(
        &self,
        pass: Pass,
        request: &SweepRequest<'_>,
    ) -> Result<Option<SweepChunk>, StoreError> {
        self.ask(self.database.sweep(pass, request)).await
    }

    async fn purge(&self, pass: Pass, limit: NonZeroU32) -> Result<Option<u64>, StoreError> {
        self.ask(self.database.purge(pass, limit)).await
    }

    async fn upkeep(&self, pass: Pass, ahead: Duration) -> Result<Option<Upkeep>, StoreError> {
        self.ask(self.database.upkeep(pass, ahead)).await
    }

    async fn dead_letters(&self, scan: &DeadLetterScan<'_>) -> Result<DeadLetterChunk, StoreError> {
        self.ask(self.database.dead_letters(scan)).await
    }

    async fn change_dead_letters(
        &self,
        rows: DeadLetterRows<'_>,
        change: DeadLetterChange,
    ) -> Result<DeadLettersChanged, StoreError> {
        self.ask(self.database.change_dead_letters(rows, change))
            .await
    }

    async fn set_paused(&self, pause: &PauseRef, paused: bool) -> Result<bool, StoreError> {
        self.ask(self.database.set_paused(pause, paused)).await
    }

    async fn paused(&self) -> Result<Vec<Pause>, StoreError> {
        self.ask(self.database.paused()).await
    }

    async fn stats(&self) -> Result<StoreStats, StoreError> {
        self.ask(self.database.stats()).await
    }

    async fn try_exclusive(
        &self,
        name: &str,
        instance: &str,
    ) -> Result<Option<Self::Exclusive>, StoreError> {
        self.ask(self.database.try_exclusive(name, instance)).await
    }

    async fn look_up(&self, events: &[Watched]) -> Result<Vec<Option<Existing>>, StoreError> {
        self.ask(self.database.look_up(events)).await
    }

    async fn blocked_keys(&self, limit: NonZeroU32) -> Result<Vec<BlockedKey>, StoreError> {
        self.ask(self.database.blocked_keys(limit)).await
    }

    async fn next_in_order(&self, keys: &[String]) -> Result<Vec<i64>, StoreError> {
        self.ask(self.database.next_in_order(keys)).await
    }

    async fn newest(&self) -> Result<i64, StoreError> {
        self.ask(self.database.newest()).await
    }

    async fn find(&self, row: i64) -> Result<Option<EventRecord>, StoreError> {
        self.ask(self.database.find(row)).await
    }

    async fn listen(&self) -> Result<Option<Self::Wakeups>, StoreError> {
        self.ask(self.database.listen()).await
    }

    async fn notify(&self) -> Result<(), StoreError> {
        self.ask(self.database.notify()).await
    }
}
