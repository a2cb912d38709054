//! What the derived impl says and does, against the real `outbox-core`.

use std::num::NonZeroU32;
use std::time::Duration;

use outbox_core::{
    Backoff, DURATION_MAX, DecodeError, EventSet, OutboxEvent, OutboxEvents, Priority,
};
use serde::{Deserialize, Serialize};

#[derive(Debug, Deserialize, OutboxEvent, PartialEq, Serialize)]
struct OrderPaid {
    order_id: u64,
}

#[test]
fn without_attributes_everything_is_left_to_the_defaults() {
    assert_eq!(OrderPaid::NAME, "order.paid");
    assert_eq!(OrderPaid::VERSION, NonZeroU32::MIN);
    assert_eq!(OrderPaid::PRIORITY, Priority::Normal);
    assert_eq!(OrderPaid::MAX_ATTEMPTS, None);
    assert_eq!(OrderPaid::BACKOFF, None);
    assert_eq!(OrderPaid::TIMEOUT, None);
    assert_eq!(OrderPaid::RETENTION, None);
    let event = OrderPaid { order_id: 7 };
    assert_eq!(event.dedup_key(), None);
    assert_eq!(event.ordering_key(), None);
    assert_eq!(event.order_id, 7);
}

/// The derive repeats two facts of core, to be able to point at literals. They must not part.
mod facts_written_twice {
    use super::*;

    #[derive(Deserialize, OutboxEvent, Serialize)]
    #[outbox(backoff(), retention = "36500d")]
    struct AtTheLimits;

    #[test]
    fn an_empty_backoff_is_the_default_of_core() {
        assert_eq!(AtTheLimits::BACKOFF, Some(Backoff::DEFAULT));
    }

    #[test]
    fn the_longest_duration_is_the_longest_of_core() {
        assert_eq!(AtTheLimits::RETENTION, Some(DURATION_MAX));
    }
}

mod bounds {
    use super::*;

    #[derive(Deserialize, OutboxEvent, Serialize)]
    #[outbox(
        version = 4294967295,
        oldest_version = 4294967295,
        max_attempts = 1,
        timeout = "1ms",
        retention = "0s"
    )]
    #[outbox(backoff(base = "30m", max = "30m", jitter = 0))]
    struct Extreme;

    #[test]
    fn the_bounds_themselves_are_accepted() {
        assert_eq!(Extreme::VERSION, NonZeroU32::MAX);
        assert_eq!(Extreme::MAX_ATTEMPTS, Some(NonZeroU32::MIN));
        assert_eq!(Extreme::TIMEOUT, Some(Duration::from_millis(1)));
        assert_eq!(Extreme::RETENTION, Some(Duration::ZERO));
        let half_an_hour = Duration::from_secs(1_800);
        let backoff = Backoff::new(half_an_hour, half_an_hour, 0.0);
        assert_eq!(Extreme::BACKOFF, Some(backoff.unwrap()));
    }

    /// 128 bytes, the longest name.
    #[derive(Deserialize, OutboxEvent, Serialize)]
    #[outbox(
        name = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
    )]
    struct LongestName;

    #[test]
    fn a_name_may_have_128_bytes() {
        assert_eq!(LongestName::NAME.len(), 128);
    }
}

mod levels {
    use super::*;

    macro_rules! check {
        ($($type:ident $level:literal $expected:ident)*) => {$(
            #[derive(Deserialize, OutboxEvent, Serialize)]
            #[outbox(priority = $level)]
            struct $type;

            assert_eq!($type::PRIORITY, Priority::$expected);
        )*};
    }

    #[test]
    fn every_level_has_its_word() {
        check! {
            Later "low" Low
            Sooner "normal" Normal
            Soon "high" High
            Now "critical" Critical
        }
    }
}

mod keys {
    use super::*;

    #[derive(Deserialize, OutboxEvent, Serialize)]
    #[outbox(dedup_key = "{a}::{b}", ordering_key = "<{a}>")]
    struct Pair {
        a: String,
        b: String,
    }

