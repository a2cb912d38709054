//! From a typed event to the row a store inserts, and from its answer back to types.
//!
//! Everything that can be wrong with an event is found here, before any SQL is sent: a statement
//! that fails aborts the caller's transaction on PostgreSQL, and with it the business change.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use crate::DURATION_MAX;
use crate::event::{EventId, OutboxEvent, Priority};
use crate::fingerprint::Fingerprint;
use crate::key::stored_key;
use crate::progress::{OutputError, Progress};
use crate::settings::Settings;
use crate::store::{EventState, Existing, Insertion, NewEvent, StoreError, Watched};

/// The most bytes the headers of one event may take, as JSON: 16 KiB.
pub const HEADERS_MAX: usize = 16 * 1024;

/// The deepest nesting of a payload or an output: what serde_json reads back.
pub const DEPTH_MAX: usize = 127;

/// What one publish does differently from its event type.
///
/// ```
/// use std::time::Duration;
/// use outbox_core::{Priority, PublishOptions};
///
/// let options = PublishOptions::new()
///     .delay(Duration::from_secs(60))
///     .priority(Priority::High)
///     .header("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
/// ```
#[derive(Clone, Debug, Default)]
pub struct PublishOptions {
    delay: Duration,
    expires_in: Option<Duration>,
    priority: Option<Priority>,
    dedup_key: Option<String>,
    headers: BTreeMap<String, String>,
}

impl PublishOptions {
    /// Starts with what the event type says.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the event due this long after it is inserted, by the database's clock.
    ///
    /// Defaults to zero: due at once. At most [`DURATION_MAX`].
    #[must_use]
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Makes the event not worth handling any more this long after it is inserted, by the database's
    /// clock. Overrides what the event type says.
    ///
    /// A handler that has been started by then may finish. An event whose time is over before that,
    /// because it waited for a relay, for an earlier event of its ordering key or for a retry, is a
    /// dead letter of the reason `expired` as soon as it is claimed; the attempt is not charged.
    /// Longer than the delay, and at most [`DURATION_MAX`].
    #[must_use]
    pub fn expires_in(mut self, expires_in: Duration) -> Self {
        self.expires_in = Some(expires_in);
        self
    }

    /// Overrides the priority of the event type.
    #[must_use]
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = Some(priority);
        self
    }

    /// Overrides the dedup key of the event type.
    #[must_use]
    pub fn dedup_key(mut self, key: impl Into<String>) -> Self {
        self.dedup_key = Some(key.into());
        self
    }

    /// Adds a header. A second one of the same name replaces the first.
    ///
    /// Headers reach the handler through [`Delivery::headers`](crate::Delivery::headers). All of
    /// them together take at most [`HEADERS_MAX`] bytes.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }
}

/// What became of a publish.
///
/// It is true only once the transaction has committed.
pub enum Published<E: OutboxEvent> {
    /// A row was inserted.
    Inserted(EventId),
    /// An event of this name with the same dedup key is known already; nothing was inserted.
    Duplicate(Duplicate<E>),
    /// As a duplicate, but what was published with the key before is something else: nothing was
    /// inserted, and what became of the earlier event is no answer to this one.
    ///
    /// A client that sends another request under an old idempotency key is told so (the draft of
    /// the IETF on the `Idempotency-Key` header suggests 422). Told apart by a fingerprint of the
    /// payload, in which the order of fields does not count, and that of the items of an array does:
    /// a `HashSet` is written in another order each time, so a field of it makes every retry look
    /// like another payload, and a `BTreeSet` does not. Events of two versions of a type are not
    /// compared. A field that differs with every publish, such as the time, belongs in a header.
    KeyReused(Duplicate<E>),
}

impl<E: OutboxEvent> Clone for Published<E> {
    fn clone(&self) -> Self {
        match self {
            Self::Inserted(id) => Self::Inserted(*id),
            Self::Duplicate(duplicate) => Self::Duplicate(duplicate.clone()),
            Self::KeyReused(earlier) => Self::KeyReused(earlier.clone()),
        }
    }
}

impl<E: OutboxEvent> fmt::Debug for Published<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inserted(id) => f.debug_tuple("Inserted").field(id).finish(),
            Self::Duplicate(duplicate) => f.debug_tuple("Duplicate").field(duplicate).finish(),
            Self::KeyReused(earlier) => f.debug_tuple("KeyReused").field(earlier).finish(),
        }
    }
}

