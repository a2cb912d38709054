use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid {
    #[outbox(dedup = true)]
    order_id: u64,
}

fn main() {}
