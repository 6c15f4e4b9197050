//! An agent's tool calls, from its updates to what a session hears. It keeps what updates only hint at: which calls are
//! open, what has been shown of each, and what a later request for permission speaks of.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use agent_client_protocol::v1::schema::{
    TerminalId, ToolCallContent, ToolCallId, ToolCallLocation, ToolCallStatus, ToolCallUpdate,
    ToolCallUpdateFields, ToolKind,
};
use qd_protocol::limits::INLINE_MAX;
use qd_protocol::link::TurnUpdate;
use serde_json::{Map, Value, json};

use super::diff::unified_diff;
use super::event_decoder::content_block_text;

/// Tool calls that are remembered at once. When there are more, those that ended longest ago are forgotten, and only if
/// all are open the oldest of them.
const CALLS_MAX: usize = 4096;
/// What a terminal has shown, by its name.
pub(super) type AcpTerminalLookup<'a> = &'a dyn Fn(&TerminalId) -> Option<String>;

/// The tool calls of one turn.
#[derive(Debug, Default)]
pub(super) struct AcpToolCalls {
    calls: HashMap<ToolCallId, AcpToolCall>,
    /// The calls in the order in which they are forgotten: first those that ended, then those that did not.
    finished: VecDeque<ToolCallId>,
    started: VecDeque<ToolCallId>,
}

/// A tool call that the agent asks about.
#[derive(Debug, PartialEq)]
pub(super) struct AcpToolPermission {
    /// What is to be told first.
    pub(super) updates: Vec<TurnUpdate>,
    pub(super) tool: String,
    pub(super) title: Option<String>,
    pub(super) input: Value,
}

/// One tool call.
#[derive(Debug, Default)]
struct AcpToolCall {
    name: String,
    kind: Option<ToolKind>,
    input: Option<Value>,
    output: AcpEmittedOutput,
    stage: AcpCallStage,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum AcpCallStage {
    /// Announced, without its arguments.
    #[default]
    Announced,
    Started,
    Finished,
}

impl AcpToolCalls {
    /// Forgets those of the turn before.
    pub(super) fn clear(&mut self) {
        self.calls.clear();
        self.finished.clear();
        self.started.clear();
    }

    /// A tool call that the agent asks about. It is judged by what the request itself says; what is known of the call
    /// only fills the gaps, and not even that if the call has ended and its id is merely used again.
    pub(super) fn record_permission_request(
        &mut self,
        update: ToolCallUpdate,
        shows: AcpTerminalLookup<'_>,
    ) -> AcpToolPermission {
        let ToolCallUpdateFields { name, kind, title, raw_input, content, locations, .. } =
            update.fields.clone();
        let id = update.tool_call_id.clone();
        let before = self.calls.get(&id).map(|call| (call.stage, call.kind.and_then(tool_name_for_kind)));
        let own_kind = kind.and_then(tool_name_for_kind);
        let said = self.update(update, shows);
        let known = self.calls.get(&id).filter(|_| !matches!(before, Some((AcpCallStage::Finished, _))));
        let is_another = matches!((own_kind, before), (Some(own), Some((_, Some(kind)))) if own != kind);
        let known_name = known.filter(|_| !is_another).map(|call| call.name.clone());
        let tool = name
            .or_else(|| known_name.filter(|name| !name.is_empty()))
            .or_else(|| own_kind.map(str::to_owned))
            .or_else(|| title.clone())
            .unwrap_or_else(|| UNNAMED_TOOL.to_owned());
        let input = raw_input.filter(|input| !is_empty(input));
        let input = input
            .or_else(|| known.and_then(|call| call.input.clone()))
            .or_else(|| {
                input_from_display(own_kind, title.as_deref(), content.as_deref(), locations.as_deref())
            })
            .unwrap_or_else(empty_input);
        AcpToolPermission { updates: said, tool, title, input }
    }

    /// What an update of a call says.
    pub(super) fn update(&mut self, update: ToolCallUpdate, shows: AcpTerminalLookup<'_>) -> Vec<TurnUpdate> {
        let ToolCallUpdate { tool_call_id: id, fields, .. } = update;
        if !self.calls.contains_key(&id) {
            if self.calls.len() >= CALLS_MAX {
                self.evict_one();
            }
            self.started.push_back(id.clone());
        }
        let call = self.calls.entry(id.clone()).or_default();
        let was_finished = call.stage == AcpCallStage::Finished;
        let said = call.update(&id, fields, shows);
        if call.stage == AcpCallStage::Finished && !was_finished {
            self.finished.push_back(id);
        }
        said
    }

