//! Alerts to a chat webhook: the example, with what it says about itself counted once more.

use std::time::{Duration, Instant};

use sqlx::postgres::PgPoolOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

use crate::examples::{RUN, example, run, schemas};
use crate::support::{Child, PgDb, eventually, within};

const MINUTE: Duration = Duration::from_secs(60);

/// The example, with a receiver of its own unless it is told otherwise.
async fn slack_alerts() -> Command {
    let mut command = example("slack_alerts").await;
    command
        .env_remove("SLACK_WEBHOOK_URL")
        .env_remove("RUST_LOG");
    command
}

#[tokio::test]
async fn every_alert_arrives_once_through_sqlite_and_no_file_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = slack_alerts().await;
    let lines = run_within_a_minute(command.env("TMPDIR", directory.path())).await;
    assert_eq!(lines[0], "Alerts to a chat webhook, in a new SQLite file.");
    check(&lines);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn every_alert_arrives_once_through_postgresql_and_nothing_is_left_there() {
    let db = PgDb::empty().await;
    let mut command = slack_alerts().await;
    let lines = run_within_a_minute(command.env("DATABASE_URL", db.url())).await;
    assert_eq!(
        lines[0],
        "Alerts to a chat webhook, in a new schema of a PostgreSQL database."
    );
    check(&lines);
    assert_eq!(schemas(&db).await, ["public"]);
}

#[tokio::test]
async fn a_webhook_that_is_no_url_is_refused_before_anything_is_published() {
    for (url, expected) in [
        (
            "hooks.slack.com/services/secret",
            "SLACK_WEBHOOK_URL is not a URL",
        ),
        (
            "https://hooks.slack.com/secret",
            "SLACK_WEBHOOK_URL begins with `https:`",
        ),
    ] {
        let mut child = Child::spawn(slack_alerts().await.env("SLACK_WEBHOOK_URL", url));
        assert_eq!(child.line(RUN).await, None);
        assert_eq!(child.wait(RUN).await.code(), Some(1));
        let said = format!("{child:?}");
        assert!(said.contains(expected), "{said}");
        assert!(!said.contains("secret"), "{said}");
    }
}

/// What is in the setting gets what an application raises, with a key, and is not experimented
/// with.
#[tokio::test]
async fn a_webhook_that_is_set_gets_three_alerts() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let mut child = Child::spawn(slack_alerts().await.env("SLACK_WEBHOOK_URL", url));
    let mut keys = Vec::new();
    for _ in 0..3 {
        let (stream, _) = within(RUN, listener.accept()).await.unwrap();
        let request = within(RUN, take(stream)).await;
        assert!(request.contains(r#"{"text":""#), "{request}");
        let key = request
            .lines()
            .find(|line| line.starts_with("idempotency-key: "));
        keys.push(key.expect("a key").to_owned());
    }
    while child.line(RUN).await.is_some() {}
    assert!(child.wait(RUN).await.success(), "{child:?}");
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 3, "{child:?}");
    assert!(
        format!("{child:?}").ends_with("\n  3 alerts accepted."),
        "{child:?}"
    );
}

/// However that one ends: here it has no time to tell them.
#[tokio::test]
async fn the_relays_end_with_the_process_that_started_them() {
    let db = PgDb::empty().await;
    let mut child = Child::spawn(slack_alerts().await.env("DATABASE_URL", db.url()));
    while let Some(line) = child.line(RUN).await {
        if line.starts_with("relay b  | process ") {
            break;
        }
    }
    child.kill_9().await;
    let sessions = "SELECT count(*) FROM pg_stat_activity \
        WHERE datname = current_database() AND pid <> pg_backend_pid() \
        AND backend_type = 'client backend'";
    // Of one connection: on a busy machine another pool opens a second one, which is a session, too.
    let session = PgPoolOptions::new()
        .max_connections(1)
        .connect_with(db.options());
    let session = session.await.unwrap();
    eventually(RUN, || async {
        let others: i64 = sqlx::query_scalar(sessions)
            .fetch_one(&session)
            .await
            .unwrap();
        others == 0
    })
    .await;
}

/// What the example says, whatever the database.
#[track_caller]
fn check(lines: &[String]) {
    let of = |parts: &[&str]| -> Vec<&str> {
        let found = lines.iter().map(String::as_str);
        found
            .filter(|line| parts.iter().all(|part| line.contains(part)))
            .collect()
    };
    let has = |parts: &[&str]| assert_ne!(of(parts), [""; 0], "{parts:?} in {lines:#?}");

    let mut published = numbers(&of(&[" is ", ": \""]), "#");
    let blank = numbers(&of(&[" is blank: \"\""]), "#");
    assert_eq!((published.len(), blank.len()), (17, 1), "{lines:#?}");
    published.retain(|number| *number != blank[0]);
    let mut accepted = numbers(&of(&["receiver | #", "accepted"]), "receiver | #");
    accepted.sort_unstable();
    assert_eq!(accepted, published, "{lines:#?}");

    has(&["disk-db1 again: a duplicate of #"]);
    has(&["attempt 1: the handler overran its timeout of 1s."]);
    has(&["attempt 1: 429 Too Many Requests: rate_limited. Again in 1000 ms"]);
    has(&["Connection refused"]);
    has(&["Relay a is dead: signal: 9 (SIGKILL)."]);
    has(&[
        "The database has ",
        " claims of it, until their leases end.",
    ]);
    has(&["was taken over by relay b. Its attempts, counted when they began: "]);

    has(&[
        "relay ",
        " | ERROR event is a dead letter ",
        "reason=permanent",
    ]);
    let dead = format!("A dead letter: #{} blank, reason permanent", blank[0]);
    has(&[&dead, "last error \"400 Bad Request: no_text\""]);
    has(&["  attempt 1 by relay ", ": 500 Internal Server Error"]);
    has(&["  attempt ", " by relay ", ": 400 Bad Request: no_text"]);

    let dropped = of(&["receiver | #", "dropped, it is here already"]).len();
    // One was not answered in time, two were cut off, and two at least were held by the relay that
    // was killed.
    assert!(dropped >= 5, "{lines:#?}");
    assert_eq!(
        lines.last().unwrap(),
        &format!(
            "17 alerts: 16 accepted by the receiver, each once, and 1 dead letter. \
             The receiver dropped {dropped} repeated requests."
        )
    );
}

/// The numbers of alerts that follow `before` at the beginning of lines.
fn numbers(lines: &[&str], before: &str) -> Vec<u32> {
    let numbers = lines.iter().filter_map(|line| {
        let number = line.strip_prefix(before)?.split(' ').next()?;
        Some(number.parse().unwrap())
    });
    numbers.collect()
}

async fn run_within_a_minute(command: &mut Command) -> Vec<String> {
    let began = Instant::now();
    let lines = run(command).await;
    assert!(began.elapsed() < MINUTE, "{:?}", began.elapsed());
    lines
}

/// Reads a request with JSON in it, and accepts it.
async fn take(mut stream: TcpStream) -> String {
    let mut request = Vec::new();
    while !request.ends_with(b"}") {
        assert_ne!(stream.read_buf(&mut request).await.unwrap(), 0);
    }
    let accepted = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    stream.write_all(accepted).await.unwrap();
    String::from_utf8(request).unwrap()
}
