//! The calls to a remote agent: by JSON-RPC at one address, or each at its own path. Responses are parsed into
//! [`A2aEvent`]. When to call is decided in `turn`.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hyper::Method;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use qd_catalog::REMOTE_TOKEN;
use qd_protocol::sse::{SseFrame, SseParser};
use serde_json::{Value, json};

use super::address::A2aAddress;
use super::card::{A2aAgentCard, A2aBinding, A2aVersion, bearer_credential};
use super::http::{A2aCredential, A2aHttpClient, A2aHttpError, A2aHttpRequest, A2aHttpResponse, excerpt};
use super::messages::{self, A2aEvent, A2aTask};

/// The largest card that is read, in bytes.
const CARD_MAX: usize = 1 << 20;
/// The largest event of a stream, in bytes. An event may hold whole files in base64.
const EVENT_MAX: usize = 32 << 20;
/// The largest response that is not a stream, in bytes: a task with all its artifacts.
const RESPONSE_MAX: usize = 64 << 20;
/// The time limit for calls that are answered at once. Sending a message has none: it may take as long as the agent
/// works.
const CALL_LIMIT: Duration = Duration::from_secs(30);
/// How many messages of a task's history are requested: more than an agent sends between two polls.
const HISTORY_LENGTH: u32 = 20;
/// The characters of a name that are escaped in a path: all that RFC 3986 does not leave as they are.
const ESCAPED_IN_PATHS: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// The error codes that the driver acts on.
pub(super) mod error_code {
    pub(crate) const TASK_NOT_FOUND: i64 = -32001;
    pub(crate) const TASK_NOT_CANCELABLE: i64 = -32002;
    pub(crate) const UNSUPPORTED_OPERATION: i64 = -32004;
    pub(crate) const METHOD_NOT_FOUND: i64 = -32601;
}

/// A client for one remote agent.
pub(super) struct A2aClient {
    http: A2aHttpClient,
    pub(super) card: A2aAgentCard,
    credential: Option<A2aCredential>,
    last_request_id: AtomicU64,
}

/// The calls of the protocol that we use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum A2aMethod {
    Send,
    Stream,
    Get,
    Cancel,
    Subscribe,
}

impl A2aMethod {
    fn wire_name(self, version: A2aVersion) -> &'static str {
        match (version, self) {
            (A2aVersion::V1_0, Self::Send) => "SendMessage",
            (A2aVersion::V1_0, Self::Stream) => "SendStreamingMessage",
            (A2aVersion::V1_0, Self::Get) => "GetTask",
            (A2aVersion::V1_0, Self::Cancel) => "CancelTask",
            (A2aVersion::V1_0, Self::Subscribe) => "SubscribeToTask",
            (A2aVersion::V0_3, Self::Send) => "message/send",
            (A2aVersion::V0_3, Self::Stream) => "message/stream",
            (A2aVersion::V0_3, Self::Get) => "tasks/get",
            (A2aVersion::V0_3, Self::Cancel) => "tasks/cancel",
            (A2aVersion::V0_3, Self::Subscribe) => "tasks/resubscribe",
        }
    }

    fn streams(self) -> bool {
        matches!(self, Self::Stream | Self::Subscribe)
    }
}

impl A2aClient {
    /// Fetches the card of the agent at this address, which says how to call it.
    pub(super) async fn discover(
        client: A2aHttpClient,
        address: &A2aAddress,
        token: Option<&str>,
    ) -> Result<Self, String> {
        let (card, card_address) = fetch_card(&client, address, token).await?;
        let card: Value =
            serde_json::from_slice(&card).map_err(|_| format!("the card at {card_address} is not JSON"))?;
        let card = A2aAgentCard::parse(&card, &card_address)
            .map_err(|reason| format!("the card at {card_address} cannot be used: {reason}"))?;
        let call_address = &card.interface.address;
        if token.is_some() && card_address.tls && !call_address.tls && !call_address.is_loopback() {
            return Err(format!(
                "the card at {card_address} says to call the agent at {call_address}, where anybody on the network \
                 could read {REMOTE_TOKEN}; leave the token out, or use an agent that is called by https"
            ));
        }
        let credential = token.map(|token| card.credential(token)).transpose()?;
        Ok(Self { http: client, card, credential, last_request_id: AtomicU64::new(0) })
    }

    /// Sends the agent a message and returns the stream of its response.
    pub(super) async fn send_message(&self, message: Value) -> Result<A2aEventStream, A2aHttpError> {
        let streams = self.card.streams;
        let configuration = messages::send_configuration(self.card.interface.version, streams);
        let method = if streams { A2aMethod::Stream } else { A2aMethod::Send };
        let response =
            self.call(method, "", json!({"message": message, "configuration": configuration})).await?;
        self.open_stream(response).await
    }

