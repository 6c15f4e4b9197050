//! What a remote agent says, in both wire forms read into one, and what it is told, written in the one it speaks.
//! Reading is lenient: an unknown field, part or state is passed over and breaks no turn.

use qd_protocol::link::File;
use serde_json::{Map, Value, json};

use super::card::Version;
use crate::drivers::acp::news;
use crate::turn::Prompt;

/// What came.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Heard {
    /// A task as it is now.
    Task(Task),
    /// An answer that is no task, and all of it.
    Message(Message),
    /// A task has come to this.
    Status { of: Of, status: Status },
    /// A task has made this.
    Artifact { of: Of, artifact: Artifact, append: bool },
    /// Nothing that we know.
    Other,
}

/// Which task, in which conversation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Of {
    pub(super) task: Option<String>,
    pub(super) context: Option<String>,
}

/// A task as it is now.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Task {
    pub(super) of: Of,
    pub(super) status: Status,
    pub(super) artifacts: Vec<Artifact>,
    /// What the agent said of it on its way.
    pub(super) history: Vec<Message>,
}

/// How a task stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Status {
    pub(super) state: State,
    pub(super) message: Option<Message>,
    /// When that was, in the agent's words.
    pub(super) timestamp: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// It is at work, or in a state that we do not know and that so does not end it.
    Working,
    Completed,
    Failed,
    Rejected,
    Canceled,
    InputRequired,
    AuthRequired,
}

impl State {
    /// Whether nothing more comes of it.
    pub(super) fn is_over(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Rejected | Self::Canceled)
    }

    fn read(value: &Value) -> Self {
        let word = value.as_str().unwrap_or_default().to_ascii_lowercase().replace('_', "-");
        match word.strip_prefix("task-state-").unwrap_or(&word) {
            "completed" => Self::Completed,
            "failed" => Self::Failed,
            "rejected" => Self::Rejected,
            "canceled" | "cancelled" => Self::Canceled,
            "input-required" => Self::InputRequired,
            "auth-required" => Self::AuthRequired,
            _ => Self::Working,
        }
    }
}

/// Something the agent said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) id: Option<String>,
    pub(super) of: Of,
    pub(super) text: String,
}

/// Something the agent made, or a piece of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Artifact {
    pub(super) id: String,
    pub(super) text: String,
}

/// Reads one event of a stream, or the answer to a call: of 1.0, where one key says what it is; of 0.3, where `kind`
/// does; or a task without either, which some calls answer with in both.
pub(super) fn read(value: &Value) -> Heard {
    let of_one = [
        ("task", "task"),
        ("message", "message"),
        ("statusUpdate", "status-update"),
        ("artifactUpdate", "artifact-update"),
    ];
    let found = of_one.iter().find(|(key, _)| value[key].is_object() && value.get("kind").is_none());
    let (kind, value) = match found {
        Some((key, kind)) => (*kind, &value[key]),
        None => (value["kind"].as_str().unwrap_or("task"), value),
    };
    match kind {
        "task" => task(value).map_or(Heard::Other, Heard::Task),
        "message" => Heard::Message(message(value)),
        "status-update" if value["status"].is_object() => {
            Heard::Status { of: of(value, "taskId"), status: status(&value["status"]) }
        }
        "artifact-update" if value["artifact"].is_object() => Heard::Artifact {
            of: of(value, "taskId"),
            artifact: artifact(&value["artifact"]),
            append: value["append"] == true,
        },
        _ => Heard::Other,
    }
}

/// Reads a task; `None` if it is none.
pub(super) fn task(value: &Value) -> Option<Task> {
    // A wrapped one is taken as well: who answers so means it.
    let value = if value["task"].is_object() { &value["task"] } else { value };
    (value["id"].is_string() && value["status"].is_object()).then(|| Task {
        of: of(value, "id"),
        status: status(&value["status"]),
        artifacts: list(&value["artifacts"]).iter().map(artifact).collect(),
        history: list(&value["history"]).iter().filter(|it| is_agents(it)).map(message).collect(),
    })
}

