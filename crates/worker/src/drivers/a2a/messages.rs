//! What a remote agent says, in both wire forms read into one, and what it is told, written in the one it speaks.
//! Reading is lenient: an unknown field, part or state is passed over and breaks no turn.

use qd_protocol::link::PromptFile;
use serde_json::{Map, Value, json};

use super::card::A2aVersion;
use crate::drivers::acp::unseen_messages;
use crate::turn::DriverPrompt;

/// What came.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum A2aEvent {
    /// A task as it is now.
    Task(A2aTask),
    /// An answer that is no task, and all of it.
    Message(A2aMessage),
    /// A task has come to this.
    Status { task_ref: A2aTaskRef, status: A2aTaskStatus },
    /// A task has made this.
    Artifact { task_ref: A2aTaskRef, artifact: A2aArtifact, append: bool },
    /// Nothing that we know.
    Other,
}

/// Which task, in which conversation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct A2aTaskRef {
    pub(super) task: Option<String>,
    pub(super) context: Option<String>,
}

/// A task as it is now.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct A2aTask {
    pub(super) task_ref: A2aTaskRef,
    pub(super) status: A2aTaskStatus,
    pub(super) artifacts: Vec<A2aArtifact>,
    /// What the agent said of it on its way.
    pub(super) history: Vec<A2aMessage>,
}

/// How a task stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct A2aTaskStatus {
    pub(super) state: A2aTaskState,
    pub(super) message: Option<A2aMessage>,
    /// When that was, in the agent's words.
    pub(super) timestamp: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum A2aTaskState {
    /// It is at work, or in a state that we do not know and that so does not end it.
    Working,
    Completed,
    Failed,
    Rejected,
    Canceled,
    InputRequired,
    AuthRequired,
}

impl A2aTaskState {
    /// Whether nothing more comes of it.
    pub(super) fn is_over(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Rejected | Self::Canceled)
    }

    fn parse(value: &Value) -> Self {
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
pub(super) struct A2aMessage {
    pub(super) id: Option<String>,
    pub(super) task_ref: A2aTaskRef,
    pub(super) text: String,
}

/// Something the agent made, or a piece of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct A2aArtifact {
    pub(super) id: String,
    pub(super) text: String,
}

/// Reads one event of a stream, or the answer to a call: of 1.0, where one key says what it is; of 0.3, where `kind`
/// does; or a task without either, which some calls answer with in both.
pub(super) fn parse_event(value: &Value) -> A2aEvent {
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
        "task" => parse_task(value).map_or(A2aEvent::Other, A2aEvent::Task),
        "message" => A2aEvent::Message(parse_message(value)),
        "status-update" if value["status"].is_object() => A2aEvent::Status {
            task_ref: parse_task_ref(value, "taskId"),
            status: parse_status(&value["status"]),
        },
        "artifact-update" if value["artifact"].is_object() => A2aEvent::Artifact {
            task_ref: parse_task_ref(value, "taskId"),
            artifact: parse_artifact(&value["artifact"]),
            append: value["append"] == true,
        },
        _ => A2aEvent::Other,
    }
}

/// Reads a task; `None` if it is none.
pub(super) fn parse_task(value: &Value) -> Option<A2aTask> {
    // A wrapped one is taken as well: who answers so means it.
    let value = if value["task"].is_object() { &value["task"] } else { value };
    (value["id"].is_string() && value["status"].is_object()).then(|| A2aTask {
        task_ref: parse_task_ref(value, "id"),
        status: parse_status(&value["status"]),
        artifacts: array_items(&value["artifacts"]).iter().map(parse_artifact).collect(),
        history: array_items(&value["history"])
            .iter()
            .filter(|it| is_from_agent(it))
            .map(parse_message)
            .collect(),
    })
}

fn parse_task_ref(value: &Value, task: &str) -> A2aTaskRef {
    let name = |value: &Value| value.as_str().filter(|name| !name.is_empty()).map(str::to_owned);
    A2aTaskRef { task: name(&value[task]), context: name(&value["contextId"]) }
}

