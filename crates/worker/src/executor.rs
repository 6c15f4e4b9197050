//! The agents behind a worker that anybody may talk to (`qd worker`): each run gets a fresh agent, which ends with it.
//! It stands where a daemon would, between the agent's end of a local link and a turn of the SDK.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use qd_keeper::Keeper;
use qd_link::executor::Approval;
use qd_link::{Executor, FromAgent, Job, SessionEnd, Turn, host_with};
use qd_protocol::event::{Answer, AskKind, Decision, RunError};
use qd_protocol::link::{AskRequest, Down, Gone, Outcome, Reply, Stop, TurnLimits, Up, UpNumber};
use qd_protocol::worker::AgentSpec;
use qd_protocol::{AskId, Number, RunId, SessionId, WorkerId};
use serde_json::Value;

use crate::agent::{Around, live};
use crate::below::Below;
use crate::kinds::{Kind, own_program};
use crate::redact::{Redactor, Secrets};

/// Random bytes of the names that a run needs here.
const RANDOM: usize = 16;

/// An agent of this build as an executor; `None` if there is none of this name.
pub fn executor(agent: &str) -> Option<impl Executor> {
    Some(Fresh { agent: agent.to_owned(), kind: Kind::named(agent)? })
}

/// A fresh agent for every run.
#[derive(Debug)]
struct Fresh {
    agent: String,
    kind: Kind,
}

impl Executor for Fresh {
    async fn run(&self, job: Job, turn: Turn) -> Outcome {
        match self.start(job.run.as_ref()).await {
            Ok((run, agent)) => {
                Conversation { run, agent, last: Number(0), steers: false }.hold(job, &turn).await
            }
            Err(error) => Outcome::failed(error),
        }
    }
}

impl Fresh {
    async fn start(&self, run: Option<&RunId>) -> Result<(RunId, SessionEnd), RunError> {
        let mut random = [0; RANDOM];
        getrandom::fill(&mut random).map_err(|cause| {
            RunError::new("agent_failed_to_start", format!("the system gives no random numbers: {cause}"))
        })?;
        let cwd = std::env::current_dir().map_err(|cause| {
            RunError::new("agent_failed_to_start", format!("the working directory is not there: {cause}"))
        })?;
        let run = run.cloned().unwrap_or_else(|| RunId::from_random(&random));
        let spec = AgentSpec {
            session: SessionId::from_random(&random),
            worker: WorkerId::from_random(&random),
            agent: self.agent.clone(),
            cwd,
            model: None,
            system_prompt: None,
            env: BTreeMap::new(),
            agent_session_id: None,
            after: UpNumber(0),
            mark: WorkerId::from_random(&random).as_str().to_owned(),
        };
        let below = match &self.kind {
            Kind::Echo => None,
            Kind::Acp(profile) => {
                let keeper = Keeper::start(&own_program(), &spec.mark).await.map_err(|cause| {
                    RunError::new("keeper_failed", format!("the keeper could not be started: {cause}"))
                })?;
                Some(Arc::new(Below::new(keeper, profile.spare.clone())))
            }
        };
        let around = Around { below, seat: None, leash: Arc::default() };
        let filter = Redactor::filter(Secrets::of(&spec.env));
        let agent =
            host_with(UpNumber(0), Some(filter), |end| live(self.kind.clone(), Box::new(spec), around, end));
        Ok((run, agent))
    }
}

/// One run with its agent. If it is dropped, so is the agent, and its keeper ends the rest.
#[derive(Debug)]
struct Conversation {
    run: RunId,
    agent: SessionEnd,
    last: Number,
    steers: bool,
}

impl Conversation {
    async fn hold(mut self, job: Job, turn: &Turn) -> Outcome {
        let mut job = Some(job);
        let mut told = false;
        let mut approvals = FuturesUnordered::new();
        loop {
            tokio::select! {
                heard = self.agent.hear() => match heard {
                    FromAgent::Said(said) => {
                        for thing in said {
                            match thing.up {
                                Up::Ready { steers, .. } => {
                                    self.steers = steers;
                                    self.prompt(job.take());
                                }
                                // A peer that no longer reads is a cancel, which comes by itself.
                                Up::Said { what, .. } => drop(turn.event(what).await),
                                Up::Ask { ask, .. } => approvals.push(approve(turn, ask)),
                                Up::Terminal { outcome, .. } => return outcome,
                                _ => {}
                            }
                        }
                    }
                    FromAgent::Gone(Gone::Failed(error)) => return Outcome::failed(error),
                    FromAgent::Gone(Gone::Lost | Gone::Stopped) => return Outcome::of(Stop::Cancelled),
                },
                Some((ask, allowed)) = approvals.next() => self.answer(ask, allowed),
                () = turn.cancelled(), if !told => {
                    if job.is_some() {
                        return Outcome::of(Stop::Cancelled);
                    }
                    told = true;
                    let number = self.next();
                    self.agent.send(Down::Cancel { number, run: self.run.clone() });
                }
                text = steer(turn, self.steers && !told) => {
                    if let Some(text) = text {
                        let number = self.next();
                        self.agent.send(Down::Steer { number, run: self.run.clone(), text });
                    }
                }
            }
        }
    }

    fn prompt(&mut self, job: Option<Job>) {
        let Some(Job { assignment, messages, files, .. }) = job else { return };
        let number = self.next();
        let limits = TurnLimits::default();
        let run = self.run.clone();
        self.agent.send(Down::Prompt { number, run, prompt: assignment, files, messages, limits });
    }

    fn answer(&mut self, ask: AskId, allowed: bool) {
        let decision = if allowed { Decision::AllowOnce } else { Decision::Deny };
        let answer = Reply::Answered(Answer { decision: Some(decision), ..Answer::default() });
        let number = self.next();
        self.agent.send(Down::Answer { number, ask, answer });
    }

    fn next(&mut self) -> Number {
        self.last.0 += 1;
        self.last
    }
}

/// The next steer of a run that takes any.
async fn steer(turn: &Turn, wanted: bool) -> Option<String> {
    match wanted {
        true => turn.steer().await,
        false => pending().await,
    }
}

/// Whether the agent may. A question has no yes or no; who cannot be asked gives no leave.
async fn approve(turn: &Turn, ask: AskRequest) -> (AskId, bool) {
    let AskRequest { id, kind, tool, input, prompt, .. } = ask;
    let permission_type = match kind {
        AskKind::Permission => "tool",
        AskKind::Question => "question",
    };
    let resource = match &input {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let approval = Approval {
        tool_name: tool.unwrap_or_default(),
        permission_type: permission_type.to_owned(),
        resource,
        question: prompt,
    };
    (id, turn.approve(approval).await)
}
