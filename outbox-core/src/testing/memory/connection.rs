//! Transactions: what is staged until the commit.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::time::SystemTime;

use async_trait::async_trait;
use tokio::sync::OwnedMutexGuard;

use super::database::{Database, Row};
use crate::store::{
    EventRef, EventState, Existing, Insertion, NewEvent, Part, Settled, Settlement, StoreError,
};

/// A writing transaction of a [`MemoryStore`](super::MemoryStore). Dropping it rolls it back.
pub struct MemoryTx<'t> {
    connection: MemoryConnection,
    // Declared after the connection: the next transaction begins when this one has left nothing.
    _writer: OwnedMutexGuard<()>,
    _borrow: PhantomData<&'t ()>,
}

/// What a publish writes through: the rows of a transaction that has not ended.
#[derive(Debug, Default)]
pub struct MemoryConnection {
    staged: Vec<Row>,
    /// Outcomes of committed rows.
    settlements: Vec<Settlement>,
    /// Committed rows that it cancels.
    cancelled: Vec<i64>,
    aborted: bool,
}

type Staged = (Vec<Row>, Vec<Settlement>, Vec<i64>);

/// A point of a transaction to which it can be rolled back.
#[derive(Clone, Copy, Debug)]
pub struct Savepoint(usize);

/// A part of a transaction, and what is there again if it is undone.
pub(super) struct MemoryPart<'c> {
    connection: &'c mut MemoryConnection,
    before: Option<Staged>,
}

impl<'c> MemoryPart<'c> {
    pub(super) fn begin(connection: &'c mut MemoryConnection) -> Self {
        Self {
            before: Some((
                connection.staged.clone(),
                connection.settlements.clone(),
                connection.cancelled.clone(),
            )),
            connection,
        }
    }
}

#[async_trait]
impl Part<MemoryConnection> for MemoryPart<'_> {
    fn connection(&mut self) -> &mut MemoryConnection {
        self.connection
    }

    async fn keep(mut self: Box<Self>) -> Result<(), StoreError> {
        self.before = None;
        Ok(())
    }

    async fn undo(self: Box<Self>) -> Result<(), StoreError> {
        Ok(())
    }
}

impl Drop for MemoryPart<'_> {
    fn drop(&mut self) {
        if let Some((staged, settlements, cancelled)) = self.before.take() {
            self.connection.staged = staged;
            self.connection.settlements = settlements;
            self.connection.cancelled = cancelled;
        }
    }
}

impl MemoryTx<'_> {
    pub(super) fn new(writer: OwnedMutexGuard<()>) -> Self {
        Self {
            connection: MemoryConnection::default(),
            _writer: writer,
            _borrow: PhantomData,
        }
    }

    pub(super) fn apply(self, database: &mut Database, now: SystemTime) {
        if !self.connection.aborted {
            for row in self.connection.staged {
                database.add(row, now);
            }
            for row in self.connection.cancelled {
                database.cancel(row, now);
            }
            database.settle(&self.connection.settlements, now);
        }
    }
}

impl Deref for MemoryTx<'_> {
    type Target = MemoryConnection;

    fn deref(&self) -> &MemoryConnection {
        &self.connection
    }
}

impl DerefMut for MemoryTx<'_> {
    fn deref_mut(&mut self) -> &mut MemoryConnection {
        &mut self.connection
    }
}

impl fmt::Debug for MemoryTx<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MemoryTx").field(&self.connection).finish()
    }
}

impl MemoryConnection {
    /// Marks where the transaction stands.
    #[must_use]
    pub fn savepoint(&self) -> Savepoint {
        Savepoint(self.staged.len())
    }

    /// Takes back everything inserted since `savepoint`.
    pub fn rollback_to(&mut self, savepoint: Savepoint) {
        self.staged.truncate(savepoint.0);
    }

    /// Does what a failed statement does to a PostgreSQL transaction whose error is ignored: the
    /// commit will answer `Ok` and write nothing.
    pub fn abort(&mut self) {
        self.aborted = true;
    }

