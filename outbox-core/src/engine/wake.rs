//! Wake-ups: hints that something may be due.
//!
//! Inside the process they are a [`Notify`]. Towards other processes they are sent by a loop of
//! their own, the first at once and then at most one per [`COALESCE`]: a NOTIFY in the publisher's
//! transaction would take a database-wide lock at its commit.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use crate::engine::Shared;
use crate::outcome::ErrorText;
use crate::store::Store;

const COALESCE: Duration = Duration::from_millis(2);

#[derive(Debug, Default)]
pub(crate) struct Wake {
    here: Notify,
    soon: Notify,
    elsewhere: Notify,
}

impl Wake {
    /// Wakes the relay of this process.
    pub(crate) fn local(&self) {
        self.here.notify_one();
    }

    /// Wakes the relays of all processes.
    pub(crate) fn everyone(&self) {
        self.here.notify_one();
        self.elsewhere.notify_one();
    }

    /// Tells the relay of this process that something will be due soon: a transaction that we do
    /// not see commit has published.
    pub(crate) fn expect(&self) {
        self.soon.notify_one();
    }

    /// Waits for such a hint. One that came since the last wait is not lost.
    pub(crate) async fn expected(&self) {
        self.soon.notified().await;
    }

    /// Waits for a wake-up. One that came since the last wait is not lost.
    pub(crate) async fn woken(&self) {
        self.here.notified().await;
    }
}

/// Sends wake-ups to other processes until the outbox closes.
pub(crate) async fn run<S: Store>(shared: Arc<Shared<S>>) {
    loop {
        tokio::select! {
            () = shared.closing.cancelled() => return,
            () = shared.wake.elsewhere.notified() => {}
        }
        if let Err(error) = shared.store.notify().await {
            // Only a hint: the others poll.
            shared.counters.store_errors.one();
            tracing::debug!(error = %ErrorText::from(&error), "a wake-up could not be sent");
        }
        tokio::time::sleep(COALESCE).await;
    }
}
