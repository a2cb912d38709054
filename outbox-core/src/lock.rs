//! Locks for the application: one instance at a time, one transaction at a time.

use std::ops::RangeInclusive;
use std::time::Duration;

/// The namespaces of advisory locks that the library keeps for itself: those whose upper half
/// spells `ou` or `ov`, 1869938688 to 1870069759.
///
/// On PostgreSQL the lower half, and the id, are made of the outbox's schema and table, so that two
/// outboxes in one database have locks of their own. [`Outbox::lock_entity`] refuses all of them on
/// every store, so that an application finds out before it changes its database.
///
/// [`Outbox::lock_entity`]: crate::Outbox::lock_entity
pub const RESERVED_NAMESPACES: RangeInclusive<i32> = 0x6f75_0000..=0x6f76_ffff;

/// How often a held lock is proven.
pub const KEEP_EVERY: Duration = Duration::from_secs(5);

/// How long a lock lasts that is a lease, as on SQLite, unless it is kept.
pub const EXCLUSIVE_LEASE: Duration = Duration::from_secs(30);

/// What a lock is taken for: the second number of an advisory lock.
///
/// A number that fits 32 bits is used as it is. Anything else is hashed to 32 bits, and two ids may
/// then share a lock: one of their transactions waits for the other without need, and no lock is
/// ever missing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LockId(i32);

impl LockId {
    /// The number that is locked.
    #[must_use]
    pub const fn get(self) -> i32 {
        self.0
    }

    fn hashed(bytes: &[u8]) -> Self {
        // FNV-1a, because processes of two releases have to agree, and a hash of the standard
        // library may change with the compiler.
        let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let [a, b, c, d, e, f, g, h] = hash.to_be_bytes();
        Self(i32::from_be_bytes([a ^ e, b ^ f, c ^ g, d ^ h]))
    }
}

impl From<i32> for LockId {
    fn from(id: i32) -> Self {
        Self(id)
    }
}

impl From<i64> for LockId {
    fn from(id: i64) -> Self {
        i32::try_from(id).map_or_else(|_| Self::hashed(&id.to_be_bytes()), Self)
    }
}

impl From<u64> for LockId {
    fn from(id: u64) -> Self {
        i32::try_from(id).map_or_else(|_| Self::hashed(&id.to_be_bytes()), Self)
    }
}

impl From<uuid::Uuid> for LockId {
    fn from(id: uuid::Uuid) -> Self {
        Self::hashed(id.as_bytes())
    }
}

impl From<&str> for LockId {
    fn from(id: &str) -> Self {
        Self::hashed(id.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_32_bits_is_the_same_lock_whatever_its_type() {
        assert_eq!(LockId::from(7_i32), LockId::from(7_i64));
        assert_eq!(LockId::from(7_u64).get(), 7);
        assert_eq!(LockId::from(-7_i64).get(), -7);
    }

    #[test]
    fn a_hashed_id_is_the_same_in_every_release() {
        assert_eq!(LockId::from("order 7").get(), -362_019_815);
        assert_ne!(LockId::from("order 7"), LockId::from("order 8"));
    }

    #[test]
    fn the_reserved_namespaces_are_as_documented() {
        assert_eq!(*RESERVED_NAMESPACES.start(), 1_869_938_688);
        assert_eq!(*RESERVED_NAMESPACES.end(), 1_870_069_759);
    }
}
