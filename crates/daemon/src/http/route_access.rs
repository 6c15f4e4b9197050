//! Who may use which route: one table with a line per route. It says which role a client's token needs, what a token
//! that is bound to one workspace reaches there, and what an agent may do. A route that is missing here is open to nobody
//! but the owner, and a test compares the table with the OpenAPI document.
//!
//! Design: docs/design/callers-are-traced.md

use axum::extract::{MatchedPath, Request};
use axum::http::Method;
use qd_protocol::api::TokenRole;
use qd_protocol::{ApiError, ErrorCode, SessionId, WorkspaceId};

use crate::client_tokens::ClientBearer;
use crate::daemon::Daemon;
use crate::edge::{BearerSession, ConnectionPeer};
use crate::workers::CallerAncestry;
use RouteReach::{Everything, Filtered, NoWorkspace, OneWorkspace};
use TokenRole::{Admin, Approver, Operator, Viewer};

/// Who may use one route.
#[derive(Debug, Clone, Copy)]
struct RouteAccess {
    method: &'static str,
    path: &'static str,
    /// The least role that a client's token needs.
    role: TokenRole,
    reach: RouteReach,
    agent: AgentAccess,
}

/// What a route reaches, which decides about tokens that are bound to one workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RouteReach {
    /// Nothing of any workspace.
    NoWorkspace,
    /// The workspace `{w}` of the path.
    OneWorkspace,
    /// What the caller may reach: the handler looks at [`Caller::workspace`](super::caller::Caller::workspace).
    Filtered,
    /// All workspaces, or the daemon itself.
    Everything,
}

/// What the agent of a session may do with a route, over the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AgentAccess {
    Never,
    /// The route reveals nothing about any session.
    Always,
    /// If the `{s}` of the path is its own session.
    OwnSession,
    /// If the query `ref` is the id of its own session.
    OwnReference,
    /// With the token of its session.
    WithSessionToken,
}

const fn route(
    method: &'static str,
    path: &'static str,
    role: TokenRole,
    reach: RouteReach,
    agent: AgentAccess,
) -> RouteAccess {
    RouteAccess { method, path, role, reach, agent }
}

