//! Names and statements: what a table name may be, and the SQL text made of it once, at build.

use std::sync::Arc;

use outbox_core::outcome;
use outbox_core::store::{EventState, StoreError, StoreErrorKind};
use sqlx::AssertSqlSafe;

use super::{
    cancel, check, claim, dead_letter, find, insert, lock, migrate, order, pause, purge, renew,
    settle, split, stats, sweep,
};
use crate::ident::Ident;

/// The database's clock, in microseconds since the epoch.
///
/// - `julianday` and not `unixepoch('subsec')`: the latter is unknown before SQLite 3.42, where it
///   gives NULL instead of an error, and the view is read with whatever shell is at hand.
/// - SQLite's clock counts milliseconds. `round` takes away the error of the division, so that
///   the value is a whole number of them.
/// - Within one statement the clock stands still, and it is first read after the statement has
///   the write lock: a lease is not used up by waiting.
const NOW: &str = "(CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000)";

/// The state of an event that is not settled, in the words of
/// [`EventState`](outbox_core::store::EventState). The view is made of it, so changing it needs a
/// migration.
///
/// A claim leaves `due_at` as it is, so the lease is asked first.
const STATUS: &str = "
    CASE
        WHEN lease_expires_at > {now} THEN 'in_progress'
        WHEN lease_expires_at IS NOT NULL THEN 'pending'
        WHEN due_at IS NOT NULL AND attempts > 0 THEN 'failed'
        ELSE 'pending'
    END";

/// The longest table name: what is left of PostgreSQL's 63 bytes after the longest suffix, so that
/// a name which is valid in one store is valid in the other.
const TABLE_MAX: usize = 63 - "_installation".len();

/// A table name that was checked. All names of an outbox begin with it.
#[derive(Clone, Debug)]
pub(super) struct Table(Ident);

impl Default for Table {
    fn default() -> Self {
        Self::new("outbox_events").expect("the default name is valid")
    }
}

impl Table {
    pub(super) fn new(name: &str) -> Result<Self, StoreError> {
        if name
            .get(..7)
            .is_some_and(|start| start.eq_ignore_ascii_case("sqlite_"))
        {
            return Err(StoreError::new(
                StoreErrorKind::Config,
                format!("table name {name:?} begins with `sqlite_`, which SQLite keeps to itself"),
            ));
        }
        Ident::new("table", name, TABLE_MAX).map(Self)
    }

    pub(super) fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// Fills a statement's placeholders. Tables are named with their database, so that a temporary
    /// table of the same name does not come between.
    pub(super) fn statement(&self, template: &str) -> Arc<str> {
        self.render(template, "main.").into()
    }

    /// Fills the placeholders of data definition, where SQLite does not allow a database's name
    /// everywhere.
    pub(super) fn definition(&self, template: &str) -> String {
        self.render(template, "")
    }

    /// Walks the template once: a placeholder inside a table's own name is not filled.
    fn render(&self, template: &str, database: &str) -> String {
        let mut sql = String::with_capacity(template.len() * 2);
        let mut rest = template;
        while let Some((before, after)) = rest.split_once('{') {
            let (placeholder, after) = after.split_once('}').expect("placeholders are closed");
            sql.push_str(before);
            match placeholder {
                "now" => sql.push_str(NOW),
                "status" => sql.push_str(&STATUS.replace("{now}", NOW)),
                "expired" => sql.push_str(&format!("'{}'", outcome::EXPIRED)),
                name => {
                    sql.push_str(database);
                    sql.push_str(&self.0.quoted_with(suffix(name)));
                }
            }
            rest = after;
        }
        sql.push_str(rest);
        sql
    }
}

fn suffix(placeholder: &str) -> &'static str {
    match placeholder {
        "events" => "",
        "ready" => "_ready",
        "waiting" => "_waiting",
        "order" => "_order",
        "parts" => "_parts",
        "dead_order" => "_dead_order",
        "dead_parts" => "_dead_parts",
        "paused" => "_paused",
        "history" => "_history",
        "history_end" => "_history_end",
        "dead" => "_dead",
        "keys" => "_keys",
        "keys_end" => "_keys_end",
        "take_key" => "_take_key",
        "locks" => "_locks",
        "installation" => "_installation",
        "schema" => "_schema",
        "all" => "_all",
        unknown => unreachable!("`{{{unknown}}}` is no placeholder"),
    }
}

