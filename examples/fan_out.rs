//! Several handlers of one event: each has its own attempts, its own dead letter, its own brake.
//!
//! ```text
//! cargo run --example fan_out
//! DATABASE_URL=postgres://localhost/postgres cargo run --example fan_out
//! ```
//!
//! The first needs no server: it works in a SQLite file that is gone afterwards. The second works
//! in a schema of its own, which it makes and drops.
//!
//! You should see, but for the first line on PostgreSQL:
//!
//! ```text
//! An outbox in a new SQLite file.
//! Order 7 is paid, and one row is written.
//! ledger: order 7 is booked.
//! email: there is no address for order 7.
//! A dead letter of the handler email. The ledger is done, and does not run again.
//! The address is there now, and the dead letter is requeued.
//! email: the receipt of order 7 is sent.
//! The handler ledger is paused, on all instances.
//! Order 8 is paid.
//! email: the receipt of order 8 is sent.
//! The ledger is resumed.
//! ledger: order 8 is booked.
//! ```
#![expect(clippy::print_stdout, reason = "a program that shows what it does")]

mod database;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use outbox_core::{
    Changed, CircuitBreaker, DeadLetterFilter, Delivery, Handler, HandlerError, HandlerOptions,
    Outbox, OutboxEvent, SettledEvent, SettledResult, Store,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use database::{PgSchema, SqliteFile};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid {
    order_id: u64,
}

async fn book(paid: OrderPaid) -> Result<(), HandlerError> {
    println!("ledger: order {} is booked.", paid.order_id);
    Ok(())
}

/// Sends receipts, once it knows where to.
struct SendReceipt {
    knows_address: Arc<AtomicBool>,
}

impl Handler<OrderPaid> for SendReceipt {
    async fn handle(&self, paid: OrderPaid, _: &Delivery) -> Result<(), HandlerError> {
        if !self.knows_address.load(Ordering::Relaxed) {
            println!("email: there is no address for order {}.", paid.order_id);
            return Err(HandlerError::permanent("no address"));
        }
        println!("email: the receipt of order {} is sent.", paid.order_id);
        Ok(())
    }
}

async fn tell<S: Store>(store: S) -> anyhow::Result<()> {
    let (report, mut outcomes) = unbounded_channel();
    let knows_address = Arc::new(AtomicBool::new(false));
    let send_receipt = SendReceipt {
        knows_address: Arc::clone(&knows_address),
    };
    let shop = Outbox::builder(store)
        .on_named("ledger", book)
        .on_with(
            // What one handler needs is no business of the other's.
            HandlerOptions::named("email")
                .max_attempts(3)
                .timeout(Duration::from_secs(5))
                .concurrency(4)
                .circuit_breaker(CircuitBreaker::after(5)),
            send_receipt,
        )
        // What is published is left to the relay, which takes it in its order.
        .without_inline_dispatch()
        .on_settled(move |event| {
            let _ = report.send(event.clone());
        })
        .build()?;
    let relay = shop.relay().concurrency(1).start().await?;

    println!("Order 7 is paid, and one row is written.");
    publish(&shop, 7).await?;
    ensure!(next(&mut outcomes).await?.result == SettledResult::Processed);
    let dead = next(&mut outcomes).await?;
    let handler = dead.handler.context("a handler with a name gave up")?;
    println!("A dead letter of the handler {handler}. The ledger is done, and does not run again.");

    knows_address.store(true, Ordering::Relaxed);
    let of_email = DeadLetterFilter::all().handler("email");
    let page = shop.dead_letters().list(&of_email, None, 10).await?;
    let letter = page.letters.first().context("the dead letter is gone")?;
    println!("The address is there now, and the dead letter is requeued.");
    ensure!(shop.dead_letters().requeue(letter.id).await? == Changed::Done);
    shop.wake();
    ensure!(next(&mut outcomes).await?.result == SettledResult::Processed);

    shop.pauses()
        .pause_handler(OrderPaid::NAME, "ledger")
        .await?;
    println!("The handler ledger is paused, on all instances.");
    println!("Order 8 is paid.");
    publish(&shop, 8).await?;
    ensure!(next(&mut outcomes).await?.handler.as_deref() == Some("email"));
    println!("The ledger is resumed.");
    shop.pauses()
        .resume_handler(OrderPaid::NAME, "ledger")
        .await?;
    ensure!(next(&mut outcomes).await?.handler.as_deref() == Some("ledger"));
    relay.shutdown(LIMIT).await?;
    Ok(())
}

/// Publishes in a transaction of its own.
async fn publish<S: Store>(shop: &Outbox<S>, order_id: u64) -> anyhow::Result<()> {
    let mut tx = shop.begin().await?;
    tx.publish(&OrderPaid { order_id }).await?;
    tx.commit().await?;
    Ok(())
}

/// The next outcome that was recorded.
async fn next(outcomes: &mut UnboundedReceiver<SettledEvent>) -> anyhow::Result<SettledEvent> {
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
