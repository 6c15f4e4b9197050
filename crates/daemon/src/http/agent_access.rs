//! An agent is not its own judge. A process on our socket that descends from an agent can look at its own session, empty
//! its own mailbox and, with that session's token, use its tools, and nothing else: it answers no ask, touches no session
//! that is not below its own, and starts nothing behind anybody's back.

use axum::extract::Request;
use axum::http::Method;
use qd_protocol::{ApiError, ErrorCode, SessionId};

use crate::daemon::Daemon;
use crate::edge::{BearerSession, ConnectionPeer, is_tool_path};
use crate::workers::CallerAncestry;

/// What tells nobody anything.
const PUBLIC_PATHS: [&str; 3] = ["/healthz", "/v1/version", "/openapi.json"];

/// Lets a request through unless it comes from below an agent and wants more than that agent's session may.
pub(super) fn admit(daemon: &Daemon, request: &Request) -> Result<(), ApiError> {
    let Some(ConnectionPeer::Unix { process, .. }) = request.extensions().get::<ConnectionPeer>() else {
        return Ok(());
    };
    let (method, path, query) = (request.method(), request.uri().path(), request.uri().query());
    let (pid, kin) = match *process {
        Some((pid, start)) => (pid, daemon.workers.caller_ancestry(pid, start)),
        None => (0, CallerAncestry::Unknown),
    };
    // What the token is good for, the guard has seen to. Whoever cannot be told apart has no more than it says.
    let speaks_for = request
        .extensions()
        .get::<BearerSession>()
        .filter(|_| is_tool_path(path))
        .map(|BearerSession(one)| one);
    match kin {
        CallerAncestry::Unrelated => Ok(()),
        _ if PUBLIC_PATHS.contains(&path) => Ok(()),
        CallerAncestry::Agent(session) if speaks_for == Some(&session) => Ok(()),
        CallerAncestry::Unknown if speaks_for.is_some() => Ok(()),
        CallerAncestry::Agent(session) if reads_own_session(method, path, query, &session) => Ok(()),
        CallerAncestry::Agent(session) if claims_own_mail(method, path, &session) => Ok(()),
        CallerAncestry::Agent(session) => {
            let message = format!(
                "process {pid} belongs to the agent of {session}, which can look at its own session, claim its mail, and do nothing else here"
            );
            Err(ApiError::new(ErrorCode::AgentNotAllowed, message)
                .with_detail("session_id", session.as_str()))
        }
        CallerAncestry::Unknown => {
            let message = format!("process {pid} belongs to an agent that is not known here, or has ended");
            Err(ApiError::new(ErrorCode::AgentNotAllowed, message))
        }
    }
}

/// Whether a request only reads what belongs to this session, or where that is.
fn reads_own_session(method: &Method, path: &str, query: Option<&str>, session: &SessionId) -> bool {
    let mut segments = path.split('/').skip_while(|segment| *segment != "sessions").skip(1);
    // Whoever looks at a terminal can type as well, and so could prompt itself.
    if segments.clone().nth(1) == Some("terminal") {
        return false;
    }
    let finds =
        path == "/v1/resolve" && query.and_then(|query| query.strip_prefix("ref=")) == Some(session.as_str());
    matches!(*method, Method::GET | Method::HEAD) && (finds || segments.next() == Some(session.as_str()))
}

/// Whether a request claims or acknowledges what was sent to this session.
fn claims_own_mail(method: &Method, path: &str, session: &SessionId) -> bool {
    let segments: Vec<&str> = path.split('/').skip_while(|segment| *segment != "sessions").skip(1).collect();
    let taken =
        matches!(segments[..], [own, "mail", "claim"] | [own, "mail", _, "ack"] if own == session.as_str());
    *method == Method::POST && taken
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
        let at = |method, path: &str| reads_own_session(&method, path, None, &own);
        let finds = |query: &str| reads_own_session(&Method::GET, "/v1/resolve", Some(query), &own);
        assert!(finds(&format!("ref={own}")) && !finds("ref=ses_") && !finds(&format!("ref=x&ref={own}")));
        for path in
            ["sessions/OWN", "sessions/OWN/messages", "sessions/OWN/events", "agent/sessions/OWN/queue"]
        {
            let path = format!("/v1/workspaces/ws_1/{}", path.replace("OWN", own.as_str()));
            assert!(at(Method::GET, &path), "{path}");
            assert!(!at(Method::POST, &path) && !at(Method::DELETE, &path), "{path}");
        }
        assert!(
            !at(Method::GET, &format!("/v1/workspaces/ws_1/sessions/{own}/terminal")),
            "it is more than looking"
        );
        for path in [
            "/v1/asks",
            "/v1/policy/test",
            "/v1/workspaces/ws_1/sessions",
            "/v1/workspaces/ws_1/sessions/ses_other",
            "/v1/events",
        ] {
            assert!(!at(Method::GET, path) && !at(Method::POST, path), "{path}");
        }
    }
}
