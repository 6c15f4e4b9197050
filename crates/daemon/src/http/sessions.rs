//! Sessions: create, list, change and close them, and read their messages and events. The settings of a session are
//! validated in `crate::sessions`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use qd_core::messages::MessageAssembler;
use qd_core::rows::SessionDoc;
use qd_core::session::SessionCommand;
use qd_journal::{EventFilter, EventTopic, SessionFilter, SessionRow};
use qd_protocol::api::{EventPage, Message, NewSession, ReferenceKind, Session, SessionPatch};
use qd_protocol::error::ErrorBody;
use qd_protocol::limits::PAGE_MAX;
use qd_protocol::{ApiError, ErrorCode, EventBody, EventNumber, SessionId, WorkspaceId};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{
    BadBodyResponses, BadQueryResponse, GuardResponses, IdempotencyKeyHeader, NotFoundResponse, SessionPath,
    WorkspacePath,
};
use super::caller::Caller;
use super::events::parse_cursor;
use super::extract::{KeyedBody, PathIds, Query};
use super::idempotency::{ResponseRecording, run_once};
use super::list::{ListPage, ListQuery, page_limit, parse_after, read_filtered};
use super::unreadable_row;
use crate::actor::ActorMessage;
use crate::daemon::{Daemon, read_failed};
use crate::edge::{ConnectionPeer, HttpError, Json};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(list_all_sessions))
        .routes(routes!(list_sessions, create_session))
        .routes(routes!(get_session, change_session, close_session))
        .routes(routes!(list_messages))
        .routes(routes!(page_of_events))
}

/// The session of a row, as clients see it now.
pub(super) fn session_view(daemon: &Daemon, row: &SessionRow) -> Result<Session, ApiError> {
    let doc: SessionDoc = serde_json::from_slice(&row.doc).map_err(unreadable_row("session", &row.id))?;
    Ok(daemon.view_session(doc))
}

pub(super) async fn find_session(
    daemon: &Daemon,
    workspace: &WorkspaceId,
    id: &SessionId,
) -> Result<SessionRow, ApiError> {
    let entry = daemon.workspaces.get(workspace)?;
    let row = daemon.journal.session(id).await.map_err(read_failed)?;
    row.filter(|row| row.workspace == entry.key).ok_or_else(|| ApiError::not_found("session", id))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SessionsQuery {
    /// The most sessions to return, 1 to 1000. Default 1000.
    limit: Option<usize>,
    /// Continue after this session: the value of `Next-After`.
    after: Option<String>,
    /// Leave out closed sessions.
    #[serde(default)]
    open: bool,
}

/// Lists the sessions of a workspace, oldest first.
#[utoipa::path(get, path = "/v1/workspaces/{w}/sessions", tag = "sessions", params(WorkspacePath, SessionsQuery),
    responses((status = 200, description = "A page of sessions", body = [Session]), BadQueryResponse, NotFoundResponse, GuardResponses)
)]
async fn list_sessions(
    State(daemon): State<Arc<Daemon>>,
    PathIds(workspace): PathIds<WorkspaceId>,
    Query(query): Query<SessionsQuery>,
) -> Result<ListPage<Session>, HttpError> {
    let entry = daemon.workspaces.get(&workspace)?;
    let filter =
        SessionFilter { workspace: Some(entry.key), open_only: query.open, ..SessionFilter::default() };
    Ok(session_page(&daemon, filter, query.limit, query.after.as_deref()).await?)
}

