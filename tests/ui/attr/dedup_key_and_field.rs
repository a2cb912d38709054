use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_key = "{order_id}")]
struct OrderPaid {
    #[outbox(dedup)]
    order_id: u64,
}

fn main() {}
