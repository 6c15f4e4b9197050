//! Git worktrees of sessions as clients see them: their location and state, the changes in them, and the result of a
//! merge.

use serde::{Deserialize, Serialize};

use crate::api::SessionStatus;
use crate::ids::{SessionId, WorkspaceId};

/// A session's git worktree, below the daemon's home.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Worktree {
    /// The session that the worktree was created for.
    pub session_id: SessionId,
    /// The workspace of that session. Null once the session is purged.
    pub workspace_id: Option<WorkspaceId>,
    /// Title of that session.
    pub title: Option<String>,
    /// What that session is doing. Null once the session is purged.
    pub session_state: Option<SessionStatus>,
    /// Absolute path of the worktree.
    pub path: String,
    /// The repository that the worktree belongs to. Null if the repository is gone.
    pub repository: Option<String>,
    pub branch: String,
    /// The commit from which the worktree started.
    pub base: Option<String>,
    /// The branch into which the worktree is merged by default.
    pub target: Option<String>,
    pub state: WorktreeStatus,
    /// Why the state is unknown, for example because the worktree's `.git` was changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Number of files with uncommitted changes.
    pub changed_files: u64,
    /// Number of commits that are not merged.
    pub ahead: u64,
    /// Lines added by the unmerged work. Present only with `?lines=true`, and not for binary files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub added: Option<u64>,
    /// Lines removed by the unmerged work. Present only with `?lines=true`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removed: Option<u64>,
    /// Size on disk in bytes. 0 with `?sizes=false`.
    pub size_bytes: u64,
    /// Other worktrees of the same repository in which the same lines were changed. Empty with `?overlaps=false`.
    pub overlaps: Vec<Overlap>,
}

/// State of a worktree. Only a `clean` or `merged` worktree is removed without `?force=true`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = WorktreeState)]
pub enum WorktreeStatus {
    /// Nothing was changed since the worktree was created.
    Clean,
    /// There are uncommitted changes.
    Dirty,
    /// Everything is committed, but not everything is merged.
    Ahead,
    /// Everything is committed and merged.
    Merged,
    /// Unknown, because the repository is gone, or the worktree was not created completely or was changed.
    Unknown,
}

impl WorktreeStatus {
    /// The state as it appears in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Clean => "clean",
            Self::Dirty => "dirty",
            Self::Ahead => "ahead",
            Self::Merged => "merged",
            Self::Unknown => "unknown",
        }
    }

    /// Whether removing the worktree loses no work.
    pub fn is_safe_to_remove(self) -> bool {
        matches!(self, Self::Clean | Self::Merged)
    }
}

/// Another session that changed the same lines of the same files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct Overlap {
    /// The other session.
    pub session_id: SessionId,
    /// The files that both sessions changed.
    pub files: Vec<OverlapFile>,
}

/// A file in which two sessions changed the same lines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct OverlapFile {
    /// Path from the top of the repository.
    pub path: String,
    /// The lines, numbered as before either change. Empty if the whole file overlaps.
    pub lines: Vec<LineRange>,
}

/// A range of lines, numbered from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct LineRange {
    pub first: u64,
    /// The last line, which is included.
    pub last: u64,
}

/// Everything that a session changed in its worktree, committed or not, compared with where the worktree started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Diff)]
pub struct WorktreeDiff {
    /// The commit that the changes are compared with.
    pub base: String,
    /// The commit that the worktree is at.
    pub head: String,
    /// Whether there are uncommitted changes.
    pub uncommitted: bool,
    /// The changed files.
    pub files: Vec<DiffFile>,
    /// The changes as shown by `git diff`. Null if only the files were requested.
    pub patch: Option<String>,
    /// Whether the patch was too long and is cut.
    pub truncated: bool,
}

/// A changed file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct DiffFile {
    /// Path from the top of the repository.
    pub path: String,
    /// Number of added lines. Null for a binary file.
    pub added: Option<u64>,
    /// Number of removed lines. Null for a binary file.
    pub removed: Option<u64>,
}

/// Body of `POST .../sessions/{s}/merge`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MergeRequest {
    /// The branch to merge into. Defaults to the branch that the worktree was created from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub into: Option<String>,
    /// Whether all changes become a single commit.
    #[serde(default)]
    pub squash: bool,
    /// The message of the commits that the merge makes. Defaults to the session's title.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Result of a merge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Merged)]
pub struct MergeResult {
    /// The branch that was merged into.
    pub into: String,
    /// The commit that the branch is at now.
    pub commit: String,
    /// Whether the branch moved. False if there was nothing to merge.
    pub moved: bool,
    /// The commit that was created for uncommitted changes of the session.
    pub committed: Option<String>,
    /// Path of the checkout of the branch that was updated with it.
    pub checkout: Option<String>,
    /// Other worktrees that changed the same lines and will meet these changes when they are merged.
    pub overlaps: Vec<Overlap>,
}

/// A file that both sides changed in conflicting ways, so that a person has to decide.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[schema(as = Conflict)]
pub struct MergeConflict {
    /// Path from the top of the repository.
    pub path: String,
    /// Description of the conflict.
    pub what: String,
    /// The conflicting places as shown by `git diff`. Long ones are cut.
    pub hunks: String,
}

/// A worktree that was removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct RemovedWorktree {
    /// The session that the worktree was created for.
    pub session_id: SessionId,
    /// Absolute path that the worktree had.
    pub path: String,
    /// The worktree's branch, if it was kept because it has commits that no other branch has.
    pub kept_branch: Option<String>,
}
