//! Claiming: taking due events under a lease.

use outbox_core::event::Priority;
use outbox_core::store::{
    ATTEMPTS_KEPT, ClaimRequest, Claimed, KnownEvent, LEASE_ENDED, Pass, StoreError,
};
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::PgStore;
use super::pass::Chunk;
use super::query::{PgUuid, Query, interval};
use super::row::{CLAIMED_COLUMNS, claimed};
use super::sqlstate::failed;

const DOING: &str = "claim events";

/// Claims the rows of `{selection}` for `$2` under the token `$1`, in the name of `$3`.
///
/// - The lease columns, `attempts` and `failures` are in no index and in no index predicate, so
///   that a claim is a HOT update and writes no index entry. `due_at` is in two, and a claim leaves
///   it alone. An expired lease needs no reaper: the same `WHERE` finds it.
/// - `ARRAY(..)` is computed once, so the limit inside it holds under any plan. In a join the
///   planner may run the subquery again and claim more.
/// - Every claim writes a fresh `lease_token`. Settling refuses another one.
/// - `clock_timestamp()`, because `now()` is the start of the transaction, and a lease counted from
///   there can be over before the claim returns.
///
/// Rows come back in no particular order.
const CLAIM: &str = "
    UPDATE {events} AS event
    SET lease_token = $1,
        lease_expires_at = clock_timestamp() + $2,
        claimed_by = $3,
        attempts = event.attempts + 1,
        failures = {lapse_recorded}
    WHERE event.id = ANY (ARRAY({selection}))
    RETURNING {claimed_columns}
";

/// `failures`, with an entry for the attempt whose lease ended without an outcome, where one did.
///
/// - A row that still has a token was never settled, retried or given back: whoever held it is the
///   last to be told by a person who looks for the cause.
const LAPSE_RECORDED: &str = "
    CASE
        WHEN event.lease_token IS NULL THEN event.failures
        ELSE {failures_shortened} || jsonb_build_array(jsonb_build_object(
            'attempt', event.attempts,
            'at', (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
            'instance', event.claimed_by,
            'error', '{lease_ended}'
        ))
    END";

/// `failures` with room for one more: the oldest goes when there are as many as are kept.
///
/// - It names `pg_catalog`, because a settlement in the caller's transaction has it too.
const FAILURES_SHORTENED: &str = "
        CASE
            WHEN event.failures IS NULL THEN '[]'::pg_catalog.jsonb
            WHEN pg_catalog.jsonb_array_length(event.failures)
                OPERATOR(pg_catalog.>=) {attempts_kept}
                THEN event.failures OPERATOR(pg_catalog.-) 0
            ELSE event.failures
        END";

/// No lease, or one that has ended.
pub(super) const LEASE_IS_FREE: &str =
    "(lease_expires_at IS NULL OR lease_expires_at <= clock_timestamp())";

/// What a claim asks of any row: `$4` are the lanes this process has handlers for, and `$5`, in the
/// same order, the newest version it reads of each.
///
/// - A lane that is not in `$4` has no position, and NULL lets nothing through.
/// - Version 1 is read by whoever knows the lane. Nearly all rows are of it, and this way they cost
///   what they cost without versions; a position costs more, from some dozens of names on.
const CLAIMABLE: &str = "attempts < max_attempts AND {lease_is_free}
    AND CASE
        WHEN version = 1 THEN {lane} = ANY ($4)
        ELSE version <= ($5::integer[])[array_position($4, {lane})]
    END
    AND name || '/' <> ALL ({paused_lanes}) AND {lane} <> ALL ({paused_lanes})
    AND (ordering_key IS NULL OR NOT {is_blocked})";

/// Whose a row is: an event's, or one handler's of it.
///
/// - With the slash in either case: a row that somebody has written under the name `a/b` is not one of
///   the handler `b` of `a`. No name of ours has a slash in it.
const LANE: &str = "(candidate.name || '/' || coalesce(candidate.handler, ''))";

/// The lanes that are paused. Read once per statement, whatever the number of rows.
const PAUSED_LANES: &str = "ARRAY(SELECT name || '/' || handler FROM {paused})";

/// Whether the row `candidate`, which has an ordering key, waits for an earlier one of its key.
///
/// - Both are in one snapshot. The numbers of a key are in the order of its commits, so whoever sees
///   the row sees every earlier one that is still there, in one of the two tables.
/// - A part of an event has the place of the whole: parts do not wait for each other.
/// - Whether any dead letter blocks is asked once per statement. As a rule none does, and a probe less
///   per row is a tenth of a claim.
/// - Operators and functions name `pg_catalog` where this is part of a statement of the caller's.
pub(super) const IS_BLOCKED: &str = "(
        EXISTS (
            SELECT FROM {events} AS earlier
            WHERE earlier.ordering_key OPERATOR(pg_catalog.=) candidate.ordering_key
            AND coalesce(earlier.origin, earlier.id)
                OPERATOR(pg_catalog.<) coalesce(candidate.origin, candidate.id)
        )
        OR (SELECT EXISTS (SELECT FROM {dead} WHERE blocks)) AND EXISTS (
            SELECT FROM {dead} AS buried
            WHERE buried.blocks
            AND buried.ordering_key OPERATOR(pg_catalog.=) candidate.ordering_key
            AND coalesce(buried.origin, buried.id)
                OPERATOR(pg_catalog.<) coalesce(candidate.origin, candidate.id)
        )
    )";

