use outbox_core::{EventOf, EventSet, HandlerError, Outbox, OutboxEvent, OutboxEvents, Store};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct OrderPaid {
    order_id: u64,
}

// Everything but the mistake is there, so the uses below are not reported.
#[derive(OutboxEvents)]
enum ShopEvents {
    OrderPaid(OrderPaid),
    Paused,
}

fn outbox<S: Store>(store: S) -> Outbox<S, ShopEvents> {
    Outbox::builder_of::<ShopEvents>(store)
        .on(|_: OrderPaid| async { Ok::<_, HandlerError>(()) })
        .build()
        .unwrap()
}

fn member<E: EventOf<ShopEvents> + Into<ShopEvents>>() {}

fn main() {
    member::<OrderPaid>();
    let _ = ShopEvents::decode("order.paid", std::num::NonZeroU32::MIN, "{}").map(|event| event.name());
}
