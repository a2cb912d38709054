//! Handlers that write through a transaction, on real ones.

use std::marker::PhantomData;
use std::time::Duration;

use outbox_core::{
    Delivery, EventState, HandlerError, OutboxEvent, SettledResult, Store, TransactionalHandler,
};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::{Database, Postgres, on_both_databases};
use crate::events::{publish_for_relays, settled};
use crate::support::within;

on_both_databases! {
    what_a_handler_writes_commits_with_its_events_outcome
    what_a_handler_wrote_is_undone_if_it_fails
}

/// An order is to be booked.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct OrderBooked {
    order: i64,
}

impl OutboxEvent for OrderBooked {
    type Output = i64;
    const NAME: &'static str = "order.booked";
}

/// Inserts an order of its event's number and its own attempt.
struct Book<D> {
    /// The attempts that fail after they wrote.
    failing: u32,
    /// What the first attempt waits for before it writes.
    go_on: watch::Receiver<bool>,
    database: PhantomData<fn(D)>,
}

fn book<D>(failing: u32) -> (Book<D>, watch::Sender<bool>) {
    let (sender, go_on) = watch::channel(true);
    let book = Book {
        failing,
        go_on,
        database: PhantomData,
    };
    (book, sender)
}

impl<D: Database> TransactionalHandler<<D::Store as Store>::Connection, OrderBooked> for Book<D> {
    async fn handle(
        &self,
        event: OrderBooked,
        connection: &mut <D::Store as Store>::Connection,
        delivery: &Delivery,
    ) -> Result<i64, HandlerError> {
        let attempt = delivery.attempt().get();
        if attempt == 1 {
            let mut go_on = self.go_on.clone();
            let _ = go_on.wait_for(|go_on| *go_on).await;
        }
        let order = event.order * 10 + i64::from(attempt);
        D::insert_order(connection, order).await?;
        if attempt <= self.failing {
            return Err(HandlerError::retry_after(
                Duration::ZERO,
                "the books are closed",
            ));
        }
        Ok(order)
    }
}

async fn what_a_handler_writes_commits_with_its_events_outcome<D: Database>(db: &D) {
    let (book, _go_on) = book::<D>(0);
    let (builder, mut outcomes) = settled(db.outbox());
    let outbox = builder.on_transactional(book).build().unwrap();
    let relay = outbox.relay().start().await.unwrap();
    let first = publish_for_relays(&outbox, &OrderBooked { order: 1 }).await;
    outcomes.recv().await.unwrap();
    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&OrderBooked { order: 2 }).await.unwrap();
    tx.commit().await.unwrap().settled().await;
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    assert_eq!(db.orders().await, [11, 21]);
    assert_eq!(db.summary().await, [("processed".to_owned(), 2)]);
    let record = outbox.find(first).await.unwrap().unwrap();
    assert_eq!(record.output.as_deref(), Some("11"));
}

async fn what_a_handler_wrote_is_undone_if_it_fails<D: Database>(db: &D) {
    let (book, _go_on) = book::<D>(2);
    let (builder, mut outcomes) = settled(db.outbox());
    let outbox = builder.on_transactional(book).build().unwrap();
    let relay = outbox.relay().start().await.unwrap();
    let id = publish_for_relays(&outbox, &OrderBooked { order: 7 }).await;
    for _ in 0..2 {
        let outcome = outcomes.recv().await.unwrap();
        assert!(
            matches!(outcome.result, SettledResult::Retry { .. }),
            "{outcome:?}"
        );
    }
    assert_eq!(
        outcomes.recv().await.unwrap().result,
        SettledResult::Processed
    );
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    assert_eq!(db.orders().await, [73]);
    let record = outbox.find(id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Processed, 3));
}

/// Two instances run it, because the first one was frozen for longer than its lease. What the first
/// one writes is gone with its lease. (On SQLite the second one could not begin to write.)
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p5_the_effect_in_the_database_happens_once_although_two_instances_run_it() {
    let db = Postgres::new().await;
    let (first, go_on) = book::<Postgres>(0);
    go_on.send(false).unwrap();
    let stalled = db
        .outbox()
        .inline_lease(Duration::from_secs(60))
        .on_transactional(first)
        .build()
        .unwrap();
    let mut tx = stalled.begin().await.unwrap();
    let id = tx
        .publish(&OrderBooked { order: 7 })
        .await
        .unwrap()
        .event_id();
    let dispatching = tx.commit().await.unwrap();
    // Its transaction is open, and the handler waits in it.
    crate::support::eventually(super::LIMIT, || async { stalled.counters().claimed == 1 }).await;
    db.expire_lease(id.row()).await;

    let (second, _go_on) = book::<Postgres>(0);
    let (builder, mut outcomes) = settled(db.outbox());
    let next = builder.on_transactional(second).build().unwrap();
    let relay = next.relay().start().await.unwrap();
    let outcome = within(super::LIMIT, outcomes.recv()).await.unwrap();
    assert_eq!(
        (outcome.result, outcome.attempt),
        (SettledResult::Processed, 2)
    );

    go_on.send(true).unwrap();
    within(super::LIMIT, dispatching.settled()).await;
    assert_eq!(stalled.counters().lease_lost, 1);
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    assert_eq!(db.orders().await, [72]);
}
