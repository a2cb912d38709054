use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid {
    #[outbox(dedupe)]
    order_id: u64,
}

fn main() {}
