//! The store on SQLite: the embedded default, without a server to run.
//!
//! ```no_run
//! use outbox_sqlx::sqlite::SqliteStore;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let store = SqliteStore::open("shop.db").await?;
//! store.migrate().await?;
//!
//! // Publishing goes through a transaction on the same file.
//! let mut tx = store.pool().begin_with("BEGIN IMMEDIATE").await?;
//! sqlx::query("UPDATE orders SET paid = 1 WHERE id = 7").execute(&mut *tx).await?;
//! tx.commit().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # One writer at a time
//!
//! SQLite has one write lock for the whole file. Every write of the framework takes it at once
//! (`BEGIN IMMEDIATE`) and holds it for a few statements, never while a handler runs. So there are
//! no row locks to skip and no deadlocks, and two relays on one file take turns.
//!
//! A transaction of the application that begins *deferred*, which is what `pool.begin()` does, and
//! reads before it publishes can find that somebody wrote in between. SQLite then refuses its first
//! write, whatever the busy timeout: the error is transient and the whole transaction has to be run
//! again. [`begin`](outbox_core::store::Store::begin) and `begin_with("BEGIN IMMEDIATE")` do not
//! have this.
//!
//! A statement can also end the whole transaction: one with `OR ROLLBACK`, or any on a full disk.
//! It reports an error. Do not publish after that: with no transaction around it, an event is
//! committed at once, although `commit()` fails later.
//!
//! The write lock is also the lock of every entity
//! ([`lock_entity`](outbox_core::store::Store::lock_entity)): a transaction that has locked one has
//! locked all, and the file. A deferred transaction becomes a writing one by it.
//!
//! # An exclusive lock is a lease
//!
//! A lock that one instance has for longer than a transaction is a row with a token and an end, 30
//! seconds ahead by the database's clock, which its holder moves on every few seconds. Whoever dies
//! with it, or drops it without releasing it, has it until then. A holder that was frozen for
//! longer may find that somebody else has it: what it does must be harmless twice, or fenced by
//! something of its own.
//!
//! # The pool is the application's
//!
//! The store has no connections of its own. On a pool of one connection a relay waits for whoever
//! holds it, and an application that holds it and waits for the relay waits until the pool gives
//! up. In-memory databases of one connection work, within that limit.
//!
//! A chunk of a cadence sets a progress handler on the connection it has borrowed, so that SQLite
//! stops a statement that takes too long, and removes it again. A progress handler of the
//! application's own would be gone then. On an in-memory database there is none: a statement that
//! takes too long goes on after its call has given up.
//!
//! # A number can be given again after a rollback
//!
//! Row numbers are never reused once their transaction has committed, not even when the row is
//! gone. But SQLite rolls the counter back with everything else: the event id that a publish
//! answered with belongs to another event if that publish is rolled back. Do not let an id out
//! before the commit.
//!
//! # What a commit is worth
//!
//! [`open`](SqliteStore::open) sets WAL and `synchronous = FULL`. With `NORMAL`, which is what many
//! pools in WAL mode are set to, a commit survives a crash of the process but the last ones can be
//! lost with the power. [`check`](outbox_core::store::Store::check) logs a warning then.
//!
//! # What is in the file
//!
//! The table's name is the beginning of all names: `outbox_events` (what is not settled),
//! `outbox_events_history` (processed or discarded, until its retention has passed),
//! `outbox_events_dead`, `outbox_events_keys` (dedup keys), `outbox_events_locks` (exclusive locks),
//! `outbox_events_installation` and `outbox_events_schema`. The view `outbox_events_all` shows every
//! event with its status in words. Several outboxes live in one file under different names. SQLite
//! 3.38 or later is needed to work with it, and the one that sqlx brings is.

mod builder;
mod cancel;
mod check;
mod claim;
mod code;
mod dead_letter;
mod find;
mod insert;
mod lend;
mod lock;
mod migrate;
mod order;
mod part;
mod pause;
mod purge;
mod renew;
mod row;
mod settle;
mod split;
mod sql;
mod stats;
mod sweep;

