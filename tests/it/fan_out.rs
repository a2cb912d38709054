//! The example of several handlers of one event, told to its end.

use crate::examples::{tells_on_postgresql, tells_on_sqlite};

/// What it says after its first line, on either database. Its header repeats it.
const STORY: [&str; 11] = [
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
];

#[tokio::test]
async fn each_handler_has_its_own_dead_letter_and_pause_on_sqlite() {
    tells_on_sqlite("fan_out", &STORY).await;
}

#[tokio::test]
async fn each_handler_has_its_own_dead_letter_and_pause_on_postgresql() {
    tells_on_postgresql("fan_out", &STORY).await;
}
