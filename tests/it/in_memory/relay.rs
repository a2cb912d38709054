//! The relay's loop: what it claims, when, and what it does with results.

use std::time::Duration;

use outbox_core::store::LEASE_ENDED;
use outbox_core::testing::{MemoryStore, Operation};
use outbox_core::{
    DeadReason, EventState, HandlerError, RelayError, SettledResult, StoreErrorKind,
};
use tokio::time::Instant;

use super::builder;
use crate::events::{OrderPaid, Step, Ticked, Unhandled, publish_for_relays, scripted, settled};

#[tokio::test(start_paused = true)]
async fn p8_p9_an_event_that_always_fails_backs_off_and_ends_as_a_dead_letter() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|run| {
        Step::Return(Err(HandlerError::retry(format!(
            "attempt {}",
            run.delivery.attempt()
        ))))
    });
    let (builder, mut outcomes) = settled(builder(&store).on(handler).max_attempts(4));
    let no_jitter =
        outbox_core::Backoff::new(Duration::from_secs(30), Duration::from_secs(1_800), 0.0)
            .unwrap();
    let outbox = builder.backoff(no_jitter).build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let _relay = outbox.relay().start().await.unwrap();

    let mut started = Vec::new();
    for _ in 0..4 {
        let run = runs.recv().await.unwrap();
        assert_eq!(run.delivery.event_id(), id);
        assert_eq!(run.delivery.max_attempts().get(), 4);
        started.push(Instant::now());
    }
    let waits: Vec<u64> = started
        .windows(2)
        .map(|w| (w[1] - w[0]).as_secs())
        .collect();
    // The poll finds it up to a second after it is due.
    for (wait, expected) in waits.iter().zip([30, 60, 120]) {
        assert!((expected..=expected + 1).contains(wait), "{waits:?}");
    }
    for attempt in 1..=3 {
        let outcome = outcomes.recv().await.unwrap();
        assert_eq!(outcome.attempt, attempt);
        assert!(matches!(outcome.result, SettledResult::Retry { .. }));
    }
    let last = outcomes.recv().await.unwrap();
    let error = "attempt 4".to_owned();
    let reason = DeadReason::AttemptsExhausted;
    assert_eq!(last.result, SettledResult::DeadLetter { reason, error });

    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(record.state, EventState::DeadLetter);
    assert_eq!(record.dead_reason, Some(DeadReason::AttemptsExhausted));
    assert_eq!(record.last_error.as_deref(), Some("attempt 4"));
    let errors: Vec<&str> = record.failures.iter().map(|f| f.error.as_str()).collect();
    assert_eq!(errors, ["attempt 1", "attempt 2", "attempt 3", "attempt 4"]);
}

#[tokio::test(start_paused = true)]
async fn p11_a_panic_and_a_timeout_are_failed_attempts_of_that_event_alone() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|run| match (run.n, run.delivery.attempt().get()) {
        (1, 1) => Step::Panic,
        (2, 1) => Step::Hang,
        _ => Step::Return(Ok(())),
    });
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder.build().unwrap();
    for n in 1..=3 {
        publish_for_relays(&outbox, &Ticked { n }).await;
    }
    let _relay = outbox.relay().start().await.unwrap();

    let mut processed = 0;
    let mut errors = Vec::new();
    while processed < 3 {
        match outcomes.recv().await.unwrap().result {
            SettledResult::Processed => processed += 1,
            SettledResult::Retry { error, .. } => errors.push(error),
            other => panic!("{other:?}"),
        }
    }
    errors.sort_unstable();
    assert_eq!(
        errors,
        [
            "the handler overran its timeout of 30s",
            "the handler panicked: as asked"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn p12_an_event_of_an_unknown_type_waits_uncharged() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let unknown = publish_for_relays(&outbox, &Unhandled).await;
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let _relay = outbox
        .relay()
        .sweep_interval(Duration::from_secs(1))
        .start()
        .await
        .unwrap();
    runs.recv().await.unwrap();
    store.wait_for_calls(Operation::Sweep, 3).await;

    let record = outbox.find(unknown).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Pending, 0));
}

