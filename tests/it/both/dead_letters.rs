//! Dead letters, as operators work on them: one, or two at once, while relays run.

use std::collections::BTreeSet;
use std::time::Duration;

use outbox_core::{
    Changed, DeadLetterFilter, EventId, EventState, HandlerError, Outbox, Published, Requeue,
    SettledResult, Store as _,
};
use tokio::sync::mpsc;

use super::{Database, on_both_databases};
use crate::events::{OrderPaid, Step, Ticked, publish_for_relays, scripted, settled};

on_both_databases! {
    p9_a_dead_letter_is_listed_read_requeued_and_handled
    p9_a_dead_letter_keeps_its_last_ten_attempts_over_a_requeue
    two_operators_who_requeue_the_same_thousand_requeue_each_once
    a_running_event_cannot_be_discarded
    p17_dead_letters_are_purged_by_age_while_relays_run
    a_discarded_dead_letter_keeps_its_key_until_its_time
    a_retention_shorter_than_the_lease_loses_nothing
    statistics_count_what_there_is
}

/// Publishes `n` events that end as dead letters.
async fn buried<D: Database>(db: &D, n: u64) -> Vec<EventId> {
    let (handler, _runs) = scripted(|_| Step::Return(Err(HandlerError::permanent("gateway down"))));
    let (builder, mut outcomes) = settled(db.outbox().on(handler));
    let outbox = builder.build().unwrap();
    let mut tx = outbox.store().begin().await.unwrap();
    let events: Vec<Ticked> = (0..n).map(|n| Ticked { n }).collect();
    let published = outbox.publish_all(&mut tx, &events).await.unwrap();
    outbox.store().commit(tx).await.unwrap();
    let relay = outbox.relay().concurrency(100).start().await.unwrap();
    for _ in 0..n {
        outcomes.recv().await.unwrap();
    }
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    published.iter().map(Published::event_id).collect()
}

