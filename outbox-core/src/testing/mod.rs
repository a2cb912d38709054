//! What tests need: a store in memory and the contract every store must keep.
