use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct Changed<T> {
    after: T,
}

struct Order;

fn publish<E: OutboxEvent>(_: &E) {}

fn main() {
    publish(&Changed { after: Order });
}
