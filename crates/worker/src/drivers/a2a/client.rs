//! The agent at the other end, as calls: by JSON-RPC at one address, or each at its path. What it answers is read into
//! [`Heard`]; when to call is for `talk` to say.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hyper::Method;
use qd_catalog::REMOTE_TOKEN;
use qd_protocol::sse::{SseFrame, SseParser};
use serde_json::{Value, json};

use super::address::A2aAddress;
use super::card::{A2aAgentCard, A2aBinding, A2aVersion, bearer_credential};
use super::http::{A2aCredential, A2aHttpClient, A2aHttpError, A2aHttpRequest, A2aHttpResponse, excerpt};
use super::messages::{self, A2aEvent, A2aTask};

/// A card; a longer one is none.
const CARD_MAX: usize = 1 << 20;
/// One event of a stream. Files come whole in it, in base64.
const EVENT_MAX: usize = 32 << 20;
/// An answer that is no stream: a task with all that it made.
const RESPONSE_MAX: usize = 64 << 20;
/// How long a call may take that is answered at once. What is told may take as long as the agent works.
const CALL_LIMIT: Duration = Duration::from_secs(30);
/// Messages of a task's past that are shown with it: more than an agent says between two looks.
const HISTORY_LENGTH: u32 = 20;

/// The codes of refusals that mean something to us.
pub(super) mod error_code {
    pub(crate) const TASK_NOT_FOUND: i64 = -32001;
    pub(crate) const TASK_NOT_CANCELABLE: i64 = -32002;
    pub(crate) const UNSUPPORTED_OPERATION: i64 = -32004;
    pub(crate) const METHOD_NOT_FOUND: i64 = -32601;
}

/// A remote agent.
pub(super) struct A2aClient {
    http: A2aHttpClient,
    pub(super) card: A2aAgentCard,
    credential: Option<A2aCredential>,
    /// The last id of a request.
    last_request_id: AtomicU64,
}

/// What an agent can be called for.
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
    /// Gets the card of the agent at this address, and so knows how to call it.
    pub(super) async fn discover(
        client: A2aHttpClient,
        address: &A2aAddress,
        token: Option<&str>,
    ) -> Result<Self, String> {
        let (card, at) = fetch_card(&client, address, token).await?;
        let card: Value =
            serde_json::from_slice(&card).map_err(|_| format!("the card at {at} is not JSON"))?;
        let card = A2aAgentCard::parse(&card, &at)
            .map_err(|why| format!("the card at {at} cannot be used: {why}"))?;
        let called = &card.interface.address;
        if token.is_some() && at.tls && !called.tls && !called.is_loopback() {
            return Err(format!(
                "the card at {at} wants to be called at {called}, where anybody on the way could read {REMOTE_TOKEN}; leave it out \
                 or use an agent that is called by https"
            ));
        }
        let credential = token.map(|token| card.credential(token)).transpose()?;
        Ok(Self { http: client, card, credential, last_request_id: AtomicU64::new(0) })
    }

    /// Tells the agent something; what it answers comes as it comes.
    pub(super) async fn send_message(&self, message: Value) -> Result<A2aEventStream, A2aHttpError> {
        let streams = self.card.streams;
        let configuration = messages::send_configuration(self.card.interface.version, streams);
        let verb = if streams { A2aMethod::Stream } else { A2aMethod::Send };
        let reply = self.call(verb, "", json!({"message": message, "configuration": configuration})).await?;
        self.open_stream(reply).await
    }

    /// Listens to a task again.
    pub(super) async fn subscribe(&self, task: &str) -> Result<A2aEventStream, A2aHttpError> {
        let reply = self.call(A2aMethod::Subscribe, task, json!({"id": task})).await?;
        self.open_stream(reply).await
    }

    /// Looks at a task.
    pub(super) async fn get_task(&self, task: &str) -> Result<A2aTask, A2aHttpError> {
        self.call_for_task(A2aMethod::Get, task, json!({"id": task, "historyLength": HISTORY_LENGTH})).await
    }

    /// Asks the agent to stop a task; gives how it stands then.
    pub(super) async fn cancel(&self, task: &str, reason: Option<&str>) -> Result<A2aTask, A2aHttpError> {
        let params = match reason {
            Some(reason) => json!({"id": task, "metadata": {"reason": reason}}),
            None => json!({"id": task}),
        };
        self.call_for_task(A2aMethod::Cancel, task, params).await
    }

    /// An error in words that say what to do.
    pub(super) fn describe_error(&self, fault: &A2aHttpError) -> String {
        if !fault.is_auth_error() {
            return fault.to_string();
        }
        let header = self.card.credential_header();
        match self.credential {
            None => format!(
                "{fault}; the agent wants a credential: give the session {REMOTE_TOKEN}, which goes into `{header}`"
            ),
            Some(_) => format!("{fault}; the value of {REMOTE_TOKEN} in `{header}` was not taken"),
        }
    }

    async fn call_for_task(
        &self,
        verb: A2aMethod,
        task: &str,
        params: Value,
    ) -> Result<A2aTask, A2aHttpError> {
        let answered = async {
            let reply = self.call(verb, task, params).await?;
            let answer = self.parse_response(&reply.read_all(RESPONSE_MAX).await?)?;
            let nonsense = || {
                A2aHttpError::InvalidResponse("the agent answered with something that is no task".to_owned())
            };
            messages::parse_task(&answer).ok_or_else(nonsense)
        };
        match tokio::time::timeout(CALL_LIMIT, answered).await {
            Ok(answered) => answered,
            Err(_) => Err(A2aHttpError::TimedOut(self.card.interface.address.to_string(), CALL_LIMIT)),
        }
    }

    async fn call(
        &self,
        verb: A2aMethod,
        task: &str,
        mut params: Value,
    ) -> Result<A2aHttpResponse, A2aHttpError> {
        let interface = &self.card.interface;
        if let (Some(tenant), Some(fields)) = (&interface.tenant, params.as_object_mut()) {
            fields.insert("tenant".to_owned(), json!(tenant));
        }
        let (method, to, body) = match interface.binding {
            A2aBinding::JsonRpc => {
                let id = self.last_request_id.fetch_add(1, Ordering::Relaxed) + 1;
                let method = verb.wire_name(interface.version);
                let body = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
                (Method::POST, interface.address.clone(), Some(body))
            }
            A2aBinding::Rest => {
                rest_request(interface.tenant.as_deref(), &interface.address, verb, task, params)
            }
        };
        let asking = A2aHttpRequest {
            method,
            address: &to,
            body: body.map(|body| Bytes::from(body.to_string())),
            accept: if verb.streams() { "text/event-stream, application/json" } else { "application/json" },
            headers: vec![("a2a-version", interface.version.name())],
            credential: self.credential.as_ref(),
        };
        self.http.send(&asking).await.map_err(refusal_in_status)
    }

    async fn open_stream(&self, reply: A2aHttpResponse) -> Result<A2aEventStream, A2aHttpError> {
        let binding = self.card.interface.binding;
        if reply.is_stream {
            return Ok(A2aEventStream::Stream(Box::new(A2aSseStream {
                response: reply,
                parser: SseParser::new(EVENT_MAX),
                frames: VecDeque::new(),
                binding,
            })));
        }
        let answer = self.parse_response(&reply.read_all(RESPONSE_MAX).await?)?;
        Ok(A2aEventStream::Single(Some(Box::new(messages::parse_event(&answer)))))
    }

    fn parse_response(&self, answer: &[u8]) -> Result<Value, A2aHttpError> {
        parse_response(self.card.interface.binding, answer)
    }
}

