//! A simulation around the session machine: clients with a few actions, a worker that behaves in any way a real one
//! could, child sessions, and an observer that checks every event against the contract. The walk tries every order,
//! the properties random ones.

mod action;
mod canonical;
mod children;
mod observer;
pub(crate) mod seeded;
mod simulated_worker;

use std::collections::VecDeque;
use std::sync::Arc;

use qd_core::session::{
    AgentAvailability, ExpectedWakeup, PromptSubmission, SessionCommand, SessionContext, SessionEffect,
    SessionEvent, SessionInput, SessionPhase, SessionState, SessionStep, SettingsUpdate, deadline, evolve,
    expected_wakeup, may_start_worker, step,
};
use qd_protocol::event::{
    AskAnswer, EventActor, EventBody, FinishReason, FleetMembership, PermissionDecision, RunError,
    RunStopCause, SessionCreated, SessionLimits,
};
use qd_protocol::link::{AgentExitReason, AgentUpdate, UpdateNumber};
use qd_protocol::policy::{Policy, PolicyVerdict};
use qd_protocol::sandbox_spec::SandboxReport;
use qd_protocol::{AskId, ClockReading, MachineUptime, Millis, RunId, SessionId, WorkspaceId};

pub(crate) use action::{ActionBudget, SimulatedAction};
use children::SimulatedChildren;
use observer::ContractObserver;
use simulated_worker::{SimulatedWorker, WorkerAction};

/// When the quota resets, as the session's own agent says. It is ahead whatever happens to the clocks.
const OWN_QUOTA_RESET: Millis = Millis(FIRST_WALL_CLOCK.0 + 86_400_000);
/// The same, as an agent of another session says.
const OTHER_QUOTA_RESET: Millis = Millis(OWN_QUOTA_RESET.0 + 1000);
/// What the wall clock shows when the simulation begins.
const FIRST_WALL_CLOCK: Millis = Millis(1_794_774_645_123);
/// No limit in the simulation is longer.
const LONGEST_LIMIT_MS: u64 = 3_600_000;

/// The input for a command that this user sends.
fn command_input(command: SessionCommand) -> SessionInput {
    let actor = Arc::new(EventActor::User { uid: 1000, pid: Some(1), command: Some("qd".to_owned()) });
    SessionInput::Command { actor, command }
}

/// The whole simulation. Two that are equal have the same future.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SimulatedSession {
    pub(crate) state: SessionState,
    worker: SimulatedWorker,
    children: SimulatedChildren,
    observer: ContractObserver,
    pub(crate) budget: ActionBudget,
    /// The restart limit that the session was created with.
    restarts: Option<u32>,
    now: ClockReading,
    halted: bool,
    /// When the quota of the account resets, if it is exhausted.
    quota_until: Option<Millis>,
    slot_free: bool,
    /// It stands in the line for a free slot.
    in_line: bool,
    /// The daemon dies after its next commit.
    dying: bool,
    /// The next input is judged together with the one after it.
    batching: bool,
    /// An input was judged whose batch is not complete, and these are its effects.
    open_batch: Option<Vec<SessionEffect>>,
    prompts: u8,
    /// Runs whose end the fleet is to be notified of.
    pub(crate) notified: Vec<RunId>,
    /// All events, if a test needs them; the walk leaves it empty.
    pub(crate) journal: Vec<SessionEvent>,
    pub(crate) keeps_journal: bool,
}

fn run_id(number: u8) -> RunId {
    RunId::parse(&format!("r{number}")).unwrap()
}

fn ask_id(number: u8) -> AskId {
    AskId::parse(&format!("a{number}")).unwrap()
}

fn session(restarts: Option<u32>, fleet: Option<FleetMembership>) -> SessionState {
    let id = SessionId::parse("s").unwrap();
    // The restart window is tested elsewhere; here crashes never expire.
    let limits = SessionLimits { restarts, restart_window_s: Some(1e9), ..SessionLimits::default() };
    let created = SessionCreated { agent: "script".to_owned(), limits, fleet, ..SessionCreated::default() };
    SessionState::new(id, WorkspaceId::parse("w").unwrap(), created, first_reading())
}

/// What the clocks show when the simulation begins.
fn first_reading() -> ClockReading {
    let uptime = MachineUptime { boot: 1, awake_ms: 5_000_000, total_ms: 6_000_000 };
    ClockReading { wall: FIRST_WALL_CLOCK, uptime: Some(uptime) }
}

