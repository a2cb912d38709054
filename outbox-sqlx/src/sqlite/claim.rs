//! Claiming: taking due events under a lease.

use outbox_core::event::Priority;
use outbox_core::store::{ATTEMPTS_KEPT, ClaimRequest, Claimed, LEASE_ENDED};
use serde_json::Value;
use sqlx::SqliteConnection;

use super::row::{claimed, claimed_columns, known_json, micros, token_text};
use super::sql::{Statements, safe};

/// Claims up to `?1` due events that `?2` [knows](known) for `?3` microseconds under the token `?4` for the
/// instance `?5`, of which `?6` are due retries and delays while there are any. `?7` to `?10` are
/// the bounds of the levels, from critical to low. Of the ordering keys `?11` the first rows are
/// looked at below the bounds, too.
///
/// - Each level of each half is a look of its own, so that it begins at its bound and stops at its
///   limit: one scan over all levels walks over whatever is leased, put off or unhandled at the
///   head of each.
/// - The bound is on ready rows only. A waiting row has a low number and becomes due late.
/// - Due retries and delays are taken from the front of their index, at least [`WINDOW`] of them,
///   and then compete by number like everybody else. Sorting all that are due would cost every
///   claim after an outage of the handlers a walk over the backlog.
/// - `row_number` marks what is reserved for them, `ORDER BY waits_first` takes it before the rest.
/// - The `IN` list is computed once, so the limit holds under any plan.
/// - No SKIP LOCKED: SQLite has one writer, and the transaction that runs this is it.
///
/// Rows come back in no particular order.
pub(super) fn claim() -> String {
    let free = free();
    let mut ready = Vec::new();
    let mut waiting = Vec::new();
    for (priority, bound) in Priority::DESCENDING.iter().zip(7..) {
        let level = priority.level();
        ready.push(format!(
            "SELECT * FROM (
                SELECT id, priority
                FROM {{events}} AS candidate
                WHERE due_at IS NULL AND priority = {level} AND id >= ?{bound} AND {free}
                ORDER BY id
                LIMIT ?1
            )"
        ));
        waiting.push(format!(
            "SELECT * FROM (
                SELECT id, priority
                FROM {{events}} AS candidate
                WHERE due_at IS NOT NULL AND due_at <= {{now}} AND priority = {level} AND {free}
                ORDER BY due_at, id
                LIMIT max(?1, {WINDOW})
            )"
        ));
    }
    let union = |levels: Vec<String>| levels.join(" UNION ALL ");
    ready.push(format!(
        "SELECT id, priority
        FROM {{events}} AS candidate
        WHERE id IN (SELECT value FROM json_each(?11))
            AND due_at IS NULL
            AND id < CASE priority WHEN 3 THEN ?7 WHEN 2 THEN ?8 WHEN 1 THEN ?9 ELSE ?10 END
            AND {free}"
    ));
    let ready = union(ready);
    let waiting = union(waiting);
    let set = take();
    let columns = claimed_columns();
    format!(
        "UPDATE {{events}} SET {set}
        WHERE id IN (
            SELECT id
            FROM (
                SELECT
                    id, priority,
                    row_number() OVER (ORDER BY priority DESC, id) <= ?6 AS waits_first
                FROM ({waiting})
                UNION ALL
                SELECT id, priority, 0 FROM ({ready})
            )
            ORDER BY waits_first DESC, priority DESC, id
            LIMIT ?1
        )
        RETURNING {columns}"
    )
}

/// Claims those of the rows `?6` that are due; the other parameters are those of [`claim`].
///
/// The low-water bounds do not count here: whoever names a row knows where it is. The limit does.
pub(super) fn claim_rows() -> String {
    let set = take();
    let columns = claimed_columns();
    let free = free();
    format!(
        "UPDATE {{events}} SET {set}
        WHERE id IN (
            SELECT id
            FROM {{events}} AS candidate
            WHERE id IN (SELECT value FROM json_each(?6))
                AND (due_at IS NULL OR due_at <= {{now}})
                AND {free}
            ORDER BY priority DESC, id
            LIMIT ?1
        )
        RETURNING {columns}"
    )
}

/// What a claim may take, apart from the due time.
///
/// - An expired lease needs no reaper: the same condition finds it.
/// - A row without an attempt left is the sweep's.
fn free() -> String {
    let known = known(2);
    format!(
        "(lease_expires_at IS NULL OR lease_expires_at <= {{now}})
        AND attempts < max_attempts
        AND {known}
        AND NOT EXISTS (
            SELECT 1 FROM {{paused}} AS paused
            WHERE paused.name = candidate.name
                AND paused.handler IN ('', coalesce(candidate.handler, ''))
        )
        AND (ordering_key IS NULL OR NOT {IS_BLOCKED})"
    )
}

