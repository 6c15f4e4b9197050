//! Turns an agent's tool call updates into turn updates. It keeps the state that single updates leave out: which calls
//! are open, which output was already emitted, and what a later permission request refers to.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use agent_client_protocol::v1::schema::{
    Meta, TerminalId, ToolCallContent, ToolCallId, ToolCallStatus, ToolCallUpdate, ToolCallUpdateFields,
    ToolKind,
};
use qd_core::policy::main_argument;
use qd_protocol::limits::INLINE_MAX;
use qd_protocol::link::TurnUpdate;
use serde_json::Value;

use super::diff::unified_diff;
use super::event_decoder::content_block_text;
use super::tool_inputs::{AcpCallDisplay, empty_input, is_empty};
use super::tool_names::{UNNAMED_TOOL, mcp_call_in_input, mcp_name, name_in_call_id, tool_name_for_kind};

/// The most tool calls remembered at once. Beyond that, the call that finished longest ago is forgotten, or the oldest
/// call if all are open.
const CALLS_MAX: usize = 4096;
/// The most bytes of arguments remembered of all open calls together. A permission request that comes without arguments
/// shows those of its call; beyond the limit it says where they are.
const INPUTS_MAX: usize = 16 << 20;

/// Looks up the output of a terminal so far, by its id.
pub(super) type AcpTerminalLookup<'a> = &'a dyn Fn(&TerminalId) -> Option<String>;

/// The tool calls of one turn.
#[derive(Debug, Default)]
pub(super) struct AcpToolCalls {
    calls: HashMap<ToolCallId, AcpToolCall>,
    /// Finished calls, in the order in which they are forgotten. They go before all others.
    finished: VecDeque<ToolCallId>,
    /// All calls in the order of arrival, including finished ones.
    started: VecDeque<ToolCallId>,
    /// The bytes of all remembered arguments, as JSON.
    input_bytes: usize,
    /// What ends the tool's name at the beginning of a call's id, if the agent's ids begin so.
    name_in_call_id: Option<String>,
    /// Whether the text with which a call is announced describes it, and is no output of the tool.
    describes_calls: bool,
}

/// A tool call for which the agent requests permission.
#[derive(Debug, PartialEq)]
pub(super) struct AcpToolPermission {
    /// Updates to emit before the ask.
    pub(super) updates: Vec<TurnUpdate>,
    pub(super) tool: String,
    pub(super) title: Option<String>,
    pub(super) input: Value,
}

#[derive(Debug, Default)]
struct AcpToolCall {
    name: String,
    kind: Option<ToolKind>,
    input: Option<Value>,
    /// The bytes of `input` as JSON.
    input_bytes: usize,
    output: AcpEmittedOutput,
    stage: AcpCallStage,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum AcpCallStage {
    /// Announced, but its arguments are not known yet.
    #[default]
    Announced,
    Started,
    Finished,
}

impl AcpToolCalls {
    pub(super) fn new(name_in_call_id: Option<String>, describes_calls: bool) -> Self {
        Self { name_in_call_id, describes_calls, ..Self::default() }
    }

    /// Forgets the calls of the previous turn.
    pub(super) fn clear(&mut self) {
        self.calls.clear();
        self.finished.clear();
        self.started.clear();
        self.input_bytes = 0;
    }

