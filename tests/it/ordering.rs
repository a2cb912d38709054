//! The example of events in order, told to its end.

use crate::examples::{example, run, schemas};
use crate::support::PgDb;

#[tokio::test]
async fn a_key_waits_behind_its_dead_letter_on_sqlite() {
    let lines = run(&mut example("ordering").await).await;
    assert_eq!(lines[0], "An outbox in a new SQLite file.");
    check(&lines);
}

#[tokio::test]
async fn a_key_waits_behind_its_dead_letter_on_postgresql() {
    let db = PgDb::empty().await;
    let lines = run(example("ordering").await.env("DATABASE_URL", db.url())).await;
    assert_eq!(
        lines[0],
        "An outbox in a new schema of a PostgreSQL database."
    );
    check(&lines);
    assert_eq!(schemas(&db).await, ["public"]);
}

/// What it says on either database, which its header repeats.
#[track_caller]
fn check(lines: &[String]) {
    assert_eq!(
        lines[1..],
        [
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
        ]
    );
}
