use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_key = "{order_id}")]
enum OrderChanged {
    Paid { order_id: u64 },
    Cancelled { reason: String },
}

fn main() {}
