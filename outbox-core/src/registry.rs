//! From an event's name to its handler.
//!
//! Handlers are typed where they are written and erased here: a row holds a name and JSON, so what
//! is looked up by that name has to take JSON.

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::backoff::Backoff;
use crate::dispatch::Failure;
use crate::event::{OutboxEvent, assert_event_name};
use crate::handler::{Delivery, Handler, TransactionalHandler};
use crate::settings::Settings;
use crate::store::KnownEvent;

/// A handler that takes JSON.
#[async_trait]
pub(crate) trait ErasedHandler: Send + Sync {
    /// Decodes what was published in the version of `delivery`, handles, and encodes the output.
    async fn run(&self, payload: &str, delivery: &Delivery) -> Result<String, Failure>;
}

/// A handler that takes JSON and a connection.
#[async_trait]
pub(crate) trait ErasedTransactional<C: Send>: Send + Sync {
    /// Decodes, handles through `connection`, and encodes the output.
    async fn run(
        &self,
        payload: &str,
        connection: &mut C,
        delivery: &Delivery,
    ) -> Result<String, Failure>;
}

/// The handlers that take a connection of the type `C`, by the name of their event.
pub(crate) type Transactional<C> = HashMap<&'static str, Box<dyn ErasedTransactional<C>>>;

struct Typed<E, H> {
    handler: H,
    event: PhantomData<fn(E)>,
}

#[async_trait]
impl<C, E, H> ErasedTransactional<C> for Typed<E, H>
where
    C: Send,
    E: OutboxEvent,
    H: TransactionalHandler<C, E>,
{
    async fn run(
        &self,
        payload: &str,
        connection: &mut C,
        delivery: &Delivery,
    ) -> Result<String, Failure> {
        handle::<C, E, H>(&self.handler, payload, connection, delivery).await
    }
}

/// Decodes, handles through `connection`, and encodes the output.
pub(crate) async fn handle<C, E, H>(
    handler: &H,
    payload: &str,
    connection: &mut C,
    delivery: &Delivery,
) -> Result<String, Failure>
where
    E: OutboxEvent,
    H: TransactionalHandler<C, E>,
{
    let event = E::decode(delivery.version, payload).map_err(Failure::Undecodable)?;
    let handled = handler.handle(event, connection, delivery).await;
    serde_json::to_string(&handled.map_err(Failure::Handler)?).map_err(Failure::Output)
}

pub(crate) fn transactional<C, E, H>(handler: H) -> Box<dyn ErasedTransactional<C>>
where
    C: Send,
    E: OutboxEvent,
    H: TransactionalHandler<C, E> + 'static,
{
    Box::new(Typed {
        handler,
        event: PhantomData::<fn(E)>,
    })
}

/// What runs when an event is dispatched.
pub(crate) enum Runner {
    /// A handler with effects of its own.
    Plain(Box<dyn ErasedHandler>),
    /// One that writes through a transaction: it is in [`Transactional`].
    Transactional,
}

#[async_trait]
impl<E: OutboxEvent, H: Handler<E>> ErasedHandler for Typed<E, H> {
    async fn run(&self, payload: &str, delivery: &Delivery) -> Result<String, Failure> {
        let event = E::decode(delivery.version, payload).map_err(Failure::Undecodable)?;
        let output = self
            .handler
            .handle(event, delivery)
            .await
            .map_err(Failure::Handler)?;
        serde_json::to_string(&output).map_err(Failure::Output)
    }
}

/// A handler and how its event is dispatched.
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    pub(crate) event_type: &'static str,
    /// It reads this version and those before it.
    pub(crate) newest_version: NonZeroU32,
    pub(crate) runner: Runner,
    pub(crate) timeout: Duration,
    pub(crate) backoff: Backoff,
}

/// A handler as it was registered, before the outbox's own settings are known.
pub(crate) struct Registration {
    name: &'static str,
    aliases: &'static [&'static str],
    version: NonZeroU32,
    event_type: &'static str,
    runner: Runner,
    timeout: Option<Duration>,
    backoff: Option<Backoff>,
    retention: Option<Duration>,
}

impl Registration {
    pub(crate) fn new<E: OutboxEvent>(handler: impl Handler<E>) -> Self {
        Self::of::<E>(Runner::Plain(Box::new(Typed {
            handler,
            event: PhantomData::<fn(E)>,
        })))
    }

    pub(crate) fn of<E: OutboxEvent>(runner: Runner) -> Self {
        const { assert_event_name::<E>() };
        Self {
            name: E::NAME,
            aliases: E::ALIASES,
            version: E::VERSION,
            event_type: std::any::type_name::<E>(),
            runner,
            timeout: E::TIMEOUT,
            backoff: E::BACKOFF,
            retention: E::RETENTION,
        }
    }
}

