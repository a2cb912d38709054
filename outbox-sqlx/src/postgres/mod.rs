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
//! | relay | the above, and `UPDATE`, `DELETE` on the table and on `_keys`; `SELECT`, `INSERT`, `UPDATE`, `DELETE` on `_history`; `INSERT` on `_dead`; `SELECT` on `_all` and `_schema` |
//! | reader | `SELECT` on `_all` |
//!
//! Row-level security must not apply to them: it hides rows without an error, and a queue whose
//! rows are hidden looks empty. [`Store::check`] finds that out.

use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use outbox_core::lease::HeldLease;
use outbox_core::store::{
    ClaimRequest, Claimed, EventRecord, Insertion, NewEvent, Renewal, Settled, Settlement, Store,
    StoreError, StoreErrorKind, SweepChunk, SweepRequest, Verified,
};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgPoolOptions, PgRow};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, PgPool, Postgres, Row, Transaction};
use tokio::time::{Instant, timeout_at};
use uuid::Uuid;

use self::catalogue::Catalogue;
use self::names::Names;
use self::query::{PgUuid, Query};
use self::sqlstate::{failed, leaves_connection_usable};
pub use self::wakeup::PgWakeups;

mod insert;

mod claim;
mod renew;
mod settle;

mod purge;
mod sweep;

mod find;
mod wakeup;

mod check;
mod migrate;

mod catalogue;
mod names;
mod query;
mod row;
mod sqlstate;

/// Keeps the rows of an outbox in PostgreSQL.
///
/// Cheap to clone; clones share their connections. It can be made outside of a runtime and
/// connects when it is first used. Its own connections then belong to the runtime of that first
/// use, and are gone when that runtime is.
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
    own: OnceLock<PgPool>,
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
        PgStoreBuilder {
            pool,
            schema: "outbox".to_owned(),
            table: "outbox_events".to_owned(),
            connections: const { NonZeroU32::new(4).unwrap() },
            deadline: Duration::from_secs(10),
            pooler: false,
        }
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
        let work = self.run_all(&mut connection.0, queries);
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
        if self.inner.pooler {
            // One message, so that the settings cost no round trip of their own.
            let settings = settings(self.inner.deadline, "SET LOCAL");
            let begin = format!("BEGIN ISOLATION LEVEL READ COMMITTED; {settings}");
            connection.begin_with(AssertSqlSafe(begin)).await
        } else {
            connection.begin_with(BEGIN).await
        }
    }

    async fn acquire(&self, doing: &'static str, until: Instant) -> Result<Own, StoreError> {
        match timeout_at(until, self.own().acquire()).await {
            Ok(Ok(connection)) => Ok(Own(connection, false)),
            Ok(Err(error)) => Err(failed(doing, error)),
            Err(_) => Err(StoreError::new(StoreErrorKind::TimedOut, doing)),
        }
    }

    /// The store's own connections.
    ///
    /// Made at the first use: a pool starts a task, which needs a runtime.
    fn own(&self) -> &PgPool {
        self.inner.own.get_or_init(|| {
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
        })
    }
}

/// A connection of the store's own. Dropped before it is known to be in order, it is closed and
/// not given to the next statement: a deadline that passed or a dropped future can leave an open
/// transaction in it, or an answer that nobody read.
struct Own(PoolConnection<Postgres>, bool);

impl Own {
    fn keep(&mut self) {
        self.1 = true;
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if !self.1 {
            self.0.close_on_drop();
        }
    }
}

/// READ COMMITTED is stated, because the database's default may be stricter, and SKIP LOCKED does
/// not help against conflicts of a snapshot.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

const READ_INSTALLATION: &str = "read the installation's UUID";

/// What a session of the store's own is set to, in one message.
fn session(deadline: Duration) -> String {
    format!(
        "SET default_transaction_isolation = 'read committed'; \
         SET default_transaction_read_only = off; \
         SET application_name = 'outbox'; \
         {}",
        settings(deadline, "SET")
    )
}