/// Every route.
#[rustfmt::skip]
const ROUTES: &[RouteAccess] = &[
    route("GET", "/healthz", Viewer, NoWorkspace, AgentAccess::Always),
    route("GET", "/openapi.json", Viewer, NoWorkspace, AgentAccess::Always),
    route("GET", "/v1/version", Viewer, NoWorkspace, AgentAccess::Always),
    route("GET", "/metrics", Viewer, Everything, AgentAccess::Never),
    route("POST", "/mcp", Operator, Everything, AgentAccess::WithSessionToken),
    route("POST", "/v1/tools/{tool}", Operator, Everything, AgentAccess::WithSessionToken),
    route("GET", "/v1/agents", Viewer, NoWorkspace, AgentAccess::Never),
    route("GET", "/v1/agents/problems", Viewer, NoWorkspace, AgentAccess::Never),
    route("GET", "/v1/asks", Viewer, Filtered, AgentAccess::Never),
    route("GET", "/v1/asks/{ask}", Viewer, Filtered, AgentAccess::Never),
    route("POST", "/v1/asks/{ask}/answer", Approver, Filtered, AgentAccess::Never),
    route("GET", "/v1/audit", Viewer, Filtered, AgentAccess::Never),
    // Whoever knows the hash of a text has seen the event that names it.
    route("GET", "/v1/blobs/{sha256}", Viewer, NoWorkspace, AgentAccess::Never),
    route("GET", "/v1/events", Viewer, Filtered, AgentAccess::Never),
    route("GET", "/v1/gc", Viewer, Everything, AgentAccess::Never),
    route("POST", "/v1/gc", Admin, Everything, AgentAccess::Never),
    route("GET", "/v1/halt", Viewer, NoWorkspace, AgentAccess::Never),
    route("POST", "/v1/halt", Operator, Everything, AgentAccess::Never),
    route("DELETE", "/v1/halt", Operator, Everything, AgentAccess::Never),
    route("GET", "/v1/journal/check", Viewer, Everything, AgentAccess::Never),
    route("GET", "/v1/mail", Viewer, Everything, AgentAccess::Never),
    route("POST", "/v1/policy/test", Viewer, NoWorkspace, AgentAccess::Never),
    route("GET", "/v1/quotas", Viewer, Everything, AgentAccess::Never),
    route("DELETE", "/v1/quotas/{account}", Operator, Everything, AgentAccess::Never),
    route("GET", "/v1/resolve", Viewer, Filtered, AgentAccess::OwnReference),
    route("GET", "/v1/search", Viewer, Everything, AgentAccess::Never),
    route("POST", "/v1/search/rebuild", Admin, Everything, AgentAccess::Never),
    route("GET", "/v1/sessions", Viewer, Filtered, AgentAccess::Never),
    route("GET", "/v1/short-ids", Viewer, NoWorkspace, AgentAccess::Never),
    route("POST", "/v1/shutdown", Admin, Everything, AgentAccess::Never),
    route("GET", "/v1/tokens", Admin, Everything, AgentAccess::Never),
    route("POST", "/v1/tokens", Admin, Everything, AgentAccess::Never),
    route("DELETE", "/v1/tokens/{id}", Admin, Everything, AgentAccess::Never),
    route("GET", "/v1/trust", Viewer, Everything, AgentAccess::Never),
    route("POST", "/v1/trust", Admin, Everything, AgentAccess::Never),
    route("DELETE", "/v1/trust", Admin, Everything, AgentAccess::Never),
    route("GET", "/v1/usage", Viewer, Everything, AgentAccess::Never),
    route("GET", "/v1/workers", Viewer, Everything, AgentAccess::Never),
    // Both need a worker token, which opens nothing else; the token of a client does not join.
    route("GET", "/v1/workers/join", Viewer, NoWorkspace, AgentAccess::Never),
    route("GET", "/v1/workers/link", Viewer, NoWorkspace, AgentAccess::Never),
    route("GET", "/v1/workers/joined", Viewer, Everything, AgentAccess::Never),
    route("GET", "/v1/workers/tokens", Admin, Everything, AgentAccess::Never),
    route("POST", "/v1/workers/tokens", Admin, Everything, AgentAccess::Never),
    route("DELETE", "/v1/workers/tokens/{id}", Admin, Everything, AgentAccess::Never),
    route("GET", "/v1/workspaces", Viewer, Filtered, AgentAccess::Never),
    route("POST", "/v1/workspaces", Operator, Filtered, AgentAccess::Never),
    route("GET", "/v1/workspaces/{w}", Viewer, OneWorkspace, AgentAccess::Never),
    route("DELETE", "/v1/workspaces/{w}", Operator, OneWorkspace, AgentAccess::Never),
    route("POST", "/v1/workspaces/{w}/agent", Operator, OneWorkspace, AgentAccess::Never),
    route("POST", "/v1/workspaces/{w}/agent/sessions/{s}/cancel", Operator, OneWorkspace, AgentAccess::Never),
    route("GET", "/v1/workspaces/{w}/agent/sessions/{s}/queue", Viewer, OneWorkspace, AgentAccess::OwnSession),
    route("DELETE", "/v1/workspaces/{w}/agent/sessions/{s}/queue", Operator, OneWorkspace, AgentAccess::Never),
    route("DELETE", "/v1/workspaces/{w}/agent/sessions/{s}/queue/{run}", Operator, OneWorkspace, AgentAccess::Never),
    route("PATCH", "/v1/workspaces/{w}/agent/sessions/{s}/queue/{run}", Operator, OneWorkspace, AgentAccess::Never),
    route("POST", "/v1/workspaces/{w}/agent/sessions/{s}/steer", Operator, OneWorkspace, AgentAccess::Never),
    route("GET", "/v1/workspaces/{w}/events", Viewer, OneWorkspace, AgentAccess::Never),
    route("GET", "/v1/workspaces/{w}/fleets", Viewer, OneWorkspace, AgentAccess::Never),
    route("POST", "/v1/workspaces/{w}/fleets", Operator, OneWorkspace, AgentAccess::Never),
    route("POST", "/v1/workspaces/{w}/fleets/check", Operator, OneWorkspace, AgentAccess::Never),
    route("GET", "/v1/workspaces/{w}/fleets/{f}", Viewer, OneWorkspace, AgentAccess::Never),
    route("POST", "/v1/workspaces/{w}/fleets/{f}/cancel", Operator, OneWorkspace, AgentAccess::Never),
    route("GET", "/v1/workspaces/{w}/runs", Viewer, OneWorkspace, AgentAccess::Never),
    route("GET", "/v1/workspaces/{w}/runs/{run}", Viewer, OneWorkspace, AgentAccess::Never),
    route("GET", "/v1/workspaces/{w}/runs/{run}/wait", Viewer, OneWorkspace, AgentAccess::Never),
    route("GET", "/v1/workspaces/{w}/sessions", Viewer, OneWorkspace, AgentAccess::Never),
    route("POST", "/v1/workspaces/{w}/sessions", Operator, OneWorkspace, AgentAccess::Never),
    route("GET", "/v1/workspaces/{w}/sessions/{s}", Viewer, OneWorkspace, AgentAccess::OwnSession),
    route("DELETE", "/v1/workspaces/{w}/sessions/{s}", Operator, OneWorkspace, AgentAccess::Never),
    route("PATCH", "/v1/workspaces/{w}/sessions/{s}", Operator, OneWorkspace, AgentAccess::Never),
    // A diff makes the daemon read whatever the agent has put into its worktree; the agent can read that itself.
    route("GET", "/v1/workspaces/{w}/sessions/{s}/diff", Viewer, OneWorkspace, AgentAccess::Never),
    route("GET", "/v1/workspaces/{w}/sessions/{s}/events", Viewer, OneWorkspace, AgentAccess::OwnSession),
    route("GET", "/v1/workspaces/{w}/sessions/{s}/mail", Viewer, OneWorkspace, AgentAccess::OwnSession),
    route("POST", "/v1/workspaces/{w}/sessions/{s}/mail", Operator, OneWorkspace, AgentAccess::Never),
    route("POST", "/v1/workspaces/{w}/sessions/{s}/mail/claim", Operator, OneWorkspace, AgentAccess::OwnSession),
    route("GET", "/v1/workspaces/{w}/sessions/{s}/mail/{m}", Viewer, OneWorkspace, AgentAccess::OwnSession),
    route("POST", "/v1/workspaces/{w}/sessions/{s}/mail/{m}/ack", Operator, OneWorkspace, AgentAccess::OwnSession),
    route("POST", "/v1/workspaces/{w}/sessions/{s}/merge", Operator, OneWorkspace, AgentAccess::Never),
    route("GET", "/v1/workspaces/{w}/sessions/{s}/messages", Viewer, OneWorkspace, AgentAccess::OwnSession),
    // A viewer of a terminal can type as well, so an agent could prompt itself.
    route("GET", "/v1/workspaces/{w}/sessions/{s}/terminal", Operator, OneWorkspace, AgentAccess::Never),
    route("DELETE", "/v1/workspaces/{w}/sessions/{s}/worktree", Operator, OneWorkspace, AgentAccess::Never),
    route("GET", "/v1/worktrees", Viewer, Everything, AgentAccess::Never),
    route("DELETE", "/v1/worktrees/{s}", Operator, Everything, AgentAccess::Never),
];

