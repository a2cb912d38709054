//! The store on PostgreSQL, 14 or later.
//!
//! [`PgStore`] is built on the application's pool. It uses that pool for transactions of the
//! publisher and for migrations, and a small pool of its own for everything the relay asks, so that
//! handlers which hold every connection of the application cannot keep events from being settled.
//!
//! # Rights
//!
//! The role that migrates owns the tables. Others need `USAGE` on the schema and:
//!
//! | who | rights |
//! | --- | --- |
//! | publisher | `INSERT`, `SELECT` on the table and on `_keys`; `USAGE` on `_id_seq`; `SELECT` on `_installation` |
//! | relay | the above, and `UPDATE`, `DELETE` on the table and on `_keys`; `SELECT`, `INSERT`, `UPDATE`, `DELETE` on `_history`; `SELECT`, `INSERT` on `_dead`; `SELECT` on `_all` and `_schema` |
//! | maintenance | the relay's, and `EXECUTE` on the function `_upkeep(interval)` |
//! | operator, who requeues, discards and purges dead letters | `SELECT`, `UPDATE`, `DELETE` on `_dead`; `INSERT` on the table and on `_history`; `SELECT`, `INSERT`, `UPDATE` on `_keys`; `SELECT` on `_all` and `_installation` |
//! | reader | `SELECT` on `_all`; for `stats()`, on the table and on `_dead` |
//!
//! `_upkeep` makes and drops the partitions of `_history` with the rights of the role that migrated,
//! which is why nobody else may run it until it is granted. A relay whose role may not goes on
//! without: rows then collect in `_history_default`, from which each pass removes what is past its
//! retention. While that has more than 32 MiB, no partition is made, because attaching one reads it
//! from end to end.
//!
//! Row-level security must not apply to them: it hides rows without an error, and a queue whose
//! rows are hidden looks empty. [`Store::check`] finds that out.
//!
//! # Connections
//!
//! Count them all in `max_connections`: per process those of the application's pool, the store's
//! own ([`connections`](PgStoreBuilder::connections), 4), one that listens for wake-ups, and one
//! for each exclusive lock while it is had.
//!
//! # Advisory locks
//!
//! The library takes advisory locks of two numbers. Their namespaces are
//! [`RESERVED_NAMESPACES`](outbox_core::lock::RESERVED_NAMESPACES):
//!
//! | for | first number | second number |
//! | --- | --- | --- |
//! | a chunk of a pass | `0x6f75....`, of schema and table | 1 sweep, 2 backstop, 3 maintenance |
//! | a migration | `0x6f757462` | of the schema |
//! | an exclusive lock | `0x6f76....`, of schema, table and the lock's name | of the same |

use std::borrow::Cow;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
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
use sqlx::postgres::{PgPoolOptions, PgRow};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool, Postgres, Row, Transaction};
use tokio::time::{Instant, timeout_at};
use uuid::Uuid;

pub use self::builder::PgStoreBuilder;
use self::catalogue::Catalogue;
pub use self::exclusive::PgExclusive;
use self::names::Names;
use self::query::{PgUuid, Query};
use self::session::{Own, session, settings};
use self::sqlstate::{failed, leaves_connection_usable};
pub use self::wakeup::PgWakeups;

mod cancel;
mod insert;
mod order;

mod claim;
mod renew;
mod settle;
mod split;

mod partition;
mod pass;
mod purge;
mod sweep;

mod dead_letter;
mod find;
mod pause;
mod stats;

mod exclusive;
mod lock;
mod part;
mod wakeup;

mod check;
mod migrate;

mod builder;
mod catalogue;
mod names;
mod query;
mod row;
mod session;
mod sqlstate;

/// Keeps the rows of an outbox in PostgreSQL.
///
/// Cheap to clone; clones share their connections. It can be made outside of a runtime and
/// connects when it is first used. Its own connections belong to the runtime they were opened on;
/// used on another one, it opens others and lets the first go.
///
/// ```no_run
/// use outbox_sqlx::PgStore;
/// use sqlx::PgPool;
///
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let pool = PgPool::connect("postgres://localhost/shop").await?;
/// let store = PgStore::new(pool);
/// store.migrate().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct PgStore {
    inner: Arc<Inner>,
}

