//! Splitting rows among the handlers of their event.
//!
//! Everything here runs in one transaction that holds the write lock, and each statement names the
//! token: what is not held is not there for either of them.

use std::collections::HashMap;

use outbox_core::store::{Split, SplitRow};
use serde_json::{Value, json};
use sqlx::sqlite::SqliteRow;
use sqlx::{Row, SqliteConnection};

use super::row::{at_least_one, text, token_text};
use super::sql::{Statements, safe};

/// Adds a row for each of the parts `?1` but the first of each row.
///
/// - A row that belongs to a handler is no whole, whoever has it.
/// - A part that is not held gets its attempt back. A paused one is not held.
/// - `attempts` never exceeds `max_attempts`, whatever a handler's own limit is.
pub(super) const ADD: &str = "
    INSERT INTO {events} (
        origin, handler, name, version, priority, ordering_key, blocks, attempts, max_attempts,
        due_at, expires_at, lease_token, lease_expires_at, claimed_by, created_at, retention,
        key_retention, failures, headers, payload
    )
    SELECT
        whole.id, part.handler, whole.name, version, priority, ordering_key, blocks,
        attempts - (NOT part.held), max(coalesce(part.own_limit, max_attempts), attempts),
        due_at, expires_at, iif(part.held, lease_token, NULL),
        iif(part.held, lease_expires_at, NULL), iif(part.held, claimed_by, NULL), created_at,
        retention, key_retention, failures, headers, payload
    FROM (
        SELECT
            entry.key AS position,
            entry.value ->> 'row' AS of_row,
            entry.value ->> 'token' AS token,
            entry.value ->> 'handler' AS handler,
            entry.value ->> 'limit' AS own_limit,
            (entry.value ->> 'held') AND NOT EXISTS (
                SELECT 1
                FROM {paused} AS paused
                JOIN {events} AS event ON event.name = paused.name
                WHERE event.id = entry.value ->> 'row'
                    AND paused.handler IN ('', entry.value ->> 'handler')
            ) AS held
        FROM json_each(?1) AS entry
    ) AS part
    JOIN {events} AS whole ON whole.id = part.of_row AND whole.lease_token = part.token
    WHERE whole.handler IS NULL
    ORDER BY part.position
    RETURNING id, origin, handler, max_attempts, lease_token IS NOT NULL AS held
";

/// Makes each row the first of its parts `?1`. It keeps its number and its dedup key.
pub(super) const KEEP: &str = "
    UPDATE {events} AS event
    SET handler = part.handler,
        max_attempts = max(coalesce(part.own_limit, max_attempts), attempts),
        attempts = attempts - (NOT part.held),
        lease_token = iif(part.held, lease_token, NULL),
        lease_expires_at = iif(part.held, lease_expires_at, NULL),
        claimed_by = iif(part.held, claimed_by, NULL)
    FROM (
        SELECT
            entry.value ->> 'row' AS of_row,
            entry.value ->> 'token' AS token,
            entry.value ->> 'handler' AS handler,
            entry.value ->> 'limit' AS own_limit,
            (entry.value ->> 'held') AND NOT EXISTS (
                SELECT 1
                FROM {paused} AS paused
                JOIN {events} AS whole ON whole.name = paused.name
                WHERE whole.id = entry.value ->> 'row'
                    AND paused.handler IN ('', entry.value ->> 'handler')
            ) AS held
        FROM json_each(?1) AS entry
    ) AS part
    WHERE event.id = part.of_row AND event.lease_token = part.token AND event.handler IS NULL
    RETURNING id, handler, max_attempts, lease_token IS NOT NULL AS held
";

pub(super) async fn run(
    connection: &mut SqliteConnection,
    statements: &Statements,
    splits: &[Split],
) -> Result<Vec<Option<Vec<SplitRow>>>, sqlx::Error> {
    let (mut first, mut others) = (Vec::new(), Vec::new());
    for split in splits {
        for (position, part) in split.parts.iter().enumerate() {
            let part = json!({
                "row": split.lease.row,
                "token": token_text(split.lease.token),
                "handler": part.handler,
                "limit": part.max_attempts,
                "held": part.held,
            });
            if position == 0 {
                first.push(part);
            } else {
                others.push(part);
            }
        }
    }
    // In this order: once a row is a part it is no whole any more.
    let mut parts = HashMap::new();
    for row in ask(connection, &statements.split_add, others).await? {
        parts.insert(
            (row.try_get("origin")?, text(&row, "handler")?),
            part(&row)?,
        );
    }
    for row in ask(connection, &statements.split_keep, first).await? {
        parts.insert((row.try_get("id")?, text(&row, "handler")?), part(&row)?);
    }
    let answers = splits.iter().map(|split| {
        let of_split = split.parts.iter();
        let row = |handler: &str| parts.remove(&(split.lease.row, handler.to_owned()));
        of_split.map(|part| part.handler).map(row).collect()
    });
    Ok(answers.collect())
}

async fn ask(
    connection: &mut SqliteConnection,
    statement: &std::sync::Arc<str>,
    parts: Vec<Value>,
) -> Result<Vec<SqliteRow>, sqlx::Error> {
    sqlx::query(safe(statement))
        .bind(Value::from(parts).to_string())
        .fetch_all(connection)
        .await
}

fn part(row: &SqliteRow) -> Result<SplitRow, sqlx::Error> {
    Ok(SplitRow {
        row: row.try_get("id")?,
        max_attempts: at_least_one(row, "max_attempts")?,
        held: row.try_get("held")?,
    })
}
