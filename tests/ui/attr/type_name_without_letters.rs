use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[allow(non_camel_case_types)]
struct __ {
    order_id: u64,
}

fn main() {}
