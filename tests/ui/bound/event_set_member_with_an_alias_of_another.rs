use outbox_core::{OutboxEvent, OutboxEvents};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid;

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(alias = "order.paid")]
struct OrderSettled;

#[derive(OutboxEvents)]
enum ShopEvents {
    OrderPaid(OrderPaid),
    OrderSettled(OrderSettled),
}

fn main() {}
