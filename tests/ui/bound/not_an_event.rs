use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct OrderPaid {
    order_id: u64,
}

fn publish<E: OutboxEvent>(_: &E) {}

fn main() {
    publish(&OrderPaid { order_id: 7 });
}
