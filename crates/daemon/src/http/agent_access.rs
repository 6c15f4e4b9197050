//! Agents must not act as their own judge. A process on our socket that descends from an agent may read its own
//! session, claim its own mail and, with that session's token, use its tools; nothing else. It answers no ask,
//! touches no session outside its own tree, and starts sessions only through the tools, below its own session.
//!
//! Design: docs/design/callers-are-traced.md

use axum::extract::Request;
use axum::http::Method;
use qd_protocol::{ApiError, ErrorCode, SessionId};

use crate::daemon::Daemon;
use crate::edge::{BearerSession, ConnectionPeer, is_tool_path};
use crate::workers::CallerAncestry;

/// Routes that reveal nothing about any session, so even agents may read them.
const PUBLIC_PATHS: [&str; 3] = ["/healthz", "/v1/version", "/openapi.json"];

/// Admits a request, unless it comes from an agent and asks for more than that agent's session may do.
pub(super) fn admit(daemon: &Daemon, request: &Request) -> Result<(), ApiError> {
    let Some(ConnectionPeer::Unix { process, .. }) = request.extensions().get::<ConnectionPeer>() else {
        return Ok(());
    };
    let (method, path, query) = (request.method(), request.uri().path(), request.uri().query());
    let (pid, ancestry) = match *process {
        Some((pid, start)) => (pid, daemon.workers.caller_ancestry(pid, start)),
        None => (0, CallerAncestry::Unknown),
    };
    // The guard has checked what the token opens. A caller of unknown ancestry has the rights of its token and no
    // more.
    let bearer = request
        .extensions()
        .get::<BearerSession>()
        .filter(|_| is_tool_path(path))
        .map(|BearerSession(session)| session);
    match ancestry {
        CallerAncestry::Unrelated => Ok(()),
        _ if PUBLIC_PATHS.contains(&path) => Ok(()),
        CallerAncestry::Agent(session) if bearer == Some(&session) => Ok(()),
        CallerAncestry::Unknown if bearer.is_some() => Ok(()),
        CallerAncestry::Agent(session) if reads_own_session(method, path, query, &session) => Ok(()),
        CallerAncestry::Agent(session) if claims_own_mail(method, path, &session) => Ok(()),
        CallerAncestry::Agent(session) => {
            let message = format!(
                "process {pid} belongs to the agent of {session}, which may only read its session and claim its mail"
            );
            Err(ApiError::new(ErrorCode::AgentNotAllowed, message)
                .with_detail("session_id", session.as_str()))
        }
        CallerAncestry::Unknown => {
            let message = format!("process {pid} belongs to an agent that is not known here, or has exited");
            Err(ApiError::new(ErrorCode::AgentNotAllowed, message))
        }
    }
}

/// Whether a request only reads this session, or resolves its id.
fn reads_own_session(method: &Method, path: &str, query: Option<&str>, session: &SessionId) -> bool {
    let mut segments = path.split('/').skip_while(|segment| *segment != "sessions").skip(1);
    // A viewer of a terminal can type as well, so the agent could prompt itself.
    if segments.clone().nth(1) == Some("terminal") {
        return false;
    }
    let resolves =
        path == "/v1/resolve" && query.and_then(|query| query.strip_prefix("ref=")) == Some(session.as_str());
    matches!(*method, Method::GET | Method::HEAD) && (resolves || segments.next() == Some(session.as_str()))
}

/// Whether a request claims or acknowledges mail of this session.
fn claims_own_mail(method: &Method, path: &str, session: &SessionId) -> bool {
    let segments: Vec<&str> = path.split('/').skip_while(|segment| *segment != "sessions").skip(1).collect();
    let is_own_mail =
        matches!(segments[..], [own, "mail", "claim"] | [own, "mail", _, "ack"] if own == session.as_str());
    *method == Method::POST && is_own_mail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_may_empty_its_own_mailbox_and_write_to_nobody() {
        let own = SessionId::from_random(&[1; 4]);
        let may = |path: &str| {
            let path = format!("/v1/workspaces/ws_1/sessions/{}", path.replace("OWN", own.as_str()));
            claims_own_mail(&Method::POST, &path, &own)
        };
        assert!(may("OWN/mail/claim") && may("OWN/mail/mail_1/ack"));
        for path in [
            "OWN/mail",
            "ses_other/mail/claim",
            "ses_other/mail",
            "OWN",
            "ses_other/mail/sessions/OWN/mail/claim",
        ] {
            assert!(!may(path), "{path}");
        }
        assert!(!claims_own_mail(
            &Method::DELETE,
            &format!("/v1/workspaces/ws_1/sessions/{own}/mail/claim"),
            &own
        ));
    }

    #[test]
    fn an_agent_may_look_at_its_own_session_alone() {
        let own = SessionId::from_random(&[1; 4]);
        let may = |method, path: &str| reads_own_session(&method, path, None, &own);
        let may_resolve = |query: &str| reads_own_session(&Method::GET, "/v1/resolve", Some(query), &own);
        assert!(
            may_resolve(&format!("ref={own}"))
                && !may_resolve("ref=ses_")
                && !may_resolve(&format!("ref=x&ref={own}"))
        );
        for path in
            ["sessions/OWN", "sessions/OWN/messages", "sessions/OWN/events", "agent/sessions/OWN/queue"]
        {
            let path = format!("/v1/workspaces/ws_1/{}", path.replace("OWN", own.as_str()));
            assert!(may(Method::GET, &path), "{path}");
            assert!(!may(Method::POST, &path) && !may(Method::DELETE, &path), "{path}");
        }
        assert!(
            !may(Method::GET, &format!("/v1/workspaces/ws_1/sessions/{own}/terminal")),
            "a viewer can type"
        );
        for path in [
            "/v1/asks",
            "/v1/policy/test",
            "/v1/workspaces/ws_1/sessions",
            "/v1/workspaces/ws_1/sessions/ses_other",
            "/v1/events",
        ] {
            assert!(!may(Method::GET, path) && !may(Method::POST, path), "{path}");
        }
    }
}
