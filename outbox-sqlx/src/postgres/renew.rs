//! Leases while they are held: verifying, extending and giving them back.

use std::collections::HashSet;
use std::time::Duration;

use outbox_core::event::EventId;
use outbox_core::lease::{HeldLease, LeaseToken};
use outbox_core::store::{Renewal, Settled, StoreError, Verified};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::PgStore;
use super::query::{PgUuid, Query, interval};
use super::row::time;
use super::sqlstate::failed;

/// Reads which of the tokens `$2` are still in the rows `$1`, and how long for.
pub(super) const VERIFY: &str = "
    SELECT
        held.id, held.token,
        (extract(epoch FROM event.created_at) * 1000000)::bigint,
        greatest(
            (extract(epoch FROM event.lease_expires_at - clock_timestamp()) * 1000000)::bigint, 0
        )
    FROM unnest($1::bigint[], $2::uuid[]) AS held(id, token)
    JOIN {events} AS event ON event.id = held.id AND event.lease_token = held.token
";

/// Extends the leases by which the tokens `$2` hold the rows `$1`, to end `$3` from now. Answers
/// with the position of each, from 1, and whether it was extended, lost, or locked by somebody.
///
/// - `SKIP LOCKED`, because a renewal that waits for one row is late for all of them. Whoever holds
///   the lock may be settling the row for us, so it is neither renewed nor lost.
/// - A row is lost when it is gone or shows another token: tokens are random and never come back,
///   so that is final even while the row is locked.
/// - `ARRAY(..)` is computed once; in a join the planner may lock rows it does not extend.
pub(super) const RENEW: &str = "
    WITH held AS MATERIALIZED (
        SELECT * FROM unnest($1::bigint[], $2::uuid[])
            WITH ORDINALITY AS held(id, token, position)
    ),
    extended AS (
        UPDATE {events} AS event
        SET lease_expires_at = clock_timestamp() + $3
        WHERE event.id = ANY (ARRAY(
            SELECT candidate.id
            FROM held
            JOIN {events} AS candidate
                ON candidate.id = held.id AND candidate.lease_token = held.token
            FOR UPDATE OF candidate SKIP LOCKED
        ))
        RETURNING event.id, event.lease_token
    )
    SELECT held.position, extended.id IS NOT NULL, event.id IS NOT NULL
    FROM held
    LEFT JOIN extended ON extended.id = held.id AND extended.lease_token = held.token
    LEFT JOIN {events} AS event ON event.id = held.id AND event.lease_token = held.token
";

/// Ends the leases by which the tokens `$2` hold the rows `$1`, and takes their attempts back.
///
/// - A claim by a sweep charged nothing, so there is nothing to take back: it left an entry for the
///   attempt that `attempts` still counts. Giving it back must not make an attempt out of nothing.
/// - It touches no indexed column: a HOT update, and the row is due again where it was.
pub(super) const RELEASE: &str = "
    UPDATE {events} AS event
    SET lease_token = NULL,
        lease_expires_at = NULL,
        claimed_by = NULL,
        attempts = event.attempts - CASE
            WHEN (event.failures -> -1 ->> 'attempt')::integer = event.attempts THEN 0
            ELSE 1
        END
    FROM unnest($1::bigint[], $2::uuid[]) AS held(id, token)
    WHERE event.id = held.id AND event.lease_token = held.token
    RETURNING event.id, held.token
";

pub(super) async fn verify(
    store: &PgStore,
    leases: &[HeldLease],
) -> Result<Vec<Verified>, StoreError> {
    const DOING: &str = "verify leases";
    if leases.is_empty() {
        return Ok(Vec::new());
    }
    let installation = store.installation().await?;
    let query = holding(Query::new(&store.sql().verify), leases);
    let rows = store.ask(DOING, query).await?;
    let verified = rows.iter().map(|row| {
        let lease = lease(row)?;
        let micros = u64::try_from(row.try_get::<i64, _>(3)?).unwrap_or(0);
        Ok(Verified {
            lease,
            id: EventId::new(installation, lease.row),
            created_at: time(row.try_get(2)?),
            remaining: Duration::from_micros(micros),
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
    let query = holding(Query::new(&store.sql().renew), leases).bind(interval(span));
    let rows = store.ask(DOING, query).await?;

    let mut renewals = vec![Renewal::Unknown; leases.len()];
    for row in &rows {
        let (position, renewal) = renewal(row).map_err(|error| failed(DOING, error))?;
        let place = usize::try_from(position - 1)
            .ok()
            .and_then(|position| renewals.get_mut(position));
        if let Some(place) = place {
            *place = renewal;
        }
    }
    Ok(renewals)
}

fn renewal(row: &PgRow) -> Result<(i64, Renewal), sqlx::Error> {
    let renewal = match (row.try_get(1)?, row.try_get(2)?) {
        (true, _) => Renewal::Renewed,
        (false, true) => Renewal::Unknown,
        (false, false) => Renewal::Lost,
    };
    Ok((row.try_get(0)?, renewal))
}

pub(super) async fn release(
    store: &PgStore,
    leases: &[HeldLease],
) -> Result<Vec<Settled>, StoreError> {
    const DOING: &str = "give claims back";
    if leases.is_empty() {
        return Ok(Vec::new());
    }
    // In the order of the rows: every statement that waits for several row locks takes them in it.
    let mut sorted = leases.to_vec();
    sorted.sort_unstable();
    let query = holding(Query::new(&store.sql().release), &sorted);
    let rows = store.ask(DOING, query).await?;
    let released: HashSet<HeldLease> = rows
        .iter()
        .map(lease)
        .collect::<Result<_, _>>()
        .map_err(|error| failed(DOING, error))?;
    Ok(leases
        .iter()
        .map(|lease| {
            if released.contains(lease) {
                Settled::Recorded
            } else {
                Settled::LeaseLost
            }
        })
        .collect())
}

/// Binds `leases` as rows and tokens.
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