    /// Records a permission request. The call is judged by what the request itself says. What is already known of the
    /// call only fills gaps, and not even that if the call has finished and its id is reused.
    pub(super) fn record_permission_request(
        &mut self,
        mut update: ToolCallUpdate,
        terminals: AcpTerminalLookup<'_>,
    ) -> AcpToolPermission {
        unwrap_mcp_call(&mut update);
        let id = update.tool_call_id.clone();
        let known = self.calls.get(&id).filter(|call| call.stage != AcpCallStage::Finished);
        let fields = &mut update.fields;
        let own_kind = fields.kind.and_then(tool_name_for_kind);
        let known_kind = known.and_then(|call| call.kind).and_then(tool_name_for_kind);
        let is_another = matches!((own_kind, known_kind), (Some(own), Some(kind)) if own != kind);
        let known_name = known.filter(|_| !is_another).map(|call| call.name.clone());
        let title = fields.title.clone();
        // The title of a command is the command, which must not pass for a tool that a rule allows.
        let mcp_title = title.as_deref().filter(|_| own_kind.or(known_kind).is_none());
        let tool = mcp_name(fields.name.as_deref(), mcp_title, update.meta.as_ref())
            .or_else(|| fields.name.clone())
            .or_else(|| known_name.filter(|name| !name.is_empty()))
            .or_else(|| {
                own_kind.or_else(|| name_in_call_id(&id, self.name_in_call_id.as_deref())).map(str::to_owned)
            })
            .or_else(|| title.clone())
            .unwrap_or_else(|| UNNAMED_TOOL.to_owned());
        // The content describes what is asked for, so it is no output of the tool.
        let content = fields.content.take();
        let display = AcpCallDisplay {
            title: title.as_deref(),
            content: content.as_deref(),
            locations: fields.locations.as_deref(),
        };
        let input = fields.raw_input.clone().filter(|input| !is_empty(input));
        let input = input
            .or_else(|| known.and_then(|call| call.input.clone()))
            .or_else(|| display.derive_input(known_tool(own_kind, &tool)?))
            .unwrap_or_else(empty_input);
        // If the call has not started yet, it starts with the arguments for which permission is requested.
        let updates = self.update_call(update, Some(&input), terminals);
        AcpToolPermission { updates, tool, title, input }
    }

    /// Decodes one update of a call.
    pub(super) fn update(
        &mut self,
        mut update: ToolCallUpdate,
        terminals: AcpTerminalLookup<'_>,
    ) -> Vec<TurnUpdate> {
        unwrap_mcp_call(&mut update);
        self.update_call(update, None, terminals)
    }

    fn update_call(
        &mut self,
        update: ToolCallUpdate,
        asked_input: Option<&Value>,
        terminals: AcpTerminalLookup<'_>,
    ) -> Vec<TurnUpdate> {
        let ToolCallUpdate { tool_call_id: id, fields, meta, .. } = update;
        let is_announced = !self.calls.contains_key(&id);
        if is_announced {
            if self.calls.len() >= CALLS_MAX {
                self.evict_one();
            }
            self.started.push_back(id.clone());
        }
        let name_in_id = name_in_call_id(&id, self.name_in_call_id.as_deref());
        let call = self.calls.entry(id.clone()).or_default();
        let was_finished = call.stage == AcpCallStage::Finished;
        let bytes_before = call.input_bytes;
        let room = INPUTS_MAX.saturating_sub(self.input_bytes - bytes_before);
        let is_description = self.describes_calls && is_announced && !is_finished(fields.status);
        let context =
            AcpCallContext { meta: meta.as_ref(), name_in_id, asked_input, is_description, room, terminals };
        let updates = call.update(&id, fields, &context);
        self.input_bytes = self.input_bytes - bytes_before + call.input_bytes;
        if call.stage == AcpCallStage::Finished && !was_finished {
            self.finished.push_back(id);
        }
        updates
    }

    fn evict_one(&mut self) {
        // Finished calls are in both lists, so `started` may name a call that is already forgotten.
        while let Some(id) = self.finished.pop_front().or_else(|| self.started.pop_front()) {
            if let Some(call) = self.calls.remove(&id) {
                self.input_bytes -= call.input_bytes;
                break;
            }
        }
        if self.started.len() > 2 * CALLS_MAX {
            self.started.retain(|id| self.calls.contains_key(id));
        }
    }
}

/// Gives a call of an MCP tool that comes as another tool its own name and arguments.
fn unwrap_mcp_call(update: &mut ToolCallUpdate) {
    let fields = &mut update.fields;
    if let Some((name, arguments)) = mcp_call_in_input(fields.raw_input.as_ref(), update.meta.as_ref()) {
        (fields.name, fields.raw_input, fields.kind) = (Some(name), Some(arguments), None);
    }
}

fn is_finished(status: Option<ToolCallStatus>) -> bool {
    matches!(status, Some(ToolCallStatus::Completed | ToolCallStatus::Failed))
}

/// What an update of a call is decoded with.
struct AcpCallContext<'a> {
    meta: Option<&'a Meta>,
    /// The name of the tool in the id of the call.
    name_in_id: Option<&'a str>,
    /// The arguments for which permission is requested.
    asked_input: Option<&'a Value>,
    /// The content describes the call, so it is no output of the tool.
    is_description: bool,
    /// How many bytes of arguments may be remembered.
    room: usize,
    terminals: AcpTerminalLookup<'a>,
}

