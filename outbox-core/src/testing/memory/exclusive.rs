//! Locks that one instance has.

use std::collections::HashMap;
use std::sync::Mutex;

use super::{MemoryStore, Operation, lock};
use crate::store::{ExclusiveLock, StoreError};

/// Who has which lock: each taking has a number of its own, so that a broken lock is not mistaken
/// for the next one of the same name.
#[derive(Debug, Default)]
pub(super) struct Holders {
    held: Mutex<(u64, HashMap<String, u64>)>,
}

impl Holders {
    fn take(&self, name: &str) -> Option<u64> {
        let (last, held) = &mut *lock(&self.held);
        if held.contains_key(name) {
            return None;
        }
        *last += 1;
        held.insert(name.to_owned(), *last);
        Some(*last)
    }

    pub(super) fn break_lock(&self, name: &str) {
        lock(&self.held).1.remove(name);
    }

    fn has(&self, name: &str, taking: u64) -> bool {
        lock(&self.held).1.get(name) == Some(&taking)
    }

    fn free(&self, name: &str, taking: u64) {
        if self.has(name, taking) {
            self.break_lock(name);
        }
    }
}

/// A lock of a [`MemoryStore`]. Dropping it frees it.
#[derive(Debug)]
pub struct MemoryExclusive {
    store: MemoryStore,
    name: String,
    taking: u64,
}

impl MemoryExclusive {
    pub(super) fn take(store: &MemoryStore, name: &str) -> Option<Self> {
        let taking = store.shared.exclusive.take(name)?;
        Some(Self {
            store: store.clone(),
            name: name.to_owned(),
            taking,
        })
    }
}

impl ExclusiveLock for MemoryExclusive {
    async fn keep(&mut self) -> Result<bool, StoreError> {
        let holders = &self.store.shared.exclusive;
        self.store
            .run(Operation::KeepExclusive, |_, _| {
                Ok(holders.has(&self.name, self.taking))
            })
            .await
    }

    async fn release(self) -> Result<(), StoreError> {
        Ok(())
    }
}

impl Drop for MemoryExclusive {
    fn drop(&mut self) {
        self.store.shared.exclusive.free(&self.name, self.taking);
    }
}
