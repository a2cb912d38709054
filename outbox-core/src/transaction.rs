//! The outbox's own transaction: it commits and then dispatches, and cannot do it the other way
//! round.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;

use tokio::sync::mpsc;

use crate::engine::inline::{BornLeased, Handover};
use crate::event::{EventId, OutboxEvent};
use crate::event_set::{AnyEvent, EventOf};
use crate::lease::LeaseToken;
use crate::outbox::{Dispatching, Outbox, no_answer};
use crate::publish::{PublishError, PublishOptions, Published};
use crate::store::{BornLease, NewEvent, Settlement, Store, StoreError};

/// A transaction that [`Outbox::begin`] began.
///
/// It dereferences to the database connection, so the application's own statements go through
/// `&mut *tx`. Events published through it are dispatched in this process once it has committed:
/// their rows are *born leased*, so no relay takes them meanwhile.
///
/// Dropping it rolls back, and says so in the log if events were published in it.
///
/// `Set` is the outbox's: which events it accepts.
pub struct OutboxTx<S: Store, Set = AnyEvent> {
    outbox: Outbox<S>,
    /// Taken by the commit or the rollback.
    tx: Option<S::Tx<'static>>,
    born: Vec<BornLeased>,
    published: usize,
    /// How many of them nobody has to dispatch any more.
    settled: usize,
    /// Rows that it cancels.
    cancelled: Vec<i64>,
    /// What is to be recorded of rows whose dispatch before the commit was dropped.
    abandoned: Vec<Settlement>,
    waiter: mpsc::Sender<()>,
    dispatching: Option<Dispatching>,
    set: PhantomData<fn(Set)>,
}

impl<S: Store, Set> OutboxTx<S, Set> {
    pub(crate) fn new(outbox: Outbox<S>, tx: S::Tx<'static>) -> Self {
        let (waiter, dispatching) = Dispatching::new();
        Self {
            outbox,
            tx: Some(tx),
            born: Vec::new(),
            published: 0,
            settled: 0,
            cancelled: Vec::new(),
            abandoned: Vec::new(),
            waiter,
            dispatching: Some(dispatching),
            set: PhantomData,
        }
    }

    pub(crate) fn outbox(&self) -> &Outbox<S> {
        &self.outbox
    }

    /// Publishes an event in this transaction.
    ///
    /// One statement, and a second one where a dedup key is taken.
    ///
    /// # Errors
    ///
    /// Returns [`PublishError`]. All but its `Store` variant leave the transaction usable.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves it open whether the row was inserted. If the transaction is
    /// committed all the same, the event waits for its first lease to expire and is then handled
    /// by a relay.
    pub async fn publish<E: EventOf<Set>>(
        &mut self,
        event: &E,
    ) -> Result<Published<E>, PublishError> {
        self.publish_with(event, &PublishOptions::default()).await
    }

    /// Publishes an event with options. An event with a delay is left to the relays.
    ///
    /// # Errors
    ///
    /// As [`publish`](Self::publish).
    ///
    /// # Cancel safety
    ///
    /// As [`publish`](Self::publish).
    pub async fn publish_with<E: EventOf<Set>>(
        &mut self,
        event: &E,
        options: &PublishOptions,
    ) -> Result<Published<E>, PublishError> {
        let rows = self.outbox.prepare_all([event], options)?;
        let mut answers = self.insert(rows).await?;
        answers
            .pop()
            .ok_or_else(|| PublishError::Store(no_answer()))
    }

