use outbox_core::{OutboxEvent, OutboxEvents};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid {
    order_id: u64,
}

#[derive(OutboxEvents)]
enum ShopEvents<'a, T, const N: usize> {
    OrderPaid(OrderPaid),
    Changed(&'a [T; N]),
}

fn main() {}
