//! Mail: sending it, looking at it, claiming what waits and acknowledging that. What becomes of a message is decided by
//! the session whose it is; who it is from is decided here, by who calls.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use qd_core::session::{Command, milliseconds};
use qd_journal::{MailFilter, MailRow, SessionKey};
use qd_protocol::error::ErrorBody;
use qd_protocol::limits::{HEAD_MAX, MAIL_CLAIM_MAX, MAIL_CLAIM_MAX_S, MAIL_CLAIM_S};
use qd_protocol::mail::{AckRequest, ClaimRequest, ClaimedMail, Mail, MailReceipt, MailState, NewMail};
use qd_protocol::text::head;
use qd_protocol::{ApiError, Code, MailId, Number, SessionId, WorkspaceId};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::describe::{BadBody, BadQuery, Guarded, InSession, KeyHeader, Missing};
use super::extract::{Ids, Keyed, Query};
use super::list::{List, after, fill, limit};
use super::once::{Kept, once};
use super::{fault, sessions};
use crate::actor::{Answer, Done, IdempotencyKey};
use crate::daemon::{Daemon, SessionRef, read_failed};
use crate::edge::{Json, OptionalJson, Refusal};
use crate::invalid;
use crate::mail::{Outgoing, Posted, Sender, sent, view};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(send_mail, list_mail))
        .routes(routes!(get_mail))
        .routes(routes!(claim_mail))
        .routes(routes!(acknowledge_mail))
        .routes(routes!(list_all_mail))
}

/// Sends a message to a session. 202 means that it is in the journal. An idle session is woken with it, a busy one gets it
/// after its turn or as a steer, and one that is held waits until it is claimed. An id that is known with the same message
/// gets its first receipt again.
#[utoipa::path(post, path = "/v1/workspaces/{w}/sessions/{s}/mail", tag = "mail", params(InSession, KeyHeader),
    request_body = NewMail,
    responses(
        (status = 202, description = "It is in the mailbox", body = MailReceipt),
        (status = 409, description = "`session_closed`, `mail_id_conflict` or `idempotency_conflict`", body = ErrorBody),
        (status = 429, description = "`queue_full`, `mailbox_full` or `overloaded`", body = ErrorBody),
        BadBody, Missing, Guarded,
    )
)]
async fn send_mail(
    State(daemon): State<Arc<Daemon>>,
    Ids((workspace, id)): Ids<(WorkspaceId, SessionId)>,
    Keyed(key, Json(new)): Keyed<Json<NewMail>>,
) -> Result<(StatusCode, Json<MailReceipt>), Refusal> {
    let session = daemon.session(&workspace, &id).await?;
    let NewMail { text, id, kind, deliver, in_reply_to, correlation_id } = new;
    let mail = Outgoing {
        // Agents do not come this far: see `kin`.
        from: Sender::User,
        id: id.or_else(|| key.as_ref().map(mail_of_key)),
        kind: kind.unwrap_or_default(),
        text,
        in_reply_to,
        correlation_id,
        deliver,
        run: None,
    };
    Ok((StatusCode::ACCEPTED, Json(post(&daemon, &session, mail, key).await?)))
}

/// Puts a message into a mailbox, once for its key.
pub(super) async fn post(
    daemon: &Arc<Daemon>,
    session: &Arc<SessionRef>,
    mail: Outgoing,
    key: Option<IdempotencyKey>,
) -> Result<MailReceipt, ApiError> {
    let deed = |key| async {
        Ok(match daemon.post_mail(session, mail, key).await? {
            Posted::Now(receipt) => (Answer::Mailed(receipt), Kept::WithEffect),
            Posted::Before(receipt) => (Answer::Mailed(receipt), Kept::NotYet),
        })
    };
    match once(daemon, key, deed).await? {
        Answer::Mailed(receipt) => Ok(receipt),
        _ => Err(fault()),
    }
}

/// The id of a message that has a key and no id.
pub(super) fn mail_of_key(key: &IdempotencyKey) -> MailId {
    MailId::from_random(&key.digest()[..26])
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct MailQuery {
    /// How many at most, from 1 to 1000; 1000 unless given.
    limit: Option<usize>,
    /// Go on after this message: what `Next-After` said.
    after: Option<String>,
    /// Only those that stand so.
    state: Option<MailState>,
}

/// The messages of a session, in the order of arrival. Long texts are cut to a head.
#[utoipa::path(get, path = "/v1/workspaces/{w}/sessions/{s}/mail", tag = "mail", params(InSession, MailQuery),
    responses((status = 200, description = "A page of them", body = [Mail]), BadQuery, Missing, Guarded)
)]
async fn list_mail(
    State(daemon): State<Arc<Daemon>>,
    Ids((workspace, id)): Ids<(WorkspaceId, SessionId)>,
    Query(query): Query<MailQuery>,
) -> Result<List<Mail>, Refusal> {
    let session = sessions::find(&daemon, &workspace, &id).await?;
    list(&daemon, query, Some(session.key)).await
}

/// The messages of all sessions, in the order of arrival. Long texts are cut to a head.
#[utoipa::path(get, path = "/v1/mail", tag = "mail", params(MailQuery), responses(
    (status = 200, description = "A page of them", body = [Mail]), BadQuery, Guarded,
))]
async fn list_all_mail(
    State(daemon): State<Arc<Daemon>>,
    Query(query): Query<MailQuery>,
) -> Result<List<Mail>, Refusal> {
    list(&daemon, query, None).await
}

