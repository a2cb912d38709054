//! Leases: how one process at a time acts on an event, without anybody having to let go.
//!
//! A claim writes a fresh random *token* and an *expiry* into the row. Until the expiry nobody
//! else claims the row. After it the row is due again, for any instance: a process that died needs
//! no clean-up.
//!
//! # A process cannot know that its lease has ended
//!
//! It can be frozen between looking at its clock and acting. So the row decides: every write that
//! ends, extends or gives back a claim names the token, and matches no row once somebody else has
//! claimed it. That is [`Settled::LeaseLost`](crate::store::Settled::LeaseLost): nothing changes,
//! it is counted, and the loop goes on.
//!
//! # The trust window
//!
//! A process stops acting on a lease before it ends: `trusted_until` is counted on its own
//! monotonic clock from *before* the claim was sent, so that a slow round trip shortens the window
//! and never stretches it. A renewal moves it in the same way. When it passes, and up to half a
//! second before, the handler is cancelled; what it still returns is refused by the token. A handler
//! that has not begun by then does not, and its event is given back: the answer to the claim, or a
//! thread to run on, came too late.
//!
//! # Renewal
//!
//! A lease is extended when a third of it has passed, all that are due with one statement, from the
//! runtime of the outbox and not of the handlers, so that a handler which blocks its thread does
//! not cost others their leases. A row that is locked at that moment is skipped and its lease is
//! *unknown*, not lost: whoever holds the lock may be settling it for us.

use std::fmt;

use uuid::Uuid;

/// A fresh random value of every claim. A write with another one is refused.
///
/// Never the instance's name and never the attempt's number: both repeat.
#[derive(Clone, Copy, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct LeaseToken(Uuid);

impl LeaseToken {
    /// Draws a new token.
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }

    /// The token as it is stored.
    #[must_use]
    pub const fn as_uuid(self) -> Uuid {
        self.0
    }

    /// The token stored as `uuid`.
    #[must_use]
    pub const fn from_uuid(uuid: Uuid) -> Self {
        Self(uuid)
    }
}

impl fmt::Debug for LeaseToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LeaseToken({})", self.0)
    }
}

/// A row, and the token under which it is held.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct HeldLease {
    /// The row's number.
    pub row: i64,
    /// The token its claim wrote.
    pub token: LeaseToken,
}
