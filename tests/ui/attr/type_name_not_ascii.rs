use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct ZahlungBestätigt {
    order_id: u64,
}

fn main() {}
