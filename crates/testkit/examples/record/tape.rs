//! Turns a log into a recording: one process of the agent, with each action of the session placed where its effect
//! shows, without the paths of this machine, and without data that no driver reads.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};

/// Longer texts of an agent are cut: a replay needs only short ones.
const TEXT_MAX: usize = 600;
/// Longer lists of an agent are cut. Models, modes and commands come in lists of a hundred.
const LIST_MAX: usize = 8;
/// Lists that no driver reads. Some contain whole pages of text.
const UNREAD_LISTS: [&str; 3] = ["availableCommands", "availableSkills", "availableSkillDetails"];

/// The first line of a recording.
#[derive(Debug, Serialize)]
pub(crate) struct RecordingHeader {
    pub(crate) agent: String,
    pub(crate) version: String,
    /// The agent's id of the conversation that it was to resume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) resume: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
enum LogLine {
    /// An action of the session.
    Action(Value),
    /// A message from us to the agent.
    ToAgent(Value),
    /// A message from the agent.
    FromAgent(Value),
}

/// The lines of one agent process.
#[derive(Debug)]
pub(crate) struct Recording(Vec<LogLine>);

impl Recording {
    /// The last process in a log that received a message, and the session's actions during its life.
    pub(crate) fn from_log(log: &str) -> Self {
        let entries: Vec<Value> =
            log.lines().map(|line| serde_json::from_str(line).expect("a line of a log")).collect();
        let is_sent = |line: &&Value| line.get(">").is_some();
        let pid = entries.iter().rfind(is_sent).expect("the agent was sent a message")["pid"].clone();
        let first = entries.iter().position(|line| line["pid"] == pid).expect("it is there");
        // The actions right before its first line are those that started the process.
        let from = entries[..first].iter().rposition(|line| line.get("!").is_none()).map_or(0, |at| at + 1);
        let lines =
            entries[from..].iter().filter_map(|line| match (line.get("!"), line.get(">"), line.get("<")) {
                (Some(action), ..) => Some(LogLine::Action(action.clone())),
                (_, Some(message), _) if line["pid"] == pid => Some(LogLine::ToAgent(message.clone())),
                (.., Some(message)) if line["pid"] == pid => Some(LogLine::FromAgent(message.clone())),
                _ => None,
            });
        Self(lines.collect()).with_actions_before_their_effects()
    }

    /// Moves each action to the line that shows its effect. An action takes a while to reach the agent, and what the
    /// agent sends meanwhile does not depend on it.
    fn with_actions_before_their_effects(self) -> Self {
        let mut lines = self.0;
        let mut at = lines.len();
        while let Some(found) = lines[..at].iter().rposition(|line| matches!(line, LogLine::Action(_))) {
            at = found;
            let action = lines.remove(at);
            let sets_mode = lines[..at].last().is_some_and(
                |before| matches!(before, LogLine::Action(before) if before.get("mode").is_some()),
            );
            let to = lines_until_effect(&action, sets_mode, &lines[at..]).map_or(at, |ahead| at + ahead);
            lines.insert(to, action);
        }
        Self(lines)
    }

    /// The text of the recording, with the paths of this machine replaced.
    pub(crate) fn to_text(&self, header: &RecordingHeader, names: &[(String, &str)]) -> String {
        let mut text = format!("{}\n", json!({ "#": header }));
        for line in &self.0 {
            let line = match line {
                LogLine::Action(action) => json!({ "!": action }),
                LogLine::ToAgent(message) => {
                    let mut message = message.clone();
                    remove_tool_servers(&mut message);
                    // This request has the list only if there is something in it.
                    if message.get("method") == Some(&json!("session/resume")) {
                        message["params"].as_object_mut().and_then(|params| params.remove("mcpServers"));
                    }
                    json!({ ">": message })
                }
                LogLine::FromAgent(message) => {
                    let mut message = message.clone();
                    cut(&mut message);
                    json!({ "<": message })
                }
            };
            let line = names
                .iter()
                .fold(with_sorted_keys(line).to_string(), |line, (path, name)| line.replace(path, name));
            text.push_str(&line);
            text.push('\n');
        }
        normalized(&text)
    }
}

/// Numbers the random ids and fixes the times in the text, so that a difference from an older recording is a difference
/// in what the agent does.
fn normalized(text: &str) -> String {
    const NAME: &str = "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
    const TIME: &str = "dddd-dd-ddTdd:dd:dd.dddZ";
    let has_shape = |text: &str, shape: &str| {
        let fits = |(c, shape): (char, char)| match shape {
            'x' => c.is_ascii_hexdigit(),
            'd' => c.is_ascii_digit(),
            other => c == other,
        };
        text.len() >= shape.len() && text.chars().zip(shape.chars()).all(fits)
    };
    let (mut normalized, mut names) = (String::new(), Vec::new());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if has_shape(rest, NAME) {
            let (name, after) = rest.split_at(NAME.len());
            let number = names.iter().position(|known| *known == name).unwrap_or_else(|| {
                names.push(name);
                names.len() - 1
            });
            normalized.push_str(&format!("00000000-0000-4000-8000-{:012}", number + 1));
            rest = after;
        } else if has_shape(rest, TIME) {
            normalized.push_str("2026-01-01T00:00:00.000Z");
            rest = &rest[TIME.len()..];
        } else {
            normalized.push(c);
            rest = &rest[c.len_utf8()..];
        }
    }
    normalized
}

