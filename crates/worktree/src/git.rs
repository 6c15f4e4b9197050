//! Git as a subprocess. Every call names the git directory and the work tree, so git does not look for them, and reads
//! the repository's configuration only as [`private_common_dir`](crate::private_common_dir) copies it. It uses no
//! shell, ignores the caller's `GIT_*` variables and all hooks, opens no connection, and has no prompt, pager or colour.
//! It has a time limit, and its messages are in English.
//!
//! Design: docs/design/git-reads-no-configuration-of-agents.md

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use qd_protocol::limits::GIT_S;

use crate::error::{WorktreeError, WorktreeResult};
use crate::process::{self, OutputLimit, StopFlag, SubprocessError, SubprocessOutput};

/// The maximum output of commands that list files, branches or commits.
const OUTPUT_MAX: usize = 64 << 20;
/// Overrides of users' settings that would make git wait, run a program, fetch, sign, or change the format of its output.
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
    "worktree.useRelativePaths=false",
];
/// The option without which `git diff` and `git status` run git in every submodule, with the configuration there. A
/// submodule at another commit is still seen.
pub(crate) const IGNORE_SUBMODULE_FILES: &str = "--ignore-submodules=dirty";
/// Variables of every git command. No connection is ever opened: git fetches nothing that a partial clone lacks, and LFS
/// uses only content that the repository has. Objects are what their ids say: the repository cannot replace one by another,
/// which would show people something else than what is merged.
const VARIABLES: [(&str, &str); 9] = [
    ("LC_ALL", "C"),
    ("GIT_TERMINAL_PROMPT", "0"),
    ("GIT_EDITOR", "true"),
    ("GIT_ALLOW_PROTOCOL", "none"),
    ("GIT_PROTOCOL_FROM_USER", "0"),
    ("GIT_NO_LAZY_FETCH", "1"),
    ("GIT_LFS_SKIP_SMUDGE", "1"),
    ("GIT_NO_REPLACE_OBJECTS", "1"),
    ("GIT_GRAFT_FILE", "/dev/null/none"),
];

/// The repository that a git command works with.
#[derive(Debug, Clone)]
enum GitTarget {
    /// Git looks for the repository of this directory, and reads its configuration. Only for `rev-parse`, which runs
    /// no program whatever that configuration says.
    Discovered(PathBuf),
    /// These directories, whatever is written in them.
    Directories(GitDirectories),
    /// No repository.
    None,
}

/// The directories of one checkout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GitDirectories {
    /// Git's directory of the checkout: its head and its index.
    pub(crate) git_dir: PathBuf,
    /// Our own directory in place of the one that all checkouts of the repository share.
    pub(crate) private_common_dir: PathBuf,
    /// The files of the checkout. Absent for commands that need none.
    pub(crate) work_tree: Option<PathBuf>,
    /// Settings of this checkout alone, as `NAME=VALUE`.
    pub(crate) settings: Vec<String>,
}

#[derive(Debug, Clone)]
pub struct Git {
    target: GitTarget,
    stop: StopFlag,
    env: Vec<(&'static str, String)>,
}

impl Git {
    /// Git in a checkout. `stop` ends its commands.
    pub(crate) fn in_checkout(directories: GitDirectories, stop: &StopFlag) -> Self {
        Self { target: GitTarget::Directories(directories), stop: stop.clone(), env: Vec::new() }
    }

    /// Git that looks for the repository of a directory. Only for `rev-parse`.
    pub(crate) fn discovering(dir: &Path, stop: &StopFlag) -> Self {
        Self { target: GitTarget::Discovered(dir.to_owned()), stop: stop.clone(), env: Vec::new() }
    }

    /// Git without a repository.
    pub(crate) fn without_repository(stop: &StopFlag) -> Self {
        Self { target: GitTarget::None, stop: stop.clone(), env: Vec::new() }
    }

    /// Adds an environment variable.
    #[must_use]
    pub fn with_env(mut self, name: &'static str, value: &str) -> Self {
        self.env.push((name, value.to_owned()));
        self
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
        command.envs(VARIABLES);
        // Without optional locks: inspecting a worktree must not lock its index, because the agent may be using it.
        command.arg("--no-pager").arg("--no-optional-locks");
        match &self.target {
            GitTarget::Discovered(dir) => {
                command.arg("-C").arg(dir);
            }
            GitTarget::Directories(directories) => {
                let GitDirectories { git_dir, private_common_dir, work_tree, settings } = directories;
                command.arg("-C").arg(work_tree.as_ref().unwrap_or(git_dir));
                command.env("GIT_DIR", git_dir).env("GIT_COMMON_DIR", private_common_dir);
                command.envs(work_tree.as_ref().map(|work_tree| ("GIT_WORK_TREE", work_tree)));
                for setting in settings {
                    command.arg("-c").arg(setting);
                }
            }
            GitTarget::None => {
                command.arg("-C").arg("/").env("GIT_DIR", "/dev/null");
            }
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
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
