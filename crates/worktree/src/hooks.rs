//! Runs a project's hooks in a new worktree and before one is removed: shell command lines, each with a time limit. The
//! first failure ends the sequence.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use qd_protocol::limits::{HOOK_OUTPUT_MAX, HOOK_S};

use crate::error::{WorktreeError, WorktreeResult};
use crate::process::{self, OutputLimit, StopFlag, SubprocessError};

/// A hook that succeeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookOutput {
    /// The command line.
    pub line: String,
    /// The end of its output, standard error included.
    pub output: String,
}

/// Runs the command lines in a directory, with these variables added to our environment.
pub fn run(
    lines: &[String],
    dir: &Path,
    env: &[(&str, &str)],
    stop: &StopFlag,
) -> WorktreeResult<Vec<HookOutput>> {
    lines.iter().map(|line| run_line(line, dir, env, stop)).collect()
}

/// The process of a hook. Every hook is started from this command, so what confines hooks belongs here.
fn hook_command(line: &str, dir: &Path, env: &[(&str, &str)]) -> Command {
    let mut command = Command::new("/bin/sh");
    // Standard output and error go to the same pipe, so that their order is kept.
    command.args(["-c", "exec 2>&1; eval \"$1\"", "sh", line]).current_dir(dir);
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"GIT_") {
            command.env_remove(name);
        }
    }
    command.envs(env.iter().copied());
    command
}

fn run_line(line: &str, dir: &Path, env: &[(&str, &str)], stop: &StopFlag) -> WorktreeResult<HookOutput> {
    let command = hook_command(line, dir, env);
    let failed =
        |detail: String| WorktreeError::HookFailed { line: line.to_owned(), path: dir.to_owned(), detail };
    let output_limit = OutputLimit::Tail(HOOK_OUTPUT_MAX);
    match process::run(command, None, Duration::from_secs(HOOK_S), output_limit, stop) {
        Ok(result) => {
            let output = String::from_utf8_lossy(&result.stdout).trim().to_owned();
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
        let outputs =
            run(&lines(&["echo $WHO > who", "cat who; echo aside >&2"]), dir.path(), &[("WHO", "me")], &stop);
        assert_eq!(outputs.unwrap()[1].output, "me\naside");
        let error = run(&lines(&["echo no; exit 3", "touch never"]), dir.path(), &[], &stop).unwrap_err();
        assert!(error.to_string().contains("exit status 3: no"), "{error}");
        assert!(!dir.path().join("never").exists());
    }
}
