//! The workspace against real databases: what one crate alone cannot show.
//!
//! A bare `cargo test` starts a PostgreSQL server of its own if `DATABASE_URL` is not set.
//! `support` is the kit; everything else is named after what it is about, in reading order.
//!
//! ```text
//! contract      the store contract on both databases
//! postgres      what only PostgreSQL has: plans, rights, HOT updates, isolation
//! sqlite        what only SQLite has
//! in_memory     the framework under paused time, over a store that fails on request
//! simulation    processes over that store which stop, freeze and lose answers anywhere
//! both          the promises as an application sees them, on both databases
//! savepoints    parts of transactions that are undone
//! connections   which connections are used, and for how long
//! faults        networks, servers and pools that fail
//! crash         processes that are killed and frozen
//! cleanup       a million settled rows, removed under load
//! operations    the runbook: its statements, and what it quotes
//! invariants    what must not be there
//! examples      the programs a newcomer runs first
//! event_set     the example of a closed set of events, told to its end
//! fan_out       the example of several handlers of one event, told to its end
//! ordering      the example of events in order, told to its end
//! versions      the example of an event that changes, told to its end
//! transactional the example of a handler whose writes commit with its event
//! slack_alerts  the example of alerts to a chat webhook, told to its end
//! order_paid    the example with a broker that goes away and comes back
//! ```

// Each is `cfg(test)`, which a test always is, because that is where clippy allows an `unwrap` in a
// function that is no test itself.
#[cfg(test)]
mod events;
#[cfg(test)]
mod support;

#[cfg(test)]
mod contract;

#[cfg(test)]
mod postgres;

#[cfg(test)]
mod sqlite;

#[cfg(test)]
mod in_memory;

#[cfg(test)]
mod simulation;

#[cfg(test)]
mod both;

#[cfg(test)]
mod savepoints;

#[cfg(test)]
mod connections;

#[cfg(test)]
mod faults;

#[cfg(test)]
mod crash;

#[cfg(test)]
mod cleanup;

#[cfg(test)]
mod operations;

#[cfg(test)]
mod invariants;

#[cfg(test)]
mod examples;

#[cfg(test)]
mod event_set;

#[cfg(test)]
mod fan_out;

#[cfg(test)]
mod ordering;

#[cfg(test)]
mod versions;

#[cfg(test)]
mod transactional;

#[cfg(test)]
mod slack_alerts;

#[cfg(test)]
mod order_paid;
