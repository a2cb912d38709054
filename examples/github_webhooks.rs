//! Webhook deliveries through an outbox: each is stored and published in one transaction, handled
//! once per delivery id, and compared with what was in the file.
//!
//! ```text
//! cargo run --example github_webhooks                     a small sample
//! cargo run --example github_webhooks -- deliveries.jsonl
//! OUTBOX_WEBHOOKS=deliveries.jsonl cargo run --example github_webhooks
//! DATABASE_URL=postgres://localhost/postgres cargo run --example github_webhooks
//! ```
//!
//! The file has one JSON object a line: `delivery` (the id, which GitHub sends in a header, and
//! sends again when somebody asks for a redelivery), `event` (its kind) and `payload`. It works in
//! a SQLite file that is gone afterwards or, with `DATABASE_URL`, in a schema that it makes and
//! drops.
//!
//! You should see a line for each kind of event and then, for the sample:
//!
//! ```text
//! 12 in, 10 handled, 2 duplicates, every payload unchanged
//! ```
//!
//! It fails if a payload reaches the handler with one byte changed, twice, or not at all.
#![expect(clippy::print_stdout, reason = "a program that shows what it does")]

mod database;

use std::collections::{BTreeMap, HashMap};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use outbox_core::{
    Delivery, Handler, HandlerError, Outbox, OutboxEvent, Published, SettledResult, Store,
};
use outbox_sqlx::PgStore;
use outbox_sqlx::SqliteStore;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sqlx::{PgConnection, SqliteConnection};
use tokio::sync::mpsc::unbounded_channel;

use database::{PgSchema, SqliteFile};

/// A webhook has come in. A line of the file has the same shape.
#[derive(Clone, Debug, Serialize, Deserialize, OutboxEvent)]
struct WebhookReceived {
    /// GitHub's id of the delivery: the same when it is delivered again.
    #[outbox(dedup)]
    delivery: String,
    event: String,
    /// The JSON text as it came. A `serde_json::Value` would read 1.10 and write 1.1.
    payload: Box<RawValue>,
}

/// Receives every webhook, waits until all are handled, and compares.
async fn run<S: Inbox>(store: S, webhooks: &[WebhookReceived]) -> anyhow::Result<()> {
    let handled = Arc::new(Mutex::new(Vec::new()));
    let (report, mut outcomes) = unbounded_channel();
    let outbox = Outbox::builder(store)
        .on(Keep(Arc::clone(&handled)))
        // So that every payload has been in the database and back. Inline dispatch, the default,
        // hands on the text that was published.
        .without_inline_dispatch()
        .on_settled(move |event| {
            let _ = report.send(event.result.clone());
        })
        .build()?;
    let relay = outbox.relay().start().await?;

    let mut kinds: BTreeMap<&str, Counts> = BTreeMap::new();
    let mut published = 0;
    for (webhook, line) in webhooks.iter().zip(1..) {
        let answer = receive(&outbox, webhook)
            .await
            .with_context(|| format!("line {line}, delivery `{}`", webhook.delivery))?;
        let kind = kinds.entry(&webhook.event).or_default();
        kind.received += 1;
        match answer {
            Published::Inserted(_) => published += 1,
            Published::Duplicate(_) => kind.duplicates += 1,
            Published::KeyReused(_) => bail!("line {line}: a delivery id with another payload"),
        }
    }
    for _ in 0..published {
        let outcome = tokio::time::timeout(Duration::from_secs(30), outcomes.recv()).await;
        let outcome = outcome.context("nothing was handled for 30 seconds")?;
        ensure!(outcome == Some(SettledResult::Processed), "{outcome:?}");
    }
    relay.shutdown(Duration::from_secs(10)).await?;

    let handled = std::mem::take(&mut *lock(&handled));
    check_unchanged(webhooks, &handled)?;
    let stored = usize::try_from(outbox.store().count().await?)?;
    ensure!(stored == handled.len(), "{stored} rows in `deliveries`");
    for webhook in &handled {
        kinds.entry(&webhook.event).or_default().handled += 1;
    }
    print(&kinds);
    Ok(())
}

/// What an endpoint for webhooks does with a request before it answers.
async fn receive<S: Inbox>(
    outbox: &Outbox<S>,
    webhook: &WebhookReceived,
) -> anyhow::Result<Published<WebhookReceived>> {
    let mut tx = outbox.begin().await?;
    S::record(&mut tx, webhook).await?;
    let published = tx.publish(webhook).await?;
    tx.commit().await?;
    Ok(published)
}

/// Keeps what it is given, for the comparison.
struct Keep(Arc<Mutex<Vec<WebhookReceived>>>);

