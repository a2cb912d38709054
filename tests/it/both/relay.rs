//! The relay, on one instance and on several.

use std::collections::BTreeMap;
use std::time::Duration;

use outbox_core::store::LEASE_ENDED;
use outbox_core::{DeadReason, EventState, HandlerError, Published, SettledResult, Store};
use tokio::sync::{mpsc, watch};

use super::{Database, on_both_databases};
use crate::events::{OrderPaid, Step, Ticked, Unhandled, publish_for_relays, scripted, settled};

on_both_databases! {
    p4_two_relays_share_a_backlog_and_run_every_event_once
    p5_p6_a_stale_holder_cannot_settle_and_the_takeover_is_attempt_2
    p7_a_crash_on_the_last_attempt_is_a_dead_letter
    p8_p9_a_failing_event_is_retried_and_then_kept_as_a_dead_letter
    p12_what_nobody_here_handles_waits_and_what_does_not_decode_is_dead
    p14_a_shutdown_stores_what_ended_and_gives_back_the_rest
    p15_a_relay_finds_everything_by_polling_alone
    p18_an_output_of_ten_megabytes_harms_nobody
    a_relay_is_woken_by_a_commit_of_the_outbox
}

async fn publish_many<D: Database>(db: &D, n: u64) -> Vec<outbox_core::EventId> {
    let outbox = db.outbox().build().unwrap();
    let mut tx = outbox.store().begin().await.unwrap();
    let events: Vec<Ticked> = (0..n).map(|n| Ticked { n }).collect();
    let published = outbox.publish_all(&mut tx, &events).await.unwrap();
    outbox.store().commit(tx).await.unwrap();
    published.iter().map(Published::event_id).collect()
}

async fn p4_two_relays_share_a_backlog_and_run_every_event_once<D: Database>(db: &D) {
    publish_many(db, 1_000).await;
    let (send, mut handled) = mpsc::unbounded_channel();
    let mut outboxes = Vec::new();
    for instance in ["a", "b"] {
        let send = send.clone();
        let outbox = db
            .outbox()
            .instance(instance)
            .on(move |event: Ticked| {
                let _ = send.send((event.n, instance));
                async { Ok::<_, HandlerError>(()) }
            })
            .build()
            .unwrap();
        outboxes.push((outbox.relay().batch(50).start().await.unwrap(), outbox));
    }
    let mut runs: BTreeMap<u64, u32> = BTreeMap::new();
    for _ in 0..1_000 {
        let (n, _) = handled.recv().await.unwrap();
        *runs.entry(n).or_default() += 1;
    }
    for (relay, _) in outboxes {
        relay.shutdown(Duration::from_secs(20)).await.unwrap();
    }
    assert!(handled.try_recv().is_err(), "an event ran twice");
    assert_eq!(runs.len(), 1_000);
    assert_eq!(db.summary().await, [("processed".to_owned(), 1_000)]);
}

async fn p5_p6_a_stale_holder_cannot_settle_and_the_takeover_is_attempt_2<D: Database>(db: &D) {
    // A minute's lease, so that nothing is renewed while the test looks.
    let (began, mut begun) = mpsc::unbounded_channel();
    let (wake, awake) = watch::channel(false);
    let stuck = move |_: Ticked| {
        let _ = began.send(());
        let mut awake = awake.clone();
        async move {
            let _ = awake.wait_for(|awake| *awake).await;
            Ok::<_, HandlerError>(())
        }
    };
    let stalled = db
        .outbox()
        .on(stuck)
        .instance("stalled")
        .inline_lease(Duration::from_secs(60))
        .build()
        .unwrap();
    // Dispatched inline, because a relay could claim the event once more before it has stopped.
    let mut tx = stalled.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    tx.commit().await.unwrap();
    begun.recv().await.unwrap();

    db.expire_lease(id.row()).await;
    let (next, mut next_runs) = scripted(|_| Step::Return(Err(HandlerError::permanent("no"))));
    let (builder, mut outcomes) = settled(db.outbox().on(next).instance("next"));
    let next = builder.build().unwrap();
    let _relay = next.relay().start().await.unwrap();
    let run = next_runs.recv().await.unwrap();
    assert_eq!(run.delivery.attempt().get(), 2);
    assert_eq!(run.delivery.event_id(), id);
    outcomes.recv().await.unwrap();

    // The first one's success comes too late, and is refused.
    wake.send(true).unwrap();
    stalled.shutdown(Duration::from_secs(20)).await.unwrap();
    assert_eq!(stalled.counters().lease_lost, 1);
    assert_eq!(stalled.counters().processed, 0);
    let record = next.find(id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::DeadLetter, 2));
    let failures: Vec<(u32, &str, &str)> = record
        .failures
        .iter()
        .map(|f| (f.attempt, f.instance.as_str(), f.error.as_str()))
        .collect();
    assert_eq!(failures, [(1, "stalled", LEASE_ENDED), (2, "next", "no")]);
}

