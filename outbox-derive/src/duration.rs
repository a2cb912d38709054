//! Durations: an integer and a unit, in quotes.

use std::time::Duration;

use proc_macro2::Span;
use syn::LitStr;

/// A duration and the literal it was read from, so that a later check can point at it.
#[derive(Clone)]
pub(crate) struct DurationLit {
    pub(crate) value: Duration,
    pub(crate) text: String,
    pub(crate) span: Span,
}

impl DurationLit {
    /// Reads `30s` and the like.
    pub(crate) fn parse(literal: &LitStr) -> syn::Result<Self> {
        let text = literal.value();
        match parse(&text) {
            Ok(value) => Ok(Self {
                value,
                text,
                span: literal.span(),
            }),
            Err(problem) => Err(syn::Error::new(literal.span(), problem)),
        }
    }
}

fn parse(text: &str) -> Result<Duration, String> {
    let shown = text.escape_debug();
    let unit_at = text.find(|c: char| !c.is_ascii_digit());
    let (number, unit) = text.split_at(unit_at.unwrap_or(text.len()));
    if number.is_empty() {
        return Err(format!(
            "`{shown}` is not a duration; write an integer and a unit, such as `30s`"
        ));
    }
    let unit_in_millis = match unit {
        "ms" => 1,
        "s" => SECOND,
        "m" => 60 * SECOND,
        "h" => 60 * 60 * SECOND,
        "d" => DAY,
        "" => return Err(format!("`{shown}` has no unit; the units are {UNITS}")),
        _ if unit.starts_with('.') => {
            return Err(format!(
                "`{shown}` is not a whole number of its unit; use a smaller one, \
                 such as `1500ms` for 1.5 seconds"
            ));
        }
        _ => {
            return Err(format!(
                "unknown unit `{}` in `{shown}`; the units are {UNITS}",
                unit.escape_debug()
            ));
        }
    };
    number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(unit_in_millis))
        .filter(|&millis| millis <= LIMIT_IN_MILLIS)
        .map(Duration::from_millis)
        .ok_or_else(|| format!("`{shown}` is over the limit of 100 years (`36500d`)"))
}

const SECOND: u64 = 1_000;
const DAY: u64 = 24 * 60 * 60 * SECOND;
const UNITS: &str = "`ms`, `s`, `m`, `h` and `d`";

/// Core's `DURATION_MAX`. It is written a second time because only here can the message point at
/// the literal beside all the others; `tests/derive.rs` compares the two.
const LIMIT_IN_MILLIS: u64 = 100 * 365 * DAY;

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Duration) {
        assert_eq!(parse(text), Ok(expected), "{text:?}");
    }

    #[track_caller]
    fn check_refused(text: &str, problem: &str) {
        let error = parse(text).unwrap_err();
        assert!(error.contains(problem), "{text:?}: {error}");
    }

    #[test]
    fn an_integer_and_a_unit_make_a_duration() {
        check("0s", Duration::ZERO);
        check("250ms", Duration::from_millis(250));
        check("30s", Duration::from_secs(30));
        check("30m", Duration::from_secs(1_800));
        check("2h", Duration::from_secs(7_200));
        check("7d", Duration::from_secs(604_800));
        check("36500d", Duration::from_secs(3_153_600_000));
    }

    #[test]
    fn anything_else_is_refused_with_what_to_write() {
        check_refused("", "not a duration");
        check_refused("s", "not a duration");
        check_refused("-1s", "not a duration");
        check_refused("30", "has no unit");
        check_refused("1.5s", "whole number");
        check_refused("30 s", "unknown unit ` s`");
        check_refused("30sec", "unknown unit `sec`");
        check_refused("5M", "unknown unit `M`");
        check_refused("1h30m", "unknown unit `h30m`");
    }

    #[test]
    fn too_long_is_refused_however_long() {
        check_refused("36501d", "100 years");
        check_refused("18446744073709551615d", "100 years");
        check_refused("99999999999999999999999999ms", "100 years");
    }
}
