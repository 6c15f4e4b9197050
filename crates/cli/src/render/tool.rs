//! A tool call on one line: its name and its main argument.

use serde_json::Value;

use super::ask_input::{AskLineKind, command_text, describe_input};
use super::text;
use super::visible_text::show_on_one_line;

/// How much of an argument or an output one line shows.
const PREVIEW_CHARS: usize = 100;
/// The arguments that identify a call best. The first one present is shown.
const MAIN_ARGUMENTS: [&str; 7] = ["file_path", "path", "url", "uri", "pattern", "query", "description"];
/// A command identifies a call better than any of them.
const COMMAND_ARGUMENTS: [&str; 2] = ["command", "cmd"];

/// The call on one line, such as `Bash: git status`, with the number of further lines.
pub(crate) fn summarize_call(name: &str, input: &Value) -> String {
    let (first_line, more) = call_lines(name, input);
    let first_line = text::truncate(&first_line, PREVIEW_CHARS);
    if more == 0 { first_line } else { format!("{first_line} (+{})", text::count_lines(more)) }
}

/// The call on one line however long, and the number of further lines of its command, text or change.
pub(crate) fn call_lines(name: &str, input: &Value) -> (String, usize) {
    let name = show_on_one_line(name);
    let lines = describe_input(input);
    let content = lines.iter().filter(|line| line.kind != AskLineKind::Argument);
    match main_argument(input) {
        // A command is part of the content that is counted; a path or another argument is not.
        Some(MainArgument::Content(first_line)) => {
            (format!("{name}: {}", show_on_one_line(&first_line)), content.count().saturating_sub(1))
        }
        Some(MainArgument::Other(argument)) => {
            (format!("{name}: {}", show_on_one_line(&argument)), content.count())
        }
        None => (name, content.count()),
    }
}

/// The first line of a tool's output and the number of further lines. `None` if there was no output.
pub(crate) fn summarize_result(output: &Value) -> Option<String> {
    let output = match output {
        Value::Null => return None,
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let lines = output.lines().filter(|line| !line.trim().is_empty()).count();
    match lines {
        0 => None,
        1 => Some(text::first_line(&output, PREVIEW_CHARS)),
        _ => {
            let first = text::first_line(&output, PREVIEW_CHARS);
            Some(format!("{first} (+{})", text::count_lines(lines - 1)))
        }
    }
}

/// What identifies a call best.
enum MainArgument {
    /// The first line of a command or another text.
    Content(String),
    /// A path or another argument, or all arguments as JSON.
    Other(String),
}

fn main_argument(input: &Value) -> Option<MainArgument> {
    let first_line = |text: &str| {
        let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
        MainArgument::Content(line.trim_start().to_owned())
    };
    match input {
        Value::Null => None,
        Value::String(argument) => Some(first_line(argument)),
        Value::Object(map) if map.is_empty() => None,
        Value::Object(map) => {
            let command = COMMAND_ARGUMENTS.iter().find_map(|key| map.get(*key)).and_then(command_text);
            let other = || {
                MAIN_ARGUMENTS.iter().find_map(|key| match map.get(*key)? {
                    Value::String(argument) => Some(argument.clone()),
                    Value::Array(parts) => {
                        let parts: Option<Vec<&str>> = parts.iter().map(Value::as_str).collect();
                        parts.map(|parts| parts.join(" "))
                    }
                    _ => None,
                })
            };
            Some(match command {
                Some(command) => first_line(&command),
                None => MainArgument::Other(other().unwrap_or_else(|| input.to_string())),
            })
        }
        other => Some(MainArgument::Content(other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_call_shows_the_argument_that_matters() {
        assert_eq!(
            summarize_call("Bash", &json!({"timeout": 3, "command": "git status"})),
            "Bash: git status"
        );
        assert_eq!(summarize_call("Run", &json!({"cmd": ["ls", "-l"]})), "Run: ls -l");
        assert_eq!(summarize_call("Odd", &json!({"x": 1})), "Odd: {\"x\":1}");
        assert_eq!(summarize_call("None", &Value::Null), "None");
        assert_eq!(summarize_call("Bash", &json!({"command": "a\x1b[2K"})), "Bash: a^[[2K");
        assert_eq!(summarize_call("Bash", &json!({"command": "cd x\n\nmake\n"})), "Bash: cd x (+2 lines)");
        assert_eq!(
            summarize_call("Edit", &json!({"file_path": "a", "old_string": "x", "new_string": "y"})),
            "Edit: a (+2 lines)"
        );
        let long = summarize_call("Bash", &json!({"command": "x".repeat(200)}));
        assert!(long.ends_with("x…") && long.chars().count() == PREVIEW_CHARS, "{long}");
    }

    #[test]
    fn a_result_is_its_first_line_and_a_count() {
        assert_eq!(summarize_result(&Value::Null), None);
        assert_eq!(summarize_result(&json!("")), None);
        assert_eq!(summarize_result(&json!("one")), Some("one".to_owned()));
        assert_eq!(summarize_result(&json!("one\n\ntwo\nthree")), Some("one (+2 lines)".to_owned()));
        assert_eq!(summarize_result(&json!({"ok": true})), Some("{\"ok\":true}".to_owned()));
    }
}
