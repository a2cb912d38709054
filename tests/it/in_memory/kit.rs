//! The test kit for applications, as an application uses it.

use std::time::Duration;

use outbox_core::testing::{
    MemoryStore, assert_not_published, assert_published, assert_survives, run_until_idle,
    run_until_settled,
};
use outbox_core::{
    Delivery, EventState, Handler, HandlerError, HandlerOptions, Outbox, OutboxEvent,
    PublishOptions,
};
use serde::{Deserialize, Serialize};

use crate::events::{OrderPaid, Run, Step, Ticked, Unhandled, publish_for_relays, scripted};

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
struct Mailed {
    to: String,
    #[serde(skip)]
    tries: u32,
}

impl OutboxEvent for Mailed {
    type Output = ();
    const NAME: &'static str = "mailed";
}

fn ok(_: &Run) -> Step {
    Step::Return(Ok(()))
}

fn on_own_thread(store: &MemoryStore) -> outbox_core::OutboxBuilder<MemoryStore> {
    Outbox::builder(store.clone())
}

async fn publish<E: OutboxEvent>(outbox: &Outbox<MemoryStore>, event: &E) {
    let mut tx = outbox.begin().await.unwrap();
    tx.publish(event).await.unwrap();
    tx.commit().await.unwrap();
}

#[tokio::test]
async fn what_was_published_is_found_whatever_became_of_it() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(ok);
    let outbox = on_own_thread(&store)
        .retention(Duration::ZERO)
        .on(handler)
        .build()
        .unwrap();
    assert_not_published::<Ticked>(&store);
    publish(&outbox, &Ticked { n: 1 }).await;
    run_until_idle(&outbox).await;
    assert!(store.records().is_empty(), "nothing of it is kept");
    assert_eq!(assert_published::<Ticked>(&store), Ticked { n: 1 });

    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 2 }).await.unwrap();
    tx.rollback().await.unwrap();
    publish(&outbox, &Ticked { n: 3 }).await;
    assert_eq!(store.published::<Ticked>(), [1, 3].map(|n| Ticked { n }));
    assert_not_published::<OrderPaid>(&store);
}

#[tokio::test]
#[should_panic(expected = "one event `order.paid` was expected; published were 2 of `ticked`")]
async fn a_missing_event_is_told_with_what_was_published() {
    let store = MemoryStore::new();
    let outbox = on_own_thread(&store).build().unwrap();
    publish(&outbox, &Ticked { n: 1 }).await;
    publish(&outbox, &Ticked { n: 2 }).await;
    assert_published::<OrderPaid>(&store);
}

#[tokio::test]
#[should_panic(expected = "no event `ticked` was expected; published were 1 of `ticked`")]
async fn an_event_too_many_is_told() {
    let store = MemoryStore::new();
    let outbox = on_own_thread(&store).build().unwrap();
    publish(&outbox, &Ticked { n: 1 }).await;
    assert_not_published::<Ticked>(&store);
}

/// Publishes the next one until there are three.
struct Chain(std::sync::OnceLock<Outbox<MemoryStore>>);

impl Handler<Ticked> for &'static Chain {
    async fn handle(&self, event: Ticked, _: &Delivery) -> Result<(), HandlerError> {
        if event.n < 3 {
            let outbox = self.0.get().unwrap();
            publish_for_relays(outbox, &Ticked { n: event.n + 1 }).await;
        }
        Ok(())
    }
}

#[tokio::test]
async fn what_handlers_publish_is_handled_too() {
    let store = MemoryStore::new();
    let chain: &'static Chain = Box::leak(Box::new(Chain(std::sync::OnceLock::new())));
    let outbox = on_own_thread(&store).on(chain).build().unwrap();
    assert!(chain.0.set(outbox.clone()).is_ok());
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let ran = run_until_idle(&outbox).await;
    assert_eq!((ran.processed, ran.retried, ran.dead), (3, 0, 0));
    assert_eq!(run_until_idle(&outbox).await.processed, 0);
}

