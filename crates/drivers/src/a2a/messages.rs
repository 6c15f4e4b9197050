//! The messages of the protocol. Both wire formats are parsed into the same types, and messages are written in the
//! format that the agent speaks. Parsing is lenient: an unknown field, part or state is ignored and breaks no turn.

use qd_protocol::link::PromptFile;
use serde_json::{Map, Value, json};

use super::card::A2aVersion;
use crate::prompt_content::prompt_blocks;
use crate::turn::DriverPrompt;

/// An event of a stream, or the response to a call.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum A2aEvent {
    /// The current state of a task.
    Task(A2aTask),
    /// A complete answer without a task.
    Message(A2aMessage),
    /// A change of a task's status.
    Status { task_ref: A2aTaskRef, status: A2aTaskStatus },
    /// An artifact of a task, or a piece of one.
    Artifact { task_ref: A2aTaskRef, artifact: A2aArtifact, append: bool },
    /// An event of an unknown kind.
    Other,
}

/// The ids of a task and of its conversation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct A2aTaskRef {
    pub(super) task: Option<String>,
    pub(super) context: Option<String>,
}

/// The current state of a task.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct A2aTask {
    pub(super) task_ref: A2aTaskRef,
    pub(super) status: A2aTaskStatus,
    pub(super) artifacts: Vec<A2aArtifact>,
    /// The agent's messages about the task so far.
    pub(super) history: Vec<A2aMessage>,
}

/// The status of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct A2aTaskStatus {
    pub(super) state: A2aTaskState,
    pub(super) message: Option<A2aMessage>,
    /// When the status was set, in the agent's format.
    pub(super) timestamp: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum A2aTaskState {
    /// The task is running. Also stands for unknown states, which must not end it.
    Working,
    Completed,
    Failed,
    Rejected,
    Canceled,
    InputRequired,
    AuthRequired,
}

impl A2aTaskState {
    /// Whether the state is final.
    pub(super) fn is_over(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Rejected | Self::Canceled)
    }

    fn parse(value: &Value) -> Self {
        let name = value.as_str().unwrap_or_default().to_ascii_lowercase().replace('_', "-");
        match name.strip_prefix("task-state-").unwrap_or(&name) {
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

/// A message of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct A2aMessage {
    pub(super) id: Option<String>,
    pub(super) task_ref: A2aTaskRef,
    pub(super) text: String,
}

/// An artifact of the agent, or a piece of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct A2aArtifact {
    pub(super) id: String,
    pub(super) text: String,
}

