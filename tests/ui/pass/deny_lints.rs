//! Generated code gives no lint anything to say. (`outbox-derive/tests/lints.rs` is the same for
//! clippy, which does not look here.)

#![deny(warnings, missing_docs, unreachable_pub, unused_qualifications)]
#![deny(
    rust_2018_idioms,
    single_use_lifetimes,
    trivial_casts,
    unused_lifetimes,
    unused_results
)]

use std::num::NonZeroU32;
use std::time::Duration;

use outbox_core::{DecodeError, EventOf, EventSet, OutboxEvent, OutboxEvents, Priority};
use serde::{Deserialize, Serialize};

/// The imports make every qualified path in the expansion one that could have been shorter.
#[derive(Serialize, Deserialize, OutboxEvent)]
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

fn ordering<T>(_: &OrderPaid<T>) -> Option<String> {
    None
}

/// The second variant makes an equal arm.
#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_key = "{id}")]
enum Changed {
    Added { id: u64 },
    Removed { id: u64 },
}

/// Deriving is no use of what is deprecated.
#[deprecated = "there is a new one"]
#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_key = "{id}")]
struct OldEvent {
    #[deprecated = "there is a new one"]
    id: u64,
}

/// Nothing in it is used but its type.
#[derive(OutboxEvents)]
enum ShopEvents {
    OrderPaid(OrderPaid<u8>),
    Changed(Changed),
}

#[deprecated = "there is a new one"]
#[derive(OutboxEvents)]
enum OldEvents {
    #[deprecated = "there is a new one"]
    Changed(Changed),
    #[expect(deprecated)]
    OldEvent(OldEvent),
}

fn accepted<E: EventOf<ShopEvents>>(event: E) -> E {
    event
}

fn main() {
    assert_eq!(OrderPaid::<u8>::PRIORITY, Priority::High);
    assert_eq!(OrderPaid::<u8>::TIMEOUT, Some(Duration::from_secs(1)));
    let paid = OrderPaid {
        order_id: "a".to_owned(),
        part: 1,
    };
    let paid = accepted(paid);
    assert_eq!(paid.dedup_key().as_deref(), Some("a:1"));
    for changed in [Changed::Added { id: 1 }, Changed::Removed { id: 1 }] {
        assert_eq!(changed.dedup_key().as_deref(), Some("1"));
    }
    let unknown = ShopEvents::decode("x", NonZeroU32::MIN, "1").err();
    assert!(matches!(unknown, Some(DecodeError::UnknownName { .. })));
}
