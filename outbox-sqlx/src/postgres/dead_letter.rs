//! Dead letters: listing them, and what a person may do with them.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use outbox_core::dead_letter::{
    DeadLetter, DeadLetterChange, DeadLetterChunk, DeadLetterRows, DeadLetterScan,
    DeadLettersChanged,
};
use outbox_core::event::EventId;
use outbox_core::store::StoreError;
use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::PgStore;
use super::query::{Query, interval};
use super::row::{count, time, unreadable};
use super::settle::key_settled;
use super::sqlstate::failed;

/// Whether a row is meant by the filter `$4` to `$9`: name, reason, least and greatest age, text,
/// handler.
///
/// - Ages are compared, and not moments: taking a long age from now could leave what a timestamp
///   can hold.
/// - `strpos`, because the text is no pattern.
const IS_MEANT: &str = "
    ($4::text IS NULL OR name = $4)
    AND ($5::text IS NULL OR dead_reason = $5)
    AND ($6::interval IS NULL OR clock_timestamp() - settled_at > $6)
    AND ($7::interval IS NULL OR clock_timestamp() - settled_at <= $7)
    AND ($8::text IS NULL OR strpos(last_error, $8) > 0)
    AND ($9::text IS NULL OR handler = $9)";

/// Lists up to `$3` of the dead letters that are meant, among the next `$2` below number `$1`, the
/// newest first. Answers, before each, with the number below which the next chunk begins.
///
/// - What a chunk reads is bounded by how many rows it looks at, and not by how many it finds. One
///   more is read, to know whether there is a next chunk.
/// - Without payloads, which can be large.
/// - `LEFT JOIN`, so that a chunk in which nothing was found can still say where the next begins.
const LIST: &str = "
    WITH seen AS MATERIALIZED (
        SELECT
            id, name, version, dead_reason, last_error, attempts, max_attempts, claimed_by,
            dedup_key, created_at, settled_at, handler, origin, {is_meant} AS meant
        FROM {dead}
        WHERE id < $1
        ORDER BY id DESC
        LIMIT $2::bigint + 1
    ),
    looked_at AS MATERIALIZED (SELECT * FROM seen ORDER BY id DESC LIMIT $2::bigint),
    found AS MATERIALIZED (
        SELECT * FROM looked_at WHERE meant ORDER BY id DESC LIMIT $3::bigint
    ),
    last AS MATERIALIZED (
        SELECT CASE
            WHEN (SELECT count(*) FROM found) = $3::bigint THEN (SELECT min(id) FROM found)
            ELSE (SELECT min(id) FROM looked_at)
        END AS id
    )
    SELECT
        (SELECT id FROM last WHERE EXISTS (SELECT FROM seen WHERE seen.id < last.id)),
        found.id, name, version, dead_reason, last_error, attempts, max_attempts, claimed_by,
        dedup_key,
        (extract(epoch FROM created_at) * 1000000)::bigint,
        (extract(epoch FROM settled_at) * 1000000)::bigint, handler, origin
    FROM last
    LEFT JOIN found ON true
    ORDER BY found.id DESC
";

/// The dead letters among the numbers `$1`.
///
/// - In the order of their numbers, as every statement locks rows, and it waits: whoever names a row
///   wants it changed. What is no dead letter any more when the wait is over is left alone.
const NUMBERED: &str = "
    chosen AS MATERIALIZED (
        SELECT id FROM {dead} WHERE id = ANY ($1::bigint[]) ORDER BY id FOR UPDATE
    ),
    next AS MATERIALIZED (SELECT NULL::bigint AS id)";

/// Up to `$3` of the dead letters that are meant, among the next `$2` above number `$1`.
///
/// - `SKIP LOCKED`: somebody else is changing it.
/// - It is locked by number after it was found, so that no more is locked than is changed.
const MATCHING: &str = "
    seen AS MATERIALIZED (
        SELECT id, {is_meant} AS meant
        FROM {dead}
        WHERE id > $1
        ORDER BY id
        LIMIT $2::bigint + 1
    ),
    looked_at AS MATERIALIZED (SELECT * FROM seen ORDER BY id LIMIT $2::bigint),
    found AS MATERIALIZED (
        SELECT id FROM looked_at WHERE meant ORDER BY id LIMIT $3::bigint
    ),
    last AS MATERIALIZED (
        SELECT CASE
            WHEN (SELECT count(*) FROM found) = $3::bigint THEN (SELECT max(id) FROM found)
            ELSE (SELECT max(id) FROM looked_at)
        END AS id
    ),
    next AS MATERIALIZED (
        SELECT id FROM last WHERE EXISTS (SELECT FROM seen WHERE seen.id > last.id)
    ),
    chosen AS MATERIALIZED (
        SELECT id FROM {dead}
        WHERE id = ANY (ARRAY(SELECT id FROM found))
        ORDER BY id
        FOR UPDATE SKIP LOCKED
    )";

