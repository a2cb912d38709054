//! Wake-ups between the clones of a store.

use std::sync::Mutex;

use tokio::sync::watch;

use super::{MemoryStore, Operation, lock};
use crate::store::{StoreError, StoreErrorKind, Wakeups};

impl MemoryStore {
    /// Switches wake-ups on, for all clones: until then [`listen`](crate::Store::listen) answers
    /// `None`.
    #[must_use]
    pub fn with_wakeups(self) -> Self {
        *lock(&self.shared.bell.sender) = Some(watch::Sender::new(()));
        self
    }

    /// Breaks every subscription there is, as a lost connection does. New ones can be made.
    pub fn break_subscriptions(&self) {
        self.shared.bell.break_subscriptions();
    }
}

/// A subscription to the wake-ups of a [`MemoryStore`]. Those that come faster than they are
/// waited for are one.
#[derive(Debug)]
pub struct MemoryWakeups {
    receiver: watch::Receiver<()>,
}

impl Wakeups for MemoryWakeups {
    async fn next(&mut self) -> Result<(), StoreError> {
        let changed = self.receiver.changed().await;
        changed.map_err(|_| Operation::Listen.error(StoreErrorKind::Unreachable))
    }
}

#[derive(Debug, Default)]
pub(super) struct Bell {
    sender: Mutex<Option<watch::Sender<()>>>,
}

impl Bell {
    pub(super) fn subscribe(&self) -> Option<MemoryWakeups> {
        let sender = lock(&self.sender);
        let receiver = sender.as_ref()?.subscribe();
        Some(MemoryWakeups { receiver })
    }

    pub(super) fn ring(&self) {
        if let Some(sender) = lock(&self.sender).as_ref() {
            sender.send_replace(());
        }
    }

    pub(super) fn break_subscriptions(&self) {
        if let Some(sender) = lock(&self.sender).as_mut() {
            *sender = watch::Sender::new(());
        }
    }
}
