use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(ordering_key = "{2}")]
struct OrderPaid(u64, u64);

fn main() {}
