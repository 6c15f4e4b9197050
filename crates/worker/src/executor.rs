//! The agents behind a worker that anybody may talk to (`qd worker`): each run gets a fresh agent, which ends with it.
//! It stands where a daemon would, between the agent's end of a local link and a turn of the SDK, and where a place
//! would: it sees to the end of all that the agent started before it tells how the run ended.

use std::collections::HashSet;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use qd_core::policy::main_argument;
use qd_keeper::{Keeper, become_subreaper, end_orphans};
use qd_link::executor::Approval;
use qd_link::{Executor, FromAgent, Job, SessionEnd, Turn, host_with};
use qd_protocol::event::{Answer, AskKind, Decision, RunError};
use qd_protocol::limits::CANCEL_GRACE_S;
use qd_protocol::link::{AskRequest, Down, Gone, Outcome, Reply, Stop, TurnLimits, Up, UpNumber};
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::AgentSpec;
use qd_protocol::{AskId, Number, RunId, SessionId, WorkerId};
use serde_json::Value;
use tokio::time::Instant;

use crate::agent::{Around, Leash, live};
use crate::below::{Below, KeeperGone};
use crate::kinds::{Kind, own_program};
use crate::redact::{Redactor, Secrets};

/// Random bytes of the names that a run needs here.
const RANDOM: usize = 16;
/// How long an agent may take to stop before it is killed. An executor that takes longer than [`CANCEL_GRACE_S`] is
/// dropped where it stands, and by then all that the agent started should be gone.
const STOP_GRACE: Duration = Duration::from_secs(CANCEL_GRACE_S - 1);
/// How long what a dead keeper lost has to end by itself.
const CLOSE: Duration = Duration::from_millis(500);

/// An agent as an executor. Once it has run one that is a process, what a dead child leaves behind falls to this
/// process, and is ended if it was a keeper's: no other children should be started here.
pub fn executor(manifest: Manifest) -> impl Executor {
    Fresh { manifest, keepers: tokio::sync::Mutex::default() }
}

/// A fresh agent for every run.
#[derive(Debug)]
struct Fresh {
    manifest: Manifest,
    /// The keepers, by pid. Locked also while one is started or lost, since children that belong to no keeper are then
    /// told from a keeper that is not in here yet.
    keepers: tokio::sync::Mutex<HashSet<u32>>,
}

impl Executor for Fresh {
    async fn run(&self, job: Job, turn: Turn) -> Outcome {
        let started = match self.start(job.run.as_ref()).await {
            Ok(started) => started,
            Err(error) => return Outcome::failed(error),
        };
        let Started { run, agent, below, leash } = started;
        let mut conversation = Conversation { run, agent, last: Number(0), steers: false };
        let lost = async {
            let Some(below) = &below else { return pending().await };
            tokio::select! {
                () = below.keeper().lost() => {}
                () = leash.keeper_gone() => {}
            }
        };
        let ended = tokio::select! {
            outcome = conversation.hold(job, &turn) => Ok(outcome),
            () = lost => Err(KeeperGone),
        };
        // The agent's task has a share in the keeper, which ends only when nobody has.
        conversation.agent.stop().await;
        match (ended, below) {
            (Ok(outcome), None) => outcome,
            (Ok(outcome), Some(below)) => {
                let pid = below.keeper().pid();
                Below::close(below).await;
                self.keepers.lock().await.remove(&pid);
                outcome
            }
            (Err(KeeperGone), below) => {
                if let Some(below) = below {
                    self.bury(&below).await;
                }
                Outcome::failed(KeeperGone.into())
            }
        }
    }
}

/// A run's agent, and what it needs of us.
struct Started {
    run: RunId,
    agent: SessionEnd,
    below: Option<Arc<Below>>,
    leash: Arc<Leash>,
}

impl Fresh {
    async fn start(&self, run: Option<&RunId>) -> Result<Started, RunError> {
        let mut random = [0; RANDOM];
        getrandom::fill(&mut random).map_err(|cause| {
            RunError::new("agent_failed_to_start", format!("the system gives no random numbers: {cause}"))
        })?;
        let cwd = std::env::current_dir().map_err(|cause| {
            RunError::new("agent_failed_to_start", format!("the working directory is not there: {cause}"))
        })?;
        let run = run.cloned().unwrap_or_else(|| RunId::from_random(&random));
        let (session, worker) = (SessionId::from_random(&random), WorkerId::from_random(&random));
        let mark = worker.as_str().to_owned();
        let manifest = Some(Box::new(self.manifest.clone()));
        let about = AgentSpec::new(session, worker, &self.manifest.agent.name, cwd);
        let spec = AgentSpec { manifest, mark, ..about };
        let kind = Kind::of(&spec)?;
        let below = match kind.helpers(&spec) {
            None => None,
            Some(helpers) => {
                Some(Arc::new(Below::new(self.keeper(&spec.mark).await?, helpers, Arc::default())))
            }
        };
        let leash = Arc::<Leash>::default();
        let around = Around { below: below.clone(), seat: None, leash: Arc::clone(&leash) };
        let filter = Redactor::filter(Secrets::of(&spec.env));
        let agent = host_with(UpNumber(0), Some(filter), |end| live(kind, Box::new(spec), around, end));
        Ok(Started { run, agent, below, leash })
    }

