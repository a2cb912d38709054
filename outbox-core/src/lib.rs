//! Typed outbox events, without a line of SQL.

use std::time::Duration;

pub mod event;
pub mod key;

pub mod handler;
mod registry;

pub mod publish;
mod transaction;

mod outbox;

pub mod backoff;
mod dispatch;
pub mod outcome;

mod engine;
mod relay;

pub mod lease;
pub mod store;

mod counters;
pub mod settings;
mod settled;

#[cfg(feature = "testing")]
pub mod testing;

#[doc(hidden)]
pub mod __private;

pub use crate::backoff::Backoff;
pub use crate::counters::Snapshot;
pub use crate::engine::ShutdownError;
pub use crate::event::{EventId, OutboxEvent, Priority};
pub use crate::handler::{Delivery, Handler, HandlerError};
pub use crate::outbox::{DirectError, Dispatching, Outbox, OutboxBuilder};
pub use crate::outcome::DeadReason;
pub use crate::publish::{Duplicate, PublishError, PublishOptions, Published};
pub use crate::registry::BuildError;
pub use crate::relay::{Relay, RelayBuilder, RelayError};
pub use crate::settled::{SettledEvent, SettledResult};
pub use crate::store::{EventRecord, EventState, Store, StoreError, StoreErrorKind};
pub use crate::transaction::OutboxTx;
#[cfg(feature = "derive")]
pub use outbox_derive::OutboxEvent;

/// The longest span this crate accepts anywhere: 100 years.
///
/// A bound far below what a database's interval arithmetic can hold, so that no sum of a stored
/// time and a configured span overflows.
pub const DURATION_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
