//! The contract that every store must keep, as tests.
//!
//! A case is a fact, and its name says it; its documentation cites the promise by the number it
//! has in [`Store`]. Expected values are written by hand. No case sleeps: where time has to
//! pass, the [`Harness`] moves the row.
//!
//! A store runs them all with [`store_contract!`](crate::store_contract), which makes one test
//! of each:
//!
//! ```
//! use std::time::Duration;
//!
//! use outbox_core::testing::MemoryStore;
//! use outbox_core::testing::contract::Harness;
//!
//! struct InMemory(MemoryStore);
//!
//! impl Harness for InMemory {
//!     type Store = MemoryStore;
//!
//!     fn store(&self) -> &MemoryStore {
//!         &self.0
//!     }
//!
//!     async fn expire_lease(&self, row: i64) {
//!         self.0.expire_lease(row);
//!     }
//!
//!     async fn make_due(&self, row: i64) {
//!         self.0.make_due(row);
//!     }
//!
//!     async fn expire_retention(&self, row: i64) {
//!         self.0.expire_retention(row);
//!     }
//!
//!     async fn set_lease(&self, row: i64, remaining: Duration) {
//!         self.0.set_lease(row, remaining);
//!     }
//!
//!     async fn expire(&self, row: i64) {
//!         self.0.expire(row);
//!     }
//!
//!     async fn age_dead_letter(&self, row: i64, age: Duration) {
//!         self.0.age_dead_letter(row, age);
//!     }
//! }
//!
//! outbox_core::store_contract!(InMemory(MemoryStore::new()));
//! ```
//!
//! A case that is not in the list of `store_contract!` would never run, so a test of this crate
//! compares the two.

#![allow(
    clippy::missing_panics_doc,
    clippy::unwrap_used,
    reason = "a case is a test, and panicking is how it fails"
)]

pub mod cancel;
pub mod claim;
pub mod dead_letter;
pub mod dedup;
pub mod expiry;
pub mod fence;
pub mod lease;
pub mod lock;
pub mod nested;
pub mod order;
pub mod pause;
pub mod publish;
pub mod retention;
pub mod settle;
pub mod split;
pub mod stats;
pub mod sweep;

mod steps;

use std::future::Future;
use std::time::Duration;

use crate::store::Store;

/// What a case needs: an installed outbox of its own, with nothing in it, and hands to move the
/// columns that only time would move.
///
/// The methods that move a row see to it that the database's own clock finds the moment past when
/// they come back.
pub trait Harness: Send + Sync {
    /// The store under test.
    type Store: Store;

    /// The store.
    fn store(&self) -> &Self::Store;

    /// The same outbox, as another process sees it. Defaults to a clone of the store, which is
    /// right where clones share nothing but the database and its connections.
    fn another_store(&self) -> impl Future<Output = Self::Store> + Send {
        async { self.store().clone() }
    }

    /// Ends the lease of an unsettled row. The token stays in the row.
    fn expire_lease(&self, row: i64) -> impl Future<Output = ()> + Send;

    /// Makes a row due that waits for a retry or a delay. It stays a row that waited.
    fn make_due(&self, row: i64) -> impl Future<Output = ()> + Send;

    /// Ends the retention of a processed event and of its dedup key, whichever of the two there
    /// still is. Removes neither.
    fn expire_retention(&self, row: i64) -> impl Future<Output = ()> + Send;

    /// Makes the lease of an unsettled row end in `remaining`.
    fn set_lease(&self, row: i64, remaining: Duration) -> impl Future<Output = ()> + Send;

    /// Ends the time in which an unsettled row is worth handling.
    fn expire(&self, row: i64) -> impl Future<Output = ()> + Send;

    /// Makes a dead letter older by `age`.
    fn age_dead_letter(&self, row: i64, age: Duration) -> impl Future<Output = ()> + Send;

    /// Comes back when an exclusive lock that was dropped without being released is free: waits
    /// until the database has noticed, or ends its lease. Defaults to nothing, for a store where
    /// dropping frees it.
    fn end_dropped_exclusive(&self, name: &str) -> impl Future<Output = ()> + Send {
        let _ = name;
        async {}
    }

    /// Comes back when a transaction is likely to wait for another one's commit.
    ///
    /// The default lets other tasks run a few times, which is enough in one process. A store
    /// whose database shows who waits should ask it; the cases hold either way, but without the
    /// wait they may miss the race they are about.
    fn publisher_waits(&self) -> impl Future<Output = ()> + Send {
        async {
            for _ in 0..64 {
                tokio::task::yield_now().await;
            }
        }
    }
}

