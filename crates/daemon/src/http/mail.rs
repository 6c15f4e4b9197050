//! Mail: send it, read it, claim waiting messages and acknowledge them. The receiving session decides what becomes of
//! a message; the sender is determined here, from the caller.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use qd_core::session::{SessionCommand, seconds_to_millis};
use qd_journal::{MailFilter, MailRow, SessionKey};
use qd_protocol::error::ErrorBody;
use qd_protocol::event::EventActor;
use qd_protocol::limits::{HEAD_MAX, MAIL_CLAIM_MAX, MAIL_CLAIM_MAX_S, MAIL_CLAIM_S};
use qd_protocol::mail::{
    ClaimedMail, Mail, MailAckRequest, MailClaimRequest, MailReceipt, MailStatus, NewMail,
};
use qd_protocol::text::escaped_head;
use qd_protocol::{ApiError, ErrorCode, EventNumber, MailId, SessionId, WorkspaceId};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{
    BadBodyResponses, BadQueryResponse, GuardResponses, IdempotencyKeyHeader, NotFoundResponse, SessionPath,
};
use super::caller::Caller;
use super::extract::{KeyedBody, PathIds, Query};
use super::idempotency::{ResponseRecording, run_once};
use super::list::{ListPage, page_limit, parse_after, read_filtered};
use super::sessions;
use crate::actor::{ActorReply, CommandCompletion, IdempotencyKey};
use crate::daemon::{Daemon, SessionAddress, read_failed};
use crate::edge::{HttpError, Json, OptionalJson, internal_error};
use crate::invalid_value;
use crate::mail::{MailSender, OutgoingMail, PostMailOutcome, decode_sent_mail, mail_view};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(send_mail, list_mail))
        .routes(routes!(get_mail))
        .routes(routes!(claim_mail))
        .routes(routes!(acknowledge_mail))
        .routes(routes!(list_all_mail))
}

/// Sends a message to a session. 202 means that it is in the journal. An idle session is woken with it, a busy one
/// gets it after its turn or as a steer, and a held message waits until it is claimed. Repeating an id with the same
/// message returns the first receipt.
#[utoipa::path(post, path = "/v1/workspaces/{w}/sessions/{s}/mail", tag = "mail", params(SessionPath, IdempotencyKeyHeader),
    request_body = NewMail,
    responses(
        (status = 202, description = "The message is in the mailbox", body = MailReceipt),
        (status = 409, description = "`session_closed`, `mail_id_conflict` or `idempotency_conflict`", body = ErrorBody),
        (status = 429, description = "`queue_full`, `mailbox_full` or `overloaded`", body = ErrorBody),
        BadBodyResponses, NotFoundResponse, GuardResponses,
    )
)]
async fn send_mail(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
    KeyedBody(key, Json(new)): KeyedBody<Json<NewMail>>,
) -> Result<(StatusCode, Json<MailReceipt>), HttpError> {
    let session = daemon.session_in_workspace(&workspace, &id).await?;
    let NewMail { text, id, kind, deliver, in_reply_to, correlation_id } = new;
    let mail = OutgoingMail {
        // Agents cannot call this route: see `route_access`.
        from: MailSender::User,
        id: id.or_else(|| key.as_ref().map(mail_id_from_key)),
        kind: kind.unwrap_or_default(),
        text,
        in_reply_to,
        correlation_id,
        deliver,
        run: None,
    };
    Ok((StatusCode::ACCEPTED, Json(post_mail(&daemon, &session, &caller.actor, mail, key).await?)))
}

/// Puts a message into a mailbox, once per idempotency key.
pub(super) async fn post_mail(
    daemon: &Arc<Daemon>,
    session: &Arc<SessionAddress>,
    actor: &Arc<EventActor>,
    mail: OutgoingMail,
    key: Option<IdempotencyKey>,
) -> Result<MailReceipt, ApiError> {
    let post = |key| async {
        Ok(match daemon.post_mail(session, actor, mail, key).await? {
            PostMailOutcome::Accepted(receipt) => {
                (ActorReply::Mailed(receipt), ResponseRecording::WrittenWithEffect)
            }
            PostMailOutcome::AlreadyAccepted(receipt) => {
                (ActorReply::Mailed(receipt), ResponseRecording::NotWritten)
            }
        })
    };
    match run_once(daemon, key, post).await? {
        ActorReply::Mailed(receipt) => Ok(receipt),
        _ => Err(internal_error()),
    }
}