/// The rows of one priority that wait for a delay or a retry and are due, longest due first.
///
/// - `(SELECT clock_timestamp())` is one value for the scan, which can bound the index. The bare
///   function is volatile: the scan would walk over every row that is due later.
const WAITING: &str = "
    SELECT id FROM {events} AS candidate
    WHERE due_at IS NOT NULL AND priority = {level} AND due_at <= (SELECT clock_timestamp())
    AND {claimable}{and}
    ORDER BY due_at, id
    LIMIT {limit}
    FOR UPDATE SKIP LOCKED";

/// The rows of one priority that are due at once, lowest number first, from the low-water mark.
///
/// - `SKIP LOCKED` lets relays claim side by side. A row another relay is claiming is passed over,
///   not waited for.
/// - The mark keeps the scan from walking over the index entries of everything that was settled
///   since the last vacuum.
/// - `id + 0` is what the ready index is made of. Were it `id`, the primary key would give the same
///   order, and a planner that saw one priority only would prefer it: the claim would then walk
///   over every row of another priority, or that waits, until the next look at the statistics.
const READY: &str = "
    SELECT id FROM {events} AS candidate
    WHERE due_at IS NULL AND priority = {level} AND id + 0 >= {low_water}
    AND {claimable}
    ORDER BY id + 0
    LIMIT {limit}
    FOR UPDATE SKIP LOCKED";

/// Those of the rows `$12` that are of one priority and due at once, below the low-water mark, where
/// `READY` does not look.
///
/// - `priority + 0` and `id`, none of which the ready index has: it could only be walked over.
const FREED: &str = "
    SELECT id FROM {events} AS candidate
    WHERE id = ANY ($12) AND due_at IS NULL AND priority + 0 = {level} AND id < {low_water}
    AND {claimable}
    LIMIT {limit}
    FOR UPDATE SKIP LOCKED";

/// Claims by number.
const NAMED_ROWS: &str = "
    SELECT id FROM {events} AS candidate
    WHERE id = ANY ($6) AND (due_at IS NULL OR due_at <= clock_timestamp())
    AND {claimable}
    LIMIT $7
    FOR UPDATE SKIP LOCKED";

/// The claim of up to `$6` due rows, `$7` of them reserved for those that waited; `$8` to `$11` are
/// the low-water marks, most urgent priority first.
///
/// One step per priority, so that every step is the range of an index: an `ORDER BY priority DESC,
/// id` over both indexes would have to read and sort all that is due. Each step asks for what the
/// ones before it left. With nothing left, its `LIMIT` is zero and it reads nothing.
///
/// - The rows the reservation took are excluded by number: a row we have locked ourselves is not
///   skipped as locked.
/// - `MATERIALIZED`, so that no step runs twice, and locks twice.
/// - `paused` is read once, and not for each of the steps.
pub(super) fn claim_template() -> String {
    claim_of(false)
}

/// The same, and of the rows `$12` also those below the low-water marks.
pub(super) fn claim_freed_template() -> String {
    claim_of(true)
}

fn claim_of(freed: bool) -> String {
    let reserved = Priority::DESCENDING
        .map(|priority| {
            let level = priority.level();
            let waiting = waiting(priority, "", "$7");
            format!("SELECT id FROM ({waiting}) AS waiting_{level}")
        })
        .join(" UNION ALL ");
    let mut selection = format!(
        "WITH paused AS MATERIALIZED (SELECT {PAUSED_LANES} AS lanes)
        , reserved AS MATERIALIZED (SELECT id FROM ({reserved}) AS waiting LIMIT $7)"
    );

    let mut taken = "reserved".to_owned();
    let mut left = "$6".to_owned();
    let mut all = "SELECT id FROM reserved".to_owned();
    for (position, priority) in Priority::DESCENDING.into_iter().enumerate() {
        let level = priority.level();
        left = format!("{left} - (SELECT count(*) FROM {taken})");
        let limit = format!("(SELECT n FROM left_{level})");
        let waiting = waiting(
            priority,
            " AND id <> ALL (ARRAY(SELECT id FROM reserved))",
            &limit,
        );
        let ready = READY
            .replace("{level}", &level.to_string())
            .replace("{low_water}", &format!("${}", 8 + position))
            .replace("{limit}", &limit);
        let of_freed = if freed {
            let of_freed = FREED
                .replace("{level}", &level.to_string())
                .replace("{low_water}", &format!("${}", 8 + position))
                .replace("{limit}", &limit);
            format!("UNION ALL SELECT id FROM ({of_freed}) AS freed")
        } else {
            String::new()
        };
        selection.push_str(&format!(
            ", left_{level} AS MATERIALIZED (SELECT {left} AS n)
            , level_{level} AS MATERIALIZED (
                SELECT id FROM (
                    SELECT id FROM ({waiting}) AS waiting
                    UNION ALL
                    SELECT id FROM ({ready}) AS ready
                    {of_freed}
                ) AS due
                ORDER BY id
                LIMIT {limit}
            )"
        ));
        left = format!("(SELECT n FROM left_{level})");
        taken = format!("level_{level}");
        all.push_str(&format!(" UNION ALL SELECT id FROM level_{level}"));
    }
    selection.push_str(&format!(" SELECT id FROM ({all}) AS due LIMIT $6"));

    taking(&selection, "(SELECT lanes FROM paused)::text[]")
}

