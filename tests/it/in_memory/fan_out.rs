//! Several handlers of one event, and how many of each run.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use outbox_core::testing::{MemoryStore, Operation};
use outbox_core::{
    Cancellation, CircuitBreaker, DeadLetterFilter, DeadReason, Delivery, EventId, EventState,
    Handler, HandlerError, HandlerOptions, Outbox, Progress, SettledResult, Store, StoreErrorKind,
    Uncommitted,
};
use tokio::sync::{Semaphore, mpsc};

use super::builder;
use crate::events::{OrderPaid, Run, Step, Ticked, publish_for_relays, scripted, settled};

/// Two handlers of [`Ticked`], each doing as it is told, and their runs.
#[allow(clippy::type_complexity, reason = "what a test needs of it")]
fn two(
    store: &MemoryStore,
    email: impl Fn(&Run) -> Step + Send + Sync + 'static,
    ledger: impl Fn(&Run) -> Step + Send + Sync + 'static,
) -> (
    outbox_core::OutboxBuilder<MemoryStore>,
    mpsc::UnboundedReceiver<Run>,
    mpsc::UnboundedReceiver<Run>,
) {
    let (email, email_runs) = scripted(email);
    let (ledger, ledger_runs) = scripted(ledger);
    let builder = builder(store)
        .on_named("email", email)
        .on_named("ledger", ledger);
    (builder, email_runs, ledger_runs)
}

fn ok(_: &Run) -> Step {
    Step::Return(Ok(()))
}

fn fails(_: &Run) -> Step {
    Step::Return(Err(HandlerError::retry("no")))
}

async fn publish(outbox: &Outbox<MemoryStore>, n: u64) -> EventId {
    let mut tx = outbox.begin().await.unwrap();
    let id = tx.publish(&Ticked { n }).await.unwrap().event_id();
    tx.commit().await.unwrap().settled().await;
    id
}

#[tokio::test(start_paused = true)]
async fn each_handler_runs_once_and_publishing_costs_one_row() {
    let store = MemoryStore::new();
    let (builder, mut email, mut ledger) = two(&store, ok, ok);
    let outbox = builder.build().unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    let dispatching = {
        let splitting = store.hold(Operation::Split);
        let dispatching = tx.commit().await.unwrap();
        splitting.arrived(1).await;
        assert_eq!(store.records().len(), 1);
        dispatching
    };
    dispatching.settled().await;

    let (email, ledger) = (email.recv().await.unwrap(), ledger.recv().await.unwrap());
    assert_eq!(email.delivery.handler(), Some("email"));
    assert_eq!(
        email.delivery.event_id(),
        id,
        "the first one's is the event's own"
    );
    assert_eq!(ledger.delivery.handler(), Some("ledger"));
    assert_ne!(ledger.delivery.event_id(), id);
    assert_eq!(
        [email.delivery.origin(), ledger.delivery.origin()],
        [id, id]
    );
    let states: Vec<_> = store.records().iter().map(|record| record.state).collect();
    assert_eq!(states, [EventState::Processed; 2]);
}

#[tokio::test(start_paused = true)]
async fn one_that_fails_does_not_make_the_other_run_again() {
    let store = MemoryStore::new();
    let (builder, mut email, mut ledger) = two(&store, fails, ok);
    let (builder, mut outcomes) = settled(builder.max_attempts(3));
    let outbox = builder.build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let relay = outbox.relay().start().await.unwrap();
    let mut dead = None;
    for _ in 0..4 {
        let outcome = outcomes.recv().await.unwrap();
        if let SettledResult::DeadLetter { .. } = outcome.result {
            dead = Some(outcome);
        }
    }
    let dead = dead.unwrap();
    assert_eq!(dead.handler.as_deref(), Some("email"));
    assert_eq!((dead.event_id, dead.attempt), (id, 3));
    assert_eq!((email.len(), ledger.len()), (3, 1));
    assert_eq!(email.recv().await.unwrap().delivery.attempt().get(), 1);
    assert_eq!(ledger.recv().await.unwrap().delivery.attempt().get(), 1);

    let filter = DeadLetterFilter::all().handler("email");
    let letters = outbox.dead_letters().list(&filter, None, 10).await.unwrap();
    assert_eq!(letters.letters[0].handler.as_deref(), Some("email"));
    relay.shutdown(Duration::from_secs(1)).await.unwrap();
}