fn of(value: &Value, task: &str) -> Of {
    let name = |value: &Value| value.as_str().filter(|name| !name.is_empty()).map(str::to_owned);
    Of { task: name(&value[task]), context: name(&value["contextId"]) }
}

fn status(value: &Value) -> Status {
    Status {
        state: State::read(&value["state"]),
        message: value["message"].is_object().then(|| message(&value["message"])),
        timestamp: value["timestamp"].as_str().unwrap_or_default().to_owned(),
    }
}

fn message(value: &Value) -> Message {
    let texts: Vec<String> =
        list(&value["parts"]).iter().map(|it| part(it).trim_matches('\n').to_owned()).collect();
    Message {
        id: value["messageId"].as_str().filter(|id| !id.is_empty()).map(str::to_owned),
        of: of(value, "taskId"),
        text: texts.join("\n"),
    }
}

fn is_agents(message: &Value) -> bool {
    let role = message["role"].as_str().unwrap_or_default().to_ascii_lowercase();
    role.strip_prefix("role_").unwrap_or(&role) == "agent"
}

/// An artifact that grows is told in pieces and shown whole, so its text is its parts' one after the other.
fn artifact(value: &Value) -> Artifact {
    Artifact {
        id: value["artifactId"].as_str().unwrap_or_default().to_owned(),
        text: list(&value["parts"]).iter().map(part).collect(),
    }
}

/// The text of a part. What is no text is named on a line of its own, and not shown: it would be of no use to a reader.
fn part(part: &Value) -> String {
    if let Some(text) = part["text"].as_str() {
        return text.to_owned();
    }
    let file = if part["file"].is_object() { &part["file"] } else { part };
    let word =
        |names: &[&str]| names.iter().find_map(|name| file[*name].as_str()).filter(|it| !it.is_empty());
    let kind = word(&["mediaType", "mimeType"]);
    let name = word(&["filename", "name"]).unwrap_or("without a name");
    let url = word(&["url", "uri", "fileWithUri"]);
    let bytes = word(&["raw", "bytes", "fileWithBytes"]);
    let kind = |usual: &'static str| kind.unwrap_or(usual).to_owned();
    match (url, bytes, &part["data"]) {
        (Some(url), ..) => format!("\n[file {name}, {}, at {url}]\n", kind("of unknown type")),
        (_, Some(bytes), _) => {
            let size = bytes.trim_end_matches('=').len() * 3 / 4;
            format!("\n[file {name}, {}, {size} bytes]\n", kind("of unknown type"))
        }
        (_, _, Value::Null) => String::new(),
        (_, _, data) => format!("\n[data, {}, {} bytes]\n", kind("application/json"), data.to_string().len()),
    }
}

/// What we tell an agent: a prompt with its files, or the answer to its question.
pub(super) fn tell(version: Version, of: &Of, id: &str, parts: Vec<Value>) -> Value {
    let mut message = json!({"messageId": id, "parts": parts});
    let fields = message.as_object_mut().expect("it was just made one");
    match version {
        Version::One => fields.insert("role".to_owned(), json!("ROLE_USER")),
        Version::Old => {
            fields.insert("kind".to_owned(), json!("message"));
            fields.insert("role".to_owned(), json!("user"))
        }
    };
    let mut name = |key: &str, value: &Option<String>| {
        if let Some(value) = value {
            fields.insert(key.to_owned(), json!(value));
        }
    };
    name("contextId", &of.context);
    name("taskId", &of.task);
    message
}

/// The parts of a prompt.
pub(super) fn prompt(version: Version, prompt: &Prompt) -> Vec<Value> {
    let mut parts = Vec::new();
    if !prompt.text.is_empty() {
        parts.push(text(version, &prompt.text));
    }
    parts.extend(news(&prompt.messages).iter().map(|words| text(version, words)));
    parts.extend(prompt.files.iter().map(|file| attach(version, file)));
    parts
}

