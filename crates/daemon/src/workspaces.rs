//! Workspaces: the project directories that people work in. They are few and needed with every session, so all of them
//! are in memory. Changes are written to the journal first.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use qd_core::session::SessionCommand;
use qd_journal::{
    AppendRequest, EventScope, IdempotencyRecord, NewEvent, RowChange, SessionFilter, WorkspaceKey,
    WorkspaceRow,
};
use qd_protocol::api::{NewWorkspace, Workspace};
use qd_protocol::event::{EmptyEventData, EventActor, EventBody, WorkspaceCreated};
use qd_protocol::limits::{CANCEL_GRACE_S, KILL_S};
use qd_protocol::{ApiError, ErrorCode, Millis, WorkspaceId};

use crate::actor::{IdempotencyKey, encode_failed};
use crate::daemon::{Daemon, append_failed, read_failed};
use crate::random;

/// How long the sessions of a workspace that is being removed may take to close: a cancel, its grace, and a kill.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(CANCEL_GRACE_S + KILL_S + 10);

/// A workspace that is not removed.
#[derive(Debug)]
pub(crate) struct WorkspaceEntry {
    pub(crate) key: WorkspaceKey,
    pub(crate) id: WorkspaceId,
    pub(crate) path: PathBuf,
    pub(crate) doc: Workspace,
}

/// All workspaces that are not removed.
#[derive(Debug, Default)]
pub(crate) struct WorkspaceRegistry {
    entries: RwLock<HashMap<WorkspaceKey, Arc<WorkspaceEntry>>>,
}

impl WorkspaceRegistry {
    pub(crate) fn by_key(&self, key: WorkspaceKey) -> Option<Arc<WorkspaceEntry>> {
        self.entries.read().get(&key).cloned()
    }

    pub(crate) fn get(&self, id: &WorkspaceId) -> Result<Arc<WorkspaceEntry>, ApiError> {
        let entries = self.entries.read();
        entries
            .values()
            .find(|entry| entry.id == *id)
            .cloned()
            .ok_or_else(|| ApiError::not_found("workspace", id))
    }

    fn by_path(&self, path: &str) -> Option<Arc<WorkspaceEntry>> {
        let entries = self.entries.read();
        entries.values().find(|entry| entry.doc.path == path).cloned()
    }

    /// All workspaces, in the order of their creation.
    pub(crate) fn all(&self) -> Vec<Arc<WorkspaceEntry>> {
        let entries = self.entries.read();
        let mut all: Vec<_> = entries.values().cloned().collect();
        all.sort_by_key(|entry| entry.key);
        all
    }

    fn add(&self, key: WorkspaceKey, doc: Workspace) {
        let entry = WorkspaceEntry { key, id: doc.id.clone(), path: PathBuf::from(&doc.path), doc };
        self.entries.write().insert(key, Arc::new(entry));
    }

    fn remove(&self, key: WorkspaceKey) {
        self.entries.write().remove(&key);
    }
}

impl Daemon {
    /// Loads the workspaces from the journal at the start.
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

    /// The directory of a workspace. Whether it exists is checked only for an agent of this machine.
    pub(crate) async fn workspace_path(&self, id: &WorkspaceId, is_local: bool) -> Result<PathBuf, ApiError> {
        let entry = self.workspaces.get(id)?;
        if !is_local {
            return Ok(entry.path.clone());
        }
        match tokio::fs::metadata(&entry.path).await {
            Ok(metadata) if metadata.is_dir() => Ok(entry.path.clone()),
            _ => Err(path_not_found(&entry.path)),
        }
    }

    /// The workspace of a directory, if there is one.
    pub(crate) async fn workspace_at(&self, path: &str) -> Result<Option<Arc<WorkspaceEntry>>, ApiError> {
        Ok(self.workspaces.by_path(&resolve_directory(path).await?))
    }

