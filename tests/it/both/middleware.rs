//! Middleware around runs on a database.

use std::marker::PhantomData;
use std::sync::Arc;

use outbox_core::middleware::{Middleware, Next, Returned, RunError};
use outbox_core::{
    Delivery, EventState, HandlerError, OutboxEvent, PublishOptions, Store, TransactionalHandler,
    Uncommitted,
};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use super::{Database, on_both_databases};
use crate::events::{OrderPaid, publish_for_relays};

on_both_databases! {
    a_tenant_is_known_to_the_handler_and_an_event_without_one_is_refused
    what_a_handler_wrote_before_it_failed_is_undone_although_a_middleware_forgives_it
    what_a_handler_wrote_before_it_was_dropped_is_undone_although_a_middleware_forgives_it
}

tokio::task_local! {
    static TENANT: String;
}

struct Tenancy;

impl Middleware for Tenancy {
    async fn around(&self, delivery: &Delivery, next: Next<'_>) -> Result<Returned, RunError> {
        match delivery.headers().get("tenant") {
            Some(tenant) => TENANT.scope(tenant.clone(), next.run()).await,
            None => Err(HandlerError::permanent("an event without a tenant").into()),
        }
    }
}

async fn a_tenant_is_known_to_the_handler_and_an_event_without_one_is_refused<D: Database>(db: &D) {
    let outbox = db
        .outbox()
        .middleware(Tenancy)
        .on(|_: OrderPaid| async { Ok::<_, HandlerError>(TENANT.with(Clone::clone)) })
        .build()
        .unwrap();
    let options = PublishOptions::new().header("tenant", "acme");
    let mut tx = outbox.begin().await.unwrap();
    let event = OrderPaid { order: 1 };
    let published = tx.publish_with(&event, &options).await.unwrap();
    tx.commit().await.unwrap().settled().await;
    let done = outbox.find(published.event_id()).await.unwrap().unwrap();
    assert_eq!(done.output.as_deref(), Some("\"acme\""));

    let id = publish_for_relays(&outbox, &OrderPaid { order: 2 }).await;
    outbox.dispatch([id]).unwrap().settled().await;
    let refused = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(refused.state, EventState::DeadLetter);
    assert_eq!(
        refused.last_error.as_deref(),
        Some("an event without a tenant")
    );
}

/// An order is to be booked.
#[derive(Debug, Deserialize, Serialize)]
struct OrderBooked {
    order: i64,
}

impl OutboxEvent for OrderBooked {
    type Output = ();
    const NAME: &'static str = "order.booked";
}

/// Inserts the order, and then fails or hangs.
struct Book<D> {
    hangs: bool,
    written: Arc<Notify>,
    database: PhantomData<fn(D)>,
}

impl<D: Database> TransactionalHandler<<D::Store as Store>::Connection, OrderBooked> for Book<D> {
    async fn handle(
        &self,
        event: OrderBooked,
        connection: &mut <D::Store as Store>::Connection,
        _: &Delivery,
    ) -> Result<(), HandlerError> {
        D::insert_order(connection, event.order).await?;
        if self.hangs {
            self.written.notify_one();
            std::future::pending::<()>().await;
        }
        Err(HandlerError::retry("the books are closed"))
    }
}

/// Makes a success of every error, and of every handler that hangs once it has written.
struct Forgiving {
    written: Arc<Notify>,
}

impl Middleware for Forgiving {
    async fn around(&self, _: &Delivery, next: Next<'_>) -> Result<Returned, RunError> {
        tokio::select! {
            biased;
            result = next.run() => result.or_else(|_| Ok(Returned::nothing())),
            () = self.written.notified() => Ok(Returned::nothing()),
        }
    }
}

async fn what_a_handler_wrote_before_it_failed_is_undone_although_a_middleware_forgives_it<
    D: Database,
>(
    db: &D,
) {
    check_forgiven(db, false).await;
}

async fn what_a_handler_wrote_before_it_was_dropped_is_undone_although_a_middleware_forgives_it<
    D: Database,
>(
    db: &D,
) {
    check_forgiven(db, true).await;
}

/// Half of what a handler was to write is not to be kept, however its event was dispatched.
async fn check_forgiven<D: Database>(db: &D, hangs: bool) {
    let written = Arc::new(Notify::new());
    let book = || Book::<D> {
        hangs,
        written: Arc::clone(&written),
        database: PhantomData,
    };
    let outbox = db
        .outbox()
        .middleware(Forgiving {
            written: Arc::clone(&written),
        })
        .on_transactional(book())
        .build()
        .unwrap();

    let id = publish_for_relays(&outbox, &OrderBooked { order: 1 }).await;
    outbox.dispatch([id]).unwrap().settled().await;
    let forgiven = outbox.find(id).await.unwrap().unwrap();
    assert_eq!(forgiven.state, EventState::Processed);
    assert!(db.orders().await.is_empty(), "dispatched");

    let direct = outbox.dispatch_directly(&OrderBooked { order: 2 }).await;
    direct.unwrap();
    assert!(db.orders().await.is_empty(), "dispatched directly");

    let mut tx = outbox.begin().await.unwrap();
    let booked = tx
        .dispatch_uncommitted_with(&OrderBooked { order: 3 }, &book())
        .await
        .unwrap();
    assert!(matches!(booked, Uncommitted::Processed(_)), "{booked:?}");
    tx.commit().await.unwrap();
    assert!(db.orders().await.is_empty(), "dispatched before the commit");
    assert_eq!(db.summary().await, [("processed".to_owned(), 2)]);
}
