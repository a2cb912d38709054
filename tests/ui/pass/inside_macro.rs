//! Values that arrive through `macro_rules!`, in invisible groups.

use outbox_core::{OutboxEvent, Priority};
use serde::{Deserialize, Serialize};

macro_rules! event {
    (
        $type:ident { $field:ident: $field_type:ty, $count:ident }
        $name:literal $version:literal $older:ty, $alias:literal $old:literal $key:literal $priority:literal $timeout:literal
        $jitter:literal $output:ty, $function:path, $outbox:path
    ) => {
        #[derive(Serialize, Deserialize, OutboxEvent)]
        #[outbox(name = $name, version = $version, dedup_key = $key, priority = $priority)]
        #[outbox(alias = $alias, upcast(from = $older, version = $old))]
        #[outbox(timeout = $timeout, backoff(jitter = $jitter), output = $output)]
        #[outbox(ordering_with = $function, crate = $outbox)]
        struct $type {
            $field: $field_type,
            $count: u8,
        }
    };
}

macro_rules! keyed {
    ($type:ident, $field:ident) => {
        #[derive(Serialize, Deserialize, OutboxEvent)]
        #[outbox(dedup_key = "{fixed}", crate = $crate::facade)]
        struct $type {
            fixed: u8,
            #[outbox(ordering)]
            $field: u8,
        }
    };
}

mod facade {
    pub use outbox_core::*;
}

event! {
    OrderPaid { order_id: Option<u8>, count }
    "order.paid" 2 OrderPaidV1, "paid" 1 "{count}" "low" "10s"
    0.1 Vec<u8>, crate::key, ::outbox_core
}

#[derive(Deserialize)]
struct OrderPaidV1(u8);

impl From<OrderPaidV1> for OrderPaid {
    fn from(paid: OrderPaidV1) -> Self {
        Self {
            order_id: None,
            count: paid.0,
        }
    }
}

keyed!(OrderShipped, order_id);

fn key(order: &OrderPaid) -> String {
    format!("{:?}", order.order_id)
}

fn main() {
    let paid = OrderPaid {
        order_id: Some(7),
        count: 1,
    };
    assert_eq!(OrderPaid::NAME, "order.paid");
    assert_eq!(OrderPaid::VERSION.get(), 2);
    assert_eq!(OrderPaid::ALIASES, ["paid"]);
    assert_eq!(OrderPaid::PRIORITY, Priority::Low);
    assert_eq!(paid.dedup_key().as_deref(), Some("1"));
    assert_eq!(paid.ordering_key().as_deref(), Some("Some(7)"));

    let shipped = OrderShipped {
        fixed: 1,
        order_id: 2,
    };
    assert_eq!(shipped.dedup_key().as_deref(), Some("1"));
    assert_eq!(shipped.ordering_key().as_deref(), Some("2"));
}