struct Inner {
    pool: PgPool,
    own: Mutex<Option<(tokio::runtime::Id, PgPool)>>,
    connections: NonZeroU32,
    deadline: Duration,
    pooler: bool,
    names: Names,
    sql: Catalogue,
    installation: RwLock<Option<Uuid>>,
}

impl PgStore {
    /// The outbox in the table `outbox_events` of the schema `outbox`, with all defaults.
    ///
    /// Connects to nothing yet.
    #[must_use]
    #[expect(
        clippy::missing_panics_doc,
        reason = "the default names are valid, as a test shows"
    )]
    pub fn new(pool: PgPool) -> Self {
        Self::builder(pool)
            .build()
            .expect("the default names are valid")
    }

    /// Starts a store with settings of its own.
    pub fn builder(pool: PgPool) -> PgStoreBuilder {
        PgStoreBuilder::new(pool)
    }

    /// Creates the outbox's schema and tables, or brings them up to this release.
    ///
    /// May be run at every start and by any number of processes at once: it takes a lock that ends
    /// with its transaction, and does nothing where there is nothing to do. All of it happens or
    /// none. Uses the application's connections; the role needs the right to create the tables, and
    /// the schema if that does not exist. Waits up to a minute for another process that migrates.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::SchemaNewer`] if a later release has migrated already, and whatever the
    /// database reports.
    ///
    /// # Cancel safety
    ///
    /// Runs in a task of its own and is finished there if the future is dropped.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        let store = self.clone();
        in_task("migrate", async move { migrate::migrate(&store).await }).await
    }

    /// The SQL that [`migrate`](Self::migrate) runs on a database without an outbox, for
    /// applications that keep their migrations elsewhere.
    ///
    /// To be run once, in one transaction. Later releases print what they add as well, under a
    /// heading with the version's number.
    #[must_use]
    pub fn migration_sql(&self) -> String {
        migrate::migration_sql(&self.inner.names)
    }

    /// Draws a new UUID for this installation, and with it a new id for every event in it.
    ///
    /// To be run once after a database has been cloned, before anything publishes to the clone or
    /// relays from it: the two databases would otherwise give the same
    /// [`EventId`](outbox_core::EventId) to different events. Other processes keep the old UUID
    /// until they are restarted. Run twice, it draws another one.
    ///
    /// # Errors
    ///
    /// Whatever the database reports.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the old UUID or a new one, and this process may go on with the
    /// old one either way: draw another before anything is published.
    pub async fn renew_installation(&self) -> Result<Uuid, StoreError> {
        let id = Uuid::new_v4();
        let query = Query::new(&self.sql().renew_installation).bind(PgUuid(id));
        self.ask("renew the installation's UUID", query).await?;
        self.remember_installation(id);
        Ok(id)
    }

    /// The application's pool.
    #[must_use]
    pub fn pool(&self) -> &PgPool {
        &self.inner.pool
    }

    /// Every statement this store sends, by name, for tests that look at plans.
    #[doc(hidden)]
    #[must_use]
    pub fn statements(&self) -> Vec<(&'static str, String)> {
        let all = self.sql().all();
        all.map(|(name, sql)| (name, sql.to_string())).to_vec()
    }

    /// What a session of the store's own is set to, for the same tests.
    #[doc(hidden)]
    #[must_use]
    pub fn session_settings(&self) -> String {
        session(self.inner.deadline)
    }

    /// The UUID that was drawn when the outbox was installed. Read once per process.
    async fn installation(&self) -> Result<Uuid, StoreError> {
        if let Some(id) = self.known_installation() {
            return Ok(id);
        }
        let query = Query::new(&self.sql().installation);
        let rows = self.ask(READ_INSTALLATION, query).await?;
        self.installation_in(&rows)
    }

    /// As [`installation`](Self::installation), on a connection that is at hand.
    async fn installation_through(
        &self,
        connection: &mut PgConnection,
    ) -> Result<Uuid, StoreError> {
        if let Some(id) = self.known_installation() {
            return Ok(id);
        }
        let query = Query::new(&self.sql().installation);
        let rows = query.fetch(connection, self.keeps_statements()).await;
        self.installation_in(&rows.map_err(|error| failed(READ_INSTALLATION, error))?)
    }

    fn installation_in(&self, rows: &[PgRow]) -> Result<Uuid, StoreError> {
        let row = rows
            .first()
            .ok_or_else(|| StoreError::new(StoreErrorKind::Denied, READ_INSTALLATION))?;
        let PgUuid(id) = row
            .try_get(0)
            .map_err(|error| failed(READ_INSTALLATION, error))?;
        self.remember_installation(id);
        Ok(id)
    }

    fn known_installation(&self) -> Option<Uuid> {
        let known = self.inner.installation.read();
        *known.unwrap_or_else(PoisonError::into_inner)
    }

    fn remember_installation(&self, id: Uuid) {
        let known = self.inner.installation.write();
        *known.unwrap_or_else(PoisonError::into_inner) = Some(id);
    }

    fn sql(&self) -> &Catalogue {
        &self.inner.sql
    }

    fn names(&self) -> &Names {
        &self.inner.names
    }

    fn channel(&self) -> String {
        self.inner.names.channel()
    }

    fn order_lock(&self, key: &str) -> (i32, i32) {
        self.inner.names.order_lock(key)
    }

    fn deadline(&self) -> Duration {
        self.inner.deadline
    }

    fn is_behind_pooler(&self) -> bool {
        self.inner.pooler
    }

    /// Whether a statement may stay prepared on its connection. Behind a pooler the next statement
    /// can reach another server, where the same name is another statement.
    fn keeps_statements(&self) -> bool {
        !self.inner.pooler
    }

    /// Asks one statement on a connection of the store's own.
    async fn ask(&self, doing: &'static str, query: Query) -> Result<Vec<PgRow>, StoreError> {
        let mut answers = self.ask_all(doing, vec![query]).await?;
        Ok(answers.pop().unwrap_or_default())
    }

    /// Asks statements on a connection of the store's own, all or none of them. Answers in order.
    ///
    /// One statement is a transaction by itself and costs one round trip.
    async fn ask_all(
        &self,
        doing: &'static str,
        queries: Vec<Query>,
    ) -> Result<Vec<Vec<PgRow>>, StoreError> {
        let until = Instant::now() + self.inner.deadline;
        let mut connection = self.acquire(doing, until).await?;
        let work = self.run_all(connection.get(), queries);
        match timeout_at(until, work).await {
            Ok(Ok(answers)) => {
                connection.keep();
                Ok(answers)
            }
            Ok(Err(error)) => {
                if leaves_connection_usable(&error) {
                    connection.keep();
                }
                Err(failed(doing, error))
            }
            // Nothing is known of what is still on its way in this connection, so nobody may have
            // it after us.
            Err(_) => Err(StoreError::new(StoreErrorKind::TimedOut, doing)),
        }
    }

    async fn run_all(
        &self,
        connection: &mut PgConnection,
        queries: Vec<Query>,
    ) -> Result<Vec<Vec<PgRow>>, sqlx::Error> {
        let persistent = self.keeps_statements();
        let mut answers = Vec::with_capacity(queries.len());
        if persistent && queries.len() == 1 {
            for query in queries {
                answers.push(query.fetch(connection, persistent).await?);
            }
            return Ok(answers);
        }
        let mut tx = self.begin_on(connection).await?;
        for query in queries {
            answers.push(query.fetch(&mut tx, persistent).await?);
        }
        tx.commit().await?;
        Ok(answers)
    }

    /// Begins a transaction with the store's settings on one of its own connections.
    async fn begin_on<'c>(
        &self,
        connection: &'c mut PgConnection,
    ) -> Result<Transaction<'c, Postgres>, sqlx::Error> {
        match self.begin_sql() {
            Cow::Borrowed(begin) => connection.begin_with(begin).await,
            Cow::Owned(begin) => connection.begin_with(AssertSqlSafe(begin)).await,
        }
    }

    /// What begins a transaction with the store's settings on one of its own connections: one
    /// message, so that the settings cost no round trip of their own.
    fn begin_sql(&self) -> Cow<'static, str> {
        if self.inner.pooler {
            let settings = settings(self.inner.deadline, "SET LOCAL");
            Cow::Owned(format!("{BEGIN}; {settings}"))
        } else {
            Cow::Borrowed(BEGIN)
        }
    }

    async fn acquire(&self, doing: &'static str, until: Instant) -> Result<Own, StoreError> {
        match timeout_at(until, self.own().acquire()).await {
            Ok(Ok(connection)) => Ok(Own::new(connection)),
            Ok(Err(error)) => Err(failed(doing, error)),
            Err(_) => Err(StoreError::new(StoreErrorKind::TimedOut, doing)),
        }
    }

    /// The store's own connections.
    ///
    /// Made at the first use, and anew on another runtime: a connection belongs to the runtime that
    /// opened it, and where that has ended nobody hears the answer to a statement.
    fn own(&self) -> PgPool {
        let here = tokio::runtime::Handle::current().id();
        let mut own = self
            .inner
            .own
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match &*own {
            Some((runtime, pool)) if *runtime == here => pool.clone(),
            _ => own.insert((here, self.new_own())).1.clone(),
        }
    }

    fn new_own(&self) -> PgPool {
        let options = PgPoolOptions::new()
            .max_connections(self.inner.connections.get())
            .acquire_timeout(self.inner.deadline)
            // A ping before each statement would double its round trips. A connection that
            // died while idle fails the statement instead, which the framework repeats.
            .test_before_acquire(false);
        let options = if self.inner.pooler {
            options
        } else {
            let settings: Arc<str> = session(self.inner.deadline).into();
            options.after_connect(move |connection, _| {
                let settings = Arc::clone(&settings);
                Box::pin(async move {
                    connection
                        .execute(sqlx::raw_sql(AssertSqlSafe(settings)))
                        .await?;
                    Ok(())
                })
            })
        };
        options.connect_lazy_with((*self.inner.pool.connect_options()).clone())
    }
}

