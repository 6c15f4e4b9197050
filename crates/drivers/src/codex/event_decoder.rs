//! Turns the server's notifications into turn updates. It keeps the state that single notifications leave out: which
//! items were already emitted, which calls are open, and which run each turn belongs to. Nothing is truncated here;
//! that happens last, when events are fitted to their size limit.

use std::collections::{HashSet, VecDeque};

use qd_protocol::event::PlanEntry;
use qd_protocol::link::TurnUpdate;
use qd_protocol::{Millis, RunId};
use serde::Deserialize;
use serde_json::Value;

use super::connection::CodexParams;
use super::items::{CodexItem, CodexToolUse};
use super::rate_limits::CodexRateLimits;
use super::tool_calls::{CodexToolCall, CodexToolCalls};
use super::turn_end::{CodexTurnEnd, CodexTurnError};
use super::usage::{CodexUsageCounter, CodexUsageReport};
use crate::pricing::TokenPricing;

/// The most turns whose run is remembered. They are needed because a command that a turn left running keeps reporting.
const TURNS_MAX: usize = 64;
/// The most warnings remembered, so that they are not repeated with every turn.
const WARNINGS_MAX: usize = 64;

/// Decodes the notifications of one conversation.
#[derive(Debug)]
pub(super) struct CodexEventDecoder {
    thread: String,
    usage: CodexUsageCounter,
    tool_calls: CodexToolCalls,
    /// The latest turns of any thread, with the runs that they belong to.
    turn_runs: VecDeque<(String, RunId)>,
    /// Items of which some text was already emitted.
    emitted_items: HashSet<String>,
    /// Whether the turn has emitted text, so that the next message needs a gap before it.
    has_text: bool,
    last_message: Option<String>,
    /// Threads whose model used tools in its current call. It will be called again with their results.
    threads_with_tools: HashSet<String>,
    /// Threads whose model call was already counted. Their next item shows another call.
    threads_between_calls: HashSet<String>,
    warnings: VecDeque<String>,
    /// The quotas of the account, as last reported.
    rate_limits: CodexRateLimits,
}

/// The updates of a notification, and the turn that they belong to, if any.
#[derive(Debug, Default, PartialEq)]
pub(super) struct CodexOutput {
    pub(super) turn: Option<String>,
    pub(super) updates: Vec<TurnUpdate>,
}