impl<E: OutboxEvent> Published<E> {
    /// The id of the inserted event, or of the one that was there already.
    #[must_use]
    pub fn event_id(&self) -> EventId {
        match self {
            Self::Inserted(id) => *id,
            Self::Duplicate(duplicate) | Self::KeyReused(duplicate) => duplicate.event_id,
        }
    }

    /// Whether a row was inserted.
    #[must_use]
    pub fn is_inserted(&self) -> bool {
        matches!(self, Self::Inserted(_))
    }

    /// The event that was there already, if there was one with the same payload.
    #[must_use]
    pub fn duplicate(&self) -> Option<&Duplicate<E>> {
        match self {
            Self::Inserted(_) | Self::KeyReused(_) => None,
            Self::Duplicate(duplicate) => Some(duplicate),
        }
    }

    /// The store's answer to the insertion of `row`.
    pub(crate) fn of(insertion: Insertion, row: &NewEvent) -> Self {
        let existing = match insertion {
            Insertion::Inserted(id) => return Self::Inserted(id),
            Insertion::Existing(existing) => existing,
        };
        let differs = row
            .fingerprint
            .zip(existing.fingerprint)
            .is_some_and(|(this, earlier)| this.differs_from(&earlier));
        let earlier = Duplicate::new(existing, row);
        if differs {
            Self::KeyReused(earlier)
        } else {
            Self::Duplicate(earlier)
        }
    }

    /// What is asked to learn what becomes of it.
    pub(crate) fn watched(&self) -> Watched {
        match self {
            Self::Inserted(id) => Watched {
                row: id.row(),
                key: None,
            },
            Self::Duplicate(earlier) | Self::KeyReused(earlier) => Watched {
                row: earlier.event_id.row(),
                key: earlier.key.clone().map(|key| (E::NAME.to_owned(), key)),
            },
        }
    }
}

/// Yields the id of an inserted event, and nothing for a duplicate: what
/// [`Outbox::dispatch`](crate::Outbox::dispatch) is to dispatch.
impl<E: OutboxEvent> IntoIterator for Published<E> {
    type Item = EventId;
    type IntoIter = std::option::IntoIter<EventId>;

    fn into_iter(self) -> Self::IntoIter {
        match self {
            Self::Inserted(id) => Some(id).into_iter(),
            Self::Duplicate(_) | Self::KeyReused(_) => None.into_iter(),
        }
    }
}

/// The event that holds a dedup key, as the publisher that came second is told of it.
pub struct Duplicate<E> {
    event_id: EventId,
    /// In its stored form.
    key: Option<String>,
    state: EventState,
    output: Option<String>,
    event: PhantomData<fn(E)>,
}

impl<E: OutboxEvent> Duplicate<E> {
    fn new(existing: Existing, row: &NewEvent) -> Self {
        Self {
            event_id: existing.id,
            key: row.dedup_key.clone(),
            state: existing.state,
            output: existing.output,
            event: PhantomData,
        }
    }

    /// Its id.
    #[must_use]
    pub fn event_id(&self) -> EventId {
        self.event_id
    }

    /// What has become of it so far.
    #[must_use]
    pub fn state(&self) -> EventState {
        self.state
    }

    /// What has become of it so far, with the output where it has been processed.
    ///
    /// [`Outbox::wait_for`](crate::Outbox::wait_for) waits for the end of it.
    ///
    /// # Errors
    ///
    /// As [`output`](Self::output).
    pub fn progress(&self) -> Result<Progress<E::Output>, OutputError> {
        Progress::of(self.state, self.output.as_deref())
    }

    /// What its handler returned.
    ///
    /// `None` until it is processed, and where the output was too large to be kept.
    ///
    /// # Errors
    ///
    /// Returns [`OutputError`] if what is stored is not an `E::Output`, because the type changed
    /// since. Outputs have no version: a release that changes `E::Output` has to read what the one
    /// before it wrote, or be ready for this error until the last of those keys is gone.
    pub fn output(&self) -> Result<Option<E::Output>, OutputError> {
        match self.progress()? {
            Progress::Processed(output) => Ok(output),
            _ => Ok(None),
        }
    }
}

impl<E> Clone for Duplicate<E> {
    fn clone(&self) -> Self {
        Self {
            event_id: self.event_id,
            key: self.key.clone(),
            state: self.state,
            output: self.output.clone(),
            event: PhantomData,
        }
    }
}

impl<E> fmt::Debug for Duplicate<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the output: what an application stores does not belong in its logs.
        f.debug_struct("Duplicate")
            .field("event_id", &self.event_id)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

