//! What a publisher of a dedup key is told, typed, and waiting for the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use outbox_core::{
    Changed, HandlerError, Outbox, OutboxEvent, Progress, PublishOptions, Published, Store,
    WaitError,
};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use super::{Database, on_both_databases};

on_both_databases! {
    every_answer_of_a_key_is_typed
    a_key_with_another_payload_is_told_so
    a_hundred_publishers_of_one_key_get_the_result_of_one_run
    a_result_is_awaited_on_another_instance
    the_end_of_an_event_that_keeps_nothing_is_found_by_its_key
    a_stored_result_of_another_type_is_an_error_and_not_a_wrong_answer
    an_event_that_does_not_end_is_waited_for_until_the_caller_gives_up
}

/// A client's request to pay, under its idempotency key.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Pay {
    request: u64,
    cents: u64,
}

impl Pay {
    fn of(request: u64) -> Self {
        Self {
            request,
            cents: 100,
        }
    }
}

impl OutboxEvent for Pay {
    type Output = Receipt;
    const NAME: &'static str = "pay";

    fn dedup_key(&self) -> Option<String> {
        Some(self.request.to_string())
    }
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
struct Receipt {
    number: u32,
}

/// Publishes in a transaction of its own.
async fn publish<S: Store>(outbox: &Outbox<S>, event: &Pay) -> Published<Pay> {
    let mut tx = outbox.begin().await.unwrap();
    let published = tx.publish(event).await.unwrap();
    tx.commit().await.unwrap();
    published
}

#[track_caller]
fn progress(published: &Published<Pay>) -> Progress<Receipt> {
    published.duplicate().unwrap().progress().unwrap()
}

async fn every_answer_of_a_key_is_typed<D: Database>(db: &D) {
    let gate = Arc::new(Semaphore::new(0));
    let waits = Arc::clone(&gate);
    let outbox = db
        .outbox()
        .on(move |event: Pay| {
            let waits = Arc::clone(&waits);
            async move {
                waits.acquire().await.unwrap().forget();
                match event.request {
                    2 => Err(HandlerError::permanent("no such account")),
                    _ => Ok(Receipt { number: 7 }),
                }
            }
        })
        .build()
        .unwrap();

    let first = publish(&outbox, &Pay::of(1)).await;
    assert!(first.is_inserted());
    assert_eq!(
        progress(&publish(&outbox, &Pay::of(1)).await),
        Progress::InProgress
    );
    gate.add_permits(1);
    let receipt = Progress::Processed(Some(Receipt { number: 7 }));
    assert_eq!(outbox.wait_for(&first).await.unwrap(), receipt);
    let again = publish(&outbox, &Pay::of(1)).await;
    assert_eq!(progress(&again), receipt);
    assert_eq!(outbox.wait_for(&again).await.unwrap(), receipt);

    let refused = publish(&outbox, &Pay::of(2)).await;
    gate.add_permits(1);
    assert_eq!(outbox.wait_for(&refused).await.unwrap(), Progress::Dead);
    assert_eq!(
        progress(&publish(&outbox, &Pay::of(2)).await),
        Progress::Dead
    );
    let dead = refused.event_id();
    let discarded = outbox.dead_letters().discard(dead).await.unwrap();
    assert_eq!(discarded, Changed::Done);
    let discarded = publish(&outbox, &Pay::of(2)).await;
    assert_eq!(progress(&discarded), Progress::Discarded);
    assert_eq!(
        outbox.wait_for(&discarded).await.unwrap(),
        Progress::Discarded
    );

    let mut tx = outbox.begin().await.unwrap();
    let later = PublishOptions::new().delay(Duration::from_secs(3_600));
    let delayed = tx.publish_with(&Pay::of(3), &later).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(
        progress(&publish(&outbox, &Pay::of(3)).await),
        Progress::Waiting
    );
    let (ended, ()) = tokio::join!(outbox.wait_for(&delayed), async {
        let mut tx = outbox.begin().await.unwrap();
        tx.cancel(delayed.event_id()).await.unwrap();
        tx.commit().await.unwrap();
    });
    assert_eq!(ended.unwrap(), Progress::Cancelled);
    assert_eq!(
        progress(&publish(&outbox, &Pay::of(3)).await),
        Progress::Cancelled
    );
}

async fn a_key_with_another_payload_is_told_so<D: Database>(db: &D) {
    let outbox = db
        .outbox()
        .on(|_: Pay| async { Ok::<_, HandlerError>(Receipt { number: 7 }) })
        .build()
        .unwrap();
    let first = publish(&outbox, &Pay::of(1)).await;
    outbox.wait_for(&first).await.unwrap();
    let other = Pay {
        request: 1,
        cents: 101,
    };
    let reused = publish(&outbox, &other).await;
    let Published::KeyReused(earlier) = &reused else {
        panic!("{reused:?}");
    };
    assert_eq!(earlier.event_id(), first.event_id());
    // Nobody takes the receipt of another payment for an answer to this one by accident.
    assert!(reused.duplicate().is_none() && !reused.is_inserted());
    assert_eq!(reused.into_iter().count(), 0);

    let mut tx = outbox.begin().await.unwrap();
    let batch = [
        Pay::of(2),
        other,
        Pay {
            request: 2,
            cents: 3,
        },
        Pay::of(2),
    ];
    let answers = tx.publish_all(&batch).await.unwrap();
    tx.rollback().await.unwrap();
    assert!(answers[0].is_inserted());
    assert!(matches!(answers[1], Published::KeyReused(_)));
    assert!(matches!(answers[2], Published::KeyReused(_)));
    assert!(matches!(answers[3], Published::Duplicate(_)));
}

/// One run, a hundred equal results, whichever of two processes a publisher is in.
async fn a_hundred_publishers_of_one_key_get_the_result_of_one_run<D: Database>(db: &D) {
    let runs = Arc::new(AtomicU32::new(0));
    let mut outboxes = Vec::new();
    for _ in 0..2 {
        let runs = Arc::clone(&runs);
        let outbox = db
            .outbox()
            .on(move |_: Pay| {
                let number = runs.fetch_add(1, Ordering::Relaxed) + 1;
                async move { Ok::<_, HandlerError>(Receipt { number }) }
            })
            .build()
            .unwrap();
        outboxes.push(outbox);
    }
    let mut publishers = tokio::task::JoinSet::new();
    for n in 0..100 {
        let outbox = outboxes[n % 2].clone();
        publishers.spawn(async move {
            let published = publish(&outbox, &Pay::of(1)).await;
            (
                published.is_inserted(),
                outbox.wait_for(&published).await.unwrap(),
            )
        });
    }
    let answers = publishers.join_all().await;
    assert_eq!(answers.iter().filter(|(inserted, _)| *inserted).count(), 1);
    let receipt = Progress::Processed(Some(Receipt { number: 1 }));
    assert_eq!(answers.len(), 100);
    assert!(
        answers.iter().all(|(_, answer)| *answer == receipt),
        "{answers:?}"
    );
    assert_eq!(runs.load(Ordering::Relaxed), 1);
}

/// The one that waits handles nothing itself.
async fn a_result_is_awaited_on_another_instance<D: Database>(db: &D) {
    let publisher = db.outbox().build().unwrap();
    let published = publish(&publisher, &Pay::of(1)).await;
    let again = publish(&publisher, &Pay::of(1)).await;
    assert_eq!(progress(&again), Progress::Waiting);

    let handler = db
        .outbox()
        .on(|_: Pay| async { Ok::<_, HandlerError>(Receipt { number: 3 }) })
        .build()
        .unwrap();
    let (first, second, ()) = tokio::join!(
        publisher.wait_for(&published),
        publisher.wait_for(&again),
        async {
            handler.dispatch(published.clone()).unwrap().settled().await;
        }
    );
    let receipt = Progress::Processed(Some(Receipt { number: 3 }));
    assert_eq!(
        [first.unwrap(), second.unwrap()],
        [receipt.clone(), receipt]
    );
}

async fn the_end_of_an_event_that_keeps_nothing_is_found_by_its_key<D: Database>(db: &D) {
    let builder = || db.outbox().retention(Duration::ZERO);
    let publisher = builder().build().unwrap();
    let published = publish(&publisher, &Pay::of(1)).await;
    let handler = builder()
        .on(|_: Pay| async { Ok::<_, HandlerError>(Receipt { number: 3 }) })
        .build()
        .unwrap();
    handler.dispatch(published.clone()).unwrap().settled().await;
    assert_eq!(
        publisher.wait_for(&published).await.unwrap(),
        Progress::Gone
    );
    let again = publish(&publisher, &Pay::of(1)).await;
    let receipt = Progress::Processed(Some(Receipt { number: 3 }));
    assert_eq!(publisher.wait_for(&again).await.unwrap(), receipt);
}

/// The same event, in a release whose receipts were text.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct OldPay {
    request: u64,
    cents: u64,
}

