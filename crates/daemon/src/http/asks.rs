//! What agents wait for: listing it, showing it, answering it. Which answer wins is decided by the ask's session.

use std::sync::Arc;

use axum::extract::State;
use qd_core::fleet;
use qd_core::session::Command;
use qd_journal::{AskFilter, AskRow};
use qd_protocol::api::{AnswerRequest, Resolved};
use qd_protocol::error::ErrorBody;
use qd_protocol::event::{Answer as AskAnswer, Ask, AskState, Decision};
use qd_protocol::{ApiError, AskId, Code};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::describe::{BadBody, BadQuery, Guarded, KeyHeader, Missing};
use super::extract::{Ids, Keyed, Query};
use super::list::{List, after, fill, limit};
use super::once::{Kept, once};
use super::{fault, unreadable};
use crate::actor::{Answer, IdempotencyKey, unwritable};
use crate::daemon::{Daemon, read_failed};
use crate::edge::{Json, Refusal};
use crate::fleets;
use crate::words::check_remark;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(list_asks)).routes(routes!(get_ask)).routes(routes!(answer_ask))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AsksQuery {
    /// How many at most, from 1 to 1000; 1000 unless given.
    limit: Option<usize>,
    /// Go on after this ask: what `Next-After` said.
    after: Option<String>,
    /// Only those that stand so.
    state: Option<AskState>,
}

/// The asks of every session, the oldest first.
#[utoipa::path(get, path = "/v1/asks", tag = "asks", params(AsksQuery), responses(
    (status = 200, description = "A page of them", body = [Ask]), BadQuery, Guarded,
))]
async fn list_asks(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<AsksQuery>,
) -> Result<List<Ask>, Refusal> {
    let (limit, after) = (limit(query.limit)?, after(query.after.as_deref(), AskId::parse)?);
    let filter = AskFilter { pending_only: query.state == Some(AskState::Pending), ..AskFilter::default() };
    let journal = &daemon.journal;
    let read = |after: Option<AskId>, size| async move { journal.asks(filter, after.as_ref(), size).await };
    let take = |row: AskRow| {
        let ask = view(&row)?;
        Ok(Some(ask).filter(|ask| query.state.is_none_or(|state| ask.state == state)))
    };
    let found = fill(limit, after, read, |row| row.id.clone(), take).await?;
    Ok(List::cut(found, limit, |ask| ask.id.as_str()))
}

/// One ask.
#[utoipa::path(get, path = "/v1/asks/{ask}", tag = "asks",
    params(("ask" = String, Path, description = "The ask")),
    responses((status = 200, description = "It", body = Ask), Missing, Guarded)
)]
async fn get_ask(State(daemon): State<Arc<Daemon>>, Ids(id): Ids<AskId>) -> Result<Json<Ask>, Refusal> {
    Ok(Json(view(&find(&daemon, &id).await?)?))
}

/// Answers an ask. The first answer wins and reaches the agent exactly once.
#[utoipa::path(post, path = "/v1/asks/{ask}/answer", tag = "asks",
    params(("ask" = String, Path, description = "The ask"), KeyHeader), request_body = AnswerRequest,
    responses(
        (status = 200, description = "It won", body = Resolved),
        BadBody, Missing, Guarded,
        (status = 400, description = "`invalid_answer`, `invalid_request` or `invalid_value`; the ask stays open",
            body = ErrorBody),
        (status = 409, description = "`already_resolved`, with the winning `answer` in the details, `withdrawn` or \
            `idempotency_conflict`", body = ErrorBody),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
    )
)]
async fn answer_ask(
    State(daemon): State<Arc<Daemon>>,
    Ids(id): Ids<AskId>,
    Keyed(key, Json(request)): Keyed<Json<AnswerRequest>>,
) -> Result<Json<Resolved>, Refusal> {
    let row = find(&daemon, &id).await?;
    let answer = understood(request)?;
    let deed = |key| async {
        match give(&daemon, &row, answer, key).await {
            Ok(answered) => Ok(answered),
            Err(error) if error.code == Code::NotFound => {
                Err(too_late(view(&find(&daemon, &id).await?)?, error))
            }
            Err(error) => Err(error),
        }
    };
    match once(&daemon, key, deed).await? {
        Answer::Answered(ask) => Ok(Json(Resolved { resolved: true, ask: *ask })),
        _ => Err(fault().into()),
    }
}

/// Gives an answer to whoever asks: a session or a fleet.
async fn give(
    daemon: &Arc<Daemon>,
    row: &AskRow,
    answer: AskAnswer,
    key: Option<IdempotencyKey>,
) -> Result<(Answer, Kept), ApiError> {
    let ask = row.id.clone();
    if let Some(session) = daemon.journal.session_by_key(row.session).await.map_err(read_failed)? {
        let session = daemon.session_ref(&session)?;
        let done = daemon.command(&session, Command::Answer { ask, answer }, key).await?;
        return Ok((done.answer, Kept::WithEffect));
    }
    let fleet = daemon.journal.fleet_by_key(row.session).await.map_err(read_failed)?;
    let fleet = daemon.fleet_ref(&fleet.ok_or_else(|| ApiError::not_found("ask", &ask))?)?;
    match daemon.command_fleet(&fleet, fleet::Command::Answer { ask, answer }).await? {
        fleets::Answer::Answered(ask) => Ok((Answer::Answered(ask), Kept::NotYet)),
        fleets::Answer::Cancelled(_) => Err(fault()),
    }
}

async fn find(daemon: &Daemon, id: &AskId) -> Result<AskRow, ApiError> {
    let row = daemon.journal.ask(id).await.map_err(read_failed)?;
    row.ok_or_else(|| ApiError::not_found("ask", id))
}

fn view(row: &AskRow) -> Result<Ask, ApiError> {
    serde_json::from_slice(&row.doc).map_err(unreadable("ask", &row.id))
}

/// An answer in our words. Whether it fits its ask is for the session to say.
fn understood(request: AnswerRequest) -> Result<AskAnswer, ApiError> {
    let AnswerRequest { decision, value, reason } = request;
    check_remark("value", value.as_deref())?;
    check_remark("reason", reason.as_deref())?;
    let decision = match decision.as_deref() {
        None => None,
        Some("allow_once") => Some(Decision::AllowOnce),
        Some("allow_always") => Some(Decision::AllowAlways),
        Some("deny") => Some(Decision::Deny),
        Some(_) => {
            let message = "`decision` is allow_once, allow_always or deny";
            return Err(ApiError::new(Code::InvalidAnswer, message));
        }
    };
    Ok(AskAnswer { decision, value, reason })
}

/// Why an ask that is there cannot be answered any more.
fn too_late(ask: Ask, error: ApiError) -> ApiError {
    match ask.state {
        AskState::Pending => error,
        AskState::Withdrawn => ApiError::new(Code::Withdrawn, "the agent no longer waits for this"),
        AskState::Answered => {
            let refused =
                ApiError::new(Code::AlreadyResolved, "somebody answered first; the details say how");
            match (serde_json::to_value(&ask.answer), serde_json::to_value(&ask)) {
                (Ok(answer), Ok(ask)) => refused.with("answer", answer).with("ask", ask),
                (Err(error), _) | (_, Err(error)) => unwritable(error),
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
        assert_eq!(understood(AnswerRequest::default()).unwrap(), AskAnswer::default());
        assert_eq!(understood(request("deny")).unwrap().decision, Some(Decision::Deny));
        for word in ["maybe", "", "Deny", "allow"] {
            assert_eq!(understood(request(word)).unwrap_err().code, Code::InvalidAnswer, "{word}");
        }
    }
}
