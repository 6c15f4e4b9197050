//! A remote agent that speaks Agent2Agent 1.0 over JSON-RPC, on loopback, scripted by its prompts. `ask` asks which
//! one, `wait` works until it is cancelled or completed by the test, and any other prompt is echoed with how often
//! this conversation was prompted. It records the calls and tokens it receives.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};
use tokio::task::{AbortHandle, JoinSet};

use crate::response_body::TestResponseBody;
use crate::within;

/// How many pieces may wait for a client that does not read.
const BODY_CAPACITY: usize = 16;

/// The agent. Dropping it ends the server.
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

#[derive(Debug, Default)]
struct FakeRemoteServer {
    state: Mutex<FakeRemoteState>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct FakeRemoteState {
    /// How many times each conversation was prompted.
    contexts: HashMap<String, u32>,
    /// The state of each task, in the protocol's terms, and its conversation.
    tasks: HashMap<String, (String, String)>,
    /// The methods that were called, in order.
    calls: Vec<String>,
    /// The values of the `authorization` header.
    tokens: Vec<String>,
}

impl FakeRemoteAgent {
    /// Listens on a free port.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has a port");
        let port = listener.local_addr().expect("it is bound").port();
        let server = Arc::<FakeRemoteServer>::default();
        let shared = Arc::clone(&server);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let server = Arc::clone(&shared);
                connections.spawn(async move {
                    let service = service_fn(move |request| {
                        let server = Arc::clone(&server);
                        async move { Ok::<_, Infallible>(respond(&server, request).await) }
                    });
                    let http = hyper::server::conn::http1::Builder::new();
                    let _ended = http.serve_connection(TokioIo::new(stream), service).await;
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Self { port, server, task: task.abort_handle() }
    }

    /// The value for `--agent`.
    pub fn agent(&self) -> String {
        format!("a2a:{}", self.url())
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The methods that were called, in order.
    pub fn calls(&self) -> Vec<String> {
        self.server.lock().calls.clone()
    }

    /// The values of the `authorization` header.
    pub fn tokens(&self) -> Vec<String> {
        self.server.lock().tokens.clone()
    }

    /// Waits until this method was called.
    pub async fn wait_for_call(&self, method: &str) {
        let is_called = |state: &FakeRemoteState| state.calls.iter().any(|called| called == method);
        within(&format!("a call of {method}"), self.server.wait_until(is_called)).await;
    }

    /// Completes all tasks that are working.
    pub fn complete_waiting_tasks(&self) {
        let mut state = self.server.lock();
        state.tasks.values_mut().filter(|(task_state, _)| task_state == "WORKING").for_each(
            |(task_state, _)| {
                "COMPLETED".clone_into(task_state);
            },
        );
        drop(state);
        self.server.changed.notify_waiters();
    }
}

impl FakeRemoteServer {
    fn lock(&self) -> MutexGuard<'_, FakeRemoteState> {
        self.state.lock()
    }

    async fn wait_until(&self, wanted: impl Fn(&FakeRemoteState) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Enabled before the check, so that a change in between is not missed.
            changed.as_mut().enable();
            if wanted(&self.lock()) {
                return;
            }
            changed.await;
        }
    }

