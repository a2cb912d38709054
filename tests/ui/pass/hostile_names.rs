//! Everything generated code could mean by accident is something else here.

#![allow(
    dead_code,
    non_snake_case,
    non_upper_case_globals,
    non_camel_case_types,
    unused_macros
)]

mod std {}
mod core {}
mod alloc {}
mod serde {}
mod outbox_core {}

struct String;
struct Duration;
struct NonZeroU32;
struct KeyBuilder;
struct Backoff;
struct Priority;
enum Option {
    Some,
    None,
}
enum Result {
    Ok,
    Err,
}
fn Ok() {}
fn Err() {}
trait From {}
trait EventSet {
    fn name(&self) -> u8 {
        1
    }
    fn decode(_: u8, _: u8) {}
}
impl<T> EventSet for T {}
trait EventOf {}
trait SetOf {}
struct Here;
struct Left;
struct Right;
struct NoHandler;
struct DecodeError;
fn Some() {}
const None: () = ();
trait OutboxEvent {
    fn dedup_key(&self) -> u8 {
        1
    }
}
impl<T> OutboxEvent for T {}
trait Display {}
trait Send {}
trait Sync {}
trait Serialize {}
trait DeserializeOwned {}
trait TryFrom {}
struct PayloadError;
fn read() {}
fn upcast() {}
macro_rules! assert {
    ($($any:tt)*) => {
        ::std::compile_error!("a local `assert!`")
    };
}

#[derive(::serde::Serialize, ::serde::Deserialize, ::outbox_core::OutboxEvent)]
#[outbox(name = "order.paid", version = 3, priority = "high", max_attempts = 3)]
#[outbox(alias = "paid", upcast(from = First<T>, version = 1), upcast(from = Self, version = 2))]
#[outbox(dedup_key = "{id}:{part}", ordering_with = key, timeout = "1s", retention = "1d")]
#[outbox(backoff(base = "1s", max = "2s", jitter = 1))]
struct OrderPaid<T> {
    id: ::std::string::String,
    part: T,
}

#[derive(::serde::Deserialize)]
struct First<T>(::std::string::String, T);

impl<T> ::std::convert::From<First<T>> for OrderPaid<T> {
    fn from(First(id, part): First<T>) -> Self {
        Self { id, part }
    }
}

fn key<T>(_: &OrderPaid<T>) -> &'static ::std::primitive::str {
    "one"
}

#[derive(::serde::Serialize, ::serde::Deserialize, ::outbox_core::OutboxEvent)]
#[outbox(dedup_key = "{id}")]
enum Changed {
    Some {
        id: ::std::primitive::u8,
    },
    None {
        id: ::std::primitive::u8,
        __key_id: ::std::primitive::u8,
    },
}

#[derive(::outbox_core::OutboxEvents)]
enum Events {
    Ok(OrderPaid<::std::primitive::u8>),
    None(Changed),
}

/// Primitives too. Serde's derives do not stand that, so its impls are outside.
mod primitives {
    struct str;
    struct u8;
    struct u32;
    struct u64;
    struct f64;
    struct char;
    struct bool;

    #[derive(::outbox_core::OutboxEvent)]
    #[outbox(
        dedup_key = "{0}:{0}",
        version = 2,
        upcast(from = Self, version = 1),
        max_attempts = 3,
        backoff(),
        timeout = "1s"
    )]
    pub struct Counted(pub ::std::primitive::u8);

    #[derive(::outbox_core::OutboxEvents)]
    pub enum Events {
        Counted(Counted),
    }
}

impl ::serde::Serialize for primitives::Counted {
    fn serialize<S: ::serde::Serializer>(
        &self,
        serializer: S,
    ) -> ::std::result::Result<S::Ok, S::Error> {
        serializer.serialize_u8(self.0)
    }
}

impl<'de> ::serde::Deserialize<'de> for primitives::Counted {
    fn deserialize<D: ::serde::Deserializer<'de>>(
        deserializer: D,
    ) -> ::std::result::Result<Self, D::Error> {
        ::serde::Deserialize::deserialize(deserializer).map(primitives::Counted)
    }
}

fn main() {
    let paid = OrderPaid {
        id: ::std::string::String::from("a"),
        part: 1,
    };
    let key = ::outbox_core::OutboxEvent::dedup_key(&paid);
    ::std::assert_eq!(key.as_deref(), ::std::option::Option::Some("a:1"));
    let event = <Events as ::std::convert::From<_>>::from(paid);
    ::std::assert_eq!(::outbox_core::EventSet::name(&event), "order.paid");
    let changed = Changed::None { id: 1, __key_id: 2 };
    let key = ::outbox_core::OutboxEvent::dedup_key(&changed);
    ::std::assert_eq!(key.as_deref(), ::std::option::Option::Some("1"));
}
