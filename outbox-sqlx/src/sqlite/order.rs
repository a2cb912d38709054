//! Ordering keys: asking for one, and listing those that are blocked.

use std::num::NonZeroU32;
use std::time::Duration;

use outbox_core::store::{BLOCKED_COUNT_MAX, BlockedKey, EventState};
use serde_json::Value;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row, SqliteConnection};

use super::dead_letter::LAST_ERROR;
use super::row::{event_id, optional_text, text, undecodable};
use super::sql::{Statements, safe};

/// Whether nothing of the ordering key `?1` is in the way of an event that is inserted now.
pub(super) const IS_FREE: &str = "
    SELECT NOT EXISTS (SELECT 1 FROM {events} WHERE ordering_key = ?1)
        AND NOT EXISTS (SELECT 1 FROM {dead} WHERE blocks AND ordering_key = ?1)
";

/// The up to `?1` keys that are blocked, the longest blocked first; of each, how many events wait, up
/// to `?2`.
///
/// - The first cause of each key, if nothing else of the key is before it. Parts of one event have one
///   place.
pub(super) fn blocked_keys() -> String {
    format!(
        "WITH cause AS (
            SELECT
                ordering_key, coalesce(origin, id) AS place, id, name, 'dead_letter' AS state,
                attempts, settled_at AS since, reason, {LAST_ERROR} AS last_error
            FROM {{dead}}
            WHERE blocks
            UNION ALL
            SELECT
                ordering_key, coalesce(origin, id), id, name, 'failed', attempts, created_at, NULL,
                coalesce(json_extract(failures, '$[#-1].error'), '')
            FROM {{events}}
            WHERE ordering_key IS NOT NULL
                AND due_at IS NOT NULL AND attempts > 0 AND lease_token IS NULL
        ),
        first AS (
            SELECT *, row_number() OVER (PARTITION BY ordering_key ORDER BY place, id) AS nth
            FROM cause
        )
        SELECT
            ordering_key, id, name, state, attempts, max({{now}} - since, 0) AS blocked_for, reason,
            last_error,
            (
                SELECT count(*) FROM (
                    SELECT 1 FROM {{events}} AS later
                    WHERE later.ordering_key = first.ordering_key
                        AND coalesce(later.origin, later.id) > first.place
                    LIMIT ?2
                )
            ) AS waiting,
            (SELECT uuid FROM {{installation}}) AS installation
        FROM first
        WHERE nth = 1
            AND NOT EXISTS (
                SELECT 1 FROM {{events}} AS earlier
                WHERE earlier.ordering_key = first.ordering_key
                    AND coalesce(earlier.origin, earlier.id) < first.place
            )
        ORDER BY since, id
        LIMIT ?1"
    )
}

/// The highest number of a row, or 0.
pub(super) const NEWEST: &str = "SELECT coalesce(max(id), 0) FROM {events}";

pub(super) async fn newest(
    connection: &mut SqliteConnection,
    statements: &Statements,
) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar(safe(&statements.newest))
        .fetch_one(connection)
        .await
}

/// The first unsettled row of each of the ordering keys `?1`, a list in JSON.
pub(super) const NEXT_IN_ORDER: &str = "
    SELECT id FROM (
        SELECT (
            SELECT first.id
            FROM {events} AS first
            WHERE first.ordering_key = freed.value
            ORDER BY coalesce(first.origin, first.id), first.id
            LIMIT 1
        ) AS id
        FROM json_each(?1) AS freed
    )
    WHERE id IS NOT NULL
";

pub(super) async fn next_in_order(
    connection: &mut SqliteConnection,
    statements: &Statements,
    keys: &[String],
) -> Result<Vec<i64>, sqlx::Error> {
    sqlx::query_scalar(safe(&statements.next_in_order))
        .bind(Value::from(keys.to_vec()).to_string())
        .fetch_all(connection)
        .await
}

pub(super) async fn is_free(
    connection: &mut SqliteConnection,
    statements: &Statements,
    key: &str,
) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar(safe(&statements.is_free))
        .bind(key)
        .fetch_one(connection)
        .await
}

pub(super) async fn list(
    connection: &mut SqliteConnection,
    statements: &Statements,
    limit: NonZeroU32,
) -> Result<Vec<BlockedKey>, sqlx::Error> {
    let rows = sqlx::query(safe(&statements.blocked_keys))
        .bind(i64::from(limit.get()))
        .bind(i64::from(BLOCKED_COUNT_MAX))
        .fetch_all(connection)
        .await?;
    rows.iter().map(blocked).collect()
}

fn blocked(row: &SqliteRow) -> Result<BlockedKey, sqlx::Error> {
    let state: &str = row.try_get("state")?;
    let state = EventState::parse(state)
        .ok_or_else(|| undecodable("state", format!("unknown state `{state}`")))?;
    let key = text(row, "ordering_key")?;
    let mut blocked = BlockedKey::new(key, event_id(row)?, text(row, "name")?, state);
    blocked.attempts = u32::try_from(row.try_get::<i64, _>("attempts")?).unwrap_or(u32::MAX);
    let micros = row.try_get::<i64, _>("blocked_for")?;
    blocked.blocked_for = Duration::from_micros(u64::try_from(micros).unwrap_or(0));
    blocked.dead_reason = optional_text(row, "reason")?;
    blocked.last_error = text(row, "last_error")?;
    let waiting = row.try_get::<i64, _>("waiting")?;
    blocked.waiting = u32::try_from(waiting).unwrap_or(BLOCKED_COUNT_MAX);
    Ok(blocked)
}
