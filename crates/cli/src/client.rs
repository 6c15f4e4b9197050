//! The one way to call the daemon: HTTP/1.1 over a unix socket, TCP or TLS. It knows paths only as text and answers
//! only as JSON; what they mean is the verbs' business.

mod dial;
pub(crate) mod host;
pub(crate) mod stream;
pub(crate) mod tls;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, anyhow};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use qd_link::socket::{Role, Socket, request_key};
use qd_protocol::api::{NEXT_AFTER, VERSION_HEADER};
use qd_protocol::error::{ErrorBody, ErrorDoc};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::daemon::Successor;
use crate::failure::{Failure, Refusal, Result, whole};
use dial::Wire;
use host::Host;

/// How often a request is sent when its connection breaks. Each is safe to repeat: a POST bears an `Idempotency-Key`.
const TRIES: u32 = 5;
/// Before the second try; doubled before each one after it.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// How long a daemon that was stopped on purpose may stay away: whoever restarts it needs less.
pub(crate) const AWAY: Duration = Duration::from_secs(30);
/// Between two looks whether it is back.
const LOOK: Duration = Duration::from_millis(200);
/// The longest list that is asked for at once.
const PAGE: usize = qd_protocol::limits::PAGE_MAX;

/// Calls one daemon. Clones share their connection.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    host: Host,
    token: Option<String>,
    /// A connection that nobody uses right now, so that a verb of two requests connects once.
    idle: Mutex<Option<Wire>>,
    /// What takes the daemon's place if it dies; none where it is not ours to start.
    successor: Option<Successor>,
}

/// A connection that is no longer HTTP.
pub(crate) type WebSocket = Socket<TokioIo<Upgraded>>;

/// An answer with its body, whatever its status.
#[derive(Debug)]
struct Answer {
    status: u16,
    headers: HeaderMap,
    body: Bytes,
}

impl Client {
    /// For this daemon; nothing is sent yet.
    pub(crate) fn new(host: Host, token: Option<String>) -> Self {
        Self { shared: Arc::new(Shared { host, token, idle: Mutex::new(None), successor: None }) }
    }

    /// The same, for the daemon that comes after it too, should it die.
    pub(crate) fn with_successor(self, successor: Successor) -> Self {
        let Shared { host, token, .. } = &*self.shared;
        let (host, token) = (host.clone(), token.clone());
        let idle = Mutex::new(self.idle().take());
        Self { shared: Arc::new(Shared { host, token, idle, successor: Some(successor) }) }
    }

    /// Whom it calls.
    pub(crate) fn host(&self) -> &Host {
        &self.shared.host
    }

    /// Asks once whether a daemon answers, and gives its version.
    pub(crate) async fn probe(&self) -> Result<Option<String>> {
        let answer = self.once(&Method::GET, "/healthz", None, None).await?;
        let answer = judged(answer)?;
        Ok(answer.headers.get(VERSION_HEADER).and_then(|value| value.to_str().ok()).map(str::to_owned))
    }

