//! `sqlx::Error` to `StoreError`, by SQLite's result codes.

use std::borrow::Cow;

use outbox_core::store::{StoreError, StoreErrorKind};
use sqlx::error::DatabaseError;

use crate::error::store_error;

/// Turns what sqlx reports while `doing` something into what the framework branches on.
pub(super) fn sqlite_error(doing: impl Into<Cow<'static, str>>, error: sqlx::Error) -> StoreError {
    if matches!(
        error,
        sqlx::Error::BeginFailed | sqlx::Error::InvalidSavePointStatement
    ) {
        // The connection is not in the state sqlx thinks it is in. It is closed; the next is not.
        return StoreError::new(StoreErrorKind::Unreachable, doing).with_source(error);
    }
    store_error(doing, error, classify)
}

/// What SQLite's result codes mean to somebody who has to decide whether to try again.
fn classify(error: &dyn DatabaseError) -> StoreErrorKind {
    let code: u32 = error
        .code()
        .and_then(|code| code.parse().ok())
        .unwrap_or_default();
    // The low byte is the primary code; the rest of an extended one says more about it.
    match (code & 0xff, code) {
        (BUSY, BUSY_SNAPSHOT) | (LOCKED, _) => StoreErrorKind::Conflict,
        (BUSY | INTERRUPT, _) => StoreErrorKind::TimedOut,
        (TOOBIG | CONSTRAINT | MISMATCH, _) => StoreErrorKind::Data,
        (PERM | READONLY | AUTH, _) => StoreErrorKind::Denied,
        (IOERR | FULL | CANTOPEN, _) => StoreErrorKind::Unreachable,
        (ERROR, _) if error.message().starts_with("no such table") => StoreErrorKind::SchemaMissing,
        _ => StoreErrorKind::Other,
    }
}

// https://sqlite.org/rescode.html
const ERROR: u32 = 1;
const PERM: u32 = 3;
const BUSY: u32 = 5;
const LOCKED: u32 = 6;
const READONLY: u32 = 8;
const INTERRUPT: u32 = 9;
const IOERR: u32 = 10;
const FULL: u32 = 13;
const CANTOPEN: u32 = 14;
const TOOBIG: u32 = 18;
const CONSTRAINT: u32 = 19;
const MISMATCH: u32 = 20;
const AUTH: u32 = 23;
const BUSY_SNAPSHOT: u32 = BUSY | (2 << 8);
