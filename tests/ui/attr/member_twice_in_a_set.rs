use outbox_core::{OutboxEvent, OutboxEvents};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid {
    order_id: u64,
}

#[derive(OutboxEvents)]
enum ShopEvents {
    Paid(OrderPaid),
    Settled(OrderPaid),
}

fn main() {}