/// The line of a request's route; `None` if there is no such route.
fn find_route(request: &Request) -> Option<&'static RouteAccess> {
    let path = request.extensions().get::<MatchedPath>()?;
    let method = if *request.method() == Method::HEAD { "GET" } else { request.method().as_str() };
    ROUTES.iter().find(|access| access.path == path.as_str() && access.method == method)
}

/// What stands at a placeholder such as `{w}` of a route's path.
fn path_part<'a>(access: &RouteAccess, path: &'a str, placeholder: &str) -> Option<&'a str> {
    access.path.split('/').zip(path.split('/')).find(|(part, _)| *part == placeholder).map(|(_, given)| given)
}

/// Admits a request, unless it comes from an agent or from a client and asks for more than they may do. Returns the
/// session whose agent it comes from.
pub(super) fn admit(daemon: &Daemon, request: &Request) -> Result<Option<SessionId>, ApiError> {
    let access = find_route(request);
    if let Some(client) = request.extensions().get::<ClientBearer>() {
        admit_client(client, access, request.uri().path())?;
    }
    match request.extensions().get::<ConnectionPeer>() {
        Some(ConnectionPeer::Unix { process, .. }) => {
            let (pid, ancestry) = match *process {
                Some((pid, start)) => (pid, daemon.workers.caller_ancestry(pid, start)),
                None => (0, CallerAncestry::Unknown),
            };
            admit_process(&format!("process {pid}"), ancestry, access, request)
        }
        // Whoever it is: the session's socket is all that its agent is shown.
        Some(ConnectionPeer::Session { session, .. }) => {
            let ancestry = CallerAncestry::Agent(session.clone());
            admit_process("a caller on this socket", ancestry, access, request)
        }
        Some(ConnectionPeer::Tcp { .. }) | None => Ok(None),
    }
}

