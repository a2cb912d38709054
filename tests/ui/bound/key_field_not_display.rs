use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_key = "order:{order_ids}")]
struct OrderPaid {
    order_ids: Vec<u64>,
}

fn main() {}
