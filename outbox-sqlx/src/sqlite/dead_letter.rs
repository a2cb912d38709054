//! Dead letters: which of them are meant, what a list shows of them, and what can be done to them.
//!
//! Every change runs in one transaction that holds the write lock, so nobody else is changing a row
//! that it looks at: there is nothing to wait for, and nothing to pass over.

use std::sync::Arc;
use std::time::Duration;

use outbox_core::dead_letter::{
    DeadLetter, DeadLetterChange, DeadLetterChunk, DeadLetterRows, DeadLetterScan,
    DeadLettersChanged,
};
use outbox_core::event::EventId;
use serde_json::{Value, json};
use sqlx::sqlite::SqliteRow;
use sqlx::{Row, SqliteConnection};

use super::row::{at_least_one, event_id, micros, optional_text, text, time};
use super::sql::{Statements, safe};

/// Looks at up to `?2` dead letters below number `?1`, downwards, and says of each whether it is
/// meant.
pub(super) fn look_down() -> String {
    let meant = meant();
    format!("SELECT id, {meant} AS meant FROM {{dead}} WHERE id < ?1 ORDER BY id DESC LIMIT ?2")
}

/// The same above number `?1`, upwards.
pub(super) fn look_up() -> String {
    let meant = meant();
    format!("SELECT id, {meant} AS meant FROM {{dead}} WHERE id > ?1 ORDER BY id LIMIT ?2")
}

/// Of name `?3`, with reason `?4`, dead for longer than `?5` and no longer than `?6` microseconds,
/// with `?7` in the last error, of handler `?8`. NULL asks for nothing.
///
/// - In what is selected and not in the `WHERE`: a row that is not meant was looked at, too, and
///   counts for the limit.
/// - `instr` and not `LIKE`, which has wildcards and takes `a` for `A`.
/// - `coalesce`: a row without a failure is one that somebody wrote by hand.
const MEANT: &str = "(
    (?3 IS NULL OR name = ?3)
    AND (?4 IS NULL OR reason = ?4)
    AND (?5 IS NULL OR settled_at < {now} - ?5)
    AND (?6 IS NULL OR settled_at >= {now} - ?6)
    AND (?7 IS NULL OR instr({last_error}, ?7) > 0)
    AND (?8 IS NULL OR handler = ?8)
)";

/// What went wrong last. An event that expired has had no attempt to fail.
pub(super) const LAST_ERROR: &str = "coalesce(
        CASE reason WHEN 'expired' THEN {expired} ELSE json_extract(failures, '$[#-1].error') END, ''
    )";

fn meant() -> String {
    MEANT.replace("{last_error}", LAST_ERROR)
}

/// Reads what a list shows of the dead letters `?1`. Not the payload, which can be large.
pub(super) fn list_statement() -> String {
    LIST.replace("{last_error}", LAST_ERROR)
}

const LIST: &str = "
    SELECT
        id, name, handler, origin, version, reason, {last_error} AS last_error, attempts,
        max_attempts, claimed_by, dedup_key, created_at, settled_at,
        (SELECT uuid FROM {installation}) AS installation
    FROM {dead}
    WHERE id IN (SELECT value FROM json_each(?1))
    ORDER BY id DESC
";

/// Which of the numbers `?1` are dead letters.
pub(super) const NUMBERED: &str = "
    SELECT id FROM {dead} WHERE id IN (SELECT value FROM json_each(?1)) ORDER BY id
";

