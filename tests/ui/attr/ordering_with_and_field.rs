use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(ordering_with = Self::key)]
struct OrderPaid {
    #[outbox(ordering)]
    order_id: u64,
}

fn main() {}