async fn session_page(
    daemon: &Daemon,
    filter: SessionFilter,
    limit: Option<usize>,
    cursor: Option<&str>,
) -> Result<ListPage<Session>, ApiError> {
    let (limit, after) = (page_limit(limit)?, parse_after(cursor, SessionId::parse)?);
    let read = |after: Option<SessionId>, size| async move {
        daemon.journal.sessions(filter, after.as_ref(), size).await
    };
    // The sessions of a removed workspace cannot be reached.
    let take = |row: SessionRow| {
        daemon.workspaces.by_key(row.workspace).map(|_| session_view(daemon, &row)).transpose()
    };
    let sessions = read_filtered(limit, after, read, |row| row.id.clone(), take).await?;
    Ok(ListPage::from_fetched(sessions, limit, |session| session.id.as_str()))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AllSessionsQuery {
    /// The most sessions to return, 1 to 1000. Default 1000.
    limit: Option<usize>,
    /// Continue after this session: the value of `Next-After`.
    after: Option<String>,
    /// Leave out closed sessions.
    #[serde(default)]
    open: bool,
    /// Only sessions that match this id, beginning of an id, or title.
    r#ref: Option<String>,
}

/// Lists the sessions of every workspace, oldest first. With `ref`, an exact match comes first.
#[utoipa::path(get, path = "/v1/sessions", tag = "sessions", params(AllSessionsQuery), responses(
    (status = 200, description = "A page of sessions", body = [Session]), BadQueryResponse, GuardResponses,
))]
async fn list_all_sessions(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    Query(query): Query<AllSessionsQuery>,
) -> Result<ListPage<Session>, HttpError> {
    let AllSessionsQuery { limit, after, open, r#ref } = query;
    let Some(reference) = r#ref else {
        let workspace = caller.workspace().map(|own| daemon.workspaces.get(own)).transpose()?;
        let workspace = workspace.map(|entry| entry.key);
        let filter = SessionFilter { workspace, open_only: open, ..SessionFilter::default() };
        return Ok(session_page(&daemon, filter, limit, after.as_deref()).await?);
    };
    let mut matches = Vec::new();
    for reference_match in daemon.journal.resolve(&reference, PAGE_MAX).await.map_err(read_failed)? {
        if caller.workspace().is_some_and(|own| *own != reference_match.workspace_id) {
            continue;
        }
        let id = SessionId::parse(&reference_match.id)
            .ok()
            .filter(|_| reference_match.kind == ReferenceKind::Session);
        let (Some(id), Ok(_)) = (id, daemon.workspaces.get(&reference_match.workspace_id)) else { continue };
        if let Some(row) = daemon.journal.session(&id).await.map_err(read_failed)?
            && !(open && row.closed_at.is_some())
        {
            matches.push(session_view(&daemon, &row)?);
        }
    }
    Ok(ListPage::from_complete(matches, &ListQuery { limit, after }, |session| session.id.as_str())?)
}

/// Creates a session. Nothing starts before its first prompt.
#[utoipa::path(post, path = "/v1/workspaces/{w}/sessions", tag = "sessions", params(WorkspacePath, IdempotencyKeyHeader),
    request_body = NewSession,
    responses(
        (status = 201, description = "The session", body = Session),
        BadBodyResponses, NotFoundResponse, GuardResponses,
        (status = 400, description = "`unknown_agent`, `unsupported_setting`, `invalid_request` or `invalid_value`",
            body = ErrorBody),
        (status = 409, description = "`agent_unavailable` (with how to install it), `agent_overrides_policy`, \
            `sandbox_unavailable` (with what is missing), `conversation_in_use` (by the session in `details`), `session_closed` (the parent) or \
            `idempotency_conflict`", body = ErrorBody),
        (status = 429, description = "`overloaded`: too many requests wait for the parent", body = ErrorBody),
    )
)]
async fn create_session(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds(workspace): PathIds<WorkspaceId>,
    peer: Option<Extension<ConnectionPeer>>,
    KeyedBody(key, Json(new)): KeyedBody<Json<NewSession>>,
) -> Result<(StatusCode, Json<Session>), HttpError> {
    // Whoever may choose the program can run anything as this user. Over the socket that is the user anyway.
    let is_socket = matches!(peer, Some(Extension(ConnectionPeer::Unix { .. })));
    if new.program.is_some() && !is_socket {
        let message = "`program` is only accepted over the daemon's socket; leave it out";
        return Err(ApiError::new(ErrorCode::InvalidValue, message).into());
    }
    let entry = daemon.workspaces.get(&workspace)?;
    let create = |key| async {
        let session = Box::pin(daemon.create_session(&entry, new, &caller.actor, key)).await?;
        Ok((session, ResponseRecording::WrittenWithEffect))
    };
    Ok((StatusCode::CREATED, Json(run_once(&daemon, key, create).await?)))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SessionQuery {
    /// Include the summed cost of this session and all its descendants.
    #[serde(default)]
    tree: bool,
}

/// Shows one session.
#[utoipa::path(get, path = "/v1/workspaces/{w}/sessions/{s}", tag = "sessions", params(SessionPath, SessionQuery),
    responses((status = 200, description = "The session", body = Session), BadQueryResponse, NotFoundResponse, GuardResponses)
)]
async fn get_session(
    State(daemon): State<Arc<Daemon>>,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
    Query(query): Query<SessionQuery>,
) -> Result<Json<Session>, HttpError> {
    let row = find_session(&daemon, &workspace, &id).await?;
    let mut session = session_view(&daemon, &row)?;
    if query.tree {
        session.tree_cost_usd = Some(daemon.journal.tree_cost(row.key).await.map_err(read_failed)?);
    }
    Ok(Json(session))
}

