//! Finding text in all sessions, and adding up what they have used. Both are answered from the derived data. An agent
//! may use neither: it would read other sessions.

use std::sync::Arc;

use axum::extract::State;
use qd_journal::derived::{SearchFilter, SearchPosition, SearchWords};
use qd_protocol::error::ErrorBody;
use qd_protocol::limits::SEARCH_HITS;
use qd_protocol::search::{IndexProgress, SearchPage};
use qd_protocol::usage_report::{UsageGrouping, UsageReport};
use qd_protocol::{ApiError, ErrorCode, Millis};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{BadBodyResponses, BadQueryResponse, GuardResponses, IdempotencyKeyHeader};
use super::extract::{KeyedBody, Query};
use super::idempotency::{ResponseRecording, run_once};
use super::list::page_limit;
use crate::daemon::Daemon;
use crate::derived_data::UsageZone;
use crate::edge::{HttpError, Json, OptionalJson};
use crate::invalid_value;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(search)).routes(routes!(rebuild_index)).routes(routes!(report_usage))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SearchQuery {
    /// The words, all of which must be in the text. `pars*` finds all words that begin so, and `"two words"` finds them
    /// in this order.
    q: String,
    /// The most hits to return, 1 to 1000. Default 50.
    limit: Option<usize>,
    /// Continue with older hits: the value of `next_before`.
    before: Option<String>,
    /// Search only sessions of this agent.
    agent: Option<String>,
    /// Search only text from this time or later.
    #[param(value_type = Option<String>)]
    since: Option<Millis>,
}

/// Finds text in the prompts, answers, tool calls and changed paths of all sessions, newest first.
#[utoipa::path(get, path = "/v1/search", tag = "search", params(SearchQuery), responses(
    (status = 200, description = "A page of hits", body = SearchPage), BadQueryResponse, GuardResponses,
))]
async fn search(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<SearchQuery>,
) -> Result<Json<SearchPage>, HttpError> {
    let words = SearchWords::parse(&query.q).map_err(|error| invalid_value(format!("`q`: {error}")))?;
    let limit = query.limit.map_or(Ok(SEARCH_HITS), |limit| page_limit(Some(limit)))?;
    let before = query.before.as_deref().map(parse_before).transpose()?;
    let filter = SearchFilter { agent: query.agent, since: query.since };
    Ok(Json(daemon.search(words, filter, before, limit).await?))
}

fn parse_before(text: &str) -> Result<SearchPosition, ApiError> {
    let bad = || {
        ApiError::new(
            ErrorCode::BadCursor,
            "`before` must be the value of `next_before` of an earlier search",
        )
    };
    SearchPosition::parse(text).ok_or_else(bad)
}

/// Builds the index of searches and usage reports again from the journal. Answers when it is done, or after 5 s while it
/// goes on.
#[utoipa::path(post, path = "/v1/search/rebuild", tag = "search", params(IdempotencyKeyHeader), responses(
    (status = 200, description = "How far the new index is", body = IndexProgress),
    (status = 409, description = "`idempotency_conflict`", body = ErrorBody),
    BadBodyResponses, GuardResponses,
))]
async fn rebuild_index(
    State(daemon): State<Arc<Daemon>>,
    KeyedBody(key, OptionalJson(_)): KeyedBody<OptionalJson<Option<serde_json::Value>>>,
) -> Result<Json<IndexProgress>, HttpError> {
    let rebuild =
        |_| async { daemon.rebuild_derived().await.map(|index| (index, ResponseRecording::NotWritten)) };
    Ok(Json(run_once(&daemon, key, rebuild).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct UsageQuery {
    /// What a row stands for. Default `agent`.
    by: Option<UsageGrouping>,
    /// Count only usage that was reported at this time or later.
    #[param(value_type = Option<String>)]
    since: Option<Millis>,
    /// Time zone of the days: a name such as `Europe/Berlin`, or an offset such as `+02:00`. Default `UTC`.
    zone: Option<String>,
}

/// Adds up the tokens and the cost of all sessions. Purged sessions are not counted.
#[utoipa::path(get, path = "/v1/usage", tag = "search", params(UsageQuery), responses(
    (status = 200, description = "The sums", body = UsageReport), BadQueryResponse, GuardResponses,
))]
async fn report_usage(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<UsageQuery>,
) -> Result<Json<UsageReport>, HttpError> {
    let zone = UsageZone::parse(query.zone.as_deref())?;
    Ok(Json(daemon.report_usage(query.by.unwrap_or_default(), query.since, zone).await?))
}
