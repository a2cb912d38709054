//! What tests need: a store in memory, and the contract that every store must keep.

mod memory;

pub use memory::{
    Hold, MemoryConnection, MemoryStore, MemoryTx, MemoryWakeups, Operation, Savepoint,
};
