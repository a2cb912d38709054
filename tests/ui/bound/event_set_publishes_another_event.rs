use outbox_core::{Outbox, OutboxEvent, OutboxEvents, Store};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid;

#[derive(Serialize, Deserialize, OutboxEvent)]
struct AlertRaised;

#[derive(Serialize, Deserialize, OutboxEvent)]
struct CacheWarm;

#[derive(OutboxEvents)]
enum ShopEvents {
    OrderPaid(OrderPaid),
    AlertRaised(AlertRaised),
}

async fn publish<S: Store>(shop: &Outbox<S, ShopEvents>, tx: &mut S::Tx<'_>) {
    shop.publish(tx, &OrderPaid).await.unwrap();
    shop.publish(tx, &CacheWarm).await.unwrap();
}

async fn publish_through_the_outbox<S: Store>(shop: &Outbox<S, ShopEvents>) {
    let mut tx = shop.begin().await.unwrap();
    tx.publish(&AlertRaised).await.unwrap();
    tx.publish(&CacheWarm).await.unwrap();
    tx.commit().await.unwrap();
}

fn main() {}