/// The id of a message that has an idempotency key and no id.
pub(super) fn mail_id_from_key(key: &IdempotencyKey) -> MailId {
    MailId::from_random(&key.digest()[..26])
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct MailQuery {
    /// The most messages to return, 1 to 1000. Default 1000.
    limit: Option<usize>,
    /// Continue after this message: the value of `Next-After`.
    after: Option<String>,
    /// Filter by state.
    state: Option<MailStatus>,
}

/// Lists the messages of a session, in the order of arrival. Long texts are cut to a head.
#[utoipa::path(get, path = "/v1/workspaces/{w}/sessions/{s}/mail", tag = "mail", params(SessionPath, MailQuery),
    responses((status = 200, description = "A page of messages", body = [Mail]), BadQueryResponse, NotFoundResponse, GuardResponses)
)]
async fn list_mail(
    State(daemon): State<Arc<Daemon>>,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
    Query(query): Query<MailQuery>,
) -> Result<ListPage<Mail>, HttpError> {
    let session = sessions::find_session(&daemon, &workspace, &id).await?;
    mail_page(&daemon, query, Some(session.key)).await
}

/// Lists the messages of all sessions, in the order of arrival. Long texts are cut to a head.
#[utoipa::path(get, path = "/v1/mail", tag = "mail", params(MailQuery), responses(
    (status = 200, description = "A page of messages", body = [Mail]), BadQueryResponse, GuardResponses,
))]
async fn list_all_mail(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<MailQuery>,
) -> Result<ListPage<Mail>, HttpError> {
    mail_page(&daemon, query, None).await
}

async fn mail_page(
    daemon: &Daemon,
    query: MailQuery,
    session: Option<SessionKey>,
) -> Result<ListPage<Mail>, HttpError> {
    let (limit, after) = (page_limit(query.limit)?, parse_after(query.after.as_deref(), MailId::parse)?);
    let filter = MailFilter { session, open_only: query.state.is_some_and(MailStatus::is_open) };
    let journal = &daemon.journal;
    let read =
        |after: Option<MailId>, size| async move { journal.list_mail(filter, after.as_ref(), size).await };
    let take = |row: MailRow| {
        let mut mail = mail_view(&row)?;
        mail.message.text.truncate(escaped_head(&mail.message.text, HEAD_MAX).len());
        Ok(Some(mail).filter(|mail| query.state.is_none_or(|state| mail.state == state)))
    };
    let mail = read_filtered(limit, after, read, |row| row.id.clone(), take).await?;
    Ok(ListPage::from_fetched(mail, limit, |item| item.message.id.as_str()))
}

/// Shows one message, with its whole text.
#[utoipa::path(get, path = "/v1/workspaces/{w}/sessions/{s}/mail/{m}", tag = "mail",
    params(SessionPath, ("m" = String, Path, description = "The message")),
    responses((status = 200, description = "The message", body = Mail), NotFoundResponse, GuardResponses)
)]
async fn get_mail(
    State(daemon): State<Arc<Daemon>>,
    PathIds((workspace, session, id)): PathIds<(WorkspaceId, SessionId, MailId)>,
) -> Result<Json<Mail>, HttpError> {
    let session = sessions::find_session(&daemon, &workspace, &session).await?;
    Ok(Json(mail_view(&find_mail(&daemon, session.key, &id).await?)?))
}

async fn find_mail(daemon: &Daemon, session: SessionKey, id: &MailId) -> Result<MailRow, ApiError> {
    let row = daemon.journal.mail(id).await.map_err(read_failed)?;
    row.filter(|row| row.session == Some(session)).ok_or_else(|| ApiError::not_found("mail", id))
}

