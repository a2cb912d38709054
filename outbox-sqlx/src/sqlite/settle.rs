//! Settling: recording outcomes and ending claims.
//!
//! Everything here runs in one transaction that holds the write lock. [`HELD`] is asked first;
//! what it answers cannot change before the commit, yet every statement names the token again, so
//! that none of them can be wrong on its own.

use std::collections::HashSet;

use outbox_core::lease::HeldLease;
use outbox_core::outcome::Outcome;
use outbox_core::store::{EventState, Settled, Settlement};
use serde_json::{Value, json};
use sqlx::{Row, SqliteConnection};

use super::claim::append_failure;
use super::part::savepoint;
use super::row::{leases_json, micros, token, token_text};
use super::sql::{Statements, safe};

/// Answers which of the leases `?1` are still in their rows, whether they have ended or not: until
/// somebody else claims the row, its outcome is welcome.
pub(super) const HELD: &str = "
    SELECT event.id, event.lease_token
    FROM json_each(?1) AS lease
    JOIN {events} AS event
        ON event.id = lease.value ->> 0 AND event.lease_token = lease.value ->> 1
";

/// Copies processed events to the history, if they are kept.
///
/// - `retention > 0`: an event that is not kept is never written a second time.
/// - The row leaves its lease token behind; who held it last stays.
pub(super) const ARCHIVE: &str = "
    INSERT INTO {history} (
        id, name, handler, origin, version, priority, state, payload, headers, dedup_key,
        ordering_key, attempts, max_attempts, claimed_by, created_at, settled_at, expires_at,
        failures, output
    )
    SELECT
        event.id, name, handler, origin, version, priority, 'processed', payload, headers, dedup_key, ordering_key,
        attempts, max_attempts, claimed_by, created_at, {now}, {now} + retention, failures,
        settled.value ->> 'output'
    FROM json_each(?1) AS settled
    JOIN {events} AS event
        ON event.id = settled.value ->> 'row' AND event.lease_token = settled.value ->> 'token'
    WHERE retention > 0
";

/// Keeps the final state and output of events beside their keys, whether the events themselves are
/// kept or not, and starts the keys' end. What is discarded has no output.
///
/// - The longer of the two retentions: a key outlives its event's last row.
/// - `event_id`: a key is only ever closed by the event that holds it.
pub(super) fn close_keys(state: EventState) -> String {
    format!(
        "UPDATE {{keys}} AS taken
        SET state = '{state}',
            output = settled.output,
            expires_at = {{now}} + max(settled.retention, settled.key_retention)
        FROM (
            SELECT
                event.id, event.name, event.dedup_key, event.retention, event.key_retention,
                outcome.value ->> 'output' AS output
            FROM json_each(?1) AS outcome
            JOIN {{events}} AS event
                ON event.id = outcome.value ->> 'row'
                AND event.lease_token = outcome.value ->> 'token'
            WHERE event.dedup_key IS NOT NULL
        ) AS settled
        WHERE taken.name = settled.name
            AND taken.key = settled.dedup_key
            AND taken.event_id = settled.id"
    )
}

/// Copies events to the dead letters, with the failure that ended them.
pub(super) fn bury() -> String {
    let failures = append_failure("settled.value ->> 'error'");
    burying("attempts", &failures, "settled.value ->> 'reason'")
}

/// Copies events to the dead letters whose time was over before a handler was started: the attempt is
/// taken back, and there is no failure to record.
pub(super) fn bury_expired() -> String {
    burying("max(attempts - 1, 0)", "failures", "'expired'")
}

fn burying(attempts: &str, failures: &str, reason: &str) -> String {
    format!(
        "INSERT INTO {{dead}} (
            id, name, handler, origin, version, priority, payload, headers, dedup_key, ordering_key,
            blocks, attempts, max_attempts, claimed_by, created_at, settled_at, retention,
            key_retention, failures, reason
        )
        SELECT
            event.id, name, handler, origin, version, priority, payload, headers, dedup_key,
            ordering_key, blocks, {attempts}, max_attempts, claimed_by, created_at, {{now}},
            retention, key_retention, {failures}, {reason}
        FROM json_each(?1) AS settled
        JOIN {{events}} AS event
            ON event.id = settled.value ->> 'row' AND event.lease_token = settled.value ->> 'token'"
    )
}

/// Marks the keys of events that became dead letters. They get no end: a dead letter's key is kept
/// until a person decides about the event.
pub(super) const MARK_DEAD_KEYS: &str = "
    UPDATE {keys} AS taken
    SET state = 'dead_letter'
    FROM (
        SELECT event.id, event.name, event.dedup_key
        FROM json_each(?1) AS outcome
        JOIN {events} AS event
            ON event.id = outcome.value ->> 'row' AND event.lease_token = outcome.value ->> 'token'
        WHERE event.dedup_key IS NOT NULL
    ) AS settled
    WHERE taken.name = settled.name
        AND taken.key = settled.dedup_key
        AND taken.event_id = settled.id
