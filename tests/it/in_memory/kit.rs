//! The test kit for applications, as an application uses it.

use std::time::Duration;

use outbox_core::testing::{
    MemoryStore, assert_not_published, assert_published, assert_published_times,
    assert_published_where, assert_survives, pinned, run_until_idle, run_until_settled,
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

#[tokio::test]
async fn a_number_of_events_and_one_among_them_are_found() {
    let store = MemoryStore::new();
    let outbox = on_own_thread(&store).build().unwrap();
    assert!(assert_published_times::<Ticked>(&store, 0).is_empty());
    for n in 1..=3 {
        publish(&outbox, &Ticked { n }).await;
    }
    let all = [1, 2, 3].map(|n| Ticked { n });
    assert_eq!(assert_published_times::<Ticked>(&store, 3), all);
    let second = assert_published_where(&store, |ticked: &Ticked| ticked.n == 2);
    assert_eq!(second, Ticked { n: 2 });
}

#[tokio::test]
#[should_panic(expected = "2 of event `ticked` were expected; published were 1 of `ticked`")]
async fn another_number_of_events_is_told() {
    let store = MemoryStore::new();
    let outbox = on_own_thread(&store).build().unwrap();
    publish(&outbox, &Ticked { n: 1 }).await;
    assert_published_times::<Ticked>(&store, 2);
}

#[tokio::test]
#[should_panic(expected = "other: [Ticked { n: 1 }]")]
async fn an_event_that_is_not_as_it_should_be_is_shown() {
    let store = MemoryStore::new();
    let outbox = on_own_thread(&store).build().unwrap();
    publish(&outbox, &Ticked { n: 1 }).await;
    assert_published_where(&store, |ticked: &Ticked| ticked.n == 2);
}

/// An event that had the name of another one before.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
struct Tocked {
    n: u64,
}

impl OutboxEvent for Tocked {
    type Output = ();
    const NAME: &'static str = "tocked";
    const ALIASES: &'static [&'static str] = &["ticked", "clock.struck"];
}

#[tokio::test]
async fn an_event_published_under_a_former_name_is_found() {
    let store = MemoryStore::new();
    let outbox = on_own_thread(&store).build().unwrap();
    publish(&outbox, &Ticked { n: 1 }).await;
    publish(&outbox, &Tocked { n: 2 }).await;
    assert_eq!(store.published::<Tocked>(), [1, 2].map(|n| Tocked { n }));
    assert_not_published::<OrderPaid>(&store);
}

/// Reads something else under the name `ticked`.
#[derive(Debug, Deserialize, Serialize)]
struct Misread {
    text: String,
}

impl OutboxEvent for Misread {
    type Output = ();
    const NAME: &'static str = "ticked";
}

#[tokio::test]
#[should_panic(expected = "an event `ticked` was published that")]
async fn an_event_that_cannot_be_decoded_is_told() {
    let store = MemoryStore::new();
    let outbox = on_own_thread(&store).build().unwrap();
    publish(&outbox, &Ticked { n: 1 }).await;
    let _ = store.published::<Misread>();
}

#[test]
fn an_event_is_pinned_by_its_name_version_and_former_names() {
    assert_eq!(
        [pinned::<Ticked>(), pinned::<Tocked>()],
        ["ticked v1", "tocked v1 (alias clock.struck, ticked)"]
    );
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

/// Publishes the next one for ever.
struct Endless {
    outbox: std::sync::OnceLock<Outbox<MemoryStore>>,
    how: Following,
}

#[derive(Clone, Copy)]
enum Following {
    Inline,
    Unleased,
    Delayed,
}

impl Handler<Ticked> for &'static Endless {
    async fn handle(&self, event: Ticked, _: &Delivery) -> Result<(), HandlerError> {
        let outbox = self.outbox.get().unwrap();
        let next = Ticked { n: event.n + 1 };
        match self.how {
            Following::Inline => publish(outbox, &next).await,
            Following::Unleased => {
                publish_for_relays(outbox, &next).await;
            }
            Following::Delayed => {
                let later = PublishOptions::new().delay(Duration::from_secs(60));
                let mut tx = outbox.begin().await.unwrap();
                tx.publish_with(&next, &later).await.unwrap();
                tx.commit().await.unwrap();
            }
        }
        Ok(())
    }
}

async fn run_endless(how: Following) {
    let store = MemoryStore::new();
    let endless: &'static Endless = Box::leak(Box::new(Endless {
        outbox: std::sync::OnceLock::new(),
        how,
    }));
    let outbox = on_own_thread(&store).on(endless).build().unwrap();
    assert!(endless.outbox.set(outbox.clone()).is_ok());
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    run_until_settled(&outbox).await;
}

#[tokio::test]
#[should_panic(expected = "over 10000 events were published meanwhile")]
async fn a_handler_without_end_that_is_dispatched_inline_is_told() {
    run_endless(Following::Inline).await;
}

