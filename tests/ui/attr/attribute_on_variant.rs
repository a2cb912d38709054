use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
enum OrderChanged {
    #[outbox(name = "order.paid")]
    Paid {
        order_id: u64,
    },
    Cancelled {
        order_id: u64,
    },
}

fn main() {}
