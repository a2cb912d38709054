//! The shop: its orders, what happens to them, and who tells the broker.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use outbox_core::{Delivery, EventId, Handler, HandlerError, OutboxEvent, Store};
use outbox_sqlx::PgStore;
use outbox_sqlx::SqliteStore;
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, SqliteConnection};

use crate::stream::Stream;

/// An order was paid. Whoever hears of it can rely on it, so it goes through the outbox.
#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(
    name = "order.paid",
    dedup_key = "{order_id}",
    output = Stored,
    // Short waits and many of them, to be watched. The defaults span two hours.
    backoff(base = "200ms", max = "1s"),
    max_attempts = 100
)]
pub(crate) struct OrderPaid {
    pub(crate) order_id: i64,
    pub(crate) cents: i64,
}

/// Where the broker keeps an event: its name for it, which is kept with the row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Stored {
    pub(crate) sequence: u64,
}

/// The page of an order could be in the cache. Nothing is wrong if it is not, so it is dispatched
/// directly and never has a row.
#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(name = "cache.warm")]
pub(crate) struct CacheWarm {
    pub(crate) order_id: i64,
}

/// What the stream answered to an attempt.
#[derive(Clone, Copy)]
pub(crate) struct Answer {
    pub(crate) event: EventId,
    pub(crate) attempt: u32,
    pub(crate) sequence: u64,
    pub(crate) duplicate: bool,
}

/// All answers so far, in the order in which they came.
#[derive(Clone, Default)]
pub(crate) struct Answers(Arc<Mutex<Vec<Answer>>>);

impl Answers {
    fn push(&self, answer: Answer) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(answer);
    }

    pub(crate) fn all(&self) -> Vec<Answer> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// The last one about an event.
    pub(crate) fn about(&self, event: EventId) -> Option<Answer> {
        self.all().into_iter().rfind(|answer| answer.event == event)
    }
}

/// Tells the broker of paid orders.
pub(crate) struct TellBroker {
    pub(crate) stream: Stream,
    pub(crate) answers: Answers,
}

impl Handler<OrderPaid> for TellBroker {
    async fn handle(&self, paid: OrderPaid, delivery: &Delivery) -> Result<Stored, HandlerError> {
        let event = delivery.event_id();
        let sent = self.stream.send(event, serde_json::to_vec(&paid)?).await;
        let answer = sent.map_err(HandlerError::retry)?;
        self.answers.push(Answer {
            event,
            attempt: delivery.attempt().get(),
            sequence: answer.sequence,
            duplicate: answer.duplicate,
        });
        Ok(Stored {
            sequence: answer.sequence,
        })
    }
}

impl Handler<CacheWarm> for Stream {
    async fn handle(&self, warm: CacheWarm, _: &Delivery) -> Result<(), HandlerError> {
        let mentioned = self.mention(serde_json::to_vec(&warm)?).await;
        mentioned.map_err(HandlerError::retry)
    }
}

// --- The shop's own data -----------------------------------------------------------------------

/// The shop's own statements. They are the same on both databases; sqlx's types are not.
pub(crate) trait Shop: Store {
    async fn pay(connection: &mut Self::Connection, order_id: i64) -> sqlx::Result<()>;
    async fn paid(&self) -> sqlx::Result<BTreeSet<i64>>;
    async fn waiting(&self) -> sqlx::Result<i64>;
}

pub(crate) const CREATE: &str = "
    CREATE TABLE orders (id BIGINT PRIMARY KEY, status TEXT NOT NULL);
    INSERT INTO orders (id, status)
    WITH RECURSIVE counted (id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM counted WHERE id < 25)
    SELECT id, 'new' FROM counted;
";
const PAY: &str = "UPDATE orders SET status = 'paid' WHERE id = $1";
const PAID: &str = "SELECT id FROM orders WHERE status = 'paid'";
const WAITING: &str = "
    SELECT count(*) FROM outbox_events_all WHERE status IN ('pending', 'in_progress', 'failed')
";

impl Shop for SqliteStore {
    async fn pay(connection: &mut SqliteConnection, order_id: i64) -> sqlx::Result<()> {
        let update = sqlx::query(PAY).bind(order_id);
        update.execute(connection).await.map(drop)
    }

    async fn paid(&self) -> sqlx::Result<BTreeSet<i64>> {
        let ids = sqlx::query_scalar(PAID).fetch_all(self.pool()).await?;
        Ok(ids.into_iter().collect())
    }

    async fn waiting(&self) -> sqlx::Result<i64> {
        sqlx::query_scalar(WAITING).fetch_one(self.pool()).await
    }
}

impl Shop for PgStore {
    async fn pay(connection: &mut PgConnection, order_id: i64) -> sqlx::Result<()> {
        let update = sqlx::query(PAY).bind(order_id);
        update.execute(connection).await.map(drop)
    }

    async fn paid(&self) -> sqlx::Result<BTreeSet<i64>> {
        let ids = sqlx::query_scalar(PAID).fetch_all(self.pool()).await?;
        Ok(ids.into_iter().collect())
    }

    async fn waiting(&self) -> sqlx::Result<i64> {
        sqlx::query_scalar(WAITING).fetch_one(self.pool()).await
    }
}
