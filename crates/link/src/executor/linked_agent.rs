//! An executor as the agent of a session: commands of a numbered link become what happens to its runs. Everything it
//! says is numbered and kept by the seat behind the link; here nothing is known of connections.

use std::sync::Arc;
use std::time::Duration;

use qd_protocol::RunId;
use qd_protocol::event::PermissionDecision;
use qd_protocol::link::{AgentCommand, AgentExitReason, AgentUpdate, AskResolution, TurnOutcome};

use super::executor_task::{CANCEL_GRACE, ExecutorTask};
use super::{Executor, RunAssignment, RunHandle, RunOutput, RunSteer};
use crate::local::{AgentEndpoint, LinkClosed};

/// The life of the agent: one run after another, until its session lets go.
pub(crate) async fn run_linked_agent<E: Executor>(
    executor: Arc<E>,
    mut end: AgentEndpoint,
) -> AgentExitReason {
    let mut active = None;
    let ready = end.send(AgentUpdate::Ready { agent_session_id: None, steers: true }).await;
    let mut heard = ready;
    while heard.is_ok() {
        heard = tokio::select! {
            biased;
            command = end.next_command() => match command {
                Some(command) => apply_command(&executor, &end, &mut active, command).await,
                None => Err(LinkClosed),
            },
            outcome = wait_for_outcome(&mut active) => finish_run(&end, &mut active, outcome).await,
        };
    }
    AgentExitReason::Stopped
}

async fn apply_command<E: Executor>(
    executor: &Arc<E>,
    end: &AgentEndpoint,
    active: &mut Option<(RunId, ExecutorTask)>,
    command: AgentCommand,
) -> Result<(), LinkClosed> {
    match command {
        AgentCommand::Prompt { run, prompt, files, messages, limits, .. } => {
            if let Some((_, running)) = active {
                // A session waits for a run's end before it gives the next; one that did not still gets both ends.
                running.kill();
                let outcome = running.wait_for_outcome().await;
                finish_run(end, active, outcome).await?;
            }
            let turn = RunHandle::new(RunOutput::Link { output: end.output(), run: run.clone() });
            let grace = limits.grace_ms.map_or(CANCEL_GRACE, Duration::from_millis);
            let job =
                RunAssignment { prompt, messages, files, run: Some(run.clone()), ..RunAssignment::default() };
            *active = Some((run, ExecutorTask::start(executor, job, turn, grace)));
        }
        AgentCommand::Steer { number, run, text } => {
            let steer = RunSteer { text, number: Some(number) };
            let taken =
                active_run(active, &run).is_some_and(|running| running.turn().inbox().push_steer(steer));
            if !taken {
                end.send(AgentUpdate::SteerMissed { steer: number }).await?;
            }
        }
        AgentCommand::Cancel { run, .. } => {
            if let Some(running) = active_run(active, &run) {
                running.cancel();
            }
        }
        AgentCommand::Kill { run, .. } => {
            if let Some(running) = active_run(active, &run) {
                running.kill();
            }
        }
        AgentCommand::Answer { ask, answer, .. } => {
            if let Some((_, running)) = active {
                running.turn().inbox().resolve_ask(&ask, permission_granted(answer));
            }
        }
    }
    Ok(())
}

/// The active run, if it is this one.
fn active_run<'a>(
    active: &'a mut Option<(RunId, ExecutorTask)>,
    run: &RunId,
) -> Option<&'a mut ExecutorTask> {
    active.as_mut().filter(|(active, _)| active == run).map(|(_, running)| running)
}

async fn wait_for_outcome(active: &mut Option<(RunId, ExecutorTask)>) -> TurnOutcome {
    match active {
        Some((_, running)) => running.wait_for_outcome().await,
        None => std::future::pending().await,
    }
}

async fn finish_run(
    end: &AgentEndpoint,
    active: &mut Option<(RunId, ExecutorTask)>,
    outcome: TurnOutcome,
) -> Result<(), LinkClosed> {
    let Some((run, running)) = active.take() else { return Ok(()) };
    for steer in running.turn().inbox().take_missed_steers() {
        end.send(AgentUpdate::SteerMissed { steer }).await?;
    }
    end.send(AgentUpdate::Terminal { run, outcome }).await
}

/// `None`: nobody will answer.
fn permission_granted(reply: AskResolution) -> Option<bool> {
    match reply {
        AskResolution::Answered(answer) => Some(matches!(
            answer.decision,
            Some(PermissionDecision::AllowOnce | PermissionDecision::AllowAlways)
        )),
        AskResolution::Withdrawn => None,
    }
}
