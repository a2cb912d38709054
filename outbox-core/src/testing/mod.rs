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
//! [`MemoryStore`] is a store like those on a database. Build the application's outbox on it, let the
//! code under test publish, and say what has to be there:
//!
//! ```
//! use outbox_core::testing::{MemoryStore, assert_not_published, assert_published};
//! use outbox_core::testing::{run_until_idle, run_until_settled};
//! use outbox_core::{EventState, HandlerError, Outbox, OutboxEvent, Store};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Debug, PartialEq, Serialize, Deserialize, OutboxEvent)]
//! #[outbox(dedup_key = "{order_id}", max_attempts = 3)]
//! struct OrderPaid {
//!     order_id: u64,
//! }
//!
//! /// What is under test.
//! async fn pay<S: Store>(outbox: &Outbox<S>, order_id: u64) -> Result<(), Box<dyn std::error::Error>> {
//!     let mut tx = outbox.begin().await?;
//!     tx.publish(&OrderPaid { order_id }).await?;
//!     tx.commit().await?;
//!     Ok(())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = MemoryStore::new();
//! let outbox = Outbox::builder(store.clone())
//!     .on(|event: OrderPaid| async move {
//!         match event.order_id {
//!             13 => Err(HandlerError::retry("the mail server is down")),
//!             _ => Ok(()),
//!         }
//!     })
//!     .build()?;
//!
//! assert_not_published::<OrderPaid>(&store);
//! pay(&outbox, 7).await?;
//! assert_eq!(assert_published::<OrderPaid>(&store), OrderPaid { order_id: 7 });
//! assert_eq!(run_until_idle(&outbox).await.processed, 1);
//!
//! // Three attempts with their backoffs, and then a dead letter, in no time.
//! pay(&outbox, 13).await?;
//! let ran = run_until_settled(&outbox).await;
//! assert_eq!((ran.retried, ran.dead), (2, 1));
//! assert_eq!(store.records()[1].state, EventState::DeadLetter);
//! # Ok(())
//! # }
//! ```
//!
//! A handler is given what is read back from the event's JSON, here as in production, however it is
//! dispatched. So no test passes on a value that the database would lose. [`assert_survives`] says it
//! of one event. The names under which events are stored can be pinned by a test as well: [`pinned`]
//! for an event, with its version and former names, and
//! `assert_eq!(ShopEvents::NAMES, ["order.paid", "alert.raised"])` for those of an
//! [`EventSet`](crate::EventSet).
//!
//! # Time without waiting
//!
//! [`MemoryStore::advance`] moves the store's clock on: leases end, and retries and delays come due.
//! Otherwise it follows Tokio's. With
//! [`on_current_runtime`](crate::OutboxBuilder::on_current_runtime) and under
//! `#[tokio::test(start_paused = true)]`, a lease of 30 seconds ends with
//! `tokio::time::advance(Duration::from_secs(30)).await`, a retry is due after its backoff, and a test
//! of an hour takes no time. (Without it the background has a thread, and a clock, of its own.) Where
//! the clock has to stand still, [`MemoryStore::expire_lease`], [`make_due`](MemoryStore::make_due) and
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
mod kit;
mod memory;

pub use kit::{
    Ran, assert_not_published, assert_published, assert_published_times, assert_published_where,
    assert_survives, pinned, run_until_idle, run_until_settled,
};
pub use memory::{
    Hold, MemoryConnection, MemoryExclusive, MemoryStore, MemoryTx, MemoryWakeups, Operation,
    Savepoint,
};
