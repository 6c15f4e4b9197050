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

use super::request::ModelRequest;
use super::request_log::{ModelApi, ModelLog, ModelLogEntry, ModelRequestOutcome, ModelRequestRecord};
use super::script::{ModelPlan, ModelScript};
use super::tools::ModelToolCall;
use super::{CALL_TOKENS, INPUT_TOKENS, chat, gemini, messages, responses};
use crate::response_body::TestResponseBody;

/// What an answer is made of.
#[derive(Debug)]
pub(super) enum ModelReply {
    Text,
    Call(ModelToolCall),
}

/// How an API says it.
pub(super) trait ModelReplyEncoder: Send {
    /// What comes before the first token; of a call, all but its end.
    fn encode_start(&mut self, reply: &ModelReply) -> String;
    /// One token of a text.
    fn encode_token(&mut self, token: &str) -> String;
    /// What comes after the last.
    fn encode_end(&mut self, reply: &ModelReply, tokens: u64) -> String;
    /// Everything at once.
    fn encode_whole(&mut self, reply: &ModelReply, text: &str, tokens: u64) -> Value;
}

/// One server-sent event.
pub(super) fn sse(event: Option<&str>, data: &Value) -> String {
    let event = event.map(|event| format!("event: {event}\n")).unwrap_or_default();
    format!("{event}data: {data}\n\n")
}

/// Serves whoever connects, until it is dropped.
pub(super) async fn serve(listener: TcpListener, log: ModelLog) {
    let own = listener.local_addr().expect("it is bound").to_string();
    let room = Arc::new(FakeModelServer { log, own_address: own, script: Mutex::default() });
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(connection(stream, Arc::clone(&room)));
        while connections.try_join_next().is_some() {}
    }
}

/// What all connections share.
#[derive(Debug)]
struct FakeModelServer {
    log: ModelLog,
    /// Our own address; requests for another are on their way through a proxy.
    own_address: String,
    script: Mutex<ModelScript>,
}

async fn connection(stream: TcpStream, room: Arc<FakeModelServer>) {
    let _undelayed = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let room = Arc::clone(&room);
        async move { Ok::<_, Infallible>(room.respond(request).await) }
    });
    // A client that goes away is seen by its request's record, and a cut is our own doing.
    let _ended =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

impl FakeModelServer {
    async fn respond(&self, request: Request<Incoming>) -> Response<TestResponseBody> {
        let (head, body) = request.into_parts();
        let elsewhere =
            head.uri.authority().map(ToString::to_string).filter(|host| *host != self.own_address);
        if let Some(host) = elsewhere {
            self.log.add_proxied_host(host);
            let mut refusal = error_response(403, "this is no way out");
            // Who wanted a tunnel might take what follows for its other end.
            refusal.headers_mut().insert(hyper::header::CONNECTION, HeaderValue::from_static("close"));
            return refusal;
        }
        let path = head.uri.path_and_query().map_or_else(String::new, ToString::to_string);
        let other = |side| request_record(ModelApi::Other, &path, side, &ModelRequest::default());
        if head.method == Method::GET && head.uri.path().ends_with("/models") {
            self.log.add(other(true)).finish();
            return json_response(200, &models());
        }
        if head.method == Method::HEAD {
            self.log.add(other(true)).finish();
            return Response::new(TestResponseBody::Whole(None));
        }
        let Ok(body) = body.collect().await else { return error_response(400, "half a request") };
        if head.headers.contains_key("content-encoding") {
            self.log.add(other(false)).finish_refused(415);
            return error_response(415, "requests are not to be compressed");
        }
        let body: Value = serde_json::from_slice(&body.to_bytes()).unwrap_or_default();
        let Some((api, heard)) = parse_request(head.uri.path(), &body) else {
            self.log.add(other(false)).finish_refused(404);
            return error_response(404, "no such path");
        };
        if let Some(count) = token_count(head.uri.path()) {
            self.log.add(request_record(api, &path, true, &heard)).finish();
            return json_response(200, &count);
        }
        let plan = self.script.lock().unwrap_or_else(PoisonError::into_inner).plan(&heard);
        let record = self.log.add(request_record(api, &path, heard.is_side_call(), &heard));
        let id = format!("{:08x}", self.log.read(|all| all.requests.len()));
        run_plan(plan, record, encoder_for(api, id, heard.model), heard.stream).await
    }
}

/// What a path and its body say. The last segment alone decides: base addresses differ from agent to agent.
fn parse_request(path: &str, body: &Value) -> Option<(ModelApi, ModelRequest)> {
    let (api, mut heard) = if path.ends_with("/messages") || path.ends_with("/messages/count_tokens") {
        (ModelApi::Messages, messages::parse_request(body))
    } else if path.ends_with("/responses") {
        (ModelApi::Responses, responses::parse_request(body))
    } else if path.ends_with("/chat/completions") {
        (ModelApi::Chat, chat::parse_request(body))
    } else if path.ends_with("enerateContent") || path.ends_with(":countTokens") {
        (ModelApi::Gemini, gemini::parse_request(path, body))
    } else {
        return None;
    };
    if let Some(model) = body["model"].as_str() {
        heard.model = model.to_owned();
    }
    Some((api, heard))
}

