//! Several handlers of one event, and how many of each run.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use outbox_core::{
    CircuitBreaker, DeadLetterFilter, EventState, HandlerError, HandlerOptions, Published,
    SettledResult, Store,
};
use tokio::sync::Semaphore;

use super::{Database, on_both_databases};
use crate::events::{OrderPaid, Step, Ticked, publish_for_relays, scripted, settled};

on_both_databases! {
    publishing_costs_one_row_whatever_the_number_of_handlers
    a_handler_that_fails_has_a_dead_letter_of_its_own_and_the_others_run_once
    a_handler_whose_process_dies_does_not_repeat_the_others
    many_events_of_three_handlers_are_each_handled_once_by_two_relays
    rows_of_a_handler_that_was_renamed_wait_under_its_old_name
    a_handlers_own_limit_is_never_exceeded
    an_open_breaker_leaves_events_uncharged
    a_pause_is_effective_on_all_instances_and_loses_nothing
}

async fn publishing_costs_one_row_whatever_the_number_of_handlers<D: Database>(db: &D) {
    let told = |name: &'static str| {
        move |_: OrderPaid| async move { Ok::<_, HandlerError>(name.to_owned()) }
    };
    let outbox = db
        .outbox()
        .on_named("email", told("email"))
        .on_with(HandlerOptions::named("ledger").primary(), told("ledger"))
        .build()
        .unwrap();
    let mut tx = outbox.store().begin().await.unwrap();
    let event = OrderPaid { order: 1 };
    let published = outbox.publish(&mut tx, &event).await.unwrap();
    outbox.store().commit(tx).await.unwrap();
    assert_eq!(db.summary().await, [("pending".to_owned(), 1)]);

    outbox.dispatch(published).unwrap().settled().await;
    assert_eq!(db.summary().await, [("processed".to_owned(), 2)]);
    let mut tx = outbox.begin().await.unwrap();
    let again = tx.publish(&event).await.unwrap();
    tx.rollback().await.unwrap();
    let Published::Duplicate(again) = again else {
        panic!("{again:?}");
    };
    assert_eq!(again.output().unwrap().as_deref(), Some("ledger"));
}

async fn a_handler_that_fails_has_a_dead_letter_of_its_own_and_the_others_run_once<D: Database>(
    db: &D,
) {
    let (email, mut email_runs) = scripted(|_| Step::Return(Err(HandlerError::retry("no"))));
    let (ledger, mut ledger_runs) = scripted(|_| Step::Return(Ok(())));
    let (builder, mut outcomes) = settled(db.outbox());
    let outbox = builder
        .on_with(HandlerOptions::named("email").max_attempts(2), email)
        .on_named("ledger", ledger)
        .build()
        .unwrap();
    let relay = outbox.relay().start().await.unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    tx.commit().await.unwrap().settled().await;
    let mut results = BTreeMap::new();
    for _ in 0..2 {
        let outcome = outcomes.recv().await.unwrap();
        results.insert(outcome.handler.unwrap().to_string(), outcome.result);
    }
    assert!(matches!(results["email"], SettledResult::Retry { .. }));
    assert_eq!(results["ledger"], SettledResult::Processed);

    db.make_due(id.row()).await;
    outbox.wake();
    let dead = outcomes.recv().await.unwrap();
    assert_eq!((dead.handler.as_deref(), dead.attempt), (Some("email"), 2));
    relay.shutdown(Duration::from_secs(10)).await.unwrap();
    let of_email = DeadLetterFilter::all().handler("email");
    let page = outbox
        .dead_letters()
        .list(&of_email, None, 10)
        .await
        .unwrap();
    assert_eq!(page.letters.len(), 1);
    assert_eq!(
        (page.letters[0].id, page.letters[0].handler.as_deref()),
        (id, Some("email"))
    );
    let of_ledger = DeadLetterFilter::all().handler("ledger");
    let page = outbox
        .dead_letters()
        .list(&of_ledger, None, 10)
        .await
        .unwrap();
    assert!(page.letters.is_empty());

    for attempt in 1..=2 {
        let run = email_runs.recv().await.unwrap().delivery;
        assert_eq!(
            (run.attempt().get(), run.max_attempts().get()),
            (attempt, 2)
        );
        assert_eq!((run.event_id(), run.origin()), (id, id));
    }
    let run = ledger_runs.recv().await.unwrap().delivery;
    assert_eq!((run.attempt().get(), run.max_attempts().get()), (1, 10));
    assert_eq!(run.origin(), id);
    assert!(email_runs.is_empty() && ledger_runs.is_empty());
}

