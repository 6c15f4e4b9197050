//! The model's HTTP server: routing paths to APIs, streaming answers, and refusing requests. A client that closes its
//! connection is noticed even while nothing is being written: hyper watches the connection and drops the body, and the
//! task that feeds the body waits for that alongside its pauses.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::HeaderValue;
use hyper::http::request::Parts;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::quota::{QuotaRefusal, quota_refusal};
use super::request::ModelRequest;
use super::request_log::{ModelApi, ModelLog, ModelLogEntry, ModelRequestOutcome, ModelRequestRecord};
use super::script::{ModelPlan, ModelScript};
use super::tools::ModelToolCall;
use super::{CALL_TOKENS, INPUT_TOKENS, chat, gemini, messages, responses};
use crate::response_body::TestResponseBody;

#[derive(Debug)]
pub(super) enum ModelReply {
    Text,
    /// Text that ends at the limit of tokens.
    TruncatedText,
    Call(ModelToolCall),
}

/// Encodes an answer for one API.
pub(super) trait ModelReplyEncoder: Send {
    /// What comes before the first token. For a call, everything except its end.
    fn encode_start(&mut self, reply: &ModelReply) -> String;
    /// One token of text.
    fn encode_token(&mut self, token: &str) -> String;
    /// What comes after the last token.
    fn encode_end(&mut self, reply: &ModelReply, tokens: u64) -> String;
    /// A whole answer that is not streamed.
    fn encode_whole(&mut self, reply: &ModelReply, text: &str, tokens: u64) -> Value;
}

pub(super) fn sse(event: Option<&str>, data: &Value) -> String {
    let event = event.map(|event| format!("event: {event}\n")).unwrap_or_default();
    format!("{event}data: {data}\n\n")
}

/// Serves connections until the future is dropped.
pub(super) async fn serve(listener: TcpListener, log: ModelLog) {
    let own_address = listener.local_addr().expect("it is bound").to_string();
    let server = Arc::new(FakeModelServer { log, own_address, script: Mutex::default() });
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(connection(stream, Arc::clone(&server)));
        while connections.try_join_next().is_some() {}
    }
}

/// What all connections share.
#[derive(Debug)]
struct FakeModelServer {
    log: ModelLog,
    /// Our own address. Requests for another address are meant for a proxy.
    own_address: String,
    script: Mutex<ModelScript>,
}

async fn connection(stream: TcpStream, server: Arc<FakeModelServer>) {
    let _undelayed = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let server = Arc::clone(&server);
        async move { Ok::<_, Infallible>(server.respond(request).await) }
    });
    // A client that goes away is recorded in its request's log entry, and a cut is our own doing.
    let _ended =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

impl FakeModelServer {
    async fn respond(&self, request: Request<Incoming>) -> Response<TestResponseBody> {
        let (head, body) = request.into_parts();
        let proxied_host =
            head.uri.authority().map(ToString::to_string).filter(|host| *host != self.own_address);
        if let Some(host) = proxied_host {
            self.log.add_proxied_host(host);
            let mut refusal = error_response(403, "this model is not a proxy");
            // A client that asked for a tunnel might take what follows for its other end.
            refusal.headers_mut().insert(hyper::header::CONNECTION, HeaderValue::from_static("close"));
            return refusal;
        }
        let path = head.uri.path_and_query().map_or_else(String::new, ToString::to_string);
        let other_record =
            |is_side_call| request_record(ModelApi::Other, &path, is_side_call, &ModelRequest::default());
        if head.method == Method::GET && head.uri.path().ends_with("/models") {
            self.log.add(other_record(true)).finish();
            return json_response(200, &models());
        }
        if head.method == Method::HEAD {
            self.log.add(other_record(true)).finish();
            return Response::new(TestResponseBody::Whole(None));
        }
        let Ok(body) = body.collect().await else { return error_response(400, "incomplete request") };
        if head.headers.contains_key("content-encoding") {
            self.log.add(other_record(false)).finish_refused(415);
            return error_response(415, "compressed requests are not supported");
        }
        let body: Value = serde_json::from_slice(&body.to_bytes()).unwrap_or_default();
        let Some((api, model_request)) = parse_request(head.uri.path(), &body) else {
            self.log.add(other_record(false)).finish_refused(404);
            return error_response(404, "no such path");
        };
        if let Some(count) = token_count(head.uri.path()) {
            self.log.add(request_record(api, &path, true, &model_request)).finish();
            return json_response(200, &count);
        }
        if !has_key(&head) {
            self.log.add(request_record(api, &path, true, &model_request)).finish_refused(401);
            return error_response(401, "you did not provide an API key");
        }
        let plan = self.script.lock().plan(&model_request);
        let entry = self.log.add(request_record(api, &path, model_request.is_side_call(), &model_request));
        let id = format!("{:08x}", self.log.read(|contents| contents.requests.len()));
        run_plan(plan, api, entry, encoder_for(api, id, model_request.model), model_request.stream).await
    }
}

