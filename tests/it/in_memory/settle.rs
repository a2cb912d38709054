//! Storing outcomes: in batches, again after failures, and never as a shared fate.

use std::time::Duration;

use outbox_core::testing::{MemoryStore, Operation};
use outbox_core::{DeadReason, EventState, HandlerError, PublishOptions, StoreErrorKind};

use super::builder;
use crate::events::{OrderPaid, Step, Ticked, publish_for_relays, scripted, settled};

#[tokio::test(start_paused = true)]
async fn p18_one_refused_output_does_not_keep_999_others_from_being_stored() {
    let store = MemoryStore::new();
    let (builder, mut outcomes) = settled(builder(&store).on(|event: OrderPaid| async move {
        let output = if event.order == 500 { "poison" } else { "fine" };
        Ok::<_, HandlerError>(output.to_owned())
    }));
    let outbox = builder.build().unwrap();
    store.refuse_output_containing("poison");
    let mut tx = outbox_core::Store::begin(&store).await.unwrap();
    let events: Vec<OrderPaid> = (0..1_000).map(|order| OrderPaid { order }).collect();
    let published = outbox.publish_all(&mut tx, &events).await.unwrap();
    outbox_core::Store::commit(&store, tx).await.unwrap();

    let began = tokio::time::Instant::now();
    let _relay = outbox
        .relay()
        .concurrency(1_000)
        .batch(1_000)
        .start()
        .await
        .unwrap();
    for _ in 0..1_000 {
        outcomes.recv().await.unwrap();
    }
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(outbox.counters().processed, 1_000);
    for (order, published) in published.iter().enumerate() {
        let record = outbox.find(published.event_id()).await.unwrap().unwrap();
        assert_eq!(record.state, EventState::Processed);
        let expected = if order == 500 { None } else { Some("\"fine\"") };
        assert_eq!(record.output.as_deref(), expected, "order {order}");
    }
}

#[tokio::test(start_paused = true)]
async fn p18_a_refused_error_text_is_replaced_and_the_failure_recorded() {
    let store = MemoryStore::new();
    store.refuse_error_containing("odd");
    let (handler, _runs) = scripted(|_| Step::Return(Err(HandlerError::permanent("odd text"))));
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder.build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let _relay = outbox.relay().start().await.unwrap();
    outcomes.recv().await.unwrap();

    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(record.state, EventState::DeadLetter);
    assert_eq!(
        record.last_error.as_deref(),
        Some("the error text was refused by the database")
    );
}

#[tokio::test(start_paused = true)]
async fn an_outcome_is_stored_once_the_database_answers_and_its_handler_runs_once() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder.build().unwrap();
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    store.fail_next(Operation::Settle, StoreErrorKind::Conflict, 5);
    let _relay = outbox.relay().start().await.unwrap();

    outcomes.recv().await.unwrap();
    assert_eq!(store.calls(Operation::Settle), 6);
    assert_eq!(runs.recv().await.unwrap().delivery.attempt().get(), 1);
    assert!(runs.try_recv().is_err());
}

/// Nothing runs, and it is held all the same: its outcome is tried again.
#[tokio::test(start_paused = true)]
async fn that_an_event_has_expired_is_stored_once_the_database_answers() {
    let store = MemoryStore::new();
    let (handler, runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let options = PublishOptions::new().expires_in(Duration::from_secs(60));
    let mut tx = outbox_core::Store::begin(&store).await.unwrap();
    let event = Ticked { n: 1 };
    let expired = outbox.publish_with(&mut tx, &event, &options).await;
    let expired = expired.unwrap().event_id();
    outbox_core::Store::commit(&store, tx).await.unwrap();
    store.expire(expired.row());
    store.fail_next(Operation::Settle, StoreErrorKind::Conflict, 5);
    outbox.dispatch([expired]).unwrap().settled().await;

    let record = outbox.find(expired).await.unwrap().unwrap();
    assert_eq!(record.dead_reason, Some(DeadReason::Expired));
    assert_eq!(record.attempts, 0);
    assert_eq!(outbox.counters().unrecorded, 0);
    assert!(runs.is_empty());
}

/// A backlog that has expired takes no more memory than one that runs: a process holds 10,000 events
/// until their outcome is stored, and no more.
#[tokio::test(start_paused = true)]
async fn no_more_expired_events_are_claimed_than_can_be_held() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder.build().unwrap();
    let options = PublishOptions::new().expires_in(Duration::from_secs(60));
    let mut tx = outbox_core::Store::begin(&store).await.unwrap();
    for n in 0..11_000 {
        let published = outbox.publish_with(&mut tx, &Ticked { n }, &options).await;
        published.unwrap();
    }
    outbox_core::Store::commit(&store, tx).await.unwrap();
    store.advance(Duration::from_secs(60));
    let settling = store.hold(Operation::Settle);
    let relay = outbox.relay().concurrency(1_000).batch(1_000);
    let relay = relay.start().await.unwrap();
    settling.arrived(1).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(outbox.counters().claimed, 10_000);
    drop(settling);
    for _ in 0..11_000 {
        outcomes.recv().await.unwrap();
    }
    relay.shutdown(Duration::from_secs(1)).await.unwrap();
    assert_eq!(outbox.counters().dead, 11_000);
}

