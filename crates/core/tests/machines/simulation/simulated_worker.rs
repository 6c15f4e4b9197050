//! The other end of the link: a worker whose agent may send output, ask, obey, ignore, end or linger, in any order
//! that a real one could. It applies each command once, spools its updates while it is disconnected, and stops its
//! agent or itself when told to.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use qd_core::session::{AgentAvailability, SessionEffect};
use qd_protocol::event::{AskKind, RunError};
use qd_protocol::link::{
    AgentExitReason, AgentUpdate, AskRequest, TurnOutcome, TurnStopReason, TurnUpdate, UpdateNumber,
};
use qd_protocol::policy::Risk;
use qd_protocol::{AskId, EventNumber, RunId, WorkerId};

use super::{ActionBudget, OWN_QUOTA_RESET, ask_id};

/// What an agent can do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum WorkerAction {
    /// The worktree is prepared, and the agent starts in it.
    Prepared,
    /// The worktree could not be prepared.
    PreparationFailed,
    Ready,
    Text,
    Ask,
    Delivered,
    TakeSteer,
    MissSteer,
    /// Ends its turn normally, even if it was told to stop.
    Done,
    /// Ends its turn normally, before it was told to stop, and leaves processes running.
    DoneLeaving,
    /// Was told to stop a turn that had ended, and has ended what that turn left running.
    Swept,
    /// Ends its turn because the quota of its account is exhausted.
    QuotaExhausted,
    /// Ends its turn because it was told to.
    Stopped,
    /// Ends its turn to wait for child sessions.
    Suspend,
    /// Output after the end of the turn.
    Late,
    /// The idle agent was told to stop, and has.
    Rested,
    /// The worker was told to end, and has.
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
enum SimulatedAgentState {
    #[default]
    None,
    /// The worktree for an agent is being prepared. There may be a worker that waits for its next agent.
    Preparing,
    /// An agent that is not ready yet.
    Starting,
    Ready,
    /// An idle agent that is being stopped.
    Tiring,
    /// A worker without an agent.
    Resting,
    /// The worker and its agent are being stopped.
    Ending,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct SimulatedWorker {
    agent_state: SimulatedAgentState,
    /// Its agents work in a worktree, which is prepared before each start.
    pub(super) uses_worktree: bool,
    /// Settings have changed since the agent was started: the next run gets another agent.
    outdated: bool,
    worker: Option<WorkerId>,
    /// Its updates reach no daemon: the connection is broken, or the daemon is dead.
    disconnected: bool,
    /// It has been connected before.
    attached: bool,
    /// Updates that could not be sent.
    spool: Vec<(UpdateNumber, AgentUpdate)>,
    turn: Option<SimulatedTurn>,
    /// The run of its last turn.
    last: Option<RunId>,
    /// The run whose turn has ended and left processes running, and whether it was told to stop since.
    left: Option<(RunId, bool)>,
    /// The last command that it applied.
    applied: EventNumber,
    update_count: u64,
    /// How many asks it has made.
    pub(crate) asked: u8,
    /// How many times each run was sent to an agent.
    pub(crate) prompt_counts: BTreeMap<RunId, u8>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct SimulatedTurn {
    run: RunId,
    told_to_stop: bool,
    steers: Vec<EventNumber>,
    /// The ask that it waits for, and whether the answer has arrived.
    pending_ask: Option<(AskId, bool)>,
}

impl Hash for SimulatedWorker {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Self {
            agent_state,
            uses_worktree,
            outdated,
            worker,
            disconnected,
            attached,
            spool,
            turn,
            last,
            left,
            applied,
            update_count,
            asked,
            prompt_counts,
        } = self;
        (agent_state, uses_worktree, outdated).hash(state);
        (worker, disconnected, attached, turn, last, left, applied, update_count, asked, prompt_counts)
            .hash(state);
        for (number, update) in spool {
            (number, format!("{update:?}")).hash(state);
        }
    }
}

impl SimulatedWorker {
    /// What a daemon knows about the agent.
    pub(crate) fn link(&self) -> AgentAvailability {
        match self.agent_state {
            _ if self.disconnected => AgentAvailability::Lost,
            SimulatedAgentState::None => AgentAvailability::Absent,
            SimulatedAgentState::Preparing
            | SimulatedAgentState::Starting
            | SimulatedAgentState::Tiring
            | SimulatedAgentState::Ending => AgentAvailability::Starting,
            SimulatedAgentState::Ready if self.outdated => AgentAvailability::Starting,
            SimulatedAgentState::Ready => AgentAvailability::Ready { steerable: true },
            SimulatedAgentState::Resting => AgentAvailability::IdleStopped,
        }
    }