/// Settings that hold for every statement the store sends by itself.
///
/// - The statement's time ends a little before the caller's patience, so that the server gives up
///   by itself and the connection survives.
/// - Every statement has an index for each of its steps. After a vacuum of an empty table, or of
///   one that was filled in bulk, the planner prefers to scan or sort, and keeps that plan when the
///   table has grown: a claim then takes 70 ms and not 0.3.
/// - `jit`: a plan that is priced with one of the above switched off counts as very expensive, and
///   would be compiled each time.
fn settings(deadline: Duration, set: &str) -> String {
    let millis = deadline.as_millis();
    let statement = std::cmp::max(millis - millis / 10, 1);
    let lock = std::cmp::max(millis / 2, 1);
    [
        "search_path = pg_catalog".to_owned(),
        format!("statement_timeout = {statement}"),
        format!("lock_timeout = {lock}"),
        format!("idle_in_transaction_session_timeout = {millis}"),
        "enable_seqscan = off".to_owned(),
        "enable_bitmapscan = off".to_owned(),
        "enable_sort = off".to_owned(),
        "jit = off".to_owned(),
    ]
    .map(|setting| format!("{set} {setting}"))
    .join("; ")
}

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
        let committed = tx.commit().await;
        committed.map_err(|error| failed("commit", error))
    }

    async fn rollback(&self, tx: Self::Tx<'static>) -> Result<(), StoreError> {
        let rolled_back = tx.rollback().await;
        rolled_back.map_err(|error| failed("roll back", error))
    }

    async fn insert(
        &self,
        connection: &mut PgConnection,
        events: &[NewEvent],
    ) -> Result<Vec<Insertion>, StoreError> {
        insert::insert(self, connection, events).await
    }

    async fn check(&self) -> Result<(), StoreError> {
        check::check(self).await
    }

    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<Vec<Claimed>, StoreError> {
        claim::claim(self, request).await
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

    async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>, StoreError> {
        settle::settle(self, settlements).await
    }

    async fn release(&self, leases: &[HeldLease]) -> Result<Vec<Settled>, StoreError> {
        renew::release(self, leases).await
    }

    async fn sweep(&self, request: &SweepRequest<'_>) -> Result<SweepChunk, StoreError> {
        sweep::sweep(self, request).await
    }

    async fn purge(&self, limit: NonZeroU32) -> Result<u64, StoreError> {
        purge::purge(self, limit).await
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

/// Settings of a [`PgStore`].
#[derive(Clone, Debug)]
#[must_use]
pub struct PgStoreBuilder {
    pool: PgPool,
    schema: String,
    table: String,
    connections: NonZeroU32,
    deadline: Duration,
    pooler: bool,
}

impl PgStoreBuilder {
    /// The schema that holds the outbox: any name of 1 to 63 bytes. Defaults to `outbox`.
    ///
    /// It may hold other things, and more than one outbox.
    pub fn schema(mut self, name: impl Into<String>) -> Self {
        self.schema = name.into();
        self
    }

    /// The table of unsettled events: any name of 1 to 47 bytes. Defaults to `outbox_events`.
    ///
    /// The other tables have its name and an ending, such as `outbox_events_history`.
    pub fn table(mut self, name: impl Into<String>) -> Self {
        self.table = name.into();
        self
    }

    /// How many connections the store may open for itself, besides one that listens for wake-ups.
    /// Defaults to 4.
    pub fn connections(mut self, most: NonZeroU32) -> Self {
        self.connections = most;
        self
    }

    /// How long the store waits for the answer to anything it asks by itself, the wait for a
    /// connection included. Defaults to 10 seconds; from 10 milliseconds to an hour.
    ///
    /// The publisher's own connection keeps the application's settings.
    pub fn statement_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Says that the pool's connections lead to a pooler that gives a server to each *transaction*,
    /// such as PgBouncer in transaction mode.
    ///
    /// Every statement then is an explicit transaction and none stays prepared; a statement costs
    /// three round trips more. Nothing listens for wake-ups from other processes: their events
    /// are found by polling.
    ///
    /// Without this, statements get mixed up behind such a pooler, silently.
    pub fn behind_transaction_pooler(mut self) -> Self {
        self.pooler = true;
        self
    }

    /// Makes the store. Connects to nothing yet.
    ///
    /// # Errors
    ///
    /// [`StoreErrorKind::Config`], with the value, for a name that PostgreSQL would cut or cannot
    /// hold, and for a deadline out of its bounds.
    pub fn build(self) -> Result<PgStore, StoreError> {
        let names = Names::new(&self.schema, &self.table)?;
        let deadline = self.deadline;
        if !(Duration::from_millis(10)..=Duration::from_secs(3600)).contains(&deadline) {
            let doing = format!("statement deadline {deadline:?} is not from 10 ms to an hour");
            return Err(StoreError::new(StoreErrorKind::Config, doing));
        }
        Ok(PgStore {
            inner: Arc::new(Inner {
                pool: self.pool,
                own: OnceLock::new(),
                connections: self.connections,
                deadline,
                pooler: self.pooler,
                sql: Catalogue::new(&names),
                names,
                installation: RwLock::new(None),
            }),
        })
    }
}
