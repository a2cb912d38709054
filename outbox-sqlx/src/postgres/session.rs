//! The store's own connections: what they are set to, and when they are given up.

use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::{PgConnection, Postgres};

/// A connection of the store's own. Dropped before it is known to be in order, it is closed and
/// not given to the next statement: a deadline that passed or a dropped future can leave an open
/// transaction in it, or an answer that nobody read.
pub(super) struct Own {
    connection: PoolConnection<Postgres>,
    in_order: bool,
}

impl Own {
    pub(super) fn new(connection: PoolConnection<Postgres>) -> Self {
        Self {
            connection,
            in_order: false,
        }
    }

    pub(super) fn get(&mut self) -> &mut PgConnection {
        &mut self.connection
    }

    /// The connection is in order: the next statement may have it.
    pub(super) fn keep(&mut self) {
        self.in_order = true;
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if !self.in_order {
            self.connection.close_on_drop();
        }
    }
}

/// What a session of the store's own is set to, in one message.
pub(super) fn session(deadline: Duration) -> String {
    format!(
        "SET default_transaction_isolation = 'read committed'; \
         SET default_transaction_read_only = off; \
         SET application_name = 'outbox'; \
         {}",
        settings(deadline, "SET")
    )
}

/// Settings that hold for every statement the store sends by itself.
///
/// - The statement's time ends a little before the caller's patience, so that the server gives up
///   by itself and the connection survives.
/// - No lock is waited for much longer than our own statements hold one: whoever holds it longer is
///   a person or another program, and the rows of everybody else must not wait behind that one.
/// - Every statement has an index for each of its steps. After a vacuum of an empty table, or of
///   one that was filled in bulk, the planner prefers to scan or sort, and keeps that plan when the
///   table has grown: a claim then takes 70 ms and not 0.3.
/// - One plan for any arguments, since each statement has one good plan: by default PostgreSQL may
///   go on planning a claim anew each time, which takes longer than the claim.
/// - `jit`: a plan that is priced with one of the above switched off counts as very expensive, and
///   would be compiled each time.
pub(super) fn settings(deadline: Duration, set: &str) -> String {
    let millis = deadline.as_millis();
    let statement = std::cmp::max(millis - millis / 10, 1);
    let lock = (millis / 2).clamp(1, LOCK_TIMEOUT_MAX.as_millis());
    [
        "search_path = pg_catalog".to_owned(),
        format!("statement_timeout = {statement}"),
        format!("lock_timeout = {lock}"),
        format!("idle_in_transaction_session_timeout = {millis}"),
        "enable_seqscan = off".to_owned(),
        "enable_bitmapscan = off".to_owned(),
        "enable_sort = off".to_owned(),
        "plan_cache_mode = force_generic_plan".to_owned(),
        "jit = off".to_owned(),
    ]
    .map(|setting| format!("{set} {setting}"))
    .join("; ")
}

/// The longest wait for a lock.
const LOCK_TIMEOUT_MAX: Duration = Duration::from_secs(1);
