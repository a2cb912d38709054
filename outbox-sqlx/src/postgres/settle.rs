//! Settling: recording what became of a claim, and ending it.

use outbox_core::outcome::{self, Outcome};
use outbox_core::store::{Settled, Settlement, StoreError};
use sqlx::PgConnection;

use super::PgStore;
use super::claim::failures_shortened;
use super::query::{Query, interval};
use super::renew::{IS_HELD, answers, holding, waves};
use super::sqlstate::failed;

const DOING: &str = "settle events";

/// Records that the handlers of the rows `$1`, held by the tokens `$2`, returned `$3`.
///
/// - One statement: the row leaves the hot table and arrives in the history, and its key learns the
///   result, at one moment. A process that dies leaves all of it or nothing.
/// - `{is_held}` refuses whoever lost the lease: the row is then another one's, or gone.
/// - All functions and operators here and below name `pg_catalog`: outcomes are also recorded in
///   the caller's transaction, with the caller's `search_path`.
const PROCESSED: &str = "
    WITH gone AS (
        DELETE FROM {events} AS event
        WHERE {is_held}
        RETURNING
            event.*,
            ($3::pg_catalog.text[])[pg_catalog.width_bucket(event.id, $1)] AS output
    ),
    kept AS (
        INSERT INTO {history} (
            id, state, name, handler, origin, version, payload, headers, dedup_key, ordering_key,
            priority, attempts, max_attempts, claimed_by, created_at, settled_at, expires_at,
            last_error, failures, output
        )
        SELECT
            id, 'processed', name, handler, origin, version, payload, headers, dedup_key, ordering_key, priority,
            attempts, max_attempts, claimed_by, created_at, pg_catalog.clock_timestamp(),
            pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) retention, last_error, failures,
            output::pg_catalog.json
        FROM gone
        WHERE retention OPERATOR(pg_catalog.>) interval '0'
    ),
    answered AS ({key_processed})
    SELECT id, lease_token FROM gone
";

/// Removes the rows `$1`, held by the tokens `$2`.
const DISCARDED: &str = "
    WITH gone AS (
        DELETE FROM {events} AS event
        WHERE {is_held}
        RETURNING event.*
    ),
    answered AS ({key_discarded})
    SELECT id, lease_token FROM gone
";

/// Tells the keys of the rows in `gone` that nothing more will happen to their events.
///
/// - The key lives at least as long as the history row, and has the result of an event that keeps
///   no history row: that is where a publisher of the same key finds it.
/// - The key is there, so it is updated. An upsert looks it up in its index whatever the planner
///   believes; a join scans every key there is when its plan was made while there were few.
const KEY_SETTLED: &str = "
        INSERT INTO {keys} AS key (name, key, event_id, retention, state, output, expires_at)
        SELECT
            name, dedup_key, id, retention, '{state}', {output},
            pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) retention
        FROM gone
        WHERE dedup_key IS NOT NULL
        ON CONFLICT (name, key) DO UPDATE
        SET state = excluded.state,
            output = excluded.output,
            expires_at = pg_catalog.clock_timestamp()
                OPERATOR(pg_catalog.+) greatest(key.retention, excluded.retention)
        WHERE key.event_id OPERATOR(pg_catalog.=) excluded.event_id
    ";

/// Puts the rows `$1`, held by the tokens `$2`, off for `$3`, because of `$4`.
///
/// - The row moves from the ready index to the waiting one: the only write to it that is not HOT.
/// - `clock_timestamp()`: the wait begins now, not when the attempt began.
const RETRY: &str = "
    UPDATE {events} AS event
    SET due_at = pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+)
            ($3::pg_catalog.interval[])[pg_catalog.width_bucket(event.id, $1)],
        lease_token = NULL,
        lease_expires_at = NULL,
        claimed_by = NULL,
        last_error = ($4::pg_catalog.text[])[pg_catalog.width_bucket(event.id, $1)],
        failures = {failure_recorded}
    WHERE {is_held}
    RETURNING event.id, ($2::pg_catalog.uuid[])[pg_catalog.width_bucket(event.id, $1)]
";

/// Moves the rows `$1`, held by the tokens `$2`, to the dead letters, for the reasons `$3` and
/// because of `$4`.
const DEAD: &str = "
    WITH gone AS (
        DELETE FROM {events} AS event
        WHERE {is_held}
        RETURNING
            event.*, event.attempts AS all_attempts,
            ($3::pg_catalog.text[])[pg_catalog.width_bucket(event.id, $1)] AS reason,
            ($4::pg_catalog.text[])[pg_catalog.width_bucket(event.id, $1)] AS error,
            {failure_recorded} AS all_failures
    ),
    {buried}
";

/// Moves the rows `$1`, held by the tokens `$2`, to the dead letters, because their time is over.
///
/// - No handler was started: the attempt is taken back, and there is no failure to record.
const EXPIRED: &str = "
    WITH gone AS (
        DELETE FROM {events} AS event
        WHERE {is_held}
        RETURNING
            event.*, event.attempts OPERATOR(pg_catalog.-) 1 AS all_attempts,
            'expired' AS reason, '{expired}' AS error, event.failures AS all_failures
    ),
    {buried}
";

