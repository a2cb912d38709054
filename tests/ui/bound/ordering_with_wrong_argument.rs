use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(ordering_with = key)]
struct OrderPaid {
    order_id: u64,
    customer_id: u64,
}

fn key(order_id: u64) -> String {
    order_id.to_string()
}

fn main() {}