    /// `GET`, one value.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        decoded(&self.call(Method::GET, path, None).await?.body)
    }

    /// `GET`, a list, page after page until there is no more.
    pub(crate) async fn list<T: DeserializeOwned>(&self, path: &str) -> Result<Vec<T>> {
        let joint = if path.contains('?') { '&' } else { '?' };
        let first = format!("{path}{joint}limit={PAGE}");
        let mut next = first.clone();
        let mut all = Vec::new();
        loop {
            let answer = self.call(Method::GET, &next, None).await?;
            all.append(&mut decoded::<Vec<T>>(&answer.body)?);
            match answer.headers.get(NEXT_AFTER).and_then(|value| value.to_str().ok()) {
                Some(after) => next = format!("{first}&after={}", encode(after)),
                None => return Ok(all),
            }
        }
    }

    /// `GET`, the bytes as they are.
    pub(crate) async fn bytes(&self, path: &str) -> Result<Bytes> {
        Ok(self.call(Method::GET, path, None).await?.body)
    }

    /// `POST`.
    pub(crate) async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        let body = serde_json::to_vec(body).map_err(anyhow::Error::from)?;
        decoded(&self.call(Method::POST, path, Some(body.into())).await?.body)
    }

    /// `POST` under a key of the caller's, tried once.
    pub(crate) async fn post_once<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        key: &str,
    ) -> Result<T> {
        let body = serde_json::to_vec(body).map_err(anyhow::Error::from)?;
        let answer = self.once(&Method::POST, path, Some(body.into()), Some(key)).await?;
        decoded(&judged(answer)?.body)
    }

    /// `DELETE`. An answer without a body is `null`.
    pub(crate) async fn delete(&self, path: &str) -> Result<serde_json::Value> {
        let answer = self.call(Method::DELETE, path, None).await?;
        if answer.body.is_empty() { Ok(serde_json::Value::Null) } else { decoded(&answer.body) }
    }

    /// Waits until a daemon answers again after it was stopped on purpose. None is started: somebody wanted it gone.
    pub(crate) async fn until_back(&self) -> Result<()> {
        self.say_stopped();
        let deadline = tokio::time::Instant::now() + AWAY;
        loop {
            // First: the one that ends may still say that it lives.
            tokio::time::sleep(LOOK).await;
            match self.probe().await {
                Ok(_) => return Ok(()),
                Err(failure) if tokio::time::Instant::now() > deadline => return Err(failure),
                Err(_) => {}
            }
        }
    }

    /// Tells whoever waits why nothing comes.
    fn say_stopped(&self) {
        if let Some(successor) = &self.shared.successor {
            successor.say_stopped(AWAY);
        }
    }

    /// After a connection that broke: sees to it that a daemon answers, if it is ours to start.
    async fn stand_in(&self) -> Result<()> {
        match &self.shared.successor {
            Some(successor) => successor.stand_in().await,
            None => Ok(()),
        }
    }

    /// One request, sent again if its connection breaks.
    async fn call(&self, method: Method, path: &str, body: Option<Bytes>) -> Result<Answer> {
        let key = (method == Method::POST).then(|| random("key_")).transpose()?;
        let mut pause = FIRST_PAUSE;
        let mut tries = 1;
        loop {
            match self.once(&method, path, body.clone(), key.as_deref()).await {
                Ok(answer) => return judged(answer),
                Err(failure) if tries == TRIES => return Err(failure),
                Err(_) => {}
            }
            tokio::time::sleep(pause).await;
            self.stand_in().await?;
            pause *= 2;
            tries += 1;
        }
    }

    async fn once(
        &self,
        method: &Method,
        path: &str,
        body: Option<Bytes>,
        key: Option<&str>,
    ) -> Result<Answer> {
        let waiting = self.idle().take().filter(Wire::is_open);
        let mut wire = match waiting {
            Some(wire) => wire,
            None => self.dial().await?,
        };
        let request = self.request(method, path, body, key)?;
        let response = wire.send(request).await.map_err(|error| self.broken(error))?;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.map_err(|error| self.broken(error))?.to_bytes();
        *self.idle() = Some(wire);
        Ok(Answer { status: parts.status.as_u16(), headers: parts.headers, body })
    }

    /// Opens a response that does not end, on a connection of its own.
    async fn open(&self, path: &str, after: Option<&str>) -> Result<(Wire, Response<Incoming>)> {
        let mut request = self.request(&Method::GET, path, None, None)?;
        request.headers_mut().insert(header::ACCEPT, HeaderValue::from_static("text/event-stream"));
        if let Some(cursor) = after {
            let cursor = HeaderValue::from_str(cursor).context("the cursor is no header value")?;
            request.headers_mut().insert("last-event-id", cursor);
        }
        let mut wire = self.dial().await?;
        let response = wire.send(request).await.map_err(|error| self.broken(error))?;
        if response.status().is_success() {
            return Ok((wire, response));
        }
        let (parts, body) = response.into_parts();
        let body = body.collect().await.map_err(|error| self.broken(error))?.to_bytes();
        Err(refused(&Answer { status: parts.status.as_u16(), headers: parts.headers, body }))
    }

    /// Opens a WebSocket of this subprotocol, on a connection of its own.
    pub(crate) async fn socket(&self, path: &str, subprotocol: &'static str) -> Result<WebSocket> {
        let mut request = self.request(&Method::GET, path, None, None)?;
        let key = HeaderValue::from_str(&request_key()).context("the key is no header value")?;
        let headers = request.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(header::SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(subprotocol));
        headers.insert(header::SEC_WEBSOCKET_KEY, key);
        // Until the connection has become another one, it is this one that moves its bytes.
        let mut wire = self.dial().await?;
        let response = wire.send(request).await.map_err(|error| self.broken(error))?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            let (parts, body) = response.into_parts();
            let body = body.collect().await.map_err(|error| self.broken(error))?.to_bytes();
            return Err(refused(&Answer { status: parts.status.as_u16(), headers: parts.headers, body }));
        }
        let upgraded = hyper::upgrade::on(response).await.map_err(|error| self.broken(error))?;
        Ok(Socket::upgraded(TokioIo::new(upgraded), Role::Client).await)
    }

    async fn dial(&self) -> Result<Wire> {
        dial::dial(&self.shared.host).await.map_err(|error| {
            Failure::Unreachable(format!("no daemon answers at {}: {}", self.shared.host, whole(&error)))
        })
    }

    fn request(
        &self,
        method: &Method,
        path: &str,
        body: Option<Bytes>,
        key: Option<&str>,
    ) -> Result<Request<Full<Bytes>>> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, self.shared.host.header())
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
        Ok(request.with_context(|| format!("{path} is no path of a request"))?)
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Option<Wire>> {
        self.shared.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn broken(&self, error: hyper::Error) -> Failure {
        if let Host::Tcp { authority, tls: false } = &self.shared.host
            && error.is_parse()
        {
            return Failure::Unreachable(format!(
                "{authority} does not speak HTTP; if this port speaks TLS, use https://{authority}"
            ));
        }
        Failure::Unreachable(format!("the connection to {} broke: {error}", self.shared.host))
    }
}