/// Changes the given settings and leaves the others. A limit set to `null` is lifted; a new policy applies to later
/// asks.
#[utoipa::path(patch, path = "/v1/workspaces/{w}/sessions/{s}", tag = "sessions", params(SessionPath),
    request_body = SessionPatch,
    responses(
        (status = 200, description = "The changed session", body = Session),
        BadBodyResponses, NotFoundResponse, GuardResponses,
        (status = 400, description = "`unsupported_setting`, `invalid_request` or `invalid_value`", body = ErrorBody),
        (status = 409, description = "`session_closed` or `sandbox_unavailable` (with what is missing)", body = ErrorBody),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
    )
)]
async fn change_session(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
    Json(patch): Json<SessionPatch>,
) -> Result<Json<Session>, HttpError> {
    // Patches run one at a time: a patch names some limits, but the event has all of them.
    let _one_at_a_time = daemon.key_locks.lock(format!("patch {id}")).await;
    let row = find_session(&daemon, &workspace, &id).await?;
    let session = daemon.session_address(&row)?;
    let update = daemon.check_patch(&session_view(&daemon, &row)?, patch)?;
    let limits_changed = update.limits.is_some();
    let command = SessionCommand::UpdateSettings(update);
    daemon.send_command(&session, &caller.actor, command, None).await?;
    if limits_changed {
        daemon.check_budgets(session.key).await.map_err(read_failed)?;
        daemon.send_message(&session, ActorMessage::Wake)?;
    }
    let row = find_session(&daemon, &workspace, &id).await?;
    Ok(Json(session_view(&daemon, &row)?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct CloseQuery {
    /// Also delete the session's events, once it is closed.
    #[serde(default)]
    purge: bool,
}

/// A session that is closing or closed, or the rest of one that was purged.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = Closed)]
enum CloseSessionResponse {
    /// The session closes when its last run has ended.
    Session(Box<Session>),
    /// The session was purged at once.
    Purged {
        id: SessionId,
        /// Always true.
        closed: bool,
    },
}

/// Closes a session: it takes no more prompts, its runs are cancelled, and its child sessions are closed. Answers once
/// this is journalled.
#[utoipa::path(delete, path = "/v1/workspaces/{w}/sessions/{s}", tag = "sessions", params(SessionPath, CloseQuery),
    responses(
        (status = 200, description = "The closing session, or what is left of a purged one", body = CloseSessionResponse),
        (status = 429, description = "`overloaded`: too many requests wait for the session", body = ErrorBody),
        BadQueryResponse, NotFoundResponse, GuardResponses,
    )
)]
async fn close_session(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
    Query(query): Query<CloseQuery>,
) -> Result<Json<CloseSessionResponse>, HttpError> {
    let session = daemon.session_in_workspace(&workspace, &id).await?;
    let command = SessionCommand::Close { purge: query.purge };
    daemon.send_command(&session, &caller.actor, command, None).await?;
    let row = daemon.journal.session(&id).await.map_err(read_failed)?;
    Ok(Json(match row {
        Some(row) => CloseSessionResponse::Session(Box::new(session_view(&daemon, &row)?)),
        None => CloseSessionResponse::Purged { id, closed: true },
    }))
}

/// The event kinds that messages are assembled from.
const MESSAGE_KINDS: &[&str] = &[
    "message.created",
    "text.delta",
    "thought.delta",
    "tool.started",
    "tool.output",
    "tool.finished",
    "plan.updated",
    "steer.accepted",
    "steer.taken",
    "message.finished",
];

/// Lists the messages of a session, in the order in which they began.
#[utoipa::path(get, path = "/v1/workspaces/{w}/sessions/{s}/messages", tag = "sessions",
    params(SessionPath, ListQuery),
    responses((status = 200, description = "A page of messages", body = [Message]), BadQueryResponse, NotFoundResponse, GuardResponses)
)]
async fn list_messages(
    State(daemon): State<Arc<Daemon>>,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
    Query(query): Query<ListQuery>,
) -> Result<ListPage<Message>, HttpError> {
    let row = find_session(&daemon, &workspace, &id).await?;
    let mut messages = MessageAssembler::default();
    let mut after = EventNumber(0);
    loop {
        let page = daemon.journal.session_events(row.key, None, MESSAGE_KINDS, after, PAGE_MAX).await;
        let page = page.map_err(read_failed)?;
        for stored in page.events {
            let body =
                EventBody::decode(&stored.kind, &stored.data).map_err(unreadable_row("session", &id))?;
            if let Some(body) = body {
                messages.add_event(stored.number.unwrap_or_default(), stored.run.as_ref(), body);
            }
        }
        after = page.scanned_through;
        if page.end {
            break;
        }
    }
    Ok(ListPage::from_complete(messages.into_messages(), &query, |message| message.message_id.as_str())?)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct EventsQuery {
    /// The most events to return, 1 to 1000. Default 1000.
    limit: Option<usize>,
    /// Only events after this seq. 0 or absent: from the beginning.
    after: Option<String>,
}

/// Lists the events of a session, page by page. A page can be short although more events follow, if its events are
/// long.
#[utoipa::path(get, path = "/v1/workspaces/{w}/sessions/{s}/events", tag = "sessions",
    params(SessionPath, EventsQuery),
    responses((status = 200, description = "A page of events; empty at the end", body = EventPage), BadQueryResponse, NotFoundResponse, GuardResponses)
)]
async fn page_of_events(
    State(daemon): State<Arc<Daemon>>,
    PathIds((workspace, id)): PathIds<(WorkspaceId, SessionId)>,
    Query(query): Query<EventsQuery>,
) -> Result<impl IntoResponse, HttpError> {
    let limit = page_limit(query.limit)?;
    let mut after = parse_cursor(query.after.as_deref().unwrap_or("0"), daemon.journal.head())?;
    let row = find_session(&daemon, &workspace, &id).await?;
    let filter = EventFilter::of(EventTopic::Session(row.key));
    let mut page = daemon.journal.page(&filter, after, limit).await.map_err(read_failed)?;
    while page.events.is_empty() && !page.end {
        page = daemon.journal.page(&filter, page.scanned_through, limit).await.map_err(read_failed)?;
    }
    // The events are JSON already, and are concatenated as they are.
    let size: usize = page.events.iter().map(|event| event.frame.len()).sum();
    let mut body = Vec::with_capacity(size + 64);
    body.extend_from_slice(br#"{"events":["#);
    for event in &page.events {
        if !body.ends_with(b"[") {
            body.push(b',');
        }
        body.extend_from_slice(&event.json());
        after = event.seq;
    }
    body.extend_from_slice(format!("],\"next_after\":{after}}}").as_bytes());
    Ok(([(header::CONTENT_TYPE, "application/json")], body))
}
