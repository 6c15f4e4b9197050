//! What a tool is for, by its name. Agents name their tools differently; those of the agents that we know are all
//! here. Somebody else's tool (`mcp__SERVER__TOOL`) may be called what it likes: its name is believed where it admits
//! to changing something, and not where it claims only to look.

/// What a tool is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// Looks at files.
    Looks,
    /// Concerns nobody but the agent: plans, thoughts, the output of what it already runs.
    Quiet,
    /// Writes files.
    Writes,
    /// Removes or moves them.
    Removes,
    /// Writes the files that a patch names.
    Patches,
    /// Looks or writes, as its `command` says.
    Edits,
    /// Runs a command line.
    Runs,
    /// Types into a command that runs already.
    Types,
    /// Reaches the network.
    Fetches,
    /// Does something else that is more than looking: another agent, a memory.
    Acts,
    /// Says that it looks, and is not known.
    Claims,
}

/// What the tool of this name is for; none if it is not known.
pub(super) fn purpose(tool: &str) -> Option<Use> {
    let Some(foreign) = tool.strip_prefix("mcp__") else { return known(tool) };
    let name = foreign.rsplit("__").next().unwrap_or(foreign);
    let verb = name.split(['_', '-', '.']).next().unwrap_or_default().to_ascii_lowercase();
    match known(name) {
        Some(Use::Looks | Use::Quiet) => Some(Use::Claims),
        Some(known) => Some(known),
        None if matches!(verb.as_str(), "read" | "get" | "list" | "search" | "find" | "view" | "query") => {
            Some(Use::Claims)
        }
        None if matches!(verb.as_str(), "write" | "create" | "update" | "edit" | "put" | "save") => {
            Some(Use::Writes)
        }
        None if matches!(verb.as_str(), "delete" | "remove" | "move" | "rename" | "drop") => {
            Some(Use::Removes)
        }
        None => None,
    }
}

/// Whether the tool of this name finds files by a pattern for their names.
pub(super) fn finds_files(tool: &str) -> bool {
    matches!(plain(tool).as_str(), "glob" | "filesearch" | "findfiles" | "searchfiles")
}

fn known(tool: &str) -> Option<Use> {
    Some(match plain(tool).as_str() {
        "read" | "readfile" | "readfiles" | "readmanyfiles" | "view" | "viewfile" | "viewimage"
        | "openfile" | "notebookread" | "ls" | "list" | "listdir" | "listdirectory" | "listfiles"
        | "glob" | "grep" | "grepsearch" | "search" | "searchfiles" | "searchfilecontent" | "filesearch"
        | "findfiles" | "codebasesearch" | "lsp" => Use::Looks,
        "todoread" | "todowrite" | "todo" | "updateplan" | "think" | "bashoutput" | "readbash"
        | "listbash" | "taskoutput" | "askuserquestion" | "askuser" | "reportintent" | "enterplanmode"
        | "toolsearch" => Use::Quiet,
        "write" | "writefile" | "writetofile" | "edit" | "editfile" | "multiedit" | "notebookedit"
        | "strreplace" | "replace" | "replaceinfile" | "create" | "createfile" | "createdirectory"
        | "insert" | "insertedit" => Use::Writes,
        "delete" | "deletefile" | "remove" | "removefile" | "move" | "movefile" | "rename" | "renamefile" => {
            Use::Removes
        }
        "applypatch" | "patch" | "applydiff" | "filechange" => Use::Patches,
        "strreplaceeditor" | "strreplacebasededittool" | "texteditor" => Use::Edits,
        "bash" | "shell" | "sh" | "zsh" | "terminal" | "execute" | "exec" | "runcommand"
        | "executecommand" | "execcommand" | "runshellcommand" | "shellcommand" | "runterminalcmd"
        | "runterminalcommand" | "runinterminal" | "localshell" | "executebash" | "commandexecution"
        | "powershell" => Use::Runs,
        "writestdin" | "writebash" | "sendinput" => Use::Types,
        "webfetch" | "websearch" | "fetch" | "fetchurl" | "googlewebsearch" | "openurl" | "browse" => {
            Use::Fetches
        }
        "task" | "agent" | "savememory" | "storememory" | "memory" | "exitplanmode" | "killshell"
        | "killbash" | "stopbash" | "skill" | "slashcommand" => Use::Acts,
        _ => return None,
    })
}

/// The name without what agents vary: case, underscores, dashes.
fn plain(tool: &str) -> String {
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
            assert!(purpose(tool).is_some(), "{tool}");
        }
    }

    #[test]
    fn the_name_of_a_foreign_tool_is_believed_only_where_it_admits_to_something() {
        for (tool, expected) in [
            ("mcp__files__read_file", Some(Use::Claims)),
            ("mcp__github__get_issue", Some(Use::Claims)),
            ("mcp__files__write_file", Some(Use::Writes)),
            ("mcp__github__create_issue", Some(Use::Writes)),
            ("mcp__db__drop_table", Some(Use::Removes)),
            ("mcp__shell__exec", Some(Use::Runs)),
            ("mcp__x__frobnicate", None),
            ("frobnicate", None),
        ] {
            assert_eq!(purpose(tool), expected, "{tool}");
        }
    }
}
