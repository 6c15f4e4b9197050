//! The limit on agents that live at once, by count and by free memory, and on their workers, by descriptors. A session
//! that finds no slot waits in line and is woken. An agent that waits for a person or for other sessions does not
//! count. An idle one is stopped to make way, or does not count if that would lose its conversation.

use std::collections::{HashMap, HashSet, VecDeque};

use parking_lot::{Mutex, MutexGuard};
use qd_protocol::SessionId;

/// How a session stands to the limit. It has one standing at a time, so none waits in line beside its own agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotStanding {
    /// There is no agent, or it waits for a person or for other sessions, or it is idle and cannot be stopped.
    NotCounted,
    /// A run waits in line until its agent may start.
    Waiting,
    /// The agent lives and has nothing to do.
    Idle,
    /// The agent works, or is about to.
    Busy,
}

/// The sessions to notify after a change.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotChanges {
    /// Sessions that may start their agent now.
    pub(crate) wake: Vec<SessionId>,
    /// A session whose idle agent is to be stopped.
    pub(crate) session_to_stop: Option<SessionId>,
}

/// When another agent may start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AgentSlotLimits {
    /// How many agents may live at once.
    pub(crate) agents: usize,
    /// How many workers there may be at once, with agents that count and agents that do not.
    pub(crate) workers: usize,
    /// How many bytes of memory must be available.
    pub(crate) min_free_bytes: u64,
}

/// The slots for agents, and the line of sessions that wait for one.
#[derive(Debug)]
pub(crate) struct AgentSlots {
    limits: AgentSlotLimits,
    state: Mutex<AgentSlotsState>,
}

#[derive(Debug, Default)]
struct AgentSlotsState {
    /// The sessions whose agent counts, and whether it is idle.
    live: HashMap<SessionId, AgentLoad>,
    /// The sessions that have a worker whose agent does not count.
    uncounted: HashSet<SessionId>,
    /// The sessions that wait, in order. None of them is in `live`.
    waiting: VecDeque<SessionId>,
}

/// Whether an agent that counts could be stopped to make way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AgentLoad {
    Idle,
    Busy,
}

impl AgentSlots {
    pub(crate) fn new(limits: AgentSlotLimits) -> Self {
        Self { limits, state: Mutex::default() }
    }

    /// Whether this session may start its agent now. Sessions that wait are not overtaken.
    pub(crate) fn may_start(&self, session: &SessionId) -> bool {
        let state = self.lock();
        if state.live.contains_key(session) {
            return true;
        }
        let position =
            state.waiting.iter().position(|waiting| waiting == session).unwrap_or(state.waiting.len());
        self.fits(&state, session, position)
    }

    /// Records how a session stands to the limit, and whether it has a worker. If nothing changes nobody is notified: a
    /// notified session reports its standing again, which would never end.
    pub(crate) fn set_standing(
        &self,
        session: &SessionId,
        standing: SlotStanding,
        has_worker: bool,
    ) -> SlotChanges {
        let mut state = self.lock();
        let counts = matches!(standing, SlotStanding::Idle | SlotStanding::Busy);
        let worker_changed = match has_worker && !counts {
            true => state.uncounted.insert(session.clone()),
            false => state.uncounted.remove(session),
        };
        let changed = match standing {
            SlotStanding::NotCounted => state.leave_line(session) | state.live.remove(session).is_some(),
            SlotStanding::Waiting => {
                let was_live = state.live.remove(session).is_some();
                let is_new = !state.waiting.contains(session);
                if is_new {
                    state.waiting.push_back(session.clone());
                }
                was_live || is_new
            }
            SlotStanding::Idle => state.set_load(session, AgentLoad::Idle),
            SlotStanding::Busy => state.set_load(session, AgentLoad::Busy),
        };
        if changed || worker_changed { self.changes_due(&state) } else { SlotChanges::default() }
    }

    /// Forgets a session that has no actor any more.
    pub(crate) fn remove(&self, session: &SessionId) -> SlotChanges {
        self.set_standing(session, SlotStanding::NotCounted, false)
    }

