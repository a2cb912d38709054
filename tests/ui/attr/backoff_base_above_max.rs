use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(backoff(base = "2h", max = "1h"))]
struct OrderPaid {
    order_id: u64,
    customer_id: u64,
}

fn main() {}
