//! An outbox on one page: a shop whose orders and events are in the same database.
//!
//! ```text
//! cargo run --example quickstart
//! DATABASE_URL=postgres://localhost/postgres cargo run --example quickstart
//! ```
//!
//! The first needs no server: it works in a SQLite file that is gone afterwards. The second works
//! in a schema of its own, which it makes and drops.
//!
//! You should see four short stories, and then what the database says about them: a receipt sent
//! milliseconds after the commit, a second click that gets the first one's receipt, a courier that
//! is down and is asked again, and a refund that nobody can make and a person has to look at. The
//! program checks each of them itself and fails if one went another way.
#![expect(clippy::print_stdout, reason = "a program that shows what it does")]

mod database;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use outbox_core::{
    DeadReason, Delivery, Handler, HandlerError, Outbox, OutboxEvent, SettledEvent, SettledResult,
    Store,
};
use outbox_sqlx::PgStore;
use outbox_sqlx::SqliteStore;
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, SqliteConnection};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use database::{PgSchema, SqliteFile};

// --- What happens in the shop ------------------------------------------------------------------

/// An order was paid. However often that is published, it happens once per order.
#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_key = "{order_id}", output = Receipt)]
struct OrderPaid {
    order_id: i64,
    cents: i64,
}

/// What the handler of [`OrderPaid`] returns. It is kept, for whoever publishes the event again.
#[derive(Serialize, Deserialize)]
struct Receipt {
    number: String,
}

/// An order was packed, and a courier has to come for it. A courier is asked again soon.
#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(max_attempts = 3, backoff(base = "200ms", jitter = 0))]
struct OrderPacked {
    order_id: i64,
}

/// An order was cancelled, and its money goes back.
#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderCancelled {
    order_id: i64,
}

// --- Who handles it ----------------------------------------------------------------------------

struct SendReceipt;

impl Handler<OrderPaid> for SendReceipt {
    async fn handle(&self, paid: OrderPaid, _: &Delivery) -> Result<Receipt, HandlerError> {
        let number = format!("R-{}-{}", paid.order_id, paid.cents);
        Ok(Receipt { number })
    }
}

struct CallCourier;

impl Handler<OrderPacked> for CallCourier {
    async fn handle(&self, _: OrderPacked, delivery: &Delivery) -> Result<(), HandlerError> {
        if delivery.attempt().get() == 1 {
            // Any error means: try again later.
            return Err(std::io::Error::other("the courier does not answer").into());
        }
        Ok(())
    }
}

/// A handler can be a function or a closure, too.
async fn refund(_: OrderCancelled) -> Result<(), HandlerError> {
    // No later attempt can succeed, so this one is the last.
    Err(HandlerError::permanent("the card was closed"))
}

// --- The story ---------------------------------------------------------------------------------

async fn tell<S: Shop>(store: S) -> anyhow::Result<()> {
    let (report, mut outcomes) = unbounded_channel();
    let outbox = Outbox::builder(store)
        .on(SendReceipt)
        .on(CallCourier)
        .on(refund)
        // So that the story can wait for what happens in the background.
        .on_settled(move |event| {
            let _ = report.send(event.clone());
        })
        .build()?;
    // Takes over what was not handled right after its commit. Any number of processes run one.
    let relay = outbox.relay().start().await?;

    println!("\n1. Order 1 is paid. The change and the event are committed together.");
    let paid = OrderPaid {
        order_id: 1,
        cents: 4_200,
    };
    let mut tx = outbox.begin().await?;
    S::set_status(&mut tx, 1, "paid").await?;
    let first = tx.publish(&paid).await?;
    let dispatching = tx.commit().await?;

    let committed = Instant::now();
    dispatching.settled().await;
    let elapsed = committed.elapsed();
    ensure!(next(&mut outcomes).await?.result == SettledResult::Processed);
    println!("   The receipt was sent, and that was recorded, {elapsed:.1?} after the commit.");

    println!("\n2. The customer clicks \"pay\" again.");
    let mut tx = outbox.begin().await?;
    let second = tx.publish(&paid).await?;
    tx.rollback().await?;

    let duplicate = second
        .duplicate()
        .context("the second click is no duplicate")?;
    ensure!(duplicate.event_id() == first.event_id());
    let receipt = duplicate.output()?.context("the receipt was not kept")?;
    ensure!(receipt.number == "R-1-4200");
    println!(
        "   No second event. The answer is the first click's receipt, {}.",
        receipt.number
    );

    println!("\n3. Order 2 is packed, but the courier does not answer.");
    let mut tx = outbox.begin().await?;
    S::set_status(&mut tx, 2, "packed").await?;
    tx.publish(&OrderPacked { order_id: 2 }).await?;
    tx.commit().await?;

    let failed = next(&mut outcomes).await?;
    let SettledResult::Retry { after, error } = failed.result else {
        bail!(
            "the first call of the courier ended with {:?}",
            failed.result
        );
    };
    println!(
        "   Attempt {}: {error}. Again in {after:?}.",
        failed.attempt
    );
    let retried = next(&mut outcomes).await?;
    ensure!(retried.attempt == 2 && retried.result == SettledResult::Processed);
    println!("   Attempt {}: the courier is on the way.", retried.attempt);

    println!("\n4. Order 3 is cancelled, but its card was closed.");
    let mut tx = outbox.begin().await?;
    S::set_status(&mut tx, 3, "cancelled").await?;
    tx.publish(&OrderCancelled { order_id: 3 }).await?;
    tx.commit().await?;

    let gave_up = next(&mut outcomes).await?;
    let SettledResult::DeadLetter { reason, error } = gave_up.result else {
        bail!("the refund ended with {:?}", gave_up.result);
    };
    ensure!(reason == DeadReason::Permanent);
    println!("   A dead letter ({reason}: {error}). It is kept until a person has looked at it.");

    relay.shutdown(Duration::from_secs(5)).await?;
    println!("\nThe relay has shut down.");
    show(outbox.store()).await
}

