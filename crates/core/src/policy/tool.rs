//! What a tool is for, judged by its name. Agents name their tools differently; the tools of all agents that we know
//! are listed here. The name of a third-party tool (`mcp__SERVER__TOOL`) is trusted if it admits to changing
//! something, but not if it claims to be read-only.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ToolPurpose {
    ReadFiles,
    /// Only affects the agent itself: plans, thoughts, the output of commands that it already runs.
    AgentInternal,
    WriteFiles,
    /// Removes or moves files.
    RemoveFiles,
    /// Writes the files that a patch names.
    ApplyPatch,
    /// Reads or writes, depending on its `command` argument.
    EditFiles,
    RunCommand,
    /// Types into a command that is already running.
    TypeInput,
    FetchNetwork,
    /// Does something else that is more than reading: starts another agent, changes a memory.
    OtherAction,
    /// Claims to be read-only, but is a third-party tool that we do not know.
    UnverifiedRead,
}

/// The purpose of the tool with this name; `None` if the tool is not known.
pub(super) fn tool_purpose(tool: &str) -> Option<ToolPurpose> {
    let Some(foreign) = tool.strip_prefix("mcp__") else { return known_tool_purpose(tool) };
    let name = foreign.rsplit("__").next().unwrap_or(foreign);
    let verb = name.split(['_', '-', '.']).next().unwrap_or_default().to_ascii_lowercase();
    match known_tool_purpose(name) {
        Some(ToolPurpose::ReadFiles | ToolPurpose::AgentInternal) => Some(ToolPurpose::UnverifiedRead),
        Some(known) => Some(known),
        None if matches!(verb.as_str(), "read" | "get" | "list" | "search" | "find" | "view" | "query") => {
            Some(ToolPurpose::UnverifiedRead)
        }
        None if matches!(verb.as_str(), "write" | "create" | "update" | "edit" | "put" | "save") => {
            Some(ToolPurpose::WriteFiles)
        }
        None if matches!(verb.as_str(), "delete" | "remove" | "move" | "rename" | "drop") => {
            Some(ToolPurpose::RemoveFiles)
        }
        None => None,
    }
}

/// Whether this tool finds files by a pattern for their names.
pub(super) fn finds_files(tool: &str) -> bool {
    matches!(normalise_tool_name(tool).as_str(), "glob" | "filesearch" | "findfiles" | "searchfiles")
}

fn known_tool_purpose(tool: &str) -> Option<ToolPurpose> {
    Some(match normalise_tool_name(tool).as_str() {
        "read" | "readfile" | "readfiles" | "readmanyfiles" | "view" | "viewfile" | "viewimage"
        | "openfile" | "notebookread" | "ls" | "list" | "listdir" | "listdirectory" | "listfiles"
        | "glob" | "grep" | "grepsearch" | "search" | "searchfiles" | "searchfilecontent" | "filesearch"
        | "findfiles" | "codebasesearch" | "lsp" => ToolPurpose::ReadFiles,
        "todoread" | "todowrite" | "todo" | "updateplan" | "think" | "bashoutput" | "readbash"
        | "listbash" | "taskoutput" | "askuserquestion" | "askuser" | "reportintent" | "enterplanmode"
        | "toolsearch" => ToolPurpose::AgentInternal,
        "write" | "writefile" | "writetofile" | "edit" | "editfile" | "multiedit" | "notebookedit"
        | "strreplace" | "replace" | "replaceinfile" | "create" | "createfile" | "createdirectory"
        | "insert" | "insertedit" => ToolPurpose::WriteFiles,
        "delete" | "deletefile" | "remove" | "removefile" | "move" | "movefile" | "rename" | "renamefile" => {
            ToolPurpose::RemoveFiles
        }
        "applypatch" | "patch" | "applydiff" | "filechange" => ToolPurpose::ApplyPatch,
        "strreplaceeditor" | "strreplacebasededittool" | "texteditor" => ToolPurpose::EditFiles,
        "bash" | "shell" | "sh" | "zsh" | "terminal" | "execute" | "exec" | "runcommand"
        | "executecommand" | "execcommand" | "runshellcommand" | "shellcommand" | "runterminalcmd"
        | "runterminalcommand" | "runinterminal" | "localshell" | "executebash" | "commandexecution"
        | "powershell" => ToolPurpose::RunCommand,
        "writestdin" | "writebash" | "sendinput" => ToolPurpose::TypeInput,
        "webfetch" | "websearch" | "fetch" | "fetchurl" | "googlewebsearch" | "openurl" | "browse" => {
            ToolPurpose::FetchNetwork
        }
        "task" | "agent" | "savememory" | "storememory" | "memory" | "exitplanmode" | "killshell"
        | "killbash" | "stopbash" | "skill" | "slashcommand" => ToolPurpose::OtherAction,
        _ => return None,
    })
}

/// The name without case, underscores and dashes, in which agents differ.
fn normalise_tool_name(tool: &str) -> String {
    tool.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tools_of_the_agents_that_we_know_are_known() {
        let agents = [
            "Bash BashOutput KillShell Read Write Edit MultiEdit NotebookEdit Glob Grep LS WebFetch WebSearch Task Agent \
             TodoWrite ExitPlanMode AskUserQuestion",
            "shell exec_command local_shell apply_patch fileChange write_stdin view_image update_plan web_search",
            "run_shell_command read_file read_many_files write_file replace glob search_file_content grep_search \
             list_directory web_fetch google_web_search save_memory",
            "run_shell_command edit task todo_write exit_plan_mode",
            "bash read edit write patch glob grep list webfetch task todowrite",
            "bash str_replace_editor view create edit grep glob read_bash write_bash stop_bash web_fetch",
            "Bash Read Edit Delete Move Search WebFetch Think",
        ];
        for tool in agents.iter().flat_map(|names| names.split_whitespace()) {
            assert!(tool_purpose(tool).is_some(), "{tool}");
        }
    }

    #[test]
    fn the_name_of_a_foreign_tool_is_believed_only_where_it_admits_to_something() {
        for (tool, expected) in [
            ("mcp__files__read_file", Some(ToolPurpose::UnverifiedRead)),
            ("mcp__github__get_issue", Some(ToolPurpose::UnverifiedRead)),
            ("mcp__files__write_file", Some(ToolPurpose::WriteFiles)),
            ("mcp__github__create_issue", Some(ToolPurpose::WriteFiles)),
            ("mcp__db__drop_table", Some(ToolPurpose::RemoveFiles)),
            ("mcp__shell__exec", Some(ToolPurpose::RunCommand)),
            ("mcp__x__frobnicate", None),
            ("frobnicate", None),
        ] {
            assert_eq!(tool_purpose(tool), expected, "{tool}");
        }
    }
}
