//! What was kept, made into a recording: one process of the agent, with what the session did put where its effect can be
//! seen, without the paths of this machine and without what no driver reads.

use serde::Serialize;
use serde_json::{Value, json};

/// Longer texts of an agent are cut: what a replay needs to see is short.
const TEXT_MAX: usize = 600;
/// Longer lists of an agent are cut. Models, modes and commands come in lists of a hundred.
const LIST_MAX: usize = 8;
/// Lists of an agent that no driver reads, whole pages of text among them.
const UNREAD: [&str; 3] = ["availableCommands", "availableSkills", "availableSkillDetails"];

/// The first line of a recording.
#[derive(Debug, Serialize)]
pub(crate) struct Header {
    pub(crate) agent: String,
    pub(crate) version: String,
    /// The agent's name for the conversation that it was to go on with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) resume: Option<String>,
}

/// One line.
#[derive(Debug, Clone, PartialEq)]
enum Line {
    /// What the session did.
    Did(Value),
    /// What we said to the agent.
    Ours(Value),
    /// What the agent said.
    Theirs(Value),
}

/// The lines of one process.
#[derive(Debug)]
pub(crate) struct Tape(Vec<Line>);

impl Tape {
    /// The last process of a log to which anything was said, and what the session did with it.
    pub(crate) fn of(log: &str) -> Self {
        let all: Vec<Value> =
            log.lines().map(|line| serde_json::from_str(line).expect("a line of a log")).collect();
        let told = |line: &&Value| line.get(">").is_some();
        let pid = all.iter().rfind(told).expect("the agent was told something")["pid"].clone();
        let first = all.iter().position(|line| line["pid"] == pid).expect("it is there");
        // A process is started by what was done last.
        let from = all[..first].iter().rposition(|line| line.get("!").is_some()).unwrap_or(first);
        let lines =
            all[from..].iter().filter_map(|line| match (line.get("!"), line.get(">"), line.get("<")) {
                (Some(did), ..) => Some(Line::Did(did.clone())),
                (_, Some(said), _) if line["pid"] == pid => Some(Line::Ours(said.clone())),
                (.., Some(said)) if line["pid"] == pid => Some(Line::Theirs(said.clone())),
                _ => None,
            });
        Self(lines.collect()).with_deeds_before_their_effects()
    }

    /// What the session does takes a while until it reaches the agent, and nothing that the agent says meanwhile is known
    /// to have been heard before it.
    fn with_deeds_before_their_effects(self) -> Self {
        let mut lines = self.0;
        let mut at = lines.len();
        while let Some(found) = lines[..at].iter().rposition(|line| matches!(line, Line::Did(_))) {
            at = found;
            let deed = lines.remove(at);
            let to = effect(&deed, &lines[at..]).map_or(at, |ahead| at + ahead);
            lines.insert(to, deed);
        }
        Self(lines)
    }

    /// The text of a recording, with places under other names.
    pub(crate) fn recording(&self, header: &Header, names: &[(String, &str)]) -> String {
        let mut text = format!("{}\n", json!({ "#": header }));
        for line in &self.0 {
            let line = match line {
                Line::Did(did) => json!({ "!": did }),
                Line::Ours(said) => json!({ ">": said }),
                Line::Theirs(said) => {
                    let mut said = said.clone();
                    cut(&mut said);
                    json!({ "<": said })
                }
            };
            let line = names.iter().fold(line.to_string(), |line, (path, name)| line.replace(path, name));
            text.push_str(&line);
            text.push('\n');
        }
        numbered(&text)
    }
}

/// The same text with the names that an agent draws numbered and its times at rest, so that what differs from an older
/// recording is what the agent does differently.
fn numbered(text: &str) -> String {
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
    let (mut numbered, mut names) = (String::new(), Vec::new());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if has_shape(rest, NAME) {
            let (name, after) = rest.split_at(NAME.len());
            let number = names.iter().position(|known| *known == name).unwrap_or_else(|| {
                names.push(name);
                names.len() - 1
            });
            numbered.push_str(&format!("00000000-0000-4000-8000-{:012}", number + 1));
            rest = after;
        } else if has_shape(rest, TIME) {
            numbered.push_str("2026-01-01T00:00:00.000Z");
            rest = &rest[TIME.len()..];
        } else {
            numbered.push(c);
            rest = &rest[c.len_utf8()..];
        }
    }
    numbered
}

/// How far ahead the effect of a deed is.
fn effect(deed: &Line, ahead: &[Line]) -> Option<usize> {
    let Line::Did(deed) = deed else { return None };
    let words = deed.get("prompt").or_else(|| deed.get("steer")).and_then(Value::as_str);
    let told = |line: &Line| match (line, words) {
        (Line::Ours(said), Some(words)) => said.to_string().contains(words),
        (Line::Ours(_), None) => true,
        _ => false,
    };
    let to = ahead.iter().position(told)?;
    // An agent that asks for its steers must not have asked before.
    let Line::Ours(said) = &ahead[to] else { return None };
    let asked = |line: &Line| matches!(line, Line::Theirs(asked) if asked.get("method").is_some() && asked.get("id") == said.get("id"));
    if words.is_some() && said.get("method").is_none() && said.get("id").is_some() {
        return ahead[..to].iter().rposition(asked).or(Some(to));
    }
    Some(to)
}

/// Takes out what is long.
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
            for name in UNREAD {
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
        let header = Header { agent: "a".to_owned(), version: "1".to_owned(), resume: None };
        let places = [("/tmp/x".to_owned(), "/w")];
        Tape::of(&log).recording(&header, &places).lines().skip(1).map(str::to_owned).collect()
    }

    #[test]
    fn the_last_process_is_kept_with_the_deed_that_started_it_before_its_effect() {
        let log = [
            json!({"!": {"prompt": "one"}}),
            json!({"pid": 1, ">": {"prompt": "one"}}),
            json!({"!": {"prompt": "two"}}),
            json!({"pid": 2, ">": {"method": "open"}}),
            json!({"pid": 2, "<": {"cwd": "/tmp/x/f"}}),
            json!({"pid": 2, ">": {"prompt": "two"}}),
            json!({"pid": 3, "<": {"version": "of a process that nobody spoke to"}}),
        ];
        let wanted = [r#"{">":{"method":"open"}}"#, r#"{"<":{"cwd":"/w/f"}}"#, r#"{"!":{"prompt":"two"}}"#];
        assert_eq!(recorded(&log)[..3], wanted);
        assert_eq!(recorded(&log)[3..], [r#"{">":{"prompt":"two"}}"#]);
    }

    #[test]
    fn a_cancel_stands_where_the_agent_is_told_and_a_steer_before_the_agent_asks_for_it() {
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
    fn what_is_drawn_is_numbered_and_what_is_long_is_cut() {
        let name = |c: &str| format!("{0}-{1}-{1}-{1}-{0}{1}", c.repeat(8), c.repeat(4));
        let text = format!("{} {} {} 2026-11-16T10:05:22.306Z", name("a"), name("b"), name("a"));
        let (one, two) = ("00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002");
        assert_eq!(numbered(&text), format!("{one} {two} {one} 2026-01-01T00:00:00.000Z"));
        let mut long =
            json!({"text": "x".repeat(2 * TEXT_MAX), "list": vec![1; 20], "availableCommands": [1]});
        cut(&mut long);
        assert_eq!(long["text"].as_str().map(|text| text.chars().count()), Some(TEXT_MAX + 1));
        assert_eq!((&long["list"], &long["availableCommands"]), (&json!(vec![1; LIST_MAX]), &json!([])));
    }
}
