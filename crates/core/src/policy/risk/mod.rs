//! How much harm a tool call could do, by our own table: what is known to destroy, to spend, to give away keys or to
//! write outside the workspace is high; what is known only to look, and only inside, is low; and of the rest we have no
//! opinion unless we know that it changes something.
//!
//! The table is text against text, the same for every agent. It may be told where the workspace is; without that an
//! absolute path is nowhere in particular. It never looks at the disk, so it does not follow links, does not know where
//! an earlier call has left a shell, and cannot see what a script does. Nothing here decides what may happen.
//!
//! In reading order: this file for tools, `line` for command lines, `command` for one command, `harm` for those whose
//! arguments matter, `code` for programs in other languages, `git`.

mod code;
mod command;
mod git;
mod harm;
mod line;

use qd_protocol::policy::Risk;
use serde_json::Value;

use super::argument::{Argument, Kind, arguments, editor_word};
use super::guarded::gives_machine_keys;
use super::path::{Place, below, host, normalise, place};
use super::tool::{Use, finds_files, purpose};

/// The risk of a call: the larger of our opinion and the agent's word, and medium where there is neither. `workspace`
/// is the absolute path of the directory that the agent works in, if that is known.
pub fn assess(tool: &str, input: &Value, claimed: Option<Risk>, workspace: Option<&str>) -> Risk {
    opinion(tool, input, workspace).max(claimed).unwrap_or(Risk::Medium)
}

fn opinion(tool: &str, input: &Value, workspace: Option<&str>) -> Option<Risk> {
    let found = arguments(tool, input);
    let purpose = purpose(tool).map(|purpose| match editor_word(Some(purpose), input) {
        Some("view") => Use::Looks,
        Some(_) => Use::Writes,
        None => purpose,
    });
    let own = purpose.and_then(of_purpose);
    let call = Call { tool, purpose, workspace };
    let lines = found.list.iter().filter(|argument| argument.kind == Kind::Command);
    let others = found.list.iter().filter(|argument| argument.kind != Kind::Command);
    let lines = all(lines.map(|line| line::of_line(&line.text, workspace, found.directory)));
    let others = others.filter_map(|argument| call.of_argument(argument)).max();
    match (lines, found.unreadable) {
        (None, false) => own.max(others),
        (lines, true) => lines.flatten().max(own).max(others).max(Some(Risk::Medium)),
        // A tool that is known to look does not vouch for a command that is not known.
        (Some(None), false) => own.max(others).filter(|risk| *risk > Risk::Low),
        (Some(lines), false) => lines.max(own).max(others),
    }
}

/// The opinion on several things together: as bad as the worst, and low only if all are. The outer `None`: there were
/// no things.
fn all(opinions: impl Iterator<Item = Option<Risk>>) -> Option<Option<Risk>> {
    opinions.reduce(|one, other| match (one, other) {
        (Some(Risk::High), _) | (_, Some(Risk::High)) => Some(Risk::High),
        (Some(Risk::Medium), _) | (_, Some(Risk::Medium)) => Some(Risk::Medium),
        (None, _) | (_, None) => None,
        (Some(Risk::Low), Some(Risk::Low)) => Some(Risk::Low),
    })
}

/// What a tool is for tells the least that it risks.
fn of_purpose(purpose: Use) -> Option<Risk> {
    match purpose {
        Use::Looks | Use::Quiet => Some(Risk::Low),
        Use::Writes | Use::Removes | Use::Patches | Use::Fetches | Use::Types | Use::Acts => {
            Some(Risk::Medium)
        }
        Use::Runs | Use::Edits | Use::Claims => None,
    }
}

/// A call, as far as its arguments need to know.
struct Call<'c> {
    tool: &'c str,
    purpose: Option<Use>,
    workspace: Option<&'c str>,
}

impl Call<'_> {
    /// What a path or an address adds to the tool's own opinion.
    fn of_argument(&self, argument: &Argument<'_>) -> Option<Risk> {
        let text = argument.text.as_ref();
        match argument.kind {
            Kind::Address => match text.strip_prefix("file://") {
                Some(file) => self.of_path(file).max(Some(Risk::Medium)),
                None if gives_machine_keys(host(text)) => Some(Risk::High),
                None => Some(Risk::Medium),
            },
            Kind::Path => self.of_path(text),
            // Names of files only, but they may be anybody's.
            Kind::Other if finds_files(self.tool) => match place(text, self.workspace) {
                Place::Inside | Place::Nowhere | Place::Secret => None,
                Place::Unclear | Place::Outside | Place::System => Some(Risk::Medium),
            },
            Kind::Command | Kind::Other => None,
        }
    }

    fn of_path(&self, path: &str) -> Option<Risk> {
        match place(path, self.workspace) {
            Place::Secret => Some(Risk::High),
            Place::System | Place::Outside => match self.purpose {
                Some(Use::Looks | Use::Quiet | Use::Claims | Use::Fetches) => Some(Risk::Medium),
                // What is not known to look may write.
                _ => Some(Risk::High),
            },
            Place::Inside if self.purpose == Some(Use::Removes) && is_everything(path, self.workspace) => {
                Some(Risk::High)
            }
            Place::Inside | Place::Nowhere | Place::Unclear => None,
        }
    }
}

/// Whether a path stands for the whole workspace, or for its history.
fn is_everything(path: &str, workspace: Option<&str>) -> bool {
    let path = normalise(path);
    matches!(below(&path, workspace).unwrap_or(&path), "." | "*" | ".*" | ".git")
}
