//! From an event's name to its handler.
//!
//! Handlers are typed where they are written and erased here: a row holds a name and JSON, so what
//! is looked up by that name has to take JSON.

use std::borrow::Cow;
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
use crate::handler_options::{HandlerOptions, is_handler_name};
use crate::lane::{Lane, Room};
use crate::middleware::ErasedMiddleware;
use crate::settings::{CONCURRENCY_MAX, Settings};
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

/// One handler: the name of its event, and its own if it has one.
pub(crate) type HandlerKey = (&'static str, Option<&'static str>);

/// The handlers that take a connection of the type `C`.
pub(crate) type Transactional<C> = HashMap<HandlerKey, Box<dyn ErasedTransactional<C>>>;

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
    /// Its own name, which rows are split by. `None` for the only handler of its event.
    pub(crate) handler: Option<&'static str>,
    pub(crate) event_type: &'static str,
    /// It reads this version and those before it.
    pub(crate) newest_version: NonZeroU32,
    pub(crate) runner: Runner,
    pub(crate) timeout: Duration,
    pub(crate) backoff: Backoff,
    /// Its own limit of attempts. `None`: what is in the row.
    pub(crate) max_attempts: Option<NonZeroU32>,
    pub(crate) lane: Arc<Lane>,
}

impl Entry {
    pub(crate) fn key(&self) -> HandlerKey {
        (self.name, self.handler)
    }
}

/// All handlers of one event: at least one, the one whose output counts first.
pub(crate) struct EventHandlers {
    entries: Vec<Arc<Entry>>,
}

impl EventHandlers {
    pub(crate) fn all(&self) -> &[Arc<Entry>] {
        &self.entries
    }

    fn first(&self) -> &Arc<Entry> {
        &self.entries[0]
    }

    /// The only handler, if it has no name. Where handlers have names, each gets a row of its own
    /// before it runs.
    pub(crate) fn unnamed(&self) -> Option<&Arc<Entry>> {
        Some(self.first()).filter(|entry| entry.handler.is_none())
    }

    /// The handler that a row belongs to.
    pub(crate) fn of(&self, handler: Option<&str>) -> Option<&Arc<Entry>> {
        self.entries.iter().find(|entry| entry.handler == handler)
    }

    /// Whether an event can be started here now.
    pub(crate) fn have_room(&self) -> bool {
        self.entries
            .iter()
            .any(|entry| entry.lane.room() != Room::Only(0))
    }
}

/// A handler as it was registered, before the outbox's own settings are known.
pub(crate) struct Registration {
    name: &'static str,
    aliases: &'static [&'static str],
    version: NonZeroU32,
    event_type: &'static str,
    runner: Runner,
    retention: Option<Duration>,
    /// What the handler is told, or else its event type says.
    options: HandlerOptions,
}

impl Registration {
    pub(crate) fn new<E: OutboxEvent>(options: HandlerOptions, handler: impl Handler<E>) -> Self {
        let runner = Runner::Plain(Box::new(Typed {
            handler,
            event: PhantomData::<fn(E)>,
        }));
        Self::of::<E>(options, runner)
    }

    pub(crate) fn of<E: OutboxEvent>(mut options: HandlerOptions, runner: Runner) -> Self {
        const { assert_event_name::<E>() };
        options.timeout = options.timeout.or(E::TIMEOUT);
        options.backoff = options.backoff.or(E::BACKOFF);
        Self {
            name: E::NAME,
            aliases: E::ALIASES,
            version: E::VERSION,
            event_type: std::any::type_name::<E>(),
            runner,
            retention: E::RETENTION,
            options,
        }
    }

    fn into_entry(self, settings: &Settings) -> Result<Entry, BuildError> {
        let HandlerOptions {
            name: handler,
            timeout,
            backoff,
            max_attempts,
            concurrency,
            breaker,
            ..
        } = self.options;
        let event = self.name;
        if let Some(handler) = handler.filter(|handler| !is_handler_name(handler)) {
            return Err(BuildError::InvalidHandlerName { event, handler });
        }
        if handler.is_none() && max_attempts.is_some() {
            return Err(BuildError::AttemptsOfUnnamedHandler { event });
        }
        let timeout = timeout.unwrap_or(settings.timeout);
        if timeout > settings.lease {
            return Err(BuildError::LeaseShorterThanTimeout {
                event,
                timeout,
                lease: settings.lease,
            });
        }
        check_count("max_attempts", max_attempts, i32::MAX as u32)?;
        check_count("concurrency", concurrency, CONCURRENCY_MAX)?;
        if let Some(breaker) = breaker {
            check_count("circuit_breaker", Some(breaker.failures), u32::MAX)?;
            if breaker.open_for.is_zero() || breaker.open_for > DAY {
                return Err(BuildError::InvalidDuration {
                    setting: "circuit_breaker",
                    value: breaker.open_for,
                    min: Duration::from_millis(1),
                    max: DAY,
                });
            }
        }
        Ok(Entry {
            name: event,
            handler,
            event_type: self.event_type,
            newest_version: self.version,
            runner: self.runner,
            timeout,
            backoff: backoff.unwrap_or(settings.backoff),
            max_attempts: max_attempts.and_then(NonZeroU32::new),
            lane: Arc::new(Lane::new(
                (event, handler),
                concurrency.map(|runs| runs as usize),
                breaker,
            )),
        })
    }
}

