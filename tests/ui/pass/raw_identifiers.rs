//! Raw identifiers, in the type, in fields and in templates.

#![allow(non_camel_case_types)]

use outbox_core::{EventSet, OutboxEvent, OutboxEvents};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_key = "{type}:{move.match}:{order}:{gen}")]
struct r#try {
    r#type: u8,
    r#move: Move,
    // Raw without need.
    r#order: u8,
    r#gen: u8,
}

#[derive(Serialize, Deserialize)]
struct Move {
    r#match: u8,
}

#[derive(Serialize, Deserialize, OutboxEvent)]
#[outbox(dedup_key = "{in}")]
enum r#Changed<r#T> {
    r#Self_ { r#in: r#T },
}

#[derive(OutboxEvents)]
enum r#match {
    r#try(r#try),
    r#Changed(Changed<u8>),
}

fn main() {
    let event = r#try {
        r#type: 1,
        r#move: Move { r#match: 2 },
        order: 3,
        r#gen: 4,
    };
    assert_eq!(r#try::NAME, "try");
    assert_eq!(event.dedup_key().as_deref(), Some("1:2:3:4"));
    assert_eq!(Changed::<u8>::NAME, "changed");
    let changed = Changed::Self_ { r#in: 4 };
    assert_eq!(changed.dedup_key().as_deref(), Some("4"));
    assert_eq!(r#match::from(event).name(), "try");
    assert_eq!(r#match::NAMES, ["try", "changed"]);
}
