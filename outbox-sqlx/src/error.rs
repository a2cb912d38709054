//! `sqlx::Error` to `StoreError`.

use std::borrow::Cow;

use outbox_core::store::{StoreError, StoreErrorKind};
use sqlx::error::DatabaseError;

/// Why a transaction cannot be committed that sqlx has rolled back by itself. It does that when a
/// savepoint in it is dropped while it begins, and would report success.
pub(crate) const TRANSACTION_HAS_ENDED: &str =
    "it has ended already: a savepoint in it was dropped while it began";

/// Turns what sqlx reports while `doing` something into what the framework branches on.
///
/// `classify` knows the error codes of one database.
pub(crate) fn store_error(
    doing: impl Into<Cow<'static, str>>,
    error: sqlx::Error,
    classify: fn(&dyn DatabaseError) -> StoreErrorKind,
) -> StoreError {
    let kind = match &error {
        sqlx::Error::Database(database) => classify(database.as_ref()),
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => StoreErrorKind::Unreachable,
        _ => StoreErrorKind::Other,
    };
    StoreError::new(kind, doing).with_source(error)
}
