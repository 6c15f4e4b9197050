//! Turns what the server tells into what a session hears. It keeps what single notifications only hint at: which items
//! have been said already, which calls are open, whose turn is whose. Nothing is cut here: that comes last, in `fit`.

use std::collections::{HashSet, VecDeque};

use qd_protocol::RunId;
use qd_protocol::event::PlanEntry;
use qd_protocol::link::TurnUpdate;
use serde::Deserialize;
use serde_json::Value;

use super::connection::CodexParams;
use super::items::{CodexItem, CodexToolUse};
use super::tool_calls::{CodexToolCall, CodexToolCalls};
use super::turn_end::{CodexTurnEnd, CodexTurnError};
use super::usage::{CodexUsageCounter, CodexUsageReport};
use crate::drivers::pricing::TokenPricing;

/// Turns of which it is remembered whose they were: a command that a turn left behind goes on speaking.
const TURNS_MAX: usize = 64;
/// Warnings that are remembered so as not to be repeated with every turn.
const WARNINGS_MAX: usize = 64;

/// What is known of a conversation beyond its text.
#[derive(Debug)]
pub(super) struct CodexEventDecoder {
    thread: String,
    usage: CodexUsageCounter,
    tool_calls: CodexToolCalls,
    /// The latest turns, of any thread, and the runs that they belong to.
    turn_runs: VecDeque<(String, RunId)>,
    /// Items of which something was said piece by piece.
    emitted_items: HashSet<String>,
    /// Whether the turn has said something, so that the next message needs a gap before it.
    has_text: bool,
    /// The last message of the turn, whole.
    last_message: Option<String>,
    /// Threads whose model has used tools since it was called: it will be called again with what they gave.
    threads_with_tools: HashSet<String>,
    /// Threads whose model has told what its call used, and whose next item shows another.
    threads_between_calls: HashSet<String>,
    warnings: VecDeque<String>,
}

/// What a notification says, and which turn it is of, if of one.
#[derive(Debug, Default, PartialEq)]
pub(super) struct CodexOutput {
    pub(super) turn: Option<String>,
    pub(super) updates: Vec<TurnUpdate>,
}

/// What a notification means beyond its words.
#[derive(Debug, PartialEq)]
pub(super) enum CodexNotification {
    /// A turn of this thread has begun.
    TurnStarted { thread: String, turn: String },
    /// One has ended.
    TurnCompleted { thread: String, turn: CodexTurnEnd },
    /// An item of this turn of ours has begun.
    ItemStarted { turn: String },
    /// Why a turn of ours will fail.
    TurnFailing { turn: String, why: CodexTurnError },
    /// Nobody waits any more for the answer to what was asked under this id.
    RequestResolved(Value),
}

/// The fields of all notifications together; each method has some of them.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct CodexNotificationParams {
    thread_id: Option<String>,
    turn_id: Option<String>,
    item_id: String,
    delta: String,
    message: String,
    summary_index: u64,
    will_retry: bool,
    to_model: String,
    request_id: Value,
}

impl CodexEventDecoder {
    /// Of a thread with this model.
    pub(super) fn new(thread: String, model: &str, pricing: TokenPricing) -> Self {
        let mut usage = CodexUsageCounter::new(pricing);
        usage.set_model(model);
        Self {
            thread,
            usage,
            tool_calls: CodexToolCalls::default(),
            turn_runs: VecDeque::new(),
            emitted_items: HashSet::new(),
            has_text: false,
            last_message: None,
            threads_with_tools: HashSet::new(),
            threads_between_calls: HashSet::new(),
            warnings: VecDeque::new(),
        }
    }

    /// Forgets what was said in the turn before. Its commands may go on, and are not forgotten.
    pub(super) fn begin_turn(&mut self) {
        self.emitted_items.clear();
        self.has_text = false;
        self.last_message = None;
    }

    /// The agent's result: its last message.
    pub(super) fn take_result(&mut self) -> Option<String> {
        self.last_message.take()
    }

    /// A turn that has begun belongs to this run.
    pub(super) fn assign_turn(&mut self, turn: &str, run: &RunId) {
        if self.run_of_turn(turn).is_none() {
            if self.turn_runs.len() == TURNS_MAX {
                self.turn_runs.pop_front();
            }
            self.turn_runs.push_back((turn.to_owned(), run.clone()));
        }
    }

    /// The run that a turn belongs to, if it has begun under our eyes.
    pub(super) fn run_of_turn(&self, turn: &str) -> Option<&RunId> {
        self.turn_runs.iter().find(|(id, _)| id == turn).map(|(_, run)| run)
    }

    /// The calls that are open.
    pub(super) fn tool_calls(&self) -> &CodexToolCalls {
        &self.tool_calls
    }