/// How many lines ahead the effect of an action is. `sets_mode`: the action before it is the choice of a mode.
fn lines_until_effect(action: &LogLine, sets_mode: bool, ahead: &[LogLine]) -> Option<usize> {
    let LogLine::Action(action) = action else { return None };
    if action.get("mode").is_some() {
        let is_prompt =
            |line: &LogLine| matches!(line, LogLine::Action(action) if action.get("prompt").is_some());
        return ahead.iter().position(is_prompt);
    }
    let text = action.get("prompt").or_else(|| action.get("steer")).and_then(Value::as_str);
    let shows_effect = |line: &LogLine| match (line, text) {
        (LogLine::ToAgent(message), Some(text)) => has_words(&message.to_string(), text),
        (LogLine::ToAgent(_), None) => true,
        _ => false,
    };
    let to = ahead.iter().position(shows_effect)?;
    // The agent is put into another mode right before the prompt.
    let last_sent = ahead[..to].iter().rposition(|line| matches!(line, LogLine::ToAgent(_)));
    if let Some(setting) = last_sent.filter(|at| sets_mode && changes_setting(&ahead[*at])) {
        return Some(setting);
    }
    // If the agent requests its steers, the action goes before the agent's request.
    let LogLine::ToAgent(message) = &ahead[to] else { return None };
    let is_its_request = |line: &LogLine| matches!(line, LogLine::FromAgent(request) if request.get("method").is_some() && request.get("id") == message.get("id"));
    if text.is_some() && message.get("method").is_none() && message.get("id").is_some() {
        return ahead[..to].iter().rposition(is_its_request).or(Some(to));
    }
    Some(to)
}

/// Whether a message changes a setting of an open conversation.
fn changes_setting(line: &LogLine) -> bool {
    let LogLine::ToAgent(message) = line else { return false };
    let method = message.get("method").or_else(|| message.pointer("/request/subtype"));
    let name = method.and_then(Value::as_str).unwrap_or_default();
    name.trim_start_matches("session/").starts_with("set_")
}

/// Removes how the agent reaches the tools of `qd mcp`, which is different in every session. A replay has none.
fn remove_tool_servers(message: &mut Value) {
    match message {
        Value::Object(fields) => {
            if let Some(servers) = fields.get_mut("mcpServers") {
                *servers = json!([]);
            }
            fields.retain(|name, _| !name.starts_with("mcp_servers."));
            fields.values_mut().for_each(remove_tool_servers);
            fields.retain(|name, value| name != "config" || *value != json!({}));
        }
        Value::Array(items) => items.iter_mut().for_each(remove_tool_servers),
        _ => {}
    }
}

/// The same value with the keys of all objects in order, whichever order the agent has sent them in.
fn with_sorted_keys(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let sorted: BTreeMap<String, Value> =
                fields.into_iter().map(|(name, value)| (name, with_sorted_keys(value))).collect();
            sorted.into_iter().collect()
        }
        Value::Array(items) => items.into_iter().map(with_sorted_keys).collect(),
        other => other,
    }
}

/// Whether a message has this text, and not only at the end of a longer word, such as an id.
fn has_words(message: &str, text: &str) -> bool {
    let is_in_word = |c: char| c.is_alphanumeric() || c == '-';
    message.match_indices(text).any(|(at, _)| !message[..at].ends_with(is_in_word))
}