/// A value for a query or a path, with everything but plain letters escaped.
pub(crate) fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// A new name out of randomness, for a run or a request.
pub(crate) fn random(prefix: &str) -> Result<String> {
    let mut bytes = [0; 20];
    getrandom::fill(&mut bytes).map_err(|error| anyhow!("the kernel gives no randomness: {error}"))?;
    let id = qd_protocol::RunId::from_random(&bytes);
    Ok(format!("{prefix}{}", id.as_str().trim_start_matches(qd_protocol::RunId::PREFIX)))
}

fn judged(answer: Answer) -> Result<Answer> {
    if (200..300).contains(&answer.status) { Ok(answer) } else { Err(refused(&answer)) }
}

/// The refusal inside an answer; one that is not in the daemon's shape comes from something in between.
fn refused(answer: &Answer) -> Failure {
    let error = serde_json::from_slice::<ErrorBody>(&answer.body).map_or_else(
        |_| ErrorDoc {
            code: "not_a_daemon".to_owned(),
            message: format!("the answer was HTTP {} and not a daemon's", answer.status),
            details: serde_json::Map::new(),
        },
        |body| body.error,
    );
    Failure::Refused(Box::new(Refusal { status: answer.status, error }))
}

fn decoded<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    let value =
        serde_json::from_slice(body).context("the daemon's answer is of a shape that this qd does not know");
    Ok(value?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_title_survives_a_query() {
        assert_eq!(encode("fix the bug & go/home ä"), "fix%20the%20bug%20%26%20go%2Fhome%20%C3%A4");
        assert_eq!(encode("ses_1-a.b~c"), "ses_1-a.b~c");
    }

    #[test]
    fn a_refusal_keeps_its_code_and_a_stranger_gets_one() {
        let answer = |status, body: &'static str| Answer {
            status,
            headers: HeaderMap::new(),
            body: Bytes::from_static(body.as_bytes()),
        };
        let failure =
            refused(&answer(409, r#"{"error":{"code":"session_closed","message":"it is closed"}}"#));
        assert_eq!((failure.code(), failure.to_string().as_str()), (Some("session_closed"), "it is closed"));
        assert_eq!(refused(&answer(502, "<html>")).code(), Some("not_a_daemon"));
        assert!(judged(answer(202, "{}")).is_ok());
    }

    #[test]
    fn a_name_out_of_randomness_is_a_good_run_id() {
        let name = random("run_").unwrap();
        assert!(qd_protocol::RunId::parse(&name).is_ok(), "{name}");
        assert_ne!(name, random("run_").unwrap());
    }
}
