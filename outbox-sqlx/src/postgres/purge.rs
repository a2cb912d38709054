//! Retention: removing what is settled and past its time.

use std::num::NonZeroU32;

use outbox_core::store::{Pass, StoreError};
use sqlx::Row;

use super::PgStore;
use super::pass::Chunk;
use super::query::Query;
use super::sqlstate::failed;

const DOING: &str = "remove what is past its retention";

/// Removes up to `$1` rows: settled events first, then dedup keys.
///
/// - Only the history and the keys are named, so no row that waits, is leased, retries or is dead
///   can be reached. A key has no `expires_at` while its event is one of those.
/// - Wherever in the history they are. A partition whose day is past is dropped as a whole; until
///   somebody does that, its rows are removed as all others.
/// - The bound stands in the `DELETE` as well, which then does not look for each row in the
///   partitions of the days to come.
/// - A key is kept while a part of its event is unsettled or dead, although the part whose state it
///   tells is settled.
/// - Events first, and keys with what is left of the limit: a key outlives its event.
/// - `SKIP LOCKED`, so that two purges do not wait for each other.
/// - `(SELECT clock_timestamp())` is one value, which can bound the index.
/// - `ARRAY(..)` and no join, for the reason `IS_HELD` gives. The keys in it are locked, so that
///   their place in the table, `ctid`, stays the same.
pub(super) const PURGE: &str = "
    WITH events AS MATERIALIZED (
        SELECT id
        FROM {history}
        WHERE expires_at <= (SELECT clock_timestamp())
        ORDER BY expires_at
        LIMIT $1
        FOR UPDATE SKIP LOCKED
    ),
    keys AS MATERIALIZED (
        SELECT ctid AS place
        FROM {keys} AS key
        WHERE expires_at <= (SELECT clock_timestamp())
        AND NOT EXISTS (SELECT FROM {events} AS part WHERE part.origin = key.event_id)
        AND NOT EXISTS (SELECT FROM {dead} AS part WHERE part.origin = key.event_id)
        ORDER BY expires_at
        LIMIT $1 - (SELECT count(*) FROM events)
        FOR UPDATE OF key SKIP LOCKED
    ),
    removed_events AS (
        DELETE FROM {history}
        WHERE id = ANY (ARRAY(SELECT id FROM events))
        AND expires_at <= (SELECT clock_timestamp())
        RETURNING 1
    ),
    removed_keys AS (
        DELETE FROM {keys}
        WHERE ctid = ANY (ARRAY(SELECT place FROM keys))
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM removed_events) + (SELECT count(*) FROM removed_keys)
";

pub(super) async fn purge(
    store: &PgStore,
    pass: Pass,
    limit: NonZeroU32,
) -> Result<Option<u64>, StoreError> {
    let Some(mut chunk) = Chunk::begin(store, pass, DOING).await? else {
        return Ok(None);
    };
    let query = Query::new(&store.sql().purge).bind(i64::from(limit.get()));
    let rows = chunk.ask(query).await?;
    chunk.commit().await?;
    let removed: i64 = match rows.first() {
        Some(row) => row.try_get(0).map_err(|error| failed(DOING, error))?,
        None => 0,
    };
    Ok(Some(u64::try_from(removed).unwrap_or(0)))
}
