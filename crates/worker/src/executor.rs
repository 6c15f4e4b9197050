//! Agents behind the public worker SDK (`qd worker`): each run gets a fresh agent, which ends with it. The executor
//! takes the daemon's part between the agent's local link and a run of the SDK. It also takes the session host's part:
//! it ends all processes of the agent before it returns the outcome of the run.

use qd_drivers::agent_launcher::AgentLauncher;
use qd_drivers::own_program;
use qd_drivers::redact::{Redactor, SecretMatcher};
use std::collections::HashSet;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use qd_core::policy::main_argument;
use qd_keeper::{KeeperHandle, become_subreaper, end_orphans};
use qd_link::{LocalLinkEvent, SessionEndpoint, host_agent_with_filter};
use qd_protocol::event::{AskAnswer, AskKind, PermissionDecision, RunError};
use qd_protocol::limits::CANCEL_GRACE_S;
use qd_protocol::link::{
    AgentCommand, AgentExitReason, AgentUpdate, AskRequest, AskResolution, TurnLimits, TurnOutcome,
    UpdateNumber,
};
use qd_protocol::manifest::Manifest;
use qd_protocol::worker::AgentSpec;
use qd_protocol::{AskId, EventNumber, RunId, SessionId, WorkerId};
use qd_worker_sdk::{Executor, PlainApproval, RunAssignment, RunHandle};
use serde_json::Value;
use tokio::time::Instant;

use crate::agent::{AgentContext, AgentControl, run_agent};
use crate::agent_processes::{AgentProcesses, KeeperLostError};

/// Random bytes of the ids that a run needs here.
const ID_RANDOM_BYTES: usize = 16;
/// How long an agent may take to stop before it is killed. The SDK drops an executor that takes longer than
/// [`CANCEL_GRACE_S`], and by then all processes of the agent should be gone.
const STOP_GRACE: Duration = Duration::from_secs(CANCEL_GRACE_S - 1);
/// How long the processes of a dead keeper have to exit by themselves.
const ORPHAN_GRACE: Duration = Duration::from_millis(500);

/// Wraps an agent as an executor. After its first agent that is a process, this process is a subreaper: orphans of its
/// children become its own children, and are killed when a keeper dies. Do not start other children in this process.
pub fn executor(manifest: Manifest) -> impl Executor {
    AgentExecutor { manifest, keepers: tokio::sync::Mutex::default() }
}

/// Starts a fresh agent for every run.
#[derive(Debug)]
struct AgentExecutor {
    manifest: Manifest,
    /// The pids of the keepers. The lock is also held while a keeper is started or lost: a child that belongs to no
    /// keeper must not be confused with a keeper that is not in the set yet.
    keepers: tokio::sync::Mutex<HashSet<u32>>,
}

impl Executor for AgentExecutor {
    async fn run(&self, job: RunAssignment, turn: RunHandle) -> TurnOutcome {
        let started = match self.start(job.run.as_ref()).await {
            Ok(started) => started,
            Err(error) => return TurnOutcome::failed(error),
        };
        let ExecutorAgent { run, agent, agent_processes, control } = started;
        let mut executor_run = ExecutorRun { run, agent, last_number: EventNumber(0), takes_steers: false };
        let lost = async {
            let Some(agent_processes) = &agent_processes else { return pending().await };
            tokio::select! {
                () = agent_processes.keeper().wait_until_lost() => {}
                () = control.keeper_lost() => {}
            }
        };
        let ended = tokio::select! {
            outcome = executor_run.drive(job, &turn) => Ok(outcome),
            () = lost => Err(KeeperLostError),
        };
        // The agent's task shares the keeper, which ends only when its last owner drops it.
        executor_run.agent.stop().await;
        match (ended, agent_processes) {
            (Ok(outcome), None) => outcome,
            (Ok(outcome), Some(agent_processes)) => {
                let pid = agent_processes.keeper().pid();
                AgentProcesses::close(agent_processes).await;
                self.keepers.lock().await.remove(&pid);
                // Nothing is left that a late cancel could end.
                TurnOutcome { leaves_processes: false, ..outcome }
            }
            (Err(KeeperLostError), agent_processes) => {
                if let Some(agent_processes) = agent_processes {
                    self.end_lost_processes(&agent_processes).await;
                }
                TurnOutcome::failed(KeeperLostError.into())
            }
        }
    }
}

