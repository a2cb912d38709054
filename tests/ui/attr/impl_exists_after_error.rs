use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(name = "Order.Paid", output = ReceiptId)]
struct OrderPaid {
    order_id: u64,
}

#[derive(Serialize, Deserialize)]
struct ReceiptId(u64);

// The one message is about the name: neither `publish` nor the output is in doubt.
fn publish<E: OutboxEvent<Output = ReceiptId>>(_: &E) {}

fn main() {
    publish(&OrderPaid { order_id: 7 });
}
