//! Passes on several instances, and locks of the application.

use std::collections::BTreeMap;
use std::time::Duration;

use outbox_core::{Cadence, Exclusive, HandlerError, Outbox, Published};
use tokio::sync::{mpsc, oneshot};

use super::{Database, on_both_databases};
use crate::events::{Ticked, publish_for_relays};
use crate::support::eventually;

on_both_databases! {
    an_application_lives_on_the_cadences_of_two_instances
    passes_of_two_instances_at_once_run_every_event_once
    maintenance_on_a_busy_outbox_removes_only_what_is_past_its_retention
    one_instance_runs_and_the_others_stand_down
    a_transaction_waits_for_the_entity_that_another_one_has_locked
}

/// An instance that reports what it handles.
fn instance<D: Database>(
    db: &D,
    name: &'static str,
    handled: &mpsc::UnboundedSender<(u64, &'static str)>,
) -> Outbox<D::Store> {
    let handled = handled.clone();
    db.outbox()
        .instance(name)
        .on(move |event: Ticked| {
            let _ = handled.send((event.n, name));
            async { Ok::<_, HandlerError>(()) }
        })
        .build()
        .unwrap()
}

async fn publish_many<D: Database>(outbox: &Outbox<D::Store>, n: u64) {
    use outbox_core::Store as _;

    let mut tx = outbox.store().begin().await.unwrap();
    let events: Vec<Ticked> = (0..n).map(|n| Ticked { n }).collect();
    let published = outbox.publish_all(&mut tx, &events).await.unwrap();
    outbox.store().commit(tx).await.unwrap();
    assert!(
        published
            .iter()
            .all(|p| matches!(p, Published::Inserted(_)))
    );
}

async fn an_application_lives_on_the_cadences_of_two_instances<D: Database>(db: &D) {
    let (send, mut handled) = mpsc::unbounded_channel();
    let outboxes = ["a", "b"].map(|name| instance(db, name, &send));
    let mut relays = Vec::new();
    for outbox in &outboxes {
        let relay = outbox
            .relay()
            .cadences_only()
            .sweep_interval(Duration::from_millis(200))
            .start();
        relays.push(relay.await.unwrap());
    }
    publish_many::<D>(&outboxes[0], 200).await;
    let mut runs: BTreeMap<u64, u32> = BTreeMap::new();
    for _ in 0..200 {
        *runs.entry(handled.recv().await.unwrap().0).or_default() += 1;
    }
    for relay in relays {
        relay.shutdown(Duration::from_secs(20)).await.unwrap();
    }
    assert!(handled.try_recv().is_err(), "an event ran twice");
    assert_eq!(runs.len(), 200);
    assert!(runs.values().all(|runs| *runs == 1), "{runs:?}");
    assert_eq!(db.summary().await, [("processed".to_owned(), 200)]);
}

async fn passes_of_two_instances_at_once_run_every_event_once<D: Database>(db: &D) {
    let (send, mut handled) = mpsc::unbounded_channel();
    let outboxes = ["a", "b"].map(|name| instance(db, name, &send));
    let mut relays = Vec::new();
    for outbox in &outboxes {
        relays.push(outbox.relay().cadences_only().start().await.unwrap());
    }
    publish_many::<D>(&outboxes[0], 500).await;
    // One of them may stand down; whoever goes on takes the rest. The first regular passes, which
    // come at a random moment, may take a share, too.
    let mut runs: BTreeMap<u64, u32> = BTreeMap::new();
    while runs.len() < 500 {
        let (a, b) = tokio::join!(
            relays[0].pass(Cadence::Backstop),
            relays[1].pass(Cadence::Backstop)
        );
        let dispatched = a.unwrap().dispatched + b.unwrap().dispatched;
        if dispatched == 0 {
            *runs.entry(handled.recv().await.unwrap().0).or_default() += 1;
        }
        while let Ok((n, _)) = handled.try_recv() {
            *runs.entry(n).or_default() += 1;
        }
    }
    for relay in relays {
        relay.shutdown(Duration::from_secs(20)).await.unwrap();
    }
    assert!(handled.try_recv().is_err(), "an event ran twice");
    assert_eq!(runs.len(), 500);
    assert!(runs.values().all(|runs| *runs == 1), "{runs:?}");
}

async fn maintenance_on_a_busy_outbox_removes_only_what_is_past_its_retention<D: Database>(db: &D) {
    let (send, mut handled) = mpsc::unbounded_channel();
    let outbox = instance(db, "a", &send);
    let relay = outbox.relay().start().await.unwrap();
    publish_many::<D>(&outbox, 300).await;
    for _ in 0..300 {
        handled.recv().await.unwrap();
    }
    let publishing = async {
        for n in 0..100 {
            publish_for_relays(&outbox, &Ticked { n: 1_000 + n }).await;
        }
    };
    let passes = async {
        for _ in 0..3 {
            let report = relay.pass(Cadence::Maintenance).await.unwrap();
            assert_eq!(report.purged, 0);
        }
    };
    tokio::join!(publishing, passes);
    for _ in 0..100 {
        handled.recv().await.unwrap();
    }
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    assert_eq!(db.summary().await, [("processed".to_owned(), 400)]);
}

async fn one_instance_runs_and_the_others_stand_down<D: Database>(db: &D) {
    let (a, b) = (db.outbox().build().unwrap(), db.outbox().build().unwrap());
    let (finish, finished) = oneshot::channel::<()>();
    let (began, has_begun) = oneshot::channel();
    let running = tokio::spawn(async move {
        a.run_exclusive("report", |_| async move {
            began.send(()).unwrap();
            finished.await.unwrap();
            7
        })
        .await
        .unwrap()
    });
    has_begun.await.unwrap();
    let other = b.run_exclusive("report", |_| async {}).await.unwrap();
    assert_eq!(other, Exclusive::StoodDown);
    let unrelated = b.run_exclusive("invoices", |_| async {}).await.unwrap();
    assert_eq!(unrelated, Exclusive::Finished(()));
    finish.send(()).unwrap();
    assert_eq!(running.await.unwrap(), Exclusive::Finished(7));
    let next = b.run_exclusive("report", |_| async { 8 }).await.unwrap();
    assert_eq!(next, Exclusive::Finished(8));

    // What panics frees it, too.
    b.run_exclusive("report", |_| async { panic!("no paper") })
        .await
        .map(|done: Exclusive<()>| done)
        .unwrap_err();
    let next = b.run_exclusive("report", |_| async {}).await.unwrap();
    assert_eq!(next, Exclusive::Finished(()));
}

async fn a_transaction_waits_for_the_entity_that_another_one_has_locked<D: Database>(db: &D) {
    const ORDERS: i32 = 1;

    let (a, b) = (db.outbox().build().unwrap(), db.outbox().build().unwrap());
    let mut first = a.begin().await.unwrap();
    first.lock_entity(ORDERS, 7).await.unwrap();
    let (asks, is_asking) = oneshot::channel();
    let second = tokio::spawn(async move {
        asks.send(()).unwrap();
        let mut tx = b.begin().await.unwrap();
        tx.lock_entity(ORDERS, 7).await.unwrap();
        tx.commit().await.unwrap();
    });
    is_asking.await.unwrap();
    D::insert_order(&mut first, 7).await.unwrap();
    assert!(!second.is_finished());
    first.commit().await.unwrap();
    eventually(Duration::from_secs(20), || async { second.is_finished() }).await;
    second.await.unwrap();
    assert_eq!(db.orders().await, [7]);
}
