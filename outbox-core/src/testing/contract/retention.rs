//! P17: clean-up removes only what is settled and past its retention.

use std::time::Duration;

use super::Harness;
use super::steps::*;
use crate::lease::LeaseToken;
use crate::outcome::DeadReason;
use crate::store::{EventState, Insertion, NewEvent, Store, Upkeep};

/// A processed event stays until its retention has passed, and then goes.
pub async fn a_processed_event_goes_after_its_retention<H: Harness>(h: &H) {
    let row = publish_and_settle(h, event(), processed()).await;
    assert_eq!(purge(h).await, 0);
    assert_eq!(record(h, row).await.state, EventState::Processed);
    h.expire_retention(row).await;
    assert_eq!(purge(h).await, 1);
    assert_eq!(find(h, row).await, None);
    assert_eq!(purge(h).await, 0);
}

/// P16: a purge removes no more than it was asked to, and another one the rest.
pub async fn a_purge_removes_no_more_than_its_limit<H: Harness>(h: &H) {
    for _ in 0..5 {
        let row = publish_and_settle(h, event(), processed()).await;
        h.expire_retention(row).await;
    }
    let mut total = 0;
    for _ in 0..5 {
        let removed = h.store().purge(pass(), count(2)).await.unwrap().unwrap();
        assert!(removed <= 2, "{removed} of 2");
        total += removed;
    }
    assert_eq!(total, 5);
}

/// P17: what is waiting, leased, retrying or dead is never removed, nor is its key, even where
/// neither is to be kept after the event is processed.
pub async fn a_purge_leaves_everything_unsettled_alone<H: Harness>(h: &H) {
    let born = || born_leased(LeaseToken::random());
    let all = [
        publish_and_settle(h, unkept("failed", event()), retry("no route")).await,
        publish_and_settle(
            h,
            unkept("dead", event()),
            dead(DeadReason::Permanent, "no"),
        )
        .await,
        publish_and_settle(h, keyed("processed"), processed()).await,
        publish(h, unkept("leased", born())).await,
        publish(h, unkept("expired", born())).await,
        publish(h, unkept("delayed", delayed())).await,
        publish(h, unkept("unknown", named(ALERT))).await,
        publish(h, unkept("due", event())).await,
    ];
    h.expire_lease(all[4]).await;
    let mut before = Vec::new();
    for row in all {
        before.push(record(h, row).await);
    }

    assert_eq!(purge(h).await, 0);
    for (row, before) in all.into_iter().zip(before) {
        assert_eq!(record(h, row).await, before);
        let again = NewEvent {
            name: if before.name == "alert.raised" {
                ALERT
            } else {
                PAID
            },
            ..keyed(before.dedup_key.as_deref().unwrap())
        };
        let answers = insert(h.store(), &[again]).await;
        match &answers[0] {
            Insertion::Existing(existing) => assert_eq!(existing.id, before.id),
            Insertion::Inserted(_) => panic!("the key of {before:?} was free"),
        }
    }
}

/// P17: neither event nor key goes before its time because another one's has come.
pub async fn a_purge_takes_each_event_at_its_own_time<H: Harness>(h: &H) {
    let gone = publish_and_settle(h, keyed("gone"), processed()).await;
    let kept = publish_and_settle(h, keyed("kept"), processed()).await;
    h.expire_retention(gone).await;
    assert!(purge(h).await >= 1);
    assert_eq!(find(h, gone).await, None);
    assert_eq!(record(h, kept).await.state, EventState::Processed);
    let answers = insert(h.store(), &[keyed("kept"), keyed("gone")]).await;
    assert!(matches!(&answers[0], Insertion::Existing(existing) if existing.id.row() == kept));
    assert!(matches!(answers[1], Insertion::Inserted(_)));
}

/// P17: the key of an event that was not kept goes after its own retention.
pub async fn a_key_without_an_event_goes_after_its_retention<H: Harness>(h: &H) {
    let event = NewEvent {
        retention: Duration::ZERO,
        ..keyed("k")
    };
    let row = publish_and_settle(h, event.clone(), processed()).await;
    assert_eq!(purge(h).await, 0);
    h.expire_retention(row).await;
    assert_eq!(purge(h).await, 1);
    let again = insert(h.store(), &[event]).await;
    assert!(matches!(again[0], Insertion::Inserted(_)));
}

/// A chunk of upkeep may be run at any time, by anybody, until there is nothing to do, and changes
/// nothing about what is kept.
pub async fn upkeep_ends_and_keeps_everything<H: Harness>(h: &H) {
    let kept = publish_and_settle(h, keyed("kept"), processed()).await;
    let gone = publish_and_settle(h, keyed("gone"), processed()).await;
    upkeep(h).await;
    assert_eq!(record(h, kept).await.state, EventState::Processed);
    h.expire_retention(gone).await;
    upkeep(h).await;
    purge(h).await;
    assert_eq!(find(h, gone).await, None);
    assert_eq!(record(h, kept).await.state, EventState::Processed);
    // Whatever it made takes what is settled from now on.
    let after = publish_and_settle(h, event(), processed()).await;
    assert_eq!(record(h, after).await.state, EventState::Processed);
    assert_eq!(
        h.store().upkeep(pass(), 9 * DAY).await.unwrap(),
        Some(Upkeep::Done)
    );
}

async fn upkeep<H: Harness>(h: &H) {
    for _ in 0..100 {
        match h.store().upkeep(pass(), 9 * DAY).await.unwrap() {
            Some(Upkeep::Changed) => {}
            answer => return assert_eq!(answer, Some(Upkeep::Done)),
        }
    }
    panic!("upkeep for nine days does not end");
}

fn unkept(key: &str, event: NewEvent) -> NewEvent {
    NewEvent {
        dedup_key: Some(key.to_owned()),
        retention: Duration::ZERO,
        key_retention: Duration::ZERO,
        ..event
    }
}