/// Why an event could not be published.
///
/// All but [`Store`](Self::Store) are found before any SQL is sent: the caller's transaction can
/// still be used.
#[derive(Debug)]
#[non_exhaustive]
pub enum PublishError {
    /// The event could not be written as JSON.
    Unserializable {
        /// The event name.
        event: &'static str,
        /// What serde said.
        source: serde_json::Error,
    },
    /// The payload is over the outbox's limit.
    PayloadTooLarge {
        /// The event name.
        event: &'static str,
        /// Its size as JSON, in bytes.
        bytes: usize,
        /// The limit, in bytes.
        max: usize,
    },
    /// The payload contains U+0000, which the database's JSON functions cannot read.
    NulInPayload {
        /// The event name.
        event: &'static str,
    },
    /// The payload is nested deeper than [`DEPTH_MAX`]: no handler could read it back.
    PayloadTooDeep {
        /// The event name.
        event: &'static str,
    },
    /// A header's name is empty, a header contains U+0000, or all of them together are over
    /// [`HEADERS_MAX`].
    InvalidHeaders {
        /// The event name.
        event: &'static str,
    },
    /// A dedup or ordering key is empty: every event without a value would share it.
    EmptyKey {
        /// The event name.
        event: &'static str,
    },
    /// The delay is over [`DURATION_MAX`].
    DelayTooLong {
        /// The event name.
        event: &'static str,
        /// The delay asked for.
        delay: Duration,
    },
    /// The event expires no later than it is due, or over [`DURATION_MAX`] from now.
    InvalidExpiry {
        /// The event name.
        event: &'static str,
        /// How long from its publish it is worth handling.
        expires_in: Duration,
        /// How long from its publish it is not due.
        delay: Duration,
    },
    /// The event type asks for more attempts, or a longer retention, than can be stored.
    InvalidEvent {
        /// The event name.
        event: &'static str,
    },
    /// The database refused, or could not be reached. On PostgreSQL the caller's transaction is
    /// aborted.
    Store(StoreError),
}

impl PublishError {
    /// Whether running the whole transaction again may succeed: the database was unreachable, or
    /// a deadlock or a serialization failure aborted it.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_transient())
    }
}

impl fmt::Display for PublishError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unserializable { event, .. } => {
                write!(f, "event `{event}` cannot be written as JSON")
            }
            Self::PayloadTooLarge { event, bytes, max } => {
                write!(
                    f,
                    "the payload of event `{event}` has {bytes} bytes; the limit is {max}"
                )
            }
            Self::NulInPayload { event } => {
                write!(f, "the payload of event `{event}` contains U+0000")
            }
            Self::PayloadTooDeep { event } => write!(
                f,
                "the payload of event `{event}` is nested deeper than {DEPTH_MAX} levels"
            ),
            Self::InvalidHeaders { event } => write!(
                f,
                "the headers of event `{event}` have an empty name, contain U+0000, or are over {HEADERS_MAX} bytes"
            ),
            Self::EmptyKey { event } => write!(f, "event `{event}` has an empty key"),
            Self::DelayTooLong { event, delay } => {
                write!(
                    f,
                    "event `{event}` cannot be delayed by {delay:?}; the limit is {DURATION_MAX:?}"
                )
            }
            Self::InvalidExpiry {
                event,
                expires_in,
                delay,
            } => write!(
                f,
                "event `{event}` cannot expire in {expires_in:?}: it must be longer than its delay \
                 of {delay:?}, and at most {DURATION_MAX:?}"
            ),
            Self::InvalidEvent { event } => write!(
                f,
                "event `{event}` asks for more attempts or a longer retention than can be stored"
            ),
            Self::Store(error) => fmt::Display::fmt(error, f),
        }
    }
}

impl std::error::Error for PublishError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unserializable { source, .. } => Some(source),
            Self::Store(error) => error.source(),
            _ => None,
        }
    }
}

