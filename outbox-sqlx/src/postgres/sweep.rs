//! Sweeping: what no claim will ever take.

use outbox_core::store::{StoreError, SweepChunk, SweepRequest};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::PgStore;
use super::claim::LEASE_IS_FREE;
use super::query::{PgUuid, Query, interval};
use super::row::exhausted;
use super::sqlstate::failed;

const DOING: &str = "sweep";

/// Looks at up to `$2` rows after number `$1`. Answers, per event name, with how many there are,
/// the last number, and how many have no attempt left and nobody holding them.
///
/// - It only reads: a sweep that finds nothing to do draws no transaction id and writes no WAL.
const LOOK: &str = "
    SELECT name, count(*), max(id), count(*) FILTER (WHERE attempts >= max_attempts AND {lease_is_free})
    FROM (
        SELECT id, name, attempts, max_attempts, lease_expires_at
        FROM {events}
        WHERE id > $1
        ORDER BY id
        LIMIT $2
    ) AS chunk
    GROUP BY name
";

/// Claims, under the token `$1`, what `LOOK` found between the numbers `$4` and `$5`.
///
/// - Whatever its name: dead-lettering a row needs no handler.
/// - `claimed_by` keeps the last holder, if there was one: it is the one that failed, and the
///   settlement records the failure under that name.
/// - Not the payload: nobody reads it, and a chunk of large ones would fill memory.
/// - No attempt is charged. `attempts` already is at its limit, and no handler will be started.
/// - A row without a lease counts as well: none should be here without an attempt left, and if one
///   is, neither a claim nor anything else would ever find it.
const TAKE: &str = "
    UPDATE {events} AS event
    SET lease_token = $1,
        lease_expires_at = clock_timestamp() + $2,
        claimed_by = coalesce(event.claimed_by, $3)
    WHERE event.id = ANY (ARRAY(
        SELECT id FROM {events}
        WHERE id > $4 AND id <= $5 AND attempts >= max_attempts AND {lease_is_free}
        ORDER BY id
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING event.id, event.name, event.attempts, event.max_attempts
";

pub(super) fn look_template() -> String {
    LOOK.replace("{lease_is_free}", LEASE_IS_FREE)
}

pub(super) fn take_template() -> String {
    TAKE.replace("{lease_is_free}", LEASE_IS_FREE)
}

pub(super) async fn sweep(
    store: &PgStore,
    request: &SweepRequest<'_>,
) -> Result<SweepChunk, StoreError> {
    let installation = store.installation().await?;
    let scan = i64::from(request.scan.get());
    let look = Query::new(&store.sql().sweep_look)
        .bind(request.after)
        .bind(scan);
    let seen: Vec<Seen> = store
        .ask(DOING, look)
        .await?
        .iter()
        .map(seen)
        .collect::<Result<_, _>>()
        .map_err(|error| failed(DOING, error))?;

    let rows: i64 = seen.iter().map(|seen| seen.rows).sum();
    let last = seen.iter().map(|seen| seen.last).max();
    let mut chunk = SweepChunk {
        next: last.filter(|_| rows >= scan),
        ..SweepChunk::default()
    };
    if let Some(last) = last.filter(|_| seen.iter().any(|seen| seen.exhausted > 0)) {
        let rows = store.ask(DOING, take(store, request, last)).await?;
        chunk.exhausted = rows
            .iter()
            .map(|row| exhausted(row, installation, request.token))
            .collect::<Result<_, _>>()
            .map_err(|error| failed(DOING, error))?;
    }
    chunk.unhandled = seen
        .into_iter()
        .filter(|seen| !request.names.contains(&seen.name.as_str()))
        .map(|seen| (seen.name, u64::try_from(seen.rows).unwrap_or(0)))
        .collect();
    Ok(chunk)
}

pub(super) fn take(store: &PgStore, request: &SweepRequest<'_>, last: i64) -> Query {
    Query::new(&store.sql().sweep_take)
        .bind(PgUuid::from(request.token))
        .bind(interval(request.lease))
        .bind(request.instance)
        .bind(request.after)
        .bind(last)
}

struct Seen {
    name: String,
    rows: i64,
    last: i64,
    exhausted: i64,
}

fn seen(row: &PgRow) -> Result<Seen, sqlx::Error> {
    Ok(Seen {
        name: row.try_get(0)?,
        rows: row.try_get(1)?,
        last: row.try_get(2)?,
        exhausted: row.try_get(3)?,
    })
}