#[tokio::test(start_paused = true)]
async fn p12_a_payload_that_does_not_decode_is_a_dead_letter_at_once() {
    let store = MemoryStore::new();
    // The stored payload is an object with `n`; this handler's event of the same name has `order`.
    let publisher = builder(&store).build().unwrap();
    let outbox = builder(&store)
        .on(|event: OrderPaid| async move { Ok::<_, HandlerError>(event.order.to_string()) })
        .build()
        .unwrap();
    #[derive(serde::Serialize, serde::Deserialize)]
    struct OtherShape {
        n: u64,
    }
    impl outbox_core::OutboxEvent for OtherShape {
        type Output = ();
        const NAME: &'static str = "order.paid";
    }
    let bad = publish_for_relays(&publisher, &OtherShape { n: 1 }).await;
    let good = publish_for_relays(&publisher, &OrderPaid { order: 1 }).await;
    let _relay = outbox.relay().start().await.unwrap();
    store.wait_for_calls(Operation::Settle, 1).await;

    let record = outbox.find(bad).await.unwrap().unwrap();
    assert_eq!(record.dead_reason, Some(DeadReason::Undecodable));
    assert!(record.last_error.unwrap().contains("missing field `order`"));
    assert_eq!(
        outbox.find(good).await.unwrap().unwrap().state,
        EventState::Processed
    );
}

#[tokio::test(start_paused = true)]
async fn p7_a_lease_that_ended_with_no_attempt_left_is_a_dead_letter_after_a_sweep() {
    let store = MemoryStore::new();
    let (crashing, mut crashed) = scripted(|_| Step::Hang);
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let first = builder(&store)
        .on(crashing)
        .max_attempts(1)
        .instance("first")
        .build()
        .unwrap();
    let id = publish_for_relays(&first, &Ticked { n: 1 }).await;
    let relay = first.relay().start().await.unwrap();
    crashed.recv().await.unwrap();
    // The process is gone: nothing renews, nothing settles.
    drop((relay, first));
    store.expire_lease(id.row());

    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let second = builder.build().unwrap();
    let _relay = second
        .relay()
        .sweep_interval(Duration::from_secs(300))
        .start()
        .await
        .unwrap();

    let outcome = outcomes.recv().await.unwrap();
    let error = LEASE_ENDED.to_owned();
    let reason = DeadReason::LeaseExpired;
    assert_eq!(outcome.result, SettledResult::DeadLetter { reason, error });
    let record = second.find(id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::DeadLetter, 1));
}

#[tokio::test(start_paused = true)]
async fn p16_no_more_handlers_run_at_once_than_allowed() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Take(Duration::from_secs(1)));
    let (builder, mut outcomes) = settled(builder(&store).on(handler));
    let outbox = builder.build().unwrap();
    for n in 0..12 {
        publish_for_relays(&outbox, &Ticked { n }).await;
    }
    let began = Instant::now();
    let _relay = outbox.relay().concurrency(4).start().await.unwrap();
    for _ in 0..12 {
        outcomes.recv().await.unwrap();
    }
    assert!(
        began.elapsed() >= Duration::from_secs(3),
        "{:?}",
        began.elapsed()
    );
    let mut started = 0;
    while runs.try_recv().is_ok() {
        started += 1;
    }
    assert_eq!(started, 12);
}

#[tokio::test(start_paused = true)]
async fn p15_everything_arrives_by_polling_alone() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store)
        .on(handler)
        .without_notifications()
        .build()
        .unwrap();
    let publisher = builder(&store).build().unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    store.wait_for_calls(Operation::Claim, 10).await;

    let published = Instant::now();
    publish_for_relays(&publisher, &Ticked { n: 1 }).await;
    runs.recv().await.unwrap();
    assert!(
        published.elapsed() <= Duration::from_secs(1),
        "{:?}",
        published.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn an_idle_relay_claims_once_a_second() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    store.wait_for_calls(Operation::Claim, 10).await;

    let before = store.calls(Operation::Claim);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let claims = store.calls(Operation::Claim) - before;
    assert!((59..=61).contains(&claims), "{claims}");
}

