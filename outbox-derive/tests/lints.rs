//! Generated code gives clippy nothing to say. rustc's lints are in `tests/ui/pass/deny_lints.rs`.
#![deny(
    clippy::all,
    clippy::pedantic,
    clippy::nursery,
    clippy::unwrap_used,
    clippy::panic
)]
#![deny(
    clippy::absolute_paths,
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing
)]
#![deny(clippy::allow_attributes, clippy::allow_attributes_without_reason)]
#![deny(warnings, unused_qualifications, missing_docs)]

use std::num::NonZeroU32;
use std::time::Duration;

use outbox_core::{EventSet, OutboxEvent, OutboxEvents, Priority};
use serde::{Deserialize, Serialize};

#[derive(Deserialize, OutboxEvent, Serialize)]
#[outbox(name = "order.paid", version = 2, priority = "high", max_attempts = 3)]
#[outbox(alias = "paid", upcast(from = OrderPaidV1<T>, version = 1))]
#[outbox(dedup_key = "{order_id}:{part}", ordering_with = ordering, timeout = "1s")]
#[outbox(backoff(base = "1s", max = "2s", jitter = 1), retention = "1d")]
struct OrderPaid<T> {
    order_id: String,
    part: T,
}

/// That it is deprecated is for those who use it.
#[deprecated = "there is a new one"]
#[derive(Deserialize)]
struct OrderPaidV1<T> {
    order_id: u64,
    part: T,
}

#[expect(deprecated, reason = "rows of it are left")]
impl<T> From<OrderPaidV1<T>> for OrderPaid<T> {
    fn from(paid: OrderPaidV1<T>) -> Self {
        Self {
            order_id: paid.order_id.to_string(),
            part: paid.part,
        }
    }
}

const fn ordering<T>(_: &OrderPaid<T>) -> Option<String> {
    None
}

#[derive(Deserialize, OutboxEvent, Serialize)]
#[outbox(dedup_key = "{id}")]
enum Changed {
    Added { id: u64 },
    Removed { id: u64 },
}

#[deprecated = "there is a new one"]
#[derive(Deserialize, OutboxEvent, Serialize)]
#[outbox(dedup_key = "{id}")]
struct OldEvent {
    id: u64,
}

#[derive(OutboxEvents)]
enum ShopEvents {
    OrderPaid(OrderPaid<u8>),
    Changed(Changed),
}

#[deprecated = "there is a new one"]
#[derive(OutboxEvents)]
enum OldEvents {
    #[deprecated = "there is a new one"]
    OrderPaid(OrderPaid<u8>),
    #[expect(deprecated, reason = "it is handled until its last row is settled")]
    OldEvent(OldEvent),
}

#[test]
fn what_is_linted_here_is_in_use() {
    assert_eq!(OrderPaid::<u8>::PRIORITY, Priority::High);
    assert_eq!(OrderPaid::<u8>::TIMEOUT, Some(Duration::from_secs(1)));
    let paid = OrderPaid {
        order_id: "a".to_owned(),
        part: 1,
    };
    assert_eq!(paid.dedup_key().as_deref(), Some("a:1"));
    for changed in [Changed::Added { id: 1 }, Changed::Removed { id: 1 }] {
        assert_eq!(changed.dedup_key().as_deref(), Some("1"));
    }
    let event = ShopEvents::from(paid);
    assert_eq!(event.name(), "order.paid");
    assert!(ShopEvents::decode("changed", NonZeroU32::MIN, "{}").is_err());
}
