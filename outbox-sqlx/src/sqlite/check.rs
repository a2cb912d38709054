//! Making sure that this process can work with the database.

use std::num::NonZeroU32;
use std::time::Duration;

use outbox_core::event::Priority;
use outbox_core::lease::LeaseToken;
use outbox_core::outcome::Outcome;
use outbox_core::store::{
    ClaimRequest, Insertion, LowWater, NewEvent, Settled, Settlement, StoreError, StoreErrorKind,
};
use sqlx::SqliteConnection;

use super::code::sqlite_error;
use super::sql::{Statements, Table, safe};
use super::{claim, insert, migrate, settle};

/// 0 (OFF), 1 (NORMAL), 2 (FULL) or 3 (EXTRA), for this connection.
pub(super) const SYNCHRONOUS: &str = "PRAGMA synchronous";

const FULL: i64 = 2;

const NAME: &str = "outbox.check";

/// Takes a real row through everything a relay does. The caller rolls back.
///
/// Rights cannot be asked for in SQLite: a file, a directory or the whole mount may be read-only,
/// and only a write finds out.
pub(super) async fn run(
    connection: &mut SqliteConnection,
    statements: &Statements,
    table: &Table,
) -> Result<(), StoreError> {
    migrate::require_version(connection, statements, table).await?;
    warn_if_commits_can_be_lost(connection, statements).await?;

    let inserted = insert::insert(connection, statements, &[event()]).await?;
    let [Insertion::Inserted(id)] = inserted[..] else {
        return Err(odd("a new row was taken for a duplicate"));
    };
    let request = ClaimRequest {
        reserved: 0,
        limit: NonZeroU32::MIN,
        lease: Duration::from_secs(60),
        token: LeaseToken::random(),
        instance: NAME,
        names: &[NAME],
        low_water: LowWater::BEGINNING,
    };
    let claimed = claim::run_rows(connection, statements, &[id.row()], &request)
        .await
        .map_err(|error| sqlite_error("claim a row to check the outbox", error))?;
    let [claimed] = &claimed[..] else {
        return Err(odd("a row that was just inserted could not be claimed"));
    };
    let settlement = Settlement {
        lease: claimed.lease(),
        outcome: Outcome::Processed { output: None },
    };
    let settled = settle::run(connection, statements, &[settlement])
        .await
        .map_err(|error| sqlite_error("settle a row to check the outbox", error))?;
    match settled[..] {
        [Settled::Recorded] => Ok(()),
        _ => Err(odd("a row that was just claimed could not be settled")),
    }
}

async fn warn_if_commits_can_be_lost(
    connection: &mut SqliteConnection,
    statements: &Statements,
) -> Result<(), StoreError> {
    let synchronous: i64 = sqlx::query_scalar(safe(&statements.synchronous))
        .fetch_one(connection)
        .await
        .map_err(|error| sqlite_error("read `PRAGMA synchronous`", error))?;
    if synchronous < FULL {
        tracing::warn!(
            synchronous,
            "the connections of the outbox do not wait for the disk at a commit: the last events \
             can be lost with the power; set `PRAGMA synchronous = FULL`"
        );
    }
    Ok(())
}

fn odd(what: &'static str) -> StoreError {
    StoreError::new(StoreErrorKind::Other, "check the outbox").with_source(what)
}

fn event() -> NewEvent {
    NewEvent {
        name: NAME,
        version: NonZeroU32::MIN,
        payload: "{}".to_owned(),
        headers: None,
        dedup_key: None,
        ordering_key: None,
        priority: Priority::Low,
        max_attempts: NonZeroU32::MIN,
        delay: Duration::ZERO,
        // Kept, so that the history is written to as well.
        retention: Duration::from_secs(60),
        key_retention: Duration::ZERO,
        lease: None,
    }
}
