//! What is done once the events that decided it are in the journal.

use std::path::PathBuf;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use qd_core::session::{Command, Effect, milliseconds};
use qd_protocol::event::{Attachment, RunError, SessionCreated};
use qd_protocol::link::{Down, File, Gone, TurnLimits};
use qd_protocol::policy::{Policy, Verdict};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{ApiError, Millis, Number, RunId, Text, WorkerId};
use serde_json::Value;
use tokio::sync::oneshot;

use super::batch::Outcome;
use super::reply::Done;
use super::{Actor, Mail, load};

impl Actor {
    /// Answers whoever waits, then acts.
    pub(super) async fn carry_out(&mut self, outcome: Outcome) {
        let Outcome { effects, answer, waiter } = outcome;
        let cancels_below = effects.iter().any(|effect| matches!(effect, Effect::CancelBelow { .. }));
        let (mut told, below) = match cancels_below {
            true => {
                let (told, below) = oneshot::channel();
                (Some(told), Some(below))
            }
            false => (None, None),
        };
        if let (Some(waiter), Some(answer)) = (waiter, answer) {
            // Whoever has gone away does not need the answer: the run is ours, not theirs.
            let _gone = waiter.send(answer.map(|answer| Done { answer, below }));
        }
        for effect in effects {
            self.act(effect, &mut told).await;
        }
    }

    async fn act(&mut self, effect: Effect, told: &mut Option<oneshot::Sender<Vec<RunId>>>) {
        match effect {
            Effect::Launch { worker, fresh } => self.launch(worker, fresh).await,
            Effect::Prompt { number, run } => self.prompt(number, run).await,
            Effect::Steer { number, run, text } => self.steer(number, run, text).await,
            Effect::Cancel { number, run } => self.agent.send(Down::Cancel { number, run }),
            Effect::Kill { number, run } => self.agent.send(Down::Kill { number, run }),
            Effect::Answer { number, ask, reply } => {
                self.agent.send(Down::Answer { number, ask, answer: reply })
            }
            // If there is none, the journal says that there is a worker and we know of none.
            Effect::StopAgent => self.end_agent(Gone::Lost),
            Effect::CancelBelow { number } => self.cancel_below(number, told.take()),
            Effect::CloseBelow { purge } => self.close_below(purge),
            Effect::AskChildren { children } => self.ask_children(children),
            Effect::TellParent => self.tell_parent(),
            Effect::TellFleet { run } => self.tell_fleet(run),
            Effect::CheckBudget => self.check_budget().await,
            Effect::Purge => {
                self.purged = true;
                self.forget_env();
                crate::maildir::remove(&self.daemon.home, &self.session.id);
            }
        }
    }

    /// A session that is closed starts no agent any more, and nobody else may see its variables.
    pub(super) fn forget_env(&self) {
        if let Err(error) = self.daemon.home.drop_env(&self.session.id) {
            tracing::warn!(session = %self.session.id, %error, "the variables of a closed session are left over");
        }
    }

    /// Ends the agent, or what is being made ready for one; `otherwise` is said if there is nothing to end.
    pub(super) fn end_agent(&mut self, otherwise: Gone) {
        let was_on_its_way = self.preparing.take().is_some();
        if self.agent.is_there() {
            return self.agent.close();
        }
        // Asked for again before it was judged, it is what it was.
        let gone = if was_on_its_way { Gone::Stopped } else { otherwise };
        self.redo.get_or_insert_default().gone.get_or_insert(gone);
    }

    async fn launch(&mut self, worker: WorkerId, fresh: bool) {
        match &self.state.settings.worktree {
            Some(worktree) => {
                let worktree = worktree.clone();
                self.prepare(worktree, worker, fresh);
            }
            None => self.start(worker, fresh).await,
        }
    }

    /// Starts the agent, where it is to work.
    pub(super) async fn start(&mut self, worker: WorkerId, fresh: bool) {
        let env = self.daemon.home.env(&self.session.id);
        let here = self.daemon.workers.is_here(&self.state.settings.agent);
        let project = self.daemon.workspace_path(&self.session.workspace, here).await;
        let mut manifest = None;
        let cwd = match (project, &self.state.settings) {
            (Ok(project), SessionCreated { agent, worktree: Some(_), directory: Some(directory), .. }) => {
                manifest = self.daemon.workers.agents().manifest(agent, &project).map(Box::new);
                Ok(PathBuf::from(directory))
            }
            (project, _) => project,
        };
        let (env, cwd) = match (env, cwd) {
            (Ok(env), Ok(cwd)) => (env, cwd),
            (env, cwd) => {
                let why = env.err().map(|error| error.to_string()).or(cwd.err().map(|error| error.message));
                return self.fail(RunError::new("agent_not_started", why.unwrap_or_default()));
            }
        };
        self.rest_after = self.may_rest_after();
        let settings = &self.state.settings;
        let id = self.state.id.clone();
        let spec = AgentSpec {
            model: settings.model.clone(),
            system_prompt: settings.system_prompt.clone(),
            env,
            agent_session_id: self.state.agent_session_id.clone(),
            last_active: self.state.last_finished,
            manifest,
            after: self.state.taken,
            ..AgentSpec::new(id, worker, &settings.agent, cwd)
        };
        // One that may do nothing may not have others do it either.
        let tools =
            settings.policy != Policy::Always(Verdict::Deny) && settings.mcp.unwrap_or(self.daemon.mcp);
        if !fresh {
            return self.agent.start(self.daemon.workers.marked(spec, tools));
        }
        match self.daemon.workers.launch(spec, tools, self.state.worker_since).await {
            Ok(link) => self.agent.launched(link),
            Err(error) => self.fail(error),
        }
    }

