use outbox_core::{OutboxEvent, OutboxEvents};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid {
    order_id: u64,
}

#[derive(OutboxEvents)]
enum ShopEvents {
    #[outbox(name = "order.settled")]
    OrderPaid(OrderPaid),
    Other(#[outbox(dedup)] Other),
}

#[derive(Serialize, Deserialize, OutboxEvent)]
struct Other;

fn main() {}