/// In this order:
///
/// 1. One handler hangs, the other is done, and its outcome is stored.
/// 2. The process is gone, and the lease ends.
/// 3. Another process takes over what hung, and only that.
async fn a_handler_whose_process_dies_does_not_repeat_the_others<D: Database>(db: &D) {
    let (email, _email_runs) = scripted(|_| Step::Hang);
    let (ledger, ledger_runs) = scripted(|_| Step::Return(Ok(())));
    let (builder, mut outcomes) = settled(db.outbox());
    let doomed = builder
        .on_named("email", email)
        .on_named("ledger", ledger)
        .build()
        .unwrap();
    let mut tx = doomed.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    tx.commit().await.unwrap();
    assert_eq!(
        outcomes.recv().await.unwrap().handler.as_deref(),
        Some("ledger")
    );

    // Its process would hold on to what hangs; that the lease ends all the same is what a kill is.
    db.expire_lease(id.row()).await;
    let (email, mut email_runs) = scripted(|_| Step::Return(Ok(())));
    let (ledger, again) = scripted(|_| Step::Return(Ok(())));
    let outbox = db
        .outbox()
        .on_named("email", email)
        .on_named("ledger", ledger)
        .build()
        .unwrap();
    let relay = outbox.relay().start().await.unwrap();
    assert_eq!(email_runs.recv().await.unwrap().delivery.attempt().get(), 2);
    relay.shutdown(Duration::from_secs(10)).await.unwrap();
    assert_eq!((ledger_runs.len(), again.len()), (1, 0));
}

async fn many_events_of_three_handlers_are_each_handled_once_by_two_relays<D: Database>(db: &D) {
    let runs = Arc::new(std::sync::Mutex::new(BTreeMap::new()));
    let counting = |name: &'static str| {
        let runs = Arc::clone(&runs);
        move |event: Ticked| {
            *runs.lock().unwrap().entry((name, event.n)).or_insert(0) += 1;
            async { Ok::<_, HandlerError>(()) }
        }
    };
    let mut relays = Vec::new();
    let mut outboxes = Vec::new();
    for _ in 0..2 {
        let outbox = db
            .outbox()
            .on_named("email", counting("email"))
            .on_with(
                HandlerOptions::named("ledger").concurrency(2),
                counting("ledger"),
            )
            .on_named("audit", counting("audit"))
            .build()
            .unwrap();
        relays.push(outbox.relay().start().await.unwrap());
        outboxes.push(outbox);
    }
    let mut published = Vec::new();
    for n in 0..40 {
        let outbox = &outboxes[(n % 2) as usize];
        let event = Ticked { n };
        if n < 20 {
            published.push(publish_for_relays(outbox, &event).await);
        } else {
            let mut tx = outbox.begin().await.unwrap();
            published.push(tx.publish(&event).await.unwrap().event_id());
            tx.commit().await.unwrap();
        }
    }
    crate::support::eventually(super::LIMIT, async || {
        db.summary().await == [("processed".to_owned(), 120)]
    })
    .await;
    for relay in relays {
        relay.shutdown(Duration::from_secs(10)).await.unwrap();
    }
    let runs = runs.lock().unwrap();
    assert_eq!(runs.len(), 120);
    assert!(runs.values().all(|runs| *runs == 1), "{runs:?}");
}

async fn rows_of_a_handler_that_was_renamed_wait_under_its_old_name<D: Database>(db: &D) {
    let (email, _runs) = scripted(|_| Step::Return(Err(HandlerError::retry("no"))));
    let old = db.outbox().on_named("email", email).build().unwrap();
    let mut tx = old.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    tx.commit().await.unwrap().settled().await;
    db.make_due(id.row()).await;

    let (mailer, runs) = scripted(|_| Step::Return(Ok(())));
    let new = db.outbox().on_named("mailer", mailer).build().unwrap();
    let relay = new.relay().start().await.unwrap();
    let report = relay.pass(outbox_core::Cadence::Sweep).await.unwrap();
    let missing = ("ticked".to_owned(), "email".to_owned());
    assert_eq!(report.missing_handlers.get(&missing), Some(&1));
    relay.shutdown(Duration::from_secs(10)).await.unwrap();
    assert!(runs.is_empty());
    let kept = new.find(id).await.unwrap().unwrap();
    assert_eq!((kept.handler.as_deref(), kept.attempts), (Some("email"), 1));
}

