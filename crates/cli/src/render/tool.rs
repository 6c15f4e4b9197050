//! A tool call on one line: its name and its main argument.

use serde_json::Value;

use super::text;

/// How much of an argument or an output one line shows.
const PREVIEW_CHARS: usize = 100;
/// The arguments that identify a call best. The first one present is shown.
const MAIN_ARGUMENTS: [&str; 9] =
    ["command", "cmd", "file_path", "path", "url", "uri", "pattern", "query", "description"];

/// The call on one line, such as `Bash: git status`.
pub(crate) fn summarize_call(name: &str, input: &Value) -> String {
    let name = text::first_line(name, PREVIEW_CHARS);
    match main_argument(input) {
        Some(argument) => format!("{name}: {argument}"),
        None => name,
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
        _ => Some(format!("{} (+{} lines)", text::first_line(&output, PREVIEW_CHARS), lines - 1)),
    }
}

/// The main argument of a call, or all arguments as JSON.
fn main_argument(input: &Value) -> Option<String> {
    match input {
        Value::Null => None,
        Value::String(argument) => Some(text::first_line(argument, PREVIEW_CHARS)),
        Value::Object(map) if map.is_empty() => None,
        Value::Object(map) => {
            let main = MAIN_ARGUMENTS.iter().find_map(|key| map.get(*key)).and_then(|value| match value {
                Value::String(argument) => Some(argument.clone()),
                Value::Array(parts) => {
                    parts.iter().map(Value::as_str).collect::<Option<Vec<_>>>().map(|parts| parts.join(" "))
                }
                _ => None,
            });
            Some(text::first_line(&main.unwrap_or_else(|| input.to_string()), PREVIEW_CHARS))
        }
        other => Some(text::first_line(&other.to_string(), PREVIEW_CHARS)),
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
        assert_eq!(summarize_call("Bash", &json!({"command": "a\x1b[2K"})), "Bash: a[2K");
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