/// Whether the request has a key, in any of the headers in which the APIs expect one.
fn has_key(head: &Parts) -> bool {
    ["authorization", "x-api-key", "x-goog-api-key"].iter().any(|name| {
        let value = head.headers.get(*name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        !value.trim_start_matches("Bearer").trim().is_empty()
    })
}

/// Parses a request. Only the end of the path decides, because base addresses differ between agents.
fn parse_request(path: &str, body: &Value) -> Option<(ModelApi, ModelRequest)> {
    let (api, mut request) = if path.ends_with("/messages") || path.ends_with("/messages/count_tokens") {
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
        request.model = model.to_owned();
    }
    let mut told = body.clone();
    told.as_object_mut().map(|fields| fields.remove("tools"));
    request.told = told.to_string();
    Some((api, request))
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

/// One list for all clients; each reads the fields that it knows.
fn models() -> Value {
    let model = json!({
        "id": "scripted", "object": "model", "type": "model", "display_name": "Scripted", "created": 1,
        "created_at": "2025-01-01T00:00:00Z", "owned_by": "nobody",
    });
    json!({ "object": "list", "data": [model], "models": [], "has_more": false })
}

fn request_record(
    api: ModelApi,
    path: &str,
    is_side_call: bool,
    request: &ModelRequest,
) -> ModelRequestRecord {
    ModelRequestRecord {
        api,
        path: path.to_owned(),
        model: request.model.clone(),
        texts: request.user_texts(),
        results: request.latest_results().len(),
        tools: request.tools.iter().map(|tool| tool.name.clone()).collect(),
        told: request.told.clone(),
        is_side_call,
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
    api: ModelApi,
    mut entry: ModelLogEntry,
    mut encoder: Box<dyn ModelReplyEncoder>,
    stream: bool,
) -> Response<TestResponseBody> {
    let (mut reply, mut is_cut, mut stalls) = (ModelReply::Text, false, false);
    let (tokens, pause) = match plan {
        ModelPlan::Refuse(status) => {
            entry.finish_refused(status);
            return error_response(status, "the script wants it");
        }
        ModelPlan::RefuseForQuota(seconds) => {
            entry.finish_refused(429);
            return quota_response(quota_refusal(api, seconds));
        }
        ModelPlan::Call(call) => {
            entry.tokens = CALL_TOKENS;
            let reply = ModelReply::Call(call);
            let response = if stream {
                let text = encoder.encode_start(&reply) + &encoder.encode_end(&reply, CALL_TOKENS);
                event_stream(TestResponseBody::Whole(Some(text.into())))
            } else {
                json_response(200, &encoder.encode_whole(&reply, "", CALL_TOKENS))
            };
            entry.finish();
            return response;
        }
        ModelPlan::SendBody(body) => {
            entry.finish();
            return event_stream(TestResponseBody::Whole(Some(body.into())));
        }
        ModelPlan::Hang => {
            // If the client goes away, this future is dropped, and the log entry with it.
            return std::future::pending().await;
        }
        ModelPlan::Say { tokens, pause } => (tokens, pause),
        ModelPlan::Stall => {
            stalls = true;
            (vec!["tok0 ".to_owned()], Duration::ZERO)
        }
        ModelPlan::Truncate(tokens) => {
            reply = ModelReply::TruncatedText;
            (tokens, Duration::ZERO)
        }
        ModelPlan::Cut { tokens, pause } => {
            is_cut = true;
            (tokens, pause)
        }
    };
    if !stream && !is_cut && !stalls {
        // If the client goes away meanwhile, this future is dropped, and the log entry with it.
        for _ in &tokens {
            tokio::time::sleep(pause).await;
            entry.tokens += 1;
        }
        let response = json_response(200, &encoder.encode_whole(&reply, &tokens.concat(), entry.tokens));
        entry.finish();
        return response;
    }
    let (sender, pieces) = mpsc::channel(BODY_CAPACITY);
    tokio::spawn(async move {
        let client = sender.clone();
        let stream_answer = async {
            let send = async |text: String| sender.send(Ok(text.into())).await.is_ok();
            let mut is_connected = send(encoder.encode_start(&reply)).await;
            for token in &tokens {
                if !pause.is_zero() {
                    tokio::time::sleep(pause).await;
                }
                is_connected = is_connected && send(encoder.encode_token(token)).await;
                entry.tokens += u64::from(is_connected);
            }
            if stalls {
                std::future::pending::<()>().await;
            }
            if is_cut {
                // hyper drops what it has not yet written when the body fails, so give it time.
                tokio::time::sleep(pause).await;
                let error = io::Error::other("the script cut the stream");
                if sender.send(Err(error)).await.is_ok() {
                    entry.finish_cut();
                }
            } else if send(encoder.encode_end(&reply, entry.tokens)).await {
                entry.finish();
            }
        };
        // Whichever comes first. An entry that is dropped without an outcome records that the client is gone.
        tokio::select! {
            () = stream_answer => {}
            () = client.closed() => {}
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

fn quota_response(refusal: QuotaRefusal) -> Response<TestResponseBody> {
    let mut response = json_response(429, &refusal.body);
    for (name, value) in refusal.headers {
        response.headers_mut().insert(name, value.parse().expect("the header is valid"));
    }
    response
}

/// An error body with the fields that the clients of each API look for.
fn error_response(status: u16, reason: &str) -> Response<TestResponseBody> {
    let kind = match status {
        400 => "invalid_request_error",
        401 => "authentication_error",
        404 => "not_found_error",
        429 => "rate_limit_error",
        529 => "overloaded_error",
        _ => "api_error",
    };
    let message = format!("scripted {status}: {reason}");
    let error = json!({ "type": kind, "message": message, "code": status, "status": "SCRIPTED" });
    json_response(status, &json!({ "type": "error", "error": error }))
}
