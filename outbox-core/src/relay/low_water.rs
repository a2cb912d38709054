//! Where a claim begins to look. See [`LowWater`] for why.

use std::time::Duration;

use tokio::time::Instant;

use crate::event::Priority;
use crate::store::{Claimed, LowWater, Pause};

/// How long a row below the mark may wait for a look from the beginning.
const FULL_LOOK_EVERY: Duration = Duration::from_secs(1);

/// A look that takes longer than this walks over much that it cannot claim: leased rows, rows of
/// unknown names, rows that wait for an earlier one of their ordering key.
const CHEAP: Duration = Duration::from_millis(20);

/// After such a look, none is from the beginning until this many times as long has passed, so that
/// they take at most a twentieth of the relay's time and of the database's.
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
    /// The last look from the beginning was long, or one since.
    long: bool,
    /// The last long look came up short, and the next one from the same marks would, too.
    walked: bool,
    /// What was paused when that began.
    paused: Option<Vec<Pause>>,
    pauses_at: Instant,
}

/// What was asked for before a look.
#[derive(Debug)]
pub(crate) struct Around {
    /// No row that was committed by then is above it.
    pub(crate) newest: i64,
    pub(crate) paused: Vec<Pause>,
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
            long: false,
            walked: false,
            paused: None,
            pauses_at: Instant::now(),
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

    /// Whether this look is to be told what is around it.
    pub(crate) fn asks_around(&self, look: Look) -> bool {
        self.long && (look.full || self.walked)
    }

    /// Whether it is time to see if there is a reason to look from the beginning now, and not only
    /// when the last long look has been rested from: what was paused, and was stepped over, may not
    /// be paused any more.
    pub(crate) fn asks_for_pauses(&mut self, look: Look) -> bool {
        let now = Instant::now();
        let due = !look.full && self.long && now >= self.full_look_at && now >= self.pauses_at;
        if due {
            self.pauses_at = now + FULL_LOOK_EVERY;
        }
        due
    }

    /// Looks from the beginning next if something else is paused than before the last long look.
    pub(crate) fn learn_pauses(&mut self, paused: Vec<Pause>) {
        if self.paused.as_ref().is_some_and(|then| *then != paused) {
            self.rested_at = Instant::now();
        }
        self.paused = Some(paused);
    }

