//! Decides which processes below a keeper belong to the agent, to its turn, or were left running by an earlier turn. It
//! is told about every child and turn, gets the process tree (parents before their children), and judges by process
//! identity. It reads nothing and ends nothing.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::procfs::{ProcessIdentity, ProcessNode};
use crate::wire::SweepScope;

/// A keeper's records of the processes below it.
#[derive(Debug, Default)]
pub(crate) struct ProcessLedger {
    /// The children started on request and not reaped yet, by the id of their request.
    children: BTreeMap<u64, StartedChild>,
    /// The processes that existed when the open turn began. Absent between turns.
    before_turn: Option<BTreeSet<ProcessIdentity>>,
    /// The same for the turn that ended last, in case it is cancelled after all. Absent once another turn or agent
    /// begins.
    before_ended_turn: Option<BTreeSet<ProcessIdentity>>,
    /// The agent's processes that existed before its first turn, whatever their parent is now.
    before_first_turn: BTreeSet<ProcessIdentity>,
    /// Whether the agent has begun a turn since it was started.
    had_turn: bool,
    /// The processes that finished turns left running, and their descendants.
    leftovers: BTreeSet<ProcessIdentity>,
}

#[derive(Debug)]
struct StartedChild {
    process: ProcessIdentity,
    /// Whether the child belongs to the turn and is not the agent.
    in_turn: bool,
}

impl ProcessLedger {
    /// Called before an agent is started. Existing processes cannot belong to the new agent.
    pub(crate) fn prepare_agent_start(&mut self, tree: &[ProcessNode]) {
        if self.agents().is_empty() {
            self.leftovers.extend(tree.iter().map(|node| node.process.clone()));
            self.had_turn = false;
            self.before_ended_turn = None;
        }
    }

    /// Records a started child: the agent, or a process that belongs to the turn.
    pub(crate) fn record_start(&mut self, id: u64, process: ProcessIdentity, in_turn: bool) {
        self.children.insert(id, StartedChild { process, in_turn });
    }

    /// Records that a child was reaped. Returns the id of its request if it was started on request.
    pub(crate) fn record_reaped(&mut self, pid: u32) -> Option<u64> {
        let id = self.children.iter().find(|(_, child)| child.process.pid == pid).map(|(id, _)| *id)?;
        self.children.remove(&id);
        Some(id)
    }

    pub(crate) fn child(&self, id: u64) -> Option<&ProcessIdentity> {
        self.children.get(&id).map(|child| &child.process)
    }

    /// Begins a turn, and ends the previous one if it is still open.
    pub(crate) fn begin_turn(&mut self, tree: &[ProcessNode]) {
        self.end_turn(tree);
        if !self.had_turn {
            self.before_first_turn = self.agent_owned(tree);
            self.had_turn = true;
        }
        self.before_turn = Some(tree.iter().map(|node| node.process.clone()).collect());
        self.before_ended_turn = None;
    }

    /// Ends the turn. What it started and has not ended stays on purpose.
    pub(crate) fn end_turn(&mut self, tree: &[ProcessNode]) {
        let agents = self.agents();
        let mut left_subtrees = ProcessSubtrees::default();
        let is_left = |node: &&ProcessNode| {
            let process = &node.process;
            let is_new = self.before_turn.as_ref().is_some_and(|before| !before.contains(process));
            left_subtrees
                .includes(node, self.leftovers.contains(process) || (is_new && !agents.contains(process)))
        };
        // Replacing the set forgets the processes that are gone.
        self.leftovers = tree.iter().filter(is_left).map(|node| node.process.clone()).collect();
        self.before_ended_turn = self.before_turn.take().or(self.before_ended_turn.take());
    }

    /// What finished turns have left running: everything that would outlive the agent, except what the open turn
    /// started.
    pub(crate) fn leftovers(&self, tree: &[ProcessNode]) -> Vec<ProcessIdentity> {
        let mut selector = self.target_selector(SweepScope::Agent, |_| false);
        let was_there = |process: &ProcessIdentity| {
            self.before_turn.as_ref().is_none_or(|before| before.contains(process))
        };
        let stays = |node: &&ProcessNode| !selector.is_target(node) && was_there(&node.process);
        tree.iter().filter(stays).map(|node| node.process.clone()).collect()
    }

