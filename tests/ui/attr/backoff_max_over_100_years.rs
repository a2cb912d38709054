use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(backoff(max = "40000d"))]
struct OrderPaid {
    order_id: u64,
    customer_id: u64,
}

fn main() {}
