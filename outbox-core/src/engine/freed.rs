//! Ordering keys of which this process has settled something.
//!
//! The next event of such a key may be far below the low-water mark of the relay, which has passed
//! it over while it was blocked. Without being told, the relay would find it at its next look from
//! the beginning, and a key would move by one event per second.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// The most keys that are remembered. Those beyond are found by a look from the beginning.
const FREED_MAX: usize = 1_000;

/// Keys to be looked at by the next claim.
#[derive(Debug, Default)]
pub(crate) struct Freed {
    keys: Mutex<BTreeSet<String>>,
}

impl Freed {
    pub(crate) fn add(&self, keys: impl IntoIterator<Item = String>) {
        let mut freed = self.lock();
        for key in keys {
            if freed.len() < FREED_MAX {
                freed.insert(key);
            }
        }
    }

    /// Takes all of them. A claim that did not look at each gives them back.
    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.lock()).into_iter().collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<String>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_taken_once_and_there_is_an_end_to_them() {
        let freed = Freed::default();
        freed.add(["b", "a", "b"].map(str::to_owned));
        assert_eq!(freed.take(), ["a", "b"]);
        assert_eq!(freed.take(), [""; 0]);
        freed.add((0..2 * FREED_MAX).map(|n| n.to_string()));
        assert_eq!(freed.take().len(), FREED_MAX);
    }
}