async fn list(daemon: &Daemon, query: MailQuery, session: Option<SessionKey>) -> Result<List<Mail>, Refusal> {
    let (limit, after) = (limit(query.limit)?, after(query.after.as_deref(), MailId::parse)?);
    let filter = MailFilter { session, open_only: query.state.is_some_and(MailState::is_open) };
    let journal = &daemon.journal;
    let read = |after: Option<MailId>, size| async move { journal.mails(filter, after.as_ref(), size).await };
    let take = |row: MailRow| {
        let mut mail = view(&row)?;
        mail.message.text.truncate(head(&mail.message.text, HEAD_MAX).len());
        Ok(Some(mail).filter(|mail| query.state.is_none_or(|state| mail.state == state)))
    };
    let found = fill(limit, after, read, |row| row.id.clone(), take).await?;
    Ok(List::cut(found, limit, |mail| mail.message.id.as_str()))
}

/// One message, whole.
#[utoipa::path(get, path = "/v1/workspaces/{w}/sessions/{s}/mail/{m}", tag = "mail",
    params(InSession, ("m" = String, Path, description = "The message")),
    responses((status = 200, description = "It", body = Mail), Missing, Guarded)
)]
async fn get_mail(
    State(daemon): State<Arc<Daemon>>,
    Ids((workspace, session, id)): Ids<(WorkspaceId, SessionId, MailId)>,
) -> Result<Json<Mail>, Refusal> {
    let session = sessions::find(&daemon, &workspace, &session).await?;
    Ok(Json(view(&find(&daemon, session.key, &id).await?)?))
}

async fn find(daemon: &Daemon, session: SessionKey, id: &MailId) -> Result<MailRow, ApiError> {
    let row = daemon.journal.mail(id).await.map_err(read_failed)?;
    row.filter(|row| row.session == Some(session)).ok_or_else(|| ApiError::not_found("mail", id))
}

/// Claims the oldest messages that wait. Each is the caller's until it is acknowledged or the limit is over; then it comes
/// back, and after five returns nobody gets it any more.
#[utoipa::path(post, path = "/v1/workspaces/{w}/sessions/{s}/mail/claim", tag = "mail",
    params(InSession, KeyHeader), request_body = Option<ClaimRequest>,
    responses(
        (status = 200, description = "The messages, none if none waits", body = [ClaimedMail]),
        (status = 409, description = "`session_closed` or `idempotency_conflict`", body = ErrorBody),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
        BadBody, Missing, Guarded,
    )
)]
async fn claim_mail(
    State(daemon): State<Arc<Daemon>>,
    Ids((workspace, id)): Ids<(WorkspaceId, SessionId)>,
    Keyed(key, OptionalJson(request)): Keyed<OptionalJson<ClaimRequest>>,
) -> Result<Json<Vec<ClaimedMail>>, Refusal> {
    let session = daemon.session(&workspace, &id).await?;
    let max = request.max.unwrap_or(1);
    if !(1..=MAIL_CLAIM_MAX).contains(&max) {
        return Err(invalid(format!("`max` is from 1 to {MAIL_CLAIM_MAX}")).into());
    }
    let limit_s = request.limit_s.unwrap_or(MAIL_CLAIM_S as f64);
    if !(limit_s > 0.0 && limit_s <= MAIL_CLAIM_MAX_S as f64) {
        return Err(invalid(format!(
            "`limit_s` is a number of seconds above 0 and up to {MAIL_CLAIM_MAX_S}"
        ))
        .into());
    }
    let deed = |key| async {
        let command = Command::Claim { max, limit_ms: milliseconds(limit_s).max(1) };
        let Done { answer, .. } = daemon.command(&session, command, key).await?;
        Ok((answer, Kept::WithEffect))
    };
    let Answer::Claimed(claims, until) = once(&daemon, key, deed).await? else { return Err(fault().into()) };
    let mut claimed = Vec::with_capacity(claims.len());
    for (id, claim) in claims {
        let message = sent(&find(&daemon, session.key, &id).await?)?.mail;
        claimed.push(ClaimedMail { message, claim, claim_expires_at: until });
    }
    Ok(Json(claimed))
}

/// Acknowledges a message that was claimed: it is done with. Said again, it is so.
#[utoipa::path(post, path = "/v1/workspaces/{w}/sessions/{s}/mail/{m}/ack", tag = "mail",
    params(InSession, ("m" = String, Path, description = "The message"), KeyHeader),
    request_body = Option<AckRequest>,
    responses(
        (status = 200, description = "It is acknowledged", body = Mail),
        (status = 409, description = "`not_claimed`: nobody has it, or somebody else; or `idempotency_conflict`",
            body = ErrorBody),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
        BadBody, Missing, Guarded,
    )
)]
async fn acknowledge_mail(
    State(daemon): State<Arc<Daemon>>,
    Ids((workspace, session, id)): Ids<(WorkspaceId, SessionId, MailId)>,
    Keyed(key, OptionalJson(request)): Keyed<OptionalJson<AckRequest>>,
) -> Result<Json<Mail>, Refusal> {
    let session = daemon.session(&workspace, &session).await?;
    find(&daemon, session.key, &id).await?;
    let AckRequest { claim } = request;
    let deed = |key| async {
        let command = Command::Acknowledge { id: id.clone(), claim: claim.map(Number) };
        match daemon.command(&session, command, key).await {
            Ok(Done { answer, .. }) => Ok((answer, Kept::WithEffect)),
            Err(error) if error.code == Code::NotClaimed => {
                let now = view(&find(&daemon, session.key, &id).await?)?;
                let again =
                    now.state == MailState::Acknowledged && claim.is_none_or(|one| now.claim == Some(one));
                if again {
                    Ok((Answer::Done, Kept::NotYet))
                } else {
                    Err(error.with("state", now.state.as_str()))
                }
            }
            Err(error) => Err(error),
        }
    };
    match once(&daemon, key, deed).await? {
        Answer::Done => Ok(Json(view(&find(&daemon, session.key, &id).await?)?)),
        _ => Err(fault().into()),
    }
}
