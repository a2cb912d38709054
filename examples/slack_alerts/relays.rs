//! The relay processes, in the hands of the one that started them.

use std::process::{ExitStatus, Stdio};

use anyhow::{Context, bail, ensure};
use reqwest::Url;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::alert::WEBHOOK_URL;
use crate::relay::Report;
use crate::show;

/// All relay processes, and everything they have said. None outlives this value.
#[derive(Default)]
pub(crate) struct Relays {
    running: Vec<Running>,
    reports: watch::Sender<Vec<Said>>,
}

/// A report, and whose it is.
pub(crate) struct Said {
    pub(crate) relay: String,
    pub(crate) report: Report,
}

struct Running {
    name: String,
    process: Child,
    stdin: ChildStdin,
    shown: [JoinHandle<()>; 2],
}

impl Relays {
    /// Starts this program again, as a relay, and waits until it relays.
    pub(crate) async fn start(
        &mut self,
        name: &str,
        place: &str,
        webhook: &Url,
    ) -> anyhow::Result<()> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["relay", name, place])
            // Not an argument: those are for everybody on this machine to see.
            .env(WEBHOOK_URL, webhook.as_str())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start {name}"))?;
        let pipes = (
            process.stdin.take(),
            process.stdout.take(),
            process.stderr.take(),
        );
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
            bail!("{name} has no pipes");
        };
        let shown = [
            tokio::spawn(read(name.to_owned(), stdout, self.reports.clone())),
            tokio::spawn(read(name.to_owned(), stderr, self.reports.clone())),
        ];
        let mut reports = self.reports.subscribe();
        let started = reports.wait_for(|reports| {
            let mut own = reports.iter().filter(|said| said.relay == name);
            own.any(|said| matches!(said.report, Report::Started { .. }))
        });
        tokio::select! {
            _ = started => {}
            status = process.wait() => {
                // It has said why.
                for shown in shown {
                    shown.await?;
                }
                bail!("{name} has not started: {}", status?);
            }
        }
        self.running.push(Running {
            name: name.to_owned(),
            process,
            stdin,
            shown,
        });
        Ok(())
    }

    pub(crate) fn reports(&self) -> watch::Receiver<Vec<Said>> {
        self.reports.subscribe()
    }

    /// Kills a relay in the middle of whatever it does: SIGKILL, of which it is not told.
    pub(crate) async fn kill(&mut self, name: &str) -> anyhow::Result<ExitStatus> {
        let at = self.running.iter().position(|relay| relay.name == name);
        let mut relay = self.running.swap_remove(at.context("no such relay")?);
        relay.process.start_kill()?;
        Ok(relay.process.wait().await?)
    }

    /// Lets every relay finish what it has begun, and waits for its end.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        for relay in std::mem::take(&mut self.running) {
            let Running {
                name,
                mut process,
                stdin,
                shown,
            } = relay;
            drop(stdin);
            let status = process.wait().await?;
            for shown in shown {
                shown.await?;
            }
            ensure!(status.success(), "{name} ended with {status}");
        }
        Ok(())
    }

    /// Kills whatever still runs.
    pub(crate) async fn kill_all(&mut self) -> anyhow::Result<()> {
        for mut relay in std::mem::take(&mut self.running) {
            relay.process.kill().await?;
        }
        Ok(())
    }
}

/// Shows the lines of a process, and keeps those that are reports.
async fn read(relay: String, stream: impl AsyncRead + Unpin, reports: watch::Sender<Vec<Said>>) {
    let mut lines = BufReader::new(stream).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match serde_json::from_str::<Report>(&line) {
            Ok(report) => {
                show(&relay, &report.to_string());
                let relay = relay.clone();
                reports.send_modify(|reports| reports.push(Said { relay, report }));
            }
            // What is logged.
            Err(_) => show(&relay, &line),
        }
    }
}
