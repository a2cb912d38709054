//! The store in memory keeps the contract of every store.

use std::time::Duration;

use outbox_core::testing::MemoryStore;
use outbox_core::testing::contract::Harness;

struct InMemory(MemoryStore);

impl Harness for InMemory {
    type Store = MemoryStore;

    fn store(&self) -> &MemoryStore {
        &self.0
    }

    async fn expire_lease(&self, row: i64) {
        self.0.expire_lease(row);
    }

    async fn make_due(&self, row: i64) {
        self.0.make_due(row);
    }

    async fn expire_retention(&self, row: i64) {
        self.0.expire_retention(row);
    }

    async fn set_lease(&self, row: i64, remaining: Duration) {
        self.0.set_lease(row, remaining);
    }

    async fn expire(&self, row: i64) {
        self.0.expire(row);
    }

    async fn age_dead_letter(&self, row: i64, age: Duration) {
        self.0.age_dead_letter(row, age);
    }
}

outbox_core::store_contract!(InMemory(MemoryStore::new()));
