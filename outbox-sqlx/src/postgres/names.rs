//! The names of one outbox, and SQL text with them filled in.

use std::sync::Arc;

use outbox_core::cadence::Cadence;
use outbox_core::lock::LockId;
use outbox_core::store::StoreError;

use crate::ident::Ident;

/// PostgreSQL cuts a longer name.
const NAME_MAX: usize = 63;

/// The longest ending of a name: that of a partition, which the database makes by itself.
const SUFFIX_MAX: usize = "_history_20000101".len();

/// What a template may name, and the ending of the table's name it stands for.
const RELATIONS: [(&str, &str); 11] = [
    ("{events}", ""),
    ("{events_id_seq}", "_id_seq"),
    ("{history}", "_history"),
    ("{history_default}", "_history_default"),
    ("{dead}", "_dead"),
    ("{keys}", "_keys"),
    ("{paused}", "_paused"),
    ("{installation}", "_installation"),
    ("{versions}", "_schema"),
    ("{all}", "_all"),
    ("{upkeep}", "_upkeep"),
];

/// The same as string constants.
const LITERALS: [(&str, &str); 5] = [
    ("{events_literal}", ""),
    ("{events_id_seq_literal}", "_id_seq"),
    ("{history_literal}", "_history"),
    ("{history_default_literal}", "_history_default"),
    ("{dead_literal}", "_dead"),
];

/// Indexes are created beside their tables: their names take no schema.
const INDEXES: [(&str, &str); 9] = [
    ("{index_ready}", "_ready"),
    ("{index_waiting}", "_waiting"),
    ("{index_order}", "_order"),
    ("{index_parts}", "_parts"),
    ("{index_dead_order}", "_dead_order"),
    ("{index_dead_parts}", "_dead_parts"),
    ("{index_history_id}", "_history_id"),
    ("{index_history_expiry}", "_history_expiry"),
    ("{index_keys_expiry}", "_keys_expiry"),
];

/// The validated names of one outbox.
#[derive(Clone, Debug)]
pub(super) struct Names {
    schema: Ident,
    table: Ident,
}

impl Names {
    pub(super) fn new(schema: &str, table: &str) -> Result<Self, StoreError> {
        Ok(Self {
            schema: Ident::new("schema", schema, NAME_MAX)?,
            table: Ident::new("table", table, NAME_MAX - SUFFIX_MAX)?,
        })
    }

    pub(super) fn schema(&self) -> &Ident {
        &self.schema
    }

    /// The name, inside the schema, of the table of schema versions.
    pub(super) fn versions(&self) -> String {
        format!("{}_schema", self.table.as_str())
    }

    /// Fills the names into `template`. What is in a name is not looked at again.
    pub(super) fn render(&self, template: &str) -> Arc<str> {
        let mut sql = String::with_capacity(2 * template.len());
        let mut rest = template;
        while let Some(brace) = rest.find('{') {
            let (before, from) = rest.split_at(brace);
            sql.push_str(before);
            let length = from.find('}').map_or(1, |end| end + 1);
            let (placeholder, after) = from.split_at(length);
            if let Some(name) = self.name(placeholder) {
                sql.push_str(&name);
                rest = after;
            } else {
                sql.push('{');
                rest = &from[1..];
            }
        }
        sql.push_str(rest);
        sql.into()
    }

