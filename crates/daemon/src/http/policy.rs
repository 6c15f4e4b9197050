//! A policy tried on asks of the past: what it would have done with each. It reads rows and decides nothing; the
//! judging is the core's, as it is for asks that come in.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::State;
use qd_core::policy::try_again;
use qd_core::rows::{AskDoc, SessionDoc};
use qd_journal::{AskFilter, SessionKey};
use qd_protocol::error::ErrorBody;
use qd_protocol::trial::{PolicyReport, PolicyTest, Trial};
use qd_protocol::{ApiError, AskId};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::describe::{BadBody, Guarded, KeyHeader, Missing};
use super::extract::Keyed;
use super::list::limit;
use super::once::{Kept, once};
use super::unreadable;
use crate::daemon::{Daemon, read_failed};
use crate::edge::{Json, Refusal};
use crate::sessions::check_policy;

/// Asks that are read at a time: each may hold much more than is told of it.
const PAGE: usize = 64;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(test_policy))
}

/// What a policy would have done with the permissions that agents asked for. Nothing is changed by it.
#[utoipa::path(post, path = "/v1/policy/test", tag = "asks", params(KeyHeader), request_body = PolicyTest,
    responses(
        (status = 200, description = "What would be different", body = PolicyReport),
        BadBody, Missing, Guarded,
        (status = 409, description = "`idempotency_conflict`", body = ErrorBody),
    )
)]
async fn test_policy(
    State(daemon): State<Arc<Daemon>>,
    Keyed(key, Json(request)): Keyed<Json<PolicyTest>>,
) -> Result<Json<PolicyReport>, Refusal> {
    let deed = |_| async { report(&daemon, request).await.map(|report| (report, Kept::NotYet)) };
    Ok(Json(once(&daemon, key, deed).await?))
}

async fn report(daemon: &Daemon, request: PolicyTest) -> Result<PolicyReport, ApiError> {
    let PolicyTest { policy, session_id, workspace_id, limit: wanted } = request;
    check_policy(&policy)?;
    let wanted = limit(wanted)?;
    let session = match &session_id {
        Some(id) => {
            let row = daemon.journal.session(id).await.map_err(read_failed)?;
            Some(row.ok_or_else(|| ApiError::not_found("session", id))?.key)
        }
        None => None,
    };
    let workspace = workspace_id.map(|id| daemon.places.get(&id)).transpose()?.map(|place| place.key);
    let filter = AskFilter { session, workspace, pending_only: false, newest_first: true };
    let mut directories = HashMap::new();
    let mut trials: Vec<Trial> = Vec::new();
    let mut after: Option<AskId> = None;
    'pages: loop {
        let rows = daemon.journal.asks(filter, after.as_ref(), PAGE).await.map_err(read_failed)?;
        let end = rows.len() < PAGE;
        after = rows.last().map(|row| row.id.clone());
        for row in rows {
            let doc: AskDoc = serde_json::from_slice(&row.doc).map_err(unreadable("ask", &row.id))?;
            let directory = match directories.get(&row.session) {
                Some(known) => known,
                None => directories.entry(row.session).or_insert(directory(daemon, row.session).await?),
            };
            trials.extend(try_again(&policy, &doc, directory.as_deref()));
            if trials.len() == wanted {
                break 'pages;
            }
        }
        if end {
            break;
        }
    }
    trials.reverse();
    Ok(PolicyReport::of(trials))
}

/// Where the agent of a session works, if that is known.
async fn directory(daemon: &Daemon, session: SessionKey) -> Result<Option<String>, ApiError> {
    let Some(row) = daemon.journal.session_by_key(session).await.map_err(read_failed)? else {
        return Ok(None);
    };
    let doc: SessionDoc = serde_json::from_slice(&row.doc).map_err(unreadable("session", &row.id))?;
    Ok(doc.directory)
}
