//! Outbox stores on PostgreSQL and SQLite, through sqlx.

#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod error;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod ident;

#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;

#[cfg(feature = "postgres")]
pub use crate::postgres::PgStore;
#[cfg(feature = "sqlite")]
pub use crate::sqlite::SqliteStore;
