//! Splitting rows among the handlers of their event.

use std::collections::HashMap;

use outbox_core::store::{Split, SplitRow, StoreError};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::PgStore;
use super::query::Query;
use super::renew::{IS_HELD, holding, waves};
use super::row::count;
use super::sqlstate::failed;

const DOING: &str = "split events among their handlers";

/// Splits the rows `$1`, held by the tokens `$2`, into parts: `$3` names the row of each, `$4` its
/// handler, `$5` its own limit of attempts and `$6` whether it is held.
///
/// - The first part of a row is the row itself: it keeps its number and its dedup key.
/// - `MATERIALIZED`, so that a number is drawn once per part, and that the rows are locked, in the
///   order of their numbers, before anything is written.
/// - A row that belongs to a handler is no whole, whoever has it.
/// - `attempts` never exceeds `max_attempts`, whatever a handler's own limit is.
const SPLIT: &str = "
    WITH whole AS MATERIALIZED (
        SELECT event.* FROM {events} AS event
        WHERE {is_held} AND event.handler IS NULL
        ORDER BY event.id
        FOR UPDATE
    ),
    part AS MATERIALIZED (
        SELECT
            entry.position, entry.of, entry.handler, entry.first,
            CASE
                WHEN entry.first THEN whole.id
                ELSE nextval({events_id_seq_literal}::regclass)
            END AS id,
            CASE
                WHEN entry.max_attempts IS NULL THEN whole.max_attempts
                ELSE greatest(entry.max_attempts, whole.attempts)
            END AS max_attempts,
            entry.held AND NOT EXISTS (
                SELECT FROM {paused} AS paused
                WHERE paused.name = whole.name AND paused.handler IN ('', entry.handler)
            ) AS held
        FROM ROWS FROM (
            unnest($3::bigint[]), unnest($4::text[]), unnest($5::integer[]), unnest($6::boolean[]),
            unnest($7::boolean[])
        ) WITH ORDINALITY AS entry(of, handler, max_attempts, held, first, position)
        JOIN whole ON whole.id = entry.of
    ),
    kept AS (
        UPDATE {events} AS event
        SET handler = part.handler,
            max_attempts = part.max_attempts,
            attempts = event.attempts - CASE WHEN part.held THEN 0 ELSE 1 END,
            lease_token = CASE WHEN part.held THEN event.lease_token END,
            lease_expires_at = CASE WHEN part.held THEN event.lease_expires_at END,
            claimed_by = CASE WHEN part.held THEN event.claimed_by END
        FROM part
        WHERE part.first AND event.id = part.id
    ),
    added AS (
        INSERT INTO {events} (
            id, origin, handler, name, version, payload, headers, ordering_key, blocks, priority,
            attempts, max_attempts, retention, lease_token, lease_expires_at, claimed_by, due_at,
            expires_at, created_at, last_error, failures
        )
        SELECT
            part.id, whole.id, part.handler, name, version, payload, headers, ordering_key, blocks,
            priority, attempts - CASE WHEN part.held THEN 0 ELSE 1 END, part.max_attempts,
            retention, CASE WHEN part.held THEN lease_token END,
            CASE WHEN part.held THEN lease_expires_at END,
            CASE WHEN part.held THEN claimed_by END, due_at, expires_at, created_at, last_error,
            failures
        FROM part
        JOIN whole ON whole.id = part.of
        WHERE NOT part.first
    )
    SELECT of, id, max_attempts, held FROM part ORDER BY position
";

pub(super) fn split_template() -> String {
    SPLIT.replace("{is_held}", IS_HELD)
}

pub(super) async fn split(
    store: &PgStore,
    splits: &[Split],
) -> Result<Vec<Option<Vec<SplitRow>>>, StoreError> {
    if splits.is_empty() {
        return Ok(Vec::new());
    }
    let waves = waves(splits, |split| split.lease);
    let queries = waves.iter().map(|wave| query(store, wave)).collect();
    let rows = store.ask_all(DOING, queries).await?;
    // By lease: a row that is named twice is held by one of the tokens at most.
    let mut found = HashMap::new();
    for (wave, rows) in waves.iter().zip(&rows) {
        for row in rows {
            let (of, part) = part(row).map_err(|error| failed(DOING, error))?;
            if let Some(split) = wave.iter().find(|split| split.lease.row == of) {
                let parts: &mut Vec<SplitRow> = found.entry(split.lease).or_default();
                parts.push(part);
            }
        }
    }
    Ok(splits
        .iter()
        .map(|split| found.remove(&split.lease))
        .collect())
}

pub(super) fn query(store: &PgStore, splits: &[&Split]) -> Query {
    let leases: Vec<_> = splits.iter().map(|split| split.lease).collect();
    let (mut of, mut handlers, mut limits, mut held, mut first) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for split in splits {
        for (position, part) in split.parts.iter().enumerate() {
            of.push(split.lease.row);
            handlers.push(part.handler);
            let limit = part.max_attempts;
            limits.push(limit.map(|n| i32::try_from(n.get()).unwrap_or(i32::MAX)));
            held.push(part.held);
            first.push(position == 0);
        }
    }
    holding(Query::new(&store.sql().split), &leases)
        .bind(of)
        .bind(handlers)
        .bind(limits)
        .bind(held)
        .bind(first)
}

fn part(row: &PgRow) -> Result<(i64, SplitRow), sqlx::Error> {
    let part = SplitRow {
        row: row.try_get(1)?,
        max_attempts: count(row.try_get(2)?)?,
        held: row.try_get(3)?,
    };
    Ok((row.try_get(0)?, part))
}