    /// Selects the processes that a sweep must end. `is_helper` recognizes the agent's helpers by name.
    pub(crate) fn target_selector<F: Fn(&ProcessIdentity) -> bool>(
        &self,
        scope: SweepScope,
        is_helper: F,
    ) -> SweepTargetSelector<'_, F> {
        let (leftovers, agent_owned, helpers) = Default::default();
        SweepTargetSelector {
            ledger: self,
            scope,
            is_helper,
            agents: self.agents(),
            leftovers,
            agent_owned,
            helpers,
        }
    }

    /// The processes that end with the agent.
    fn agent_owned(&self, tree: &[ProcessNode]) -> BTreeSet<ProcessIdentity> {
        let mut selector = self.target_selector(SweepScope::Agent, |_| false);
        tree.iter().filter(|node| selector.is_target(node)).map(|node| node.process.clone()).collect()
    }

    fn agents(&self) -> HashSet<&ProcessIdentity> {
        self.children.values().filter(|child| !child.in_turn).map(|child| &child.process).collect()
    }
}

/// Decides for each process whether a sweep must end it. Processes must be given parents before their children.
#[derive(Debug)]
pub(crate) struct SweepTargetSelector<'a, F> {
    ledger: &'a ProcessLedger,
    scope: SweepScope,
    is_helper: F,
    agents: HashSet<&'a ProcessIdentity>,
    leftovers: ProcessSubtrees,
    agent_owned: ProcessSubtrees,
    helpers: ProcessSubtrees,
}

impl<F: Fn(&ProcessIdentity) -> bool> SweepTargetSelector<'_, F> {
    pub(crate) fn is_target(&mut self, node: &ProcessNode) -> bool {
        let ledger = self.ledger;
        match self.scope {
            SweepScope::All => true,
            SweepScope::Agent => self.belongs_to_agent(node),
            SweepScope::Turn => self.belongs_to_turn(node, ledger.before_turn.as_ref()),
            SweepScope::EndedTurn => self.belongs_to_turn(node, ledger.before_ended_turn.as_ref()),
        }
    }

    /// The agent itself, what existed before its first turn, and everything below them; except what a turn left running
    /// and everything below that.
    fn belongs_to_agent(&mut self, node: &ProcessNode) -> bool {
        let ledger = self.ledger;
        let is_leftover = self.leftovers.includes(node, ledger.leftovers.contains(&node.process));
        let is_early = !ledger.had_turn || ledger.before_first_turn.contains(&node.process);
        let is_owned = self
            .agent_owned
            .includes(node, self.agents.contains(&node.process) || (is_early && !is_leftover));
        is_owned && !is_leftover
    }

    /// Whether a process was started during the turn before which only the processes of `before` existed.
    fn belongs_to_turn(&mut self, node: &ProcessNode, before: Option<&BTreeSet<ProcessIdentity>>) -> bool {
        let Some(before) = before else { return false };
        let is_agent = self.agents.contains(&node.process);
        // Otherwise an agent with the name of a helper (both can be `node`) would spare everything.
        let is_helper = self.helpers.includes(node, !is_agent && (self.is_helper)(&node.process));
        !is_agent && !is_helper && !before.contains(&node.process)
    }
}

/// Chosen processes and everything below them.
#[derive(Debug, Default)]
struct ProcessSubtrees(HashSet<u32>);

