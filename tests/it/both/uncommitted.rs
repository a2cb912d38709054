//! Dispatch before the commit, with the caller's connection.

use std::marker::PhantomData;
use std::time::Duration;

use outbox_core::store::Store;
use outbox_core::{
    Delivery, EventState, HandlerError, Outbox, OutboxEvent, TransactionalHandler, Uncommitted,
};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use super::{Database, on_both_databases};

on_both_databases! {
    what_a_handler_writes_lives_and_dies_with_the_transaction
    a_handler_that_fails_loses_its_own_writes_and_nothing_else
    a_handler_that_panics_or_overruns_its_timeout_loses_its_own_writes_and_nothing_else
    a_dispatch_that_is_dropped_loses_its_own_writes_and_nothing_else
    a_dispatch_dropped_anywhere_keeps_its_writes_only_with_its_outcome
    a_handler_whose_statement_fails_can_go_on_without_harm
    what_failed_before_the_commit_is_taken_by_a_relay_at_once
}

/// An order is to be booked.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct OrderBooked {
    order: i64,
}

impl OutboxEvent for OrderBooked {
    type Output = ();
    const NAME: &'static str = "order.booked";
    const TIMEOUT: Option<Duration> = Some(Duration::from_millis(300));

    fn dedup_key(&self) -> Option<String> {
        Some(self.order.to_string())
    }
}

#[derive(Clone, Copy)]
enum Then {
    Succeed,
    Fail,
    Panic,
    Hang,
    /// Writes the same order again, which fails, and returns that error.
    WriteAgain,
}

/// Inserts the order, and then does as it is told.
struct Book<'a, D> {
    then: Then,
    written: &'a Notify,
    database: PhantomData<fn(D)>,
}

impl<D: Database> TransactionalHandler<<D::Store as Store>::Connection, OrderBooked>
    for Book<'_, D>
{
    async fn handle(
        &self,
        event: OrderBooked,
        connection: &mut <D::Store as Store>::Connection,
        _: &Delivery,
    ) -> Result<(), HandlerError> {
        D::insert_order(connection, event.order).await?;
        self.written.notify_one();
        match self.then {
            Then::Succeed => Ok(()),
            Then::Fail => Err(HandlerError::retry("the books are closed")),
            Then::Panic => panic!("as asked"),
            Then::Hang => std::future::pending().await,
            Then::WriteAgain => Ok(D::insert_order(connection, event.order).await?),
        }
    }
}

fn book<D>(then: Then, written: &Notify) -> Book<'_, D> {
    Book {
        then,
        written,
        database: PhantomData,
    }
}

fn outbox<D: Database>(db: &D) -> Outbox<D::Store> {
    db.outbox()
        .on(|_: OrderBooked| async { Ok::<_, HandlerError>(()) })
        .build()
        .unwrap()
}

async fn what_a_handler_writes_lives_and_dies_with_the_transaction<D: Database>(db: &D) {
    let outbox = outbox(db);
    let written = Notify::new();
    let handler = book::<D>(Then::Succeed, &written);
    let mut tx = outbox.begin().await.unwrap();
    let booked = tx
        .dispatch_uncommitted_with(&OrderBooked { order: 1 }, &handler)
        .await
        .unwrap();
    assert!(matches!(booked, Uncommitted::Processed(_)), "{booked:?}");
    tx.rollback().await.unwrap();
    assert!(db.orders().await.is_empty());
    assert_eq!(db.summary().await, []);

    let mut tx = outbox.begin().await.unwrap();
    let booked = tx
        .dispatch_uncommitted_with(&OrderBooked { order: 1 }, &handler)
        .await
        .unwrap();
    let Uncommitted::Processed(handled) = booked else {
        panic!("{booked:?}");
    };
    tx.commit().await.unwrap();
    assert_eq!(db.orders().await, [1]);
    let record = outbox.find(handled.event_id()).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Processed, 1));

    // Nobody runs it again: the same event is a duplicate, which writes nothing.
    let mut tx = outbox.begin().await.unwrap();
    let again = tx
        .dispatch_uncommitted_with(&OrderBooked { order: 1 }, &handler)
        .await
        .unwrap();
    assert!(matches!(again, Uncommitted::Duplicate(_)), "{again:?}");
    tx.commit().await.unwrap();
    assert_eq!(db.orders().await, [1]);
}

async fn a_handler_that_fails_loses_its_own_writes_and_nothing_else<D: Database>(db: &D) {
    check_only_its_own_writes_are_undone(db, Then::Fail, "the books are closed").await;
}

async fn a_handler_that_panics_or_overruns_its_timeout_loses_its_own_writes_and_nothing_else<
    D: Database,
>(
    db: &D,
) {
    check_only_its_own_writes_are_undone(db, Then::Panic, "the handler panicked: as asked").await;
    let overrun = "the handler overran its timeout of 300ms";
    check_only_its_own_writes_are_undone(db, Then::Hang, overrun).await;
}

async fn check_only_its_own_writes_are_undone<D: Database>(db: &D, then: Then, error: &str) {
    let outbox = outbox(db);
    let before = db.orders().await;
    let first = i64::try_from(before.len()).unwrap() + 10;
    let written = Notify::new();
    let mut tx = outbox.begin().await.unwrap();
    D::insert_order(&mut tx, first).await.unwrap();
    let event = OrderBooked {
        order: 1_000 + first,
    };
    let failed = tx
        .dispatch_uncommitted_with(&event, &book::<D>(then, &written))
        .await
        .unwrap();
    let Uncommitted::Failed {
        event_id,
        error: text,
    } = failed
    else {
        panic!("{failed:?}");
    };
    assert_eq!(text, error);
    D::insert_order(&mut tx, first + 1).await.unwrap();
    tx.commit().await.unwrap();

    let mut expected = before;
    expected.extend([first, first + 1]);
    assert_eq!(db.orders().await, expected);
    let record = outbox.find(event_id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (EventState::Failed, 1));
    assert_eq!(record.last_error.as_deref(), Some(error));
}

