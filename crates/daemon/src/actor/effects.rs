//! What is done once the events that decided it are in the journal.

use std::path::PathBuf;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use qd_core::session::{SessionCommand, SessionEffect, seconds_to_millis};
use qd_protocol::event::{Attachment, RunError, SessionCreated};
use qd_protocol::link::{AgentCommand, AgentExitReason, PromptFile, TurnLimits};
use qd_protocol::policy::{Policy, PolicyVerdict};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{ApiError, EventNumber, LongText, Millis, RunId, WorkerId};
use serde_json::Value;
use tokio::sync::oneshot;

use super::batch::StepOutcome;
use super::reply::CommandCompletion;
use super::{ActorMessage, SessionActor, load};

impl SessionActor {
    /// Answers whoever waits, then acts.
    pub(super) async fn perform_outcome(&mut self, outcome: StepOutcome) {
        let StepOutcome { effects, reply: answer, waiter } = outcome;
        let cancels_below =
            effects.iter().any(|effect| matches!(effect, SessionEffect::CancelChildren { .. }));
        let (mut told, below) = match cancels_below {
            true => {
                let (told, below) = oneshot::channel();
                (Some(told), Some(below))
            }
            false => (None, None),
        };
        if let (Some(waiter), Some(answer)) = (waiter, answer) {
            // Whoever has gone away does not need the answer: the run is ours, not theirs.
            let _gone = waiter
                .send(answer.map(|answer| CommandCompletion { reply: answer, cancelled_in_children: below }));
        }
        for effect in effects {
            self.perform_effect(effect, &mut told).await;
        }
    }

    async fn perform_effect(
        &mut self,
        effect: SessionEffect,
        told: &mut Option<oneshot::Sender<Vec<RunId>>>,
    ) {
        match effect {
            SessionEffect::LaunchAgent { worker, new_worker: fresh } => {
                self.launch_agent(worker, fresh).await
            }
            SessionEffect::SendPrompt { number, run } => self.send_prompt(number, run).await,
            SessionEffect::SendSteer { number, run, text } => self.send_steer(number, run, text).await,
            SessionEffect::CancelTurn { number, run } => {
                self.agent.send(AgentCommand::Cancel { number, run })
            }
            SessionEffect::KillTurn { number, run } => self.agent.send(AgentCommand::Kill { number, run }),
            SessionEffect::SendAnswer { number, ask, reply } => {
                self.agent.send(AgentCommand::Answer { number, ask, answer: reply })
            }
            // If there is none, the journal says that there is a worker and we know of none.
            SessionEffect::StopAgent => self.end_agent(AgentExitReason::Lost),
            SessionEffect::CancelChildren { number } => self.cancel_children(number, told.take()),
            SessionEffect::CloseChildren { purge } => self.close_children(purge),
            SessionEffect::QueryChildren { children } => self.check_children(children),
            SessionEffect::NotifyParent => self.notify_parent(),
            SessionEffect::NotifyFleet { run } => self.notify_fleet(run),
            SessionEffect::CheckBudget => self.check_budget().await,
            SessionEffect::Purge => {
                self.purged = true;
                self.forget_env();
                crate::maildir::remove_folders(&self.daemon.home, &self.session.id);
            }
        }
    }

    /// A session that is closed starts no agent any more, and nobody else may see its variables.
    pub(super) fn forget_env(&self) {
        if let Err(error) = self.daemon.home.remove_session_secrets(&self.session.id) {
            tracing::warn!(session = %self.session.id, %error, "the variables of a closed session are left over");
        }
    }

    /// Ends the agent, or what is being made ready for one; `otherwise` is said if there is nothing to end.
    pub(super) fn end_agent(&mut self, otherwise: AgentExitReason) {
        let was_on_its_way = self.preparation.take().is_some();
        if self.agent.has_worker() {
            return self.agent.close();
        }
        // Asked for again before it was judged, it is what it was.
        let gone = if was_on_its_way { AgentExitReason::Stopped } else { otherwise };
        self.retry_inputs.get_or_insert_default().gone.get_or_insert(gone);
    }

    async fn launch_agent(&mut self, worker: WorkerId, fresh: bool) {
        match &self.state.settings.worktree {
            Some(worktree) => {
                let worktree = worktree.clone();
                self.begin_preparation(worktree, worker, fresh);
            }
            None => self.start_agent(worker, fresh).await,
        }
    }

