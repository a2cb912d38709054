use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(backoff(jitter = 1.5))]
struct OrderPaid {
    order_id: u64,
    customer_id: u64,
}

fn main() {}
