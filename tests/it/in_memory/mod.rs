//! The framework over a store in memory, under paused time: what can be made to fail at will.

mod cadence;
mod dead_letter;
mod event_set;
mod exclusive;
mod fan_out;
mod hostile;
mod inline;
mod kit;
mod layers;
mod lease;
mod log;
mod middleware;
mod order;
mod relay;
mod settle;
mod shutdown;
mod transactional;
mod uncommitted;

use outbox_core::testing::MemoryStore;
use outbox_core::{Outbox, OutboxBuilder};

/// An outbox whose background follows the paused time of the test.
pub(crate) fn builder(store: &MemoryStore) -> OutboxBuilder<MemoryStore> {
    Outbox::builder(store.clone())
        .on_current_runtime()
        .instance("test")
}
