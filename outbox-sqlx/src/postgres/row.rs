//! Rows to what the framework works with.

use std::num::NonZeroU32;
use std::time::{Duration, SystemTime};

use outbox_core::event::{EventId, Priority};
use outbox_core::lease::LeaseToken;
use outbox_core::store::{Claimed, EventRecord, EventState, Exhausted, Failure};
use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::query::PgUuid;

/// What a claim answers with, in the order in which [`claimed`] reads it.
///
/// The payload is the stored text itself: `json` keeps it, and the cast copies it.
pub(super) const CLAIMED_COLUMNS: &str = "
    event.id, event.name, event.version, event.payload::text, event.headers::text, event.priority,
    event.due_at IS NOT NULL, event.attempts, event.max_attempts,
    (extract(epoch FROM event.created_at) * 1000000)::bigint,
    coalesce(event.expires_at <= clock_timestamp(), false), event.ordering_key, event.handler,
    event.origin,
    CASE
        WHEN event.failures IS NULL THEN 0
        WHEN event.failures -> -1 ->> 'error' IS DISTINCT FROM '{lease_ended}'
            OR (event.failures -> -1 ->> 'attempt')::integer <> event.attempts - 1
        THEN 0
        WHEN event.failures -> -2 ->> 'error' IS DISTINCT FROM '{lease_ended}'
            OR (event.failures -> -2 ->> 'attempt')::integer <> event.attempts - 2
        THEN 1
        ELSE 2
    END";

pub(super) fn claimed(
    row: &PgRow,
    installation: Uuid,
    token: LeaseToken,
) -> Result<Claimed, sqlx::Error> {
    Ok(Claimed {
        id: EventId::new(installation, row.try_get(0)?),
        token,
        name: row.try_get(1)?,
        version: count(row.try_get(2)?)?,
        payload: row.try_get(3)?,
        headers: row.try_get(4)?,
        priority: Priority::from_level(row.try_get(5)?)
            .ok_or_else(|| unreadable("a priority outside 0..=3"))?,
        waited: row.try_get(6)?,
        attempt: count(row.try_get(7)?)?,
        max_attempts: count(row.try_get(8)?)?,
        created_at: time(row.try_get(9)?),
        expired: row.try_get(10)?,
        ordering_key: row.try_get(11)?,
        handler: row.try_get(12)?,
        origin: row.try_get(13)?,
        lapsed: u32::try_from(row.try_get::<i32, _>(14)?).unwrap_or(0),
    })
}

/// A row of a sweep: id, name, attempts, max attempts, handler, origin.
pub(super) fn exhausted(
    row: &PgRow,
    installation: Uuid,
    token: LeaseToken,
) -> Result<Exhausted, sqlx::Error> {
    Ok(Exhausted {
        id: EventId::new(installation, row.try_get(0)?),
        token,
        name: row.try_get(1)?,
        attempt: count(row.try_get(2)?)?,
        max_attempts: count(row.try_get(3)?)?,
        handler: row.try_get(4)?,
        origin: row.try_get(5)?,
    })
}

/// What [`record`] reads, in its order.
pub(super) const RECORD_COLUMNS: &str = "
    id, name, version, payload::text, headers::text, dedup_key, ordering_key,
    CASE priority WHEN 'low' THEN 0 WHEN 'normal' THEN 1 WHEN 'high' THEN 2 ELSE 3 END::smallint,
    status, attempts, max_attempts, lease_token, claimed_by,
    (extract(epoch FROM due_at) * 1000000)::bigint,
    (extract(epoch FROM created_at) * 1000000)::bigint,
    (extract(epoch FROM settled_at) * 1000000)::bigint,
    last_error, dead_reason, output::text, failures::text, handler, origin,
    (extract(epoch FROM expires_at) * 1000000)::bigint";

pub(super) fn record(row: &PgRow, installation: Uuid) -> Result<EventRecord, sqlx::Error> {
    let status: String = row.try_get(8)?;
    let mut record = EventRecord::new(
        EventId::new(installation, row.try_get(0)?),
        row.try_get(1)?,
        count(row.try_get(2)?)?,
        row.try_get(3)?,
        EventState::parse(&status).ok_or_else(|| unreadable("an unknown status"))?,
        count(row.try_get(10)?)?,
        time(row.try_get(14)?),
    );
    record.headers = row.try_get(4)?;
    record.dedup_key = row.try_get(5)?;
    record.ordering_key = row.try_get(6)?;
    record.priority = Priority::from_level(row.try_get(7)?)
        .ok_or_else(|| unreadable("a priority outside 0..=3"))?;
    record.attempts = u32::try_from(row.try_get::<i32, _>(9)?)
        .map_err(|_| unreadable("a negative number of attempts"))?;
    record.lease_token = row
        .try_get::<Option<PgUuid>, _>(11)?
        .map(|token| LeaseToken::from_uuid(token.0));
    record.claimed_by = row.try_get(12)?;
    record.due_at = row.try_get::<Option<i64>, _>(13)?.map(time);
    record.settled_at = row.try_get::<Option<i64>, _>(15)?.map(time);
    record.last_error = row.try_get(16)?;
    record.dead_reason = row
        .try_get::<Option<String>, _>(17)?
        .and_then(|reason| reason.parse().ok());
    record.output = row.try_get(18)?;
    if let Some(list) = row.try_get::<Option<String>, _>(19)? {
        record.failures = failures(&list)?;
    }
    record.handler = row.try_get(20)?;
    let origin: Option<i64> = row.try_get(21)?;
    record.origin = origin.map(|row| EventId::new(installation, row));
    record.expires_at = row.try_get::<Option<i64>, _>(22)?.map(time);
    Ok(record)
}

/// What one statement appends to `failures`: `{attempt, at, instance, error}` with `at` in
/// microseconds since 1970.
fn failures(list: &str) -> Result<Vec<Failure>, sqlx::Error> {
    let entries: Vec<serde_json::Value> =
        serde_json::from_str(list).map_err(|error| sqlx::Error::Decode(error.into()))?;
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    Ok(entries
        .iter()
        .map(|entry| Failure {
            attempt: entry["attempt"]
                .as_u64()
                .and_then(|attempt| u32::try_from(attempt).ok())
                .unwrap_or_default(),
            at: time(entry["at"].as_i64().unwrap_or_default()),
            instance: text(&entry["instance"]),
            error: text(&entry["error"]),
        })
        .collect())
}

/// A moment given in microseconds since 1970.
pub(super) fn time(micros: i64) -> SystemTime {
    let distance = Duration::from_micros(micros.unsigned_abs());
    if micros < 0 {
        SystemTime::UNIX_EPOCH - distance
    } else {
        SystemTime::UNIX_EPOCH + distance
    }
}

pub(super) fn count(stored: i32) -> Result<NonZeroU32, sqlx::Error> {
    u32::try_from(stored)
        .ok()
        .and_then(NonZeroU32::new)
        .ok_or_else(|| unreadable("a count below 1"))
}

/// The table's constraints forbid all of these, so they mean that somebody dropped one.
pub(super) fn unreadable(what: &'static str) -> sqlx::Error {
    sqlx::Error::Decode(what.into())
}
