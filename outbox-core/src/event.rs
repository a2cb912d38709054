//! What an event is: a typed fact with a stable name, a priority and, optionally, two keys.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use crate::backoff::Backoff;
use crate::version::{self, PayloadError};

/// The longest event name, in bytes.
pub const EVENT_NAME_MAX: usize = 128;

/// A domain fact that can be published through an outbox.
///
/// Derive it: `#[derive(OutboxEvent)]` fills in everything below from the type and its
/// `#[outbox(..)]` attribute. By hand, `NAME` and `Output` are all that has to be written; a name
/// that breaks the rules of [`NAME`](Self::NAME) is then refused by the compiler where the type is
/// published or given a handler. So is one in [`ALIASES`](Self::ALIASES).
///
/// ```
/// use outbox_core::OutboxEvent;
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct OrderPaid { order_id: u64 }
///
/// impl OutboxEvent for OrderPaid {
///     type Output = ();
///     const NAME: &'static str = "order.paid";
///     fn dedup_key(&self) -> Option<String> { Some(self.order_id.to_string()) }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an outbox event",
    label = "not an outbox event",
    note = "add `#[derive(OutboxEvent)]` to `{Self}`, beside serde's `Serialize` and `Deserialize`"
)]
pub trait OutboxEvent: Serialize + DeserializeOwned + Send + Sync + 'static {
    /// What a handler of this event returns.
    ///
    /// It is kept with the row, as JSON, and given back to whoever publishes the same dedup key
    /// again. `()` when there is nothing to tell.
    type Output: Serialize + DeserializeOwned + Send + 'static;

    /// The stable string stored with every row.
    ///
    /// 1 to [`EVENT_NAME_MAX`] bytes of `a-z`, `0-9`, `.`, `_` and `-`. Rows are found by it, so
    /// changing it leaves the rows of the old name waiting for a handler that knows them, unless it
    /// is kept in [`ALIASES`](Self::ALIASES).
    const NAME: &'static str;

    /// The former names of the event. Defaults to none.
    ///
    /// Rows of these names are handled as rows of [`NAME`](Self::NAME) are, with the same versions.
    /// None of them may be a name or an alias of another event in the same outbox. Nothing is
    /// published under them. A dedup key belongs to the name it was published under: an event of
    /// the new name is no duplicate of one of a former name.
    const ALIASES: &'static [&'static str] = &[];

    /// The version of the payload's shape, from 1. Defaults to 1.
    ///
    /// It is stored with every row. A row of a later version than this is left alone, for a process
    /// that reads it; one of an earlier version is given to [`decode`](Self::decode).
    const VERSION: NonZeroU32 = NonZeroU32::MIN;

    /// Which of two due events is claimed first. Defaults to [`Priority::Normal`].
    const PRIORITY: Priority = Priority::Normal;

    /// How often a handler may be started before the event becomes a dead letter.
    ///
    /// Defaults to the publishing outbox's setting. Stored in the row.
    const MAX_ATTEMPTS: Option<NonZeroU32> = None;

    /// How long to wait between attempts. Defaults to the dispatching outbox's setting.
    const BACKOFF: Option<Backoff> = None;

    /// How long one run of the handler may take. Defaults to the dispatching outbox's setting.
    const TIMEOUT: Option<Duration> = None;

    /// How long the row is kept once it is processed.
    ///
    /// Defaults to the publishing outbox's setting. Stored in the row; zero keeps nothing.
    const RETENTION: Option<Duration> = None;

    /// How long an event is worth handling, from its publish. Defaults to `None`: for ever.
    ///
    /// [`PublishOptions::expires_in`](crate::PublishOptions::expires_in) says what becomes of it.
    const EXPIRES_IN: Option<Duration> = None;

    /// What becomes of later events of its ordering key should an event of this type end as a dead
    /// letter. Stored in the row. Defaults to [`BehindDead::Block`].
    const BEHIND_DEAD: BehindDead = BehindDead::Block;

    /// Turns a stored payload into the event.
    ///
    /// `version` is that of the row, which is at most [`VERSION`](Self::VERSION). By default no
    /// version but this one is read, with serde. The derive reads earlier ones with what `upcast`
    /// says.
    ///
    /// # Errors
    ///
    /// Returns [`PayloadError`] for a version that is not read, and for a payload that is not what
    /// its version reads. The event is a dead letter then, with the reason `undecodable`.
    fn decode(version: NonZeroU32, payload: &str) -> Result<Self, PayloadError> {
        version::read_own(version, payload)
    }

    /// The publisher's key: while an event of this name with the same key is known, publishing
    /// inserts nothing and answers with the existing one.
    ///
    /// `None`, the default, never refuses. A key longer than
    /// [`KEY_MAX`](crate::key::KEY_MAX) bytes is stored as its SHA-256, never cut.
    fn dedup_key(&self) -> Option<String> {
        None
    }

    /// Events that share this key are handled one after the other, in the order in which their
    /// transactions commit, by however many processes. Defaults to `None`: in no order.
    ///
    /// It belongs to no event name: events of different types with one key are in one order. Nor
    /// does a delay or a priority change the order: later events of the key wait behind an event
    /// that is delayed, running, or between two attempts. What happens behind a dead letter is
    /// said by [`BEHIND_DEAD`](Self::BEHIND_DEAD). Publishing waits for open transactions that have
    /// published the same key.
    ///
    /// A key longer than [`KEY_MAX`](crate::key::KEY_MAX) bytes is stored as its SHA-256, never
    /// cut.
    fn ordering_key(&self) -> Option<String> {
        None
    }
}

