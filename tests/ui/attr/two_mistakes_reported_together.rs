use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(
    version = 0,
    priority = "urgent",
    backoff(base = "0s", jitter = 2),
    timeout = "1.5s"
)]
#[outbox(dedup_key = "{oder_id}", nmae = "order.paid")]
struct OrderPaid {
    #[outbox(order)]
    order_id: u64,
}

fn main() {}