    fn evict_one(&mut self) {
        // What has ended is in both lists, so that the second may name what is forgotten already.
        while let Some(id) = self.finished.pop_front().or_else(|| self.started.pop_front()) {
            if self.calls.remove(&id).is_some() {
                break;
            }
        }
        if self.started.len() > 2 * CALLS_MAX {
            self.started.retain(|id| self.calls.contains_key(id));
        }
    }
}

/// The name of a tool whose agent gives none.
const UNNAMED_TOOL: &str = "tool";

/// The name under which rules know the tools of a kind, for agents that give a title and no name.
fn tool_name_for_kind(kind: ToolKind) -> Option<&'static str> {
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

impl AcpToolCall {
    fn update(
        &mut self,
        id: &ToolCallId,
        fields: ToolCallUpdateFields,
        shows: AcpTerminalLookup<'_>,
    ) -> Vec<TurnUpdate> {
        if self.stage == AcpCallStage::Finished {
            return Vec::new();
        }
        let ToolCallUpdateFields { kind, status, title, name, content, raw_input, raw_output, .. } = fields;
        self.kind = kind.filter(|kind| tool_name_for_kind(*kind).is_some()).or(self.kind);
        let named_by_kind = self.kind.and_then(tool_name_for_kind).map(str::to_owned);
        if let Some(name) = name.or_else(|| named_by_kind.or(title).filter(|_| self.name.is_empty())) {
            self.name = name;
        }
        let mut input = raw_input.filter(|input| !is_empty(input));
        let output: String =
            content.unwrap_or_default().into_iter().map(|it| content_text(it, shows)).collect();
        let goes_on = status.is_some_and(|status| status != ToolCallStatus::Pending);

        let call_id = id.to_string();
        let mut said = Vec::new();
        // Some agents announce a call first and give its arguments later; then it starts when they are known.
        if self.stage == AcpCallStage::Announced && (input.is_some() || goes_on || !output.is_empty()) {
            self.stage = AcpCallStage::Started;
            if self.name.is_empty() {
                self.name = UNNAMED_TOOL.to_owned();
            }
            let input = input.clone().unwrap_or_else(empty_input);
            said.push(TurnUpdate::ToolStarted { call_id: call_id.clone(), name: self.name.clone(), input });
        }
        if let Some(input) = input.take() {
            self.input = Some(capped_input(input));
        }
        if let Some(text) = self.output.take_new(output) {
            said.push(TurnUpdate::ToolOutput { call_id: call_id.clone(), text });
        }
        if let Some(status @ (ToolCallStatus::Completed | ToolCallStatus::Failed)) = status {
            self.stage = AcpCallStage::Finished;
            self.input = None;
            let shown = std::mem::take(&mut self.output).into_output();
            said.push(TurnUpdate::ToolFinished {
                call_id,
                name: self.name.clone(),
                output: raw_output.or(shown).unwrap_or_default(),
                is_error: status == ToolCallStatus::Failed,
            });
        }
        said
    }
}

/// What has been told as a call's output: agents repeat all of it each time.
#[derive(Debug, Default)]
struct AcpEmittedOutput {
    bytes: usize,
    hash: u64,
    /// All of it while that fits an event: it is what the call gave if the agent does not say so itself.
    text: String,
}

impl AcpEmittedOutput {
    /// What of the output is new.
    fn take_new(&mut self, output: String) -> Option<String> {
        let known = output.get(..self.bytes).is_some_and(|start| text_hash(start) == self.hash);
        let new = if known { &output[self.bytes..] } else { &output };
        if new.is_empty() {
            return None;
        }
        let new = new.to_owned();
        (self.bytes, self.hash) = (output.len(), text_hash(&output));
        self.text = if output.len() <= INLINE_MAX { output } else { String::new() };
        Some(new)
    }