/// A notification that changes the state of a turn or an ask.
#[derive(Debug, PartialEq)]
pub(super) enum CodexNotification {
    TurnStarted {
        thread: String,
        turn: String,
    },
    TurnCompleted {
        thread: String,
        turn: CodexTurnEnd,
    },
    /// An item of a turn of our thread has begun.
    ItemStarted {
        turn: String,
    },
    /// A turn of our thread will fail with this error.
    TurnFailing {
        turn: String,
        why: CodexTurnError,
    },
    /// The server no longer waits for the response to its request with this id.
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
            rate_limits: CodexRateLimits::default(),
        }
    }

    /// Forgets the text of the previous turn. Its commands may still run and are not forgotten.
    pub(super) fn begin_turn(&mut self) {
        self.emitted_items.clear();
        self.has_text = false;
        self.last_message = None;
    }

    pub(super) fn take_result(&mut self) -> Option<String> {
        self.last_message.take()
    }

    /// Records that a turn belongs to this run.
    pub(super) fn assign_turn(&mut self, turn: &str, run: &RunId) {
        if self.run_of_turn(turn).is_none() {
            if self.turn_runs.len() == TURNS_MAX {
                self.turn_runs.pop_front();
            }
            self.turn_runs.push_back((turn.to_owned(), run.clone()));
        }
    }

    /// The run that a turn belongs to, if its start was seen.
    pub(super) fn run_of_turn(&self, turn: &str) -> Option<&RunId> {
        self.turn_runs.iter().find(|(id, _)| id == turn).map(|(_, run)| run)
    }

    /// When the quota of the account resets, if it is exhausted.
    pub(super) fn quota_resets_at(&self) -> Option<Millis> {
        self.rate_limits.resets_at()
    }

    /// The open tool calls.
    pub(super) fn tool_calls(&self) -> &CodexToolCalls {
        &self.tool_calls
    }

    /// Decodes a notification. Methods that a session has no use for yield nothing.
    pub(super) fn decode(
        &mut self,
        method: &str,
        params: &CodexParams,
    ) -> (CodexOutput, Option<CodexNotification>) {
        let nothing = (CodexOutput::default(), None);
        let Some(fields) = params.read::<CodexNotificationParams>() else { return nothing };
        // The text of agents that ours has started is dropped, but their usage counts.
        let ours = fields.thread_id.as_deref().is_none_or(|thread| thread == self.thread);
        let turn = fields.turn_id.clone().filter(|_| ours);
        let emit = |updates: Vec<TurnUpdate>| (CodexOutput { turn: turn.clone(), updates }, None);
        match method {
            "turn/started" | "turn/completed" => self.decode_turn(method, params, fields),
            "thread/tokenUsage/updated" => (self.decode_usage(params, fields), None),
            "serverRequest/resolved" => {
                (CodexOutput::default(), Some(CodexNotification::RequestResolved(fields.request_id)))
            }
            "item/started" | "item/completed" => self.decode_item(method, params, fields, ours),
            _ if !ours => nothing,
            "item/agentMessage/delta" | "item/plan/delta" => {
                emit(self.message_piece(&fields.item_id, fields.delta))
            }
            "item/reasoning/summaryTextDelta" | "item/reasoning/textDelta" => {
                self.emitted_items.insert(fields.item_id);
                emit(vec![TurnUpdate::Thought { text: fields.delta }])
            }
            "item/reasoning/summaryPartAdded" if fields.summary_index > 0 => {
                emit(vec![TurnUpdate::Thought { text: PARAGRAPH_GAP.to_owned() }])
            }
            "item/commandExecution/outputDelta" => emit(self.tool_output(fields.item_id, fields.delta)),
            "item/mcpToolCall/progress" => emit(self.tool_output(fields.item_id, fields.message + "\n")),
            "turn/plan/updated" => emit(decode_plan(params).into_iter().collect()),
            "error" => decode_error(params, fields, turn.as_deref()),
            "warning" | "guardianWarning" => emit(self.decode_warning(fields.message)),
            "account/rateLimits/updated" => {
                self.rate_limits = CodexRateLimits::read(params).unwrap_or_default();
                nothing
            }
            "model/rerouted" => {
                self.usage.set_model(&fields.to_model);
                emit(vec![TurnUpdate::notice(format!("the model is now {}", fields.to_model))])
            }
            _ => nothing,
        }
    }

    fn decode_turn(
        &mut self,
        method: &str,
        params: &CodexParams,
        fields: CodexNotificationParams,
    ) -> (CodexOutput, Option<CodexNotification>) {
        #[derive(Deserialize)]
        struct CodexTurnParams {
            turn: CodexTurnEnd,
        }
        let (Some(CodexTurnParams { turn }), Some(thread)) = (params.read(), fields.thread_id) else {
            return (CodexOutput::default(), None);
        };
        if method == "turn/completed" {
            self.threads_between_calls.remove(&thread);
            self.threads_with_tools.remove(&thread);
            return (CodexOutput::default(), Some(CodexNotification::TurnCompleted { thread, turn }));
        }
        // A turn begins with a model call.
        let output = CodexOutput { turn: Some(turn.id.clone()), updates: vec![TurnUpdate::ModelCall] };
        (output, Some(CodexNotification::TurnStarted { thread, turn: turn.id }))
    }

    fn decode_usage(&mut self, params: &CodexParams, fields: CodexNotificationParams) -> CodexOutput {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct CodexUsageParams {
            token_usage: CodexUsageReport,
        }
        let (Some(CodexUsageParams { token_usage }), Some(thread), Some(turn)) =
            (params.read(), fields.thread_id, fields.turn_id)
        else {
            return CodexOutput::default();
        };
        let live = self.run_of_turn(&turn).is_some();
        let context = token_usage.context().filter(|_| live && thread == self.thread);
        let usage = self.usage.count_report(&thread, live, token_usage);
        let usage = usage.map(TurnUpdate::usage).into_iter();
        let mut updates: Vec<TurnUpdate> = usage.chain(context.map(TurnUpdate::Context)).collect();
        if self.threads_with_tools.remove(&thread) {
            updates.push(TurnUpdate::ModelCall);
        } else if live {
            self.threads_between_calls.insert(thread);
        }
        CodexOutput { turn: Some(turn), updates }
    }

    fn decode_item(
        &mut self,
        method: &str,
        params: &CodexParams,
        fields: CodexNotificationParams,
        ours: bool,
    ) -> (CodexOutput, Option<CodexNotification>) {
        #[derive(Deserialize)]
        struct CodexItemParams {
            item: CodexItem,
        }
        let (Some(CodexItemParams { item }), Some(turn)) = (params.read(), fields.turn_id) else {
            return (CodexOutput::default(), None);
        };
        let mut updates = Vec::new();
        let started = method == "item/started";
        if let Some(thread) = fields.thread_id.filter(|_| started) {
            if item.kind != "userMessage" && self.threads_between_calls.remove(&thread) {
                updates.push(TurnUpdate::ModelCall);
            }
            if item.result_returns_to_model() {
                self.threads_with_tools.insert(thread);
            }
        }
        if !ours {
            return (CodexOutput { turn: Some(turn), updates }, None);
        }
        if started {
            updates.extend(self.start_tool(&item, &turn));
        } else {
            self.finish_item(&item, &turn, &mut updates);
        }
        let notification = started.then(|| CodexNotification::ItemStarted { turn: turn.clone() });
        (CodexOutput { turn: Some(turn), updates }, notification)
    }

    fn start_tool(&mut self, item: &CodexItem, turn: &str) -> Option<TurnUpdate> {
        let tool = item.tool_use()?;
        // A call that needs approval is reported as started twice.
        if self.tool_calls.tool_use(&item.id).is_some() {
            return None;
        }
        let CodexToolUse { name, input } = tool.clone();
        self.tool_calls
            .insert(&item.id, CodexToolCall { tool, is_command: item.is_command(), turn: turn.to_owned() });
        Some(TurnUpdate::ToolStarted { call_id: item.id.clone(), name, input })
    }

    fn finish_item(&mut self, item: &CodexItem, turn: &str, updates: &mut Vec<TurnUpdate>) {
        if let Some(text) = item.text() {
            if !self.emitted_items.contains(&item.id) {
                updates.extend(self.message_piece(&item.id, text.to_owned()));
            }
            self.last_message = Some(text.to_owned());
        } else if let Some(text) = item.reasoning_text() {
            if self.emitted_items.insert(item.id.clone()) {
                updates.push(TurnUpdate::Thought { text });
            }
        } else if item.kind == "contextCompaction" {
            updates.push(TurnUpdate::Compacted { used_before: None });
        } else if let Some(tool) = item.tool_use() {
            // Some calls are only reported when they have finished.
            updates.extend(self.start_tool(item, turn));
            self.tool_calls.remove(&item.id);
            let result = item.tool_result();
            updates.push(TurnUpdate::ToolFinished {
                call_id: item.id.clone(),
                name: tool.name,
                output: result.output,
                is_error: result.is_error,
            });
        }
    }

    /// Emits a piece of a message. The first piece has a gap before it unless it is the turn's first message.
    fn message_piece(&mut self, item: &str, text: String) -> Vec<TurnUpdate> {
        if text.is_empty() {
            return Vec::new();
        }
        let is_first_piece = !self.emitted_items.contains(item);
        if is_first_piece {
            self.emitted_items.insert(item.to_owned());
        }
        let text = if is_first_piece && self.has_text { format!("{PARAGRAPH_GAP}{text}") } else { text };
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

    /// Emits a warning once.
    fn decode_warning(&mut self, text: String) -> Vec<TurnUpdate> {
        if text.is_empty() || self.warnings.contains(&text) {
            return Vec::new();
        }
        if self.warnings.len() == WARNINGS_MAX {
            self.warnings.pop_front();
        }
        self.warnings.push_back(text.clone());
        vec![TurnUpdate::notice(text)]
    }
}

/// The gap between two messages, or between two parts of a thought.
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

/// Decodes an error. If the server will retry, it is a notice; otherwise it is kept for the turn's end.
fn decode_error(
    params: &CodexParams,
    fields: CodexNotificationParams,
    turn: Option<&str>,
) -> (CodexOutput, Option<CodexNotification>) {
    #[derive(Deserialize)]
    struct CodexErrorParams {
        error: CodexTurnError,
    }
    let Some(CodexErrorParams { error }) = params.read() else { return (CodexOutput::default(), None) };
    if fields.will_retry {
        let updates = vec![TurnUpdate::notice(error.message_text())];
        return (CodexOutput { turn: turn.map(str::to_owned), updates }, None);
    }
    let notification = turn.map(|turn| CodexNotification::TurnFailing { turn: turn.to_owned(), why: error });
    (CodexOutput::default(), notification)
}
