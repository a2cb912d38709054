use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(name = "order.paid")]
#[outbox(version = 2, name = "order.settled")]
struct OrderPaid {
    order_id: u64,
    customer_id: u64,
}

fn main() {}
