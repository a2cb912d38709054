//! Every key of the attribute, and what it sets.

use std::num::NonZeroU32;
use std::time::Duration;

use outbox_core::{Backoff, BehindDead, OutboxEvent, Priority};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(name = "shop.order-paid", alias = "order.paid", alias = "order-paid")]
#[outbox(version = 4, oldest_version = 2, upcast(from = OrderPaidV2, version = 2))]
#[outbox(upcast(from = OrderPaidV3, version = 3))]
#[outbox(dedup_key = "{order_id}", ordering_key = "customer:{customer_id}")]
#[outbox(behind_dead = "skip", expires_in = "1h")]
#[outbox(priority = "high", max_attempts = 8, timeout = "10s", retention = "7d")]
#[outbox(backoff(base = "500ms", max = "1h", jitter = 0.5), output = ReceiptId)]
#[outbox(crate = ::outbox_core)]
struct OrderPaid {
    order_id: u64,
    customer_id: u64,
}

#[derive(Debug, Deserialize, PartialEq, Serialize)]
struct ReceiptId(u64);

/// Old versions need nothing but serde's `Deserialize`.
#[derive(Deserialize)]
struct OrderPaidV2 {
    order: u64,
}

#[derive(Deserialize)]
struct OrderPaidV3 {
    order: u64,
    customer: String,
}

impl From<OrderPaidV2> for OrderPaidV3 {
    fn from(paid: OrderPaidV2) -> Self {
        let customer = "0".to_owned();
        let order = paid.order;
        Self { order, customer }
    }
}

impl TryFrom<OrderPaidV3> for OrderPaid {
    type Error = std::num::ParseIntError;

    fn try_from(paid: OrderPaidV3) -> Result<Self, Self::Error> {
        Ok(Self {
            order_id: paid.order,
            customer_id: paid.customer.parse()?,
        })
    }
}

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_with = Self::key, ordering_with = customer)]
struct OrderShipped {
    order_id: u64,
    customer: Option<String>,
}

impl OrderShipped {
    fn key(&self) -> String {
        format!("shipped:{}", self.order_id)
    }
}

fn customer(order: &OrderShipped) -> Option<String> {
    order.customer.clone()
}

#[derive(Serialize, Deserialize, OutboxEvent)]
struct LineAdded {
    #[outbox(dedup, ordering)]
    order_id: u64,
    note: String,
    #[outbox(dedup)]
    sku: String,
}

fn main() {
    assert_eq!(OrderPaid::NAME, "shop.order-paid");
    assert_eq!(OrderPaid::ALIASES, ["order.paid", "order-paid"]);
    assert_eq!(OrderPaid::VERSION.get(), 4);
    let read = |version, payload| {
        let paid = OrderPaid::decode(NonZeroU32::new(version).unwrap(), payload);
        paid.map(|paid| (paid.order_id, paid.customer_id)).ok()
    };
    assert_eq!(read(1, r#"{"order":7}"#), None);
    assert_eq!(read(2, r#"{"order":7}"#), Some((7, 0)));
    assert_eq!(read(3, r#"{"order":7,"customer":"9"}"#), Some((7, 9)));
    assert_eq!(read(3, r#"{"order":7,"customer":"?"}"#), None);
    assert_eq!(read(4, r#"{"order_id":7,"customer_id":9}"#), Some((7, 9)));
    assert_eq!(read(5, r#"{"order_id":7,"customer_id":9}"#), None);
    assert_eq!(OrderPaid::PRIORITY, Priority::High);
    assert_eq!(OrderPaid::MAX_ATTEMPTS, NonZeroU32::new(8));
    assert_eq!(OrderPaid::BEHIND_DEAD, BehindDead::Skip);
    assert_eq!(LineAdded::BEHIND_DEAD, BehindDead::Block);
    assert_eq!(OrderPaid::EXPIRES_IN, Some(Duration::from_secs(3_600)));
    assert_eq!(LineAdded::EXPIRES_IN, None);
    assert_eq!(OrderPaid::TIMEOUT, Some(Duration::from_secs(10)));
    assert_eq!(OrderPaid::RETENTION, Some(Duration::from_secs(604_800)));
    let backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(3_600), 0.5);
    assert_eq!(OrderPaid::BACKOFF, backoff.ok());
    let _: <OrderPaid as OutboxEvent>::Output = ReceiptId(1);

    let paid = OrderPaid {
        order_id: 7,
        customer_id: 9,
    };
    assert_eq!(paid.dedup_key().as_deref(), Some("7"));
    assert_eq!(paid.ordering_key().as_deref(), Some("customer:9"));

    let shipped = OrderShipped {
        order_id: 7,
        customer: None,
    };
    assert_eq!(shipped.dedup_key().as_deref(), Some("shipped:7"));
    assert_eq!(shipped.ordering_key(), None);

    let added = LineAdded {
        order_id: 7,
        note: String::new(),
        sku: "a:b".to_owned(),
    };
    assert_eq!(added.dedup_key().as_deref(), Some("7:a:b"));
    assert_eq!(added.ordering_key().as_deref(), Some("7"));
    assert!(added.note.is_empty());
}
