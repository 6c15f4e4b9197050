//! The workspaces: directories that people work in. They are few and asked for with every session, so all of them
//! are in memory; the journal is written first.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use qd_core::session::SessionCommand;
use qd_journal::{
    AppendRequest, EventScope, IdempotencyRecord, NewEvent, RowChange, SessionFilter, WorkspaceKey,
    WorkspaceRow,
};
use qd_protocol::api::{NewWorkspace, Workspace};
use qd_protocol::event::{EmptyEventData, EventBody, WorkspaceCreated};
use qd_protocol::limits::{CANCEL_GRACE_S, KILL_S};
use qd_protocol::{ApiError, ErrorCode, Millis, WorkspaceId};

use crate::actor::{IdempotencyKey, encode_failed};
use crate::daemon::{Daemon, append_failed, read_failed};
use crate::random;

/// How long the sessions of a workspace that is forgotten may take to close: a cancel, its grace, and a kill.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(CANCEL_GRACE_S + KILL_S + 10);

/// A workspace that is not removed.
#[derive(Debug)]
pub(crate) struct WorkspaceEntry {
    pub(crate) key: WorkspaceKey,
    pub(crate) id: WorkspaceId,
    pub(crate) path: PathBuf,
    pub(crate) doc: Workspace,
}

/// Those that are not removed.
#[derive(Debug, Default)]
pub(crate) struct WorkspaceRegistry {
    entries: RwLock<HashMap<WorkspaceKey, Arc<WorkspaceEntry>>>,
}

impl WorkspaceRegistry {
    pub(crate) fn by_key(&self, key: WorkspaceKey) -> Option<Arc<WorkspaceEntry>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).get(&key).cloned()
    }

    /// The workspace of this id.
    pub(crate) fn get(&self, id: &WorkspaceId) -> Result<Arc<WorkspaceEntry>, ApiError> {
        let known = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        known
            .values()
            .find(|place| place.id == *id)
            .cloned()
            .ok_or_else(|| ApiError::not_found("workspace", id))
    }

    fn by_path(&self, path: &str) -> Option<Arc<WorkspaceEntry>> {
        let known = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        known.values().find(|place| place.doc.path == path).cloned()
    }

    /// All of them, in the order in which they were made.
    pub(crate) fn all(&self) -> Vec<Arc<WorkspaceEntry>> {
        let known = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = known.values().cloned().collect();
        all.sort_by_key(|place| place.key);
        all
    }

    fn add(&self, key: WorkspaceKey, doc: Workspace) {
        let place = WorkspaceEntry { key, id: doc.id.clone(), path: PathBuf::from(&doc.path), doc };
        self.entries.write().unwrap_or_else(PoisonError::into_inner).insert(key, Arc::new(place));
    }

    fn remove(&self, key: WorkspaceKey) {
        self.entries.write().unwrap_or_else(PoisonError::into_inner).remove(&key);
    }
}

impl Daemon {
    /// Reads the workspaces from the journal, once, at the start.
    pub(crate) async fn load_workspaces(&self) -> Result<(), ApiError> {
        for row in self.journal.workspaces(None, usize::MAX).await.map_err(read_failed)? {
            if !row.removed {
                let WorkspaceRow { key, id, path, name, created_at, .. } = row;
                let name = name.unwrap_or_default();
                self.workspaces.add(key, Workspace { id, path, name, created_at });
            }
        }
        Ok(())
    }

    /// The directory of a workspace. Whether it is one can only be told if it is to be worked in `here`.
    pub(crate) async fn workspace_path(&self, id: &WorkspaceId, here: bool) -> Result<PathBuf, ApiError> {
        let place = self.workspaces.get(id)?;
        if !here {
            return Ok(place.path.clone());
        }
        match tokio::fs::metadata(&place.path).await {
            Ok(found) if found.is_dir() => Ok(place.path.clone()),
            _ => Err(path_not_found(&place.path)),
        }
    }

    /// The workspace of a directory, and whether it is new.
    pub(crate) async fn create_workspace(
        &self,
        new: NewWorkspace,
        key: Option<IdempotencyKey>,
    ) -> Result<(Workspace, bool), ApiError> {
        let path = resolve_directory(&new.path).await?;
        let _one_at_a_time = self.key_locks.lock(format!("path {path}")).await;
        if let Some(place) = self.workspaces.by_path(&path) {
            return Ok((place.doc.clone(), false));
        }
        let name = new.name.filter(|name| !name.is_empty()).unwrap_or_else(|| {
            Path::new(&path)
                .file_name()
                .map_or_else(|| path.clone(), |name| name.to_string_lossy().into_owned())
        });
        let id = WorkspaceId::from_random(&random::bytes::<16>());
        let workspace = Workspace { id, path: path.clone(), name: name.clone(), created_at: Millis::now() };
        let number = self.journal.new_workspace_key();
        let body = EventBody::WorkspaceCreated(WorkspaceCreated { path, name });
        let row = workspace_row(number, &workspace, false)?;
        let answer = serde_json::to_vec(&workspace).map_err(encode_failed)?;
        let remember = key.map(|IdempotencyKey { key, fingerprint }| IdempotencyRecord {
            key,
            fingerprint,
            make_response: Box::new(move |_| answer.clone()),
        });
        self.append_workspace_event(number, &workspace, body, row, remember).await?;
        self.workspaces.add(number, workspace.clone());
        Ok((workspace, true))
    }

