//! The example programs, run as a reader of the README runs them.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use tokio::process::Command;
use tokio::sync::OnceCell;

use crate::support::{Child, PgDb, within};

/// How long an example may take: its own limits are shorter.
pub(crate) const RUN: Duration = Duration::from_secs(120);

/// How long cargo may take to build the examples from nothing.
const BUILD: Duration = Duration::from_secs(20 * 60);

#[tokio::test]
async fn the_quickstart_tells_its_story_on_sqlite() {
    let lines = run(&mut example("quickstart").await).await;
    assert_eq!(lines[0], "A shop and its outbox, in a new SQLite file.");
    check_quickstart(&lines);
}

#[tokio::test]
async fn the_quickstart_tells_its_story_on_postgresql_and_leaves_nothing_there() {
    let db = PgDb::empty().await;
    for _ in 0..2 {
        let lines = run(example("quickstart").await.env("DATABASE_URL", db.url())).await;
        assert_eq!(
            lines[0],
            "A shop and its outbox, in a new schema of a PostgreSQL database."
        );
        check_quickstart(&lines);
        assert_eq!(schemas(&db).await, ["public"]);
    }
}

#[tokio::test]
async fn webhooks_arrive_unchanged_through_sqlite() {
    let lines = run(&mut example("github_webhooks").await).await;
    check_webhooks(&lines);
}

#[tokio::test]
async fn webhooks_arrive_unchanged_through_postgresql() {
    let db = PgDb::empty().await;
    let lines = run(example("github_webhooks")
        .await
        .env("DATABASE_URL", db.url()))
    .await;
    check_webhooks(&lines);
    assert_eq!(schemas(&db).await, ["public"]);
}

#[tokio::test]
async fn the_sample_of_webhooks_is_counted_by_kind() {
    let lines = run(example("github_webhooks")
        .await
        .env_remove("OUTBOX_WEBHOOKS"))
    .await;
    let rows: Vec<Vec<_>> = lines[2..]
        .iter()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(
        rows[..5],
        [
            ["event", "received", "handled", "duplicates"],
            ["issue_comment", "3", "3", "0"],
            ["issues", "2", "2", "0"],
            ["push", "5", "3", "2"],
            ["release", "2", "2", "0"],
        ]
    );
    assert_eq!(
        lines[8..],
        ["12 in, 10 handled, 2 duplicates, every payload unchanged"]
    );
}

#[tokio::test]
async fn a_line_that_is_no_webhook_is_named() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let good = r#"{"delivery": "1", "event": "ping", "payload": {}}"#;
    std::io::Write::write_all(&mut file, format!("{good}\n{{\"delivery\"\n").as_bytes()).unwrap();
    let mut child = Child::spawn(example("github_webhooks").await.arg(file.path()));
    assert_eq!(child.wait(RUN).await.code(), Some(1));
    while child.line(RUN).await.is_some() {}
    let said = format!("{child:?}");
    assert!(said.contains("line 2: EOF while parsing"), "{said}");
}

/// What the quickstart says on either database, from its second line.
#[track_caller]
fn check_quickstart(lines: &[String]) {
    let has = |expected: &[&str]| {
        let found = lines
            .iter()
            .any(|line| expected.iter().all(|part| line.contains(part)));
        assert!(found, "{expected:?} in {lines:#?}");
    };
    has(&[
        "   The receipt was sent, and that was recorded, ",
        "s after the commit.",
    ]);
    has(&["   No second event. The answer is the first click's receipt, R-1-4200."]);
    has(&[
        " WARN attempt failed",
        "event_name=order.packed attempt=1",
        "retry_in=200ms",
    ]);
    has(&["   Attempt 1: the courier does not answer. Again in 200ms."]);
    has(&["   Attempt 2: the courier is on the way."]);
    has(&[
        "ERROR event is a dead letter",
        "event_name=order.cancelled",
        "reason=permanent",
    ]);
    has(&["   A dead letter (permanent: the card was closed)."]);
    has(&["The relay has shut down."]);

    let table = lines.iter().skip_while(|line| !line.contains("last_error"));
    let rows: Vec<_> = table
        .take_while(|line| !line.is_empty())
        .map(|line| columns_after_the_id(line).join(" | "))
        .collect();
    assert_eq!(
        rows,
        [
            "name | status | attempts | last_error | dead_reason | output",
            r#"order.paid | processed | 1 | - | - | {"number":"R-1-4200"}"#,
            "order.packed | processed | 2 | the courier does not answer | - | -",
            "order.cancelled | dead_letter | 1 | the card was closed | permanent | -",
        ]
    );
    assert_eq!(
        lines.last().unwrap(),
        "Orders: 1 paid, 2 packed, 3 cancelled."
    );
}