/// Cuts long texts and lists.
fn cut(value: &mut Value) {
    match value {
        Value::String(text) if text.chars().count() > TEXT_MAX => {
            *text = text.chars().take(TEXT_MAX).chain(['…']).collect();
        }
        Value::Array(list) => {
            list.truncate(LIST_MAX);
            list.iter_mut().for_each(cut);
        }
        Value::Object(fields) => {
            for name in UNREAD_LISTS {
                if let Some(list) = fields.get_mut(name) {
                    *list = json!([]);
                }
            }
            fields.values_mut().for_each(cut);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(log: &[Value]) -> Vec<String> {
        let log: String = log.iter().map(|line| format!("{line}\n")).collect();
        let header = RecordingHeader { agent: "a".to_owned(), version: "1".to_owned(), resume: None };
        let places = [("/tmp/x".to_owned(), "/w")];
        Recording::from_log(&log).to_text(&header, &places).lines().skip(1).map(str::to_owned).collect()
    }

    #[test]
    fn the_last_process_is_kept_with_the_action_that_started_it_before_its_effect() {
        let log = [
            json!({"!": {"prompt": "one"}}),
            json!({"pid": 1, ">": {"prompt": "one"}}),
            json!({"!": {"prompt": "two"}}),
            json!({"pid": 2, ">": {"method": "open", "id": "part-two"}}),
            json!({"pid": 2, "<": {"cwd": "/tmp/x/f"}}),
            json!({"pid": 2, ">": {"prompt": "two"}}),
            json!({"pid": 3, "<": {"version": "of a process that nobody spoke to"}}),
        ];
        let expected = [
            r#"{">":{"id":"part-two","method":"open"}}"#,
            r#"{"<":{"cwd":"/w/f"}}"#,
            r#"{"!":{"prompt":"two"}}"#,
        ];
        assert_eq!(recorded(&log)[..3], expected);
        assert_eq!(recorded(&log)[3..], [r#"{">":{"prompt":"two"}}"#]);
    }

    #[test]
    fn a_cancel_is_placed_where_the_agent_gets_it_and_a_steer_before_the_agent_asks_for_it() {
        let log = [
            json!({"!": {"cancel": true}}),
            json!({"pid": 1, "<": "meanwhile"}),
            json!({"pid": 1, ">": {"method": "cancel"}}),
            json!({"!": {"steer": "left"}}),
            json!({"pid": 1, "<": {"id": 7, "method": "asks"}}),
            json!({"pid": 1, ">": {"id": 7, "result": ["left"]}}),
        ];
        let first: Vec<String> = recorded(&log).iter().map(|line| line[2..3].to_owned()).collect();
        assert_eq!(first.concat(), "<!>!<>");
    }

    #[test]
    fn a_mode_and_its_prompt_are_placed_where_the_agent_is_put_into_the_mode() {
        let log = [
            json!({"!": {"mode": "plan"}}),
            json!({"!": {"prompt": "think"}}),
            json!({"pid": 1, ">": {"method": "session/new", "mcpServers": [1]}}),
            json!({"pid": 1, "<": "opened"}),
            json!({"pid": 1, ">": {"method": "session/set_mode"}}),
            json!({"pid": 1, "<": "granted"}),
            json!({"pid": 1, ">": {"prompt": "think"}}),
        ];
        let first: Vec<String> = recorded(&log).iter().map(|line| line[2..3].to_owned()).collect();
        assert_eq!(first.concat(), "><!!><>");
        assert_eq!(recorded(&log)[0], r#"{">":{"mcpServers":[],"method":"session/new"}}"#);
    }

    #[test]
    fn what_is_drawn_is_numbered_and_what_is_long_is_cut() {
        let name = |c: &str| format!("{0}-{1}-{1}-{1}-{0}{1}", c.repeat(8), c.repeat(4));
        let text = format!("{} {} {} 2026-11-16T10:05:22.306Z", name("a"), name("b"), name("a"));
        let (one, two) = ("00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002");
        assert_eq!(normalized(&text), format!("{one} {two} {one} 2026-01-01T00:00:00.000Z"));
        let mut long =
            json!({"text": "x".repeat(2 * TEXT_MAX), "list": vec![1; 20], "availableCommands": [1]});
        cut(&mut long);
        assert_eq!(long["text"].as_str().map(|text| text.chars().count()), Some(TEXT_MAX + 1));
        assert_eq!((&long["list"], &long["availableCommands"]), (&json!(vec![1; LIST_MAX]), &json!([])));
    }
}
