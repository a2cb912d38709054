//! Settling: recording what became of a claim, and ending it.

use outbox_core::outcome::Outcome;
use outbox_core::store::{Settled, Settlement, StoreError};

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
/// - The key lives at least as long as the history row, and has the result of an event that keeps
///   no history row: that is where a publisher of the same key finds it.
/// - The key is there, so it is updated. An upsert looks it up in its index whatever the planner
///   believes; a join scans every key there is when its plan was made while there were few.
const PROCESSED: &str = "
    WITH gone AS (
        DELETE FROM {events} AS event
        WHERE {is_held}
        RETURNING event.*, ($3::text[])[width_bucket(event.id, $1)] AS output
    ),
    kept AS (
        INSERT INTO {history} (
            id, name, version, payload, headers, dedup_key, ordering_key, priority, attempts,
            max_attempts, claimed_by, created_at, settled_at, expires_at, last_error,
            failures, output
        )
        SELECT
            id, name, version, payload, headers, dedup_key, ordering_key, priority, attempts,
            max_attempts, claimed_by, created_at, clock_timestamp(),
            clock_timestamp() + retention, last_error, failures, output::json
        FROM gone
        WHERE retention > interval '0'
    ),
    answered AS (
        INSERT INTO {keys} AS key (name, key, event_id, retention, state, output, expires_at)
        SELECT
            name, dedup_key, id, retention, 'processed', output::json,
            clock_timestamp() + retention
        FROM gone
        WHERE dedup_key IS NOT NULL
        ON CONFLICT (name, key) DO UPDATE
        SET state = excluded.state,
            output = excluded.output,
            expires_at = clock_timestamp() + greatest(key.retention, excluded.retention)
        WHERE key.event_id = excluded.event_id
    )
    SELECT id, lease_token FROM gone
";

/// Puts the rows `$1`, held by the tokens `$2`, off for `$3`, because of `$4`.
///
/// - The row moves from the ready index to the waiting one: the only write to it that is not HOT.
/// - `clock_timestamp()`: the wait begins now, not when the attempt began.
const RETRY: &str = "
    UPDATE {events} AS event
    SET due_at = clock_timestamp() + ($3::interval[])[width_bucket(event.id, $1)],
        lease_token = NULL,
        lease_expires_at = NULL,
        claimed_by = NULL,
        last_error = ($4::text[])[width_bucket(event.id, $1)],
        failures = {failure_recorded}
    WHERE {is_held}
    RETURNING event.id, ($2::uuid[])[width_bucket(event.id, $1)]
";

/// Moves the rows `$1`, held by the tokens `$2`, to the dead letters, for the reasons `$3` and
/// because of `$4`.
///
/// - The dedup key stays as it is: it does not expire while its event is dead.
const DEAD: &str = "
    WITH gone AS (
        DELETE FROM {events} AS event
        WHERE {is_held}
        RETURNING
            event.*, ($3::text[])[width_bucket(event.id, $1)] AS reason,
            ($4::text[])[width_bucket(event.id, $1)] AS error, {failure_recorded} AS all_failures
    ),
    kept AS (
        INSERT INTO {dead} (
            id, name, version, payload, headers, dedup_key, ordering_key, priority, attempts,
            max_attempts, retention, claimed_by, created_at, settled_at, dead_reason,
            last_error, failures
        )
        SELECT
            id, name, version, payload, headers, dedup_key, ordering_key, priority, attempts,
            max_attempts, retention, claimed_by, created_at, clock_timestamp(), reason,
            error, all_failures
        FROM gone
    )
    SELECT id, lease_token FROM gone
";

/// `failures` with an entry for the attempt that ends here.
const FAILURE_RECORDED: &str = "
    {failures_shortened} || jsonb_build_array(jsonb_build_object(
        'attempt', event.attempts,
        'at', (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
        'instance', event.claimed_by,
        'error', ($4::text[])[width_bucket(event.id, $1)]
    ))";

pub(super) fn processed_template() -> String {
    recording(PROCESSED)
}

pub(super) fn retry_template() -> String {
    recording(RETRY)
}

pub(super) fn dead_template() -> String {
    recording(DEAD)
}

fn recording(template: &str) -> String {
    template
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
    queries
}
