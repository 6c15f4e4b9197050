//! Tests a policy on past asks: what it would have decided for each. It only reads rows; the judging is the core's, as
//! for live asks.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::State;
use qd_core::policy::run_trial;
use qd_core::rows::{AskDoc, SessionDoc};
use qd_journal::{AskFilter, SessionKey};
use qd_protocol::error::ErrorBody;
use qd_protocol::policy_trial::{PolicyTestReport, PolicyTestRequest, PolicyTrial};
use qd_protocol::{ApiError, AskId};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{BadBodyResponses, GuardResponses, IdempotencyKeyHeader, NotFoundResponse};
use super::extract::KeyedBody;
use super::idempotency::{ResponseRecording, run_once};
use super::list::page_limit;
use super::unreadable_row;
use crate::daemon::{Daemon, read_failed};
use crate::edge::{HttpError, Json};
use crate::sessions::check_policy;

/// How many asks are read at a time: each may be much larger than its part of the report.
const ASKS_PER_READ: usize = 64;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(test_policy))
}

/// Shows what a policy would have decided for past permission requests. Nothing is changed.
#[utoipa::path(post, path = "/v1/policy/test", tag = "asks", params(IdempotencyKeyHeader), request_body = PolicyTestRequest,
    responses(
        (status = 200, description = "The differences", body = PolicyTestReport),
        BadBodyResponses, NotFoundResponse, GuardResponses,
        (status = 409, description = "`idempotency_conflict`", body = ErrorBody),
    )
)]
async fn test_policy(
    State(daemon): State<Arc<Daemon>>,
    KeyedBody(key, Json(request)): KeyedBody<Json<PolicyTestRequest>>,
) -> Result<Json<PolicyTestReport>, HttpError> {
    let test = |_| async {
        build_policy_report(&daemon, request).await.map(|report| (report, ResponseRecording::NotWritten))
    };
    Ok(Json(run_once(&daemon, key, test).await?))
}

async fn build_policy_report(
    daemon: &Daemon,
    request: PolicyTestRequest,
) -> Result<PolicyTestReport, ApiError> {
    let PolicyTestRequest { policy, session_id, workspace_id, limit } = request;
    check_policy(&policy)?;
    let limit = page_limit(limit)?;
    let session = match &session_id {
        Some(id) => {
            let row = daemon.journal.session(id).await.map_err(read_failed)?;
            Some(row.ok_or_else(|| ApiError::not_found("session", id))?.key)
        }
        None => None,
    };
    let workspace =
        workspace_id.map(|id| daemon.workspaces.get(&id)).transpose()?.map(|workspace| workspace.key);
    let filter = AskFilter { session, workspace, pending_only: false, newest_first: true };
    let mut directories = HashMap::new();
    let mut trials: Vec<PolicyTrial> = Vec::new();
    let mut after: Option<AskId> = None;
    'pages: loop {
        let rows = daemon.journal.asks(filter, after.as_ref(), ASKS_PER_READ).await.map_err(read_failed)?;
        let end = rows.len() < ASKS_PER_READ;
        after = rows.last().map(|row| row.id.clone());
        for row in rows {
            let doc: AskDoc = serde_json::from_slice(&row.doc).map_err(unreadable_row("ask", &row.id))?;
            let directory = match directories.get(&row.session) {
                Some(known) => known,
                None => {
                    directories.entry(row.session).or_insert(session_directory(daemon, row.session).await?)
                }
            };
            trials.extend(run_trial(&policy, &doc, directory.as_deref()));
            if trials.len() == limit {
                break 'pages;
            }
        }
        if end {
            break;
        }
    }
    trials.reverse();
    Ok(PolicyTestReport::of(trials))
}

/// The directory that a session's agent works in, if it is known.
async fn session_directory(daemon: &Daemon, session: SessionKey) -> Result<Option<String>, ApiError> {
    let Some(row) = daemon.journal.session_by_key(session).await.map_err(read_failed)? else {
        return Ok(None);
    };
    let doc: SessionDoc = serde_json::from_slice(&row.doc).map_err(unreadable_row("session", &row.id))?;
    Ok(doc.directory)
}
