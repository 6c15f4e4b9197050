//! How a verb can fail, and the exit code that says so. Every other file returns a [`Failure`] and leaves it to `main`
//! to print it and to end the process.

use std::fmt;
use std::process::ExitCode;

use qd_protocol::FinishReason;
use qd_protocol::error::{ErrorBody, ErrorDoc};

/// What a verb gives back.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

/// The exit codes of the contract. Their order is that of their numbers, so that the worst of several is the greatest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Exit {
    /// Well.
    Well = 0,
    /// Something failed.
    Failed = 1,
    /// The command line makes no sense.
    Usage = 2,
    /// Nothing has this id.
    NotFound = 3,
    /// No daemon answers.
    Unreachable = 4,
    /// Over its time.
    TimedOut = 124,
    /// Cancelled, as after Ctrl-C.
    Cancelled = 130,
}

impl Exit {
    /// What the end of a run means for the process that waited for it.
    pub(crate) fn of(reason: FinishReason) -> Self {
        match reason {
            FinishReason::EndTurn => Self::Well,
            FinishReason::Cancelled => Self::Cancelled,
            FinishReason::Timeout => Self::TimedOut,
            FinishReason::Error
            | FinishReason::MaxTokens
            | FinishReason::MaxTurns
            | FinishReason::BudgetExceeded
            | FinishReason::Refused
            | FinishReason::Interrupted => Self::Failed,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why a verb did not do what it was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The caller should say it differently.
    Usage(String),
    /// Nothing has this id, prefix or title.
    NotFound(String),
    /// No daemon answers there.
    Unreachable(String),
    /// The daemon said no.
    Refused(Box<Refusal>),
    /// It did not happen in time.
    TimedOut(String),
    /// Stdout could not be written. A reader that has gone away is no failure.
    Output(std::io::Error),
    /// Anything else.
    Other(anyhow::Error),
}

/// A refusal as the daemon sent it.
#[derive(Debug, Clone)]
pub(crate) struct Refusal {
    /// The HTTP status.
    pub(crate) status: u16,
    /// Code, message and details.
    pub(crate) error: ErrorDoc,
}

impl Failure {
    /// The exit code that tells a script what happened.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Usage(_) => Exit::Usage,
            Self::NotFound(_) => Exit::NotFound,
            Self::Unreachable(_) => Exit::Unreachable,
            Self::TimedOut(_) => Exit::TimedOut,
            // Wrong usage is what the command line itself gives away; what only the daemon can know has failed.
            Self::Refused(refusal) if refusal.status == 404 => Exit::NotFound,
            Self::Refused(_) => Exit::Failed,
            Self::Output(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Exit::Well,
            Self::Output(_) | Self::Other(_) => Exit::Failed,
        }
    }

    /// The daemon's code, if it was the daemon that refused.
    pub(crate) fn code(&self) -> Option<&str> {
        match self {
            Self::Refused(refusal) => Some(&refusal.error.code),
            _ => None,
        }
    }

    /// The failure in the one shape that programs know: the daemon's own refusal, or ours dressed alike.
    pub(crate) fn body(&self) -> ErrorBody {
        let code = match self {
            Self::Refused(refusal) => return ErrorBody { error: refusal.error.clone() },
            Self::Usage(_) => "usage",
            Self::NotFound(_) => "not_found",
            Self::Unreachable(_) => "daemon_unreachable",
            Self::TimedOut(_) => "timed_out",
            Self::Output(_) => "output_failed",
            Self::Other(_) => "failed",
        };
        let details = serde_json::Map::new();
        ErrorBody { error: ErrorDoc { code: code.to_owned(), message: self.to_string(), details } }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(text) | Self::NotFound(text) | Self::Unreachable(text) | Self::TimedOut(text) => {
                f.write_str(text)
            }
            Self::Refused(refusal) => {
                f.write_str(&refusal.error.message)?;
                match refusal.error.details.get("install").and_then(|how| how.as_str()) {
                    Some(how) if !refusal.error.message.contains(how) => write!(f, " ({how})"),
                    _ => Ok(()),
                }
            }
            Self::Output(error) => write!(f, "stdout cannot be written: {error}"),
            Self::Other(error) => f.write_str(&whole(error)),
        }
    }
}

/// An error with its causes. Many say their cause themselves; it is not said again.
pub(crate) fn whole(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string).filter(|cause| !cause.is_empty()) {
        if text.ends_with(&cause) {
            continue;
        }
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&cause);
    }
    text
}

impl From<std::io::Error> for Failure {
    /// Only [`Output`](crate::output::Output) writes with `?`; other I/O says what it was about through `anyhow`.
    fn from(error: std::io::Error) -> Self {
        Self::Output(error)
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::Other(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(status: u16, code: &str) -> Failure {
        let error =
            ErrorDoc { code: code.to_owned(), message: "no".to_owned(), details: serde_json::Map::new() };
        Failure::Refused(Box::new(Refusal { status, error }))
    }

    #[test]
    fn each_failure_has_the_exit_code_of_the_contract() {
        assert_eq!(refused(404, "not_found").exit(), Exit::NotFound);
        assert_eq!(refused(400, "unknown_agent").exit(), Exit::Failed);
        assert_eq!(refused(409, "session_closed").exit(), Exit::Failed);
        assert_eq!(Failure::Unreachable(String::new()).exit(), Exit::Unreachable);
        assert_eq!(Exit::of(FinishReason::EndTurn), Exit::Well);
        assert_eq!(Exit::of(FinishReason::Timeout), Exit::TimedOut);
        assert_eq!(Exit::of(FinishReason::Cancelled), Exit::Cancelled);
        assert_eq!(Exit::of(FinishReason::Interrupted), Exit::Failed);
    }

    #[test]
    fn a_reader_that_went_away_is_no_failure() {
        assert_eq!(Failure::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe)).exit(), Exit::Well);
        assert_eq!(Failure::from(std::io::Error::from(std::io::ErrorKind::StorageFull)).exit(), Exit::Failed);
    }

    #[test]
    fn a_cause_that_was_said_is_not_said_again() {
        let cause = anyhow::anyhow!("the port is taken");
        let error = cause.context("failed to listen: the port is taken").context("[::1]:80");
        assert_eq!(whole(&error), "[::1]:80: failed to listen: the port is taken");
        assert_eq!(whole(&anyhow::anyhow!("a").context("b")), "b: a");
    }

    #[test]
    fn a_refusal_says_how_to_install_the_agent() {
        let Failure::Refused(mut refusal) = refused(409, "agent_unavailable") else { panic!("made above") };
        refusal.error.details.insert("install".to_owned(), "npm i -g x".into());
        assert_eq!(Failure::Refused(refusal).to_string(), "no (npm i -g x)");
    }
}
