//! Runs a project's hooks in a new worktree and before one is removed: shell command lines, each with a time limit. The
//! first failure ends the sequence. Their caller decides how they are confined.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use qd_protocol::limits::{HOOK_OUTPUT_MAX, HOOK_S};

use crate::error::{WorktreeError, WorktreeResult};
use crate::process::{self, OutputLimit, StopFlag, SubprocessError};

const SHELL: &str = "/bin/sh";

/// A hook that succeeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookOutput {
    /// The command line.
    pub line: String,
    /// The end of its output, standard error included.
    pub output: String,
}

/// Where and how hooks run.
#[derive(Debug)]
pub struct HookEnvironment<'a> {
    pub directory: &'a Path,
    /// Variables that are added to our own.
    pub variables: &'a [(&'a str, &'a str)],
    /// What comes before the shell and confines it: a program and its arguments. Empty if nothing does.
    pub confined_by: &'a [OsString],
}

/// Runs the command lines.
pub fn run(
    lines: &[String],
    environment: &HookEnvironment<'_>,
    stop: &StopFlag,
) -> WorktreeResult<Vec<HookOutput>> {
    lines.iter().map(|line| run_line(line, environment, stop)).collect()
}

/// The process of a hook. Every hook is started from this command.
fn hook_command(line: &str, environment: &HookEnvironment<'_>) -> Command {
    let HookEnvironment { directory, variables, confined_by } = environment;
    let mut command = match confined_by.split_first() {
        Some((program, arguments)) => {
            let mut command = Command::new(program);
            command.args(arguments).arg(SHELL);
            command
        }
        None => Command::new(SHELL),
    };
    // Standard output and error go to the same pipe, so that their order is kept.
    command.args(["-c", "exec 2>&1; eval \"$1\"", "sh", line]).current_dir(directory);
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"GIT_") {
            command.env_remove(name);
        }
    }
    command.envs(variables.iter().copied());
    command
}

fn run_line(line: &str, environment: &HookEnvironment<'_>, stop: &StopFlag) -> WorktreeResult<HookOutput> {
    let command = hook_command(line, environment);
    let path = environment.directory;
    let failed =
        |detail: String| WorktreeError::HookFailed { line: line.to_owned(), path: path.to_owned(), detail };
    let output_limit = OutputLimit::Tail(HOOK_OUTPUT_MAX);
    match process::run(command, None, Duration::from_secs(HOOK_S), output_limit, stop) {
        Ok(result) => {
            // Only what confines the hook writes to standard error.
            let output = [result.stdout.as_slice(), &result.stderr].concat();
            let output = String::from_utf8_lossy(&output).trim().to_owned();
            match result.status.success() {
                true => Ok(HookOutput { line: line.to_owned(), output }),
                false if output.is_empty() => Err(failed(result.describe_exit())),
                false => Err(failed(format!("{}: {output}", result.describe_exit()))),
            }
        }
        Err(SubprocessError::Stopped) => Err(WorktreeError::Stopped),
        Err(SubprocessError::TimedOut) => {
            Err(WorktreeError::TimedOut { command: line.to_owned(), seconds: HOOK_S })
        }
        Err(SubprocessError::NotStarted(error)) => Err(failed(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(lines: &[&str]) -> Vec<String> {
        lines.iter().map(|line| (*line).to_owned()).collect()
    }

    #[test]
    fn lines_run_in_order_in_their_directory_until_one_fails() {
        let dir = tempfile::tempdir().unwrap();
        let stop = StopFlag::default();
        let environment =
            HookEnvironment { directory: dir.path(), variables: &[("WHO", "me")], confined_by: &[] };
        let outputs = run(&lines(&["echo $WHO > who", "cat who; echo aside >&2"]), &environment, &stop);
        assert_eq!(outputs.unwrap()[1].output, "me\naside");
        let error = run(&lines(&["echo no; exit 3", "touch never"]), &environment, &stop).unwrap_err();
        assert!(error.to_string().contains("exit status 3: no"), "{error}");
        assert!(!dir.path().join("never").exists());
    }

    #[test]
    fn what_confines_a_hook_starts_its_shell_and_may_say_why_it_did_not() {
        let dir = tempfile::tempdir().unwrap();
        let run_with = |confined_by: &[&str], line: &str| {
            let confined_by: Vec<OsString> = confined_by.iter().map(OsString::from).collect();
            let environment =
                HookEnvironment { directory: dir.path(), variables: &[], confined_by: &confined_by };
            run(&lines(&[line]), &environment, &StopFlag::default())
        };
        let outputs = run_with(&["/usr/bin/env", "CONFINED=yes"], "echo $CONFINED").unwrap();
        assert_eq!(outputs[0].output, "yes");
        let error = run_with(&["/bin/sh", "-c", "echo cannot confine it >&2; exit 126"], "true").unwrap_err();
        assert!(error.to_string().contains("exit status 126: cannot confine it"), "{error}");
    }
}
