use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(version = 2, upcast(version = 1))]
struct OrderPaid {
    order_id: u64,
    customer_id: u64,
}

fn main() {}
