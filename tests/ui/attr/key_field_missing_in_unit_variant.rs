use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(ordering_key = "{0}")]
enum OrderChanged {
    Paid(u64),
    Cancelled,
}

fn main() {}