fn prompt(run: RunId) -> PromptSubmission {
    PromptSubmission {
        prompt: run.as_str().into(),
        fingerprint: run.to_string(),
        run,
        attachments: Vec::new(),
    }
}

impl SimulatedSession {
    /// A session whose agent may crash as often as the budget allows.
    pub(crate) fn new(budget: ActionBudget) -> Self {
        Self::with_restarts(budget, None)
    }

    /// A session whose agent is restarted this often after a crash.
    pub(crate) fn with_restarts(budget: ActionBudget, restarts: Option<u32>) -> Self {
        Self::of(budget, restarts, None)
    }

    /// A session whose agents work in a worktree, which is prepared before each start.
    pub(crate) fn in_worktree(budget: ActionBudget) -> Self {
        let mut session = Self::new(budget);
        session.set_worktree(true);
        session
    }

    pub(crate) fn set_worktree(&mut self, uses_worktree: bool) {
        self.worker.uses_worktree = uses_worktree;
    }

    /// A session of a fleet. It keeps its journal, which the fleet queries.
    pub(crate) fn in_fleet(budget: ActionBudget, fleet: FleetMembership) -> Self {
        Self { keeps_journal: true, ..Self::of(budget, None, Some(fleet)) }
    }

    fn of(budget: ActionBudget, restarts: Option<u32>, fleet: Option<FleetMembership>) -> Self {
        Self {
            state: session(restarts, fleet),
            worker: SimulatedWorker::default(),
            children: SimulatedChildren::default(),
            observer: ContractObserver::default(),
            budget,
            restarts,
            now: first_reading(),
            halted: false,
            quota_until: None,
            slot_free: true,
            in_line: false,
            dying: false,
            batching: false,
            open_batch: None,
            prompts: 0,
            notified: Vec::new(),
            journal: Vec::new(),
            keeps_journal: false,
        }
    }

    /// The possible next actions. The last one is what happens when the clients are done.
    pub(crate) fn actions(&self) -> Vec<SimulatedAction> {
        let Self { budget, worker, .. } = self;
        let mut actions = Vec::new();
        let mut offer = |yes: bool, action: SimulatedAction| {
            if yes {
                actions.push(action);
            }
        };
        offer(budget.prompts > 0, SimulatedAction::Prompt);
        offer(budget.cancels > 0, SimulatedAction::Cancel);
        offer(budget.single_cancels > 0 && self.prompts > 0, SimulatedAction::CancelNewest);
        offer(budget.single_cancels > 0 && self.active_is_older(), SimulatedAction::CancelActive);
        offer(budget.steers > 0, SimulatedAction::Steer);
        offer(budget.answers > 0 && worker.asked > 0, SimulatedAction::Allow);
        offer(budget.answers > 0 && worker.asked > 0, SimulatedAction::Deny);
        offer(budget.removes > 0 && self.prompts > 0, SimulatedAction::Remove);
        offer(budget.clears > 0, SimulatedAction::Clear);
        offer(budget.moves > 0 && self.prompts > 0, SimulatedAction::MoveNewestToFront);
        offer(budget.moves > 0 && self.prompts > 0, SimulatedAction::MoveFirstToEnd);
        offer(budget.halts > 0 && !self.halted, SimulatedAction::Halt);
        offer(self.halted, SimulatedAction::Unhalt);
        offer(
            budget.quotas > 0 && self.quota_until != Some(OTHER_QUOTA_RESET),
            SimulatedAction::QuotaReachedElsewhere,
        );
        offer(self.quota_until.is_some(), SimulatedAction::ReleaseQuota);
        offer(budget.fills > 0 && self.slot_free, SimulatedAction::Fill);
        offer(!self.slot_free, SimulatedAction::Free);
        offer(budget.policies > 0, SimulatedAction::Policy);
        offer(budget.forgives > 0, SimulatedAction::Forgive);
        offer(budget.closes > 0, SimulatedAction::Close);
        offer(budget.spawns > 0 && worker.is_in_turn(), SimulatedAction::Spawn);
        offer(budget.deaths > 0 && worker.can_die(), SimulatedAction::Die);
        offer(budget.vanishes > 0 && worker.has_process(), SimulatedAction::Vanish);
        offer(budget.rests > 0 && worker.can_rest(), SimulatedAction::Rest);
        offer(budget.outdates > 0 && worker.can_be_outdated(), SimulatedAction::Outdate);
        offer(budget.batches > 0 && !self.batching && !self.dying, SimulatedAction::Batch);
        offer(budget.breaks > 0 && worker.can_break(), SimulatedAction::Break);
        offer(budget.crashes > 0 && !self.dying, SimulatedAction::Crash);
        for child in self.children.busy() {
            offer(true, SimulatedAction::ChildEnds(child));
        }
        offer(self.children.closing, SimulatedAction::BelowClosed);
        offer(worker.is_disconnected(), SimulatedAction::Mend);
        offer(budget.reboots > 0, SimulatedAction::Reboot);
        offer(budget.clock_changes > 0, SimulatedAction::SetClockBack);
        offer(budget.clock_changes > 0, SimulatedAction::SetClockForward);
        offer(self.deadline().is_some(), SimulatedAction::Tick);
        for worker_action in worker.possible_actions(budget) {
            offer(true, SimulatedAction::Agent(worker_action));
        }
        if self.open_batch.is_some() {
            actions.retain(|action| action.is_command());
            actions.push(SimulatedAction::EndBatch);
        }
        actions
    }

