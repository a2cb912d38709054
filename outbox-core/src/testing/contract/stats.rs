//! Counting what there is.

use super::Harness;
use super::steps::*;
use crate::outcome::DeadReason;
use crate::stats::{EventCounts, StoreStats};
use crate::store::{NewEvent, Store};

/// Nothing is counted where nothing is.
pub async fn an_empty_outbox_has_nothing_to_count<H: Harness>(h: &H) {
    publish_and_settle(h, event(), processed()).await;
    let expected = StoreStats {
        exact: true,
        ..StoreStats::default()
    };
    assert_eq!(h.store().stats().await.unwrap(), expected);
}

/// Every unsettled event and every dead letter is in one count, by name; what is settled is in
/// none.
pub async fn every_event_is_counted_once<H: Harness>(h: &H) {
    publish_and_settle(h, event(), processed()).await;
    publish_and_settle(h, event(), retry("no")).await;
    bury(h, event(), DeadReason::Permanent, "no").await;
    bury(h, named(ALERT), DeadReason::Permanent, "no").await;
    let exhausted = publish(h, with_attempts(1)).await;
    assert_eq!(claim_up_to(h, 10).await, [exhausted]);
    h.expire_lease(exhausted).await;
    let held = publish(h, event()).await;
    assert_eq!(claim_up_to(h, 10).await, [held]);
    let lapsed = publish(h, event()).await;
    assert_eq!(claim_up_to(h, 10).await, [lapsed]);
    h.expire_lease(lapsed).await;
    let retry_due = publish(h, event()).await;
    publish_all(h, &[event(), delayed(), delayed(), named(ALERT)]).await;
    // Claimed by number, so that what is due besides stays as it is.
    let claimed = h
        .store()
        .claim_rows(&[retry_due], &request(1))
        .await
        .unwrap();
    record_outcome(h, claimed[0].lease(), retry("no")).await;
    h.make_due(retry_due).await;

    let stats = h.store().stats().await.unwrap();
    assert!(stats.exact);
    assert_eq!(
        stats.events["order.paid"],
        EventCounts {
            due: 3,
            waiting: 2,
            retrying: 1,
            in_progress: 1,
            exhausted: 1,
            dead: 1,
        }
    );
    assert_eq!(
        stats.events["alert.raised"],
        EventCounts {
            due: 1,
            dead: 1,
            ..EventCounts::default()
        }
    );
    assert_eq!(stats.events.len(), 2);
}

/// The lag is the age of what has been due the longest, whatever its priority.
pub async fn the_oldest_due_event_is_the_lag<H: Harness>(h: &H) {
    let waited = publish(h, delayed()).await;
    h.make_due(waited).await;
    let low = NewEvent {
        priority: crate::event::Priority::Low,
        ..event()
    };
    publish_all(h, &[low, event()]).await;
    let lag = h.store().stats().await.unwrap().oldest_due;
    assert!(lag.is_some_and(|lag| lag < HOUR), "{lag:?}");
}

/// What nobody may claim now is not late.
pub async fn what_waits_or_is_leased_is_no_lag<H: Harness>(h: &H) {
    publish_all(h, &[event(), delayed()]).await;
    claim_one(h).await;
    assert_eq!(h.store().stats().await.unwrap().oldest_due, None);
}
