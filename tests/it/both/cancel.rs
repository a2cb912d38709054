//! Events that are taken back, that come later, and that nobody wants after a while.

use std::time::Duration;

use outbox_core::{
    Cancellation, Changed, DeadReason, EventState, HandlerError, PublishError, PublishOptions,
    Published, SettledResult, Store,
};

use super::{Database, on_both_databases};
use crate::events::{OrderPaid, Step, Ticked, publish_for_relays, scripted, settled};

on_both_databases! {
    a_waiting_event_is_cancelled_by_its_id_and_by_its_key
    a_cancellation_that_rolls_back_has_not_happened
    a_running_event_is_cancelled_and_its_handler_is_stopped
    what_a_cancelled_handler_reports_is_refused
    an_expired_event_is_a_dead_letter_and_no_handler_is_started
    an_event_can_be_published_for_later
    an_event_cannot_expire_before_it_is_due
}

async fn a_waiting_event_is_cancelled_by_its_id_and_by_its_key<D: Database>(db: &D) {
    let outbox = db
        .outbox()
        .on(|_: OrderPaid| async { Ok::<_, HandlerError>("r".to_owned()) })
        .build()
        .unwrap();
    let first = publish_for_relays(&outbox, &OrderPaid { order: 1 }).await;
    let second = publish_for_relays(&outbox, &OrderPaid { order: 2 }).await;

    let mut tx = outbox.begin().await.unwrap();
    let found = tx.cancel(first).await.unwrap();
    assert_eq!(found, Cancellation::Cancelled(first));
    tx.commit().await.unwrap();
    let mut tx = outbox.store().begin().await.unwrap();
    let found = outbox
        .cancel_by_key::<OrderPaid>(&mut tx, "2")
        .await
        .unwrap();
    assert_eq!(found, Cancellation::Cancelled(second));
    let found = outbox
        .cancel_by_key::<OrderPaid>(&mut tx, "3")
        .await
        .unwrap();
    assert_eq!(found, Cancellation::NotFound);
    outbox.store().commit(tx).await.unwrap();

    outbox.dispatch([first, second]).unwrap().settled().await;
    for id in [first, second] {
        let kept = outbox.find(id).await.unwrap().unwrap();
        assert_eq!((kept.state, kept.attempts), (EventState::Cancelled, 0));
    }
    let mut tx = outbox.begin().await.unwrap();
    let again = tx.cancel(first).await.unwrap();
    assert_eq!(again, Cancellation::TooLate(first, EventState::Cancelled));
    let published = tx.publish(&OrderPaid { order: 1 }).await.unwrap();
    tx.commit().await.unwrap();
    let Published::Duplicate(duplicate) = published else {
        panic!("{published:?}");
    };
    assert_eq!(duplicate.state(), EventState::Cancelled);
    assert_eq!(db.summary().await, [("cancelled".to_owned(), 2)]);
}

async fn a_cancellation_that_rolls_back_has_not_happened<D: Database>(db: &D) {
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = db.outbox().on(handler).build().unwrap();
    let id = publish_for_relays(&outbox, &Ticked { n: 1 }).await;
    let mut tx = outbox.begin().await.unwrap();
    tx.cancel(id).await.unwrap();
    tx.rollback().await.unwrap();
    outbox.dispatch([id]).unwrap().settled().await;
    assert_eq!(runs.recv().await.unwrap().n, 1);
}

/// The handler would never end; that its event is settled shows that it was stopped.
async fn a_running_event_is_cancelled_and_its_handler_is_stopped<D: Database>(db: &D) {
    let (handler, mut runs) = scripted(|_| Step::Hang);
    let outbox = db.outbox().on(handler).lease(Duration::from_secs(6));
    let outbox = outbox
        .handler_timeout(Duration::from_secs(5))
        .build()
        .unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    tx.commit().await.unwrap();
    let run = runs.recv().await.unwrap();

    let mut tx = outbox.begin().await.unwrap();
    let found = tx.cancel(id).await.unwrap();
    assert_eq!(found, Cancellation::CancelledInProgress(id));
    tx.commit().await.unwrap();
    run.delivery.cancelled().cancelled().await;

    let kept = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(kept.state, EventState::Cancelled);
    assert_eq!(kept.failures, []);
    assert_eq!(outbox.counters().lease_lost, 1);
}

