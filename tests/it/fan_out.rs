//! The example of several handlers of one event, told to its end.

use crate::examples::{example, run, schemas};
use crate::support::PgDb;

#[tokio::test]
async fn each_handler_has_its_own_dead_letter_and_pause_on_sqlite() {
    let lines = run(&mut example("fan_out").await).await;
    assert_eq!(lines[0], "An outbox in a new SQLite file.");
    check(&lines);
}

#[tokio::test]
async fn each_handler_has_its_own_dead_letter_and_pause_on_postgresql() {
    let db = PgDb::empty().await;
    let lines = run(example("fan_out").await.env("DATABASE_URL", db.url())).await;
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
            "Order 7 is paid, and one row is written.",
            "ledger: order 7 is booked.",
            "email: there is no address for order 7.",
            "A dead letter of the handler email. The ledger is done, and does not run again.",
            "The address is there now, and the dead letter is requeued.",
            "email: the receipt of order 7 is sent.",
            "The handler ledger is paused, on all instances.",
            "Order 8 is paid.",
            "email: the receipt of order 8 is sent.",
            "The ledger is resumed.",
            "ledger: order 8 is booked.",
        ]
    );
}