async fn p9_a_dead_letter_is_listed_read_requeued_and_handled<D: Database>(db: &D) {
    let ids = buried(db, 3).await;
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let (builder, mut outcomes) = settled(db.outbox().on(handler));
    let outbox = builder.build().unwrap();
    let relay = outbox.relay().start().await.unwrap();
    let letters = outbox.dead_letters();

    let filter = DeadLetterFilter::all().error_contains("gateway");
    let page = letters.list(&filter, None, 2).await.unwrap();
    let listed: Vec<EventId> = page.letters.iter().map(|letter| letter.id).collect();
    assert_eq!(listed, [ids[2], ids[1]]);
    let last = letters.list(&filter, page.next, 2).await.unwrap();
    assert_eq!(last.letters[0].id, ids[0]);
    assert!(last.next.is_none());
    let nul = DeadLetterFilter::all().error_contains("gate\0way");
    assert!(
        letters
            .list(&nul, None, 9)
            .await
            .unwrap()
            .letters
            .is_empty()
    );
    let nobody = DeadLetterFilter::all().error_contains("Gateway");
    assert!(
        letters
            .list(&nobody, None, 9)
            .await
            .unwrap()
            .letters
            .is_empty()
    );
    let record = letters.get(ids[1]).await.unwrap().unwrap();
    assert_eq!(record.payload, r#"{"n":1}"#);

    assert_eq!(letters.requeue(ids[1]).await.unwrap(), Changed::Done);
    let run = runs.recv().await.unwrap();
    assert_eq!((run.n, run.delivery.attempt().get()), (1, 1));
    assert_eq!(
        outcomes.recv().await.unwrap().result,
        SettledResult::Processed
    );
    let processed = Changed::NotDead(EventState::Processed);
    assert_eq!(letters.requeue(ids[1]).await.unwrap(), processed);
    assert_eq!(letters.get(ids[1]).await.unwrap(), None);
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
}

async fn p9_a_dead_letter_keeps_its_last_ten_attempts_over_a_requeue<D: Database>(db: &D) {
    let ids = buried(db, 1).await;
    let (handler, _runs) = scripted(|run| {
        let error = format!("failure {}", run.delivery.attempt());
        Step::Return(Err(HandlerError::retry_after(Duration::ZERO, error)))
    });
    let (builder, mut outcomes) = settled(db.outbox().on(handler));
    let outbox = builder.build().unwrap();
    let relay = outbox.relay().start().await.unwrap();
    let letters = outbox.dead_letters();
    assert_eq!(letters.requeue(ids[0]).await.unwrap(), Changed::Done);
    for _ in 0..10 {
        outcomes.recv().await.unwrap();
    }
    let record = letters.get(ids[0]).await.unwrap().unwrap();
    assert_eq!(record.attempts, 10, "a fresh budget");
    let errors: Vec<String> = record.failures.iter().map(|f| f.error.clone()).collect();
    let expected: Vec<String> = (1..=10).map(|n| format!("failure {n}")).collect();
    assert_eq!(errors, expected);
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
}

async fn two_operators_who_requeue_the_same_thousand_requeue_each_once<D: Database>(db: &D) {
    let ids = buried(db, 1_000).await;
    let operators: Vec<Outbox<D::Store>> = (0..2).map(|_| db.outbox().build().unwrap()).collect();
    let filter = DeadLetterFilter::all();
    let (a, b) = (operators[0].dead_letters(), operators[1].dead_letters());
    let (by_a, by_b) = tokio::join!(
        a.requeue_all(&filter, Requeue::at_once()),
        b.requeue_all(&filter, Requeue::at_once()),
    );
    assert_eq!(by_a.unwrap() + by_b.unwrap(), 1_000);
    assert_eq!(db.summary().await, [("pending".to_owned(), 1_000)]);

    let (done, mut handled) = mpsc::unbounded_channel();
    let outbox = db
        .outbox()
        .on(move |event: Ticked| {
            let _ = done.send(event.n);
            async { Ok::<_, HandlerError>(()) }
        })
        .build()
        .unwrap();
    let relay = outbox.relay().concurrency(100).start().await.unwrap();
    let mut seen = BTreeSet::new();
    for _ in &ids {
        assert!(
            seen.insert(handled.recv().await.unwrap()),
            "an event ran twice"
        );
    }
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    assert!(handled.try_recv().is_err());
}

async fn a_running_event_cannot_be_discarded<D: Database>(db: &D) {
    let ids = buried(db, 1).await;
    let (began, mut begun) = mpsc::unbounded_channel();
    let (finish, finished) = tokio::sync::watch::channel(false);
    let (builder, mut outcomes) = settled(db.outbox().on(move |_: Ticked| {
        let _ = began.send(());
        let mut finished = finished.clone();
        async move {
            let _ = finished.wait_for(|finished| *finished).await;
            Ok::<_, HandlerError>(())
        }
    }));
    let outbox = builder.build().unwrap();
    let relay = outbox.relay().start().await.unwrap();
    let letters = outbox.dead_letters();
    assert_eq!(letters.requeue(ids[0]).await.unwrap(), Changed::Done);
    begun.recv().await.unwrap();
    let running = Changed::NotDead(EventState::InProgress);
    assert_eq!(letters.discard(ids[0]).await.unwrap(), running);
    assert_eq!(
        letters.discard_all(&DeadLetterFilter::all()).await.unwrap(),
        0
    );
    finish.send(true).unwrap();
    assert_eq!(
        outcomes.recv().await.unwrap().result,
        SettledResult::Processed
    );
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
}

async fn p17_dead_letters_are_purged_by_age_while_relays_run<D: Database>(db: &D) {
    let old = buried(db, 20).await;
    for id in &old {
        db.age_dead_letter(id.row()).await;
    }
    let young = buried(db, 1).await;
    let (done, mut handled) = mpsc::unbounded_channel();
    let outbox = db
        .outbox()
        .on(move |event: Ticked| {
            let _ = done.send(event.n);
            async { Ok::<_, HandlerError>(()) }
        })
        .build()
        .unwrap();
    let relay = outbox.relay().start().await.unwrap();
    let publishing = async {
        for n in 0..100 {
            publish_for_relays(&outbox, &Ticked { n: 1_000 + n }).await;
        }
    };
    let letters = outbox.dead_letters();
    let (purged, ()) = tokio::join!(letters.purge(Duration::from_secs(3_600)), publishing);
    assert_eq!(purged.unwrap(), 20);
    for _ in 0..100 {
        assert!(handled.recv().await.unwrap() >= 1_000);
    }
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    let record = outbox.find(young[0]).await.unwrap().unwrap();
    assert_eq!(record.state, EventState::DeadLetter);
}

async fn a_discarded_dead_letter_keeps_its_key_until_its_time<D: Database>(db: &D) {
    let (builder, mut outcomes) =
        settled(db.outbox().on(|_: OrderPaid| async {
            Err::<String, _>(HandlerError::permanent("no such user"))
        }));
    let outbox = builder.build().unwrap();
    let id = publish_for_relays(&outbox, &OrderPaid { order: 7 }).await;
    let relay = outbox.relay().start().await.unwrap();
    outcomes.recv().await.unwrap();
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    assert_eq!(
        outbox.dead_letters().discard(id).await.unwrap(),
        Changed::Done
    );
    let nothing = Changed::NotDead(EventState::Discarded);
    assert_eq!(outbox.dead_letters().discard(id).await.unwrap(), nothing);

    let mut tx = outbox.store().begin().await.unwrap();
    match outbox
        .publish(&mut tx, &OrderPaid { order: 7 })
        .await
        .unwrap()
    {
        Published::Duplicate(duplicate) => {
            assert_eq!(
                (duplicate.event_id(), duplicate.state()),
                (id, EventState::Discarded)
            );
        }
        published => panic!("{published:?}"),
    }
    outbox.store().rollback(tx).await.unwrap();
    assert_eq!(db.summary().await, [("discarded".to_owned(), 1)]);
}

async fn a_retention_shorter_than_the_lease_loses_nothing<D: Database>(db: &D) {
    let (done, mut handled) = mpsc::unbounded_channel();
    let (builder, mut outcomes) = settled(
        db.outbox()
            .lease(Duration::from_secs(60))
            .retention(Duration::from_micros(1))
            .dedup_retention(Duration::ZERO)
            .on(move |event: OrderPaid| {
                let _ = done.send(event.order);
                async move { Ok::<_, HandlerError>(event.order.to_string()) }
            }),
    );
    let outbox = builder.build().unwrap();
    let relay = outbox
        .relay()
        .sweep_interval(Duration::from_millis(100))
        .start()
        .await
        .unwrap();
    for order in 0..50 {
        publish_for_relays(&outbox, &OrderPaid { order }).await;
    }
    let mut seen = BTreeSet::new();
    for _ in 0..50 {
        assert!(seen.insert(handled.recv().await.unwrap()));
        let outcome = outcomes.recv().await.unwrap();
        assert_eq!(outcome.result, SettledResult::Processed);
    }
    relay.pass(outbox_core::Cadence::Maintenance).await.unwrap();
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    assert_eq!(db.summary().await, []);
}

async fn statistics_count_what_there_is<D: Database>(db: &D) {
    buried(db, 2).await;
    let outbox = db
        .outbox()
        .on(|_: OrderPaid| async { Ok::<_, HandlerError>(String::new()) })
        .build()
        .unwrap();
    publish_for_relays(&outbox, &OrderPaid { order: 7 }).await;
    publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let stats = outbox.stats().await.unwrap();
    assert!(stats.exact);
    assert_eq!((stats.total().due, stats.total().dead), (2, 2));
    assert_eq!(stats.events["ticked"].dead, 2);
    assert_eq!(stats.unhandled, ["ticked"]);
    assert!(stats.oldest_due.unwrap() < Duration::from_secs(60));
}