fn check_count(setting: &'static str, value: Option<u32>, max: u32) -> Result<(), BuildError> {
    match value {
        Some(value) if value == 0 || value > max => Err(BuildError::InvalidCount {
            setting,
            value,
            max,
        }),
        _ => Ok(()),
    }
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// All handlers of an outbox, by event name and by former names.
#[derive(Default)]
pub(crate) struct Registry {
    events: HashMap<&'static str, Arc<EventHandlers>>,
    known: Vec<KnownEvent>,
    /// Whether any handler may at times have no room.
    has_lanes: bool,
    longest_retention: Duration,
    middleware: Vec<Arc<dyn ErasedMiddleware>>,
}

/// What can be claimed now.
pub(crate) struct Claimable<'a> {
    /// Rows of handlers without a limit of their own: as many as the process has room for.
    pub(crate) open: Cow<'a, [KnownEvent]>,
    /// Those of each handler with one.
    pub(crate) limited: Vec<Limited>,
}

/// What can be claimed for a handler with a limit of its own.
pub(crate) struct Limited {
    pub(crate) of: HandlerKey,
    /// Its rows, under every name of its event.
    pub(crate) events: Vec<KnownEvent>,
    pub(crate) room: usize,
    pub(crate) lane: Arc<Lane>,
}

/// An event while its handlers are collected.
struct Collected {
    aliases: &'static [&'static str],
    entries: Vec<Arc<Entry>>,
    has_primary: bool,
}

impl Registry {
    pub(crate) fn build(
        registrations: Vec<Registration>,
        middleware: Vec<Arc<dyn ErasedMiddleware>>,
        settings: &Settings,
    ) -> Result<Self, BuildError> {
        let mut registry = Self {
            middleware,
            ..Self::default()
        };
        let mut collected: Vec<Collected> = Vec::new();
        for registration in registrations {
            registry.longest_retention = std::cmp::max(
                registry.longest_retention,
                registration.retention.unwrap_or_default(),
            );
            let aliases = registration.aliases;
            let is_primary = registration.options.primary;
            let entry = Arc::new(registration.into_entry(settings)?);
            registry.has_lanes |= entry.lane.room() != Room::Any || entry.lane.has_breaker();
            match collected
                .iter_mut()
                .find(|event| event.entries[0].name == entry.name)
            {
                Some(event) => event.add(entry, is_primary)?,
                None => collected.push(Collected {
                    aliases,
                    entries: vec![entry],
                    has_primary: is_primary,
                }),
            }
        }
        for event in collected {
            let handlers = Arc::new(EventHandlers {
                entries: event.entries,
            });
            registry.add(handlers.first().name, &handlers)?;
            for alias in event.aliases {
                registry.add(alias, &handlers)?;
            }
        }
        // A stable order, so that the same program sends the same statement parameters.
        registry
            .known
            .sort_unstable_by_key(|event| (event.name, event.handler));
        Ok(registry)
    }

