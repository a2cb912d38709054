use outbox_core::{OutboxEvent, OutboxEvents};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid {
    order_id: u64,
}

#[derive(OutboxEvents)]
#[outbox(name = "shop", priority = "high")]
#[outbox]
enum ShopEvents {
    OrderPaid(OrderPaid),
}

#[derive(OutboxEvents)]
#[outbox("shop")]
#[outbox()]
enum OtherEvents {
    OrderPaid(OrderPaid),
}

fn main() {}
