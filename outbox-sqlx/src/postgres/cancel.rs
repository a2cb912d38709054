//! Cancelling an event through the caller's connection, and looking up what has become of events.

use outbox_core::event::EventId;
use outbox_core::store::{EventRef, EventState, Existing, StoreError, StoreErrorKind, Watched};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::PgStore;
use super::insert::fingerprint;
use super::query::Query;
use super::row::unreadable;
use super::settle::key_settled;
use super::sqlstate::failed;

const DOING: &str = "cancel an event";

/// How often a cancellation looks again at an event that was dead at one moment and requeued at the
/// next.
const LOOKS: usize = 5;

/// Cancels what is unsettled of the event `$1`: its row, and those that were split from it. Answers
/// with their states before, and whether they are parts.
///
/// - One statement: the rows leave the hot table and arrive in the history, and the key learns of it,
///   at one moment.
/// - It waits for a settlement that has locked the row, and leaves alone what is gone when that is
///   over.
/// - All functions and operators here and below name `pg_catalog`: this is sent through the caller's
///   connection, with the caller's `search_path`.
const CANCEL: &str = "
    WITH gone AS (
        DELETE FROM {events} AS event
        WHERE event.id OPERATOR(pg_catalog.=) $1 OR event.origin OPERATOR(pg_catalog.=) $1
        RETURNING event.*, {state} AS state
    ),
    kept AS (
        INSERT INTO {history} (
            id, state, name, handler, origin, version, payload, headers, dedup_key, ordering_key,
            priority, attempts, max_attempts, claimed_by, created_at, settled_at, expires_at,
            last_error, failures
        )
        SELECT
            id, 'cancelled', name, handler, origin, version, payload, headers, dedup_key,
            ordering_key, priority, attempts, max_attempts, claimed_by, created_at,
            pg_catalog.clock_timestamp(),
            pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) retention, last_error, failures
        FROM gone
        WHERE retention OPERATOR(pg_catalog.>) interval '0'
    ),
    answered AS ({key_cancelled})
    SELECT state, handler IS NOT NULL FROM gone
";

/// What the state of an unsettled row is called.
const STATE: &str = "
        CASE
            WHEN event.lease_expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp()
                THEN 'in_progress'
            WHEN event.lease_token IS NULL AND event.due_at IS NOT NULL
                AND event.attempts OPERATOR(pg_catalog.>) 0 THEN 'failed'
            ELSE 'pending'
        END";

/// The number of the event of the name `$1` that holds the key `$2`.
pub(super) const HOLDER: &str = "
    SELECT event_id FROM {keys}
    WHERE name OPERATOR(pg_catalog.=) $1 AND key OPERATOR(pg_catalog.=) $2
";

/// What has become of the events `$1`, of the names `$2` and with the keys `$3` where they have one:
/// position, state, output and fingerprint.
///
/// - One statement over every place an event can be, because a row can move between two.
/// - Sub-selects, each of which reads one index: a join may be planned as a scan while tables are
///   empty.
const LOOK_UP: &str = "
    SELECT position, coalesce(unsettled, dead, settled, of_key), coalesce(output, key_output), fingerprint
    FROM (
        SELECT
            wanted.position,
            (SELECT {state} FROM {events} AS event WHERE event.id OPERATOR(pg_catalog.=) wanted.id)
                AS unsettled,
            (
                SELECT 'dead_letter' FROM {dead} AS dead
                WHERE dead.id OPERATOR(pg_catalog.=) wanted.id
            ) AS dead,
            settled.state AS settled, settled.output::pg_catalog.text AS output,
            key.state AS of_key, key.output::pg_catalog.text AS key_output, key.fingerprint
        FROM ROWS FROM (
            pg_catalog.unnest($1::pg_catalog.int8[]), pg_catalog.unnest($2::pg_catalog.text[]),
            pg_catalog.unnest($3::pg_catalog.text[])
        ) WITH ORDINALITY AS wanted(id, name, key, position)
        LEFT JOIN LATERAL (
            SELECT history.state, history.output FROM {history} AS history
            WHERE history.id OPERATOR(pg_catalog.=) wanted.id
            LIMIT 1
        ) AS settled ON true
        LEFT JOIN LATERAL (
            SELECT held.state, held.output, held.fingerprint FROM {keys} AS held
            WHERE held.name OPERATOR(pg_catalog.=) wanted.name
            AND held.key OPERATOR(pg_catalog.=) wanted.key
            AND held.event_id OPERATOR(pg_catalog.=) wanted.id
            LIMIT 1
        ) AS key ON true
    ) AS found
    ORDER BY position
";

pub(super) fn cancel_template() -> String {
    CANCEL
        .replace("{state}", STATE)
        .replace("{key_cancelled}", &key_settled("cancelled", "NULL"))
}

pub(super) fn look_up_template() -> String {
    LOOK_UP.replace("{state}", STATE)
}