    /// What stands in the way of an agent is told like an agent that failed to start.
    pub(super) fn fail(&mut self, error: RunError) {
        self.redo.get_or_insert_default().gone = Some(Gone::Failed(error));
    }

    /// Gives the agent a prompt, or what a suspended run waited for. Everything goes with it: its machine may not be
    /// ours.
    async fn prompt(&mut self, number: Number, run: RunId) {
        match self.words(number, &run).await {
            Ok((prompt, files, messages)) => {
                let limits = self.limits().await;
                self.agent.send(Down::Prompt { number, run, prompt, files, messages, limits });
            }
            Err(error) => {
                tracing::error!(session = %self.session.id, %run, %error, "a prompt could not be read again");
                self.agent.close();
                self.fail(RunError::new("prompt_unreadable", error.message));
            }
        }
    }

    async fn words(
        &mut self,
        number: Number,
        run: &RunId,
    ) -> Result<(String, Vec<File>, Vec<Value>), ApiError> {
        let accept = match self.prompts.take(run) {
            Some(accept) => accept,
            None => load::prompt(&self.daemon, &self.session, run).await?,
        };
        let resumed = self.state.active().is_some_and(|(_, started)| started.resumed);
        let messages = match resumed {
            true => load::transcript(&self.daemon, &self.session, run, number).await?,
            false => Vec::new(),
        };
        let blobs = self.daemon.home.blobs();
        let mut files = Vec::with_capacity(accept.attachments.len());
        for Attachment { name, mime, data, blob } in accept.attachments {
            let data = match (data, blob) {
                (Some(data), _) => data,
                (None, Some(blob)) => BASE64.encode(load::blob(&blobs, &blob).await?),
                (None, None) => String::new(),
            };
            files.push(File { name, mime, data });
        }
        Ok((load::whole(&blobs, accept.prompt).await?, files, messages))
    }

    /// Tells the worker of a turn what is left to it: the limits may be others than when it began.
    pub(super) async fn tell_limits(&self) {
        let turn = self.state.turn().filter(|(_, started)| started.stop.is_none());
        if let Some(run) = turn.map(|(run, _)| run.id.clone()) {
            self.agent.limit(run, self.limits().await);
        }
    }

    /// What is left to the run, for a worker that is alone.
    async fn limits(&self) -> TurnLimits {
        let limits = &self.state.settings.limits;
        let started = self.state.active().map(|(_, started)| started);
        let ran = started.map_or(0, |started| started.run_time(Millis::now()));
        let turns = started.map_or(0, |started| started.turns);
        TurnLimits {
            timeout_ms: limits.run_timeout_s.map(|limit| milliseconds(limit).saturating_sub(ran)),
            max_turns: limits.max_turns.map(|most| most.saturating_sub(turns)),
            budget_usd: self.daemon.budget_left(&self.line).await,
            grace_ms: limits.cancel_grace_s.map(milliseconds),
        }
    }

    async fn steer(&mut self, number: Number, run: RunId, text: Text) {
        match load::whole(&self.daemon.home.blobs(), text).await {
            Ok(text) => self.agent.send(Down::Steer { number, run, text }),
            Err(error) => {
                tracing::error!(session = %self.session.id, %run, %error, "a steer could not be read again");
            }
        }
    }

    async fn check_budget(&mut self) {
        let counts = self.line.len() > 1 || self.state.settings.limits.budget_usd.is_some();
        if !counts && !self.daemon.budgets.any_spent(&self.line) {
            return;
        }
        if let Err(error) = self.daemon.check_budgets(self.session.key).await {
            tracing::warn!(session = %self.session.id, %error, "a budget could not be checked");
        }
    }

    /// Tells the session below, on an errand that the daemon owns, and then ourselves that it is done.
    pub(super) fn tell_self(
        daemon: &Arc<crate::daemon::Daemon>,
        session: &Arc<crate::daemon::SessionRef>,
        command: Command,
    ) {
        let (reply, _answer) = oneshot::channel();
        let request = super::Request { command, key: None, birth: None, reply };
        if let Err(error) = daemon.send(session, Mail::Request(Box::new(request))) {
            tracing::warn!(session = %session.id, %error, "a session was not told what became of those below; it asks again when it wakes");
        }
    }
}
