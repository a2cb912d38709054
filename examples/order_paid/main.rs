//! `order.paid`, end to end: an order is paid, and a broker hears of it once, whatever happens.
//!
//! ```text
//! cargo run --example order_paid
//! NATS_URL=nats://localhost:4222 cargo run --example order_paid
//! DATABASE_URL=postgres://localhost/postgres cargo run --example order_paid
//! ```
//!
//! The broker is NATS with JetStream. The first starts a server of its own, from the program
//! `nats-server` in `NATS_SERVER`, on `PATH` or where Debian puts it. The second makes a stream on
//! a server that somebody else runs (without TLS) and, since that is not to be stopped, cuts the
//! line to it instead: all that the shop says to the broker goes through a port of this program.
//! With `DATABASE_URL` the shop is in a schema of its own instead of a SQLite file.
//!
//! You should see this, in a second or two, with other ports, times and (from order 6) sequences:
//!
//! ```text
//! A shop and its outbox, in a new SQLite file.
//! The broker: NATS 2.9.10, /usr/sbin/nats-server at 127.0.0.1:14076, started here.
//! Its stream: outbox_example_f8ba627fdac3451c85215ff6cf6711fc.
//!
//! 1. Orders 1 to 3 are paid. Each change is committed together with its event.
//!    Order 1 is in the stream, sequence 1, 8.7ms after the commit.
//!    Order 2 is in the stream, sequence 2, 5.7ms after the commit.
//!    Order 3 is in the stream, sequence 3, 10.7ms after the commit.
//!
//! 2. Order 4 is paid, its event published, and then the transaction rolls back.
//!    Neither the change nor the event is there. Nobody is told.
//!
//! 3. Order 5 is paid, and the connection breaks before the stream's answer.
//!    The stream has it, sequence 4.
//!    Attempt 1: the connection broke before the answer. Again in 176ms.
//!    Attempt 2: sequence 4, duplicate: true. The stream keeps one of the two.
//!
//! 4. The broker is away: the server is killed.
//!    Orders 6 to 25 are paid all the same, in 46.4ms.
//!    Each was tried at once, and is tried again: the broker is away.
//!    Order 6 is paid a second time: no second event, the first one still waits.
//!    Its page is not warmed: the direct dispatch of `cache.warm` failed: the broker is away. That has no row, and is not tried again.
//!    20 events wait in the outbox.
//!
//! 5. The broker is back: the server is started again, on the same port and files.
//!    0 events wait in the outbox, 226.3ms after it was reached.
//!
//! 6. Order 6 is paid a third time, now that its event is in the stream.
//!    The answer is the first event's: sequence 11.
//!    Its page is warmed, too. The broker passes that on and does not keep it.
//!
//! 7. Somebody else reads the stream from its beginning.
//!    24 entries for 24 paid orders: each once, and none of order 4.
//!    Every row of the outbox has the sequence of its entry.
//!    The stream gave 24 answers, 1 of them with duplicate: true.
//! ```
//!
//! It fails if anything of this is not so, or is not over in half a minute. Nothing is left
//! behind, on a Ctrl-C either. Killed (SIGKILL), it still takes its server along, and leaves two
//! directories of temporary files or, on servers of somebody else's, `outbox_example_..`: a stream
//! and a schema, to be removed by hand.
#![expect(clippy::print_stdout, reason = "a program that shows what it does")]

mod broker;
#[path = "../database.rs"]
mod database;
mod line;
mod orders;
mod server;
mod story;
mod stream;

use std::io::{self, IsTerminal};
use std::time::Duration;

use anyhow::anyhow;
use tokio::signal::unix::{SignalKind, signal};

use broker::Broker;
use database::{PgSchema, SqliteFile};
use orders::{CREATE, Shop};

/// How long the story may take. On an idle machine it takes one second.
const DEADLINE: Duration = Duration::from_secs(25);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .compact()
        // Failed attempts are warnings, and connections that fail while the broker is away are
        // errors of its client. The story tells of both itself.
        .with_env_filter("error,async_nats=off")
        .with_ansi(io::stdout().is_terminal())
        .with_target(false)
        .without_time()
        .init();

    if let Ok(url) = std::env::var("DATABASE_URL") {
        println!("A shop and its outbox, in a new schema of a PostgreSQL database.");
        let schema = PgSchema::create(&url).await?;
        sqlx::raw_sql(CREATE).execute(schema.store.pool()).await?;
        let ran = run(schema.store.clone()).await;
        schema.remove().await?;
        ran
    } else {
        println!("A shop and its outbox, in a new SQLite file.");
        let file = SqliteFile::create().await?;
        sqlx::raw_sql(CREATE).execute(file.store.pool()).await?;
        run(file.store.clone()).await
    }
}

/// Tells the story, and leaves nothing of the broker behind however it ended.
async fn run<S: Shop>(store: S) -> anyhow::Result<()> {
    let interrupted = interrupted()?;
    let mut broker = Broker::start().await?;
    let told = tokio::select! {
        told = tokio::time::timeout(DEADLINE, story::tell(store, &mut broker)) => {
            told.unwrap_or_else(|_| Err(anyhow!("the story was not over after {DEADLINE:?}")))
        }
        signal = interrupted => Err(anyhow!("ended by {signal}")),
    };
    let removed = broker.remove().await;
    told.and(removed)
}

/// Waits for a signal that would have ended this program before it had tidied up.
fn interrupted() -> io::Result<impl Future<Output = &'static str>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => "SIGINT",
            _ = terminate.recv() => "SIGTERM",
        }
    })
}
