//! A fleet as lists show it: its own state, and the current states of its sessions.

use std::collections::BTreeMap;

use qd_core::fleet::FleetState;
use qd_journal::{FleetRow, RowChange};
use qd_protocol::api::SessionStatus;
use qd_protocol::fleet::{Fleet, FleetSession, FleetStatus};
use qd_protocol::{ApiError, Millis, SessionId, WorkspaceId};
use serde::{Deserialize, Serialize};

use super::FleetAddress;
use crate::actor::encode_failed;
use crate::http::unreadable_row;

/// The part of a fleet's row that never changes.
#[derive(Debug, Serialize, Deserialize)]
struct FleetOriginDoc {
    workspace_id: WorkspaceId,
    task: String,
    sessions: BTreeMap<String, SessionId>,
    created_at: Millis,
}

/// The part of a fleet's row that changes.
#[derive(Debug, Serialize, Deserialize)]
struct FleetStatusDoc {
    state: FleetStatus,
    result: Option<String>,
    problems: Vec<String>,
    updated_at: Millis,
}

/// The row of a new fleet.
pub(crate) fn new_fleet_row(fleet: &FleetAddress, state: &FleetState) -> Result<RowChange, ApiError> {
    let origin = FleetOriginDoc {
        workspace_id: state.workspace.clone(),
        task: state.spec.task.clone(),
        sessions: state.sessions.clone(),
        created_at: state.created_at.wall,
    };
    fleet_row_change(fleet, state, Some(serde_json::to_vec(&origin).map_err(encode_failed)?))
}

/// The row of a fleet in its current state.
pub(crate) fn fleet_row(fleet: &FleetAddress, state: &FleetState) -> Result<RowChange, ApiError> {
    fleet_row_change(fleet, state, None)
}

fn fleet_row_change(
    fleet: &FleetAddress,
    state: &FleetState,
    origin: Option<Vec<u8>>,
) -> Result<RowChange, ApiError> {
    let doc = FleetStatusDoc {
        state: state.status(),
        result: state.result.clone(),
        problems: state.problems.clone(),
        updated_at: state.updated_at,
    };
    Ok(RowChange::Fleet(FleetRow {
        key: fleet.key,
        id: fleet.id.clone(),
        workspace: fleet.workspace_key,
        live: state.finished.is_none(),
        budget_usd: state.spec.budget_usd,
        created_with: origin,
        doc: serde_json::to_vec(&doc).map_err(encode_failed)?,
    }))
}

/// A new fleet, as clients see it.
pub(super) fn new_fleet_view(state: &FleetState) -> Fleet {
    let idle = |id: &SessionId| FleetSession { session_id: id.clone(), state: SessionStatus::Idle };
    Fleet {
        id: state.id.clone(),
        workspace_id: state.workspace.clone(),
        state: state.status(),
        sessions: state.sessions.iter().map(|(name, id)| (name.clone(), idle(id))).collect(),
        result: None,
        task: state.spec.task.clone(),
        problems: Vec::new(),
        created_at: state.created_at.wall,
        updated_at: state.updated_at,
    }
}

/// A fleet as clients see it. `state_of` gives the state of a session, if it is known.
pub(super) fn fleet_view(
    row: &FleetRow,
    state_of: impl Fn(&SessionId) -> Option<SessionStatus>,
) -> Result<Fleet, ApiError> {
    let unreadable = |error| unreadable_row("fleet", &row.id)(error);
    let origin = row.created_with.as_deref().unwrap_or_default();
    let FleetOriginDoc { workspace_id, task, sessions, created_at } =
        serde_json::from_slice(origin).map_err(unreadable)?;
    let FleetStatusDoc { state, result, problems, updated_at } =
        serde_json::from_slice(&row.doc).map_err(unreadable)?;
    let session = |session_id: SessionId| FleetSession {
        state: state_of(&session_id).unwrap_or(SessionStatus::Idle),
        session_id,
    };
    Ok(Fleet {
        id: row.id.clone(),
        workspace_id,
        state,
        sessions: sessions.into_iter().map(|(name, id)| (name, session(id))).collect(),
        result,
        task,
        problems,
        created_at,
        updated_at,
    })
}
