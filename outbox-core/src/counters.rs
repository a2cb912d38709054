//! What an outbox has done since it was built, as numbers.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Numbers that only rise. One set per [`Outbox`](crate::Outbox), for this process.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)*
        }

        /// What an outbox has done in this process since it was built.
        ///
        /// The numbers only rise; a rate is the difference of two snapshots. They are read one
        /// after the other, so sums over them may be off by what happened in between.
        #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
        #[non_exhaustive]
        pub struct Snapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> Snapshot {
                Snapshot { $($name: self.$name.0.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Events this process claimed, or found verified after a commit.
    claimed,
    /// Events recorded as processed.
    processed,
    /// Failed attempts recorded, with another one to follow.
    retried,
    /// Events recorded as dead letters.
    dead,
    /// Events removed because they could not be decoded.
    discarded,
    /// Claims given back without a charge.
    released,
    /// Claims that turned out to be somebody else's: a settlement, a release or a renewal under a
    /// token that was no longer in its row, and handlers stopped because their lease had ended.
    lease_lost,
    /// Results of handlers that came after their event had been settled or lost, and were refused.
    late_results,
    /// Outcomes that were never recorded; their leases expire.
    unrecorded,
    /// Claim statements sent.
    claims,
    /// Settlement statements sent, counted by batch.
    settlements,
    /// Renewal statements sent.
    renewals,
    /// Verification statements sent for rows born leased.
    verifications,
    /// Rows born leased that were gone when they were verified: rolled back, or taken over.
    vanished,
    /// Calls to the store that failed.
    store_errors,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: usize) {
        self.0
            .fetch_add(u64::try_from(n).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(crate) fn one(&self) {
        self.add(1);
    }
}