    /// Whether this session stands in line.
    pub(crate) fn is_waiting(&self, session: &SessionId) -> bool {
        self.lock().waiting.contains(session)
    }

    /// Checks again whether a waiting session may start: memory becomes available without notice.
    pub(crate) fn recheck(&self) -> SlotChanges {
        self.changes_due(&self.lock())
    }

    pub(crate) fn has_waiters(&self) -> bool {
        !self.lock().waiting.is_empty()
    }

    fn changes_due(&self, state: &AgentSlotsState) -> SlotChanges {
        if state.waiting.is_empty() {
            return SlotChanges::default();
        }
        // The same rule as in `may_start`: a session woken in vain would wait and be woken without end.
        let in_line = state.waiting.iter().enumerate();
        let fitting = in_line.take_while(|(position, session)| self.fits(state, session, *position));
        let wake: Vec<SessionId> = fitting.map(|(_, session)| session.clone()).collect();
        let idle = || {
            state.live.iter().find(|(_, load)| **load == AgentLoad::Idle).map(|(session, _)| session.clone())
        };
        let session_to_stop = if wake.len() < state.waiting.len() { idle() } else { None };
        SlotChanges { wake, session_to_stop }
    }

    /// Whether the session at this position of the line may start its agent. One agent may always live.
    fn fits(&self, state: &AgentSlotsState, session: &SessionId, position: usize) -> bool {
        let alone = state.live.is_empty() && position == 0;
        // A session that has a worker starts its agent there.
        let has_room = state.uncounted.contains(session)
            || state.live.len() + state.uncounted.len() + position < self.limits.workers;
        state.live.len() + position < self.limits.agents && (alone || has_room && self.has_memory())
    }

    fn has_memory(&self) -> bool {
        // If the kernel does not report the available memory, it is no limit.
        self.limits.min_free_bytes == 0
            || available_memory().is_none_or(|available| available >= self.limits.min_free_bytes)
    }

    fn lock(&self) -> MutexGuard<'_, AgentSlotsState> {
        self.state.lock()
    }
}

impl AgentSlotsState {
    /// Takes a session out of the line, and returns whether it was there.
    fn leave_line(&mut self, session: &SessionId) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|waiting| waiting != session);
        self.waiting.len() != before
    }

    /// Counts the agent of a session, and returns whether that changes anything.
    fn set_load(&mut self, session: &SessionId, load: AgentLoad) -> bool {
        self.leave_line(session) | (self.live.insert(session.clone(), load) != Some(load))
    }
}

