//! Performs the effects of a step, once the events that decided them are in the journal.

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use qd_core::sandbox::SandboxUnavailable;
use qd_core::session::{SessionEffect, seconds_to_millis};
use qd_protocol::event::{Attachment, RunError, SessionCreated};
use qd_protocol::link::{AgentCommand, AgentExitReason, PromptFile, TurnLimits};
use qd_protocol::policy::{Policy, PolicyVerdict};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{ApiError, ErrorCode, EventNumber, LongText, RunId, WorkerId};
use serde_json::Value;
use tokio::sync::oneshot;

use super::batch::StepOutcome;
use super::reply::CommandCompletion;
use super::{SessionActor, load};
use crate::clock::read_clocks;

impl SessionActor {
    /// Replies to the waiting client, then performs the effects.
    pub(super) async fn perform_outcome(&mut self, outcome: StepOutcome) {
        let StepOutcome { effects, reply, waiter } = outcome;
        let cancels_children =
            effects.iter().any(|effect| matches!(effect, SessionEffect::CancelChildren { .. }));
        let (mut receipt, cancelled_in_children) = match cancels_children {
            true => {
                let (receipt, cancelled) = oneshot::channel();
                (Some(receipt), Some(cancelled))
            }
            false => (None, None),
        };
        if let (Some(waiter), Some(reply)) = (waiter, reply) {
            // A client that has disconnected does not need the reply: the run is ours, not the client's.
            let _gone = waiter.send(reply.map(|reply| CommandCompletion { reply, cancelled_in_children }));
        }
        for effect in effects {
            self.perform_effect(effect, &mut receipt).await;
        }
    }

    async fn perform_effect(
        &mut self,
        effect: SessionEffect,
        receipt: &mut Option<oneshot::Sender<Vec<RunId>>>,
    ) {
        match effect {
            SessionEffect::LaunchAgent { worker, new_worker } => {
                self.launch_agent(worker, new_worker).await;
                self.launch_decided = false;
            }
            SessionEffect::SendPrompt { number, run } => self.send_prompt(number, run).await,
            SessionEffect::SendSteer { number, run, text } => self.send_steer(number, run, text).await,
            SessionEffect::CancelTurn { number, run } => {
                self.agent.send(AgentCommand::Cancel { number, run })
            }
            SessionEffect::KillTurn { number, run } => {
                // A stopped worker would not even receive this.
                self.daemon.workers.resume(&self.session.id);
                self.agent.send(AgentCommand::Kill { number, run });
            }
            SessionEffect::SendAnswer { number, ask, reply } => {
                self.agent.send(AgentCommand::Answer { number, ask, answer: reply })
            }
            // If the journal has a worker but no link to it exists here, the worker counts as lost.
            SessionEffect::StopAgent => self.end_agent(AgentExitReason::Lost),
            SessionEffect::CancelChildren { number } => self.cancel_children(number, receipt.take()),
            SessionEffect::CloseChildren { purge } => self.close_children(purge),
            SessionEffect::QueryChildren { children } => self.check_children(children),
            SessionEffect::NotifyParent => self.notify_parent(),
            SessionEffect::NotifyFleet { run } => self.notify_fleet(run),
            SessionEffect::CheckBudget => self.check_budget().await,
            SessionEffect::WakeAccount => self.daemon.wake_awake_sessions(),
            SessionEffect::Purge => {
                self.purged = true;
                self.remove_session_secrets();
                crate::maildir::remove_folders(&self.daemon.home, &self.session.id);
            }
        }
    }

    /// Removes the stored variables and token of a closed session: it starts no more agents, and nobody else may read
    /// them.
    pub(super) fn remove_session_secrets(&self) {
        if let Err(error) = self.daemon.home.remove_session_secrets(&self.session.id) {
            tracing::warn!(session = %self.session.id, %error, "could not remove the variables of a closed session");
        }
    }