/// The agent of one run, with its processes.
struct ExecutorAgent {
    run: RunId,
    agent: SessionEndpoint,
    agent_processes: Option<Arc<AgentProcesses>>,
    control: Arc<AgentControl>,
}

impl AgentExecutor {
    async fn start(&self, run: Option<&RunId>) -> Result<ExecutorAgent, RunError> {
        let mut random = [0; ID_RANDOM_BYTES];
        getrandom::fill(&mut random).map_err(|cause| {
            RunError::new("agent_failed_to_start", format!("the system provides no random numbers: {cause}"))
        })?;
        let cwd = std::env::current_dir().map_err(|cause| {
            RunError::new("agent_failed_to_start", format!("the working directory does not exist: {cause}"))
        })?;
        let run = run.cloned().unwrap_or_else(|| RunId::from_random(&random));
        let (session, worker) = (SessionId::from_random(&random), WorkerId::from_random(&random));
        let mark = worker.as_str().to_owned();
        let manifest = Some(Box::new(self.manifest.clone()));
        let base = AgentSpec::new(session, worker, &self.manifest.agent.name, cwd);
        let spec = AgentSpec { manifest, mark, ..base };
        let launcher = AgentLauncher::from_spec(&spec)?;
        let agent_processes = match launcher.helper_names(&spec) {
            None => None,
            Some(helpers) => Some(Arc::new(AgentProcesses::new(
                self.start_keeper(&spec.mark).await?,
                helpers,
                Arc::default(),
            ))),
        };
        let control = Arc::<AgentControl>::default();
        let context = AgentContext {
            agent_processes: agent_processes.clone(),
            endpoint_status: None,
            control: Arc::clone(&control),
        };
        let filter = Redactor::new_filter(SecretMatcher::of_agent(&spec));
        let agent = host_agent_with_filter(UpdateNumber(0), Some(filter), |end| {
            run_agent(launcher, Box::new(spec), context, end)
        });
        Ok(ExecutorAgent { run, agent, agent_processes, control })
    }

    async fn start_keeper(&self, mark: &str) -> Result<KeeperHandle, RunError> {
        let failed = |cause: &dyn std::fmt::Display| {
            RunError::new("keeper_failed", format!("failed to start the keeper: {cause}"))
        };
        become_subreaper().map_err(|cause| failed(&cause))?;
        let mut keepers = self.keepers.lock().await;
        let keeper = KeeperHandle::start(&own_program(), mark).await.map_err(|cause| failed(&cause))?;
        keepers.insert(keeper.pid());
        Ok(keeper)
    }

    /// Ends the processes of a dead keeper.
    async fn end_lost_processes(&self, agent_processes: &AgentProcesses) {
        let keeper = agent_processes.keeper();
        let mut keepers = self.keepers.lock().await;
        // The kernel hands the keeper's children to us only once the keeper is dead.
        keeper.wait_until_lost().await;
        // The future of a run may have been dropped before it removed its keeper.
        let children = qd_keeper::procfs::children(std::process::id());
        keepers.retain(|pid| *pid != keeper.pid() && children.contains(pid));
        let others: Vec<u32> = keepers.iter().copied().collect();
        end_orphans(&others, ORPHAN_GRACE).await;
    }
}

/// One run with its agent. Dropping it drops the agent, and its keeper ends the rest.
#[derive(Debug)]
struct ExecutorRun {
    run: RunId,
    agent: SessionEndpoint,
    last_number: EventNumber,
    takes_steers: bool,
}

