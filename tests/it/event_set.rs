//! The example of a closed set of events, told to its end.

use crate::examples::{example, run, schemas};
use crate::support::PgDb;

#[tokio::test]
async fn the_events_of_a_set_are_handled_and_decoded_on_sqlite() {
    let lines = run(&mut example("event_set").await).await;
    assert_eq!(lines[0], "An outbox in a new SQLite file.");
    check(&lines);
}

#[tokio::test]
async fn the_events_of_a_set_are_handled_and_decoded_on_postgresql() {
    let db = PgDb::empty().await;
    let lines = run(example("event_set").await.env("DATABASE_URL", db.url())).await;
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
            "The set: order.paid, alert.raised.",
            "Two of its events are published and committed.",
            "A receipt is sent for order 7.",
            "Somebody is called: the courier does not answer.",
            "Row 1 is order.paid of order 7.",
            "Row 2 is alert.raised: the courier does not answer.",
            r#"Another event is none of them: no event of the set has the name "cache.warm"."#,
        ]
    );
}