/// Says whether `name` may be an event name: 1 to [`EVENT_NAME_MAX`] bytes of `[a-z0-9._-]`.
#[must_use]
pub const fn is_event_name(name: &str) -> bool {
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes.len() > EVENT_NAME_MAX {
        return false;
    }
    let mut i = 0;
    while i < bytes.len() {
        if !matches!(bytes[i], b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-') {
            return false;
        }
        i += 1;
    }
    true
}

/// Stops the build when `E::NAME`, or an alias, is not a valid event name.
pub(crate) const fn assert_event_name<E: OutboxEvent>() {
    assert!(
        is_event_name(E::NAME),
        "`OutboxEvent::NAME` must be 1 to 128 bytes of `a-z`, `0-9`, `.`, `_` and `-`"
    );
    let mut i = 0;
    while i < E::ALIASES.len() {
        assert!(
            is_event_name(E::ALIASES[i]),
            "each of `OutboxEvent::ALIASES` must be 1 to 128 bytes of `a-z`, `0-9`, `.`, `_` and `-`"
        );
        i += 1;
    }
}

/// Which of two due events is claimed first: four stored levels.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Priority {
    /// Claimed when nothing else is due.
    Low,
    /// The default.
    #[default]
    Normal,
    /// Claimed before `Normal`.
    High,
    /// Claimed before everything else.
    Critical,
}

impl Priority {
    /// All levels, the first to be claimed first.
    pub const DESCENDING: [Self; 4] = [Self::Critical, Self::High, Self::Normal, Self::Low];

    /// The stored number: 0 (low) to 3 (critical).
    #[must_use]
    pub const fn level(self) -> i16 {
        match self {
            Self::Low => 0,
            Self::Normal => 1,
            Self::High => 2,
            Self::Critical => 3,
        }
    }

    /// The priority stored as `level`, or `None` where no level has that number.
    #[must_use]
    pub const fn from_level(level: i16) -> Option<Self> {
        match level {
            0 => Some(Self::Low),
            1 => Some(Self::Normal),
            2 => Some(Self::High),
            3 => Some(Self::Critical),
            _ => None,
        }
    }
}

/// What becomes of later events of an ordering key when an event ends as a dead letter.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum BehindDead {
    /// They wait until a person has requeued or discarded it. For steps that make no sense without
    /// the one before.
    #[default]
    Block,
    /// They go on without it. For updates of which the last one counts.
    Skip,
}

/// Names one event for ever, across redeliveries, databases and brokers.
///
/// It is made of the installation's UUID and the row's number, so two databases never give the
/// same one, and it stays the same for every attempt: use it as a broker's dedup id or as the
/// idempotency key of an effect. Its text form is `<installation>-<row>`, the UUID without
/// hyphens.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct EventId {
    installation: Uuid,
    row: i64,
}

impl EventId {
    /// Puts together the id of row `row` in the database with that installation's UUID.
    #[must_use]
    pub const fn new(installation: Uuid, row: i64) -> Self {
        Self { installation, row }
    }

    /// The UUID that was drawn when the outbox was installed in its database.
    #[must_use]
    pub const fn installation(self) -> Uuid {
        self.installation
    }

    /// The row's number inside its database.
    #[must_use]
    pub const fn row(self) -> i64 {
        self.row
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.installation.simple(), self.row)
    }
}

impl FromStr for EventId {
    type Err = InvalidEventId;

    fn from_str(text: &str) -> Result<Self, InvalidEventId> {
        let (installation, row) = text.split_once('-').ok_or(InvalidEventId)?;
        Ok(Self {
            installation: Uuid::try_parse(installation).map_err(|_| InvalidEventId)?,
            row: row.parse().map_err(|_| InvalidEventId)?,
        })
    }
}

/// A text that is not an [`EventId`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct InvalidEventId;

impl fmt::Display for InvalidEventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an event id reads `<32 hexadecimal digits>-<row number>`")
    }
}

impl std::error::Error for InvalidEventId {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_id_survives_its_text_form() {
        let id = EventId::new(Uuid::from_u128(7), 42);
        assert_eq!(id.to_string(), "00000000000000000000000000000007-42");
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!("42".parse::<EventId>(), Err(InvalidEventId));
    }

    #[track_caller]
    fn check_name(name: &str, expected: bool) {
        assert_eq!(is_event_name(name), expected, "{name:?}");
    }

    #[test]
    fn event_names_have_an_alphabet_and_a_limit() {
        check_name("order.paid", true);
        check_name("a-b_c.9", true);
        check_name(&"x".repeat(EVENT_NAME_MAX), true);
        check_name(&"x".repeat(EVENT_NAME_MAX + 1), false);
        check_name("", false);
        check_name("Order.Paid", false);
        check_name("order paid", false);
        check_name("größe", false);
    }

    #[test]
    fn levels_go_up_with_urgency() {
        for priority in Priority::DESCENDING {
            assert_eq!(Priority::from_level(priority.level()), Some(priority));
        }
        assert!(Priority::DESCENDING.is_sorted_by(|a, b| a.level() > b.level()));
        assert_eq!(Priority::from_level(4), None);
    }
}