/// A handler whose process dies with it, as a lease that ends: the other is not run again, although
/// its outcome was never stored.
#[tokio::test(start_paused = true)]
async fn one_that_kills_its_process_does_not_repeat_the_others_with_each_attempt() {
    let store = MemoryStore::new();
    let (doomed, email, ledger) = two(&store, |_| Step::Hang, ok);
    let doomed = doomed.build().unwrap();
    let mut tx = doomed.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    tx.commit().await.unwrap();
    store.wait_for_calls(Operation::Settle, 1).await;
    drop(doomed);
    store.expire_lease(id.row());

    let (builder, mut again, other) = two(&store, ok, ok);
    let outbox = builder.build().unwrap();
    let relay = outbox.relay().start().await.unwrap();
    assert_eq!(again.recv().await.unwrap().delivery.attempt().get(), 2);
    relay.shutdown(Duration::from_secs(1)).await.unwrap();
    assert_eq!((email.len(), ledger.len(), other.len()), (1, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn an_outcome_is_stored_without_waiting_for_a_slower_handler() {
    let store = MemoryStore::new();
    let slow = |_: &Run| Step::Take(Duration::from_secs(20));
    let (builder, _email, _ledger) = two(&store, slow, ok);
    let (builder, mut outcomes) = settled(builder);
    let outbox = builder.build().unwrap();
    let began = tokio::time::Instant::now();
    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 1 }).await.unwrap();
    tx.commit().await.unwrap();
    let first = outcomes.recv().await.unwrap();
    assert_eq!(first.handler.as_deref(), Some("ledger"));
    assert!(began.elapsed() < Duration::from_secs(1));
    let second = outcomes.recv().await.unwrap();
    assert_eq!(second.handler.as_deref(), Some("email"));
    assert!(began.elapsed() >= Duration::from_secs(20));
}

#[tokio::test(start_paused = true)]
async fn each_handler_has_attempts_a_backoff_and_a_timeout_of_its_own() {
    let store = MemoryStore::new();
    let (email, _) = scripted(|_| Step::Hang);
    let (ledger, _) = scripted(fails);
    let minute = Duration::from_secs(60);
    let (builder, mut outcomes) = settled(builder(&store));
    let outbox = builder
        .on_with(
            HandlerOptions::named("email")
                .max_attempts(1)
                .timeout(Duration::from_secs(2)),
            email,
        )
        .on_with(
            HandlerOptions::named("ledger")
                .backoff(outbox_core::Backoff::new(minute, minute, 0.0).unwrap()),
            ledger,
        )
        .build()
        .unwrap();
    publish(&outbox, 1).await;
    let mut ends = [
        outcomes.recv().await.unwrap(),
        outcomes.recv().await.unwrap(),
    ];
    ends.sort_by_key(|end| end.handler.clone());
    let SettledResult::DeadLetter { reason, error } = &ends[0].result else {
        panic!("{:?}", ends[0]);
    };
    assert_eq!(*reason, DeadReason::AttemptsExhausted);
    assert_eq!(error, "the handler overran its timeout of 2s");
    let error = "no".to_owned();
    assert_eq!(
        ends[1].result,
        SettledResult::Retry {
            after: minute,
            error
        }
    );
}

/// Returns its own name.
struct Named(&'static str);

impl Handler<OrderPaid> for Named {
    async fn handle(&self, _: OrderPaid, _: &Delivery) -> Result<String, HandlerError> {
        Ok(self.0.to_owned())
    }
}

#[tokio::test(start_paused = true)]
async fn the_output_that_is_told_is_the_first_ones_or_the_primary_ones() {
    for (primary, expected) in [(false, "email"), (true, "ledger")] {
        let store = MemoryStore::new();
        let ledger = HandlerOptions::named("ledger");
        let ledger = if primary { ledger.primary() } else { ledger };
        let outbox = builder(&store)
            .on_named("email", Named("email"))
            .on_with(ledger, Named("ledger"))
            .build()
            .unwrap();
        let mut tx = outbox.begin().await.unwrap();
        let published = tx.publish(&OrderPaid { order: 7 }).await.unwrap();
        tx.commit().await.unwrap();
        let told = Progress::Processed(Some(expected.to_owned()));
        assert_eq!(outbox.wait_for(&published).await.unwrap(), told);
        let output = outbox.dispatch_directly(&OrderPaid { order: 8 }).await;
        assert_eq!(output.unwrap(), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_is_added_gets_what_is_split_from_then_on() {
    let store = MemoryStore::new();
    let (old, _) = scripted(ok);
    let old = builder(&store)
        .on_named("email", old)
        .without_inline_dispatch()
        .build();
    let old = old.unwrap();
    let done = publish_for_relays(&old, &Ticked { n: 1 }).await;
    old.dispatch([done]).unwrap().settled().await;
    let waiting = publish_for_relays(&old, &Ticked { n: 2 }).await;

    let (builder, mut email, mut ledger) = two(&store, ok, ok);
    let new = builder.build().unwrap();
    new.dispatch([done, waiting]).unwrap().settled().await;
    assert_eq!(email.recv().await.unwrap().n, 2);
    assert_eq!(ledger.recv().await.unwrap().n, 2);
    assert!(email.is_empty() && ledger.is_empty());
}

/// P12: nothing is lost that was split for a handler which is gone; the sweep names it.
#[tokio::test(start_paused = true)]
async fn rows_of_a_handler_that_was_removed_wait_and_are_reported() {
    let store = MemoryStore::new();
    let (builder, _email, _ledger) = two(&store, fails, ok);
    let old = builder.build().unwrap();
    let id = publish(&old, 1).await;
    store.make_due(id.row());

    let (ledger, runs) = scripted(ok);
    let new = super::builder(&store).on_named("ledger", ledger).build();
    let new = new.unwrap();
    let relay = new.relay().start().await.unwrap();
    let report = relay.pass(outbox_core::Cadence::Sweep).await.unwrap();
    let missing = ("ticked".to_owned(), "email".to_owned());
    assert_eq!(report.missing_handlers.get(&missing), Some(&1));
    assert_eq!(report.unhandled.get("ticked"), Some(&1));
    assert!(report.later_versions.is_empty());
    relay.shutdown(Duration::from_secs(1)).await.unwrap();
    assert!(runs.is_empty());
    let kept = new.find(id).await.unwrap().unwrap();
    assert_eq!((kept.state, kept.attempts), (EventState::Failed, 1));
}

/// The relay has room for one run. The parts that find no place are left uncharged, and taken by
/// the claims that follow.
#[tokio::test(start_paused = true)]
async fn parts_without_a_place_are_claimed_when_there_is_room() {
    let store = MemoryStore::new();
    let (builder, mut email, mut ledger) = two(&store, ok, ok);
    let outbox = builder.build().unwrap();
    for n in 0..5 {
        publish_for_relays(&outbox, &Ticked { n }).await;
    }
    let relay = outbox.relay().concurrency(1).start().await.unwrap();
    for _ in 0..5 {
        assert_eq!(email.recv().await.unwrap().delivery.attempt().get(), 1);
        assert_eq!(ledger.recv().await.unwrap().delivery.attempt().get(), 1);
    }
    relay.shutdown(Duration::from_secs(1)).await.unwrap();
    assert!(email.is_empty() && ledger.is_empty());
}

/// A split that failed is given back uncharged, and tried again.
#[tokio::test(start_paused = true)]
async fn a_split_that_fails_costs_no_attempt() {
    let store = MemoryStore::new();
    let (builder, mut email, mut ledger) = two(&store, ok, ok);
    let outbox = builder.build().unwrap();
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    store.fail_next(Operation::Split, StoreErrorKind::Unreachable, 1);
    let relay = outbox.relay().start().await.unwrap();
    assert_eq!(email.recv().await.unwrap().delivery.attempt().get(), 1);
    assert_eq!(ledger.recv().await.unwrap().delivery.attempt().get(), 1);
    assert_eq!(outbox.counters().released, 1);
    relay.shutdown(Duration::from_secs(1)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn before_the_commit_an_event_of_several_handlers_is_left() {
    let store = MemoryStore::new();
    let (builder, email, _ledger) = two(&store, ok, ok);
    let outbox = builder.build().unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let left = tx.dispatch_uncommitted(&Ticked { n: 1 }).await.unwrap();
    assert!(matches!(left, Uncommitted::Left(_)), "{left:?}");
    tx.commit().await.unwrap();
    assert!(email.is_empty());
}

/// Counts how many of its runs there are at once, and ends them when it is told.
struct Counting {
    running: Arc<AtomicU32>,
    most: Arc<AtomicU32>,
    gate: Arc<Semaphore>,
}

impl Handler<Ticked> for Counting {
    async fn handle(&self, _: Ticked, _: &Delivery) -> Result<(), HandlerError> {
        let running = self.running.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(running, Ordering::Relaxed);
        self.gate.acquire().await.unwrap().forget();
        self.running.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn p16_a_handler_has_no_more_runs_at_once_than_its_own_limit() {
    for cadences_only in [false, true] {
        let store = MemoryStore::new();
        let most = Arc::new(AtomicU32::new(0));
        let gate = Arc::new(Semaphore::new(0));
        let limited = Counting {
            running: Arc::default(),
            most: Arc::clone(&most),
            gate: Arc::clone(&gate),
        };
        let (builder, mut outcomes) = settled(builder(&store));
        let outbox = builder
            .on_with(HandlerOptions::new().concurrency(2), limited)
            .on(|_: OrderPaid| async { Ok::<_, HandlerError>(String::new()) })
            .build()
            .unwrap();
        for n in 0..10 {
            publish_for_relays(&outbox, &Ticked { n }).await;
            publish_for_relays(&outbox, &OrderPaid { order: n }).await;
        }
        let relay = outbox.relay();
        let relay = if cadences_only {
            relay.cadences_only()
        } else {
            relay
        };
        let relay = relay.concurrency(16).start().await.unwrap();
        // The others are not held up.
        for _ in 0..10 {
            assert_eq!(&*outcomes.recv().await.unwrap().event_name, "order.paid");
        }
        assert!(outcomes.is_empty());
        assert_eq!(outbox.counters().claimed, 12, "never more than can start");
        gate.add_permits(10);
        for _ in 0..10 {
            let outcome = outcomes.recv().await.unwrap();
            assert_eq!((&*outcome.event_name, outcome.attempt), ("ticked", 1));
        }
        assert_eq!(most.load(Ordering::Relaxed), 2);
        relay.shutdown(Duration::from_secs(1)).await.unwrap();
    }
}

/// Inline, too: what finds no room in its lane is left to the relay, uncharged.
#[tokio::test(start_paused = true)]
async fn p16_inline_runs_count_towards_a_handlers_limit() {
    let store = MemoryStore::new();
    let most = Arc::new(AtomicU32::new(0));
    let gate = Arc::new(Semaphore::new(0));
    let limited = Counting {
        running: Arc::default(),
        most: Arc::clone(&most),
        gate: Arc::clone(&gate),
    };
    let outbox = builder(&store)
        .on_with(HandlerOptions::new().concurrency(2), limited)
        .build()
        .unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let events = [1, 2, 3, 4].map(|n| Ticked { n });
    let published = tx.publish_all(&events).await.unwrap();
    let dispatching = tx.commit().await.unwrap();
    store.wait_for_calls(Operation::Release, 1).await;
    gate.add_permits(4);
    dispatching.settled().await;
    let mut attempts = Vec::new();
    for event in published {
        let record = outbox.find(event.event_id()).await.unwrap().unwrap();
        attempts.push((record.state, record.attempts));
    }
    let (done, waiting) = ((EventState::Processed, 1), (EventState::Pending, 0));
    assert_eq!(attempts, [done, done, waiting, waiting]);
    assert_eq!(most.load(Ordering::Relaxed), 2);
}

/// In this order:
///
/// 1. Two events fail, and the breaker opens.
/// 2. The others wait, and no attempt of theirs is spent.
/// 3. After a while one is let through. It fails, and the others wait for as long again.
/// 4. The next one succeeds, and all go through.
#[tokio::test(start_paused = true)]
async fn an_open_breaker_spends_no_attempts() {
    let store = MemoryStore::new();
    let healthy = Arc::new(AtomicU32::new(0));
    let is_healthy = Arc::clone(&healthy);
    let (handler, mut runs) = scripted(move |_| match is_healthy.load(Ordering::Relaxed) {
        0 => Step::Return(Err(HandlerError::retry_after(
            Duration::from_secs(3_600),
            "down",
        ))),
        _ => Step::Return(Ok(())),
    });
    let breaker = CircuitBreaker::after(2).open_for(Duration::from_secs(30));
    let outbox = builder(&store)
        .on_with(HandlerOptions::new().circuit_breaker(breaker), handler)
        .build()
        .unwrap();
    for n in 0..6 {
        publish_for_relays(&outbox, &Ticked { n }).await;
    }
    let relay = outbox.relay().concurrency(1).start().await.unwrap();
    for n in 0..2 {
        assert_eq!(runs.recv().await.unwrap().n, n);
    }
    tokio::time::sleep(Duration::from_secs(25)).await;
    assert!(runs.is_empty());
    let claimed = outbox.counters().claimed;
    assert_eq!(claimed, 2);
    let attempts: Vec<u32> = store
        .records()
        .iter()
        .map(|record| record.attempts)
        .collect();
    assert_eq!(attempts, [1, 1, 0, 0, 0, 0]);

    let began = tokio::time::Instant::now();
    assert_eq!(runs.recv().await.unwrap().n, 2);
    assert!(began.elapsed() < Duration::from_secs(10));
    healthy.store(1, Ordering::Relaxed);
    assert_eq!(runs.recv().await.unwrap().n, 3);
    assert!(
        began.elapsed() > Duration::from_secs(30),
        "open for as long again"
    );
    for n in 4..6 {
        assert_eq!(runs.recv().await.unwrap().n, n);
    }
    assert!(began.elapsed() < Duration::from_secs(45));
    relay.shutdown(Duration::from_secs(1)).await.unwrap();
}

/// While it is open nothing is born leased.
#[tokio::test(start_paused = true)]
async fn an_open_breaker_leaves_inline_events_to_the_relays() {
    let store = MemoryStore::new();
    let (handler, runs) = scripted(fails);
    let breaker = HandlerOptions::new().circuit_breaker(CircuitBreaker::after(1));
    let outbox = builder(&store).on_with(breaker, handler).build().unwrap();
    publish(&outbox, 1).await;
    let second = publish(&outbox, 2).await;
    assert_eq!(runs.len(), 1);
    let kept = outbox.find(second).await.unwrap().unwrap();
    assert_eq!((kept.state, kept.attempts), (EventState::Pending, 0));
}

/// Paused on one instance, nothing starts on another; what is paused under a former name too.
#[tokio::test(start_paused = true)]
async fn a_pause_holds_for_all_instances_and_loses_nothing() {
    let store = MemoryStore::new();
    let (builder, mut email, mut ledger) = two(&store, ok, ok);
    let outbox = builder.build().unwrap();
    let relay = outbox.relay().start().await.unwrap();
    let elsewhere = super::builder(&store).build().unwrap();
    assert!(
        elsewhere
            .pauses()
            .pause_handler("ticked", "email")
            .await
            .unwrap()
    );
    for n in 0..3 {
        publish(&outbox, n).await;
    }
    for n in 0..3 {
        assert_eq!(ledger.recv().await.unwrap().n, n);
    }
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert!(email.is_empty());
    let paused = elsewhere.pauses().list().await.unwrap();
    assert_eq!(paused.len(), 1);
    assert_eq!(paused[0].of.handler.as_deref(), Some("email"));

    assert!(elsewhere.pauses().pause("ticked").await.unwrap());
    publish(&outbox, 3).await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert!(ledger.is_empty());
    assert!(elsewhere.pauses().resume("ticked").await.unwrap());
    assert_eq!(ledger.recv().await.unwrap().n, 3);
    assert!(
        elsewhere
            .pauses()
            .resume_handler("ticked", "email")
            .await
            .unwrap()
    );
    for _ in 0..4 {
        assert_eq!(email.recv().await.unwrap().delivery.attempt().get(), 1);
    }
    assert_eq!(elsewhere.pauses().list().await.unwrap(), []);
    relay.shutdown(Duration::from_secs(1)).await.unwrap();
    let records = store.records();
    assert_eq!(records.len(), 8);
    assert!(
        records
            .iter()
            .all(|record| record.state == EventState::Processed)
    );
}

/// A claim is asked for with the handlers this process has, and no others.
#[tokio::test(start_paused = true)]
async fn another_processs_handler_is_left_to_it() {
    let store = MemoryStore::new();
    let (builder, _email, _ledger) = two(&store, fails, ok);
    let outbox = builder.build().unwrap();
    let id = publish(&outbox, 1).await;
    store.make_due(id.row());
    let of_email = outbox_core::store::KnownEvent {
        name: "ticked",
        handler: Some("email"),
        newest_version: NonZeroU32::MIN,
    };
    let request = outbox_core::store::ClaimRequest {
        limit: NonZeroU32::MIN,
        reserved: 0,
        lease: Duration::from_secs(60),
        token: outbox_core::lease::LeaseToken::random(),
        instance: "elsewhere",
        events: &[of_email],
        low_water: outbox_core::store::LowWater::BEGINNING,
        freed: &[],
    };
    let claimed = store.claim(&request).await.unwrap();
    assert_eq!(claimed[0].id, id);
}

/// Its lease would be extended for the first time after 20 seconds.
#[tokio::test(start_paused = true)]
async fn every_handler_of_this_process_hears_soon_that_its_event_was_cancelled() {
    let store = MemoryStore::new();
    let hangs = |_: &Run| Step::Hang;
    let (builder, mut email, mut ledger) = two(&store, hangs, hangs);
    let outbox = builder.build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    outbox.dispatch([id]).unwrap();
    let runs = [email.recv().await.unwrap(), ledger.recv().await.unwrap()];

    let began = tokio::time::Instant::now();
    let mut tx = outbox.begin().await.unwrap();
    let found = tx.cancel(id).await.unwrap();
    assert_eq!(found, Cancellation::CancelledInProgress(id));
    tx.commit().await.unwrap();
    for run in runs {
        run.delivery.cancelled().cancelled().await;
    }
    assert!(began.elapsed() < Duration::from_secs(6));
    let states: Vec<_> = store.records().iter().map(|record| record.state).collect();
    assert_eq!(states, [EventState::Cancelled; 2]);
}

/// Ten events are split at once, and one handler can run one of them: the parts of the other nine are
/// not taken to be given back.
#[tokio::test(start_paused = true)]
async fn no_more_parts_are_held_than_their_handler_has_room_for() {
    let store = MemoryStore::new();
    let (email, mut runs) = scripted(ok);
    let (ledger, _runs) = scripted(ok);
    let outbox = builder(&store)
        .on_with(HandlerOptions::named("email").concurrency(1), email)
        .on_named("ledger", ledger)
        .build()
        .unwrap();
    for n in 0..10 {
        publish_for_relays(&outbox, &Ticked { n }).await;
    }
    let relay = outbox
        .relay()
        .concurrency(100)
        .batch(10)
        .start()
        .await
        .unwrap();
    for _ in 0..10 {
        runs.recv().await.unwrap();
    }
    relay.shutdown(Duration::from_secs(1)).await.unwrap();
    assert_eq!(outbox.counters().processed, 20);
    assert_eq!(outbox.counters().released, 0);
}