async fn p7_a_crash_on_the_last_attempt_is_a_dead_letter<D: Database>(db: &D) {
    let (stuck, mut stuck_runs) = scripted(|_| Step::Hang);
    let crashed = db
        .outbox()
        .on(stuck)
        .max_attempts(1)
        .instance("crashed")
        .build()
        .unwrap();
    let id = publish_for_relays(&crashed, &Ticked { n: 1 }).await;
    let relay = crashed.relay().start().await.unwrap();
    stuck_runs.recv().await.unwrap();
    drop((relay, crashed));
    db.expire_lease(id.row()).await;

    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let (builder, mut outcomes) = settled(db.outbox().on(handler).instance("next"));
    let next = builder.build().unwrap();
    let _relay = next
        .relay()
        .sweep_interval(Duration::from_millis(100))
        .start()
        .await
        .unwrap();
    let outcome = outcomes.recv().await.unwrap();
    let error = LEASE_ENDED.to_owned();
    let reason = DeadReason::LeaseExpired;
    assert_eq!(outcome.result, SettledResult::DeadLetter { reason, error });
    assert!(runs.try_recv().is_err());
    let record = next.find(id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::DeadLetter, 1));
    assert_eq!(record.failures.len(), 1);
    assert_eq!(record.failures[0].instance, "crashed");
}