#[tokio::test(start_paused = true)]
async fn a_wake_up_from_another_process_is_heard() {
    let store = MemoryStore::new().with_wakeups();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let publisher = builder(&store).build().unwrap();
    let _relay = outbox
        .relay()
        .poll_interval(Duration::from_secs(3_600))
        .start()
        .await
        .unwrap();
    store.wait_for_calls(Operation::Claim, 10).await;

    let mut tx = publisher.begin().await.unwrap();
    tx.publish(&Ticked { n: 1 }).await.unwrap();
    let committed = Instant::now();
    tx.commit().await.unwrap();
    runs.recv().await.unwrap();
    assert!(
        committed.elapsed() < Duration::from_millis(10),
        "{:?}",
        committed.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn what_came_while_nobody_listened_is_found_after_listening_again() {
    let store = MemoryStore::new().with_wakeups();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let publisher = builder(&store).build().unwrap();
    let _relay = outbox
        .relay()
        .poll_interval(Duration::from_secs(3_600))
        .start()
        .await
        .unwrap();
    store.wait_for_calls(Operation::Claim, 10).await;

    let listening = store.hold(Operation::Listen);
    store.break_subscriptions();
    listening.arrived(1).await;
    publish_for_relays(&publisher, &Ticked { n: 1 }).await;
    let published = Instant::now();
    drop(listening);
    runs.recv().await.unwrap();
    assert!(
        published.elapsed() < Duration::from_secs(20),
        "{:?}",
        published.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn the_relay_comes_back_after_an_outage_of_any_length() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    store.wait_for_calls(Operation::Claim, 1).await;

    store.unreachable(true);
    tokio::time::sleep(Duration::from_secs(3_600)).await;
    let attempts = store.calls(Operation::Claim);
    store.unreachable(false);
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let back = Instant::now();
    runs.recv().await.unwrap();
    assert!(
        back.elapsed() <= Duration::from_secs(5),
        "{:?}",
        back.elapsed()
    );
    assert!(attempts < 2_000, "{attempts} calls during the outage");
}

#[tokio::test(start_paused = true)]
async fn a_database_that_is_down_at_the_start_does_not_stop_the_relay() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;

    store.unreachable(true);
    let _relay = outbox.relay().start().await.unwrap();
    tokio::time::sleep(Duration::from_secs(15)).await;
    store.unreachable(false);
    runs.recv().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_schema_of_another_release_is_an_error_at_the_start_and_nothing_stops_a_running_relay() {
    let store = MemoryStore::new();
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();

    // Once for the check of the inline dispatch, which starts with it.
    store.fail_next(Operation::Check, StoreErrorKind::SchemaNewer, 2);
    let refused = outbox.relay().start().await.unwrap_err();
    assert!(matches!(refused, RelayError::Store(e) if e.kind() == StoreErrorKind::SchemaNewer));

    // Once it runs, nothing stops it: what is missing may be restored.
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    store.fail_next(Operation::Claim, StoreErrorKind::SchemaMissing, 20);
    store.fail_next(Operation::Claim, StoreErrorKind::Denied, 20);
    let _relay = outbox.relay().start().await.unwrap();
    runs.recv().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_relay_that_cannot_work_does_not_start() {
    let store = MemoryStore::new();
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = builder(&store).on(handler).build().unwrap();
    let text = |error: RelayError| error.to_string();

    let zero = outbox.relay().concurrency(0).start().await.unwrap_err();
    assert_eq!(
        text(zero),
        "`concurrency` cannot be 0: it must be from 1 to 10000"
    );
    let zero = outbox.relay().batch(0).start().await.unwrap_err();
    assert_eq!(
        text(zero),
        "`batch` cannot be 0: it must be from 1 to 10000"
    );
    let zero = outbox
        .relay()
        .poll_interval(Duration::ZERO)
        .start()
        .await
        .unwrap_err();
    assert_eq!(
        text(zero),
        "`poll_interval` cannot be 0ns: it must be from 10ms to 3600s"
    );

    let empty = builder(&store).build().unwrap();
    let nothing = empty.relay().start().await.unwrap_err();
    assert_eq!(
        text(nothing),
        "a relay needs an outbox with at least one handler"
    );

    let relay = outbox.relay().start().await.unwrap();
    let second = outbox.relay().start().await.unwrap_err();
    assert_eq!(text(second), "this outbox has a relay already");
    drop(relay);
    outbox.relay().start().await.unwrap();
}