/// All handlers of an outbox, by event name and by former names.
#[derive(Default)]
pub(crate) struct Registry {
    entries: HashMap<&'static str, Arc<Entry>>,
    known: Vec<KnownEvent>,
    longest_retention: Duration,
}

impl Registry {
    pub(crate) fn build(
        registrations: Vec<Registration>,
        settings: &Settings,
    ) -> Result<Self, BuildError> {
        let mut registry = Self::default();
        for registration in registrations {
            let entry = Entry {
                name: registration.name,
                event_type: registration.event_type,
                newest_version: registration.version,
                runner: registration.runner,
                timeout: registration.timeout.unwrap_or(settings.timeout),
                backoff: registration.backoff.unwrap_or(settings.backoff),
            };
            if entry.timeout > settings.lease {
                return Err(BuildError::LeaseShorterThanTimeout {
                    event: entry.name,
                    timeout: entry.timeout,
                    lease: settings.lease,
                });
            }
            registry.longest_retention = std::cmp::max(
                registry.longest_retention,
                registration.retention.unwrap_or_default(),
            );
            let entry = Arc::new(entry);
            registry.add(entry.name, &entry)?;
            for alias in registration.aliases {
                registry.add(alias, &entry)?;
            }
        }
        // A stable order, so that the same program sends the same statement parameters.
        registry.known.sort_unstable_by_key(|event| event.name);
        Ok(registry)
    }

    /// Adds one of the names of `entry`.
    fn add(&mut self, name: &'static str, entry: &Arc<Entry>) -> Result<(), BuildError> {
        if let Some(first) = self.entries.get(name) {
            return Err(taken(name, first, entry));
        }
        self.entries.insert(name, Arc::clone(entry));
        self.known.push(KnownEvent {
            name,
            newest_version: entry.newest_version,
        });
        Ok(())
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Arc<Entry>> {
        self.entries.get(name)
    }

    /// The longest retention that an event type with a handler here asks for.
    pub(crate) fn longest_retention(&self) -> Duration {
        self.longest_retention
    }

    /// The handler of this name, if it reads this version.
    pub(crate) fn reading(&self, name: &str, version: NonZeroU32) -> Option<&Arc<Entry>> {
        let entry = self.get(name)?;
        (version <= entry.newest_version).then_some(entry)
    }

    /// Every event name that has a handler, former names included, sorted.
    pub(crate) fn known(&self) -> &[KnownEvent] {
        &self.known
    }
}

/// The error for a name that `second` wants, and that is one of `first`'s.
fn taken(name: &'static str, first: &Arc<Entry>, second: &Arc<Entry>) -> BuildError {
    let is_own_name = name == first.name && name == second.name && !Arc::ptr_eq(first, second);
    let (first, second) = (first.event_type, second.event_type);
    if is_own_name {
        BuildError::DuplicateHandler {
            event: name,
            first,
            second,
        }
    } else {
        BuildError::AliasTaken {
            name,
            first,
            second,
        }
    }
}

/// Why an outbox could not be built.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum BuildError {
    /// Two handlers were registered for one event name.
    DuplicateHandler {
        /// The event name.
        event: &'static str,
        /// The Rust type of the event that came first.
        first: &'static str,
        /// The Rust type of the event that came second.
        second: &'static str,
    },
    /// An alias of an event is a name or an alias of another one, or of the same one a second time.
    AliasTaken {
        /// The name that both have.
        name: &'static str,
        /// The Rust type of the event that came first.
        first: &'static str,
        /// The Rust type of the event that came second.
        second: &'static str,
    },
    /// A handler may run longer than a lease lasts: if one renewal failed, another instance would
    /// run it at the same time.
    LeaseShorterThanTimeout {
        /// The event name.
        event: &'static str,
        /// How long its handler may run.
        timeout: Duration,
        /// How long a lease lasts.
        lease: Duration,
    },
    /// A count is zero, or above what it may be.
    InvalidCount {
        /// The setting.
        setting: &'static str,
        /// What it was set to.
        value: u32,
        /// The most it may be.
        max: u32,
    },
    /// A span is out of its bounds.
    InvalidDuration {
        /// The setting.
        setting: &'static str,
        /// What it was set to.
        value: Duration,
        /// The shortest it may be.
        min: Duration,
        /// The longest it may be.
        max: Duration,
    },
    /// The instance name is empty, longer than [`INSTANCE_MAX`](crate::settings::INSTANCE_MAX)
    /// bytes, or contains U+0000.
    InvalidInstance {
        /// What it was set to.
        instance: String,
    },
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DuplicateHandler {
                event,
                first,
                second,
            } if first == second => {
                write!(f, "event `{event}` already has a handler for `{first}`")
            }
            Self::DuplicateHandler {
                event,
                first,
                second,
            } => write!(
                f,
                "event `{event}` already has a handler for `{first}`, so `{second}` needs another name"
            ),
            Self::AliasTaken {
                name,
                first,
                second,
            } if first == second => write!(
                f,
                "`{first}` has the event name `{name}` twice; an alias is a former name, given once"
            ),
            Self::AliasTaken {
                name,
                first,
                second,
            } => write!(
                f,
                "both `{first}` and `{second}` have the event name `{name}`; an alias belongs to \
                 one event"
            ),
            Self::LeaseShorterThanTimeout {
                event,
                timeout,
                lease,
            } => write!(
                f,
                "the handler of `{event}` may run {timeout:?}, longer than the lease of {lease:?}: lower \
                 its `timeout`, or raise `lease`"
            ),
            Self::InvalidCount {
                setting,
                value,
                max,
            } => write!(
                f,
                "`{setting}` cannot be {value}: it must be from 1 to {max}"
            ),
            Self::InvalidDuration {
                setting,
                value,
                min,
                max,
            } => {
                write!(
                    f,
                    "`{setting}` cannot be {value:?}: it must be from {min:?} to {max:?}"
                )
            }
            Self::InvalidInstance { instance } => write!(
                f,
                "an instance name has 1 to {} bytes and no U+0000, unlike {instance:?}",
                crate::settings::INSTANCE_MAX
            ),
        }
    }
}

