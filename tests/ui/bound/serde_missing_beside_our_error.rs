use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(OutboxEvent)]
#[outbox(version = 0)]
struct OrderPaid {
    order_id: u64,
}

// Another type, so that serde is in use here as in any crate of events.
#[derive(Serialize, Deserialize)]
struct ReceiptId(u64);

fn main() {}
