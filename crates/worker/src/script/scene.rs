//! One turn of the scripted agent: what it can say to its client and wait for. It knows the protocol and no steps.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use agent_client_protocol::v1::schema::{
    Content, ContentBlock, ContentChunk, Cost, CreateElicitationRequest, ElicitationAction,
    ElicitationContentValue, ElicitationFormMode, ElicitationSchema, ElicitationSessionScope, Meta,
    PermissionOption, PermissionOptionKind, Plan, PlanEntry, PlanEntryPriority, PlanEntryStatus,
    RequestPermissionOutcome, RequestPermissionRequest, RequestPermissionResponse, SessionNotification,
    SessionUpdate, StringPropertySchema, TextContent, ToolCall, ToolCallContent, ToolCallStatus,
    ToolCallUpdate, ToolCallUpdateFields, UsageUpdate,
};
use agent_client_protocol::v1::{ConnectionTo, Responder};
use agent_client_protocol::{Client, Error, JsonRpcRequest};
use qd_protocol::event::{self, Usage};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::agent::{Fate, Session, Steered};
use super::flow::Flow;
use super::memory::{WORDS_MAX, gist};
use super::steps::{Ask, Question, Tool};
use crate::drivers::acp::OURS;

/// The one field of a question's form.
const ANSWER: &str = "answer";
const ALLOW: &str = "yes";
const DENY: &str = "no";
/// A context window, which the protocol wants to know and nobody else does.
const CONTEXT: u64 = 1 << 20;

/// What a client decided.
#[derive(Debug)]
pub(super) enum Decided {
    /// Yes, or a question's answer.
    Yes(String),
    /// No, and why.
    No(String),
    /// Nobody did.
    Nobody,
}

/// One turn.
#[derive(Debug)]
pub(super) struct Scene {
    pub(super) session: Arc<Session>,
    client: ConnectionTo<Client>,
    flow: Arc<Flow>,
    cancel: CancellationToken,
    ignores_cancel: AtomicBool,
    steered: Notify,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Steers that nobody awaited yet, and whom to tell.
    steers: VecDeque<(String, Responder<Steered>)>,
    /// The gist of what was said.
    words: String,
    late: Vec<String>,
}

impl Scene {
    pub(super) fn new(client: ConnectionTo<Client>, flow: Arc<Flow>, session: Arc<Session>) -> Self {
        Self {
            session,
            client,
            flow,
            cancel: CancellationToken::new(),
            ignores_cancel: AtomicBool::new(false),
            steered: Notify::new(),
            state: Mutex::default(),
        }
    }

    /// A piece of the answer.
    pub(super) async fn say(&self, text: &str) -> Result<(), Error> {
        {
            let mut state = self.lock();
            if state.words.len() < WORDS_MAX {
                state.words.push_str(gist(text));
            }
        }
        self.update(SessionUpdate::AgentMessageChunk(chunk(text))).await
    }

    pub(super) async fn think(&self, text: &str) -> Result<(), Error> {
        self.update(SessionUpdate::AgentThoughtChunk(chunk(text))).await
    }

    /// A turn of the past.
    pub(super) async fn replay(&self, prompt: &str, answer: &str) -> Result<(), Error> {
        self.update(SessionUpdate::UserMessageChunk(chunk(prompt))).await?;
        self.update(SessionUpdate::AgentMessageChunk(chunk(answer))).await
    }

    /// Uses a tool, or acts as if.
    pub(super) async fn tool(&self, call_id: &str, tool: Tool) -> Result<(), Error> {
        let Tool { name, input, output, is_error } = tool;
        let call = ToolCall::new(call_id.to_owned(), name.clone())
            .name(name)
            .status(ToolCallStatus::InProgress)
            .raw_input(input);
        self.update(SessionUpdate::ToolCall(call)).await?;
        let status = if is_error { ToolCallStatus::Failed } else { ToolCallStatus::Completed };
        let mut ended = ToolCallUpdateFields::new().status(status);
        if let Value::String(text) = &output {
            ended = ended.content(vec![ToolCallContent::Content(Content::new(block(text)))]);
        }
        let ended = ToolCallUpdate::new(call_id.to_owned(), ended.raw_output(output));
        self.update(SessionUpdate::ToolCallUpdate(ended)).await
    }

    pub(super) async fn plan(&self, entries: Vec<event::PlanEntry>) -> Result<(), Error> {
        let entry = |event::PlanEntry { content, status }| {
            let known = PlanEntryStatus::deserialize(Value::String(status.clone()));
            let word = known.is_err().then(|| ours(json!({"status": status})));
            let status = known.unwrap_or(PlanEntryStatus::Pending);
            PlanEntry::new(content, PlanEntryPriority::Medium, status).meta(word)
        };
        self.update(SessionUpdate::Plan(Plan::new(entries.into_iter().map(entry).collect()))).await
    }

