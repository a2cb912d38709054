//! The example of a closed set of events, told to its end.

use crate::examples::{tells_on_postgresql, tells_on_sqlite};

/// What it says after its first line, on either database. Its header repeats it.
const STORY: [&str; 7] = [
    "The set: order.paid, alert.raised.",
    "Two of its events are published and committed.",
    "A receipt is sent for order 7.",
    "Somebody is called: the courier does not answer.",
    "Row 1 is order.paid of order 7.",
    "Row 2 is alert.raised: the courier does not answer.",
    r#"Another event is none of them: no event of the set has the name "cache.warm"."#,
];

#[tokio::test]
async fn the_events_of_a_set_are_handled_and_decoded_on_sqlite() {
    tells_on_sqlite("event_set", &STORY).await;
}

#[tokio::test]
async fn the_events_of_a_set_are_handled_and_decoded_on_postgresql() {
    tells_on_postgresql("event_set", &STORY).await;
}