/// - The dedup key stays as it is: it does not expire while its event is dead.
const BURIED: &str = "
    kept AS (
        INSERT INTO {dead} (
            id, name, handler, origin, version, payload, headers, dedup_key, ordering_key, blocks,
            priority, attempts, max_attempts, retention, claimed_by, created_at, settled_at,
            dead_reason, last_error, failures
        )
        SELECT
            id, name, handler, origin, version, payload, headers, dedup_key, ordering_key, blocks,
            priority, all_attempts, max_attempts, retention, claimed_by, created_at,
            pg_catalog.clock_timestamp(), reason, error, all_failures
        FROM gone
    )
    SELECT id, lease_token FROM gone
";

/// `failures` with an entry for the attempt that ends here.
const FAILURE_RECORDED: &str = "
    {failures_shortened} OPERATOR(pg_catalog.||)
    pg_catalog.jsonb_build_array(pg_catalog.jsonb_build_object(
        'attempt', event.attempts,
        'at', (
            extract(epoch FROM pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.*) 1000000
        )::bigint,
        'instance', event.claimed_by,
        'error', ($4::pg_catalog.text[])[pg_catalog.width_bucket(event.id, $1)]
    ))";

pub(super) fn processed_template() -> String {
    recording(PROCESSED)
}

pub(super) fn discarded_template() -> String {
    recording(DISCARDED)
}

/// `KEY_SETTLED` for keys whose events end in `state`, with `output`.
pub(super) fn key_settled(state: &str, output: &str) -> String {
    KEY_SETTLED
        .replace("{state}", state)
        .replace("{output}", output)
}

pub(super) fn retry_template() -> String {
    recording(RETRY)
}

pub(super) fn dead_template() -> String {
    recording(&DEAD.replace("{buried}", BURIED))
}

pub(super) fn expired_template() -> String {
    let expired = EXPIRED.replace("{expired}", outcome::EXPIRED);
    recording(&expired.replace("{buried}", BURIED))
}

fn recording(template: &str) -> String {
    let key_processed = key_settled("processed", "output::pg_catalog.json");
    template
        .replace("{key_processed}", &key_processed)
        .replace("{key_discarded}", &key_settled("discarded", "NULL"))
        .replace("{failure_recorded}", FAILURE_RECORDED)
        .replace("{failures_shortened}", &failures_shortened())
        .replace("{is_held}", IS_HELD)
}

pub(super) async fn settle(
    store: &PgStore,
    settlements: &[Settlement],
) -> Result<Vec<Settled>, StoreError> {
    if settlements.is_empty() {
        return Ok(Vec::new());
    }
    let rows = store.ask_all(DOING, queries(store, settlements)).await?;
    let leases = settlements.iter().map(|settlement| settlement.lease);
    answers(leases, &rows).map_err(|error| failed(DOING, error))
}

/// As [`settle`], through the caller's connection.
///
/// One statement per kind of outcome, in the caller's transaction: after an error some may have been
/// recorded, and the caller rolls back.
pub(super) async fn settle_through(
    store: &PgStore,
    connection: &mut PgConnection,
    settlements: &[Settlement],
) -> Result<Vec<Settled>, StoreError> {
    let mut rows = Vec::new();
    for query in queries(store, settlements) {
        let recorded = query.fetch(connection, store.keeps_statements()).await;
        rows.push(recorded.map_err(|error| failed(DOING, error))?);
    }
    let leases = settlements.iter().map(|settlement| settlement.lease);
    answers(leases, &rows).map_err(|error| failed(DOING, error))
}

/// One statement per kind of outcome that occurs. More than one of them go into one transaction,
/// so that a batch is recorded as a whole or not at all.
pub(super) fn queries(store: &PgStore, settlements: &[Settlement]) -> Vec<Query> {
    let wave = waves(settlements, |settlement| settlement.lease);
    wave.iter()
        .flat_map(|wave| wave_queries(store, wave))
        .collect()
}

fn wave_queries(store: &PgStore, settlements: &[&Settlement]) -> Vec<Query> {
    let mut processed = (Vec::new(), Vec::new());
    let mut retries = (Vec::new(), Vec::new(), Vec::new());
    let mut dead = (Vec::new(), Vec::new(), Vec::new());
    let mut discarded = Vec::new();
    let mut expired = Vec::new();
    for settlement in settlements {
        match &settlement.outcome {
            Outcome::Processed { output } => {
                processed.0.push(settlement.lease);
                processed.1.push(output.as_deref());
            }
            Outcome::Retry { after, error } => {
                retries.0.push(settlement.lease);
                retries.1.push(interval(*after));
                retries.2.push(error.as_str());
            }
            Outcome::Dead { reason, error } => {
                dead.0.push(settlement.lease);
                dead.1.push(reason.as_str());
                dead.2.push(error.as_str());
            }
            Outcome::Discarded { .. } => discarded.push(settlement.lease),
            Outcome::Expired => expired.push(settlement.lease),
        }
    }

    let mut queries = Vec::new();
    if !processed.0.is_empty() {
        let query = holding(Query::new(&store.sql().processed), &processed.0);
        queries.push(query.bind(processed.1));
    }
    if !retries.0.is_empty() {
        let query = holding(Query::new(&store.sql().retry), &retries.0);
        queries.push(query.bind(retries.1).bind(retries.2));
    }
    if !dead.0.is_empty() {
        let query = holding(Query::new(&store.sql().dead), &dead.0);
        queries.push(query.bind(dead.1).bind(dead.2));
    }
    if !discarded.is_empty() {
        queries.push(holding(Query::new(&store.sql().discarded), &discarded));
    }
    if !expired.is_empty() {
        queries.push(holding(Query::new(&store.sql().expired), &expired));
    }
    queries
}
