//! The task that owns one agent: starts it, runs its turns, and ends it. The task sits at the agent's end of a local
//! link and handles commands while a turn runs, so that a cancel, a steer, an answer or a kill reaches the turn at
//! once. What the worker itself says about a turn is in `turn_judgement`.

mod tree_limits;
mod turn_judgement;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use parking_lot::{Mutex, MutexGuard};
use qd_drivers::agent_driver::AgentDriver;
use qd_drivers::agent_launcher::AgentLauncher;
use qd_drivers::meter::TurnMeter;
use qd_drivers::silence::SilenceAction;
use qd_drivers::turn::{DriverInbox, DriverPrompt, DriverSteer, DriverTurn, DriverTurnEnd};
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

use self::tree_limits::wait_for_tree_limit;
use self::turn_judgement::{WorkerStop, missing_answer_error, silence_notice, unrequested_cancel_error};
use crate::agent_processes::{AgentProcesses, KeeperLostError};
use crate::agent_sandbox::plan_agent_sandbox;

/// How long processes that a stopped turn started have to exit by themselves.
const SWEEP_GRACE: Duration = Duration::from_secs(1);

/// What an agent's task needs from its worker.
#[derive(Debug)]
pub(crate) struct AgentContext {
    /// The processes the agent starts; `None` for an agent that starts none.
    pub(crate) agent_processes: Option<Arc<AgentProcesses>>,
    /// Whether a daemon is attached. `None` if there can be none, as in an executor: then no limits are enforced here.
    pub(crate) endpoint_status: Option<watch::Receiver<WorkerEndpointStatus>>,
    /// How the worker asks the agent to stop when it is idle.
    pub(crate) control: Arc<AgentControl>,
}

/// Signals between a worker and its agent's task that do not go through the link.
#[derive(Debug, Default)]
pub(crate) struct AgentControl {
    idle_stop_requested: Notify,
    idle_stopped: Notify,
    keeper_lost: Notify,
    /// What the running turn has used.
    meter: Mutex<Option<Arc<TurnMeter>>>,
}

impl AgentControl {
    /// Asks an idle agent to stop, and waits for it for at most `limit`.
    pub(crate) async fn request_idle_stop(&self, limit: Duration) {
        self.idle_stop_requested.notify_one();
        // An agent that takes longer is killed when its processes are swept.
        let _stopped = tokio::time::timeout(limit, self.idle_stopped.notified()).await;
    }

    /// How long the running turn has taken so far.
    pub(crate) fn run_time(&self) -> Option<Duration> {
        self.lock_meter().as_ref().map(|meter| meter.run_time())
    }

    fn lock_meter(&self) -> MutexGuard<'_, Option<Arc<TurnMeter>>> {
        self.meter.lock()
    }

    /// Tells the worker that the agent has stopped. Never returns: the worker drops the agent's task.
    async fn report_idle_stopped<T>(&self) -> T {
        self.idle_stopped.notify_one();
        std::future::pending().await
    }

    /// Resolves when the agent's task finds that its keeper is lost.
    pub(crate) async fn keeper_lost(&self) {
        self.keeper_lost.notified().await;
    }
}

/// Runs one agent from its start to its end. When this returns, the agent and the processes of its last turn are gone.
/// It does not return while earlier turns have left processes on purpose and a worker can hold them, nor when the
/// keeper is lost: in both cases the worker drops the task.
pub(crate) async fn run_agent(
    launcher: AgentLauncher,
    spec: Box<AgentSpec>,
    context: AgentContext,
    link_end: AgentEndpoint,
) -> AgentExitReason {
    let AgentContext { agent_processes, endpoint_status, control } = context;
    if let Some(mb) = spec.limits.as_deref().and_then(|limits| limits.output_mb_per_min) {
        link_end.limit_output(mb << 20);
    }
    let mut task = AgentTask {
        spec,
        launcher,
        agent_processes,
        endpoint_status,
        link_end,
        last_run: None,
        ended_turn: None,
    };
    match task.run(&control).await {
        Ok(reason) => reason,
        Err(AgentTaskError::Closed(LinkClosed)) => AgentExitReason::Stopped,
        Err(AgentTaskError::KeeperLost(KeeperLostError)) => {
            // Only the worker can find the processes of a dead keeper. It drops this task when it has ended them.
            control.keeper_lost.notify_one();
            std::future::pending().await
        }
    }
}

