//! The existing worktrees: the folders below the home, whether or not their session still exists.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qd_core::rows::SessionDoc;
use qd_protocol::api::Session;
use qd_protocol::limits::OVERLAP_WORKTREES_MAX;
use qd_protocol::worktree::{DiffFile, Overlap, Worktree, WorktreeStatus};
use qd_protocol::{ApiError, SessionId};
use qd_worktree::{GitRecords, GitWorktree, StopFlag, WorktreeError, overlap, summary};

use super::{BRANCH_PREFIX, worktree_refused};
use crate::daemon::{Daemon, read_failed};

/// What to find out about worktrees besides their states. Each of these takes long where there are many files or many
/// worktrees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorktreeInspection {
    /// Their sizes on disk.
    pub(crate) sizes: bool,
    /// Which of them changed the same lines.
    pub(crate) overlaps: bool,
    /// How many lines their unmerged work adds and removes.
    pub(crate) lines: bool,
}

impl Daemon {
    /// All worktrees, by session id.
    pub(crate) async fn worktrees(&self, inspection: WorktreeInspection) -> Result<Vec<Worktree>, ApiError> {
        let root = self.home.worktrees();
        let names = self.run_blocking(StopFlag::default(), move |_| session_worktrees(&root)).await?;
        let mut known: Vec<(SessionId, Option<Session>, PathBuf)> = Vec::with_capacity(names.len());
        for (id, path) in names {
            known.push((id.clone(), self.session_of_worktree(&id).await?, path));
        }
        let records = self.git_records();
        let inspect = move |stop: &StopFlag| inspect_worktrees(known, &records, inspection, stop);
        self.run_blocking(StopFlag::default(), inspect).await?
    }

    /// The session that a worktree was made for, unless it was purged.
    pub(super) async fn session_of_worktree(&self, id: &SessionId) -> Result<Option<Session>, ApiError> {
        let Some(row) = self.journal.session(id).await.map_err(read_failed)? else { return Ok(None) };
        let doc: Option<SessionDoc> = serde_json::from_slice(&row.doc).ok();
        Ok(doc.map(|doc| self.view_session(doc)))
    }

    /// Other worktrees that changed the same lines as this session's.
    pub(super) async fn overlaps_of(self: &Arc<Self>, id: &SessionId) -> Result<Vec<Overlap>, ApiError> {
        let inspection = WorktreeInspection { sizes: false, overlaps: true, lines: false };
        let all = self.worktrees(inspection).await?;
        let own = all.into_iter().find(|worktree| worktree.session_id == *id);
        Ok(own.map(|worktree| worktree.overlaps).unwrap_or_default())
    }
}

/// The folders of worktrees that are named by a session id.
fn session_worktrees(root: &Path) -> Vec<(SessionId, PathBuf)> {
    // Canonical, so that each worktree has one path even if the home is a symbolic link.
    let root = root.canonicalize().unwrap_or_else(|_| root.to_owned());
    let Ok(entries) = std::fs::read_dir(root) else { return Vec::new() };
    let mut names: Vec<(SessionId, PathBuf)> = entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter_map(|entry| {
            let name = entry.file_name();
            let id = name.to_str().filter(|name| name.starts_with(SessionId::PREFIX))?;
            Some((SessionId::parse(id).ok()?, entry.path()))
        })
        .collect();
    names.sort();
    names
}

fn inspect_worktrees(
    known: Vec<(SessionId, Option<Session>, PathBuf)>,
    records: &GitRecords,
    inspection: WorktreeInspection,
    stop: &StopFlag,
) -> Result<Vec<Worktree>, ApiError> {
    let mut worktrees = Vec::with_capacity(known.len());
    let mut changed: BTreeMap<PathBuf, Vec<(usize, GitWorktree)>> = BTreeMap::new();
    for (id, session, path) in known {
        let (tree, problem) = match GitWorktree::open(&path, records, stop) {
            Ok(tree) => (Some(tree), None),
            Err(WorktreeError::Stopped) => return Err(worktree_refused(WorktreeError::Stopped)),
            Err(WorktreeError::NoWorktree(_)) => (None, None),
            Err(error) => (None, Some(error.to_string())),
        };
        let mut worktree = Worktree {
            workspace_id: session.as_ref().map(|session| session.workspace_id.clone()),
            title: session.as_ref().and_then(|session| session.title.clone()),
            session_state: session.as_ref().map(|session| session.state),
            path: path.display().to_string(),
            repository: tree.as_ref().map(|tree| tree.repository_top().display().to_string()),
            branch: format!("{BRANCH_PREFIX}{id}"),
            base: None,
            target: None,
            state: WorktreeStatus::Unknown,
            problem,
            changed_files: 0,
            ahead: 0,
            added: None,
            removed: None,
            size_bytes: if inspection.sizes { summary::disk_usage(&path) } else { 0 },
            overlaps: Vec::new(),
            session_id: id,
        };
        if let Some(tree) = tree {
            worktree.base = Some(tree.record.base.clone());
            worktree.target.clone_from(&tree.record.target);
            match tree.summarize() {
                Ok(summary) => {
                    (worktree.state, worktree.changed_files, worktree.ahead) =
                        (summary.state, summary.changed_files, summary.ahead);
                }
                Err(error) => worktree.problem = Some(error.to_string()),
            }
            let is_changed = matches!(worktree.state, WorktreeStatus::Dirty | WorktreeStatus::Ahead);
            if inspection.lines && is_changed {
                (worktree.added, worktree.removed) = count_changed_lines(&tree).unzip();
            }
            if inspection.overlaps && is_changed {
                changed.entry(tree.record.common_dir.clone()).or_default().push((worktrees.len(), tree));
            }
        }
        worktrees.push(worktree);
    }
    for (repository, trees) in changed {
        add_overlaps(&mut worktrees, &repository, trees);
    }
    Ok(worktrees)
}

/// How many lines the unmerged work adds and removes. `None` if git cannot say, for example because the worktree was
/// removed meanwhile.
fn count_changed_lines(tree: &GitWorktree) -> Option<(u64, u64)> {
    let diff = tree.diff(false).ok()?;
    let sum = |lines: fn(&DiffFile) -> Option<u64>| diff.files.iter().filter_map(lines).sum();
    Some((sum(|file| file.added), sum(|file| file.removed)))
}

/// Compares the changed worktrees of one repository, which are given with their places in `worktrees`.
fn add_overlaps(worktrees: &mut [Worktree], repository: &Path, trees: Vec<(usize, GitWorktree)>) {
    let (indexes, mut trees): (Vec<usize>, Vec<GitWorktree>) = trees.into_iter().unzip();
    if trees.len() > OVERLAP_WORKTREES_MAX {
        // The comparison is limited to this many worktrees; the first ones by session id are left out.
        trees.drain(..trees.len() - OVERLAP_WORKTREES_MAX);
    }
    let indexes = &indexes[indexes.len() - trees.len()..];
    match overlap::find_overlaps(&trees) {
        Ok(pairs) => {
            for (first, second, files) in pairs {
                for (own, theirs) in [(first, second), (second, first)] {
                    let session_id = worktrees[indexes[theirs]].session_id.clone();
                    worktrees[indexes[own]].overlaps.push(Overlap { session_id, files: files.clone() });
                }
            }
        }
        // A worktree may have been removed or moved meanwhile; that is no reason to list none.
        Err(error) => {
            tracing::warn!(repository = %repository.display(), %error, "could not compare worktrees");
        }
    }
}