    /// Learns from what a claim of at most `limit` rows found, and how long it took. That a row of
    /// `freed` was below the marks, which is in order, says nothing of others.
    ///
    /// A full look does not lower a mark: what it found below is claimed now, and if there may be
    /// more of it the next look is a full one again.
    ///
    /// One that came up short has seen all there is above its marks, and has no use for what it left.
    /// If that took long, the claims after it begin above what it has seen, until one looks from the
    /// beginning again: a hundred thousand rows behind each other in order would otherwise be walked
    /// over by each of them.
    pub(crate) fn learn(
        &mut self,
        look: Look,
        claimed: &[Claimed],
        freed: &[i64],
        limit: usize,
        took: Duration,
        around: Option<Around>,
    ) {
        let full_batch = claimed.len() >= limit;
        if took > CHEAP {
            self.long = true;
            self.walked = !full_batch;
            self.rested_at = Instant::now() + std::cmp::min(took * REST, REST_MAX);
        } else if look.full {
            self.long = false;
        }
        if self.long
            && !full_batch
            && let Some(around) = around
        {
            self.walked = false;
            self.paused = Some(around.paused);
            for priority in Priority::DESCENDING {
                self.marks.raise(priority, around.newest.saturating_add(1));
            }
        }
        if look.full {
            self.full_look_at = Instant::now() + FULL_LOOK_EVERY;
            self.more_below = full_batch
                && claimed.iter().any(|c| {
                    !c.waited
                        && c.id.row() < self.marks.of(c.priority)
                        && freed.binary_search(&c.id.row()).is_err()
                });
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
    use crate::store::PauseRef;

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
            lapsed: 0,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_begins_where_the_last_one_found_its_first_row() {
        let mut marks = Marks::new();
        let first = marks.look();
        assert!(first.full);
        marks.learn(first, &[claimed(8), claimed(7)], &[], 2, SOON, None);
        let second = marks.look();
        assert!(!second.full);
        assert_eq!(second.from.of(Priority::Normal), 7);
        assert_eq!(second.from.of(Priority::High), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn it_looks_from_the_beginning_once_a_second_and_when_it_finds_too_little() {
        let mut marks = Marks::new();
        marks.learn(marks.look(), &[claimed(7), claimed(8)], &[], 2, SOON, None);
        tokio::time::advance(FULL_LOOK_EVERY).await;
        assert!(marks.look().full);
        marks.learn(marks.look(), &[claimed(9), claimed(10)], &[], 2, SOON, None);
        assert!(!marks.look().full);
        marks.learn(marks.look(), &[claimed(11)], &[], 2, SOON, None);
        assert!(marks.look().full);
    }

    #[tokio::test(start_paused = true)]
    async fn rows_below_the_mark_are_drained_before_it_is_used_again() {
        let mut marks = Marks::new();
        marks.learn(
            marks.look(),
            &[claimed(70), claimed(80)],
            &[],
            2,
            SOON,
            None,
        );
        tokio::time::advance(FULL_LOOK_EVERY).await;
        marks.learn(marks.look(), &[claimed(3), claimed(4)], &[], 2, SOON, None);
        assert!(marks.look().full, "there may be more below");
        marks.learn(marks.look(), &[claimed(5), claimed(81)], &[], 2, SOON, None);
        assert!(marks.look().full);
        marks.learn(
            marks.look(),
            &[claimed(82), claimed(83)],
            &[],
            2,
            SOON,
            None,
        );
        assert_eq!(marks.look().from.of(Priority::Normal), 82);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_look_from_the_beginning_is_not_repeated_at_once() {
        let mut marks = Marks::new();
        let long = Duration::from_millis(500);
        marks.learn(marks.look(), &[claimed(7), claimed(8)], &[], 2, long, None);
        marks.learn(marks.look(), &[claimed(9)], &[], 2, SOON, None);
        tokio::time::advance(FULL_LOOK_EVERY).await;
        assert!(!marks.look().full);
        tokio::time::advance(long * REST - FULL_LOOK_EVERY).await;
        assert!(marks.look().full);
    }

    const LONG: Duration = Duration::from_millis(100);

    fn around(newest: i64, paused: &[&str]) -> Around {
        let paused = paused.iter().map(|name| Pause {
            of: PauseRef {
                name: (*name).to_owned(),
                handler: None,
            },
            since: SystemTime::UNIX_EPOCH,
        });
        Around {
            newest,
            paused: paused.collect(),
        }
    }

    /// What a long look has seen to the end is not walked over again until the next one.
    #[tokio::test(start_paused = true)]
    async fn after_a_long_look_to_the_end_claims_begin_above_it() {
        let mut marks = Marks::new();
        assert!(!marks.asks_around(marks.look()));
        marks.learn(marks.look(), &[], &[], 2, LONG, None);
        assert_eq!(marks.look().from.of(Priority::Normal), 0);
        tokio::time::advance(LONG * REST).await;
        assert!(marks.asks_around(marks.look()));
        marks.learn(
            marks.look(),
            &[claimed(7)],
            &[],
            2,
            LONG,
            Some(around(90, &[])),
        );
        assert!(!marks.look().full);
        assert_eq!(marks.look().from.of(Priority::Normal), 91);
        assert_eq!(marks.look().from.of(Priority::High), 91);
        // A claim that fills its batch has nothing to ask, however long it took.
        marks.learn(
            marks.look(),
            &[claimed(92), claimed(93)],
            &[],
            2,
            LONG,
            None,
        );
        assert!(!marks.asks_around(marks.look()));
        // A short one that fills its batch has not come to the end.
        tokio::time::advance(LONG * REST).await;
        marks.learn(
            marks.look(),
            &[claimed(95), claimed(96)],
            &[],
            2,
            SOON,
            Some(around(99, &[])),
        );
        assert_eq!(marks.look().from.of(Priority::Normal), 95);
        tokio::time::advance(FULL_LOOK_EVERY).await;
        assert!(!marks.asks_around(marks.look()));
    }

    /// Somebody resumed what the long look has stepped over.
    #[tokio::test(start_paused = true)]
    async fn a_pause_that_ends_ends_the_rest_after_a_long_look() {
        let mut marks = Marks::new();
        let long = Duration::from_secs(2);
        marks.learn(marks.look(), &[], &[], 2, long, None);
        tokio::time::advance(REST_MAX).await;
        marks.learn(marks.look(), &[], &[], 2, long, Some(around(90, &["a"])));
        assert!(
            !marks.asks_for_pauses(marks.look()),
            "it has just been told"
        );
        tokio::time::advance(FULL_LOOK_EVERY).await;
        assert!(marks.asks_for_pauses(marks.look()));
        assert!(!marks.asks_for_pauses(marks.look()), "once a second");
        marks.learn_pauses(around(0, &["a"]).paused);
        assert!(!marks.look().full);
        marks.learn_pauses(around(0, &[]).paused);
        assert!(marks.look().full);
    }

    #[tokio::test(start_paused = true)]
    async fn a_database_that_hung_does_not_put_off_the_next_look_for_minutes() {
        let mut marks = Marks::new();
        let hung = Duration::from_secs(60);
        marks.learn(marks.look(), &[claimed(7), claimed(8)], &[], 2, hung, None);
        assert!(!marks.look().full);
        tokio::time::advance(REST_MAX).await;
        assert!(marks.look().full);
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_of_a_freed_key_does_not_hold_the_mark_back() {
        let mut marks = Marks::new();
        marks.learn(
            marks.look(),
            &[claimed(70), claimed(80)],
            &[],
            2,
            SOON,
            None,
        );
        tokio::time::advance(FULL_LOOK_EVERY).await;
        let both = [claimed(1), claimed(2)];
        marks.learn(marks.look(), &both, &[1, 2, 5], 2, SOON, None);
        assert!(!marks.look().full, "they were asked for");
        marks.learn(marks.look(), &[claimed(3), claimed(90)], &[], 2, SOON, None);
        assert_eq!(marks.look().from.of(Priority::Normal), 90);
    }
}
