//! The unmerged work in the worktrees of listed sessions. Git needs its time for it, and a list does not wait long.

use std::time::Duration;

use qd_protocol::api::Session;
use qd_protocol::worktree::Worktree;

use crate::client::DaemonClient;
use crate::render::session_cells::UnmergedWork;

/// How long a list waits for git.
const GIT_WAIT: Duration = Duration::from_secs(2);
/// Only what lists show: sizes and overlaps take longer.
const PATH: &str = "/v1/worktrees?overlaps=false&sizes=false&lines=true";

/// Asks only if one of the sessions has a worktree. A daemon that takes too long, or is too old to know, leaves the work
/// unknown: a list without it is better than none.
pub(super) async fn fetch_unmerged_work(client: &DaemonClient, sessions: &[Session]) -> UnmergedWork {
    if sessions.iter().all(|session| session.worktree.is_none()) {
        return UnmergedWork::of(&[]);
    }
    match tokio::time::timeout(GIT_WAIT, client.list::<Worktree>(PATH)).await {
        Ok(Ok(worktrees)) => UnmergedWork::of(&worktrees),
        Ok(Err(_)) | Err(_) => UnmergedWork::unknown(),
    }
}