/// Claims the oldest waiting messages. The caller holds each until it acknowledges it or the limit has passed; then
/// the message waits again, and after five returns it is no longer delivered.
#[utoipa::path(post, path = "/v1/workspaces/{w}/sessions/{s}/mail/claim", tag = "mail",
    params(SessionPath, IdempotencyKeyHeader), request_body = Option<MailClaimRequest>,
    responses(
        (status = 200, description = "The messages; empty if none waits", body = [ClaimedMail]),
        (status = 409, description = "`session_closed` or `idempotency_conflict`", body = ErrorBody),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
        BadBodyResponses, NotFoundResponse, GuardResponses,
    )
)]
async fn claim_mail(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
    KeyedBody(key, OptionalJson(request)): KeyedBody<OptionalJson<MailClaimRequest>>,
) -> Result<Json<Vec<ClaimedMail>>, HttpError> {
    let session = daemon.session_in_workspace(&workspace, &id).await?;
    let max = request.max.unwrap_or(1);
    if !(1..=MAIL_CLAIM_MAX).contains(&max) {
        return Err(invalid_value(format!("`max` must be from 1 to {MAIL_CLAIM_MAX}")).into());
    }
    let limit_s = request.limit_s.unwrap_or(MAIL_CLAIM_S as f64);
    if !(limit_s > 0.0 && limit_s <= MAIL_CLAIM_MAX_S as f64) {
        return Err(invalid_value(format!(
            "`limit_s` must be a number of seconds above 0 and up to {MAIL_CLAIM_MAX_S}"
        ))
        .into());
    }
    let claim = |key| async {
        let command = SessionCommand::ClaimMail { max, lease_ms: seconds_to_millis(limit_s).max(1) };
        let CommandCompletion { reply, .. } =
            daemon.send_command(&session, &caller.actor, command, key).await?;
        Ok((reply, ResponseRecording::WrittenWithEffect))
    };
    let ActorReply::Claimed(claims, until) = run_once(&daemon, key, claim).await? else {
        return Err(internal_error().into());
    };
    let mut claimed = Vec::with_capacity(claims.len());
    for (id, claim) in claims {
        let message = decode_sent_mail(&find_mail(&daemon, session.key, &id).await?)?.mail;
        claimed.push(ClaimedMail { message, claim, claim_expires_at: until });
    }
    Ok(Json(claimed))
}

/// Acknowledges a claimed message: it is done. Repeating this has no further effect.
#[utoipa::path(post, path = "/v1/workspaces/{w}/sessions/{s}/mail/{m}/ack", tag = "mail",
    params(SessionPath, ("m" = String, Path, description = "The message"), IdempotencyKeyHeader),
    request_body = Option<MailAckRequest>,
    responses(
        (status = 200, description = "The acknowledged message", body = Mail),
        (status = 409, description = "`not_claimed`: it is not claimed, or by somebody else; or `idempotency_conflict`",
            body = ErrorBody),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
        BadBodyResponses, NotFoundResponse, GuardResponses,
    )
)]
async fn acknowledge_mail(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds((workspace, session, id)): PathIds<(WorkspaceId, SessionId, MailId)>,
    KeyedBody(key, OptionalJson(request)): KeyedBody<OptionalJson<MailAckRequest>>,
) -> Result<Json<Mail>, HttpError> {
    let session = daemon.session_in_workspace(&workspace, &session).await?;
    find_mail(&daemon, session.key, &id).await?;
    let MailAckRequest { claim } = request;
    let acknowledge = |key| async {
        let command = SessionCommand::AcknowledgeMail { id: id.clone(), claim: claim.map(EventNumber) };
        match daemon.send_command(&session, &caller.actor, command, key).await {
            Ok(CommandCompletion { reply, .. }) => Ok((reply, ResponseRecording::WrittenWithEffect)),
            Err(error) if error.code == ErrorCode::NotClaimed => {
                let view = mail_view(&find_mail(&daemon, session.key, &id).await?)?;
                let already_acknowledged = view.state == MailStatus::Acknowledged
                    && claim.is_none_or(|claim| view.claim == Some(claim));
                if already_acknowledged {
                    Ok((ActorReply::Done, ResponseRecording::NotWritten))
                } else {
                    Err(error.with_detail("state", view.state.as_str()))
                }
            }
            Err(error) => Err(error),
        }
    };
    match run_once(&daemon, key, acknowledge).await? {
        ActorReply::Done => Ok(Json(mail_view(&find_mail(&daemon, session.key, &id).await?)?)),
        _ => Err(internal_error().into()),
    }
}
