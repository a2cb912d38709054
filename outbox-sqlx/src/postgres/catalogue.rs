//! Every statement of one outbox, with its names filled in.

use std::sync::Arc;

use super::dead_letter::{self, Changes};
use super::names::Names;
use super::{
    cancel, claim, exclusive, find, insert, lock, order, partition, pause, purge, renew, settle,
    split, stats, sweep, wakeup,
};

/// The statements, rendered once: the text is what a connection finds a prepared statement by.
pub(super) struct Catalogue {
    pub(super) insert_one: Arc<str>,
    pub(super) insert_keyed: Arc<str>,
    pub(super) insert_many: Arc<str>,
    pub(super) insert_many_ordered: Arc<str>,
    pub(super) look_up: Arc<str>,
    pub(super) claim: Arc<str>,
    pub(super) claim_freed: Arc<str>,
    pub(super) claim_rows: Arc<str>,
    pub(super) verify: Arc<str>,
    pub(super) renew: Arc<str>,
    pub(super) release: Arc<str>,
    pub(super) split: Arc<str>,
    pub(super) processed: Arc<str>,
    pub(super) retry: Arc<str>,
    pub(super) dead: Arc<str>,
    pub(super) expired: Arc<str>,
    pub(super) discarded: Arc<str>,
    pub(super) cancel: Arc<str>,
    pub(super) key_holder: Arc<str>,
    pub(super) watch: Arc<str>,
    pub(super) sweep_look: Arc<str>,
    pub(super) sweep_take: Arc<str>,
    pub(super) sweep_cut: Arc<str>,
    pub(super) purge: Arc<str>,
    pub(super) upkeep: Arc<str>,
    pub(super) dead_letters: Arc<str>,
    pub(super) change_numbered: Changes,
    pub(super) change_matching: Changes,
    pub(super) stats: Arc<str>,
    pub(super) lock_entity: Arc<str>,
    pub(super) is_free: Arc<str>,
    pub(super) blocked_keys: Arc<str>,
    pub(super) next_in_order: Arc<str>,
    pub(super) newest: Arc<str>,
    pub(super) pause: Arc<str>,
    pub(super) resume: Arc<str>,
    pub(super) paused: Arc<str>,
    pub(super) exclusive_try: Arc<str>,
    pub(super) exclusive_try_in_transaction: Arc<str>,
    pub(super) exclusive_is_had: Arc<str>,
    pub(super) exclusive_free: Arc<str>,
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
            insert_many: names.render(&insert::many_template()),
            insert_many_ordered: names.render(&insert::many_ordered_template()),
            look_up: names.render(insert::LOOK_UP),
            claim: names.render(&claim::claim_template()),
            claim_freed: names.render(&claim::claim_freed_template()),
            claim_rows: names.render(&claim::claim_rows_template()),
            verify: names.render(&renew::template(renew::VERIFY)),
            renew: names.render(&renew::template(renew::RENEW)),
            release: names.render(&renew::template(renew::RELEASE)),
            split: names.render(&split::split_template()),
            processed: names.render(&settle::processed_template()),
            retry: names.render(&settle::retry_template()),
            dead: names.render(&settle::dead_template()),
            expired: names.render(&settle::expired_template()),
            discarded: names.render(&settle::discarded_template()),
            cancel: names.render(&cancel::cancel_template()),
            key_holder: names.render(cancel::HOLDER),
            watch: names.render(&cancel::look_up_template()),
            sweep_look: names.render(&sweep::look_template()),
            sweep_take: names.render(&sweep::take_template()),
            sweep_cut: names.render(sweep::CUT),
            purge: names.render(purge::PURGE),
            upkeep: names.render(partition::UPKEEP),
            dead_letters: names.render(&dead_letter::list_template()),
            change_numbered: Changes::numbered(|template| names.render(template)),
            change_matching: Changes::matching(|template| names.render(template)),
            stats: names.render(&stats::template()),
            lock_entity: names.render(lock::LOCK_ENTITY),
            is_free: names.render(order::IS_FREE),
            blocked_keys: names.render(order::BLOCKED_KEYS),
            next_in_order: names.render(order::NEXT_IN_ORDER),
            newest: names.render(order::NEWEST),
            pause: names.render(pause::PAUSE),
            resume: names.render(pause::RESUME),
            paused: names.render(pause::PAUSED),
            exclusive_try: names.render(exclusive::TRY),
            exclusive_try_in_transaction: names.render(exclusive::TRY_IN_TRANSACTION),
            exclusive_is_had: names.render(exclusive::IS_HAD),
            exclusive_free: names.render(exclusive::FREE),
            find: names.render(&find::find_template()),
            notify: names.render(wakeup::NOTIFY),
            installation: names.render(INSTALLATION),
            renew_installation: names.render(RENEW_INSTALLATION),
            version: names.render(VERSION),
        }
    }

    /// Every statement with its name, in the order in which an event meets them.
    pub(super) fn all(&self) -> [(&'static str, &Arc<str>); 50] {
        // Taken apart by name, so that a statement that is added is a compile error here.
        let Self {
            insert_one,
            insert_keyed,
            insert_many,
            insert_many_ordered,
            look_up,
            claim,
            claim_freed,
            claim_rows,
            verify,
            renew,
            release,
            split,
            processed,
            retry,
            dead,
            expired,
            discarded,
            cancel,
            key_holder,
            watch,
            sweep_look,
            sweep_take,
            sweep_cut,
            purge,
            upkeep,
            dead_letters,
            change_numbered,
            change_matching,
            stats,
            lock_entity,
            is_free,
            blocked_keys,
            next_in_order,
            newest,
            pause,
            resume,
            paused,
            exclusive_try,
            exclusive_try_in_transaction,
            exclusive_is_had,
            exclusive_free,
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
            ("insert_many_ordered", insert_many_ordered),
            ("look_up", look_up),
            ("claim", claim),
            ("claim_freed", claim_freed),
            ("claim_rows", claim_rows),
            ("verify", verify),
            ("renew", renew),
            ("release", release),
            ("split", split),
            ("processed", processed),
            ("retry", retry),
            ("dead", dead),
            ("expired", expired),
            ("discarded", discarded),
            ("cancel", cancel),
            ("key_holder", key_holder),
            ("watch", watch),
            ("sweep_look", sweep_look),
            ("sweep_take", sweep_take),
            ("sweep_cut", sweep_cut),
            ("purge", purge),
            ("upkeep", upkeep),
            ("dead_letters", dead_letters),
            ("requeue_numbered", &change_numbered.requeue),
            ("discard_numbered", &change_numbered.discard),
            ("purge_numbered", &change_numbered.purge),
            ("requeue_matching", &change_matching.requeue),
            ("discard_matching", &change_matching.discard),
            ("purge_matching", &change_matching.purge),
            ("stats", stats),
            ("lock_entity", lock_entity),
            ("is_free", is_free),
            ("blocked_keys", blocked_keys),
            ("next_in_order", next_in_order),
            ("newest", newest),
            ("pause", pause),
            ("resume", resume),
            ("paused", paused),
            ("exclusive_try", exclusive_try),
            ("exclusive_try_in_transaction", exclusive_try_in_transaction),
            ("exclusive_is_had", exclusive_is_had),
            ("exclusive_free", exclusive_free),
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
