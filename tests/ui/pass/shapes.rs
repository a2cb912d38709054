//! Unit, tuple and enum events, `Self` in field types, and a derive inside a function.

use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct CacheCleared;

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_key = "{0}/{1.sku}", ordering_key = "{1.place.0}")]
struct LineAdded(u64, Line);

#[derive(Serialize, Deserialize)]
struct Line {
    sku: String,
    place: (u8, u8),
}

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_key = "{{{order_id}}}", ordering_with = OrderChanged::variant)]
enum OrderChanged {
    Paid { order_id: u64, cents: u64 },
    Cancelled { order_id: String },
}

impl OrderChanged {
    fn variant(&self) -> &'static str {
        match self {
            Self::Paid { .. } => "paid",
            Self::Cancelled { .. } => "cancelled",
        }
    }
}

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_key = "{0.sku}:{0.place.1}")]
enum LineChanged {
    Added(Line),
    Removed(Line, u64),
}

#[derive(Serialize, Deserialize, OutboxEvent)]
struct CategoryMoved {
    #[outbox(dedup)]
    id: u64,
    parents: Vec<Self>,
}

fn main() {
    #[derive(Serialize, Deserialize, OutboxEvent)]
    #[outbox(dedup_key = "{id}")]
    struct InFunction {
        id: u8,
    }
    assert_eq!(InFunction { id: 1 }.dedup_key().as_deref(), Some("1"));
    assert_eq!(InFunction::NAME, "in.function");

    assert_eq!(CacheCleared::NAME, "cache.cleared");
    assert_eq!(CacheCleared.dedup_key(), None);

    let line = || Line {
        sku: "a/b:c".to_owned(),
        place: (4, 5),
    };
    let added = LineAdded(7, line());
    assert_eq!(added.dedup_key().as_deref(), Some("7/a/b:c"));
    assert_eq!(added.ordering_key().as_deref(), Some("4"));

    let paid = OrderChanged::Paid {
        order_id: 7,
        cents: 1,
    };
    let cancelled = OrderChanged::Cancelled {
        order_id: "{7}".to_owned(),
    };
    assert_eq!(paid.dedup_key().as_deref(), Some("{7}"));
    assert_eq!(cancelled.dedup_key().as_deref(), Some(r"{{7\}}"));
    assert_eq!(paid.ordering_key().as_deref(), Some("paid"));
    assert!(matches!(paid, OrderChanged::Paid { cents: 1, .. }));

    for changed in [LineChanged::Added(line()), LineChanged::Removed(line(), 1)] {
        assert_eq!(changed.dedup_key().as_deref(), Some(r"a/b\:c:5"));
    }

    let moved = CategoryMoved {
        id: 1,
        parents: Vec::new(),
    };
    assert_eq!(moved.dedup_key().as_deref(), Some("1"));
    assert!(moved.parents.is_empty());
}
