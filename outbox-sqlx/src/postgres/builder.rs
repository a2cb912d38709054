//! The settings of a store, and their bounds.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use outbox_core::store::{StoreError, StoreErrorKind};
use sqlx::PgPool;

use super::catalogue::Catalogue;
use super::names::Names;
use super::{Inner, PgStore};

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
    pub(super) fn new(pool: PgPool) -> Self {
        Self {
            pool,
            schema: "outbox".to_owned(),
            table: "outbox_events".to_owned(),
            connections: const { NonZeroU32::new(4).unwrap() },
            deadline: Duration::from_secs(10),
            pooler: false,
        }
    }

    /// The schema that holds the outbox: any name of 1 to 63 bytes. Defaults to `outbox`.
    ///
    /// It may hold other things, and more than one outbox.
    pub fn schema(mut self, name: impl Into<String>) -> Self {
        self.schema = name.into();
        self
    }

    /// The table of unsettled events: any name of 1 to 46 bytes. Defaults to `outbox_events`.
    ///
    /// The other tables have its name and an ending, such as `outbox_events_history`.
    pub fn table(mut self, name: impl Into<String>) -> Self {
        self.table = name.into();
        self
    }

    /// How many connections the store may open for itself, besides one that listens for wake-ups
    /// and one for each exclusive lock that is had. Defaults to 4.
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
                own: Mutex::default(),
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
