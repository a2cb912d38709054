//! Leases while they are held: verifying, extending and giving them back.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use outbox_core::event::EventId;
use outbox_core::lease::{HeldLease, LeaseToken};
use outbox_core::store::{Renewal, Settled, StoreError, Verified};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::PgStore;
use super::claim::IS_BLOCKED;
use super::query::{PgUuid, Query, interval};
use super::row::time;
use super::sqlstate::failed;

/// The rows `$1` that are still held by the tokens `$2`, each by the one at its own position.
///
/// - `width_bucket` finds the position by bisection: `$1` is sorted and names no row twice.
/// - No join: its plan, made while the table was empty and kept when it has grown, reads the whole
///   table for each batch. This reads the primary key whatever the planner believes.
/// - It names `pg_catalog`, because a settlement in the caller's transaction runs with the caller's
///   `search_path`.
/// - Both conditions stand where the row is locked, so that they are looked at again when somebody
///   changed the row a moment before.
pub(super) const IS_HELD: &str = "
    event.id OPERATOR(pg_catalog.=) ANY ($1)
    AND event.lease_token OPERATOR(pg_catalog.=)
        ($2::pg_catalog.uuid[])[pg_catalog.width_bucket(event.id, $1)]";

/// Reads which of the tokens `$2` are still in the rows `$1`, for how long, and whether anything
/// speaks against starting them.
///
/// - A row that was born leased belongs to all handlers of its event, so the pause of one of them does
///   not concern it.
pub(super) const VERIFY: &str = "
    SELECT
        event.id, event.lease_token,
        (extract(epoch FROM event.created_at) * 1000000)::bigint,
        greatest(
            (extract(epoch FROM event.lease_expires_at - clock_timestamp()) * 1000000)::bigint, 0
        ),
        coalesce(event.expires_at <= clock_timestamp(), false),
        event.name = ANY (ARRAY(SELECT name FROM {paused} WHERE handler = ''))
            OR (event.ordering_key IS NOT NULL AND {is_blocked})
    FROM {events} AS event
    WHERE {is_held}
";

/// Extends the leases by which the tokens `$2` hold the rows `$1`, to end `$3` from now. Answers
/// with those that were extended, and with those that were held when it began.
///
/// - `SKIP LOCKED`, because a renewal that waits for one row is late for all of them. Whoever holds
///   the lock may be settling the row for us, so it is neither renewed nor lost.
/// - A row is lost when it is gone or shows another token: tokens are random and never come back,
///   so that is final even while the row is locked.
/// - `ARRAY(..)` is computed once, and the rows in it are locked: their tokens cannot change any
///   more.
pub(super) const RENEW: &str = "
    WITH extended AS (
        UPDATE {events} AS event
        SET lease_expires_at = clock_timestamp() + $3
        WHERE event.id = ANY (ARRAY(
            SELECT event.id FROM {events} AS event WHERE {is_held} FOR UPDATE SKIP LOCKED
        ))
        RETURNING event.id, event.lease_token
    )
    SELECT id, lease_token, true FROM extended
    UNION ALL
    SELECT event.id, event.lease_token, false FROM {events} AS event WHERE {is_held}
";

/// Ends the leases by which the tokens `$2` hold the rows `$1`, and takes their attempts back.
///
/// - It touches no indexed column: a HOT update, and the row is due again where it was.
pub(super) const RELEASE: &str = "
    UPDATE {events} AS event
    SET lease_token = NULL,
        lease_expires_at = NULL,
        claimed_by = NULL,
        attempts = event.attempts - 1
    WHERE {is_held}
    RETURNING event.id, ($2::uuid[])[width_bucket(event.id, $1)]
";

pub(super) fn template(sql: &str) -> String {
    sql.replace("{is_held}", IS_HELD)
        .replace("{is_blocked}", &IS_BLOCKED.replace("candidate.", "event."))
}

pub(super) async fn verify(
    store: &PgStore,
    leases: &[HeldLease],
) -> Result<Vec<Verified>, StoreError> {
    const DOING: &str = "verify leases";
    if leases.is_empty() {
        return Ok(Vec::new());
    }
    let installation = store.installation().await?;
    let queries = per_wave(leases, |held| {
        holding(Query::new(&store.sql().verify), held)
    });
    let rows = store.ask_all(DOING, queries).await?;
    let verified = rows.iter().flatten().map(|row| {
        let lease = lease(row)?;
        let micros = u64::try_from(row.try_get::<i64, _>(3)?).unwrap_or(0);
        Ok(Verified {
            lease,
            id: EventId::new(installation, lease.row),
            created_at: time(row.try_get(2)?),
            remaining: Duration::from_micros(micros),
            expired: row.try_get(4)?,
            blocked: row.try_get(5)?,
        })
    });
    verified
        .collect::<Result<_, _>>()
        .map_err(|error| failed(DOING, error))
}

