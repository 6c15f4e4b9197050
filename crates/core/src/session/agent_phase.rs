//! Whether a session's agent is there. Three parties say it in words of their own, and this file maps one to the other:
//!
//! - The worker reports an [`AgentPresence`] when it is connected, and updates afterwards.
//! - The daemon keeps an [`AgentPhase`]: the same, with the requests that it has made and that are not answered yet.
//! - The machine asks whether a prompt can be sent: [`AgentAvailability`].
//!
//! | phase | the worker reports | the machine sees |
//! | --- | --- | --- |
//! | `Starting` | `Empty`, `Starting`, `Gone` | `Starting` |
//! | `Ready` | `Ready` | `Ready`, or `Starting` if the agent's settings are outdated |
//! | `Stopping` | any, until it has stopped | `Starting` |
//! | `IdleStopped` | `IdleStopped` | `IdleStopped` |
//! | `Closing` | any, until it is gone | `Starting` |
//! | `Ended` | nothing more | `Absent` |
//!
//! While the connection is lost, the machine sees `Lost`, unless the agent has ended.

use qd_protocol::frame::v1::AgentPresence;

use super::AgentAvailability;

/// How far an agent has come that has a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AgentPhase {
    /// The start was requested; the agent has not reported ready.
    #[default]
    Starting,
    /// The agent takes prompts.
    Ready {
        /// It accepts steers during a turn.
        steers: bool,
    },
    /// The agent was told to stop, or ends with its turn, and has not reported it yet.
    Stopping,
    /// The idle agent was stopped; its worker still holds processes that turns left running.
    IdleStopped,
    /// The worker was told to end the agent and exit.
    Closing,
    /// The agent's last update has arrived.
    Ended,
}

impl AgentPhase {
    /// The phase after a connection to a worker that reports this presence. A request that is not answered yet is
    /// repeated on every connection, so it decides.
    pub fn after_attach(self, presence: AgentPresence) -> Self {
        match (self, presence) {
            (Self::Stopping | Self::Closing | Self::Ended, _) => self,
            (_, AgentPresence::Ready { steers }) => Self::Ready { steers },
            (_, AgentPresence::IdleStopped) => Self::IdleStopped,
            (_, AgentPresence::Empty | AgentPresence::Starting | AgentPresence::Gone) => Self::Starting,
        }
    }

    /// What the machine sees of it. `is_outdated` says that settings have changed since the agent was started: it finishes
    /// its turn, but the next run waits for a new agent.
    pub fn availability(self, is_lost: bool, is_outdated: bool) -> AgentAvailability {
        match self {
            Self::Ended => AgentAvailability::Absent,
            _ if is_lost => AgentAvailability::Lost,
            Self::Ready { steers } if !is_outdated => AgentAvailability::Ready { steerable: steers },
            Self::IdleStopped => AgentAvailability::IdleStopped,
            Self::Ready { .. } | Self::Starting | Self::Stopping | Self::Closing => {
                AgentAvailability::Starting
            }
        }
    }

    /// Whether a start or stop is under way.
    pub fn is_changing(self) -> bool {
        matches!(self, Self::Starting | Self::Stopping | Self::Closing)
    }

    /// Whether there is an agent that counts towards the limit on live agents.
    pub fn is_live(self) -> bool {
        !matches!(self, Self::IdleStopped | Self::Ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READY: AgentPhase = AgentPhase::Ready { steers: true };
    const PHASES: [AgentPhase; 6] = [
        AgentPhase::Starting,
        READY,
        AgentPhase::Stopping,
        AgentPhase::IdleStopped,
        AgentPhase::Closing,
        AgentPhase::Ended,
    ];
    const PRESENCES: [AgentPresence; 5] = [
        AgentPresence::Empty,
        AgentPresence::Starting,
        AgentPresence::Ready { steers: true },
        AgentPresence::IdleStopped,
        AgentPresence::Gone,
    ];

    #[test]
    fn the_table_has_every_phase_with_every_presence() {
        for phase in PHASES {
            let after = PRESENCES.map(|presence| phase.after_attach(presence));
            let expected = match phase {
                AgentPhase::Starting | AgentPhase::Ready { .. } | AgentPhase::IdleStopped => [
                    AgentPhase::Starting,
                    AgentPhase::Starting,
                    READY,
                    AgentPhase::IdleStopped,
                    AgentPhase::Starting,
                ],
                AgentPhase::Stopping | AgentPhase::Closing | AgentPhase::Ended => [phase; 5],
            };
            assert_eq!(after, expected, "{phase:?}");
        }
    }

    #[test]
    fn the_table_has_what_the_machine_sees_of_every_phase() {
        for phase in PHASES {
            let expected = match phase {
                AgentPhase::Starting | AgentPhase::Stopping | AgentPhase::Closing => {
                    AgentAvailability::Starting
                }
                AgentPhase::Ready { steers } => AgentAvailability::Ready { steerable: steers },
                AgentPhase::IdleStopped => AgentAvailability::IdleStopped,
                AgentPhase::Ended => AgentAvailability::Absent,
            };
            assert_eq!(phase.availability(false, false), expected, "{phase:?}");
            let outdated = if phase == READY { AgentAvailability::Starting } else { expected };
            assert_eq!(phase.availability(false, true), outdated, "{phase:?}, outdated");
            let lost = if phase == AgentPhase::Ended { expected } else { AgentAvailability::Lost };
            for is_outdated in [false, true] {
                assert_eq!(phase.availability(true, is_outdated), lost, "{phase:?}, lost");
            }
        }
    }

    #[test]
    fn a_session_sleeps_only_if_no_start_or_stop_is_under_way_and_sees_no_agent_that_does_not_count() {
        for phase in PHASES {
            let seen = phase.availability(false, false);
            assert_eq!(phase.is_changing(), seen == AgentAvailability::Starting, "{phase:?}");
            let is_absent = matches!(seen, AgentAvailability::Absent | AgentAvailability::IdleStopped);
            assert_eq!(phase.is_live(), !is_absent, "{phase:?}");
        }
    }
}