    /// What a notification says and means. Methods that mean nothing to a session say nothing.
    pub(super) fn decode(
        &mut self,
        method: &str,
        params: &CodexParams,
    ) -> (CodexOutput, Option<CodexNotification>) {
        let nothing = (CodexOutput::default(), None);
        let Some(told) = params.read::<CodexNotificationParams>() else { return nothing };
        // What is said by the agents that ours has started is theirs; what they use is ours.
        let ours = told.thread_id.as_deref().is_none_or(|thread| thread == self.thread);
        let turn = told.turn_id.clone().filter(|_| ours);
        let heard = |said: Vec<TurnUpdate>| (CodexOutput { turn: turn.clone(), updates: said }, None);
        match method {
            "turn/started" | "turn/completed" => self.decode_turn(method, params, told),
            "thread/tokenUsage/updated" => (self.decode_usage(params, told), None),
            "serverRequest/resolved" => {
                (CodexOutput::default(), Some(CodexNotification::RequestResolved(told.request_id)))
            }
            "item/started" | "item/completed" => self.decode_item(method, params, told, ours),
            _ if !ours => nothing,
            "item/agentMessage/delta" | "item/plan/delta" => {
                heard(self.message_piece(&told.item_id, told.delta))
            }
            "item/reasoning/summaryTextDelta" | "item/reasoning/textDelta" => {
                self.emitted_items.insert(told.item_id);
                heard(vec![TurnUpdate::Thought { text: told.delta }])
            }
            "item/reasoning/summaryPartAdded" if told.summary_index > 0 => {
                heard(vec![TurnUpdate::Thought { text: PARAGRAPH_GAP.to_owned() }])
            }
            "item/commandExecution/outputDelta" => heard(self.tool_output(told.item_id, told.delta)),
            "item/mcpToolCall/progress" => heard(self.tool_output(told.item_id, told.message + "\n")),
            "turn/plan/updated" => heard(decode_plan(params).into_iter().collect()),
            "error" => decode_error(params, told, turn.as_deref()),
            "warning" | "guardianWarning" => heard(self.decode_warning(told.message)),
            "model/rerouted" => {
                self.usage.set_model(&told.to_model);
                heard(vec![TurnUpdate::Notice { text: format!("the model is now {}", told.to_model) }])
            }
            _ => nothing,
        }
    }

    fn decode_turn(
        &mut self,
        method: &str,
        params: &CodexParams,
        told: CodexNotificationParams,
    ) -> (CodexOutput, Option<CodexNotification>) {
        #[derive(Deserialize)]
        struct CodexTurnParams {
            turn: CodexTurnEnd,
        }
        let (Some(CodexTurnParams { turn }), Some(thread)) = (params.read(), told.thread_id) else {
            return (CodexOutput::default(), None);
        };
        if method == "turn/completed" {
            self.threads_between_calls.remove(&thread);
            self.threads_with_tools.remove(&thread);
            return (CodexOutput::default(), Some(CodexNotification::TurnCompleted { thread, turn }));
        }
        // A turn begins with a call of the model.
        let heard = CodexOutput { turn: Some(turn.id.clone()), updates: vec![TurnUpdate::ModelCall] };
        (heard, Some(CodexNotification::TurnStarted { thread, turn: turn.id }))
    }

    fn decode_usage(&mut self, params: &CodexParams, told: CodexNotificationParams) -> CodexOutput {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct CodexUsageParams {
            token_usage: CodexUsageReport,
        }
        let (Some(CodexUsageParams { token_usage }), Some(thread), Some(turn)) =
            (params.read(), told.thread_id, told.turn_id)
        else {
            return CodexOutput::default();
        };
        let live = self.run_of_turn(&turn).is_some();
        let usage = self.usage.count_report(&thread, live, token_usage);
        let mut said: Vec<TurnUpdate> = usage.map(|usage| TurnUpdate::Usage { usage }).into_iter().collect();
        if self.threads_with_tools.remove(&thread) {
            said.push(TurnUpdate::ModelCall);
        } else if live {
            self.threads_between_calls.insert(thread);
        }
        CodexOutput { turn: Some(turn), updates: said }
    }

    fn decode_item(
        &mut self,
        method: &str,
        params: &CodexParams,
        told: CodexNotificationParams,
        ours: bool,
    ) -> (CodexOutput, Option<CodexNotification>) {
        #[derive(Deserialize)]
        struct CodexItemParams {
            item: CodexItem,
        }
        let (Some(CodexItemParams { item }), Some(turn)) = (params.read(), told.turn_id) else {
            return (CodexOutput::default(), None);
        };
        let mut said = Vec::new();
        let started = method == "item/started";
        if let Some(thread) = told.thread_id.filter(|_| started) {
            if item.kind != "userMessage" && self.threads_between_calls.remove(&thread) {
                said.push(TurnUpdate::ModelCall);
            }
            if item.result_returns_to_model() {
                self.threads_with_tools.insert(thread);
            }
        }
        if !ours {
            return (CodexOutput { turn: Some(turn), updates: said }, None);
        }
        if started {
            said.extend(self.start_tool(&item, &turn));
        } else {
            self.finish_item(&item, &turn, &mut said);
        }
        let news = started.then(|| CodexNotification::ItemStarted { turn: turn.clone() });
        (CodexOutput { turn: Some(turn), updates: said }, news)
    }

