//! Asks: list them, show one, answer one. The session of an ask decides which answer wins.

use std::sync::Arc;

use axum::extract::State;
use qd_core::ask_digest::with_digest;
use qd_core::fleet;
use qd_core::rows::AskDoc;
use qd_core::session::SessionCommand;
use qd_journal::{AskFilter, AskRow};
use qd_protocol::api::{AnswerRequest, AnswerResponse, AskRecord};
use qd_protocol::error::ErrorBody;
use qd_protocol::event::{Ask, AskAnswer, AskStatus, EventActor, PermissionDecision};
use qd_protocol::{ApiError, AskId, ErrorCode};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{
    BadBodyResponses, BadQueryResponse, GuardResponses, IdempotencyKeyHeader, NotFoundResponse,
};
use super::caller::Caller;
use super::extract::{KeyedBody, PathIds, Query};
use super::idempotency::{ResponseRecording, run_once};
use super::list::{ListPage, page_limit, parse_after, read_filtered};
use super::unreadable_row;
use crate::actor::{ActorReply, IdempotencyKey, encode_failed};
use crate::daemon::{Daemon, read_failed};
use crate::edge::{HttpError, Json, internal_error};
use crate::fleets;
use crate::invalid_value;
use crate::user_content::check_remark;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(list_asks)).routes(routes!(get_ask)).routes(routes!(answer_ask))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AsksQuery {
    /// The most asks to return, 1 to 1000. Default 1000.
    limit: Option<usize>,
    /// Continue after this ask: the value of `Next-After`.
    after: Option<String>,
    /// List the newest first, from this ask to older ones: the value of `Next-After`. If it is empty, from the newest.
    before: Option<String>,
    /// Filter by state.
    state: Option<AskStatus>,
}

/// Lists the asks of every session, oldest first, or with `before` newest first.
#[utoipa::path(get, path = "/v1/asks", tag = "asks", params(AsksQuery), responses(
    (status = 200, description = "A page of asks", body = [AskRecord]), BadQueryResponse, GuardResponses,
))]
async fn list_asks(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    Query(query): Query<AsksQuery>,
) -> Result<ListPage<AskRecord>, HttpError> {
    let limit = page_limit(query.limit)?;
    let newest_first = query.before.is_some();
    if newest_first && query.after.is_some() {
        return Err(invalid_value("`after` and `before` cannot be used together").into());
    }
    let cursor = query.before.filter(|before| !before.is_empty()).or(query.after);
    let after = parse_after(cursor.as_deref(), AskId::parse)?;
    let pending_only = query.state == Some(AskStatus::Pending);
    let workspace = caller.workspace().map(|own| daemon.workspaces.get(own)).transpose()?;
    let workspace = workspace.map(|entry| entry.key);
    let filter = AskFilter { workspace, pending_only, newest_first, ..AskFilter::default() };
    let journal = &daemon.journal;
    let read = |after: Option<AskId>, size| async move { journal.asks(filter, after.as_ref(), size).await };
    let take = |row: AskRow| {
        let ask = decode_ask(&row)?;
        Ok(Some(ask).filter(|record| query.state.is_none_or(|state| record.ask.state == state)))
    };
    let asks = read_filtered(limit, after, read, |row| row.id.clone(), take).await?;
    Ok(ListPage::from_fetched(asks, limit, |record| record.ask.id.as_str()))
}

/// Shows one ask.
#[utoipa::path(get, path = "/v1/asks/{ask}", tag = "asks",
    params(("ask" = String, Path, description = "The ask")),
    responses((status = 200, description = "The ask", body = AskRecord), NotFoundResponse, GuardResponses)
)]
async fn get_ask(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds(id): PathIds<AskId>,
) -> Result<Json<AskRecord>, HttpError> {
    let row = find_ask(&daemon, &id).await?;
    check_reach(&daemon, &caller, &row).await?;
    Ok(Json(decode_ask(&row)?))
}

/// Answers an ask. The first answer wins and reaches the agent exactly once.
#[utoipa::path(post, path = "/v1/asks/{ask}/answer", tag = "asks",
    params(("ask" = String, Path, description = "The ask"), IdempotencyKeyHeader), request_body = AnswerRequest,
    responses(
        (status = 200, description = "The ask, resolved by this answer", body = AnswerResponse),
        BadBodyResponses, NotFoundResponse, GuardResponses,
        (status = 400, description = "`invalid_answer`, `invalid_request` or `invalid_value`; the ask stays open",
            body = ErrorBody),
        (status = 409, description = "`already_resolved`, with the winning `answer` in the details, `withdrawn`, \
            `ask_changed` (the ask stays open) or `idempotency_conflict`", body = ErrorBody),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
    )
)]
async fn answer_ask(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds(id): PathIds<AskId>,
    KeyedBody(key, Json(request)): KeyedBody<Json<AnswerRequest>>,
) -> Result<Json<AnswerResponse>, HttpError> {
    let row = find_ask(&daemon, &id).await?;
    check_reach(&daemon, &caller, &row).await?;
    let shown_sha256 = request.input_sha256.clone();
    let answer = parse_answer(request)?;
    let deliver = |key| async {
        match deliver_answer(&daemon, &row, &caller.actor, answer, shown_sha256, key).await {
            Ok(answered) => Ok(answered),
            Err(error) if error.code == ErrorCode::NotFound => {
                Err(not_answerable(decode_ask(&find_ask(&daemon, &id).await?)?.ask, error))
            }
            Err(error) => Err(error),
        }
    };
    match run_once(&daemon, key, deliver).await? {
        ActorReply::Answered(ask) => Ok(Json(AnswerResponse { resolved: true, ask: with_digest(*ask) })),
        _ => Err(internal_error().into()),
    }
}

