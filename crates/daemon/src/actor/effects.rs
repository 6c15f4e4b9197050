//! What is done once the events that decided it are in the journal.

use std::sync::Arc;

use qd_core::session::{Command, Effect};
use qd_link::AgentSpec;
use qd_protocol::link::{Down, Gone};
use qd_protocol::{Number, RunId};
use tokio::sync::oneshot;

use super::batch::Outcome;
use super::reply::Done;
use super::{Actor, Mail, Redo, load};

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
            Effect::Launch => self.launch().await,
            Effect::Prompt { number, run } => self.prompt(number, run).await,
            Effect::Steer { number, run, text } => {
                self.agent.send(Down::Steer { number, run, text: text.head, blob: text.blob });
            }
            Effect::Cancel { number, run } => self.agent.send(Down::Cancel { number, run }),
            Effect::Kill { number, run } => self.agent.send(Down::Kill { number, run }),
            Effect::Answer { number, ask, reply } => {
                self.agent.send(Down::Answer { number, ask, answer: reply })
            }
            Effect::StopAgent => {
                self.agent.stop().await;
                if self.state.closed {
                    self.forget_env();
                }
            }
            Effect::CancelBelow { number } => self.cancel_below(number, told.take()),
            Effect::CloseBelow { purge } => self.close_below(purge),
            Effect::CheckBudget => self.check_budget().await,
            Effect::Purge => {
                self.purged = true;
                self.forget_env();
            }
        }
    }

    /// A session that is closed starts no agent any more, and nobody else may see its variables.
    fn forget_env(&self) {
        if let Err(error) = self.daemon.home.drop_env(&self.session.id) {
            tracing::warn!(session = %self.session.id, %error, "the variables of a closed session are left over");
        }
    }

    async fn launch(&mut self) {
        let env = self.daemon.home.env(&self.session.id);
        let cwd = self.daemon.workspace_path(&self.session.workspace).await;
        let (env, cwd) = match (env, cwd) {
            (Ok(env), Ok(cwd)) => (env, cwd),
            (env, cwd) => {
                let why = env.err().map(|error| error.to_string()).or(cwd.err().map(|error| error.message));
                return self.cannot_launch(why.unwrap_or_default());
            }
        };
        let (state, daemon) = (&self.state, &self.daemon);
        self.agent.launch(&*daemon.launcher, || AgentSpec {
            session: state.id.clone(),
            agent: state.settings.agent.clone(),
            cwd,
            model: state.settings.model.clone(),
            system_prompt: state.settings.system_prompt.clone(),
            env,
            agent_session_id: state.agent_session_id.clone(),
            after: state.taken,
            blobs: daemon.home.blobs(),
        });
    }

    /// What stands in the way of an agent is told like an agent that failed to start.
    fn cannot_launch(&mut self, why: String) {
        let error = qd_protocol::event::RunError::new("agent_not_started", why);
        self.redo = Some(Box::new(Redo { gone: Some(Gone::Failed(error)), ..Redo::default() }));
    }

    async fn prompt(&mut self, number: Number, run: RunId) {
        let accept = match self.prompts.take(&run) {
            Some(accept) => accept,
            None => match load::prompt(&self.daemon, &self.session, &run).await {
                Ok(accept) => accept,
                Err(error) => {
                    tracing::error!(session = %self.session.id, %run, %error, "a prompt could not be read again");
                    self.agent.stop().await;
                    return self.cannot_launch(error.message);
                }
            },
        };
        let (prompt, blob) = (accept.prompt.head, accept.prompt.blob);
        self.agent.send(Down::Prompt { number, run, prompt, blob, attachments: accept.attachments });
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