/// Admits a client if the role of its token suffices, and the route reaches no workspace but its own.
fn admit_client(client: &ClientBearer, access: Option<&RouteAccess>, path: &str) -> Result<(), ApiError> {
    // The owner is told what there is.
    if client.role == Admin && client.workspace.is_none() {
        return Ok(());
    }
    let Some(access) = access else {
        return Err(ApiError::new(ErrorCode::NotFound, format!("there is nothing at {path}")));
    };
    if client.role < access.role {
        let (needed, role) = (access.role.as_str(), client.role.as_str());
        let message =
            format!("this needs the role {needed}, and the token {} has the role {role}", client.name);
        return Err(ApiError::new(ErrorCode::RoleNotAllowed, message).with_detail("role", needed));
    }
    let Some(own) = &client.workspace else { return Ok(()) };
    let is_within = match access.reach {
        NoWorkspace | Filtered => true,
        OneWorkspace => path_part(access, path, "{w}") == Some(own.as_str()),
        Everything => false,
    };
    match is_within {
        true => Ok(()),
        false => Err(workspace_not_allowed(&client.name, own)),
    }
}

/// The error for a token that is bound to another workspace.
pub(super) fn workspace_not_allowed(token: &str, own: &WorkspaceId) -> ApiError {
    let message = format!("the token {token} is for the workspace {own}, and this is not in it");
    ApiError::new(ErrorCode::RoleNotAllowed, message).with_detail("workspace_id", own.as_str())
}

