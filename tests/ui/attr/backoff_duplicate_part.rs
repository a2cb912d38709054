use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(backoff(base = "30s", base = "1m"))]
struct OrderPaid {
    order_id: u64,
    customer_id: u64,
}

fn main() {}