impl Handler<WebhookReceived> for Keep {
    async fn handle(&self, webhook: WebhookReceived, _: &Delivery) -> Result<(), HandlerError> {
        lock(&self.0).push(webhook);
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks that each delivery id was handled once, with the bytes of its first line in the file.
fn check_unchanged(
    webhooks: &[WebhookReceived],
    handled: &[WebhookReceived],
) -> anyhow::Result<()> {
    let mut expected = HashMap::new();
    for webhook in webhooks {
        expected.entry(&webhook.delivery).or_insert(webhook);
    }
    for webhook in handled {
        let id = &webhook.delivery;
        let sent = expected
            .remove(id)
            .with_context(|| format!("delivery `{id}` was handled twice, or never sent"))?;
        ensure!(
            webhook.event == sent.event && webhook.payload.get() == sent.payload.get(),
            "delivery `{id}` was changed on its way"
        );
    }
    ensure!(expected.is_empty(), "never handled: {:?}", expected.keys());
    Ok(())
}

// --- The application's own table ---------------------------------------------------------------

/// The application's own statements. They are the same on both databases; sqlx's types are not.
trait Inbox: Store {
    async fn record(
        connection: &mut Self::Connection,
        webhook: &WebhookReceived,
    ) -> sqlx::Result<()>;
    async fn count(&self) -> sqlx::Result<i64>;
}

const CREATE: &str = "
    CREATE TABLE deliveries (id TEXT PRIMARY KEY, event TEXT NOT NULL, payload TEXT NOT NULL)
";
const INSERT: &str = "
    INSERT INTO deliveries (id, event, payload) VALUES ($1, $2, $3) ON CONFLICT (id) DO NOTHING
";
const COUNT: &str = "SELECT count(*) FROM deliveries";

impl Inbox for SqliteStore {
    async fn record(
        connection: &mut SqliteConnection,
        webhook: &WebhookReceived,
    ) -> sqlx::Result<()> {
        let insert = sqlx::query(INSERT)
            .bind(&webhook.delivery)
            .bind(&webhook.event)
            .bind(webhook.payload.get());
        insert.execute(connection).await.map(drop)
    }

    async fn count(&self) -> sqlx::Result<i64> {
        sqlx::query_scalar(COUNT).fetch_one(self.pool()).await
    }
}

impl Inbox for PgStore {
    async fn record(connection: &mut PgConnection, webhook: &WebhookReceived) -> sqlx::Result<()> {
        let insert = sqlx::query(INSERT)
            .bind(&webhook.delivery)
            .bind(&webhook.event)
            .bind(webhook.payload.get());
        insert.execute(connection).await.map(drop)
    }

    async fn count(&self) -> sqlx::Result<i64> {
        sqlx::query_scalar(COUNT).fetch_one(self.pool()).await
    }
}

// --- The file ----------------------------------------------------------------------------------

/// The file to read: the argument, what `OUTBOX_WEBHOOKS` names, or the sample.
fn file() -> PathBuf {
    let given = std::env::args_os().nth(1);
    let given = given.or_else(|| std::env::var_os("OUTBOX_WEBHOOKS"));
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("webhooks/sample.jsonl");
    given.map_or(sample, PathBuf::from)
}

fn read(path: &Path) -> anyhow::Result<Vec<WebhookReceived>> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("read `{}`", path.display()))?;
    let parsed = text.lines().zip(1..).map(|(line, number)| {
        serde_json::from_str(line).map_err(|error| {
            // The parser saw one line, and says so.
            let error = error.to_string().replace(" at line 1 ", " at ");
            anyhow!("`{}`, line {number}: {error}", path.display())
        })
    });
    parsed.collect()
}

// --- The table that is printed -----------------------------------------------------------------

#[derive(Default)]
struct Counts {
    received: usize,
    handled: usize,
    duplicates: usize,
}

fn print(kinds: &BTreeMap<&str, Counts>) {
    let line = |columns: [&str; 4]| {
        let [event, received, handled, duplicates] = columns;
        println!("{event:<30} {received:>8} {handled:>8} {duplicates:>10}");
    };
    println!();
    line(["event", "received", "handled", "duplicates"]);
    for (kind, counts) in kinds {
        let [received, handled, duplicates] =
            [counts.received, counts.handled, counts.duplicates].map(|count| count.to_string());
        line([kind, &received, &handled, &duplicates]);
    }

    let total = |of: fn(&Counts) -> usize| kinds.values().map(of).sum::<usize>();
    println!(
        "\n{} in, {} handled, {} duplicates, every payload unchanged",
        total(|counts| counts.received),
        total(|counts| counts.handled),
        total(|counts| counts.duplicates),
    );
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .compact()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(std::io::stdout().is_terminal())
        .with_target(false)
        .without_time()
        .init();

    let path = file();
    let webhooks = read(&path)?;
    if let Ok(url) = std::env::var("DATABASE_URL") {
        println!("{}, through an outbox in PostgreSQL:", path.display());
        let schema = PgSchema::create(&url).await?;
        sqlx::raw_sql(CREATE).execute(schema.store.pool()).await?;
        let ran = run(schema.store.clone(), &webhooks).await;
        schema.remove().await?;
        ran
    } else {
        println!("{}, through an outbox in SQLite:", path.display());
        let file = SqliteFile::create().await?;
        sqlx::raw_sql(CREATE).execute(file.store.pool()).await?;
        run(file.store.clone(), &webhooks).await
    }
}