    /// Settles rows that this transaction has inserted at once, and committed ones when it commits.
    pub(super) fn settle(
        &mut self,
        database: &mut Database,
        settlements: &[Settlement],
        now: SystemTime,
    ) -> Vec<Settled> {
        let settle = |settlement: &Settlement| self.settle_one(database, settlement, now);
        settlements.iter().map(settle).collect()
    }

    fn settle_one(
        &mut self,
        database: &mut Database,
        settlement: &Settlement,
        now: SystemTime,
    ) -> Settled {
        let lease = settlement.lease;
        let inserted = self.staged.iter_mut().find(|row| {
            row.is_unsettled()
                && row.columns.id.row() == lease.row
                && row.columns.lease_token == Some(lease.token)
        });
        if let Some(row) = inserted {
            row.settle(&settlement.outcome, now);
        } else if database.held(lease).is_some() {
            self.settlements.push(settlement.clone());
        } else {
            return Settled::LeaseLost;
        }
        Settled::Recorded
    }

    /// Cancels a row that this transaction has inserted at once, and a committed one when it commits.
    pub(super) fn cancel(
        &mut self,
        database: &mut Database,
        event: &EventRef,
        now: SystemTime,
    ) -> Option<Existing> {
        let inserted = self.staged.iter_mut().find(|row| row.is(event));
        if let Some(row) = inserted {
            let found = row.existing(now);
            if row.is_unsettled() {
                row.cancel(now);
            }
            return Some(found);
        }
        let (id, mut found) = match event {
            EventRef::Id(id) => {
                let row = database.rows.get(&id.row());
                let row = row.filter(|row| row.columns.id == *id);
                (*id, row.map(|row| row.existing(now)))
            }
            EventRef::Key { name, key } => {
                let found = database.holder(name, key, now)?;
                (found.id, Some(found))
            }
        };
        let is_cancelled = |row: i64| self.cancelled.contains(&row);
        if let Some(found) = found.as_mut().filter(|_| is_cancelled(id.row())) {
            found.state = EventState::Cancelled;
        }
        let parts: Vec<(i64, EventState)> = database
            .unsettled_rows_of(id)
            .map(|row| (row.columns.id.row(), row.state(now)))
            .filter(|(row, _)| !is_cancelled(*row))
            .collect();
        let Some((_, first)) = parts.first() else {
            return found;
        };
        let in_progress = EventState::InProgress;
        let state = match parts.iter().any(|(_, state)| *state == in_progress) {
            true => in_progress,
            false => *first,
        };
        self.cancelled.extend(parts.iter().map(|(row, _)| row));
        Some(Existing {
            id,
            state,
            output: None,
            fingerprint: None,
        })
    }

    /// Whether an event of this ordering key that is inserted now would be its first.
    pub(super) fn is_first(&self, database: &Database, key: &str) -> bool {
        let staged = self.staged.iter();
        let mut rows = staged.chain(database.rows.values());
        !rows.any(|row| {
            row.columns.ordering_key.as_deref() == Some(key)
                && row.blocks_later()
                && !self.cancelled.contains(&row.columns.id.row())
        })
    }

    pub(super) fn insert(
        &mut self,
        database: &mut Database,
        events: &[NewEvent],
        now: SystemTime,
    ) -> Vec<Insertion> {
        events
            .iter()
            .map(|event| self.insert_one(database, event, now))
            .collect()
    }

    fn insert_one(
        &mut self,
        database: &mut Database,
        event: &NewEvent,
        now: SystemTime,
    ) -> Insertion {
        if let Some(existing) = self.holder(database, event, now) {
            return Insertion::Existing(existing);
        }
        let id = database.next_id();
        self.staged.push(Row::new(id, event, now));
        Insertion::Inserted(id)
    }

    /// The event that holds the key already: committed, or inserted by this transaction.
    fn holder(&self, database: &Database, event: &NewEvent, now: SystemTime) -> Option<Existing> {
        let key = event.dedup_key.as_deref()?;
        self.staged
            .iter()
            .find(|row| {
                row.columns.name == event.name && row.columns.dedup_key.as_deref() == Some(key)
            })
            .map(|row| row.existing(now))
            .or_else(|| database.holder(event.name, key, now))
    }
}
