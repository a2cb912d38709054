//! Making sure that this process can work with the database.

use std::num::NonZeroU32;
use std::time::Duration;

use outbox_core::dead_letter::{DeadLetterChange, DeadLetterRows};
use outbox_core::event::{BehindDead, Priority};
use outbox_core::lease::{HeldLease, LeaseToken};
use outbox_core::outcome::{DeadReason, ErrorText, Outcome};
use outbox_core::store::{
    ClaimRequest, Insertion, KnownEvent, LowWater, NewEvent, Settled, Settlement, StoreError,
    StoreErrorKind,
};
use sqlx::SqliteConnection;

use super::code::sqlite_error;
use super::sql::{Statements, Table, safe};
use super::{claim, dead_letter, insert, lock, migrate, settle};

/// 0 (OFF), 1 (NORMAL), 2 (FULL) or 3 (EXTRA), for this connection.
pub(super) const SYNCHRONOUS: &str = "PRAGMA synchronous";

const FULL: i64 = 2;

const NAME: &str = "outbox.check";

/// Takes a real row through everything a relay does and through a requeue, and takes a lock. The
/// caller rolls back.
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
    let lease = claim(connection, statements, id.row()).await?;
    let dead = Outcome::Dead {
        reason: DeadReason::Permanent,
        error: ErrorText::new(&"a check"),
    };
    settle(connection, statements, lease, dead).await?;
    requeue(connection, statements, id.row()).await?;
    let lease = claim(connection, statements, id.row()).await?;
    let processed = Outcome::Processed { output: None };
    settle(connection, statements, lease, processed).await?;
    take_lock(connection, statements).await
}

async fn claim(
    connection: &mut SqliteConnection,
    statements: &Statements,
    row: i64,
) -> Result<HeldLease, StoreError> {
    let request = ClaimRequest {
        reserved: 0,
        limit: NonZeroU32::MIN,
        lease: Duration::from_secs(60),
        token: LeaseToken::random(),
        instance: NAME,
        events: &[KnownEvent {
            name: NAME,
            handler: None,
            newest_version: NonZeroU32::MIN,
        }],
        low_water: LowWater::BEGINNING,
        freed: &[],
    };
    let claimed = claim::run_rows(connection, statements, &[row], &request)
        .await
        .map_err(|error| sqlite_error("claim a row to check the outbox", error))?;
    match &claimed[..] {
        [claimed] => Ok(claimed.lease()),
        _ => Err(odd("a row that is due could not be claimed")),
    }
}

async fn settle(
    connection: &mut SqliteConnection,
    statements: &Statements,
    lease: HeldLease,
    outcome: Outcome,
) -> Result<(), StoreError> {
    let settlement = Settlement { lease, outcome };
    let settled = settle::run(connection, statements, &[settlement])
        .await
        .map_err(|error| sqlite_error("settle a row to check the outbox", error))?;
    match settled[..] {
        [Settled::Recorded] => Ok(()),
        _ => Err(odd("a row that was just claimed could not be settled")),
    }
}

async fn requeue(
    connection: &mut SqliteConnection,
    statements: &Statements,
    row: i64,
) -> Result<(), StoreError> {
    let change = DeadLetterChange::Requeue {
        delay: Duration::ZERO,
        spacing: Duration::ZERO,
    };
    let rows = DeadLetterRows::Numbered(&[row]);
    let changed = dead_letter::change(connection, statements, rows, change)
        .await
        .map_err(|error| sqlite_error("requeue a row to check the outbox", error))?;
    match changed.rows[..] {
        [_] => Ok(()),
        _ => Err(odd("a row that was just buried could not be requeued")),
    }
}

async fn take_lock(
    connection: &mut SqliteConnection,
    statements: &Statements,
) -> Result<(), StoreError> {
    let token = LeaseToken::random();
    let failed = |error| sqlite_error("take a lock to check the outbox", error);
    let taken = lock::take(connection, statements, NAME, token, NAME)
        .await
        .map_err(failed)?;
    let kept = lock::keep(connection, statements, NAME, token)
        .await
        .map_err(failed)?;
    lock::free(connection, statements, NAME, token)
        .await
        .map_err(failed)?;
    match taken && kept {
        true => Ok(()),
        false => Err(odd("a lock that nobody has could not be taken")),
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
        // A key, so that the table of keys is written to.
        dedup_key: Some(LeaseToken::random().as_uuid().to_string()),
        fingerprint: None,
        ordering_key: None,
        behind_dead: BehindDead::Block,
        priority: Priority::Low,
        max_attempts: NonZeroU32::MIN,
        delay: Duration::ZERO,
        expires_in: None,
        // And kept, so that the history is.
        retention: Duration::from_secs(60),
        key_retention: Duration::ZERO,
        lease: None,
    }
}
