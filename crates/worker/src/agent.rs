//! The life of one agent: started, ready, in and out of turns, gone. It runs as one task on its end of a local link and
//! takes commands while a turn runs, so that a cancel, a steer, an answer or a kill reaches the turn at once.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use qd_link::{AgentEndpoint, LinkClosed, WorkerEndpointStatus};
use qd_protocol::RunId;
use qd_protocol::event::{ProcessCleanup, RunError};
use qd_protocol::limits::CANCEL_GRACE_S;
use qd_protocol::link::{
    AgentCommand, AgentExitReason, AgentUpdate, TurnLimits, TurnOutcome, TurnStopReason, TurnUpdate,
};
use qd_protocol::worker::AgentSpec;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::agent_kind::AgentKind;
use crate::agent_processes::{AgentProcesses, KeeperLostError};
use crate::drivers::RunningAgent;
use crate::meter::TurnMeter;
use crate::turn::{DriverInbox, DriverPrompt, DriverSteer, DriverTurn, DriverTurnEnd};

/// How long what a turn started has to end by itself, once the turn is over and was to be stopped.
const SWEEP_GRACE: Duration = Duration::from_secs(1);

/// Around an agent: what it may need of its worker.
#[derive(Debug)]
pub(crate) struct AgentContext {
    /// What it starts; `None` for an agent that starts nothing.
    pub(crate) agent_processes: Option<Arc<AgentProcesses>>,
    /// Whether a daemon is attached; `None` if there can be none, and so nobody but the agent counts.
    pub(crate) endpoint_status: Option<watch::Receiver<WorkerEndpointStatus>>,
    /// How its worker asks it to rest.
    pub(crate) control: Arc<AgentControl>,
}

/// What a worker and its agent's task tell each other past the link.
#[derive(Debug, Default)]
pub(crate) struct AgentControl {
    rest_requested: Notify,
    rested: Notify,
    keeper_lost: Notify,
    /// What the turn under way has used.
    meter: Mutex<Option<Arc<TurnMeter>>>,
}

impl AgentControl {
    /// Asks an agent without a turn to stop, and waits for it; not longer than `limit`.
    pub(crate) async fn request_rest(&self, limit: Duration) {
        self.rest_requested.notify_one();
        // One that takes longer is ended with everything else.
        let _rested = tokio::time::timeout(limit, self.rested.notified()).await;
    }

    /// How long the turn under way has run.
    pub(crate) fn run_time(&self) -> Option<Duration> {
        self.lock_meter().as_ref().map(|meter| meter.run_time())
    }

    fn lock_meter(&self) -> MutexGuard<'_, Option<Arc<TurnMeter>>> {
        self.meter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The agent has stopped: the worker takes the rest from here, and its task with it.
    async fn report_rested<T>(&self) -> T {
        self.rested.notify_one();
        std::future::pending().await
    }

    /// Resolves when the agent's task found that its keeper is of no use.
    pub(crate) async fn keeper_lost(&self) {
        self.keeper_lost.notified().await;
    }
}

/// The life of one agent, from its start to its end. When it comes back, nothing of the agent and its last turn is left;
/// it does not while there is something that earlier turns left on purpose and a worker to hold it, nor when the keeper
/// is gone: then its worker ends it.
pub(crate) async fn run_agent(
    kind: AgentKind,
    spec: Box<AgentSpec>,
    around: AgentContext,
    end: AgentEndpoint,
) -> AgentExitReason {
    let AgentContext { agent_processes: below, endpoint_status: seat, control: leash } = around;
    let mut life =
        AgentTask { spec, agent_processes: below, endpoint_status: seat, link_end: end, last_run: None };
    match life.run(kind, &leash).await {
        Ok(gone) => gone,
        Err(AgentTaskError::Closed(LinkClosed)) => AgentExitReason::Stopped,
        Err(AgentTaskError::KeeperLost(KeeperLostError)) => {
            // Only the worker can find what the keeper lost; it ends this task when it has.
            leash.keeper_lost.notify_one();
            std::future::pending().await
        }
    }
}

