//! Typed outbox events, without a line of SQL.

use std::time::Duration;

pub mod event;
pub mod key;

pub mod handler;
pub mod lease;
pub mod outcome;
pub mod store;

pub mod backoff;

#[cfg(feature = "testing")]
pub mod testing;

#[doc(hidden)]
pub mod __private;

pub use crate::backoff::Backoff;
pub use crate::event::{EventId, OutboxEvent, Priority};
pub use crate::handler::{Delivery, Handler, HandlerError};
pub use crate::store::{EventState, Store, StoreError};
#[cfg(feature = "derive")]
pub use outbox_derive::OutboxEvent;

/// The longest span this crate accepts anywhere: 100 years.
///
/// A bound far below what a database's interval arithmetic can hold, so that no sum of a stored
/// time and a configured span overflows.
pub const DURATION_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
