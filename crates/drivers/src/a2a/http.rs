//! HTTP to a remote agent: one connection per request, plain or TLS. This module knows limits, credentials and
//! redirects, and nothing of the content. An [`A2aHttpResponse`] owns its connection, which ends when the response is
//! dropped.

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
use crate::dialer::RemoteAgentDialer;

/// The most redirects followed, all on the same server; a server that needs more redirects in circles.
const REDIRECTS_MAX: usize = 3;
/// How many bytes of an error response are read: enough for a reason in any format.
const REFUSAL_MAX: usize = 64 << 10;
/// How many bytes of an error response are shown.
const SHOWN_MAX: usize = 300;

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum A2aHttpError {
    /// The request never reached the server.
    #[error("{0} cannot be reached: {1}")]
    Unreachable(String, String),
    /// The request may have reached the server.
    #[error("the connection to {0} broke: {1}")]
    Broken(String, String),
    /// No response came in time.
    #[error("{0} did not answer within {secs} s", secs = .1.as_secs())]
    TimedOut(String, Duration),
    /// The server answered with an HTTP error: server, status and body.
    #[error("{0} answered HTTP {1} {body}", body = excerpt(.2))]
    HttpStatus(String, u16, String),
    /// The server redirects to another server.
    #[error(
        "{0} redirects to {1}, which is another server and is not followed: use that address if you trust it"
    )]
    CrossServerRedirect(String, String),
    /// The agent answered with an error of the protocol.
    #[error("{message}")]
    Refused { code: i64, message: String },
    /// The response exceeds a size limit.
    #[error("{0}")]
    TooLong(String),
    /// The response cannot be parsed.
    #[error("{0}")]
    InvalidResponse(String),
}

impl A2aHttpError {
    /// Whether a retry may succeed: the connection failed, or the server is temporarily unavailable.
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

    /// Whether a credential is missing or was not accepted.
    pub(super) fn is_auth_error(&self) -> bool {
        matches!(self, Self::HttpStatus(_, 401 | 403, _))
    }
}

/// The header that authenticates a request.
#[derive(Clone)]
pub(super) struct A2aCredential {
    pub(super) header: HeaderName,
    pub(super) value: HeaderValue,
}

/// An HTTP request to a remote agent.
#[derive(Clone)]
pub(super) struct A2aHttpRequest<'a> {
    pub(super) method: Method,
    pub(super) address: &'a A2aAddress,
    /// The JSON body.
    pub(super) body: Option<Bytes>,
    /// The accepted content types.
    pub(super) accept: &'static str,
    pub(super) headers: Vec<(&'static str, &'static str)>,
    pub(super) credential: Option<&'a A2aCredential>,
}

/// An HTTP client for remote agents.
pub(super) struct A2aHttpClient {
    dialer: RemoteAgentDialer,
}

impl A2aHttpClient {
    /// A client that trusts the certificates in this file, or the system's if there is none.
    pub(super) fn new(roots: Option<PathBuf>) -> Self {
        Self { dialer: RemoteAgentDialer::new(roots) }
    }

    /// Sends a request, follows redirects on the same server, and waits for the head of the response. Any status but
    /// 2xx is an error.
    pub(super) async fn send(&self, request: &A2aHttpRequest<'_>) -> Result<A2aHttpResponse, A2aHttpError> {
        let mut address = request.address.clone();
        for _ in 0..=REDIRECTS_MAX {
            let response = self.send_once(&address, request).await?;
            let is_followed = match request.method {
                Method::GET => response.status.is_redirection(),
                // Other redirects would turn the request into a GET.
                _ => {
                    matches!(response.status, StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT)
                }
            };
            if !is_followed {
                return if response.status.is_success() {
                    Ok(response)
                } else {
                    Err(response.into_status_error().await)
                };
            }
            let next = address.join(&response.location).map_err(A2aHttpError::InvalidResponse)?;
            if !next.is_same_server(&address) {
                return Err(A2aHttpError::CrossServerRedirect(address.to_string(), next.to_string()));
            }
            address = next;
        }
        Err(A2aHttpError::InvalidResponse(format!("{} redirects in circles", request.address)))
    }

