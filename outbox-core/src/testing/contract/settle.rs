//! Settlements: what each outcome leaves behind.

use std::time::Duration;

use super::Harness;
use super::steps::*;
use crate::lease::{HeldLease, LeaseToken};
use crate::outcome::{DeadReason, ErrorText, OUTPUT_MAX, Outcome};
use crate::store::{EventState, Insertion, NewEvent, Settled, Settlement, Store};

/// A processed event is kept with its result.
pub async fn a_processed_event_is_kept_with_its_output<H: Harness>(h: &H) {
    let row = publish_and_settle(h, keyed("k"), processed_with(r#""receipt-7 𝄞""#)).await;
    let record = record(h, row).await;
    assert_eq!(record.state, EventState::Processed);
    assert_eq!(record.output.as_deref(), Some(r#""receipt-7 𝄞""#));
    assert_eq!(record.payload, r#"{"order_id":7}"#);
    assert_eq!(record.dedup_key.as_deref(), Some("k"));
    assert_eq!(record.attempts, 1);
    assert_eq!(record.claimed_by.as_deref(), Some("a"));
    assert!(record.settled_at.unwrap() >= record.created_at);
    assert_eq!(record.due_at, None);
    assert_eq!(record.dead_reason, None);
    assert_eq!(record.last_error, None);
    assert_eq!(record.failures, []);
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
}

/// A handler that returned nothing leaves no output.
pub async fn an_event_processed_without_output_has_none<H: Harness>(h: &H) {
    let row = publish_and_settle(h, event(), processed()).await;
    let record = record(h, row).await;
    assert_eq!(record.state, EventState::Processed);
    assert_eq!(record.output, None);
}

/// P16: an output at its limit is kept whole.
pub async fn an_output_at_the_limit_is_kept<H: Harness>(h: &H) {
    let output = format!("\"{}\"", "x".repeat(65_534));
    assert_eq!(output.len(), OUTPUT_MAX);
    let row = publish_and_settle(h, keyed("k"), processed_with(&output)).await;
    assert!(record(h, row).await.output == Some(output));
}

/// With a retention of zero a processed event leaves no row.
pub async fn a_processed_event_without_retention_is_gone<H: Harness>(h: &H) {
    let event = NewEvent {
        retention: Duration::ZERO,
        ..event()
    };
    let row = publish_and_settle(h, event, processed()).await;
    assert_eq!(find(h, row).await, None);
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
}

/// A retention of zero forgets no failure before its time: retries and dead letters stay.
pub async fn an_event_without_retention_can_still_fail_and_die<H: Harness>(h: &H) {
    let event = NewEvent {
        retention: Duration::ZERO,
        ..event()
    };
    let row = publish_and_settle(h, event, retry("no route")).await;
    assert_eq!(record(h, row).await.state, EventState::Failed);
    h.make_due(row).await;
    let lease = claim_one(h).await.lease();
    record_outcome(h, lease, dead(DeadReason::Permanent, "no such customer")).await;
    purge(h).await;
    assert_eq!(record(h, row).await.state, EventState::DeadLetter);
}

/// P8: a retry is due after its delay, counted by the database from the settlement.
pub async fn a_retry_is_due_after_its_delay<H: Harness>(h: &H) {
    let row = publish_and_settle(h, event(), retry("no route")).await;
    let record = record(h, row).await;
    assert_eq!(record.state, EventState::Failed);
    assert_eq!(record.attempts, 1);
    assert_eq!(record.lease_token, None);
    assert_eq!(record.settled_at, None);
    assert_eq!(record.last_error.as_deref(), Some("no route"));
    assert_eq!(record.failures.len(), 1);
    let failure = &record.failures[0];
    assert_eq!(failure.attempt, 1);
    assert_eq!(failure.instance, "a");
    assert_eq!(failure.error, "no route");
    assert!(failure.at >= record.created_at);
    let wait = record.due_at.unwrap().duration_since(failure.at).unwrap();
    assert!(
        wait >= Duration::from_secs(3_590) && wait <= Duration::from_secs(3_610),
        "an hour: {wait:?}"
    );
}

/// P8: a retry without a delay is due at once.
pub async fn a_retry_without_delay_is_due_at_once<H: Harness>(h: &H) {
    let at_once = Outcome::Retry {
        after: Duration::ZERO,
        error: ErrorText::new(&"no route"),
    };
    let row = publish_and_settle(h, event(), at_once).await;
    let claimed = claim_one(h).await;
    assert_eq!(claimed.id.row(), row);
    assert_eq!(claimed.attempt.get(), 2);
}

/// An event that failed and then succeeded is processed like any other.
pub async fn a_retry_can_succeed<H: Harness>(h: &H) {
    let row = publish_and_settle(h, event(), retry("no route")).await;
    h.make_due(row).await;
    let lease = claim_one(h).await.lease();
    record_outcome(h, lease, processed_with("7")).await;
    let record = record(h, row).await;
    assert_eq!(record.state, EventState::Processed);
    assert_eq!(record.attempts, 2);
    assert_eq!(record.output.as_deref(), Some("7"));
    assert_eq!(record.due_at, None);
}

/// P9: a dead letter keeps its payload, its reason and its last error.
pub async fn a_dead_letter_keeps_everything<H: Harness>(h: &H) {
    let event = NewEvent {
        headers: Some(r#"{"tenant":"x"}"#.to_owned()),
        ordering_key: Some("customer:1".to_owned()),
        ..keyed("k")
    };
    let outcome = dead(DeadReason::Permanent, "no such customer");
    let row = publish_and_settle(h, event, outcome).await;
    let record = record(h, row).await;
    assert_eq!(record.state, EventState::DeadLetter);
    assert_eq!(record.dead_reason, Some(DeadReason::Permanent));
    assert_eq!(record.last_error.as_deref(), Some("no such customer"));
    assert_eq!(record.payload, r#"{"order_id":7}"#);
    assert!(record.headers.is_some());
    assert_eq!(record.dedup_key.as_deref(), Some("k"));
    assert_eq!(record.ordering_key.as_deref(), Some("customer:1"));
    assert_eq!(record.attempts, 1);
    assert_eq!(record.max_attempts.get(), 3);
    assert_eq!(record.claimed_by.as_deref(), Some("a"));
    assert!(record.settled_at.unwrap() >= record.created_at);
    assert_eq!(record.failures.len(), 1);
    assert_eq!(record.failures[0].attempt, 1);
    assert_eq!(record.failures[0].error, "no such customer");
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
}

/// P9: every reason is kept as what it is.
pub async fn every_dead_reason_is_kept<H: Harness>(h: &H) {
    for reason in [
        DeadReason::AttemptsExhausted,
        DeadReason::Permanent,
        DeadReason::Undecodable,
        DeadReason::LeaseExpired,
    ] {
        let row = publish_and_settle(h, event(), dead(reason, "no")).await;
        assert_eq!(record(h, row).await.dead_reason, Some(reason));
    }
}

/// P9: the last ten failed attempts are kept, oldest first, into the dead letter.
pub async fn the_last_ten_failures_are_kept<H: Harness>(h: &H) {
    let row = publish(h, with_attempts(13)).await;
    for attempt in 1..=12 {
        let lease = claim_one(h).await.lease();
        record_outcome(h, lease, retry(&format!("failure {attempt}"))).await;
        h.make_due(row).await;
    }
    let failures = record(h, row).await.failures;
    let attempts: Vec<u32> = failures.iter().map(|failure| failure.attempt).collect();
    assert_eq!(attempts, [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    assert_eq!(failures[0].error, "failure 3");
    assert_eq!(failures[9].error, "failure 12");

    let lease = claim_one(h).await.lease();
    record_outcome(h, lease, dead(DeadReason::AttemptsExhausted, "failure 13")).await;
    let failures = record(h, row).await.failures;
    assert_eq!(failures.len(), 10);
    assert_eq!(failures[0].error, "failure 4");
    assert_eq!(failures[9].error, "failure 13");
    assert_eq!(failures[9].attempt, 13);
}

/// P18: an error text at its limit, of characters of four bytes, can be recorded, ten times over.
pub async fn an_error_text_at_the_limit_is_kept<H: Harness>(h: &H) {
    let text = "𝄞".repeat(497);
    let row = publish(h, with_attempts(20)).await;
    for _ in 0..10 {
        let lease = claim_one(h).await.lease();
        record_outcome(h, lease, retry(&text)).await;
        h.make_due(row).await;
    }
    let record = record(h, row).await;
    assert_eq!(record.last_error, Some(text.clone()));
    assert_eq!(record.failures.len(), 10);
    assert!(record.failures.iter().all(|failure| failure.error == text));
}

/// P18: an error text with quotes, braces, line breaks and control characters is kept as it is.
pub async fn an_odd_error_text_is_kept<H: Harness>(h: &H) {
    let text = "it's {\"odd\"}, \\back\\ \u{1}\u{7f}\r\n\t%s $1 ?";
    let row = publish_and_settle(h, event(), retry(text)).await;
    let record = record(h, row).await;
    assert_eq!(record.last_error.as_deref(), Some(text));
    assert_eq!(record.failures[0].error, text);
}

/// P6: a row that was born leased is settled under the token it was born with.
pub async fn a_born_leased_row_settles_under_its_token<H: Harness>(h: &H) {
    let token = LeaseToken::random();
    let row = publish(h, born_leased(token)).await;
    record_outcome(h, HeldLease { row, token }, processed_with("7")).await;
    let record = record(h, row).await;
    assert_eq!(record.state, EventState::Processed);
    assert_eq!(record.attempts, 1);
    assert_eq!(record.claimed_by.as_deref(), Some("publisher"));
}

/// P5: one batch carries every outcome, several tokens and lost leases; answers come in input
/// order.
pub async fn a_mixed_batch_is_answered_in_input_order<H: Harness>(h: &H) {
    let all = publish_all(h, &vec![event(); 6]).await;
    let mut claimed = claim(h, &request(3)).await;
    claimed.extend(claim(h, &request(3)).await);
    let lease = |position: usize| claimed[position].lease();
    let wrong = |row| HeldLease {
        row,
        token: LeaseToken::random(),
    };
    let batch = [
        (lease(4), dead(DeadReason::Permanent, "dead 4")),
        (wrong(all[0]), processed()),
        (lease(1), retry("retry 1")),
        (wrong(1_000_000), retry("nobody's")),
        (lease(5), processed_with("5")),
        (lease(0), processed_with("0")),
        (
            HeldLease {
                row: all[2],
                ..lease(5)
            },
            processed(),
        ),
        (lease(3), retry("retry 3")),
    ];
    let batch = batch.map(|(lease, outcome)| Settlement { lease, outcome });
    let answers = h.store().settle(&batch).await.unwrap();
    assert_eq!(
        answers,
        [
            Settled::Recorded,
            Settled::LeaseLost,
            Settled::Recorded,
            Settled::LeaseLost,
            Settled::Recorded,
            Settled::Recorded,
            Settled::LeaseLost,
            Settled::Recorded,
        ]
    );

    let expected = [
        (EventState::Processed, None),
        (EventState::Failed, Some("retry 1")),
        (EventState::InProgress, None),
        (EventState::Failed, Some("retry 3")),
        (EventState::DeadLetter, Some("dead 4")),
        (EventState::Processed, None),
    ];
    for (row, (state, error)) in all.iter().zip(expected) {
        let record = record(h, *row).await;
        assert_eq!((record.state, record.last_error.as_deref()), (state, error));
    }
    assert_eq!(record(h, all[5]).await.output.as_deref(), Some("5"));
    assert_eq!(record(h, all[0]).await.output.as_deref(), Some("0"));
}

/// One batch settles events that are kept beside others that are not.
pub async fn a_batch_mixes_retentions<H: Harness>(h: &H) {
    let gone = NewEvent {
        retention: Duration::ZERO,
        ..event()
    };
    let all = publish_all(h, &[gone.clone(), event(), gone, keyed("k")]).await;
    let claimed = claim(h, &request(10)).await;
    let batch: Vec<_> = claimed
        .iter()
        .map(|row| Settlement {
            lease: row.lease(),
            outcome: processed(),
        })
        .collect();
    let answers = h.store().settle(&batch).await.unwrap();
    assert_eq!(answers, [Settled::Recorded; 4]);
    assert_eq!(find(h, all[0]).await, None);
    assert_eq!(record(h, all[1]).await.state, EventState::Processed);
    assert_eq!(find(h, all[2]).await, None);
    assert_eq!(record(h, all[3]).await.state, EventState::Processed);
}

/// An event that is discarded leaves nothing but its key, which says what became of it.
pub async fn a_discarded_event_is_gone_and_its_key_says_so<H: Harness>(h: &H) {
    let discarded = Outcome::Discarded {
        error: ErrorText::new(&"no such field"),
    };
    let row = publish_and_settle(h, keyed("k"), discarded).await;
    assert_eq!(find(h, row).await, None);
    let again = insert(h.store(), &[keyed("k")]).await;
    match &again[0] {
        Insertion::Existing(existing) => {
            assert_eq!(existing.id.row(), row);
            assert_eq!(existing.state, EventState::Discarded);
            assert_eq!(existing.output, None);
        }
        Insertion::Inserted(_) => panic!("the key was free at once"),
    }
    assert_eq!(purge(h).await, 0);
    h.expire_retention(row).await;
    assert_eq!(purge(h).await, 1);
    let again = insert(h.store(), &[keyed("k")]).await;
    assert!(matches!(again[0], Insertion::Inserted(_)));
}
