//! Something that one instance does while the others stand down: an hourly report, a migration of
//! data.
//!
//! The lock belongs to a connection, or to a lease, that the outbox's own thread keeps alive. Who
//! loses it is told, and has to stop by itself: nobody can take back what runs.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::dispatch::panic_text;
use crate::engine::Shared;
use crate::lock::{EXCLUSIVE_LEASE, KEEP_EVERY, LockId, RESERVED_NAMESPACES};
use crate::outbox::Outbox;
use crate::outcome::ErrorText;
use crate::store::{ExclusiveLock, Store, StoreError};
use crate::transaction::OutboxTx;

/// The longest name of an exclusive lock, in bytes.
pub const EXCLUSIVE_NAME_MAX: usize = 128;

/// How long a lock counts as held without a proof: less than a lease, so that its holder learns of
/// the loss before somebody else has it.
const TRUSTED_FOR: Duration = Duration::from_secs(20);

const _: () = assert!(TRUSTED_FOR.as_secs() < EXCLUSIVE_LEASE.as_secs());
const _: () = assert!(KEEP_EVERY.as_secs() * 3 < TRUSTED_FOR.as_secs());

impl<S: Store, Set> Outbox<S, Set> {
    /// Does `work` if nobody else, in this process or in another, is doing something under the same
    /// name, and stands down at once if somebody is.
    ///
    /// The lock is proven every 5 seconds. It is freed when `work` returns, panics, or is dropped
    /// with this future; when this process dies; and, at the latest half a minute later, when its
    /// host does. On PostgreSQL it is an advisory lock on a connection of its own, beyond those of
    /// every pool; on SQLite a row with a lease.
    ///
    /// ```
    /// use outbox_core::{Exclusive, Outbox, Store};
    ///
    /// # async fn send_report() {}
    /// # async fn f<S: Store>(outbox: Outbox<S>) -> Result<(), Box<dyn std::error::Error>> {
    /// // On every instance, every hour:
    /// let done = outbox
    ///     .run_exclusive("hourly report", |tenure| async move {
    ///         tokio::select! {
    ///             () = send_report() => true,
    ///             () = tenure.lost() => false,
    ///         }
    ///     })
    ///     .await?;
    /// match done {
    ///     Exclusive::Finished(sent) => println!("sent: {sent}"),
    ///     Exclusive::LockLost(_) => println!("another instance may have begun meanwhile"),
    ///     Exclusive::StoodDown => println!("another instance is at it"),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # The lock can be lost while `work` runs
    ///
    /// Its connection can break, and then another instance may begin. [`Tenure::lost`] fires, within
    /// 20 seconds in the worst case, and `work` has to stop by itself; what it returns is marked as
    /// [`Exclusive::LockLost`]. It is a means against doing something twice, not against doing it at
    /// once: let what must not overlap also take a lock in its own transaction
    /// ([`lock_entity`](Self::lock_entity)).
    ///
    /// A [`shutdown`](Self::shutdown) neither ends `work` nor waits for it.
    ///
    /// # Errors
    ///
    /// Returns [`ExclusiveError`] if the name is empty, longer than [`EXCLUSIVE_NAME_MAX`] or contains
    /// U+0000, if the database could not be asked, or if `work` panicked.
    ///
    /// # Panics
    ///
    /// Panics outside of a Tokio runtime.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work` and frees the lock. Dropped while the lock is being taken, it
    /// may leave one behind on SQLite, until its lease of 30 seconds ends.
    pub async fn run_exclusive<T, F>(
        &self,
        name: &str,
        work: impl FnOnce(Tenure) -> F,
    ) -> Result<Exclusive<T>, ExclusiveError>
    where
        F: Future<Output = T>,
    {
        check_name(name)?;
        let engine = self.engine()?;
        let instance = Arc::clone(&self.settings().instance);
        let asked = name.to_owned();
        // Read before each question is sent: a lease counts from when the database had it.
        let asked_at = Instant::now();
        let lock = engine
            .ask(move |store| async move { store.try_exclusive(&asked, &instance).await })
            .await?;
        let Some(lock) = lock else {
            return Ok(Exclusive::StoodDown);
        };
        let tenure = Tenure::default();
        let over = CancellationToken::new();
        let (freed, is_freed) = oneshot::channel();
        engine.spawn(keep(
            Arc::clone(&engine.shared),
            (lock, asked_at),
            tenure.clone(),
            over.clone(),
            freed,
        ));
        // Freed too if this future is dropped.
        let end = over.drop_guard();
        let done = AssertUnwindSafe(async { work(tenure.clone()).await })
            .catch_unwind()
            .await;
        drop(end);
        // So that whoever is told that it is done can begin the next. An error means that the
        // outbox has closed.
        let _ = is_freed.await;
        match done {
            Ok(value) if tenure.is_lost() => Ok(Exclusive::LockLost(value)),
            Ok(value) => Ok(Exclusive::Finished(value)),
            Err(panic) => Err(ExclusiveError::Panicked {
                name: name.to_owned(),
                text: panic_text(panic),
            }),
        }
    }