use std::fmt;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use outbox_core::dead_letter::{
    DeadLetterChange, DeadLetterChunk, DeadLetterRows, DeadLetterScan, DeadLettersChanged,
};
use outbox_core::lease::HeldLease;
use outbox_core::lock::LockId;
use outbox_core::stats::StoreStats;
use outbox_core::store::{
    BlockedKey, ClaimRequest, Claimed, EventRecord, EventRef, Existing, Insertion, NewEvent,
    NoWakeups, Part, Pass, Pause, PauseRef, Renewal, Settled, Settlement, Split, SplitRow, Store,
    StoreError, StoreErrorKind, SweepChunk, SweepRequest, Upkeep, Verified, Watched,
};
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{Connection, Sqlite, SqliteConnection, Transaction};
use uuid::Uuid;

pub use self::builder::SqliteStoreBuilder;
pub use self::lock::SqliteExclusive;

use self::code::sqlite_error;
use self::lend::{End, is_in_memory};
use self::sql::{Statements, Table, safe};

/// An outbox in a SQLite database.
///
/// A clone is cheap and shares everything. See the [module](self) for what SQLite means for an
/// application that publishes through it.
#[derive(Clone)]
pub struct SqliteStore {
    inner: Arc<Inner>,
}

struct Inner {
    pool: SqlitePool,
    table: Table,
    deadline: Duration,
    statements: Statements,
    in_memory: bool,
}

impl SqliteStore {
    /// Opens the file at `path`, and creates it if it is not there.
    ///
    /// The pool has up to 5 connections with WAL, `synchronous = FULL`, foreign keys enforced and a
    /// busy timeout of 5 seconds. The tables are those of [`new`](Self::new), and
    /// [`migrate`](Self::migrate) creates them.
    ///
    /// # Errors
    ///
    /// An error of kind [`Unreachable`](StoreErrorKind::Unreachable) if the file can be neither
    /// opened nor created, and of kind [`Config`](StoreErrorKind::Config) for `:memory:`, which
    /// would be another database on each connection: make a pool of one, and [`new`](Self::new).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future may leave an empty file.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let path = path.as_ref();
        if path.as_os_str().is_empty() || path == Path::new(":memory:") {
            return Err(StoreError::new(
                StoreErrorKind::Config,
                format!("{path:?} is not a file, and its connections would share nothing"),
            ));
        }
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(BUSY_TIMEOUT);
        let pool = SqlitePoolOptions::new()
            .max_connections(CONNECTIONS)
            .connect_with(options)
            .await
            .map_err(|error| sqlite_error(format!("open `{}`", path.display()), error))?;
        Ok(Self::new(pool))
    }

    /// Makes a store on the application's own pool, in the table `outbox_events`.
    ///
    /// Nothing is sent to the database.
    #[must_use]
    pub fn new(pool: SqlitePool) -> Self {
        Self::assemble(pool, Table::default(), DEFAULT_DEADLINE)
    }

    /// Starts a store on the application's own pool with other settings than [`new`](Self::new).
    ///
    /// ```no_run
    /// # fn example(pool: sqlx::SqlitePool) -> Result<(), Box<dyn std::error::Error>> {
    /// let store = outbox_sqlx::sqlite::SqliteStore::builder(pool)
    ///     .table("billing_events")
    ///     .statement_deadline(std::time::Duration::from_secs(3))
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder(pool: SqlitePool) -> SqliteStoreBuilder {
        SqliteStoreBuilder::new(pool)
    }

    fn assemble(pool: SqlitePool, table: Table, deadline: Duration) -> Self {
        Self {
            inner: Arc::new(Inner {
                in_memory: is_in_memory(&pool),
                statements: Statements::new(&table),
                pool,
                table,
                deadline,
            }),
        }
    }

    /// Installs the tables, or brings them to the version of this release, in one transaction.
    ///
    /// Running it again changes nothing, and any number of processes may run it at once: one does
    /// the work and the others find it done. It has no deadline but the pool's and the busy
    /// timeout's, since a migration that is given up half way would be given up every time.
    ///
    /// # Errors
    ///
    /// An error of kind [`SchemaNewer`](StoreErrorKind::SchemaNewer) if a later release has been
    /// here, and of the kind of whatever the database refuses. Nothing has changed then.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future rolls back, or comes too late and everything is installed.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        let Inner {
            statements, table, ..
        } = &*self.inner;
        self.transaction(
            "install the outbox",
            End::Commit,
            async |connection: &mut SqliteConnection| {
                migrate::run(connection, statements, table).await
            },
        )
        .await
    }

    /// The SQL that [`migrate`](Self::migrate) runs on an empty database, for people who keep their
    /// migrations elsewhere.
    ///
    /// It has to be run in one transaction; it contains no `BEGIN`.
    #[must_use]
    pub fn migration_sql(&self) -> String {
        migrate::sql(&self.inner.table)
    }

    /// Draws a new UUID for this installation, which is part of every event's id.
    ///
    /// To be run on a copy of a database that goes on living beside the original, before anything
    /// is published through it: otherwise the two give the same ids to different events. Events
    /// that are already there change their ids with it, so what has been sent under the old ones is
    /// not recognised as a repetition any more.
    ///
    /// # Errors
    ///
    /// Whatever the database refuses. The UUID is the old one then.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the old UUID or a new one.
    pub async fn renew_installation(&self) -> Result<Uuid, StoreError> {
        self.write(
            "renew the installation",
            async |connection: &mut SqliteConnection| {
                let statement = safe(&self.inner.statements.renew_installation);
                let uuid: String = sqlx::query_scalar(statement).fetch_one(connection).await?;
                row::installation(&uuid)
            },
        )
        .await
    }

    /// The pool the store works on.
    #[must_use]
    pub fn pool(&self) -> &SqlitePool {
        &self.inner.pool
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore")
            .field("table", &self.inner.table.as_str())
            .field("deadline", &self.inner.deadline)
            .finish_non_exhaustive()
    }
}

