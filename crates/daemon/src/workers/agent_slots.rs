//! The limit on agents that live at once, by count and by free memory, and on their workers, by descriptors. A session
//! that finds no slot waits in line and is woken. An agent that waits for a person or for other sessions does not
//! count, and an idle one is stopped to make way.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use qd_protocol::SessionId;

/// How a session's agent uses a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotUse {
    /// There is neither an agent nor a worker.
    NoWorker,
    /// There is a worker, but its agent is stopped, or waits for a person or for other sessions.
    NotCounted,
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
    /// The sessions whose agent counts.
    live: HashMap<SessionId, SlotUse>,
    /// The sessions that have a worker whose agent does not count.
    uncounted: HashSet<SessionId>,
    /// The sessions that wait, in order.
    waiting: VecDeque<SessionId>,
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

    /// Adds a session to the line. If it is in line already, nobody is notified: a notified session enqueues itself
    /// again, which would never end.
    pub(crate) fn enqueue(&self, session: &SessionId) -> SlotChanges {
        let mut state = self.lock();
        if state.waiting.contains(session) {
            return SlotChanges::default();
        }
        state.waiting.push_back(session.clone());
        self.changes_due(&state)
    }

    /// Takes a session that has nothing to start any more out of the line.
    pub(crate) fn dequeue(&self, session: &SessionId) -> SlotChanges {
        let mut state = self.lock();
        state.waiting.retain(|waiting| waiting != session);
        self.changes_due(&state)
    }

    /// Records how a session's agent uses a slot.
    pub(crate) fn set_use(&self, session: &SessionId, slot_use: SlotUse) -> SlotChanges {
        let mut state = self.lock();
        let had_worker = state.uncounted.remove(session);
        let before = match slot_use {
            SlotUse::NoWorker => state.live.remove(session),
            SlotUse::NotCounted => {
                state.uncounted.insert(session.clone());
                state.live.remove(session)
            }
            slot_use => {
                state.waiting.retain(|waiting| waiting != session);
                state.live.insert(session.clone(), slot_use)
            }
        };
        let before = before.unwrap_or(if had_worker { SlotUse::NotCounted } else { SlotUse::NoWorker });
        if before == slot_use { SlotChanges::default() } else { self.changes_due(&state) }
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
            state
                .live
                .iter()
                .find(|(_, slot_use)| **slot_use == SlotUse::Idle)
                .map(|(session, _)| session.clone())
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

    fn session(n: u8) -> SessionId {
        SessionId::from_random(&[n; 4])
    }

    #[test]
    fn those_who_wait_are_served_in_order_and_nobody_overtakes() {
        let slots = slots(1, 0);
        assert!(slots.may_start(&session(1)));
        slots.set_use(&session(1), SlotUse::Busy);
        assert!(slots.may_start(&session(1)), "a session whose agent lives may go on");
        assert!(!slots.may_start(&session(2)));
        assert_eq!(slots.enqueue(&session(2)), SlotChanges::default());
        assert_eq!(slots.enqueue(&session(3)), SlotChanges::default());
        let changes = slots.set_use(&session(1), SlotUse::NotCounted);
        assert_eq!(changes, SlotChanges { wake: vec![session(2)], session_to_stop: None });
        assert!(!slots.may_start(&session(3)) && !slots.may_start(&session(4)));
        assert!(slots.may_start(&session(2)));
        slots.set_use(&session(2), SlotUse::Busy);
        assert!(!slots.may_start(&session(3)));
    }

    #[test]
    fn an_idle_agent_gives_way_and_a_busy_one_does_not() {
        let slots = slots(2, 0);
        slots.set_use(&session(1), SlotUse::Busy);
        slots.set_use(&session(2), SlotUse::Idle);
        assert_eq!(
            slots.enqueue(&session(3)),
            SlotChanges { wake: vec![], session_to_stop: Some(session(2)) }
        );
        let changes = slots.set_use(&session(2), SlotUse::Busy);
        assert_eq!(changes, SlotChanges::default());
        let changes = slots.set_use(&session(1), SlotUse::Idle);
        assert_eq!(changes, SlotChanges { wake: vec![], session_to_stop: Some(session(1)) });
    }

    #[test]
    fn a_session_that_leaves_the_line_lets_the_next_start() {
        let slots = slots(1, 0);
        slots.set_use(&session(1), SlotUse::Busy);
        slots.enqueue(&session(2));
        slots.enqueue(&session(3));
        slots.set_use(&session(1), SlotUse::NotCounted);
        assert_eq!(slots.dequeue(&session(2)).wake, [session(3)]);
        assert!(slots.may_start(&session(3)));
    }

    #[test]
    fn without_memory_nothing_starts_beside_what_lives() {
        let slots = slots(10, u64::MAX);
        assert!(slots.may_start(&session(1)), "one agent may always live");
        slots.set_use(&session(1), SlotUse::Busy);
        assert!(!slots.may_start(&session(2)));
        assert_eq!(slots.enqueue(&session(2)), SlotChanges::default(), "nobody is woken in vain");
        assert_eq!(slots.enqueue(&session(2)), SlotChanges::default());
        let changes = slots.set_use(&session(1), SlotUse::Idle);
        assert_eq!(changes, SlotChanges { wake: vec![], session_to_stop: Some(session(1)) });
        let changes = slots.set_use(&session(1), SlotUse::NotCounted);
        assert_eq!(changes, SlotChanges { wake: vec![session(2)], session_to_stop: None });
    }

    #[test]
    fn workers_that_do_not_count_as_agents_still_need_descriptors() {
        let slots = AgentSlots::new(AgentSlotLimits { agents: 10, workers: 2, min_free_bytes: 0 });
        slots.set_use(&session(1), SlotUse::NotCounted);
        assert!(slots.may_start(&session(2)));
        slots.set_use(&session(2), SlotUse::Busy);
        assert!(!slots.may_start(&session(3)));
        assert!(slots.may_start(&session(1)), "its worker exists");
        assert_eq!(slots.enqueue(&session(3)), SlotChanges::default());
        let changes = slots.set_use(&session(1), SlotUse::NoWorker);
        assert_eq!(changes, SlotChanges { wake: vec![session(3)], session_to_stop: None });
        slots.set_use(&session(1), SlotUse::NotCounted);
        slots.set_use(&session(2), SlotUse::NotCounted);
        assert!(slots.may_start(&session(3)), "one agent may always live");
    }
}
