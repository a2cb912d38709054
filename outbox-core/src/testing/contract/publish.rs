//! Publishing: what goes in, and what a transaction that ends does to it.

use std::time::Duration;

use super::Harness;
use super::steps::*;
use crate::event::Priority;
use crate::lease::LeaseToken;
use crate::store::{EventState, Insertion, NewEvent, Store};

/// A store that is installed says that it is.
pub async fn an_installed_outbox_passes_its_check<H: Harness>(h: &H) {
    h.store().check().await.unwrap();
}

/// The check leaves nothing behind, and nothing of it is ever claimed.
pub async fn a_check_leaves_no_row<H: Harness>(h: &H) {
    let before = publish(h, event()).await;
    h.store().check().await.unwrap();
    assert_eq!(claim_up_to(h, 10).await, [before]);
    let chunk = sweep_chunk(h, &sweep_after(0, 100)).await;
    assert_eq!(chunk.unhandled, []);
}

/// P1: everything a publisher hands over is in the row.
pub async fn every_column_is_kept<H: Harness>(h: &H) {
    let event = NewEvent {
        version: count(3),
        headers: Some(r#"{"traceparent":"00-ab-cd-01"}"#.to_owned()),
        dedup_key: Some("order:7".to_owned()),
        ordering_key: Some("customer:𝄞".to_owned()),
        priority: Priority::High,
        max_attempts: count(8),
        ..event()
    };
    let answers = insert(h.store(), &[event]).await;
    let id = inserted(&answers[0]);

    let record = record(h, id.row()).await;
    assert_eq!(record.id, id);
    assert_eq!(record.name, "order.paid");
    assert_eq!(record.version.get(), 3);
    assert_eq!(record.payload, r#"{"order_id":7}"#);
    let headers: serde_json::Value =
        serde_json::from_str(record.headers.as_deref().unwrap()).unwrap();
    assert_eq!(headers, serde_json::json!({"traceparent": "00-ab-cd-01"}));
    assert_eq!(record.dedup_key.as_deref(), Some("order:7"));
    assert_eq!(record.ordering_key.as_deref(), Some("customer:𝄞"));
    assert_eq!(record.priority, Priority::High);
    assert_eq!(record.state, EventState::Pending);
    assert_eq!(record.attempts, 0);
    assert_eq!(record.max_attempts.get(), 8);
    assert_eq!(record.lease_token, None);
    assert_eq!(record.claimed_by, None);
    assert_eq!(record.due_at, None);
    assert_eq!(record.settled_at, None);
    assert_eq!(record.last_error, None);
    assert_eq!(record.dead_reason, None);
    assert_eq!(record.output, None);
    assert_eq!(record.failures, []);
}

/// P1: what is optional may be missing.
pub async fn an_event_needs_no_headers_and_no_keys<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    let record = record(h, row).await;
    assert_eq!(record.headers, None);
    assert_eq!(record.dedup_key, None);
    assert_eq!(record.ordering_key, None);
}

/// P1: a payload comes out as it went in, to the byte. A database type that parses JSON would
/// sort keys, drop the first of two, round numbers or refuse an escape.
pub async fn a_payload_comes_out_unchanged_to_the_byte<H: Harness>(h: &H) {
    let payloads = [
        r#"{"a":1.10,"a":2}"#,
        " { \"z\" : 1 ,\n\t\"a\" : [ ] } ",
        r#"{"clef":"𝄞","umlaut":"äöü","rtl":"\u05d0"}"#,
        r#"{"escaped":"\ud834\udd1e","nul":"\u0000"}"#,
        r#"{"n":123456789012345678901234567890.000000000000000000001e-7}"#,
        r#""'; DROP TABLE events; --""#,
        "null",
        "0",
    ];
    let events = payloads.map(|payload| NewEvent {
        payload: payload.to_owned(),
        ..event()
    });
    let rows = publish_all(h, &events).await;

    for (row, payload) in rows.iter().zip(payloads) {
        assert_eq!(record(h, *row).await.payload, payload);
    }
    let claimed = claim(h, &request(10)).await;
    let claimed: Vec<&str> = claimed.iter().map(|row| row.payload.as_str()).collect();
    assert_eq!(claimed, payloads);
}

/// P16: a payload of a quarter of a mebibyte is no special case.
pub async fn a_large_payload_comes_out_unchanged<H: Harness>(h: &H) {
    let payload = format!("\"{}\"", "𝄞".repeat(65_536));
    let row = publish(
        h,
        NewEvent {
            payload: payload.clone(),
            ..event()
        },
    )
    .await;
    assert!(record(h, row).await.payload == payload);
}

/// P4: numbers ascend in input order, whatever order keys are taken in.
pub async fn numbers_ascend_in_input_order<H: Harness>(h: &H) {
    let first = publish_all(h, &[keyed("z"), event(), keyed("a"), keyed("m"), event()]).await;
    let second = publish_all(h, &[keyed("c"), keyed("b")]).await;
    let all = [first, second].concat();
    assert!(all.is_sorted_by(|a, b| a < b), "{all:?}");

    let keys: Vec<_> = [record(h, all[0]).await, record(h, all[2]).await]
        .map(|record| record.dedup_key)
        .into();
    assert_eq!(keys, [Some("z".to_owned()), Some("a".to_owned())]);
}

/// P1: one of a transaction that is rolled back leaves nothing.
pub async fn a_rolled_back_event_leaves_nothing<H: Harness>(h: &H) {
    let mut tx = h.store().begin().await.unwrap();
    let answers = h.store().insert(&mut tx, &[keyed("k")]).await.unwrap();
    let row = inserted(&answers[0]).row();
    h.store().rollback(tx).await.unwrap();

    assert_eq!(find(h, row).await, None);
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    let again = insert(h.store(), &[keyed("k")]).await;
    assert!(matches!(again[0], Insertion::Inserted(_)), "{again:?}");
}

/// P1: a transaction that is dropped is rolled back.
pub async fn a_dropped_transaction_leaves_nothing<H: Harness>(h: &H) {
    let mut tx = h.store().begin().await.unwrap();
    h.store().insert(&mut tx, &[keyed("k")]).await.unwrap();
    drop(tx);

    // This waits for the roll-back where that happens in the background. (It may be given the
    // number of the row that never was.)
    let again = insert(h.store(), &[keyed("k")]).await;
    let again = inserted(&again[0]).row();
    assert_eq!(claim_up_to(h, 10).await, [again]);
}

/// P1, P2: until its transaction commits, an event is nobody's. A store with one writer may let
/// the claim wait instead, and fail when it has waited for long enough.
pub async fn an_uncommitted_event_cannot_be_claimed<H: Harness>(h: &H) {
    let mut tx = h.store().begin().await.unwrap();
    let answers = h.store().insert(&mut tx, &[event()]).await.unwrap();
    match h.store().claim(&request(10)).await {
        Ok(claimed) => assert_eq!(rows(&claimed), NOTHING),
        Err(error) => assert!(error.is_transient(), "{error:?}"),
    }
    h.store().commit(tx).await.unwrap();
    assert_eq!(claim_up_to(h, 10).await, [inserted(&answers[0]).row()]);
}

/// Two processes on one outbox see the same events under the same ids.
pub async fn another_process_sees_the_same_event<H: Harness>(h: &H) {
    let other = h.another_store().await;
    let answers = insert(h.store(), &[event()]).await;
    let id = inserted(&answers[0]);
    let seen = other.find(id.row()).await.unwrap();
    assert_eq!(seen.map(|record| record.id), Some(id));
    let claimed = other.claim(&request(10)).await.unwrap();
    assert_eq!(claimed[0].id, id);
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
}

/// P2: several inserts of one transaction live and die together.
pub async fn a_transaction_can_insert_more_than_once<H: Harness>(h: &H) {
    let mut tx = h.store().begin().await.unwrap();
    let first = h.store().insert(&mut tx, &[event()]).await.unwrap();
    let second = h.store().insert(&mut tx, &[event()]).await.unwrap();
    h.store().commit(tx).await.unwrap();
    let expected = [inserted(&first[0]).row(), inserted(&second[0]).row()];
    assert!(expected[0] < expected[1]);
    assert_eq!(claim_up_to(h, 10).await, expected);
}

/// P6: a row born leased is in progress, with its first attempt charged, and no claim takes it.
pub async fn a_born_leased_event_is_in_progress<H: Harness>(h: &H) {
    let token = LeaseToken::random();
    let row = publish(h, born_leased(token)).await;

    let record = record(h, row).await;
    assert_eq!(record.state, EventState::InProgress);
    assert_eq!(record.attempts, 1);
    assert_eq!(record.lease_token, Some(token));
    assert_eq!(record.claimed_by.as_deref(), Some("publisher"));
    assert_eq!(record.due_at, None);
    assert_eq!(claim_up_to(h, 10).await, NOTHING);
    let claimed = h.store().claim_rows(&[row], &request(10)).await.unwrap();
    assert_eq!(rows(&claimed), NOTHING);
}

/// One statement takes events that are born leased beside others that are not.
pub async fn a_batch_mixes_leased_delayed_and_due_events<H: Harness>(h: &H) {
    let token = LeaseToken::random();
    let rows = publish_all(h, &[event(), born_leased(token), delayed(), event()]).await;
    assert_eq!(claim_up_to(h, 10).await, [rows[0], rows[3]]);
}

/// A delay is counted by the database, and the event is pending meanwhile.
pub async fn a_delayed_event_waits_for_its_due_time<H: Harness>(h: &H) {
    let row = publish(h, delayed()).await;
    let waiting = record(h, row).await;
    assert_eq!(waiting.state, EventState::Pending);
    let delay = waiting.due_at.unwrap().duration_since(waiting.created_at);
    let delay = delay.unwrap();
    assert!(
        delay >= Duration::from_secs(3_590) && delay <= Duration::from_secs(3_610),
        "an hour: {delay:?}"
    );
    assert_eq!(claim_up_to(h, 10).await, NOTHING);

    h.make_due(row).await;
    let claimed = claim_one(h).await;
    assert_eq!(claimed.id.row(), row);
    assert!(claimed.waited);
    assert_eq!(claimed.attempt.get(), 1);
}

/// P16: a thousand events in one statement, and out again.
pub async fn a_thousand_events_go_in_and_out<H: Harness>(h: &H) {
    let events: Vec<NewEvent> = (0..1_000)
        .map(|n| NewEvent {
            payload: n.to_string(),
            ..keyed(&format!("key-{n:04}"))
        })
        .collect();
    let rows = publish_all(h, &events).await;
    assert!(rows.is_sorted_by(|a, b| a < b));

    let claimed = claim(h, &request(1_000)).await;
    assert_eq!(claimed.len(), 1_000);
    assert_eq!(claimed[999].id.row(), rows[999]);
    assert_eq!(claimed[999].payload, "999");
    let settlements: Vec<_> = claimed
        .iter()
        .map(|row| crate::store::Settlement {
            lease: row.lease(),
            outcome: processed(),
        })
        .collect();
    let answers = h.store().settle(&settlements).await.unwrap();
    assert_eq!(answers, vec![crate::store::Settled::Recorded; 1_000]);
    assert_eq!(claim_up_to(h, 1_000).await, NOTHING);

    let again = insert(h.store(), &events).await;
    assert!(matches!(&again[500], Insertion::Existing(existing) if existing.id.row() == rows[500]));
}

/// Asked about nothing, every method answers nothing.
pub async fn empty_input_answers_nothing<H: Harness>(h: &H) {
    let row = publish(h, event()).await;
    assert_eq!(insert(h.store(), &[]).await, []);
    assert_eq!(h.store().verify(&[]).await.unwrap(), []);
    assert_eq!(h.store().renew(&[], HOUR).await.unwrap(), []);
    assert_eq!(h.store().settle(&[]).await.unwrap(), []);
    assert_eq!(h.store().release(&[]).await.unwrap(), []);
    let claimed = h.store().claim_rows(&[], &request(10)).await.unwrap();
    assert_eq!(rows(&claimed), NOTHING);
    assert_eq!(record(h, row).await.attempts, 0);
}

/// A row that never was is not found.
pub async fn an_unknown_row_is_not_found<H: Harness>(h: &H) {
    assert_eq!(find(h, 1_000_000).await, None);
}
