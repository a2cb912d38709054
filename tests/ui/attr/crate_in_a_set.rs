use outbox_core::{OutboxEvent, OutboxEvents};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid {
    order_id: u64,
}

#[derive(OutboxEvents)]
#[outbox(crate = outbox_core)]
enum ShopEvents {
    OrderPaid(OrderPaid),
}

#[derive(OutboxEvents)]
#[outbox(crate = ::outbox_core, crate = ::outbox_core)]
enum OtherEvents {
    OrderPaid(OrderPaid),
}

fn main() {}
