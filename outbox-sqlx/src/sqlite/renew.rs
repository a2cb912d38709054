//! Holding on to leases, looking at them, and giving them back.

use outbox_core::lease::HeldLease;
use outbox_core::store::{Renewal, Settled, Verified};
use sqlx::{Row, SqliteConnection};
use std::time::Duration;

use super::claim::IS_BLOCKED;
use super::row::{event_id, leases_json, micros, time, token};
use super::settle::held;
use super::sql::{Statements, safe};

/// Answers which of the leases `?1` are in their rows, how much of each is left, and whether anything
/// speaks against starting them.
///
/// - `max`: an expired lease that nobody took over is still held, with nothing left of it.
/// - A row that was born leased belongs to all handlers of its event, so the pause of one of them does
///   not concern it.
const VERIFY: &str = "
    SELECT
        event.id, event.lease_token, event.created_at,
        max(event.lease_expires_at - {now}, 0) AS remaining,
        coalesce(event.expires_at <= {now}, 0) AS expired,
        EXISTS (SELECT 1 FROM {paused} WHERE name = event.name AND handler = '')
            OR (event.ordering_key IS NOT NULL AND {is_blocked}) AS blocked,
        (SELECT uuid FROM {installation}) AS installation
    FROM json_each(?1) AS lease
    JOIN {events} AS event
        ON event.id = lease.value ->> 0 AND event.lease_token = lease.value ->> 1
";

pub(super) fn verify_statement() -> String {
    VERIFY.replace("{is_blocked}", &IS_BLOCKED.replace("candidate.", "event."))
}

/// Lets the leases `?1` end `?2` microseconds from now. An expired one that nobody took over
/// begins again.
pub(super) const RENEW: &str = "
    UPDATE {events} AS event
    SET lease_expires_at = {now} + ?2
    FROM json_each(?1) AS lease
    WHERE event.id = lease.value ->> 0 AND event.lease_token = lease.value ->> 1
";

/// Gives the claims `?1` back.
///
/// - `due_at` is left as it is: what had waited long enough is due, and no index entry is moved.
/// - The attempt is taken back, for its handler never started. `max` keeps a row that was altered
///   by hand from being refused by its own constraint.
pub(super) const RELEASE: &str = "
    UPDATE {events} AS event
    SET attempts = max(attempts - 1, 0),
        lease_token = NULL,
        lease_expires_at = NULL,
        claimed_by = NULL
    FROM json_each(?1) AS lease
    WHERE event.id = lease.value ->> 0 AND event.lease_token = lease.value ->> 1
";

pub(super) async fn verify(
    connection: &mut SqliteConnection,
    statements: &Statements,
    leases: &[HeldLease],
) -> Result<Vec<Verified>, sqlx::Error> {
    let rows = sqlx::query(safe(&statements.verify))
        .bind(leases_json(leases))
        .fetch_all(connection)
        .await?;
    let mut verified = Vec::with_capacity(rows.len());
    for row in rows {
        let Some(token) = token(row.try_get("lease_token")?) else {
            continue;
        };
        let id = event_id(&row)?;
        verified.push(Verified {
            lease: HeldLease {
                row: id.row(),
                token,
            },
            id,
            created_at: time(row.try_get("created_at")?),
            remaining: Duration::from_micros(
                u64::try_from(row.try_get::<i64, _>("remaining")?).unwrap_or(0),
            ),
            expired: row.try_get("expired")?,
            blocked: row.try_get("blocked")?,
        });
    }
    Ok(verified)
}

/// Extends leases. Never answers [`Renewal::Unknown`]: there are no row locks, and who has the
/// write lock is waited for.
pub(super) async fn renew(
    connection: &mut SqliteConnection,
    statements: &Statements,
    leases: &[HeldLease],
    lease: Duration,
) -> Result<Vec<Renewal>, sqlx::Error> {
    let held = held(connection, statements, leases).await?;
    sqlx::query(safe(&statements.renew))
        .bind(leases_json(&held))
        .bind(micros(lease))
        .execute(connection)
        .await?;
    Ok(leases
        .iter()
        .map(|lease| match held.contains(lease) {
            true => Renewal::Renewed,
            false => Renewal::Lost,
        })
        .collect())
}

pub(super) async fn release(
    connection: &mut SqliteConnection,
    statements: &Statements,
    leases: &[HeldLease],
) -> Result<Vec<Settled>, sqlx::Error> {
    let mut held = held(connection, statements, leases).await?;
    sqlx::query(safe(&statements.release))
        .bind(leases_json(&held))
        .execute(connection)
        .await?;
    Ok(leases
        .iter()
        .map(|lease| match held.remove(lease) {
            true => Settled::Recorded,
            false => Settled::LeaseLost,
        })
        .collect())
}