    #[track_caller]
    fn check(a: &str, b: &str, dedup: &str, ordering: &str) {
        let pair = Pair {
            a: a.to_owned(),
            b: b.to_owned(),
        };
        assert_eq!(pair.dedup_key().as_deref(), Some(dedup));
        assert_eq!(pair.ordering_key().as_deref(), Some(ordering));
    }

    #[test]
    fn a_field_is_escaped_against_the_text_that_ends_it() {
        check("a", "b", "a::b", "<a>");
        check("a:", "b", r"a\:::b", "<a:>");
        check("a", ":b", "a:::b", "<a>");
        check(r"a\>", "b", r"a\\>::b", r"<a\\\>>");
        check("", "", "::", "<>");
    }

    #[derive(Deserialize, OutboxEvent, Serialize)]
    struct Marked {
        #[outbox(ordering)]
        #[outbox(dedup)]
        second_in_the_alphabet: u8,
        unmarked: u8,
        #[outbox(dedup)]
        first_in_the_alphabet: u8,
    }

    #[test]
    fn marked_fields_are_joined_as_they_are_declared() {
        let marked = Marked {
            second_in_the_alphabet: 2,
            unmarked: 0,
            first_in_the_alphabet: 1,
        };
        assert_eq!(marked.dedup_key().as_deref(), Some("2:1"));
        assert_eq!(marked.ordering_key().as_deref(), Some("2"));
        assert_eq!(marked.unmarked, 0);
    }

    #[derive(Deserialize, OutboxEvent, Serialize)]
    #[outbox(dedup_key = "{order_id}")]
    enum OrderChanged {
        Paid { order_id: u64 },
        Cancelled { order_id: u64 },
    }

    #[test]
    fn the_variant_is_not_part_of_a_key() {
        let paid = OrderChanged::Paid { order_id: 7 }.dedup_key();
        let cancelled = OrderChanged::Cancelled { order_id: 7 }.dedup_key();
        assert_eq!(paid, cancelled);
    }
}

mod sets {
    use super::*;

    #[derive(Debug, Deserialize, OutboxEvent, PartialEq, Serialize)]
    #[outbox(name = "order.changed")]
    struct Changed<T: std::fmt::Debug>(T);

    #[derive(Debug, OutboxEvents, PartialEq)]
    enum ShopEvents {
        Paid(OrderPaid),
        OrderChanged(Changed<u8>),
    }

    #[test]
    fn names_stand_in_the_order_of_the_variants() {
        assert_eq!(ShopEvents::NAMES, ["order.paid", "order.changed"]);
    }

    #[test]
    fn each_member_is_made_a_value_and_found_by_its_name() {
        let paid = ShopEvents::from(OrderPaid { order_id: 7 });
        let changed = ShopEvents::from(Changed(1));
        assert_eq!(paid, ShopEvents::Paid(OrderPaid { order_id: 7 }));
        assert_eq!(paid.name(), "order.paid");
        assert_eq!(changed.name(), "order.changed");

        let decoded = ShopEvents::decode("order.paid", NonZeroU32::MIN, r#"{"order_id":7}"#);
        assert_eq!(decoded.unwrap(), paid);
        let decoded = ShopEvents::decode("order.changed", NonZeroU32::MIN, "1");
        assert_eq!(decoded.unwrap(), changed);
    }

    #[track_caller]
    fn check_refused(name: &str, payload: &str, expected: &str) -> DecodeError {
        let error = ShopEvents::decode(name, NonZeroU32::MIN, payload).expect_err(expected);
        assert_eq!(error.to_string(), expected);
        error
    }

    #[test]
    fn an_unknown_name_and_a_payload_that_does_not_fit_are_told_apart() {
        let unknown = check_refused("x", "1", r#"no event of the set has the name "x""#);
        assert!(matches!(unknown, DecodeError::UnknownName { name } if name == "x"));

        let text = "event `order.changed` cannot be decoded";
        let undecodable = check_refused("order.changed", "256", text);
        let source = std::error::Error::source(&undecodable).and_then(|error| error.source());
        let source = source.map(ToString::to_string);
        assert!(source.is_some_and(|source| source.contains("256")));
        assert!(matches!(
            undecodable,
            DecodeError::Undecodable {
                event: "order.changed",
                ..
            }
        ));
    }
}