    /// Subscribes to the events of a task again.
    pub(super) async fn subscribe(&self, task: &str) -> Result<A2aEventStream, A2aHttpError> {
        let response = self.call(A2aMethod::Subscribe, task, json!({"id": task})).await?;
        self.open_stream(response).await
    }

    /// Fetches the current state of a task.
    pub(super) async fn get_task(&self, task: &str) -> Result<A2aTask, A2aHttpError> {
        self.call_for_task(A2aMethod::Get, task, json!({"id": task, "historyLength": HISTORY_LENGTH})).await
    }

    /// Cancels a task and returns its state after that.
    pub(super) async fn cancel(&self, task: &str, reason: Option<&str>) -> Result<A2aTask, A2aHttpError> {
        let params = match reason {
            Some(reason) => json!({"id": task, "metadata": {"reason": reason}}),
            None => json!({"id": task}),
        };
        self.call_for_task(A2aMethod::Cancel, task, params).await
    }

    /// The text of an error, with advice on what to do about it.
    pub(super) fn describe_error(&self, error: &A2aHttpError) -> String {
        if !error.is_auth_error() {
            return error.to_string();
        }
        let header = self.card.credential_header();
        match self.credential {
            None => format!(
                "{error}; the agent requires a credential: give the session {REMOTE_TOKEN}, which is sent in the header \
                 `{header}`"
            ),
            Some(_) => {
                format!("{error}; the value of {REMOTE_TOKEN} in the header `{header}` was not accepted")
            }
        }
    }

    async fn call_for_task(
        &self,
        method: A2aMethod,
        task: &str,
        params: Value,
    ) -> Result<A2aTask, A2aHttpError> {
        let request = async {
            let response = self.call(method, task, params).await?;
            let value = self.parse_response(&response.read_all(RESPONSE_MAX).await?)?;
            let not_a_task =
                || A2aHttpError::InvalidResponse("the agent's response is not a task".to_owned());
            messages::parse_task(&value).ok_or_else(not_a_task)
        };
        match tokio::time::timeout(CALL_LIMIT, request).await {
            Ok(result) => result,
            Err(_) => Err(A2aHttpError::TimedOut(self.card.interface.address.to_string(), CALL_LIMIT)),
        }
    }

    async fn call(
        &self,
        a2a_method: A2aMethod,
        task: &str,
        mut params: Value,
    ) -> Result<A2aHttpResponse, A2aHttpError> {
        let interface = &self.card.interface;
        if let (Some(tenant), Some(fields)) = (&interface.tenant, params.as_object_mut()) {
            fields.insert("tenant".to_owned(), json!(tenant));
        }
        let (method, address, body) = match interface.binding {
            A2aBinding::JsonRpc => {
                let id = self.last_request_id.fetch_add(1, Ordering::Relaxed) + 1;
                let method = a2a_method.wire_name(interface.version);
                let body = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
                (Method::POST, interface.address.clone(), Some(body))
            }
            A2aBinding::Rest => {
                rest_request(interface.tenant.as_deref(), &interface.address, a2a_method, task, params)
            }
        };
        let request = A2aHttpRequest {
            method,
            address: &address,
            body: body.map(|body| Bytes::from(body.to_string())),
            accept: if a2a_method.streams() {
                "text/event-stream, application/json"
            } else {
                "application/json"
            },
            headers: vec![("a2a-version", interface.version.name())],
            credential: self.credential.as_ref(),
        };
        self.http.send(&request).await.map_err(refusal_in_status)
    }

    async fn open_stream(&self, response: A2aHttpResponse) -> Result<A2aEventStream, A2aHttpError> {
        let binding = self.card.interface.binding;
        if response.is_stream {
            return Ok(A2aEventStream::Stream(Box::new(A2aSseStream {
                response,
                parser: SseParser::new(EVENT_MAX),
                frames: VecDeque::new(),
                binding,
            })));
        }
        let value = self.parse_response(&response.read_all(RESPONSE_MAX).await?)?;
        Ok(A2aEventStream::Single(Some(Box::new(messages::parse_event(&value)))))
    }

    fn parse_response(&self, body: &[u8]) -> Result<Value, A2aHttpError> {
        parse_response(self.card.interface.binding, body)
    }
}