impl ExecutorRun {
    async fn drive(&mut self, job: RunAssignment, turn: &RunHandle) -> TurnOutcome {
        let mut job = Some(job);
        // The number of the cancel, and when its grace is over.
        let mut cancel: Option<(EventNumber, Instant)> = None;
        let mut killed = false;
        let mut approvals = FuturesUnordered::new();
        loop {
            tokio::select! {
                event = self.agent.next_event() => match event {
                    LocalLinkEvent::Updates(updates) => {
                        for numbered in updates {
                            match numbered.update {
                                AgentUpdate::Ready { steers, .. } => {
                                    self.takes_steers = steers;
                                    self.send_prompt(job.take());
                                }
                                // A peer that no longer reads is noticed as a cancel.
                                AgentUpdate::Turn { update, .. } => drop(turn.send_update(update).await),
                                AgentUpdate::Ask { ask, .. } => approvals.push(request_approval(turn, ask)),
                                AgentUpdate::TurnEnded { outcome, .. } => return outcome,
                                _ => {}
                            }
                        }
                    }
                    LocalLinkEvent::Gone(AgentExitReason::Failed(error) | AgentExitReason::Unreachable(error)) => return TurnOutcome::failed(error),
                    LocalLinkEvent::Gone(AgentExitReason::Lost | AgentExitReason::Stopped) => return TurnOutcome::cancelled(),
                },
                Some((ask, answer)) = approvals.next() => self.send_answer(ask, answer),
                () = turn.cancelled(), if cancel.is_none() => {
                    if job.is_some() {
                        return TurnOutcome::cancelled();
                    }
                    let number = self.next_number();
                    cancel = Some((number, Instant::now() + STOP_GRACE));
                    self.agent.send(AgentCommand::Cancel { number, run: self.run.clone() });
                }
                number = wait_for_stop_grace(cancel), if !killed => {
                    killed = true;
                    self.agent.send(AgentCommand::Kill { number, run: self.run.clone() });
                }
                text = next_steer(turn, self.takes_steers && !turn.is_cancelled()) => {
                    if let Some(text) = text {
                        let number = self.next_number();
                        self.agent.send(AgentCommand::Steer { number, run: self.run.clone(), text });
                    }
                }
            }
        }
    }

    fn send_prompt(&mut self, job: Option<RunAssignment>) {
        let Some(RunAssignment { prompt: assignment, messages, files, .. }) = job else { return };
        let number = self.next_number();
        let limits = TurnLimits::default();
        let run = self.run.clone();
        self.agent.send(AgentCommand::Prompt {
            number,
            run,
            prompt: assignment,
            mode: None,
            files,
            messages,
            limits,
        });
    }

    fn send_answer(&mut self, ask: AskId, answer: AskAnswer) {
        let number = self.next_number();
        self.agent.send(AgentCommand::Answer { number, ask, answer: AskResolution::Answered(answer) });
    }

    fn next_number(&mut self) -> EventNumber {
        self.last_number.0 += 1;
        self.last_number
    }
}

/// The next steer, if the agent takes steers at all.
async fn next_steer(turn: &RunHandle, enabled: bool) -> Option<String> {
    match enabled {
        true => turn.next_steer().await,
        false => pending().await,
    }
}

/// Waits until the grace of a cancel is over, and returns its number.
async fn wait_for_stop_grace(cancel: Option<(EventNumber, Instant)>) -> EventNumber {
    let Some((number, deadline)) = cancel else { return pending().await };
    tokio::time::sleep_until(deadline).await;
    number
}

/// Asks the peer, and returns the answer for the agent. A peer can only approve or deny: approving a question chooses
/// the first of its options, denying it leaves it without an answer.
async fn request_approval(turn: &RunHandle, ask: AskRequest) -> (AskId, AskAnswer) {
    let AskRequest { id, kind, tool, input, prompt, options, .. } = ask;
    let permission_type = match kind {
        AskKind::Permission => "tool",
        AskKind::Question => "question",
    };
    let approval = PlainApproval {
        resource: approval_resource(tool.as_deref().unwrap_or_default(), &input),
        tool_name: tool.unwrap_or_default(),
        permission_type: permission_type.to_owned(),
        question: prompt,
    };
    let answer = match (turn.request_approval(approval).await, kind) {
        (true, AskKind::Permission) => {
            AskAnswer { decision: Some(PermissionDecision::AllowOnce), ..AskAnswer::default() }
        }
        (true, AskKind::Question) => {
            let value = options.into_iter().next().unwrap_or_else(|| "yes".to_owned());
            AskAnswer { value: Some(value), ..AskAnswer::default() }
        }
        (false, _) => AskAnswer { decision: Some(PermissionDecision::Deny), ..AskAnswer::default() },
    };
    (id, answer)
}

/// The resource of an approval: the tool's main argument as policy rules see it, or else all of its input.
fn approval_resource(tool: &str, input: &Value) -> String {
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
            assert_eq!(super::approval_resource("Tool", &input), resource);
        }
    }
}
