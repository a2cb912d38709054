//! Middleware around runs on a database.

use outbox_core::middleware::{Middleware, Next, Returned, RunError};
use outbox_core::{Delivery, EventState, HandlerError, PublishOptions};

use super::{Database, on_both_databases};
use crate::events::{OrderPaid, publish_for_relays};

on_both_databases! {
    a_tenant_is_known_to_the_handler_and_an_event_without_one_is_refused
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
