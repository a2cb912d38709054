//! Ordering keys: locking one, and listing those that are blocked.

use std::num::NonZeroU32;
use std::time::Duration;

use outbox_core::event::EventId;
use outbox_core::store::{BLOCKED_COUNT_MAX, BlockedKey, EventState, StoreError};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::PgStore;
use super::query::Query;
use super::row::unreadable;
use super::sqlstate::failed;

/// Whether nothing of the ordering key `$1` is in the way of an event that is inserted now.
///
/// - A statement of its own, after the one that locks the key: its snapshot has what was committed
///   while it waited for the lock.
pub(super) const IS_FREE: &str = "
    SELECT NOT EXISTS (
        SELECT FROM {events} AS earlier WHERE earlier.ordering_key OPERATOR(pg_catalog.=) $1
    ) AND NOT EXISTS (
        SELECT FROM {dead} AS buried
        WHERE buried.blocks AND buried.ordering_key OPERATOR(pg_catalog.=) $1
    )
";

/// The highest number drawn, or 0.
///
/// - Not `max(id)`: that walks over the index entries of all newest events that are settled.
/// - `pg_sequence_last_value` asks for USAGE, which whoever splits events has; the sequence as a table
///   would ask for SELECT.
pub(super) const NEWEST: &str = "
    SELECT coalesce(pg_sequence_last_value({events_id_seq_literal}::regclass), 0)
";

/// The first unsettled row of each of the ordering keys `$1`.
///
/// - One look into an index per key.
pub(super) const NEXT_IN_ORDER: &str = "
    SELECT next.id
    FROM unnest($1::text[]) AS freed(key)
    CROSS JOIN LATERAL (
        SELECT first.id
        FROM {events} AS first
        WHERE first.ordering_key = freed.key
        ORDER BY coalesce(first.origin, first.id), first.id
        LIMIT 1
    ) AS next
";

/// The up to `$1` keys that are blocked, the longest blocked first; of each, how many events wait, up
/// to `$2`.
///
/// - The first cause of each key, if nothing else of the key is before it. Parts of one event have one
///   place.
/// - What waits is counted for those that are listed, and no further than it is shown.
pub(super) const BLOCKED_KEYS: &str = "
    WITH cause AS (
        SELECT
            ordering_key, coalesce(origin, id) AS place, id, name, 'dead_letter' AS state, attempts,
            settled_at AS since, dead_reason, last_error
        FROM {dead}
        WHERE blocks
        UNION ALL
        SELECT
            ordering_key, coalesce(origin, id), id, name, 'failed', attempts, created_at, NULL,
            last_error
        FROM {events}
        WHERE ordering_key IS NOT NULL
        AND due_at IS NOT NULL AND attempts > 0 AND lease_token IS NULL
    ),
    first AS (
        SELECT DISTINCT ON (ordering_key) cause.*
        FROM cause
        ORDER BY ordering_key, place, id
    ),
    listed AS MATERIALIZED (
        SELECT first.*
        FROM first
        WHERE NOT EXISTS (
            SELECT FROM {events} AS earlier
            WHERE earlier.ordering_key = first.ordering_key
            AND coalesce(earlier.origin, earlier.id) < first.place
        )
        ORDER BY since, id
        LIMIT $1
    )
    SELECT
        ordering_key, id, name, state, attempts,
        greatest((extract(epoch FROM clock_timestamp() - since) * 1000000)::bigint, 0),
        dead_reason, last_error,
        (
            SELECT count(*) FROM (
                SELECT FROM {events} AS later
                WHERE later.ordering_key = listed.ordering_key
                AND coalesce(later.origin, later.id) > listed.place
                LIMIT $2
            ) AS waiting
        )
    FROM listed
    ORDER BY since, id
";

pub(super) async fn lock_ordering_key(
    store: &PgStore,
    connection: &mut PgConnection,
    key: &str,
) -> Result<bool, StoreError> {
    const DOING: &str = "lock an ordering key";
    let (namespace, id) = store.order_lock(key);
    let lock = Query::new(&store.sql().lock_entity)
        .bind(namespace)
        .bind(id);
    let locked = lock.fetch(connection, store.keeps_statements()).await;
    locked.map_err(|error| failed(DOING, error))?;
    let query = Query::new(&store.sql().is_free).bind(key);
    let rows = query.fetch(connection, store.keeps_statements()).await;
    let rows = rows.map_err(|error| failed(DOING, error))?;
    let free = rows.first().map(|row| row.try_get(0)).transpose();
    Ok(free.map_err(|error| failed(DOING, error))?.unwrap_or(false))
}

pub(super) async fn next_in_order(
    store: &PgStore,
    keys: &[String],
) -> Result<Vec<i64>, StoreError> {
    const DOING: &str = "find what is next in order";
    let query = Query::new(&store.sql().next_in_order).bind(keys);
    let rows = store.ask(DOING, query).await?;
    rows.iter()
        .map(|row| row.try_get(0))
        .collect::<Result<_, _>>()
        .map_err(|error| failed(DOING, error))
}

pub(super) async fn newest(store: &PgStore) -> Result<i64, StoreError> {
    const DOING: &str = "find the newest event";
    let rows = store.ask(DOING, Query::new(&store.sql().newest)).await?;
    let newest = rows.first().map(|row| row.try_get(0)).transpose();
    Ok(newest.map_err(|error| failed(DOING, error))?.unwrap_or(0))
}

pub(super) async fn blocked_keys(
    store: &PgStore,
    limit: NonZeroU32,
) -> Result<Vec<BlockedKey>, StoreError> {
    const DOING: &str = "list blocked keys";
    let installation = store.installation().await?;
    let query = Query::new(&store.sql().blocked_keys)
        .bind(i64::from(limit.get()))
        .bind(i64::from(BLOCKED_COUNT_MAX));
    let rows = store.ask(DOING, query).await?;
    rows.iter()
        .map(|row| blocked(row, installation))
        .collect::<Result<_, _>>()
        .map_err(|error| failed(DOING, error))
}

fn blocked(row: &PgRow, installation: Uuid) -> Result<BlockedKey, sqlx::Error> {
    let head = EventId::new(installation, row.try_get(1)?);
    let state: String = row.try_get(3)?;
    let state = EventState::parse(&state).ok_or_else(|| unreadable("an unknown state"))?;
    let mut blocked = BlockedKey::new(row.try_get(0)?, head, row.try_get(2)?, state);
    blocked.attempts = u32::try_from(row.try_get::<i32, _>(4)?).unwrap_or(0);
    let micros = u64::try_from(row.try_get::<i64, _>(5)?).unwrap_or(0);
    blocked.blocked_for = Duration::from_micros(micros);
    blocked.dead_reason = row.try_get(6)?;
    blocked.last_error = row.try_get::<Option<String>, _>(7)?.unwrap_or_default();
    blocked.waiting = u32::try_from(row.try_get::<i64, _>(8)?).unwrap_or(BLOCKED_COUNT_MAX);
    Ok(blocked)
}
