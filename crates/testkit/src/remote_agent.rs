//! A remote agent that speaks Agent2Agent 1.0 by JSON-RPC, on loopback, scripted by its prompts: `ask` asks which, `wait`
//! works until it is cancelled or let go, and anything else is said again, with how often this conversation was
//! prompted. It keeps what it was told.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};
use tokio::task::{AbortHandle, JoinSet};

use crate::response_body::TestResponseBody;
use crate::within;

/// Pieces that may wait for a client that does not read.
const BODY_CAPACITY: usize = 16;

/// The agent. It ends when it is dropped.
#[derive(Debug)]
pub struct FakeRemoteAgent {
    port: u16,
    server: Arc<FakeRemoteServer>,
    task: AbortHandle,
}

impl Drop for FakeRemoteAgent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What all connections share.
#[derive(Debug, Default)]
struct FakeRemoteServer {
    state: Mutex<FakeRemoteState>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct FakeRemoteState {
    /// How often each conversation was prompted.
    contexts: HashMap<String, u32>,
    /// How each task stands, in the protocol's words, and whose it is.
    tasks: HashMap<String, (String, String)>,
    /// The methods that were called, in order.
    calls: Vec<String>,
    /// What came in the header that lets people in.
    tokens: Vec<String>,
}

impl FakeRemoteAgent {
    /// Listens on a port of its own.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has a port");
        let port = listener.local_addr().expect("it is bound").port();
        let room = Arc::<FakeRemoteServer>::default();
        let shared = Arc::clone(&room);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let room = Arc::clone(&shared);
                connections.spawn(async move {
                    let service = service_fn(move |request| {
                        let room = Arc::clone(&room);
                        async move { Ok::<_, Infallible>(respond(&room, request).await) }
                    });
                    let http = hyper::server::conn::http1::Builder::new();
                    let _ended = http.serve_connection(TokioIo::new(stream), service).await;
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Self { port, server: room, task: task.abort_handle() }
    }

    /// What `--agent` takes.
    pub fn agent(&self) -> String {
        format!("a2a:{}", self.url())
    }

    /// Where it listens.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The methods that were called, in order.
    pub fn calls(&self) -> Vec<String> {
        self.server.lock().calls.clone()
    }

    /// What came in the header that lets people in.
    pub fn tokens(&self) -> Vec<String> {
        self.server.lock().tokens.clone()
    }

    /// Waits until this was called.
    pub async fn wait_for_call(&self, method: &str) {
        let wanted = |state: &FakeRemoteState| state.calls.iter().any(|called| called == method);
        within(&format!("a call of {method}"), self.server.wait_until(wanted)).await;
    }

    /// Lets all tasks go that wait.
    pub fn complete_waiting_tasks(&self) {
        let mut state = self.server.lock();
        state.tasks.values_mut().filter(|(standing, _)| standing == "WORKING").for_each(|(standing, _)| {
            "COMPLETED".clone_into(standing);
        });
        drop(state);
        self.server.changed.notify_waiters();
    }
}

impl FakeRemoteServer {
    fn lock(&self) -> MutexGuard<'_, FakeRemoteState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn wait_until(&self, wanted: impl Fn(&FakeRemoteState) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Before the look, so that a change in between is not missed.
            changed.as_mut().enable();
            if wanted(&self.lock()) {
                return;
            }
            changed.await;
        }
    }

    fn set_task_state(&self, task: &str, standing: &str) {
        if let Some((now, _)) = self.lock().tasks.get_mut(task) {
            standing.clone_into(now);
        }
        self.changed.notify_waiters();
    }
}

