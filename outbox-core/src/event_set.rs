//! Which events an outbox accepts: any, or those of a closed set.

use std::fmt;
use std::num::NonZeroU32;

use crate::event::OutboxEvent;
use crate::version::PayloadError;

/// The set of an outbox that accepts every event, which is what an outbox is without a set of its
/// own.
///
/// That an event has a handler is then known only at run time: one without waits, and
/// [`Stats::unhandled`](crate::Stats::unhandled) reports it.
#[derive(Clone, Copy, Debug)]
pub struct AnyEvent;

/// An event that an outbox of `Set` accepts.
///
/// Every event is one of [`AnyEvent`]. Those of a closed set are named by `#[derive(OutboxEvents)]`,
/// which writes the impls; they are not written by hand.
///
/// It is also how a library asks for an outbox, whatever else that accepts:
///
/// ```
/// use outbox_core::{EventOf, Outbox, OutboxEvent, PublishError, Store};
/// # use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize, OutboxEvent)]
/// pub struct InvoiceSent { number: u64 }
///
/// async fn send_invoice<S: Store, Set>(
///     outbox: &Outbox<S, Set>,
///     tx: &mut S::Tx<'_>,
/// ) -> Result<(), PublishError>
/// where
///     InvoiceSent: EventOf<Set>,
/// {
///     outbox.publish(tx, &InvoiceSent { number: 7 }).await?;
///     Ok(())
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an event of `{Set}`",
    label = "not an event of `{Set}`",
    note = "`{Set}` is a closed set: give it a variant that holds `{Self}`"
)]
pub trait EventOf<Set>: OutboxEvent {
    /// Where the event stands among the members of the set.
    #[doc(hidden)]
    type Place;
}

impl<E: OutboxEvent> EventOf<AnyEvent> for E {
    type Place = crate::coverage::Here;
}

/// A closed set of events: all that an outbox accepts, and each with a handler.
///
/// Derive it on an enum with a variant for each event: `#[derive(OutboxEvents)]`. The page of the
/// derive says what it makes.
///
/// A set is for [`Outbox::builder_of`](crate::Outbox::builder_of). Its values are for tools and
/// tests, which meet events by name: rows are decoded to them.
///
/// ```
/// use outbox_core::{DecodeError, EventSet, OutboxEvent, OutboxEvents};
/// # use serde::{Deserialize, Serialize};
///
/// #[derive(Debug, PartialEq, Serialize, Deserialize, OutboxEvent)]
/// struct OrderPaid { order_id: u64 }
///
/// #[derive(Debug, PartialEq, Serialize, Deserialize, OutboxEvent)]
/// struct AlertRaised { text: String }
///
/// #[derive(Debug, PartialEq, OutboxEvents)]
/// enum ShopEvents {
///     OrderPaid(OrderPaid),
///     AlertRaised(AlertRaised),
/// }
///
/// assert_eq!(ShopEvents::NAMES, ["order.paid", "alert.raised"]);
///
/// let version = std::num::NonZeroU32::MIN;
/// let event = ShopEvents::decode("order.paid", version, r#"{"order_id":7}"#)?;
/// assert_eq!(event, ShopEvents::from(OrderPaid { order_id: 7 }));
/// assert_eq!(event.name(), "order.paid");
///
/// let unknown = ShopEvents::decode("cache.warm", version, "{}");
/// assert!(matches!(unknown, Err(DecodeError::UnknownName { .. })));
/// let undecodable = ShopEvents::decode("order.paid", version, "{}");
/// assert!(matches!(undecodable, Err(DecodeError::Undecodable { event: "order.paid", .. })));
/// # Ok::<_, DecodeError>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a set of events",
    label = "not a set of events",
    note = "add `#[derive(OutboxEvents)]` to the enum `{Self}`, whose variants each hold one event"
)]
pub trait EventSet: Sized + 'static {
    /// The set when no member has a handler yet.
    #[doc(hidden)]
    type Unhandled;

    /// The event names of the members, in the order of the variants.
    const NAMES: &'static [&'static str];

    /// The event name of this value.
    fn name(&self) -> &'static str;

    /// Decodes the payload of an event by its name and version, all as they stand in a row:
    /// [`EventRecord::name`](crate::EventRecord::name),
    /// [`EventRecord::version`](crate::EventRecord::version) and
    /// [`EventRecord::payload`](crate::EventRecord::payload).
    ///
    /// A member is found by its former names, too, and brought to its present version.
    ///
    /// # Errors
    ///
    /// Returns [`DecodeError`] if no member has this name, or if that member does not read this
    /// version, or the payload is not what it reads.
    fn decode(name: &str, version: NonZeroU32, payload: &str) -> Result<Self, DecodeError>;
}

