use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_key = "{line.skew}")]
struct OrderPaid {
    line: Line,
}

#[derive(Serialize, Deserialize)]
struct Line {
    sku: String,
}

fn main() {}