#[tokio::test(start_paused = true)]
async fn a_settlement_whose_answer_was_lost_is_not_repeated_by_another_run() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    store.lose_answers(Operation::Settle, 1);
    let _relay = outbox.relay().start().await.unwrap();

    store.wait_for_calls(Operation::Settle, 2).await;
    assert_eq!(
        outbox.find(id).await.unwrap().unwrap().state,
        EventState::Processed
    );
    assert_eq!(runs.recv().await.unwrap().n, 1);
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert!(runs.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn a_hook_that_panics_changes_nothing() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let builder = builder(&store)
        .on(handler)
        .on_settled(|_| panic!("in the hook"));
    let (builder, mut outcomes) = settled(builder);
    let outbox = builder.build().unwrap();
    for n in 0..2 {
        publish_for_relays(&outbox, &Ticked { n }).await;
    }
    let _relay = outbox.relay().start().await.unwrap();
    outcomes.recv().await.unwrap();
    outcomes.recv().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn p18_a_locked_row_does_not_keep_others_from_being_stored_and_is_stored_at_last() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder.build().unwrap();
    let mut ids = Vec::new();
    for n in 0..100 {
        ids.push(publish_for_relays(&outbox, &Ticked { n }).await);
    }
    // An operator looks at one of them, FOR UPDATE, and goes for lunch.
    store.lock_row(ids[42].row());
    let began = tokio::time::Instant::now();
    let relay = outbox.relay().concurrency(100).start().await.unwrap();
    for _ in 0..99 {
        assert_ne!(outcomes.recv().await.unwrap().event_id, ids[42]);
    }
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );

    tokio::time::sleep(Duration::from_secs(300)).await;
    store.unlock_row(ids[42].row());
    assert_eq!(outcomes.recv().await.unwrap().event_id, ids[42]);
    relay.shutdown(Duration::from_secs(10)).await.unwrap();
    let mut started = 0;
    while runs.try_recv().is_ok() {
        started += 1;
    }
    assert!(started <= 101, "{started} runs of 100 events");
}

#[tokio::test(start_paused = true)]
async fn p18_an_outcome_the_database_never_takes_does_not_stop_the_others() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder.build().unwrap();
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    store.fail_next(Operation::Settle, StoreErrorKind::Other, 3);
    let _relay = outbox.relay().start().await.unwrap();
    store.wait_for_calls(Operation::Settle, 3).await;
    assert_eq!(outbox.counters().unrecorded, 1);

    publish_for_relays(&outbox, &Ticked { n: 2 }).await;
    assert_eq!(outcomes.recv().await.unwrap().attempt, 1);
}

#[tokio::test(start_paused = true)]
async fn what_was_locked_for_a_while_is_stored_soon_after() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(1)));
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder.build().unwrap();
    let mut ids = Vec::new();
    for n in 0..100 {
        ids.push(publish_for_relays(&outbox, &Ticked { n }).await);
    }
    let _relay = outbox.relay().concurrency(100).start().await.unwrap();
    for _ in 0..100 {
        runs.recv().await.unwrap();
    }
    // The whole table, for a change of its schema.
    ids.iter().for_each(|id| store.lock_row(id.row()));
    tokio::time::sleep(Duration::from_secs(30)).await;
    ids.iter().for_each(|id| store.unlock_row(id.row()));
    let unlocked = tokio::time::Instant::now();
    for _ in 0..100 {
        outcomes.recv().await.unwrap();
    }
    assert!(
        unlocked.elapsed() <= Duration::from_secs(2),
        "{:?}",
        unlocked.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn p18_a_refused_dead_letter_of_a_sweep_does_not_keep_the_others_from_being_stored() {
    let store = MemoryStore::new();
    let (crashing, mut crashed) = scripted(|_| Step::Hang);
    let first = builder(&store)
        .on(crashing)
        .max_attempts(1)
        .build()
        .unwrap();
    let mut ids = Vec::new();
    for n in 0..10 {
        ids.push(publish_for_relays(&first, &Ticked { n }).await);
    }
    let relay = first.relay().start().await.unwrap();
    for _ in 0..10 {
        crashed.recv().await.unwrap();
    }
    drop((relay, first));
    ids.iter().for_each(|id| store.expire_lease(id.row()));

    // The first settlement is that of the whole batch.
    store.fail_next(Operation::Settle, StoreErrorKind::Data, 1);
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let second = builder.build().unwrap();
    let _relay = second.relay().start().await.unwrap();
    for _ in 0..10 {
        outcomes.recv().await.unwrap();
    }
    assert_eq!(
        (second.counters().dead, second.counters().unrecorded),
        (10, 0)
    );
}