#[tokio::test]
async fn what_cannot_be_handled_now_is_left() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(ok);
    let outbox = on_own_thread(&store).on(handler).build().unwrap();
    publish_for_relays(&outbox, &Unhandled).await;
    let later = PublishOptions::new().delay(Duration::from_secs(60));
    let mut tx = outbox.begin().await.unwrap();
    tx.publish_with(&Ticked { n: 1 }, &later).await.unwrap();
    tx.commit().await.unwrap();
    outbox.pauses().pause("ticked").await.unwrap();
    publish_for_relays(&outbox, &Ticked { n: 2 }).await;
    assert_eq!(run_until_idle(&outbox).await.processed, 0);
    outbox.pauses().resume("ticked").await.unwrap();
    assert_eq!(run_until_idle(&outbox).await.processed, 1);
    store.advance(Duration::from_secs(60));
    assert_eq!(run_until_idle(&outbox).await.processed, 1);
    assert_eq!(
        [runs.recv().await.unwrap().n, runs.recv().await.unwrap().n],
        [2, 1]
    );
    let states: Vec<_> = store.records().iter().map(|record| record.state).collect();
    let processed = EventState::Processed;
    assert_eq!(states, [EventState::Pending, processed, processed]);
}

#[tokio::test]
async fn eight_attempts_and_a_dead_letter_take_no_time() {
    let store = MemoryStore::new();
    let (handler, runs) = scripted(|_| Step::Return(Err(HandlerError::retry("no"))));
    let outbox = on_own_thread(&store)
        .max_attempts(8)
        .on(handler)
        .build()
        .unwrap();
    publish(&outbox, &Ticked { n: 1 }).await;
    let began = store.now();
    let ran = run_until_settled(&outbox).await;
    assert_eq!((ran.retried, ran.dead, runs.len()), (7, 1, 8));
    // 30 s, 1 min, 2 min .. 30 min, shortened by up to a fifth.
    let passed = store.now().duration_since(began).unwrap();
    assert!(passed > Duration::from_secs(50 * 60), "{passed:?}");
    assert_eq!(store.records()[0].state, EventState::DeadLetter);
}

#[tokio::test]
async fn all_handlers_of_an_event_are_run() {
    let store = MemoryStore::new();
    let (email, email_runs) = scripted(ok);
    let (ledger, ledger_runs) = scripted(ok);
    let outbox = on_own_thread(&store)
        .on_with(HandlerOptions::named("email").concurrency(1), email)
        .on_named("ledger", ledger)
        .build()
        .unwrap();
    for n in 0..20 {
        publish_for_relays(&outbox, &Ticked { n }).await;
    }
    assert_eq!(run_until_idle(&outbox).await.processed, 40);
    assert_eq!((email_runs.len(), ledger_runs.len()), (20, 20));
}

/// A field that is not written reaches no handler, however its event is dispatched: no test passes on
/// a value that the database would lose.
#[tokio::test]
async fn handlers_are_given_what_was_read_back() {
    let store = MemoryStore::new();
    let (seen, mut events) = tokio::sync::mpsc::unbounded_channel();
    let outbox = on_own_thread(&store)
        .on(move |event: Mailed| {
            let _ = seen.send(event.tries);
            async { Ok::<_, HandlerError>(()) }
        })
        .build()
        .unwrap();
    let event = Mailed {
        to: "a@example.org".to_owned(),
        tries: 3,
    };
    publish(&outbox, &event).await;
    publish_for_relays(&outbox, &event).await;
    run_until_idle(&outbox).await;
    outbox.dispatch_directly(&event).await.unwrap();
    for _ in 0..3 {
        assert_eq!(events.recv().await, Some(0));
    }
}

#[test]
fn an_event_that_survives_is_told_so() {
    assert_survives(&Ticked { n: 7 });
}

#[test]
#[should_panic(expected = "it came back as another one")]
fn an_event_that_loses_a_field_is_told_so() {
    assert_survives(&Mailed {
        to: String::new(),
        tries: 3,
    });
}

#[test]
#[should_panic(expected = "the payload of event `mailed` contains U+0000")]
fn an_event_that_cannot_be_published_is_told_so() {
    assert_survives(&Mailed {
        to: "\0".to_owned(),
        tries: 0,
    });
}
