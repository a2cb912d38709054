//! The crate under another name, and through a re-export.

extern crate outbox_core as renamed;

mod facade {
    pub use outbox_core as outbox;
}

use renamed::OutboxEvent;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(crate = ::renamed)]
struct Renamed;

#[derive(Serialize, Deserialize, facade::outbox::OutboxEvent)]
#[outbox(crate = crate::facade::outbox, dedup_key = "{0}", timeout = "1s")]
struct Reexported(u8);

fn main() {
    assert_eq!(Renamed::NAME, "renamed");
    assert_eq!(Reexported(1).dedup_key().as_deref(), Some("1"));
}
