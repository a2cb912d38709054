use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(behind_dead = "skip")]
struct OrderPaid {
    order_id: u64,
    customer_id: u64,
}

fn main() {}
