use outbox_core::{OutboxEvent, OutboxEvents};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid;

#[derive(Serialize, Deserialize)]
struct CacheWarm;

#[derive(OutboxEvents)]
enum ShopEvents {
    OrderPaid(OrderPaid),
    CacheWarm(CacheWarm),
}

fn main() {}