impl OutboxEvent for OldPay {
    type Output = String;
    const NAME: &'static str = "pay";

    fn dedup_key(&self) -> Option<String> {
        Some(self.request.to_string())
    }
}

async fn a_stored_result_of_another_type_is_an_error_and_not_a_wrong_answer<D: Database>(db: &D) {
    let old = db
        .outbox()
        .on(|_: OldPay| async { Ok::<_, HandlerError>("receipt".to_owned()) })
        .build()
        .unwrap();
    let mut tx = old.begin().await.unwrap();
    let event = OldPay {
        request: 1,
        cents: 100,
    };
    tx.publish(&event).await.unwrap();
    tx.commit().await.unwrap().settled().await;

    let new = db.outbox().build().unwrap();
    let again = publish(&new, &Pay::of(1)).await;
    assert!(again.duplicate().unwrap().progress().is_err());
    let waited = new.wait_for(&again).await;
    assert!(matches!(waited, Err(WaitError::Output(_))), "{waited:?}");
    // The row is kept as it is.
    let kept = new.find(again.event_id()).await.unwrap().unwrap();
    assert_eq!(kept.output.as_deref(), Some("\"receipt\""));
}

async fn an_event_that_does_not_end_is_waited_for_until_the_caller_gives_up<D: Database>(db: &D) {
    let outbox = db.outbox().build().unwrap();
    let published = publish(&outbox, &Pay::of(1)).await;
    let limit = Duration::from_millis(300);
    let waited = tokio::time::timeout(limit, outbox.wait_for(&published)).await;
    assert!(waited.is_err(), "{waited:?}");
}
