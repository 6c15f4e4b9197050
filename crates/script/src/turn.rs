//! One turn of the scripted agent: what it can send to its client and wait for. It knows the protocol, but no steps.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use agent_client_protocol::v1::schema::{
    Content, ContentBlock, ContentChunk, Cost, CreateElicitationRequest, CurrentModeUpdate,
    ElicitationAction, ElicitationContentValue, ElicitationFormMode, ElicitationSchema,
    ElicitationSessionScope, Meta, PermissionOption, PermissionOptionKind, Plan, PlanEntry,
    PlanEntryPriority, PlanEntryStatus, RequestPermissionOutcome, RequestPermissionRequest,
    RequestPermissionResponse, SessionNotification, SessionUpdate, StringPropertySchema, TextContent,
    ToolCall, ToolCallContent, ToolCallStatus, ToolCallUpdate, ToolCallUpdateFields, UsageUpdate,
};
use agent_client_protocol::v1::{ConnectionTo, Responder};
use agent_client_protocol::{Client, Error, JsonRpcRequest, UntypedMessage};
use parking_lot::{Mutex, MutexGuard};
use qd_protocol::event::{self, TokenUsage};
use qd_protocol::worker::{HOST_PID_METHOD, META_KEY};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::agent::{ScriptSession, ScriptSteerOutcome, ScriptSteerResponse};
use super::flow_control::ScriptFlowControl;
use super::memory::{REMEMBERED_MAX, remembered_part};
use super::steps::{ScriptAsk, ScriptMode, ScriptQuestion, ScriptToolCall};

/// The only field of a question's form.
const ANSWER_FIELD: &str = "answer";
const ALLOW_OPTION: &str = "yes";
const DENY_OPTION: &str = "no";
/// The name of the first process in a sandbox.
const SANDBOX_INIT_NAME: &[u8] = b"qd-sandbox\n";
/// The size of the context window, which the protocol requires and nobody uses.
const CONTEXT_WINDOW: u64 = 1 << 20;

/// The client's decision on an ask.
#[derive(Debug)]
pub(super) enum ScriptAskDecision {
    /// Allowed, or the answer to a question.
    Yes(String),
    /// Denied, with the reason.
    No(String),
    Unanswered,
}

#[derive(Debug)]
pub(super) struct ScriptTurn {
    pub(super) session: Arc<ScriptSession>,
    client: ConnectionTo<Client>,
    flow: Arc<ScriptFlowControl>,
    cancel: CancellationToken,
    ignores_cancel: AtomicBool,
    steer_arrived: Notify,
    state: Mutex<ScriptTurnState>,
}

#[derive(Debug, Default)]
struct ScriptTurnState {
    /// Steers that no step has awaited yet, with the responders for their outcome.
    steers: VecDeque<(String, Responder<ScriptSteerResponse>)>,
    /// The beginning of the answer so far, up to [`REMEMBERED_MAX`] or a little more.
    remembered_text: String,
    late_texts: Vec<String>,
}

impl ScriptTurn {
    pub(super) fn new(
        client: ConnectionTo<Client>,
        flow: Arc<ScriptFlowControl>,
        session: Arc<ScriptSession>,
    ) -> Self {
        Self {
            session,
            client,
            flow,
            cancel: CancellationToken::new(),
            ignores_cancel: AtomicBool::new(false),
            steer_arrived: Notify::new(),
            state: Mutex::default(),
        }
    }

    /// Sends a piece of the answer.
    pub(super) async fn say(&self, text: &str) -> Result<(), Error> {
        {
            let mut state = self.lock();
            if state.remembered_text.len() < REMEMBERED_MAX {
                state.remembered_text.push_str(remembered_part(text));
            }
        }
        self.send_update(SessionUpdate::AgentMessageChunk(text_chunk(text))).await
    }

    pub(super) async fn think(&self, text: &str) -> Result<(), Error> {
        self.send_update(SessionUpdate::AgentThoughtChunk(text_chunk(text))).await
    }

    /// Replays an earlier turn.
    pub(super) async fn replay(&self, prompt: &str, answer: &str) -> Result<(), Error> {
        self.send_update(SessionUpdate::UserMessageChunk(text_chunk(prompt))).await?;
        self.send_update(SessionUpdate::AgentMessageChunk(text_chunk(answer))).await
    }

