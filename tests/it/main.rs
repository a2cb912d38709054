//! The workspace against real databases: what one crate alone cannot show.
//!
//! A bare `cargo test` starts a PostgreSQL server of its own if `DATABASE_URL` is not set.
//! `support` is the kit; everything else is named after what it is about, in reading order.

#[cfg(test)]
mod events;
#[cfg(test)]
mod support;

#[cfg(test)]
mod both;
#[cfg(test)]
mod connections;
#[cfg(test)]
mod contract;
#[cfg(test)]
mod crash;
#[cfg(test)]
mod in_memory;
#[cfg(test)]
mod postgres;
#[cfg(test)]
mod savepoints;
#[cfg(test)]
mod sqlite;