/// Takes what was chosen out of the dead letters and does `{change}` with it. Answers with where the
/// next chunk of a walk begins, and with the numbers.
///
/// - One statement: an event is at one place at every moment.
/// - One time for all rows, so that they are spaced exactly.
const CHANGE: &str = "
    WITH {selection},
    clock AS MATERIALIZED (SELECT clock_timestamp() AS now),
    gone AS (
        DELETE FROM {dead}
        WHERE id = ANY (ARRAY(SELECT id FROM chosen))
        RETURNING *
    ),
    {change}
    SELECT (SELECT id FROM next), ARRAY(SELECT id FROM gone ORDER BY id)
";

/// Back into the hot table, due `{delay}` from now, and each row `{spacing}` after the one before.
///
/// - Its key needs nothing: it does not expire while its event is dead or unsettled.
/// - Without a deadline: a person wants it handled.
/// - All get a due time: their lag counts from now, and no low-water mark passes them over.
const REQUEUE: &str = "
    requeued AS (
        INSERT INTO {events} (
            id, name, handler, origin, version, payload, headers, dedup_key, ordering_key, blocks,
            priority, max_attempts, retention, due_at, created_at, last_error, failures
        )
        SELECT
            id, name, handler, origin, version, payload, headers, dedup_key, ordering_key, blocks,
            priority, max_attempts, retention,
            (SELECT now FROM clock) + wait,
            created_at, last_error, failures
        FROM (
            SELECT
                *,
                {delay}::interval
                    + (row_number() OVER (ORDER BY id) - 1)::double precision * {spacing}::interval
                    AS wait
            FROM gone
        ) AS gone
    )";

/// Into the history, for as long as the event is kept. The key is kept no shorter.
const DISCARD: &str = "
    kept AS (
        INSERT INTO {history} (
            id, state, name, handler, origin, version, payload, headers, dedup_key, ordering_key,
            priority, attempts, max_attempts, claimed_by, created_at, settled_at, expires_at,
            dead_reason, last_error, failures
        )
        SELECT
            id, 'discarded', name, handler, origin, version, payload, headers, dedup_key,
            ordering_key, priority, attempts, max_attempts, claimed_by, created_at, (SELECT now FROM clock),
            (SELECT now FROM clock) + retention, dead_reason, last_error, failures
        FROM gone
        WHERE retention > interval '0'
    ),
    {purge}";

/// Into nothing. The key is kept, as that of a discarded event.
const PURGE: &str = "answered AS ({key_settled})";

/// What a change does, as a template: its parameters follow those of the selection.
fn change_template(selection: &str, change: &str, parameters: u32) -> String {
    CHANGE
        .replace("{selection}", selection)
        .replace("{change}", change)
        .replace("{purge}", PURGE)
        .replace("{key_settled}", &key_settled("discarded", "NULL"))
        .replace("{is_meant}", IS_MEANT)
        .replace("{delay}", &format!("${}", parameters + 1))
        .replace("{spacing}", &format!("${}", parameters + 2))
}

pub(super) fn list_template() -> String {
    LIST.replace("{is_meant}", IS_MEANT)
}

/// The statements of one way to choose dead letters.
pub(super) struct Changes {
    pub(super) requeue: Arc<str>,
    pub(super) discard: Arc<str>,
    pub(super) purge: Arc<str>,
}

impl Changes {
    pub(super) fn numbered(render: impl Fn(&str) -> Arc<str>) -> Self {
        Self::new(render, NUMBERED, 1)
    }

    pub(super) fn matching(render: impl Fn(&str) -> Arc<str>) -> Self {
        Self::new(render, MATCHING, 9)
    }