/// Parses one event of a stream or the response to a call. In 1.0 a key says what it is, in 0.3 the field `kind` does.
/// Some calls return a task without either, in both versions.
pub(super) fn parse_event(value: &Value) -> A2aEvent {
    let keys = [
        ("task", "task"),
        ("message", "message"),
        ("statusUpdate", "status-update"),
        ("artifactUpdate", "artifact-update"),
    ];
    let found = keys.iter().find(|(key, _)| value[key].is_object() && value.get("kind").is_none());
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

/// Parses a task. `None` if it is not one.
pub(super) fn parse_task(value: &Value) -> Option<A2aTask> {
    // Some agents wrap the task; that is accepted, too.
    let value = if value["task"].is_object() { &value["task"] } else { value };
    (value["id"].is_string() && value["status"].is_object()).then(|| A2aTask {
        task_ref: parse_task_ref(value, "id"),
        status: parse_status(&value["status"]),
        artifacts: array_items(&value["artifacts"]).iter().map(parse_artifact).collect(),
        history: array_items(&value["history"])
            .iter()
            .filter(|message| is_from_agent(message))
            .map(parse_message)
            .collect(),
    })
}

fn parse_task_ref(value: &Value, task: &str) -> A2aTaskRef {
    let non_empty =
        |value: &Value| value.as_str().filter(|non_empty| !non_empty.is_empty()).map(str::to_owned);
    A2aTaskRef { task: non_empty(&value[task]), context: non_empty(&value["contextId"]) }
}

fn parse_status(value: &Value) -> A2aTaskStatus {
    A2aTaskStatus {
        state: A2aTaskState::parse(&value["state"]),
        message: value["message"].is_object().then(|| parse_message(&value["message"])),
        timestamp: value["timestamp"].as_str().unwrap_or_default().to_owned(),
    }
}

fn parse_message(value: &Value) -> A2aMessage {
    let texts: Vec<String> = array_items(&value["parts"])
        .iter()
        .map(|part| part_text(part).trim_matches('\n').to_owned())
        .collect();
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

/// Parses an artifact. It may come in pieces and later whole, so its text is the concatenation of its parts.
fn parse_artifact(value: &Value) -> A2aArtifact {
    A2aArtifact {
        id: value["artifactId"].as_str().unwrap_or_default().to_owned(),
        text: array_items(&value["parts"]).iter().map(part_text).collect(),
    }
}

/// The text of a part. A part without text is only named, on a line of its own, because its bytes are of no use to a
/// reader.
fn part_text(part: &Value) -> String {
    if let Some(text) = part["text"].as_str() {
        return text.to_owned();
    }
    let file = if part["file"].is_object() { &part["file"] } else { part };
    let field =
        |names: &[&str]| names.iter().find_map(|name| file[*name].as_str()).filter(|value| !value.is_empty());
    let kind = field(&["mediaType", "mimeType"]);
    let name = field(&["filename", "name"]).unwrap_or("without a name");
    let url = field(&["url", "uri", "fileWithUri"]);
    let bytes = field(&["raw", "bytes", "fileWithBytes"]);
    let kind = |default: &'static str| kind.unwrap_or(default).to_owned();
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

/// A message to the agent: a prompt with its files, or the answer to a question.
pub(super) fn user_message(version: A2aVersion, task_ref: &A2aTaskRef, id: &str, parts: Vec<Value>) -> Value {
    let mut message = json!({"messageId": id, "parts": parts});
    let fields = message.as_object_mut().expect("it was just created as an object");
    match version {
        A2aVersion::V1_0 => fields.insert("role".to_owned(), json!("ROLE_USER")),
        A2aVersion::V0_3 => {
            fields.insert("kind".to_owned(), json!("message"));
            fields.insert("role".to_owned(), json!("user"))
        }
    };
    let mut insert_id = |key: &str, value: &Option<String>| {
        if let Some(value) = value {
            fields.insert(key.to_owned(), json!(value));
        }
    };
    insert_id("contextId", &task_ref.context);
    insert_id("taskId", &task_ref.task);
    message
}

pub(super) fn prompt_parts(version: A2aVersion, prompt: &DriverPrompt) -> Vec<Value> {
    // An agent takes every file: it is sent as it is.
    prompt_blocks(prompt, |text| text_part(version, text), |file| Some(file_part(version, file))).0
}

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

/// The configuration of a message. Without streams, the response is to come at once, and the task is polled.
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
    use crate::prompt_content::test_prompt;

    fn task_ref_t() -> A2aTaskRef {
        A2aTaskRef { task: Some("t".to_owned()), context: Some("c".to_owned()) }
    }

    #[test]
    fn both_wire_formats_mean_the_same() {
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
        let state = |name: &str| A2aTaskState::parse(&json!(name));
        for (old, new, expected) in [
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
            assert_eq!((state(old), state(new)), (expected, expected), "{old}");
        }
        assert!(!A2aTaskState::parse(&json!(7)).is_over());
    }

    #[test]
    fn files_and_data_are_named_and_their_bytes_are_not_shown() {
        let text_of = |value: Value| part_text(&value);
        let raw = "QUJDREVG";
        assert_eq!(
            text_of(json!({"raw": raw, "filename": "a.png", "mediaType": "image/png"})),
            "\n[file a.png, image/png, 6 bytes]\n"
        );
        assert_eq!(
            text_of(
                json!({"kind": "file", "file": {"bytes": raw, "name": "a.png", "mimeType": "image/png"}})
            ),
            "\n[file a.png, image/png, 6 bytes]\n"
        );
        assert_eq!(
            text_of(json!({"url": "https://h/x.pdf"})),
            "\n[file without a name, of unknown type, at https://h/x.pdf]\n"
        );
        assert!(text_of(json!({"kind": "file", "file": {"uri": "https://h/x"}})).contains("https://h/x"));
        assert_eq!(text_of(json!({"data": {"a": 1}})), "\n[data, application/json, 7 bytes]\n");
        assert_eq!(text_of(json!({"hologram": 1})), "");
    }

    #[test]
    fn an_artifact_in_pieces_is_the_same_text_as_the_whole() {
        let pieces = [json!({"text": "a "}), json!({"data": [1]}), json!({"text": "b"})];
        let whole = parse_artifact(&json!({"artifactId": "x", "parts": pieces}));
        let joined: String = pieces
            .iter()
            .map(|part| parse_artifact(&json!({"artifactId": "x", "parts": [part]})).text)
            .collect();
        assert_eq!(whole.text, joined);
    }

    #[test]
    fn nonsense_is_ignored() {
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
    fn a_message_has_the_format_of_its_version() {
        let file = PromptFile { name: "n".to_owned(), mime: "m".to_owned(), data: "QQ==".to_owned() };
        let message_for = |version| {
            let prompt = test_prompt("do", vec![file.clone()], vec![]);
            user_message(version, &task_ref_t(), "m1", prompt_parts(version, &prompt))
        };
        assert_eq!(
            message_for(A2aVersion::V1_0),
            json!({"messageId": "m1", "role": "ROLE_USER", "contextId": "c", "taskId": "t",
                "parts": [{"text": "do"}, {"raw": "QQ==", "filename": "n", "mediaType": "m"}]})
        );
        assert_eq!(
            message_for(A2aVersion::V0_3),
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