impl Store for SqliteStore {
    type Connection = SqliteConnection;
    type Tx<'t> = Transaction<'t, Sqlite>;
    type Wakeups = NoWakeups;
    type Exclusive = SqliteExclusive;

    async fn begin(&self) -> Result<Self::Tx<'static>, StoreError> {
        let doing = "begin a transaction";
        self.within(doing, self.begin_for_caller(doing)).await
    }

    async fn begin_part<'c>(
        &self,
        connection: &'c mut SqliteConnection,
    ) -> Result<Box<dyn Part<SqliteConnection> + 'c>, StoreError> {
        part::begin(connection).await
    }

    async fn commit(&self, mut tx: Self::Tx<'static>) -> Result<(), StoreError> {
        let doing = "commit a transaction";
        self.within(doing, async {
            // What its thread was told to undo is undone then.
            let pinged = tx.ping().await;
            pinged.map_err(|error| sqlite_error(doing, error))?;
            if !tx.is_in_transaction() {
                let ended = StoreError::new(StoreErrorKind::Other, doing);
                return Err(ended.with_source(crate::error::TRANSACTION_HAS_ENDED));
            }
            tx.commit()
                .await
                .map_err(|error| sqlite_error(doing, error))
        })
        .await
    }

    async fn rollback(&self, tx: Self::Tx<'static>) -> Result<(), StoreError> {
        let doing = "roll back a transaction";
        self.within(doing, async {
            tx.rollback()
                .await
                .map_err(|error| sqlite_error(doing, error))
        })
        .await
    }

    async fn insert(
        &self,
        connection: &mut Self::Connection,
        events: &[NewEvent],
    ) -> Result<Vec<Insertion>, StoreError> {
        insert::insert(connection, &self.inner.statements, events).await
    }

    async fn settle_through(
        &self,
        connection: &mut Self::Connection,
        settlements: &[Settlement],
    ) -> Result<Vec<Settled>, StoreError> {
        settle::run_through(connection, &self.inner.statements, settlements)
            .await
            .map_err(|error| sqlite_error("settle events in a transaction", error))
    }

    /// Only asks: whoever writes has the write lock of the file, and with it every key. In a deferred
    /// transaction that has not written, another one may write before it does; then the database
    /// refuses this one's insert.
    async fn lock_ordering_key(
        &self,
        connection: &mut Self::Connection,
        key: &str,
    ) -> Result<bool, StoreError> {
        order::is_free(connection, &self.inner.statements, key)
            .await
            .map_err(|error| sqlite_error("lock an ordering key", error))
    }

    async fn cancel(
        &self,
        connection: &mut Self::Connection,
        event: &EventRef,
    ) -> Result<Option<Existing>, StoreError> {
        cancel::run(connection, &self.inner.statements, event)
            .await
            .map_err(|error| sqlite_error("cancel an event", error))
    }

    /// Takes the write lock of the file, whatever the namespace and the id. It waits as long as the
    /// connection's busy timeout.
    async fn lock_entity(
        &self,
        connection: &mut Self::Connection,
        _namespace: i32,
        _id: LockId,
    ) -> Result<(), StoreError> {
        lock::lock_entity(connection, &self.inner.statements)
            .await
            .map_err(|error| sqlite_error("lock an entity", error))
    }

    async fn check(&self) -> Result<(), StoreError> {
        let doing = "check the outbox";
        let Inner {
            statements, table, ..
        } = &*self.inner;
        let check = self.transaction(
            doing,
            End::Rollback,
            async |connection: &mut SqliteConnection| {
                check::run(connection, statements, table).await
            },
        );
        self.within(doing, check).await
    }

    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<Vec<Claimed>, StoreError> {
        let statements = &self.inner.statements;
        self.write("claim events", async |connection: &mut SqliteConnection| {
            claim::run(connection, statements, request).await
        })
        .await
    }

    async fn claim_in(
        &self,
        pass: Pass,
        request: &ClaimRequest<'_>,
    ) -> Result<Option<Vec<Claimed>>, StoreError> {
        let statements = &self.inner.statements;
        self.write_in(
            pass,
            "claim events in a pass",
            async |connection: &mut SqliteConnection| {
                claim::run(connection, statements, request).await
            },
        )
        .await
    }

    async fn claim_rows(
        &self,
        rows: &[i64],
        request: &ClaimRequest<'_>,
    ) -> Result<Vec<Claimed>, StoreError> {
        let statements = &self.inner.statements;
        self.write(
            "claim events by number",
            async |connection: &mut SqliteConnection| {
                claim::run_rows(connection, statements, rows, request).await
            },
        )
        .await
    }

    async fn verify(&self, leases: &[HeldLease]) -> Result<Vec<Verified>, StoreError> {
        let statements = &self.inner.statements;
        self.read(
            "verify leases",
            async |connection: &mut SqliteConnection| {
                renew::verify(connection, statements, leases).await
            },
        )
        .await
    }

    async fn renew(
        &self,
        leases: &[HeldLease],
        lease: Duration,
    ) -> Result<Vec<Renewal>, StoreError> {
        let statements = &self.inner.statements;
        self.write("renew leases", async |connection: &mut SqliteConnection| {
            renew::renew(connection, statements, leases, lease).await
        })
        .await
    }

    async fn split(&self, splits: &[Split]) -> Result<Vec<Option<Vec<SplitRow>>>, StoreError> {
        let statements = &self.inner.statements;
        self.write(
            "split events among their handlers",
            async |connection: &mut SqliteConnection| {
                split::run(connection, statements, splits).await
            },
        )
        .await
    }

    async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>, StoreError> {
        let statements = &self.inner.statements;
        self.write(
            "settle events",
            async |connection: &mut SqliteConnection| {
                settle::run(connection, statements, settlements).await
            },
        )
        .await
    }

    async fn release(&self, leases: &[HeldLease]) -> Result<Vec<Settled>, StoreError> {
        let statements = &self.inner.statements;
        self.write(
            "release claims",
            async |connection: &mut SqliteConnection| {
                renew::release(connection, statements, leases).await
            },
        )
        .await
    }

    async fn sweep(
        &self,
        pass: Pass,
        request: &SweepRequest<'_>,
    ) -> Result<Option<SweepChunk>, StoreError> {
        let statements = &self.inner.statements;
        self.write_in(pass, "sweep", async |connection: &mut SqliteConnection| {
            sweep::run(connection, statements, request).await
        })
        .await
    }

    async fn purge(&self, pass: Pass, limit: NonZeroU32) -> Result<Option<u64>, StoreError> {
        let statements = &self.inner.statements;
        self.write_in(pass, "purge", async |connection: &mut SqliteConnection| {
            purge::run(connection, statements, limit).await
        })
        .await
    }

    /// Always [`Upkeep::Done`]: the history has no partitions.
    async fn upkeep(&self, _pass: Pass, _ahead: Duration) -> Result<Option<Upkeep>, StoreError> {
        Ok(Some(Upkeep::Done))
    }

    async fn dead_letters(&self, scan: &DeadLetterScan<'_>) -> Result<DeadLetterChunk, StoreError> {
        let statements = &self.inner.statements;
        self.read(
            "list dead letters",
            async |connection: &mut SqliteConnection| {
                dead_letter::list(connection, statements, scan).await
            },
        )
        .await
    }

    async fn change_dead_letters(
        &self,
        rows: DeadLetterRows<'_>,
        change: DeadLetterChange,
    ) -> Result<DeadLettersChanged, StoreError> {
        let statements = &self.inner.statements;
        self.write(
            "change dead letters",
            async |connection: &mut SqliteConnection| {
                dead_letter::change(connection, statements, rows, change).await
            },
        )
        .await
    }

    async fn set_paused(&self, pause: &PauseRef, paused: bool) -> Result<bool, StoreError> {
        let statements = &self.inner.statements;
        self.write(
            "pause or resume",
            async |connection: &mut SqliteConnection| {
                pause::set(connection, statements, pause, paused).await
            },
        )
        .await
    }

    async fn paused(&self) -> Result<Vec<Pause>, StoreError> {
        let statements = &self.inner.statements;
        self.read(
            "list what is paused",
            async |connection: &mut SqliteConnection| pause::list(connection, statements).await,
        )
        .await
    }

    /// Counts the first 50,000 unsettled events and the first 50,000 dead letters, by number.
    async fn stats(&self) -> Result<StoreStats, StoreError> {
        let statements = &self.inner.statements;
        self.read("count events", async |connection: &mut SqliteConnection| {
            stats::run(connection, statements).await
        })
        .await
    }

    /// The lock is a lease of 30 seconds, which is kept until it is released or its holder dies.
    async fn try_exclusive(
        &self,
        name: &str,
        instance: &str,
    ) -> Result<Option<Self::Exclusive>, StoreError> {
        SqliteExclusive::take(self, name, instance).await
    }

    async fn look_up(&self, events: &[Watched]) -> Result<Vec<Option<Existing>>, StoreError> {
        let statements = &self.inner.statements;
        self.read(
            "look up events",
            async |connection: &mut SqliteConnection| {
                cancel::look_up(connection, statements, events).await
            },
        )
        .await
    }

    async fn blocked_keys(&self, limit: NonZeroU32) -> Result<Vec<BlockedKey>, StoreError> {
        let statements = &self.inner.statements;
        self.read(
            "list blocked keys",
            async |connection: &mut SqliteConnection| {
                order::list(connection, statements, limit).await
            },
        )
        .await
    }

    async fn next_in_order(&self, keys: &[String]) -> Result<Vec<i64>, StoreError> {
        let statements = &self.inner.statements;
        self.read(
            "find what is next in order",
            async |connection: &mut SqliteConnection| {
                order::next_in_order(connection, statements, keys).await
            },
        )
        .await
    }

    async fn newest(&self) -> Result<i64, StoreError> {
        let statements = &self.inner.statements;
        self.read(
            "find the newest event",
            async |connection: &mut SqliteConnection| order::newest(connection, statements).await,
        )
        .await
    }

    async fn find(&self, row: i64) -> Result<Option<EventRecord>, StoreError> {
        let statements = &self.inner.statements;
        self.read(
            "find an event",
            async |connection: &mut SqliteConnection| find::run(connection, statements, row).await,
        )
        .await
    }

    /// Always `None`: wake-ups do not leave the process.
    async fn listen(&self) -> Result<Option<Self::Wakeups>, StoreError> {
        Ok(None)
    }

    /// Does nothing.
    async fn notify(&self) -> Result<(), StoreError> {
        Ok(())
    }
}

const DEFAULT_DEADLINE: Duration = Duration::from_secs(10);
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECTIONS: u32 = 5;
