//! The example `order_paid`: a story with a real broker, on both databases.
//!
//! It tells the story with a NATS server that it starts itself, and with one that somebody else
//! runs. The program of both is the one that `scripts/nats-server` finds, and is needed.

use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::examples::{example, run, schemas, workspace};
use crate::support::{Child, PgDb, eventually, within};

/// How long a story may take. It ends itself earlier.
const LIMIT: Duration = Duration::from_secs(60);

#[tokio::test]
async fn the_broker_hears_of_each_paid_order_once_on_sqlite() {
    let mut story = Story::with_a_server_of_its_own().await;
    let lines = story.tell().await;
    assert_eq!(lines[0], "A shop and its outbox, in a new SQLite file.");
    check(&lines, OWN_SERVER);
    assert!(!answers(server(&lines[1])).await, "{}", lines[1]);
    story.check_that_nothing_is_left();
}

#[tokio::test]
async fn the_broker_hears_of_each_paid_order_once_on_postgresql() {
    let db = PgDb::empty().await;
    let mut story = Story::with_a_server_of_its_own().await;
    story.command.env("DATABASE_URL", db.url());
    let lines = story.tell().await;
    assert_eq!(
        lines[0],
        "A shop and its outbox, in a new schema of a PostgreSQL database."
    );
    check(&lines, OWN_SERVER);
    assert!(!answers(server(&lines[1])).await, "{}", lines[1]);
    story.check_that_nothing_is_left();
    assert_eq!(schemas(&db).await, ["public"]);
}

#[tokio::test]
async fn somebody_elses_broker_is_cut_off_and_left_as_it_was() {
    let files = tempfile::tempdir().unwrap();
    let (_running, address) = start_server(files.path()).await;
    assert_eq!(streams(&address).await, 0);

    let mut story = Story::new().await;
    story.command.env("NATS_URL", format!("nats://{address}"));
    let lines = story.tell().await;
    assert!(lines[1].ends_with(&format!("the NATS server at NATS_URL, {address}.")));
    check(&lines, SOMEBODY_ELSES);
    story.check_that_nothing_is_left();
    assert_eq!(streams(&address).await, 0);
}

#[tokio::test]
async fn a_broker_that_is_not_there_is_named_and_the_end() {
    let mut story = Story::new().await;
    let mut child = Child::spawn(story.command.env("NATS_URL", "127.0.0.1:1"));
    assert_eq!(child.wait(LIMIT).await.code(), Some(1));
    while child.line(LIMIT).await.is_some() {}
    let said = format!("{child:?}");
    assert!(said.contains("Error: connect to 127.0.0.1:1"), "{said}");
    story.check_that_nothing_is_left();
}

#[tokio::test]
async fn a_story_that_is_told_to_stop_tidies_up_first() {
    let mut story = Story::with_a_server_of_its_own().await;
    let (mut child, server) = story.freeze_at_its_beginning().await;
    child.terminate();
    child.thaw();
    assert_eq!(child.wait(LIMIT).await.code(), Some(1), "{child:?}");
    while child.line(LIMIT).await.is_some() {}
    assert!(format!("{child:?}").contains("Error: ended by SIGTERM"));
    assert!(!answers(&server).await);
    story.check_that_nothing_is_left();
}

#[tokio::test]
async fn the_server_of_a_story_that_is_killed_dies_with_it() {
    let mut story = Story::with_a_server_of_its_own().await;
    let (mut child, server) = story.freeze_at_its_beginning().await;
    assert!(answers(&server).await);
    child.kill_9().await;
    assert_eq!(child.wait(LIMIT).await.signal(), Some(9));
    eventually(LIMIT, async || !answers(&server).await).await;
}

/// The example, with a directory of its own for what it leaves behind.
struct Story {
    command: Command,
    files: TempDir,
}

impl Story {
    async fn new() -> Self {
        let files = tempfile::tempdir().unwrap();
        let mut command = example("order_paid").await;
        command.env("TMPDIR", files.path());
        Self { command, files }
    }

    async fn with_a_server_of_its_own() -> Self {
        let mut story = Self::new().await;
        story.command.env_remove("NATS_URL");
        story.command.env("NATS_SERVER", program().await);
        story
    }

    async fn tell(&mut self) -> Vec<String> {
        let began = Instant::now();
        let lines = run(&mut self.command).await;
        let elapsed = began.elapsed();
        assert!(elapsed < LIMIT, "{elapsed:?} for {lines:#?}");
        lines
    }

    /// Stops the process when its server runs, and returns where that listens.
    async fn freeze_at_its_beginning(&mut self) -> (Child, String) {
        let mut child = Child::spawn(&mut self.command);
        loop {
            let line = child.line(LIMIT).await;
            let line = line.unwrap_or_else(|| panic!("no broker: {child:?}"));
            if line.starts_with("The broker: ") {
                child.freeze();
                return (child, server(&line).to_owned());
            }
        }
    }

