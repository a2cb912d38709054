//! One event: decode, call its handler, time it out, catch its panic, decide.
//!
//! A panic in a handler does not leave this module. What a result means is decided in one place,
//! [`decide`], from values to values.

use std::any::Any;
use std::num::NonZeroU32;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use tokio_util::sync::CancellationToken;

use crate::backoff::Backoff;
use crate::handler::{Delivery, HandlerError, Verdict};
use crate::outcome::{DeadReason, ErrorText, OUTPUT_MAX, Outcome};
use crate::publish::is_readable;
use crate::version::PayloadError;

/// Why a run did not succeed.
pub(crate) enum Failure {
    /// The payload is not what the event type reads.
    Undecodable(PayloadError),
    /// The handler returned an error.
    Handler(HandlerError),
    /// The handler's output cannot be written as JSON.
    Output(serde_json::Error),
    /// The handler panicked.
    Panicked(String),
    /// The handler overran its timeout.
    TimedOut(Duration),
}

impl Failure {
    /// The text that is stored and logged.
    pub(crate) fn text(&self) -> ErrorText {
        match self {
            Self::Undecodable(error) => ErrorText::of_chain(error),
            Self::Handler(error) => ErrorText::of_chain(error.as_error()),
            Self::Output(error) => ErrorText::new(&format_args!(
                "the handler's output cannot be encoded: {error}"
            )),
            Self::Panicked(text) => ErrorText::new(&format_args!("the handler panicked: {text}")),
            Self::TimedOut(limit) => ErrorText::new(&format_args!(
                "the handler overran its timeout of {limit:?}"
            )),
        }
    }
}

/// What a run came to, as values: nothing of the handler's own is left in it that could still
/// block or panic, in its `Display` or its `Drop`, when the outcome is on its way.
pub(crate) enum Finding {
    /// The handler succeeded, with this output as JSON.
    Done(String),
    /// It did not.
    Failed {
        /// What follows from it.
        cause: Cause,
        /// What is stored and logged.
        error: ErrorText,
    },
}

/// What follows from a failure.
#[derive(Clone, Copy)]
pub(crate) enum Cause {
    /// No attempt can read the payload.
    Undecodable,
    /// The same, and the application wants no such event kept.
    Discard,
    /// The handler has said what it asks for.
    Handler(Verdict),
    /// Everything else: another attempt after the backoff.
    Run,
}

impl From<Result<String, Failure>> for Finding {
    fn from(result: Result<String, Failure>) -> Self {
        match result {
            Ok(output) => Self::Done(output),
            Err(failure) => Self::Failed {
                cause: match &failure {
                    Failure::Undecodable(_) => Cause::Undecodable,
                    Failure::Handler(error) => Cause::Handler(error.verdict()),
                    Failure::Output(_) | Failure::Panicked(_) | Failure::TimedOut(_) => Cause::Run,
                },
                error: failure.text(),
            },
        }
    }
}

/// Runs a handler once: `handling` is its future, `timeout` how long it may take.
///
/// Returns `None` when `interrupt` fired before there was a result; the future of the handler has
/// been dropped then.
pub(crate) async fn run(
    handling: impl Future<Output = Result<String, Failure>>,
    timeout: Duration,
    delivery: &Delivery,
    interrupt: &CancellationToken,
) -> Option<Finding> {
    // The timeout is inside of what is caught, and so is the end of the handler's error, so that a
    // panic in the `Drop` of either is caught too.
    let bounded = async {
        let result = tokio::time::timeout(timeout, handling).await;
        result.unwrap_or_else(|_| Err(Failure::TimedOut(timeout)))
    };
    let caught = AssertUnwindSafe(async {
        tokio::select! {
            // A result that is there counts, even if the interruption came in the same moment.
            biased;
            result = bounded => Some(Finding::from(result)),
            () = interrupt.cancelled() => None,
        }
    })
    .catch_unwind()
    .await;
    // Whatever the handler has spawned hears that the run is over.
    delivery.cancelled.cancel();
    match caught {
        Ok(finding) => finding,
        Err(panic) => Some(Finding::from(Err(Failure::Panicked(panic_text(panic))))),
    }
}

/// What a result means for the event.
///
/// `sample` is a random number from `0.0..1.0` for the jitter.
pub(crate) fn decide(
    finding: Finding,
    attempt: NonZeroU32,
    max_attempts: NonZeroU32,
    backoff: &Backoff,
    sample: f64,
) -> Outcome {
    let (cause, error) = match finding {
        Finding::Done(output) => {
            return Outcome::Processed {
                output: output_to_keep(output),
            };
        }
        Finding::Failed { cause, error } => (cause, error),
    };
    let after = match cause {
        Cause::Undecodable => {
            let reason = DeadReason::Undecodable;
            return Outcome::Dead { reason, error };
        }
        Cause::Discard => return Outcome::Discarded { error },
        Cause::Handler(Verdict::Permanent) => {
            let reason = DeadReason::Permanent;
            return Outcome::Dead { reason, error };
        }
        Cause::Handler(Verdict::RetryAfter(delay)) => delay,
        Cause::Handler(Verdict::Retry) | Cause::Run => backoff.delay_after(attempt, sample),
    };
    if attempt >= max_attempts {
        let reason = DeadReason::AttemptsExhausted;
        return Outcome::Dead { reason, error };
    }
    Outcome::Retry { after, error }
}

