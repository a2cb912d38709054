//! Between columns and the framework's types.

use std::fmt::Write as _;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use outbox_core::DURATION_MAX;
use outbox_core::event::{EventId, Priority};
use outbox_core::fingerprint::Fingerprint;
use outbox_core::lease::{HeldLease, LeaseToken};
use outbox_core::store::{Claimed, Exhausted, KnownEvent, LEASE_ENDED};
use serde_json::{Value, json};
use sqlx::error::BoxDynError;
use sqlx::sqlite::SqliteRow;
use sqlx::{Decode, Row, Sqlite};
use uuid::Uuid;

/// What a claim returns of each row, whichever statement claims it.
const CLAIMED_COLUMNS: &str = "
    id, name, version, payload, headers, priority, due_at IS NOT NULL AS waited,
    attempts, max_attempts, created_at, coalesce(expires_at <= {now}, 0) AS expired, ordering_key,
    handler, origin, (SELECT uuid FROM {installation}) AS installation,
    CASE
        WHEN failures IS NULL THEN 0
        WHEN json_extract(failures, '$[#-1].error') IS NOT '{lease_ended}'
            OR json_extract(failures, '$[#-1].attempt') IS NOT attempts - 1
        THEN 0
        WHEN json_extract(failures, '$[#-2].error') IS NOT '{lease_ended}'
            OR json_extract(failures, '$[#-2].attempt') IS NOT attempts - 2
        THEN 1
        ELSE 2
    END AS lapsed
";

pub(super) fn claimed_columns() -> String {
    CLAIMED_COLUMNS.replace("{lease_ended}", LEASE_ENDED)
}

pub(super) fn claimed(row: &SqliteRow, token: LeaseToken) -> Result<Claimed, sqlx::Error> {
    Ok(Claimed {
        id: event_id(row)?,
        token,
        name: text(row, "name")?,
        version: at_least_one(row, "version")?,
        payload: text(row, "payload")?,
        headers: optional_text(row, "headers")?,
        priority: i16::try_from(row.try_get::<i64, _>("priority")?)
            .ok()
            .and_then(Priority::from_level)
            .unwrap_or_default(),
        waited: row.try_get("waited")?,
        attempt: at_least_one(row, "attempts")?,
        max_attempts: at_least_one(row, "max_attempts")?,
        created_at: time(row.try_get("created_at")?),
        expired: row.try_get("expired")?,
        ordering_key: optional_text(row, "ordering_key")?,
        handler: optional_text(row, "handler")?,
        origin: row.try_get("origin")?,
        lapsed: row.try_get("lapsed")?,
    })
}

/// A row of a sweep.
pub(super) fn exhausted(row: &SqliteRow, token: LeaseToken) -> Result<Exhausted, sqlx::Error> {
    Ok(Exhausted {
        id: event_id(row)?,
        token,
        name: text(row, "name")?,
        attempt: at_least_one(row, "attempts")?,
        max_attempts: at_least_one(row, "max_attempts")?,
        handler: optional_text(row, "handler")?,
        origin: row.try_get("origin")?,
    })
}

/// The id made of the columns `id` and `installation`.
pub(super) fn event_id(row: &SqliteRow) -> Result<EventId, sqlx::Error> {
    let uuid: String = row.try_get("installation")?;
    Ok(EventId::new(installation(&uuid)?, row.try_get("id")?))
}

pub(super) fn installation(uuid: &str) -> Result<Uuid, sqlx::Error> {
    Uuid::from_str(uuid).map_err(|error| undecodable("installation", error))
}

/// A text that may not be UTF-8, since SQLite does not check and a person may have written it.
/// What is not is replaced: one such row must not make the claim of all others fail. Its payload
/// then fails to decode, for that event alone.
pub(super) fn text(row: &SqliteRow, column: &'static str) -> Result<String, sqlx::Error> {
    optional_text(row, column)?.ok_or_else(|| undecodable(column, "unexpected NULL"))
}

pub(super) fn optional_text(
    row: &SqliteRow,
    column: &'static str,
) -> Result<Option<String>, sqlx::Error> {
    let Lossy(text) = row.try_get_unchecked(column)?;
    Ok(text)
}

struct Lossy(Option<String>);

impl<'r> Decode<'r, Sqlite> for Lossy {
    fn decode(value: <Sqlite as sqlx::Database>::ValueRef<'r>) -> Result<Self, BoxDynError> {
        let bytes = <Option<Vec<u8>> as Decode<'r, Sqlite>>::decode(value)?;
        Ok(Self(bytes.map(|bytes| {
            String::from_utf8(bytes)
                .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
        })))
    }
}

/// A number that the schema keeps above zero. Where it is not, the schema was altered; 1 and the
/// largest number are then nearer to the truth than an error that stops everybody's claim.
pub(super) fn at_least_one(
    row: &SqliteRow,
    column: &'static str,
) -> Result<NonZeroU32, sqlx::Error> {
    let number: i64 = row.try_get(column)?;
    let number = u32::try_from(number.max(1)).unwrap_or(u32::MAX);
    Ok(NonZeroU32::new(number).unwrap_or(NonZeroU32::MIN))
}

pub(super) fn undecodable(column: &'static str, error: impl Into<BoxDynError>) -> sqlx::Error {
    sqlx::Error::ColumnDecode {
        index: column.to_owned(),
        source: error.into(),
    }
}

/// A point in time stored as microseconds since the epoch.
pub(super) fn time(micros: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

/// A span as it is stored: capped, because a sum that leaves the range of 64 bits becomes a
/// floating-point number, which the column refuses.
pub(super) fn micros(span: Duration) -> i64 {
    i64::try_from(span.min(DURATION_MAX).as_micros()).unwrap_or(i64::MAX)
}

/// A token as it is stored: hyphenated text, so that it can be compared with a log line by somebody
/// with the `sqlite3` shell. The 20 bytes a BLOB would save are in no index.
pub(super) fn token_text(token: LeaseToken) -> String {
    token.as_uuid().hyphenated().to_string()
}

pub(super) fn token(text: &str) -> Option<LeaseToken> {
    Uuid::from_str(text).ok().map(LeaseToken::from_uuid)
}

/// Any number of leases as one parameter: `[[row, token], ..]`.
pub(super) fn leases_json<'a>(leases: impl IntoIterator<Item = &'a HeldLease>) -> String {
    let leases: Vec<Value> = leases
        .into_iter()
        .map(|lease| json!([lease.row, token_text(lease.token)]))
        .collect();
    Value::from(leases).to_string()
}

/// What a process handles, as one parameter: `{"order.paid/": 3, "order.paid/email": 3, ..}`.
pub(super) fn known_json(events: &[KnownEvent]) -> String {
    let newest = events.iter().map(|event| {
        let lane = format!("{}/{}", event.name, event.handler.unwrap_or_default());
        (lane, event.newest_version.get().into())
    });
    Value::Object(newest.collect()).to_string()
}

/// A fingerprint as it is stored: hexadecimal text, which JSON can carry.
pub(super) fn fingerprint_text(fingerprint: &Fingerprint) -> String {
    let bytes = fingerprint.as_bytes().iter();
    bytes.fold(String::new(), |mut text, byte| {
        // Writing to a `String` does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// One that a later release made differently is none for us.
pub(super) fn fingerprint(text: Option<&str>) -> Option<Fingerprint> {
    let text = text?;
    let byte = |at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..text.len()).step_by(2).map(byte).collect();
    Fingerprint::from_bytes(&bytes?)
}
