use outbox_core::{HandlerError, Outbox, OutboxEvent, OutboxEvents, Store};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid;

#[derive(Serialize, Deserialize, OutboxEvent)]
struct AlertRaised;

#[derive(OutboxEvents)]
enum ShopEvents {
    OrderPaid(OrderPaid),
    AlertRaised(AlertRaised),
}

fn shop<S: Store>(store: S) -> Outbox<S, ShopEvents> {
    Outbox::builder_of::<ShopEvents>(store)
        .on(|_: OrderPaid| async { Ok::<_, HandlerError>(()) })
        .build()
        .unwrap()
}

fn main() {}
