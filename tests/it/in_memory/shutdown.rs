//! P14: a shutdown finishes, gives back, and says what it could not store.

use std::time::Duration;

use outbox_core::testing::{MemoryStore, Operation};
use outbox_core::{EventState, HandlerError, StoreErrorKind};
use tokio::time::Instant;

use super::builder;
use crate::events::{Step, Ticked, publish_for_relays, scripted};

const GRACE: Duration = Duration::from_secs(20);

#[tokio::test(start_paused = true)]
async fn p14_a_run_that_ends_within_the_grace_period_is_stored() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(10)));
    let outbox = builder(&store).on(handler).build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let waiting = publish_for_relays(&outbox, &Ticked { n: 2 }).await;
    let relay = outbox.relay().concurrency(1).start().await.unwrap();
    runs.recv().await.unwrap();

    let began = Instant::now();
    relay.shutdown(GRACE).await.unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(11),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(
        outbox.find(id).await.unwrap().unwrap().state,
        EventState::Processed
    );
    let waiting = outbox.find(waiting).await.unwrap().unwrap();
    assert_eq!((waiting.state, waiting.attempts), (EventState::Pending, 0));
}

#[tokio::test(start_paused = true)]
async fn p14_leases_are_renewed_until_the_last_handler_has_ended() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(9)));
    let outbox = builder(&store)
        .on(handler)
        .lease(Duration::from_secs(10))
        .handler_timeout(Duration::from_secs(10))
        .build()
        .unwrap();
    let (other, mut other_runs) = scripted(|_| Step::Return(Ok(())));
    let elsewhere = builder(&store).on(other).build().unwrap();
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let relay = outbox.relay().start().await.unwrap();
    runs.recv().await.unwrap();
    let _elsewhere = elsewhere.relay().start().await.unwrap();

    relay.shutdown(GRACE).await.unwrap();
    assert!(store.calls(Operation::Renew) >= 2);
    assert_eq!(outbox.counters().processed, 1);
    assert!(other_runs.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn p14_what_does_not_end_within_the_grace_period_goes_back_uncharged() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Hang);
    let outbox = builder(&store)
        .on(handler)
        .lease(Duration::from_secs(60))
        .handler_timeout(Duration::from_secs(60))
        .build()
        .unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let relay = outbox.relay().start().await.unwrap();
    let run = runs.recv().await.unwrap();

    let began = Instant::now();
    relay.shutdown(GRACE).await.unwrap();
    assert!(began.elapsed() <= GRACE);
    assert!(run.delivery.cancelled().is_cancelled());
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Pending, 0));
    assert_eq!(record.lease_token, None);
}

#[tokio::test(start_paused = true)]
async fn p14_a_shutdown_without_a_database_names_what_is_not_stored() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(1)));
    let outbox = builder(&store).on(handler).build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let relay = outbox.relay().start().await.unwrap();
    runs.recv().await.unwrap();

    store.unreachable(true);
    let began = Instant::now();
    let error = relay.shutdown(GRACE).await.unwrap_err();
    assert_eq!(error.unsettled(), [id.row()]);
    assert!(
        began.elapsed() <= GRACE + Duration::from_millis(10),
        "{:?}",
        began.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn p14_a_shutdown_gives_back_what_waits_for_inline_dispatch() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(2)));
    let outbox = builder(&store)
        .on(handler)
        .inline_concurrency(1)
        .build()
        .unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let first = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    let second = tx.publish(&Ticked { n: 2 }).await.unwrap().event_id();
    let dispatching = tx.commit().await.unwrap();
    runs.recv().await.unwrap();

    outbox.shutdown(GRACE).await.unwrap();
    dispatching.settled().await;
    assert_eq!(
        outbox.find(first).await.unwrap().unwrap().state,
        EventState::Processed
    );
    let second = outbox.find(second).await.unwrap().unwrap();
    assert_eq!((second.state, second.attempts), (EventState::Pending, 0));
}

