//! From an event's name to its handler.
//!
//! Handlers are typed where they are written and erased here: a row holds a name and JSON, so what
//! is looked up by that name has to take JSON.

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::backoff::Backoff;
use crate::dispatch::Failure;
use crate::event::{OutboxEvent, assert_event_name};
use crate::handler::{Delivery, Handler};
use crate::settings::Settings;

/// A handler that takes JSON.
#[async_trait]
pub(crate) trait ErasedHandler: Send + Sync {
    /// Decodes, handles, and encodes the output.
    async fn run(&self, payload: &str, delivery: &Delivery) -> Result<String, Failure>;
}

struct Typed<E, H> {
    handler: H,
    event: PhantomData<fn(E)>,
}

#[async_trait]
impl<E: OutboxEvent, H: Handler<E>> ErasedHandler for Typed<E, H> {
    async fn run(&self, payload: &str, delivery: &Delivery) -> Result<String, Failure> {
        let event: E = serde_json::from_str(payload).map_err(Failure::Undecodable)?;
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
    pub(crate) handler: Box<dyn ErasedHandler>,
    pub(crate) timeout: Duration,
    pub(crate) backoff: Backoff,
}

/// A handler as it was registered, before the outbox's own settings are known.
pub(crate) struct Registration {
    name: &'static str,
    event_type: &'static str,
    handler: Box<dyn ErasedHandler>,
    timeout: Option<Duration>,
    backoff: Option<Backoff>,
    retention: Option<Duration>,
}

impl Registration {
    pub(crate) fn new<E: OutboxEvent>(handler: impl Handler<E>) -> Self {
        const { assert_event_name::<E>() };
        Self {
            name: E::NAME,
            event_type: std::any::type_name::<E>(),
            handler: Box::new(Typed {
                handler,
                event: PhantomData::<fn(E)>,
            }),
            timeout: E::TIMEOUT,
            backoff: E::BACKOFF,
            retention: E::RETENTION,
        }
    }
}

/// All handlers of an outbox, by event name.
#[derive(Default)]
pub(crate) struct Registry {
    entries: HashMap<&'static str, Arc<Entry>>,
    names: Vec<&'static str>,
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
                handler: registration.handler,
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
            if let Some(first) = registry.entries.get(entry.name) {
                return Err(BuildError::DuplicateHandler {
                    event: entry.name,
                    first: first.event_type,
                    second: entry.event_type,
                });
            }
            registry.longest_retention = std::cmp::max(
                registry.longest_retention,
                registration.retention.unwrap_or_default(),
            );
            registry.names.push(entry.name);
            registry.entries.insert(entry.name, Arc::new(entry));
        }
        // A stable order, so that the same program sends the same statement parameters.
        registry.names.sort_unstable();
        Ok(registry)
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Arc<Entry>> {
        self.entries.get(name)
    }

    /// The longest retention that an event type with a handler here asks for.
    pub(crate) fn longest_retention(&self) -> Duration {
        self.longest_retention
    }

    /// Every event name that has a handler, sorted.
    pub(crate) fn names(&self) -> &[&'static str] {
        &self.names
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
            Self::LeaseShorterThanTimeout {
                event,
                timeout,
                lease,
            } => write!(
                f,
                "the handler of `{event}` may run {timeout:?}, longer than the lease of {lease:?}"
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
        ($($event:ident: $name:literal, $timeout:expr;)+) => {$(
            #[derive(serde::Deserialize, serde::Serialize)]
            struct $event;

            impl OutboxEvent for $event {
                type Output = ();
                const NAME: &'static str = $name;
                const TIMEOUT: Option<Duration> = $timeout;
            }
        )+};
    }

    events! {
        Placed: "order.placed", None;
        AlsoPlaced: "order.placed", None;
        Slow: "slow", Some(Duration::from_secs(61));
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
            "the handler of `slow` may run 61s, longer than the lease of 60s",
        );
    }
}
