use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(version = 4, upcast(from = OrderPaidV1, version = 1))]
#[outbox(upcast(from = OrderPaidV2, version = 2), upcast(from = OrderPaidV1, version = 3))]
struct OrderPaid {
    order_id: u64,
    customer_id: u64,
}

fn main() {}