/// Delivers an answer to the session or fleet that asked.
async fn deliver_answer(
    daemon: &Arc<Daemon>,
    row: &AskRow,
    actor: &Arc<EventActor>,
    answer: AskAnswer,
    shown_sha256: Option<String>,
    key: Option<IdempotencyKey>,
) -> Result<(ActorReply, ResponseRecording), ApiError> {
    let ask = row.id.clone();
    if let Some(session) = daemon.journal.session_by_key(row.session).await.map_err(read_failed)? {
        let session = daemon.session_address(&session)?;
        let command = SessionCommand::Answer { ask, answer, shown_sha256 };
        let completion = daemon.send_command(&session, actor, command, key).await?;
        return Ok((completion.reply, ResponseRecording::WrittenWithEffect));
    }
    let fleet = daemon.journal.fleet_by_key(row.session).await.map_err(read_failed)?;
    let fleet = daemon.fleet_address(&fleet.ok_or_else(|| ApiError::not_found("ask", &ask))?)?;
    let command = fleet::FleetCommand::Answer { ask, answer, shown_sha256 };
    match daemon.send_fleet_command(&fleet, actor, command).await? {
        fleets::FleetActorReply::Answered(ask) => {
            Ok((ActorReply::Answered(ask), ResponseRecording::NotWritten))
        }
        fleets::FleetActorReply::Cancelled(_) => Err(internal_error()),
    }
}

async fn find_ask(daemon: &Daemon, id: &AskId) -> Result<AskRow, ApiError> {
    let row = daemon.journal.ask(id).await.map_err(read_failed)?;
    row.ok_or_else(|| ApiError::not_found("ask", id))
}

/// Refuses a caller that is bound to another workspace than that of the session or fleet that asks.
async fn check_reach(daemon: &Daemon, caller: &Caller, row: &AskRow) -> Result<(), ApiError> {
    if caller.workspace().is_none() {
        return Ok(());
    }
    let workspace = match daemon.journal.session_by_key(row.session).await.map_err(read_failed)? {
        Some(session) => Some(session.workspace),
        None => {
            let fleet = daemon.journal.fleet_by_key(row.session).await.map_err(read_failed)?;
            fleet.map(|fleet| fleet.workspace)
        }
    };
    let entry = workspace.and_then(|key| daemon.workspaces.by_key(key));
    caller.require_workspace(&entry.ok_or_else(|| ApiError::not_found("ask", &row.id))?.id)
}

fn decode_ask(row: &AskRow) -> Result<AskRecord, ApiError> {
    let doc: AskDoc = serde_json::from_slice(&row.doc).map_err(unreadable_row("ask", &row.id))?;
    Ok(doc.view())
}

/// Parses an answer. The session checks whether it fits the ask.
fn parse_answer(request: AnswerRequest) -> Result<AskAnswer, ApiError> {
    let AnswerRequest { decision, value, reason, input_sha256: _ } = request;
    check_remark("value", value.as_deref())?;
    check_remark("reason", reason.as_deref())?;
    let decision = match decision.as_deref() {
        None => None,
        Some("allow_once") => Some(PermissionDecision::AllowOnce),
        Some("allow_always") => Some(PermissionDecision::AllowAlways),
        Some("deny") => Some(PermissionDecision::Deny),
        Some(_) => {
            let message = "`decision` must be allow_once, allow_always or deny";
            return Err(ApiError::new(ErrorCode::InvalidAnswer, message));
        }
    };
    Ok(AskAnswer { decision, value, reason })
}

/// The error for an ask that exists but cannot be answered any more.
fn not_answerable(ask: Ask, error: ApiError) -> ApiError {
    match ask.state {
        AskStatus::Pending => error,
        AskStatus::Withdrawn => ApiError::new(ErrorCode::Withdrawn, "the agent no longer waits for this"),
        AskStatus::Answered => {
            let conflict = ApiError::new(
                ErrorCode::AlreadyResolved,
                "the ask was already answered; the details have the answer",
            );
            match (serde_json::to_value(&ask.answer), serde_json::to_value(&ask)) {
                (Ok(answer), Ok(ask)) => conflict.with_detail("answer", answer).with_detail("ask", ask),
                (Err(error), _) | (_, Err(error)) => encode_failed(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(decision: &str) -> AnswerRequest {
        AnswerRequest { decision: Some(decision.to_owned()), ..AnswerRequest::default() }
    }

    #[test]
    fn a_decision_is_one_of_three_words() {
        assert_eq!(parse_answer(AnswerRequest::default()).unwrap(), AskAnswer::default());
        assert_eq!(parse_answer(request("deny")).unwrap().decision, Some(PermissionDecision::Deny));
        for word in ["maybe", "", "Deny", "allow"] {
            assert_eq!(parse_answer(request(word)).unwrap_err().code, ErrorCode::InvalidAnswer, "{word}");
        }
    }
}