/// `null` says nothing, and an output over a limit is not kept: its handler has succeeded, and
/// running it again would make the output neither smaller nor flatter.
fn output_to_keep(output: String) -> Option<String> {
    if output.len() > OUTPUT_MAX || !is_readable(&output) {
        tracing::error!(
            bytes = output.len(),
            max = OUTPUT_MAX,
            "a handler's output is too large or too deep to keep; the event is processed without it"
        );
        return None;
    }
    (output != "null").then_some(output)
}

/// The text a panic was given.
///
/// What it was given is forgotten instead of dropped: it is the handler's, and were its `Drop` to
/// panic, that would be outside of everything that catches.
pub(crate) fn panic_text(panic: Box<dyn Any + Send>) -> String {
    let text = if let Some(text) = panic.downcast_ref::<&'static str>() {
        (*text).to_owned()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "no text".to_owned()
    };
    std::mem::forget(panic);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[track_caller]
    fn check(result: Result<String, Failure>, attempt: u32, expected: &Outcome) {
        let backoff = Backoff::new(30 * SECOND, 1_800 * SECOND, 0.0).unwrap();
        let attempt = NonZeroU32::new(attempt).unwrap();
        let max = NonZeroU32::new(3).unwrap();
        assert_eq!(
            &decide(result.into(), attempt, max, &backoff, 0.0),
            expected
        );
    }

    fn retry(after: Duration, error: &str) -> Outcome {
        Outcome::Retry {
            after,
            error: ErrorText::new(&error),
        }
    }

    fn dead(reason: DeadReason, error: &str) -> Outcome {
        Outcome::Dead {
            reason,
            error: ErrorText::new(&error),
        }
    }

    fn failed(error: HandlerError) -> Result<String, Failure> {
        Err(Failure::Handler(error))
    }

    #[test]
    fn a_success_keeps_what_the_handler_returned() {
        check(
            Ok("7".to_owned()),
            1,
            &Outcome::Processed {
                output: Some("7".to_owned()),
            },
        );
        check(
            Ok("null".to_owned()),
            3,
            &Outcome::Processed { output: None },
        );
    }

    #[test]
    fn an_output_over_the_limit_is_left_out_and_the_event_is_processed() {
        check(
            Ok("7".repeat(OUTPUT_MAX + 1)),
            1,
            &Outcome::Processed { output: None },
        );
    }

    #[test]
    fn p8_a_failure_waits_30_s_then_60_s_and_the_last_is_dead() {
        check(
            failed(HandlerError::retry("down")),
            1,
            &retry(30 * SECOND, "down"),
        );
        check(
            failed(HandlerError::retry("down")),
            2,
            &retry(60 * SECOND, "down"),
        );
        check(
            failed(HandlerError::retry("down")),
            3,
            &dead(DeadReason::AttemptsExhausted, "down"),
        );
    }

    #[test]
    fn p8_a_handler_may_ask_for_its_own_delay_but_not_for_another_attempt() {
        check(
            failed(HandlerError::retry_after(7 * SECOND, "429")),
            2,
            &retry(7 * SECOND, "429"),
        );
        check(
            failed(HandlerError::retry_after(7 * SECOND, "429")),
            3,
            &dead(DeadReason::AttemptsExhausted, "429"),
        );
    }

    #[test]
    fn p8_a_permanent_failure_gives_up_at_once() {
        check(
            failed(HandlerError::permanent("no such user")),
            1,
            &dead(DeadReason::Permanent, "no such user"),
        );
    }

    #[test]
    fn p11_a_panic_and_an_overrun_are_failed_attempts() {
        check(
            Err(Failure::Panicked("boom".to_owned())),
            1,
            &retry(30 * SECOND, "the handler panicked: boom"),
        );
        check(
            Err(Failure::TimedOut(SECOND)),
            2,
            &retry(60 * SECOND, "the handler overran its timeout of 1s"),
        );
    }

    #[test]
    fn p12_a_payload_that_cannot_be_decoded_is_dead_at_once() {
        let version = NonZeroU32::MIN;
        let error = crate::version::read::<u32>(version, "\"x\"").unwrap_err();
        let text = "the payload of version 1 cannot be decoded: \
                    invalid type: string \"x\", expected u32 at line 1 column 3";
        check(
            Err(Failure::Undecodable(error)),
            1,
            &dead(DeadReason::Undecodable, text),
        );
    }
}