/// In this order:
///
/// 1. The handler runs, in a process that does not hear of the cancellation.
/// 2. The event is cancelled.
/// 3. The handler reports, and nothing changes.
async fn what_a_cancelled_handler_reports_is_refused<D: Database>(db: &D) {
    let gate = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
    let waits = std::sync::Arc::clone(&gate);
    let (started, mut starts) = tokio::sync::mpsc::unbounded_channel();
    let outbox = db
        .outbox()
        .on(move |_: Ticked| {
            let waits = std::sync::Arc::clone(&waits);
            let _ = started.send(());
            async move {
                waits.acquire().await.unwrap().forget();
                Err(HandlerError::retry("no"))
            }
        })
        .build()
        .unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    let dispatching = tx.commit().await.unwrap();
    starts.recv().await.unwrap();

    let elsewhere = db.outbox().build().unwrap();
    let mut tx = elsewhere.begin().await.unwrap();
    tx.cancel(id).await.unwrap();
    tx.commit().await.unwrap();
    gate.add_permits(1);
    dispatching.settled().await;

    let kept = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(kept.state, EventState::Cancelled);
    assert_eq!((kept.failures, kept.last_error), (vec![], None));
    assert_eq!(outbox.counters().lease_lost, 1);
}

async fn an_expired_event_is_a_dead_letter_and_no_handler_is_started<D: Database>(db: &D) {
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let (builder, mut outcomes) = settled(db.outbox());
    let outbox = builder.on(handler).build().unwrap();
    let options = PublishOptions::new().expires_in(Duration::from_secs(3_600));
    let mut tx = outbox.store().begin().await.unwrap();
    let mut publish = async |n| {
        let event = Ticked { n };
        let published = outbox.publish_with(&mut tx, &event, &options).await;
        published.unwrap().event_id()
    };
    let (expired, fresh) = (publish(1).await, publish(2).await);
    outbox.store().commit(tx).await.unwrap();
    db.expire(expired.row()).await;
    outbox.dispatch([expired, fresh]).unwrap().settled().await;

    assert_eq!(runs.recv().await.unwrap().n, 2);
    assert!(runs.is_empty());
    let mut results = [
        outcomes.recv().await.unwrap(),
        outcomes.recv().await.unwrap(),
    ];
    results.sort_by_key(|outcome| outcome.event_id);
    let error = "not handled before its deadline".to_owned();
    let reason = DeadReason::Expired;
    assert_eq!(
        results[0].result,
        SettledResult::DeadLetter { reason, error }
    );
    let kept = outbox.find(expired).await.unwrap().unwrap();
    assert_eq!((kept.dead_reason, kept.attempts), (Some(reason), 0));
    assert_eq!(kept.failures, []);

    // Who requeues it wants it handled.
    let requeued = outbox.dead_letters().requeue(expired).await.unwrap();
    assert_eq!(requeued, Changed::Done);
    outbox.dispatch([expired]).unwrap().settled().await;
    assert_eq!(runs.recv().await.unwrap().n, 1);
}

async fn an_event_can_be_published_for_later<D: Database>(db: &D) {
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = db.outbox().on(handler).build().unwrap();
    let options = PublishOptions::new().delay(Duration::from_secs(3_600));
    let mut tx = outbox.begin().await.unwrap();
    let published = tx.publish_with(&Ticked { n: 1 }, &options).await.unwrap();
    let id = published.event_id();
    tx.commit().await.unwrap().settled().await;
    outbox.dispatch([id]).unwrap().settled().await;
    assert!(runs.is_empty());
    db.make_due(id.row()).await;
    outbox.dispatch([id]).unwrap().settled().await;
    assert_eq!(runs.recv().await.unwrap().n, 1);
}

async fn an_event_cannot_expire_before_it_is_due<D: Database>(db: &D) {
    let outbox = db.outbox().build().unwrap();
    let hour = Duration::from_secs(3_600);
    let options = PublishOptions::new().delay(hour).expires_in(hour);
    let mut tx = outbox.begin().await.unwrap();
    let refused = tx.publish_with(&Ticked { n: 1 }, &options).await;
    assert!(matches!(refused, Err(PublishError::InvalidExpiry { .. })));
    assert_eq!(
        refused.unwrap_err().to_string(),
        "event `ticked` cannot expire in 3600s: it must be longer than its delay of 3600s, and at \
         most 3153600000s"
    );
    // The transaction is still usable.
    D::insert_order(&mut tx, 1).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(db.orders().await, [1]);
}