    /// Reports a tool call and its result, without running anything.
    pub(super) async fn use_tool(&self, call_id: &str, tool: ScriptToolCall) -> Result<(), Error> {
        let ScriptToolCall { name, input, output, is_error } = tool;
        let call = ToolCall::new(call_id.to_owned(), name.clone())
            .name(name)
            .status(ToolCallStatus::InProgress)
            .raw_input(input);
        self.send_update(SessionUpdate::ToolCall(call)).await?;
        let status = if is_error { ToolCallStatus::Failed } else { ToolCallStatus::Completed };
        let mut ended = ToolCallUpdateFields::new().status(status);
        if let Value::String(text) = &output {
            ended = ended.content(vec![ToolCallContent::Content(Content::new(text_block(text)))]);
        }
        let ended = ToolCallUpdate::new(call_id.to_owned(), ended.raw_output(output));
        self.send_update(SessionUpdate::ToolCallUpdate(ended)).await
    }

    pub(super) async fn send_plan(&self, entries: Vec<event::PlanEntry>) -> Result<(), Error> {
        let entry = |event::PlanEntry { content, status }| {
            let known = PlanEntryStatus::deserialize(Value::String(status.clone()));
            let meta = known.is_err().then(|| own_meta(json!({"status": status})));
            let status = known.unwrap_or(PlanEntryStatus::Pending);
            PlanEntry::new(content, PlanEntryPriority::Medium, status).meta(meta)
        };
        self.send_update(SessionUpdate::Plan(Plan::new(entries.into_iter().map(entry).collect()))).await
    }

    /// Switches the agent's mode by itself, and reports it.
    pub(super) async fn switch_mode(&self, mode: ScriptMode) -> Result<(), Error> {
        self.session.set_mode(mode);
        self.send_update(SessionUpdate::CurrentModeUpdate(CurrentModeUpdate::new(mode.name()))).await
    }

    /// Reports the total usage: the protocol wants totals, and has no field for tokens.
    pub(super) async fn report_usage(&self, usage: TokenUsage) -> Result<(), Error> {
        let TokenUsage { input_tokens, output_tokens, cost_usd } = usage;
        let tokens = own_meta(json!({"input_tokens": input_tokens, "output_tokens": output_tokens}));
        let update = UsageUpdate::new(input_tokens.saturating_add(output_tokens), CONTEXT_WINDOW)
            .cost(Cost::new(cost_usd, "USD"))
            .meta(tokens);
        self.send_update(SessionUpdate::UsageUpdate(update)).await
    }

    pub(super) async fn ask(&self, call_id: &str, ask: ScriptAsk) -> Result<ScriptAskDecision, Error> {
        let ScriptAsk { tool, input, risk, .. } = ask;
        let call = ToolCallUpdateFields::new().title(tool.clone()).name(tool).raw_input(input);
        let options = vec![
            PermissionOption::new(ALLOW_OPTION, "Yes", PermissionOptionKind::AllowOnce),
            PermissionOption::new(DENY_OPTION, "No", PermissionOptionKind::RejectOnce),
        ];
        let call = ToolCallUpdate::new(call_id.to_owned(), call);
        let request = RequestPermissionRequest::new(self.session.id.clone(), call, options)
            .meta(risk.map(|risk| own_meta(json!({"risk": risk}))));
        let RequestPermissionResponse { outcome, meta, .. } = self.send_request(request).await?;
        Ok(match outcome {
            RequestPermissionOutcome::Selected(chosen) if chosen.option_id.0.as_ref() == ALLOW_OPTION => {
                ScriptAskDecision::Yes("allowed".to_owned())
            }
            RequestPermissionOutcome::Selected(_) => {
                let reason = meta.as_ref().and_then(|meta| meta.get(META_KEY)?.get("reason")?.as_str());
                ScriptAskDecision::No(reason.unwrap_or("no reason given").to_owned())
            }
            _ => ScriptAskDecision::Unanswered,
        })
    }

    pub(super) async fn question(&self, question: ScriptQuestion) -> Result<ScriptAskDecision, Error> {
        let ScriptQuestion { prompt, options } = question;
        let field = StringPropertySchema::new().enum_values((!options.is_empty()).then_some(options));
        let form = ElicitationFormMode::new(
            ElicitationSessionScope::new(self.session.id.clone()),
            ElicitationSchema::new().property(ANSWER_FIELD, field, true),
        );
        let response = self.send_request(CreateElicitationRequest::new(form, prompt)).await?;
        Ok(match response.action {
            ElicitationAction::Accept(accepted) => {
                match accepted.content.unwrap_or_default().remove(ANSWER_FIELD) {
                    Some(ElicitationContentValue::String(text)) => ScriptAskDecision::Yes(text),
                    _ => ScriptAskDecision::Yes(String::new()),
                }
            }
            ElicitationAction::Decline => ScriptAskDecision::No("no answer given".to_owned()),
            _ => ScriptAskDecision::Unanswered,
        })
    }