    fn set_task_state(&self, task: &str, new_state: &str) {
        if let Some((task_state, _)) = self.lock().tasks.get_mut(task) {
            new_state.clone_into(task_state);
        }
        self.changed.notify_waiters();
    }
}

async fn respond(server: &Arc<FakeRemoteServer>, request: Request<Incoming>) -> Response<TestResponseBody> {
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
    let mut state = server.lock();
    state.calls.push(method.to_owned());
    state.tokens.extend(token.map(str::to_owned));
    drop(state);
    server.changed.notify_waiters();
    let task = call["params"]["id"].as_str().unwrap_or_default();
    let reply = |result: Value| json_response(&json!({"jsonrpc": "2.0", "id": call["id"], "result": result}));
    match method {
        "SendStreamingMessage" => handle_prompt(server, &call),
        "CancelTask" => {
            server.set_task_state(task, "CANCELED");
            reply(task_json(server, task))
        }
        "GetTask" => reply(task_json(server, task)),
        _ => json_response(
            &json!({"jsonrpc": "2.0", "id": call["id"], "error": {"code": -32601, "message": "no such method"}}),
        ),
    }
}

/// Takes a prompt or an answer, and streams the response.
fn handle_prompt(server: &Arc<FakeRemoteServer>, call: &Value) -> Response<TestResponseBody> {
    let message = &call["params"]["message"];
    let text = message["parts"][0]["text"].as_str().unwrap_or_default().to_owned();
    let mut state = server.lock();
    let new_id = format!("context-{}", state.contexts.len() + 1);
    let context = message["contextId"].as_str().map_or(new_id, str::to_owned);
    let new_id = format!("task-{}", state.tasks.len() + 1);
    let task = message["taskId"].as_str().map_or(new_id, str::to_owned);
    let is_answer = message["taskId"].is_string();
    let prompts = state.contexts.entry(context.clone()).or_default();
    *prompts += u32::from(!is_answer);
    let reply = if is_answer { format!("you said {text}") } else { format!("{text}, prompt {prompts}") };
    state.tasks.insert(task.clone(), ("WORKING".to_owned(), context.clone()));
    drop(state);
    let (sender, pieces) = mpsc::channel(BODY_CAPACITY);
    let (server, id) = (Arc::clone(server), call["id"].clone());
    tokio::spawn(async move {
        let with_task = |event: Value| {
            let mut event = event;
            event["taskId"] = json!(task);
            event["contextId"] = json!(context);
            event
        };
        let send = async |event: Value| {
            let event = json!({"jsonrpc": "2.0", "id": id, "result": event});
            // Without a listener the event is dropped; the task continues.
            let _sent = sender.send(Ok(Bytes::from(format!("data: {event}\n\n")))).await;
        };
        let artifact_update = |text: &str, append: bool| {
            let artifact = json!({"artifactId": "answer", "parts": [{"text": text}]});
            json!({"artifactUpdate": with_task(json!({"artifact": artifact, "append": append}))})
        };
        let status_update = |state: &str, text: Option<&str>| {
            let message = text.map(|text| {
                json!({"messageId": format!("{task}-{state}"), "role": "ROLE_AGENT", "parts": [{"text": text}]})
            });
            let status = json!({"state": format!("TASK_STATE_{state}"), "message": message});
            json!({"statusUpdate": with_task(json!({ "status": status }))})
        };
        send(json!({"task": task_json(&server, &task)})).await;
        match text.as_str() {
            "ask" if !is_answer => {
                server.set_task_state(&task, "INPUT_REQUIRED");
                send(status_update("INPUT_REQUIRED", Some("Which one?"))).await;
            }
            "wait" => {
                send(artifact_update("begun", false)).await;
                server
                    .wait_until(|state| {
                        state.tasks.get(&task).is_none_or(|(task_state, _)| task_state != "WORKING")
                    })
                    .await;
                let task_state = server
                    .lock()
                    .tasks
                    .get(&task)
                    .map(|(task_state, _)| task_state.clone())
                    .unwrap_or_default();
                if task_state == "COMPLETED" {
                    send(artifact_update(" and ended", true)).await;
                }
                send(status_update(&task_state, None)).await;
            }
            _ => {
                send(status_update("WORKING", Some("let me see"))).await;
                send(artifact_update(&reply, false)).await;
                server.set_task_state(&task, "COMPLETED");
                send(status_update("COMPLETED", None)).await;
            }
        }
    });
    let response = Response::builder().header("content-type", "text/event-stream");
    response.body(TestResponseBody::Streamed(pieces)).expect("the head is valid")
}

fn task_json(server: &FakeRemoteServer, task: &str) -> Value {
    let (task_state, context) = server.lock().tasks.get(task).cloned().unwrap_or_default();
    json!({"id": task, "contextId": context, "status": {"state": format!("TASK_STATE_{task_state}")}})
}

fn json_response(body: &Value) -> Response<TestResponseBody> {
    let response = Response::builder().header("content-type", "application/json");
    response.body(TestResponseBody::Whole(Some(body.to_string().into()))).expect("the head is valid")
}
