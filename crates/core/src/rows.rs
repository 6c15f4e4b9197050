//! The rows behind lists. They are written in the same transaction as the events that changed them, and replaying the
//! journal through [`apply_event`] rebuilds them. Streamed text changes no row.
//!
//! Design: docs/design/rows-with-their-events.md

use qd_protocol::api::{self, RunStatus, SessionStatus};
use qd_protocol::event::{
    Ask, AskResolved, EventBody, FinishReason, MailSent, ResolvedBy, RunError, SessionCreated, TokenUsage,
};
use qd_protocol::mail::{Mail, MailDelivery, MailReceipt, MailStatus};
use qd_protocol::policy::PolicyRule;
use qd_protocol::sandbox_spec::SandboxReport;
use qd_protocol::text::BlobRef;
use qd_protocol::{AccountId, MailId, Millis, RunId, Seq, SessionId};
use serde::{Deserialize, Serialize};

use crate::ask_digest;
use crate::quota::{ExhaustedQuota, usual_account};
use crate::session::{
    MailDeliveryState, MailboxEntry, SessionEvent, SessionPhase, SessionState, UnfinishedRun, evolve,
};

/// A row that an event changed, other than the session's own row.
#[derive(Debug, Clone, PartialEq)]
pub enum UpdatedRow {
    /// A run.
    Run {
        id: RunId,
        doc: RunDoc,
        /// Only set by `run.accepted`, since the prompt never changes.
        prompt: Option<RunPrompt>,
        /// Tells its prompt apart from a different one under the same run id.
        fingerprint: String,
    },
    Ask(AskDoc),
    /// A mail message.
    Mail {
        id: MailId,
        doc: MailDoc,
        /// Only set by `mail.sent`, since the message itself never changes.
        sent: Option<Box<MailSent>>,
    },
    /// The exhausted quota of an account.
    Quota(ExhaustedQuota),
}

/// The delivery state of a message, as stored in its row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailDoc {
    pub state: MailStatus,
    /// The run that the message became, or that was steered with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_id: Option<RunId>,
    /// How the agent received it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delivered_as: Option<MailDelivery>,
    /// The current claim, or the claim by which it was acknowledged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<u64>,
    /// When the claim expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim_expires_at: Option<Millis>,
    /// How many times it was returned to the mailbox.
    pub returns: u32,
    /// Why it was returned or quarantined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    pub updated_at: Millis,
}

impl MailDoc {
    /// The message as the API shows it.
    pub fn view(self, sent: MailSent) -> Mail {
        Mail {
            message: sent.mail,
            deliver: sent.deliver,
            state: self.state,
            run_id: self.run_id,
            delivered_as: self.delivered_as,
            claim: self.claim,
            claim_expires_at: self.claim_expires_at,
            returns: self.returns,
            reason: self.reason,
            updated_at: self.updated_at,
        }
    }
}

/// The receipt for a message whose `mail.sent` event has this seq.
pub fn mail_receipt(sent: &MailSent, seq: Seq) -> MailReceipt {
    MailReceipt {
        id: sent.mail.id.clone(),
        deliver: sent.deliver,
        run_id: sent.run_id.clone(),
        sent_at: sent.mail.sent_at,
        seq,
    }
}

/// An ask and how it was resolved, as stored in its row. Flattened like the events that it comes from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AskDoc {
    #[serde(flatten)]
    pub ask: Ask,
    /// What resolved the ask; absent while it is open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<ResolvedBy>,
    /// The policy rule that decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<PolicyRule>,
    /// It was allowed because a person had allowed the tool for the rest of the session.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub granted: bool,
    /// When the ask was resolved. Absent while it is open, and in rows of earlier releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolved_at: Option<Millis>,
}

impl AskDoc {
    /// The row of an open ask.
    pub fn opened(ask: Ask) -> Self {
        Self { ask, by: None, rule: None, granted: false, resolved_at: None }
    }

    /// The row of an ask that was answered or withdrawn.
    pub fn resolved(resolved: &AskResolved, at: Millis) -> Self {
        let AskResolved { ask_id: _, ask, by, rule, granted } = resolved;
        Self { ask: ask.clone(), by: Some(*by), rule: rule.clone(), granted: *granted, resolved_at: Some(at) }
    }

    /// The ask as the API shows it. An ask of an earlier release gets the digest of its input here.
    pub fn view(self) -> api::AskRecord {
        let Self { ask, by, rule, granted, resolved_at } = self;
        api::AskRecord { ask: ask_digest::with_digest(ask), by, rule, granted, resolved_at }
    }
}

/// The prompt of a run, as stored in its row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunPrompt {
    /// The prompt, or its head if there is a blob.
    pub prompt: String,
    /// The file that holds the whole prompt.
    pub blob: Option<BlobRef>,
}

