//! Where a claim begins to look. See [`LowWater`] for why.

use std::time::Duration;

use tokio::time::Instant;

use crate::event::Priority;
use crate::store::{Claimed, LowWater};

/// How long a row below the mark may wait for a look from the beginning.
const FULL_LOOK_EVERY: Duration = Duration::from_secs(1);

/// A look from the beginning that takes longer than this walks over much that it cannot claim:
/// leased rows, rows of unknown names, rows behind a dead letter of their ordering key.
const CHEAP: Duration = Duration::from_millis(20);

/// Such a look is not repeated until this many times as long has passed, so that it takes at most a
/// twentieth of the relay's time and of the database's.
const REST: u32 = 19;

/// But no longer than this. What took long may have been a database that did not answer; and a
/// transaction that commits late has a row below the mark, which waits for this look.
const REST_MAX: Duration = Duration::from_secs(10);

/// The marks of one relay.
#[derive(Debug)]
pub(crate) struct Marks {
    marks: LowWater,
    full_look_at: Instant,
    /// Until when the last look from the beginning has been enough.
    rested_at: Instant,
    /// The last full look found rows below the marks, so there may be more of them.
    more_below: bool,
}

/// One claim's lower bounds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Look {
    pub(crate) from: LowWater,
    pub(crate) full: bool,
}

impl Default for Marks {
    fn default() -> Self {
        Self::new()
    }
}

impl Marks {
    fn new() -> Self {
        Self {
            marks: LowWater::BEGINNING,
            full_look_at: Instant::now(),
            rested_at: Instant::now(),
            more_below: false,
        }
    }

    /// Where the next claim begins.
    pub(crate) fn look(&self) -> Look {
        let due = std::cmp::max(self.full_look_at, self.rested_at);
        let full = self.more_below || Instant::now() >= due;
        Look {
            from: if full {
                LowWater::BEGINNING
            } else {
                self.marks
            },
            full,
        }
    }

    /// Learns from what a claim of at most `limit` rows found, and how long it took.
    ///
    /// A full look does not lower a mark: what it found below is claimed now, and if there may be
    /// more of it the next look is a full one again.
    pub(crate) fn learn(&mut self, look: Look, claimed: &[Claimed], limit: usize, took: Duration) {
        let full_batch = claimed.len() >= limit;
        if look.full {
            self.full_look_at = Instant::now() + FULL_LOOK_EVERY;
            if took > CHEAP {
                self.rested_at = Instant::now() + std::cmp::min(took * REST, REST_MAX);
            }
            self.more_below = full_batch
                && claimed
                    .iter()
                    .any(|c| !c.waited && c.id.row() < self.marks.of(c.priority));
        }
        for priority in Priority::DESCENDING {
            // Not those of freed ordering keys: they were found below the mark, and a claim with one
            // of them would not raise it.
            let rows = claimed.iter().filter(|c| {
                !c.waited && c.priority == priority && c.id.row() >= look.from.of(priority)
            });
            if let Some(smallest) = rows.map(|c| c.id.row()).min() {
                self.marks.raise(priority, smallest);
            }
        }
        if !look.full && !full_batch {
            // Nothing more above the marks: there may be something below.
            self.full_look_at = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::time::SystemTime;

    use uuid::Uuid;

    use super::*;
    use crate::EventId;
    use crate::lease::LeaseToken;

    const SOON: Duration = Duration::from_millis(1);

    fn claimed(row: i64) -> Claimed {
        Claimed {
            id: EventId::new(Uuid::nil(), row),
            token: LeaseToken::random(),
            name: "a".to_owned(),
            handler: None,
            origin: None,
            version: NonZeroU32::MIN,
            payload: "null".to_owned(),
            headers: None,
            ordering_key: None,
            priority: Priority::Normal,
            waited: false,
            attempt: NonZeroU32::MIN,
            max_attempts: NonZeroU32::MIN,
            created_at: SystemTime::UNIX_EPOCH,
            expired: false,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_begins_where_the_last_one_found_its_first_row() {
        let mut marks = Marks::new();
        let first = marks.look();
        assert!(first.full);
        marks.learn(first, &[claimed(8), claimed(7)], 2, SOON);
        let second = marks.look();
        assert!(!second.full);
        assert_eq!(second.from.of(Priority::Normal), 7);
        assert_eq!(second.from.of(Priority::High), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn it_looks_from_the_beginning_once_a_second_and_when_it_finds_too_little() {
        let mut marks = Marks::new();
        marks.learn(marks.look(), &[claimed(7), claimed(8)], 2, SOON);
        tokio::time::advance(FULL_LOOK_EVERY).await;
        assert!(marks.look().full);
        marks.learn(marks.look(), &[claimed(9), claimed(10)], 2, SOON);
        assert!(!marks.look().full);
        marks.learn(marks.look(), &[claimed(11)], 2, SOON);
        assert!(marks.look().full);
    }

    #[tokio::test(start_paused = true)]
    async fn rows_below_the_mark_are_drained_before_it_is_used_again() {
        let mut marks = Marks::new();
        marks.learn(marks.look(), &[claimed(70), claimed(80)], 2, SOON);
        tokio::time::advance(FULL_LOOK_EVERY).await;
        marks.learn(marks.look(), &[claimed(3), claimed(4)], 2, SOON);
        assert!(marks.look().full, "there may be more below");
        marks.learn(marks.look(), &[claimed(5), claimed(81)], 2, SOON);
        assert!(marks.look().full);
        marks.learn(marks.look(), &[claimed(82), claimed(83)], 2, SOON);
        assert_eq!(marks.look().from.of(Priority::Normal), 82);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_look_from_the_beginning_is_not_repeated_at_once() {
        let mut marks = Marks::new();
        let long = Duration::from_millis(500);
        marks.learn(marks.look(), &[claimed(7), claimed(8)], 2, long);
        marks.learn(marks.look(), &[claimed(9)], 2, SOON);
        tokio::time::advance(FULL_LOOK_EVERY).await;
        assert!(!marks.look().full);
        tokio::time::advance(long * REST - FULL_LOOK_EVERY).await;
        assert!(marks.look().full);
    }

    #[tokio::test(start_paused = true)]
    async fn a_database_that_hung_does_not_put_off_the_next_look_for_minutes() {
        let mut marks = Marks::new();
        let hung = Duration::from_secs(60);
        marks.learn(marks.look(), &[claimed(7), claimed(8)], 2, hung);
        assert!(!marks.look().full);
        tokio::time::advance(REST_MAX).await;
        assert!(marks.look().full);
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_of_a_freed_key_does_not_hold_the_mark_back() {
        let mut marks = Marks::new();
        marks.learn(marks.look(), &[claimed(70), claimed(80)], 2, SOON);
        marks.learn(marks.look(), &[claimed(3), claimed(90)], 2, SOON);
        assert_eq!(marks.look().from.of(Priority::Normal), 90);
    }
}