/// Every statement of a store, rendered for its table.
#[derive(Debug)]
pub(super) struct Statements {
    pub(super) insert_one: Arc<str>,
    pub(super) insert_many: Arc<str>,
    pub(super) existing: Arc<str>,
    pub(super) claim: Arc<str>,
    pub(super) claim_rows: Arc<str>,
    pub(super) held: Arc<str>,
    pub(super) archive: Arc<str>,
    pub(super) close_keys: Arc<str>,
    pub(super) discard_keys: Arc<str>,
    pub(super) bury: Arc<str>,
    pub(super) bury_expired: Arc<str>,
    pub(super) mark_dead_keys: Arc<str>,
    pub(super) leave: Arc<str>,
    pub(super) retry: Arc<str>,
    pub(super) verify: Arc<str>,
    pub(super) renew: Arc<str>,
    pub(super) release: Arc<str>,
    pub(super) split_add: Arc<str>,
    pub(super) split_keep: Arc<str>,
    pub(super) parts_of: Arc<str>,
    pub(super) archive_cancelled: Arc<str>,
    pub(super) cancel_key: Arc<str>,
    pub(super) leave_cancelled: Arc<str>,
    pub(super) key_holder: Arc<str>,
    pub(super) watch: Arc<str>,
    pub(super) is_free: Arc<str>,
    pub(super) blocked_keys: Arc<str>,
    pub(super) next_in_order: Arc<str>,
    pub(super) newest: Arc<str>,
    pub(super) pause: Arc<str>,
    pub(super) resume: Arc<str>,
    pub(super) paused: Arc<str>,
    pub(super) sweep_chunk: Arc<str>,
    pub(super) sweep_unhandled: Arc<str>,
    pub(super) sweep_cut: Arc<str>,
    pub(super) sweep_claim: Arc<str>,
    pub(super) purge_history: Arc<str>,
    pub(super) purge_keys: Arc<str>,
    pub(super) dead_look_down: Arc<str>,
    pub(super) dead_look_up: Arc<str>,
    pub(super) dead_list: Arc<str>,
    pub(super) dead_numbered: Arc<str>,
    pub(super) requeue: Arc<str>,
    pub(super) archive_dead: Arc<str>,
    pub(super) close_dead_keys: Arc<str>,
    pub(super) leave_dead: Arc<str>,
    pub(super) counts: Arc<str>,
    pub(super) oldest_due: Arc<str>,
    pub(super) lock_cut: Arc<str>,
    pub(super) lock_take: Arc<str>,
    pub(super) lock_keep: Arc<str>,
    pub(super) lock_free: Arc<str>,
    pub(super) lock_entity: Arc<str>,
    pub(super) find: Arc<str>,
    pub(super) installation: Arc<str>,
    pub(super) schema_version: Arc<str>,
    pub(super) set_version: Arc<str>,
    pub(super) renew_installation: Arc<str>,
    pub(super) synchronous: Arc<str>,
}

