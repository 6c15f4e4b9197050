//! The HTTP client for the daemon: HTTP/1.1 over a unix socket, TCP or TLS. Paths are plain text and responses plain
//! JSON here; the verbs know what they mean.

mod connection;
pub(crate) mod host;
pub(crate) mod liveness;
pub(crate) mod stream;
pub(crate) mod tls;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::{Mutex, MutexGuard};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use qd_link::socket::{Role, Socket, request_key};
use qd_protocol::api::{NEXT_AFTER, VERSION_HEADER};
use qd_protocol::error::{ErrorBody, ErrorDoc};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::daemon::DaemonRestarter;
use crate::failure::{CliFailure, DaemonRefusal, Result, format_error_chain};
use crate::output::CliOutput;
use connection::DaemonHttpConnection;
use host::DaemonHost;
use liveness::REQUEST_PROBE_AFTER;

/// How many times a request is sent when its connection breaks. Every request is safe to repeat: a POST carries an
/// `Idempotency-Key`.
const MAX_ATTEMPTS: u32 = 5;
/// The characters of a value that are escaped in a query or a path: all that RFC 3986 does not leave as they are.
const ESCAPED_IN_URLS: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// Delay before the second attempt; doubled before each further one.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(50);
/// How long to wait for a daemon that was stopped on purpose. A restart takes less.
pub(crate) const MAX_DOWNTIME: Duration = Duration::from_secs(30);
/// Between two probes for a stopped daemon.
const PROBE_INTERVAL: Duration = Duration::from_millis(200);
/// Items per page of a list.
const PAGE_SIZE: usize = qd_protocol::limits::PAGE_MAX;

/// An HTTP client of one daemon. Clones share their connection.
#[derive(Debug, Clone)]
pub(crate) struct DaemonClient {
    shared: Arc<DaemonClientState>,
}

#[derive(Debug)]
struct DaemonClientState {
    host: DaemonHost,
    token: Option<String>,
    /// The open connection while no request uses it, so a verb with several requests connects once.
    idle: Mutex<Option<DaemonHttpConnection>>,
    /// Starts a new daemon if this one dies. `None` if the host was given explicitly.
    restarter: Option<DaemonRestarter>,
    /// Where a daemon that does not answer is reported. `None` for a client that only looks for a daemon.
    notes: Option<CliOutput>,
    /// Whether it was reported that the daemon does not answer, so that parallel requests report it once.
    is_silence_noted: AtomicBool,
    /// The pid of the daemon behind the last connection over a unix socket, or 0.
    daemon_pid: AtomicU32,
}

/// A WebSocket on a connection upgraded from HTTP.
pub(crate) type DaemonWebSocket = Socket<TokioIo<Upgraded>>;

/// A response of any status with its body.
#[derive(Debug)]
struct DaemonResponse {
    status: u16,
    headers: HeaderMap,
    body: Bytes,
}

impl DaemonClient {
    /// Creates a client without connecting.
    pub(crate) fn new(host: DaemonHost, token: Option<String>) -> Self {
        Self {
            shared: Arc::new(DaemonClientState {
                host,
                token,
                idle: Mutex::new(None),
                restarter: None,
                notes: None,
                is_silence_noted: AtomicBool::new(false),
                daemon_pid: AtomicU32::new(0),
            }),
        }
    }

    /// The same client, which reports on stderr when the daemon does not answer.
    pub(crate) fn with_notes(self, out: &CliOutput) -> Self {
        self.rebuild(|state| state.notes = Some(out.clone()))
    }

    /// The same client, with a way to start a new daemon if this one dies.
    pub(crate) fn with_restarter(self, restarter: DaemonRestarter) -> Self {
        self.rebuild(|state| state.restarter = Some(restarter))
    }

    /// A client with a changed state and the open connection of this one, which must not have been cloned.
    fn rebuild(self, change: impl FnOnce(&mut DaemonClientState)) -> Self {
        let DaemonClientState { host, token, notes, daemon_pid, .. } = &*self.shared;
        let mut state = DaemonClientState {
            host: host.clone(),
            token: token.clone(),
            idle: Mutex::new(self.lock_idle().take()),
            restarter: None,
            notes: notes.clone(),
            is_silence_noted: AtomicBool::new(false),
            daemon_pid: AtomicU32::new(daemon_pid.load(Ordering::Relaxed)),
        };
        change(&mut state);
        Self { shared: Arc::new(state) }
    }