#[tokio::test(start_paused = true)]
async fn after_a_shutdown_events_are_published_for_others_and_a_second_one_is_harmless() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    outbox.begin().await.unwrap().rollback().await.unwrap();
    outbox.shutdown(GRACE).await.unwrap();
    outbox.shutdown(GRACE).await.unwrap();

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
async fn p14_a_transaction_that_commits_after_the_shutdown_gives_its_events_back_uncharged() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    outbox.shutdown(GRACE).await.unwrap();

    tx.commit().await.unwrap().settled().await;
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Pending, 0));
    assert!(runs.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn p6_a_release_whose_answer_was_lost_takes_back_one_attempt_and_not_two() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|run| match run.delivery.attempt().get() {
        1 => Step::Return(Err(HandlerError::retry_after(Duration::ZERO, "first"))),
        _ => Step::Hang,
    });
    let outbox = builder(&store).on(handler).build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let relay = outbox.relay().start().await.unwrap();
    runs.recv().await.unwrap();
    runs.recv().await.unwrap();
    store.lose_answers(Operation::Release, 1);

    relay.shutdown(GRACE).await.unwrap();
    assert_eq!(store.calls(Operation::Release), 2);
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!((record.attempts, record.lease_token), (1, None));
}

#[tokio::test(start_paused = true)]
async fn p14_a_claim_in_flight_is_given_back_before_a_shutdown_returns() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(5)));
    let outbox = builder(&store).on(handler).build().unwrap();
    let hold = store.hold(Operation::Claim);
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let relay = outbox.relay().start().await.unwrap();
    hold.arrived(1).await;
    let shutdown = tokio::spawn(relay.shutdown(GRACE));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!shutdown.is_finished());
    drop(hold);
    shutdown.await.unwrap().unwrap();
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Pending, 0));
    assert!(runs.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn p14_a_verification_that_is_not_answered_in_time_is_an_error_and_starts_nothing_later() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(1)));
    let outbox = builder(&store).on(handler).build().unwrap();
    let hold = store.hold(Operation::Verify);
    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 1 }).await.unwrap();
    tx.commit().await.unwrap();
    hold.arrived(1).await;
    let error = outbox.shutdown(Duration::from_secs(5)).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "the shutdown's grace period ended before the database had answered"
    );
    drop(hold);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(runs.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn p14_after_a_failed_shutdown_the_leases_end() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(1)));
    let outbox = builder(&store).on(handler).build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let relay = outbox.relay().start().await.unwrap();
    runs.recv().await.unwrap();
    store.fail_next(Operation::Settle, StoreErrorKind::Unreachable, 1_000_000);
    let error = relay.shutdown(GRACE).await.unwrap_err();
    assert_eq!(error.unsettled(), [id.row()]);
    tokio::time::sleep(Duration::from_secs(300)).await;
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(record.state, EventState::Pending);
}

#[tokio::test(start_paused = true)]
async fn p14_a_shutdown_names_what_it_could_not_give_back() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(1)));
    let outbox = builder(&store)
        .on(handler)
        .inline_concurrency(1)
        .build()
        .unwrap();
    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 1 }).await.unwrap();
    let second = tx.publish(&Ticked { n: 2 }).await.unwrap().event_id();
    tx.commit().await.unwrap();
    runs.recv().await.unwrap();
    store.fail_next(Operation::Release, StoreErrorKind::Unreachable, 1_000_000);
    let error = outbox.shutdown(GRACE).await.unwrap_err();
    assert!(error.unsettled().contains(&second.row()), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn p14_a_second_shorter_shutdown_keeps_the_first_ones_deadline() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(10)));
    let outbox = builder(&store).on(handler).build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let relay = outbox.relay().start().await.unwrap();
    runs.recv().await.unwrap();
    let first = tokio::spawn(relay.shutdown(GRACE));
    tokio::task::yield_now().await;
    let _ = outbox.shutdown(Duration::from_secs(1)).await;
    first.await.unwrap().unwrap();
    assert_eq!(
        outbox.find(id).await.unwrap().unwrap().state,
        EventState::Processed
    );
}

#[tokio::test(start_paused = true)]
async fn a_grace_period_without_end_is_no_mistake() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(10)));
    let outbox = builder(&store).on(handler).build().unwrap();
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let relay = outbox.relay().start().await.unwrap();
    runs.recv().await.unwrap();
    relay.shutdown(Duration::MAX).await.unwrap();
    assert_eq!(outbox.counters().processed, 1);
}
