//! The model's HTTP: which path is which API, how an answer goes out piece by piece, and who is refused. A connection
//! that the client closes is noticed while nothing is being written, too: hyper watches it, drops the body, and the
//! task that feeds the body waits for that beside its pauses.

use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::HeaderValue;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::heard::Heard;
use super::script::{Plan, Script};
use super::seen::{Api, Log, Outcome, Record, Seen};
use super::tools::Call;
use super::{CALL_TOKENS, INPUT_TOKENS, chat, gemini, messages, responses};
use crate::pieces::Pieces;

/// What an answer is made of.
#[derive(Debug)]
pub(super) enum Reply {
    Text,
    Call(Call),
}

/// How an API says it.
pub(super) trait Voice: Send {
    /// What comes before the first token; of a call, all but its end.
    fn open(&mut self, reply: &Reply) -> String;
    /// One token of a text.
    fn token(&mut self, token: &str) -> String;
    /// What comes after the last.
    fn close(&mut self, reply: &Reply, tokens: u64) -> String;
    /// Everything at once.
    fn whole(&mut self, reply: &Reply, text: &str, tokens: u64) -> Value;
}

/// One server-sent event.
pub(super) fn sse(event: Option<&str>, data: &Value) -> String {
    let event = event.map(|event| format!("event: {event}\n")).unwrap_or_default();
    format!("{event}data: {data}\n\n")
}

/// Serves whoever connects, until it is dropped.
pub(super) async fn serve(listener: TcpListener, log: Log) {
    let own = listener.local_addr().expect("it is bound").to_string();
    let room = Arc::new(Room { log, own, script: Mutex::default() });
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(connection(stream, Arc::clone(&room)));
        while connections.try_join_next().is_some() {}
    }
}

/// What all connections share.
#[derive(Debug)]
struct Room {
    log: Log,
    /// Our own address; requests for another are on their way through a proxy.
    own: String,
    script: Mutex<Script>,
}

async fn connection(stream: TcpStream, room: Arc<Room>) {
    let _undelayed = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let room = Arc::clone(&room);
        async move { Ok::<_, Infallible>(room.answer(request).await) }
    });
    // A client that goes away is seen by its request's record, and a cut is our own doing.
    let _ended =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

impl Room {
    async fn answer(&self, request: Request<Incoming>) -> Response<Pieces> {
        let (head, body) = request.into_parts();
        let elsewhere = head.uri.authority().map(ToString::to_string).filter(|host| *host != self.own);
        if let Some(host) = elsewhere {
            self.log.phone_home(host);
            let mut refusal = refusal(403, "this is no way out");
            // Who wanted a tunnel might take what follows for its other end.
            refusal.headers_mut().insert(hyper::header::CONNECTION, HeaderValue::from_static("close"));
            return refusal;
        }
        let path = head.uri.path_and_query().map_or_else(String::new, ToString::to_string);
        let other = |side| seen(Api::Other, &path, side, &Heard::default());
        if head.method == Method::GET && head.uri.path().ends_with("/models") {
            self.log.add(other(true)).done();
            return whole(200, &models());
        }
        if head.method == Method::HEAD {
            self.log.add(other(true)).done();
            return Response::new(Pieces::Whole(None));
        }
        let Ok(body) = body.collect().await else { return refusal(400, "half a request") };
        if head.headers.contains_key("content-encoding") {
            self.log.add(other(false)).refused(415);
            return refusal(415, "requests are not to be compressed");
        }
        let body: Value = serde_json::from_slice(&body.to_bytes()).unwrap_or_default();
        let Some((api, heard)) = hear(head.uri.path(), &body) else {
            self.log.add(other(false)).refused(404);
            return refusal(404, "no such path");
        };
        if let Some(count) = count(head.uri.path()) {
            self.log.add(seen(api, &path, true, &heard)).done();
            return whole(200, &count);
        }
        let plan = self.script.lock().unwrap_or_else(PoisonError::into_inner).plan(&heard);
        let record = self.log.add(seen(api, &path, heard.is_side(), &heard));
        let id = format!("{:08x}", self.log.read(|all| all.requests.len()));
        carry_out(plan, record, voice(api, id, heard.model), heard.stream).await
    }
}

/// What a path and its body say. The last segment alone decides: base addresses differ from agent to agent.
fn hear(path: &str, body: &Value) -> Option<(Api, Heard)> {
    let (api, mut heard) = if path.ends_with("/messages") || path.ends_with("/messages/count_tokens") {
        (Api::Messages, messages::hear(body))
    } else if path.ends_with("/responses") {
        (Api::Responses, responses::hear(body))
    } else if path.ends_with("/chat/completions") {
        (Api::Chat, chat::hear(body))
    } else if path.ends_with("enerateContent") || path.ends_with(":countTokens") {
        (Api::Gemini, gemini::hear(path, body))
    } else {
        return None;
    };
    if let Some(model) = body["model"].as_str() {
        heard.model = model.to_owned();
    }
    Some((api, heard))
}

