//! Dispatch after the commit: what runs, and what must not.

use std::time::Duration;

use outbox_core::testing::{MemoryStore, Operation};
use outbox_core::{EventState, HandlerError, PublishOptions, StoreErrorKind};

use super::builder;
use crate::events::{OrderPaid, Step, Ticked, Unhandled, publish_for_relays, scripted};

#[tokio::test(start_paused = true)]
async fn an_event_is_handled_right_after_its_commit_without_a_claim() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();

    let mut tx = outbox.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 7 }).await.unwrap().event_id();
    assert!(runs.try_recv().is_err(), "nothing runs before the commit");
    tx.commit().await.unwrap().settled().await;

    let run = runs.recv().await.unwrap();
    assert_eq!(run.n, 7);
    assert_eq!(run.delivery.event_id(), id);
    assert_eq!(run.delivery.attempt().get(), 1);
    assert_eq!(
        outbox.find(id).await.unwrap().unwrap().state,
        EventState::Processed
    );
    assert_eq!(store.calls(Operation::Claim), 0);
    assert_eq!(store.calls(Operation::Verify), 1);
    assert_eq!(store.calls(Operation::Settle), 1);
}

#[tokio::test(start_paused = true)]
async fn a_hundred_events_of_one_commit_share_one_verification_and_one_settlement() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store)
        .on(handler)
        .inline_concurrency(100)
        .build()
        .unwrap();

    let mut tx = outbox.begin().await.unwrap();
    let events: Vec<Ticked> = (0..100).map(|n| Ticked { n }).collect();
    let published = tx.publish_all(&events).await.unwrap();
    tx.commit().await.unwrap().settled().await;

    assert_eq!(published.len(), 100);
    assert_eq!(outbox.counters().processed, 100);
    assert_eq!(store.calls(Operation::Insert), 1);
    assert_eq!(store.calls(Operation::Verify), 1);
    assert_eq!(store.calls(Operation::Settle), 1);
}

#[tokio::test(start_paused = true)]
async fn p1_an_event_of_a_rolled_back_savepoint_is_not_handled() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();

    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 1 }).await.unwrap();
    let savepoint = tx.savepoint();
    tx.publish(&Ticked { n: 2 }).await.unwrap();
    tx.rollback_to(savepoint);
    tx.publish(&Ticked { n: 3 }).await.unwrap();
    tx.commit().await.unwrap().settled().await;

    assert_eq!(runs.recv().await.unwrap().n, 1);
    assert_eq!(runs.recv().await.unwrap().n, 3);
    assert!(runs.try_recv().is_err());
    assert_eq!(outbox.counters().vanished, 1);
}

#[tokio::test(start_paused = true)]
async fn p1_a_commit_that_rolled_back_without_saying_so_dispatches_nothing() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();

    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 1 }).await.unwrap();
    tx.abort();
    tx.commit().await.unwrap().settled().await;

    assert!(runs.try_recv().is_err());
    assert_eq!(outbox.counters().vanished, 1);
    assert!(store.records().is_empty());
}

#[tokio::test(start_paused = true)]
async fn p6_a_commit_whose_answer_was_lost_gives_its_events_back_uncharged() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();

    let mut tx = outbox.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    store.lose_answers(Operation::Commit, 1);
    let unknown = tx.commit().await.unwrap_err();
    assert_eq!(unknown.kind(), StoreErrorKind::TimedOut);

    store.wait_for_calls(Operation::Release, 1).await;
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Pending, 0));
    assert!(runs.try_recv().is_err());

    let _relay = outbox.relay().start().await.unwrap();
    assert_eq!(runs.recv().await.unwrap().delivery.attempt().get(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_lost_commit_is_given_back_once_the_database_answers_again() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();

    let mut tx = outbox.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    store.lose_answers(Operation::Commit, 1);
    store.fail_next(Operation::Release, StoreErrorKind::Unreachable, 4);
    tx.commit().await.unwrap_err();

    store.wait_for_calls(Operation::Release, 5).await;
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Pending, 0));
}

#[tokio::test(start_paused = true)]
async fn a_commit_that_is_dropped_half_way_gives_its_events_back() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();

    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 1 }).await.unwrap();
    let hold = store.hold(Operation::Commit);
    let commit = tokio::spawn(tx.commit());
    hold.arrived(1).await;
    commit.abort();

    store.wait_for_calls(Operation::Release, 1).await;
    assert_eq!(outbox.counters().processed, 0);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_dispatched_inline_is_inserted_unleased() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let mut tx = outbox.begin().await.unwrap();

    let delay = PublishOptions::new().delay(Duration::from_secs(60));
    let delayed = tx
        .publish_with(&Ticked { n: 1 }, &delay)
        .await
        .unwrap()
        .event_id();
    let unhandled = tx.publish(&Unhandled).await.unwrap().event_id();
    tx.commit().await.unwrap().settled().await;

    for id in [delayed, unhandled] {
        let record = outbox.find(id).await.unwrap().unwrap();
        assert_eq!((record.state, record.attempts), (EventState::Pending, 0));
        assert_eq!(record.lease_token, None);
    }
}

