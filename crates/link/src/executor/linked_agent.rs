//! Runs an executor as the agent of a session: the commands of a numbered link start, steer and stop its runs. The
//! worker endpoint behind the link numbers and keeps the updates; nothing is known of connections here.

use std::sync::Arc;
use std::time::Duration;

use qd_protocol::RunId;
use qd_protocol::event::PermissionDecision;
use qd_protocol::link::{AgentCommand, AgentExitReason, AgentUpdate, AskResolution, TurnOutcome};

use super::executor_task::{CANCEL_GRACE, ExecutorTask};
use super::{Executor, RunAssignment, RunHandle, RunOutput, RunSteer};
use crate::local::{AgentEndpoint, LinkClosed};

/// Runs the agent: one run after another, until the session releases it.
pub(crate) async fn run_linked_agent<E: Executor>(
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
            let handle = RunHandle::new(RunOutput::Link { output: endpoint.output(), run: run.clone() });
            let grace = limits.grace_ms.map_or(CANCEL_GRACE, Duration::from_millis);
            let assignment =
                RunAssignment { prompt, messages, files, run: Some(run.clone()), ..RunAssignment::default() };
            *active = Some((run, ExecutorTask::start(executor, assignment, handle, grace)));
        }
        AgentCommand::Steer { number, run, text } => {
            let steer = RunSteer { text, number: Some(number) };
            let accepted =
                active_run(active, &run).is_some_and(|task| task.handle().inbox().push_steer(steer));
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
                task.handle().inbox().resolve_ask(&ask, permission_granted(answer));
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
    for steer in task.handle().inbox().take_missed_steers() {
        endpoint.send(AgentUpdate::SteerMissed { steer }).await?;
    }
    endpoint.send(AgentUpdate::TurnEnded { run, outcome }).await
}

/// `None` if there will be no answer.
fn permission_granted(resolution: AskResolution) -> Option<bool> {
    match resolution {
        AskResolution::Answered(answer) => Some(matches!(
            answer.decision,
            Some(PermissionDecision::AllowOnce | PermissionDecision::AllowAlways)
        )),
        AskResolution::Withdrawn => None,
    }
}
