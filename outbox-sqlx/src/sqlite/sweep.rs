//! Sweeping: looking at all that is not settled, whatever its name.

use outbox_core::settings::LEASE_MAX;
use outbox_core::store::{SweepChunk, SweepRequest, Unhandled};
use sqlx::{Row, SqliteConnection};

use super::claim::known;
use super::row::{at_least_one, exhausted, known_json, micros, optional_text, text, token_text};
use super::sql::{Statements, safe};

/// How many rows the chunk after `?1` of at most `?2` has, and the last of them.
pub(super) const CHUNK: &str = "
    SELECT count(*) AS rows, max(id) AS last
    FROM (SELECT id FROM {events} WHERE id > ?1 ORDER BY id LIMIT ?2)
";

/// Counts the rows of the chunk from after `?1` to `?2` that `?3` does not [know](known).
pub(super) fn unhandled() -> String {
    let known = known(3);
    format!(
        "SELECT name, handler, version, count(*) AS rows
        FROM {{events}}
        WHERE id > ?1 AND id <= ?2 AND NOT {known}
        GROUP BY name, handler, version
        ORDER BY name, handler, version"
    )
}

/// Lets the leases of the chunk from after `?1` to `?2` end `?3` microseconds from now at the
/// latest.
///
/// The token stays: whoever holds the lease has at least as long as any lease may last, and may
/// renew and settle as before.
pub(super) const CUT: &str = "
    UPDATE {events}
    SET lease_expires_at = {now} + ?3
    WHERE id > ?1 AND id <= ?2 AND lease_expires_at > {now} + ?3
";

/// Claims the rows of the chunk from after `?1` to `?2` that have no attempt left and no lease that
/// still runs, for `?3` microseconds under the token `?4` for the instance `?5`.
///
/// - `lease_expires_at IS NULL`: a row that ran out of attempts without a lease is not one the
///   framework writes, but somebody may lower `max_attempts` by hand; a claim never takes it, so
///   the sweep must.
/// - Due, as for a claim: until then it waits for its retry, and is counted as one that does.
/// - Not the payload: nobody reads it, and a chunk of large ones would fill memory.
/// - No attempt is charged: no handler will run.
/// - No condition on the name: a dead letter needs no handler.
/// - `claimed_by` keeps the last holder, if there was one: it is the one that failed, and the
///   settlement records the failure under that name.
pub(super) const CLAIM: &str = "
    UPDATE {events}
    SET lease_token = ?4,
        lease_expires_at = {now} + ?3,
        claimed_by = coalesce(claimed_by, ?5)
    WHERE id > ?1 AND id <= ?2
        AND attempts >= max_attempts
        AND (due_at IS NULL OR due_at <= {now})
        AND (lease_expires_at IS NULL OR lease_expires_at <= {now})
    RETURNING
        id, name, handler, origin, attempts, max_attempts,
        (SELECT uuid FROM {installation}) AS installation
";

pub(super) async fn run(
    connection: &mut SqliteConnection,
    statements: &Statements,
    request: &SweepRequest<'_>,
) -> Result<SweepChunk, sqlx::Error> {
    let scan = i64::from(request.scan.get());
    let chunk = sqlx::query(safe(&statements.sweep_chunk))
        .bind(request.after)
        .bind(scan)
        .fetch_one(&mut *connection)
        .await?;
    let Some(last) = chunk.try_get::<Option<i64>, _>("last")? else {
        return Ok(SweepChunk::default());
    };
    let full = chunk.try_get::<i64, _>("rows")? >= scan;

    let groups = sqlx::query(safe(&statements.sweep_unhandled))
        .bind(request.after)
        .bind(last)
        .bind(known_json(request.events))
        .fetch_all(&mut *connection)
        .await?;
    let mut unhandled = Vec::with_capacity(groups.len());
    for row in &groups {
        unhandled.push(Unhandled {
            name: text(row, "name")?,
            handler: optional_text(row, "handler")?,
            version: at_least_one(row, "version")?,
            rows: u64::try_from(row.try_get::<i64, _>("rows")?).unwrap_or(0),
        });
    }

    let cut_leases = sqlx::query(safe(&statements.sweep_cut))
        .bind(request.after)
        .bind(last)
        .bind(micros(LEASE_MAX))
        .execute(&mut *connection)
        .await?
        .rows_affected();

    let taken = sqlx::query(safe(&statements.sweep_claim))
        .bind(request.after)
        .bind(last)
        .bind(micros(request.lease))
        .bind(token_text(request.token))
        .bind(request.instance)
        .fetch_all(&mut *connection)
        .await?;
    Ok(SweepChunk {
        exhausted: taken
            .iter()
            .map(|row| exhausted(row, request.token))
            .collect::<Result<_, _>>()?,
        unhandled,
        cut_leases,
        next: full.then_some(last),
    })
}