    fn active_is_older(&self) -> bool {
        self.state.active_run().is_some_and(|(run, _)| run.id != run_id(self.prompts))
    }

    fn context(&self) -> SessionContext {
        let Self { now, halted, quota_until, slot_free, .. } = *self;
        let mut undone = self.open_batch.iter().flatten();
        let launches = undone.any(|effect| matches!(effect, SessionEffect::LaunchAgent { .. }));
        // Like the actor: an agent whose launch is decided counts as starting.
        let agent = if launches { AgentAvailability::Starting } else { self.worker.link() };
        SessionContext {
            now,
            halted,
            quota_until,
            over_budget: false,
            slot_available: slot_free,
            agent,
            sandbox: None,
        }
    }

    /// Takes one action, checks all invariants, and carries out the effects.
    pub(crate) fn act(&mut self, action: SimulatedAction) {
        match action {
            SimulatedAction::Halt => {
                self.budget.halts -= 1;
                self.halted = true;
            }
            SimulatedAction::Unhalt => {
                self.halted = false;
                self.input(SessionInput::Wake);
            }
            SimulatedAction::QuotaReachedElsewhere => {
                self.budget.quotas -= 1;
                self.quota_until = Some(OTHER_QUOTA_RESET);
                self.input(SessionInput::Wake);
            }
            SimulatedAction::ReleaseQuota => {
                self.quota_until = None;
                self.input(SessionInput::Wake);
            }
            SimulatedAction::Fill => {
                self.budget.fills -= 1;
                self.slot_free = false;
            }
            SimulatedAction::Free => {
                self.slot_free = true;
                // Only those who stand in line are woken.
                if self.in_line {
                    self.input(SessionInput::Wake);
                }
            }
            SimulatedAction::Outdate => {
                self.budget.outdates -= 1;
                self.worker.mark_outdated();
                let model = Some("other".to_owned());
                let update = SettingsUpdate { model, ..SettingsUpdate::default() };
                self.input(command_input(SessionCommand::UpdateSettings(update)));
            }
            SimulatedAction::Batch => {
                self.budget.batches -= 1;
                self.batching = true;
            }
            SimulatedAction::EndBatch => {
                let mut inbox = VecDeque::new();
                self.carry_out_all(&mut inbox);
                inbox.into_iter().for_each(|input| self.input(input));
            }
            SimulatedAction::Crash => {
                self.budget.crashes -= 1;
                self.dying = true;
            }
            SimulatedAction::Reboot => {
                self.budget.reboots -= 1;
                self.worker.vanish();
                self.reboot_clocks();
                self.restart();
            }
            SimulatedAction::SetClockBack | SimulatedAction::SetClockForward => {
                self.budget.clock_changes -= 1;
                let wall = self.now.wall.0;
                self.set_clock(match action {
                    SimulatedAction::SetClockBack => Millis(wall - 3 * 3_600_000),
                    _ => Millis(wall + 2 * 3_600_000),
                });
            }
            SimulatedAction::Rest => {
                self.budget.rests -= 1;
                self.worker.stop_idle_agent();
            }
            SimulatedAction::Break => {
                self.budget.breaks -= 1;
                self.worker.disconnect();
            }
            SimulatedAction::Vanish => {
                self.budget.vanishes -= 1;
                let noticed = !self.worker.is_disconnected();
                self.worker.vanish();
                if noticed {
                    self.discover_loss();
                }
            }
            SimulatedAction::Mend if self.worker.has_process() => self.attach(true),
            SimulatedAction::Mend => self.discover_loss(),
            SimulatedAction::Die => {
                self.budget.deaths -= 1;
                let error = RunError::new("agent_exited", "it died");
                if let Some(update) = self.worker.die(AgentExitReason::Failed(error)) {
                    self.receive(update);
                }
            }
            SimulatedAction::Tick => {
                self.now = self.now.plus(self.deadline().expect("only offered with one"));
                let before = self.state.number;
                self.input(SessionInput::Tick);
                assert!(self.state.number > before, "a deadline that passes has an effect");
            }
            SimulatedAction::Agent(WorkerAction::PreparationFailed) => {
                self.budget.failed_preparations -= 1;
                self.worker.forget_launch();
                let error = RunError::new("worktree_failed", "no worktree");
                self.input(SessionInput::WorkerGone(AgentExitReason::Failed(error)));
            }
            SimulatedAction::Agent(worker_action) => {
                if worker_action == WorkerAction::Ready && self.worker.is_new() {
                    self.attach(false);
                }
                if self.worker.possible_actions(&self.budget).contains(&worker_action)
                    && let Some(update) = self.worker.perform(worker_action, &mut self.budget)
                {
                    self.receive(update);
                }
            }
            SimulatedAction::ChildEnds(child) => {
                let result = self.children.end(child);
                match self.dying {
                    // The child's end is journalled, but the daemon dies before it notifies the parent.
                    true => self.restart(),
                    false => {
                        self.input(command_input(SessionCommand::ChildEnded(result.clone())));
                        self.assert_no_effect(command_input(SessionCommand::ChildEnded(result)));
                    }
                }
            }
            SimulatedAction::BelowClosed => {
                self.children.closing = false;
                self.input(command_input(SessionCommand::ChildrenClosed));
            }
            _ => {
                let command = self.command(action);
                self.input(command_input(command));
            }
        }
        // While a batch is open, effects that its inputs need have not been carried out.
        if self.open_batch.is_none() {
            self.check_liveness();
        }
    }