pub(super) fn claim_rows_template() -> String {
    taking(NAMED_ROWS, PAUSED_LANES)
}

fn waiting(priority: Priority, and: &str, limit: &str) -> String {
    WAITING
        .replace("{level}", &priority.level().to_string())
        .replace("{and}", and)
        .replace("{limit}", limit)
}

fn taking(selection: &str, paused_lanes: &str) -> String {
    CLAIM
        .replace("{selection}", selection)
        .replace("{claimable}", CLAIMABLE)
        .replace("{paused_lanes}", paused_lanes)
        .replace("{is_blocked}", IS_BLOCKED)
        .replace("{lane}", LANE)
        .replace("{lease_is_free}", LEASE_IS_FREE)
        .replace("{claimed_columns}", CLAIMED_COLUMNS)
        .replace("{lapse_recorded}", &lapse_recorded())
        .replace("{lease_ended}", LEASE_ENDED)
}

pub(super) fn failures_shortened() -> String {
    FAILURES_SHORTENED.replace("{attempts_kept}", &ATTEMPTS_KEPT.to_string())
}

fn lapse_recorded() -> String {
    LAPSE_RECORDED
        .replace("{failures_shortened}", &failures_shortened())
        .replace("{lease_ended}", LEASE_ENDED)
}

pub(super) async fn claim(
    store: &PgStore,
    request: &ClaimRequest<'_>,
) -> Result<Vec<Claimed>, StoreError> {
    take(store, request, claim_query(store, request)).await
}

pub(super) fn claim_query(store: &PgStore, request: &ClaimRequest<'_>) -> Query {
    let limit = i64::from(request.limit.get());
    let sql = if request.freed.is_empty() {
        &store.sql().claim
    } else {
        &store.sql().claim_freed
    };
    let query = taker(sql, request)
        .bind(limit)
        .bind(i64::from(request.reserved));
    let query = Priority::DESCENDING
        .into_iter()
        .fold(query, |query, priority| {
            query.bind(request.low_water.of(priority))
        });
    if request.freed.is_empty() {
        query
    } else {
        query.bind(request.freed)
    }
}

pub(super) async fn claim_rows(
    store: &PgStore,
    rows: &[i64],
    request: &ClaimRequest<'_>,
) -> Result<Vec<Claimed>, StoreError> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    take(store, request, named_rows(store, rows, request)).await
}

pub(super) fn named_rows(store: &PgStore, rows: &[i64], request: &ClaimRequest<'_>) -> Query {
    taker(&store.sql().claim_rows, request)
        .bind(rows)
        .bind(i64::from(request.limit.get()))
}

fn taker(sql: &std::sync::Arc<str>, request: &ClaimRequest<'_>) -> Query {
    let lanes: Vec<String> = request.events.iter().map(lane).collect();
    let newest = request
        .events
        .iter()
        .map(|event| event.newest_version.get());
    // No row has a version that the column cannot hold.
    let newest: Vec<i32> = newest
        .map(|n| i32::try_from(n).unwrap_or(i32::MAX))
        .collect();
    Query::new(sql)
        .bind(PgUuid::from(request.token))
        .bind(interval(request.lease))
        .bind(request.instance)
        .bind(lanes)
        .bind(newest)
}

/// As `LANE` has it.
fn lane(event: &KnownEvent) -> String {
    format!("{}/{}", event.name, event.handler.unwrap_or_default())
}

/// As [`claim`], in a chunk of a pass.
pub(super) async fn claim_in(
    store: &PgStore,
    pass: Pass,
    request: &ClaimRequest<'_>,
) -> Result<Option<Vec<Claimed>>, StoreError> {
    let installation = store.installation().await?;
    let Some(mut chunk) = Chunk::begin(store, pass, DOING).await? else {
        return Ok(None);
    };
    let rows = chunk.ask(claim_query(store, request)).await?;
    chunk.commit().await?;
    all_claimed(&rows, installation, request).map(Some)
}

async fn take(
    store: &PgStore,
    request: &ClaimRequest<'_>,
    query: Query,
) -> Result<Vec<Claimed>, StoreError> {
    let installation = store.installation().await?;
    let rows = store.ask(DOING, query).await?;
    all_claimed(&rows, installation, request)
}

fn all_claimed(
    rows: &[PgRow],
    installation: Uuid,
    request: &ClaimRequest<'_>,
) -> Result<Vec<Claimed>, StoreError> {
    rows.iter()
        .map(|row| claimed(row, installation, request.token))
        .collect::<Result<_, _>>()
        .map_err(|error| failed(DOING, error))
}
