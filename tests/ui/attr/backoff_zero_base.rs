use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(backoff(base = "0ms", max = "10s"))]
struct OrderPaid {
    order_id: u64,
    customer_id: u64,
}

fn main() {}