#[tokio::test(start_paused = true)]
async fn p6_an_event_with_a_single_attempt_is_not_born_leased() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).max_attempts(1).build().unwrap();

    let mut tx = outbox.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    tx.commit().await.unwrap().settled().await;

    assert_eq!(outbox.find(id).await.unwrap().unwrap().attempts, 0);
    assert!(runs.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn p16_events_beyond_the_queue_are_left_to_the_relay() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).inline_queue(2).build().unwrap();

    let mut tx = outbox.begin().await.unwrap();
    let events: Vec<Ticked> = (0..5).map(|n| Ticked { n }).collect();
    tx.publish_all(&events).await.unwrap();
    tx.commit().await.unwrap().settled().await;

    assert_eq!(outbox.counters().processed, 2);
    let waiting = store
        .records()
        .into_iter()
        .filter(|r| r.state == EventState::Pending);
    assert_eq!(waiting.map(|r| r.attempts).collect::<Vec<_>>(), [0, 0, 0]);

    // The places are free again.
    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 9 }).await.unwrap();
    tx.commit().await.unwrap().settled().await;
    assert_eq!(outbox.counters().processed, 3);
}

#[tokio::test(start_paused = true)]
async fn p6_an_event_that_waited_too_long_for_a_handler_goes_back_uncharged() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|run| match run.n {
        1 => Step::Take(Duration::from_secs(25)),
        _ => Step::Return(Ok(())),
    });
    let outbox = builder(&store)
        .on(handler)
        .inline_concurrency(1)
        .inline_lease(Duration::from_secs(10))
        .build()
        .unwrap();

    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 1 }).await.unwrap();
    let second = tx.publish(&Ticked { n: 2 }).await.unwrap().event_id();
    let committed = tokio::time::Instant::now();
    tx.commit().await.unwrap();
    assert_eq!(runs.recv().await.unwrap().n, 1);

    store.wait_for_calls(Operation::Release, 1).await;
    assert!(
        committed.elapsed() < Duration::from_secs(10),
        "before its lease ends"
    );
    let record = outbox.find(second).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Pending, 0));
}

#[tokio::test(start_paused = true)]
async fn a_slow_transaction_renews_the_lease_its_rows_were_born_with() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();

    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 1 }).await.unwrap();
    tokio::time::advance(Duration::from_secs(14)).await;
    tx.commit().await.unwrap().settled().await;

    assert_eq!(runs.recv().await.unwrap().delivery.attempt().get(), 1);
    assert_eq!(store.calls(Operation::Renew), 1);
    assert_eq!(outbox.counters().processed, 1);
}

#[tokio::test(start_paused = true)]
async fn a_transaction_that_outlived_its_lease_does_not_run_what_a_relay_has_taken() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let (other, mut other_runs) = scripted(|_| Step::Hang);
    let elsewhere = builder(&store)
        .on(other)
        .instance("elsewhere")
        .build()
        .unwrap();

    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 1 }).await.unwrap();
    tokio::time::advance(Duration::from_secs(60)).await;
    let verification = store.hold(Operation::Verify);
    let dispatching = tx.commit().await.unwrap();
    verification.arrived(1).await;
    // The lease is over by the time the row becomes visible.
    let _relay = elsewhere.relay().start().await.unwrap();
    assert_eq!(other_runs.recv().await.unwrap().delivery.attempt().get(), 2);
    drop(verification);
    dispatching.settled().await;

    assert!(runs.try_recv().is_err());
    assert_eq!(outbox.counters().vanished, 1);
}

#[tokio::test(start_paused = true)]
async fn rows_of_the_callers_own_transaction_are_dispatched_on_request() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();

    let mut tx = outbox_core::Store::begin(&store).await.unwrap();
    let published = outbox.publish(&mut tx, &Ticked { n: 5 }).await.unwrap();
    outbox_core::Store::commit(&store, tx).await.unwrap();
    assert!(runs.try_recv().is_err());
    outbox.dispatch(published.clone()).unwrap().settled().await;
    assert_eq!(runs.recv().await.unwrap().n, 5);

    outbox.dispatch(published).unwrap().settled().await;
    assert!(runs.try_recv().is_err(), "it is settled");
}