/// Whether the row `candidate`, which has an ordering key, waits for an earlier one of its key. A
/// part of an event has the place of the whole: parts do not wait for each other.
pub(super) const IS_BLOCKED: &str = "(
            EXISTS (
                SELECT 1 FROM {events} AS earlier
                WHERE earlier.ordering_key = candidate.ordering_key
                    AND coalesce(earlier.origin, earlier.id)
                        < coalesce(candidate.origin, candidate.id)
            )
            OR EXISTS (
                SELECT 1 FROM {dead} AS buried
                WHERE buried.blocks
                    AND buried.ordering_key = candidate.ordering_key
                    AND coalesce(buried.origin, buried.id)
                        < coalesce(candidate.origin, candidate.id)
            )
        )";

/// Whether the parameter, an object of the newest version by lane ([`known_json`]), has the row's lane,
/// which is its event or one handler of it, and reads its version.
///
/// - `CASE`, because its branches are looked at in their order, and no further than needed. The
///   names in the object make a valid path; what somebody wrote into a row by hand may not, and
///   the claim would fail.
/// - Version 1 is read by whoever knows the name, and nearly all rows are of it.
/// - `json_extract` parses the object once. A look into `json_each` for each row would parse it for
///   each row.
pub(super) fn known(parameter: u8) -> String {
    format!(
        "CASE
            WHEN {LANE} NOT IN (SELECT key FROM json_each(?{parameter})) THEN 0
            WHEN version = 1 THEN 1
            ELSE version <= json_extract(?{parameter}, '$.\"' || {LANE} || '\"')
        END"
    )
}

/// Whose a row is.
///
/// - With the slash in either case: a row that somebody has written under the name `a/b` is not one of
///   the handler `b` of `a`. No name of ours has a slash in it.
const LANE: &str = "(name || '/' || coalesce(handler, ''))";

/// What a claim writes.
///
/// - The attempt is charged here, so that an event which kills its process runs out of attempts.
/// - `due_at` is left as it is: no index entry is moved, and the row still tells that it waited.
fn take() -> String {
    let failures = lapsed();
    format!(
        "{failures},
        attempts = attempts + 1,
        lease_token = ?4,
        lease_expires_at = {{now}} + ?3,
        claimed_by = ?5"
    )
}

/// Records the attempt whose lease is being taken over, under the instance that held it.
///
/// A right-hand side reads the row as it was: these are the attempt and instance of the old lease.
fn lapsed() -> String {
    let append = append_failure(&format!("'{LEASE_ENDED}'"));
    format!(
        "failures = CASE
            WHEN lease_token IS NULL THEN failures
            ELSE {append}
        END"
    )
}

/// The failures with one more, the oldest making room for it.
pub(super) fn append_failure(error: &str) -> String {
    format!(
        "json_insert(
            CASE
                WHEN json_array_length(failures) >= {ATTEMPTS_KEPT} THEN json_remove(failures, '$[0]')
                ELSE failures
            END,
            '$[#]',
            json_object(
                'attempt', attempts, 'at', {{now}}, 'instance', claimed_by, 'error', {error}
            )
        )"
    )
}

/// How many due retries and delays of a level a claim orders by number, at least.
const WINDOW: u32 = 1_000;

pub(super) async fn run(
    connection: &mut SqliteConnection,
    statements: &Statements,
    request: &ClaimRequest<'_>,
) -> Result<Vec<Claimed>, sqlx::Error> {
    let mut query = sqlx::query(safe(&statements.claim))
        .bind(i64::from(request.limit.get()))
        .bind(known_json(request.events))
        .bind(micros(request.lease))
        .bind(token_text(request.token))
        .bind(request.instance)
        .bind(i64::from(request.reserved));
    for priority in Priority::DESCENDING {
        query = query.bind(request.low_water.of(priority));
    }
    query = query.bind(Value::from(request.freed.to_vec()).to_string());
    let rows = query.fetch_all(connection).await?;
    rows.iter().map(|row| claimed(row, request.token)).collect()
}

pub(super) async fn run_rows(
    connection: &mut SqliteConnection,
    statements: &Statements,
    numbers: &[i64],
    request: &ClaimRequest<'_>,
) -> Result<Vec<Claimed>, sqlx::Error> {
    let rows = sqlx::query(safe(&statements.claim_rows))
        .bind(i64::from(request.limit.get()))
        .bind(known_json(request.events))
        .bind(micros(request.lease))
        .bind(token_text(request.token))
        .bind(request.instance)
        .bind(Value::from(numbers.to_vec()).to_string())
        .fetch_all(connection)
        .await?;
    rows.iter().map(|row| claimed(row, request.token)).collect()
}
