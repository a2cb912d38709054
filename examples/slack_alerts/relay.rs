//! A relay process: posts alerts until its standard input ends.
//!
//! The other end of that pipe is in the process that started it. So it ends with that process,
//! however that ends.

use std::fmt;
use std::io::{self, Write};
use std::time::Duration;

use anyhow::Context;
use outbox_core::{Outbox, SettledEvent, SettledResult, Store};
use outbox_sqlx::PgStore;
use outbox_sqlx::SqliteStore;
use reqwest::Url;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tokio::sync::oneshot;

use crate::alert::{PostToChat, WEBHOOK_URL, number, webhook_url};

/// Relays what is in `place`: a schema of the database at `DATABASE_URL`, or else a SQLite file.
pub(crate) async fn run(name: &str, place: &str) -> anyhow::Result<()> {
    let webhook = webhook_url()?.with_context(|| format!("{WEBHOOK_URL} is not set"))?;
    if let Ok(url) = std::env::var("DATABASE_URL") {
        let pool = PgPool::connect_lazy(&url).context("read DATABASE_URL")?;
        let store = PgStore::builder(pool).schema(place).build()?;
        relay(store, name, webhook).await
    } else {
        let store = SqliteStore::open(place).await?;
        relay(store, name, webhook).await
    }
}

async fn relay<S: Store>(store: S, name: &str, webhook: Url) -> anyhow::Result<()> {
    let outbox = Outbox::builder(store)
        .instance(name)
        .on(PostToChat::new(webhook, name)?)
        // How long an alert waits when the process that holds it dies. A minute by default.
        .lease(Duration::from_secs(2))
        .on_settled(|event| say(&Report::of(event)))
        .build()?;
    let relay = outbox
        .relay()
        // So few that one relay cannot hold everything.
        .concurrency(4)
        // On SQLite nobody wakes another process.
        .poll_interval(Duration::from_millis(100))
        .start()
        .await?;
    say(&Report::Started {
        process: std::process::id(),
    });
    end_of_input().await;
    relay.shutdown(Duration::from_secs(5)).await?;
    Ok(())
}

/// What a relay process tells the one that started it: a line of JSON on its standard output.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Report {
    Started {
        process: u32,
    },
    Settled {
        /// The event's id, which is the alert's idempotency key.
        key: String,
        attempt: u32,
        outcome: Outcome,
    },
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Outcome {
    Processed,
    Failed { error: String, after: Duration },
    DeadLetter { reason: String, error: String },
}

impl Report {
    fn of(event: &SettledEvent) -> Self {
        let outcome = match event.result.clone() {
            SettledResult::Retry { after, error } => Outcome::Failed { error, after },
            SettledResult::DeadLetter { reason, error } => Outcome::DeadLetter {
                reason: reason.to_string(),
                error,
            },
            // Nothing is discarded here: nobody has asked for that.
            _ => Outcome::Processed,
        };
        Self::Settled {
            key: event.event_id.to_string(),
            attempt: event.attempt,
            outcome,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (key, attempt, outcome) = match self {
            Self::Started { process } => return write!(f, "process {process} has started"),
            Self::Settled {
                key,
                attempt,
                outcome,
            } => (key, attempt, outcome),
        };
        write!(f, "{} attempt {attempt}: ", number(key))?;
        match outcome {
            Outcome::Processed => f.write_str("processed"),
            Outcome::Failed { error, after } => {
                write!(f, "{error}. Again in {} ms", after.as_millis())
            }
            Outcome::DeadLetter { reason, error } => {
                write!(f, "{error}. The last one: {reason}")
            }
        }
    }
}

fn say(report: &Report) {
    // Nobody listens any more: this process is about to end. `println!` would panic.
    if let Ok(line) = serde_json::to_string(report) {
        let _ = writeln!(io::stdout(), "{line}");
    }
}

async fn end_of_input() {
    let (send, ended) = oneshot::channel();
    // A thread of its own, because a runtime cannot end while it reads.
    std::thread::spawn(move || {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        let _ = send.send(());
    });
    let _ = ended.await;
}