    /// Ends the agent, or stops the preparation for one. If neither exists, the agent's exit is reported as
    /// `otherwise`.
    pub(super) fn end_agent(&mut self, otherwise: AgentExitReason) {
        let was_preparing = self.preparation.take().is_some();
        if self.agent.has_worker() {
            return self.agent.close();
        }
        // A second request before the first is judged does not change the reason.
        let gone = if was_preparing { AgentExitReason::Stopped } else { otherwise };
        self.unreported_exit.get_or_insert(gone);
    }

    async fn launch_agent(&mut self, worker: WorkerId, new_worker: bool) {
        match &self.state.settings.worktree {
            Some(worktree) => {
                let worktree = worktree.clone();
                self.begin_preparation(worktree, worker, new_worker);
            }
            None => self.start_agent(worker, new_worker).await,
        }
    }

    /// Starts the agent in its working directory, in a new worker or in the one the session has.
    pub(super) async fn start_agent(&mut self, worker: WorkerId, new_worker: bool) {
        if new_worker && !self.is_confined_as_asked(None) {
            // Settings were changed after the launch was decided, and `worker.started` names the sandbox of before. The
            // next launch names the new one.
            return self.end_agent(AgentExitReason::Stopped);
        }
        let env = self.daemon.home.session_env(&self.session.id);
        let is_local = self.daemon.workers.is_local(&self.state.settings.agent);
        let project = self.daemon.workspace_path(&self.session.workspace, is_local).await;
        let (env, project) = match (env, project) {
            (Ok(env), Ok(project)) => (env, project),
            (env, project) => {
                let why = env.err().map(|error| error.to_string());
                let why = why.or(project.err().map(|error| error.message)).unwrap_or_default();
                return self.fail_agent(RunError::new("agent_not_started", why));
            }
        };
        let spec = match self.agent_spec(worker, &project) {
            Ok(spec) => AgentSpec { env, ..spec },
            Err(error) => {
                let code = ErrorCode::SandboxUnavailable.as_str();
                return self.fail_agent(RunError::new(code, error.to_string()));
            }
        };
        self.idle_timeout = self.agent_idle_timeout();
        let settings = &self.state.settings;
        // An agent that may not act itself may not have other sessions act for it either.
        let tools = settings.policy != Policy::Always(PolicyVerdict::Deny)
            && settings.mcp.unwrap_or(self.daemon.default_mcp);
        if !new_worker {
            return self.agent.start(self.daemon.workers.complete_spec(spec, tools));
        }
        match self.daemon.workers.launch(spec, tools, self.state.worker_since).await {
            Ok(link) => self.agent.set_new_link(link),
            Err(error) => self.fail_agent(error),
        }
    }

    /// What the agent is started with, except for what [`Workers::complete_spec`](crate::workers::Workers) adds.
    fn agent_spec(&self, worker: WorkerId, project: &Path) -> Result<AgentSpec, SandboxUnavailable> {
        let settings = &self.state.settings;
        let SessionCreated { agent, program, worktree, directory, .. } = settings;
        let program = program.as_deref().map(Path::new);
        // An agent in a worktree has the manifest of its project, not that of the worktree.
        let has_own_manifest = worktree.is_some() || program.is_some();
        let manifest = has_own_manifest
            .then(|| self.daemon.workers.agents().launch_manifest(agent, project, program))
            .flatten();
        let cwd = match (worktree, directory) {
            (Some(_), Some(directory)) => PathBuf::from(directory),
            _ => project.to_owned(),
        };
        let id = self.state.id.clone();
        let sandbox = self.daemon.workers.sandbox_spec(&id, settings, project)?;
        // A conversation from elsewhere may have been used until the moment in which the session was created.
        let adopted_at = settings.agent_session_id.is_some().then_some(self.state.created_at);
        // Nobody knows what such a conversation has cost before.
        let is_adopted =
            settings.agent_session_id.is_some() && settings.agent_session_id == self.state.agent_session_id;
        Ok(AgentSpec {
            model: settings.model.clone(),
            system_prompt: settings.system_prompt.clone(),
            agent_session_id: self.state.agent_session_id.clone(),
            conversation_cost_usd: self.state.conversation_cost_usd.or((!is_adopted).then_some(0.0)),
            last_active: self.state.last_finished.or(adopted_at),
            manifest: manifest.map(Box::new),
            sandbox,
            after: self.state.last_update_number,
            ..AgentSpec::new(id, worker, agent, cwd)
        })
    }