    /// Something will make a session with unfinished runs go on, and it really exists.
    fn check_liveness(&self) {
        if !self.state.is_busy() {
            return;
        }
        for child in self.state.suspension().into_iter().flat_map(|suspended| &suspended.waits_for) {
            assert!(self.children.is_busy(child), "a run waits for {child}, which has ended");
        }
        let Self { state, worker, .. } = self;
        let exists = match expected_wakeup(state, &self.context(), self.in_line) {
            None => false,
            Some(ExpectedWakeup::Slot) => self.in_line && !self.slot_free && !worker.is_live(),
            Some(ExpectedWakeup::HaltLifted) => self.halted,
            Some(ExpectedWakeup::QuotaReleased) => self.quota_until.is_some(),
            Some(ExpectedWakeup::AgentChange) => worker.is_changing(),
            Some(ExpectedWakeup::TurnEnd) => worker.is_in_turn() || worker.is_ending_leftovers(),
            Some(ExpectedWakeup::Answer) => state.pending_asks().next().is_some() && worker.is_in_turn(),
            Some(ExpectedWakeup::ChildrenEnd) => !self.children.busy().is_empty(),
            Some(ExpectedWakeup::StopDeadline) => self.deadline().is_some(),
        };
        assert!(exists, "nothing will make this session go on: {state:?} with {worker:?}");
    }

    /// The milliseconds until the next deadline.
    pub(crate) fn deadline(&self) -> Option<u64> {
        deadline(&self.state, self.worker.link(), self.now)
    }

    /// Nothing happens for some time.
    pub(crate) fn pass_time(&mut self, ms: u64) {
        self.now = self.now.plus(ms);
    }

    /// Somebody sets the wall clock, which changes no deadline.
    pub(crate) fn set_clock(&mut self, wall: Millis) {
        let before = self.deadline();
        self.now.wall = wall;
        assert_eq!(self.deadline(), before, "a deadline moved with the wall clock");
    }

