//! The agent at the other end, as calls: by JSON-RPC at one address, or each at its path. What it answers is read into
//! [`Heard`]; when to call is for `talk` to say.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hyper::Method;
use qd_catalog::REMOTE_TOKEN;
use qd_protocol::sse::{Frame, Parser};
use serde_json::{Value, json};

use super::address::Address;
use super::card::{Binding, Card, Version, bearer};
use super::http::{Asking, Client, Credential, Fault, Reply, shown};
use super::words::{self, Heard, Task};

/// A card; a longer one is none.
const CARD_MAX: usize = 1 << 20;
/// One event of a stream. Files come whole in it, in base64.
const EVENT_MAX: usize = 32 << 20;
/// An answer that is no stream: a task with all that it made.
const ANSWER_MAX: usize = 64 << 20;
/// How long a call may take that is answered at once. What is told may take as long as the agent works.
const CALL: Duration = Duration::from_secs(30);
/// Messages of a task's past that are shown with it: more than an agent says between two looks.
const HISTORY: u32 = 20;

/// The codes of refusals that mean something to us.
pub(super) mod code {
    pub(crate) const TASK_NOT_FOUND: i64 = -32001;
    pub(crate) const TASK_NOT_CANCELABLE: i64 = -32002;
    pub(crate) const UNSUPPORTED_OPERATION: i64 = -32004;
    pub(crate) const METHOD_NOT_FOUND: i64 = -32601;
}

/// A remote agent.
pub(super) struct Remote {
    client: Client,
    pub(super) card: Card,
    credential: Option<Credential>,
    /// The last id of a request.
    id: AtomicU64,
}

/// What an agent can be called for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    Send,
    Stream,
    Get,
    Cancel,
    Subscribe,
}

impl Verb {
    fn method(self, version: Version) -> &'static str {
        match (version, self) {
            (Version::One, Self::Send) => "SendMessage",
            (Version::One, Self::Stream) => "SendStreamingMessage",
            (Version::One, Self::Get) => "GetTask",
            (Version::One, Self::Cancel) => "CancelTask",
            (Version::One, Self::Subscribe) => "SubscribeToTask",
            (Version::Old, Self::Send) => "message/send",
            (Version::Old, Self::Stream) => "message/stream",
            (Version::Old, Self::Get) => "tasks/get",
            (Version::Old, Self::Cancel) => "tasks/cancel",
            (Version::Old, Self::Subscribe) => "tasks/resubscribe",
        }
    }

    fn streams(self) -> bool {
        matches!(self, Self::Stream | Self::Subscribe)
    }
}

impl Remote {
    /// Gets the card of the agent at this address, and so knows how to call it.
    pub(super) async fn find(client: Client, address: &Address, token: Option<&str>) -> Result<Self, String> {
        let (card, at) = fetch_card(&client, address, token).await?;
        let card: Value =
            serde_json::from_slice(&card).map_err(|_| format!("the card at {at} is not JSON"))?;
        let card = Card::read(&card, &at).map_err(|why| format!("the card at {at} cannot be used: {why}"))?;
        let called = &card.interface.at;
        if token.is_some() && at.tls && !called.tls && !called.is_here() {
            return Err(format!(
                "the card at {at} wants to be called at {called}, where anybody on the way could read {REMOTE_TOKEN}; leave it out \
                 or use an agent that is called by https"
            ));
        }
        let credential = token.map(|token| card.credential(token)).transpose()?;
        Ok(Self { client, card, credential, id: AtomicU64::new(0) })
    }

    /// Tells the agent something; what it answers comes as it comes.
    pub(super) async fn tell(&self, message: Value) -> Result<Line, Fault> {
        let streams = self.card.streams;
        let configuration = words::configuration(self.card.interface.version, streams);
        let verb = if streams { Verb::Stream } else { Verb::Send };
        let reply = self.call(verb, "", json!({"message": message, "configuration": configuration})).await?;
        self.line(reply).await
    }

