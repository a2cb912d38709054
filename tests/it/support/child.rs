//! Another process, to freeze, stop and kill.
//!
//! A program run here writes what happened to its standard output, a line each, and ends when its
//! standard input does: that is how it goes away with a test process that was killed.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWriteExt, BufReader};
use tokio::process::{ChildStdin, Command};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// A running program. Killed when this value is dropped.
pub(crate) struct Child {
    process: tokio::process::Child,
    stdin: Option<ChildStdin>,
    lines: UnboundedReceiver<String>,
    /// Everything it has written so far, for the text of a failure.
    said: Arc<Mutex<Vec<String>>>,
}

impl Child {
    /// Starts `command`, with its three standard streams in the hands of the test.
    ///
    /// ```ignore
    /// let mut node = Child::spawn(
    ///     Command::new(env!("CARGO_BIN_EXE_node")).env("DATABASE_URL", db.url()),
    /// );
    /// let started: Started = node.event(SECONDS).await;
    /// ```
    pub(crate) fn spawn(command: &mut Command) -> Self {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap_or_else(|error| panic!("start {command:?}: {error}"));
        let (send, lines) = unbounded_channel();
        let said = Arc::default();
        let stdout = process.stdout.take().expect("it is piped");
        let stderr = process.stderr.take().expect("it is piped");
        // Read whether or not the test asks, so that a full pipe never stops the process.
        tokio::spawn(read(stdout, Arc::clone(&said), Some(send)));
        tokio::spawn(read(stderr, Arc::clone(&said), None));
        Self {
            stdin: process.stdin.take(),
            process,
            lines,
            said,
        }
    }

    /// The next line of its standard output, or `None` once it has ended and all is read.
    pub(crate) async fn line(&mut self, limit: Duration) -> Option<String> {
        match tokio::time::timeout(limit, self.lines.recv()).await {
            Ok(line) => line,
            Err(_) => panic!("no line within {limit:?} from {self:?}"),
        }
    }

    /// The next line of its standard output that is JSON of the shape `E`; others are passed over.
    ///
    /// # Panics
    ///
    /// If none comes within `limit`, or the process ends first.
    pub(crate) async fn event<E: DeserializeOwned>(&mut self, limit: Duration) -> E {
        let found = async {
            while let Some(line) = self.lines.recv().await {
                if let Ok(event) = serde_json::from_str(&line) {
                    return Some(event);
                }
            }
            None
        };
        match tokio::time::timeout(limit, found).await {
            Ok(Some(event)) => event,
            Ok(None) => panic!("it ended before the event awaited: {self:?}"),
            Err(_) => panic!("no such event within {limit:?} from {self:?}"),
        }
    }

    /// Writes a line to its standard input.
    pub(crate) async fn tell(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().expect("its standard input is open");
        stdin
            .write_all(format!("{line}\n").as_bytes())
            .await
            .unwrap_or_else(|error| panic!("tell {line:?}: {error}"));
    }

    /// Closes its standard input.
    pub(crate) fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Kills it in the middle of whatever it does, and waits until it is gone.
    pub(crate) async fn kill_9(&mut self) {
        self.process.kill().await.expect("kill a child");
    }

    /// Asks it to stop: SIGTERM.
    pub(crate) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Stops it from running, as a long pause would: SIGSTOP. It keeps its connections.
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets it run on: SIGCONT.
    pub(crate) fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        // No id once it was awaited: the number may be another process by now.
        let pid = self
            .process
            .id()
            .and_then(|id| Pid::from_raw(id.try_into().ok()?));
        kill_process(pid.expect("it was not awaited yet"), signal).expect("signal a child");
    }

    /// Waits for its end.
    pub(crate) async fn wait(&mut self, limit: Duration) -> ExitStatus {
        match tokio::time::timeout(limit, self.process.wait()).await {
            Ok(status) => status.expect("wait for a child"),
            Err(_) => panic!("not ended within {limit:?}: {self:?}"),
        }
    }
}

/// Its id and everything it said: what one wants to read under a failure.
impl fmt::Debug for Child {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let said = self.said.lock().expect("nobody panics while holding it");
        write!(f, "process {:?}, which said:", self.process.id())?;
        said.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}

async fn read(
    stream: impl AsyncRead + Unpin,
    said: Arc<Mutex<Vec<String>>>,
    lines: Option<UnboundedSender<String>>,
) {
    let mut reader = BufReader::new(stream).lines();
    while let Ok(Some(line)) = reader.next_line().await {
        said.lock()
            .expect("nobody panics while holding it")
            .push(line.clone());
        if let Some(lines) = &lines {
            let _ = lines.send(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::support::Child;

    const LIMIT: Duration = Duration::from_secs(10);

    fn shell(script: &str) -> Child {
        Child::spawn(Command::new("sh").arg("-c").arg(script))
    }

    #[tokio::test]
    async fn lines_arrive_in_order_and_end_with_the_process() {
        let mut child = shell("echo one; echo two; echo hidden >&2");
        assert_eq!(child.line(LIMIT).await.as_deref(), Some("one"));
        assert_eq!(child.line(LIMIT).await.as_deref(), Some("two"));
        assert_eq!(child.line(LIMIT).await, None);
        assert!(child.wait(LIMIT).await.success());
    }

    #[tokio::test]
    async fn an_event_is_the_next_line_of_its_shape() {
        #[derive(Deserialize)]
        struct Handled {
            attempt: u32,
        }
        let mut child = shell(r#"echo starting; echo '{"attempt": 3}'; cat"#);
        assert_eq!(child.event::<Handled>(LIMIT).await.attempt, 3);
    }

    #[tokio::test]
    async fn an_event_that_never_comes_shows_what_the_process_said() {
        let mut child = shell("echo not this; echo nor this >&2");
        child.wait(LIMIT).await;
        let waiting = tokio::spawn(async move { child.event::<u32>(LIMIT).await });
        let panic = waiting.await.unwrap_err().into_panic();
        let text = panic.downcast_ref::<String>().unwrap();
        assert!(text.contains("not this"), "{text}");
    }

    #[tokio::test]
    async fn kill_9_leaves_no_time_to_tidy_up() {
        let mut child = shell("trap 'echo tidied up' TERM EXIT; echo ready; read line");
        child.line(LIMIT).await;
        child.kill_9().await;
        assert_eq!(child.wait(LIMIT).await.signal(), Some(9));
        assert_eq!(child.line(LIMIT).await, None);
    }

    #[tokio::test]
    async fn terminate_lets_it_tidy_up() {
        let mut child =
            shell("trap 'echo tidied up; exit 0' TERM; echo ready; while :; do :; done");
        child.line(LIMIT).await;
        child.terminate();
        assert_eq!(child.line(LIMIT).await.as_deref(), Some("tidied up"));
        assert!(child.wait(LIMIT).await.success());
    }

    #[tokio::test]
    async fn a_frozen_process_answers_once_it_is_thawed() {
        let mut child = shell("echo ready; read line; echo got $line");
        child.line(LIMIT).await;
        child.freeze();
        child.tell("word").await;
        let silence = tokio::time::timeout(Duration::from_millis(100), child.lines.recv()).await;
        assert!(silence.is_err());
        child.thaw();
        assert_eq!(child.line(LIMIT).await.as_deref(), Some("got word"));
    }

    #[tokio::test]
    async fn it_sees_its_standard_input_end() {
        let mut child = shell("cat; echo over");
        child.close_stdin();
        assert_eq!(child.line(LIMIT).await.as_deref(), Some("over"));
    }
}
