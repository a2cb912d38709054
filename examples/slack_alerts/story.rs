//! What the chapters of the story have in common: its beginning, its end, and what they wait for.

use std::future::Future;
use std::time::Duration;

use anyhow::{Context, ensure};
use outbox_core::Outbox;
use reqwest::Url;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::alert::{AlertRaised, number};
use crate::receiver::Receiver;
use crate::relay::{Outcome, Report};
use crate::relays::Relays;
use crate::rows::{AlertRow, Alerts};

/// What was published so far, and who relays it.
pub(crate) struct Story<'a, S: Alerts> {
    pub(crate) outbox: Outbox<S>,
    pub(crate) relays: &'a mut Relays,
    pub(crate) deadline: Deadline,
    /// The ids of all alerts, which are their idempotency keys.
    published: Vec<String>,
    /// Those that the receiver took without an answer, and has to see again.
    pub(crate) unanswered: Vec<String>,
}

impl<'a, S: Alerts> Story<'a, S> {
    /// Starts two relay processes.
    pub(crate) async fn begin(
        store: S,
        webhook: &Url,
        relays: &'a mut Relays,
        deadline: Deadline,
    ) -> anyhow::Result<Self> {
        let place = store.place().await?;
        for name in ["relay a", "relay b"] {
            let starting = relays.start(name, &place, webhook);
            deadline.within("a relay to start", starting).await??;
        }
        Ok(Self {
            // There is no handler in this process, so all it publishes is left to the relays.
            outbox: Outbox::builder(store).build()?,
            relays,
            deadline,
            published: Vec::new(),
            unanswered: Vec::new(),
        })
    }

    /// Publishes new alerts in one transaction, and returns their keys.
    pub(crate) async fn publish(&mut self, alerts: &[AlertRaised]) -> anyhow::Result<Vec<String>> {
        // In the transaction in which an application writes what the alerts are about.
        let mut tx = self.outbox.begin().await?;
        let mut keys = Vec::new();
        for (alert, published) in alerts.iter().zip(tx.publish_all(alerts).await?) {
            ensure!(
                published.duplicate().is_none(),
                "{} is not new",
                alert.incident
            );
            let key = published.event_id().to_string();
            println!("{} is {}: {:?}", number(&key), alert.incident, alert.text);
            keys.push(key);
        }
        tx.commit().await?;
        self.published.extend_from_slice(&keys);
        Ok(keys)
    }

    /// Waits until each of these alerts is processed or a dead letter.
    pub(crate) async fn settled(&self, keys: &[String]) -> anyhow::Result<()> {
        let last = |outcome: &Outcome| !matches!(outcome, Outcome::Failed { .. });
        self.reported("every alert to be settled", keys, 1, last)
            .await
    }

    /// Waits until the relays have reported so many such outcomes of each of these alerts.
    pub(crate) async fn reported(
        &self,
        what: &str,
        keys: &[String],
        times: usize,
        such: impl Fn(&Outcome) -> bool,
    ) -> anyhow::Result<()> {
        self.until(what, self.relays.reports(), |reports| {
            keys.iter().all(|expected| {
                let of_it = reports.iter().filter(|said| match &said.report {
                    Report::Started { .. } => false,
                    Report::Settled { key, outcome, .. } => key == expected && such(outcome),
                });
                of_it.count() >= times
            })
        })
        .await
    }

    /// Waits until it is so.
    pub(crate) async fn until<T>(
        &self,
        what: &str,
        mut watched: watch::Receiver<T>,
        so: impl FnMut(&T) -> bool,
    ) -> anyhow::Result<()> {
        self.deadline
            .within(what, watched.wait_for(so))
            .await?
            .map(drop)
            .context("nobody is left to wait for")
    }

    /// Lets the relays finish, and reads what is in the database then.
    pub(crate) async fn ends(self) -> anyhow::Result<Ended> {
        println!("\nThe relays are told to stop.");
        let stopping = self.relays.stop();
        self.deadline
            .within("the relays to stop", stopping)
            .await??;
        let rows = self.outbox.store().rows().await?;
        let keys = rows.iter().map(|row| row.event_id.clone());
        ensure!(
            keys.eq(self.published.iter().cloned()),
            "other alerts are in the database than were published"
        );
        let (dead, others) = rows
            .into_iter()
            .partition::<Vec<_>, _>(|row| row.status == "dead_letter");
        for row in &others {
            ensure!(
                row.status == "processed",
                "{} is still {}",
                number(&row.event_id),
                row.status
            );
        }
        Ok(Ended {
            processed: others,
            dead,
            unanswered: self.unanswered,
        })
    }
}

/// What the database says at the end.
pub(crate) struct Ended {
    pub(crate) processed: Vec<AlertRow>,
    pub(crate) dead: Vec<AlertRow>,
    unanswered: Vec<String>,
}

impl Ended {
    /// Compares it with what the receiver says: the keys it accepted, and each of them once.
    pub(crate) fn compare(&self, receiver: &Receiver) -> anyhow::Result<()> {
        let seen = receiver.seen();
        let seen = seen.borrow();
        let mut accepted = seen.accepted.clone();
        accepted.sort();
        let mut processed: Vec<_> = self
            .processed
            .iter()
            .map(|row| row.event_id.clone())
            .collect();
        processed.sort();
        let short = |keys: &[String]| keys.iter().map(|key| number(key)).collect::<Vec<_>>();
        ensure!(
            accepted == processed,
            "accepted: {:?}, but processed: {:?}",
            short(&accepted),
            short(&processed)
        );
        ensure!(
            seen.repeated >= self.unanswered.len(),
            "only {} repeated",
            seen.repeated
        );
        println!(
            "{} alerts: {} accepted by the receiver, each once, and {} dead letter. \
             The receiver dropped {} repeated requests.",
            accepted.len() + self.dead.len(),
            accepted.len(),
            self.dead.len(),
            seen.repeated,
        );
        Ok(())
    }

    /// Shows each dead letter as a person finds it who has to look at it.
    pub(crate) fn show_dead(&self) -> anyhow::Result<()> {
        for row in &self.dead {
            let AlertRow {
                dead_reason,
                last_error,
                ..
            } = row;
            println!(
                "A dead letter: {} {}, reason {}, last error {:?}",
                number(&row.event_id),
                row.dedup_key,
                dead_reason.as_deref().unwrap_or("-"),
                last_error.as_deref().unwrap_or("-"),
            );
            for failure in row.failures()? {
                println!(
                    "  attempt {} by {}: {}",
                    failure.attempt, failure.instance, failure.error
                );
            }
        }
        Ok(())
    }
}

/// When the whole story has to be told.
#[derive(Clone, Copy)]
pub(crate) struct Deadline {
    at: Instant,
    limit: Duration,
}

impl Deadline {
    pub(crate) fn after(limit: Duration) -> Self {
        Self {
            at: Instant::now() + limit,
            limit,
        }
    }

    /// Waits for something, but not beyond the deadline.
    pub(crate) async fn within<F: Future>(
        self,
        what: &str,
        future: F,
    ) -> anyhow::Result<F::Output> {
        timeout_at(self.at, future).await.with_context(|| {
            format!(
                "{:?} after its beginning the story still waits for {what}",
                self.limit
            )
        })
    }
}
