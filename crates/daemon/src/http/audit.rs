//! Who did what, and when, in all sessions. It is answered from the derived data. An agent may not use it: it would read
//! other sessions.

use std::sync::Arc;

use axum::extract::State;
use qd_journal::derived::AuditFilter;
use qd_protocol::audit::AuditPage;
use qd_protocol::{ApiError, ErrorCode, Millis, Seq, SessionId};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{BadQueryResponse, GuardResponses, NotFoundResponse};
use super::caller::Caller;
use super::extract::Query;
use super::list::page_limit;
use crate::daemon::Daemon;
use crate::edge::{HttpError, Json};
use crate::invalid_value;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(audit))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AuditQuery {
    /// The most entries to return, 1 to 1000. Default 1000.
    limit: Option<usize>,
    /// Continue after this entry: the value of `next`.
    after: Option<String>,
    /// List the newest first, from this entry to older ones: the value of `next`. If it is empty, from the newest.
    before: Option<String>,
    /// Only what was done at this time or later.
    #[param(value_type = Option<String>)]
    since: Option<Millis>,
    /// Only what was done in this session.
    session: Option<String>,
}

/// Lists who did what: every event that somebody caused, with who it was. Purged sessions are not in it.
#[utoipa::path(get, path = "/v1/audit", tag = "search", params(AuditQuery), responses(
    (status = 200, description = "A page of entries", body = AuditPage), BadQueryResponse, NotFoundResponse, GuardResponses,
))]
async fn audit(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    Query(query): Query<AuditQuery>,
) -> Result<Json<AuditPage>, HttpError> {
    if query.before.is_some() && query.after.is_some() {
        return Err(invalid_value("`after` and `before` cannot be used together").into());
    }
    let session = match &query.session {
        Some(text) => {
            let id = SessionId::parse(text).map_err(|_| ApiError::not_found("session", text))?;
            let session = daemon.find_session(&id).await?;
            caller.require_workspace(&session.workspace)?;
            Some(session.key)
        }
        None => None,
    };
    let workspace = caller.workspace().map(|own| daemon.workspaces.get(own)).transpose()?;
    let filter = AuditFilter {
        workspace: workspace.map(|entry| entry.key),
        session,
        since: query.since,
        after: query.after.as_deref().map(parse_position).transpose()?,
        before: query.before.as_deref().filter(|text| !text.is_empty()).map(parse_position).transpose()?,
        newest_first: query.before.is_some(),
    };
    Ok(Json(daemon.audit(filter, page_limit(query.limit)?).await?))
}

fn parse_position(text: &str) -> Result<Seq, ApiError> {
    let bad = |_| ApiError::new(ErrorCode::BadCursor, "a position is the value of `next` of an earlier page");
    text.parse().map(Seq).map_err(bad)
}
