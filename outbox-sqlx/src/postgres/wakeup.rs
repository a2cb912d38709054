//! Wake-ups between processes, by LISTEN and NOTIFY.
//!
//! A hint and never data: everything arrives without it, a poll later. It is sent from a connection
//! of the store's own, because a NOTIFY in the publisher's transaction makes commits queue up for a
//! lock of the whole database.

use std::fmt;
use std::time::Duration;

use outbox_core::store::{StoreError, StoreErrorKind, Wakeups};
use sqlx::postgres::{PgListener, PgPoolOptions};
use tokio::time::{Instant, timeout, timeout_at};

use super::PgStore;
use super::query::Query;
use super::sqlstate::failed;

const LISTENING: &str = "listen for wake-ups";

/// How long a silent connection is believed. A connection that is gone without a word looks like
/// one on which nothing happens.
const HEARTBEAT: Duration = Duration::from_secs(30);

/// Sends a wake-up on the channel `$1`.
pub(super) const NOTIFY: &str = "SELECT pg_catalog.pg_notify($1, '')";

/// A subscription to the wake-ups of one outbox, on a connection of its own.
///
/// Dropped, it closes its connection.
pub struct PgWakeups {
    listener: PgListener,
    /// When the connection was last known to live. Kept over calls of `next`, because a caller that
    /// drops and repeats it sooner than every heartbeat would otherwise never send one.
    alive: Instant,
    deadline: Duration,
}

impl fmt::Debug for PgWakeups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgWakeups").finish_non_exhaustive()
    }
}

pub(super) async fn listen(store: &PgStore) -> Result<Option<PgWakeups>, StoreError> {
    if store.is_behind_pooler() {
        // A pooler answers LISTEN with success and delivers nothing.
        return Ok(None);
    }
    let deadline = store.deadline();
    let subscribe = async {
        // A pool of one, which never gives the connection a second life: after an error the whole
        // subscription is made anew, so that the relay knows to look at the table afterwards.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .idle_timeout(None)
            .max_lifetime(None)
            .acquire_timeout(deadline)
            .connect_lazy_with((*store.pool().connect_options()).clone());
        let mut listener = PgListener::connect_with(&pool).await?;
        listener.eager_reconnect(false);
        listener.listen(&store.channel()).await?;
        Ok(listener)
    };
    match timeout(deadline, subscribe).await {
        Ok(Ok(listener)) => Ok(Some(PgWakeups {
            listener,
            alive: Instant::now(),
            deadline,
        })),
        Ok(Err(error)) => Err(failed(LISTENING, error)),
        Err(_) => Err(StoreError::new(StoreErrorKind::TimedOut, LISTENING)),
    }
}

impl Wakeups for PgWakeups {
    async fn next(&mut self) -> Result<(), StoreError> {
        loop {
            let heartbeat = self.alive + HEARTBEAT;
            match timeout_at(heartbeat, self.listener.try_recv()).await {
                Ok(Ok(Some(_))) => {
                    // Any number of wake-ups ask for one look.
                    while self.listener.next_buffered().is_some() {}
                    self.alive = Instant::now();
                    return Ok(());
                }
                // The listener noticed that the connection is gone. What was sent meanwhile is
                // lost, so the caller has to know.
                Ok(Ok(None)) => {
                    return Err(StoreError::new(StoreErrorKind::Unreachable, LISTENING));
                }
                Ok(Err(error)) => return Err(failed(LISTENING, error)),
                Err(_) => self.beat().await?,
            }
        }
    }
}

impl PgWakeups {
    async fn beat(&mut self) -> Result<(), StoreError> {
        let beat = sqlx::query("SELECT 1").execute(&mut self.listener);
        match timeout(self.deadline, beat).await {
            Ok(Ok(_)) => {
                self.alive = Instant::now();
                Ok(())
            }
            Ok(Err(error)) => Err(failed(LISTENING, error)),
            Err(_) => Err(StoreError::new(StoreErrorKind::TimedOut, LISTENING)),
        }
    }
}

pub(super) async fn notify(store: &PgStore) -> Result<(), StoreError> {
    let query = Query::new(&store.sql().notify).bind(store.channel());
    store.ask("wake other processes", query).await?;
    Ok(())
}
