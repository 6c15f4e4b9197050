//! The brake for everything, over HTTP. What it does is in `crate::halt`.

use std::sync::Arc;

use axum::extract::State;
use qd_protocol::api::{Halt, HaltRequest};
use qd_protocol::error::ErrorBody;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::describe::{BadBody, Guarded, KeyHeader};
use super::extract::Keyed;
use super::once::{Kept, once};
use crate::daemon::Daemon;
use crate::edge::{Json, OptionalJson, Refusal};
use crate::words::check_remark;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(get_halt, set_halt, lift_halt))
}

/// Whether anything may start.
#[utoipa::path(get, path = "/v1/halt", tag = "halt", responses(
    (status = 200, description = "The halt, set or not", body = Halt), Guarded,
))]
async fn get_halt(State(daemon): State<Arc<Daemon>>) -> Json<Halt> {
    Json(daemon.halt())
}

/// From now on prompts are accepted and queued, but nothing starts, in any workspace, also after a restart. Live runs
/// go on unless `cancel`.
#[utoipa::path(post, path = "/v1/halt", tag = "halt", params(KeyHeader), request_body = Option<HaltRequest>,
    responses(
        (status = 200, description = "It is set", body = Halt),
        (status = 409, description = "`idempotency_conflict`", body = ErrorBody),
        BadBody, Guarded,
    )
)]
async fn set_halt(
    State(daemon): State<Arc<Daemon>>,
    Keyed(key, OptionalJson(request)): Keyed<OptionalJson<HaltRequest>>,
) -> Result<Json<Halt>, Refusal> {
    check_remark("reason", request.reason.as_deref())?;
    let deed = |key| async {
        let halt = Box::pin(daemon.set_halt_on(request, key)).await?;
        Ok((halt, Kept::WithEffect))
    };
    Ok(Json(once(&daemon, key, deed).await?))
}

/// Things start again.
#[utoipa::path(delete, path = "/v1/halt", tag = "halt", responses(
    (status = 200, description = "It is lifted", body = Halt), Guarded,
))]
async fn lift_halt(State(daemon): State<Arc<Daemon>>) -> Result<Json<Halt>, Refusal> {
    Ok(Json(daemon.lift_halt().await?))
}