    /// Listens to a task again.
    pub(super) async fn subscribe(&self, task: &str) -> Result<Line, Fault> {
        let reply = self.call(Verb::Subscribe, task, json!({"id": task})).await?;
        self.line(reply).await
    }

    /// Looks at a task.
    pub(super) async fn look(&self, task: &str) -> Result<Task, Fault> {
        self.ask_for_task(Verb::Get, task, json!({"id": task, "historyLength": HISTORY})).await
    }

    /// Asks the agent to stop a task; gives how it stands then.
    pub(super) async fn cancel(&self, task: &str, reason: Option<&str>) -> Result<Task, Fault> {
        let params = match reason {
            Some(reason) => json!({"id": task, "metadata": {"reason": reason}}),
            None => json!({"id": task}),
        };
        self.ask_for_task(Verb::Cancel, task, params).await
    }

    /// An error in words that say what to do.
    pub(super) fn words(&self, fault: &Fault) -> String {
        if !fault.is_about_credentials() {
            return fault.to_string();
        }
        let header = self.card.header();
        match self.credential {
            None => format!(
                "{fault}; the agent wants a credential: give the session {REMOTE_TOKEN}, which goes into `{header}`"
            ),
            Some(_) => format!("{fault}; the value of {REMOTE_TOKEN} in `{header}` was not taken"),
        }
    }

    async fn ask_for_task(&self, verb: Verb, task: &str, params: Value) -> Result<Task, Fault> {
        let answered = async {
            let reply = self.call(verb, task, params).await?;
            let answer = self.unwrap(&reply.whole(ANSWER_MAX).await?)?;
            let nonsense = || Fault::Nonsense("the agent answered with something that is no task".to_owned());
            words::task(&answer).ok_or_else(nonsense)
        };
        match tokio::time::timeout(CALL, answered).await {
            Ok(answered) => answered,
            Err(_) => Err(Fault::Late(self.card.interface.at.to_string(), CALL)),
        }
    }

    async fn call(&self, verb: Verb, task: &str, mut params: Value) -> Result<Reply, Fault> {
        let interface = &self.card.interface;
        if let (Some(tenant), Some(fields)) = (&interface.tenant, params.as_object_mut()) {
            fields.insert("tenant".to_owned(), json!(tenant));
        }
        let (method, to, body) = match interface.binding {
            Binding::JsonRpc => {
                let id = self.id.fetch_add(1, Ordering::Relaxed) + 1;
                let method = verb.method(interface.version);
                let body = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
                (Method::POST, interface.at.clone(), Some(body))
            }
            Binding::Rest => rest(interface.tenant.as_deref(), &interface.at, verb, task, params),
        };
        let asking = Asking {
            method,
            to: &to,
            body: body.map(|body| Bytes::from(body.to_string())),
            accept: if verb.streams() { "text/event-stream, application/json" } else { "application/json" },
            headers: vec![("a2a-version", interface.version.name())],
            credential: self.credential.as_ref(),
        };
        self.client.ask(&asking).await.map_err(refused)
    }

    async fn line(&self, reply: Reply) -> Result<Line, Fault> {
        let binding = self.card.interface.binding;
        if reply.is_stream {
            return Ok(Line::Stream(Box::new(Events {
                reply,
                parser: Parser::new(EVENT_MAX),
                frames: VecDeque::new(),
                binding,
            })));
        }
        let answer = self.unwrap(&reply.whole(ANSWER_MAX).await?)?;
        Ok(Line::Whole(Some(Box::new(words::read(&answer)))))
    }

    fn unwrap(&self, answer: &[u8]) -> Result<Value, Fault> {
        unwrap(self.card.interface.binding, answer)
    }
}