    /// Reports a problem before the start as an agent that failed to start.
    pub(super) fn fail_agent(&mut self, error: RunError) {
        self.unreported_exit = Some(AgentExitReason::Failed(error));
    }

    /// Sends a prompt to the agent, or the results that a suspended run waited for. The contents of attachments go
    /// along, because the worker may be on another machine.
    async fn send_prompt(&mut self, number: EventNumber, run: RunId) {
        match self.load_prompt_parts(number, &run).await {
            Ok((prompt, files, messages)) => {
                let limits = self.remaining_limits().await;
                let mode = self.state.settings.mode.clone();
                self.agent.send(AgentCommand::Prompt { number, run, prompt, mode, files, messages, limits });
            }
            Err(error) => {
                tracing::error!(session = %self.session.id, %run, %error, "could not load a prompt from the journal");
                self.agent.close();
                self.fail_agent(RunError::new("prompt_unreadable", error.message));
            }
        }
    }

    async fn load_prompt_parts(
        &mut self,
        number: EventNumber,
        run: &RunId,
    ) -> Result<(String, Vec<PromptFile>, Vec<Value>), ApiError> {
        let prompt = match self.prompts.take(run) {
            Some(prompt) => prompt,
            None => load::load_prompt(&self.daemon, &self.session, run).await?,
        };
        let resumed = self.state.active_run().is_some_and(|(_, started)| started.resumed);
        let messages = match resumed {
            true => load::resume_transcript(&self.daemon, &self.session, run, number).await?,
            false => Vec::new(),
        };
        let blobs = self.daemon.home.blobs();
        let mut files = Vec::with_capacity(prompt.attachments.len());
        for Attachment { name, mime, data, blob } in prompt.attachments {
            let data = match (data, blob) {
                (Some(data), _) => data,
                (None, Some(blob)) => BASE64.encode(load::read_blob(&blobs, &blob).await?),
                (None, None) => String::new(),
            };
            files.push(PromptFile { name, mime, data });
        }
        Ok((load::full_text(&blobs, prompt.prompt).await?, files, messages))
    }

    /// Sends the worker of a running turn its remaining limits, which may have changed since the turn began.
    pub(super) async fn send_limits(&self) {
        let turn = self.state.current_turn().filter(|(_, started)| started.stop.is_none());
        if let Some(run) = turn.map(|(run, _)| run.id.clone()) {
            self.agent.send_limits(run, self.remaining_limits().await);
        }
    }

    /// What the run has left of its limits. The worker enforces them while no daemon is attached.
    async fn remaining_limits(&self) -> TurnLimits {
        let limits = &self.state.settings.limits;
        let started = self.state.active_run().map(|(_, started)| started);
        let ran = started.map_or(0, |started| started.run_time(read_clocks()));
        let turns = started.map_or(0, |started| started.turns);
        TurnLimits {
            timeout_ms: limits.run_timeout_s.map(|limit| seconds_to_millis(limit).saturating_sub(ran)),
            max_turns: limits.max_turns.map(|limit| limit.saturating_sub(turns)),
            budget_usd: self.daemon.budget_left(&self.lineage).await,
            grace_ms: limits.cancel_grace_s.map(seconds_to_millis),
        }
    }

    async fn send_steer(&mut self, number: EventNumber, run: RunId, text: LongText) {
        match load::full_text(&self.daemon.home.blobs(), text).await {
            Ok(text) => self.agent.send(AgentCommand::Steer { number, run, text }),
            Err(error) => {
                tracing::error!(session = %self.session.id, %run, %error, "could not load the text of a steer");
            }
        }
    }

    async fn check_budget(&mut self) {
        let has_budget = self.lineage.len() > 1 || self.state.settings.limits.budget_usd.is_some();
        if !has_budget && !self.daemon.budgets.any_spent(&self.lineage) {
            return;
        }
        if let Err(error) = self.daemon.check_budgets(self.session.key).await {
            tracing::warn!(session = %self.session.id, %error, "a budget could not be checked");
        }
    }
}