    /// The next steer, which counts as taken.
    pub(super) async fn next_steer(&self) -> Result<String, Error> {
        loop {
            let next = self.lock().steers.pop_front();
            if let Some((text, responder)) = next {
                responder.respond(ScriptSteerResponse { outcome: ScriptSteerOutcome::Taken })?;
                return Ok(text);
            }
            self.steer_arrived.notified().await;
        }
    }

    pub(super) fn queue_steer(
        &self,
        text: String,
        responder: Responder<ScriptSteerResponse>,
    ) -> Result<(), Error> {
        self.lock().steers.push_back((text, responder));
        self.steer_arrived.notify_one();
        Ok(())
    }

    /// Reports the remaining steers as missed.
    pub(super) fn miss_steers(&self) {
        let remaining = std::mem::take(&mut self.lock().steers);
        for (_, responder) in remaining {
            // If the client is gone, nobody wants to know.
            let _sent = responder.respond(ScriptSteerResponse { outcome: ScriptSteerOutcome::Missed });
        }
    }

    pub(super) fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Waits for a cancel, unless the turn ignores cancels.
    pub(super) async fn cancelled(&self) {
        self.cancel.cancelled().await;
        if self.ignores_cancel() {
            std::future::pending().await
        }
    }

    pub(super) fn ignore_cancel(&self) {
        self.ignores_cancel.store(true, Ordering::Relaxed);
    }

    pub(super) fn ignores_cancel(&self) -> bool {
        self.ignores_cancel.load(Ordering::Relaxed)
    }

    /// Queues text to send after the turn is over, when the agent should no longer send anything.
    pub(super) fn queue_late_text(&self, text: String) {
        self.lock().late_texts.push(text);
    }

    pub(super) async fn send_late_texts(&self) -> Result<(), Error> {
        let late = std::mem::take(&mut self.lock().late_texts);
        for text in late {
            self.send_update(SessionUpdate::AgentMessageChunk(text_chunk(&text))).await?;
        }
        Ok(())
    }

    pub(super) fn remembered_text(&self) -> String {
        self.lock().remembered_text.clone()
    }

    /// Waits until everything has been written to the client.
    pub(super) async fn wait_until_drained(&self) {
        self.flow.wait_until_drained().await;
    }

    async fn send_update(&self, update: SessionUpdate) -> Result<(), Error> {
        self.flow.wait_for_room().await;
        self.flow.count_sent();
        self.client.send_notification(SessionNotification::new(self.session.id.clone(), update))
    }

    /// What the machine calls a process that we have started: outside of our sandbox, it has another pid.
    pub(super) async fn host_pid(&self, pid: u32) -> u32 {
        // Outside of a sandbox the first process is the machine's own.
        if tokio::fs::read("/proc/1/comm").await.is_ok_and(|name| name != SANDBOX_INIT_NAME) {
            return pid;
        }
        let asked = match UntypedMessage::new(HOST_PID_METHOD, json!({ "pid": pid })) {
            Ok(request) => self.send_request(request).await,
            Err(error) => Err(error),
        };
        let answered = asked.ok().and_then(|answer| u32::try_from(answer.get("pid")?.as_u64()?).ok());
        answered.unwrap_or(pid)
    }

    async fn send_request<T: JsonRpcRequest>(&self, request: T) -> Result<T::Response, Error> {
        self.flow.wait_for_room().await;
        self.flow.count_sent();
        self.client.send_request(request).block_task().await
    }

    fn lock(&self) -> MutexGuard<'_, ScriptTurnState> {
        self.state.lock()
    }
}

/// Metadata for values that the protocol has no field for.
fn own_meta(value: Value) -> Meta {
    Meta::from_iter([(META_KEY.to_owned(), value)])
}

fn text_chunk(text: &str) -> ContentChunk {
    ContentChunk::new(text_block(text))
}

fn text_block(text: &str) -> ContentBlock {
    ContentBlock::Text(TextContent::new(text))
}
