//! Everything generated code may name, and nothing else may.
//!
//! The derive and this crate are pinned to each other, so what is here can change in any release.

use std::time::Duration;

pub use core::num::NonZeroU32;
pub use std::option::Option;
pub use std::result::Result;
pub use std::string::String;
pub use std::time;

pub use serde;

pub use crate::backoff::Backoff;
pub use crate::coverage::{Here, Left, NoHandler, Right, SetOf};
pub use crate::event::{BehindDead, EVENT_NAME_MAX, OutboxEvent, Priority};
pub use crate::event_set::{
    DecodeError, EventOf, EventSet, decoded, has_name, share_a_name, unknown_name,
};
pub use crate::key::KeyBuilder;
pub use crate::version::{PayloadError, read, read_own, upcast};

/// What a function named by `dedup_with` or `ordering_with` may return.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a key",
    label = "returns `{Self}`",
    note = "a function named by `dedup_with` or `ordering_with` returns `String`, `&str` or `Option<String>`"
)]
pub trait IntoKey {
    /// The key, if there is one.
    fn into_key(self) -> Option<String>;
}

impl IntoKey for String {
    fn into_key(self) -> Option<String> {
        Some(self)
    }
}

impl IntoKey for &str {
    fn into_key(self) -> Option<String> {
        Some(self.to_owned())
    }
}

impl IntoKey for Option<String> {
    fn into_key(self) -> Option<String> {
        self
    }
}

/// [`Backoff::new`] for a `const`: what it refuses stops the build.
#[must_use]
pub const fn backoff(base: Duration, max: Duration, jitter: f64) -> Backoff {
    match Backoff::new(base, max, jitter) {
        Ok(backoff) => backoff,
        Err(_) => panic!("`backoff` needs 0 < base <= max <= 100 years and a jitter from 0 to 1"),
    }
}

/// An attempt limit for a `const`.
#[must_use]
pub const fn at_least_one(n: u32) -> NonZeroU32 {
    match NonZeroU32::new(n) {
        Some(n) => n,
        None => panic!("must be at least 1"),
    }
}
