//! With `crate = ..`, nothing in the output names `::outbox_core`.
//!
//! The trait behind the path is a fake. Each event has an impl of the real trait beside it, which
//! would overlap with the derived one if that were of the real trait too; and the fake's types
//! would not fit the real ones.

use serde::{Deserialize, Serialize};

mod fake {
    pub mod __private {
        pub use std::num::NonZeroU32;
        pub use std::option::Option;
        pub use std::result::Result;
        pub use std::string::String;

        pub use serde;

        pub const EVENT_NAME_MAX: usize = 1_000;

        pub mod time {
            #[derive(Debug, PartialEq)]
            pub struct Duration(u64);

            impl Duration {
                pub const fn new(seconds: u64, _nanos: u32) -> Self {
                    Self(seconds)
                }
            }
        }

        pub trait OutboxEvent: Serialize + Send + Sync + 'static {
            type Output;
            const NAME: &'static str;
            const ALIASES: &'static [&'static str];
            const VERSION: NonZeroU32;
            const PRIORITY: Priority;
            const MAX_ATTEMPTS: Option<NonZeroU32>;
            const BACKOFF: Option<Backoff>;
            const TIMEOUT: Option<time::Duration>;
            const RETENTION: Option<time::Duration>;
            fn decode(version: NonZeroU32, payload: &str) -> Result<Self, PayloadError>
            where
                Self: Sized;
            fn dedup_key(&self) -> Option<String>;
            fn ordering_key(&self) -> Option<String>;
        }

        use serde::Serialize;

        #[derive(Debug, PartialEq)]
        pub enum Priority {
            High,
        }

        pub struct PayloadError;

        pub fn read<T>(_: NonZeroU32, _: &str) -> Result<T, PayloadError> {
            Err(PayloadError)
        }

        pub fn upcast<T, Next>(_: NonZeroU32, _: T) -> Result<Next, PayloadError> {
            Err(PayloadError)
        }

        pub fn read_own<T>(_: NonZeroU32, _: &str) -> Result<T, PayloadError> {
            Err(PayloadError)
        }

        pub struct Backoff;

        pub const fn backoff(_: time::Duration, _: time::Duration, _: f64) -> Backoff {
            Backoff
        }

        pub const fn at_least_one(_: u32) -> NonZeroU32 {
            NonZeroU32::MAX
        }

        #[derive(Default)]
        pub struct KeyBuilder;

        impl KeyBuilder {
            pub fn new() -> Self {
                Self
            }

            pub fn last_field(self, _: &dyn std::fmt::Display) -> Self {
                self
            }

            pub fn finish(self) -> String {
                "fake".to_owned()
            }
        }

        pub trait IntoKey {
            fn into_key(self) -> Option<String>;
        }

        impl IntoKey for u8 {
            fn into_key(self) -> Option<String> {
                None
            }
        }
    }
}

use fake::__private::OutboxEvent;

#[derive(Serialize, Deserialize, outbox_core::OutboxEvent)]
#[outbox(
    alias = "paid",
    version = 2,
    upcast(from = u8, version = 1),
    priority = "high",
    max_attempts = 3,
    timeout = "1s",
    retention = "1d"
)]
#[outbox(backoff(), dedup_key = "{part}", ordering_with = key, crate = crate::fake)]
struct OrderPaid<T> {
    part: T,
}

fn key<T>(_: &OrderPaid<T>) -> u8 {
    7
}

impl outbox_core::OutboxEvent for OrderPaid<u8> {
    type Output = ();
    const NAME: &'static str = "real";
}

fn main() {
    let paid = OrderPaid { part: 1_u8 };
    assert_eq!(OutboxEvent::dedup_key(&paid).as_deref(), Some("fake"));
    assert_eq!(OutboxEvent::ordering_key(&paid), None);
    assert_eq!(<OrderPaid<u8> as OutboxEvent>::VERSION.get(), u32::MAX);
    assert_eq!(
        <OrderPaid<u8> as OutboxEvent>::PRIORITY,
        fake::__private::Priority::High
    );
    assert!(<OrderPaid<u8> as OutboxEvent>::decode(std::num::NonZeroU32::MIN, "").is_err());
    assert!(<OrderPaid<u8> as OutboxEvent>::TIMEOUT.is_some());
}