/// The columns of a row, which two spaces or more separate. A sequence may leave out an id.
fn columns_after_the_id(row: &str) -> Vec<&str> {
    let columns = row.split("  ").map(str::trim);
    columns
        .filter(|column| !column.is_empty())
        .skip(1)
        .collect()
}

/// What the webhooks say at the end, of the file in `OUTBOX_WEBHOOKS` or of the sample.
///
/// The path has to be absolute: cargo runs a test in the directory of its package.
#[track_caller]
fn check_webhooks(lines: &[String]) {
    #[derive(Deserialize)]
    struct Webhook {
        delivery: String,
    }
    let sample = workspace().join("examples/webhooks/sample.jsonl");
    let file = std::env::var_os("OUTBOX_WEBHOOKS").map_or(sample, PathBuf::from);
    let text = std::fs::read_to_string(file).unwrap();
    let ids: Vec<_> = text
        .lines()
        .map(|line| serde_json::from_str::<Webhook>(line).unwrap().delivery)
        .collect();
    let received = ids.len();
    let handled = ids.iter().collect::<HashSet<_>>().len();
    let duplicates = received - handled;
    assert_eq!(
        lines.last().unwrap(),
        &format!(
            "{received} in, {handled} handled, {duplicates} duplicates, every payload unchanged"
        )
    );
}

/// Runs an example on SQLite, and checks what it says after its first line.
pub(crate) async fn tells_on_sqlite(name: &str, story: &[&str]) {
    let lines = run(&mut example(name).await).await;
    assert_eq!(lines[0], "An outbox in a new SQLite file.");
    assert_eq!(lines[1..], *story);
}

/// As [`tells_on_sqlite`], on PostgreSQL, where the example leaves nothing behind.
pub(crate) async fn tells_on_postgresql(name: &str, story: &[&str]) {
    let db = PgDb::empty().await;
    let lines = run(example(name).await.env("DATABASE_URL", db.url())).await;
    assert_eq!(
        lines[0],
        "An outbox in a new schema of a PostgreSQL database."
    );
    assert_eq!(lines[1..], *story);
    assert_eq!(schemas(&db).await, ["public"]);
}

/// The schemas of a database but for PostgreSQL's own.
pub(crate) async fn schemas(db: &PgDb) -> Vec<String> {
    let sql = "SELECT nspname::text FROM pg_namespace WHERE nspname !~ '^pg_|^information_schema$'";
    sqlx::query_scalar(sql).fetch_all(&db.pool()).await.unwrap()
}

/// Runs an example to its end, and returns what it printed.
pub(crate) async fn run(command: &mut Command) -> Vec<String> {
    let mut child = Child::spawn(command);
    let mut lines = Vec::new();
    while let Some(line) = child.line(RUN).await {
        lines.push(line);
    }
    assert!(child.wait(RUN).await.success(), "{child:?}");
    lines
}

/// An example, on SQLite unless it is told otherwise.
pub(crate) async fn example(name: &str) -> Command {
    static BUILT: OnceCell<HashMap<String, PathBuf>> = OnceCell::const_new();

    let built = BUILT.get_or_init(|| within(BUILD, build())).await;
    let mut command = Command::new(&built[name]);
    command.env_remove("DATABASE_URL");
    command
}

/// Builds the examples, and returns where cargo put them.
///
/// Cargo does not hold its lock while it runs tests. The flags are those of `scripts/test`: after
/// it, there is nothing left to build.
async fn build() -> HashMap<String, PathBuf> {
    #[derive(Deserialize)]
    struct Built {
        target: Target,
        executable: PathBuf,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
    }
    let output = Command::new(env!("CARGO"))
        .args(["build", "--workspace", "--all-features", "--examples"])
        .args(["--quiet", "--message-format=json-render-diagnostics"])
        .current_dir(workspace())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .output()
        .await
        .expect("run cargo");
    assert!(output.status.success(), "the examples do not build");
    let messages = String::from_utf8(output.stdout).expect("cargo writes JSON");
    // Messages of other kinds have no executable.
    let built = messages.lines().flat_map(serde_json::from_str::<Built>);
    built
        .map(|built| (built.target.name, built.executable))
        .collect()
}

pub(crate) fn workspace() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}
