//! Sweeping: what no claim will ever take.

use std::num::NonZeroU32;

use outbox_core::settings::LEASE_MAX;
use outbox_core::store::{Pass, StoreError, SweepChunk, SweepRequest, Unhandled, is_known};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::PgStore;
use super::claim::LEASE_IS_FREE;
use super::pass::Chunk;
use super::query::{PgUuid, Query, interval};
use super::row::{count, exhausted};
use super::sqlstate::failed;

const DOING: &str = "sweep";

/// Looks at up to `$2` rows after number `$1`. Answers, per name, handler and version, with how many there are,
/// the last number, how many are due with no attempt left and nobody holding them, and how many
/// have a lease that ends later than `$3` from now.
///
/// - It only reads: a sweep that finds nothing to do draws no transaction id and writes no WAL.
const LOOK: &str = "
    SELECT
        name, version, count(*), max(id),
        count(*) FILTER (WHERE {is_exhausted}),
        count(*) FILTER (WHERE lease_expires_at > clock_timestamp() + $3),
        handler
    FROM (
        SELECT id, name, handler, version, attempts, max_attempts, lease_expires_at, due_at
        FROM {events}
        WHERE id > $1
        ORDER BY id
        LIMIT $2
    ) AS chunk
    GROUP BY name, handler, version
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
        WHERE id > $4 AND id <= $5 AND {is_exhausted}
        ORDER BY id
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING
        event.id, event.name, event.attempts, event.max_attempts, event.handler, event.origin
";

/// Cuts the leases that `LOOK` found between the numbers `$1` and `$2`, to end `$3` from now.
///
/// - The clock of a server that was set forward and back gives such a lease, and without this its
///   row would be nobody's for as long.
/// - The token stays: whoever holds it has longer than any lease, and loses nothing.
/// - A lease that somebody is renewing is right by itself in a moment: `SKIP LOCKED`.
pub(super) const CUT: &str = "
    UPDATE {events} AS event
    SET lease_expires_at = clock_timestamp() + $3
    WHERE event.id = ANY (ARRAY(
        SELECT id FROM {events}
        WHERE id > $1 AND id <= $2 AND lease_expires_at > clock_timestamp() + $3
        ORDER BY id
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING event.id
";

/// What no claim will take, and nothing else is about to change: a lease has to end, and a due time
/// to come, first.
const IS_EXHAUSTED: &str = "attempts >= max_attempts AND {lease_is_free}
            AND (due_at IS NULL OR due_at <= clock_timestamp())";

pub(super) fn look_template() -> String {
    with_conditions(LOOK)
}

pub(super) fn take_template() -> String {
    with_conditions(TAKE)
}

fn with_conditions(template: &str) -> String {
    template
        .replace("{is_exhausted}", IS_EXHAUSTED)
        .replace("{lease_is_free}", LEASE_IS_FREE)
}

pub(super) async fn sweep(
    store: &PgStore,
    pass: Pass,
    request: &SweepRequest<'_>,
) -> Result<Option<SweepChunk>, StoreError> {
    let installation = store.installation().await?;
    let Some(mut work) = Chunk::begin(store, pass, DOING).await? else {
        return Ok(None);
    };
    let scan = i64::from(request.scan.get());
    let seen: Vec<Seen> = work
        .ask(look(store, request.after, scan))
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
    if let Some(last) = last.filter(|_| seen.iter().any(|seen| seen.beyond_bounds > 0)) {
        let rows = work.ask(cut(store, request.after, last)).await?;
        chunk.cut_leases = u64::try_from(rows.len()).unwrap_or(u64::MAX);
    }
    if let Some(last) = last.filter(|_| seen.iter().any(|seen| seen.exhausted > 0)) {
        let rows = work.ask(take(store, request, last)).await?;
        chunk.exhausted = rows
            .iter()
            .map(|row| exhausted(row, installation, request.token))
            .collect::<Result<_, _>>()
            .map_err(|error| failed(DOING, error))?;
    }
    work.commit().await?;
    chunk.unhandled = seen
        .into_iter()
        .filter(|seen| {
            !is_known(
                request.events,
                &seen.name,
                seen.version,
                seen.handler.as_deref(),
            )
        })
        .map(|seen| Unhandled {
            name: seen.name,
            handler: seen.handler,
            version: seen.version,
            rows: u64::try_from(seen.rows).unwrap_or(0),
        })
        .collect();
    Ok(Some(chunk))
}

pub(super) fn look(store: &PgStore, after: i64, scan: i64) -> Query {
    Query::new(&store.sql().sweep_look)
        .bind(after)
        .bind(scan)
        .bind(interval(LEASE_MAX))
}

pub(super) fn cut(store: &PgStore, after: i64, last: i64) -> Query {
    Query::new(&store.sql().sweep_cut)
        .bind(after)
        .bind(last)
        .bind(interval(LEASE_MAX))
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
    version: NonZeroU32,
    rows: i64,
    last: i64,
    exhausted: i64,
    beyond_bounds: i64,
    handler: Option<String>,
}

fn seen(row: &PgRow) -> Result<Seen, sqlx::Error> {
    Ok(Seen {
        name: row.try_get(0)?,
        version: count(row.try_get(1)?)?,
        rows: row.try_get(2)?,
        last: row.try_get(3)?,
        exhausted: row.try_get(4)?,
        beyond_bounds: row.try_get(5)?,
        handler: row.try_get(6)?,
    })
}
