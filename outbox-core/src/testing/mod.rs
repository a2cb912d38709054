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
//! [`MemoryStore`] is a store like those on a database: hand it to what is generic over
//! [`Store`](crate::Store), let that run, and look at the rows.
//!
//! ```
//! use std::time::Duration;
//!
//! use outbox_core::lease::LeaseToken;
//! use outbox_core::outcome::Outcome;
//! use outbox_core::store::{ClaimRequest, Insertion, LowWater, NewEvent, Settlement};
//! use outbox_core::testing::MemoryStore;
//! use outbox_core::{EventState, Priority, Store};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = MemoryStore::new();
//!
//! // Nothing exists before the commit.
//! let mut tx = store.begin().await?;
//! let event = NewEvent {
//!     name: "order.paid",
//!     version: 1.try_into()?,
//!     payload: r#"{"order_id":7}"#.to_owned(),
//!     headers: None,
//!     dedup_key: Some("7".to_owned()),
//!     ordering_key: None,
//!     priority: Priority::Normal,
//!     max_attempts: 3.try_into()?,
//!     delay: Duration::ZERO,
//!     retention: Duration::from_secs(3_600),
//!     key_retention: Duration::from_secs(86_400),
//!     lease: None,
//! };
//! store.insert(&mut tx, std::slice::from_ref(&event)).await?;
//! assert!(store.records().is_empty());
//! store.commit(tx).await?;
//! assert_eq!(store.records()[0].state, EventState::Pending);
//!
//! // A second one with the same key is a duplicate.
//! let mut tx = store.begin().await?;
//! let answers = store.insert(&mut tx, &[event]).await?;
//! store.commit(tx).await?;
//! assert!(matches!(answers[0], Insertion::Existing(_)));
//! assert_eq!(store.records().len(), 1);
//!
//! // What a relay does with it.
//! let request = ClaimRequest {
//!     limit: 10.try_into()?,
//!     lease: Duration::from_secs(30),
//!     token: LeaseToken::random(),
//!     instance: "test",
//!     names: &["order.paid"],
//!     low_water: LowWater::BEGINNING,
//! };
//! let claimed = store.claim(&request).await?;
//! let outcome = Outcome::Processed { output: None };
//! let lease = claimed[0].lease();
//! store.settle(&[Settlement { lease, outcome }]).await?;
//! assert_eq!(store.records()[0].state, EventState::Processed);
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
    Hold, MemoryConnection, MemoryStore, MemoryTx, MemoryWakeups, Operation, Savepoint,
};