    /// The clocks after a reboot that took a minute. No deadline may become later than a full limit from now.
    fn reboot_clocks(&mut self) {
        let boot = self.now.uptime.map_or(0, |uptime| uptime.boot) + 1;
        let wall = self.now.wall.plus(60_000);
        self.now =
            ClockReading { wall, uptime: Some(MachineUptime { boot, awake_ms: 9000, total_ms: 9000 }) };
        assert!(self.deadline().is_none_or(|remaining| remaining <= LONGEST_LIMIT_MS), "a limit grew");
    }

    /// Sends a prompt under this run id. Returns false if the session refuses it.
    pub(crate) fn accept(&mut self, run: RunId) -> bool {
        self.input(command_input(SessionCommand::AcceptPrompt(prompt(run.clone()))));
        self.has(&run)
    }

    pub(crate) fn cancel_run(&mut self, run: RunId) {
        self.input(command_input(SessionCommand::Cancel {
            run: Some(run),
            by: RunStopCause::Fleet,
            reason: None,
        }));
    }

    /// Whether the session ever accepted this run.
    pub(crate) fn has(&self, run: &RunId) -> bool {
        self.events_of(run).any(|body| matches!(body, EventBody::RunAccepted(_)))
    }

    /// How the run ended, if it has.
    pub(crate) fn ended(&self, run: &RunId) -> Option<FinishReason> {
        self.events_of(run).find_map(|body| match body {
            EventBody::RunFinished(finished) => Some(finished.finish_reason),
            _ => None,
        })
    }

    fn events_of(&self, run: &RunId) -> impl Iterator<Item = &EventBody> {
        self.journal.iter().filter(|event| event.run.as_ref() == Some(run)).map(|event| &event.body)
    }

    /// How many times the daemon has died.
    pub(crate) fn restarts(&self) -> usize {
        usize::from(self.observer.restarts)
    }

    /// The command that a client sends for an action.
    fn command(&mut self, action: SimulatedAction) -> SessionCommand {
        let cancel = |run| SessionCommand::Cancel { run, by: RunStopCause::User, reason: None };
        match action {
            SimulatedAction::Prompt => {
                self.budget.prompts -= 1;
                self.prompts += 1;
                SessionCommand::AcceptPrompt(prompt(run_id(self.prompts)))
            }
            SimulatedAction::Cancel => {
                self.budget.cancels -= 1;
                cancel(None)
            }
            SimulatedAction::CancelNewest => {
                self.budget.single_cancels -= 1;
                cancel(Some(run_id(self.prompts)))
            }
            SimulatedAction::CancelActive => {
                self.budget.single_cancels -= 1;
                cancel(self.state.active_run().map(|(run, _)| run.id.clone()))
            }
            SimulatedAction::Steer => {
                self.budget.steers -= 1;
                SessionCommand::Steer { text: "left".into() }
            }
            SimulatedAction::Allow | SimulatedAction::Deny => {
                self.budget.answers -= 1;
                let decision = if action == SimulatedAction::Allow {
                    PermissionDecision::AllowOnce
                } else {
                    PermissionDecision::Deny
                };
                let answer = AskAnswer { decision: Some(decision), ..AskAnswer::default() };
                SessionCommand::Answer { ask: ask_id(self.worker.asked), answer, shown_sha256: None }
            }
            SimulatedAction::Remove => {
                self.budget.removes -= 1;
                SessionCommand::RemoveQueued { run: run_id(self.prompts) }
            }
            SimulatedAction::Clear => {
                self.budget.clears -= 1;
                SessionCommand::ClearQueue
            }
            SimulatedAction::MoveNewestToFront => {
                self.budget.moves -= 1;
                let before = Some(self.first_queued());
                SessionCommand::MoveQueued { run: run_id(self.prompts), before }
            }
            SimulatedAction::MoveFirstToEnd => {
                self.budget.moves -= 1;
                SessionCommand::MoveQueued { run: self.first_queued(), before: None }
            }
            SimulatedAction::Policy => {
                self.budget.policies -= 1;
                let policy = Some(Policy::Always(PolicyVerdict::Allow));
                SessionCommand::UpdateSettings(SettingsUpdate { policy, ..SettingsUpdate::default() })
            }
            SimulatedAction::Forgive => {
                self.budget.forgives -= 1;
                let limits = &self.state.settings.limits;
                let restarts = limits.restarts.map(|restarts| restarts + 1);
                let limits = Some(SessionLimits { restarts, ..limits.clone() });
                SessionCommand::UpdateSettings(SettingsUpdate { limits, ..SettingsUpdate::default() })
            }
            SimulatedAction::Close => {
                self.budget.closes -= 1;
                SessionCommand::Close { purge: false }
            }
            SimulatedAction::Spawn => {
                self.budget.spawns -= 1;
                SessionCommand::AddChild { child: self.children.spawn() }
            }
            _ => unreachable!("{action:?} is not a client's action"),
        }
    }

