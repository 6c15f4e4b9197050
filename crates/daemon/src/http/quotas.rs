//! Exhausted quotas, over HTTP. Their logic is in `crate::quotas`.

use std::sync::Arc;

use axum::extract::State;
use qd_core::quota::ExhaustedQuota;
use qd_protocol::AccountId;
use qd_protocol::api::AccountQuota;
use qd_protocol::error::ErrorBody;
use qd_protocol::event::QuotaReleaseCause;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::GuardResponses;
use super::caller::Caller;
use super::extract::PathIds;
use crate::daemon::Daemon;
use crate::edge::{HttpError, Json};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(list_quotas)).routes(routes!(release_quota))
}

/// Lists the accounts whose quota is exhausted, the first to reset first.
#[utoipa::path(get, path = "/v1/quotas", tag = "quotas", responses(
    (status = 200, description = "The exhausted quotas", body = [AccountQuota]), GuardResponses,
))]
async fn list_quotas(State(daemon): State<Arc<Daemon>>) -> Json<Vec<AccountQuota>> {
    Json(daemon.quotas.list().iter().map(ExhaustedQuota::view).collect())
}

/// Releases an account before its quota resets: its queued runs start again.
#[utoipa::path(delete, path = "/v1/quotas/{account}", tag = "quotas",
    params(("account" = String, Path, description = "Id of the account")),
    responses(
        (status = 200, description = "The quota that was released", body = AccountQuota),
        (status = 404, description = "`not_found`: the quota of this account is not exhausted", body = ErrorBody),
        GuardResponses,
    )
)]
async fn release_quota(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds(account): PathIds<AccountId>,
) -> Result<Json<AccountQuota>, HttpError> {
    Ok(Json(daemon.release_quota(&account, QuotaReleaseCause::User, &caller.actor).await?))
}