async fn fetch_card(
    client: &A2aHttpClient,
    address: &A2aAddress,
    token: Option<&str>,
) -> Result<(Bytes, A2aAddress), String> {
    let mut first = None;
    for at in address.card_addresses() {
        match get_card(client, &at, token).await {
            Ok(card) => return Ok((card, at)),
            Err(fault @ A2aHttpError::HttpStatus(_, 404 | 410, _)) => first = first.or(Some(fault)),
            Err(fault) if fault.is_auth_error() => {
                return Err(match token {
                    None => format!("{fault}; its card wants a credential: give the session {REMOTE_TOKEN}"),
                    Some(_) => format!("{fault}; the value of {REMOTE_TOKEN} was not taken"),
                });
            }
            Err(fault @ (A2aHttpError::Unreachable(..) | A2aHttpError::Broken(..))) => {
                return Err(format!("{fault}; is the agent running, and is this its address?"));
            }
            Err(fault) => return Err(fault.to_string()),
        }
    }
    let why = first.map_or_else(|| "it was not found".to_owned(), |fault| fault.to_string());
    Err(format!(
        "there is no card of an agent below {address}: {why}; give the address of the card itself (….json)"
    ))
}

/// A card is public most often, so what lets us in is kept back until it is asked for.
async fn get_card(
    client: &A2aHttpClient,
    at: &A2aAddress,
    token: Option<&str>,
) -> Result<Bytes, A2aHttpError> {
    let mut asking = A2aHttpRequest {
        method: Method::GET,
        address: at,
        body: None,
        accept: "application/json",
        headers: Vec::new(),
        credential: None,
    };
    let reply = match (client.send(&asking).await, token) {
        (Err(fault), Some(token)) if fault.is_auth_error() => {
            let credential = bearer_credential(token).map_err(A2aHttpError::InvalidResponse)?;
            asking.credential = Some(&credential);
            client.send(&asking).await?
        }
        (answered, _) => answered?,
    };
    reply.read_all(CARD_MAX).await
}