    /// Adds one of the names of an event.
    fn add(&mut self, name: &'static str, handlers: &Arc<EventHandlers>) -> Result<(), BuildError> {
        if let Some(first) = self.events.get(name) {
            return Err(taken(name, first.first(), handlers.first()));
        }
        self.events.insert(name, Arc::clone(handlers));
        let known = |handler| KnownEvent {
            name,
            handler,
            newest_version: handlers.first().newest_version,
        };
        self.known.push(known(None));
        let named = handlers.all().iter().filter_map(|entry| entry.handler);
        self.known.extend(named.map(|handler| known(Some(handler))));
        Ok(())
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Arc<EventHandlers>> {
        self.events.get(name)
    }

    /// The longest retention that an event type with a handler here asks for.
    pub(crate) fn longest_retention(&self) -> Duration {
        self.longest_retention
    }

    /// The handlers of this name, if they read this version.
    pub(crate) fn reading(&self, name: &str, version: NonZeroU32) -> Option<&Arc<EventHandlers>> {
        let handlers = self.get(name)?;
        (version <= handlers.first().newest_version).then_some(handlers)
    }

    /// Every event name that has a handler, former names included, with each of its handlers, sorted.
    pub(crate) fn known(&self) -> &[KnownEvent] {
        &self.known
    }

    /// What runs around each run, the outermost first.
    pub(crate) fn middleware(&self) -> &[Arc<dyn ErasedMiddleware>] {
        &self.middleware
    }

    /// The name of an event and its former names, where it is known here.
    pub(crate) fn names_of(&self, event: &str) -> Vec<String> {
        let Some(handlers) = self.get(event) else {
            return vec![event.to_owned()];
        };
        let same = |(_, other): &(_, &Arc<EventHandlers>)| Arc::ptr_eq(other, handlers);
        let mut names: Vec<String> = self
            .events
            .iter()
            .filter(same)
            .map(|(name, _)| (*name).to_owned())
            .collect();
        names.sort_unstable();
        names
    }

    /// What there is room for.
    pub(crate) fn claimable(&self) -> Claimable<'_> {
        if !self.has_lanes {
            return Claimable {
                open: Cow::Borrowed(&self.known),
                limited: Vec::new(),
            };
        }
        let mut open = Vec::new();
        let mut limited: Vec<Limited> = Vec::new();
        for known in &self.known {
            // What belongs to all of several handlers is split before any of them runs.
            let entry = self.get(known.name).and_then(|all| all.of(known.handler));
            let room = entry.map_or(Room::Any, |entry| entry.lane.room());
            match (entry, room) {
                (_, Room::Any) => open.push(*known),
                (None, _) | (_, Room::Only(0)) => {}
                (Some(entry), Room::Only(room)) => {
                    match limited.iter_mut().find(|of| of.of == entry.key()) {
                        Some(same) => same.events.push(*known),
                        None => limited.push(Limited {
                            of: entry.key(),
                            events: vec![*known],
                            room,
                            lane: Arc::clone(&entry.lane),
                        }),
                    }
                }
            }
        }
        Claimable {
            open: Cow::Owned(open),
            limited,
        }
    }
}