/// Admits a process on the socket: anybody but an agent, and an agent where its session may go.
fn admit_process(
    caller: &str,
    ancestry: CallerAncestry,
    access: Option<&RouteAccess>,
    request: &Request,
) -> Result<Option<SessionId>, ApiError> {
    let bearer = request.extensions().get::<BearerSession>().map(|BearerSession(session)| session);
    let agent_access = access.map_or(AgentAccess::Never, |access| access.agent);
    let query = request.uri().query();
    let is_allowed = |session: &SessionId| match agent_access {
        AgentAccess::Never => false,
        AgentAccess::Always => true,
        AgentAccess::OwnSession => access
            .is_some_and(|access| path_part(access, request.uri().path(), "{s}") == Some(session.as_str())),
        AgentAccess::OwnReference => {
            query.and_then(|query| query.strip_prefix("ref=")) == Some(session.as_str())
        }
        AgentAccess::WithSessionToken => bearer == Some(session),
    };
    match ancestry {
        CallerAncestry::Unrelated => Ok(None),
        CallerAncestry::Agent(session) if is_allowed(&session) => Ok(Some(session)),
        // A caller of unknown ancestry has the rights of its token and no more.
        CallerAncestry::Unknown
            if agent_access == AgentAccess::Always
                || (agent_access == AgentAccess::WithSessionToken && bearer.is_some()) =>
        {
            Ok(None)
        }
        CallerAncestry::Agent(session) => {
            let message = format!(
                "{caller} belongs to the agent of {session}, which may only read its session and claim its mail"
            );
            Err(ApiError::new(ErrorCode::AgentNotAllowed, message)
                .with_detail("session_id", session.as_str()))
        }
        CallerAncestry::Unknown => {
            let message = format!("{caller} belongs to an agent that is not known here, or has exited");
            Err(ApiError::new(ErrorCode::AgentNotAllowed, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use axum::body::Body;

    use super::*;

    #[test]
    fn every_route_says_who_may_use_it_and_nothing_else_is_in_the_table() {
        let document: serde_json::Value =
            serde_json::from_str(super::super::api_document::openapi_document()).unwrap();
        let routes = document["paths"].as_object().unwrap().iter().flat_map(|(path, item)| {
            let methods = item.as_object().unwrap().keys();
            methods.map(move |method| (method.to_uppercase(), path.clone()))
        });
        let routes: BTreeSet<(String, String)> = routes.collect();
        let table: BTreeSet<(String, String)> =
            ROUTES.iter().map(|access| (access.method.to_owned(), access.path.to_owned())).collect();
        assert_eq!(table, routes);
        assert_eq!(table.len(), ROUTES.len(), "a route has one line");
    }

    #[test]
    fn what_changes_something_needs_more_than_a_viewer_and_secrets_need_an_admin() {
        for access in ROUTES {
            let only_tests = access.path == "/v1/policy/test";
            assert!(access.method == "GET" || only_tests || access.role > Viewer, "{access:?}");
            let is_secret =
                ["/v1/tokens", "/v1/workers/tokens"].iter().any(|path| access.path.starts_with(path));
            assert_eq!(
                access.role == Admin && access.method == "GET",
                is_secret && access.method == "GET",
                "{access:?}"
            );
            assert_eq!(access.reach == OneWorkspace, access.path.contains("{w}"), "{access:?}");
            let names_session = access.path.contains("{s}");
            assert!(access.agent != AgentAccess::OwnSession || names_session, "{access:?}");
        }
    }

    fn agent_may(method: &str, path: &str, own: &SessionId) -> bool {
        let given = path.replace("OWN", own.as_str());
        let (bare, _) = given.split_once('?').unwrap_or((&given, ""));
        let matches = |access: &&RouteAccess| {
            let parts: Vec<(&str, &str)> = access.path.split('/').zip(bare.split('/')).collect();
            access.method == method
                && access.path.split('/').count() == bare.split('/').count()
                && parts.iter().all(|(part, given)| part.starts_with('{') || part == given)
        };
        let request = Request::builder().method(method).uri(&given).body(Body::empty()).unwrap();
        let ancestry = CallerAncestry::Agent(own.clone());
        admit_process("process 1", ancestry, ROUTES.iter().find(matches), &request).is_ok()
    }

    #[test]
    fn an_agent_may_empty_its_own_mailbox_and_write_to_nobody() {
        let own = SessionId::from_random(&[1; 4]);
        let session = "/v1/workspaces/ws_1/sessions";
        assert!(agent_may("POST", &format!("{session}/OWN/mail/claim"), &own));
        assert!(agent_may("POST", &format!("{session}/OWN/mail/mail_1/ack"), &own));
        for path in ["OWN/mail", "ses_other/mail/claim", "ses_other/mail", "OWN", "ses_other/mail/mail_1/ack"]
        {
            assert!(!agent_may("POST", &format!("{session}/{path}"), &own), "{path}");
        }
        assert!(!agent_may("POST", &format!("{session}/ses_other/mail/sessions/OWN/mail/claim"), &own));
    }

    #[test]
    fn an_agent_may_look_at_its_own_session_alone() {
        let own = SessionId::from_random(&[1; 4]);
        let may_resolve = |query: &str| agent_may("GET", &format!("/v1/resolve?{query}"), &own);
        assert!(may_resolve("ref=OWN") && !may_resolve("ref=ses_") && !may_resolve("ref=x&ref=OWN"));
        for path in
            ["sessions/OWN", "sessions/OWN/messages", "sessions/OWN/events", "agent/sessions/OWN/queue"]
        {
            let path = format!("/v1/workspaces/ws_1/{path}");
            assert!(agent_may("GET", &path, &own), "{path}");
            assert!(!agent_may("POST", &path, &own) && !agent_may("DELETE", &path, &own), "{path}");
            assert!(!agent_may("GET", &path.replace("OWN", "ses_other"), &own), "{path}");
        }
        assert!(!agent_may("GET", "/v1/workspaces/ws_1/sessions/OWN/terminal", &own), "a viewer can type");
        for path in ["/v1/asks", "/v1/tokens", "/v1/workspaces/ws_1/sessions", "/v1/events", "/v1/nothing"] {
            assert!(!agent_may("GET", path, &own) && !agent_may("POST", path, &own), "{path}");
        }
    }
}
