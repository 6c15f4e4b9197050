//! HTTP to a remote agent: one connection for each request, plain or by TLS. It knows bounds, credentials and
//! redirects, and nothing of what is said. Whoever holds a [`Reply`] owns its connection, and ends it by dropping it.

use std::path::PathBuf;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio_util::task::AbortOnDropHandle;

use super::address::A2aAddress;
use crate::drivers::dialer::RemoteAgentDialer;

/// Redirects that are followed, all on the same server; a server that needs more goes in circles.
const REDIRECTS_MAX: usize = 3;
/// What is read of an answer that is a refusal: enough for a reason in any form.
const REFUSAL_MAX: usize = 64 << 10;
/// What is shown of such an answer.
const SHOWN_MAX: usize = 300;

/// Why a request came to nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum A2aHttpError {
    /// It never got there.
    #[error("{0} cannot be reached: {1}")]
    Unreachable(String, String),
    /// It may have got there.
    #[error("the connection to {0} broke: {1}")]
    Broken(String, String),
    /// No answer came in time.
    #[error("{0} gave no answer within {secs} s", secs = .1.as_secs())]
    TimedOut(String, Duration),
    /// It was refused by HTTP.
    #[error("{0} answered HTTP {1} {body}", body = excerpt(.2))]
    HttpStatus(String, u16, String),
    /// It is elsewhere.
    #[error(
        "{0} redirects to {1}, which is another server and is not followed: use that address if you trust it"
    )]
    CrossServerRedirect(String, String),
    /// It was refused by the agent.
    #[error("{message}")]
    Refused {
        /// The protocol's code.
        code: i64,
        /// The agent's words.
        message: String,
    },
    /// The answer is longer than is read.
    #[error("{0}")]
    TooLong(String),
    /// The answer is none.
    #[error("{0}")]
    InvalidResponse(String),
}

impl A2aHttpError {
    /// Whether another try may do better: the line was at fault, or a server that is about to come back.
    pub(super) fn is_retryable(&self) -> bool {
        match self {
            Self::Unreachable(..) | Self::Broken(..) | Self::TimedOut(..) => true,
            Self::HttpStatus(_, status, _) => *status >= 500 || *status == 429,
            Self::CrossServerRedirect(..)
            | Self::Refused { .. }
            | Self::TooLong(_)
            | Self::InvalidResponse(_) => false,
        }
    }

    /// Whether credentials are missing or were not taken.
    pub(super) fn is_auth_error(&self) -> bool {
        matches!(self, Self::HttpStatus(_, 401 | 403, _))
    }
}

/// What goes with a request so that it is let in.
#[derive(Clone)]
pub(super) struct A2aCredential {
    pub(super) header: HeaderName,
    pub(super) value: HeaderValue,
}

/// A request.
#[derive(Clone)]
pub(super) struct A2aHttpRequest<'a> {
    pub(super) method: Method,
    pub(super) address: &'a A2aAddress,
    /// JSON.
    pub(super) body: Option<Bytes>,
    /// What may come back.
    pub(super) accept: &'static str,
    /// Other headers.
    pub(super) headers: Vec<(&'static str, &'static str)>,
    pub(super) credential: Option<&'a A2aCredential>,
}

/// Asks remote agents.
pub(super) struct A2aHttpClient {
    dialler: RemoteAgentDialer,
}

impl A2aHttpClient {
    /// One that trusts the certificates in this file, or those that the system does.
    pub(super) fn new(roots: Option<PathBuf>) -> Self {
        Self { dialler: RemoteAgentDialer::new(roots) }
    }

    /// Sends a request, follows where its own server sends it, and waits for the head of the answer. Gives answers of
    /// 2xx alone, and how they are to be read on.
    pub(super) async fn send(&self, asking: &A2aHttpRequest<'_>) -> Result<A2aHttpResponse, A2aHttpError> {
        let mut to = asking.address.clone();
        for _ in 0..=REDIRECTS_MAX {
            let reply = self.send_once(&to, asking).await?;
            let follows = match asking.method {
                Method::GET => reply.status.is_redirection(),
                // The others would be made a GET of.
                _ => matches!(reply.status, StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT),
            };
            if !follows {
                return if reply.status.is_success() {
                    Ok(reply)
                } else {
                    Err(reply.into_status_error().await)
                };
            }
            let next = to.join(&reply.location).map_err(A2aHttpError::InvalidResponse)?;
            if !next.is_same_server(&to) {
                return Err(A2aHttpError::CrossServerRedirect(to.to_string(), next.to_string()));
            }
            to = next;
        }
        Err(A2aHttpError::InvalidResponse(format!("{} redirects in circles", asking.address)))
    }

