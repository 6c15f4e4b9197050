//! Git as a subprocess. Every call names its directory, uses no shell, ignores the caller's `GIT_*` variables and the
//! repository's hooks, and has no prompt, pager or colour. It has a time limit, and its messages are in English.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use qd_protocol::limits::GIT_S;

use crate::error::{WorktreeError, WorktreeResult};
use crate::process::{self, OutputLimit, StopFlag, SubprocessError, SubprocessOutput};

/// The maximum output of commands that list files, branches or commits.
const OUTPUT_MAX: usize = 64 << 20;
/// Overrides of users' settings that would make git wait, fetch, sign, or change the format of its output.
const SETTINGS: &[&str] = &[
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.quotePath=false",
    "core.pager=cat",
    "core.editor=true",
    "color.ui=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "commit.gpgSign=false",
    "merge.conflictStyle=merge",
    "merge.verifySignatures=false",
    "rerere.enabled=false",
    "submodule.recurse=false",
    "diff.noprefix=false",
    "diff.mnemonicPrefix=false",
    "diff.ignoreSubmodules=none",
    "status.showUntrackedFiles=normal",
    "advice.detachedHead=false",
];

#[derive(Debug, Clone)]
pub struct Git {
    dir: PathBuf,
    stop: StopFlag,
    env: Vec<(&'static str, String)>,
}

impl Git {
    /// Git in this directory. `stop` ends its commands.
    pub fn at(dir: &Path, stop: &StopFlag) -> Self {
        Self { dir: dir.to_owned(), stop: stop.clone(), env: Vec::new() }
    }

    /// Adds an environment variable.
    #[must_use]
    pub fn with_env(mut self, name: &'static str, value: &str) -> Self {
        self.env.push((name, value.to_owned()));
        self
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Runs a command, whatever its exit status. It is an error only if git could not start, timed out or was stopped.
    pub fn run(&self, args: &[&str]) -> WorktreeResult<SubprocessOutput> {
        self.run_with(args, None, OutputLimit::Head(OUTPUT_MAX))
    }

    /// Like [`run`](Self::run), with standard input and a limit on the output.
    pub fn run_with(
        &self,
        args: &[&str],
        input: Option<Vec<u8>>,
        limit: OutputLimit,
    ) -> WorktreeResult<SubprocessOutput> {
        let output = process::run(self.command(args), input, Duration::from_secs(GIT_S), limit, &self.stop);
        output.map_err(|error| match error {
            SubprocessError::NotStarted(error) => WorktreeError::NoGit(error),
            SubprocessError::Stopped => WorktreeError::Stopped,
            SubprocessError::TimedOut => {
                WorktreeError::TimedOut { command: format!("git {}", command_name(args)), seconds: GIT_S }
            }
        })
    }

    /// Runs a command that must succeed, and returns its output.
    pub fn output(&self, args: &[&str]) -> WorktreeResult<Vec<u8>> {
        let output = self.run(args)?;
        if output.status.success() { Ok(output.stdout) } else { Err(git_failed(args, &output)) }
    }

    /// Like [`output`](Self::output), as text without trailing line breaks.
    pub fn output_text(&self, args: &[&str]) -> WorktreeResult<String> {
        let output = self.output(args)?;
        Ok(String::from_utf8_lossy(&output).trim_end_matches('\n').to_owned())
    }

    /// The output of a command as text. Absent if the command fails or prints nothing.
    pub fn optional_text(&self, args: &[&str]) -> WorktreeResult<Option<String>> {
        let output = self.run(args)?;
        let text = String::from_utf8_lossy(&output.stdout).trim_end_matches('\n').to_owned();
        Ok((output.status.success() && !text.is_empty()).then_some(text))
    }

    /// Runs a command that answers by its exit status: 0 is true, 1 is false, anything else is an error.
    pub fn exits_zero(&self, args: &[&str]) -> WorktreeResult<bool> {
        let output = self.run(args)?;
        match output.status.code() {
            Some(0) => Ok(true),
            Some(1) => Ok(false),
            _ => Err(git_failed(args, &output)),
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("git");
        for (name, _) in std::env::vars_os() {
            if name.as_encoded_bytes().starts_with(b"GIT_") {
                command.env_remove(name);
            }
        }
        command.env("LC_ALL", "C").env("GIT_TERMINAL_PROMPT", "0").env("GIT_EDITOR", "true");
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        // Without optional locks: inspecting a worktree must not lock its index, because the agent may be using it.
        command.arg("--no-pager").arg("--no-optional-locks").arg("-C").arg(&self.dir);
        for setting in SETTINGS {
            command.arg("-c").arg(setting);
        }
        command.args(args);
        command
    }
}

pub(crate) fn git_failed(args: &[&str], output: &SubprocessOutput) -> WorktreeError {
    WorktreeError::GitFailed { command: command_name(args), detail: error_text(output) }
}

/// Git's error message, on one line.
pub(crate) fn error_text(output: &SubprocessOutput) -> String {
    let text = if output.stderr.iter().any(|byte| !byte.is_ascii_whitespace()) {
        &output.stderr
    } else {
        &output.stdout
    };
    let text = String::from_utf8_lossy(text);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    // The reason is at the end, after any progress messages.
    let last = &lines[lines.len().saturating_sub(6)..];
    if last.is_empty() { output.describe_exit() } else { last.join("; ") }
}

/// A command's name for an error message: the subcommand and its first argument, without options.
fn command_name(args: &[&str]) -> String {
    let arguments = args.iter().filter(|argument| !argument.starts_with('-'));
    arguments.take(2).copied().collect::<Vec<_>>().join(" ")
}
