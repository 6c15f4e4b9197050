//! Liveness: a session with unfinished runs always has something that will make it go on. [`expected_wakeup`] says what
//! that is. The walk and the random properties check it after every action, and the daemon every few seconds.
//!
//! Design: docs/design/no-run-is-forgotten.md

use super::{AgentAvailability, SessionContext, SessionState};

/// What will make a session with unfinished runs go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpectedWakeup {
    /// A free slot, for which the session stands in line.
    Slot,
    /// The end of the halt.
    HaltLifted,
    /// The reset of the account's quota, or its release by a person.
    QuotaReleased,
    /// The end of a start, stop or reconnect of the agent.
    AgentChange,
    /// The end of the turn that the agent works on, or the loss of that agent.
    TurnEnd,
    /// A person's answer to an open ask.
    Answer,
    /// The end of the child sessions that the run is suspended for.
    ChildrenEnd,
    /// The deadline of a stop: a turn that does not end is killed, and then given up.
    StopDeadline,
}

/// What will make this session go on; `None` if nothing will, which is a mistake of ours. `in_line` says whether the
/// session stands in the line for a free slot. Only meaningful for a session with unfinished runs.
pub fn expected_wakeup(
    state: &SessionState,
    context: &SessionContext,
    in_line: bool,
) -> Option<ExpectedWakeup> {
    match state.current_turn() {
        Some((_, started)) => match context.agent {
            AgentAvailability::Lost => Some(ExpectedWakeup::AgentChange),
            AgentAvailability::Ready { .. } | AgentAvailability::Starting => {
                let has_open_ask = state.pending_asks().next().is_some();
                Some(if has_open_ask { ExpectedWakeup::Answer } else { ExpectedWakeup::TurnEnd })
            }
            // A turn without an agent. A run timeout does not count: it may be hours away.
            AgentAvailability::Absent | AgentAvailability::IdleStopped => {
                started.stop.map(|_| ExpectedWakeup::StopDeadline)
            }
        },
        None if state.run_awaiting_agent().is_none() => Some(ExpectedWakeup::ChildrenEnd),
        None if context.halted => Some(ExpectedWakeup::HaltLifted),
        None if context.quota_until.is_some() => Some(ExpectedWakeup::QuotaReleased),
        None => match context.agent {
            AgentAvailability::Starting | AgentAvailability::Lost => Some(ExpectedWakeup::AgentChange),
            AgentAvailability::Ready { .. } | AgentAvailability::IdleStopped
                if state.worker_stopping_since.is_some() =>
            {
                Some(ExpectedWakeup::AgentChange)
            }
            AgentAvailability::Ready { .. } => None,
            AgentAvailability::Absent | AgentAvailability::IdleStopped => {
                (in_line && state.waits_for_slot()).then_some(ExpectedWakeup::Slot)
            }
        },
    }
}
