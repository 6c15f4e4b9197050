//! How the descriptors that this process may open are divided among its own files, workers and connections. Everything
//! that a client can open is limited, so that no number of clients can keep the daemon from writing its journal,
//! starting a worker or taking a command.

use qd_protocol::limits::{COMMAND_CONNECTIONS, CONNECTIONS_MAX, FILE_DESCRIPTORS, WORKER_DESCRIPTORS};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The limit on open files that the daemon asks for.
const DESCRIPTOR_LIMIT: usize = 65_536;
/// One in this many of the descriptors that are not reserved is for workers.
const WORKER_SHARE: usize = 3;
/// Descriptors that starting one worker takes for a moment: its pipes and its log.
const WORKER_START_DESCRIPTORS: usize = 6;
/// One in this many connections is reserved for commands, if that is more than [`COMMAND_CONNECTIONS`].
const COMMAND_SHARE: usize = 16;
/// The most connections over the limit that are answered at the same time.
const REJECTIONS_MAX: usize = 64;

/// How many of each thing may be open at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DescriptorShares {
    /// Workers on this machine.
    pub(crate) workers: usize,
    pub(crate) connections: usize,
    /// Connections that may be used for event streams, waits and terminals, which last.
    pub(crate) streams: usize,
    /// Connections over the limit that are told so before they are closed.
    pub(crate) rejections: usize,
}

impl DescriptorShares {
    /// The shares of the limit that this process has, which is raised first as far as possible.
    pub(crate) fn of_this_process() -> Self {
        let limit = raise_descriptor_limit();
        let shares = Self::divide(limit);
        let Self { workers, connections, streams, .. } = shares;
        tracing::info!(limit, workers, connections, streams, "the limit on open files");
        shares
    }

    /// Divides a limit. A very small one gives at least one of each.
    pub(crate) fn divide(limit: usize) -> Self {
        let usable = limit.saturating_sub(FILE_DESCRIPTORS);
        let for_workers = usable / WORKER_SHARE;
        let rejections = (usable / 16).clamp(1, REJECTIONS_MAX);
        let connections = usable.saturating_sub(for_workers + rejections).clamp(2, CONNECTIONS_MAX);
        Self {
            workers: (for_workers.saturating_sub(WORKER_START_DESCRIPTORS) / WORKER_DESCRIPTORS).max(1),
            connections,
            streams: streams_of(connections),
            rejections,
        }
    }
}

/// How many of so many connections may be used for what lasts.
pub(crate) fn streams_of(connections: usize) -> usize {
    let commands = (connections / COMMAND_SHARE).max(COMMAND_CONNECTIONS);
    connections.saturating_sub(commands).max(1)
}

/// Raises the soft limit on open files, which is usually 1024, and returns the limit in force. If it cannot be raised,
/// the daemon runs with the limit it has.
fn raise_descriptor_limit() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let to_usize = |files: u64| usize::try_from(files).unwrap_or(usize::MAX);
    let wanted = limit.maximum.map_or(DESCRIPTOR_LIMIT, |most| to_usize(most).min(DESCRIPTOR_LIMIT));
    if limit.current.is_some_and(|now| to_usize(now) < wanted) {
        let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted as u64), ..limit });
        tracing::debug!(?raised, wanted, "raised the limit on open files");
    }
    getrlimit(Resource::Nofile).current.map_or(DESCRIPTOR_LIMIT, to_usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The descriptors that are open if every share is used up.
    fn used(shares: DescriptorShares) -> usize {
        let workers = shares.workers * WORKER_DESCRIPTORS + WORKER_START_DESCRIPTORS;
        FILE_DESCRIPTORS + workers + shares.connections + shares.rejections
    }

    #[test]
    fn the_shares_together_never_exceed_the_limit() {
        for limit in [80, 96, 128, 256, 1024, 4096, 65_536, 1 << 20] {
            let shares = DescriptorShares::divide(limit);
            assert!(used(shares) <= limit, "{limit}: {shares:?}");
            assert!(shares.connections - shares.streams >= COMMAND_CONNECTIONS, "{limit}: {shares:?}");
        }
    }

    #[test]
    fn a_usual_limit_allows_the_documented_connections() {
        let shares = DescriptorShares::divide(65_536);
        assert_eq!((shares.connections, shares.rejections), (CONNECTIONS_MAX, REJECTIONS_MAX));
        assert_eq!(shares.streams, CONNECTIONS_MAX - CONNECTIONS_MAX / COMMAND_SHARE);
    }

    #[test]
    fn even_a_tiny_limit_leaves_one_of_each() {
        for limit in [0, 16, 41, 50] {
            let DescriptorShares { workers, connections, streams, rejections } =
                DescriptorShares::divide(limit);
            assert!(workers > 0 && connections > streams && streams > 0 && rejections > 0, "{limit}");
        }
    }
}