impl Collected {
    /// Adds a further handler of the event.
    fn add(&mut self, entry: Arc<Entry>, is_primary: bool) -> Result<(), BuildError> {
        let first = &self.entries[0];
        let event = entry.name;
        if first.event_type != entry.event_type {
            return Err(taken(event, first, &entry));
        }
        let Some(handler) = entry.handler.filter(|_| first.handler.is_some()) else {
            return Err(taken(event, first, &entry));
        };
        if self
            .entries
            .iter()
            .any(|other| other.handler == Some(handler))
        {
            return Err(BuildError::DuplicateHandlerName { event, handler });
        }
        if is_primary && self.has_primary {
            return Err(BuildError::TwoPrimaries { event });
        }
        self.has_primary |= is_primary;
        let place = if is_primary { 0 } else { self.entries.len() };
        self.entries.insert(place, entry);
        Ok(())
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
    /// Two handlers of one event have the same name.
    DuplicateHandlerName {
        /// The event name.
        event: &'static str,
        /// The handler name.
        handler: &'static str,
    },
    /// A handler's name is not 1 to
    /// [`HANDLER_NAME_MAX`](crate::HANDLER_NAME_MAX) bytes of `a-z`, `0-9`, `.`, `_` and `-`.
    InvalidHandlerName {
        /// The event name.
        event: &'static str,
        /// The handler name.
        handler: &'static str,
    },
    /// Two handlers of one event are both the primary one.
    TwoPrimaries {
        /// The event name.
        event: &'static str,
    },
    /// A handler without a name has a limit of attempts of its own: say it on the event type.
    AttemptsOfUnnamedHandler {
        /// The event name.
        event: &'static str,
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
                write!(
                    f,
                    "event `{event}` already has a handler for `{first}`; where there are several, \
                     each needs a name: register them with `.on_named(..)`"
                )
            }
            Self::DuplicateHandler {
                event,
                first,
                second,
            } => write!(
                f,
                "event `{event}` already has a handler for `{first}`, so `{second}` needs another name"
            ),
            Self::DuplicateHandlerName { event, handler } => {
                write!(
                    f,
                    "event `{event}` has two handlers of the name `{handler}`"
                )
            }
            Self::InvalidHandlerName { event, handler } => write!(
                f,
                "event `{event}` has a handler of the name {handler:?}; it must be 1 to {} bytes of \
                 `a-z`, `0-9`, `.`, `_` and `-`",
                crate::HANDLER_NAME_MAX
            ),
            Self::TwoPrimaries { event } => {
                write!(
                    f,
                    "event `{event}` has two primary handlers; only one output can be kept"
                )
            }
            Self::AttemptsOfUnnamedHandler { event } => write!(
                f,
                "the handler of `{event}` has `max_attempts` of its own but no name; give it one, or \
                 set `max_attempts` on the event type"
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
        named::<E>(HandlerOptions::new())
    }

    fn named<E: OutboxEvent<Output = ()>>(options: HandlerOptions) -> Registration {
        Registration::new::<E>(options, |_: E| async { Ok::<_, HandlerError>(()) })
    }

    #[track_caller]
    fn check_refused(registrations: Vec<Registration>, expected: &str) {
        let settings = Draft::default().check().unwrap();
        match Registry::build(registrations, Vec::new(), &settings) {
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
             `outbox_core::registry::tests::Placed`; where there are several, each needs a name: \
             register them with `.on_named(..)`",
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

    #[test]
    fn several_handlers_of_an_event_need_names_of_their_own() {
        let named = |name| named::<Placed>(HandlerOptions::named(name));
        check_refused(
            vec![named("email"), registration::<Placed>()],
            "event `order.placed` already has a handler for \
             `outbox_core::registry::tests::Placed`; where there are several, each needs a name: \
             register them with `.on_named(..)`",
        );
        check_refused(
            vec![named("email"), named("ledger"), named("email")],
            "event `order.placed` has two handlers of the name `email`",
        );
        check_refused(
            vec![named("E-Mail")],
            "event `order.placed` has a handler of the name \"E-Mail\"; it must be 1 to 64 bytes of \
             `a-z`, `0-9`, `.`, `_` and `-`",
        );
    }

    #[test]
    fn only_one_output_can_be_kept() {
        let primary = |name| named::<Placed>(HandlerOptions::named(name).primary());
        check_refused(
            vec![primary("email"), primary("ledger")],
            "event `order.placed` has two primary handlers; only one output can be kept",
        );
        let settings = Draft::default().check().unwrap();
        let registrations = vec![
            named::<Placed>(HandlerOptions::named("email")),
            primary("ledger"),
        ];
        let registry = Registry::build(registrations, Vec::new(), &settings).unwrap();
        let all = registry.get("order.placed").unwrap().all().iter();
        let names: Vec<_> = all.map(|entry| entry.handler.unwrap()).collect();
        assert_eq!(names, ["ledger", "email"], "the primary one comes first");
    }

    #[test]
    fn a_handlers_own_limits_are_checked() {
        let options = HandlerOptions::new;
        let check = |options, expected| check_refused(vec![named::<Placed>(options)], expected);
        check(
            options().concurrency(0),
            "`concurrency` cannot be 0: it must be from 1 to 10000",
        );
        check(
            options().max_attempts(3),
            "the handler of `order.placed` has `max_attempts` of its own but no name; give it one, \
             or set `max_attempts` on the event type",
        );
        check(
            HandlerOptions::named("email").max_attempts(0),
            "`max_attempts` cannot be 0: it must be from 1 to 2147483647",
        );
        check(
            options().circuit_breaker(crate::CircuitBreaker::after(0)),
            "`circuit_breaker` cannot be 0: it must be from 1 to 4294967295",
        );
    }

    #[test]
    fn what_has_a_limit_is_claimed_apart_and_what_has_no_room_is_not_claimed() {
        let settings = Draft::default().check().unwrap();
        let registrations = vec![
            named::<Placed>(HandlerOptions::named("email").concurrency(1)),
            named::<Placed>(HandlerOptions::named("ledger")),
        ];
        let registry = Registry::build(registrations, Vec::new(), &settings).unwrap();
        let handlers = |events: &[KnownEvent]| -> Vec<_> {
            events.iter().map(|event| event.handler).collect()
        };
        let claimable = registry.claimable();
        assert_eq!(handlers(&claimable.open), [None, Some("ledger")]);
        let [limited] = &claimable.limited[..] else {
            panic!("{} limited", claimable.limited.len());
        };
        assert_eq!(limited.of, ("order.placed", Some("email")));
        assert_eq!(
            (handlers(&limited.events), limited.room),
            (vec![Some("email")], 1)
        );

        let email = registry
            .get("order.placed")
            .unwrap()
            .of(Some("email"))
            .unwrap();
        let _entered = email.lane.enter().unwrap();
        assert!(registry.claimable().limited.is_empty());
    }
}