impl From<StoreError> for PublishError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// Checks an event and turns it into an unleased row.
pub(crate) fn prepare<E: OutboxEvent>(
    event: &E,
    options: &PublishOptions,
    settings: &Settings,
) -> Result<NewEvent, PublishError> {
    const { crate::event::assert_event_name::<E>() };
    let name = E::NAME;
    if options.delay > DURATION_MAX {
        return Err(PublishError::DelayTooLong {
            event: name,
            delay: options.delay,
        });
    }
    let max_attempts = E::MAX_ATTEMPTS.unwrap_or(settings.max_attempts);
    let retention = E::RETENTION.unwrap_or(settings.retention);
    if i32::try_from(max_attempts.get()).is_err()
        || i32::try_from(E::VERSION.get()).is_err()
        || retention > DURATION_MAX
    {
        return Err(PublishError::InvalidEvent { event: name });
    }
    let expires_in = options.expires_in.or(E::EXPIRES_IN);
    if let Some(expires_in) = expires_in
        && (expires_in <= options.delay || expires_in > DURATION_MAX)
    {
        return Err(PublishError::InvalidExpiry {
            event: name,
            expires_in,
            delay: options.delay,
        });
    }
    let payload = payload(event, settings.payload_max)?;
    let dedup_key = options.dedup_key.clone().or_else(|| event.dedup_key());
    let dedup_key = key(name, dedup_key)?;
    Ok(NewEvent {
        name,
        version: E::VERSION,
        fingerprint: dedup_key
            .is_some()
            .then(|| Fingerprint::of(E::VERSION, &payload)),
        payload,
        headers: headers(name, &options.headers)?,
        dedup_key,
        ordering_key: key(name, event.ordering_key())?,
        behind_dead: E::BEHIND_DEAD,
        priority: options.priority.unwrap_or(E::PRIORITY),
        max_attempts,
        delay: options.delay,
        expires_in,
        retention,
        key_retention: std::cmp::max(retention, settings.dedup_retention),
        lease: None,
    })
}

/// The event as JSON, if it can be stored.
pub(crate) fn payload<E: OutboxEvent>(event: &E, max: usize) -> Result<String, PublishError> {
    let json = serde_json::to_string(event).map_err(|source| PublishError::Unserializable {
        event: E::NAME,
        source,
    })?;
    if json.len() > max {
        return Err(PublishError::PayloadTooLarge {
            event: E::NAME,
            bytes: json.len(),
            max,
        });
    }
    if !is_readable(&json) {
        return Err(PublishError::PayloadTooDeep { event: E::NAME });
    }
    if contains_nul(&json) {
        return Err(PublishError::NulInPayload { event: E::NAME });
    }
    Ok(json)
}

/// Whether serde_json reads it back, and the databases take it: its depth is within
/// [`DEPTH_MAX`].
pub(crate) fn is_readable(json: &str) -> bool {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => {
                depth += 1;
                if depth > DEPTH_MAX {
                    return false;
                }
            }
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    true
}

/// Whether JSON text says U+0000: the escape `\u0000`, its backslash itself not escaped.
fn contains_nul(json: &str) -> bool {
    json.match_indices("\\u0000").any(|(at, _)| {
        let backslashes = json.as_bytes()[..at]
            .iter()
            .rev()
            .take_while(|byte| **byte == b'\\');
        backslashes.count() % 2 == 0
    })
}

fn headers(
    event: &'static str,
    headers: &BTreeMap<String, String>,
) -> Result<Option<String>, PublishError> {
    if headers.is_empty() {
        return Ok(None);
    }
    let invalid = headers
        .iter()
        .any(|(name, value)| name.is_empty() || name.contains('\0') || value.contains('\0'));
    let json = serde_json::to_string(headers)
        .map_err(|source| PublishError::Unserializable { event, source })?;
    if invalid || json.len() > HEADERS_MAX {
        return Err(PublishError::InvalidHeaders { event });
    }
    Ok(Some(json))
}

fn key(event: &'static str, key: Option<String>) -> Result<Option<String>, PublishError> {
    match key {
        Some(key) if key.is_empty() => Err(PublishError::EmptyKey { event }),
        key => Ok(key.map(stored_key)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_nul(value: &str, expected: bool) {
        let json = serde_json::to_string(value).unwrap();
        assert_eq!(contains_nul(&json), expected, "{json}");
    }

    #[test]
    fn what_is_nested_too_deeply_to_be_read_back_is_found() {
        let nested = |depth| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(is_readable(&nested(DEPTH_MAX)));
        assert!(serde_json::from_str::<serde_json::Value>(&nested(DEPTH_MAX)).is_ok());
        assert!(!is_readable(&nested(DEPTH_MAX + 1)));
        assert!(serde_json::from_str::<serde_json::Value>(&nested(DEPTH_MAX + 1)).is_err());
        // Brackets in strings, and side by side, are not nested.
        assert!(is_readable(
            &serde_json::to_string(&"[\\\"".repeat(300)).unwrap()
        ));
        assert!(is_readable(&format!("[{}[]]", "[],".repeat(300))));
    }

    #[test]
    fn nul_is_told_from_a_backslash_before_u0000() {
        check_nul("a\0b", true);
        check_nul("a\\\0b", true);
        check_nul("a\\u0000b", false);
        check_nul("a\\\\u0000b", false);
        check_nul("plain", false);
    }
}
