//! What tests need: a store in memory, and the contract that every store must keep.

pub mod contract;
mod memory;

pub use memory::{
    Hold, MemoryConnection, MemoryStore, MemoryTx, MemoryWakeups, Operation, Savepoint,
};