    fn new(render: impl Fn(&str) -> Arc<str>, selection: &str, parameters: u32) -> Self {
        let of = |change| render(&change_template(selection, change, parameters));
        Self {
            requeue: of(REQUEUE),
            discard: of(DISCARD),
            purge: of(PURGE),
        }
    }

    fn of(&self, change: DeadLetterChange) -> &Arc<str> {
        match change {
            DeadLetterChange::Requeue { .. } => &self.requeue,
            DeadLetterChange::Discard => &self.discard,
            DeadLetterChange::Purge => &self.purge,
        }
    }
}

pub(super) async fn dead_letters(
    store: &PgStore,
    scan: &DeadLetterScan<'_>,
) -> Result<DeadLetterChunk, StoreError> {
    const DOING: &str = "list dead letters";
    let installation = store.installation().await?;
    let query = walk(Query::new(&store.sql().dead_letters), scan);
    let rows = store.ask(DOING, query).await?;
    chunk(&rows, installation).map_err(|error| failed(DOING, error))
}

pub(super) async fn change(
    store: &PgStore,
    rows: DeadLetterRows<'_>,
    change: DeadLetterChange,
) -> Result<DeadLettersChanged, StoreError> {
    const DOING: &str = "change dead letters";
    let query = match rows {
        DeadLetterRows::Numbered(numbers) => {
            Query::new(store.sql().change_numbered.of(change)).bind(numbers)
        }
        DeadLetterRows::Matching(scan) => {
            walk(Query::new(store.sql().change_matching.of(change)), &scan)
        }
    };
    let query = match change {
        DeadLetterChange::Requeue { delay, spacing } => {
            query.bind(interval(delay)).bind(interval(spacing))
        }
        DeadLetterChange::Discard | DeadLetterChange::Purge => query,
    };
    let rows = store.ask(DOING, query).await?;
    changed(&rows).map_err(|error| failed(DOING, error))
}

/// Binds where a chunk begins and ends, and what is meant.
pub(super) fn walk(query: Query, scan: &DeadLetterScan<'_>) -> Query {
    let rows = |limit: NonZeroU32| i64::from(limit.get());
    let age = |age: Option<Duration>| age.map(interval);
    query
        .bind(scan.beyond)
        .bind(rows(scan.scan))
        .bind(rows(scan.limit))
        .bind(scan.filter.event_asked())
        .bind(scan.filter.reason_asked().map(|reason| reason.as_str()))
        .bind(age(scan.filter.least_age()))
        .bind(age(scan.filter.greatest_age()))
        .bind(scan.filter.error_asked())
        .bind(scan.filter.handler_asked())
}

fn chunk(rows: &[PgRow], installation: Uuid) -> Result<DeadLetterChunk, sqlx::Error> {
    let mut chunk = DeadLetterChunk::default();
    for row in rows {
        chunk.next = row.try_get(0)?;
        if let Some(number) = row.try_get(1)? {
            let id = EventId::new(installation, number);
            chunk.found.push(dead_letter(row, id)?);
        }
    }
    Ok(chunk)
}

fn dead_letter(row: &PgRow, id: EventId) -> Result<DeadLetter, sqlx::Error> {
    let mut letter = DeadLetter::new(
        id,
        row.try_get(2)?,
        count(row.try_get(3)?)?,
        count(row.try_get(7)?)?,
        time(row.try_get(10)?),
        time(row.try_get(11)?),
    );
    letter.reason_text = row.try_get(4)?;
    letter.last_error = row.try_get(5)?;
    letter.attempts = u32::try_from(row.try_get::<i32, _>(6)?)
        .map_err(|_| unreadable("a negative number of attempts"))?;
    letter.claimed_by = row.try_get(8)?;
    letter.dedup_key = row.try_get(9)?;
    letter.handler = row.try_get(12)?;
    let origin: Option<i64> = row.try_get(13)?;
    letter.origin = origin.map(|row| EventId::new(id.installation(), row));
    Ok(letter)
}

fn changed(rows: &[PgRow]) -> Result<DeadLettersChanged, sqlx::Error> {
    match rows.first() {
        Some(row) => Ok(DeadLettersChanged {
            next: row.try_get(0)?,
            rows: row.try_get(1)?,
        }),
        None => Ok(DeadLettersChanged::default()),
    }
}