/// Puts the dead letters `?1`, a list of numbers and waits in microseconds, back among the
/// unsettled events.
///
/// - The same number, so the same event id; the counter of numbers is beyond it already.
/// - Without a deadline: a person wants it handled.
/// - All get a due time: their lag counts from now, and no low-water mark passes them over.
/// - The trigger on the table takes the key again, which is still this event's, and forgets that
///   it was that of a dead letter.
/// - `NOT EXISTS`: somebody who deleted the key by hand has let another event take it. That one
///   dead letter stays what it is, and the others do not fail with it.
pub(super) const REQUEUE: &str = "
    INSERT INTO {events} (
        id, name, handler, origin, version, priority, payload, headers, dedup_key, ordering_key,
        blocks, max_attempts, retention, key_retention, failures, created_at, due_at
    )
    SELECT
        letter.id, letter.name, handler, origin, version, priority, payload, headers, dedup_key,
        ordering_key, blocks, max_attempts, retention, key_retention, failures, created_at,
        {now} + (chosen.value ->> 1)
    FROM json_each(?1) AS chosen
    JOIN {dead} AS letter ON letter.id = chosen.value ->> 0
    WHERE NOT EXISTS (
        SELECT 1
        FROM {keys} AS taken
        WHERE taken.name = letter.name
            AND taken.key = letter.dedup_key
            AND taken.event_id <> letter.id
    )
    RETURNING id
";

/// Copies the dead letters `?1` to the history, if they are kept.
pub(super) const ARCHIVE_DEAD: &str = "
    INSERT INTO {history} (
        id, name, handler, origin, version, priority, state, payload, headers, dedup_key,
        ordering_key, attempts, max_attempts, claimed_by, created_at, settled_at, expires_at, reason,
        failures
    )
    SELECT
        id, name, handler, origin, version, priority, 'discarded', payload, headers, dedup_key, ordering_key,
        attempts, max_attempts, claimed_by, created_at, {now}, {now} + retention, reason, failures
    FROM {dead}
    WHERE id IN (SELECT value FROM json_each(?1)) AND retention > 0
";

/// Says beside the keys of the dead letters `?1` that they were discarded, and starts the keys' end.
///
/// - The longer of the two retentions: a key outlives its event's last row.
/// - `event_id`: a key is only ever closed by the event that holds it.
pub(super) const CLOSE_DEAD_KEYS: &str = "
    UPDATE {keys} AS taken
    SET state = 'discarded',
        output = NULL,
        expires_at = {now} + max(letter.retention, letter.key_retention)
    FROM (
        SELECT id, name, dedup_key, retention, key_retention
        FROM {dead}
        WHERE id IN (SELECT value FROM json_each(?1)) AND dedup_key IS NOT NULL
    ) AS letter
    WHERE taken.name = letter.name
        AND taken.key = letter.dedup_key
        AND taken.event_id = letter.id
";

/// Takes the dead letters `?1` out of their table.
pub(super) const LEAVE_DEAD: &str = "
    DELETE FROM {dead} WHERE id IN (SELECT value FROM json_each(?1))
";

/// What is meant is read with a second statement. A dead letter that somebody changes between the
/// two is none any more, and is left out.
pub(super) async fn list(
    connection: &mut SqliteConnection,
    statements: &Statements,
    scan: &DeadLetterScan<'_>,
) -> Result<DeadLetterChunk, sqlx::Error> {
    let (meant, next) = look(connection, &statements.dead_look_down, scan).await?;
    if meant.is_empty() {
        return Ok(DeadLetterChunk {
            found: Vec::new(),
            next,
        });
    }
    let rows = sqlx::query(safe(&statements.dead_list))
        .bind(Value::from(meant).to_string())
        .fetch_all(connection)
        .await?;
    let found = rows.iter().map(letter).collect::<Result<_, _>>()?;
    Ok(DeadLetterChunk { found, next })
}

pub(super) async fn change(
    connection: &mut SqliteConnection,
    statements: &Statements,
    rows: DeadLetterRows<'_>,
    change: DeadLetterChange,
) -> Result<DeadLettersChanged, sqlx::Error> {
    let (mut rows, next) = match rows {
        DeadLetterRows::Numbered(rows) => (
            numbered(connection, &statements.dead_numbered, rows).await?,
            None,
        ),
        DeadLetterRows::Matching(scan) => look(connection, &statements.dead_look_up, &scan).await?,
    };
    if rows.is_empty() {
        return Ok(DeadLettersChanged { rows, next });
    }
    let steps = match change {
        DeadLetterChange::Requeue { delay, spacing } => {
            rows = requeue(connection, statements, &rows, delay, spacing).await?;
            &[&statements.leave_dead][..]
        }
        DeadLetterChange::Discard => &[
            &statements.archive_dead,
            &statements.close_dead_keys,
            &statements.leave_dead,
        ],
        DeadLetterChange::Purge => &[&statements.close_dead_keys, &statements.leave_dead],
    };
    let chosen = Value::from(rows.clone()).to_string();
    for step in steps {
        sqlx::query(safe(step))
            .bind(chosen.as_str())
            .execute(&mut *connection)
            .await?;
    }
    Ok(DeadLettersChanged { rows, next })
}

