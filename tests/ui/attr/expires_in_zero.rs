use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(expires_in = "0s")]
struct OrderPaid {
    order_id: u64,
    customer_id: u64,
}

fn main() {}
