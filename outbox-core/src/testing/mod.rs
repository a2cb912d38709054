//! What tests need: a store in memory, and the contract that every store must keep.
//!
//! Switch it on for tests only:
//!
//! ```toml
//! [dev-dependencies]
//! outbox-core = { path = "..", features = ["testing"] }
//! ```
//!
//! # Testing an application
//!
//! [`MemoryStore`] is a store like those on a database: build the application's outbox on it, let
//! the code under test publish, and look at the rows.
//!
//! ```
//! use std::time::Duration;
//!
//! use outbox_core::testing::MemoryStore;
//! use outbox_core::{EventState, HandlerError, Outbox, OutboxEvent};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize, OutboxEvent)]
//! #[outbox(dedup_key = "{order_id}", output = String)]
//! struct OrderPaid { order_id: u64 }
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = MemoryStore::new();
//! let outbox = Outbox::builder(store.clone())
//!     // The background follows the paused time of the test.
//!     .on_current_runtime()
//!     .on(|event: OrderPaid| async move {
//!         Ok::<_, HandlerError>(format!("receipt-{}", event.order_id))
//!     })
//!     .build()?;
//!
//! // Nothing exists before the commit.
//! let mut tx = outbox.begin().await?;
//! let _ = tx.publish(&OrderPaid { order_id: 7 }).await?;
//! assert!(store.records().is_empty());
//! tx.commit().await?.settled().await;
//! assert_eq!(store.records()[0].state, EventState::Processed);
//!
//! // The same key again is answered with the earlier result.
//! let mut tx = outbox.begin().await?;
//! let again = tx.publish(&OrderPaid { order_id: 7 }).await?;
//! assert_eq!(again.duplicate().unwrap().output()?.as_deref(), Some("receipt-7"));
//! # Ok(())
//! # }
//! ```
//!
//! # Time without waiting
//!
//! The store's clock is Tokio's. Under `#[tokio::test(start_paused = true)]` a lease of 30 seconds
//! ends with `tokio::time::advance(Duration::from_secs(30)).await`, a retry is due after its
//! backoff, and a test of an hour takes no time. Where the clock has to stand still,
//! [`MemoryStore::expire_lease`], [`make_due`](MemoryStore::make_due) and
//! [`expire_retention`](MemoryStore::expire_retention) move one row.
//!
//! # Waiting without sleeping
//!
//! [`MemoryStore::wait_for_calls`] comes back when the store has been asked often enough, and
//! [`MemoryStore::hold`] stops the callers of one [`Operation`] at its door until they are let in:
//! between the two, a test can stand between any two statements of a relay.
//!
//! # Failures
//!
//! A database can be out of reach, refuse a value, lose an answer after it has done the work, or
//! commit nothing because its transaction was aborted. [`MemoryStore`] does each on request; its
//! page lists how.
//!
//! # Testing a store
//!
//! [`contract`] says what a store promises, as tests that run against any of them. A crate with a
//! store of its own implements [`contract::Harness`] and calls
//! [`store_contract!`](crate::store_contract).

pub mod contract;
mod memory;

pub use memory::{
    Hold, MemoryConnection, MemoryExclusive, MemoryStore, MemoryTx, MemoryWakeups, Operation,
    Savepoint,
};
