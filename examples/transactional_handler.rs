//! A handler that only writes to this database: what it wrote commits with its event's outcome.
//!
//! ```text
//! cargo run --example transactional_handler
//! ```
//!
//! It needs no server: it works in a SQLite file that is gone afterwards. You should see:
//!
//! ```text
//! An outbox in a new SQLite file, and a table of revenue.
//! Three orders of 10, 20 and 12 are paid.
//! Order 2: booked in attempt 1, but the books are closed.
//! Order 2: booked in attempt 2.
//! The revenue is 42, in 3 bookings: what attempt 1 had booked of order 2 was undone.
//! ```
//!
//! A plain handler would have to find out whether it had booked an order before. This one need not:
//! a booking without its event's outcome, or an outcome without the booking, is never there.
#![expect(clippy::print_stdout, reason = "a program that shows what it does")]

#[expect(dead_code, reason = "examples on PostgreSQL use the rest")]
mod database;

use std::time::Duration;

use anyhow::{Context, ensure};
use outbox_core::{
    Delivery, HandlerError, Outbox, OutboxEvent, SettledResult, TransactionalHandler,
};
use serde::{Deserialize, Serialize};
use sqlx::SqliteConnection;
use tokio::sync::mpsc::unbounded_channel;

use database::SqliteFile;

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid {
    order_id: i64,
    amount: i64,
}

/// Books the amount of an order.
struct BookRevenue;

impl TransactionalHandler<SqliteConnection, OrderPaid> for BookRevenue {
    async fn handle(
        &self,
        event: OrderPaid,
        connection: &mut SqliteConnection,
        delivery: &Delivery,
    ) -> Result<(), HandlerError> {
        sqlx::query("INSERT INTO revenue (order_id, amount) VALUES (?1, ?2)")
            .bind(event.order_id)
            .bind(event.amount)
            .execute(connection)
            .await?;
        if event.order_id != 2 {
            return Ok(());
        }
        let attempt = delivery.attempt();
        if attempt.get() == 1 {
            println!("Order 2: booked in attempt 1, but the books are closed.");
            let soon = Duration::from_millis(50);
            return Err(HandlerError::retry_after(soon, "the books are closed"));
        }
        println!("Order 2: booked in attempt {attempt}.");
        Ok(())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    println!("An outbox in a new SQLite file, and a table of revenue.");
    let file = SqliteFile::create().await?;
    let pool = file.store.pool().clone();
    sqlx::query("CREATE TABLE revenue (order_id INTEGER NOT NULL, amount INTEGER NOT NULL) STRICT")
        .execute(&pool)
        .await?;

    let (report, mut outcomes) = unbounded_channel();
    let outbox = Outbox::builder(file.store.clone())
        .on_transactional(BookRevenue)
        .on_settled(move |event| {
            let _ = report.send(event.result.clone());
        })
        .build()?;
    let relay = outbox.relay().start().await?;

    println!("Three orders of 10, 20 and 12 are paid.");
    let mut tx = outbox.begin().await?;
    for (order_id, amount) in [(1, 10), (2, 20), (3, 12)] {
        let _ = tx.publish(&OrderPaid { order_id, amount }).await?;
    }
    tx.commit().await?;

    let mut processed = 0;
    while processed < 3 {
        let outcome = tokio::time::timeout(LIMIT, outcomes.recv()).await;
        let outcome = outcome.context("nothing was recorded in time")?;
        processed += u32::from(outcome == Some(SettledResult::Processed));
    }
    relay.shutdown(LIMIT).await?;

    let (revenue, bookings): (i64, i64) =
        sqlx::query_as("SELECT sum(amount), count(*) FROM revenue")
            .fetch_one(&pool)
            .await?;
    println!(
        "The revenue is {revenue}, in {bookings} bookings: what attempt 1 had booked of order 2 was \
         undone."
    );
    ensure!(
        (revenue, bookings) == (42, 3),
        "a booking is missing, or there twice"
    );
    Ok(())
}

const LIMIT: Duration = Duration::from_secs(10);