    /// Takes a lock that `tx` keeps until it ends, so that no two transactions work on one entity
    /// at once. Waits for the transaction that has it.
    ///
    /// `namespace` is a number of the application's choice for a kind of entity; see [`LockId`] for
    /// what an id can be. Taken twice by one transaction, it is taken once. Two transactions that
    /// take two locks in opposite order can deadlock; the database then aborts one of them, with a
    /// transient error.
    ///
    /// On PostgreSQL this is `pg_advisory_xact_lock(namespace, id)`, with two arguments. Locks with
    /// one argument have a key space of their own, shared by everything in the database that uses
    /// them: there an order's number can be the lock of somebody's scheduler. On SQLite it is the
    /// write lock of the file, for every entity.
    ///
    /// # Errors
    ///
    /// Returns [`LockError`] if the namespace is one of the library's own
    /// ([`RESERVED_NAMESPACES`]), or with the database's error.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves it open whether the transaction has the lock.
    pub async fn lock_entity(
        &self,
        tx: &mut S::Tx<'_>,
        namespace: i32,
        id: impl Into<LockId> + Send,
    ) -> Result<(), LockError> {
        lock_through(self.store(), tx, namespace, id.into()).await
    }
}

impl<S: Store, Set> OutboxTx<S, Set> {
    /// Takes a lock that this transaction keeps until it ends. See [`Outbox::lock_entity`].
    ///
    /// # Errors
    ///
    /// As [`Outbox::lock_entity`].
    ///
    /// # Cancel safety
    ///
    /// As [`Outbox::lock_entity`].
    pub async fn lock_entity(
        &mut self,
        namespace: i32,
        id: impl Into<LockId> + Send,
    ) -> Result<(), LockError> {
        let store = self.outbox().store().clone();
        lock_through(&store, self, namespace, id.into()).await
    }
}

async fn lock_through<S: Store>(
    store: &S,
    connection: &mut S::Connection,
    namespace: i32,
    id: LockId,
) -> Result<(), LockError> {
    if RESERVED_NAMESPACES.contains(&namespace) {
        return Err(LockError::ReservedNamespace { namespace });
    }
    store
        .lock_entity(connection, namespace, id)
        .await
        .map_err(LockError::Store)
}

fn check_name(name: &str) -> Result<(), ExclusiveError> {
    if name.is_empty() || name.len() > EXCLUSIVE_NAME_MAX || name.contains('\0') {
        return Err(ExclusiveError::InvalidName {
            name: name.to_owned(),
        });
    }
    Ok(())
}