    /// Publishes any number of events of one type with one statement, and answers in their order.
    ///
    /// Nothing is inserted if one of them is refused. Of two with the same dedup key the second is
    /// a duplicate of the first.
    ///
    /// # Errors
    ///
    /// As [`publish`](Self::publish).
    ///
    /// # Cancel safety
    ///
    /// As [`publish`](Self::publish).
    pub async fn publish_all<'e, E: EventOf<Set>>(
        &mut self,
        events: impl IntoIterator<Item = &'e E>,
    ) -> Result<Vec<Published<E>>, PublishError> {
        let rows = self
            .outbox
            .prepare_all(events, &PublishOptions::default())?;
        self.insert(rows).await
    }

    /// Commits, and hands what was published to its handlers.
    ///
    /// It returns when the commit does; [`Dispatching::settled`] waits for the handlers.
    ///
    /// # A commit can succeed without its rows
    ///
    /// On PostgreSQL the COMMIT of a transaction in which a statement had failed rolls back and
    /// reports no error. No handler is called then: each row is looked up first.
    ///
    /// # Errors
    ///
    /// After an error it is *unknown* whether the transaction has committed. Nothing is dispatched
    /// here; if its events exist they are given back and a relay handles them. Do not publish them
    /// again without a dedup key.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future is like an error: unknown, and the rows decide.
    pub async fn commit(mut self) -> Result<Dispatching, StoreError> {
        self.settle_abandoned().await?;
        let Some(tx) = self.tx.take() else {
            return Err(no_answer());
        };
        let handoff = Handoff {
            outbox: &self.outbox,
            born: std::mem::take(&mut self.born),
        };
        self.outbox.store().commit(tx).await?;
        let for_relays = self.published - self.settled > handoff.born.len();
        handoff.dispatch();
        // Those that waited behind what was cancelled are due now.
        if for_relays || !self.cancelled.is_empty() {
            self.outbox.wake();
        }
        self.outbox.tell_cancelled(&self.cancelled);
        // Every path but this one has given it away already.
        self.dispatching.take().ok_or_else(no_answer)
    }

    /// Rolls back. No event of this transaction is ever handled.
    ///
    /// # Errors
    ///
    /// Returns the store's error. The transaction is rolled back all the same, by the database,
    /// when its connection ends.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future rolls back all the same.
    pub async fn rollback(mut self) -> Result<(), StoreError> {
        self.published = 0;
        match self.tx.take() {
            Some(tx) => self.outbox.store().rollback(tx).await,
            None => Ok(()),
        }
    }

    async fn insert<E: OutboxEvent>(
        &mut self,
        mut rows: Vec<NewEvent>,
    ) -> Result<Vec<Published<E>>, PublishError> {
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        // One per statement and not per transaction: SQLite gives the number of a row that a
        // rolled-back savepoint removed to the next one, and by number and token the next one
        // would then be taken for the first.
        let token = LeaseToken::random();
        let places: Vec<_> = rows.iter_mut().map(|row| self.lease(row, token)).collect();
        let Some(tx) = self.tx.as_mut() else {
            return Err(PublishError::Store(no_answer()));
        };
        let answers = self.outbox.store().insert(tx, &rows).await?;
        let mut published = Vec::with_capacity(answers.len());
        for ((row, place), answer) in rows.into_iter().zip(places).zip(answers) {
            let answer = Published::of(answer, &row);
            if let Published::Inserted(id) = &answer {
                self.published += 1;
                if let Some(place) = place {
                    self.born.push(BornLeased {
                        id: *id,
                        token,
                        name: row.name,
                        version: row.version,
                        payload: row.payload,
                        headers: row.headers,
                        ordering_key: row.ordering_key,
                        priority: row.priority,
                        max_attempts: row.max_attempts,
                        waiter: Some(self.waiter.clone()),
                        _place: place,
                    });
                }
            }
            published.push(answer);
        }
        Ok(published)
    }

    /// Inserts one row that is dispatched before the commit, under the lease it says.
    pub(crate) async fn insert_held<E: OutboxEvent>(
        &mut self,
        rows: &[NewEvent],
    ) -> Result<Published<E>, PublishError> {
        let tx = self.tx.as_mut().ok_or_else(no_answer)?;
        let mut answers = self.outbox.store().insert(tx, rows).await?;
        let answer = answers.pop().zip(rows.last()).ok_or_else(no_answer)?;
        let answer = Published::of(answer.0, answer.1);
        if answer.is_inserted() {
            self.published += 1;
        }
        Ok(answer)
    }

    pub(crate) fn count_cancelled(&mut self, event: EventId) {
        self.cancelled.push(event.row());
    }

    pub(crate) fn count_settled(&mut self) {
        self.settled += 1;
    }

    /// The connection, and where to note what is dropped half way.
    pub(crate) fn parts(
        &mut self,
    ) -> Result<(&mut S::Connection, &mut Vec<Settlement>), StoreError> {
        let tx = self.tx.as_mut().ok_or_else(no_answer)?;
        Ok((tx, &mut self.abandoned))
    }

    /// Decides whether a row is born leased, and if so reserves its place in the queue.
    fn lease(
        &self,
        row: &mut NewEvent,
        token: LeaseToken,
    ) -> Option<tokio::sync::OwnedSemaphorePermit> {
        let settings = self.outbox.settings();
        let accepting = self.outbox.engine().is_ok_and(|engine| {
            !engine.shared.stopping.is_cancelled()
                && !engine.shared.inline_refused.load(Ordering::Relaxed)
        });
        let inline = settings.inline.on
            && accepting
            && row.delay.is_zero()
            // Its only attempt, charged now, would be lost with this process.
            && row.max_attempts.get() > 1
            && self
                .outbox
                .registry()
                .reading(row.name, row.version)
                .is_some_and(|handlers| handlers.have_room());
        if !inline {
            return None;
        }
        let place = std::sync::Arc::clone(self.outbox.places())
            .try_acquire_owned()
            .ok()?;
        row.lease = Some(BornLease {
            token,
            duration: settings.inline.lease,
            instance: std::sync::Arc::clone(&settings.instance),
        });
        Some(place)
    }
}

/// What a transaction published, until it is known whether it has committed. Dropped before that,
/// because the commit failed or its future was dropped, it has the rows given back.
struct Handoff<'a, S: Store> {
    outbox: &'a Outbox<S>,
    born: Vec<BornLeased>,
}

impl<S: Store> Handoff<'_, S> {
    fn dispatch(mut self) {
        self.send(Handover::Committed);
    }

    fn send(&mut self, handover: fn(Vec<BornLeased>) -> Handover) {
        let born = std::mem::take(&mut self.born);
        if born.is_empty() {
            return;
        }
        if let Ok(engine) = self.outbox.engine() {
            // Fails only once the outbox has closed; then the leases expire.
            let _ = engine.inline.send(handover(born));
        }
    }
}

impl<S: Store> Drop for Handoff<'_, S> {
    fn drop(&mut self) {
        self.send(Handover::Unknown);
    }
}

impl<S: Store, Set> Deref for OutboxTx<S, Set> {
    type Target = S::Connection;

    fn deref(&self) -> &S::Connection {
        self.tx
            .as_ref()
            .expect("only a commit or a rollback takes it, and both consume `self`")
    }
}

impl<S: Store, Set> DerefMut for OutboxTx<S, Set> {
    fn deref_mut(&mut self) -> &mut S::Connection {
        self.tx
            .as_mut()
            .expect("only a commit or a rollback takes it, and both consume `self`")
    }
}

impl<S: Store, Set> Drop for OutboxTx<S, Set> {
    fn drop(&mut self) {
        if self.tx.is_some() && self.published > 0 {
            tracing::warn!(
                events = self.published,
                "a transaction of the outbox was dropped; it rolls back, and its events with it"
            );
        }
    }
}

impl<S: Store, Set> fmt::Debug for OutboxTx<S, Set> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboxTx")
            .field("published", &self.published)
            .finish_non_exhaustive()
    }
}