async fn a_handlers_own_limit_is_never_exceeded<D: Database>(db: &D) {
    let (now, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let gate = Arc::new(Semaphore::new(0));
    let (builder, mut outcomes) = settled(db.outbox());
    let handler = {
        let (now, most, gate) = (Arc::clone(&now), Arc::clone(&most), Arc::clone(&gate));
        move |_: Ticked| {
            let (now, most, gate) = (Arc::clone(&now), Arc::clone(&most), Arc::clone(&gate));
            async move {
                let running = now.fetch_add(1, Ordering::Relaxed) + 1;
                most.fetch_max(running, Ordering::Relaxed);
                gate.acquire().await.unwrap().forget();
                now.fetch_sub(1, Ordering::Relaxed);
                Ok::<_, HandlerError>(())
            }
        }
    };
    let outbox = builder
        .on_with(HandlerOptions::new().concurrency(3), handler)
        .on(|_: OrderPaid| async { Ok::<_, HandlerError>(String::new()) })
        .build()
        .unwrap();
    for n in 0..10 {
        publish_for_relays(&outbox, &Ticked { n }).await;
    }
    for order in 0..10 {
        publish_for_relays(&outbox, &OrderPaid { order }).await;
    }
    let relay = outbox.relay().start().await.unwrap();
    for _ in 0..10 {
        assert_eq!(&*outcomes.recv().await.unwrap().event_name, "order.paid");
    }
    gate.add_permits(10);
    for _ in 0..10 {
        let outcome = outcomes.recv().await.unwrap();
        assert_eq!(
            (outcome.attempt, outcome.result),
            (1, SettledResult::Processed)
        );
    }
    assert!(most.load(Ordering::Relaxed) <= 3);
    relay.shutdown(Duration::from_secs(10)).await.unwrap();
}

async fn an_open_breaker_leaves_events_uncharged<D: Database>(db: &D) {
    let (handler, runs) = scripted(|_| Step::Return(Err(HandlerError::retry("down"))));
    let (builder, mut outcomes) = settled(db.outbox());
    let breaker = CircuitBreaker::after(2).open_for(Duration::from_secs(3_600));
    let outbox = builder
        .on_with(HandlerOptions::new().circuit_breaker(breaker), handler)
        .on(|_: OrderPaid| async { Ok::<_, HandlerError>(String::new()) })
        .build()
        .unwrap();
    let mut ids = Vec::new();
    for n in 0..5 {
        ids.push(publish_for_relays(&outbox, &Ticked { n }).await);
    }
    let relay = outbox.relay().concurrency(1).start().await.unwrap();
    for _ in 0..2 {
        assert!(matches!(
            outcomes.recv().await.unwrap().result,
            SettledResult::Retry { .. }
        ));
    }
    // Whatever is handled after these has been claimed after the breaker opened.
    for order in 0..3 {
        publish_for_relays(&outbox, &OrderPaid { order }).await;
        outbox.wake();
        assert_eq!(&*outcomes.recv().await.unwrap().event_name, "order.paid");
    }
    assert_eq!(runs.len(), 2);
    for id in &ids[2..] {
        let kept = outbox.find(*id).await.unwrap().unwrap();
        assert_eq!((kept.state, kept.attempts), (EventState::Pending, 0));
    }
    relay.shutdown(Duration::from_secs(10)).await.unwrap();
}

async fn a_pause_is_effective_on_all_instances_and_loses_nothing<D: Database>(db: &D) {
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let (builder, mut outcomes) = settled(db.outbox());
    let outbox = builder
        .on(handler)
        .on(|_: OrderPaid| async { Ok::<_, HandlerError>(String::new()) })
        .build()
        .unwrap();
    let relay = outbox.relay().start().await.unwrap();
    let elsewhere = db.outbox().build().unwrap();
    assert!(elsewhere.pauses().pause("ticked").await.unwrap());

    // By relay, and born leased.
    let mut ids = vec![publish_for_relays(&outbox, &Ticked { n: 0 }).await];
    let mut tx = outbox.begin().await.unwrap();
    ids.push(tx.publish(&Ticked { n: 1 }).await.unwrap().event_id());
    tx.commit().await.unwrap().settled().await;
    // Others go on; whatever is claimed for them was looked for after the pause.
    for order in 0..3 {
        publish_for_relays(&outbox, &OrderPaid { order }).await;
        outbox.wake();
        assert_eq!(&*outcomes.recv().await.unwrap().event_name, "order.paid");
    }
    assert!(runs.is_empty());
    for id in &ids {
        let kept = outbox.find(*id).await.unwrap().unwrap();
        assert_eq!((kept.state, kept.attempts), (EventState::Pending, 0));
    }

    assert_eq!(elsewhere.pauses().list().await.unwrap().len(), 1);
    assert!(elsewhere.pauses().resume("ticked").await.unwrap());
    let both = [runs.recv().await.unwrap(), runs.recv().await.unwrap()];
    let mut both = both.map(|run| (run.n, run.delivery.attempt().get()));
    both.sort_unstable();
    assert_eq!(both, [(0, 1), (1, 1)]);
    relay.shutdown(Duration::from_secs(10)).await.unwrap();
}