    pub(crate) fn host(&self) -> &DaemonHost {
        &self.shared.host
    }

    /// Checks once, without retries, whether a daemon answers, and returns its version.
    pub(crate) async fn probe(&self) -> Result<Option<String>> {
        let answer = self.send_once(&Method::GET, "/healthz", None, None).await?;
        let answer = check_status(answer)?;
        Ok(answer.headers.get(VERSION_HEADER).and_then(|value| value.to_str().ok()).map(str::to_owned))
    }

    /// `GET` of one value.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        decode_json(&self.send_with_retries(Method::GET, path, None).await?.body)
    }

    /// `GET` of a whole list, page by page.
    pub(crate) async fn list<T: DeserializeOwned>(&self, path: &str) -> Result<Vec<T>> {
        let separator = if path.contains('?') { '&' } else { '?' };
        let first = format!("{path}{separator}limit={PAGE_SIZE}");
        let mut next = first.clone();
        let mut all = Vec::new();
        loop {
            let answer = self.send_with_retries(Method::GET, &next, None).await?;
            all.append(&mut decode_json::<Vec<T>>(&answer.body)?);
            match answer.headers.get(NEXT_AFTER).and_then(|value| value.to_str().ok()) {
                Some(after) => next = format!("{first}&after={}", percent_encode(after)),
                None => return Ok(all),
            }
        }
    }

    /// `GET` of raw bytes.
    pub(crate) async fn get_bytes(&self, path: &str) -> Result<Bytes> {
        Ok(self.send_with_retries(Method::GET, path, None).await?.body)
    }

    pub(crate) async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        let body = serde_json::to_vec(body).map_err(anyhow::Error::from)?;
        decode_json(&self.send_with_retries(Method::POST, path, Some(body.into())).await?.body)
    }

    pub(crate) async fn patch<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        let body = serde_json::to_vec(body).map_err(anyhow::Error::from)?;
        decode_json(&self.send_with_retries(Method::PATCH, path, Some(body.into())).await?.body)
    }

    /// `POST` with the caller's `Idempotency-Key`, sent only once.
    pub(crate) async fn post_once<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        key: &str,
    ) -> Result<T> {
        let body = serde_json::to_vec(body).map_err(anyhow::Error::from)?;
        let answer = self.send_once(&Method::POST, path, Some(body.into()), Some(key)).await?;
        decode_json(&check_status(answer)?.body)
    }

    /// `DELETE`. A response without a body is `null`.
    pub(crate) async fn delete(&self, path: &str) -> Result<serde_json::Value> {
        let answer = self.send_with_retries(Method::DELETE, path, None).await?;
        if answer.body.is_empty() { Ok(serde_json::Value::Null) } else { decode_json(&answer.body) }
    }

    /// Waits until a daemon answers again after one was stopped on purpose. Does not start one, because somebody wanted
    /// it stopped.
    pub(crate) async fn wait_until_back(&self) -> Result<()> {
        self.note_stopped();
        let deadline = tokio::time::Instant::now() + MAX_DOWNTIME;
        loop {
            // Sleep first: a daemon that is shutting down may still answer.
            tokio::time::sleep(PROBE_INTERVAL).await;
            match self.probe().await {
                Ok(_) => return Ok(()),
                Err(failure) if tokio::time::Instant::now() > deadline => return Err(failure),
                Err(_) => {}
            }
        }
    }

    /// Prints that the daemon was stopped and how long the verb waits.
    fn note_stopped(&self) {
        if let Some(restarter) = &self.shared.restarter {
            restarter.note_stopped(MAX_DOWNTIME);
        }
    }

    /// Called after a connection broke: starts a daemon if none answers and this client may start one.
    async fn ensure_running(&self) -> Result<()> {
        match &self.shared.restarter {
            Some(restarter) => restarter.ensure_running().await,
            None => Ok(()),
        }
    }

    /// Sends one request, and again if its connection breaks.
    async fn send_with_retries(
        &self,
        method: Method,
        path: &str,
        body: Option<Bytes>,
    ) -> Result<DaemonResponse> {
        let key = matches!(method, Method::POST | Method::PATCH).then(|| random_id("key_")).transpose()?;
        let mut delay = FIRST_RETRY_DELAY;
        let mut attempts = 1;
        loop {
            match self.send_once(&method, path, body.clone(), key.as_deref()).await {
                Ok(answer) => return check_status(answer),
                Err(failure @ CliFailure::Unresponsive(_)) => return Err(failure),
                Err(failure) if attempts == MAX_ATTEMPTS => return Err(failure),
                Err(_) => {}
            }
            tokio::time::sleep(delay).await;
            self.ensure_running().await?;
            delay *= 2;
            attempts += 1;
        }
    }

    /// Sends a request once. It takes as long as the daemon needs, but fails if the daemon gives no sign of life.
    async fn send_once(
        &self,
        method: &Method,
        path: &str,
        body: Option<Bytes>,
        key: Option<&str>,
    ) -> Result<DaemonResponse> {
        // Boxed, because verbs hold several of these futures at once.
        let exchange = Box::pin(self.exchange(method, path, body, key));
        self.while_daemon_lives(REQUEST_PROBE_AFTER, exchange).await?
    }

    async fn exchange(
        &self,
        method: &Method,
        path: &str,
        body: Option<Bytes>,
        key: Option<&str>,
    ) -> Result<DaemonResponse> {
        let idle = self.lock_idle().take().filter(DaemonHttpConnection::is_open);
        let mut connection = match idle {
            Some(connection) => connection,
            None => self.connect().await?,
        };
        let request = self.build_request(method, path, body, key)?;
        let response = connection.send(request).await.map_err(|error| self.connection_failure(error))?;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.map_err(|error| self.connection_failure(error))?.to_bytes();
        *self.lock_idle() = Some(connection);
        Ok(DaemonResponse { status: parts.status.as_u16(), headers: parts.headers, body })
    }

    /// Opens an event stream on its own connection.
    async fn open_stream(
        &self,
        path: &str,
        after: Option<&str>,
    ) -> Result<(DaemonHttpConnection, Response<Incoming>)> {
        self.while_daemon_lives(REQUEST_PROBE_AFTER, self.request_stream(path, after)).await?
    }

    async fn request_stream(
        &self,
        path: &str,
        after: Option<&str>,
    ) -> Result<(DaemonHttpConnection, Response<Incoming>)> {
        let mut request = self.build_request(&Method::GET, path, None, None)?;
        request.headers_mut().insert(header::ACCEPT, HeaderValue::from_static("text/event-stream"));
        if let Some(cursor) = after {
            let cursor = HeaderValue::from_str(cursor).context("the cursor is not a valid header value")?;
            request.headers_mut().insert("last-event-id", cursor);
        }
        let mut connection = self.connect().await?;
        let response = connection.send(request).await.map_err(|error| self.connection_failure(error))?;
        if response.status().is_success() {
            return Ok((connection, response));
        }
        let (parts, body) = response.into_parts();
        let body = body.collect().await.map_err(|error| self.connection_failure(error))?.to_bytes();
        Err(refusal_failure(&DaemonResponse { status: parts.status.as_u16(), headers: parts.headers, body }))
    }

    /// Opens a WebSocket with this subprotocol on its own connection.
    pub(crate) async fn open_websocket(
        &self,
        path: &str,
        subprotocol: &'static str,
    ) -> Result<DaemonWebSocket> {
        self.while_daemon_lives(REQUEST_PROBE_AFTER, self.request_websocket(path, subprotocol)).await?
    }

    async fn request_websocket(&self, path: &str, subprotocol: &'static str) -> Result<DaemonWebSocket> {
        let mut request = self.build_request(&Method::GET, path, None, None)?;
        let key = HeaderValue::from_str(&request_key()).context("the key is not a valid header value")?;
        let headers = request.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(header::SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(subprotocol));
        headers.insert(header::SEC_WEBSOCKET_KEY, key);
        // The connection must stay alive until the upgrade is complete: its task moves the bytes until then.
        let mut connection = self.connect().await?;
        let response = connection.send(request).await.map_err(|error| self.connection_failure(error))?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            let (parts, body) = response.into_parts();
            let body = body.collect().await.map_err(|error| self.connection_failure(error))?.to_bytes();
            return Err(refusal_failure(&DaemonResponse {
                status: parts.status.as_u16(),
                headers: parts.headers,
                body,
            }));
        }
        let upgraded = hyper::upgrade::on(response).await.map_err(|error| self.connection_failure(error))?;
        Ok(Socket::from_upgraded(TokioIo::new(upgraded), Role::Client).await)
    }

    async fn connect(&self) -> Result<DaemonHttpConnection> {
        let connection = connection::connect_with_timeout(&self.shared.host).await.map_err(|error| {
            CliFailure::Unreachable(format!(
                "no daemon answers at {}: {}",
                self.shared.host,
                format_error_chain(&error)
            ))
        })?;
        self.shared.daemon_pid.store(connection.peer_pid().unwrap_or(0), Ordering::Relaxed);
        Ok(connection)
    }

    fn build_request(
        &self,
        method: &Method,
        path: &str,
        body: Option<Bytes>,
        key: Option<&str>,
    ) -> Result<Request<Full<Bytes>>> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, self.shared.host.host_header())
            .header(header::USER_AGENT, concat!("qd/", env!("CARGO_PKG_VERSION")));
        if let Some(token) = &self.shared.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let request = request.body(Full::new(body.unwrap_or_default()));
        Ok(request.with_context(|| format!("{path} is not a valid request path"))?)
    }

    fn lock_idle(&self) -> MutexGuard<'_, Option<DaemonHttpConnection>> {
        self.shared.idle.lock()
    }

    fn connection_failure(&self, error: hyper::Error) -> CliFailure {
        if let DaemonHost::Tcp { authority, tls: false } = &self.shared.host
            && error.is_parse()
        {
            return CliFailure::Unreachable(format!(
                "{authority} does not speak HTTP; if this port speaks TLS, use https://{authority}"
            ));
        }
        CliFailure::Unreachable(format!("the connection to {} broke: {error}", self.shared.host))
    }
}