/// Answers which were requeued, ascending.
async fn requeue(
    connection: &mut SqliteConnection,
    statements: &Statements,
    rows: &[i64],
    delay: Duration,
    spacing: Duration,
) -> Result<Vec<i64>, sqlx::Error> {
    let mut wait = delay;
    let mut chosen = Vec::with_capacity(rows.len());
    for row in rows {
        chosen.push(json!([row, micros(wait)]));
        wait = wait.saturating_add(spacing);
    }
    let mut requeued: Vec<i64> = sqlx::query_scalar(safe(&statements.requeue))
        .bind(Value::from(chosen).to_string())
        .fetch_all(connection)
        .await?;
    requeued.sort_unstable();
    Ok(requeued)
}

async fn numbered(
    connection: &mut SqliteConnection,
    statement: &Arc<str>,
    rows: &[i64],
) -> Result<Vec<i64>, sqlx::Error> {
    sqlx::query_scalar(safe(statement))
        .bind(Value::from(rows.to_vec()).to_string())
        .fetch_all(connection)
        .await
}

/// The numbers that are meant, in the order of the walk, and where the next chunk begins.
///
/// One row more than is to be looked at tells whether anything is left.
async fn look(
    connection: &mut SqliteConnection,
    statement: &Arc<str>,
    scan: &DeadLetterScan<'_>,
) -> Result<(Vec<i64>, Option<i64>), sqlx::Error> {
    let filter = scan.filter;
    let rows = sqlx::query(safe(statement))
        .bind(scan.beyond)
        .bind(i64::from(scan.scan.get()) + 1)
        .bind(filter.event_asked())
        .bind(filter.reason_asked().map(|reason| reason.as_str()))
        .bind(filter.least_age().map(micros))
        .bind(filter.greatest_age().map(micros))
        .bind(filter.error_asked())
        .bind(filter.handler_asked())
        .fetch_all(connection)
        .await?;

    let limit = usize::try_from(scan.limit.get()).unwrap_or(usize::MAX);
    let mut meant = Vec::new();
    let mut last = None;
    for (looked_at, row) in (0..).zip(&rows) {
        if looked_at == scan.scan.get() || meant.len() == limit {
            return Ok((meant, last));
        }
        let number: i64 = row.try_get("id")?;
        last = Some(number);
        if row.try_get("meant")? {
            meant.push(number);
        }
    }
    Ok((meant, None))
}

fn letter(row: &SqliteRow) -> Result<DeadLetter, sqlx::Error> {
    let id = event_id(row)?;
    let mut letter = DeadLetter::new(
        id,
        text(row, "name")?,
        at_least_one(row, "version")?,
        at_least_one(row, "max_attempts")?,
        time(row.try_get("created_at")?),
        time(row.try_get("settled_at")?),
    );
    letter.reason_text = text(row, "reason")?;
    letter.last_error = text(row, "last_error")?;
    letter.attempts = u32::try_from(row.try_get::<i64, _>("attempts")?).unwrap_or(u32::MAX);
    letter.claimed_by = optional_text(row, "claimed_by")?;
    letter.dedup_key = optional_text(row, "dedup_key")?;
    letter.handler = optional_text(row, "handler")?;
    let origin: Option<i64> = row.try_get("origin")?;
    letter.origin = origin.map(|row| EventId::new(id.installation(), row));
    Ok(letter)
}