/// The tool whose arguments can be derived from what is shown of a call: one that is known by its kind, or of an MCP
/// server.
fn known_tool<'a>(kind: Option<&'a str>, name: &'a str) -> Option<&'a str> {
    kind.or_else(|| name.starts_with("mcp__").then_some(name))
}

impl AcpToolCall {
    fn update(
        &mut self,
        id: &ToolCallId,
        fields: ToolCallUpdateFields,
        context: &AcpCallContext<'_>,
    ) -> Vec<TurnUpdate> {
        if self.stage == AcpCallStage::Finished {
            return Vec::new();
        }
        let ToolCallUpdateFields {
            kind, status, title, name, content, locations, raw_input, raw_output, ..
        } = fields;
        self.kind = kind.filter(|kind| tool_name_for_kind(*kind).is_some()).or(self.kind);
        self.learn_name(name, title.as_deref(), context);
        let input = raw_input.filter(|input| !is_empty(input));
        let display = AcpCallDisplay {
            title: title.as_deref(),
            content: content.as_deref(),
            locations: locations.as_deref(),
        };
        let goes_on = status.is_some_and(|status| status != ToolCallStatus::Pending);
        let has_output =
            !context.is_description && content.as_ref().is_some_and(|content| !content.is_empty());

        let call_id = id.to_string();
        let mut updates = Vec::new();
        // Some agents announce a call first and give its arguments later. Then it starts when they are known, or when
        // permission is requested for it.
        let is_asked = context.asked_input.is_some();
        let is_ready = is_asked || input.as_ref().is_some_and(|input| self.is_complete(input));
        if self.stage == AcpCallStage::Announced && (is_ready || goes_on || has_output) {
            self.stage = AcpCallStage::Started;
            if self.name.is_empty() {
                self.name = UNNAMED_TOOL.to_owned();
            }
            let input = input
                .clone()
                .or_else(|| context.asked_input.cloned())
                .or_else(|| self.input.clone())
                .or_else(|| display.derive_input(self.known_tool()?))
                .unwrap_or_else(empty_input);
            updates.push(TurnUpdate::ToolStarted {
                call_id: call_id.clone(),
                name: self.name.clone(),
                input,
            });
        }
        if let Some(input) = input {
            self.remember_input(&call_id, input, context.room);
        }
        let output: String = content
            .filter(|_| !context.is_description)
            .unwrap_or_default()
            .into_iter()
            .map(|block| content_text(block, context.terminals))
            .collect();
        if let Some(text) = self.output.take_new(output) {
            updates.push(TurnUpdate::ToolOutput { call_id: call_id.clone(), text });
        }
        if let Some(status @ (ToolCallStatus::Completed | ToolCallStatus::Failed)) = status {
            self.stage = AcpCallStage::Finished;
            (self.input, self.input_bytes) = (None, 0);
            let shown = std::mem::take(&mut self.output).into_output();
            updates.push(TurnUpdate::ToolFinished {
                call_id,
                name: self.name.clone(),
                output: raw_output.or(shown).unwrap_or_default(),
                is_error: status == ToolCallStatus::Failed,
            });
        }
        updates
    }