/// Why a stored event is no value of an [`EventSet`].
#[derive(Debug)]
#[non_exhaustive]
pub enum DecodeError {
    /// No member of the set has this name.
    UnknownName {
        /// The name asked for.
        name: String,
    },
    /// The payload is not what the member of this name reads.
    Undecodable {
        /// The member's event name.
        event: &'static str,
        /// Why.
        source: PayloadError,
    },
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownName { name } => write!(f, "no event of the set has the name {name:?}"),
            Self::Undecodable { event, .. } => {
                write!(f, "event `{event}` cannot be decoded")
            }
        }
    }
}

impl std::error::Error for DecodeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::UnknownName { .. } => None,
            Self::Undecodable { source, .. } => Some(source),
        }
    }
}

// What generated code calls takes the constants of events, and not the types: that a member is no
// event is told once, where it is named, and not once more for each bound.

/// Whether `name` is an event's name or one of its aliases.
#[must_use]
pub fn has_name(name: &str, own: &str, aliases: &[&str]) -> bool {
    name == own || aliases.contains(&name)
}

/// What a member's `decode` answered, with its event name.
///
/// # Errors
///
/// Returns [`DecodeError::Undecodable`] with the reason.
pub fn decoded<E>(event: &'static str, decoded: Result<E, PayloadError>) -> Result<E, DecodeError> {
    decoded.map_err(|source| DecodeError::Undecodable { event, source })
}

/// The error for a name that no member has.
#[must_use]
pub fn unknown_name(name: &str) -> DecodeError {
    DecodeError::UnknownName {
        name: name.to_owned(),
    }
}

/// Whether two events share a name, present or former, for a `const`. Of each its name and its
/// aliases.
#[must_use]
pub const fn share_a_name(
    (one, aliases): (&str, &[&str]),
    (other, other_aliases): (&str, &[&str]),
) -> bool {
    if is_same_name(one, other) || is_among(one, other_aliases) {
        return true;
    }
    let mut i = 0;
    while i < aliases.len() {
        if is_same_name(aliases[i], other) || is_among(aliases[i], other_aliases) {
            return true;
        }
        i += 1;
    }
    false
}

const fn is_among(name: &str, names: &[&str]) -> bool {
    let mut i = 0;
    while i < names.len() {
        if is_same_name(name, names[i]) {
            return true;
        }
        i += 1;
    }
    false
}

const fn is_same_name(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    if one.len() != other.len() {
        return false;
    }
    let mut i = 0;
    while i < one.len() {
        if one[i] != other[i] {
            return false;
        }
        i += 1;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(one: &str, other: &str, expected: bool) {
        assert_eq!(is_same_name(one, other), expected, "{one:?} {other:?}");
        assert_eq!(is_same_name(other, one), expected, "{other:?} {one:?}");
    }

    #[test]
    fn names_are_one_if_every_byte_is() {
        check("order.paid", "order.paid", true);
        check("order.paid", "order.paie", false);
        check("order.paid", "prder.paid", false);
        check("order.paid", "order.paid2", false);
        check("order.paid", "", false);
        check("", "", true);
    }

    #[test]
    fn a_former_name_is_shared_as_a_present_one_is() {
        let paid: (_, &[&str]) = ("paid", &[]);
        let settled: (_, &[&str]) = ("settled", &["closed", "paid"]);
        let ended: (_, &[&str]) = ("ended", &["over", "closed"]);
        assert!(share_a_name(paid, paid));
        assert!(share_a_name(paid, settled));
        assert!(share_a_name(settled, paid));
        assert!(share_a_name(settled, ended));
        assert!(!share_a_name(paid, ended));
        assert!(!share_a_name(ended, paid));
    }
}