    /// Starts the agent, where it is to work.
    pub(super) async fn start_agent(&mut self, worker: WorkerId, fresh: bool) {
        let env = self.daemon.home.session_env(&self.session.id);
        let here = self.daemon.workers.is_local(&self.state.settings.agent);
        let project = self.daemon.workspace_path(&self.session.workspace, here).await;
        let mut manifest = None;
        let cwd = match (project, &self.state.settings) {
            (Ok(project), SessionCreated { agent, worktree: Some(_), directory: Some(directory), .. }) => {
                manifest = self.daemon.workers.agents().launch_manifest(agent, &project).map(Box::new);
                Ok(PathBuf::from(directory))
            }
            (project, _) => project,
        };
        let (env, cwd) = match (env, cwd) {
            (Ok(env), Ok(cwd)) => (env, cwd),
            (env, cwd) => {
                let why = env.err().map(|error| error.to_string()).or(cwd.err().map(|error| error.message));
                return self.fail_agent(RunError::new("agent_not_started", why.unwrap_or_default()));
            }
        };
        self.idle_timeout = self.agent_idle_timeout();
        let settings = &self.state.settings;
        let id = self.state.id.clone();
        let spec = AgentSpec {
            model: settings.model.clone(),
            system_prompt: settings.system_prompt.clone(),
            env,
            agent_session_id: self.state.agent_session_id.clone(),
            last_active: self.state.last_finished,
            manifest,
            after: self.state.last_link_number,
            ..AgentSpec::new(id, worker, &settings.agent, cwd)
        };
        // One that may do nothing may not have others do it either.
        let tools = settings.policy != Policy::Always(PolicyVerdict::Deny)
            && settings.mcp.unwrap_or(self.daemon.default_mcp);
        if !fresh {
            return self.agent.start(self.daemon.workers.complete_spec(spec, tools));
        }
        match self.daemon.workers.launch(spec, tools, self.state.worker_since).await {
            Ok(link) => self.agent.set_new_link(link),
            Err(error) => self.fail_agent(error),
        }
    }

    /// What stands in the way of an agent is told like an agent that failed to start.
    pub(super) fn fail_agent(&mut self, error: RunError) {
        self.retry_inputs.get_or_insert_default().gone = Some(AgentExitReason::Failed(error));
    }

    /// Gives the agent a prompt, or what a suspended run waited for. Everything goes with it: its machine may not be
    /// ours.
    async fn send_prompt(&mut self, number: EventNumber, run: RunId) {
        match self.load_prompt_parts(number, &run).await {
            Ok((prompt, files, messages)) => {
                let limits = self.remaining_limits().await;
                self.agent.send(AgentCommand::Prompt { number, run, prompt, files, messages, limits });
            }
            Err(error) => {
                tracing::error!(session = %self.session.id, %run, %error, "a prompt could not be read again");
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
        let accept = match self.prompts.take(run) {
            Some(accept) => accept,
            None => load::load_prompt(&self.daemon, &self.session, run).await?,
        };
        let resumed = self.state.active_run().is_some_and(|(_, started)| started.resumed);
        let messages = match resumed {
            true => load::resume_transcript(&self.daemon, &self.session, run, number).await?,
            false => Vec::new(),
        };
        let blobs = self.daemon.home.blobs();
        let mut files = Vec::with_capacity(accept.attachments.len());
        for Attachment { name, mime, data, blob } in accept.attachments {
            let data = match (data, blob) {
                (Some(data), _) => data,
                (None, Some(blob)) => BASE64.encode(load::read_blob(&blobs, &blob).await?),
                (None, None) => String::new(),
            };
            files.push(PromptFile { name, mime, data });
        }
        Ok((load::full_text(&blobs, accept.prompt).await?, files, messages))
    }

    /// Tells the worker of a turn what is left to it: the limits may be others than when it began.
    pub(super) async fn send_limits(&self) {
        let turn = self.state.current_turn().filter(|(_, started)| started.stop.is_none());
        if let Some(run) = turn.map(|(run, _)| run.id.clone()) {
            self.agent.send_limits(run, self.remaining_limits().await);
        }
    }

    /// What is left to the run, for a worker that is alone.
    async fn remaining_limits(&self) -> TurnLimits {
        let limits = &self.state.settings.limits;
        let started = self.state.active_run().map(|(_, started)| started);
        let ran = started.map_or(0, |started| started.run_time(Millis::now()));
        let turns = started.map_or(0, |started| started.turns);
        TurnLimits {
            timeout_ms: limits.run_timeout_s.map(|limit| seconds_to_millis(limit).saturating_sub(ran)),
            max_turns: limits.max_turns.map(|most| most.saturating_sub(turns)),
            budget_usd: self.daemon.budget_left(&self.lineage).await,
            grace_ms: limits.cancel_grace_s.map(seconds_to_millis),
        }
    }

    async fn send_steer(&mut self, number: EventNumber, run: RunId, text: LongText) {
        match load::full_text(&self.daemon.home.blobs(), text).await {
            Ok(text) => self.agent.send(AgentCommand::Steer { number, run, text }),
            Err(error) => {
                tracing::error!(session = %self.session.id, %run, %error, "a steer could not be read again");
            }
        }
    }

    async fn check_budget(&mut self) {
        let counts = self.lineage.len() > 1 || self.state.settings.limits.budget_usd.is_some();
        if !counts && !self.daemon.budgets.any_spent(&self.lineage) {
            return;
        }
        if let Err(error) = self.daemon.check_budgets(self.session.key).await {
            tracing::warn!(session = %self.session.id, %error, "a budget could not be checked");
        }
    }

    /// Tells the session below, on an errand that the daemon owns, and then ourselves that it is done.
    pub(super) fn post_command(
        daemon: &Arc<crate::daemon::Daemon>,
        session: &Arc<crate::daemon::SessionAddress>,
        command: SessionCommand,
    ) {
        let (reply, _answer) = oneshot::channel();
        let request = super::CommandRequest { command, key: None, child: None, reply };
        if let Err(error) = daemon.send_message(session, ActorMessage::Request(Box::new(request))) {
            tracing::warn!(session = %session.id, %error, "a session was not told what became of those below; it asks again when it wakes");
        }
    }
}