async fn a_dispatch_that_is_dropped_loses_its_own_writes_and_nothing_else<D: Database>(db: &D) {
    let outbox = outbox(db);
    let written = Notify::new();
    let handler = book::<D>(Then::Hang, &written);
    let mut tx = outbox.begin().await.unwrap();
    D::insert_order(&mut tx, 1).await.unwrap();
    tokio::select! {
        dispatched = tx.dispatch_uncommitted_with(&OrderBooked { order: 100 }, &handler) => {
            panic!("{dispatched:?}");
        }
        () = written.notified() => {}
    }
    D::insert_order(&mut tx, 2).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(db.orders().await, [1, 2]);
    assert_eq!(db.summary().await, [("failed".to_owned(), 1)]);
}

/// Wherever the future is dropped, what the handler wrote is there if its event was processed, and
/// only then: otherwise a relay runs it again. And what was written around it is there if the
/// commit succeeded, and only then.
async fn a_dispatch_dropped_anywhere_keeps_its_writes_only_with_its_outcome<D: Database>(db: &D) {
    let written = Notify::new();
    let mut finished = 0;
    let ways = [
        (Then::Succeed, true),
        (Then::Fail, true),
        (Then::Succeed, false),
    ];
    for (n, (polls, (then, commits))) in (1..=40)
        .flat_map(|polls| ways.map(|way| (polls, way)))
        .enumerate()
    {
        // Of its own, so that no statement is prepared yet: one more place to be dropped at.
        let outbox = outbox(db);
        let handler = book::<D>(then, &written);
        let order = 10 * i64::try_from(n).unwrap();
        let mut tx = outbox.begin().await.unwrap();
        D::insert_order(&mut tx, order + 1).await.unwrap();
        let event = OrderBooked { order };
        let dispatch = tx.dispatch_uncommitted_with(&event, &handler);
        finished += u32::from(polled(dispatch, polls).await.is_some());
        let used = D::insert_order(&mut tx, order + 2).await.is_ok();
        let committed = commits && tx.commit().await.is_ok();
        let orders = db.orders().await;
        let kept = [0, 1, 2].map(|which| orders.contains(&(order + which)));
        assert_eq!(kept[1..], [committed, committed && used], "{polls}");
        let status = db.status_of(&order.to_string()).await;
        let processed = status.as_deref() == Some("processed");
        assert_eq!(kept[0], processed, "{polls} {status:?}");
    }
    assert!((1..120).contains(&finished), "{finished}");
}

/// What `future` comes to within so many polls. Dropped after them.
async fn polled<T>(future: impl Future<Output = T>, polls: u32) -> Option<T> {
    let mut future = std::pin::pin!(future);
    let mut left = polls;
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        std::task::Poll::Ready(value) => std::task::Poll::Ready(Some(value)),
        std::task::Poll::Pending => {
            left -= 1;
            if left == 0 {
                std::task::Poll::Ready(None)
            } else {
                std::task::Poll::Pending
            }
        }
    })
    .await
}

async fn a_handler_whose_statement_fails_can_go_on_without_harm<D: Database>(db: &D) {
    let outbox = outbox(db);
    let written = Notify::new();
    let mut tx = outbox.begin().await.unwrap();
    let handler = book::<D>(Then::WriteAgain, &written);
    let failed = tx
        .dispatch_uncommitted_with(&OrderBooked { order: 1 }, &handler)
        .await
        .unwrap();
    assert!(matches!(failed, Uncommitted::Failed { .. }), "{failed:?}");
    // The transaction is as usable as before.
    let handler = book::<D>(Then::Succeed, &written);
    let booked = tx
        .dispatch_uncommitted_with(&OrderBooked { order: 2 }, &handler)
        .await
        .unwrap();
    assert!(matches!(booked, Uncommitted::Processed(_)), "{booked:?}");
    tx.commit().await.unwrap();
    assert_eq!(db.orders().await, [2]);
}

async fn what_failed_before_the_commit_is_taken_by_a_relay_at_once<D: Database>(db: &D) {
    let (ran, mut runs) = tokio::sync::mpsc::unbounded_channel();
    let outbox = db
        .outbox()
        .on(move |event: OrderBooked| {
            let _ = ran.send(event.order);
            async { Ok::<_, HandlerError>(()) }
        })
        .build()
        .unwrap();
    let relay = outbox.relay().start().await.unwrap();
    let written = Notify::new();
    let mut tx = outbox.begin().await.unwrap();
    let failed = tx
        .dispatch_uncommitted_with(&OrderBooked { order: 7 }, &book::<D>(Then::Fail, &written))
        .await
        .unwrap();
    assert!(matches!(failed, Uncommitted::Failed { .. }), "{failed:?}");
    tx.commit().await.unwrap();
    assert_eq!(runs.recv().await, Some(7));
    relay.shutdown(Duration::from_secs(20)).await.unwrap();
    assert_eq!(db.summary().await, [("processed".to_owned(), 1)]);
}
