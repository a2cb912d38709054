use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(crate = super::outbox)]
struct OrderPaid {
    order_id: u64,
}

fn main() {}