impl ProcessSubtrees {
    /// Whether this process is chosen or below a chosen one.
    fn includes(&mut self, node: &ProcessNode, is_chosen: bool) -> bool {
        let is_included = is_chosen || self.0.contains(&node.parent);
        if is_included {
            self.0.insert(node.process.pid);
        }
        is_included
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEEPER: u32 = 1;
    const AGENT: u32 = 10;

    /// A process with this pid and parent. All processes are named by their pid.
    fn node(pid: u32, parent: u32) -> ProcessNode {
        ProcessNode { process: process(pid), parent }
    }

    fn process(pid: u32) -> ProcessIdentity {
        ProcessIdentity { pid, start_ticks: 1, name: pid.to_string() }
    }

    fn pids(processes: &[ProcessIdentity]) -> Vec<u32> {
        processes.iter().map(|process| process.pid).collect()
    }

    fn targets(ledger: &ProcessLedger, tree: &[ProcessNode], scope: SweepScope) -> Vec<u32> {
        targets_sparing(ledger, tree, scope, &[])
    }

    fn targets_sparing(
        ledger: &ProcessLedger,
        tree: &[ProcessNode],
        scope: SweepScope,
        helpers: &[u32],
    ) -> Vec<u32> {
        let mut selector = ledger.target_selector(scope, |process| helpers.contains(&process.pid));
        tree.iter().filter(|node| selector.is_target(node)).map(|node| node.process.pid).collect()
    }

    fn ledger_with_agent() -> ProcessLedger {
        let mut ledger = ProcessLedger::default();
        ledger.record_start(1, process(AGENT), false);
        ledger
    }

    #[test]
    fn a_turn_owns_what_was_not_there_when_it_began_wherever_it_hangs() {
        let mut ledger = ledger_with_agent();
        ledger.begin_turn(&[node(AGENT, KEEPER), node(11, AGENT)]);
        let tree = [node(AGENT, KEEPER), node(12, KEEPER), node(11, AGENT), node(13, AGENT), node(14, 11)];
        assert_eq!(targets(&ledger, &tree, SweepScope::Turn), [12, 13, 14]);
        assert_eq!(targets(&ledger, &tree, SweepScope::All), [AGENT, 12, 11, 13, 14]);
    }

    #[test]
    fn a_pid_used_again_during_the_turn_is_the_turns() {
        let mut ledger = ledger_with_agent();
        ledger.begin_turn(&[node(AGENT, KEEPER), node(11, AGENT)]);
        let mut again = node(11, AGENT);
        again.process.start_ticks = 2;
        assert_eq!(targets(&ledger, &[node(AGENT, KEEPER), again], SweepScope::Turn), [11]);
    }

    #[test]
    fn without_an_open_turn_nothing_is_the_turns() {
        let mut ledger = ledger_with_agent();
        let tree = [node(AGENT, KEEPER), node(11, AGENT)];
        assert_eq!(targets(&ledger, &tree, SweepScope::Turn), [0; 0]);
        ledger.begin_turn(&tree[..1]);
        ledger.end_turn(&tree);
        assert_eq!(targets(&ledger, &tree, SweepScope::Turn), [0; 0]);
    }

    #[test]
    fn a_helper_and_what_is_below_it_outlive_the_turn_but_an_agent_of_that_name_spares_nobody() {
        let mut ledger = ledger_with_agent();
        ledger.begin_turn(&[node(AGENT, KEEPER)]);
        let tree = [node(AGENT, KEEPER), node(11, AGENT), node(12, AGENT), node(13, 11), node(14, 13)];
        assert_eq!(targets_sparing(&ledger, &tree, SweepScope::Turn, &[11]), [12]);
        assert_eq!(targets_sparing(&ledger, &tree, SweepScope::Turn, &[AGENT]), [11, 12, 13, 14]);
    }

    #[test]
    fn an_idle_agent_takes_its_own_processes_along_and_leaves_what_a_turn_left() {
        let mut ledger = ledger_with_agent();
        // 11 is a helper below the agent, 12 a helper that is a child of the keeper.
        let early = [node(AGENT, KEEPER), node(12, KEEPER), node(11, AGENT)];
        ledger.begin_turn(&early);
        let busy = [early.as_slice(), &[node(20, AGENT)]].concat();
        ledger.end_turn(&busy);
        // By now the server (20) has a child, and the agent has one more helper.
        let between_turns = [busy.as_slice(), &[node(21, 20), node(15, AGENT)]].concat();
        assert_eq!(targets(&ledger, &between_turns, SweepScope::Agent), [AGENT, 12, 11, 15]);
        assert_eq!(pids(&ledger.leftovers(&between_turns)), [20, 21]);
        // A second turn records the server's child as left running too.
        ledger.begin_turn(&between_turns);
        ledger.end_turn(&between_turns);
        ledger.record_reaped(AGENT);
        let after_agent = [node(20, KEEPER), node(21, KEEPER)];
        assert_eq!(targets(&ledger, &after_agent, SweepScope::Agent), [0; 0]);
        assert_eq!(pids(&ledger.leftovers(&after_agent)), [20, 21]);
        // The next agent does not own them either, nor a process that they started unobserved.
        let after_agent = [after_agent.as_slice(), &[node(22, KEEPER)]].concat();
        ledger.prepare_agent_start(&after_agent);
        ledger.record_start(2, process(30), false);
        let again = [after_agent.as_slice(), &[node(30, KEEPER), node(31, 30)]].concat();
        assert_eq!(targets(&ledger, &again, SweepScope::Agent), [30, 31]);
        assert_eq!(targets(&ledger, &again, SweepScope::All), [20, 21, 22, 30, 31]);
    }

    #[test]
    fn an_agent_that_never_had_a_turn_takes_all_along() {
        let ledger = ledger_with_agent();
        let tree = [node(AGENT, KEEPER), node(11, KEEPER), node(12, 11)];
        assert_eq!(targets(&ledger, &tree, SweepScope::Agent), [AGENT, 11, 12]);
        assert_eq!(pids(&ledger.leftovers(&tree)), [0; 0]);
    }

    #[test]
    fn what_an_ended_turn_left_can_be_selected_until_the_next_turn_or_agent_begins() {
        let mut ledger = ledger_with_agent();
        ledger.begin_turn(&[node(AGENT, KEEPER)]);
        ledger.end_turn(&[node(AGENT, KEEPER), node(20, KEEPER)]);
        ledger.begin_turn(&[node(AGENT, KEEPER), node(20, KEEPER)]);
        let tree = [node(AGENT, KEEPER), node(20, KEEPER), node(30, KEEPER), node(31, 30)];
        ledger.end_turn(&tree);
        assert_eq!(targets(&ledger, &tree, SweepScope::EndedTurn), [30, 31], "20 is of an earlier turn");
        assert_eq!(targets(&ledger, &tree, SweepScope::Turn), [0; 0]);
        ledger.end_turn(&tree);
        assert_eq!(targets(&ledger, &tree, SweepScope::EndedTurn), [30, 31], "no turn was open");
        ledger.begin_turn(&tree);
        assert_eq!(targets(&ledger, &tree, SweepScope::EndedTurn), [0; 0]);
        ledger.end_turn(&tree);
        ledger.record_reaped(AGENT);
        ledger.prepare_agent_start(&tree);
        assert_eq!(targets(&ledger, &tree, SweepScope::EndedTurn), [0; 0]);
    }

    #[test]
    fn what_an_open_turn_started_has_not_been_left_by_it() {
        let mut ledger = ledger_with_agent();
        ledger.begin_turn(&[node(AGENT, KEEPER)]);
        let tree = [node(AGENT, KEEPER), node(20, KEEPER), node(21, AGENT)];
        assert_eq!(pids(&ledger.leftovers(&tree)), [0; 0]);
        ledger.end_turn(&tree);
        assert_eq!(pids(&ledger.leftovers(&tree)), [20, 21]);
    }

    #[test]
    fn a_child_started_in_the_turn_is_ended_with_it() {
        let mut ledger = ledger_with_agent();
        ledger.begin_turn(&[node(AGENT, KEEPER)]);
        ledger.record_start(2, process(20), true);
        let tree = [node(AGENT, KEEPER), node(20, KEEPER), node(21, 20)];
        assert_eq!(targets(&ledger, &tree, SweepScope::Turn), [20, 21]);
        ledger.end_turn(&tree);
        assert_eq!(targets(&ledger, &tree, SweepScope::Agent), [AGENT]);
        assert_eq!(pids(&ledger.leftovers(&tree)), [20, 21]);
    }
}
