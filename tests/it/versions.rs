//! The example of an event that changes, told to its end.

use crate::examples::{tells_on_postgresql, tells_on_sqlite};

/// What it says after its first line, on either database. Its header repeats it.
const STORY: [&str; 10] = [
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
];

#[tokio::test]
async fn rows_of_every_release_are_handled_on_sqlite() {
    tells_on_sqlite("versions", &STORY).await;
}

#[tokio::test]
async fn rows_of_every_release_are_handled_on_postgresql() {
    tells_on_postgresql("versions", &STORY).await;
}