async fn fetch_card(
    client: &A2aHttpClient,
    address: &A2aAddress,
    token: Option<&str>,
) -> Result<(Bytes, A2aAddress), String> {
    let mut first = None;
    for card_address in address.card_addresses() {
        match get_card(client, &card_address, token).await {
            Ok(card) => return Ok((card, card_address)),
            Err(error @ A2aHttpError::HttpStatus(_, 404 | 410, _)) => first = first.or(Some(error)),
            Err(error) if error.is_auth_error() => {
                return Err(match token {
                    None => {
                        format!("{error}; the card requires a credential: give the session {REMOTE_TOKEN}")
                    }
                    Some(_) => format!("{error}; the value of {REMOTE_TOKEN} was not accepted"),
                });
            }
            Err(error @ (A2aHttpError::Unreachable(..) | A2aHttpError::Broken(..))) => {
                return Err(format!("{error}; is the agent running, and is this its address?"));
            }
            Err(error) => return Err(error.to_string()),
        }
    }
    let reason = first.map_or_else(|| "not found".to_owned(), |error| error.to_string());
    Err(format!("no card was found at {address}: {reason}; give the address of the card itself (….json)"))
}

/// Fetches a card. Most cards are public, so the token is only sent after the server has asked for it.
async fn get_card(
    client: &A2aHttpClient,
    address: &A2aAddress,
    token: Option<&str>,
) -> Result<Bytes, A2aHttpError> {
    let mut request = A2aHttpRequest {
        method: Method::GET,
        address,
        body: None,
        accept: "application/json",
        headers: Vec::new(),
        credential: None,
    };
    let response = match (client.send(&request).await, token) {
        (Err(error), Some(token)) if error.is_auth_error() => {
            let credential = bearer_credential(token).map_err(A2aHttpError::InvalidResponse)?;
            request.credential = Some(&credential);
            client.send(&request).await?
        }
        (result, _) => result?,
    };
    response.read_all(CARD_MAX).await
}

/// Builds a request for the binding in which each call has its own path. The task's id is in the path alone.
fn rest_request(
    tenant: Option<&str>,
    address: &A2aAddress,
    a2a_method: A2aMethod,
    task: &str,
    params: Value,
) -> (Method, A2aAddress, Option<Value>) {
    let task = percent_encode(task);
    let path = match a2a_method {
        A2aMethod::Send => "message:send".to_owned(),
        A2aMethod::Stream => "message:stream".to_owned(),
        A2aMethod::Get => format!("tasks/{task}?historyLength={HISTORY_LENGTH}"),
        A2aMethod::Cancel => format!("tasks/{task}:cancel"),
        A2aMethod::Subscribe => format!("tasks/{task}:subscribe"),
    };
    let path = match tenant {
        Some(tenant) => format!("{}/{path}", percent_encode(tenant)),
        None => path,
    };
    let reads = matches!(a2a_method, A2aMethod::Get | A2aMethod::Subscribe);
    let method = if reads { Method::GET } else { Method::POST };
    (method, address.with_subpath(&path), (!reads).then_some(params))
}

fn percent_encode(name: &str) -> String {
    utf8_percent_encode(name, ESCAPED_IN_PATHS).to_string()
}

/// Parses the content of a response or an event.
fn parse_response(binding: A2aBinding, body: &[u8]) -> Result<Value, A2aHttpError> {
    let mut value: Value = serde_json::from_slice(body).map_err(|_| {
        A2aHttpError::InvalidResponse(format!(
            "the agent's answer is not JSON: {}",
            excerpt(&String::from_utf8_lossy(&body[..body.len().min(1 << 10)]))
        ))
    })?;
    if let Some(refused) = parse_refusal(&value["error"]) {
        return Err(refused);
    }
    match binding {
        A2aBinding::JsonRpc if value.get("result").is_some() => Ok(value["result"].take()),
        A2aBinding::JsonRpc => Err(A2aHttpError::InvalidResponse(
            "the agent's answer has neither a result nor an error".to_owned(),
        )),
        A2aBinding::Rest => Ok(value),
    }
}

/// Replaces an HTTP error by the agent's own error from its body, if there is one. For authentication errors the status
/// alone counts.
fn refusal_in_status(error: A2aHttpError) -> A2aHttpError {
    match &error {
        A2aHttpError::HttpStatus(_, 401 | 403, _) => error,
        A2aHttpError::HttpStatus(_, _, body) => {
            let body: Value = serde_json::from_str(body).unwrap_or_default();
            parse_refusal(&body["error"]).unwrap_or(error)
        }
        _ => error,
    }
}

/// Parses an error in any of its formats: a JSON-RPC code, or an HTTP status with the reason among the details.
fn parse_refusal(error: &Value) -> Option<A2aHttpError> {
    let message = error["message"].as_str();
    let reason = error["details"]
        .as_array()
        .and_then(|details| details.iter().find_map(|detail| detail["reason"].as_str()));
    let code = match reason {
        Some("TASK_NOT_FOUND") => error_code::TASK_NOT_FOUND,
        Some("TASK_NOT_CANCELABLE") => error_code::TASK_NOT_CANCELABLE,
        Some("UNSUPPORTED_OPERATION") => error_code::UNSUPPORTED_OPERATION,
        _ => error["code"].as_i64()?,
    };
    let detail = error["data"].as_str().map(|data| format!(": {}", excerpt(data))).unwrap_or_default();
    let text = message.map_or_else(|| "the agent refused and did not say why".to_owned(), excerpt);
    Some(A2aHttpError::Refused { code, message: format!("{text}{detail} ({code})") })
}