fn token_count(path: &str) -> Option<Value> {
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

fn request_record(api: ModelApi, path: &str, side: bool, heard: &ModelRequest) -> ModelRequestRecord {
    ModelRequestRecord {
        api,
        path: path.to_owned(),
        model: heard.model.clone(),
        texts: heard.user_texts(),
        results: heard.latest_results().len(),
        tools: heard.tools.iter().map(|tool| tool.name.clone()).collect(),
        is_side_call: side,
        received_at: Instant::now(),
        ended_at: None,
        outcome: ModelRequestOutcome::Streaming,
    }
}

fn encoder_for(api: ModelApi, id: String, model: String) -> Box<dyn ModelReplyEncoder> {
    match api {
        ModelApi::Messages => Box::new(messages::MessagesEncoder { id, model }),
        ModelApi::Responses => {
            Box::new(responses::ResponsesEncoder { id, model, next_sequence: 0, text: String::new() })
        }
        ModelApi::Chat | ModelApi::Other => Box::new(chat::ChatEncoder { id, model }),
        ModelApi::Gemini => Box::new(gemini::GeminiEncoder { id, model, tokens: 0 }),
    }
}

async fn run_plan(
    plan: ModelPlan,
    mut record: ModelLogEntry,
    mut voice: Box<dyn ModelReplyEncoder>,
    stream: bool,
) -> Response<TestResponseBody> {
    let (tokens, pause, is_cut) = match plan {
        ModelPlan::Refuse(status) => {
            record.finish_refused(status);
            return error_response(status, "the script wants it");
        }
        ModelPlan::Call(call) => {
            record.tokens = CALL_TOKENS;
            let reply = ModelReply::Call(call);
            let answer = if stream {
                let text = voice.encode_start(&reply) + &voice.encode_end(&reply, CALL_TOKENS);
                event_stream(TestResponseBody::Whole(Some(text.into())))
            } else {
                json_response(200, &voice.encode_whole(&reply, "", CALL_TOKENS))
            };
            record.finish();
            return answer;
        }
        ModelPlan::Say { tokens, pause } => (tokens, pause, false),
        ModelPlan::Cut { tokens, pause } => (tokens, pause, true),
    };
    if !stream && !is_cut {
        // The client may go away meanwhile: then this whole future is dropped, and the record with it.
        for _ in &tokens {
            tokio::time::sleep(pause).await;
            record.tokens += 1;
        }
        let answer =
            json_response(200, &voice.encode_whole(&ModelReply::Text, &tokens.concat(), record.tokens));
        record.finish();
        return answer;
    }
    let (feed, pieces) = mpsc::channel(BODY_CAPACITY);
    tokio::spawn(async move {
        let gone = feed.clone();
        let said = async {
            let send = async |text: String| feed.send(Ok(text.into())).await.is_ok();
            let mut is_heard = send(voice.encode_start(&ModelReply::Text)).await;
            for token in &tokens {
                if !pause.is_zero() {
                    tokio::time::sleep(pause).await;
                }
                is_heard = is_heard && send(voice.encode_token(token)).await;
                record.tokens += u64::from(is_heard);
            }
            if is_cut {
                // hyper forgets what it has not yet written when the body breaks.
                tokio::time::sleep(pause).await;
                let error = io::Error::other("the script cuts the stream");
                if feed.send(Err(error)).await.is_ok() {
                    record.finish_cut();
                }
            } else if send(voice.encode_end(&ModelReply::Text, record.tokens)).await {
                record.finish();
            }
        };
        // Whichever comes first; the record that is dropped unfinished says that the client has gone.
        tokio::select! {
            () = said => {}
            () = gone.closed() => {}
        }
    });
    event_stream(TestResponseBody::Streamed(pieces))
}

/// How many pieces may wait for a client that does not read.
const BODY_CAPACITY: usize = 16;

fn event_stream(pieces: TestResponseBody) -> Response<TestResponseBody> {
    let builder =
        Response::builder().header("content-type", "text/event-stream").header("request-id", "scripted");
    builder.body(pieces).expect("the headers are valid")
}

fn json_response(status: u16, body: &Value) -> Response<TestResponseBody> {
    let builder = Response::builder().status(status).header("content-type", "application/json");
    builder.body(TestResponseBody::Whole(Some(body.to_string().into()))).expect("the head is valid")
}

/// An error in a form that holds what each API's clients look for.
fn error_response(status: u16, why: &str) -> Response<TestResponseBody> {
    let kind = match status {
        400 => "invalid_request_error",
        429 => "rate_limit_error",
        529 => "overloaded_error",
        _ => "api_error",
    };
    let message = format!("scripted {status}: {why}");
    let error = json!({ "type": kind, "message": message, "code": status, "status": "SCRIPTED" });
    json_response(status, &json!({ "type": "error", "error": error }))
}