    async fn keeper(&self, mark: &str) -> Result<Keeper, RunError> {
        let failed = |cause: &dyn std::fmt::Display| {
            RunError::new("keeper_failed", format!("the keeper could not be started: {cause}"))
        };
        become_subreaper().map_err(|cause| failed(&cause))?;
        let mut keepers = self.keepers.lock().await;
        let keeper = Keeper::start(&own_program(), mark).await.map_err(|cause| failed(&cause))?;
        keepers.insert(keeper.pid());
        Ok(keeper)
    }

    /// Ends what a dead keeper has left to us.
    async fn bury(&self, below: &Below) {
        let keeper = below.keeper();
        let mut keepers = self.keepers.lock().await;
        // Only then have its children fallen to us.
        keeper.lost().await;
        // A run that was dropped has not taken its keeper out.
        let children = qd_keeper::proc::children(std::process::id());
        keepers.retain(|pid| *pid != keeper.pid() && children.contains(pid));
        let others: Vec<u32> = keepers.iter().copied().collect();
        end_orphans(&others, CLOSE).await;
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
    async fn hold(&mut self, job: Job, turn: &Turn) -> Outcome {
        let mut job = Some(job);
        // The cancel, and until when it has to be obeyed.
        let mut told: Option<(Number, Instant)> = None;
        let mut killed = false;
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
                Some((ask, answer)) = approvals.next() => self.answer(ask, answer),
                () = turn.cancelled(), if told.is_none() => {
                    if job.is_some() {
                        return Outcome::of(Stop::Cancelled);
                    }
                    let number = self.next();
                    told = Some((number, Instant::now() + STOP_GRACE));
                    self.agent.send(Down::Cancel { number, run: self.run.clone() });
                }
                number = out_of_grace(told), if !killed => {
                    killed = true;
                    self.agent.send(Down::Kill { number, run: self.run.clone() });
                }
                text = steer(turn, self.steers && !turn.is_cancelled()) => {
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

    fn answer(&mut self, ask: AskId, answer: Answer) {
        let number = self.next();
        self.agent.send(Down::Answer { number, ask, answer: Reply::Answered(answer) });
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

/// Waits until a cancel has been given time enough, and gives its number.
async fn out_of_grace(told: Option<(Number, Instant)>) -> Number {
    let Some((number, until)) = told else { return pending().await };
    tokio::time::sleep_until(until).await;
    number
}

/// What the agent is told. A peer can only say yes or no, so that a yes to a question is the first of its options, and
/// a no leaves it without an answer.
async fn approve(turn: &Turn, ask: AskRequest) -> (AskId, Answer) {
    let AskRequest { id, kind, tool, input, prompt, options, .. } = ask;
    let permission_type = match kind {
        AskKind::Permission => "tool",
        AskKind::Question => "question",
    };
    let approval = Approval {
        resource: resource(tool.as_deref().unwrap_or_default(), &input),
        tool_name: tool.unwrap_or_default(),
        permission_type: permission_type.to_owned(),
        question: prompt,
    };
    let answer = match (turn.approve(approval).await, kind) {
        (true, AskKind::Permission) => Answer { decision: Some(Decision::AllowOnce), ..Answer::default() },
        (true, AskKind::Question) => {
            let value = options.into_iter().next().unwrap_or_else(|| "yes".to_owned());
            Answer { value: Some(value), ..Answer::default() }
        }
        (false, _) => Answer { decision: Some(Decision::Deny), ..Answer::default() },
    };
    (id, answer)
}

/// What a tool is to work on, as rules see it, where its arguments say so; else all of them.
fn resource(tool: &str, input: &Value) -> String {
    match (main_argument(tool, input), input) {
        (Some(argument), _) => argument.into_owned(),
        (None, Value::Null) => String::new(),
        (None, input) => input.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_resource_of_an_approval_is_what_the_tool_works_on() {
        for (input, resource) in [
            (json!({"description": "list", "command": "ls -l"}), "ls -l"),
            (json!({"command": ["ls", "-l"]}), "ls -l"),
            (json!({"file_path": "a.rs", "content": "x"}), "a.rs"),
            (json!({"url": "https://x.org", "prompt": "p"}), "https://x.org"),
            (json!({"n": 1}), r#"{"n":1}"#),
            (json!("words"), "words"),
            (Value::Null, ""),
        ] {
            assert_eq!(super::resource("Tool", &input), resource);
        }
    }
}