/// The events of an agent's response.
pub(super) enum A2aEventStream {
    Stream(Box<A2aSseStream>),
    /// The whole response; `None` once it was returned.
    Single(Option<Box<A2aEvent>>),
}

impl A2aEventStream {
    /// Returns the next event, or `None` at the end. Cancel safe.
    pub(super) async fn next(&mut self) -> Result<Option<A2aEvent>, A2aHttpError> {
        match self {
            Self::Stream(events) => events.next().await,
            Self::Single(event) => Ok(event.take().map(|event| *event)),
        }
    }
}

/// A stream of server-sent events.
pub(super) struct A2aSseStream {
    response: A2aHttpResponse,
    parser: SseParser,
    /// Frames that have arrived and were not returned yet.
    frames: VecDeque<SseFrame>,
    binding: A2aBinding,
}

impl A2aSseStream {
    async fn next(&mut self) -> Result<Option<A2aEvent>, A2aHttpError> {
        loop {
            while let Some(frame) = self.frames.pop_front() {
                match frame {
                    SseFrame::Message { data, .. } if !data.trim().is_empty() => {
                        return parse_response(self.binding, data.as_bytes())
                            .map(|value| Some(messages::parse_event(&value)));
                    }
                    SseFrame::Message { .. } | SseFrame::Comment(_) => {}
                }
            }
            let Some(chunk) = self.response.next_chunk().await? else { return Ok(None) };
            let frames =
                self.parser.feed(&chunk).map_err(|too_long| A2aHttpError::TooLong(too_long.to_string()))?;
            self.frames.extend(frames);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_known_in_every_form() {
        let code_of = |error| match error {
            A2aHttpError::Refused { code, .. } => code,
            other => panic!("no refusal: {other:?}"),
        };
        let rpc = json!({"jsonrpc": "2.0", "id": 1, "error": {"code": -32002, "message": "too late", "data": "over"}});
        let refusal = parse_response(A2aBinding::JsonRpc, rpc.to_string().as_bytes()).unwrap_err();
        assert_eq!(refusal.to_string(), "too late: over (-32002)");
        assert_eq!(code_of(refusal), error_code::TASK_NOT_CANCELABLE);
        let rest = json!({"error": {"code": 404, "status": "NOT_FOUND", "message": "no such task",
            "details": [{"@type": "x", "reason": "TASK_NOT_FOUND", "domain": "a2a-protocol.org"}]}});
        let status = |status, body: &Value| {
            refusal_in_status(A2aHttpError::HttpStatus("h".to_owned(), status, body.to_string()))
        };
        assert_eq!(code_of(status(404, &rest)), error_code::TASK_NOT_FOUND);
        assert_eq!(code_of(status(400, &rpc)), error_code::TASK_NOT_CANCELABLE, "some answer so by HTTP");
        assert!(status(401, &rpc).is_auth_error());
        assert!(matches!(status(502, &json!("<html>")), A2aHttpError::HttpStatus(_, 502, _)));
    }

    #[test]
    fn an_invalid_response_is_reported_as_such() {
        let html = parse_response(A2aBinding::JsonRpc, b"<html>\n <b>no</b>").unwrap_err();
        assert_eq!(html.to_string(), "the agent's answer is not JSON: <html> <b>no</b>");
        assert!(parse_response(A2aBinding::JsonRpc, b"{}").is_err());
        assert_eq!(parse_response(A2aBinding::Rest, b"{\"task\":1}"), Ok(json!({"task": 1})));
    }

    #[test]
    fn a_call_by_path_has_the_task_in_its_path() {
        let address = A2aAddress::parse("http://h/a2a/").unwrap();
        let request_for = |method, tenant| {
            let (method, to, body) = rest_request(tenant, &address, method, "t/1", json!({"id": "t/1"}));
            (format!("{method} {}", to.path), body.is_some())
        };
        assert_eq!(request_for(A2aMethod::Stream, None), ("POST /a2a/message:stream".to_owned(), true));
        assert_eq!(request_for(A2aMethod::Cancel, None), ("POST /a2a/tasks/t%2F1:cancel".to_owned(), true));
        assert_eq!(
            request_for(A2aMethod::Get, Some("x")),
            ("GET /a2a/x/tasks/t%2F1?historyLength=20".to_owned(), false)
        );
        assert_eq!(
            request_for(A2aMethod::Subscribe, None),
            ("GET /a2a/tasks/t%2F1:subscribe".to_owned(), false)
        );
    }
}
