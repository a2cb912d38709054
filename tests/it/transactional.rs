//! The example of a transactional handler, told to its end.

use crate::examples::{example, run};

#[tokio::test]
async fn bookings_commit_with_their_events() {
    let lines = run(&mut example("transactional_handler").await).await;
    assert_eq!(
        lines,
        [
            "An outbox in a new SQLite file, and a table of revenue.",
            "Three orders of 10, 20 and 12 are paid.",
            "Order 2: booked in attempt 1, but the books are closed.",
            "Order 2: booked in attempt 2.",
            "The revenue is 42, in 3 bookings: what attempt 1 had booked of order 2 was undone.",
        ]
    );
}
