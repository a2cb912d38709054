use outbox_core::{OutboxEvent, OutboxEvents};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid {
    order_id: u64,
}

#[derive(OutboxEvents)]
struct OneEvent(OrderPaid);

#[derive(OutboxEvents)]
union Either {
    number: u64,
    sign: i64,
}

fn main() {}
