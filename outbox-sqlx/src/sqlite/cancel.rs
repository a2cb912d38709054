//! Cancelling an event through the caller's connection, and looking up what has become of events.

use outbox_core::event::EventId;
use outbox_core::store::{EventRef, EventState, Existing, Watched};
use serde_json::{Value, json};
use sqlx::sqlite::SqliteRow;
use sqlx::{Row, SqliteConnection};
use uuid::Uuid;

use super::part::savepoint;
use super::row::{fingerprint, installation, undecodable};
use super::sql::{Statements, safe};

/// The state of each unsettled row of the event `?1`: its own, and those that were split from it.
pub(super) const PARTS_OF: &str = "
    SELECT {status} AS state FROM {events} WHERE id = ?1
    UNION ALL
    SELECT {status} FROM {events} WHERE origin = ?1
";

/// Copies the unsettled rows of the event `?1` to the history, if they are kept.
pub(super) const ARCHIVE: &str = "
    INSERT INTO {history} (
        id, name, handler, origin, version, priority, state, payload, headers, dedup_key,
        ordering_key, attempts, max_attempts, claimed_by, created_at, settled_at, expires_at,
        failures
    )
    SELECT
        id, name, handler, origin, version, priority, 'cancelled', payload, headers, dedup_key,
        ordering_key, attempts, max_attempts, claimed_by, created_at, {now}, {now} + retention,
        failures
    FROM {events}
    WHERE (id = ?1 OR origin = ?1) AND retention > 0
";

/// Says beside the key of the event `?1` that it was cancelled, and starts the key's end.
///
/// - The longer of the two retentions: a key outlives its event's last row.
pub(super) const CLOSE_KEY: &str = "
    UPDATE {keys} AS taken
    SET state = 'cancelled',
        output = NULL,
        expires_at = {now} + max(event.retention, event.key_retention)
    FROM {events} AS event
    WHERE event.id = ?1
        AND event.dedup_key IS NOT NULL
        AND taken.name = event.name
        AND taken.key = event.dedup_key
        AND taken.event_id = event.id
";

pub(super) const LEAVE: &str = "DELETE FROM {events} WHERE id = ?1 OR origin = ?1";

/// The number of the event of the name `?1` that holds the key `?2`.
pub(super) const HOLDER: &str = "SELECT event_id FROM {keys} WHERE name = ?1 AND key = ?2";

/// What has become of the events of the JSON array `?1` of `[row, name, key]`.
///
/// - One statement over every place an event can be, because a row can move between two.
pub(super) const LOOK_UP: &str = "
    SELECT
        wanted.key AS position,
        coalesce(
            (SELECT {status} FROM {events} WHERE id = wanted.value ->> 0),
            (SELECT 'dead_letter' FROM {dead} WHERE id = wanted.value ->> 0),
            (SELECT state FROM {history} WHERE id = wanted.value ->> 0),
            taken.state
        ) AS state,
        coalesce((SELECT output FROM {history} WHERE id = wanted.value ->> 0), taken.output)
            AS output,
        taken.fingerprint,
        (SELECT uuid FROM {installation}) AS installation
    FROM json_each(?1) AS wanted
    LEFT JOIN {keys} AS taken
        ON taken.name = wanted.value ->> 1
        AND taken.key = wanted.value ->> 2
        AND taken.event_id = wanted.value ->> 0
    ORDER BY wanted.key
";

/// Cancels in a part of the caller's transaction, for the reason that settling does.
pub(super) async fn run(
    connection: &mut SqliteConnection,
    statements: &Statements,
    event: &EventRef,
) -> Result<Option<Existing>, sqlx::Error> {
    let mut part = savepoint(connection).await?;
    match cancel(&mut part, statements, event).await {
        Ok(found) => {
            part.commit().await?;
            Ok(found)
        }
        Err(error) => {
            // What made it fail says more than that there was nothing left to undo.
            let _ = part.rollback().await;
            Err(error)
        }
    }
}

async fn cancel(
    connection: &mut SqliteConnection,
    statements: &Statements,
    event: &EventRef,
) -> Result<Option<Existing>, sqlx::Error> {
    let uuid: String = sqlx::query_scalar(safe(&statements.installation))
        .fetch_one(&mut *connection)
        .await?;
    let installation = installation(&uuid)?;
    let watched = match event {
        EventRef::Id(id) if id.installation() != installation => return Ok(None),
        EventRef::Id(id) => Watched {
            row: id.row(),
            key: None,
        },
        EventRef::Key { name, key } => {
            let holder = sqlx::query_scalar(safe(&statements.key_holder))
                .bind(name)
                .bind(key)
                .fetch_optional(&mut *connection)
                .await?;
            let Some(row) = holder else {
                return Ok(None);
            };
            Watched {
                row,
                key: Some((name.clone(), key.clone())),
            }
        }
    };
    let states: Vec<String> = sqlx::query_scalar(safe(&statements.parts_of))
        .bind(watched.row)
        .fetch_all(&mut *connection)
        .await?;
    let found = look_up(connection, statements, std::slice::from_ref(&watched)).await?;
    let found = found.into_iter().next().flatten();
    if states.is_empty() {
        return Ok(found);
    }
    // Closing the key first: it is found by the row that leaves.
    for step in [
        &statements.cancel_key,
        &statements.archive_cancelled,
        &statements.leave_cancelled,
    ] {
        sqlx::query(safe(step))
            .bind(watched.row)
            .execute(&mut *connection)
            .await?;
    }
    let mut before = state(&states[0])?;
    if states
        .iter()
        .any(|state| state == EventState::InProgress.as_str())
    {
        before = EventState::InProgress;
    }
    Ok(Some(Existing {
        id: EventId::new(installation, watched.row),
        state: before,
        output: None,
        fingerprint: None,
    }))
}

pub(super) async fn look_up(
    connection: &mut SqliteConnection,
    statements: &Statements,
    events: &[Watched],
) -> Result<Vec<Option<Existing>>, sqlx::Error> {
    let wanted: Vec<Value> = events
        .iter()
        .map(|event| match &event.key {
            Some((name, key)) => json!([event.row, name, key]),
            None => json!([event.row, null, null]),
        })
        .collect();
    let rows = sqlx::query(safe(&statements.watch))
        .bind(Value::from(wanted).to_string())
        .fetch_all(connection)
        .await?;
    let mut found = vec![None; events.len()];
    for row in &rows {
        let position: i64 = row.try_get("position")?;
        let at = usize::try_from(position).unwrap_or(usize::MAX);
        if let Some(event) = events.get(at) {
            found[at] = existing(row, event.row)?;
        }
    }
    Ok(found)
}

fn existing(row: &SqliteRow, number: i64) -> Result<Option<Existing>, sqlx::Error> {
    let Some(found) = row.try_get::<Option<String>, _>("state")? else {
        return Ok(None);
    };
    let uuid: String = row.try_get("installation")?;
    let uuid: Uuid = installation(&uuid)?;
    Ok(Some(Existing {
        id: EventId::new(uuid, number),
        state: state(&found)?,
        output: row.try_get("output")?,
        fingerprint: fingerprint(row.try_get("fingerprint")?),
    }))
}

fn state(text: &str) -> Result<EventState, sqlx::Error> {
    EventState::parse(text).ok_or_else(|| undecodable("state", format!("unknown state `{text}`")))
}
