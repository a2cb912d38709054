//! Outbox stores on PostgreSQL and SQLite, through sqlx.
//!
//! A store keeps the rows and decides nothing. What an outbox is, and everything an application
//! does with one, is in [`outbox_core`]; begin there.
//!
//! | store | feature | for |
//! | --- | --- | --- |
//! | `PgStore` | `postgres`, on by default | any number of processes on one PostgreSQL, 14 or later |
//! | `SqliteStore` | `sqlite` | one machine, no server: a file, one writer at a time |
//!
//! Both keep the same promises and pass the same contract. Each module's page says what is
//! particular to its database: the connections it uses, the rights it needs, the tables it makes.
//!
//! ```no_run
//! # #[cfg(feature = "postgres")]
//! # mod example {
//! use outbox_core::{HandlerError, Outbox, OutboxEvent};
//! use outbox_sqlx::PgStore;
//! use serde::{Deserialize, Serialize};
//! use sqlx::PgPool;
//!
//! #[derive(Serialize, Deserialize, OutboxEvent)]
//! struct OrderPaid {
//!     order_id: i64,
//! }
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let store = PgStore::new(PgPool::connect("postgres://localhost/shop").await?);
//! store.migrate().await?;
//!
//! let outbox = Outbox::builder(store)
//!     .on(|event: OrderPaid| async move {
//!         println!("order {} is paid", event.order_id);
//!         Ok::<_, HandlerError>(())
//!     })
//!     .build()?;
//! let relay = outbox.relay().start().await?;
//!
//! let mut tx = outbox.begin().await?;
//! sqlx::query("UPDATE orders SET paid = true WHERE id = 7").execute(&mut *tx).await?;
//! let _ = tx.publish(&OrderPaid { order_id: 7 }).await?;
//! tx.commit().await?;
//! # Ok(())
//! # }
//! # }
//! ```
//!
//! # sqlx
//!
//! This crate switches on neither a runtime nor TLS of sqlx, and not its `time`, `chrono` or `uuid`
//! types, which would change what the application's own `query!` macros infer. The application
//! chooses: `runtime-tokio`, and a `tls-..` feature where the server asks for it.
//!
//! The tables are made by a migrator of the stores' own, with a version table of its own. It does
//! not touch `_sqlx_migrations`.

#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod error;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod ident;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod part;

#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;

#[cfg(feature = "postgres")]
pub use crate::postgres::PgStore;
#[cfg(feature = "sqlite")]
pub use crate::sqlite::SqliteStore;

/// Compiles and runs what the README shows.
#[cfg(all(doctest, feature = "postgres", feature = "sqlite"))]
#[doc = include_str!("../../README.md")]
struct ReadmeDoctests;

/// Compiles what the runbook shows.
#[cfg(all(doctest, feature = "postgres", feature = "sqlite"))]
#[doc = include_str!("../../docs/operations.md")]
struct RunbookDoctests;