/// A part that is text.
pub(super) fn text(version: Version, text: &str) -> Value {
    match version {
        Version::One => json!({"text": text}),
        Version::Old => json!({"kind": "text", "text": text}),
    }
}

fn attach(version: Version, file: &File) -> Value {
    let File { name, mime, data } = file;
    match version {
        Version::One => json!({"raw": data, "filename": name, "mediaType": mime}),
        Version::Old => json!({"kind": "file", "file": {"bytes": data, "name": name, "mimeType": mime}}),
    }
}

/// The settings that go with what we tell: where nothing is streamed, the answer is to come at once, and we look again.
pub(super) fn configuration(version: Version, streams: bool) -> Value {
    let mut fields = Map::new();
    match version {
        _ if streams => {}
        Version::One => drop(fields.insert("returnImmediately".to_owned(), json!(true))),
        Version::Old => drop(fields.insert("blocking".to_owned(), json!(false))),
    }
    Value::Object(fields)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_t() -> Of {
        Of { task: Some("t".to_owned()), context: Some("c".to_owned()) }
    }

    #[test]
    fn both_wire_forms_mean_the_same() {
        let parts = |old: bool| match old {
            true => json!([{"kind": "text", "text": "hi"}]),
            false => json!([{"text": "hi"}]),
        };
        let message = |old: bool| {
            let (role, kind) = if old { ("agent", json!("message")) } else { ("ROLE_AGENT", Value::Null) };
            json!({"messageId": "m", "role": role, "kind": kind, "contextId": "c", "parts": parts(old)})
        };
        let status = |old: bool| {
            let state = if old { "input-required" } else { "TASK_STATE_INPUT_REQUIRED" };
            json!({"state": state, "message": message(old), "timestamp": "now"})
        };
        let pairs = [
            (
                json!({"kind": "status-update", "taskId": "t", "contextId": "c", "status": status(true), "final": true}),
                json!({"statusUpdate": {"taskId": "t", "contextId": "c", "status": status(false)}}),
            ),
            (
                json!({"kind": "artifact-update", "taskId": "t", "contextId": "c", "append": true,
                    "artifact": {"artifactId": "a", "parts": parts(true)}}),
                json!({"artifactUpdate": {"taskId": "t", "contextId": "c", "append": true, "lastChunk": true,
                    "artifact": {"artifactId": "a", "parts": parts(false)}}}),
            ),
            (
                json!({"kind": "task", "id": "t", "contextId": "c", "status": status(true), "history": [message(true)]}),
                json!({"task": {"id": "t", "contextId": "c", "status": status(false), "history": [message(false)]}}),
            ),
            (message(true), json!({"message": message(false)})),
        ];
        for (old, new) in pairs {
            let (old, new) = (read(&old), read(&new));
            assert_eq!(old, new);
            assert_ne!(old, Heard::Other);
        }
        let bare = json!({"id": "t", "contextId": "c", "status": status(false)});
        assert!(matches!(read(&bare), Heard::Task(Task { of, .. }) if of == of_t()), "as GetTask answers");
    }

    #[test]
    fn every_state_is_known_and_an_unknown_one_ends_nothing() {
        let state = |word: &str| State::read(&json!(word));
        for (old, new, is) in [
            ("submitted", "TASK_STATE_SUBMITTED", State::Working),
            ("working", "TASK_STATE_WORKING", State::Working),
            ("completed", "TASK_STATE_COMPLETED", State::Completed),
            ("failed", "TASK_STATE_FAILED", State::Failed),
            ("rejected", "TASK_STATE_REJECTED", State::Rejected),
            ("canceled", "TASK_STATE_CANCELED", State::Canceled),
            ("input-required", "TASK_STATE_INPUT_REQUIRED", State::InputRequired),
            ("auth-required", "TASK_STATE_AUTH_REQUIRED", State::AuthRequired),
            ("unknown", "TASK_STATE_UNSPECIFIED", State::Working),
            ("dreaming", "TASK_STATE_DREAMING", State::Working),
        ] {
            assert_eq!((state(old), state(new)), (is, is), "{old}");
        }
        assert!(!State::read(&json!(7)).is_over());
    }

    #[test]
    fn files_and_data_are_named_and_their_bytes_are_not_shown() {
        let told = |value: Value| part(&value);
        let raw = "QUJDREVG";
        assert_eq!(
            told(json!({"raw": raw, "filename": "a.png", "mediaType": "image/png"})),
            "\n[file a.png, image/png, 6 bytes]\n"
        );
        assert_eq!(
            told(json!({"kind": "file", "file": {"bytes": raw, "name": "a.png", "mimeType": "image/png"}})),
            "\n[file a.png, image/png, 6 bytes]\n"
        );
        assert_eq!(
            told(json!({"url": "https://h/x.pdf"})),
            "\n[file without a name, of unknown type, at https://h/x.pdf]\n"
        );
        assert!(told(json!({"kind": "file", "file": {"uri": "https://h/x"}})).contains("https://h/x"));
        assert_eq!(told(json!({"data": {"a": 1}})), "\n[data, application/json, 7 bytes]\n");
        assert_eq!(told(json!({"hologram": 1})), "");
    }

    #[test]
    fn an_artifact_in_pieces_is_the_same_text_as_the_whole() {
        let pieces = [json!({"text": "a "}), json!({"data": [1]}), json!({"text": "b"})];
        let whole = artifact(&json!({"artifactId": "x", "parts": pieces}));
        let joined: String =
            pieces.iter().map(|it| artifact(&json!({"artifactId": "x", "parts": [it]})).text).collect();
        assert_eq!(whole.text, joined);
    }

    #[test]
    fn nonsense_is_passed_over() {
        for value in [
            json!(null),
            json!(3),
            json!([]),
            json!({}),
            json!({"kind": "status-update"}),
            json!({"statusUpdate": 3}),
            json!({"task": {"id": 4, "status": {}}}),
            json!({"kind": "song", "id": "x"}),
        ] {
            assert_eq!(read(&value), Heard::Other, "{value}");
        }
        let odd = json!({"task": {"id": "t", "status": {"state": 9, "message": "?"}, "artifacts": {}, "history": [3]}});
        assert!(matches!(read(&odd), Heard::Task(task) if task.status.state == State::Working));
    }

    #[test]
    fn what_is_told_has_the_form_of_its_version() {
        let file = File { name: "n".to_owned(), mime: "m".to_owned(), data: "QQ==".to_owned() };
        let prompted = |version| {
            let what = Prompt {
                run: qd_protocol::RunId::parse("r").unwrap(),
                text: "do".to_owned(),
                files: vec![file.clone()],
                messages: vec![],
                limits: Default::default(),
            };
            tell(version, &of_t(), "m1", prompt(version, &what))
        };
        assert_eq!(
            prompted(Version::One),
            json!({"messageId": "m1", "role": "ROLE_USER", "contextId": "c", "taskId": "t",
                "parts": [{"text": "do"}, {"raw": "QQ==", "filename": "n", "mediaType": "m"}]})
        );
        assert_eq!(
            prompted(Version::Old),
            json!({"kind": "message", "messageId": "m1", "role": "user", "contextId": "c", "taskId": "t", "parts": [
                {"kind": "text", "text": "do"}, {"kind": "file", "file": {"bytes": "QQ==", "name": "n", "mimeType": "m"}}]})
        );
        assert_eq!(tell(Version::One, &Of::default(), "m", vec![]).get("contextId"), None);
        assert_eq!(configuration(Version::One, false), json!({"returnImmediately": true}));
        assert_eq!(configuration(Version::Old, false), json!({"blocking": false}));
        assert_eq!(configuration(Version::Old, true), json!({}));
    }
}
