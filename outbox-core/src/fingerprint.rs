//! What tells a repeated publish from a dedup key that is used for something else.

use serde_json::Value;
use sha2::{Digest, Sha256};
use std::num::NonZeroU32;

/// How many bytes of the hash are kept. Two payloads of one key, out of all that were ever
/// published, would have to share 128 bits.
const HASH: usize = 16;

const VERSION: usize = 4;

/// A short stand-in for a payload, kept with its dedup key.
///
/// It is of what the payload says and not of its text: the order of an object's fields does not
/// count. (A `HashMap` gives them in a different one each time.) It begins with the version of the
/// payload's shape, because the payloads of two versions cannot be compared: an old and a new
/// process that publish the same key would always be told that they differ.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Fingerprint([u8; VERSION + HASH]);

impl Fingerprint {
    /// The fingerprint of a payload, as JSON text.
    #[must_use]
    pub fn of(version: NonZeroU32, payload: &str) -> Self {
        let mut hasher = Sha256::new();
        match serde_json::from_str(payload) {
            Ok(value) => digest(&value, &mut hasher),
            // Not what serde_json reads back; then its text is all there is.
            Err(_) => hasher.update(payload),
        }
        let mut bytes = [0; VERSION + HASH];
        bytes[..VERSION].copy_from_slice(&version.get().to_be_bytes());
        bytes[VERSION..].copy_from_slice(&hasher.finalize()[..HASH]);
        Self(bytes)
    }

    /// What a store keeps.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The fingerprint that [`as_bytes`](Self::as_bytes) gave, or `None` where it is none.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Whether the payloads are known to differ. Those of two versions are not.
    #[must_use]
    pub fn differs_from(&self, other: &Self) -> bool {
        self.0[..VERSION] == other.0[..VERSION] && self.0 != other.0
    }
}

/// Every value is told from every other one by its tag and its lengths, so that no two lists of
/// values give the same bytes.
fn digest(value: &Value, hasher: &mut Sha256) {
    match value {
        Value::Null => hasher.update(b"n"),
        Value::Bool(true) => hasher.update(b"t"),
        Value::Bool(false) => hasher.update(b"f"),
        Value::Number(number) => text(b'd', &number.to_string(), hasher),
        Value::String(string) => text(b's', string, hasher),
        Value::Array(values) => {
            length(b'a', values.len(), hasher);
            for value in values {
                digest(value, hasher);
            }
        }
        Value::Object(fields) => {
            length(b'o', fields.len(), hasher);
            // Sorted here: whether serde_json keeps them sorted is a feature any crate can change.
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_unstable_by_key(|(name, _)| *name);
            for (name, value) in fields {
                text(b'k', name, hasher);
                digest(value, hasher);
            }
        }
    }
}

fn text(tag: u8, text: &str, hasher: &mut Sha256) {
    length(tag, text.len(), hasher);
    hasher.update(text);
}

fn length(tag: u8, length: usize, hasher: &mut Sha256) {
    hasher.update([tag]);
    hasher.update((length as u64).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(version: u32, payload: &str) -> Fingerprint {
        Fingerprint::of(NonZeroU32::new(version).unwrap(), payload)
    }

    #[track_caller]
    fn check(one: &str, other: &str, differ: bool) {
        assert_eq!(of(1, one).differs_from(&of(1, other)), differ);
    }

    #[test]
    fn what_a_payload_says_counts_and_not_its_text() {
        check(r#"{"a":1,"b":2}"#, r#"{"b":2, "a":1}"#, false);
        check(
            r#"{"a":[{"x":1,"y":2}]}"#,
            r#"{"a":[{"y":2,"x":1}]}"#,
            false,
        );
        check(r#""\u00e9""#, "\"\u{e9}\"", false);
        check(r#"{"a":1}"#, r#"{"a":2}"#, true);
        check("[1,2]", "[2,1]", true);
        check(r#"["ab","c"]"#, r#"["a","bc"]"#, true);
        check(r#"["1"]"#, "[1]", true);
        check("[[],[]]", "[[[]]]", true);
        check("null", "false", true);
    }

    #[test]
    fn payloads_of_two_versions_are_not_compared() {
        assert!(!of(1, r#"{"cents":1}"#).differs_from(&of(2, r#"{"amount":1}"#)));
    }

    #[test]
    fn a_fingerprint_is_the_same_in_every_release() {
        let of = of(3, r#"{"order_id":7,"lines":["a",null,true,1.5]}"#);
        let hex: String = of.as_bytes().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, "00000003c3e387fb861ec4c97a8057237cac993a");
    }

    #[test]
    fn a_fingerprint_survives_its_bytes() {
        let of = of(1, "{}");
        assert_eq!(Fingerprint::from_bytes(of.as_bytes()), Some(of));
        assert_eq!(Fingerprint::from_bytes(b"short"), None);
    }
}
