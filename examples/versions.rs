//! An event that changes, and what becomes of the rows that were written before.
//!
//! ```text
//! cargo run --example versions
//! DATABASE_URL=postgres://localhost/postgres cargo run --example versions
//! ```
//!
//! The first needs no server: it works in a SQLite file that is gone afterwards. The second works
//! in a schema of its own, which it makes and drops.
//!
//! You should see, but for the first line on PostgreSQL:
//!
//! ```text
//! An outbox in a new SQLite file.
//! Release 1 publishes order 1, of 42 euros, and that it was packed.
//! Release 2 publishes order 2, of 1999 cents.
//! Release 3 starts, and handles what they have left.
//!   Order 1: 4200 cents in EUR, published in version 1 as order.paid.
//!   Order 1 is packed, published in version 1 as order.packed.
//!   Order 2: 1999 cents in EUR, published in version 2 as order.paid.
//! Release 3 publishes order 3, of 500 cents in CHF, and is rolled back.
//! Release 2 runs again, and leaves 1 event of order.paid alone: it is of version 3.
//! Release 3 is back.
//!   Order 3: 500 cents in CHF, published in version 3 as order.paid.
//! ```
//!
//! You cannot see what does not compile: release 3 without one of its two upcasts, or without one
//! of the steps between the types.
#![expect(clippy::print_stdout, reason = "a program that shows what it does")]

mod database;

use std::time::Duration;

use anyhow::{Context, ensure};
use outbox_core::{
    Cadence, Delivery, EventId, Handler, HandlerError, Outbox, OutboxEvent, Relay, Store,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use database::{PgSchema, SqliteFile};

// --- Three releases ----------------------------------------------------------------------------

/// What release 1 published. Release 3 needs nothing of it but that it can be read; that it can be
/// published as well is for this program, which is all three.
#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(name = "order.paid")]
struct OrderPaidV1 {
    order_id: u64,
    euros: u64,
}

/// What release 2 published.
#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(name = "order.paid", version = 2, upcast(from = OrderPaidV1, version = 1))]
struct OrderPaidV2 {
    order_id: u64,
    cents: u64,
}

/// What release 3 publishes, and what its handler gets, whoever published it.
#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(name = "order.paid", version = 3)]
#[outbox(upcast(from = OrderPaidV1, version = 1), upcast(from = OrderPaidV2, version = 2))]
struct OrderPaid {
    order_id: u64,
    cents: u64,
    currency: String,
}

impl TryFrom<OrderPaidV1> for OrderPaidV2 {
    type Error = &'static str;

    fn try_from(paid: OrderPaidV1) -> Result<Self, &'static str> {
        // A payload that does not fit becomes a dead letter, which keeps it.
        let cents = paid.euros.checked_mul(100).ok_or("too many euros")?;
        let order_id = paid.order_id;
        Ok(Self { order_id, cents })
    }
}

impl From<OrderPaidV2> for OrderPaid {
    fn from(paid: OrderPaidV2) -> Self {
        Self {
            order_id: paid.order_id,
            cents: paid.cents,
            currency: "EUR".to_owned(),
        }
    }
}

/// What release 1 called it.
#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPacked {
    order_id: u64,
}

/// What release 3 calls it.
#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(alias = "order.packed")]
struct ParcelReady {
    order_id: u64,
}

// --- Who handles it ----------------------------------------------------------------------------

/// Sends on what it was given, with its id.
struct Tell(UnboundedSender<(EventId, String)>);

impl Tell {
    fn tell(&self, what: String, delivery: &Delivery) {
        let _ = self.0.send((delivery.event_id(), what));
    }
}

impl Handler<OrderPaid> for Tell {
    async fn handle(&self, paid: OrderPaid, delivery: &Delivery) -> Result<(), HandlerError> {
        let OrderPaid {
            order_id,
            cents,
            currency,
        } = paid;
        let version = delivery.version();
        let what = format!(
            "Order {order_id}: {cents} cents in {currency}, published in version {version}"
        );
        self.tell(what, delivery);
        Ok(())
    }
}

