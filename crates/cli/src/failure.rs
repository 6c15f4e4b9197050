//! How a verb can fail, and the exit code of each failure. All other files return a [`CliFailure`]; only `main` prints
//! it and ends the process.

use std::fmt;
use std::process::ExitCode;

use qd_protocol::FinishReason;
use qd_protocol::error::{ErrorBody, ErrorDoc};

/// The result of a verb.
pub(crate) type Result<T, E = CliFailure> = std::result::Result<T, E>;

/// The documented exit codes, ordered by number, so the worst of several is the maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CliExitCode {
    Success = 0,
    Failed = 1,
    /// The command line is not valid.
    Usage = 2,
    /// Nothing has this id or title.
    NotFound = 3,
    /// No daemon answers.
    Unreachable = 4,
    /// As with `timeout(1)`.
    TimedOut = 124,
    /// As after SIGINT in a shell.
    Cancelled = 130,
}

impl CliExitCode {
    /// The exit code of a process that waited for a run with this finish reason.
    pub(crate) fn from_finish_reason(reason: FinishReason) -> Self {
        match reason {
            FinishReason::EndTurn => Self::Success,
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

impl From<CliExitCode> for ExitCode {
    fn from(exit: CliExitCode) -> Self {
        Self::from(exit as u8)
    }
}

/// Why a verb failed.
#[derive(Debug)]
pub(crate) enum CliFailure {
    /// The command line or an environment variable is wrong.
    Usage(String),
    /// Nothing has this id, prefix or title.
    NotFound(String),
    /// No daemon answers at the address.
    Unreachable(String),
    /// There is a daemon, but it gives no sign of life. Another one cannot be started beside it.
    Unresponsive(String),
    /// The daemon answered with an error.
    Refused(Box<DaemonRefusal>),
    TimedOut(String),
    /// Stdout could not be written. A broken pipe counts as success.
    Output(std::io::Error),
    Other(anyhow::Error),
}

/// An error response of the daemon.
#[derive(Debug, Clone)]
pub(crate) struct DaemonRefusal {
    /// The HTTP status.
    pub(crate) status: u16,
    pub(crate) error: ErrorDoc,
}

impl CliFailure {
    /// The exit code that tells a script what happened.
    pub(crate) fn exit_code(&self) -> CliExitCode {
        match self {
            Self::Usage(_) => CliExitCode::Usage,
            Self::NotFound(_) => CliExitCode::NotFound,
            Self::Unreachable(_) | Self::Unresponsive(_) => CliExitCode::Unreachable,
            Self::TimedOut(_) => CliExitCode::TimedOut,
            // `Usage` is for errors visible in the command line itself. A refusal by the daemon is a failure.
            Self::Refused(refusal) if refusal.status == 404 => CliExitCode::NotFound,
            Self::Refused(_) => CliExitCode::Failed,
            Self::Output(error) if error.kind() == std::io::ErrorKind::BrokenPipe => CliExitCode::Success,
            Self::Output(_) | Self::Other(_) => CliExitCode::Failed,
        }
    }

    /// The daemon's error code, if the daemon refused.
    pub(crate) fn code(&self) -> Option<&str> {
        match self {
            Self::Refused(refusal) => Some(&refusal.error.code),
            _ => None,
        }
    }

    /// The failure as JSON, in the daemon's error format whether the daemon or the CLI raised it.
    pub(crate) fn error_body(&self) -> ErrorBody {
        let code = match self {
            Self::Refused(refusal) => return ErrorBody { error: refusal.error.clone() },
            Self::Usage(_) => "usage",
            Self::NotFound(_) => "not_found",
            Self::Unreachable(_) | Self::Unresponsive(_) => "daemon_unreachable",
            Self::TimedOut(_) => "timed_out",
            Self::Output(_) => "output_failed",
            Self::Other(_) => "failed",
        };
        let details = serde_json::Map::new();
        ErrorBody { error: ErrorDoc { code: code.to_owned(), message: self.to_string(), details } }
    }
}

impl fmt::Display for CliFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(text)
            | Self::NotFound(text)
            | Self::Unreachable(text)
            | Self::Unresponsive(text)
            | Self::TimedOut(text) => f.write_str(text),
            Self::Refused(refusal) => {
                f.write_str(&refusal.error.message)?;
                match refusal.error.details.get("install").and_then(|how| how.as_str()) {
                    Some(how) if !refusal.error.message.contains(how) => write!(f, " ({how})"),
                    _ => Ok(()),
                }
            }
            Self::Output(error) => write!(f, "cannot write to stdout: {error}"),
            Self::Other(error) => f.write_str(&format_error_chain(error)),
        }
    }
}

/// Formats an error with its causes, separated by colons. A cause that the text already ends with is not repeated.
pub(crate) fn format_error_chain(error: &anyhow::Error) -> String {
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

impl From<std::io::Error> for CliFailure {
    /// Only [`CliOutput`](crate::output::CliOutput) returns bare I/O errors; all other I/O adds context with `anyhow`.
    fn from(error: std::io::Error) -> Self {
        Self::Output(error)
    }
}

impl From<anyhow::Error> for CliFailure {
    fn from(error: anyhow::Error) -> Self {
        Self::Other(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(status: u16, code: &str) -> CliFailure {
        let error =
            ErrorDoc { code: code.to_owned(), message: "no".to_owned(), details: serde_json::Map::new() };
        CliFailure::Refused(Box::new(DaemonRefusal { status, error }))
    }

    #[test]
    fn each_failure_has_the_exit_code_of_the_contract() {
        assert_eq!(refused(404, "not_found").exit_code(), CliExitCode::NotFound);
        assert_eq!(refused(400, "unknown_agent").exit_code(), CliExitCode::Failed);
        assert_eq!(refused(409, "session_closed").exit_code(), CliExitCode::Failed);
        assert_eq!(CliFailure::Unreachable(String::new()).exit_code(), CliExitCode::Unreachable);
        assert_eq!(CliExitCode::from_finish_reason(FinishReason::EndTurn), CliExitCode::Success);
        assert_eq!(CliExitCode::from_finish_reason(FinishReason::Timeout), CliExitCode::TimedOut);
        assert_eq!(CliExitCode::from_finish_reason(FinishReason::Cancelled), CliExitCode::Cancelled);
        assert_eq!(CliExitCode::from_finish_reason(FinishReason::Interrupted), CliExitCode::Failed);
    }

    #[test]
    fn a_reader_that_went_away_is_no_failure() {
        assert_eq!(
            CliFailure::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe)).exit_code(),
            CliExitCode::Success
        );
        assert_eq!(
            CliFailure::from(std::io::Error::from(std::io::ErrorKind::StorageFull)).exit_code(),
            CliExitCode::Failed
        );
    }

    #[test]
    fn a_cause_that_was_said_is_not_said_again() {
        let cause = anyhow::anyhow!("the port is taken");
        let error = cause.context("failed to listen: the port is taken").context("[::1]:80");
        assert_eq!(format_error_chain(&error), "[::1]:80: failed to listen: the port is taken");
        assert_eq!(format_error_chain(&anyhow::anyhow!("a").context("b")), "b: a");
    }

    #[test]
    fn a_refusal_says_how_to_install_the_agent() {
        let CliFailure::Refused(mut refusal) = refused(409, "agent_unavailable") else {
            panic!("made above")
        };
        refusal.error.details.insert("install".to_owned(), "npm i -g x".into());
        assert_eq!(CliFailure::Refused(refusal).to_string(), "no (npm i -g x)");
    }
}
