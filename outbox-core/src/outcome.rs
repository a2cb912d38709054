//! What dispatch decided about one event, and the text that says why.

use std::fmt::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::str::FromStr;
use std::time::Duration;

/// The longest error text that is stored, in bytes.
pub const ERROR_TEXT_MAX: usize = 2_000;

/// The largest output that is stored, in bytes of JSON: 64 KiB.
pub const OUTPUT_MAX: usize = 64 * 1024;

/// What dispatch decided. A store writes it down and decides nothing.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// The handler succeeded. The event leaves the outbox.
    Processed {
        /// What the handler returned, as JSON of at most [`OUTPUT_MAX`] bytes. `None` where there
        /// is nothing to keep.
        output: Option<String>,
    },
    /// The attempt failed and another one follows.
    Retry {
        /// How long the event is not due, counted by the database from the settlement.
        after: Duration,
        /// What went wrong.
        error: ErrorText,
    },
    /// Nobody will try again unless a person asks.
    Dead {
        /// Why.
        reason: DeadReason,
        /// What went wrong last.
        error: ErrorText,
    },
    /// No handler was started, because the event was not worth handling any more. It is a dead
    /// letter for the reason [`Expired`](DeadReason::Expired); the attempt that its claim has
    /// charged is taken back, and no failure is recorded.
    Expired,
    /// The event leaves the outbox and nothing of it is kept, because the application has said so:
    /// its payload cannot be decoded. Its dedup key is kept, for its retention, as that of a
    /// discarded event.
    Discarded {
        /// What went wrong. Logged, not stored.
        error: ErrorText,
    },
}

/// Why an event is a dead letter.
///
/// The text form is stored with the row and is part of the public contract: operators query it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum DeadReason {
    /// Its last attempt failed. Stored as `attempts_exhausted`.
    AttemptsExhausted,
    /// The handler said that no attempt can succeed. Stored as `permanent`.
    Permanent,
    /// The stored payload is not what the event type reads. Stored as `undecodable`.
    Undecodable,
    /// The lease of its last attempt ended without an outcome: whoever held it died, was frozen,
    /// or could not reach the database. Stored as `lease_expired`.
    LeaseExpired,
    /// It was not handled before the deadline it was published with, and no handler was started
    /// after that. Stored as `expired`.
    Expired,
}

/// The last error of an event that expired.
pub const EXPIRED: &str = "not handled before its deadline";

impl DeadReason {
    /// The stored text.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AttemptsExhausted => "attempts_exhausted",
            Self::Permanent => "permanent",
            Self::Undecodable => "undecodable",
            Self::LeaseExpired => "lease_expired",
            Self::Expired => "expired",
        }
    }
}

impl fmt::Display for DeadReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for DeadReason {
    type Err = UnknownDeadReason;

    fn from_str(text: &str) -> Result<Self, UnknownDeadReason> {
        [
            Self::AttemptsExhausted,
            Self::Permanent,
            Self::Undecodable,
            Self::LeaseExpired,
            Self::Expired,
        ]
        .into_iter()
        .find(|reason| reason.as_str() == text)
        .ok_or(UnknownDeadReason)
    }
}

/// A text that is no [`DeadReason`] this release knows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct UnknownDeadReason;

impl fmt::Display for UnknownDeadReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a reason this release knows")
    }
}

impl std::error::Error for UnknownDeadReason {}

/// An error as it is stored: at most [`ERROR_TEXT_MAX`] bytes, without U+0000.
///
/// PostgreSQL's `text` refuses U+0000. A failure whose text the database refuses could never be
/// recorded, and its event would stay claimed; so the text is cleaned before any SQL is sent, and
/// cut at a character, with a mark that says so.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct ErrorText(String);

impl ErrorText {
    /// Takes the text of `error`.
    ///
    /// Only as much is formatted as is kept. A `Display` that panics gives a text that says so.
    #[must_use]
    pub fn new(error: &dyn fmt::Display) -> Self {
        let mut text = Bounded::default();
        // The error is the handler's; its `Display` may do anything, and recording the failure
        // must not depend on it.
        let shown = catch_unwind(AssertUnwindSafe(|| write!(text, "{error}")));
        if let Err(panic) = shown {
            // Its `Drop` may panic, too.
            std::mem::forget(panic);
            text = Bounded::default();
            text.push("the error could not be shown: its Display panicked");
        }
        Self(text.finish())
    }

    /// Takes `error` and every error that it says it came from, joined by `: `.
    #[must_use]
    pub fn of_chain(error: &(dyn std::error::Error + 'static)) -> Self {
        Self::new(&Chain(error))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ErrorText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

struct Chain<'a>(&'a (dyn std::error::Error + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            write!(f, ": {error}")?;
            source = error.source();
        }
        Ok(())
    }
}

const CUT: &str = "… (cut)";

#[derive(Default)]
struct Bounded {
    text: String,
    cut: bool,
}

impl Bounded {
    fn push(&mut self, text: &str) {
        for c in text.chars() {
            let c = if c == '\0' {
                char::REPLACEMENT_CHARACTER
            } else {
                c
            };
            if self.text.len() + c.len_utf8() > ERROR_TEXT_MAX - CUT.len() {
                self.cut = true;
                return;
            }
            self.text.push(c);
        }
    }

    fn finish(mut self) -> String {
        if self.cut {
            self.text.push_str(CUT);
        }
        self.text
    }
}

impl fmt::Write for Bounded {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text);
        // An error stops the formatting, so that a text of 10 MB is not walked to its end.
        if self.cut { Err(fmt::Error) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_with_nul_can_be_stored() {
        assert_eq!(ErrorText::new(&"boom\0tail").as_str(), "boom\u{fffd}tail");
    }

    #[test]
    fn a_long_text_is_cut_at_a_character() {
        let text = ErrorText::new(&"ä".repeat(5_000_000));
        assert!(text.as_str().len() <= ERROR_TEXT_MAX);
        assert!(text.as_str().ends_with(CUT));
        assert!(text.as_str().starts_with("ää"));
    }

    #[test]
    fn a_display_that_panics_still_gives_a_text() {
        struct Broken;
        impl fmt::Display for Broken {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("half")?;
                panic!("in Display")
            }
        }
        assert_eq!(
            ErrorText::new(&Broken).as_str(),
            "the error could not be shown: its Display panicked"
        );
    }

    #[test]
    fn a_chain_names_every_source() {
        let inner = std::io::Error::other("inner");
        let outer = std::io::Error::other(inner);
        assert_eq!(ErrorText::of_chain(&outer).as_str(), "inner");
    }

    #[test]
    fn dead_reasons_survive_their_text_form() {
        for reason in [
            "attempts_exhausted",
            "permanent",
            "undecodable",
            "lease_expired",
            "expired",
        ] {
            assert_eq!(
                reason.parse::<DeadReason>().map(DeadReason::as_str),
                Ok(reason)
            );
        }
        assert_eq!("bored".parse::<DeadReason>(), Err(UnknownDeadReason));
    }
}
