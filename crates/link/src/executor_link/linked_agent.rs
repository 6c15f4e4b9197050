//! Runs an executor as the agent of a session: the commands of a numbered link start, steer and stop its runs. The
//! worker endpoint behind the link numbers and keeps the updates; nothing is known of connections here.

use std::sync::Arc;
use std::time::Duration;

use qd_protocol::event::{AskKind, PermissionDecision};
use qd_protocol::link::{
    AgentCommand, AgentExitReason, AgentUpdate, AskRequest, AskResolution, TurnOutcome, TurnUpdate,
};
use qd_protocol::{AskId, EventNumber, RunId};
use qd_worker_sdk::executor::{ExecutorTask, RunTransport, SendFuture};
use qd_worker_sdk::{Executor, PlainApproval, RunAssignment, RunStopped};
use serde_json::json;

use crate::local::{AgentEndpoint, AgentOutput, LinkClosed};

/// Runs the agent: one run after another, until the session releases it.
pub(super) async fn run_linked_agent<E: Executor>(
    executor: Arc<E>,
    mut endpoint: AgentEndpoint,
) -> AgentExitReason {
    let mut active = None;
    let mut sent = endpoint.send(AgentUpdate::Ready { agent_session_id: None, steers: true }).await;
    while sent.is_ok() {
        sent = tokio::select! {
            biased;
            command = endpoint.next_command() => match command {
                Some(command) => apply_command(&executor, &endpoint, &mut active, command).await,
                None => Err(LinkClosed),
            },
            outcome = wait_for_outcome(&mut active) => finish_run(&endpoint, &mut active, outcome).await,
        };
    }
    AgentExitReason::Stopped
}

/// Sends the updates of one run through the numbered link.
#[derive(Debug)]
struct LinkedRun {
    output: AgentOutput,
    run: RunId,
}

impl LinkedRun {
    fn send(&self, update: AgentUpdate) -> SendFuture<'_> {
        Box::pin(async move { self.output.send(update).await.map_err(|LinkClosed| RunStopped) })
    }
}

impl RunTransport for LinkedRun {
    fn send_update(&self, update: TurnUpdate) -> SendFuture<'_> {
        self.send(AgentUpdate::Turn { run: self.run.clone(), update })
    }

    fn request_approval(&self, ask: AskId, approval: PlainApproval) -> SendFuture<'_> {
        self.send(AgentUpdate::Ask { run: self.run.clone(), ask: permission_request(ask, approval) })
    }

    /// There is always room for an update this small, so it does not wait.
    fn confirm_steer(&self, number: EventNumber) -> SendFuture<'_> {
        self.send(AgentUpdate::SteerTaken { steer: number })
    }

    fn confirm_answer(&self, ask: AskId) -> SendFuture<'_> {
        self.send(AgentUpdate::AskDelivered { ask })
    }
}

async fn apply_command<E: Executor>(
    executor: &Arc<E>,
    endpoint: &AgentEndpoint,
    active: &mut Option<(RunId, ExecutorTask)>,
    command: AgentCommand,
) -> Result<(), LinkClosed> {
    match command {
        AgentCommand::Prompt { run, prompt, files, messages, limits, .. } => {
            if let Some((_, task)) = active {
                // A session waits for a run's end before it sends the next prompt. If it does not, both runs still get
                // their terminals.
                task.kill();
                let outcome = task.wait_for_outcome().await;
                finish_run(endpoint, active, outcome).await?;
            }
            let transport = LinkedRun { output: endpoint.output(), run: run.clone() };
            let grace = limits.grace_ms.map(Duration::from_millis);
            let assignment =
                RunAssignment { prompt, messages, files, run: Some(run.clone()), ..RunAssignment::default() };
            *active = Some((run, ExecutorTask::start(executor, assignment, transport, grace)));
        }
        AgentCommand::Steer { number, run, text } => {
            let accepted = active_run(active, &run).is_some_and(|task| task.push_steer(text, Some(number)));
            if !accepted {
                endpoint.send(AgentUpdate::SteerMissed { steer: number }).await?;
            }
        }
        AgentCommand::Cancel { run, .. } => {
            if let Some(task) = active_run(active, &run) {
                task.cancel();
            }
        }
        AgentCommand::Kill { run, .. } => {
            if let Some(task) = active_run(active, &run) {
                task.kill();
            }
        }
        AgentCommand::Answer { ask, answer, .. } => {
            if let Some((_, task)) = active {
                task.resolve_ask(&ask, permission_granted(answer));
            }
        }
    }
    Ok(())
}

/// The active run, if its id is `run`.
fn active_run<'a>(
    active: &'a mut Option<(RunId, ExecutorTask)>,
    run: &RunId,
) -> Option<&'a mut ExecutorTask> {
    active.as_mut().filter(|(active, _)| active == run).map(|(_, task)| task)
}

async fn wait_for_outcome(active: &mut Option<(RunId, ExecutorTask)>) -> TurnOutcome {
    match active {
        Some((_, task)) => task.wait_for_outcome().await,
        None => std::future::pending().await,
    }
}

async fn finish_run(
    endpoint: &AgentEndpoint,
    active: &mut Option<(RunId, ExecutorTask)>,
    outcome: TurnOutcome,
) -> Result<(), LinkClosed> {
    let Some((run, task)) = active.take() else { return Ok(()) };
    for steer in task.take_missed_steers() {
        endpoint.send(AgentUpdate::SteerMissed { steer }).await?;
    }
    endpoint.send(AgentUpdate::TurnEnded { run, outcome }).await
}

/// `None` if there will be no answer.
fn permission_granted(resolution: AskResolution) -> Option<bool> {
    match resolution {
        AskResolution::Answered(answer) => Some(answer.decision.is_some_and(PermissionDecision::allows)),
        AskResolution::Withdrawn => None,
    }
}

fn permission_request(id: AskId, approval: PlainApproval) -> AskRequest {
    AskRequest {
        id,
        kind: AskKind::Permission,
        tool: Some(approval.tool_name),
        input: json!({ "permission_type": approval.permission_type, "resource": approval.resource }),
        risk: None,
        prompt: approval.question,
        options: Vec::new(),
        implicit: false,
    }
}
