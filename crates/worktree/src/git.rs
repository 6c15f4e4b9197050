//! Git as a program. Every call names its directory, has no shell in between, no variable of the caller's git, no hook of
//! the repository, no prompt, no pager, no colour and a limit of time; its words are in English.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use qd_protocol::limits::GIT_S;

use crate::error::{WorktreeError, WorktreeResult};
use crate::process::{self, OutputLimit, StopFlag, SubprocessError, SubprocessOutput};

/// Bytes of an answer that is not shown to anybody: names of files, of branches and of commits.
const OUTPUT_MAX: usize = 64 << 20;
/// What people may have set, and what would make a program of git wait, fetch, sign, or say the same otherwise.
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

/// Git in one directory.
#[derive(Debug, Clone)]
pub struct Git {
    dir: PathBuf,
    stop: StopFlag,
    env: Vec<(&'static str, String)>,
}

impl Git {
    /// In this directory, until it is stopped.
    pub fn at(dir: &Path, stop: &StopFlag) -> Self {
        Self { dir: dir.to_owned(), stop: stop.clone(), env: Vec::new() }
    }

    /// The same with a variable of git's.
    #[must_use]
    pub fn with_env(mut self, name: &'static str, value: &str) -> Self {
        self.env.push((name, value.to_owned()));
        self
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Runs a command, however it ends. Only that it could not run, took too long or was stopped is an error.
    pub fn run(&self, args: &[&str]) -> WorktreeResult<SubprocessOutput> {
        self.run_with(args, None, OutputLimit::Head(OUTPUT_MAX))
    }

    /// The same with something on its standard input, and a part of its output.
    pub fn run_with(
        &self,
        args: &[&str],
        input: Option<Vec<u8>>,
        keep: OutputLimit,
    ) -> WorktreeResult<SubprocessOutput> {
        let ended = process::run(self.command(args), input, Duration::from_secs(GIT_S), keep, &self.stop);
        ended.map_err(|broken| match broken {
            SubprocessError::NotStarted(error) => WorktreeError::NoGit(error),
            SubprocessError::Stopped => WorktreeError::Stopped,
            SubprocessError::TimedOut => {
                WorktreeError::TimedOut { what: format!("git {}", command_name(args)), seconds: GIT_S }
            }
        })
    }

    /// Runs a command that has to do well, and gives its output.
    pub fn output(&self, args: &[&str]) -> WorktreeResult<Vec<u8>> {
        let ended = self.run(args)?;
        if ended.status.success() { Ok(ended.stdout) } else { Err(git_failed(args, &ended)) }
    }

    /// The same as text, without the last line's end.
    pub fn output_text(&self, args: &[&str]) -> WorktreeResult<String> {
        let out = self.output(args)?;
        Ok(String::from_utf8_lossy(&out).trim_end_matches('\n').to_owned())
    }

    /// The same where there may be nothing to say.
    pub fn optional_text(&self, args: &[&str]) -> WorktreeResult<Option<String>> {
        let ended = self.run(args)?;
        let text = String::from_utf8_lossy(&ended.stdout).trim_end_matches('\n').to_owned();
        Ok((ended.status.success() && !text.is_empty()).then_some(text))
    }

    /// Whether a command that answers by its status says yes.
    pub fn exits_zero(&self, args: &[&str]) -> WorktreeResult<bool> {
        let ended = self.run(args)?;
        match ended.status.code() {
            Some(0) => Ok(true),
            Some(1) => Ok(false),
            _ => Err(git_failed(args, &ended)),
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
        // Looking at a worktree must not lock its index: its agent may be at work.
        command.arg("--no-pager").arg("--no-optional-locks").arg("-C").arg(&self.dir);
        for setting in SETTINGS {
            command.arg("-c").arg(setting);
        }
        command.args(args);
        command
    }
}

/// What git said when it did not do it.
pub(crate) fn git_failed(args: &[&str], ended: &SubprocessOutput) -> WorktreeError {
    WorktreeError::GitFailed { what: command_name(args), said: error_text(ended) }
}

/// Its own words, on one line.
pub(crate) fn error_text(ended: &SubprocessOutput) -> String {
    let words = if ended.stderr.iter().any(|byte| !byte.is_ascii_whitespace()) {
        &ended.stderr
    } else {
        &ended.stdout
    };
    let words = String::from_utf8_lossy(words);
    let lines: Vec<&str> = words.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    // The reason stands at the end, after whatever it had to say of its progress.
    let last = &lines[lines.len().saturating_sub(6)..];
    if last.is_empty() { ended.describe_exit() } else { last.join("; ") }
}

/// A command as it is named in an error: without what only programs want to know.
fn command_name(args: &[&str]) -> String {
    let words = args.iter().filter(|word| !word.starts_with('-'));
    words.take(2).copied().collect::<Vec<_>>().join(" ")
}
