//! What waits for what: blocked events, expired ones, and callers who wait for an end.

use std::time::Duration;

use outbox_core::testing::{MemoryStore, Operation};
use outbox_core::{
    DeadReason, EventState, HandlerError, Outbox, OutboxEvent, Progress, PublishOptions,
    StoreErrorKind, WaitError,
};
use serde::{Deserialize, Serialize};

use super::builder;
use crate::events::{OrderPaid, Step, Ticked, publish_for_relays, scripted};

#[derive(Deserialize, Serialize)]
struct Booked {
    n: u64,
}

impl OutboxEvent for Booked {
    type Output = ();
    const NAME: &'static str = "booked";

    fn ordering_key(&self) -> Option<String> {
        Some("account".to_owned())
    }
}

fn receipts(store: &MemoryStore) -> Outbox<MemoryStore> {
    builder(store)
        .on(|event: OrderPaid| async move { Ok::<_, HandlerError>(format!("r-{}", event.order)) })
        .build()
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_inline_event_that_expired_in_the_queue_is_not_started() {
    let store = MemoryStore::new();
    let (handler, runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let options = PublishOptions::new().expires_in(Duration::from_secs(3));
    let verifying = store.hold(Operation::Verify);
    let mut tx = outbox.begin().await.unwrap();
    let id = tx.publish_with(&Ticked { n: 1 }, &options).await;
    let id = id.unwrap().event_id();
    let dispatching = tx.commit().await.unwrap();
    verifying.arrived(1).await;
    tokio::time::advance(Duration::from_secs(3)).await;
    drop(verifying);
    dispatching.settled().await;

    assert!(runs.is_empty());
    let kept = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(kept.dead_reason, Some(DeadReason::Expired));
    assert_eq!((kept.attempts, outbox.counters().dead), (0, 1));
}

/// Three events of one key, published in one transaction: the relay is woken for each of them, and
/// does not wait for its poll.
#[tokio::test(start_paused = true)]
async fn the_next_of_a_key_is_claimed_when_the_one_before_is_settled() {
    let store = MemoryStore::new();
    let outbox = builder(&store)
        .on(|_: Booked| async { Ok::<_, HandlerError>(()) })
        .build()
        .unwrap();
    let relay = outbox
        .relay()
        .poll_interval(Duration::from_secs(60))
        .start()
        .await
        .unwrap();
    let began = tokio::time::Instant::now();
    let mut tx = outbox.begin().await.unwrap();
    let steps = [Booked { n: 1 }, Booked { n: 2 }, Booked { n: 3 }];
    let published = tx.publish_all(&steps).await.unwrap();
    tx.commit().await.unwrap();
    for event in &published {
        assert_eq!(
            outbox.wait_for(event).await.unwrap(),
            Progress::Processed(Some(()))
        );
    }
    assert!(
        began.elapsed() < Duration::from_millis(100),
        "{:?}",
        began.elapsed()
    );
    assert!(store.records().iter().all(|record| record.attempts == 1));
    relay.shutdown(Duration::from_secs(1)).await.unwrap();
}

/// A claim that failed has not looked at the rows it was told of, and a look-up that failed leaves
/// them to the next look from the beginning.
#[tokio::test(start_paused = true)]
async fn a_key_moves_on_although_its_next_event_was_not_found_at_once() {
    for failing in [Operation::Claim, Operation::NextInOrder] {
        let store = MemoryStore::new();
        let outbox = builder(&store)
            .on(|_: Booked| async { Ok::<_, HandlerError>(()) })
            .build()
            .unwrap();
        let mut ids = Vec::new();
        for n in 0..3 {
            ids.push(publish_for_relays(&outbox, &Booked { n }).await);
        }
        let relay = outbox.relay().start().await.unwrap();
        store.fail_next(failing, StoreErrorKind::Unreachable, 1);
        let last = store.wait_for_calls(Operation::Settle, 3);
        tokio::time::timeout(Duration::from_secs(5), last)
            .await
            .unwrap();
        relay.shutdown(Duration::from_secs(1)).await.unwrap();
        for id in ids {
            assert_eq!(
                outbox.find(id).await.unwrap().unwrap().state,
                EventState::Processed
            );
        }
    }
}

/// What this process settles is not asked for.
#[tokio::test(start_paused = true)]
async fn a_caller_that_waits_is_answered_by_the_settlement() {
    let store = MemoryStore::new();
    let outbox = receipts(&store);
    let mut tx = outbox.begin().await.unwrap();
    let published = tx.publish(&OrderPaid { order: 7 }).await.unwrap();
    let settling = store.hold(Operation::Settle);
    tx.commit().await.unwrap();
    settling.arrived(1).await;
    let waiting = outbox.wait_for(&published);
    tokio::pin!(waiting);
    tokio::select! {
        biased;
        ended = &mut waiting => panic!("before it was stored: {ended:?}"),
        () = tokio::time::sleep(Duration::from_secs(10)) => {}
    }
    let asked = store.calls(Operation::LookUp);
    drop(settling);
    let receipt = Progress::Processed(Some("r-7".to_owned()));
    assert_eq!(waiting.await.unwrap(), receipt);
    assert_eq!(store.calls(Operation::LookUp), asked);
    assert!(
        (40..=100).contains(&asked),
        "at most four a second: {asked}"
    );
}

/// A hundred callers ask with one statement; when all of them have left, nobody asks.
#[tokio::test(start_paused = true)]
async fn callers_that_wait_share_their_question() {
    let store = MemoryStore::new();
    let outbox = builder(&store).build().unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let published = tx.publish(&OrderPaid { order: 7 }).await.unwrap();
    tx.commit().await.unwrap();
    let mut waits = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let (outbox, published) = (outbox.clone(), published.clone());
        waits.spawn(async move { outbox.wait_for(&published).await });
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(waits.try_join_next().is_none());
    waits.shutdown().await;
    let asked = store.calls(Operation::LookUp);
    assert!(
        (40..=100).contains(&asked),
        "at most four a second: {asked}"
    );
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(store.calls(Operation::LookUp) <= asked + 1);
}

/// A thousand callers a second do not make it a thousand questions, each about all of them.
#[tokio::test(start_paused = true)]
async fn callers_that_keep_coming_do_not_make_it_ask_more_often() {
    let store = MemoryStore::new();
    let outbox = builder(&store).build().unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let published = tx.publish(&OrderPaid { order: 7 }).await.unwrap();
    tx.commit().await.unwrap();
    let mut waits = tokio::task::JoinSet::new();
    for _ in 0..1_000 {
        let (outbox, published) = (outbox.clone(), published.clone());
        waits.spawn(async move { outbox.wait_for(&published).await });
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let asked = store.calls(Operation::LookUp);
    assert!((90..=200).contains(&asked), "every 5 to 10 ms: {asked}");
}

#[tokio::test(start_paused = true)]
async fn a_wait_outlasts_an_outage_and_ends_with_what_waiting_does_not_mend() {
    let store = MemoryStore::new();
    let outbox = builder(&store).build().unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let published = tx.publish(&OrderPaid { order: 7 }).await.unwrap();
    tx.commit().await.unwrap();
    store.fail_next(Operation::LookUp, StoreErrorKind::Unreachable, 1);
    store.fail_next(Operation::LookUp, StoreErrorKind::Denied, 1);
    let waited = outbox.wait_for(&published).await;
    let Err(WaitError::Store(error)) = waited else {
        panic!("{waited:?}");
    };
    assert_eq!(error.kind(), StoreErrorKind::Denied);
    assert_eq!(store.calls(Operation::LookUp), 2);
}

#[tokio::test(start_paused = true)]
async fn what_rolled_back_is_gone_for_who_waits_for_it() {
    let store = MemoryStore::new();
    let outbox = receipts(&store);
    let mut tx = outbox.begin().await.unwrap();
    let published = tx.publish(&OrderPaid { order: 7 }).await.unwrap();
    tx.rollback().await.unwrap();
    assert_eq!(outbox.wait_for(&published).await.unwrap(), Progress::Gone);
}
