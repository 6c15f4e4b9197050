//! How many agents may live at once, by count and by free memory. Whoever finds no room waits in line and is woken; an
//! agent that is idle, or waits for a person or for other sessions, gives way.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use qd_protocol::SessionId;

/// What a session's agent is to the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// There is none, or it waits for somebody else.
    Nothing,
    /// It lives and has nothing to do.
    Idle,
    /// It works, or is about to.
    Busy,
}

/// What others must be told after a change.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    /// Sessions that can go on.
    pub(crate) wake: Vec<SessionId>,
    /// A session whose idle agent is to give way.
    pub(crate) rest: Option<SessionId>,
}

/// The room that there is.
#[derive(Debug)]
pub(crate) struct Room {
    /// Agents that may live at once.
    most: usize,
    /// Bytes that must be free before another one is started.
    free: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Those that count.
    live: HashMap<SessionId, Need>,
    /// Those that wait, in order.
    line: VecDeque<SessionId>,
}

impl Room {
    pub(crate) fn new(most: usize, free: u64) -> Self {
        Self { most, free, state: Mutex::default() }
    }

    /// Whether this session may start its agent now. Nobody overtakes those who wait.
    pub(crate) fn has(&self, session: &SessionId) -> bool {
        let state = self.lock();
        if state.live.contains_key(session) {
            return true;
        }
        let place = state.line.iter().position(|waits| waits == session).unwrap_or(state.line.len());
        self.fits(&state, place)
    }

    /// Puts a session in line. One that is there already is told nothing: it would ask again, and be told again.
    pub(crate) fn wait(&self, session: &SessionId) -> Told {
        let mut state = self.lock();
        if state.line.contains(session) {
            return Told::default();
        }
        state.line.push_back(session.clone());
        self.consequences(&state)
    }

    /// Takes a session out of the line, if it has nothing to start any more.
    pub(crate) fn leave(&self, session: &SessionId) -> Told {
        let mut state = self.lock();
        state.line.retain(|waits| waits != session);
        self.consequences(&state)
    }

    /// Says what a session's agent is now.
    pub(crate) fn set(&self, session: &SessionId, need: Need) -> Told {
        let mut state = self.lock();
        let before = match need {
            Need::Nothing => state.live.remove(session),
            need => {
                state.line.retain(|waits| waits != session);
                state.live.insert(session.clone(), need)
            }
        };
        match before == Some(need) || (before.is_none() && need == Need::Nothing) {
            true => Told::default(),
            false => self.consequences(&state),
        }
    }

    /// Looks again: memory comes back without anybody saying so.
    pub(crate) fn look(&self) -> Told {
        self.consequences(&self.lock())
    }

    /// Whether anybody waits.
    pub(crate) fn is_waited_for(&self) -> bool {
        !self.lock().line.is_empty()
    }

    fn consequences(&self, state: &State) -> Told {
        if state.line.is_empty() {
            return Told::default();
        }
        // By the same rule by which they will look: who was woken in vain would wait, and be woken, without end.
        let fitting = state.line.iter().enumerate().take_while(|(place, _)| self.fits(state, *place));
        let wake: Vec<SessionId> = fitting.map(|(_, session)| session.clone()).collect();
        let idle =
            || state.live.iter().find(|(_, need)| **need == Need::Idle).map(|(session, _)| session.clone());
        let rest = if wake.len() < state.line.len() { idle() } else { None };
        Told { wake, rest }
    }

    /// Whether the one at this place in the line may start its agent. One agent may always live.
    fn fits(&self, state: &State, place: usize) -> bool {
        let alone = state.live.is_empty() && place == 0;
        state.live.len() + place < self.most && (alone || self.has_memory())
    }

    fn has_memory(&self) -> bool {
        // Where the kernel does not say, it is not for us to forbid.
        self.free == 0 || available_memory().is_none_or(|available| available >= self.free)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
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
        let room = Room::new(1, 0);
        assert!(room.has(&session(1)));
        room.set(&session(1), Need::Busy);
        assert!(room.has(&session(1)), "one that lives may go on");
        assert!(!room.has(&session(2)));
        assert_eq!(room.wait(&session(2)), Told::default());
        assert_eq!(room.wait(&session(3)), Told::default());
        let told = room.set(&session(1), Need::Nothing);
        assert_eq!(told, Told { wake: vec![session(2)], rest: None });
        assert!(!room.has(&session(3)) && !room.has(&session(4)));
        assert!(room.has(&session(2)));
        room.set(&session(2), Need::Busy);
        assert!(!room.has(&session(3)));
    }

    #[test]
    fn an_idle_agent_gives_way_and_a_busy_one_does_not() {
        let room = Room::new(2, 0);
        room.set(&session(1), Need::Busy);
        room.set(&session(2), Need::Idle);
        assert_eq!(room.wait(&session(3)), Told { wake: vec![], rest: Some(session(2)) });
        let told = room.set(&session(2), Need::Busy);
        assert_eq!(told, Told::default());
        let told = room.set(&session(1), Need::Idle);
        assert_eq!(told, Told { wake: vec![], rest: Some(session(1)) });
    }

    #[test]
    fn one_that_gives_up_lets_the_next_go() {
        let room = Room::new(1, 0);
        room.set(&session(1), Need::Busy);
        room.wait(&session(2));
        room.wait(&session(3));
        room.set(&session(1), Need::Nothing);
        assert_eq!(room.leave(&session(2)).wake, [session(3)]);
        assert!(room.has(&session(3)));
    }

    #[test]
    fn without_memory_nothing_starts_beside_what_lives() {
        let room = Room::new(10, u64::MAX);
        assert!(room.has(&session(1)), "one agent may always live");
        room.set(&session(1), Need::Busy);
        assert!(!room.has(&session(2)));
        assert_eq!(room.wait(&session(2)), Told::default(), "nobody is woken in vain");
        assert_eq!(room.wait(&session(2)), Told::default());
        let told = room.set(&session(1), Need::Idle);
        assert_eq!(told, Told { wake: vec![], rest: Some(session(1)) });
        let told = room.set(&session(1), Need::Nothing);
        assert_eq!(told, Told { wake: vec![session(2)], rest: None });
    }
}