";

/// Takes settled events out of the table of those that are not.
///
/// The first condition drives the look-up by number; the second holds each number to the token it
/// came with.
pub(super) const LEAVE: &str = "
    DELETE FROM {events}
    WHERE id IN (SELECT value ->> 'row' FROM json_each(?1))
        AND (id, lease_token) IN (SELECT value ->> 'row', value ->> 'token' FROM json_each(?1))
";

/// Puts failed events off until their retry.
///
/// The delay is counted from here, by this clock. The attempt stays charged.
pub(super) fn retry() -> String {
    let failures = append_failure("failed.value ->> 'error'");
    format!(
        "UPDATE {{events}} AS event
        SET failures = {failures},
            due_at = {{now}} + (failed.value ->> 'after'),
            lease_token = NULL,
            lease_expires_at = NULL,
            claimed_by = NULL
        FROM json_each(?1) AS failed
        WHERE event.id = failed.value ->> 'row' AND event.lease_token = failed.value ->> 'token'"
    )
}

pub(super) async fn run(
    connection: &mut SqliteConnection,
    statements: &Statements,
    settlements: &[Settlement],
) -> Result<Vec<Settled>, sqlx::Error> {
    let mut open = held(connection, statements, settlements.iter().map(|s| &s.lease)).await?;
    let mut answers = Vec::with_capacity(settlements.len());
    let (mut processed, mut failed, mut dead) = (Vec::new(), Vec::new(), Vec::new());
    let (mut discarded, mut expired) = (Vec::new(), Vec::new());

    for settlement in settlements {
        let lease = settlement.lease;
        // Removing it makes a second outcome for the same lease come too late, as it would in a
        // call of its own.
        if !open.remove(&lease) {
            answers.push(Settled::LeaseLost);
            continue;
        }
        answers.push(Settled::Recorded);
        let (row, token) = (lease.row, token_text(lease.token));
        match &settlement.outcome {
            Outcome::Processed { output } => {
                processed.push(json!({"row": row, "token": token, "output": output}));
            }
            Outcome::Retry { after, error } => failed.push(
                json!({"row": row, "token": token, "after": micros(*after), "error": error.as_str()}),
            ),
            Outcome::Dead { reason, error } => dead.push(json!({
                "row": row, "token": token, "reason": reason.as_str(), "error": error.as_str(),
            })),
            Outcome::Discarded { .. } => discarded.push(json!({"row": row, "token": token})),
            Outcome::Expired => expired.push(json!({"row": row, "token": token})),
        }
    }

    let Statements {
        archive,
        close_keys,
        discard_keys,
        bury,
        bury_expired,
        mark_dead_keys,
        leave,
        retry,
        ..
    } = statements;
    for (batch, steps) in [
        (processed, &[archive, close_keys, leave][..]),
        (failed, &[retry][..]),
        (dead, &[bury, mark_dead_keys, leave][..]),
        (discarded, &[discard_keys, leave][..]),
        (expired, &[bury_expired, mark_dead_keys, leave][..]),
    ] {
        if batch.is_empty() {
            continue;
        }
        let batch = Value::from(batch).to_string();
        for step in steps {
            sqlx::query(safe(step))
                .bind(batch.as_str())
                .execute(&mut *connection)
                .await?;
        }
    }
    Ok(answers)
}

/// Settles through the caller's connection, in a part of the caller's transaction.
///
/// A part of its own, because SQLite undoes only the statement that failed: without it a caller
/// that goes on after an error would commit half of what settling writes.
pub(super) async fn run_through(
    connection: &mut SqliteConnection,
    statements: &Statements,
    settlements: &[Settlement],
) -> Result<Vec<Settled>, sqlx::Error> {
    let mut part = savepoint(connection).await?;
    match run(&mut part, statements, settlements).await {
        Ok(answers) => {
            part.commit().await?;
            Ok(answers)
        }
        Err(error) => {
            // What made the settlement fail says more than that there was nothing left to undo.
            let _ = part.rollback().await;
            Err(error)
        }
    }
}

/// Which of `leases` are still in their rows.
pub(super) async fn held<'a>(
    connection: &mut SqliteConnection,
    statements: &Statements,
    leases: impl IntoIterator<Item = &'a HeldLease>,
) -> Result<HashSet<HeldLease>, sqlx::Error> {
    let rows = sqlx::query(safe(&statements.held))
        .bind(leases_json(leases))
        .fetch_all(connection)
        .await?;
    let mut held = HashSet::with_capacity(rows.len());
    for row in rows {
        // What matched was written from a token, so it reads as one.
        if let Some(token) = token(row.try_get("lease_token")?) {
            held.insert(HeldLease {
                row: row.try_get("id")?,
                token,
            });
        }
    }
    Ok(held)
}
