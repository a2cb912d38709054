use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
enum OrderChanged {
    Paid {
        #[outbox(dedup)]
        order_id: u64,
    },
}

fn main() {}