impl Handler<ParcelReady> for Tell {
    async fn handle(&self, ready: ParcelReady, delivery: &Delivery) -> Result<(), HandlerError> {
        let (order_id, version) = (ready.order_id, delivery.version());
        let what = format!("Order {order_id} is packed, published in version {version}");
        self.tell(what, delivery);
        Ok(())
    }
}

// --- The story ---------------------------------------------------------------------------------

async fn tell<S: Store>(store: S) -> anyhow::Result<()> {
    println!("Release 1 publishes order 1, of 42 euros, and that it was packed.");
    publish(
        &store,
        &OrderPaidV1 {
            order_id: 1,
            euros: 42,
        },
    )
    .await?;
    publish(&store, &OrderPacked { order_id: 1 }).await?;
    println!("Release 2 publishes order 2, of 1999 cents.");
    publish(
        &store,
        &OrderPaidV2 {
            order_id: 2,
            cents: 1_999,
        },
    )
    .await?;

    println!("Release 3 starts, and handles what they have left.");
    run_release_3(&store, 3).await?;

    println!("Release 3 publishes order 3, of 500 cents in CHF, and is rolled back.");
    let currency = "CHF".to_owned();
    let paid = OrderPaid {
        order_id: 3,
        cents: 500,
        currency,
    };
    publish(&store, &paid).await?;

    let release_2 = Outbox::builder(store.clone())
        .on(|_: OrderPaidV2| async { Err::<(), _>(HandlerError::permanent("not one of these")) })
        .build()?;
    let relay = only_when_told(&release_2).await?;
    let report = relay.pass(Cadence::Sweep).await?;
    relay.shutdown(LIMIT).await?;
    ensure!(report.dispatched == 0);
    for (name, rows) in &report.unhandled {
        let version = report
            .later_versions
            .get(name)
            .context("the name is known")?;
        println!(
            "Release 2 runs again, and leaves {rows} event of {name} alone: it is of version {version}."
        );
    }

    println!("Release 3 is back.");
    run_release_3(&store, 1).await
}

/// Publishes in a transaction of its own, and leaves the event to a relay.
async fn publish<S: Store, E: OutboxEvent>(store: &S, event: &E) -> anyhow::Result<()> {
    let outbox = Outbox::builder(store.clone()).build()?;
    let mut tx = store.begin().await?;
    outbox.publish(&mut tx, event).await?;
    store.commit(tx).await?;
    Ok(())
}

/// Starts release 3, has it handle what there is, and prints what its handlers were given.
async fn run_release_3<S: Store>(store: &S, events: u64) -> anyhow::Result<()> {
    let (report, mut handled) = unbounded_channel();
    let outbox = Outbox::builder(store.clone())
        .on::<OrderPaid, _>(Tell(report.clone()))
        .on::<ParcelReady, _>(Tell(report))
        .build()?;
    let relay = only_when_told(&outbox).await?;
    let report = relay.pass(Cadence::Sweep).await?;
    relay.shutdown(LIMIT).await?;
    ensure!(report.dispatched == events && report.unhandled.is_empty());
    let mut told = Vec::new();
    for _ in 0..events {
        told.push(handled.try_recv().context("an event was not handled")?);
    }
    told.sort();
    for (id, what) in told {
        let row = outbox.find(id).await?.context("the event is gone")?;
        println!("  {what} as {}.", row.name);
    }
    Ok(())
}

/// So that the story has its order: what a relay does at any time, this one does when told.
async fn only_when_told<S: Store>(outbox: &Outbox<S>) -> anyhow::Result<Relay<S>> {
    let relay = outbox.relay().cadences_only().sweep_interval(A_DAY);
    Ok(relay.backstop_interval(A_DAY).start().await?)
}

const A_DAY: Duration = Duration::from_secs(24 * 60 * 60);
const LIMIT: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    if let Ok(url) = std::env::var("DATABASE_URL") {
        println!("An outbox in a new schema of a PostgreSQL database.");
        let schema = PgSchema::create(&url).await?;
        let told = tell(schema.store.clone()).await;
        schema.remove().await?;
        told
    } else {
        println!("An outbox in a new SQLite file.");
        let file = SqliteFile::create().await?;
        tell(file.store.clone()).await
    }
}
