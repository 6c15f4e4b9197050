//! The worktrees that there are: what lies below the home, whether or not its session is still known.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qd_core::rows::SessionDoc;
use qd_protocol::api::Session;
use qd_protocol::limits::OVERLAP_WORKTREES_MAX;
use qd_protocol::worktree::{Overlap, Worktree, WorktreeStatus};
use qd_protocol::{ApiError, SessionId};
use qd_worktree::{GitWorktree, StopFlag, overlap, remove, summary};

use super::{BRANCH_PREFIX, worktree_refused};
use crate::daemon::{Daemon, read_failed};

impl Daemon {
    /// All worktrees, the oldest session first.
    pub(crate) async fn worktrees(self: &Arc<Self>) -> Result<Vec<Worktree>, ApiError> {
        self.inspect_all_worktrees(true).await
    }

    async fn inspect_all_worktrees(&self, sizes: bool) -> Result<Vec<Worktree>, ApiError> {
        let root = self.home.worktrees();
        let names = self.run_blocking(StopFlag::default(), move |_| session_worktrees(&root)).await?;
        let mut known: Vec<(SessionId, Option<Session>, PathBuf)> = Vec::with_capacity(names.len());
        for (id, path) in names {
            known.push((id.clone(), self.session_of_worktree(&id).await?, path));
        }
        self.run_blocking(StopFlag::default(), move |stop| inspect_worktrees(known, sizes, stop)).await?
    }

    /// The session that a worktree was made for, unless it is purged.
    pub(super) async fn session_of_worktree(&self, id: &SessionId) -> Result<Option<Session>, ApiError> {
        let Some(row) = self.journal.session(id).await.map_err(read_failed)? else { return Ok(None) };
        let doc: Option<SessionDoc> = serde_json::from_slice(&row.doc).ok();
        Ok(doc.map(|doc| doc.view(self.is_halted())))
    }

    /// Others that changed the same lines as a session.
    pub(super) async fn overlaps_of(self: &Arc<Self>, id: &SessionId) -> Result<Vec<Overlap>, ApiError> {
        let all = self.inspect_all_worktrees(false).await?;
        let own = all.into_iter().find(|one| one.session_id == *id);
        Ok(own.map(|one| one.overlaps).unwrap_or_default())
    }
}

/// What lies where worktrees are made and has the name of a session.
fn session_worktrees(root: &Path) -> Vec<(SessionId, PathBuf)> {
    // One path for each: what is a link leads somewhere else.
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
    sizes: bool,
    stop: &StopFlag,
) -> Result<Vec<Worktree>, ApiError> {
    let mut found = Vec::with_capacity(known.len());
    let mut at_work: BTreeMap<PathBuf, Vec<(usize, GitWorktree)>> = BTreeMap::new();
    for (id, session, path) in known {
        let tree = match GitWorktree::open(&path, stop) {
            Err(qd_worktree::WorktreeError::Stopped) => {
                return Err(worktree_refused(qd_worktree::WorktreeError::Stopped));
            }
            tree => tree.ok(),
        };
        let mut one = Worktree {
            workspace_id: session.as_ref().map(|session| session.workspace_id.clone()),
            title: session.as_ref().and_then(|session| session.title.clone()),
            session_state: session.as_ref().map(|session| session.state),
            path: path.display().to_string(),
            repository: remove::repository_of(&path, stop).map(|top| top.display().to_string()),
            branch: format!("{BRANCH_PREFIX}{id}"),
            base: None,
            target: None,
            state: WorktreeStatus::Unknown,
            changed_files: 0,
            ahead: 0,
            size_bytes: if sizes { summary::disk_usage(&path) } else { 0 },
            overlaps: Vec::new(),
            session_id: id,
        };
        if let Some(tree) = tree {
            one.base = Some(tree.record.base.clone());
            one.target.clone_from(&tree.record.target);
            if let Ok(stands) = tree.summarize() {
                (one.state, one.changed_files, one.ahead) =
                    (stands.state, stands.changed_files, stands.ahead);
            }
            if matches!(one.state, WorktreeStatus::Dirty | WorktreeStatus::Ahead) {
                at_work.entry(tree.common_dir.clone()).or_default().push((found.len(), tree));
            }
        }
        found.push(one);
    }
    for (repository, trees) in at_work {
        let (places, mut trees): (Vec<usize>, Vec<GitWorktree>) = trees.into_iter().unzip();
        if trees.len() > OVERLAP_WORKTREES_MAX {
            // The newest: what is old has been looked at before.
            trees.drain(..trees.len() - OVERLAP_WORKTREES_MAX);
        }
        let places = &places[places.len() - trees.len()..];
        match overlap::find_overlaps(&trees) {
            Ok(pairs) => {
                for (one, other, files) in pairs {
                    for (mine, theirs) in [(one, other), (other, one)] {
                        let session_id = found[places[theirs]].session_id.clone();
                        found[places[mine]].overlaps.push(Overlap { session_id, files: files.clone() });
                    }
                }
            }
            // One of them may have gone or moved while it was looked at; that is no reason to list none.
            Err(error) => {
                tracing::warn!(repository = %repository.display(), %error, "worktrees could not be compared");
            }
        }
    }
    Ok(found)
}