/// Keeps a lock until `over`, and frees it. On the outbox's own thread, which `work` cannot block.
/// It comes with the time at which it was asked for.
async fn keep<S: Store>(
    shared: Arc<Shared<S>>,
    (mut lock, mut proven_at): (S::Exclusive, Instant),
    tenure: Tenure,
    over: CancellationToken,
    freed: oneshot::Sender<()>,
) {
    loop {
        let ends = tokio::select! {
            () = over.cancelled() => true,
            () = tokio::time::sleep(KEEP_EVERY) => false,
        };
        // Once more at the end, so that a loss which nobody has seen yet is not taken for a tenure.
        let asked_at = Instant::now();
        match tokio::time::timeout_at(proven_at + TRUSTED_FOR, lock.keep()).await {
            Ok(Ok(true)) => proven_at = asked_at,
            Ok(Ok(false)) => tenure.lose(),
            Err(_) => {
                tracing::warn!("an exclusive lock could not be proven in time");
                tenure.lose();
            }
            Ok(Err(error)) => {
                shared.counters.store_errors.one();
                tracing::warn!(
                    error = %ErrorText::from(&error),
                    "an exclusive lock could not be proven"
                );
                if ends || proven_at.elapsed() + KEEP_EVERY > TRUSTED_FOR {
                    tenure.lose();
                }
            }
        }
        if ends || tenure.is_lost() {
            break;
        }
    }
    if let Err(error) = lock.release().await {
        tracing::debug!(
            error = %ErrorText::from(&error),
            "an exclusive lock was not released; the database frees it"
        );
    }
    // Whoever waited may be gone.
    let _ = freed.send(());
}

/// The time in which an exclusive lock is held.
#[derive(Clone, Debug, Default)]
pub struct Tenure {
    lost: CancellationToken,
}

impl Tenure {
    /// Waits until the lock is lost: another instance may begin.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub async fn lost(&self) {
        self.lost.cancelled().await;
    }

    /// Whether the lock is known to be lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost.is_cancelled()
    }

    fn lose(&self) {
        self.lost.cancel();
    }
}

/// What became of [`Outbox::run_exclusive`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[must_use]
pub enum Exclusive<T> {
    /// It was done, and the lock was held from beginning to end.
    Finished(T),
    /// It was done, and the lock was lost, or could not be proven, before its end: another instance
    /// may have begun.
    LockLost(T),
    /// Another instance has the lock. Nothing was done.
    StoodDown,
}

/// Why nothing came of [`Outbox::run_exclusive`].
#[derive(Debug)]
#[non_exhaustive]
pub enum ExclusiveError {
    /// The name is empty, too long, or contains U+0000.
    InvalidName {
        /// The name.
        name: String,
    },
    /// What was to be done panicked. The lock is free.
    Panicked {
        /// The name of the lock.
        name: String,
        /// The text of the panic.
        text: String,
    },
    /// The database could not be asked for the lock.
    Store(StoreError),
}

impl fmt::Display for ExclusiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidName { name } => write!(
                f,
                "the name of an exclusive lock has 1 to {EXCLUSIVE_NAME_MAX} bytes and no U+0000, \
                 unlike {name:?}"
            ),
            Self::Panicked { name, text } => {
                write!(
                    f,
                    "what ran under the exclusive lock `{name}` panicked: {text}"
                )
            }
            Self::Store(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl std::error::Error for ExclusiveError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // Its text is ours, so what is next is what it comes from.
            Self::Store(error) => error.source(),
            _ => None,
        }
    }
}

impl From<StoreError> for ExclusiveError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// Why an entity was not locked.
#[derive(Debug)]
#[non_exhaustive]
pub enum LockError {
    /// The namespace is one of the library's own.
    ReservedNamespace {
        /// The namespace.
        namespace: i32,
    },
    /// The database reported an error.
    Store(StoreError),
}

impl LockError {
    /// Whether the same transaction, run again, may succeed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_transient())
    }
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ReservedNamespace { namespace } => write!(
                f,
                "the lock namespace {namespace} is one of the library's own, {} to {}: choose \
                 another number",
                RESERVED_NAMESPACES.start(),
                RESERVED_NAMESPACES.end()
            ),
            Self::Store(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl std::error::Error for LockError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Store(error) => error.source(),
            Self::ReservedNamespace { .. } => None,
        }
    }
}
