//! Names of schemas and tables: the one thing that comes from outside and stands in SQL text.

use outbox_core::store::{StoreError, StoreErrorKind};

/// A name that a database takes as it is, once it is quoted.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Ident(String);

impl Ident {
    /// Checks that `name` is 1 to `max` bytes long and has no U+0000.
    ///
    /// A database cuts a name that is too long, silently, and two outboxes would share a table; so
    /// it is an error that repeats the name. `what` says what it is the name of.
    pub(crate) fn new(what: &str, name: &str, max: usize) -> Result<Self, StoreError> {
        let config = |why: String| {
            StoreError::new(
                StoreErrorKind::Config,
                format!("{what} name {name:?} {why}"),
            )
        };
        if name.is_empty() {
            return Err(config("is empty".to_owned()));
        }
        if name.contains('\0') {
            return Err(config("contains U+0000".to_owned()));
        }
        if name.len() > max {
            let len = name.len();
            return Err(config(format!(
                "is {len} bytes long, and at most {max} are allowed"
            )));
        }
        Ok(Self(name.to_owned()))
    }

    /// The name as it is.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The name with `suffix` after it, quoted.
    pub(crate) fn quoted_with(&self, suffix: &str) -> String {
        format!("\"{}{suffix}\"", self.0.replace('"', "\"\""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_quoted(name: &str, expected: &str) {
        assert_eq!(
            Ident::new("table", name, 63).unwrap().quoted_with(""),
            expected
        );
    }

    #[test]
    fn a_quoted_name_ends_where_it_ends() {
        check_quoted("events", r#""events""#);
        check_quoted("Order Events", r#""Order Events""#);
        check_quoted(r#"a"; DROP TABLE b; --"#, r#""a""; DROP TABLE b; --""#);
        check_quoted("größe", r#""größe""#);
    }

    #[track_caller]
    fn check_refused(name: &str, why: &str) {
        let error = Ident::new("table", name, 63).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Config);
        assert_eq!(
            error.to_string(),
            format!("invalid store setting: table name {name:?} {why}")
        );
    }

    #[test]
    fn a_name_no_database_would_keep_is_refused_with_the_name() {
        check_refused("", "is empty");
        check_refused("a\0b", "contains U+0000");
        check_refused(
            &"x".repeat(70),
            "is 70 bytes long, and at most 63 are allowed",
        );
        check_refused(
            &"ä".repeat(32),
            "is 64 bytes long, and at most 63 are allowed",
        );
    }
}
