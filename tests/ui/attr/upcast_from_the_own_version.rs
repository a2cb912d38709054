use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(version = 2, upcast(from = OrderPaidV1, version = 1))]
#[outbox(upcast(from = OrderPaidV1, version = 2), upcast(from = OrderPaidV1, version = 3))]
struct OrderPaid {
    order_id: u64,
    customer_id: u64,
}

#[derive(Deserialize)]
struct OrderPaidV1 {
    order_id: u64,
}

impl From<OrderPaidV1> for OrderPaid {
    fn from(paid: OrderPaidV1) -> Self {
        Self {
            order_id: paid.order_id,
            customer_id: 0,
        }
    }
}

fn main() {}
