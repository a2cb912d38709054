use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_key = "{0}")]
enum OrderChanged {
    Paid(u64),
    Cancelled(Option<u64>),
}

fn main() {}