/// Prints what is in the database, and checks that it is what was told.
async fn show<S: Shop>(store: &S) -> anyhow::Result<()> {
    println!("What the database says (the view outbox_events_all):\n");
    let events = store.events().await?;
    print_events(&events);
    let told = events
        .iter()
        .map(|event| (event.status.as_str(), event.attempts));
    ensure!(told.eq([("processed", 1), ("processed", 2), ("dead_letter", 1)]));

    let orders = store.orders().await?.join(", ");
    println!("\nOrders: {orders}.");
    ensure!(orders == "1 paid, 2 packed, 3 cancelled");
    Ok(())
}

/// The next outcome that was recorded.
async fn next(outcomes: &mut UnboundedReceiver<SettledEvent>) -> anyhow::Result<SettledEvent> {
    let outcome = tokio::time::timeout(Duration::from_secs(10), outcomes.recv()).await;
    outcome
        .context("nothing was recorded within 10 seconds")?
        .context("the outbox has ended")
}

// --- The shop's own data -----------------------------------------------------------------------

/// The shop's own statements. They are the same on both databases; sqlx's types are not.
trait Shop: Store {
    async fn set_status(
        connection: &mut Self::Connection,
        order_id: i64,
        status: &str,
    ) -> sqlx::Result<()>;
    async fn orders(&self) -> sqlx::Result<Vec<String>>;
    async fn events(&self) -> sqlx::Result<Vec<EventRow>>;
}

const CREATE: &str = "
    CREATE TABLE orders (id BIGINT PRIMARY KEY, status TEXT NOT NULL);
    INSERT INTO orders (id, status) VALUES (1, 'new'), (2, 'new'), (3, 'new');
";
const SET_STATUS: &str = "UPDATE orders SET status = $2 WHERE id = $1";
const ORDERS: &str = "SELECT CAST(id AS TEXT) || ' ' || status FROM orders ORDER BY id";
const EVENTS: &str = "
    SELECT
        id, name, status, CAST(attempts AS BIGINT) AS attempts,
        last_error, dead_reason, CAST(output AS TEXT) AS output
    FROM outbox_events_all
    ORDER BY id
";

/// A row of the view that shows every event.
#[derive(sqlx::FromRow)]
struct EventRow {
    id: i64,
    name: String,
    status: String,
    attempts: i64,
    last_error: Option<String>,
    dead_reason: Option<String>,
    output: Option<String>,
}

impl Shop for SqliteStore {
    async fn set_status(
        connection: &mut SqliteConnection,
        order_id: i64,
        status: &str,
    ) -> sqlx::Result<()> {
        let update = sqlx::query(SET_STATUS).bind(order_id).bind(status);
        update.execute(connection).await.map(drop)
    }

    async fn orders(&self) -> sqlx::Result<Vec<String>> {
        sqlx::query_scalar(ORDERS).fetch_all(self.pool()).await
    }

    async fn events(&self) -> sqlx::Result<Vec<EventRow>> {
        sqlx::query_as(EVENTS).fetch_all(self.pool()).await
    }
}

impl Shop for PgStore {
    async fn set_status(
        connection: &mut PgConnection,
        order_id: i64,
        status: &str,
    ) -> sqlx::Result<()> {
        let update = sqlx::query(SET_STATUS).bind(order_id).bind(status);
        update.execute(connection).await.map(drop)
    }

    async fn orders(&self) -> sqlx::Result<Vec<String>> {
        sqlx::query_scalar(ORDERS).fetch_all(self.pool()).await
    }

    async fn events(&self) -> sqlx::Result<Vec<EventRow>> {
        sqlx::query_as(EVENTS).fetch_all(self.pool()).await
    }
}

fn print_events(events: &[EventRow]) {
    let line = |columns: [&str; 7]| {
        let [id, name, status, attempts, error, reason, output] = columns;
        println!(
            "{id:>5}  {name:<15}  {status:<11}  {attempts:>8}  {error:<27}  {reason:<11}  {output}"
        );
    };
    line([
        "id",
        "name",
        "status",
        "attempts",
        "last_error",
        "dead_reason",
        "output",
    ]);
    for event in events {
        line([
            &event.id.to_string(),
            &event.name,
            &event.status,
            &event.attempts.to_string(),
            event.last_error.as_deref().unwrap_or("-"),
            event.dead_reason.as_deref().unwrap_or("-"),
            event.output.as_deref().unwrap_or("-"),
        ]);
    }
}

// --- Where it all is ---------------------------------------------------------------------------

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // Without the time, to be easily compared.
    tracing_subscriber::fmt()
        .compact()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(std::io::stdout().is_terminal())
        .with_target(false)
        .without_time()
        .init();

    if let Ok(url) = std::env::var("DATABASE_URL") {
        println!("A shop and its outbox, in a new schema of a PostgreSQL database.");
        let schema = PgSchema::create(&url).await?;
        sqlx::raw_sql(CREATE).execute(schema.store.pool()).await?;
        let told = tell(schema.store.clone()).await;
        schema.remove().await?;
        told
    } else {
        println!("A shop and its outbox, in a new SQLite file.");
        let file = SqliteFile::create().await?;
        sqlx::raw_sql(CREATE).execute(file.store.pool()).await?;
        tell(file.store.clone()).await
    }
}
