//! Reading everything known about one event.

use outbox_core::event::{EventId, Priority};
use outbox_core::store::{EventRecord, EventState, Failure};
use serde_json::Value;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row, SqliteConnection};

use super::row::{at_least_one, event_id, optional_text, text, time, token, undecodable};
use super::sql::{Statements, safe};

/// Reads event `?1` from the view, which knows where events are kept and what their states are
/// called. The condition reaches the primary key of each of its tables.
pub(super) const FIND: &str = "
    SELECT event.*, (SELECT uuid FROM {installation}) AS installation
    FROM {all} AS event
    WHERE event.id = ?1
";

/// What makes a row's number an event's id.
pub(super) const INSTALLATION: &str = "SELECT uuid FROM {installation}";

pub(super) async fn run(
    connection: &mut SqliteConnection,
    statements: &Statements,
    number: i64,
) -> Result<Option<EventRecord>, sqlx::Error> {
    sqlx::query(safe(&statements.find))
        .bind(number)
        .fetch_optional(connection)
        .await?
        .as_ref()
        .map(record)
        .transpose()
}

fn record(row: &SqliteRow) -> Result<EventRecord, sqlx::Error> {
    let status: &str = row.try_get("status")?;
    let state = EventState::parse(status)
        .ok_or_else(|| undecodable("status", format!("unknown status `{status}`")))?;
    let mut record = EventRecord::new(
        event_id(row)?,
        text(row, "name")?,
        at_least_one(row, "version")?,
        text(row, "payload")?,
        state,
        at_least_one(row, "max_attempts")?,
        time(row.try_get("created_at")?),
    );
    record.handler = optional_text(row, "handler")?;
    let origin: Option<i64> = row.try_get("origin")?;
    record.origin = origin.map(|row| EventId::new(record.id.installation(), row));
    record.expires_at = row.try_get::<Option<i64>, _>("expires_at")?.map(time);
    record.headers = optional_text(row, "headers")?;
    record.dedup_key = optional_text(row, "dedup_key")?;
    record.ordering_key = optional_text(row, "ordering_key")?;
    record.priority = priority(row.try_get("priority")?);
    record.attempts = u32::try_from(row.try_get::<i64, _>("attempts")?).unwrap_or(u32::MAX);
    record.lease_token = row
        .try_get::<Option<&str>, _>("lease_token")?
        .and_then(token);
    record.claimed_by = optional_text(row, "claimed_by")?;
    record.due_at = row.try_get::<Option<i64>, _>("due_at")?.map(time);
    record.settled_at = row.try_get::<Option<i64>, _>("settled_at")?.map(time);
    record.last_error = optional_text(row, "last_error")?;
    record.dead_reason = match row.try_get::<Option<&str>, _>("dead_reason")? {
        None => None,
        Some(reason) => Some(
            reason
                .parse()
                .map_err(|_| undecodable("dead_reason", format!("unknown reason `{reason}`")))?,
        ),
    };
    record.output = optional_text(row, "output")?;
    record.failures = failures(row.try_get("failures")?)?;
    Ok(record)
}

fn priority(word: &str) -> Priority {
    match word {
        "low" => Priority::Low,
        "high" => Priority::High,
        "critical" => Priority::Critical,
        _ => Priority::Normal,
    }
}

fn failures(json: &str) -> Result<Vec<Failure>, sqlx::Error> {
    let failures: Vec<Value> =
        serde_json::from_str(json).map_err(|error| undecodable("failures", error))?;
    Ok(failures
        .iter()
        .map(|failure| Failure {
            attempt: failure["attempt"]
                .as_u64()
                .and_then(|attempt| u32::try_from(attempt).ok())
                .unwrap_or(0),
            at: time(failure["at"].as_i64().unwrap_or(0)),
            instance: failure["instance"].as_str().unwrap_or_default().to_owned(),
            error: failure["error"].as_str().unwrap_or_default().to_owned(),
        })
        .collect())
}