    /// All of it, or that it was too much: then it was told piece by piece, and not again.
    fn into_output(self) -> Option<Value> {
        match self.bytes {
            0 => None,
            bytes if self.text.is_empty() => Some(format!("[{bytes} bytes, as told before]").into()),
            _ => Some(self.text.into()),
        }
    }
}

fn text_hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// Arguments as they are remembered: whole or not at all, since a cut could go through a secret.
fn capped_input(input: Value) -> Value {
    let size = input.to_string().len();
    if size <= INLINE_MAX { input } else { format!("[{size} bytes, as told before]").into() }
}

/// Arguments that nobody gave.
fn empty_input() -> Value {
    Value::Object(Map::new())
}

fn is_empty(input: &Value) -> bool {
    input.is_null() || input.as_object().is_some_and(serde_json::Map::is_empty)
}

/// What a tool would be given, of an agent that only shows it to people.
fn input_from_display(
    tool: Option<&str>,
    title: Option<&str>,
    content: Option<&[ToolCallContent]>,
    locations: Option<&[ToolCallLocation]>,
) -> Option<Value> {
    let changed = content.unwrap_or_default().iter().find_map(|content| match content {
        ToolCallContent::Diff(diff) => Some(diff.path.clone()),
        _ => None,
    });
    let path = changed.or_else(|| locations?.first().map(|location| location.path.clone()));
    match (tool?, title, path) {
        ("Bash", Some(title), _) => Some(json!({ "command": title })),
        ("WebFetch", Some(title), _) => Some(json!({ "url": title })),
        (_, _, Some(path)) => Some(json!({ "path": path })),
        _ => None,
    }
}

fn content_text(content: ToolCallContent, shows: AcpTerminalLookup<'_>) -> String {
    match content {
        ToolCallContent::Content(content) => content_block_text(content.content),
        ToolCallContent::Diff(diff) => unified_diff(
            &diff.path.display().to_string(),
            diff.old_text.as_deref().unwrap_or_default(),
            &diff.new_text,
        ),
        ToolCallContent::Terminal(terminal) => shows(&terminal.terminal_id).unwrap_or_default(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use agent_client_protocol::v1::schema::{
        Content, ContentBlock, Diff, SessionUpdate, Terminal, TextContent, ToolCall,
    };
    use serde_json::json;

    use super::*;

    /// Calls as they come among the updates.
    #[derive(Default)]
    struct AcpTestCalls(AcpToolCalls);

    impl AcpTestCalls {
        fn decode(&mut self, update: SessionUpdate) -> Vec<TurnUpdate> {
            match update {
                SessionUpdate::ToolCall(call) => self.0.update(call.into(), &|_| None),
                SessionUpdate::ToolCallUpdate(update) => self.0.update(update, &|_| None),
                other => panic!("{other:?} is no call"),
            }
        }

        fn record_permission_request(&mut self, update: ToolCallUpdate) -> AcpToolPermission {
            self.0.record_permission_request(update, &|_| None)
        }

        fn begin_turn(&mut self) {
            self.0.clear();
        }
    }

    fn tool_started(call_id: &str, name: &str, input: Value) -> TurnUpdate {
        TurnUpdate::ToolStarted { call_id: call_id.to_owned(), name: name.to_owned(), input }
    }

    fn update(fields: ToolCallUpdateFields) -> SessionUpdate {
        SessionUpdate::ToolCallUpdate(ToolCallUpdate::new("c", fields))
    }

    fn content(text: &str) -> Vec<ToolCallContent> {
        vec![ToolCallContent::Content(Content::new(ContentBlock::Text(TextContent::new(text))))]
    }

    #[test]
    fn a_call_that_is_announced_without_arguments_starts_when_they_come() {
        let mut ear = AcpTestCalls::default();
        assert_eq!(ear.decode(SessionUpdate::ToolCall(ToolCall::new("c", "Bash").raw_input(json!({})))), []);
        let said = ear
            .decode(update(ToolCallUpdateFields::new().title("ls -l").raw_input(json!({"command": "ls"}))));
        assert_eq!(said, [tool_started("c", "Bash", json!({"command": "ls"}))]);
    }

    #[test]
    fn output_that_is_repeated_whole_is_told_piece_by_piece() {
        let mut ear = AcpTestCalls::default();
        let call = ToolCall::new("c", "run").name("Bash".to_owned()).status(ToolCallStatus::InProgress);
        assert_eq!(ear.decode(SessionUpdate::ToolCall(call)), [tool_started("c", "Bash", json!({}))]);
        let output = |text: &str| TurnUpdate::ToolOutput { call_id: "c".to_owned(), text: text.to_owned() };
        let shows = |text| update(ToolCallUpdateFields::new().content(content(text)));
        assert_eq!(ear.decode(shows("one\n")), [output("one\n")]);
        assert_eq!(ear.decode(shows("one\ntwo\n")), [output("two\n")]);
        assert_eq!(ear.decode(shows("one\ntwo\n")), []);
        let fails = ToolCallUpdateFields::new().status(ToolCallStatus::Failed);
        let finished = TurnUpdate::ToolFinished {
            call_id: "c".to_owned(),
            name: "Bash".to_owned(),
            output: json!("one\ntwo\n"),
            is_error: true,
        };
        assert_eq!(ear.decode(update(fails.clone())), [finished]);
        assert_eq!(ear.decode(update(fails)), [], "a call ends once");
    }

    #[test]
    fn a_call_of_which_only_the_end_is_heard_has_started_too() {
        let mut ear = AcpTestCalls::default();
        let fields = ToolCallUpdateFields::new().status(ToolCallStatus::Completed).raw_output(json!(1));
        let said = ear.decode(update(fields));
        assert_eq!(said[0], tool_started("c", UNNAMED_TOOL, json!({})));
        assert!(
            matches!(&said[1], TurnUpdate::ToolFinished { output, is_error: false, .. } if *output == json!(1))
        );
    }

    #[test]
    fn past_the_bound_every_call_is_told_and_the_oldest_that_ended_is_forgotten() {
        let mut ear = AcpTestCalls::default();
        let call = |n: usize, status| {
            let call = ToolCall::new(format!("c{n}"), "t").name("Bash".to_owned()).status(status);
            SessionUpdate::ToolCall(call.raw_input(json!({"command": n})))
        };
        assert_eq!(ear.decode(call(0, ToolCallStatus::InProgress)).len(), 1);
        for n in 1..3 * CALLS_MAX {
            assert_eq!(ear.decode(call(n, ToolCallStatus::Completed)).len(), 2, "{n}");
        }
        assert!(ear.0.calls.len() <= CALLS_MAX && ear.0.started.len() <= 2 * CALLS_MAX + 1);
        let open = ear.record_permission_request(ToolCallUpdate::new("c0", ToolCallUpdateFields::new()));
        assert_eq!((open.tool.as_str(), open.input), ("Bash", json!({"command": 0})), "it is still open");
        for n in 0..2 * CALLS_MAX {
            let said = ear.decode(call(100_000 + n, ToolCallStatus::InProgress));
            assert_eq!(
                said,
                [tool_started(&format!("c{}", 100_000 + n), "Bash", json!({"command": 100_000 + n}))]
            );
        }
        assert_eq!(ear.0.calls.len(), CALLS_MAX);
    }

    #[test]
    fn a_permission_is_judged_by_its_own_words() {
        let mut ear = AcpTestCalls::default();
        let asks = |ear: &mut AcpTestCalls, fields| {
            let AcpToolPermission { tool, input, .. } =
                ear.record_permission_request(ToolCallUpdate::new("c", fields));
            (tool, input)
        };
        let fields = ToolCallUpdateFields::new;
        ear.decode(update(
            fields().name("Read".to_owned()).kind(ToolKind::Read).raw_input(json!({"path": "a"})),
        ));
        let own = fields().name("Bash".to_owned()).raw_input(json!({"command": "rm"}));
        assert_eq!(asks(&mut ear, own), ("Bash".to_owned(), json!({"command": "rm"})));

        ear.begin_turn();
        ear.decode(update(
            fields().name("Read".to_owned()).kind(ToolKind::Read).raw_input(json!({"path": "a"})),
        ));
        assert_eq!(asks(&mut ear, fields().title("Reading")), ("Read".to_owned(), json!({"path": "a"})));
        let kind = fields().kind(ToolKind::Execute).raw_input(json!({"command": "rm"}));
        assert_eq!(asks(&mut ear, kind), ("Bash".to_owned(), json!({"command": "rm"})));

        ear.decode(update(fields().status(ToolCallStatus::Completed)));
        let again = fields().title("rm").raw_input(json!({"command": "rm"}));
        assert_eq!(
            asks(&mut ear, again),
            ("rm".to_owned(), json!({"command": "rm"})),
            "its id is used again"
        );
        assert_eq!(asks(&mut ear, fields()), (UNNAMED_TOOL.to_owned(), json!({})));
    }

    #[test]
    fn a_tool_without_a_name_is_called_by_its_kind_and_only_then_by_its_title() {
        let mut ear = AcpTestCalls::default();
        let call =
            |id: &'static str, kind| ToolCall::new(id, "Run `ls`").kind(kind).raw_input(json!({"a": 1}));
        let said = ear.decode(SessionUpdate::ToolCall(call("c", ToolKind::Execute)));
        assert_eq!(said, [tool_started("c", "Bash", json!({"a": 1}))]);
        let said = ear.decode(SessionUpdate::ToolCall(call("d", ToolKind::Other)));
        assert_eq!(said, [tool_started("d", "Run `ls`", json!({"a": 1}))]);
        let asking = ear.record_permission_request(ToolCallUpdate::new(
            "c",
            ToolCallUpdateFields::new().title("Run `ls`"),
        ));
        assert_eq!((asking.tool.as_str(), asking.title.as_deref()), ("Bash", Some("Run `ls`")));
    }

    #[test]
    fn output_beyond_the_bound_is_told_once_however_often_it_is_repeated() {
        let mut ear = AcpTestCalls::default();
        let (mut all, mut told) = ("x".repeat(INLINE_MAX), 0);
        for _ in 0..5 {
            all.push_str("more");
            for said in ear.decode(update(ToolCallUpdateFields::new().content(content(&all)))) {
                if let TurnUpdate::ToolOutput { text, .. } = said {
                    told += text.len();
                }
            }
        }
        assert_eq!(told, all.len());
        let said = ear.decode(update(ToolCallUpdateFields::new().status(ToolCallStatus::Completed)));
        let note = json!(format!("[{} bytes, as told before]", all.len()));
        assert!(
            matches!(&said[..], [TurnUpdate::ToolFinished { output, .. }] if *output == note),
            "{said:?}"
        );
    }

    #[test]
    fn what_is_only_shown_to_people_is_judged_all_the_same() {
        let mut calls = AcpToolCalls::default();
        let mut asks =
            |fields| calls.record_permission_request(ToolCallUpdate::new("c", fields), &|_| None).input;
        let fields = ToolCallUpdateFields::new;
        assert_eq!(asks(fields().kind(ToolKind::Execute).title("rm -rf x")), json!({"command": "rm -rf x"}));
        let diff = ToolCallContent::Diff(Diff::new("/w/a.rs", "new"));
        assert_eq!(asks(fields().kind(ToolKind::Edit).content(vec![diff])), json!({"path": "/w/a.rs"}));
        let place = vec![ToolCallLocation::new("/w/b.rs")];
        assert_eq!(
            asks(fields().kind(ToolKind::Read).title("Read b").locations(place)),
            json!({"path": "/w/b.rs"})
        );
    }

    #[test]
    fn a_change_is_shown_line_by_line_and_a_terminal_by_what_it_has_shown() {
        let mut calls = AcpToolCalls::default();
        let diff = ToolCallContent::Diff(Diff::new("/w/a", "b\n").old_text("a\n".to_owned()));
        let said = calls
            .update(ToolCallUpdate::new("c", ToolCallUpdateFields::new().content(vec![diff])), &|_| None);
        let Some(TurnUpdate::ToolOutput { text, .. }) = said.last() else { panic!("{said:?}") };
        assert!(text.ends_with("-a\n+b\n"), "{text}");
        let terminal = ToolCallContent::Terminal(Terminal::new("term_1"));
        let fields = ToolCallUpdateFields::new().content(vec![terminal]).status(ToolCallStatus::Completed);
        let said = calls.update(ToolCallUpdate::new("d", fields), &|id| Some(format!("shown by {id}")));
        assert!(
            matches!(&said[2], TurnUpdate::ToolFinished { output, .. } if output == "shown by term_1"),
            "{said:?}"
        );
    }
}