/// Why the task cannot go on.
#[derive(Debug, thiserror::Error)]
enum AgentTaskError {
    #[error(transparent)]
    Closed(#[from] LinkClosed),
    #[error(transparent)]
    KeeperLost(#[from] KeeperLostError),
}

/// How a turn ended.
#[derive(Debug)]
enum TurnCompletion {
    /// The driver reported the end, on its own or after a cancel.
    Ended(DriverTurnEnd),
    /// It did not stop in time.
    Killed,
}

#[derive(Debug)]
struct AgentTask {
    spec: Box<AgentSpec>,
    launcher: AgentLauncher,
    agent_processes: Option<Arc<AgentProcesses>>,
    endpoint_status: Option<watch::Receiver<WorkerEndpointStatus>>,
    link_end: AgentEndpoint,
    /// The run that updates between turns belong to.
    last_run: Option<RunId>,
    /// The last turn, if it ended by itself and left processes running.
    ended_turn: Option<Box<EndedTurn>>,
}

/// A turn that has ended by itself and left processes running. A cancel that meets its end still ends them.
#[derive(Debug)]
struct EndedTurn {
    run: RunId,
    grace: Duration,
    outcome: TurnOutcome,
}

enum AgentStartResult {
    Ready(Box<dyn AgentDriver>),
    Gone(AgentExitReason),
}

/// What follows when an agent exits between its turns.
#[derive(Debug)]
enum IdleExitResult {
    Gone(AgentExitReason),
    /// Start the agent again for this prompt.
    Restart(Box<AgentCommand>),
}

impl AgentTask {
    async fn run(&mut self, control: &AgentControl) -> Result<AgentExitReason, AgentTaskError> {
        let mut waiting: Option<Box<AgentCommand>> = None;
        // Everything but the idle wait is boxed: ten thousand idle agents should cost a few megabytes.
        loop {
            let mut agent = match Box::pin(self.start_agent(waiting.as_deref())).await? {
                AgentStartResult::Ready(agent) => agent,
                AgentStartResult::Gone(reason) => return Ok(reason),
            };
            let output = self.link_end.output();
            let error = loop {
                let command = match waiting.take() {
                    Some(prompt) => prompt,
                    None => tokio::select! {
                        // Commands first: a prompt that has arrived keeps an agent running that is about to be stopped.
                        biased;
                        command = self.link_end.next_command() => Box::new(command.ok_or(LinkClosed)?),
                        error = agent.idle(&output) => break Box::new(error),
                        () = control.idle_stop_requested.notified() => {
                            agent.stop().await;
                            return control.report_idle_stopped().await;
                        }
                    },
                };
                if let Some(reason) = Box::pin(self.handle_command(&mut *agent, control, command)).await? {
                    return Ok(reason);
                }
            };
            drop(agent);
            match Box::pin(self.handle_idle_exit(error, control)).await? {
                IdleExitResult::Gone(reason) => return Ok(reason),
                IdleExitResult::Restart(prompt) => waiting = Some(prompt),
            }
        }
    }

    /// Starts the agent. `prompt` is set if it arrived after the last agent had exited.
    async fn start_agent(
        &mut self,
        prompt: Option<&AgentCommand>,
    ) -> Result<AgentStartResult, AgentTaskError> {
        if let Some(sandbox) = &self.spec.sandbox {
            match plan_agent_sandbox(sandbox, self.launcher.location()) {
                Ok(Some(report)) => self.link_end.send(AgentUpdate::Confined(report)).await?,
                Ok(None) => {}
                Err(error) => {
                    return self.fail_to_start(error, prompt).await.map(AgentStartResult::Gone);
                }
            }
        }
        let supervision = self.agent_processes.as_deref().map(AgentProcesses::supervision);
        let agent = match self.launcher.start(&self.spec, supervision).await {
            Ok(agent) => agent,
            Err(error) => {
                return self
                    .fail_to_start(self.launcher.explain_error(&self.spec, error), prompt)
                    .await
                    .map(AgentStartResult::Gone);
            }
        };
        let ready = agent.ready_update(&self.spec);
        if let AgentUpdate::Ready { agent_session_id, .. } = &ready {
            self.spec.agent_session_id.clone_from(agent_session_id);
        }
        self.link_end.send(ready).await?;
        Ok(AgentStartResult::Ready(agent))
    }

    /// Reports a changed conversation id. An agent may switch to another conversation after a command of its own; a
    /// later resume has to continue that one.
    async fn report_new_session_id(&mut self, ready: AgentUpdate) -> Result<(), LinkClosed> {
        match &ready {
            AgentUpdate::Ready { agent_session_id, .. }
                if *agent_session_id != self.spec.agent_session_id =>
            {
                self.spec.agent_session_id.clone_from(agent_session_id);
                self.spec.conversation_cost_usd = Some(0.0);
                self.link_end.send(ready).await
            }
            _ => Ok(()),
        }
    }

    /// Handles a command to an idle agent: a prompt starts a turn, anything else came too late for its turn. Returns the
    /// exit reason if the agent did not survive the command.
    async fn handle_command(
        &mut self,
        agent: &mut dyn AgentDriver,
        control: &AgentControl,
        command: Box<AgentCommand>,
    ) -> Result<Option<AgentExitReason>, AgentTaskError> {
        match *command {
            AgentCommand::Prompt { run, prompt, mode, files, messages, limits, .. } => {
                self.last_run = Some(run.clone());
                self.ended_turn = None;
                let inbox = DriverInbox::for_run(run.clone());
                *control.lock_meter() = Some(Arc::clone(&inbox.meter));
                let prompt = DriverPrompt { run, text: prompt, mode, files, messages, limits };
                let meter = Arc::clone(&inbox.meter);
                let ended = self.run_turn(agent, prompt, inbox).await;
                self.spec.conversation_cost_usd =
                    meter.conversation_cost_usd().or(self.spec.conversation_cost_usd);
                *control.lock_meter() = None;
                let ended = ended?;
                let ready = agent.ready_update(&self.spec);
                if ended.is_none() {
                    self.report_new_session_id(ready).await?;
                }
                Ok(ended)
            }
            other => self.handle_late_command(other).await,
        }
    }

    /// Runs one turn from its prompt to its terminal. Returns the exit reason if the agent did not survive the turn.
    async fn run_turn(
        &mut self,
        agent: &mut dyn AgentDriver,
        prompt: DriverPrompt,
        inbox: DriverInbox,
    ) -> Result<Option<AgentExitReason>, AgentTaskError> {
        if let Some(agent_processes) = &self.agent_processes {
            agent_processes.begin_turn().await?;
        }
        let (ended, own_stop) = self.drive_turn(agent, &prompt, &inbox).await?;
        let stopping = inbox.is_cancelled();
        let run = &prompt.run;
        match ended {
            // A run that suspends itself goes on later. What its turn started is ended now, so that nothing is left of
            // the run if it is cancelled meanwhile; its agent may have been stopped by then.
            TurnCompletion::Ended(DriverTurnEnd::Stopped(outcome))
                if stopping || outcome.stop == TurnStopReason::Suspended =>
            {
                let outcome = match own_stop {
                    Some(stop) => stop.apply_to(outcome),
                    None => outcome,
                };
                let grace = cancel_grace(&prompt.limits);
                self.sweep_and_report(&inbox, EndedTurn { run: prompt.run, grace, outcome }, false).await
            }
            TurnCompletion::Ended(DriverTurnEnd::Stopped(outcome))
                if outcome.stop == TurnStopReason::Cancelled =>
            {
                self.end_unrequested_cancel(&inbox, run, outcome).await
            }
            TurnCompletion::Ended(DriverTurnEnd::Stopped(mut outcome)) => {
                if self.is_answer_missing(&inbox, &prompt, &outcome) {
                    outcome = TurnOutcome::failed(missing_answer_error());
                }
                outcome.error = outcome.error.map(|error| self.launcher.explain_error(&self.spec, error));
                if let Some(agent_processes) = &self.agent_processes {
                    outcome.leaves_processes = agent_processes.end_turn().await?;
                }
                if outcome.leaves_processes {
                    let grace = cancel_grace(&prompt.limits);
                    let ended = EndedTurn { run: run.clone(), grace, outcome: outcome.clone() };
                    self.ended_turn = Some(Box::new(ended));
                }
                self.report_turn_end(&inbox, run, outcome).await?;
                Ok(None)
            }
            // Some agents stop by exiting. They did what they were asked to do, so this is not a failure.
            TurnCompletion::Ended(DriverTurnEnd::AgentExited(_)) if stopping => {
                self.kill_agent(&inbox, run, own_stop).await.map(Some)
            }
            TurnCompletion::Ended(DriverTurnEnd::AgentExited(error)) => {
                let error = self.launcher.explain_error(&self.spec, error);
                self.fail_turn(&inbox, run, error).await.map(Some)
            }
            TurnCompletion::Killed => self.kill_agent(&inbox, run, own_stop).await.map(Some),
        }
    }

    /// Whether a turn that ended well should have had an answer and has none.
    fn is_answer_missing(&self, inbox: &DriverInbox, prompt: &DriverPrompt, outcome: &TurnOutcome) -> bool {
        let is_command = prompt.text.trim_start().starts_with('/');
        self.launcher.always_answers()
            && outcome.stop == TurnStopReason::EndTurn
            && outcome.text.is_none()
            && !is_command
            && !inbox.meter.has_answered()
    }

    /// Ends a turn that the agent reports as cancelled, though nobody cancelled it. That is an error: only a run that
    /// somebody cancelled ends as cancelled. Such an agent may not take the next prompt, so it is ended if another
    /// process can continue its conversation. Returns the exit reason if it was ended.
    async fn end_unrequested_cancel(
        &mut self,
        inbox: &DriverInbox,
        run: &RunId,
        outcome: TurnOutcome,
    ) -> Result<Option<AgentExitReason>, AgentTaskError> {
        let error = Some(unrequested_cancel_error());
        let outcome = TurnOutcome { stop: TurnStopReason::Error, error, ..outcome };
        if !self.launcher.can_resume() || self.agent_processes.is_none() {
            self.report_turn_end(inbox, run, outcome).await?;
            return Ok(None);
        }
        let (processes, leftovers) = self.end_agent(SWEEP_GRACE).await?;
        let outcome = TurnOutcome { processes, agent_ends: true, ..outcome };
        self.report_turn_end(inbox, run, outcome).await?;
        self.finish_agent(AgentExitReason::Stopped, leftovers).await.map(Some)
    }

    /// Drives the turn until it ends or has to be killed. Also returns why the worker itself stopped it, if it did.
    async fn drive_turn(
        &mut self,
        agent: &mut dyn AgentDriver,
        prompt: &DriverPrompt,
        inbox: &DriverInbox,
    ) -> Result<(TurnCompletion, Option<WorkerStop>), AgentTaskError> {
        let Self { endpoint_status, link_end, launcher, spec, agent_processes, .. } = self;
        let turn = DriverTurn::new(prompt.run.clone(), link_end.output(), inbox);
        let mut turn_end = agent.turn(&turn, prompt);
        inbox.meter.set_remaining(&prompt.limits);
        if launcher.reports_progress() {
            inbox.meter.set_silence_rules(spec.silence);
        }
        let mut limit_exceeded = pin!(wait_for_limit(&inbox.meter, &prompt.run, endpoint_status.clone()));
        let mut tree_exceeded = pin!(wait_for_tree_limit(agent_processes.as_deref(), spec.limits.as_deref()));
        let mut own_stop = None;
        // Sent beside everything else: while the session takes no updates, commands must still be handled.
        let mut notice = None;
        let mut out_of_grace = pin!(tokio::time::sleep(Duration::MAX));
        loop {
            tokio::select! {
                // Commands first: a cancel that has arrived when the turn ends takes precedence.
                biased;
                command = link_end.next_command() => {
                    if apply_to_turn(link_end, inbox, &prompt.run, command.ok_or(LinkClosed)?).await? {
                        return Ok((TurnCompletion::Killed, own_stop));
                    }
                }
                stop = &mut limit_exceeded, if own_stop.is_none() => {
                    own_stop = Some(WorkerStop::Limit(stop));
                    inbox.cancel(&prompt.run);
                    out_of_grace.as_mut().reset(Instant::now() + cancel_grace(&prompt.limits));
                }
                // Without any grace: what has started too much could start more in the meantime.
                exceeded = &mut tree_exceeded => {
                    return Ok((TurnCompletion::Killed, Some(WorkerStop::Tree(exceeded))));
                }
                () = &mut out_of_grace, if own_stop.is_some() => return Ok((TurnCompletion::Killed, own_stop)),
                ended = &mut turn_end => return Ok((TurnCompletion::Ended(ended?), own_stop)),
                sent = wait_for_notice(&mut notice) => {
                    sent?;
                    notice = None;
                }
                action = inbox.meter.wait_for_silence(), if notice.is_none() && !inbox.is_cancelled() => match action {
                    SilenceAction::Notice(silence) => {
                        let update = TurnUpdate::Notice {
                            text: silence_notice(silence),
                            silent_s: Some(silence.as_secs()),
                            limit: None,
                        };
                        let update = AgentUpdate::Turn { run: prompt.run.clone(), update };
                        let output = link_end.output();
                        notice = Some(Box::pin(async move { output.send(update).await }) as BoxFuture<'static, _>);
                    }
                    SilenceAction::EndTurn(silence) => {
                        own_stop = Some(WorkerStop::Silence(silence));
                        inbox.cancel(&prompt.run);
                        out_of_grace.as_mut().reset(Instant::now() + cancel_grace(&prompt.limits));
                    }
                },
            }
        }
    }

    /// Ends the processes of a stopped turn, and reports its end. Returns the exit reason if the agent was killed.
    async fn sweep_and_report(
        &mut self,
        inbox: &DriverInbox,
        EndedTurn { run, grace, mut outcome }: EndedTurn,
        has_ended: bool,
    ) -> Result<Option<AgentExitReason>, AgentTaskError> {
        let (processes, leftovers) = self.sweep_turn(&run, inbox, has_ended, grace).await?;
        outcome.processes = processes;
        outcome.leaves_processes = false;
        outcome.agent_ends = leftovers.is_some();
        self.report_turn_end(inbox, &run, outcome).await?;
        match leftovers {
            Some(leftovers) => self.finish_agent(AgentExitReason::Stopped, leftovers).await.map(Some),
            None => Ok(None),
        }
    }

    /// Ends the processes that a stopped turn started. A kill in the meantime takes away their grace and ends the agent
    /// as well; the second value is then set and tells whether earlier turns have left processes.
    async fn sweep_turn(
        &mut self,
        run: &RunId,
        inbox: &DriverInbox,
        has_ended: bool,
        grace: Duration,
    ) -> Result<(ProcessCleanup, Option<bool>), AgentTaskError> {
        let Self { agent_processes, link_end, .. } = self;
        let Some(agent_processes) = agent_processes else { return Ok((ProcessCleanup::default(), None)) };
        let mut sweep = pin!(agent_processes.sweep_turn(has_ended, SWEEP_GRACE.min(grace)));
        loop {
            tokio::select! {
                swept = &mut sweep => {
                    let processes = swept?;
                    agent_processes.end_turn().await?;
                    return Ok((processes, None));
                }
                command = link_end.next_command() => {
                    if apply_to_turn(link_end, inbox, run, command.ok_or(LinkClosed)?).await? {
                        let (turn, (all, leftovers)) = tokio::try_join!(sweep, agent_processes.end_agent(Duration::ZERO))?;
                        return Ok((merge_sweep_counts(turn, all), Some(leftovers)));
                    }
                }
            }
        }
    }

    /// Kills the agent and the processes of its turn, and reports the end of the turn.
    async fn kill_agent(
        &mut self,
        inbox: &DriverInbox,
        run: &RunId,
        own_stop: Option<WorkerStop>,
    ) -> Result<AgentExitReason, AgentTaskError> {
        let (processes, leftovers) = self.end_agent(Duration::ZERO).await?;
        let outcome = TurnOutcome { processes, agent_ends: true, ..TurnOutcome::cancelled() };
        let outcome = match own_stop {
            Some(stop) => stop.apply_to(outcome),
            None => outcome,
        };
        self.report_turn_end(inbox, run, outcome).await?;
        self.finish_agent(AgentExitReason::Stopped, leftovers).await
    }

    /// Handles an agent that exited by itself during its turn. Its processes are ended before the end is reported,
    /// because the daemon may start the agent again as soon as it knows.
    async fn fail_turn(
        &mut self,
        inbox: &DriverInbox,
        run: &RunId,
        error: RunError,
    ) -> Result<AgentExitReason, AgentTaskError> {
        let (processes, leftovers) = self.end_agent(SWEEP_GRACE).await?;
        if !leftovers && processes.survivors == 0 {
            return Ok(AgentExitReason::Failed(error));
        }
        // `Gone` could not name the survivors, so the end of the turn is reported apart from it. The error then belongs
        // to this turn alone: as a reason for `Gone` it would fail the next run as well.
        let outcome = TurnOutcome { processes, agent_ends: true, ..TurnOutcome::failed(error) };
        self.report_turn_end(inbox, run, outcome).await?;
        self.finish_agent(AgentExitReason::Lost, leftovers).await
    }

    /// Handles an agent that never became ready. `prompt` is set if it arrived after the last agent had exited.
    async fn fail_to_start(
        &mut self,
        error: RunError,
        prompt: Option<&AgentCommand>,
    ) -> Result<AgentExitReason, AgentTaskError> {
        let (_, leftovers) = self.end_agent(SWEEP_GRACE).await?;
        match prompt {
            Some(AgentCommand::Prompt { run, .. }) if leftovers => {
                let outcome = TurnOutcome { agent_ends: true, ..TurnOutcome::failed(error.clone()) };
                self.link_end.send(AgentUpdate::TurnEnded { run: run.clone(), outcome }).await?;
                self.finish_agent(AgentExitReason::Failed(error), leftovers).await
            }
            // A run that waits for its agent learns of the failure only through `Gone`.
            _ => Ok(AgentExitReason::Failed(error)),
        }
    }

    /// Handles an agent that exited between its turns. If they left processes on purpose, the task stays to hold them,
    /// and the next prompt starts the agent again.
    async fn handle_idle_exit(
        &mut self,
        error: Box<RunError>,
        control: &AgentControl,
    ) -> Result<IdleExitResult, AgentTaskError> {
        let (_, leftovers) = self.end_agent(SWEEP_GRACE).await?;
        if !leftovers {
            return Ok(IdleExitResult::Gone(AgentExitReason::Failed(*error)));
        }
        if let Some(run) = self.last_run.clone() {
            let text = format!("{}; the next prompt starts it again", error.message);
            self.link_end.send(AgentUpdate::Turn { run, update: TurnUpdate::notice(text) }).await?;
        }
        loop {
            tokio::select! {
                biased;
                command = self.link_end.next_command() => match command.ok_or(LinkClosed)? {
                    prompt @ AgentCommand::Prompt { .. } => {
                        self.ended_turn = None;
                        return Ok(IdleExitResult::Restart(Box::new(prompt)));
                    }
                    other => if let Some(reason) = self.handle_late_command(other).await? {
                        return Ok(IdleExitResult::Gone(reason));
                    },
                },
                () = control.idle_stop_requested.notified() => return control.report_idle_stopped().await,
            }
        }
    }

    /// The agent has exited. Processes that earlier turns left on purpose live as long as the session, and so does its
    /// worker: then the agent is reported as `IdleStopped`, and the task ends only when another agent is started.
    async fn finish_agent(
        &mut self,
        reason: AgentExitReason,
        leftovers: bool,
    ) -> Result<AgentExitReason, AgentTaskError> {
        if !leftovers {
            return Ok(reason);
        }
        self.link_end.send(AgentUpdate::IdleStopped).await?;
        loop {
            let command = self.link_end.next_command().await.ok_or(LinkClosed)?;
            self.reject_late_command(command).await?;
        }
    }

    /// Handles a command that came after the end of its turn. A cancel or kill may have met that end: then what the turn
    /// left running is ended, and its end is reported again. Returns the exit reason if the agent was killed as well.
    async fn handle_late_command(
        &mut self,
        command: AgentCommand,
    ) -> Result<Option<AgentExitReason>, AgentTaskError> {
        let (stopped_run, is_kill) = match &command {
            AgentCommand::Cancel { run, .. } => (Some(run), false),
            AgentCommand::Kill { run, .. } => (Some(run), true),
            _ => (None, false),
        };
        let Some(mut ended) = self.ended_turn.take_if(|ended| Some(&ended.run) == stopped_run) else {
            self.reject_late_command(command).await?;
            return Ok(None);
        };
        if is_kill {
            ended.grace = Duration::ZERO;
        }
        self.sweep_and_report(&DriverInbox::for_run(ended.run.clone()), *ended, true).await
    }

    async fn reject_late_command(&self, command: AgentCommand) -> Result<(), LinkClosed> {
        match command {
            AgentCommand::Steer { number, .. } => {
                self.link_end.send(AgentUpdate::SteerMissed { steer: number }).await
            }
            AgentCommand::Prompt { run, .. } => {
                let error = RunError::new("agent_exited", "the agent was about to end");
                let outcome = TurnOutcome { agent_ends: true, ..TurnOutcome::failed(error) };
                self.link_end.send(AgentUpdate::TurnEnded { run, outcome }).await?;
                self.link_end.send(AgentUpdate::IdleStopped).await
            }
            AgentCommand::Cancel { .. } | AgentCommand::Kill { .. } | AgentCommand::Answer { .. } => Ok(()),
        }
    }

    /// Ends the agent and its turn. The second value tells whether earlier turns left processes that a worker can hold.
    async fn end_agent(&self, grace: Duration) -> Result<(ProcessCleanup, bool), KeeperLostError> {
        match &self.agent_processes {
            Some(agent_processes) => {
                let (processes, leftovers) = agent_processes.end_agent(grace).await?;
                Ok((processes, leftovers && self.endpoint_status.is_some()))
            }
            None => Ok((ProcessCleanup::default(), false)),
        }
    }

    async fn report_turn_end(
        &self,
        inbox: &DriverInbox,
        run: &RunId,
        outcome: TurnOutcome,
    ) -> Result<(), LinkClosed> {
        for steer in inbox.take_missed_steers() {
            self.link_end.send(AgentUpdate::SteerMissed { steer }).await?;
        }
        self.link_end.send(AgentUpdate::TurnEnded { run: run.clone(), outcome }).await
    }
}

/// Applies a command to the running turn. Returns true if the turn has to be killed.
async fn apply_to_turn(
    link_end: &AgentEndpoint,
    inbox: &DriverInbox,
    current: &RunId,
    command: AgentCommand,
) -> Result<bool, LinkClosed> {
    match command {
        AgentCommand::Kill { run, .. } => return Ok(run == *current),
        AgentCommand::Cancel { run, .. } => inbox.cancel(&run),
        AgentCommand::Steer { number, run, text } => {
            if run != *current || !inbox.queue_steer(DriverSteer { number, text }) {
                link_end.send(AgentUpdate::SteerMissed { steer: number }).await?;
            }
        }
        AgentCommand::Answer { ask, answer, .. } => inbox.deliver_reply(&ask, answer),
        // A session has one turn at a time. If that is ever violated, the second prompt must not wait for ever.
        AgentCommand::Prompt { run, .. } => {
            let busy =
                RunError::new("agent_busy", "the agent was given a prompt in the middle of another turn");
            link_end.send(AgentUpdate::TurnEnded { run, outcome: TurnOutcome::failed(busy) }).await?;
        }
    }
    Ok(false)
}

/// Waits until the turn exceeds one of its limits while no daemon is attached to enforce them.
async fn wait_for_limit(
    meter: &TurnMeter,
    run: &RunId,
    endpoint_status: Option<watch::Receiver<WorkerEndpointStatus>>,
) -> TurnStopReason {
    let Some(mut endpoint_status) = endpoint_status else { return std::future::pending().await };
    let mut known = None;
    loop {
        let WorkerEndpointStatus { attached, limits, .. } = endpoint_status.borrow_and_update().clone();
        // The daemon may have sent newer limits than those that came with the prompt.
        if let Some((limited_run, remaining)) = limits.as_ref().filter(|_| limits != known)
            && limited_run == run
        {
            meter.set_remaining(remaining);
        }
        known = limits;
        tokio::select! {
            stop = meter.wait_until_exceeded(), if !attached => return stop,
            changed = endpoint_status.changed() => if changed.is_err() {
                return std::future::pending().await;
            },
        }
    }
}

/// Waits until a notice is sent; for ever if there is none.
async fn wait_for_notice(
    notice: &mut Option<BoxFuture<'static, Result<(), LinkClosed>>>,
) -> Result<(), LinkClosed> {
    match notice {
        Some(sending) => sending.await,
        None => std::future::pending().await,
    }
}

fn cancel_grace(limits: &TurnLimits) -> Duration {
    limits.grace_ms.map_or(Duration::from_secs(CANCEL_GRACE_S), Duration::from_millis)
}

/// Merges the counts of two overlapping sweeps. Both counted most of the same processes, so the larger value is taken.
fn merge_sweep_counts(first: ProcessCleanup, second: ProcessCleanup) -> ProcessCleanup {
    let killed = first.killed.max(second.killed);
    let larger = if first.survivors > second.survivors { first } else { second };
    ProcessCleanup { killed, ..larger }
}

#[cfg(test)]
mod tests;