    /// The tool's name: the common one of an MCP tool, or the agent's, or that of its kind, or the one in the id of the
    /// call, or the title.
    fn learn_name(&mut self, name: Option<String>, title: Option<&str>, context: &AcpCallContext<'_>) {
        let shown_name = context.name_in_id.or(title).filter(|_| self.name.is_empty());
        // Later titles are not looked at once the call has started: then it has been reported under its name.
        let mcp_title = title.filter(|_| self.stage == AcpCallStage::Announced && self.kind.is_none());
        let by_kind = || self.kind.and_then(tool_name_for_kind).filter(|_| self.name.is_empty());
        if let Some(name) = mcp_name(name.as_deref(), mcp_title, context.meta)
            .or(name)
            .or_else(|| by_kind().or(shown_name).map(str::to_owned))
        {
            self.name = name;
        }
    }

    fn known_tool(&self) -> Option<&str> {
        known_tool(self.kind.and_then(tool_name_for_kind), &self.name)
    }

    /// Whether the arguments say what the call is about. Of some tools, agents report the directory first and the
    /// command later.
    fn is_complete(&self, input: &Value) -> bool {
        let has_main_argument = matches!(
            self.kind,
            Some(ToolKind::Execute | ToolKind::Read | ToolKind::Edit | ToolKind::Delete | ToolKind::Fetch)
        );
        !has_main_argument || main_argument(&self.name, input).is_some()
    }

    /// Keeps the arguments for a later permission request. They are kept whole or not at all, since a cut could split
    /// a secret.
    fn remember_input(&mut self, call_id: &str, input: Value, room: usize) {
        let size = input.to_string().len();
        (self.input, self.input_bytes) = if size <= room {
            (Some(input), size)
        } else {
            let note = format!(
                "[{size} bytes, which are not repeated here; they are the input of the event tool.started with call_id \
                 {call_id}]"
            );
            (Some(note.into()), 0)
        };
    }
}

/// The output already emitted for a call. Needed because agents repeat the whole output each time.
#[derive(Debug, Default)]
struct AcpEmittedOutput {
    bytes: usize,
    hash: u64,
    /// The whole output while it fits into an event. It becomes the call's result if the agent reports none.
    text: String,
}

impl AcpEmittedOutput {
    /// The part of `output` that was not emitted yet.
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

    /// The whole output. If it was too long to keep, a note instead: it was already emitted piece by piece.
    fn into_output(self) -> Option<Value> {
        match self.bytes {
            0 => None,
            bytes if self.text.is_empty() => Some(format!("[{bytes} bytes, sent above]").into()),
            _ => Some(self.text.into()),
        }
    }
}

fn text_hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