    /// The first queued run. If none is queued, a run that cannot be moved: the first one, or one that has ended.
    fn first_queued(&self) -> RunId {
        let queued = self.state.queued_runs(self.context().holds_runs()).map(|(_, run)| run).next();
        queued.or(self.state.runs.front()).map_or(run_id(self.prompts), |run| run.id.clone())
    }

    /// The worker connects: it gets the commands that it missed, and its spool is delivered.
    fn attach(&mut self, reattached: bool) {
        let applied = self.worker.attach();
        self.input(SessionInput::WorkerAttached { applied, reattached, run_time_ms: None });
        self.deliver_spool();
    }

    /// The worker is found to be gone. Its spool is delivered first.
    fn discover_loss(&mut self) {
        self.deliver_spool();
        if self.worker.is_confirmed_gone() {
            self.input(SessionInput::WorkerGone(AgentExitReason::Lost));
        }
    }

    fn deliver_spool(&mut self) {
        // A daemon that dies in between leaves the rest to the next one.
        let starts = self.observer.restarts;
        while self.observer.restarts == starts
            && let Some(update) = self.worker.pop_spool()
        {
            self.receive(update);
        }
    }

    /// Delivers an update twice: the second time it must have no effect.
    fn receive(&mut self, (number, update): (UpdateNumber, AgentUpdate)) {
        self.input(SessionInput::Update(number, update.clone()));
        if number <= self.state.last_update_number {
            self.assert_no_effect(SessionInput::Update(number, update));
        }
        if self.state.worker.is_none() {
            self.assert_no_effect(SessionInput::WorkerGone(AgentExitReason::Lost));
        }
    }

    fn assert_no_effect(&self, input: SessionInput) {
        let mut state = self.state.clone();
        let repeated = step(&mut state, input.clone(), &self.context());
        let SessionStep { events, effects, .. } = repeated;
        assert!(events.is_empty() && effects.is_empty(), "{input:?} made {events:?} and {effects:?}");
        assert_eq!(self.state, state);
    }

    /// Handles an input and everything that follows from it, in order.
    fn input(&mut self, input: SessionInput) {
        let mut inbox = VecDeque::from([input]);
        while let Some(input) = inbox.pop_front() {
            let effects = self.commit_step(input);
            match effects {
                Some(effects) => {
                    let stops = effects.iter().any(|effect| matches!(effect, SessionEffect::StopAgent));
                    assert!(!stops || self.state.worker.is_some(), "no worker to end");
                    self.open_batch.get_or_insert_default().extend(effects);
                    if !std::mem::take(&mut self.batching) {
                        self.carry_out_all(&mut inbox);
                    }
                }
                None => inbox = VecDeque::from([self.start_next_daemon()]),
            }
        }
    }

    /// What the actor does after a commit.
    fn carry_out_all(&mut self, inbox: &mut VecDeque<SessionInput>) {
        for effect in self.open_batch.take().unwrap_or_default() {
            self.carry_out(effect, inbox);
        }
        if self.state.current_turn().is_none() {
            self.worker.stop_if_outdated();
        }
        self.in_line = self.state.waits_for_slot() && !self.context().holds_runs();
    }

    /// One step, committed. Returns its effects, unless the daemon died after the commit.
    fn commit_step(&mut self, input: SessionInput) -> Option<Vec<SessionEffect>> {
        let before = self.state.clone();
        let mut context = self.context();
        context.sandbox = may_start_worker(&before, &input, &context).then(SandboxReport::default);
        let result = step(&mut self.state, input.clone(), &context);
        self.crash_and_rebuild(before.clone(), &result.events);
        self.observer.observe(&before, &input, &result, &self.state, &context);
        for event in &result.events {
            if let EventBody::QuotaReached(reached) = &event.body {
                self.quota_until = self.quota_until.max(Some(reached.until));
            }
            if let EventBody::RunResumed(resumed) = &event.body {
                let busy = resumed.children.iter().any(|child| self.children.is_busy(&child.session_id));
                assert!(!busy, "resumed while a session that it waits for is busy");
            }
            if let (EventBody::RunFinished(finished), Some(run)) = (&event.body, &event.run) {
                assert!(
                    finished.finish_reason != FinishReason::Cancelled
                        || finished.processes.survivors > 0
                        || !self.worker.has_left(run),
                    "{run} was cancelled and says that no process of it survives, but one does"
                );
                self.worker.forget_left(run);
            }
        }
        let commits = !result.events.is_empty();
        if self.keeps_journal {
            self.journal.extend(result.events);
        }
        (!self.dying || !commits).then_some(result.effects)
    }

