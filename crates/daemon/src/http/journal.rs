//! The health of the journal, for `qd doctor`.

use std::sync::Arc;

use axum::extract::State;
use qd_protocol::api::JournalCheckReport;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::GuardResponses;
use crate::daemon::{Daemon, read_failed};
use crate::edge::{HttpError, Json};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(check_journal))
}

/// Reads every row of the journal now and returns the damaged places.
#[utoipa::path(get, path = "/v1/journal/check", tag = "daemon", responses(
    (status = 200, description = "The rows that were read, and the damage that was found", body = JournalCheckReport),
    GuardResponses,
))]
async fn check_journal(State(daemon): State<Arc<Daemon>>) -> Result<Json<JournalCheckReport>, HttpError> {
    Ok(Json(daemon.check_journal().await.map_err(read_failed)?))
}