    pub(crate) fn is_there(&self) -> bool {
        self.agent_state != SimulatedAgentState::None
    }

    /// Its process exists. It does not while the worktree of its first agent is being prepared.
    pub(crate) fn has_process(&self) -> bool {
        self.is_there() && (self.agent_state != SimulatedAgentState::Preparing || self.attached)
    }

    pub(crate) fn can_die(&self) -> bool {
        !self.disconnected
            && matches!(self.agent_state, SimulatedAgentState::Starting | SimulatedAgentState::Ready)
    }

    pub(crate) fn can_rest(&self) -> bool {
        !self.disconnected && self.agent_state == SimulatedAgentState::Ready && self.turn.is_none()
    }

    pub(crate) fn can_break(&self) -> bool {
        !self.disconnected && self.attached
    }

    pub(crate) fn is_disconnected(&self) -> bool {
        self.disconnected
    }

    pub(crate) fn is_in_turn(&self) -> bool {
        !self.disconnected && self.turn.is_some()
    }

    pub(crate) fn launch(&mut self, worker: WorkerId, new_worker: bool) {
        if new_worker {
            assert_eq!(
                self.agent_state,
                SimulatedAgentState::None,
                "a second worker beside {:?}",
                self.worker
            );
            let Self { last, update_count, asked, prompt_counts, uses_worktree, .. } = std::mem::take(self);
            let worker = Some(worker);
            *self = Self {
                agent_state: Self::first_state(uses_worktree),
                uses_worktree,
                worker,
                last,
                update_count,
                asked,
                prompt_counts,
                ..Self::default()
            };
        } else {
            assert_eq!(self.worker.as_ref(), Some(&worker), "an agent in a worker that is not there");
            assert_eq!(self.agent_state, SimulatedAgentState::Resting, "a second agent in one worker");
            self.agent_state = Self::first_state(self.uses_worktree);
            self.outdated = false;
        }
    }

    fn first_state(uses_worktree: bool) -> SimulatedAgentState {
        if uses_worktree { SimulatedAgentState::Preparing } else { SimulatedAgentState::Starting }
    }

    /// The agent counts towards the limit on live agents.
    pub(crate) fn is_live(&self) -> bool {
        !matches!(self.agent_state, SimulatedAgentState::None | SimulatedAgentState::Resting)
    }

    /// A start, stop or reconnect is under way.
    pub(crate) fn is_changing(&self) -> bool {
        let in_transition = matches!(
            self.agent_state,
            SimulatedAgentState::Preparing
                | SimulatedAgentState::Starting
                | SimulatedAgentState::Tiring
                | SimulatedAgentState::Ending
        );
        self.disconnected || in_transition
    }

    pub(crate) fn can_be_outdated(&self) -> bool {
        self.agent_state == SimulatedAgentState::Ready && !self.outdated
    }

    /// Settings have changed, and the agent was started with the old ones.
    pub(crate) fn mark_outdated(&mut self) {
        self.outdated = true;
    }

    /// Stops an outdated agent that is in no turn. The daemon does this after every commit.
    pub(crate) fn stop_if_outdated(&mut self) {
        if self.outdated && self.can_rest() {
            self.stop_idle_agent();
        }
    }

    /// The worker is told to end. While it is disconnected, the command is lost.
    pub(crate) fn end(&mut self) {
        assert!(self.disconnected || self.is_there(), "no worker to end");
        if !self.disconnected {
            self.agent_state = SimulatedAgentState::Ending;
        }
    }

    /// Preparing the worktree failed before the worker was started.
    pub(crate) fn forget_launch(&mut self) {
        self.agent_state = SimulatedAgentState::None;
        self.worker = None;
    }

    /// The idle agent is told to stop.
    pub(crate) fn stop_idle_agent(&mut self) {
        self.agent_state = SimulatedAgentState::Tiring;
    }

    /// The worker is gone, and no daemon knows yet. Its spool remains.
    pub(crate) fn vanish(&mut self) {
        self.agent_state = SimulatedAgentState::None;
        self.worker = None;
        self.attached = false;
        self.turn = None;
        self.outdated = false;
        // Whoever finds that it is gone ends its processes first.
        self.left = None;
        self.disconnected = true;
    }

