//! What is next of the ordering keys of which this process has settled something.
//!
//! The next event of such a key may be far below the low-water mark of the relay, which has passed
//! it over while it was blocked. Without being told, the relay would find it at its next look from
//! the beginning, and a key would move by one event per second.
//!
//! Asked for beside the claims, and not by them: a claim waits for nothing but its own rows, and most
//! keys have nothing that waits.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::engine::Shared;
use crate::outcome::ErrorText;
use crate::store::Store;

/// The most keys, and the most rows, that are remembered. Those beyond are found by a look from the
/// beginning.
const FREED_MAX: usize = 10_000;

#[derive(Debug, Default)]
pub(crate) struct Freed {
    keys: Mutex<BTreeSet<String>>,
    added: Notify,
    rows: Mutex<BTreeSet<i64>>,
}

impl Freed {
    /// Has the next event of the key looked for.
    pub(crate) fn add(&self, key: &str) {
        let mut keys = lock(&self.keys);
        if keys.len() < FREED_MAX {
            keys.insert(key.to_owned());
        }
        drop(keys);
        self.added.notify_one();
    }

    /// Takes rows that a claim of at most `limit` has to look at, twice as many as it can take. If
    /// it had no room for some, they come [back](Self::put_back).
    pub(crate) fn take(&self, limit: usize) -> Vec<i64> {
        let mut rows = lock(&self.rows);
        let beyond = rows.iter().nth(2 * limit).copied();
        let rest = beyond.map(|row| rows.split_off(&row)).unwrap_or_default();
        std::mem::replace(&mut *rows, rest).into_iter().collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.rows).is_empty()
    }

    pub(crate) fn put_back(&self, found: impl IntoIterator<Item = i64>) {
        let mut rows = lock(&self.rows);
        for row in found {
            if rows.len() < FREED_MAX {
                rows.insert(row);
            }
        }
    }

    fn take_keys(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.keys)).into_iter().collect()
    }
}

/// Looks for what is next until the outbox closes.
pub(crate) async fn run<S: Store>(shared: Arc<Shared<S>>) {
    loop {
        tokio::select! {
            () = shared.closing.cancelled() => return,
            () = shared.freed.added.notified() => {}
        }
        let keys = shared.freed.take_keys();
        match shared.store.next_in_order(&keys).await {
            Ok(rows) if rows.is_empty() => {}
            Ok(rows) => {
                shared.freed.put_back(rows);
                shared.wake.everyone();
            }
            Err(error) => {
                shared.counters.store_errors.one();
                tracing::debug!(
                    error = %ErrorText::from(&error),
                    "what is next in order was not found; a look from the beginning will find it"
                );
                // A claim that comes up short looks from the beginning.
                shared.wake.everyone();
            }
        }
    }
}

fn lock<T>(set: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that runs under these locks panics; were it to, the sets are still consistent.
    set.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_and_a_row_are_taken_once_and_there_is_an_end_to_them() {
        let freed = Freed::default();
        ["b", "a", "b"].into_iter().for_each(|key| freed.add(key));
        assert_eq!(freed.take_keys(), ["a", "b"]);
        assert_eq!(freed.take_keys(), [""; 0]);
        freed.put_back([2, 3, 1, 2]);
        assert_eq!(freed.take(1), [1, 2]);
        assert!(!freed.is_empty());
        assert_eq!(freed.take(1), [3]);
        assert!(freed.is_empty());
        assert_eq!(freed.take(1), [0; 0]);
        (0..2 * FREED_MAX).for_each(|n| freed.add(&n.to_string()));
        assert_eq!(freed.take_keys().len(), FREED_MAX);
        freed.put_back(0..20_000);
        assert_eq!(freed.take(FREED_MAX).len(), FREED_MAX);
    }
}