pub(super) async fn renew(
    store: &PgStore,
    leases: &[HeldLease],
    span: Duration,
) -> Result<Vec<Renewal>, StoreError> {
    const DOING: &str = "renew leases";
    if leases.is_empty() {
        return Ok(Vec::new());
    }
    let queries = per_wave(leases, |held| {
        holding(Query::new(&store.sql().renew), held).bind(interval(span))
    });
    let rows = store.ask_all(DOING, queries).await?;

    let mut found: HashMap<HeldLease, bool> = HashMap::new();
    for row in rows.iter().flatten() {
        let (lease, extended) = renewal(row).map_err(|error| failed(DOING, error))?;
        *found.entry(lease).or_default() |= extended;
    }
    Ok(leases
        .iter()
        .map(|lease| match found.get(lease) {
            Some(true) => Renewal::Renewed,
            Some(false) => Renewal::Unknown,
            None => Renewal::Lost,
        })
        .collect())
}

fn renewal(row: &PgRow) -> Result<(HeldLease, bool), sqlx::Error> {
    Ok((lease(row)?, row.try_get(2)?))
}

pub(super) async fn release(
    store: &PgStore,
    leases: &[HeldLease],
) -> Result<Vec<Settled>, StoreError> {
    const DOING: &str = "give claims back";
    if leases.is_empty() {
        return Ok(Vec::new());
    }
    let queries = per_wave(leases, |held| {
        holding(Query::new(&store.sql().release), held)
    });
    let rows = store.ask_all(DOING, queries).await?;
    answers(leases.iter().copied(), &rows).map_err(|error| failed(DOING, error))
}

/// Which of the leases are among the rows that a statement changed.
pub(super) fn answers(
    leases: impl Iterator<Item = HeldLease>,
    rows: &[Vec<PgRow>],
) -> Result<Vec<Settled>, sqlx::Error> {
    let changed: HashSet<HeldLease> = rows.iter().flatten().map(lease).collect::<Result<_, _>>()?;
    Ok(leases
        .map(|lease| {
            if changed.contains(&lease) {
                Settled::Recorded
            } else {
                Settled::LeaseLost
            }
        })
        .collect())
}

/// Sorts by row, and puts what names a row a second time into a further wave.
///
/// In the order of the rows, because that is the order in which locks are taken. A row is named
/// twice when a process lost its lease, claimed the row again, and learns the outcome of both runs
/// at once; each wave then is a statement of its own.
pub(super) fn waves<T>(items: &[T], lease: impl Fn(&T) -> HeldLease) -> Vec<Vec<&T>> {
    let mut sorted: Vec<&T> = items.iter().collect();
    sorted.sort_by_key(|item| lease(item));
    let mut waves: Vec<Vec<&T>> = Vec::new();
    let mut depth = 0;
    let mut previous = None;
    for item in sorted {
        let row = lease(item).row;
        depth = if previous == Some(row) { depth + 1 } else { 0 };
        previous = Some(row);
        if depth == waves.len() {
            waves.push(Vec::new());
        }
        waves[depth].push(item);
    }
    waves
}

fn per_wave(leases: &[HeldLease], query: impl Fn(&[HeldLease]) -> Query) -> Vec<Query> {
    waves(leases, |lease| *lease)
        .into_iter()
        .map(|wave| query(&wave.into_iter().copied().collect::<Vec<_>>()))
        .collect()
}

/// Binds the leases of one wave as rows and tokens.
pub(super) fn holding(query: Query, leases: &[HeldLease]) -> Query {
    let rows: Vec<i64> = leases.iter().map(|lease| lease.row).collect();
    let tokens: Vec<PgUuid> = leases.iter().map(|lease| lease.token.into()).collect();
    query.bind(rows).bind(tokens)
}

/// Reads a lease from a row's first two columns.
pub(super) fn lease(row: &PgRow) -> Result<HeldLease, sqlx::Error> {
    Ok(HeldLease {
        row: row.try_get(0)?,
        token: LeaseToken::from_uuid(row.try_get::<PgUuid, _>(1)?.0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_is_named_twice_is_asked_about_twice() {
        let of = |row| HeldLease {
            row,
            token: LeaseToken::random(),
        };
        let leases = [of(3), of(1), of(3), of(2), of(3)];
        let rows: Vec<Vec<i64>> = waves(&leases, |lease| *lease)
            .iter()
            .map(|wave| wave.iter().map(|lease| lease.row).collect())
            .collect();
        assert_eq!(rows, [vec![1, 2, 3], vec![3], vec![3]]);
    }
}