/// - READ COMMITTED is stated, because the database's default may be stricter, and SKIP LOCKED does
///   not help against conflicts of a snapshot.
/// - READ WRITE, because a pooled session keeps the default it began with: after a time in which
///   the database was set to read-only, it would refuse for as long as it lives.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

const READ_INSTALLATION: &str = "read the installation's UUID";

/// Runs `work` in a task of its own, where it is finished whether or not somebody waits for it.
///
/// A `BEGIN` that is dropped half way leaves a connection in the pool with an open transaction, and
/// what the next user of it writes is rolled back.
async fn in_task<T: Send + 'static>(
    doing: &'static str,
    work: impl Future<Output = Result<T, StoreError>> + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::spawn(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down.
            Err(error) => {
                Err(StoreError::new(StoreErrorKind::Unreachable, doing).with_source(error))
            }
        },
    }
}

impl Store for PgStore {
    type Connection = PgConnection;
    type Tx<'t> = Transaction<'t, Postgres>;
    type Wakeups = PgWakeups;
    type Exclusive = PgExclusive;

    async fn begin(&self) -> Result<Self::Tx<'static>, StoreError> {
        const DOING: &str = "begin a transaction";
        let pool = self.inner.pool.clone();
        let begin = async move {
            let begun = pool.begin_with(BEGIN).await;
            begun.map_err(|error| failed(DOING, error))
        };
        in_task(DOING, begin).await
    }

    async fn commit(&self, tx: Self::Tx<'static>) -> Result<(), StoreError> {
        const DOING: &str = "commit";
        if !tx.is_in_transaction() {
            return Err(StoreError::new(StoreErrorKind::Other, DOING)
                .with_source(crate::error::TRANSACTION_HAS_ENDED));
        }
        let committed = tx.commit().await;
        committed.map_err(|error| failed(DOING, error))
    }

    async fn rollback(&self, tx: Self::Tx<'static>) -> Result<(), StoreError> {
        let rolled_back = tx.rollback().await;
        rolled_back.map_err(|error| failed("roll back", error))
    }

    async fn begin_part<'c>(
        &self,
        connection: &'c mut PgConnection,
    ) -> Result<Box<dyn Part<PgConnection> + 'c>, StoreError> {
        part::begin(connection).await
    }

    async fn insert(
        &self,
        connection: &mut PgConnection,
        events: &[NewEvent],
    ) -> Result<Vec<Insertion>, StoreError> {
        insert::insert(self, connection, events).await
    }

    async fn settle_through(
        &self,
        connection: &mut PgConnection,
        settlements: &[Settlement],
    ) -> Result<Vec<Settled>, StoreError> {
        settle::settle_through(self, connection, settlements).await
    }

    async fn lock_ordering_key(
        &self,
        connection: &mut PgConnection,
        key: &str,
    ) -> Result<bool, StoreError> {
        order::lock_ordering_key(self, connection, key).await
    }

    async fn cancel(
        &self,
        connection: &mut PgConnection,
        event: &EventRef,
    ) -> Result<Option<Existing>, StoreError> {
        cancel::cancel(self, connection, event).await
    }

    async fn lock_entity(
        &self,
        connection: &mut PgConnection,
        namespace: i32,
        id: LockId,
    ) -> Result<(), StoreError> {
        lock::lock_entity(self, connection, namespace, id).await
    }

    async fn check(&self) -> Result<(), StoreError> {
        check::check(self).await
    }

    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<Vec<Claimed>, StoreError> {
        claim::claim(self, request).await
    }

    async fn claim_in(
        &self,
        pass: Pass,
        request: &ClaimRequest<'_>,
    ) -> Result<Option<Vec<Claimed>>, StoreError> {
        claim::claim_in(self, pass, request).await
    }

    async fn claim_rows(
        &self,
        rows: &[i64],
        request: &ClaimRequest<'_>,
    ) -> Result<Vec<Claimed>, StoreError> {
        claim::claim_rows(self, rows, request).await
    }

    async fn verify(&self, leases: &[HeldLease]) -> Result<Vec<Verified>, StoreError> {
        renew::verify(self, leases).await
    }

    async fn renew(
        &self,
        leases: &[HeldLease],
        lease: Duration,
    ) -> Result<Vec<Renewal>, StoreError> {
        renew::renew(self, leases, lease).await
    }

    async fn split(&self, splits: &[Split]) -> Result<Vec<Option<Vec<SplitRow>>>, StoreError> {
        split::split(self, splits).await
    }

    async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>, StoreError> {
        settle::settle(self, settlements).await
    }

    async fn release(&self, leases: &[HeldLease]) -> Result<Vec<Settled>, StoreError> {
        renew::release(self, leases).await
    }

    async fn sweep(
        &self,
        pass: Pass,
        request: &SweepRequest<'_>,
    ) -> Result<Option<SweepChunk>, StoreError> {
        sweep::sweep(self, pass, request).await
    }

    async fn purge(&self, pass: Pass, limit: NonZeroU32) -> Result<Option<u64>, StoreError> {
        purge::purge(self, pass, limit).await
    }

    async fn upkeep(&self, pass: Pass, ahead: Duration) -> Result<Option<Upkeep>, StoreError> {
        partition::upkeep(self, pass, ahead).await
    }

    async fn dead_letters(&self, scan: &DeadLetterScan<'_>) -> Result<DeadLetterChunk, StoreError> {
        dead_letter::dead_letters(self, scan).await
    }

    async fn change_dead_letters(
        &self,
        rows: DeadLetterRows<'_>,
        change: DeadLetterChange,
    ) -> Result<DeadLettersChanged, StoreError> {
        dead_letter::change(self, rows, change).await
    }

    async fn set_paused(&self, pause: &PauseRef, paused: bool) -> Result<bool, StoreError> {
        pause::set_paused(self, pause, paused).await
    }

    async fn paused(&self) -> Result<Vec<Pause>, StoreError> {
        pause::paused(self).await
    }

    async fn stats(&self) -> Result<StoreStats, StoreError> {
        stats::stats(self).await
    }

    async fn try_exclusive(
        &self,
        name: &str,
        instance: &str,
    ) -> Result<Option<PgExclusive>, StoreError> {
        exclusive::try_exclusive(self, name, instance).await
    }

    async fn look_up(&self, events: &[Watched]) -> Result<Vec<Option<Existing>>, StoreError> {
        cancel::look_up(self, events).await
    }

    async fn blocked_keys(&self, limit: NonZeroU32) -> Result<Vec<BlockedKey>, StoreError> {
        order::blocked_keys(self, limit).await
    }

    async fn next_in_order(&self, keys: &[String]) -> Result<Vec<i64>, StoreError> {
        order::next_in_order(self, keys).await
    }

    async fn newest(&self) -> Result<i64, StoreError> {
        order::newest(self).await
    }

    async fn find(&self, row: i64) -> Result<Option<EventRecord>, StoreError> {
        find::find(self, row).await
    }

    async fn listen(&self) -> Result<Option<PgWakeups>, StoreError> {
        wakeup::listen(self).await
    }

    async fn notify(&self) -> Result<(), StoreError> {
        wakeup::notify(self).await
    }
}

impl fmt::Debug for PgStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgStore")
            .field("names", &self.inner.names)
            .field("deadline", &self.inner.deadline)
            .field("behind_transaction_pooler", &self.inner.pooler)
            .finish_non_exhaustive()
    }
}