    /// The daemon dies and another one is started.
    pub(crate) fn restart(&mut self) {
        let wake = self.start_next_daemon();
        self.input(wake);
    }

    fn start_next_daemon(&mut self) -> SessionInput {
        self.dying = false;
        self.open_batch = None;
        self.observer.restarts += 1;
        self.children.closing = false;
        self.worker.daemon_died(self.state.worker.as_ref());
        SessionInput::Wake
    }

    /// Replaying the events of a step must give the same state.
    fn crash_and_rebuild(&self, before: SessionState, events: &[SessionEvent]) {
        let mut rebuilt = before;
        for event in events {
            evolve(&mut rebuilt, event);
        }
        assert_eq!(rebuilt, self.state, "replay gives another state");
    }

    /// The same through bytes: a snapshot, and events as the journal stores them, give the same state byte for byte.
    pub(crate) fn check_bytes(&self, events: &[SessionEvent]) {
        let new = serde_json::to_vec(&session(self.restarts, self.state.settings.fleet.clone())).unwrap();
        let mut rebuilt: SessionState = serde_json::from_slice(&new).unwrap();
        for event in events {
            let data = event.body.encode(event.actor.as_deref()).unwrap();
            let body = EventBody::decode(event.body.kind(), &data).unwrap().unwrap();
            assert_eq!(body, event.body, "an event reads back as it was written");
            evolve(&mut rebuilt, &SessionEvent { body, ..event.clone() });
        }
        assert_eq!(serde_json::to_vec(&rebuilt).unwrap(), serde_json::to_vec(&self.state).unwrap());
        let snapshot: SessionState =
            serde_json::from_slice(&serde_json::to_vec(&self.state).unwrap()).unwrap();
        assert_eq!(snapshot, self.state, "a snapshot reads back as it was written");
    }

    fn carry_out(&mut self, effect: SessionEffect, inbox: &mut VecDeque<SessionInput>) {
        let ended = |child| command_input(SessionCommand::ChildEnded(child));
        match effect {
            SessionEffect::LaunchAgent { worker, new_worker } => self.worker.launch(worker, new_worker),
            // Later in the same batch the worker turned out to be gone. The actor has no link to it any more.
            SessionEffect::StopAgent if self.state.worker.is_none() => {}
            SessionEffect::StopAgent => self.worker.end(),
            SessionEffect::SendPrompt { .. }
            | SessionEffect::SendSteer { .. }
            | SessionEffect::CancelTurn { .. }
            | SessionEffect::KillTurn { .. }
            | SessionEffect::SendAnswer { .. } => {
                self.worker.apply_command(effect);
                self.observer.check_prompt_counts(&mut self.worker.prompt_counts);
            }
            SessionEffect::QueryChildren { children } => {
                inbox.extend(self.children.ended(&children).into_iter().map(ended));
            }
            SessionEffect::CancelChildren { number } => {
                inbox.extend(self.children.end_all().into_iter().map(ended));
                inbox.push_back(command_input(SessionCommand::ChildrenCancelled { number }));
            }
            SessionEffect::CloseChildren { .. } => {
                inbox.extend(self.children.end_all().into_iter().map(ended));
                self.children.closing = true;
            }
            SessionEffect::NotifyFleet { run } => self.notified.push(run),
            SessionEffect::NotifyParent => panic!("the session has no parent"),
            SessionEffect::CheckBudget | SessionEffect::WakeAccount | SessionEffect::Purge => {}
        }
    }

    /// What must hold when nothing can happen any more: no run was forgotten.
    pub(crate) fn check_end(&self) {
        assert!(self.state.runs.is_empty(), "runs left over: {:?}", self.state.runs);
        assert!(matches!(self.state.phase(), SessionPhase::Idle | SessionPhase::Closed));
        assert_eq!(self.state.closing.is_some(), self.state.closed, "a close was forgotten");
        self.observer.check_end();
    }
}