fn parse_status(value: &Value) -> A2aTaskStatus {
    A2aTaskStatus {
        state: A2aTaskState::parse(&value["state"]),
        message: value["message"].is_object().then(|| parse_message(&value["message"])),
        timestamp: value["timestamp"].as_str().unwrap_or_default().to_owned(),
    }
}

fn parse_message(value: &Value) -> A2aMessage {
    let texts: Vec<String> =
        array_items(&value["parts"]).iter().map(|it| part_text(it).trim_matches('\n').to_owned()).collect();
    A2aMessage {
        id: value["messageId"].as_str().filter(|id| !id.is_empty()).map(str::to_owned),
        task_ref: parse_task_ref(value, "taskId"),
        text: texts.join("\n"),
    }
}

fn is_from_agent(message: &Value) -> bool {
    let role = message["role"].as_str().unwrap_or_default().to_ascii_lowercase();
    role.strip_prefix("role_").unwrap_or(&role) == "agent"
}

/// An artifact that grows is told in pieces and shown whole, so its text is its parts' one after the other.
fn parse_artifact(value: &Value) -> A2aArtifact {
    A2aArtifact {
        id: value["artifactId"].as_str().unwrap_or_default().to_owned(),
        text: array_items(&value["parts"]).iter().map(part_text).collect(),
    }
}

