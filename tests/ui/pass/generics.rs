//! Type parameters, const parameters and where-clauses.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_key = "{id}:{version}", output = Option<T>)]
struct Changed<T, K = u64>
where
    K: Clone,
{
    id: K,
    version: u32,
    after: BTreeMap<String, Vec<T>>,
}

// `Marker` is never stored, so it need not be serialisable; a key may show the field all the same.
#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(ordering_key = "{0}")]
struct Tagged<T: fmt::Debug, const N: usize>(Id<T>, [u8; 4]);

#[derive(Serialize, Deserialize)]
#[serde(bound = "")]
struct Id<T> {
    number: u64,
    of: PhantomData<T>,
}

impl<T> fmt::Display for Id<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number.fmt(f)
    }
}

#[derive(Serialize, Deserialize, OutboxEvent)]
#[serde(bound = "")]
struct Moved<From, To> {
    from: PhantomData<From>,
    to: PhantomData<To>,
}

struct NotSerialisable;

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_key = "{id}")]
enum Either<L, R> {
    Left { id: L },
    Right { id: Vec2<R> },
}

#[derive(Serialize, Deserialize)]
struct Vec2<R>(R, R);

impl<R: fmt::Display> fmt::Display for Vec2<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.0, self.1)
    }
}

fn event<E: OutboxEvent>(event: &E) -> (Option<String>, Option<String>) {
    (event.dedup_key(), event.ordering_key())
}

fn main() {
    let changed = Changed {
        id: "a:b".to_owned(),
        version: 2,
        after: BTreeMap::from([("x".to_owned(), vec![1_u8])]),
    };
    assert_eq!(event(&changed).0.as_deref(), Some(r"a\:b:2"));

    let tagged: Tagged<u8, 3> = Tagged(
        Id {
            number: 5,
            of: PhantomData,
        },
        [0; 4],
    );
    assert_eq!(event(&tagged).1.as_deref(), Some("5"));

    let moved: Moved<NotSerialisable, NotSerialisable> = Moved {
        from: PhantomData,
        to: PhantomData,
    };
    assert_eq!(event(&moved), (None, None));

    let left: Either<u8, u8> = Either::Left { id: 1 };
    assert_eq!(event(&left).0.as_deref(), Some("1"));
    let right: Either<u8, u8> = Either::Right { id: Vec2(1, 2) };
    assert_eq!(event(&right).0.as_deref(), Some("1/2"));
}
