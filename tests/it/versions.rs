//! The example of an event that changes, told to its end.

use crate::examples::{example, run, schemas};
use crate::support::PgDb;

#[tokio::test]
async fn rows_of_every_release_are_handled_on_sqlite() {
    let lines = run(&mut example("versions").await).await;
    assert_eq!(lines[0], "An outbox in a new SQLite file.");
    check(&lines);
}

#[tokio::test]
async fn rows_of_every_release_are_handled_on_postgresql() {
    let db = PgDb::empty().await;
    let lines = run(example("versions").await.env("DATABASE_URL", db.url())).await;
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
            "Release 1 publishes order 1, of 42 euros, and that it was packed.",
            "Release 2 publishes order 2, of 1999 cents.",
            "Release 3 starts, and handles what they have left.",
            "  Order 1: 4200 cents in EUR, published in version 1 as order.paid.",
            "  Order 1 is packed, published in version 1 as order.packed.",
            "  Order 2: 1999 cents in EUR, published in version 2 as order.paid.",
            "Release 3 publishes order 3, of 500 cents in CHF, and is rolled back.",
            "Release 2 runs again, and leaves 1 event of order.paid alone: it is of version 3.",
            "Release 3 is back.",
            "  Order 3: 500 cents in CHF, published in version 3 as order.paid.",
        ]
    );
}