impl std::error::Error for BuildError {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HandlerError;
    use crate::settings::Draft;

    macro_rules! events {
        ($($event:ident: $name:literal, $timeout:expr, $aliases:expr;)+) => {$(
            #[derive(serde::Deserialize, serde::Serialize)]
            struct $event;

            impl OutboxEvent for $event {
                type Output = ();
                const NAME: &'static str = $name;
                const TIMEOUT: Option<Duration> = $timeout;
                const ALIASES: &'static [&'static str] = &$aliases;
            }
        )+};
    }

    events! {
        Placed: "order.placed", None, [];
        AlsoPlaced: "order.placed", None, [];
        Slow: "slow", Some(Duration::from_secs(61)), [];
        Renamed: "order.made", None, ["order.placed", "placed"];
        AlsoRenamed: "order.born", None, ["placed"];
        RenamedToItself: "order.same", None, ["order.same"];
        RenamedTwice: "order.twice", None, ["once", "once"];
    }

    fn registration<E: OutboxEvent<Output = ()>>() -> Registration {
        Registration::new::<E>(|_: E| async { Ok::<_, HandlerError>(()) })
    }

    #[track_caller]
    fn check_refused(registrations: Vec<Registration>, expected: &str) {
        let settings = Draft::default().check().unwrap();
        match Registry::build(registrations, &settings) {
            Ok(_) => panic!("built"),
            Err(error) => assert_eq!(error.to_string(), expected),
        }
    }

    #[test]
    fn one_name_has_one_handler_and_the_error_names_both_types() {
        check_refused(
            vec![registration::<Placed>(), registration::<AlsoPlaced>()],
            "event `order.placed` already has a handler for \
             `outbox_core::registry::tests::Placed`, so \
             `outbox_core::registry::tests::AlsoPlaced` needs another name",
        );
        check_refused(
            vec![registration::<Placed>(), registration::<Placed>()],
            "event `order.placed` already has a handler for \
             `outbox_core::registry::tests::Placed`",
        );
    }

    #[test]
    fn a_handler_may_not_run_longer_than_the_lease() {
        check_refused(
            vec![registration::<Slow>()],
            "the handler of `slow` may run 61s, longer than the lease of 60s: lower its `timeout`, or \
             raise `lease`",
        );
    }

    #[test]
    fn an_alias_belongs_to_one_event_and_the_error_names_both_types() {
        let taken = "both `outbox_core::registry::tests::Placed` and \
                     `outbox_core::registry::tests::Renamed` have the event name `order.placed`; \
                     an alias belongs to one event";
        check_refused(
            vec![registration::<Placed>(), registration::<Renamed>()],
            taken,
        );
        check_refused(
            vec![registration::<Renamed>(), registration::<Placed>()],
            "both `outbox_core::registry::tests::Renamed` and \
             `outbox_core::registry::tests::Placed` have the event name `order.placed`; \
             an alias belongs to one event",
        );
        check_refused(
            vec![registration::<Renamed>(), registration::<AlsoRenamed>()],
            "both `outbox_core::registry::tests::Renamed` and \
             `outbox_core::registry::tests::AlsoRenamed` have the event name `placed`; \
             an alias belongs to one event",
        );
    }

    #[test]
    fn an_alias_is_another_name_than_the_events_own_and_given_once() {
        check_refused(
            vec![registration::<RenamedToItself>()],
            "`outbox_core::registry::tests::RenamedToItself` has the event name `order.same` twice; \
             an alias is a former name, given once",
        );
        check_refused(
            vec![registration::<RenamedTwice>()],
            "`outbox_core::registry::tests::RenamedTwice` has the event name `once` twice; \
             an alias is a former name, given once",
        );
    }
}