    /// Whether processes are alive that this run's turn started and left.
    pub(crate) fn has_left(&self, run: &RunId) -> bool {
        self.left.as_ref().is_some_and(|(left, _)| left == run)
    }

    /// Whether it was told to stop a turn that had ended, and ends what that turn left running.
    pub(crate) fn is_ending_leftovers(&self) -> bool {
        !self.disconnected && matches!(self.left, Some((_, true)))
    }

    /// The run has ended, so what its turn left running is no longer looked at.
    pub(crate) fn forget_left(&mut self, run: &RunId) {
        self.left.take_if(|(left, _)| left == run);
    }

    /// Whether it is gone and its whole spool was delivered. From then on its loss is known.
    pub(crate) fn is_confirmed_gone(&mut self) -> bool {
        let is_confirmed_gone = self.agent_state == SimulatedAgentState::None && self.spool.is_empty();
        self.disconnected &= !is_confirmed_gone;
        is_confirmed_gone
    }

    /// The agent exits by itself, and its worker with it.
    pub(crate) fn die(&mut self, exit: AgentExitReason) -> Option<(UpdateNumber, AgentUpdate)> {
        self.vanish();
        self.disconnected = false;
        self.send_or_spool(AgentUpdate::Gone(exit))
    }

    pub(crate) fn disconnect(&mut self) {
        self.disconnected = true;
    }

    /// The daemon died; another one looks for this worker.
    pub(crate) fn daemon_died(&mut self, worker: Option<&WorkerId>) {
        // A preparation ends with its daemon.
        if self.agent_state == SimulatedAgentState::Preparing {
            if self.attached {
                self.agent_state = SimulatedAgentState::Resting;
            } else {
                self.forget_launch();
            }
        }
        if worker.is_none() {
            self.vanish();
            self.disconnected = false;
        } else {
            assert!(
                self.worker.is_none() || self.worker.as_ref() == worker,
                "the journal names another worker"
            );
            self.disconnected = true;
        }
    }

    /// The connection is established. Returns the last command that was applied.
    pub(crate) fn attach(&mut self) -> EventNumber {
        self.disconnected = false;
        self.attached = true;
        self.applied
    }

    /// Takes the next update from the spool.
    pub(crate) fn pop_spool(&mut self) -> Option<(UpdateNumber, AgentUpdate)> {
        (!self.spool.is_empty()).then(|| self.spool.remove(0))
    }

    pub(crate) fn is_new(&self) -> bool {
        !self.attached
    }

    /// Receives a command. It is lost while the connection is broken, and ignored if it was applied before.
    pub(crate) fn apply_command(&mut self, effect: SessionEffect) {
        let number = match &effect {
            SessionEffect::SendPrompt { number, .. }
            | SessionEffect::SendSteer { number, .. }
            | SessionEffect::CancelTurn { number, .. }
            | SessionEffect::KillTurn { number, .. }
            | SessionEffect::SendAnswer { number, .. } => *number,
            _ => return,
        };
        if self.disconnected || number <= self.applied {
            return;
        }
        assert!(self.is_there(), "{effect:?} without a worker");
        self.applied = number;
        match effect {
            SessionEffect::SendPrompt { run, .. } => {
                assert_eq!(
                    self.agent_state,
                    SimulatedAgentState::Ready,
                    "{run} was sent to an agent that is not ready"
                );
                assert!(self.turn.is_none(), "{run} was sent to an agent that is busy with {:?}", self.turn);
                *self.prompt_counts.entry(run.clone()).or_default() += 1;
                self.turn =
                    Some(SimulatedTurn { run, told_to_stop: false, steers: Vec::new(), pending_ask: None });
            }
            SessionEffect::SendSteer { run, .. } => {
                if let Some(turn) = self.turn.as_mut().filter(|turn| turn.run == run) {
                    turn.steers.push(number);
                }
            }
            SessionEffect::CancelTurn { run, .. } | SessionEffect::KillTurn { run, .. } => {
                if let Some(turn) = self.turn.as_mut().filter(|turn| turn.run == run) {
                    turn.told_to_stop = true;
                }
                if let Some((_, told_to_stop)) = self.left.as_mut().filter(|(left, _)| *left == run) {
                    *told_to_stop = true;
                }
            }
            SessionEffect::SendAnswer { ask, .. } => {
                if let Some((pending_ask, answered)) =
                    self.turn.as_mut().and_then(|turn| turn.pending_ask.as_mut())
                    && *pending_ask == ask
                {
                    assert!(!*answered, "{ask} was answered twice");
                    *answered = true;
                }
            }
            _ => {}
        }
    }

