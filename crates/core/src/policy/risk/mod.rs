//! How much harm a tool call could do, by our own table. High: known to destroy, to spend money, to give away keys or
//! to write outside the workspace. Low: known only to read, and only inside the workspace. Medium: known to change
//! something, or more than could be parsed. Anything else has no assessment.
//!
//! The table compares text with text and is the same for every agent. It may be given the path of the workspace;
//! without it, the location of an absolute path is unclear. It never looks at the disk, so it does not follow links,
//! does not know the directory that an earlier call left a shell in, and cannot see what a script does. Nothing here
//! decides whether a call is allowed.
//!
//! In reading order: this file for tools, `line` for command lines, `command` for one command, `harm` for commands
//! whose arguments matter, `code` for programs in other languages, `git`.

mod code;
mod command;
mod git;
mod harm;
mod line;

use qd_protocol::policy::Risk;
use serde_json::Value;

use super::argument::{ArgumentKind, ToolArgument, editor_command, find_arguments};
use super::path::{PathLocation, address_host, locate_path, normalise, relative_to_workspace};
use super::sensitive::is_metadata_host;
use super::tool::{ToolPurpose, finds_files, tool_purpose};

/// The risk of a call: the higher of our own assessment and the agent's claim, and medium if there is neither.
/// `workspace` is the absolute path of the directory that the agent works in, if known.
pub fn assess_risk(tool: &str, input: &Value, claimed: Option<Risk>, workspace: Option<&str>) -> Risk {
    own_assessment(tool, input, workspace).max(claimed).unwrap_or(Risk::Medium)
}

fn own_assessment(tool: &str, input: &Value, workspace: Option<&str>) -> Option<Risk> {
    let found = find_arguments(tool, input);
    let purpose = tool_purpose(tool).map(|purpose| match editor_command(Some(purpose), input) {
        Some("view") => ToolPurpose::ReadFiles,
        Some(_) => ToolPurpose::WriteFiles,
        None => purpose,
    });
    let own = purpose.and_then(risk_of_purpose);
    let call = CallRiskContext { tool, purpose, workspace };
    let lines = found.list.iter().filter(|argument| argument.kind == ArgumentKind::Command);
    let others = found.list.iter().filter(|argument| argument.kind != ArgumentKind::Command);
    let lines = worst_risk(lines.map(|line| line::risk_of_line(&line.text, workspace, found.directory)));
    let others = others.filter_map(|argument| call.risk_of_argument(argument)).max();
    match (lines, found.unreadable) {
        (None, false) => own.max(others),
        (lines, true) => lines.flatten().max(own).max(others).max(Some(Risk::Medium)),
        // A read-only tool does not vouch for a command that is not known.
        (Some(None), false) => own.max(others).filter(|risk| *risk > Risk::Low),
        (Some(lines), false) => lines.max(own).max(others),
    }
}

/// Combines several assessments: as high as the highest, and low only if all are low. The outer `None` means that
/// there was nothing to assess.
fn worst_risk(opinions: impl Iterator<Item = Option<Risk>>) -> Option<Option<Risk>> {
    opinions.reduce(|left, right| match (left, right) {
        (Some(Risk::High), _) | (_, Some(Risk::High)) => Some(Risk::High),
        (Some(Risk::Medium), _) | (_, Some(Risk::Medium)) => Some(Risk::Medium),
        (None, _) | (_, None) => None,
        (Some(Risk::Low), Some(Risk::Low)) => Some(Risk::Low),
    })
}

/// The lowest risk of a tool with this purpose.
fn risk_of_purpose(purpose: ToolPurpose) -> Option<Risk> {
    match purpose {
        ToolPurpose::ReadFiles | ToolPurpose::AgentInternal => Some(Risk::Low),
        ToolPurpose::WriteFiles
        | ToolPurpose::RemoveFiles
        | ToolPurpose::ApplyPatch
        | ToolPurpose::FetchNetwork
        | ToolPurpose::TypeInput
        | ToolPurpose::OtherAction => Some(Risk::Medium),
        ToolPurpose::RunCommand | ToolPurpose::EditFiles | ToolPurpose::UnverifiedRead => None,
    }
}

/// The facts about a call that the risk of its arguments depends on.
struct CallRiskContext<'c> {
    tool: &'c str,
    purpose: Option<ToolPurpose>,
    workspace: Option<&'c str>,
}

impl CallRiskContext<'_> {
    /// The risk that a path or an address adds to that of the tool.
    fn risk_of_argument(&self, argument: &ToolArgument<'_>) -> Option<Risk> {
        let text = argument.text.as_ref();
        match argument.kind {
            ArgumentKind::Address => match text.strip_prefix("file://") {
                Some(file) => self.risk_of_path(file).max(Some(Risk::Medium)),
                None if is_metadata_host(address_host(text)) => Some(Risk::High),
                None => Some(Risk::Medium),
            },
            ArgumentKind::Path => self.risk_of_path(text),
            // The tool only returns names of files, but they may be anywhere.
            ArgumentKind::Other if finds_files(self.tool) => match locate_path(text, self.workspace) {
                PathLocation::Inside | PathLocation::NullDevice | PathLocation::Secret => None,
                PathLocation::Unclear | PathLocation::Outside | PathLocation::System => Some(Risk::Medium),
            },
            ArgumentKind::Command | ArgumentKind::Other => None,
        }
    }

    fn risk_of_path(&self, path: &str) -> Option<Risk> {
        match locate_path(path, self.workspace) {
            PathLocation::Secret => Some(Risk::High),
            PathLocation::System | PathLocation::Outside => match self.purpose {
                Some(
                    ToolPurpose::ReadFiles
                    | ToolPurpose::AgentInternal
                    | ToolPurpose::UnverifiedRead
                    | ToolPurpose::FetchNetwork,
                ) => Some(Risk::Medium),
                // A tool that is not known to be read-only may write.
                _ => Some(Risk::High),
            },
            PathLocation::Inside
                if self.purpose == Some(ToolPurpose::RemoveFiles)
                    && is_whole_workspace(path, self.workspace) =>
            {
                Some(Risk::High)
            }
            PathLocation::Inside | PathLocation::NullDevice | PathLocation::Unclear => None,
        }
    }
}

/// Whether a path means the whole workspace, or its git history.
fn is_whole_workspace(path: &str, workspace: Option<&str>) -> bool {
    let path = normalise(path);
    matches!(relative_to_workspace(&path, workspace).unwrap_or(&path), "." | "*" | ".*" | ".git")
}