/// A run without its prompt, as stored in its row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunDoc {
    pub session_id: SessionId,
    pub state: RunStatus,
    /// Its position in the queue when it was accepted, which its receipt repeats.
    pub position: u32,
    pub finish_reason: Option<FinishReason>,
    /// The result, or its head if there is a blob.
    pub text: Option<String>,
    /// The file that holds the whole result.
    pub text_blob: Option<BlobRef>,
    pub error: Option<RunError>,
    pub usage: TokenUsage,
    pub accepted_at: Millis,
    /// When the agent was ready for the prompt.
    pub started_at: Option<Millis>,
    pub finished_at: Option<Millis>,
}

impl RunDoc {
    /// The run as the API shows it.
    pub fn view(self, id: RunId, prompt: RunPrompt) -> api::Run {
        api::Run {
            id,
            session_id: self.session_id,
            state: self.state,
            prompt: prompt.prompt,
            prompt_blob: prompt.blob,
            finish_reason: self.finish_reason,
            text: self.text,
            text_blob: self.text_blob,
            error: self.error,
            usage: self.usage,
            accepted_at: self.accepted_at,
            started_at: self.started_at,
            finished_at: self.finished_at,
        }
    }
}

/// A session, as stored in its row. Fields that depend on the moment, such as a halt, are filled in by
/// [`SessionDoc::view`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionDoc {
    /// The session as far as the journal knows; `state` and `queued` are placeholders.
    pub session: api::Session,
    pub phase: SessionPhase,
    /// How many runs have not ended.
    #[serde(rename = "unfinished")]
    pub unfinished_runs: u32,
    /// The directory that its agent works in, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<String>,
}

impl SessionDoc {
    pub fn of(state: &SessionState) -> Self {
        let settings = &state.settings;
        let session = api::Session {
            id: state.id.clone(),
            workspace_id: state.workspace.clone(),
            agent: settings.agent.clone(),
            title: settings.title.clone(),
            state: SessionStatus::Idle,
            busy: state.is_busy(),
            parent: settings.parent.clone(),
            fleet: settings.fleet.clone(),
            model: settings.model.clone(),
            mode: settings.mode.clone(),
            system_prompt: settings.system_prompt.clone(),
            policy: settings.policy.clone(),
            queued: 0,
            usage: state.usage,
            context: state.agent_context,
            agent_session_id: state.agent_session_id.clone(),
            worktree: settings.worktree.as_ref().map(|worktree| worktree.path.clone()),
            mcp: settings.mcp,
            sandbox: Some(session_sandbox(state))
                .filter(|sandbox| *sandbox != api::SessionSandbox::default()),
            budget_usd: settings.limits.budget_usd,
            max_turns: settings.limits.max_turns,
            run_timeout_s: settings.limits.run_timeout_s,
            cancel_grace_s: settings.limits.cancel_grace_s,
            restarts: settings.limits.restarts,
            restart_window_s: settings.limits.restart_window_s,
            max_journal_mb: settings.limits.max_journal_mb,
            env: settings.env.clone(),
            mail: settings.mail,
            tree_cost_usd: None,
            account: Some(state.account()),
            quota_until: None,
            closing: state.closing.is_some(),
            active_run: state.runs.front().map(active_run),
            last_run: state.last_run.clone(),
            auto_title: state.auto_title.clone().filter(|_| settings.title.is_none()),
            created_at: state.created_at,
            updated_at: state.updated_at,
        };
        let directory = settings.directory.clone();
        Self { session, phase: state.phase(), unfinished_runs: state.runs.len() as u32, directory }
    }

    /// The account that the agent uses. Rows of earlier releases lack it.
    pub fn account(&self) -> AccountId {
        self.session.account.clone().unwrap_or_else(|| usual_account(&self.session.agent))
    }

    /// The session as the API shows it now. Under a halt, and while the quota of its account is exhausted, a run that
    /// has not started counts as queued.
    pub fn view(self, halted: bool, quota_until: Option<Millis>) -> api::Session {
        let held = halted || quota_until.is_some();
        let serving = match self.phase {
            SessionPhase::Unstarted => !held,
            SessionPhase::Running | SessionPhase::Waiting => true,
            SessionPhase::Idle | SessionPhase::Queued | SessionPhase::Closed => false,
        };
        let state = match self.phase {
            SessionPhase::Unstarted if !held => SessionStatus::Starting,
            SessionPhase::Idle | SessionPhase::Queued | SessionPhase::Unstarted => SessionStatus::Idle,
            SessionPhase::Running => SessionStatus::Running,
            SessionPhase::Waiting => SessionStatus::Waiting,
            SessionPhase::Closed => SessionStatus::Closed,
        };
        api::Session {
            state,
            queued: self.unfinished_runs - u32::from(serving).min(self.unfinished_runs),
            quota_until: quota_until.filter(|_| state != SessionStatus::Closed),
            account: Some(self.account()),
            sandbox: Some(self.session.sandbox.unwrap_or_default()),
            ..self.session
        }
    }
}

