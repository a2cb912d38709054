use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(version = 3, upcast(from = OrderPaidV1, version = 1))]
#[outbox(upcast(from = OrderPaidV2, version = 2))]
struct OrderPaid {
    order_id: u64,
    customer_id: u64,
}

#[derive(Deserialize)]
struct OrderPaidV1 {
    order_id: u64,
}

#[derive(Deserialize)]
struct OrderPaidV2 {
    order_id: u64,
    customer: String,
}

impl From<OrderPaidV2> for OrderPaid {
    fn from(paid: OrderPaidV2) -> Self {
        Self {
            order_id: paid.order_id,
            customer_id: paid.customer.len() as u64,
        }
    }
}

fn main() {}
