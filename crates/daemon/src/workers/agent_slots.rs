//! How many agents may live at once, by count and by free memory. Whoever finds no room waits in line and is woken; an
//! agent that is idle, or waits for a person or for other sessions, gives way.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use qd_protocol::SessionId;

/// What a session's agent is to the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotUse {
    /// There is none, or it waits for somebody else.
    NotCounted,
    /// It lives and has nothing to do.
    Idle,
    /// It works, or is about to.
    Busy,
}

/// What others must be told after a change.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotChanges {
    /// Sessions that can go on.
    pub(crate) wake: Vec<SessionId>,
    /// A session whose idle agent is to give way.
    pub(crate) rest: Option<SessionId>,
}

/// The room that there is.
#[derive(Debug)]
pub(crate) struct AgentSlots {
    /// Agents that may live at once.
    agents_max: usize,
    /// Bytes that must be free before another one is started.
    min_free_bytes: u64,
    state: Mutex<AgentSlotsState>,
}

#[derive(Debug, Default)]
struct AgentSlotsState {
    /// Those that count.
    live: HashMap<SessionId, SlotUse>,
    /// Those that wait, in order.
    waiting: VecDeque<SessionId>,
}

impl AgentSlots {
    pub(crate) fn new(agents_max: usize, min_free_bytes: u64) -> Self {
        Self { agents_max, min_free_bytes, state: Mutex::default() }
    }

    /// Whether this session may start its agent now. Nobody overtakes those who wait.
    pub(crate) fn may_start(&self, session: &SessionId) -> bool {
        let state = self.lock();
        if state.live.contains_key(session) {
            return true;
        }
        let place = state.waiting.iter().position(|waits| waits == session).unwrap_or(state.waiting.len());
        self.fits(&state, place)
    }

    /// Puts a session in line. One that is there already is told nothing: it would ask again, and be told again.
    pub(crate) fn enqueue(&self, session: &SessionId) -> SlotChanges {
        let mut state = self.lock();
        if state.waiting.contains(session) {
            return SlotChanges::default();
        }
        state.waiting.push_back(session.clone());
        self.changes_due(&state)
    }

    /// Takes a session out of the line, if it has nothing to start any more.
    pub(crate) fn dequeue(&self, session: &SessionId) -> SlotChanges {
        let mut state = self.lock();
        state.waiting.retain(|waits| waits != session);
        self.changes_due(&state)
    }

    /// Says what a session's agent is now.
    pub(crate) fn set_use(&self, session: &SessionId, need: SlotUse) -> SlotChanges {
        let mut state = self.lock();
        let before = match need {
            SlotUse::NotCounted => state.live.remove(session),
            need => {
                state.waiting.retain(|waits| waits != session);
                state.live.insert(session.clone(), need)
            }
        };
        match before == Some(need) || (before.is_none() && need == SlotUse::NotCounted) {
            true => SlotChanges::default(),
            false => self.changes_due(&state),
        }
    }

    /// Looks again: memory comes back without anybody saying so.
    pub(crate) fn recheck(&self) -> SlotChanges {
        self.changes_due(&self.lock())
    }

    /// Whether anybody waits.
    pub(crate) fn has_waiters(&self) -> bool {
        !self.lock().waiting.is_empty()
    }

    fn changes_due(&self, state: &AgentSlotsState) -> SlotChanges {
        if state.waiting.is_empty() {
            return SlotChanges::default();
        }
        // By the same rule by which they will look: who was woken in vain would wait, and be woken, without end.
        let fitting = state.waiting.iter().enumerate().take_while(|(place, _)| self.fits(state, *place));
        let wake: Vec<SessionId> = fitting.map(|(_, session)| session.clone()).collect();
        let idle = || {
            state.live.iter().find(|(_, need)| **need == SlotUse::Idle).map(|(session, _)| session.clone())
        };
        let rest = if wake.len() < state.waiting.len() { idle() } else { None };
        SlotChanges { wake, rest }
    }

    /// Whether the one at this place in the line may start its agent. One agent may always live.
    fn fits(&self, state: &AgentSlotsState, place: usize) -> bool {
        let alone = state.live.is_empty() && place == 0;
        state.live.len() + place < self.agents_max && (alone || self.has_memory())
    }

    fn has_memory(&self) -> bool {
        // Where the kernel does not say, it is not for us to forbid.
        self.min_free_bytes == 0
            || available_memory().is_none_or(|available| available >= self.min_free_bytes)
    }

    fn lock(&self) -> MutexGuard<'_, AgentSlotsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that can be had without swapping.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(n: u8) -> SessionId {
        SessionId::from_random(&[n; 4])
    }

    #[test]
    fn those_who_wait_are_served_in_order_and_nobody_overtakes() {
        let room = AgentSlots::new(1, 0);
        assert!(room.may_start(&session(1)));
        room.set_use(&session(1), SlotUse::Busy);
        assert!(room.may_start(&session(1)), "one that lives may go on");
        assert!(!room.may_start(&session(2)));
        assert_eq!(room.enqueue(&session(2)), SlotChanges::default());
        assert_eq!(room.enqueue(&session(3)), SlotChanges::default());
        let told = room.set_use(&session(1), SlotUse::NotCounted);
        assert_eq!(told, SlotChanges { wake: vec![session(2)], rest: None });
        assert!(!room.may_start(&session(3)) && !room.may_start(&session(4)));
        assert!(room.may_start(&session(2)));
        room.set_use(&session(2), SlotUse::Busy);
        assert!(!room.may_start(&session(3)));
    }

    #[test]
    fn an_idle_agent_gives_way_and_a_busy_one_does_not() {
        let room = AgentSlots::new(2, 0);
        room.set_use(&session(1), SlotUse::Busy);
        room.set_use(&session(2), SlotUse::Idle);
        assert_eq!(room.enqueue(&session(3)), SlotChanges { wake: vec![], rest: Some(session(2)) });
        let told = room.set_use(&session(2), SlotUse::Busy);
        assert_eq!(told, SlotChanges::default());
        let told = room.set_use(&session(1), SlotUse::Idle);
        assert_eq!(told, SlotChanges { wake: vec![], rest: Some(session(1)) });
    }

    #[test]
    fn one_that_gives_up_lets_the_next_go() {
        let room = AgentSlots::new(1, 0);
        room.set_use(&session(1), SlotUse::Busy);
        room.enqueue(&session(2));
        room.enqueue(&session(3));
        room.set_use(&session(1), SlotUse::NotCounted);
        assert_eq!(room.dequeue(&session(2)).wake, [session(3)]);
        assert!(room.may_start(&session(3)));
    }

    #[test]
    fn without_memory_nothing_starts_beside_what_lives() {
        let room = AgentSlots::new(10, u64::MAX);
        assert!(room.may_start(&session(1)), "one agent may always live");
        room.set_use(&session(1), SlotUse::Busy);
        assert!(!room.may_start(&session(2)));
        assert_eq!(room.enqueue(&session(2)), SlotChanges::default(), "nobody is woken in vain");
        assert_eq!(room.enqueue(&session(2)), SlotChanges::default());
        let told = room.set_use(&session(1), SlotUse::Idle);
        assert_eq!(told, SlotChanges { wake: vec![], rest: Some(session(1)) });
        let told = room.set_use(&session(1), SlotUse::NotCounted);
        assert_eq!(told, SlotChanges { wake: vec![session(2)], rest: None });
    }
}