/// The text of a part. What is no text is named on a line of its own, and not shown: it would be of no use to a reader.
fn part_text(part: &Value) -> String {
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
pub(super) fn user_message(version: A2aVersion, of: &A2aTaskRef, id: &str, parts: Vec<Value>) -> Value {
    let mut message = json!({"messageId": id, "parts": parts});
    let fields = message.as_object_mut().expect("it was just made one");
    match version {
        A2aVersion::V1_0 => fields.insert("role".to_owned(), json!("ROLE_USER")),
        A2aVersion::V0_3 => {
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
pub(super) fn prompt_parts(version: A2aVersion, prompt: &DriverPrompt) -> Vec<Value> {
    let mut parts = Vec::new();
    if !prompt.text.is_empty() {
        parts.push(text_part(version, &prompt.text));
    }
    parts.extend(unseen_messages(&prompt.messages).iter().map(|words| text_part(version, words)));
    parts.extend(prompt.files.iter().map(|file| file_part(version, file)));
    parts
}

/// A part that is text.
pub(super) fn text_part(version: A2aVersion, text: &str) -> Value {
    match version {
        A2aVersion::V1_0 => json!({"text": text}),
        A2aVersion::V0_3 => json!({"kind": "text", "text": text}),
    }
}

fn file_part(version: A2aVersion, file: &PromptFile) -> Value {
    let PromptFile { name, mime, data } = file;
    match version {
        A2aVersion::V1_0 => json!({"raw": data, "filename": name, "mediaType": mime}),
        A2aVersion::V0_3 => json!({"kind": "file", "file": {"bytes": data, "name": name, "mimeType": mime}}),
    }
}

/// The settings that go with what we tell: where nothing is streamed, the answer is to come at once, and we look again.
pub(super) fn send_configuration(version: A2aVersion, streams: bool) -> Value {
    let mut fields = Map::new();
    match version {
        _ if streams => {}
        A2aVersion::V1_0 => drop(fields.insert("returnImmediately".to_owned(), json!(true))),
        A2aVersion::V0_3 => drop(fields.insert("blocking".to_owned(), json!(false))),
    }
    Value::Object(fields)
}

fn array_items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task_ref_t() -> A2aTaskRef {
        A2aTaskRef { task: Some("t".to_owned()), context: Some("c".to_owned()) }
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
            let (old, new) = (parse_event(&old), parse_event(&new));
            assert_eq!(old, new);
            assert_ne!(old, A2aEvent::Other);
        }
        let bare = json!({"id": "t", "contextId": "c", "status": status(false)});
        assert!(
            matches!(parse_event(&bare), A2aEvent::Task(A2aTask { task_ref, .. }) if task_ref == task_ref_t()),
            "as GetTask answers"
        );
    }

    #[test]
    fn every_state_is_known_and_an_unknown_one_ends_nothing() {
        let state = |word: &str| A2aTaskState::parse(&json!(word));
        for (old, new, is) in [
            ("submitted", "TASK_STATE_SUBMITTED", A2aTaskState::Working),
            ("working", "TASK_STATE_WORKING", A2aTaskState::Working),
            ("completed", "TASK_STATE_COMPLETED", A2aTaskState::Completed),
            ("failed", "TASK_STATE_FAILED", A2aTaskState::Failed),
            ("rejected", "TASK_STATE_REJECTED", A2aTaskState::Rejected),
            ("canceled", "TASK_STATE_CANCELED", A2aTaskState::Canceled),
            ("input-required", "TASK_STATE_INPUT_REQUIRED", A2aTaskState::InputRequired),
            ("auth-required", "TASK_STATE_AUTH_REQUIRED", A2aTaskState::AuthRequired),
            ("unknown", "TASK_STATE_UNSPECIFIED", A2aTaskState::Working),
            ("dreaming", "TASK_STATE_DREAMING", A2aTaskState::Working),
        ] {
            assert_eq!((state(old), state(new)), (is, is), "{old}");
        }
        assert!(!A2aTaskState::parse(&json!(7)).is_over());
    }

    #[test]
    fn files_and_data_are_named_and_their_bytes_are_not_shown() {
        let told = |value: Value| part_text(&value);
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
        let whole = parse_artifact(&json!({"artifactId": "x", "parts": pieces}));
        let joined: String =
            pieces.iter().map(|it| parse_artifact(&json!({"artifactId": "x", "parts": [it]})).text).collect();
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
            assert_eq!(parse_event(&value), A2aEvent::Other, "{value}");
        }
        let odd = json!({"task": {"id": "t", "status": {"state": 9, "message": "?"}, "artifacts": {}, "history": [3]}});
        assert!(
            matches!(parse_event(&odd), A2aEvent::Task(task) if task.status.state == A2aTaskState::Working)
        );
    }

    #[test]
    fn what_is_told_has_the_form_of_its_version() {
        let file = PromptFile { name: "n".to_owned(), mime: "m".to_owned(), data: "QQ==".to_owned() };
        let prompted = |version| {
            let what = DriverPrompt {
                run: qd_protocol::RunId::parse("r").unwrap(),
                text: "do".to_owned(),
                files: vec![file.clone()],
                messages: vec![],
                limits: Default::default(),
            };
            user_message(version, &task_ref_t(), "m1", prompt_parts(version, &what))
        };
        assert_eq!(
            prompted(A2aVersion::V1_0),
            json!({"messageId": "m1", "role": "ROLE_USER", "contextId": "c", "taskId": "t",
                "parts": [{"text": "do"}, {"raw": "QQ==", "filename": "n", "mediaType": "m"}]})
        );
        assert_eq!(
            prompted(A2aVersion::V0_3),
            json!({"kind": "message", "messageId": "m1", "role": "user", "contextId": "c", "taskId": "t", "parts": [
                {"kind": "text", "text": "do"}, {"kind": "file", "file": {"bytes": "QQ==", "name": "n", "mimeType": "m"}}]})
        );
        assert_eq!(
            user_message(A2aVersion::V1_0, &A2aTaskRef::default(), "m", vec![]).get("contextId"),
            None
        );
        assert_eq!(send_configuration(A2aVersion::V1_0, false), json!({"returnImmediately": true}));
        assert_eq!(send_configuration(A2aVersion::V0_3, false), json!({"blocking": false}));
        assert_eq!(send_configuration(A2aVersion::V0_3, true), json!({}));
    }
}
