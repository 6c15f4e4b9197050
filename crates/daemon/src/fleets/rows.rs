//! A fleet as lists have it: what it says of itself, and what its sessions do right now.

use qd_core::fleet::State;
use qd_core::rows::SessionDoc;
use qd_journal::{FleetRow, RowChange, SessionRow};
use qd_protocol::api::SessionState;
use qd_protocol::fleet::{Fleet, FleetSession};
use qd_protocol::{ApiError, Code};

use super::FleetRef;
use crate::actor::unwritable;

/// The row of a fleet as it stands.
pub(crate) fn row(fleet: &FleetRef, state: &State) -> Result<RowChange, ApiError> {
    Ok(RowChange::Fleet(FleetRow {
        key: fleet.key,
        id: fleet.id.clone(),
        workspace: fleet.workspace_key,
        live: state.finished.is_none(),
        budget_usd: state.spec.budget_usd,
        doc: serde_json::to_vec(&view(state, |_| None)).map_err(unwritable)?,
    }))
}

/// A fleet as clients see it. `state_of` says what a session does, where that is known.
pub(super) fn view(state: &State, state_of: impl Fn(&str) -> Option<SessionState>) -> Fleet {
    let session = |name: &str| state_of(name).unwrap_or(SessionState::Idle);
    Fleet {
        id: state.id.clone(),
        workspace_id: state.workspace.clone(),
        state: state.state(),
        sessions: state
            .sessions
            .iter()
            .map(|(name, id)| (name.clone(), FleetSession { session_id: id.clone(), state: session(name) }))
            .collect(),
        result: state.result.clone(),
        task: state.spec.task.clone(),
        problems: state.problems.clone(),
        created_at: state.created_at,
        updated_at: state.updated_at,
    }
}

/// A fleet as its row has it.
pub(super) fn read(row: &FleetRow) -> Result<Fleet, ApiError> {
    serde_json::from_slice(&row.doc).map_err(|error| {
        let message =
            format!("fleet {} could not be read from the journal: {error}; see `qd doctor`", row.id);
        ApiError::new(Code::Internal, message)
    })
}

/// What a session does right now.
pub(super) fn session_state(row: &SessionRow, halted: bool) -> Option<SessionState> {
    let doc: SessionDoc = serde_json::from_slice(&row.doc).ok()?;
    Some(doc.view(halted).state)
}