/// The confinement as the API shows it: that of the agent's last start, with what later changes ask for.
fn session_sandbox(state: &SessionState) -> api::SessionSandbox {
    let SessionCreated { sandbox, network, .. } = &state.settings;
    match &state.sandbox {
        Some(SandboxReport { asked, level, network: in_force, why }) => api::SessionSandbox {
            asked: sandbox.unwrap_or(*asked),
            level: Some(*level),
            network: *in_force,
            network_asked: network.filter(|asked| asked != in_force),
            why: why.clone(),
        },
        None => api::SessionSandbox {
            asked: sandbox.unwrap_or_default(),
            network: network.unwrap_or_default(),
            ..api::SessionSandbox::default()
        },
    }
}

/// Whether an event changes the session's own row.
pub fn changes_session_row(body: &EventBody) -> bool {
    !matches!(
        body,
        EventBody::TextDelta(_)
            | EventBody::ThoughtDelta(_)
            | EventBody::ToolStarted(_)
            | EventBody::ToolOutput(_)
            | EventBody::ToolFinished(_)
            | EventBody::TurnStarted(_)
            | EventBody::PlanUpdated(_)
            | EventBody::ContextCompacted(_)
            | EventBody::NoticeShown(_)
            | EventBody::MessageCreated(_)
            | EventBody::MessageFinished(_)
            | EventBody::AskDelivered(_)
            | EventBody::QuotaReached(_)
    )
}

/// Applies an event and returns the rows that it changed.
pub fn apply_event(state: &mut SessionState, event: &SessionEvent) -> Vec<UpdatedRow> {
    let ending = match (&event.body, &event.run) {
        (EventBody::RunFinished(_), Some(id)) => state.run(id).cloned(),
        _ => None,
    };
    let first_before = match &event.body {
        EventBody::RunMoved(_) => state.runs.front().map(|run| run.id.clone()),
        _ => None,
    };
    let before = mail_id_of(&event.body).and_then(|id| state.mailbox_entry(id).cloned());
    evolve(state, event);
    let run_of = |id: &RunId| state.run(id).map(|run| run_row(state, run, None));
    match (&event.body, &event.run) {
        (EventBody::RunAccepted(accepted), Some(id)) => {
            let prompt = RunPrompt { prompt: accepted.prompt.clone(), blob: accepted.blob.clone() };
            let run = state.run(id).map(|run| run_row(state, run, Some(prompt)));
            run.into_iter().chain(mail_row(state, event, before)).collect()
        }
        (
            EventBody::RunQueued(_)
            | EventBody::RunStarted(_)
            | EventBody::RunSuspended(_)
            | EventBody::RunResumed(_)
            | EventBody::UsageReported(_),
            Some(id),
        ) => run_of(id).into_iter().collect(),
        (EventBody::RunMoved(_), Some(id)) => {
            // A run that is no longer the first is queued now, even if it was accepted to start at once.
            let first_after = state.runs.front().map(|run| run.id.clone());
            let firsts = [first_before, first_after].into_iter().flatten().filter(|first| first != id);
            [id.clone()].into_iter().chain(firsts).filter_map(|run| run_of(&run)).collect()
        }
        (EventBody::QuotaReached(reached), _) => vec![UpdatedRow::Quota(ExhaustedQuota {
            account: reached.account.clone(),
            agent: reached.agent.clone(),
            session: state.id.clone(),
            until: reached.until,
            since: event.ts,
        })],
        (EventBody::AskOpened(opened), run) => {
            let ask = AskDoc::opened(opened.ask.clone());
            run.iter().filter_map(run_of).chain([UpdatedRow::Ask(ask)]).collect()
        }
        (EventBody::AskResolved(resolved), run) => run
            .iter()
            .filter_map(run_of)
            .chain([UpdatedRow::Ask(AskDoc::resolved(resolved, event.ts.wall))])
            .collect(),
        (EventBody::RunFinished(finished), Some(id)) => {
            let Some(run) = ending else { return Vec::new() };
            let doc = RunDoc {
                state: RunStatus::Finished,
                finish_reason: Some(finished.finish_reason),
                text: Some(finished.text.clone()),
                text_blob: finished.blob.clone(),
                error: finished.error.clone(),
                usage: finished.usage,
                finished_at: Some(event.ts.wall),
                ..run_doc(state, &run)
            };
            vec![UpdatedRow::Run { id: id.clone(), doc, prompt: None, fingerprint: run.fingerprint }]
        }
        _ => mail_row(state, event, before).into_iter().collect(),
    }
}