    async fn send_once(
        &self,
        to: &A2aAddress,
        asking: &A2aHttpRequest<'_>,
    ) -> Result<A2aHttpResponse, A2aHttpError> {
        let unreachable = |cause: String| A2aHttpError::Unreachable(to.to_string(), cause);
        let broken = |cause: hyper::Error| A2aHttpError::Broken(to.to_string(), error_chain(&cause));
        let request = build_request(to, asking)?;
        let stream = self.dialler.dial(to.dial_host(), to.port, to.tls).await.map_err(unreachable)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        // A broken connection is told to whoever waits for the answer; there is nobody else to tell.
        let mover = AbortOnDropHandle::new(tokio::spawn(async move { drop(connection.await) }));
        let response = sender.send_request(request).await.map_err(broken)?;
        Ok(A2aHttpResponse::new(to, response, mover))
    }
}

fn build_request(to: &A2aAddress, asking: &A2aHttpRequest<'_>) -> Result<Request<Full<Bytes>>, A2aHttpError> {
    let mut request = Request::builder()
        .method(&asking.method)
        .uri(&to.path)
        .header(header::HOST, to.authority())
        .header(header::USER_AGENT, concat!("quarterdeck/", env!("CARGO_PKG_VERSION")))
        .header(header::ACCEPT, asking.accept);
    if asking.body.is_some() {
        request = request.header(header::CONTENT_TYPE, "application/json");
    }
    for (name, value) in &asking.headers {
        request = request.header(*name, *value);
    }
    if let Some(A2aCredential { header, value }) = asking.credential {
        request = request.header(header, value);
    }
    let request = request.body(Full::new(asking.body.clone().unwrap_or_default()));
    request.map_err(|cause| A2aHttpError::InvalidResponse(format!("{to} cannot be asked: {cause}")))
}

/// An answer, of which the head is there.
pub(super) struct A2aHttpResponse {
    /// Who gives it.
    server: String,
    status: StatusCode,
    /// Whether it is a stream of events.
    pub(super) is_stream: bool,
    location: String,
    body: Incoming,
    /// Moves the bytes; ended with us.
    _connection_task: AbortOnDropHandle<()>,
}

impl A2aHttpResponse {
    fn new(to: &A2aAddress, response: Response<Incoming>, mover: AbortOnDropHandle<()>) -> Self {
        let (head, body) = response.into_parts();
        let said = |name: HeaderName| {
            head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
        };
        let kind = said(header::CONTENT_TYPE).to_ascii_lowercase();
        Self {
            server: to.to_string(),
            status: head.status,
            is_stream: kind.starts_with("text/event-stream"),
            location: said(header::LOCATION),
            body,
            _connection_task: mover,
        }
    }

    /// The next bytes of it; `None` if that was all. Nothing is lost if the wait is given up.
    pub(super) async fn next_chunk(&mut self) -> Result<Option<Bytes>, A2aHttpError> {
        loop {
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(cause)) => {
                    return Err(A2aHttpError::Broken(self.server.clone(), error_chain(&cause)));
                }
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// All of it.
    pub(super) async fn read_all(mut self, max: usize) -> Result<Bytes, A2aHttpError> {
        let mut whole = BytesMut::new();
        while let Some(more) = self.next_chunk().await? {
            if whole.len() + more.len() > max {
                return Err(A2aHttpError::TooLong(format!(
                    "the answer of {} is longer than {max} bytes",
                    self.server
                )));
            }
            whole.extend_from_slice(&more);
        }
        Ok(whole.freeze())
    }

    async fn into_status_error(mut self) -> A2aHttpError {
        let mut body = BytesMut::new();
        while let Ok(Some(more)) = self.next_chunk().await {
            body.extend_from_slice(&more);
            if body.len() > REFUSAL_MAX {
                break;
            }
        }
        A2aHttpError::HttpStatus(
            self.server,
            self.status.as_u16(),
            String::from_utf8_lossy(&body).into_owned(),
        )
    }
}

/// The beginning of some words of the remote's, on one line.
pub(super) fn excerpt(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    qd_protocol::text::escaped_head(&line, SHOWN_MAX).to_owned()
}

/// An error with its causes, which alone say what happened.
fn error_chain(error: &hyper::Error) -> String {
    let mut words = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        words = format!("{words}: {inner}");
        cause = inner.source();
    }
    words
}