/// The bytes of memory that are available without swapping.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(agents: usize, min_free_bytes: u64) -> AgentSlots {
        AgentSlots::new(AgentSlotLimits { agents, workers: 100, min_free_bytes })
    }

    /// Sets the standing of a session, which has a worker if its agent counts.
    fn set(slots: &AgentSlots, n: u8, standing: SlotStanding) -> SlotChanges {
        let has_worker = matches!(standing, SlotStanding::Idle | SlotStanding::Busy);
        slots.set_standing(&session(n), standing, has_worker)
    }

    fn session(n: u8) -> SessionId {
        SessionId::from_random(&[n; 4])
    }

    #[test]
    fn those_who_wait_are_served_in_order_and_nobody_overtakes() {
        let slots = slots(1, 0);
        assert!(slots.may_start(&session(1)));
        set(&slots, 1, SlotStanding::Busy);
        assert!(slots.may_start(&session(1)), "a session whose agent lives may go on");
        assert!(!slots.may_start(&session(2)));
        assert_eq!(set(&slots, 2, SlotStanding::Waiting), SlotChanges::default());
        assert_eq!(set(&slots, 3, SlotStanding::Waiting), SlotChanges::default());
        let changes = set(&slots, 1, SlotStanding::NotCounted);
        assert_eq!(changes, SlotChanges { wake: vec![session(2)], session_to_stop: None });
        assert!(!slots.may_start(&session(3)) && !slots.may_start(&session(4)));
        assert!(slots.may_start(&session(2)));
        set(&slots, 2, SlotStanding::Busy);
        assert!(!slots.may_start(&session(3)));
    }

    #[test]
    fn an_idle_agent_gives_way_and_a_busy_one_does_not() {
        let slots = slots(2, 0);
        set(&slots, 1, SlotStanding::Busy);
        set(&slots, 2, SlotStanding::Idle);
        assert_eq!(
            set(&slots, 3, SlotStanding::Waiting),
            SlotChanges { wake: vec![], session_to_stop: Some(session(2)) }
        );
        let changes = set(&slots, 2, SlotStanding::Busy);
        assert_eq!(changes, SlotChanges::default());
        let changes = set(&slots, 1, SlotStanding::Idle);
        assert_eq!(changes, SlotChanges { wake: vec![], session_to_stop: Some(session(1)) });
    }

    #[test]
    fn a_session_that_leaves_the_line_lets_the_next_start() {
        let slots = slots(1, 0);
        set(&slots, 1, SlotStanding::Busy);
        set(&slots, 2, SlotStanding::Waiting);
        set(&slots, 3, SlotStanding::Waiting);
        set(&slots, 1, SlotStanding::NotCounted);
        assert_eq!(set(&slots, 2, SlotStanding::NotCounted).wake, [session(3)]);
        assert!(slots.may_start(&session(3)));
    }

    #[test]
    fn without_memory_nothing_starts_beside_what_lives() {
        let slots = slots(10, u64::MAX);
        assert!(slots.may_start(&session(1)), "one agent may always live");
        set(&slots, 1, SlotStanding::Busy);
        assert!(!slots.may_start(&session(2)));
        assert_eq!(set(&slots, 2, SlotStanding::Waiting), SlotChanges::default(), "nobody is woken in vain");
        assert_eq!(set(&slots, 2, SlotStanding::Waiting), SlotChanges::default());
        let changes = set(&slots, 1, SlotStanding::Idle);
        assert_eq!(changes, SlotChanges { wake: vec![], session_to_stop: Some(session(1)) });
        let changes = set(&slots, 1, SlotStanding::NotCounted);
        assert_eq!(changes, SlotChanges { wake: vec![session(2)], session_to_stop: None });
    }

    #[test]
    fn a_session_whose_agent_lives_is_not_woken_by_its_own_reports() {
        let slots = slots(2, 0);
        set(&slots, 1, SlotStanding::Busy);
        set(&slots, 2, SlotStanding::Busy);
        set(&slots, 3, SlotStanding::Waiting);
        assert_eq!(set(&slots, 2, SlotStanding::NotCounted).wake, [session(3)]);
        assert!(slots.may_start(&session(3)));
        set(&slots, 3, SlotStanding::Busy);
        assert!(!slots.is_waiting(&session(3)));
        set(&slots, 2, SlotStanding::NotCounted);
        for _ in 0..3 {
            assert_eq!(set(&slots, 3, SlotStanding::Busy), SlotChanges::default());
        }
    }

    #[test]
    fn workers_that_do_not_count_as_agents_still_need_descriptors() {
        let slots = AgentSlots::new(AgentSlotLimits { agents: 10, workers: 2, min_free_bytes: 0 });
        slots.set_standing(&session(1), SlotStanding::NotCounted, true);
        assert!(slots.may_start(&session(2)));
        set(&slots, 2, SlotStanding::Busy);
        assert!(!slots.may_start(&session(3)));
        assert!(slots.may_start(&session(1)), "its worker exists");
        assert_eq!(set(&slots, 3, SlotStanding::Waiting), SlotChanges::default());
        let changes = set(&slots, 1, SlotStanding::NotCounted);
        assert_eq!(changes, SlotChanges { wake: vec![session(3)], session_to_stop: None });
        slots.set_standing(&session(1), SlotStanding::NotCounted, true);
        slots.set_standing(&session(2), SlotStanding::NotCounted, true);
        assert!(slots.may_start(&session(3)), "one agent may always live");
    }
}
