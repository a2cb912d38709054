use outbox_core::{OutboxEvent, OutboxEvents};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid {
    order_id: u64,
}

#[derive(OutboxEvents)]
enum ShopEvents {
    Unit,
    Empty(),
    Named { event: OrderPaid },
    Two(OrderPaid, u64),
    OrderPaid(OrderPaid),
}

fn main() {}