/// A call in the binding where each has its own path. What stands in the path is not said again.
fn rest_request(
    tenant: Option<&str>,
    at: &A2aAddress,
    verb: A2aMethod,
    task: &str,
    params: Value,
) -> (Method, A2aAddress, Option<Value>) {
    let task = percent_encode(task);
    let path = match verb {
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
    let reads = matches!(verb, A2aMethod::Get | A2aMethod::Subscribe);
    let method = if reads { Method::GET } else { Method::POST };
    (method, at.with_subpath(&path), (!reads).then_some(params))
}

fn percent_encode(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~');
    name.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// What an answer or an event holds.
fn parse_response(binding: A2aBinding, answer: &[u8]) -> Result<Value, A2aHttpError> {
    let mut value: Value = serde_json::from_slice(answer).map_err(|_| {
        A2aHttpError::InvalidResponse(format!(
            "the agent's answer is not JSON: {}",
            excerpt(&String::from_utf8_lossy(&answer[..answer.len().min(1 << 10)]))
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

/// The agent's own refusal out of one by HTTP, where it says more than a status. Who is not let in is told so by the
/// status alone.
fn refusal_in_status(fault: A2aHttpError) -> A2aHttpError {
    match &fault {
        A2aHttpError::HttpStatus(_, 401 | 403, _) => fault,
        A2aHttpError::HttpStatus(_, _, body) => {
            let body: Value = serde_json::from_str(body).unwrap_or_default();
            parse_refusal(&body["error"]).unwrap_or(fault)
        }
        _ => fault,
    }
}

/// A refusal in any of the forms that there are: a code of JSON-RPC, or a status with its reason among the details.
fn parse_refusal(error: &Value) -> Option<A2aHttpError> {
    let message = error["message"].as_str();
    let reason =
        error["details"].as_array().and_then(|details| details.iter().find_map(|it| it["reason"].as_str()));
    let code = match reason {
        Some("TASK_NOT_FOUND") => error_code::TASK_NOT_FOUND,
        Some("TASK_NOT_CANCELABLE") => error_code::TASK_NOT_CANCELABLE,
        Some("UNSUPPORTED_OPERATION") => error_code::UNSUPPORTED_OPERATION,
        _ => error["code"].as_i64()?,
    };
    let detail = error["data"].as_str().map(|data| format!(": {}", excerpt(data))).unwrap_or_default();
    let said = message.map_or_else(|| "the agent refused and did not say why".to_owned(), excerpt);
    Some(A2aHttpError::Refused { code, message: format!("{said}{detail} ({code})") })
}

/// What an agent answers, as it comes.
pub(super) enum A2aEventStream {
    Stream(Box<A2aSseStream>),
    /// All at once; `None` when that was heard.
    Single(Option<Box<A2aEvent>>),
}

impl A2aEventStream {
    /// The next thing; `None` if that was all. Nothing is lost if the wait is given up.
    pub(super) async fn next(&mut self) -> Result<Option<A2aEvent>, A2aHttpError> {
        match self {
            Self::Stream(events) => events.next().await,
            Self::Single(heard) => Ok(heard.take().map(|heard| *heard)),
        }
    }
}

/// A stream of events.
pub(super) struct A2aSseStream {
    response: A2aHttpResponse,
    parser: SseParser,
    /// Those that have come and were not given.
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
            let Some(more) = self.response.next_chunk().await? else { return Ok(None) };
            let frames =
                self.parser.feed(&more).map_err(|too_long| A2aHttpError::TooLong(too_long.to_string()))?;
            self.frames.extend(frames);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_known_in_every_form() {
        let code_of = |fault| match fault {
            A2aHttpError::Refused { code, .. } => code,
            other => panic!("no refusal: {other:?}"),
        };
        let rpc = json!({"jsonrpc": "2.0", "id": 1, "error": {"code": -32002, "message": "too late", "data": "over"}});
        let refused_by = parse_response(A2aBinding::JsonRpc, rpc.to_string().as_bytes()).unwrap_err();
        assert_eq!(refused_by.to_string(), "too late: over (-32002)");
        assert_eq!(code_of(refused_by), error_code::TASK_NOT_CANCELABLE);
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
    fn an_answer_that_is_none_is_said_to_be_none() {
        let html = parse_response(A2aBinding::JsonRpc, b"<html>\n <b>no</b>").unwrap_err();
        assert_eq!(html.to_string(), "the agent's answer is not JSON: <html> <b>no</b>");
        assert!(parse_response(A2aBinding::JsonRpc, b"{}").is_err());
        assert_eq!(parse_response(A2aBinding::Rest, b"{\"task\":1}"), Ok(json!({"task": 1})));
    }

    #[test]
    fn a_call_by_path_says_there_which_task_it_is_about() {
        let at = A2aAddress::parse("http://h/a2a/").unwrap();
        let called = |verb, tenant| {
            let (method, to, body) = rest_request(tenant, &at, verb, "t/1", json!({"id": "t/1"}));
            (format!("{method} {}", to.path), body.is_some())
        };
        assert_eq!(called(A2aMethod::Stream, None), ("POST /a2a/message:stream".to_owned(), true));
        assert_eq!(called(A2aMethod::Cancel, None), ("POST /a2a/tasks/t%2F1:cancel".to_owned(), true));
        assert_eq!(
            called(A2aMethod::Get, Some("x")),
            ("GET /a2a/x/tasks/t%2F1?historyLength=20".to_owned(), false)
        );
        assert_eq!(called(A2aMethod::Subscribe, None), ("GET /a2a/tasks/t%2F1:subscribe".to_owned(), false));
    }
}
