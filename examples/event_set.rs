//! A closed set of events: the compiler knows which there are, and that each has a handler.
//!
//! ```text
//! cargo run --example event_set
//! DATABASE_URL=postgres://localhost/postgres cargo run --example event_set
//! ```
//!
//! The first needs no server: it works in a SQLite file that is gone afterwards. The second works
//! in a schema of its own, which it makes and drops.
//!
//! You should see, but for the first line on PostgreSQL:
//!
//! ```text
//! An outbox in a new SQLite file.
//! The set: order.paid, alert.raised.
//! Two of its events are published and committed.
//! A receipt is sent for order 7.
//! Somebody is called: the courier does not answer.
//! Row 1 is order.paid of order 7.
//! Row 2 is alert.raised: the courier does not answer.
//! Another event is none of them: no event of the set has the name "cache.warm".
//! ```
//!
//! You cannot see what does not compile. Publish `CacheWarm` or give it a handler, or take away one
//! of the two handlers, and the compiler says which event it is about.
#![expect(clippy::print_stdout, reason = "a program that shows what it does")]

mod database;

use std::time::Duration;

use anyhow::{Context, ensure};
use outbox_core::{
    EventId, EventSet, EventState, HandlerError, Outbox, OutboxEvent, OutboxEvents, Store,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use database::{PgSchema, SqliteFile};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid {
    order_id: u64,
}

#[derive(Serialize, Deserialize, OutboxEvent)]
struct AlertRaised {
    text: String,
}

/// All events of the shop.
#[derive(OutboxEvents)]
enum ShopEvents {
    OrderPaid(OrderPaid),
    AlertRaised(AlertRaised),
}

/// An event, but none of the shop's.
#[derive(Serialize, Deserialize, OutboxEvent)]
struct CacheWarm;

async fn send_receipt(paid: OrderPaid) -> Result<(), HandlerError> {
    println!("A receipt is sent for order {}.", paid.order_id);
    Ok(())
}

async fn raise_alert(alert: AlertRaised) -> Result<(), HandlerError> {
    println!("Somebody is called: {}.", alert.text);
    Ok(())
}

async fn tell<S: Store>(store: S) -> anyhow::Result<()> {
    println!("The set: {}.", ShopEvents::NAMES.join(", "));
    let (report, mut outcomes) = unbounded_channel();
    // A plain type, for the application's state.
    let shop: Outbox<S, ShopEvents> = Outbox::builder_of::<ShopEvents>(store)
        .on(send_receipt)
        .on(raise_alert)
        // What is published is left to the relay, which takes it in its order.
        .without_inline_dispatch()
        .on_settled(move |event| {
            let _ = report.send(event.event_id);
        })
        .build()?;

    let mut tx = shop.begin().await?;
    tx.publish(&OrderPaid { order_id: 7 }).await?;
    let text = "the courier does not answer".to_owned();
    tx.publish(&AlertRaised { text }).await?;
    tx.commit().await?;
    println!("Two of its events are published and committed.");

    let relay = shop.relay().concurrency(1).start().await?;
    let settled = [next(&mut outcomes).await?, next(&mut outcomes).await?];
    for id in settled {
        let row = shop.find(id).await?.context("the event is gone")?;
        ensure!(row.state == EventState::Processed);
        // From a row to the event, whatever its type.
        match ShopEvents::decode(&row.name, row.version, &row.payload)? {
            ShopEvents::OrderPaid(paid) => {
                println!(
                    "Row {} is {} of order {}.",
                    id.row(),
                    row.name,
                    paid.order_id
                );
            }
            ShopEvents::AlertRaised(alert) => {
                println!("Row {} is {}: {}.", id.row(), row.name, alert.text);
            }
        }
    }
    relay.shutdown(LIMIT).await?;

    let another = ShopEvents::decode(CacheWarm::NAME, CacheWarm::VERSION, "null").err();
    let another = another.context("an event of another set was decoded")?;
    println!("Another event is none of them: {another}.");
    Ok(())
}

/// The next event whose outcome was recorded.
async fn next(outcomes: &mut UnboundedReceiver<EventId>) -> anyhow::Result<EventId> {
    let outcome = tokio::time::timeout(LIMIT, outcomes.recv()).await;
    outcome
        .context("nothing was recorded in time")?
        .context("the outbox has ended")
}

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