    async fn send_once(
        &self,
        address: &A2aAddress,
        request: &A2aHttpRequest<'_>,
    ) -> Result<A2aHttpResponse, A2aHttpError> {
        let unreachable = |cause: String| A2aHttpError::Unreachable(address.to_string(), cause);
        let broken = |cause: hyper::Error| A2aHttpError::Broken(address.to_string(), error_chain(&cause));
        let http_request = build_request(address, request)?;
        let stream =
            self.dialer.dial(address.dial_host(), address.port, address.tls).await.map_err(unreachable)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        // The error is dropped here: the caller that waits for the response gets it, too.
        let connection_task = AbortOnDropHandle::new(tokio::spawn(async move { drop(connection.await) }));
        let response = sender.send_request(http_request).await.map_err(broken)?;
        Ok(A2aHttpResponse::new(address, response, connection_task))
    }
}

fn build_request(
    address: &A2aAddress,
    request: &A2aHttpRequest<'_>,
) -> Result<Request<Full<Bytes>>, A2aHttpError> {
    let mut builder = Request::builder()
        .method(&request.method)
        .uri(&address.path)
        .header(header::HOST, address.authority())
        .header(header::USER_AGENT, concat!("quarterdeck/", env!("CARGO_PKG_VERSION")))
        .header(header::ACCEPT, request.accept);
    if request.body.is_some() {
        builder = builder.header(header::CONTENT_TYPE, "application/json");
    }
    for (name, value) in &request.headers {
        builder = builder.header(*name, *value);
    }
    if let Some(A2aCredential { header, value }) = request.credential {
        builder = builder.header(header, value);
    }
    let http_request = builder.body(Full::new(request.body.clone().unwrap_or_default()));
    http_request.map_err(|cause| {
        A2aHttpError::InvalidResponse(format!("cannot build a request to {address}: {cause}"))
    })
}

/// A response whose head has arrived.
pub(super) struct A2aHttpResponse {
    /// The server's address, for error messages.
    server: String,
    status: StatusCode,
    /// Whether the body is a stream of server-sent events.
    pub(super) is_stream: bool,
    location: String,
    body: Incoming,
    /// Drives the connection; aborted when the response is dropped.
    _connection_task: AbortOnDropHandle<()>,
}

impl A2aHttpResponse {
    fn new(
        address: &A2aAddress,
        response: Response<Incoming>,
        connection_task: AbortOnDropHandle<()>,
    ) -> Self {
        let (head, body) = response.into_parts();
        let header_text = |name: HeaderName| {
            head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
        };
        let kind = header_text(header::CONTENT_TYPE).to_ascii_lowercase();
        Self {
            server: address.to_string(),
            status: head.status,
            is_stream: kind.starts_with("text/event-stream"),
            location: header_text(header::LOCATION),
            body,
            _connection_task: connection_task,
        }
    }

    /// Returns the next bytes of the body, or `None` at its end. Cancel safe.
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

    /// Reads the whole body, up to `max` bytes.
    pub(super) async fn read_all(mut self, max: usize) -> Result<Bytes, A2aHttpError> {
        let mut body = BytesMut::new();
        while let Some(chunk) = self.next_chunk().await? {
            if body.len() + chunk.len() > max {
                return Err(A2aHttpError::TooLong(format!(
                    "the response of {} is longer than {max} bytes",
                    self.server
                )));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body.freeze())
    }

    async fn into_status_error(mut self) -> A2aHttpError {
        let mut body = BytesMut::new();
        while let Ok(Some(chunk)) = self.next_chunk().await {
            body.extend_from_slice(&chunk);
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

/// The beginning of a remote text, on one line.
pub(super) fn excerpt(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    qd_protocol::text::escaped_head(&line, SHOWN_MAX).to_owned()
}

/// The text of an error with its causes. The error alone does not say what happened.
fn error_chain(error: &hyper::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}