async fn fetch_card(
    client: &Client,
    address: &Address,
    token: Option<&str>,
) -> Result<(Bytes, Address), String> {
    let mut first = None;
    for at in address.cards() {
        match get_card(client, &at, token).await {
            Ok(card) => return Ok((card, at)),
            Err(fault @ Fault::Status(_, 404 | 410, _)) => first = first.or(Some(fault)),
            Err(fault) if fault.is_about_credentials() => {
                return Err(match token {
                    None => format!("{fault}; its card wants a credential: give the session {REMOTE_TOKEN}"),
                    Some(_) => format!("{fault}; the value of {REMOTE_TOKEN} was not taken"),
                });
            }
            Err(fault @ (Fault::Unreachable(..) | Fault::Broken(..))) => {
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
async fn get_card(client: &Client, at: &Address, token: Option<&str>) -> Result<Bytes, Fault> {
    let mut asking = Asking {
        method: Method::GET,
        to: at,
        body: None,
        accept: "application/json",
        headers: Vec::new(),
        credential: None,
    };
    let reply = match (client.ask(&asking).await, token) {
        (Err(fault), Some(token)) if fault.is_about_credentials() => {
            let credential = bearer(token).map_err(Fault::Nonsense)?;
            asking.credential = Some(&credential);
            client.ask(&asking).await?
        }
        (answered, _) => answered?,
    };
    reply.whole(CARD_MAX).await
}

/// A call in the binding where each has its own path. What stands in the path is not said again.
fn rest(
    tenant: Option<&str>,
    at: &Address,
    verb: Verb,
    task: &str,
    params: Value,
) -> (Method, Address, Option<Value>) {
    let task = encode(task);
    let path = match verb {
        Verb::Send => "message:send".to_owned(),
        Verb::Stream => "message:stream".to_owned(),
        Verb::Get => format!("tasks/{task}?historyLength={HISTORY}"),
        Verb::Cancel => format!("tasks/{task}:cancel"),
        Verb::Subscribe => format!("tasks/{task}:subscribe"),
    };
    let path = match tenant {
        Some(tenant) => format!("{}/{path}", encode(tenant)),
        None => path,
    };
    let reads = matches!(verb, Verb::Get | Verb::Subscribe);
    let method = if reads { Method::GET } else { Method::POST };
    (method, at.below(&path), (!reads).then_some(params))
}

fn encode(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~');
    name.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// What an answer or an event holds.
fn unwrap(binding: Binding, answer: &[u8]) -> Result<Value, Fault> {
    let mut value: Value = serde_json::from_slice(answer).map_err(|_| {
        Fault::Nonsense(format!(
            "the agent's answer is not JSON: {}",
            shown(&String::from_utf8_lossy(&answer[..answer.len().min(1 << 10)]))
        ))
    })?;
    if let Some(refused) = refusal(&value["error"]) {
        return Err(refused);
    }
    match binding {
        Binding::JsonRpc if value.get("result").is_some() => Ok(value["result"].take()),
        Binding::JsonRpc => {
            Err(Fault::Nonsense("the agent's answer has neither a result nor an error".to_owned()))
        }
        Binding::Rest => Ok(value),
    }
}

/// The agent's own refusal out of one by HTTP, where it says more than a status. Who is not let in is told so by the
/// status alone.
fn refused(fault: Fault) -> Fault {
    match &fault {
        Fault::Status(_, 401 | 403, _) => fault,
        Fault::Status(_, _, body) => {
            let body: Value = serde_json::from_str(body).unwrap_or_default();
            refusal(&body["error"]).unwrap_or(fault)
        }
        _ => fault,
    }
}

/// A refusal in any of the forms that there are: a code of JSON-RPC, or a status with its reason among the details.
fn refusal(error: &Value) -> Option<Fault> {
    let message = error["message"].as_str();
    let reason =
        error["details"].as_array().and_then(|details| details.iter().find_map(|it| it["reason"].as_str()));
    let code = match reason {
        Some("TASK_NOT_FOUND") => code::TASK_NOT_FOUND,
        Some("TASK_NOT_CANCELABLE") => code::TASK_NOT_CANCELABLE,
        Some("UNSUPPORTED_OPERATION") => code::UNSUPPORTED_OPERATION,
        _ => error["code"].as_i64()?,
    };
    let detail = error["data"].as_str().map(|data| format!(": {}", shown(data))).unwrap_or_default();
    let said = message.map_or_else(|| "the agent refused and did not say why".to_owned(), shown);
    Some(Fault::Refused { code, message: format!("{said}{detail} ({code})") })
}

/// What an agent answers, as it comes.
pub(super) enum Line {
    Stream(Box<Events>),
    /// All at once; `None` when that was heard.
    Whole(Option<Box<Heard>>),
}

impl Line {
    /// The next thing; `None` if that was all. Nothing is lost if the wait is given up.
    pub(super) async fn next(&mut self) -> Result<Option<Heard>, Fault> {
        match self {
            Self::Stream(events) => events.next().await,
            Self::Whole(heard) => Ok(heard.take().map(|heard| *heard)),
        }
    }
}

/// A stream of events.
pub(super) struct Events {
    reply: Reply,
    parser: Parser,
    /// Those that have come and were not given.
    frames: VecDeque<Frame>,
    binding: Binding,
}

impl Events {
    async fn next(&mut self) -> Result<Option<Heard>, Fault> {
        loop {
            while let Some(frame) = self.frames.pop_front() {
                match frame {
                    Frame::Message { data, .. } if !data.trim().is_empty() => {
                        return unwrap(self.binding, data.as_bytes()).map(|value| Some(words::read(&value)));
                    }
                    Frame::Message { .. } | Frame::Comment(_) => {}
                }
            }
            let Some(more) = self.reply.more().await? else { return Ok(None) };
            let frames = self.parser.feed(&more).map_err(|too_long| Fault::TooLong(too_long.to_string()))?;
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
            Fault::Refused { code, .. } => code,
            other => panic!("no refusal: {other:?}"),
        };
        let rpc = json!({"jsonrpc": "2.0", "id": 1, "error": {"code": -32002, "message": "too late", "data": "over"}});
        let refused_by = unwrap(Binding::JsonRpc, rpc.to_string().as_bytes()).unwrap_err();
        assert_eq!(refused_by.to_string(), "too late: over (-32002)");
        assert_eq!(code_of(refused_by), code::TASK_NOT_CANCELABLE);
        let rest = json!({"error": {"code": 404, "status": "NOT_FOUND", "message": "no such task",
            "details": [{"@type": "x", "reason": "TASK_NOT_FOUND", "domain": "a2a-protocol.org"}]}});
        let status = |status, body: &Value| refused(Fault::Status("h".to_owned(), status, body.to_string()));
        assert_eq!(code_of(status(404, &rest)), code::TASK_NOT_FOUND);
        assert_eq!(code_of(status(400, &rpc)), code::TASK_NOT_CANCELABLE, "some answer so by HTTP");
        assert!(status(401, &rpc).is_about_credentials());
        assert!(matches!(status(502, &json!("<html>")), Fault::Status(_, 502, _)));
    }

    #[test]
    fn an_answer_that_is_none_is_said_to_be_none() {
        let html = unwrap(Binding::JsonRpc, b"<html>\n <b>no</b>").unwrap_err();
        assert_eq!(html.to_string(), "the agent's answer is not JSON: <html> <b>no</b>");
        assert!(unwrap(Binding::JsonRpc, b"{}").is_err());
        assert_eq!(unwrap(Binding::Rest, b"{\"task\":1}"), Ok(json!({"task": 1})));
    }

    #[test]
    fn a_call_by_path_says_there_which_task_it_is_about() {
        let at = Address::parse("http://h/a2a/").unwrap();
        let called = |verb, tenant| {
            let (method, to, body) = rest(tenant, &at, verb, "t/1", json!({"id": "t/1"}));
            (format!("{method} {}", to.path), body.is_some())
        };
        assert_eq!(called(Verb::Stream, None), ("POST /a2a/message:stream".to_owned(), true));
        assert_eq!(called(Verb::Cancel, None), ("POST /a2a/tasks/t%2F1:cancel".to_owned(), true));
        assert_eq!(
            called(Verb::Get, Some("x")),
            ("GET /a2a/x/tasks/t%2F1?historyLength=20".to_owned(), false)
        );
        assert_eq!(called(Verb::Subscribe, None), ("GET /a2a/tasks/t%2F1:subscribe".to_owned(), false));
    }
}
