//! From the version that a row was written in to the type that there is now.
//!
//! Old rows outlive the release that wrote them. Each older version has a type that still reads it,
//! and from there a step leads to the type of the next one, up to the event itself. The derive
//! writes the way down in [`OutboxEvent::decode`]; here is what it is made of.

use std::error::Error;
use std::fmt;
use std::num::NonZeroU32;

use serde::de::DeserializeOwned;

use crate::event::OutboxEvent;

/// Why a stored payload could not be turned into its event.
#[derive(Debug)]
#[non_exhaustive]
pub enum PayloadError {
    /// It is not what the type of its version reads.
    Unreadable {
        /// The version in the row.
        version: NonZeroU32,
        /// What serde said.
        source: serde_json::Error,
    },
    /// It was read, and a step to a later version refused it.
    Refused {
        /// The version in the row.
        version: NonZeroU32,
        /// What the step said.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The event type does not read this version.
    UnknownVersion {
        /// The version in the row.
        version: NonZeroU32,
    },
}

impl fmt::Display for PayloadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { version, .. } => {
                write!(f, "the payload of version {version} cannot be decoded")
            }
            Self::Refused { version, .. } => write!(
                f,
                "the payload of version {version} cannot be brought to the current version"
            ),
            Self::UnknownVersion { version } => {
                write!(f, "the event type does not read version {version}")
            }
        }
    }
}

impl Error for PayloadError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Unreadable { source, .. } => Some(source),
            Self::Refused { source, .. } => Some(source.as_ref()),
            Self::UnknownVersion { .. } => None,
        }
    }
}

/// A step from the type of one version to that of the next.
///
/// `TryFrom` makes it, and so `From` does.
#[diagnostic::on_unimplemented(
    message = "no step leads from `{Self}` to `{Next}`",
    label = "what was written as `{Self}` cannot become `{Next}`",
    note = "write `impl From<{Self}> for {Next}`, or `TryFrom` with an error of your own where not \
            every payload fits"
)]
pub trait UpcastTo<Next> {
    /// Takes the step.
    ///
    /// # Errors
    ///
    /// Returns whatever `TryFrom` did.
    fn upcast(self) -> Result<Next, Box<dyn Error + Send + Sync>>;
}

#[diagnostic::do_not_recommend]
impl<T, Next> UpcastTo<Next> for T
where
    Next: TryFrom<T, Error: Into<Box<dyn Error + Send + Sync>>>,
{
    fn upcast(self) -> Result<Next, Box<dyn Error + Send + Sync>> {
        self.try_into().map_err(Into::into)
    }
}

/// Reads a payload as the type of its version.
///
/// # Errors
///
/// Returns [`PayloadError::Unreadable`] with what serde said.
pub fn read<T: DeserializeOwned>(version: NonZeroU32, payload: &str) -> Result<T, PayloadError> {
    serde_json::from_str(payload).map_err(|source| PayloadError::Unreadable { version, source })
}

/// Reads a payload of the event's own version, and of no other.
///
/// # Errors
///
/// Returns [`PayloadError::UnknownVersion`] for another one, and else as [`read`] does.
pub fn read_own<E: OutboxEvent>(version: NonZeroU32, payload: &str) -> Result<E, PayloadError> {
    if version != E::VERSION {
        return Err(PayloadError::UnknownVersion { version });
    }
    read(version, payload)
}

/// Takes one step, with a payload that was written in `version`.
///
/// # Errors
///
/// Returns [`PayloadError::Refused`] with what the step said.
pub fn upcast<T: UpcastTo<Next>, Next>(
    version: NonZeroU32,
    event: T,
) -> Result<Next, PayloadError> {
    let next = event.upcast();
    next.map_err(|source| PayloadError::Refused { version, source })
}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};

    use super::*;
    use crate::outcome::ErrorText;

    #[derive(Debug, PartialEq, Deserialize)]
    struct First {
        euros: i64,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Second {
        cents: i64,
    }

    impl TryFrom<First> for Second {
        type Error = &'static str;

        fn try_from(first: First) -> Result<Self, &'static str> {
            let cents = first.euros.checked_mul(100).ok_or("too many euros")?;
            Ok(Self { cents })
        }
    }

    impl OutboxEvent for Second {
        type Output = ();
        const NAME: &'static str = "second";
        const VERSION: NonZeroU32 = NonZeroU32::new(2).unwrap();

        fn decode(version: NonZeroU32, payload: &str) -> Result<Self, PayloadError> {
            match version.get() {
                1 => upcast::<First, _>(version, read(version, payload)?),
                _ => read_own(version, payload),
            }
        }
    }

    #[track_caller]
    fn check(version: u32, payload: &str, expected: Result<i64, &str>) {
        let read = Second::decode(NonZeroU32::new(version).unwrap(), payload);
        let read = read.map(|event| event.cents);
        let read = read.map_err(|error| ErrorText::of_chain(&error).to_string());
        assert_eq!(read.as_ref().copied().map_err(String::as_str), expected);
    }

    #[test]
    fn each_version_is_read_as_its_own_type() {
        check(1, r#"{"euros":7}"#, Ok(700));
        check(2, r#"{"cents":7}"#, Ok(7));
        check(
            3,
            r#"{"cents":7}"#,
            Err("the event type does not read version 3"),
        );
    }

    #[test]
    fn what_cannot_be_read_says_in_which_version_it_was_written() {
        check(
            1,
            r#"{"cents":7}"#,
            Err(
                "the payload of version 1 cannot be decoded: missing field `euros` at line 1 column 11",
            ),
        );
        check(
            2,
            r#"{"euros":7}"#,
            Err(
                "the payload of version 2 cannot be decoded: missing field `cents` at line 1 column 11",
            ),
        );
    }

    #[test]
    fn a_step_may_refuse() {
        check(
            1,
            r#"{"euros":9000000000000000000}"#,
            Err(
                "the payload of version 1 cannot be brought to the current version: too many euros",
            ),
        );
    }
}