async fn p8_p9_a_failing_event_is_retried_and_then_kept_as_a_dead_letter<D: Database>(db: &D) {
    let (handler, mut runs) = scripted(|run| {
        Step::Return(Err(HandlerError::retry(format!(
            "attempt {}",
            run.delivery.attempt()
        ))))
    });
    let (builder, mut outcomes) = settled(db.outbox().on(handler).max_attempts(3));
    let outbox = builder.build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let _relay = outbox.relay().start().await.unwrap();
    for (attempt, longest) in [(1, 30), (2, 60)] {
        let outcome = outcomes.recv().await.unwrap();
        let SettledResult::Retry { after, .. } = outcome.result else {
            panic!("{outcome:?}")
        };
        let longest = Duration::from_secs(longest);
        assert!(
            after <= longest && after >= longest.mul_f64(0.8),
            "attempt {attempt}: {after:?}"
        );
        let waiting = outbox.find(id).await.unwrap().unwrap();
        assert_eq!(
            (waiting.state, waiting.attempts),
            (EventState::Failed, attempt)
        );
        db.make_due(id.row()).await;
        outbox.wake();
    }
    let last = outcomes.recv().await.unwrap();
    let error = "attempt 3".to_owned();
    let reason = DeadReason::AttemptsExhausted;
    assert_eq!(last.result, SettledResult::DeadLetter { reason, error });

    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(record.payload, r#"{"n":1}"#);
    assert_eq!(record.dead_reason, Some(reason));
    let errors: Vec<&str> = record.failures.iter().map(|f| f.error.as_str()).collect();
    assert_eq!(errors, ["attempt 1", "attempt 2", "attempt 3"]);
    let mut ids = Vec::new();
    while let Ok(run) = runs.try_recv() {
        ids.push(run.delivery.event_id());
    }
    assert_eq!(ids, [id; 3]);
}

async fn p12_what_nobody_here_handles_waits_and_what_does_not_decode_is_dead<D: Database>(db: &D) {
    let (handler, _runs) = scripted(|_| Step::Return(Ok(())));
    let (builder, mut outcomes) = settled(db.outbox().on(handler));
    let outbox = builder.build().unwrap();
    let unknown = publish_for_relays(&outbox, &Unhandled).await;
    let ids = publish_many(db, 5).await;
    db.execute(D::BREAK_PAYLOAD, ids[2].row()).await;
    let _relay = outbox
        .relay()
        .sweep_interval(Duration::from_millis(100))
        .start()
        .await
        .unwrap();
    for _ in 0..5 {
        outcomes.recv().await.unwrap();
    }
    let broken = outbox.find(ids[2]).await.unwrap().unwrap();
    assert_eq!(broken.dead_reason, Some(DeadReason::Undecodable));
    assert!(
        broken
            .last_error
            .unwrap()
            .starts_with("the payload of version 1 cannot be decoded")
    );
    let unknown = outbox.find(unknown).await.unwrap().unwrap();
    assert_eq!((unknown.state, unknown.attempts), (EventState::Pending, 0));
    assert_eq!(
        db.summary().await,
        [
            ("dead_letter".to_owned(), 1),
            ("pending".to_owned(), 1),
            ("processed".to_owned(), 4)
        ]
    );
}

async fn p14_a_shutdown_stores_what_ended_and_gives_back_the_rest<D: Database>(db: &D) {
    let (handler, mut runs) = scripted(|run| match run.n {
        0 => Step::Take(Duration::from_millis(300)),
        _ => Step::Hang,
    });
    let outbox = db.outbox().on(handler).build().unwrap();
    let ids = publish_many(db, 2).await;
    let relay = outbox.relay().start().await.unwrap();
    runs.recv().await.unwrap();
    runs.recv().await.unwrap();
    relay.shutdown(Duration::from_secs(2)).await.unwrap();

    // From another process, since this one has ended: nothing waits for a lease.
    let other = db.outbox().build().unwrap();
    let ended = other.find(ids[0]).await.unwrap().unwrap();
    assert_eq!(ended.state, EventState::Processed);
    let interrupted = other.find(ids[1]).await.unwrap().unwrap();
    assert_eq!(
        (interrupted.state, interrupted.attempts),
        (EventState::Pending, 0)
    );
    assert_eq!(interrupted.lease_token, None);
}

async fn p15_a_relay_finds_everything_by_polling_alone<D: Database>(db: &D) {
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = db
        .outbox()
        .on(handler)
        .without_notifications()
        .build()
        .unwrap();
    let _relay = outbox.relay().start().await.unwrap();
    let ids = publish_many(db, 3).await;
    for _ in ids {
        runs.recv().await.unwrap();
    }
}

async fn p18_an_output_of_ten_megabytes_harms_nobody<D: Database>(db: &D) {
    let (builder, mut outcomes) = settled(db.outbox().on(|event: OrderPaid| async move {
        match event.order {
            0 => Ok("x".repeat(10_000_000)),
            1 => Ok("nul \0 inside".to_owned()),
            2 => Err(HandlerError::permanent("é\0".repeat(5_000_000))),
            n => Ok(n.to_string()),
        }
    }));
    let outbox = builder.build().unwrap();
    let mut tx = outbox.store().begin().await.unwrap();
    let events: Vec<OrderPaid> = (0..100).map(|order| OrderPaid { order }).collect();
    let published = outbox.publish_all(&mut tx, &events).await.unwrap();
    outbox.store().commit(tx).await.unwrap();
    let _relay = outbox.relay().concurrency(100).start().await.unwrap();
    for _ in 0..100 {
        outcomes.recv().await.unwrap();
    }
    let mut records = Vec::new();
    for published in &published[..4] {
        records.push(outbox.find(published.event_id()).await.unwrap().unwrap());
    }
    assert_eq!(
        (records[0].state, &records[0].output),
        (EventState::Processed, &None)
    );
    let nul: String = serde_json::from_str(records[1].output.as_deref().unwrap()).unwrap();
    assert_eq!(nul, "nul \0 inside");
    let error = records[2].last_error.as_deref().unwrap();
    assert!(
        error.len() <= 2_000 && error.starts_with("é\u{fffd}é"),
        "{}",
        error.len()
    );
    assert_eq!(records[3].output.as_deref(), Some("\"3\""));
}

async fn a_relay_is_woken_by_a_commit_of_the_outbox<D: Database>(db: &D) {
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = db
        .outbox()
        .on(handler)
        .without_inline_dispatch()
        .build()
        .unwrap();
    let _relay = outbox
        .relay()
        .poll_interval(Duration::from_secs(3_600))
        .start()
        .await
        .unwrap();
    for n in 0..5 {
        let mut tx = outbox.begin().await.unwrap();
        tx.publish(&Ticked { n }).await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(runs.recv().await.unwrap().n, n);
    }
}
