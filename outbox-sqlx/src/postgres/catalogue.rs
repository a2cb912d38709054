//! Every statement of one outbox, with its names filled in.

use std::sync::Arc;

use super::names::Names;
use super::{claim, find, insert, purge, renew, settle, sweep, wakeup};

/// The statements, rendered once: the text is what a connection finds a prepared statement by.
pub(super) struct Catalogue {
    pub(super) insert_one: Arc<str>,
    pub(super) insert_keyed: Arc<str>,
    pub(super) insert_many: Arc<str>,
    pub(super) look_up: Arc<str>,
    pub(super) claim: Arc<str>,
    pub(super) claim_rows: Arc<str>,
    pub(super) verify: Arc<str>,
    pub(super) renew: Arc<str>,
    pub(super) release: Arc<str>,
    pub(super) processed: Arc<str>,
    pub(super) retry: Arc<str>,
    pub(super) dead: Arc<str>,
    pub(super) sweep_look: Arc<str>,
    pub(super) sweep_take: Arc<str>,
    pub(super) purge: Arc<str>,
    pub(super) find: Arc<str>,
    pub(super) notify: Arc<str>,
    pub(super) installation: Arc<str>,
    pub(super) renew_installation: Arc<str>,
    pub(super) version: Arc<str>,
}

const INSTALLATION: &str = "SELECT id FROM {installation}";

/// - An upsert, so that it also repairs an installation whose row was lost.
const RENEW_INSTALLATION: &str = "
    INSERT INTO {installation} AS installed (id) VALUES ($1)
    ON CONFLICT (only_row) DO UPDATE SET id = excluded.id
";

const VERSION: &str = "SELECT max(version) FROM {versions}";

impl Catalogue {
    pub(super) fn new(names: &Names) -> Self {
        Self {
            insert_one: names.render(insert::INSERT_ONE),
            insert_keyed: names.render(insert::INSERT_KEYED),
            insert_many: names.render(insert::INSERT_MANY),
            look_up: names.render(insert::LOOK_UP),
            claim: names.render(&claim::claim_template()),
            claim_rows: names.render(&claim::claim_rows_template()),
            verify: names.render(&renew::template(renew::VERIFY)),
            renew: names.render(&renew::template(renew::RENEW)),
            release: names.render(&renew::template(renew::RELEASE)),
            processed: names.render(&settle::processed_template()),
            retry: names.render(&settle::retry_template()),
            dead: names.render(&settle::dead_template()),
            sweep_look: names.render(&sweep::look_template()),
            sweep_take: names.render(&sweep::take_template()),
            purge: names.render(purge::PURGE),
            find: names.render(&find::find_template()),
            notify: names.render(wakeup::NOTIFY),
            installation: names.render(INSTALLATION),
            renew_installation: names.render(RENEW_INSTALLATION),
            version: names.render(VERSION),
        }
    }

    /// Every statement with its name, in the order in which an event meets them.
    pub(super) fn all(&self) -> [(&'static str, &Arc<str>); 20] {
        // Taken apart by name, so that a statement that is added is a compile error here.
        let Self {
            insert_one,
            insert_keyed,
            insert_many,
            look_up,
            claim,
            claim_rows,
            verify,
            renew,
            release,
            processed,
            retry,
            dead,
            sweep_look,
            sweep_take,
            purge,
            find,
            notify,
            installation,
            renew_installation,
            version,
        } = self;
        [
            ("insert_one", insert_one),
            ("insert_keyed", insert_keyed),
            ("insert_many", insert_many),
            ("look_up", look_up),
            ("claim", claim),
            ("claim_rows", claim_rows),
            ("verify", verify),
            ("renew", renew),
            ("release", release),
            ("processed", processed),
            ("retry", retry),
            ("dead", dead),
            ("sweep_look", sweep_look),
            ("sweep_take", sweep_take),
            ("purge", purge),
            ("find", find),
            ("notify", notify),
            ("installation", installation),
            ("renew_installation", renew_installation),
            ("version", version),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_statement_keeps_a_placeholder_or_forgets_its_schema() {
        let names = Names::new("the schema", "the table").unwrap();
        for (name, sql) in Catalogue::new(&names).all() {
            assert!(!sql.contains(['{', '}']), "{name}: {sql}");
            assert_eq!(
                sql.matches("\"the table").count(),
                sql.matches("\"the schema\".\"the table").count(),
                "{name}: {sql}"
            );
        }
    }
}