fn count(path: &str) -> Option<Value> {
    if path.ends_with("/count_tokens") {
        Some(json!({ "input_tokens": INPUT_TOKENS }))
    } else if path.ends_with(":countTokens") {
        Some(json!({ "totalTokens": INPUT_TOKENS }))
    } else {
        None
    }
}

/// One list for whoever asks: each reads what it knows of it.
fn models() -> Value {
    let model = json!({
        "id": "scripted", "object": "model", "type": "model", "display_name": "Scripted", "created": 1,
        "created_at": "2025-01-01T00:00:00Z", "owned_by": "nobody",
    });
    json!({ "object": "list", "data": [model], "models": [], "has_more": false })
}

fn seen(api: Api, path: &str, side: bool, heard: &Heard) -> Seen {
    Seen {
        api,
        path: path.to_owned(),
        model: heard.model.clone(),
        texts: heard.texts(),
        results: heard.results().len(),
        tools: heard.tools.iter().map(|tool| tool.name.clone()).collect(),
        side,
        at: Instant::now(),
        ended: None,
        outcome: Outcome::Streaming,
    }
}

fn voice(api: Api, id: String, model: String) -> Box<dyn Voice> {
    match api {
        Api::Messages => Box::new(messages::Message { id, model }),
        Api::Responses => Box::new(responses::Response { id, model, next: 0, text: String::new() }),
        Api::Chat | Api::Other => Box::new(chat::Completion { id, model }),
        Api::Gemini => Box::new(gemini::Candidate { id, model, tokens: 0 }),
    }
}

async fn carry_out(
    plan: Plan,
    mut record: Record,
    mut voice: Box<dyn Voice>,
    stream: bool,
) -> Response<Pieces> {
    let (tokens, pause, is_cut) = match plan {
        Plan::Refuse(status) => {
            record.refused(status);
            return refusal(status, "the script wants it");
        }
        Plan::Call(call) => {
            record.tokens = CALL_TOKENS;
            let reply = Reply::Call(call);
            let answer = if stream {
                let text = voice.open(&reply) + &voice.close(&reply, CALL_TOKENS);
                event_stream(Pieces::Whole(Some(text.into())))
            } else {
                whole(200, &voice.whole(&reply, "", CALL_TOKENS))
            };
            record.done();
            return answer;
        }
        Plan::Say { tokens, pause } => (tokens, pause, false),
        Plan::Cut { tokens, pause } => (tokens, pause, true),
    };
    if !stream && !is_cut {
        // The client may go away meanwhile: then this whole future is dropped, and the record with it.
        for _ in &tokens {
            tokio::time::sleep(pause).await;
            record.tokens += 1;
        }
        let answer = whole(200, &voice.whole(&Reply::Text, &tokens.concat(), record.tokens));
        record.done();
        return answer;
    }
    let (feed, pieces) = mpsc::channel(PIECES);
    tokio::spawn(async move {
        let gone = feed.clone();
        let said = async {
            let send = async |text: String| feed.send(Ok(text.into())).await.is_ok();
            let mut is_heard = send(voice.open(&Reply::Text)).await;
            for token in &tokens {
                if !pause.is_zero() {
                    tokio::time::sleep(pause).await;
                }
                is_heard = is_heard && send(voice.token(token)).await;
                record.tokens += u64::from(is_heard);
            }
            if is_cut {
                // hyper forgets what it has not yet written when the body breaks.
                tokio::time::sleep(pause).await;
                let error = io::Error::other("the script cuts the stream");
                if feed.send(Err(error)).await.is_ok() {
                    record.cut();
                }
            } else if send(voice.close(&Reply::Text, record.tokens)).await {
                record.done();
            }
        };
        // Whichever comes first; the record that is dropped unfinished says that the client has gone.
        tokio::select! {
            () = said => {}
            () = gone.closed() => {}
        }
    });
    event_stream(Pieces::Fed(pieces))
}

/// How many pieces may wait for a client that does not read.
const PIECES: usize = 16;

fn event_stream(pieces: Pieces) -> Response<Pieces> {
    let builder =
        Response::builder().header("content-type", "text/event-stream").header("request-id", "scripted");
    builder.body(pieces).expect("the headers are valid")
}

fn whole(status: u16, body: &Value) -> Response<Pieces> {
    let builder = Response::builder().status(status).header("content-type", "application/json");
    builder.body(Pieces::Whole(Some(body.to_string().into()))).expect("the head is valid")
}

/// An error in a form that holds what each API's clients look for.
fn refusal(status: u16, why: &str) -> Response<Pieces> {
    let kind = match status {
        400 => "invalid_request_error",
        429 => "rate_limit_error",
        529 => "overloaded_error",
        _ => "api_error",
    };
    let message = format!("scripted {status}: {why}");
    let error = json!({ "type": kind, "message": message, "code": status, "status": "SCRIPTED" });
    whole(status, &json!({ "type": "error", "error": error }))
}
