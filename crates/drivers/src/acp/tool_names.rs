//! The names of tools as policy rules know them. Agents report a tool's own name, only its kind, or only a title for
//! people, and each names the tools of MCP servers in its own way. Nothing is remembered here.

use agent_client_protocol::v1::schema::{Meta, ToolCallId, ToolKind};
use serde_json::Value;

use crate::tool_server::{SERVER_NAME, mcp_tool_name};

/// The name of a tool if the agent gives none.
pub(super) const UNNAMED_TOOL: &str = "tool";

/// Characters that agents put between the name of an MCP server and that of its tool.
const SEPARATORS: [char; 5] = ['_', '-', '.', '/', ':'];

/// The name by which policy rules know tools of this kind, for agents that give a title but no name.
pub(super) fn tool_name_for_kind(kind: ToolKind) -> Option<&'static str> {
    match kind {
        ToolKind::Execute => Some("Bash"),
        ToolKind::Read => Some("Read"),
        ToolKind::Edit => Some("Edit"),
        ToolKind::Delete => Some("Delete"),
        ToolKind::Move => Some("Move"),
        ToolKind::Search => Some("Search"),
        ToolKind::Fetch => Some("WebFetch"),
        ToolKind::Think => Some("Think"),
        _ => None,
    }
}

/// The name of the tool with which the id of a call begins, before the separator. Agents without a separator have no
/// names in their ids.
pub(super) fn name_in_call_id<'a>(id: &'a ToolCallId, separator: Option<&str>) -> Option<&'a str> {
    let (name, _) = id.0.split_once(separator?)?;
    is_identifier(name).then_some(name)
}

/// The common name of a tool of an MCP server, `mcp__SERVER__TOOL`, if the agent's name or title for the call is one
/// agent's way to name such a tool. Some agents report the name in the `_meta` of the call.
pub(super) fn mcp_name(name: Option<&str>, title: Option<&str>, meta: Option<&Meta>) -> Option<String> {
    let in_meta = meta.and_then(|meta| meta.get("toolName")?.as_str());
    [name, in_meta, title].into_iter().flatten().find_map(common_mcp_name)
}

/// The common name and the arguments of a call of an MCP tool that the agent describes by its arguments: Codex's adapter
/// reports such a call as a command, whose input has the server, the tool and its arguments.
pub(super) fn mcp_call_in_input(input: Option<&Value>, meta: Option<&Meta>) -> Option<(String, Value)> {
    let is_mcp_call = meta?.get("is_mcp_tool_call") == Some(&Value::Bool(true));
    let input = input.filter(|_| is_mcp_call)?;
    let name = mcp_tool_name(input.get("server")?.as_str()?, input.get("tool")?.as_str()?);
    Some((name, input.get("arguments").cloned().unwrap_or_default()))
}

fn common_mcp_name(text: &str) -> Option<String> {
    if let Some((server, tool)) = text.strip_prefix("mcp__").and_then(|rest| rest.split_once("__")) {
        return (is_identifier(server) && is_identifier(tool)).then(|| text.to_owned());
    }
    if let Some((tool, server)) = text.strip_suffix(" MCP Server)").and_then(|rest| rest.rsplit_once(" (")) {
        return (is_identifier(server) && is_identifier(tool)).then(|| mcp_tool_name(server, tool));
    }
    // The other forms do not show where the server's name ends, so only our own server is recognised.
    let rest = text.strip_prefix("mcp").map_or(text, |rest| rest.trim_start_matches(SEPARATORS));
    let tool = rest.strip_prefix(SERVER_NAME)?.strip_prefix(SEPARATORS)?.trim_start_matches(SEPARATORS);
    is_identifier(tool).then(|| mcp_tool_name(SERVER_NAME, tool))
}

fn is_identifier(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || SEPARATORS.contains(&c))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_agents_name_for_an_mcp_tool_becomes_the_same() {
        for title in [
            "mcp__quarterdeck__spawn_agent",
            "spawn_agent (quarterdeck MCP Server)",
            "quarterdeck_spawn_agent",
            "quarterdeck-spawn_agent",
            "quarterdeck/spawn_agent",
            "mcp.quarterdeck.spawn_agent",
            "mcp_quarterdeck_spawn_agent",
        ] {
            let name = mcp_name(None, Some(title), None);
            assert_eq!(name.as_deref(), Some("mcp__quarterdeck__spawn_agent"), "{title}");
        }
        let meta = json!({"toolName": "mcp__github__get_issue"});
        assert_eq!(
            mcp_name(None, Some("{\"number\":1}"), meta.as_object()).as_deref(),
            Some("mcp__github__get_issue")
        );
        assert_eq!(
            mcp_name(None, Some("get_issue (github MCP Server)"), None).as_deref(),
            Some("mcp__github__get_issue"),
            "also a foreign server, where the agent names it"
        );
    }

    #[test]
    fn a_call_that_is_reported_as_a_command_is_known_by_its_input() {
        let input = json!({"server": "quarterdeck", "tool": "status", "arguments": {"session": "s"}});
        let meta = json!({"is_mcp_tool_call": true});
        assert_eq!(
            mcp_call_in_input(Some(&input), meta.as_object()),
            Some(("mcp__quarterdeck__status".to_owned(), json!({"session": "s"})))
        );
        assert_eq!(mcp_call_in_input(Some(&input), None), None, "the arguments alone prove nothing");
        assert_eq!(mcp_call_in_input(Some(&json!({"command": "ls"})), meta.as_object()), None);
    }

    #[test]
    fn a_text_for_people_is_not_taken_for_an_mcp_tool() {
        for title in [
            "Ask quarterdeck to spawn_agent",
            "quarterdeck",
            "quarterdeck list files",
            "mcp__quarterdeck__list the files",
            "mcp__only",
            "rm -rf (quarterdeck MCP Server)",
            "github_get_issue",
        ] {
            assert_eq!(mcp_name(None, Some(title), None), None, "{title}");
        }
    }
}