/// Why a life cannot go on as it should.
#[derive(Debug, thiserror::Error)]
enum AgentTaskError {
    #[error(transparent)]
    Closed(#[from] LinkClosed),
    #[error(transparent)]
    KeeperLost(#[from] KeeperLostError),
}

/// How a turn came to its end.
#[derive(Debug)]
enum TurnCompletion {
    /// By itself, or because it was asked to.
    ByItself(DriverTurnEnd),
    /// It was given no more time.
    Killed,
}

#[derive(Debug)]
struct AgentTask {
    spec: Box<AgentSpec>,
    agent_processes: Option<Arc<AgentProcesses>>,
    endpoint_status: Option<watch::Receiver<WorkerEndpointStatus>>,
    link_end: AgentEndpoint,
    /// The turn that a word between turns belongs to.
    last_run: Option<RunId>,
}

/// What came of a start.
enum AgentStartResult {
    Ready(RunningAgent),
    Gone(AgentExitReason),
}

/// What follows the end of an agent between its turns.
#[derive(Debug)]
enum IdleExitResult {
    Gone(AgentExitReason),
    /// A prompt that wants another.
    Restart(Box<AgentCommand>),
}

impl AgentTask {
    async fn run(
        &mut self,
        kind: AgentKind,
        leash: &AgentControl,
    ) -> Result<AgentExitReason, AgentTaskError> {
        let mut waiting: Option<Box<AgentCommand>> = None;
        // Everything that is not idling is boxed: ten thousand idle agents should cost a few megabytes.
        loop {
            let mut agent = match Box::pin(self.start_agent(kind.clone(), waiting.as_deref())).await? {
                AgentStartResult::Ready(agent) => agent,
                AgentStartResult::Gone(gone) => return Ok(gone),
            };
            let voice = self.link_end.output();
            let error = loop {
                let down = match waiting.take() {
                    Some(prompt) => prompt,
                    None => tokio::select! {
                        // Commands first: a prompt that is there makes an agent that should rest go on.
                        biased;
                        down = self.link_end.next_command() => Box::new(down.ok_or(LinkClosed)?),
                        error = agent.idle(&voice) => break Box::new(error),
                        () = leash.rest_requested.notified() => {
                            Box::pin(agent.stop()).await;
                            return leash.report_rested().await;
                        }
                    },
                };
                if let Some(gone) = Box::pin(self.handle_command(&mut agent, leash, down)).await? {
                    return Ok(gone);
                }
            };
            drop(agent);
            match Box::pin(self.handle_idle_exit(error, leash)).await? {
                IdleExitResult::Gone(gone) => return Ok(gone),
                IdleExitResult::Restart(prompt) => waiting = Some(prompt),
            }
        }
    }

    /// Starts the agent; for this prompt, if it is one that found the last agent dead.
    async fn start_agent(
        &mut self,
        kind: AgentKind,
        prompt: Option<&AgentCommand>,
    ) -> Result<AgentStartResult, AgentTaskError> {
        let agent = match RunningAgent::start(kind, &self.spec, self.agent_processes.as_ref()).await {
            Ok(agent) => agent,
            Err(error) => return self.fail_to_start(error, prompt).await.map(AgentStartResult::Gone),
        };
        let ready = agent.ready_update(&self.spec);
        if let AgentUpdate::Ready { agent_session_id, .. } = &ready {
            self.spec.agent_session_id.clone_from(agent_session_id);
        }
        self.link_end.send(ready).await?;
        Ok(AgentStartResult::Ready(agent))
    }

    /// An agent may go on under another name, after a command of its own: then that is the conversation to go on with.
    async fn report_new_session_id(&mut self, ready: AgentUpdate) -> Result<(), LinkClosed> {
        match &ready {
            AgentUpdate::Ready { agent_session_id, .. }
                if *agent_session_id != self.spec.agent_session_id =>
            {
                self.spec.agent_session_id.clone_from(agent_session_id);
                self.link_end.send(ready).await
            }
            _ => Ok(()),
        }
    }

    /// Does what an idle agent is told: a prompt is a turn, and anything else came too late for its own.
    async fn handle_command(
        &mut self,
        agent: &mut RunningAgent,
        leash: &AgentControl,
        down: Box<AgentCommand>,
    ) -> Result<Option<AgentExitReason>, AgentTaskError> {
        match *down {
            AgentCommand::Prompt { run, prompt, files, messages, limits, .. } => {
                self.last_run = Some(run.clone());
                let inbox = DriverInbox::default();
                *leash.lock_meter() = Some(Arc::clone(&inbox.meter));
                let prompt = DriverPrompt { run, text: prompt, files, messages, limits };
                let ended = self.run_turn(agent, prompt, inbox).await;
                *leash.lock_meter() = None;
                let ended = ended?;
                let ready = agent.ready_update(&self.spec);
                if ended.is_none() {
                    self.report_new_session_id(ready).await?;
                }
                Ok(ended)
            }
            other => {
                self.reject_late_command(other).await?;
                Ok(None)
            }
        }
    }

    /// One turn, from its prompt to its terminal. Gives how the agent went if it did not outlive its turn.
    async fn run_turn(
        &mut self,
        agent: &mut RunningAgent,
        prompt: DriverPrompt,
        inbox: DriverInbox,
    ) -> Result<Option<AgentExitReason>, AgentTaskError> {
        if let Some(below) = &self.agent_processes {
            below.begin_turn().await?;
        }
        let (ended, limit) = self.drive_turn(agent, &prompt, &inbox).await?;
        let stopping = inbox.is_cancelled();
        let run = &prompt.run;
        match ended {
            TurnCompletion::ByItself(DriverTurnEnd::Stopped(mut outcome)) if stopping => {
                let (processes, left) = self.sweep_turn(&prompt, &inbox).await?;
                outcome.processes = processes;
                outcome.agent_ends = left.is_some();
                outcome.stop = limit.unwrap_or(outcome.stop);
                self.send_terminal(&inbox, run, outcome).await?;
                match left {
                    Some(left) => self.finish_agent(AgentExitReason::Stopped, left).await.map(Some),
                    None => Ok(None),
                }
            }
            TurnCompletion::ByItself(DriverTurnEnd::Stopped(outcome)) => {
                if let Some(below) = &self.agent_processes {
                    below.end_turn().await?;
                }
                self.send_terminal(&inbox, run, outcome).await?;
                Ok(None)
            }
            // Some agents stop by ending themselves. They did as they were told, so it is no failure.
            TurnCompletion::ByItself(DriverTurnEnd::AgentExited(_)) if stopping => {
                self.kill_agent(&inbox, run, limit).await.map(Some)
            }
            TurnCompletion::ByItself(DriverTurnEnd::AgentExited(error)) => {
                self.fail_turn(&inbox, run, error).await.map(Some)
            }
            TurnCompletion::Killed => self.kill_agent(&inbox, run, limit).await.map(Some),
        }
    }

    /// Runs the turn until it ends or is given no more time; also tells which of its limits stopped it.
    async fn drive_turn(
        &mut self,
        agent: &mut RunningAgent,
        prompt: &DriverPrompt,
        inbox: &DriverInbox,
    ) -> Result<(TurnCompletion, Option<TurnStopReason>), AgentTaskError> {
        let Self { endpoint_status: seat, link_end: end, .. } = self;
        let turn = DriverTurn::new(prompt.run.clone(), end.output(), inbox);
        let mut work = Box::pin(agent.turn(&turn, prompt));
        inbox.meter.set_remaining(&prompt.limits);
        let mut over = pin!(wait_for_limit(&inbox.meter, &prompt.run, seat.clone()));
        let mut limit = None;
        let mut out_of_grace = pin!(tokio::time::sleep(Duration::MAX));
        loop {
            tokio::select! {
                // Commands first: a cancel that is there when the work ends has won.
                biased;
                down = end.next_command() => {
                    if apply_to_turn(end, inbox, &prompt.run, down.ok_or(LinkClosed)?).await? {
                        return Ok((TurnCompletion::Killed, limit));
                    }
                }
                stop = &mut over, if limit.is_none() => {
                    limit = Some(stop);
                    inbox.cancel();
                    out_of_grace.as_mut().reset(Instant::now() + cancel_grace(&prompt.limits));
                }
                () = &mut out_of_grace, if limit.is_some() => return Ok((TurnCompletion::Killed, limit)),
                ended = &mut work => return Ok((TurnCompletion::ByItself(ended?), limit)),
            }
        }
    }

    /// Ends what a stopped turn started. A kill meanwhile leaves it no grace and takes the agent as well: then the second
    /// value tells whether earlier turns have left something.
    async fn sweep_turn(
        &mut self,
        prompt: &DriverPrompt,
        inbox: &DriverInbox,
    ) -> Result<(ProcessCleanup, Option<bool>), AgentTaskError> {
        let Self { agent_processes: below, link_end: end, .. } = self;
        let Some(below) = below else { return Ok((ProcessCleanup::default(), None)) };
        let mut sweep = pin!(below.sweep_turn(SWEEP_GRACE.min(cancel_grace(&prompt.limits))));
        loop {
            tokio::select! {
                swept = &mut sweep => {
                    let processes = swept?;
                    below.end_turn().await?;
                    return Ok((processes, None));
                }
                down = end.next_command() => {
                    if apply_to_turn(end, inbox, &prompt.run, down.ok_or(LinkClosed)?).await? {
                        let (turn, (all, left)) = tokio::try_join!(sweep, below.end_agent(Duration::ZERO))?;
                        return Ok((merge_sweep_counts(turn, all), Some(left)));
                    }
                }
            }
        }
    }

    /// Ends the agent and what its turn started, and says the end of its turn.
    async fn kill_agent(
        &mut self,
        inbox: &DriverInbox,
        run: &RunId,
        limit: Option<TurnStopReason>,
    ) -> Result<AgentExitReason, AgentTaskError> {
        let (processes, left) = self.end_agent(Duration::ZERO).await?;
        let stop = limit.unwrap_or(TurnStopReason::Cancelled);
        let outcome = TurnOutcome { processes, agent_ends: true, ..TurnOutcome::of(stop) };
        self.send_terminal(inbox, run, outcome).await?;
        self.finish_agent(AgentExitReason::Stopped, left).await
    }

    /// The end of an agent that ended by itself in its turn. What it started goes first: whoever hears of the end may
    /// start it again.
    async fn fail_turn(
        &mut self,
        inbox: &DriverInbox,
        run: &RunId,
        mut error: RunError,
    ) -> Result<AgentExitReason, AgentTaskError> {
        let (processes, left) = self.end_agent(SWEEP_GRACE).await?;
        if left {
            let outcome = TurnOutcome { processes, agent_ends: true, ..TurnOutcome::failed(error.clone()) };
            self.send_terminal(inbox, run, outcome).await?;
        } else if processes.survivors > 0 {
            // The last word of an agent is the end of its turn as well, and has no other place for this.
            let ProcessCleanup { survivors, .. } = processes;
            error.message.push_str(&format!("; {survivors} of its processes could not be ended"));
        }
        self.finish_agent(AgentExitReason::Failed(error), left).await
    }

    /// The end of an agent that never was ready; the prompt is one that was to wake it.
    async fn fail_to_start(
        &mut self,
        error: RunError,
        prompt: Option<&AgentCommand>,
    ) -> Result<AgentExitReason, AgentTaskError> {
        let (_, left) = self.end_agent(SWEEP_GRACE).await?;
        match prompt {
            Some(AgentCommand::Prompt { run, .. }) if left => {
                let outcome = TurnOutcome { agent_ends: true, ..TurnOutcome::failed(error.clone()) };
                self.link_end.send(AgentUpdate::Terminal { run: run.clone(), outcome }).await?;
                self.finish_agent(AgentExitReason::Failed(error), left).await
            }
            // A run that waits for its agent can be told in no other way.
            _ => Ok(AgentExitReason::Failed(error)),
        }
    }

    /// The end of an agent between its turns. If they have left something, that needs somebody to hold it, and the next
    /// prompt starts the agent again.
    async fn handle_idle_exit(
        &mut self,
        error: Box<RunError>,
        leash: &AgentControl,
    ) -> Result<IdleExitResult, AgentTaskError> {
        let (_, left) = self.end_agent(SWEEP_GRACE).await?;
        if !left {
            return Ok(IdleExitResult::Gone(AgentExitReason::Failed(*error)));
        }
        if let Some(run) = self.last_run.clone() {
            let text = format!("{}; the next prompt starts it again", error.message);
            self.link_end.send(AgentUpdate::Turn { run, update: TurnUpdate::Notice { text } }).await?;
        }
        loop {
            tokio::select! {
                biased;
                down = self.link_end.next_command() => match down.ok_or(LinkClosed)? {
                    prompt @ AgentCommand::Prompt { .. } => return Ok(IdleExitResult::Restart(Box::new(prompt))),
                    other => self.reject_late_command(other).await?,
                },
                () = leash.rest_requested.notified() => return leash.report_rested().await,
            }
        }
    }

    /// The agent is no more. What earlier turns left on purpose lives as long as the session, and so does its worker:
    /// then this is a rest, and only another agent ends it.
    async fn finish_agent(
        &mut self,
        gone: AgentExitReason,
        left: bool,
    ) -> Result<AgentExitReason, AgentTaskError> {
        if !left {
            return Ok(gone);
        }
        self.link_end.send(AgentUpdate::Rested).await?;
        loop {
            let down = self.link_end.next_command().await.ok_or(LinkClosed)?;
            self.reject_late_command(down).await?;
        }
    }

    async fn reject_late_command(&self, down: AgentCommand) -> Result<(), LinkClosed> {
        match down {
            AgentCommand::Steer { number, .. } => {
                self.link_end.send(AgentUpdate::SteerMissed { steer: number }).await
            }
            AgentCommand::Prompt { run, .. } => {
                let error = RunError::new("agent_exited", "the agent was about to end");
                let outcome = TurnOutcome { agent_ends: true, ..TurnOutcome::failed(error) };
                self.link_end.send(AgentUpdate::Terminal { run, outcome }).await?;
                self.link_end.send(AgentUpdate::Rested).await
            }
            AgentCommand::Cancel { .. } | AgentCommand::Kill { .. } | AgentCommand::Answer { .. } => Ok(()),
        }
    }

    /// Ends the agent and its turn; tells whether earlier turns have left something that somebody can hold.
    async fn end_agent(&self, grace: Duration) -> Result<(ProcessCleanup, bool), KeeperLostError> {
        match &self.agent_processes {
            Some(below) => {
                let (processes, left) = below.end_agent(grace).await?;
                Ok((processes, left && self.endpoint_status.is_some()))
            }
            None => Ok((ProcessCleanup::default(), false)),
        }
    }

    async fn send_terminal(
        &self,
        inbox: &DriverInbox,
        run: &RunId,
        outcome: TurnOutcome,
    ) -> Result<(), LinkClosed> {
        for steer in inbox.take_missed_steers() {
            self.link_end.send(AgentUpdate::SteerMissed { steer }).await?;
        }
        self.link_end.send(AgentUpdate::Terminal { run: run.clone(), outcome }).await
    }
}

/// Applies a command to the running turn; true if the turn is to be given no more time.
async fn apply_to_turn(
    end: &AgentEndpoint,
    inbox: &DriverInbox,
    current: &RunId,
    down: AgentCommand,
) -> Result<bool, LinkClosed> {
    match down {
        AgentCommand::Kill { run, .. } => return Ok(run == *current),
        AgentCommand::Cancel { run, .. } if run == *current => inbox.cancel(),
        AgentCommand::Cancel { .. } => {}
        AgentCommand::Steer { number, run, text } => {
            if run != *current || !inbox.queue_steer(DriverSteer { number, text }) {
                end.send(AgentUpdate::SteerMissed { steer: number }).await?;
            }
        }
        AgentCommand::Answer { ask, answer, .. } => inbox.deliver_reply(&ask, answer),
        // A session has one turn at a time. Should that ever be wrong, the second must not wait for ever.
        AgentCommand::Prompt { run, .. } => {
            let busy =
                RunError::new("agent_busy", "the agent was given a prompt in the middle of another turn");
            end.send(AgentUpdate::Terminal { run, outcome: TurnOutcome::failed(busy) }).await?;
        }
    }
    Ok(false)
}

/// Waits until the turn is over one of its limits and no daemon is there to say so.
async fn wait_for_limit(
    meter: &TurnMeter,
    run: &RunId,
    seat: Option<watch::Receiver<WorkerEndpointStatus>>,
) -> TurnStopReason {
    let Some(mut seat) = seat else { return std::future::pending().await };
    let mut known = None;
    loop {
        let WorkerEndpointStatus { attached, limits, .. } = seat.borrow_and_update().clone();
        // The daemon's last word on what is left, if it has said more than it did with the prompt.
        if let Some((of, left)) = limits.as_ref().filter(|_| limits != known)
            && of == run
        {
            meter.set_remaining(left);
        }
        known = limits;
        tokio::select! {
            stop = meter.wait_until_exceeded(), if !attached => return stop,
            changed = seat.changed() => if changed.is_err() {
                return std::future::pending().await;
            },
        }
    }
}

fn cancel_grace(limits: &TurnLimits) -> Duration {
    limits.grace_ms.map_or(Duration::from_secs(CANCEL_GRACE_S), Duration::from_millis)
}

/// What two sweeps did of which one overtook the other: both count most of the same processes.
fn merge_sweep_counts(one: ProcessCleanup, other: ProcessCleanup) -> ProcessCleanup {
    ProcessCleanup { killed: one.killed.max(other.killed), survivors: one.survivors.max(other.survivors) }
}

#[cfg(test)]
mod tests;