impl Statements {
    pub(super) fn new(table: &Table) -> Self {
        Self {
            insert_one: table.statement(&insert::insert_one()),
            insert_many: table.statement(&insert::insert_many()),
            existing: table.statement(insert::EXISTING),
            claim: table.statement(&claim::claim()),
            claim_rows: table.statement(&claim::claim_rows()),
            held: table.statement(settle::HELD),
            archive: table.statement(settle::ARCHIVE),
            close_keys: table.statement(&settle::close_keys(EventState::Processed)),
            discard_keys: table.statement(&settle::close_keys(EventState::Discarded)),
            bury: table.statement(&settle::bury()),
            bury_expired: table.statement(&settle::bury_expired()),
            mark_dead_keys: table.statement(settle::MARK_DEAD_KEYS),
            leave: table.statement(settle::LEAVE),
            retry: table.statement(&settle::retry()),
            verify: table.statement(&renew::verify_statement()),
            renew: table.statement(renew::RENEW),
            release: table.statement(renew::RELEASE),
            split_add: table.statement(split::ADD),
            split_keep: table.statement(split::KEEP),
            parts_of: table.statement(cancel::PARTS_OF),
            archive_cancelled: table.statement(cancel::ARCHIVE),
            cancel_key: table.statement(cancel::CLOSE_KEY),
            leave_cancelled: table.statement(cancel::LEAVE),
            key_holder: table.statement(cancel::HOLDER),
            watch: table.statement(cancel::LOOK_UP),
            is_free: table.statement(order::IS_FREE),
            blocked_keys: table.statement(&order::blocked_keys()),
            next_in_order: table.statement(order::NEXT_IN_ORDER),
            newest: table.statement(order::NEWEST),
            pause: table.statement(pause::PAUSE),
            resume: table.statement(pause::RESUME),
            paused: table.statement(pause::PAUSED),
            sweep_chunk: table.statement(sweep::CHUNK),
            sweep_unhandled: table.statement(&sweep::unhandled()),
            sweep_cut: table.statement(sweep::CUT),
            sweep_claim: table.statement(sweep::CLAIM),
            purge_history: table.statement(purge::HISTORY),
            purge_keys: table.statement(purge::KEYS),
            dead_look_down: table.statement(&dead_letter::look_down()),
            dead_look_up: table.statement(&dead_letter::look_up()),
            dead_list: table.statement(&dead_letter::list_statement()),
            dead_numbered: table.statement(dead_letter::NUMBERED),
            requeue: table.statement(dead_letter::REQUEUE),
            archive_dead: table.statement(dead_letter::ARCHIVE_DEAD),
            close_dead_keys: table.statement(dead_letter::CLOSE_DEAD_KEYS),
            leave_dead: table.statement(dead_letter::LEAVE_DEAD),
            counts: table.statement(stats::COUNTS),
            oldest_due: table.statement(&stats::oldest_due()),
            lock_cut: table.statement(lock::CUT),
            lock_take: table.statement(lock::TAKE),
            lock_keep: table.statement(lock::KEEP),
            lock_free: table.statement(lock::FREE),
            lock_entity: table.statement(lock::LOCK_ENTITY),
            find: table.statement(find::FIND),
            installation: table.statement(find::INSTALLATION),
            schema_version: table.statement(migrate::VERSION),
            set_version: table.statement(migrate::SET_VERSION),
            renew_installation: table.statement(migrate::RENEW_INSTALLATION),
            synchronous: table.statement(check::SYNCHRONOUS),
        }
    }
}

/// Hands a rendered statement to sqlx. It holds nothing from outside but the table's name, which
/// was checked and quoted.
pub(super) fn safe(sql: &Arc<str>) -> AssertSqlSafe<Arc<str>> {
    AssertSqlSafe(Arc::clone(sql))
}

#[cfg(test)]
mod tests {
    use sqlx::Row;

    use super::*;