/// Makes one `#[tokio::test]` of every case of the store contract.
///
/// The argument is an expression that makes a fresh
/// [`Harness`](crate::testing::contract::Harness); it is evaluated once per case and may
/// `.await`. The crate that uses it needs `tokio` with the features `macros` and `rt`.
#[macro_export]
macro_rules! store_contract {
    ($harness:expr) => {
        $crate::__store_contract_cases! { [$crate::__store_contract_tests] ($harness) }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __store_contract_tests {
    (($harness:expr) $($topic:ident: $($case:ident)+;)+) => {
        $($(
            #[::tokio::test]
            async fn $case() {
                let harness = $harness;
                $crate::testing::contract::$topic::$case(&harness).await;
            }
        )+)+
    };
}

/// The list of all cases, handed to the macro that is named.
#[doc(hidden)]
#[macro_export]
macro_rules! __store_contract_cases {
    ([$($then:tt)+] $argument:tt) => {
        $($then)+! {
            $argument
            publish:
                an_installed_outbox_passes_its_check
                a_check_leaves_no_row
                every_column_is_kept
                an_event_needs_no_headers_and_no_keys
                a_payload_comes_out_unchanged_to_the_byte
                a_large_payload_comes_out_unchanged
                numbers_ascend_in_input_order
                a_rolled_back_event_leaves_nothing
                a_dropped_transaction_leaves_nothing
                an_uncommitted_event_cannot_be_claimed
                a_transaction_can_insert_more_than_once
                another_process_sees_the_same_event
                a_born_leased_event_is_in_progress
                a_batch_mixes_leased_delayed_and_due_events
                a_delayed_event_waits_for_its_due_time
                a_thousand_events_go_in_and_out
                empty_input_answers_nothing
                an_unknown_row_is_not_found;
            dedup:
                a_duplicate_is_not_inserted
                a_duplicate_is_told_the_id
                keys_are_scoped_by_event_name
                unkeyed_events_are_never_duplicates
                keys_are_compared_to_the_byte
                duplicates_in_a_batch_are_answered_in_input_order
                a_transaction_meets_its_own_key
                a_duplicate_leaves_the_transaction_usable
                a_duplicate_is_told_that_the_event_is_in_progress
                a_duplicate_of_a_born_leased_event_is_told_so
                a_duplicate_of_an_expired_lease_is_told_pending
                a_duplicate_is_told_that_the_event_failed
                a_duplicate_is_told_the_output
                a_duplicate_of_an_event_without_output_is_told_none
                a_key_outlives_an_event_that_is_not_kept
                a_key_lasts_as_long_as_its_event
                a_duplicate_is_told_of_the_dead_letter
                a_key_is_free_again_after_its_retention
                a_loser_waits_for_the_commit_and_learns_the_id
                a_waiting_loser_is_inserted_when_the_winner_rolls_back
                one_of_many_concurrent_publishers_wins
                batches_with_equal_keys_do_not_deadlock
                a_duplicate_finds_an_event_that_is_being_settled
                a_duplicate_is_told_the_fingerprint;
            claim:
                a_claim_hands_over_the_event
                a_claim_takes_no_more_than_its_limit
                priority_goes_before_number
                a_batch_prefers_the_higher_priority
                unknown_names_are_left_alone
                later_versions_are_left_alone
                each_name_is_claimed_up_to_its_own_version
                no_names_claim_nothing
                a_low_water_mark_bounds_one_priority
                a_low_water_mark_never_hides_a_waiting_row
                a_retry_waits_for_its_due_time
                a_reserved_part_of_a_batch_is_for_waiting_rows
                the_reserve_goes_by_priority
                waiting_rows_compete_at_their_priority
                a_reserve_that_nobody_needs_is_used
                a_claim_is_exclusive_while_its_lease_lasts
                concurrent_claims_are_disjoint
                both_kinds_of_claim_are_disjoint
                an_expired_lease_makes_the_row_due_again
                an_expired_birth_lease_makes_the_row_due_again
                an_expired_lease_of_a_retry_makes_it_due_again
                a_row_without_an_attempt_left_is_not_claimed
                a_claim_by_number_takes_those_rows_only
                a_claim_by_number_takes_only_what_is_due
                a_claim_tells_of_the_leases_that_ended_before_it
                a_claim_in_a_pass_begins_at_the_marks
                a_claim_in_a_pass_is_a_claim;
            lease:
                a_held_lease_is_verified
                a_rolled_back_lease_is_not_verified
                verification_leaves_out_what_is_not_held
                an_expired_lease_has_nothing_left
                a_renewal_moves_the_end_of_the_lease
                a_renewal_changes_nothing_else
                an_expired_lease_that_nobody_took_can_be_renewed
                a_stale_token_cannot_renew
                renewals_are_answered_in_input_order
                a_released_row_is_due_and_uncharged
                a_released_birth_lease_is_uncharged
                a_released_retry_is_still_due
                an_expired_lease_that_nobody_took_can_be_released
                a_stale_token_cannot_release
                a_second_release_is_lost
                releases_are_answered_in_input_order;
            settle:
                a_processed_event_is_kept_with_its_output
                an_event_processed_without_output_has_none
                an_output_at_the_limit_is_kept
                a_processed_event_without_retention_is_gone
                an_event_without_retention_can_still_fail_and_die
                a_retry_is_due_after_its_delay
                a_retry_without_delay_is_due_at_once
                a_retry_can_succeed
                a_dead_letter_keeps_everything
                every_dead_reason_is_kept
                the_last_ten_failures_are_kept
                an_error_text_at_the_limit_is_kept
                an_odd_error_text_is_kept
                a_born_leased_row_settles_under_its_token
                a_mixed_batch_is_answered_in_input_order
                a_batch_mixes_retentions
                a_discarded_event_is_gone_and_its_key_says_so;
            fence:
                a_stale_token_cannot_settle_as_processed
                a_stale_token_cannot_settle_as_retry
                a_stale_token_cannot_settle_as_dead
                an_expired_lease_that_nobody_took_can_settle
                a_second_settlement_is_lost
                a_released_row_cannot_be_settled
                of_two_concurrent_settlements_one_is_recorded
                a_renewal_does_not_disturb_a_settlement;
            sweep:
                a_sweep_claims_what_is_out_of_attempts
                a_swept_lease_is_lost_to_its_holder
                a_swept_row_is_held_until_its_lease_ends
                a_sweep_takes_what_is_out_of_attempts_whatever_its_name
                a_sweep_leaves_everything_else_alone
                a_sweep_counts_what_nobody_here_handles
                a_sweep_counts_what_is_of_a_later_version
                a_sweep_covers_everything_in_chunks
                an_empty_outbox_is_swept_in_one_chunk
                a_retry_without_an_attempt_left_is_swept
                a_lease_beyond_all_bounds_is_cut;
            retention:
                a_processed_event_goes_after_its_retention
                a_purge_removes_no_more_than_its_limit
                a_purge_leaves_everything_unsettled_alone
                a_purge_takes_each_event_at_its_own_time
                a_key_without_an_event_goes_after_its_retention
                upkeep_ends_and_keeps_everything;
            dead_letter:
                dead_letters_are_listed_newest_first_in_pages
                a_list_says_everything_but_the_payload
                a_list_looks_at_no_more_than_it_is_asked_to
                a_filter_narrows_by_name_reason_age_and_error
                an_error_is_searched_to_the_letter
                a_requeued_event_is_due_with_a_fresh_budget
                a_requeued_event_keeps_its_failures_and_its_key
                requeued_events_are_spaced
                a_walk_requeues_each_matching_dead_letter_once
                only_dead_letters_can_be_changed
                a_discarded_dead_letter_is_kept_for_its_retention
                a_discarded_dead_letter_without_retention_is_gone
                the_key_of_a_discarded_dead_letter_is_free_after_its_retention
                a_purged_dead_letter_is_gone_and_its_key_is_kept
                two_operators_change_each_dead_letter_once;
            nested:
                a_part_that_is_kept_lives_with_its_transaction
                a_part_that_is_rolled_back_leaves_the_rest
                a_part_that_is_dropped_leaves_the_rest
                an_outcome_lives_and_dies_with_its_transaction
                an_outcome_through_a_transaction_is_fenced
                an_outcome_of_a_claimed_event_lives_and_dies_with_the_callers_transaction
                an_outcome_through_a_transaction_comes_too_late_for_a_lost_lease
                a_failed_part_can_be_recorded_as_a_retry;
            lock:
                one_instance_has_an_exclusive_lock
                a_released_exclusive_lock_is_free
                a_dropped_exclusive_lock_is_free
                exclusive_locks_differ_by_name
                an_entity_can_be_locked_twice_in_one_transaction
                a_second_transaction_waits_for_a_locked_entity;
            order:
                only_the_first_of_each_key_is_claimed
                a_claim_tells_the_key
                a_key_orders_events_of_all_types
                the_next_is_due_when_the_one_before_is_processed
                the_next_waits_for_a_retry
                neither_delay_nor_priority_changes_the_order
                no_claim_takes_a_blocked_row
                a_dead_letter_blocks_its_key
                a_requeued_dead_letter_is_the_first_again
                a_key_goes_on_behind_a_dead_letter_that_is_skipped
                a_dead_letter_blocks_nothing_that_came_before_it
                a_row_born_leased_behind_another_is_found_blocked
                a_row_born_leased_behind_a_dead_letter_is_found_blocked
                the_first_unsettled_row_of_a_key_is_next
                no_row_is_above_the_newest
                the_next_of_a_freed_key_is_found_below_the_mark
                freed_rows_count_towards_the_limit
                numbers_of_a_key_are_in_the_order_of_the_commits
                batches_with_equal_ordering_keys_do_not_deadlock
                a_batch_of_one_key_is_in_input_order
                a_locked_key_tells_whether_anything_blocks_it
                blocked_keys_are_listed_with_their_cause
                the_longest_blocked_key_is_listed_first
                only_the_first_cause_of_a_key_is_listed
                events_behind_a_blocked_key_are_counted_up_to_a_limit
                what_is_settled_blocks_nothing;
            cancel:
                a_cancelled_event_is_not_claimed
                a_failed_event_can_be_cancelled
                a_running_event_can_be_cancelled_and_its_outcome_is_refused
                a_cancellation_that_rolls_back_has_not_happened
                a_transaction_can_cancel_its_own_event
                what_has_ended_is_not_cancelled
                a_second_cancellation_is_told_of_the_first
                an_id_of_another_database_cancels_nothing
                a_cancelled_events_key_lives_on
                a_cancelled_event_is_purged_after_its_retention
                watched_events_are_found_wherever_they_are;
            expiry:
                a_claim_tells_whether_its_event_has_expired
                a_claim_by_number_tells_whether_its_event_has_expired
                a_verification_tells_whether_its_event_has_expired
                the_deadline_is_shown
                an_expired_event_is_a_dead_letter_without_a_charge
                an_expiry_is_fenced
                an_expired_event_of_an_unknown_type_is_left_alone
                a_requeued_event_does_not_expire_again
                expired_events_are_settled_beside_others;
            split:
                each_part_is_a_row_held_under_the_same_token
                a_part_has_what_the_whole_had
                parts_end_by_themselves
                a_part_that_is_not_held_is_due_uncharged
                a_claim_takes_the_rows_of_the_handlers_it_names
                a_part_of_a_later_version_is_left_alone
                a_part_can_have_a_limit_of_attempts_of_its_own
                a_parts_limit_covers_what_was_charged_before
                a_split_is_fenced
                a_part_is_not_split_again
                many_rows_are_split_at_once
                a_duplicate_is_told_of_the_first_part
                a_key_lasts_as_long_as_any_part
                a_dead_letter_names_its_handler
                a_processed_part_is_kept_with_its_handler
                a_sweep_reports_rows_of_handlers_that_are_not_here
                an_exhausted_part_is_swept_with_its_handler
                a_key_waits_for_all_parts_of_an_event
                a_name_that_looks_like_a_handler_is_left_alone
                a_part_can_be_given_back
                a_cancellation_is_of_all_parts
                a_cancellation_leaves_parts_that_have_ended
                a_part_can_be_cancelled_by_itself;
            pause:
                a_paused_event_is_not_claimed
                other_events_are_claimed
                what_is_held_can_be_renewed_and_settled
                a_row_born_leased_is_found_blocked
                a_part_of_a_paused_handler_waits
                a_paused_event_pauses_its_handlers
                pausing_twice_is_pausing_once
                pauses_are_listed
                a_sweep_looks_at_what_is_paused;
            stats:
                an_empty_outbox_has_nothing_to_count
                every_event_is_counted_once
                the_oldest_due_event_is_the_lag
                what_waits_or_is_leased_is_no_lag;
        }
    };
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    macro_rules! listed {
        (() $($topic:ident: $($case:ident)+;)+) => {
            vec![$($(concat!(stringify!($topic), "::", stringify!($case)).to_owned(),)+)+]
        };
    }

    #[test]
    fn every_case_is_in_the_list() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/testing/contract");
        let mut written = Vec::new();
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let topic = path.file_stem().unwrap().to_str().unwrap().to_owned();
            for line in fs::read_to_string(&path).unwrap().lines() {
                if let Some(case) = line.strip_prefix("pub async fn ") {
                    let end = case.find('<').unwrap();
                    written.push(format!("{topic}::{}", &case[..end]));
                }
            }
        }
        let mut listed: Vec<String> = crate::__store_contract_cases! { [listed] () };
        written.sort();
        listed.sort();
        assert_eq!(listed, written);
    }
}
