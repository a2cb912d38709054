//! Dispatch right after the commit.

use std::time::Duration;

use outbox_core::{EventState, HandlerError};

use super::{Database, LIMIT, on_both_databases};
use crate::events::{OrderPaid, Step, Ticked, scripted};
use crate::support::eventually;

on_both_databases! {
    an_event_is_handled_right_after_its_commit_and_a_duplicate_gets_its_result
    the_handler_finds_the_business_change
    p1_a_transaction_that_rolls_back_dispatches_nothing
    a_panic_in_an_inline_handler_is_a_failed_attempt_and_the_publisher_is_not_hit
    handlers_that_block_their_threads_do_not_cost_others_their_leases
    p11_a_handler_that_blocks_is_a_failed_attempt_before_it_returns
}

async fn an_event_is_handled_right_after_its_commit_and_a_duplicate_gets_its_result<D: Database>(
    db: &D,
) {
    let outbox =
        db.outbox()
            .instance("shop-1")
            .on(|event: OrderPaid| async move {
                Ok::<_, HandlerError>(format!("receipt-{}", event.order))
            })
            .build()
            .unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let id = tx
        .publish(&OrderPaid { order: 1 })
        .await
        .unwrap()
        .event_id();
    tx.commit().await.unwrap().settled().await;

    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Processed, 1));
    assert_eq!(record.output.as_deref(), Some("\"receipt-1\""));
    assert_eq!(record.claimed_by.as_deref(), Some("shop-1"));
    assert_eq!(outbox.counters().claims, 0);

    let mut tx = outbox.begin().await.unwrap();
    let again = tx.publish(&OrderPaid { order: 1 }).await.unwrap();
    tx.commit().await.unwrap().settled().await;
    assert_eq!(
        again.duplicate().unwrap().output().unwrap().as_deref(),
        Some("receipt-1")
    );
    assert_eq!(outbox.counters().processed, 1);
}

async fn the_handler_finds_the_business_change<D: Database + 'static>(db: &D) {
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = db.outbox().on(handler).build().unwrap();
    for n in 0..20 {
        let mut tx = outbox.begin().await.unwrap();
        D::insert_order(&mut tx, n).await.unwrap();
        tx.publish(&Ticked { n: 1 }).await.unwrap();
        tx.commit().await.unwrap();
        runs.recv().await.unwrap();
        // Another connection than the publisher's sees it by the time the handler runs.
        assert!(db.orders().await.contains(&n));
    }
}

async fn p1_a_transaction_that_rolls_back_dispatches_nothing<D: Database>(db: &D) {
    let (handler, mut runs) = scripted(|_| Step::Return(Ok(())));
    let outbox = db.outbox().on(handler).build().unwrap();
    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 1 }).await.unwrap();
    tx.rollback().await.unwrap();
    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 2 }).await.unwrap();
    drop(tx);
    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&Ticked { n: 3 }).await.unwrap();
    tx.commit().await.unwrap().settled().await;

    assert_eq!(runs.recv().await.unwrap().n, 3);
    assert!(runs.try_recv().is_err());
}

async fn a_panic_in_an_inline_handler_is_a_failed_attempt_and_the_publisher_is_not_hit<
    D: Database,
>(
    db: &D,
) {
    let (handler, _runs) = scripted(|run| match run.n {
        1 => Step::Panic,
        2 => Step::Return(Err(HandlerError::permanent("a\0b"))),
        _ => Step::Return(Ok(())),
    });
    let outbox = db.outbox().on(handler).build().unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let events = [1, 2, 3].map(|n| Ticked { n });
    let published = tx.publish_all(&events).await.unwrap();
    tx.commit().await.unwrap().settled().await;

    let mut records = Vec::new();
    for published in &published {
        records.push(outbox.find(published.event_id()).await.unwrap().unwrap());
    }
    assert_eq!(records[0].state, EventState::Failed);
    assert_eq!(
        records[0].last_error.as_deref(),
        Some("the handler panicked: as asked")
    );
    assert_eq!(records[1].state, EventState::DeadLetter);
    assert_eq!(records[1].last_error.as_deref(), Some("a\u{fffd}b"));
    assert_eq!(records[2].state, EventState::Processed);
}

/// Blocks its thread for longer than every lease here would last without a renewal.
fn block() {
    // On purpose: what a handler must not do.
    #[allow(clippy::disallowed_methods, reason = "the hazard itself is under test")]
    std::thread::sleep(Duration::from_millis(2_500));
}

/// Two workers, both blocked by handlers. All leases are renewed meanwhile, because the background
/// has a thread of its own.
async fn handlers_that_block_their_threads_do_not_cost_others_their_leases<D: Database>(db: &D) {
    let (handler, mut runs) = scripted(|run| {
        if run.n > 0 {
            block();
        }
        Step::Take(Duration::from_millis(10))
    });
    let outbox = db
        .outbox()
        .on(handler)
        .inline_lease(Duration::from_secs(1))
        .build()
        .unwrap();
    let mut tx = outbox.begin().await.unwrap();
    tx.publish_all(&[0, 1, 2].map(|n| Ticked { n }))
        .await
        .unwrap();
    tx.commit().await.unwrap().settled().await;

    for _ in 0..3 {
        assert_eq!(runs.recv().await.unwrap().delivery.attempt().get(), 1);
    }
    let counters = outbox.counters();
    assert_eq!((counters.processed, counters.lease_lost), (3, 0));
}

async fn p11_a_handler_that_blocks_is_a_failed_attempt_before_it_returns<D: Database>(db: &D) {
    let (handler, _runs) = scripted(|_| {
        block();
        Step::Return(Ok(()))
    });
    let outbox = db
        .outbox()
        .on(handler)
        .handler_timeout(Duration::from_millis(200))
        .build()
        .unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let id = tx.publish(&Ticked { n: 1 }).await.unwrap().event_id();
    let dispatching = tx.commit().await.unwrap();
    let committed = std::time::Instant::now();
    dispatching.settled().await;

    assert!(
        committed.elapsed() < Duration::from_millis(2_400),
        "{:?}",
        committed.elapsed()
    );
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(record.state, EventState::Failed);
    let overrun = Some("the handler overran its timeout of 200ms");
    assert_eq!(record.last_error.as_deref(), overrun);
    // When it does return, what it says changes nothing.
    eventually(LIMIT, async || outbox.counters().late_results == 1).await;
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(record.last_error.as_deref(), overrun);
    assert_eq!(outbox.counters().processed, 0);
}
