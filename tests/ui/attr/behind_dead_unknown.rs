use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(ordering_key = "{order_id}", behind_dead = "wait")]
struct OrderPaid {
    order_id: u64,
    customer_id: u64,
}

fn main() {}