    /// Returns the workspace of a directory, and whether it is new.
    pub(crate) async fn create_workspace(
        &self,
        new: NewWorkspace,
        actor: &EventActor,
        key: Option<IdempotencyKey>,
    ) -> Result<(Workspace, bool), ApiError> {
        let path = resolve_directory(&new.path).await?;
        let _one_at_a_time = self.key_locks.lock(format!("path {path}")).await;
        if let Some(entry) = self.workspaces.by_path(&path) {
            return Ok((entry.doc.clone(), false));
        }
        let name = new.name.filter(|name| !name.is_empty()).unwrap_or_else(|| {
            Path::new(&path)
                .file_name()
                .map_or_else(|| path.clone(), |name| name.to_string_lossy().into_owned())
        });
        let id = WorkspaceId::from_random(&random::bytes::<16>());
        let workspace = Workspace { id, path: path.clone(), name: name.clone(), created_at: Millis::now() };
        let workspace_key = self.journal.new_workspace_key();
        let body = EventBody::WorkspaceCreated(WorkspaceCreated { path, name });
        let row = workspace_row(workspace_key, &workspace, false)?;
        let response = serde_json::to_vec(&workspace).map_err(encode_failed)?;
        let record = key.map(|IdempotencyKey { key, fingerprint }| IdempotencyRecord {
            key,
            fingerprint,
            make_response: Box::new(move |_| response.clone()),
        });
        self.append_workspace_event(workspace_key, &workspace, body, actor, row, record).await?;
        self.workspaces.add(workspace_key, workspace.clone());
        Ok((workspace, true))
    }

    /// Removes a workspace and closes its sessions. If a session is busy, only with `force`.
    pub(crate) async fn remove_workspace(
        self: &Arc<Self>,
        id: &WorkspaceId,
        force: bool,
        actor: &Arc<EventActor>,
    ) -> Result<(), ApiError> {
        let entry = self.workspaces.get(id)?;
        let _one_at_a_time = self.key_locks.lock(format!("path {}", entry.doc.path)).await;
        let open = SessionFilter { workspace: Some(entry.key), open_only: true, ..SessionFilter::default() };
        let rows = self.journal.sessions(open, None, usize::MAX).await.map_err(read_failed)?;
        if !force {
            for row in &rows {
                // An awake session may have accepted a run that its row does not show yet.
                let busy = match self.probe_session(&row.id).await {
                    Some(probe) => probe.busy,
                    None => row.live,
                };
                if busy {
                    let message =
                        "a run in this workspace is active; cancel it, wait for it, or use ?force=true";
                    return Err(
                        ApiError::new(ErrorCode::Busy, message).with_detail("session_id", row.id.as_str())
                    );
                }
            }
        }
        for row in &rows {
            let session = self.session_address(row)?;
            self.send_command(&session, actor, SessionCommand::Close { purge: false }, None).await?;
        }
        // Its runs end first; if one does not end in time, the workspace is removed all the same.
        let closed = async {
            for row in &rows {
                self.wait_closed(&row.id).await;
            }
        };
        if tokio::time::timeout(CLOSE_TIMEOUT, closed).await.is_err() {
            tracing::warn!(workspace = %id, "a session of a removed workspace did not close in time");
        }
        let row = workspace_row(entry.key, &entry.doc, true)?;
        self.append_workspace_event(
            entry.key,
            &entry.doc,
            EventBody::WorkspaceRemoved(EmptyEventData {}),
            actor,
            row,
            None,
        )
        .await?;
        self.workspaces.remove(entry.key);
        Ok(())
    }

    async fn append_workspace_event(
        &self,
        key: WorkspaceKey,
        workspace: &Workspace,
        body: EventBody,
        actor: &EventActor,
        row: RowChange,
        record: Option<IdempotencyRecord>,
    ) -> Result<(), ApiError> {
        let event = NewEvent {
            scope: Arc::new(EventScope {
                workspace: Some((key, workspace.id.clone())),
                ..EventScope::default()
            }),
            number: None,
            // The creation has the same time in the list and in the event.
            ts: if matches!(body, EventBody::WorkspaceCreated(_)) {
                workspace.created_at.into()
            } else {
                Millis::now().into()
            },
            run: None,
            kind: body.kind(),
            data: body.encode(Some(actor)).map_err(encode_failed)?,
            update_number: None,
        };
        let append = AppendRequest {
            events: vec![event],
            rows: vec![row],
            idempotency: record,
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

/// Resolves a path from a client to a directory, following symbolic links.
async fn resolve_directory(path: &str) -> Result<String, ApiError> {
    let given = Path::new(path);
    if !given.is_absolute() {
        let message =
            format!("{path} is not an absolute path; the daemon does not know your current directory");
        return Err(ApiError::new(ErrorCode::PathNotFound, message));
    }
    let resolved = tokio::fs::canonicalize(given).await.map_err(|_| path_not_found(given))?;
    match tokio::fs::metadata(&resolved).await {
        Ok(metadata) if metadata.is_dir() => {}
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