#[tokio::test]
#[should_panic(expected = "1000 rounds had only what the one before has published")]
async fn a_handler_without_end_is_told() {
    run_endless(Following::Unleased).await;
}

#[tokio::test]
#[should_panic(expected = "1000 rounds had only what the one before has published")]
async fn a_handler_without_end_that_waits_in_between_is_told() {
    run_endless(Following::Delayed).await;
}

/// Its rows were all there before the first round, however many rounds they take.
#[tokio::test]
async fn a_long_backlog_of_one_handler_is_no_handler_without_end() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(ok);
    let outbox = on_own_thread(&store)
        .on_with(HandlerOptions::new().concurrency(1), handler)
        .build()
        .unwrap();
    for n in 0..1_100 {
        publish_for_relays(&outbox, &Ticked { n }).await;
    }
    assert_eq!(run_until_idle(&outbox).await.processed, 1_100);
}

#[tokio::test]
async fn a_retry_at_once_is_due_at_once() {
    let store = MemoryStore::new();
    let at_once = |_: &Run| Step::Return(Err(HandlerError::retry_after(Duration::ZERO, "no")));
    let (handler, runs) = scripted(at_once);
    let outbox = on_own_thread(&store)
        .max_attempts(5)
        .on(handler)
        .build()
        .unwrap();
    publish(&outbox, &Ticked { n: 1 }).await;
    let ran = run_until_idle(&outbox).await;
    assert_eq!((ran.retried, ran.dead, runs.len()), (4, 1, 5));
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
    let ran = run_until_idle(&outbox).await;
    assert_eq!((ran.processed, ran.not_due, ran.unhandled), (0, 1, 1));
    outbox.pauses().resume("ticked").await.unwrap();
    assert_eq!(run_until_idle(&outbox).await.processed, 1);
    store.advance(Duration::from_secs(60));
    let ran = run_until_idle(&outbox).await;
    assert_eq!((ran.processed, ran.not_due, ran.unhandled), (1, 0, 1));
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

/// Tokio's paused time is that of one runtime, so the background has to be on it.
#[tokio::test(start_paused = true)]
async fn paused_time_moves_an_outbox_on_the_runtime_of_the_test() {
    let store = MemoryStore::new();
    let (handler, runs) = scripted(|run| match run.delivery.attempt().get() {
        1 => Step::Return(Err(HandlerError::retry("no"))),
        _ => Step::Return(Ok(())),
    });
    let outbox = super::builder(&store).on(handler).build().unwrap();
    publish(&outbox, &Ticked { n: 1 }).await;
    assert_eq!(run_until_idle(&outbox).await.retried, 1);
    tokio::time::advance(Duration::from_secs(31)).await;
    assert_eq!(run_until_idle(&outbox).await.processed, 1);
    assert_eq!(runs.len(), 2);
}

/// 1. A handler runs, and the clock of the database jumps over the end of its lease.
/// 2. The handler returns. Nobody has claimed its event meanwhile.
///
/// A run in this process is waited for, so there is no second one, and its result counts.
#[tokio::test]
async fn a_run_whose_lease_the_clock_has_passed_is_waited_for() {
    let store = MemoryStore::new();
    let (go, gone) = tokio::sync::watch::channel(false);
    let (started, mut starts) = tokio::sync::mpsc::unbounded_channel();
    let outbox = on_own_thread(&store)
        .on(move |_: Ticked| {
            let _ = started.send(());
            let mut gone = gone.clone();
            async move {
                let _ = gone.wait_for(|gone| *gone).await;
                Ok::<_, HandlerError>(())
            }
        })
        .build()
        .unwrap();
    publish(&outbox, &Ticked { n: 1 }).await;
    starts.recv().await.unwrap();
    store.advance(Duration::from_secs(60 * 60));
    let (ran, ()) = tokio::join!(run_until_idle(&outbox), async {
        // Polled after the other one, which then waits.
        go.send(true).unwrap();
    });
    assert_eq!(ran.processed, 1);
    assert!(starts.try_recv().is_err(), "it was run once");
    assert_eq!(store.records()[0].attempts, 1);
}

/// What another instance has claimed is its own until the lease ends.
#[tokio::test]
async fn what_another_instance_holds_is_left_until_its_lease_ends() {
    let store = MemoryStore::new();
    let (hanging, mut started) = scripted(|_| Step::Hang);
    let other = on_own_thread(&store)
        .instance("other")
        .on(hanging)
        .build()
        .unwrap();
    publish(&other, &Ticked { n: 1 }).await;
    started.recv().await.unwrap();

    let (handler, _runs) = scripted(ok);
    let outbox = on_own_thread(&store)
        .instance("here")
        .on(handler)
        .build()
        .unwrap();
    assert_eq!(run_until_settled(&outbox).await.processed, 0);
    store.advance(Duration::from_secs(60 * 60));
    assert_eq!(run_until_idle(&outbox).await.processed, 1);
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