    fn start_tool(&mut self, item: &CodexItem, turn: &str) -> Option<TurnUpdate> {
        let tool = item.tool_use()?;
        // A call that needs leave is begun twice.
        if self.tool_calls.tool_use(&item.id).is_some() {
            return None;
        }
        let CodexToolUse { name, input } = tool.clone();
        self.tool_calls
            .insert(&item.id, CodexToolCall { tool, is_command: item.is_command(), turn: turn.to_owned() });
        Some(TurnUpdate::ToolStarted { call_id: item.id.clone(), name, input })
    }

    fn finish_item(&mut self, item: &CodexItem, turn: &str, said: &mut Vec<TurnUpdate>) {
        if let Some(text) = item.text() {
            if !self.emitted_items.contains(&item.id) {
                said.extend(self.message_piece(&item.id, text.to_owned()));
            }
            self.last_message = Some(text.to_owned());
        } else if let Some(text) = item.thought() {
            if self.emitted_items.insert(item.id.clone()) {
                said.push(TurnUpdate::Thought { text });
            }
        } else if item.kind == "contextCompaction" {
            said.push(TurnUpdate::Notice {
                text: "the agent shortened its memory of the conversation".to_owned(),
            });
        } else if let Some(tool) = item.tool_use() {
            // Some are only told when they have ended.
            said.extend(self.start_tool(item, turn));
            self.tool_calls.remove(&item.id);
            let ending = item.tool_result();
            said.push(TurnUpdate::ToolFinished {
                call_id: item.id.clone(),
                name: tool.name,
                output: ending.output,
                is_error: ending.is_error,
            });
        }
    }

    /// A piece of a message; the first has a gap before it if it is not the turn's first message.
    fn message_piece(&mut self, item: &str, text: String) -> Vec<TurnUpdate> {
        if text.is_empty() {
            return Vec::new();
        }
        let is_next = !self.emitted_items.contains(item);
        if is_next {
            self.emitted_items.insert(item.to_owned());
        }
        let text = if is_next && self.has_text { format!("{PARAGRAPH_GAP}{text}") } else { text };
        self.has_text = true;
        vec![TurnUpdate::Text { text }]
    }

    fn tool_output(&self, call_id: String, text: String) -> Vec<TurnUpdate> {
        if self.tool_calls.tool_use(&call_id).is_some() {
            vec![TurnUpdate::ToolOutput { call_id, text }]
        } else {
            Vec::new()
        }
    }

    /// A warning, once.
    fn decode_warning(&mut self, text: String) -> Vec<TurnUpdate> {
        if text.is_empty() || self.warnings.contains(&text) {
            return Vec::new();
        }
        if self.warnings.len() == WARNINGS_MAX {
            self.warnings.pop_front();
        }
        self.warnings.push_back(text.clone());
        vec![TurnUpdate::Notice { text }]
    }
}

/// Between two messages, or two parts of a thought.
const PARAGRAPH_GAP: &str = "\n\n";

fn decode_plan(params: &CodexParams) -> Option<TurnUpdate> {
    #[derive(Deserialize)]
    struct CodexPlan {
        plan: Vec<CodexPlanStep>,
    }
    #[derive(Deserialize)]
    struct CodexPlanStep {
        step: String,
        status: String,
    }
    let entry = |CodexPlanStep { step, status }| {
        let status = if status == "inProgress" { "in_progress".to_owned() } else { status };
        PlanEntry { content: step, status }
    };
    let CodexPlan { plan } = params.read()?;
    Some(TurnUpdate::Plan { entries: plan.into_iter().map(entry).collect() })
}

/// What went wrong: something that will be tried again is told, and the rest is the turn's end.
fn decode_error(
    params: &CodexParams,
    told: CodexNotificationParams,
    turn: Option<&str>,
) -> (CodexOutput, Option<CodexNotification>) {
    #[derive(Deserialize)]
    struct CodexErrorParams {
        error: CodexTurnError,
    }
    let Some(CodexErrorParams { error }) = params.read() else { return (CodexOutput::default(), None) };
    if told.will_retry {
        let said = vec![TurnUpdate::Notice { text: error.message_text() }];
        return (CodexOutput { turn: turn.map(str::to_owned), updates: said }, None);
    }
    let news = turn.map(|turn| CodexNotification::TurnFailing { turn: turn.to_owned(), why: error });
    (CodexOutput::default(), news)
}
