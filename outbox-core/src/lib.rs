//! Typed outbox events, without a line of SQL.
//!
//! An *outbox* is a table in the application's own database. An event is written to it in the same
//! transaction as the change it describes, so that either both are there or neither, and is handed
//! to its handler after the commit: at once in the process that published it, or later by a *relay*
//! in any process.
//!
//! This crate is everything but the database. The stores on PostgreSQL and SQLite are in
//! `outbox-sqlx`; a store in memory, for tests, is in `testing` (feature `testing`).
//!
//! # The concepts, in the order in which you meet them
//!
//! 1. An [`OutboxEvent`] is a type with a stable name. Derive it. Optionally it has a dedup key, a
//!    priority, limits of its own, and a type that its handler returns.
//! 2. A [`Handler`] does what has to be done about an event. It returns an output or a
//!    [`HandlerError`]: try again, try again after a while, or give up. [`Delivery`] tells it which
//!    event and which attempt this is. What concerns all of them is a [`Middleware`] around each run.
//! 3. An [`Outbox`] is built from a [`Store`] and the handlers. It is what the application keeps.
//! 4. An [`EventSet`] is an enum of the application's events. It is optional. An outbox of a set
//!    publishes its members alone, and does not compile while one of them has no handler.
//! 5. [`Outbox::begin`] begins a transaction in which the application makes its change and
//!    [publishes](OutboxTx::publish). Its [`commit`](OutboxTx::commit) commits and then dispatches.
//!    [`Outbox::publish`] writes through a transaction that the application began itself.
//! 6. [`Published`] says whether the event is new or a [`Duplicate`] of one with the same dedup
//!    key. A duplicate has the earlier event's state and its handler's output.
//! 7. A [`Relay`] takes what was not handled right after its commit. It claims events under a
//!    [lease], so that any number of processes can run one.
//! 8. A failed event is due again after its [`Backoff`]. After its last attempt, or when its
//!    handler gave up, it is a dead letter and keeps its [`DeadReason`].
//!
//! ```
//! use std::time::Duration;
//!
//! use outbox_core::testing::MemoryStore;
//! use outbox_core::{HandlerError, Outbox, OutboxEvent};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize, OutboxEvent)]
//! #[outbox(dedup_key = "{order_id}", output = String)]
//! struct OrderPaid {
//!     order_id: u64,
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let outbox = Outbox::builder(MemoryStore::new())
//!     .on(|event: OrderPaid| async move {
//!         Ok::<_, HandlerError>(format!("receipt of order {}", event.order_id))
//!     })
//!     .build()?;
//! let relay = outbox.relay().start().await?;
//!
//! let mut tx = outbox.begin().await?;
//! let published = tx.publish(&OrderPaid { order_id: 7 }).await?;
//! assert!(published.duplicate().is_none());
//! // Returns when the commit does; only `settled` waits for the handler.
//! tx.commit().await?.settled().await;
//!
//! let mut tx = outbox.begin().await?;
//! let again = tx.publish(&OrderPaid { order_id: 7 }).await?;
//! assert_eq!(again.event_id(), published.event_id());
//! let output = again.duplicate().unwrap().output()?;
//! assert_eq!(output.as_deref(), Some("receipt of order 7"));
//! tx.rollback().await?;
//!
//! relay.shutdown(Duration::from_secs(5)).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # At least once
//!
//! An event whose transaction committed is handled at least once or becomes a dead letter. It can
//! be handled more than once: a process can die between the effect and the record of it. So a
//! handler must be idempotent, and [`Delivery::event_id`] is what it can recognise a redelivery by.
//! The page of [`Handler`] says when one can be cut short.
//!
//! The promises are numbered, P1 to P18; those that a store has to keep are listed at [`Store`].
//!
//! # Modules
//!
//! What most applications need is re-exported here. The modules, in reading order: [`event`] and
//! [`key`], [`handler`], [`middleware`], [`publish`], [`backoff`] and [`outcome`], [`lease`], [`store`],
//! [`settings`]. [`store`] is for authors of stores and is not stable.
//!
//! # Features
//!
//! - `derive`, on by default: `#[derive(OutboxEvent)]` and `#[derive(OutboxEvents)]`
//! - `tower`: layers of `tower` around each run of a handler ([`middleware`])
//! - `testing`: the store in memory, and the contract that every store must keep, as tests

use std::time::Duration;

pub mod event;
mod event_set;
pub mod fingerprint;
pub mod key;
mod version;

pub mod handler;
mod handler_options;
mod lane;
pub mod middleware;
mod registry;

mod cancel;
mod progress;
pub mod publish;
mod transaction;
mod uncommitted;

mod builder;
mod coverage;
mod outbox;

pub mod backoff;
mod dispatch;
pub mod outcome;

mod engine;
mod relay;

pub mod cadence;
pub mod dead_letter;
mod exclusive;
pub mod lock;
mod pause;
pub mod stats;

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
pub use crate::builder::OutboxBuilder;
pub use crate::cadence::{Cadence, PassReport};
pub use crate::cancel::Cancellation;
pub use crate::counters::Snapshot;
pub use crate::dead_letter::{
    BulkError, Changed, DeadLetter, DeadLetterCursor, DeadLetterFilter, DeadLetterPage,
    DeadLetters, Requeue,
};
pub use crate::engine::ShutdownError;
pub use crate::event::{BehindDead, EventId, OutboxEvent, Priority};
pub use crate::event_set::{AnyEvent, DecodeError, EventOf, EventSet};
pub use crate::exclusive::{EXCLUSIVE_NAME_MAX, Exclusive, ExclusiveError, LockError, Tenure};
pub use crate::handler::{Delivery, Handler, HandlerError, TransactionalHandler};
pub use crate::handler_options::{CircuitBreaker, HANDLER_NAME_MAX, HandlerOptions};
pub use crate::lock::LockId;
pub use crate::middleware::Middleware;
pub use crate::outbox::{BLOCKED_KEYS_MAX, DirectError, Dispatching, Outbox};
pub use crate::outcome::DeadReason;
pub use crate::pause::Pauses;
pub use crate::progress::{OutputError, Progress, WaitError};
pub use crate::publish::{Duplicate, PublishError, PublishOptions, Published};
pub use crate::registry::BuildError;
pub use crate::relay::{Relay, RelayBuilder, RelayError};
pub use crate::settled::{DeadEvent, SettledEvent, SettledResult, UndecodableEvent};
pub use crate::stats::{EventCounts, Stats};
pub use crate::store::{
    BlockedKey, EventRecord, EventState, Pause, PauseRef, Store, StoreError, StoreErrorKind,
};
pub use crate::transaction::OutboxTx;
pub use crate::uncommitted::{Handled, Uncommitted};
pub use crate::version::PayloadError;
#[cfg(feature = "derive")]
pub use outbox_derive::{OutboxEvent, OutboxEvents};

/// The longest span this crate accepts anywhere: 100 years.
///
/// A bound far below what a database's interval arithmetic can hold, so that no sum of a stored
/// time and a configured span overflows.
pub const DURATION_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
