//! What a SQLSTATE means to the framework.

use outbox_core::store::{StoreError, StoreErrorKind};
use sqlx::error::DatabaseError;

use crate::error::store_error;

/// Turns what sqlx reports while `doing` something into what the framework branches on.
pub(super) fn failed(doing: &'static str, error: sqlx::Error) -> StoreError {
    let doing = if is_aborted_transaction(&error) {
        "use a transaction that an earlier error has aborted"
    } else {
        doing
    };
    store_error(doing, error, classify)
}

/// Whether the connection is as good as before the error.
///
/// A list of what is known to be harmless: a connection thrown away without need costs a reconnect,
/// one kept without reason can fail every statement after it. A read-only server (25006) is in
/// neither, so that the next connection can find the new primary.
pub(super) fn leaves_connection_usable(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(database) => matches!(
            classify(database.as_ref()),
            StoreErrorKind::Conflict
                | StoreErrorKind::TimedOut
                | StoreErrorKind::Locked
                | StoreErrorKind::Data
                | StoreErrorKind::Denied
                | StoreErrorKind::SchemaMissing
        ),
        sqlx::Error::Encode(_) => true,
        _ => false,
    }
}

fn is_aborted_transaction(error: &sqlx::Error) -> bool {
    let database = error.as_database_error();
    database.and_then(DatabaseError::code).as_deref() == Some("25P02")
}

fn classify(error: &dyn DatabaseError) -> StoreErrorKind {
    if is_misrouted(error) {
        return StoreErrorKind::Conflict;
    }
    match error.code() {
        Some(code) => kind_of(&code),
        None => StoreErrorKind::Other,
    }
}

/// Whether a row was on its way into the default partition when a partition for its day was
/// attached. The same statement, sent again, finds that one. A check that a table has beyond its
/// partition's bounds has a name.
fn is_misrouted(error: &dyn DatabaseError) -> bool {
    error.code().as_deref() == Some("23514")
        && error.constraint().is_none()
        && error
            .table()
            .is_some_and(|table| table.ends_with("_history_default"))
}

/// By the code and never by the text, which comes in the server's language.
fn kind_of(code: &str) -> StoreErrorKind {
    match code {
        // query_canceled is how statement_timeout reports itself.
        "57014" => StoreErrorKind::TimedOut,
        "55P03" => StoreErrorKind::Locked,
        // Shutting down, starting up; a read-only server is one that was, or will be, the primary.
        "57P01" | "57P02" | "57P03" | "25006" => StoreErrorKind::Unreachable,
        "42501" => StoreErrorKind::Denied,
        "42P01" | "3F000" => StoreErrorKind::SchemaMissing,
        _ => match code.get(..2) {
            Some("40") => StoreErrorKind::Conflict,
            // Connection exceptions; out of connections, memory or disk.
            Some("08" | "53") => StoreErrorKind::Unreachable,
            // 54: too complex, as JSON that is nested too deeply.
            Some("22" | "23" | "54") => StoreErrorKind::Data,
            Some("28") => StoreErrorKind::Denied,
            _ => StoreErrorKind::Other,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(code: &str, expected: StoreErrorKind) {
        assert_eq!(kind_of(code), expected, "{code}");
    }

    #[test]
    fn a_code_says_what_a_program_can_do() {
        check("40001", StoreErrorKind::Conflict);
        check("40P01", StoreErrorKind::Conflict);
        check("57014", StoreErrorKind::TimedOut);
        check("55P03", StoreErrorKind::Locked);
        check("54001", StoreErrorKind::Data);
        check("08006", StoreErrorKind::Unreachable);
        check("57P01", StoreErrorKind::Unreachable);
        check("53300", StoreErrorKind::Unreachable);
        check("25006", StoreErrorKind::Unreachable);
        check("22P02", StoreErrorKind::Data);
        check("23514", StoreErrorKind::Data);
        check("42501", StoreErrorKind::Denied);
        check("42P01", StoreErrorKind::SchemaMissing);
        check("3F000", StoreErrorKind::SchemaMissing);
        check("25P02", StoreErrorKind::Other);
        check("", StoreErrorKind::Other);
    }
}
