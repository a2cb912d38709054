//! The names of one outbox, and SQL text with them filled in.

use std::sync::Arc;

use outbox_core::store::StoreError;

use crate::ident::Ident;

/// PostgreSQL cuts a longer name.
const NAME_MAX: usize = 63;

/// The longest of the endings below.
const SUFFIX_MAX: usize = "_history_default".len();

/// What a template may name, and the ending of the table's name it stands for.
const RELATIONS: [(&str, &str); 9] = [
    ("{events}", ""),
    ("{events_id_seq}", "_id_seq"),
    ("{history}", "_history"),
    ("{history_default}", "_history_default"),
    ("{dead}", "_dead"),
    ("{keys}", "_keys"),
    ("{installation}", "_installation"),
    ("{versions}", "_schema"),
    ("{all}", "_all"),
];

/// Indexes are created beside their tables: their names take no schema.
const INDEXES: [(&str, &str); 5] = [
    ("{index_ready}", "_ready"),
    ("{index_waiting}", "_waiting"),
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

    /// Fills the names into `template`.
    pub(super) fn render(&self, template: &str) -> Arc<str> {
        let mut sql = template.replace(
            "{events_id_seq_literal}",
            &literal(&self.qualified("_id_seq")),
        );
        for (placeholder, suffix) in RELATIONS {
            sql = sql.replace(placeholder, &self.qualified(suffix));
        }
        for (placeholder, suffix) in INDEXES {
            sql = sql.replace(placeholder, &self.table.quoted_with(suffix));
        }
        sql.replace("{schema}", &self.schema.quoted_with("")).into()
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
        let schema = self.schema.as_str().bytes();
        let table = self.table.as_str().bytes();
        let both = schema.chain(std::iter::once(0)).chain(table);
        format!("outbox_{:016x}", fingerprint(both))
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
        let longest = RELATIONS.iter().chain(&INDEXES).map(|(_, suffix)| suffix);
        assert_eq!(longest.map(|suffix| suffix.len()).max(), Some(SUFFIX_MAX));

        assert!(Names::new("s", &"t".repeat(NAME_MAX - SUFFIX_MAX)).is_ok());
        let too_long = Names::new("s", &"t".repeat(70)).unwrap_err();
        assert_eq!(too_long.kind(), StoreErrorKind::Config);
        assert!(too_long.to_string().contains(&"t".repeat(70)));
    }

    #[test]
    fn outboxes_differ_in_their_channel() {
        let of = |schema, table| Names::new(schema, table).unwrap().channel();
        assert_eq!(of("outbox", "outbox_events"), "outbox_246eb4a556283883");
        assert_ne!(of("a", "bc"), of("ab", "c"));
    }
}