/// Percent-encodes a value for a query or a path.
pub(crate) fn percent_encode(text: &str) -> String {
    utf8_percent_encode(text, ESCAPED_IN_URLS).to_string()
}

/// A new random id for a run or a request.
pub(crate) fn random_id(prefix: &str) -> Result<String> {
    let mut bytes = [0; 20];
    getrandom::fill(&mut bytes)
        .map_err(|error| anyhow!("cannot read random bytes from the kernel: {error}"))?;
    let id = qd_protocol::RunId::from_random(&bytes);
    Ok(format!("{prefix}{}", id.as_str().trim_start_matches(qd_protocol::RunId::PREFIX)))
}

fn check_status(answer: DaemonResponse) -> Result<DaemonResponse> {
    if (200..300).contains(&answer.status) { Ok(answer) } else { Err(refusal_failure(&answer)) }
}

/// The refusal in an error response. A response that is not in the daemon's format came from a proxy or another server.
fn refusal_failure(answer: &DaemonResponse) -> CliFailure {
    let error = serde_json::from_slice::<ErrorBody>(&answer.body).map_or_else(
        |_| ErrorDoc {
            code: "not_a_daemon".to_owned(),
            message: format!("got HTTP {} from something that is not a Quarterdeck daemon", answer.status),
            details: serde_json::Map::new(),
        },
        |body| body.error,
    );
    CliFailure::Refused(Box::new(DaemonRefusal { status: answer.status, error }))
}