#[tokio::test(start_paused = true)]
async fn asking_for_an_uncommitted_event_dispatches_nothing() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();

    let mut tx = outbox_core::Store::begin(&store).await.unwrap();
    let published = outbox.publish(&mut tx, &Ticked { n: 5 }).await.unwrap();
    outbox.dispatch(published).unwrap().settled().await;
    assert!(runs.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn a_failed_inline_run_was_attempt_1_and_waits_for_its_backoff() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Err(HandlerError::retry("receiver is down"))));
    let outbox = builder(&store).on(handler).build().unwrap();

    let mut tx = outbox.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    tx.commit().await.unwrap().settled().await;

    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Failed, 1));
    assert_eq!(record.last_error.as_deref(), Some("receiver is down"));
    let wait = record.due_at.unwrap().duration_since(store.now()).unwrap();
    assert!(
        wait > Duration::from_secs(23) && wait <= Duration::from_secs(30),
        "{wait:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_verification_that_fails_is_repeated_and_nothing_is_lost() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();

    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 1 }).await.unwrap();
    store.fail_next(Operation::Verify, StoreErrorKind::Unreachable, 3);
    tx.commit().await.unwrap().settled().await;

    assert_eq!(runs.recv().await.unwrap().delivery.attempt().get(), 1);
    assert_eq!(outbox.counters().processed, 1);
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_gets_the_earlier_result_and_runs_nothing() {
    let store = MemoryStore::new();
    let outbox =
        builder(&store)
            .on(|event: OrderPaid| async move {
                Ok::<_, HandlerError>(format!("receipt-{}", event.order))
            })
            .build()
            .unwrap();

    let mut tx = outbox.begin().await.unwrap();
    let first = tx
        .publish(&OrderPaid { order: 3 })
        .await
        .unwrap()
        .event_id();
    tx.commit().await.unwrap().settled().await;

    let mut tx = outbox.begin().await.unwrap();
    let again = tx.publish(&OrderPaid { order: 3 }).await.unwrap();
    tx.commit().await.unwrap().settled().await;

    let duplicate = again.duplicate().unwrap();
    assert_eq!(duplicate.event_id(), first);
    assert_eq!(duplicate.state(), EventState::Processed);
    assert_eq!(duplicate.output().unwrap().as_deref(), Some("receipt-3"));
    assert_eq!(outbox.counters().processed, 1);
}

#[tokio::test(start_paused = true)]
async fn a_direct_dispatch_leaves_no_row_and_returns_the_output() {
    let store = MemoryStore::new();
    let outbox = builder(&store)
        .on(|event: OrderPaid| async move {
            match event.order {
                1 => Ok("done".to_owned()),
                2 => Err(HandlerError::retry("no")),
                _ => panic!("boom"),
            }
        })
        .build()
        .unwrap();

    assert_eq!(
        outbox
            .dispatch_directly(&OrderPaid { order: 1 })
            .await
            .unwrap(),
        "done"
    );
    let failed = outbox
        .dispatch_directly(&OrderPaid { order: 2 })
        .await
        .unwrap_err();
    assert_eq!(
        failed.to_string(),
        "the direct dispatch of `order.paid` failed: no"
    );
    let panicked = outbox
        .dispatch_directly(&OrderPaid { order: 3 })
        .await
        .unwrap_err();
    assert_eq!(
        panicked.to_string(),
        "the direct dispatch of `order.paid` failed: the handler panicked: boom"
    );
    let unhandled = outbox.dispatch_directly(&Unhandled).await.unwrap_err();
    assert_eq!(unhandled.to_string(), "event `unhandled` has no handler");
    assert!(store.records().is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_inline_event_is_not_the_relays_meanwhile() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(10)));
    let outbox = builder(&store).on(handler).build().unwrap();
    let _relay = outbox.relay().start().await.unwrap();

    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 1 }).await.unwrap();
    tx.commit().await.unwrap().settled().await;
    publish_for_relays(&outbox, &Ticked { n: 2 }).await;

    assert_eq!(runs.recv().await.unwrap().n, 1);
    assert_eq!(runs.recv().await.unwrap().n, 2);
    assert_eq!(outbox.counters().lease_lost, 0);
}

#[tokio::test(start_paused = true)]
async fn a_process_that_may_not_settle_dispatches_nothing_inline() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    store.fail_next(Operation::Check, StoreErrorKind::Denied, 1);
    outbox.begin().await.unwrap().rollback().await.unwrap();
    store.wait_for_calls(Operation::Check, 1).await;

    let mut tx = outbox.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    tx.commit().await.unwrap().settled().await;
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(
        (record.state, record.lease_token),
        (EventState::Pending, None)
    );
    assert!(runs.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn p16_what_is_asked_for_beyond_the_queue_is_left_to_the_relay() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).inline_queue(3).build().unwrap();
    let mut ids = Vec::new();
    for n in 0..10 {
        ids.push(publish_for_relays(&outbox, &Ticked { n }).await);
    }
    outbox.dispatch(ids.clone()).unwrap().settled().await;
    assert_eq!(outbox.counters().processed, 3);
    outbox.dispatch(ids).unwrap().settled().await;
    assert_eq!(
        outbox.counters().processed,
        3,
        "the first three are settled, and asked for again"
    );
}

#[tokio::test(start_paused = true)]
async fn a_dispatch_survives_a_claim_that_failed() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    store.fail_next(Operation::ClaimRows, StoreErrorKind::Conflict, 1);
    outbox.dispatch([id]).unwrap().settled().await;
    assert_eq!(
        outbox.find(id).await.unwrap().unwrap().state,
        EventState::Processed
    );
}
