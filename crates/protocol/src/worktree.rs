//! Git worktrees of sessions as clients see them: where they are, how they stand, what changed in them, and what
//! becomes of a merge.

use serde::{Deserialize, Serialize};

use crate::api::SessionStatus;
use crate::ids::{SessionId, WorkspaceId};

/// A git worktree below the daemon's home.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Worktree {
    /// The session that it was made for.
    pub session_id: SessionId,
    /// That session's workspace; absent once the session is purged.
    pub workspace_id: Option<WorkspaceId>,
    /// That session's title.
    pub title: Option<String>,
    /// What that session does; absent once it is purged.
    pub session_state: Option<SessionStatus>,
    /// Where it is.
    pub path: String,
    /// The repository that it belongs to; absent if that is gone.
    pub repository: Option<String>,
    /// Its branch.
    pub branch: String,
    /// The commit that it was made from.
    pub base: Option<String>,
    /// The branch that it is merged into unless another is named.
    pub target: Option<String>,
    /// How it stands.
    pub state: WorktreeStatus,
    /// Files with changes that are not committed.
    pub changed_files: u64,
    /// Commits that are not merged.
    pub ahead: u64,
    /// Bytes on the disk.
    pub size_bytes: u64,
    /// Others of the same repository that changed the same lines.
    pub overlaps: Vec<Overlap>,
}

/// How a worktree stands. Only one that is `clean` or `merged` is removed without being told twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = WorktreeState)]
pub enum WorktreeStatus {
    /// Nothing was changed since it was made.
    Clean,
    /// Something is not committed.
    Dirty,
    /// Everything is committed, and something of it is not merged.
    Ahead,
    /// Everything is committed and merged.
    Merged,
    /// Nobody can tell: its repository is gone, or it was never made to its end.
    Unknown,
}

impl WorktreeStatus {
    /// The word on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Clean => "clean",
            Self::Dirty => "dirty",
            Self::Ahead => "ahead",
            Self::Merged => "merged",
            Self::Unknown => "unknown",
        }
    }

    /// Whether nothing is lost with it.
    pub fn is_safe_to_remove(self) -> bool {
        matches!(self, Self::Clean | Self::Merged)
    }
}

/// Another session that changed the same lines of the same files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Overlap {
    /// The other.
    pub session_id: SessionId,
    /// Where both changed something.
    pub files: Vec<OverlapFile>,
}

/// A file that two sessions changed at the same place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct OverlapFile {
    /// The file, from the top of the repository.
    pub path: String,
    /// The lines, as they were before either changed them. None: the file as a whole.
    pub lines: Vec<LineRange>,
}

/// Some lines of a file, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct LineRange {
    /// The first.
    pub first: u64,
    /// The last.
    pub last: u64,
}

/// What a session changed: committed or not, against where it began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Diff)]
pub struct WorktreeDiff {
    /// The commit that it is compared with.
    pub base: String,
    /// The commit that the worktree is at.
    pub head: String,
    /// Whether something is not committed.
    pub uncommitted: bool,
    /// The files.
    pub files: Vec<DiffFile>,
    /// The changes as `git diff` shows them; absent if only the files were asked for.
    pub patch: Option<String>,
    /// Whether the patch was too long and is cut.
    pub truncated: bool,
}

/// A file that changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct DiffFile {
    /// From the top of the repository.
    pub path: String,
    /// Lines that came; absent for a file that is not text.
    pub added: Option<u64>,
    /// Lines that went; absent for a file that is not text.
    pub removed: Option<u64>,
}

/// `POST .../sessions/{s}/merge`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MergeRequest {
    /// The branch; the one that the session's worktree began from, unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub into: Option<String>,
    /// Whether all of it becomes one commit.
    #[serde(default)]
    pub squash: bool,
}

/// What a merge did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Merged)]
pub struct MergeResult {
    /// The branch that was merged into.
    pub into: String,
    /// Where that branch is now.
    pub commit: String,
    /// Whether it has moved; false if there was nothing to merge.
    pub moved: bool,
    /// The commit that was made of what the session had not committed.
    pub committed: Option<String>,
    /// The checkout of that branch that was moved along.
    pub checkout: Option<String>,
    /// Others that changed the same lines and will meet this when they are merged.
    pub overlaps: Vec<Overlap>,
}

/// A file that two sides changed so that only a person can say what is right.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Conflict)]
pub struct MergeConflict {
    /// From the top of the repository.
    pub path: String,
    /// What both did, in words.
    pub what: String,
    /// The places, as `git diff` shows them, cut if they are long.
    pub hunks: String,
}

/// What was removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct RemovedWorktree {
    /// Whose worktree it was.
    pub session_id: SessionId,
    /// Where it was.
    pub path: String,
    /// Its branch, if that was kept because it has commits that no other branch has.
    pub kept_branch: Option<String>,
}