/// The message that an event is about.
fn mail_id_of(body: &EventBody) -> Option<&MailId> {
    match body {
        EventBody::MailSent(sent) => Some(&sent.mail.id),
        EventBody::MailDelivered(delivered) => Some(&delivered.id),
        EventBody::MailClaimed(claimed) => Some(&claimed.id),
        EventBody::MailAcknowledged(acknowledged) => Some(&acknowledged.id),
        EventBody::MailReturned(returned) => Some(&returned.id),
        EventBody::MailQuarantined(quarantined) => Some(&quarantined.id),
        EventBody::RunAccepted(accepted) => accepted.mail.as_ref(),
        _ => None,
    }
}

/// The row of the message that an event is about. `before` is its mailbox entry before the event, since a message
/// that is settled is no longer in the state.
fn mail_row(state: &SessionState, event: &SessionEvent, before: Option<MailboxEntry>) -> Option<UpdatedRow> {
    let id = mail_id_of(&event.body)?;
    let entry = state.mailbox_entry(id);
    let returns = entry.or(before.as_ref()).map_or(0, |entry| entry.returns);
    let mut doc = MailDoc {
        state: MailStatus::Waiting,
        run_id: None,
        delivered_as: None,
        claim: None,
        claim_expires_at: None,
        returns,
        reason: None,
        updated_at: event.ts.wall,
    };
    match entry.map(|entry| &entry.delivery) {
        Some(MailDeliveryState::Run(run) | MailDeliveryState::Steer { target_run: run, .. }) => {
            doc.state = MailStatus::Delivering;
            doc.run_id = Some(run.clone());
        }
        Some(MailDeliveryState::Claimed { claim, until, .. }) => {
            doc.state = MailStatus::Claimed;
            doc.claim = Some(claim.0);
            doc.claim_expires_at = Some(*until);
        }
        Some(MailDeliveryState::Held) | None => {}
    }
    let mut sent = None;
    match &event.body {
        EventBody::MailSent(body) => sent = Some(Box::new(body.clone())),
        EventBody::MailReturned(returned) => doc.reason = Some(returned.reason.clone()),
        EventBody::MailDelivered(delivered) => {
            doc.state = MailStatus::Delivered;
            doc.delivered_as = Some(delivered.delivered_as);
            doc.run_id = Some(delivered.run_id.clone());
        }
        EventBody::MailAcknowledged(acknowledged) => {
            doc.state = MailStatus::Acknowledged;
            doc.claim = Some(acknowledged.claim.0);
        }
        EventBody::MailQuarantined(quarantined) => {
            doc.state = MailStatus::Quarantined;
            doc.reason = Some(quarantined.reason.clone());
        }
        _ => {}
    }
    Some(UpdatedRow::Mail { id: id.clone(), doc, sent })
}

fn active_run(run: &UnfinishedRun) -> api::ActiveRun {
    let started_at = run.execution.as_ref().map(|started| started.started_at.wall);
    api::ActiveRun { id: run.id.clone(), accepted_at: run.accepted_at, started_at }
}

fn run_row(state: &SessionState, run: &UnfinishedRun, prompt: Option<RunPrompt>) -> UpdatedRow {
    let (id, fingerprint) = (run.id.clone(), run.fingerprint.clone());
    UpdatedRow::Run { id, doc: run_doc(state, run), prompt, fingerprint }
}

fn run_doc(state: &SessionState, run: &UnfinishedRun) -> RunDoc {
    let has_pending_ask = state.pending_asks().any(|ask| ask.run_id.as_ref() == Some(&run.id));
    let is_first = state.runs.front().is_some_and(|first| first.id == run.id);
    RunDoc {
        session_id: state.id.clone(),
        state: match (&run.execution, run.position) {
            (Some(started), _) if started.suspended.is_some() => RunStatus::Suspended,
            (Some(_), _) if has_pending_ask => RunStatus::Waiting,
            (Some(_), _) => RunStatus::Running,
            (None, 0) if !run.waits_for_slot && run.quota_until.is_none() && is_first => RunStatus::Accepted,
            (None, _) => RunStatus::Queued,
        },
        position: run.position,
        finish_reason: None,
        text: None,
        text_blob: None,
        error: None,
        usage: run.execution.as_ref().map(|started| started.usage).unwrap_or_default(),
        accepted_at: run.accepted_at,
        started_at: run.execution.as_ref().map(|started| started.started_at.wall),
        finished_at: None,
    }
}
