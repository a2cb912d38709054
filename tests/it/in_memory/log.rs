//! What the log says: the lines somebody is woken by.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use outbox_core::testing::{MemoryStore, Operation};
use outbox_core::{Cadence, HandlerError, OutboxEvent};
use serde::{Deserialize, Serialize};
use tracing::subscriber::DefaultGuard;

use super::builder;
use crate::events::{Step, Ticked, Unhandled, publish_for_relays, scripted, settled};

/// The log of this thread, and with it of everything under paused time.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn capture() -> (Self, DefaultGuard) {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .without_time()
            .with_writer(move || writer.clone())
            .finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    #[track_caller]
    fn contains(&self, parts: &[&str]) {
        let text = self.text();
        let found = text
            .lines()
            .any(|line| parts.iter().all(|part| line.contains(part)));
        assert!(found, "no line with {parts:?} in:\n{text}");
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn p9_a_dead_letter_is_logged_as_an_error_with_its_reason() {
    let (log, _guard) = Log::capture();
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Err(HandlerError::permanent("no such user"))));
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder.build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 424_242 })
        .await
        .to_string();
    let _relay = outbox.relay().start().await.unwrap();
    outcomes.recv().await.unwrap();

    log.contains(&[
        "ERROR",
        "event is a dead letter",
        &id,
        "permanent",
        "no such user",
        "ticked",
    ]);
    assert!(
        !log.text().contains("424242"),
        "a payload does not belong in a log"
    );
}

#[tokio::test(start_paused = true)]
async fn p12_events_that_nobody_here_handles_are_reported() {
    let (log, _guard) = Log::capture();
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    for _ in 0..3 {
        publish_for_relays(&outbox, &Unhandled).await;
    }
    let relay = outbox.relay().start().await.unwrap();
    relay.pass(Cadence::Sweep).await.unwrap();
    log.contains(&["WARN", "event_name=\"unhandled\"", "waiting=3"]);
}

/// What `ticked` is in a later release.
#[derive(Deserialize, Serialize, OutboxEvent)]
#[outbox(name = "ticked", version = 7, oldest_version = 7)]
struct TickedLater;

#[tokio::test(start_paused = true)]
async fn p12_events_of_a_later_version_are_reported_as_such() {
    let (log, _guard) = Log::capture();
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    for _ in 0..2 {
        publish_for_relays(&outbox, &TickedLater).await;
    }
    let relay = outbox.relay().start().await.unwrap();
    relay.pass(Cadence::Sweep).await.unwrap();
    log.contains(&[
        "WARN",
        "events of a later version than this process reads wait",
        "event_name=\"ticked\"",
        "version=7",
        "waiting=2",
    ]);
}

#[tokio::test(start_paused = true)]
async fn a_transaction_dropped_with_events_in_it_says_so() {
    let (log, _guard) = Log::capture();
    let store = MemoryStore::new();
    let outbox = builder(&store).build().unwrap();
    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 1 }).await.unwrap();
    drop(tx);
    log.contains(&[
        "WARN",
        "a transaction of the outbox was dropped",
        "events=1",
    ]);
    let silent = log.text().len();
    drop(outbox.begin().await.unwrap());
    assert_eq!(
        log.text().len(),
        silent,
        "one without events is nobody's business"
    );
}

#[tokio::test(start_paused = true)]
async fn an_outage_of_an_hour_logs_a_bounded_number_of_lines() {
    let (log, _guard) = Log::capture();
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    store.wait_for_calls(Operation::Claim, 1).await;
    store.unreachable(true);
    tokio::time::sleep(Duration::from_secs(3_600)).await;
    let lines = log.text().lines().count();
    assert!(lines < 1_500, "{lines} lines");
}