fn content_text(content: ToolCallContent, terminals: AcpTerminalLookup<'_>) -> String {
    match content {
        ToolCallContent::Content(content) => content_block_text(content.content),
        ToolCallContent::Diff(diff) => unified_diff(
            &diff.path.display().to_string(),
            diff.old_text.as_deref().unwrap_or_default(),
            &diff.new_text,
        ),
        ToolCallContent::Terminal(terminal) => terminals(&terminal.terminal_id).unwrap_or_default(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use agent_client_protocol::v1::schema::{
        Content, ContentBlock, Diff, SessionUpdate, Terminal, TextContent, ToolCall, ToolCallLocation,
    };
    use serde_json::json;

    use super::*;

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
        let mut calls = AcpTestCalls::default();
        assert_eq!(
            calls.decode(SessionUpdate::ToolCall(ToolCall::new("c", "Bash").raw_input(json!({})))),
            []
        );
        let updates = calls
            .decode(update(ToolCallUpdateFields::new().title("ls -l").raw_input(json!({"command": "ls"}))));
        assert_eq!(updates, [tool_started("c", "Bash", json!({"command": "ls"}))]);
    }

    #[test]
    fn the_name_in_the_id_of_a_call_counts_more_than_a_title_and_less_than_a_kind() {
        let mut calls = AcpTestCalls(AcpToolCalls::new(Some("__".to_owned()), false));
        let mut name_of = |call: ToolCall| match &calls.decode(SessionUpdate::ToolCall(call))[..] {
            [TurnUpdate::ToolStarted { name, .. }, ..] => name.clone(),
            other => panic!("{other:?}"),
        };
        let call =
            |id: &str, title: &str| ToolCall::new(id.to_owned(), title).status(ToolCallStatus::InProgress);
        assert_eq!(name_of(call("enter_plan_mode__1", "Initiating Plan Mode")), "enter_plan_mode");
        assert_eq!(name_of(call("run_shell_command__2", "ls").kind(ToolKind::Execute)), "Bash");
        assert_eq!(name_of(call("mcp_s_t__3", "t (s MCP Server)")), "mcp__s__t");
        assert_eq!(name_of(call("4", "Think")), "Think");
        let asked = ToolCallUpdateFields::new().title("Requesting plan approval");
        let permission = calls.record_permission_request(ToolCallUpdate::new("exit_plan_mode__5", asked));
        assert_eq!(permission.tool, "exit_plan_mode");
    }

    #[test]
    fn a_text_that_describes_a_call_is_no_output_of_its_tool() {
        let finished = |describes_calls| {
            let mut calls = AcpTestCalls(AcpToolCalls::new(None, describes_calls));
            let call = ToolCall::new("c", "ls").kind(ToolKind::Execute).status(ToolCallStatus::InProgress);
            let mut updates = calls.decode(SessionUpdate::ToolCall(call.content(content("lists files"))));
            assert_eq!(updates.remove(0), tool_started("c", "Bash", json!({"command": "ls"})));
            updates
                .extend(calls.decode(update(ToolCallUpdateFields::new().status(ToolCallStatus::Completed))));
            match updates.pop() {
                Some(TurnUpdate::ToolFinished { output, .. }) => output,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(finished(true), json!(null));
        assert_eq!(finished(false), json!("lists files"));

        let mut calls = AcpTestCalls(AcpToolCalls::new(None, true));
        let failed = ToolCall::new("c", "ls").kind(ToolKind::Execute).status(ToolCallStatus::Failed);
        let updates = calls.decode(SessionUpdate::ToolCall(failed.content(content("no such folder"))));
        assert!(
            matches!(&updates[..], [_, TurnUpdate::ToolOutput { text, .. }, _] if text == "no such folder")
        );
    }

    #[test]
    fn output_that_is_repeated_whole_is_emitted_piece_by_piece() {
        let mut calls = AcpTestCalls::default();
        let call = ToolCall::new("c", "run").name("Bash".to_owned()).status(ToolCallStatus::InProgress);
        assert_eq!(calls.decode(SessionUpdate::ToolCall(call)), [tool_started("c", "Bash", json!({}))]);
        let output = |text: &str| TurnUpdate::ToolOutput { call_id: "c".to_owned(), text: text.to_owned() };
        let output_update = |text| update(ToolCallUpdateFields::new().content(content(text)));
        assert_eq!(calls.decode(output_update("one\n")), [output("one\n")]);
        assert_eq!(calls.decode(output_update("one\ntwo\n")), [output("two\n")]);
        assert_eq!(calls.decode(output_update("one\ntwo\n")), []);
        let fails = ToolCallUpdateFields::new().status(ToolCallStatus::Failed);
        let finished = TurnUpdate::ToolFinished {
            call_id: "c".to_owned(),
            name: "Bash".to_owned(),
            output: json!("one\ntwo\n"),
            is_error: true,
        };
        assert_eq!(calls.decode(update(fails.clone())), [finished]);
        assert_eq!(calls.decode(update(fails)), [], "a call ends once");
    }

    #[test]
    fn a_call_with_only_a_final_update_is_started_and_finished() {
        let mut calls = AcpTestCalls::default();
        let fields = ToolCallUpdateFields::new().status(ToolCallStatus::Completed).raw_output(json!(1));
        let updates = calls.decode(update(fields));
        assert_eq!(updates[0], tool_started("c", UNNAMED_TOOL, json!({})));
        assert!(
            matches!(&updates[1], TurnUpdate::ToolFinished { output, is_error: false, .. } if *output == json!(1))
        );
    }

    #[test]
    fn past_the_bound_every_call_is_emitted_and_the_one_that_finished_first_is_forgotten() {
        let mut calls = AcpTestCalls::default();
        let call = |n: usize, status| {
            let call = ToolCall::new(format!("c{n}"), "t").name("Bash".to_owned()).status(status);
            SessionUpdate::ToolCall(call.raw_input(json!({"command": n})))
        };
        assert_eq!(calls.decode(call(0, ToolCallStatus::InProgress)).len(), 1);
        for n in 1..3 * CALLS_MAX {
            assert_eq!(calls.decode(call(n, ToolCallStatus::Completed)).len(), 2, "{n}");
        }
        assert!(calls.0.calls.len() <= CALLS_MAX && calls.0.started.len() <= 2 * CALLS_MAX + 1);
        let open = calls.record_permission_request(ToolCallUpdate::new("c0", ToolCallUpdateFields::new()));
        assert_eq!((open.tool.as_str(), open.input), ("Bash", json!({"command": 0})), "it is still open");
        for n in 0..2 * CALLS_MAX {
            let updates = calls.decode(call(100_000 + n, ToolCallStatus::InProgress));
            assert_eq!(
                updates,
                [tool_started(&format!("c{}", 100_000 + n), "Bash", json!({"command": 100_000 + n}))]
            );
        }
        assert_eq!(calls.0.calls.len(), CALLS_MAX);
    }

    #[test]
    fn a_permission_request_is_judged_by_its_own_fields() {
        let mut calls = AcpTestCalls::default();
        let request_permission = |calls: &mut AcpTestCalls, fields| {
            let AcpToolPermission { tool, input, .. } =
                calls.record_permission_request(ToolCallUpdate::new("c", fields));
            (tool, input)
        };
        let fields = ToolCallUpdateFields::new;
        calls.decode(update(
            fields().name("Read".to_owned()).kind(ToolKind::Read).raw_input(json!({"path": "a"})),
        ));
        let own = fields().name("Bash".to_owned()).raw_input(json!({"command": "rm"}));
        assert_eq!(request_permission(&mut calls, own), ("Bash".to_owned(), json!({"command": "rm"})));

        calls.begin_turn();
        calls.decode(update(
            fields().name("Read".to_owned()).kind(ToolKind::Read).raw_input(json!({"path": "a"})),
        ));
        assert_eq!(
            request_permission(&mut calls, fields().title("Reading")),
            ("Read".to_owned(), json!({"path": "a"}))
        );
        let kind = fields().kind(ToolKind::Execute).raw_input(json!({"command": "rm"}));
        assert_eq!(request_permission(&mut calls, kind), ("Bash".to_owned(), json!({"command": "rm"})));

        calls.decode(update(fields().status(ToolCallStatus::Completed)));
        let again = fields().title("rm").raw_input(json!({"command": "rm"}));
        assert_eq!(
            request_permission(&mut calls, again),
            ("rm".to_owned(), json!({"command": "rm"})),
            "its id is used again"
        );
        assert_eq!(request_permission(&mut calls, fields()), (UNNAMED_TOOL.to_owned(), json!({})));
    }

    #[test]
    fn a_tool_without_a_name_is_called_by_its_kind_and_only_then_by_its_title() {
        let mut calls = AcpTestCalls::default();
        let input = json!({"command": "ls"});
        let call = |id: &'static str, kind| ToolCall::new(id, "Run `ls`").kind(kind).raw_input(input.clone());
        let updates = calls.decode(SessionUpdate::ToolCall(call("c", ToolKind::Execute)));
        assert_eq!(updates, [tool_started("c", "Bash", input.clone())]);
        let updates = calls.decode(SessionUpdate::ToolCall(call("d", ToolKind::Other)));
        assert_eq!(updates, [tool_started("d", "Run `ls`", input.clone())]);
        let permission = calls.record_permission_request(ToolCallUpdate::new(
            "c",
            ToolCallUpdateFields::new().title("Run `ls`"),
        ));
        assert_eq!((permission.tool.as_str(), permission.title.as_deref()), ("Bash", Some("Run `ls`")));
    }

    #[test]
    fn a_call_starts_with_its_command_whenever_the_agent_gives_it() {
        // OpenCode announces a command with its directory alone.
        let mut calls = AcpTestCalls::default();
        let announced = ToolCall::new("c", "bash").kind(ToolKind::Execute).raw_input(json!({"cwd": "/w"}));
        assert_eq!(calls.decode(SessionUpdate::ToolCall(announced)), []);
        let input = json!({"command": "ls", "cwd": "/w"});
        let fields = ToolCallUpdateFields::new().status(ToolCallStatus::InProgress).raw_input(input.clone());
        assert_eq!(calls.decode(update(fields)), [tool_started("c", "Bash", input)]);

        // Gemini shows it as the title of its permission request, whose content is no output.
        calls.begin_turn();
        let fields = ToolCallUpdateFields::new()
            .kind(ToolKind::Execute)
            .title("ls -l")
            .status(ToolCallStatus::Pending)
            .content(content("[current working directory /w]"));
        let permission = calls.record_permission_request(ToolCallUpdate::new("c", fields));
        let input = json!({"command": "ls -l"});
        assert_eq!(permission.input, input);
        assert_eq!(permission.updates, [tool_started("c", "Bash", input)]);

        // A call that needs no permission shows it as well.
        calls.begin_turn();
        let read = ToolCall::new("c", "a.rs").kind(ToolKind::Read).status(ToolCallStatus::InProgress);
        let read = read.locations(vec![ToolCallLocation::new("/w/a.rs")]);
        assert_eq!(
            calls.decode(SessionUpdate::ToolCall(read)),
            [tool_started("c", "Read", json!({"path": "/w/a.rs"}))]
        );
    }

    #[test]
    fn an_mcp_tool_has_one_name_and_its_arguments_whichever_way_the_agent_shows_them() {
        let (name, input) = ("mcp__quarterdeck__spawn_agent", json!({"agent": "echo"}));
        let fields = || ToolCallUpdateFields::new().kind(ToolKind::Other);
        let mut calls = AcpTestCalls::default();
        // Gemini shows the arguments as JSON.
        let gemini =
            fields().title("spawn_agent (quarterdeck MCP Server)").content(content(r#"{"agent":"echo"}"#));
        let gemini = calls.record_permission_request(ToolCallUpdate::new("c", gemini));
        assert_eq!((gemini.tool.as_str(), &gemini.input), (name, &input));
        assert_eq!(gemini.updates, [tool_started("c", name, input.clone())]);

        // Copilot names the server only when it announces the call.
        calls.begin_turn();
        let announced = ToolCall::new("c", "quarterdeck-spawn_agent").kind(ToolKind::Other);
        let updates = calls.decode(SessionUpdate::ToolCall(announced.raw_input(input.clone())));
        assert_eq!(updates, [tool_started("c", name, input.clone())]);
        let copilot = fields().title("spawn_agent").raw_input(input.clone());
        assert_eq!(calls.record_permission_request(ToolCallUpdate::new("c", copilot)).tool, name);

        // Qwen announces another tool, which calls this one.
        calls.begin_turn();
        calls.decode(SessionUpdate::ToolCall(ToolCall::new("c", "ToolCall").kind(ToolKind::Other)));
        let qwen = ToolCallUpdate::new("c", fields().title("{}").raw_input(input.clone()))
            .meta(json!({"toolName": name}).as_object().cloned());
        let qwen = calls.record_permission_request(qwen);
        assert_eq!(qwen.tool, name);
        assert_eq!(qwen.updates, [tool_started("c", name, input)]);
    }

    #[test]
    fn a_command_that_looks_like_an_mcp_tool_is_a_command() {
        let mut calls = AcpTestCalls::default();
        let fields = ToolCallUpdateFields::new().kind(ToolKind::Execute).title("quarterdeck-list");
        let permission = calls.record_permission_request(ToolCallUpdate::new("c", fields));
        assert_eq!(
            (permission.tool.as_str(), permission.input),
            ("Bash", json!({"command": "quarterdeck-list"}))
        );
    }

    #[test]
    fn a_permission_request_shows_long_arguments_whole_or_says_where_they_are() {
        let mut calls = AcpTestCalls::default();
        let request = || ToolCallUpdate::new("c", ToolCallUpdateFields::new());
        let start = |bytes: usize| {
            let input = json!({"command": "x".repeat(bytes)});
            (
                SessionUpdate::ToolCall(
                    ToolCall::new("c", "Run").kind(ToolKind::Execute).raw_input(input.clone()),
                ),
                input,
            )
        };
        let (call, input) = start(2 * INLINE_MAX);
        calls.decode(call);
        assert_eq!(calls.record_permission_request(request()).input, input);
        calls.begin_turn();
        let (call, _) = start(INPUTS_MAX);
        calls.decode(call);
        let note = calls.record_permission_request(request()).input;
        assert!(note.as_str().unwrap().contains("tool.started with call_id c]"), "{note}");
        assert!(calls.0.input_bytes <= INPUTS_MAX);
    }

    #[test]
    fn output_beyond_the_bound_is_emitted_once_however_often_it_is_repeated() {
        let mut calls = AcpTestCalls::default();
        let (mut all, mut emitted) = ("x".repeat(INLINE_MAX), 0);
        for _ in 0..5 {
            all.push_str("more");
            for turn_update in calls.decode(update(ToolCallUpdateFields::new().content(content(&all)))) {
                if let TurnUpdate::ToolOutput { text, .. } = turn_update {
                    emitted += text.len();
                }
            }
        }
        assert_eq!(emitted, all.len());
        let updates = calls.decode(update(ToolCallUpdateFields::new().status(ToolCallStatus::Completed)));
        let note = json!(format!("[{} bytes, sent above]", all.len()));
        assert!(
            matches!(&updates[..], [TurnUpdate::ToolFinished { output, .. }] if *output == note),
            "{updates:?}"
        );
    }

    #[test]
    fn arguments_that_are_only_shown_to_people_are_judged_too() {
        let mut calls = AcpToolCalls::default();
        let mut input_of =
            |fields| calls.record_permission_request(ToolCallUpdate::new("c", fields), &|_| None).input;
        let fields = ToolCallUpdateFields::new;
        assert_eq!(
            input_of(fields().kind(ToolKind::Execute).title("rm -rf x")),
            json!({"command": "rm -rf x"})
        );
        let diff = ToolCallContent::Diff(Diff::new("/w/a.rs", "new"));
        let created = json!({"path": "/w/a.rs", "old_text": null, "new_text": "new"});
        assert_eq!(input_of(fields().kind(ToolKind::Edit).content(vec![diff.clone()])), created);
        let changed = ToolCallContent::Diff(Diff::new("/w/b.rs", "new").old_text("old".to_owned()));
        assert_eq!(
            input_of(fields().kind(ToolKind::Edit).content(vec![diff, changed])),
            json!({"path": ["/w/a.rs", "/w/b.rs"],
                "changes": [created, {"path": "/w/b.rs", "old_text": "old", "new_text": "new"}]})
        );
        let locations = vec![ToolCallLocation::new("/w/b.rs")];
        assert_eq!(
            input_of(fields().kind(ToolKind::Read).title("Read b").locations(locations)),
            json!({"path": "/w/b.rs"})
        );
    }

    #[test]
    fn a_change_is_shown_as_a_diff_and_a_terminal_as_its_output() {
        let mut calls = AcpToolCalls::default();
        let diff = ToolCallContent::Diff(Diff::new("/w/a", "b\n").old_text("a\n".to_owned()));
        let updates = calls
            .update(ToolCallUpdate::new("c", ToolCallUpdateFields::new().content(vec![diff])), &|_| None);
        let Some(TurnUpdate::ToolOutput { text, .. }) = updates.last() else { panic!("{updates:?}") };
        assert!(text.ends_with("-a\n+b\n"), "{text}");
        let terminal = ToolCallContent::Terminal(Terminal::new("term_1"));
        let fields = ToolCallUpdateFields::new().content(vec![terminal]).status(ToolCallStatus::Completed);
        let updates = calls.update(ToolCallUpdate::new("d", fields), &|id| Some(format!("shown by {id}")));
        assert!(
            matches!(&updates[2], TurnUpdate::ToolFinished { output, .. } if output == "shown by term_1"),
            "{updates:?}"
        );
    }
}
