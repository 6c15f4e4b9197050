//! Watches how many processes an agent has started and how much memory they use, while a turn runs.

use std::time::Duration;

use qd_keeper::{TreeUsage, machine_memory, tree_usage};
use qd_protocol::event::RunError;
use qd_protocol::worker::AgentLimits;

use crate::agent_processes::AgentProcesses;

/// Between two looks at a tree that is far from its limits.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);
/// Between two looks at a tree that uses more than one part in [`NEAR_PART`] of what it may.
const NEAR_LOOK_INTERVAL: Duration = Duration::from_millis(250);
const NEAR_PART: u64 = 8;

/// A limit of an agent's tree that was exceeded.
#[derive(Debug, Clone, Copy)]
pub(super) enum ExceededTreeLimit {
    Processes { max: u64 },
    Memory { max_mb: u64 },
}

impl ExceededTreeLimit {
    /// The error of the turn that was ended for it.
    pub(super) fn error(self) -> RunError {
        match self {
            Self::Processes { max } => RunError::new(
                "process_limit",
                format!(
                    "the agent had started more than {max} processes, so all of them were ended; `max_processes` in \
                     config.toml sets how many it may start"
                ),
            ),
            Self::Memory { max_mb } => RunError::new(
                "memory_limit",
                format!(
                    "the agent and what it had started used more than {max_mb} MiB of memory, so all of them were \
                     ended; `max_memory_mb` in config.toml sets how much they may use"
                ),
            ),
        }
    }
}

/// What one tree may use.
#[derive(Debug, Clone, Copy)]
struct TreeLimits {
    processes: u64,
    memory: u64,
}

impl TreeLimits {
    fn new(limits: AgentLimits) -> Self {
        let percent = || Some(machine_memory()? / 100 * limits.memory_percent?);
        let memory = limits.memory_mb.map(|mb| mb << 20).or_else(percent);
        Self { processes: limits.processes.unwrap_or(u64::MAX), memory: memory.unwrap_or(u64::MAX) }
    }

    fn find_exceeded(self, usage: TreeUsage) -> Option<ExceededTreeLimit> {
        if usage.processes > self.processes {
            Some(ExceededTreeLimit::Processes { max: self.processes })
        } else if usage.memory > self.memory {
            Some(ExceededTreeLimit::Memory { max_mb: self.memory >> 20 })
        } else {
            None
        }
    }

    fn is_near(self, usage: TreeUsage) -> bool {
        usage.processes > self.processes / NEAR_PART || usage.memory > self.memory / NEAR_PART
    }
}

/// Waits until the processes below an agent's keeper exceed a limit. For ever if they have none.
pub(super) async fn wait_for_tree_limit(
    agent_processes: Option<&AgentProcesses>,
    limits: Option<&AgentLimits>,
) -> ExceededTreeLimit {
    let (Some(agent_processes), Some(&limits)) = (agent_processes, limits) else {
        return std::future::pending().await;
    };
    let limits = TreeLimits::new(limits);
    if limits.processes == u64::MAX && limits.memory == u64::MAX {
        return std::future::pending().await;
    }
    let keeper = agent_processes.keeper().pid();
    let mut interval = LOOK_INTERVAL;
    loop {
        tokio::time::sleep(interval).await;
        let look = move || tree_usage(keeper, limits.processes.saturating_add(1));
        let Ok(usage) = tokio::task::spawn_blocking(look).await else { continue };
        if let Some(exceeded) = limits.find_exceeded(usage) {
            return exceeded;
        }
        interval = if limits.is_near(usage) { NEAR_LOOK_INTERVAL } else { LOOK_INTERVAL };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_set_limits_a_tree() {
        let usage = TreeUsage { processes: 10, memory: 10 << 20 };
        let exceeded =
            |limits| TreeLimits::new(limits).find_exceeded(usage).map(|exceeded| exceeded.error().code);
        assert_eq!(exceeded(AgentLimits::default()), None);
        assert_eq!(
            exceeded(AgentLimits { processes: Some(10), memory_mb: Some(10), ..Default::default() }),
            None
        );
        let few = AgentLimits { processes: Some(9), ..Default::default() };
        assert_eq!(exceeded(few).as_deref(), Some("process_limit"));
        let little = AgentLimits { memory_mb: Some(9), ..Default::default() };
        assert_eq!(exceeded(little).as_deref(), Some("memory_limit"));
        let share = AgentLimits { memory_percent: Some(0), ..Default::default() };
        assert_eq!(exceeded(share).as_deref(), Some("memory_limit"));
    }
}
