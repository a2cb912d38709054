//! The example of events in order, told to its end.

use crate::examples::{tells_on_postgresql, tells_on_sqlite};

/// What it says after its first line, on either database. Its header repeats it.
const STORY: [&str; 10] = [
    "Three steps of account 1 are published and committed.",
    "account 1: opened.",
    "account 1: 100 in? The ledger is locked.",
    "Blocked: account:1, by a dead letter (the ledger is locked); 1 event waits behind it.",
    "Another account goes on.",
    "account 2: opened.",
    "The ledger is open, and the dead letter is requeued.",
    "account 1: 100 in.",
    "account 1: 30 out.",
    "Nothing is blocked any more.",
];

#[tokio::test]
async fn a_key_waits_behind_its_dead_letter_on_sqlite() {
    tells_on_sqlite("ordering", &STORY).await;
}

#[tokio::test]
async fn a_key_waits_behind_its_dead_letter_on_postgresql() {
    tells_on_postgresql("ordering", &STORY).await;
}
