//! Events of one key, one after the other: what comes behind an event that failed waits.
//!
//! ```text
//! cargo run --example ordering
//! DATABASE_URL=postgres://localhost/postgres cargo run --example ordering
//! ```
//!
//! The first needs no server: it works in a SQLite file that is gone afterwards. The second works
//! in a schema of its own, which it makes and drops.
//!
//! You should see, but for the first line on PostgreSQL:
//!
//! ```text
//! An outbox in a new SQLite file.
//! Three steps of account 1 are published and committed.
//! account 1: opened.
//! account 1: 100 in? The ledger is locked.
//! Blocked: account:1, by a dead letter (the ledger is locked); 1 event waits behind it.
//! Another account goes on.
//! account 2: opened.
//! The ledger is open, and the dead letter is requeued.
//! account 1: 100 in.
//! account 1: 30 out.
//! Nothing is blocked any more.
//! ```
#![expect(clippy::print_stdout, reason = "a program that shows what it does")]

mod database;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use outbox_core::{
    Changed, Delivery, Handler, HandlerError, Outbox, OutboxEvent, SettledResult, Store,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use database::{PgSchema, SqliteFile};

/// A step of an account, of no use without the one before.
#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(ordering_key = "account:{account}")]
struct Booked {
    account: u64,
    step: String,
}

impl Booked {
    fn new(account: u64, step: &str) -> Self {
        let step = step.to_owned();
        Self { account, step }
    }
}

struct Ledger {
    is_locked: Arc<AtomicBool>,
}

impl Handler<Booked> for Ledger {
    async fn handle(&self, booked: Booked, _: &Delivery) -> Result<(), HandlerError> {
        let Booked { account, step } = booked;
        if step.starts_with("100") && self.is_locked.load(Ordering::Relaxed) {
            println!("account {account}: {step}? The ledger is locked.");
            return Err(HandlerError::permanent("the ledger is locked"));
        }
        println!("account {account}: {step}.");
        Ok(())
    }
}

async fn tell<S: Store>(store: S) -> anyhow::Result<()> {
    let (report, mut outcomes) = unbounded_channel();
    let is_locked = Arc::new(AtomicBool::new(true));
    let bank = Outbox::builder(store)
        .on(Ledger {
            is_locked: Arc::clone(&is_locked),
        })
        .without_inline_dispatch()
        .on_settled(move |event| {
            let _ = report.send(event.result.clone());
        })
        .build()?;

    let steps = ["opened", "100 in", "30 out"].map(|step| Booked::new(1, step));
    let mut tx = bank.begin().await?;
    tx.publish_all(&steps).await?;
    tx.commit().await?;
    println!("Three steps of account 1 are published and committed.");
    // However many handlers it runs at once, and however many relays there are.
    let relay = bank.relay().concurrency(16).start().await?;
    ensure!(next(&mut outcomes).await? == SettledResult::Processed);
    next(&mut outcomes).await?;

    let blocked = bank.blocked_keys().await?;
    let key = blocked.first().context("nothing is blocked")?;
    println!(
        "Blocked: {}, by a dead letter ({}); {} event waits behind it.",
        key.ordering_key, key.last_error, key.waiting
    );
    println!("Another account goes on.");
    let mut tx = bank.begin().await?;
    tx.publish(&Booked::new(2, "opened")).await?;
    tx.commit().await?;
    ensure!(next(&mut outcomes).await? == SettledResult::Processed);

    is_locked.store(false, Ordering::Relaxed);
    println!("The ledger is open, and the dead letter is requeued.");
    ensure!(bank.dead_letters().requeue(key.head).await? == Changed::Done);
    bank.wake();
    for _ in 0..2 {
        ensure!(next(&mut outcomes).await? == SettledResult::Processed);
    }
    ensure!(bank.blocked_keys().await?.is_empty());
    println!("Nothing is blocked any more.");
    relay.shutdown(LIMIT).await?;
    Ok(())
}

/// The next outcome that was recorded.
async fn next(outcomes: &mut UnboundedReceiver<SettledResult>) -> anyhow::Result<SettledResult> {
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
