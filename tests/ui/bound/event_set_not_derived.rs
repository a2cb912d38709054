use outbox_core::{Outbox, OutboxEvent, Store};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid;

enum ShopEvents {
    OrderPaid(OrderPaid),
}

fn shop<S: Store>(store: S) {
    Outbox::builder_of::<ShopEvents>(store);
}

fn main() {}
