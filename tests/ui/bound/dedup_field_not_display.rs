use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid {
    order_id: u64,
    #[outbox(dedup)]
    lines: Vec<u64>,
}

fn main() {}