fn decode_json<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    let value = serde_json::from_slice(body).context("this qd does not understand the daemon's response");
    Ok(value?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_title_survives_a_query() {
        assert_eq!(percent_encode("fix the bug & go/home ä"), "fix%20the%20bug%20%26%20go%2Fhome%20%C3%A4");
        assert_eq!(percent_encode("ses_1-a.b~c"), "ses_1-a.b~c");
    }

    #[test]
    fn a_refusal_keeps_its_code_and_a_stranger_gets_one() {
        let answer = |status, body: &'static str| DaemonResponse {
            status,
            headers: HeaderMap::new(),
            body: Bytes::from_static(body.as_bytes()),
        };
        let failure =
            refusal_failure(&answer(409, r#"{"error":{"code":"session_closed","message":"it is closed"}}"#));
        assert_eq!((failure.code(), failure.to_string().as_str()), (Some("session_closed"), "it is closed"));
        assert_eq!(refusal_failure(&answer(502, "<html>")).code(), Some("not_a_daemon"));
        assert!(check_status(answer(202, "{}")).is_ok());
    }

    #[test]
    fn a_random_id_is_a_valid_run_id() {
        let id = random_id("run_").unwrap();
        assert!(qd_protocol::RunId::parse(&id).is_ok(), "{id}");
        assert_ne!(id, random_id("run_").unwrap());
    }
}