    #[track_caller]
    fn check_that_nothing_is_left(&self) {
        let left: Vec<_> = std::fs::read_dir(self.files.path()).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

/// How the broker goes away and comes back.
type Outage = [&'static str; 2];

const OWN_SERVER: Outage = [
    "4. The broker is away: the server is killed.",
    "5. The broker is back: the server is started again, on the same port and files.",
];

const SOMEBODY_ELSES: Outage = [
    "4. The broker is away: the line to it is cut, because the server is not ours to stop.",
    "5. The broker is back: the line is restored.",
];

/// Compares the story with what is to be told. `*` stands for anything.
#[track_caller]
fn check(lines: &[String], [away, back]: Outage) {
    let expected = [
        "Its stream: outbox_example_*.",
        "1. Orders 1 to 3 are paid. Each change is committed together with its event.",
        "   Order 1 is in the stream, sequence 1, *s after the commit.",
        "   Order 2 is in the stream, sequence 2, *s after the commit.",
        "   Order 3 is in the stream, sequence 3, *s after the commit.",
        "2. Order 4 is paid, its event published, and then the transaction rolls back.",
        "   Neither the change nor the event is there. Nobody is told.",
        "3. Order 5 is paid, and the connection breaks before the stream's answer.",
        "   The stream has it, sequence 4.",
        "   Attempt 1: the connection broke before the answer. Again in *ms.",
        "   Attempt 2: sequence 4, duplicate: true. The stream keeps one of the two.",
        away,
        "   Orders 6 to 25 are paid all the same, in *s.",
        "   Each was tried at once, and is tried again: the broker is away.",
        "   Order 6 is paid a second time: no second event, the first one still waits.",
        "   Its page is not warmed: the direct dispatch of `cache.warm` failed: *",
        "   20 events wait in the outbox.",
        back,
        "   0 events wait in the outbox, *s after it was reached.",
        "6. Order 6 is paid a third time, now that its event is in the stream.",
        "   The answer is the first event's: sequence *.",
        "   Its page is warmed, too. The broker passes that on and does not keep it.",
        "7. Somebody else reads the stream from its beginning.",
        "   24 entries for 24 paid orders: each once, and none of order 4.",
        "   Every row of the outbox has the sequence of its entry.",
        "   The stream gave 24 answers, 1 of them with duplicate: true.",
    ];
    let told = lines[2..].iter().filter(|line| !line.is_empty());
    let told: Vec<_> = told.map(String::as_str).collect();
    for (told, expected) in told.iter().zip(expected) {
        assert!(
            matches(told, expected),
            "{told:?} is not {expected:?} in {lines:#?}"
        );
    }
    assert_eq!(told.len(), expected.len(), "{lines:#?}");
}

fn matches(text: &str, pattern: &str) -> bool {
    match pattern.split_once('*') {
        None => text == pattern,
        Some((before, after)) => {
            text.len() >= before.len() + after.len()
                && text.starts_with(before)
                && text.ends_with(after)
        }
    }
}

// --- The NATS server ---------------------------------------------------------------------------

/// The server program.
///
/// # Panics
///
/// If there is none, with what to do about it.
async fn program() -> PathBuf {
    let script = workspace().join("scripts/nats-server");
    let output = Command::new(script).output().await.unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}", error.trim_end());
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim_end())
}

/// Starts a server, and returns where it listens.
async fn start_server(files: &Path) -> (Child, String) {
    // It writes its log to its standard error, and would not end with its standard input, as a
    // process of the tests has to. `$$` becomes the server; standard input is another one after `&`.
    let script = r#"exec 3<&0; (read -r _ <&3; kill -KILL $$) & exec "$@" 3<&- 2>&1"#;
    let mut server = Child::spawn(
        Command::new("sh")
            .args(["-c", script, "sh"])
            .arg(program().await)
            .args(["--addr", "127.0.0.1", "--port", "-1"])
            .args(["--jetstream", "--store_dir"])
            .arg(files),
    );
    let mut address = None;
    loop {
        let line = server.line(LIMIT).await;
        let line = line.unwrap_or_else(|| panic!("no server: {server:?}"));
        if let Some((_, listening)) = line.split_once("client connections on ") {
            address = Some(listening.to_owned());
        }
        if line.contains("Server is ready") {
            return (server, address.expect("it listens before it is ready"));
        }
    }
}

/// Where the server of the story listens, as it says itself.
#[track_caller]
fn server(line: &str) -> &str {
    let (_, rest) = line.rsplit_once(" at ").expect("a place");
    rest.strip_suffix(", started here.").expect("its own")
}

/// Whether anybody listens there.
async fn answers(server: &str) -> bool {
    match TcpStream::connect(server).await {
        Ok(_) => true,
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => false,
        Err(error) => panic!("{server}: {error}"),
    }
}

/// How many streams the server has.
async fn streams(server: &str) -> usize {
    let mut connection = BufReader::new(TcpStream::connect(server).await.unwrap());
    let question = "CONNECT {}\r\nSUB names 1\r\nPUB $JS.API.STREAM.NAMES names 0\r\n\r\n";
    connection.write_all(question.as_bytes()).await.unwrap();
    let mut lines = connection.lines();
    let answer = async {
        while let Some(line) = lines.next_line().await.unwrap() {
            if line.starts_with("MSG names ") {
                return lines.next_line().await.unwrap();
            }
        }
        None
    };
    let answer = within(LIMIT, answer).await.expect("an answer");
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    assert!(answer["error"].is_null(), "{answer}");
    answer["streams"].as_array().map_or(0, Vec::len)
}