    /// Tells what was used in all: the protocol wants totals, and has no field for tokens.
    pub(super) async fn report(&self, used: Usage) -> Result<(), Error> {
        let Usage { input_tokens, output_tokens, cost_usd } = used;
        let tokens = ours(json!({"input_tokens": input_tokens, "output_tokens": output_tokens}));
        let update = UsageUpdate::new(input_tokens.saturating_add(output_tokens), CONTEXT)
            .cost(Cost::new(cost_usd, "USD"))
            .meta(tokens);
        self.update(SessionUpdate::UsageUpdate(update)).await
    }

    /// Asks for permission and waits.
    pub(super) async fn ask(&self, call_id: &str, ask: Ask) -> Result<Decided, Error> {
        let Ask { tool, input, risk } = ask;
        let call = ToolCallUpdateFields::new().title(tool.clone()).name(tool).raw_input(input);
        let options = vec![
            PermissionOption::new(ALLOW, "Yes", PermissionOptionKind::AllowOnce),
            PermissionOption::new(DENY, "No", PermissionOptionKind::RejectOnce),
        ];
        let call = ToolCallUpdate::new(call_id.to_owned(), call);
        let request = RequestPermissionRequest::new(self.session.id.clone(), call, options)
            .meta(risk.map(|risk| ours(json!({"risk": risk}))));
        let RequestPermissionResponse { outcome, meta, .. } = self.request(request).await?;
        Ok(match outcome {
            RequestPermissionOutcome::Selected(chosen) if chosen.option_id.0.as_ref() == ALLOW => {
                Decided::Yes("allowed".to_owned())
            }
            RequestPermissionOutcome::Selected(_) => {
                let reason = meta.as_ref().and_then(|meta| meta.get(OURS)?.get("reason")?.as_str());
                Decided::No(reason.unwrap_or("no reason given").to_owned())
            }
            _ => Decided::Nobody,
        })
    }

    /// Asks a question and waits.
    pub(super) async fn question(&self, question: Question) -> Result<Decided, Error> {
        let Question { prompt, options } = question;
        let field = StringPropertySchema::new().enum_values((!options.is_empty()).then_some(options));
        let form = ElicitationFormMode::new(
            ElicitationSessionScope::new(self.session.id.clone()),
            ElicitationSchema::new().property(ANSWER, field, true),
        );
        let response = self.request(CreateElicitationRequest::new(form, prompt)).await?;
        Ok(match response.action {
            ElicitationAction::Accept(accepted) => {
                match accepted.content.unwrap_or_default().remove(ANSWER) {
                    Some(ElicitationContentValue::String(text)) => Decided::Yes(text),
                    _ => Decided::Yes(String::new()),
                }
            }
            ElicitationAction::Decline => Decided::No("no answer given".to_owned()),
            _ => Decided::Nobody,
        })
    }

    /// The next steer, which counts as taken.
    pub(super) async fn steer(&self) -> Result<String, Error> {
        loop {
            let next = self.lock().steers.pop_front();
            if let Some((text, responder)) = next {
                responder.respond(Steered { outcome: Fate::Taken })?;
                return Ok(text);
            }
            self.steered.notified().await;
        }
    }

    pub(super) fn put_steer(&self, text: String, responder: Responder<Steered>) -> Result<(), Error> {
        self.lock().steers.push_back((text, responder));
        self.steered.notify_one();
        Ok(())
    }

    /// Nobody will await the steers that are left.
    pub(super) fn miss_steers(&self) {
        let left = std::mem::take(&mut self.lock().steers);
        for (_, responder) in left {
            // If the client is gone, so is whoever would want to know.
            let _told = responder.respond(Steered { outcome: Fate::Missed });
        }
    }

    pub(super) fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Waits for a cancel that is paid heed to.
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

    /// Something to be said when the turn is over and it should no longer be.
    pub(super) fn keep_for_later(&self, text: String) {
        self.lock().late.push(text);
    }

    pub(super) async fn say_late(&self) -> Result<(), Error> {
        let late = std::mem::take(&mut self.lock().late);
        for text in late {
            self.update(SessionUpdate::AgentMessageChunk(chunk(&text))).await?;
        }
        Ok(())
    }

    /// The gist of what was said.
    pub(super) fn words(&self) -> String {
        self.lock().words.clone()
    }

    /// Waits until the client has been sent everything.
    pub(super) async fn drained(&self) {
        self.flow.drained().await;
    }

    async fn update(&self, update: SessionUpdate) -> Result<(), Error> {
        self.flow.room().await;
        self.flow.sent();
        self.client.send_notification(SessionNotification::new(self.session.id.clone(), update))
    }

    async fn request<T: JsonRpcRequest>(&self, request: T) -> Result<T::Response, Error> {
        self.flow.room().await;
        self.flow.sent();
        self.client.send_request(request).block_task().await
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the protocol has no field for.
fn ours(value: Value) -> Meta {
    Meta::from_iter([(OURS.to_owned(), value)])
}

fn chunk(text: &str) -> ContentChunk {
    ContentChunk::new(block(text))
}

fn block(text: &str) -> ContentBlock {
    ContentBlock::Text(TextContent::new(text))
}