async fn respond(room: &Arc<FakeRemoteServer>, request: Request<Incoming>) -> Response<TestResponseBody> {
    let (head, body) = request.into_parts();
    if head.uri.path() == "/.well-known/agent-card.json" {
        let interface = json!({"url": "/", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"});
        return json_response(&json!({"name": "remote", "description": "A test's.", "version": "1",
            "capabilities": {"streaming": true}, "supportedInterfaces": [interface]}));
    }
    let Ok(body) = body.collect().await else { return json_response(&json!("half a request")) };
    let call: Value = serde_json::from_slice(&body.to_bytes()).unwrap_or_default();
    let method = call["method"].as_str().unwrap_or_default();
    let token = head.headers.get("authorization").and_then(|value| value.to_str().ok());
    let mut state = room.lock();
    state.calls.push(method.to_owned());
    state.tokens.extend(token.map(str::to_owned));
    drop(state);
    room.changed.notify_waiters();
    let task = call["params"]["id"].as_str().unwrap_or_default();
    let reply = |result: Value| json_response(&json!({"jsonrpc": "2.0", "id": call["id"], "result": result}));
    match method {
        "SendStreamingMessage" => handle_prompt(room, &call),
        "CancelTask" => {
            room.set_task_state(task, "CANCELED");
            reply(task_json(room, task))
        }
        "GetTask" => reply(task_json(room, task)),
        _ => json_response(
            &json!({"jsonrpc": "2.0", "id": call["id"], "error": {"code": -32601, "message": "no such method"}}),
        ),
    }
}

/// Takes a prompt or an answer, and says what it says to that.
fn handle_prompt(room: &Arc<FakeRemoteServer>, call: &Value) -> Response<TestResponseBody> {
    let message = &call["params"]["message"];
    let words = message["parts"][0]["text"].as_str().unwrap_or_default().to_owned();
    let mut state = room.lock();
    let fresh = format!("context-{}", state.contexts.len() + 1);
    let context = message["contextId"].as_str().map_or(fresh, str::to_owned);
    let fresh = format!("task-{}", state.tasks.len() + 1);
    let task = message["taskId"].as_str().map_or(fresh, str::to_owned);
    let is_answer = message["taskId"].is_string();
    let prompts = state.contexts.entry(context.clone()).or_default();
    *prompts += u32::from(!is_answer);
    let said = if is_answer { format!("you said {words}") } else { format!("{words}, prompt {prompts}") };
    state.tasks.insert(task.clone(), ("WORKING".to_owned(), context.clone()));
    drop(state);
    let (feed, pieces) = mpsc::channel(BODY_CAPACITY);
    let (room, id) = (Arc::clone(room), call["id"].clone());
    tokio::spawn(async move {
        let of = |what: Value| {
            let mut what = what;
            what["taskId"] = json!(task);
            what["contextId"] = json!(context);
            what
        };
        let send = async |event: Value| {
            let event = json!({"jsonrpc": "2.0", "id": id, "result": event});
            // Whoever does not listen is told nothing; the task goes on.
            let _heard = feed.send(Ok(Bytes::from(format!("data: {event}\n\n")))).await;
        };
        let made = |text: &str, append: bool| {
            let artifact = json!({"artifactId": "answer", "parts": [{"text": text}]});
            json!({"artifactUpdate": of(json!({"artifact": artifact, "append": append}))})
        };
        let stands = |state: &str, words: Option<&str>| {
            let message = words.map(|words| {
                json!({"messageId": format!("{task}-{state}"), "role": "ROLE_AGENT", "parts": [{"text": words}]})
            });
            let status = json!({"state": format!("TASK_STATE_{state}"), "message": message});
            json!({"statusUpdate": of(json!({ "status": status }))})
        };
        send(json!({"task": task_json(&room, &task)})).await;
        match words.as_str() {
            "ask" if !is_answer => {
                room.set_task_state(&task, "INPUT_REQUIRED");
                send(stands("INPUT_REQUIRED", Some("Which one?"))).await;
            }
            "wait" => {
                send(made("begun", false)).await;
                room.wait_until(|state| state.tasks.get(&task).is_none_or(|(now, _)| now != "WORKING")).await;
                let standing = room.lock().tasks.get(&task).map(|(now, _)| now.clone()).unwrap_or_default();
                if standing == "COMPLETED" {
                    send(made(" and ended", true)).await;
                }
                send(stands(&standing, None)).await;
            }
            _ => {
                send(stands("WORKING", Some("let me see"))).await;
                send(made(&said, false)).await;
                room.set_task_state(&task, "COMPLETED");
                send(stands("COMPLETED", None)).await;
            }
        }
    });
    let response = Response::builder().header("content-type", "text/event-stream");
    response.body(TestResponseBody::Streamed(pieces)).expect("the head is valid")
}

fn task_json(room: &FakeRemoteServer, task: &str) -> Value {
    let (standing, context) = room.lock().tasks.get(task).cloned().unwrap_or_default();
    json!({"id": task, "contextId": context, "status": {"state": format!("TASK_STATE_{standing}")}})
}

fn json_response(body: &Value) -> Response<TestResponseBody> {
    let response = Response::builder().header("content-type", "application/json");
    response.body(TestResponseBody::Whole(Some(body.to_string().into()))).expect("the head is valid")
}
