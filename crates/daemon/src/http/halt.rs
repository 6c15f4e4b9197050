//! The halt, over HTTP. Its logic is in `crate::halt`.

use std::sync::Arc;

use axum::extract::State;
use qd_protocol::api::{HaltRequest, HaltStatus};
use qd_protocol::error::ErrorBody;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{BadBodyResponses, GuardResponses, IdempotencyKeyHeader};
use super::caller::Caller;
use super::extract::KeyedBody;
use super::idempotency::{ResponseRecording, run_once};
use crate::daemon::Daemon;
use crate::edge::{HttpError, Json, OptionalJson};
use crate::user_content::check_remark;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(get_halt, set_halt, lift_halt))
}

/// Shows whether a halt is set.
#[utoipa::path(get, path = "/v1/halt", tag = "halt", responses(
    (status = 200, description = "The halt, set or not", body = HaltStatus), GuardResponses,
))]
async fn get_halt(State(daemon): State<Arc<Daemon>>) -> Json<HaltStatus> {
    Json(daemon.halt_status())
}

/// Sets a halt: prompts are accepted and queued, but nothing starts, in any workspace, even after a restart. Active
/// runs continue unless `cancel` is set.
#[utoipa::path(post, path = "/v1/halt", tag = "halt", params(IdempotencyKeyHeader), request_body = Option<HaltRequest>,
    responses(
        (status = 200, description = "The halt", body = HaltStatus),
        (status = 409, description = "`idempotency_conflict`", body = ErrorBody),
        BadBodyResponses, GuardResponses,
    )
)]
async fn set_halt(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    KeyedBody(key, OptionalJson(request)): KeyedBody<OptionalJson<HaltRequest>>,
) -> Result<Json<HaltStatus>, HttpError> {
    check_remark("reason", request.reason.as_deref())?;
    let apply = |key| async {
        let halt = Box::pin(daemon.apply_halt(request, caller.actor, key)).await?;
        Ok((halt, ResponseRecording::WrittenWithEffect))
    };
    Ok(Json(run_once(&daemon, key, apply).await?))
}

/// Lifts the halt: queued runs start again.
#[utoipa::path(delete, path = "/v1/halt", tag = "halt", responses(
    (status = 200, description = "The halt, lifted", body = HaltStatus), GuardResponses,
))]
async fn lift_halt(State(daemon): State<Arc<Daemon>>, caller: Caller) -> Result<Json<HaltStatus>, HttpError> {
    Ok(Json(daemon.lift_halt(&caller.actor).await?))
}