    /// Forgets a workspace. Its sessions are closed; if one of them is busy, only with `force`.
    pub(crate) async fn remove_workspace(
        self: &Arc<Self>,
        id: &WorkspaceId,
        force: bool,
    ) -> Result<(), ApiError> {
        let place = self.workspaces.get(id)?;
        let _one_at_a_time = self.key_locks.lock(format!("path {}", place.doc.path)).await;
        let open = SessionFilter { workspace: Some(place.key), open_only: true, ..SessionFilter::default() };
        let rows = self.journal.sessions(open, None, usize::MAX).await.map_err(read_failed)?;
        if !force {
            for row in &rows {
                // An awake session may have accepted what its row does not show yet.
                let busy = match self.probe_session(&row.id).await {
                    Some(probe) => probe.busy,
                    None => row.live,
                };
                if busy {
                    let message =
                        "a run of this workspace is live; cancel it, wait for it, or use ?force=true";
                    return Err(
                        ApiError::new(ErrorCode::Busy, message).with_detail("session_id", row.id.as_str())
                    );
                }
            }
        }
        for row in &rows {
            let session = self.session_address(row)?;
            self.send_command(&session, SessionCommand::Close { purge: false }, None).await?;
        }
        // What runs in it ends first; if something does not, that is no reason to keep the workspace.
        let closed = async {
            for row in &rows {
                self.wait_closed(&row.id).await;
            }
        };
        if tokio::time::timeout(CLOSE_TIMEOUT, closed).await.is_err() {
            tracing::warn!(workspace = %id, "a session of a forgotten workspace did not close in time");
        }
        let row = workspace_row(place.key, &place.doc, true)?;
        self.append_workspace_event(
            place.key,
            &place.doc,
            EventBody::WorkspaceRemoved(EmptyEventData {}),
            row,
            None,
        )
        .await?;
        self.workspaces.remove(place.key);
        Ok(())
    }

    async fn append_workspace_event(
        &self,
        key: WorkspaceKey,
        workspace: &Workspace,
        body: EventBody,
        row: RowChange,
        remember: Option<IdempotencyRecord>,
    ) -> Result<(), ApiError> {
        let event = NewEvent {
            scope: Arc::new(EventScope {
                workspace: Some((key, workspace.id.clone())),
                ..EventScope::default()
            }),
            number: None,
            // Its creation has one time, in the list and in the event.
            ts: if matches!(body, EventBody::WorkspaceCreated(_)) {
                workspace.created_at
            } else {
                Millis::now()
            },
            run: None,
            kind: body.kind(),
            data: body.encode().map_err(encode_failed)?,
            update_number: None,
        };
        let append = AppendRequest {
            events: vec![event],
            rows: vec![row],
            idempotency: remember,
            may_use_reserve: false,
        };
        self.journal.append(append).await.map(drop).map_err(append_failed)
    }
}

fn workspace_row(key: WorkspaceKey, workspace: &Workspace, removed: bool) -> Result<RowChange, ApiError> {
    Ok(RowChange::Workspace(WorkspaceRow {
        key,
        id: workspace.id.clone(),
        path: workspace.path.clone(),
        name: Some(workspace.name.clone()),
        removed,
        created_at: workspace.created_at,
        doc: serde_json::to_vec(workspace).map_err(encode_failed)?,
    }))
}

/// The directory that a path from outside names, symbolic links followed.
async fn resolve_directory(path: &str) -> Result<String, ApiError> {
    let given = Path::new(path);
    if !given.is_absolute() {
        let message =
            format!("{path} is not an absolute path; the daemon has no directory of yours to begin from");
        return Err(ApiError::new(ErrorCode::PathNotFound, message));
    }
    let resolved = tokio::fs::canonicalize(given).await.map_err(|_| path_not_found(given))?;
    match tokio::fs::metadata(&resolved).await {
        Ok(found) if found.is_dir() => {}
        _ => return Err(path_not_found(given)),
    }
    let text = resolved.into_os_string().into_string();
    text.map_err(|_| {
        ApiError::new(ErrorCode::InvalidValue, "a path that is not UTF-8 cannot be a workspace; rename it")
    })
}

pub(crate) fn path_not_found(path: &Path) -> ApiError {
    let message = format!("{} is not a directory that exists; create it or check the path", path.display());
    ApiError::new(ErrorCode::PathNotFound, message)
}