    /// What it could do now. While it is disconnected, it may still come to the end of its turn.
    pub(crate) fn possible_actions(&self, budget: &ActionBudget) -> Vec<WorkerAction> {
        let mut actions = Vec::new();
        match (self.agent_state, &self.turn) {
            (SimulatedAgentState::Ready, Some(turn)) if self.disconnected => {
                if !matches!(turn.pending_ask, Some((_, false))) {
                    actions.push(WorkerAction::Done);
                    if budget.leaves > 0 && !turn.told_to_stop {
                        actions.push(WorkerAction::DoneLeaving);
                    }
                    if budget.quotas > 0 {
                        actions.push(WorkerAction::QuotaExhausted);
                    }
                }
            }
            _ if self.disconnected => {}
            (SimulatedAgentState::Preparing, _) => {
                actions.push(WorkerAction::Prepared);
                if budget.failed_preparations > 0 && !self.attached {
                    actions.push(WorkerAction::PreparationFailed);
                }
            }
            (SimulatedAgentState::Starting, _) => actions.push(WorkerAction::Ready),
            (SimulatedAgentState::Tiring, _) => actions.push(WorkerAction::Rested),
            (SimulatedAgentState::Ending, _) => actions.push(WorkerAction::Ended),
            (SimulatedAgentState::Ready, Some(turn)) => {
                let is_waiting = matches!(turn.pending_ask, Some((_, false)));
                if budget.says > 0 {
                    actions.push(WorkerAction::Text);
                }
                if budget.asks > 0 && turn.pending_ask.is_none() {
                    actions.push(WorkerAction::Ask);
                }
                if matches!(turn.pending_ask, Some((_, true))) {
                    actions.push(WorkerAction::Delivered);
                }
                if !turn.steers.is_empty() && !is_waiting {
                    actions.extend([WorkerAction::TakeSteer, WorkerAction::MissSteer]);
                }
                if budget.suspends > 0 && !is_waiting {
                    actions.push(WorkerAction::Suspend);
                }
                if !is_waiting {
                    if budget.leaves > 0 && !turn.told_to_stop {
                        actions.push(WorkerAction::DoneLeaving);
                    }
                    if budget.quotas > 0 {
                        actions.push(WorkerAction::QuotaExhausted);
                    }
                    actions.push(WorkerAction::Done);
                }
                if turn.told_to_stop {
                    actions.push(WorkerAction::Stopped);
                }
            }
            (SimulatedAgentState::Ready | SimulatedAgentState::Resting | SimulatedAgentState::None, _) => {}
        }
        if matches!(self.left, Some((_, true))) {
            actions.push(WorkerAction::Swept);
        }
        if budget.late > 0
            && self.last.is_some()
            && self.agent_state == SimulatedAgentState::Ready
            && !self.disconnected
        {
            actions.push(WorkerAction::Late);
        }
        actions
    }