pub(super) async fn cancel(
    store: &PgStore,
    connection: &mut PgConnection,
    event: &EventRef,
) -> Result<Option<Existing>, StoreError> {
    let installation = store.installation_through(connection).await?;
    let watched = match event {
        EventRef::Id(id) if id.installation() != installation => return Ok(None),
        EventRef::Id(id) => Watched {
            row: id.row(),
            key: None,
        },
        EventRef::Key { name, key } => {
            let query = Query::new(&store.sql().key_holder).bind(name).bind(key);
            let Some(row) = fetch(store, connection, query).await?.into_iter().next() else {
                return Ok(None);
            };
            Watched {
                row: row.try_get(0).map_err(|error| failed(DOING, error))?,
                key: Some((name.clone(), key.clone())),
            }
        }
    };
    let id = EventId::new(installation, watched.row);
    let mut before = None;
    for _ in 0..LOOKS {
        let query = Query::new(&store.sql().cancel).bind(watched.row);
        let rows = fetch(store, connection, query).await?;
        let cancelled = cancelled(&rows).map_err(|error| failed(DOING, error))?;
        before = earlier(before, &cancelled);
        if cancelled.iter().any(|(_, is_part)| *is_part) {
            // It may have waited for the split that made it one, and what that has added is not in
            // its snapshot.
            continue;
        }
        if let Some(state) = before {
            return Ok(Some(Existing {
                id,
                state,
                output: None,
                fingerprint: None,
            }));
        }
        let query = query_of(store, std::slice::from_ref(&watched));
        let rows = fetch(store, connection, query).await?;
        let found = found(&rows, std::slice::from_ref(&watched), installation);
        let found = found.map_err(|error| failed(DOING, error))?.pop().flatten();
        let unsettled = |found: &Existing| {
            matches!(
                found.state,
                EventState::Pending | EventState::InProgress | EventState::Failed
            )
        };
        if !found.as_ref().is_some_and(unsettled) {
            return Ok(found);
        }
    }
    Err(StoreError::new(
        StoreErrorKind::Conflict,
        "cancel an event that keeps coming and going",
    ))
}

fn cancelled(rows: &[PgRow]) -> Result<Vec<(EventState, bool)>, sqlx::Error> {
    let row = |row: &PgRow| {
        let state: String = row.try_get(0)?;
        let state = EventState::parse(&state).ok_or_else(|| unreadable("an unknown state"))?;
        Ok((state, row.try_get(1)?))
    };
    rows.iter().map(row).collect()
}

/// The state of an event of which these were cancelled, too: in progress if one of them was.
fn earlier(before: Option<EventState>, cancelled: &[(EventState, bool)]) -> Option<EventState> {
    let mut states = before
        .into_iter()
        .chain(cancelled.iter().map(|(state, _)| *state));
    let first = states.next()?;
    let other = states.find(|state| *state == EventState::InProgress);
    Some(other.unwrap_or(first))
}

async fn fetch(
    store: &PgStore,
    connection: &mut PgConnection,
    query: Query,
) -> Result<Vec<PgRow>, StoreError> {
    let rows = query.fetch(connection, store.keeps_statements()).await;
    rows.map_err(|error| failed(DOING, error))
}

pub(super) async fn look_up(
    store: &PgStore,
    events: &[Watched],
) -> Result<Vec<Option<Existing>>, StoreError> {
    const DOING: &str = "look up events";
    if events.is_empty() {
        return Ok(Vec::new());
    }
    let installation = store.installation().await?;
    let rows = store.ask(DOING, query_of(store, events)).await?;
    found(&rows, events, installation).map_err(|error| failed(DOING, error))
}

pub(super) fn query_of(store: &PgStore, events: &[Watched]) -> Query {
    let rows: Vec<i64> = events.iter().map(|event| event.row).collect();
    let keys = events.iter().map(|event| match &event.key {
        Some((name, key)) => (Some(name.as_str()), Some(key.as_str())),
        None => (None, None),
    });
    let (names, keys): (Vec<Option<&str>>, Vec<Option<&str>>) = keys.unzip();
    Query::new(&store.sql().watch)
        .bind(rows)
        .bind(names)
        .bind(keys)
}

fn found(
    rows: &[PgRow],
    events: &[Watched],
    installation: Uuid,
) -> Result<Vec<Option<Existing>>, sqlx::Error> {
    let mut found = vec![None; events.len()];
    for row in rows {
        let position: i64 = row.try_get(0)?;
        let at = usize::try_from(position - 1).unwrap_or(usize::MAX);
        let (Some(event), Some(state)) = (events.get(at), row.try_get::<Option<String>, _>(1)?)
        else {
            continue;
        };
        found[at] = Some(Existing {
            id: EventId::new(installation, event.row),
            state: EventState::parse(&state).ok_or_else(|| unreadable("an unknown state"))?,
            output: row.try_get(2)?,
            fingerprint: fingerprint(row.try_get(3)?),
        });
    }
    Ok(found)
}
