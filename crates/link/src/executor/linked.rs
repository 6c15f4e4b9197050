//! An executor as the agent of a session: commands of a numbered link become what happens to its runs. Everything it
//! says is numbered and kept by the seat behind the link; here nothing is known of connections.

use std::sync::Arc;
use std::time::Duration;

use qd_protocol::RunId;
use qd_protocol::event::Decision;
use qd_protocol::link::{Down, Gone, Outcome, Reply, Up};

use super::running::{GRACE, Running};
use super::{Executor, Job, Mouth, Steer, Turn};
use crate::local::{AgentEnd, Closed};

/// The life of the agent: one run after another, until its session lets go.
pub(crate) async fn agent<E: Executor>(executor: Arc<E>, mut end: AgentEnd) -> Gone {
    let mut active = None;
    let ready = end.say(Up::Ready { agent_session_id: None, steers: true }).await;
    let mut heard = ready;
    while heard.is_ok() {
        heard = tokio::select! {
            biased;
            command = end.command() => match command {
                Some(command) => obey(&executor, &end, &mut active, command).await,
                None => Err(Closed),
            },
            outcome = ended(&mut active) => finish(&end, &mut active, outcome).await,
        };
    }
    Gone::Stopped
}

async fn obey<E: Executor>(
    executor: &Arc<E>,
    end: &AgentEnd,
    active: &mut Option<(RunId, Running)>,
    command: Down,
) -> Result<(), Closed> {
    match command {
        Down::Prompt { run, prompt, files, messages, limits, .. } => {
            if let Some((_, running)) = active {
                // A session waits for a run's end before it gives the next; one that did not still gets both ends.
                running.kill();
                let outcome = running.ended().await;
                finish(end, active, outcome).await?;
            }
            let turn = Turn::new(Mouth::Link { voice: end.voice(), run: run.clone() });
            let grace = limits.grace_ms.map_or(GRACE, Duration::from_millis);
            let job = Job { assignment: prompt, messages, files, run: Some(run.clone()), ..Job::default() };
            *active = Some((run, Running::start(executor, job, turn, grace)));
        }
        Down::Steer { number, run, text } => {
            let steer = Steer { text, number: Some(number) };
            let taken = this(active, &run).is_some_and(|running| running.turn().inbox().put_steer(steer));
            if !taken {
                end.say(Up::SteerMissed { steer: number }).await?;
            }
        }
        Down::Cancel { run, .. } => {
            if let Some(running) = this(active, &run) {
                running.cancel();
            }
        }
        Down::Kill { run, .. } => {
            if let Some(running) = this(active, &run) {
                running.kill();
            }
        }
        Down::Answer { ask, answer, .. } => {
            if let Some((_, running)) = active {
                running.turn().inbox().answer(&ask, leave(answer));
            }
        }
    }
    Ok(())
}

/// The active run, if it is this one.
fn this<'a>(active: &'a mut Option<(RunId, Running)>, run: &RunId) -> Option<&'a mut Running> {
    active.as_mut().filter(|(active, _)| active == run).map(|(_, running)| running)
}

async fn ended(active: &mut Option<(RunId, Running)>) -> Outcome {
    match active {
        Some((_, running)) => running.ended().await,
        None => std::future::pending().await,
    }
}

async fn finish(
    end: &AgentEnd,
    active: &mut Option<(RunId, Running)>,
    outcome: Outcome,
) -> Result<(), Closed> {
    let Some((run, running)) = active.take() else { return Ok(()) };
    for steer in running.turn().inbox().missed() {
        end.say(Up::SteerMissed { steer }).await?;
    }
    end.say(Up::Terminal { run, outcome }).await
}

/// `None`: nobody will answer.
fn leave(reply: Reply) -> Option<bool> {
    match reply {
        Reply::Answered(answer) => {
            Some(matches!(answer.decision, Some(Decision::AllowOnce | Decision::AllowAlways)))
        }
        Reply::Withdrawn => None,
    }
}