    #[track_caller]
    fn check_refused(name: &str, why: &str) {
        let error = Table::new(name).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Config);
        assert!(error.to_string().contains(why), "{error}");
    }

    #[test]
    fn a_table_name_has_limits() {
        check_refused("", "is empty");
        check_refused("a\0b", "contains U+0000");
        check_refused("SQLite_events", "begins with `sqlite_`");
        check_refused(&"x".repeat(TABLE_MAX + 1), "is 51 bytes long");
        assert!(Table::new(&"x".repeat(TABLE_MAX)).is_ok());
        assert!(Table::new(Table::default().as_str()).is_ok());
        assert!(Table::new("große \"Ereignisse\"; --").is_ok());
    }

    #[test]
    fn a_table_name_is_quoted_and_never_read_as_a_placeholder() {
        let table = Table::new("a\"{keys}").unwrap();
        assert_eq!(
            &*table.statement("SELECT 1 FROM {events}, {keys} x"),
            r#"SELECT 1 FROM main."a""{keys}", main."a""{keys}_keys" x"#
        );
    }

    /// Every statement that looks for rows of the outbox, under a name. `counts` walks two tables
    /// as far as its limit, `blocked_keys` what has failed or is dead, and `lock_entity` looks for
    /// none.
    fn looking(statements: &Statements) -> [(&'static str, &Arc<str>); 47] {
        [
            ("insert_one", &statements.insert_one),
            ("insert_many", &statements.insert_many),
            ("existing", &statements.existing),
            ("claim", &statements.claim),
            ("claim_rows", &statements.claim_rows),
            ("held", &statements.held),
            ("bury_expired", &statements.bury_expired),
            ("split_add", &statements.split_add),
            ("split_keep", &statements.split_keep),
            ("parts_of", &statements.parts_of),
            ("archive_cancelled", &statements.archive_cancelled),
            ("cancel_key", &statements.cancel_key),
            ("leave_cancelled", &statements.leave_cancelled),
            ("key_holder", &statements.key_holder),
            ("watch", &statements.watch),
            ("is_free", &statements.is_free),
            ("next_in_order", &statements.next_in_order),
            ("newest", &statements.newest),
            ("archive", &statements.archive),
            ("close_keys", &statements.close_keys),
            ("bury", &statements.bury),
            ("mark_dead_keys", &statements.mark_dead_keys),
            ("leave", &statements.leave),
            ("retry", &statements.retry),
            ("verify", &statements.verify),
            ("renew", &statements.renew),
            ("release", &statements.release),
            ("sweep_unhandled", &statements.sweep_unhandled),
            ("sweep_claim", &statements.sweep_claim),
            ("purge_history", &statements.purge_history),
            ("purge_keys", &statements.purge_keys),
            ("find", &statements.find),
            ("discard_keys", &statements.discard_keys),
            ("sweep_cut", &statements.sweep_cut),
            ("dead_look_down", &statements.dead_look_down),
            ("dead_look_up", &statements.dead_look_up),
            ("dead_list", &statements.dead_list),
            ("dead_numbered", &statements.dead_numbered),
            ("requeue", &statements.requeue),
            ("archive_dead", &statements.archive_dead),
            ("close_dead_keys", &statements.close_dead_keys),
            ("leave_dead", &statements.leave_dead),
            ("oldest_due", &statements.oldest_due),
            ("lock_cut", &statements.lock_cut),
            ("lock_take", &statements.lock_take),
            ("lock_keep", &statements.lock_keep),
            ("lock_free", &statements.lock_free),
        ]
    }

    #[tokio::test]
    async fn no_statement_walks_a_table_and_what_is_due_is_found_in_both_indexes_on_every_level() {
        let pool = sqlx::sqlite::SqlitePoolOptions::new()
            .max_connections(1)
            .connect("sqlite::memory:")
            .await
            .unwrap();
        let store = super::super::SqliteStore::new(pool.clone());
        store.migrate().await.unwrap();
        // Empty, then full without statistics, then with them.
        for before in [
            "SELECT 1",
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000)
            INSERT INTO outbox_events (
                name, version, priority, payload, dedup_key, max_attempts, due_at, created_at,
                retention, key_retention
            )
            SELECT
                'order.paid', 1, i % 4, '{}', 'k' || i, 5, CASE WHEN i % 3 = 0 THEN i END, 1, 1, 1
            FROM n",
            "ANALYZE",
        ] {
            sqlx::raw_sql(before).execute(&pool).await.unwrap();
            for (name, sql) in looking(&store.inner.statements) {
                let plan: Vec<String> =
                    sqlx::query(AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}")))
                        .fetch_all(&pool)
                        .await
                        .unwrap()
                        .iter()
                        .map(|row| row.get("detail"))
                        .collect();
                // Lists that came as JSON and results of inner queries have no index, and the
                // installation is one row.
                let walks = |step: &&String| {
                    step.starts_with("SCAN")
                        && !step.contains("VIRTUAL TABLE")
                        && !step.contains("(subquery")
                        && !step.contains("_installation")
                        && !step.contains("CONSTANT ROW")
                };
                assert_eq!(plan.iter().find(walks), None, "{name}: {plan:#?}");
                if name == "claim" || name == "oldest_due" {
                    for index in ["outbox_events_ready", "outbox_events_waiting"] {
                        let levels = plan.iter().filter(|step| step.contains(index)).count();
                        assert_eq!(levels, 4, "{index}: {plan:#?}");
                    }
                }
            }
        }
    }
}
