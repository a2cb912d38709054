//! Alerts to a chat webhook, from two relay processes on one database. The receiver fails, hangs,
//! is busy and restarts, and one of the relays is killed. Every alert that can arrive arrives once.
//!
//! ```text
//! cargo run --example slack_alerts
//! DATABASE_URL=postgres://localhost/postgres cargo run --example slack_alerts
//! SLACK_WEBHOOK_URL=http://localhost:8065/hooks/x cargo run --example slack_alerts
//! ```
//!
//! The first needs no server: it works in a SQLite file that is gone afterwards. The second works
//! in a schema of its own, which it makes and drops. Both bring a receiver along. The third posts
//! the alerts of the first chapter to yours, and breaks nothing.
//!
//! You should see six chapters, in about as many seconds. Here is the last of them, and the end;
//! `..` stands for what is left out:
//!
//! ```text
//! 6. The receiver hangs again, and relay a is killed while it waits.
//! #12 is heat-1: "Rack 1 is too hot"
//! ..
//! receiver | #15 from relay a: accepted, and no answer
//! ..
//! Relay a is dead: signal: 9 (SIGKILL).
//! ..
//! The database has 4 claims of it, until their leases end.
//! The receiver is well again.
//! ..
//! receiver | #15 from relay b: 200 dropped, it is here already
//! relay b  | #15 attempt 2: processed
//! ..
//! #15 was taken over by relay b. Its attempts, counted when they began: 2.
//!
//! The relays are told to stop.
//! A dead letter: #5 blank, reason permanent, last error "400 Bad Request: no_text"
//!   attempt 1 by relay a: 500 Internal Server Error: out of order
//!   attempt 2 by relay b: 400 Bad Request: no_text
//! 17 alerts: 16 accepted by the receiver, each once, and 1 dead letter. The receiver dropped 8 ..
//! ```
//!
//! The program checks all of it itself, and fails if anything went another way.
//!
//! # What makes it once
//!
//! That no alert is lost, and none is published twice, is the outbox: the dedup key of an alert is
//! its incident. But an alert is posted *at least* once: where the answer is lost, it is posted
//! again. That it is the same one only the receiver can tell, by the header `Idempotency-Key`: the
//! event's id, the same for every attempt. Slack's own webhooks do not read such a header, and show
//! the alert a second time.
#![expect(clippy::print_stdout, reason = "a program that shows what it does")]

mod alert;
mod chapters;
#[path = "../database.rs"]
mod database;
mod receiver;
mod relay;
mod relays;
mod rows;
mod story;

use std::time::Duration;

use anyhow::{anyhow, bail};
use reqwest::Url;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use alert::webhook_url;
use database::{PgSchema, SqliteFile};
use relays::Relays;
use rows::Alerts;
use story::Deadline;

/// It takes a fifth of this on an idle machine.
const LIMIT: Duration = Duration::from_secs(30);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // What fails and is tried again is told by the hook of each relay. An error is for a person.
    let errors = EnvFilter::builder().with_default_directive(LevelFilter::ERROR.into());
    tracing_subscriber::fmt()
        .compact()
        .with_env_filter(errors.from_env_lossy())
        .with_ansi(false)
        .with_target(false)
        .without_time()
        .init();

    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [] => tell().await,
        ["relay", name, place] => relay::run(name, place).await,
        _ => bail!("this program takes no arguments, unlike {arguments:?}"),
    }
}

/// Tells the story in a database of its own, of which nothing is left.
async fn tell() -> anyhow::Result<()> {
    // Before anything is made or published.
    let webhook = webhook_url()?;
    if let Ok(url) = std::env::var("DATABASE_URL") {
        println!("Alerts to a chat webhook, in a new schema of a PostgreSQL database.");
        let schema = PgSchema::create(&url).await?;
        let told = tell_in(schema.store.clone(), webhook).await;
        schema.remove().await?;
        told
    } else {
        println!("Alerts to a chat webhook, in a new SQLite file.");
        let file = SqliteFile::create().await?;
        tell_in(file.store.clone(), webhook).await
    }
}

async fn tell_in<S: Alerts>(store: S, webhook: Option<Url>) -> anyhow::Result<()> {
    let deadline = Deadline::after(LIMIT);
    let mut relays = Relays::default();
    let told = async {
        match webhook {
            Some(webhook) => chapters::first(store, &webhook, &mut relays, deadline).await,
            None => chapters::all(store, &mut relays, deadline).await,
        }
    };
    let told = tokio::select! {
        told = deadline.within("the end", told) => told.flatten(),
        _ = tokio::signal::ctrl_c() => Err(anyhow!("interrupted")),
    };
    // None is left, unless something went wrong.
    relays.kill_all().await?;
    told
}

/// A line of one of those who speak here.
pub(crate) fn show(who: &str, line: &str) {
    println!("{who:<8} | {line}");
}