    /// Performs an action. Returns the update, unless it was spooled.
    pub(crate) fn perform(
        &mut self,
        action: WorkerAction,
        budget: &mut ActionBudget,
    ) -> Option<(UpdateNumber, AgentUpdate)> {
        let turn = self.turn.as_mut();
        let update = match (action, turn) {
            (WorkerAction::Prepared, _) => {
                self.agent_state = SimulatedAgentState::Starting;
                return None;
            }
            (WorkerAction::Ready, _) => {
                self.agent_state = SimulatedAgentState::Ready;
                self.outdated = false;
                AgentUpdate::Ready { agent_session_id: None, steers: true }
            }
            (WorkerAction::Rested, _) => {
                self.agent_state = SimulatedAgentState::Resting;
                AgentUpdate::IdleStopped
            }
            (WorkerAction::Ended, _) => {
                return self.die(AgentExitReason::Stopped);
            }
            (WorkerAction::Late, _) => {
                budget.late -= 1;
                let run = self.last.clone().expect("only offered with one");
                AgentUpdate::Turn { run, update: TurnUpdate::Text { text: "late".to_owned() } }
            }
            (WorkerAction::Text, Some(turn)) => {
                budget.says -= 1;
                AgentUpdate::Turn { run: turn.run.clone(), update: TurnUpdate::Text { text: "x".to_owned() } }
            }
            (WorkerAction::Ask, Some(turn)) => {
                budget.asks -= 1;
                self.asked += 1;
                let id = ask_id(self.asked);
                turn.pending_ask = Some((id.clone(), false));
                let ask = AskRequest {
                    id,
                    kind: AskKind::Permission,
                    tool: Some("Demo".to_owned()),
                    input: serde_json::Value::Null,
                    risk: Some(Risk::Medium),
                    prompt: "may I?".to_owned(),
                    options: Vec::new(),
                    implicit: false,
                };
                AgentUpdate::Ask { run: turn.run.clone(), ask }
            }
            (WorkerAction::Delivered, Some(turn)) => {
                let (ask, _) = turn.pending_ask.take().expect("only offered with one");
                AgentUpdate::AskDelivered { ask }
            }
            (WorkerAction::TakeSteer, Some(turn)) => AgentUpdate::SteerTaken { steer: turn.steers.remove(0) },
            (WorkerAction::MissSteer, Some(turn)) => {
                AgentUpdate::SteerMissed { steer: turn.steers.remove(0) }
            }
            (WorkerAction::Done | WorkerAction::Stopped | WorkerAction::Suspend, Some(turn)) => {
                let run = turn.run.clone();
                self.turn = None;
                self.last = Some(run.clone());
                let stop = match action {
                    WorkerAction::Done => TurnStopReason::EndTurn,
                    WorkerAction::Stopped => TurnStopReason::Cancelled,
                    _ => {
                        budget.suspends -= 1;
                        TurnStopReason::Suspended
                    }
                };
                AgentUpdate::TurnEnded { run, outcome: TurnOutcome::of(stop) }
            }
            (WorkerAction::QuotaExhausted, Some(turn)) => {
                budget.quotas -= 1;
                let run = turn.run.clone();
                self.turn = None;
                self.last = Some(run.clone());
                let error = RunError::quota_exhausted("no more today", Some(OWN_QUOTA_RESET));
                AgentUpdate::TurnEnded { run, outcome: TurnOutcome::failed(error) }
            }
            (WorkerAction::DoneLeaving, Some(turn)) => {
                budget.leaves -= 1;
                let run = turn.run.clone();
                self.turn = None;
                self.last = Some(run.clone());
                self.left = Some((run.clone(), false));
                let outcome =
                    TurnOutcome { leaves_processes: true, ..TurnOutcome::of(TurnStopReason::EndTurn) };
                AgentUpdate::TurnEnded { run, outcome }
            }
            (WorkerAction::Swept, _) => {
                let (run, _) = self.left.take().expect("only offered with one");
                AgentUpdate::TurnEnded { run, outcome: TurnOutcome::of(TurnStopReason::EndTurn) }
            }
            (WorkerAction::PreparationFailed, _) => unreachable!("the session performs it"),
            (_, None) => unreachable!("only offered in a turn"),
        };
        self.send_or_spool(update)
    }

    fn send_or_spool(&mut self, update: AgentUpdate) -> Option<(UpdateNumber, AgentUpdate)> {
        self.update_count += 1;
        let update = (UpdateNumber(self.update_count), update);
        if self.disconnected {
            self.spool.push(update);
            return None;
        }
        Some(update)
    }

    pub(crate) fn each_number(&self, visit: &mut dyn FnMut(EventNumber)) {
        visit(self.applied);
        for steer in self.turn.iter().flat_map(|turn| &turn.steers) {
            visit(*steer);
        }
    }

    /// A copy with numbers replaced by their rank, and without anything that it will never use again.
    pub(crate) fn canonical(&self, rank: impl Fn(EventNumber) -> EventNumber, budget: &ActionBudget) -> Self {
        let mut canonical = self.clone();
        if budget.late == 0 {
            canonical.last = None;
        }
        for steer in canonical.turn.iter_mut().flat_map(|turn| &mut turn.steers) {
            *steer = rank(*steer);
        }
        canonical.applied = rank(canonical.applied);
        canonical.worker = None;
        canonical.update_count = 0;
        for (number, _) in &mut canonical.spool {
            *number = UpdateNumber(0);
        }
        canonical
    }
}