    /// What stands for `placeholder`.
    fn name(&self, placeholder: &str) -> Option<String> {
        let suffix = |of: &[(&str, &'static str)]| {
            let found = of.iter().find(|(name, _)| *name == placeholder);
            found.map(|(_, suffix)| *suffix)
        };
        if let Some(suffix) = suffix(&LITERALS) {
            return Some(literal(&self.qualified(suffix)));
        }
        if let Some(suffix) = suffix(&RELATIONS) {
            return Some(self.qualified(suffix));
        }
        if let Some(suffix) = suffix(&INDEXES) {
            return Some(self.table.quoted_with(suffix));
        }
        match placeholder {
            "{schema_literal}" => Some(literal(self.schema.as_str())),
            "{table_literal}" => Some(literal(self.table.as_str())),
            "{function_quote}" => Some(self.function_quote()),
            "{schema}" => Some(self.schema.quoted_with("")),
            _ => None,
        }
    }

    /// What begins and ends the text of a function: nothing that a name inside it has.
    fn function_quote(&self) -> String {
        let mut quote = "$function$".to_owned();
        while self.schema.as_str().contains(&quote) || self.table.as_str().contains(&quote) {
            quote.insert(1, '_');
        }
        quote
    }

    fn qualified(&self, suffix: &str) -> String {
        format!(
            "{}.{}",
            self.schema.quoted_with(""),
            self.table.quoted_with(suffix)
        )
    }

    /// The channel of the wake-ups: the same in every process, another one for every outbox, and
    /// within the 63 bytes that a channel's name may have.
    pub(super) fn channel(&self) -> String {
        format!("outbox_{:016x}", fingerprint(self.bytes()))
    }

    /// The advisory lock of one of the cadences. The first number spells `ou` in its upper half and
    /// is made of schema and table in its lower one.
    ///
    /// Two outboxes whose names happen to give the same number stand down for each other now and
    /// then; nothing depends on who has the lock.
    pub(super) fn cadence_lock(&self, cadence: Cadence) -> (i32, i32) {
        let [.., a, b] = fingerprint(self.bytes()).to_be_bytes();
        let namespace = i32::from_be_bytes([b'o', b'u', a, b]);
        let id = match cadence {
            Cadence::Sweep => 1,
            Cadence::Backstop => 2,
            Cadence::Maintenance => 3,
        };
        (namespace, id)
    }

    /// The advisory lock of an ordering key. The first number spells `ou` in its upper half, and is made
    /// of schema, table and a word in its lower one: another one than the cadences have, as a rule.
    ///
    /// Two keys that give the same number wait for each other without need, and no order is lost.
    pub(super) fn order_lock(&self, key: &str) -> (i32, i32) {
        let word = self.bytes().chain(*b"\0order");
        let [.., a, b] = fingerprint(word).to_be_bytes();
        (
            i32::from_be_bytes([b'o', b'u', a, b]),
            LockId::from(key).get(),
        )
    }

    /// The advisory lock of an exclusive lock. The first number spells `ov` in its upper half.
    ///
    /// 48 bits, and not 32 as an id has: of two names that gave the same lock, one would stand down
    /// for as long as the other one runs, which can be for ever.
    pub(super) fn exclusive_lock(&self, name: &str) -> (i32, i32) {
        let all = self.bytes().chain(std::iter::once(0)).chain(name.bytes());
        let [_, _, a, b, c, d, e, f] = fingerprint(all).to_be_bytes();
        (
            i32::from_be_bytes([b'o', b'v', a, b]),
            i32::from_be_bytes([c, d, e, f]),
        )
    }

    /// What one outbox differs from every other one of its database in.
    fn bytes(&self) -> impl Iterator<Item = u8> {
        let schema = self.schema.as_str().bytes();
        let table = self.table.as_str().bytes();
        schema.chain(std::iter::once(0)).chain(table)
    }

    /// The advisory lock of the migrator. By schema, because two outboxes that are installed in one
    /// schema at the same time must not both create it.
    ///
    /// The two-argument form has a key space of its own, in which no single-argument lock of the
    /// application can be. The first number spells `outb`.
    pub(super) fn migration_lock(&self) -> (i32, i32) {
        let [.., a, b, c, d] = fingerprint(self.schema.as_str().bytes()).to_be_bytes();
        (0x6f75_7462, i32::from_be_bytes([a, b, c, d]))
    }
}

/// FNV-1a, because a hash of the standard library may change with the compiler, and processes of
/// two releases have to agree.
fn fingerprint(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// `text` as a string constant that means the same whatever `standard_conforming_strings` says.
fn literal(text: &str) -> String {
    format!("E'{}'", text.replace('\\', r"\\").replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use outbox_core::lock::RESERVED_NAMESPACES;
    use outbox_core::store::StoreErrorKind;

    use super::*;

    #[track_caller]
    fn check(schema: &str, table: &str, template: &str, expected: &str) {
        let names = Names::new(schema, table).unwrap();
        assert_eq!(&*names.render(template), expected);
    }

    #[test]
    fn every_relation_is_named_with_its_schema() {
        check(
            "outbox",
            "outbox_events",
            "SELECT FROM {events}, {keys}, {history_default}",
            r#"SELECT FROM "outbox"."outbox_events", "outbox"."outbox_events_keys", "outbox"."outbox_events_history_default""#,
        );
        check(
            r#"My "App""#,
            "Bob's",
            "{all} {index_ready} {events_id_seq_literal}",
            r#""My ""App"""."Bob's_all" "Bob's_ready" E'"My ""App"""."Bob''s_id_seq"'"#,
        );
    }

    #[test]
    fn no_name_made_from_the_table_is_longer_than_the_database_allows() {
        for (_, suffix) in RELATIONS.iter().chain(&INDEXES) {
            assert!(suffix.len() <= SUFFIX_MAX, "{suffix}");
        }

        assert!(Names::new("s", &"t".repeat(NAME_MAX - SUFFIX_MAX)).is_ok());
        let too_long = Names::new("s", &"t".repeat(70)).unwrap_err();
        assert_eq!(too_long.kind(), StoreErrorKind::Config);
        assert!(too_long.to_string().contains(&"t".repeat(70)));
    }

    #[test]
    fn no_name_ends_the_function_it_stands_in() {
        check(
            "outbox",
            "a$function$",
            "{function_quote}{table_literal}{function_quote}",
            "$_function$E'a$function$'$_function$",
        );
    }

    #[test]
    fn every_lock_is_in_the_reserved_namespaces() {
        let names = Names::new("outbox", "outbox_events").unwrap();
        let cadences = Cadence::ALL.map(|cadence| names.cadence_lock(cadence));
        assert_eq!(cadences.map(|(_, id)| id), [1, 2, 3]);
        let locks = [
            cadences[0],
            names.exclusive_lock("report"),
            names.migration_lock(),
            names.order_lock("account:7"),
        ];
        for (namespace, _) in locks {
            assert!(RESERVED_NAMESPACES.contains(&namespace), "{namespace:x}");
        }
        let other = Names::new("outbox", "more_events").unwrap();
        assert_ne!(other.cadence_lock(Cadence::Sweep), cadences[0]);
        assert_ne!(other.exclusive_lock("report"), locks[1]);
        assert_ne!(other.order_lock("account:7"), locks[3]);
        assert_ne!(names.order_lock("account:8"), locks[3]);
        assert_ne!(locks[0].0, locks[3].0);
        assert_ne!(names.exclusive_lock("reports"), locks[1]);
    }

    #[test]
    fn outboxes_differ_in_their_channel() {
        let of = |schema, table| Names::new(schema, table).unwrap().channel();
        assert_eq!(of("outbox", "outbox_events"), "outbox_246eb4a556283883");
        assert_ne!(of("a", "bc"), of("ab", "c"));
    }
}
