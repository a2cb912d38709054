//! Generated code needs no prelude.

#![no_implicit_prelude]

#[derive(::serde::Serialize, ::serde::Deserialize, ::outbox_core::OutboxEvent)]
#[outbox(
    dedup_key = "{order_id}:{part}",
    alias = "paid",
    version = 2,
    upcast(from = OrderPaidV1<T>, version = 1),
    priority = "critical",
    max_attempts = 3
)]
#[outbox(backoff(), timeout = "1s", retention = "0s", ordering_with = key)]
struct OrderPaid<T> {
    order_id: u64,
    part: T,
}

#[derive(::serde::Deserialize)]
struct OrderPaidV1<T>(u64, T);

impl<T> ::std::convert::From<OrderPaidV1<T>> for OrderPaid<T> {
    fn from(paid: OrderPaidV1<T>) -> Self {
        OrderPaid {
            order_id: paid.0,
            part: paid.1,
        }
    }
}

fn key<T>(_: &OrderPaid<T>) -> &'static str {
    "one"
}

#[derive(::serde::Serialize, ::serde::Deserialize, ::outbox_core::OutboxEvent)]
#[outbox(dedup_key = "{0}")]
enum Changed {
    One(u64),
    Two(u64),
}

#[derive(::outbox_core::OutboxEvents)]
enum Events {
    OrderPaid(OrderPaid<u8>),
    Changed(Changed),
}

fn main() {
    use ::outbox_core::OutboxEvent as _;

    let paid = OrderPaid {
        order_id: 7,
        part: 1_u8,
    };
    ::std::assert_eq!(
        paid.dedup_key().as_deref(),
        ::std::option::Option::Some("7:1")
    );
    let event = <Events as ::std::convert::From<_>>::from(paid);
    ::std::assert_eq!(::outbox_core::EventSet::name(&event), "order.paid");
    for changed in [Changed::One(1), Changed::Two(1)] {
        ::std::assert_eq!(
            changed.dedup_key().as_deref(),
            ::std::option::Option::Some("1")
        );
    }
}
