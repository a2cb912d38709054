use outbox_core::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
struct Changed<#[outbox(name = "changed")] T> {
    after: T,
}

fn main() {}
