//! A fake remote agent behind a real server on loopback. Its pages are set once, and each call is answered by the test.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;

use super::with_timeout;

/// The capacity for waiting calls and body pieces: more than any test needs.
const WINDOW: usize = 64;

/// A page: its status, its content type or redirect target, and its body.
type A2aTestPage = (u16, String, String);

/// The fake server. It stops when it is dropped.
pub(super) struct FakeA2aServer {
    pub(super) port: u16,
    pages: Arc<Mutex<HashMap<String, A2aTestPage>>>,
    calls: mpsc::Receiver<FakeA2aCall>,
    task: AbortHandle,
}

impl Drop for FakeA2aServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A call that waits for its response.
pub(super) struct FakeA2aCall {
    /// The JSON-RPC method of the body, or else the HTTP method and path.
    pub(super) method: String,
    pub(super) params: Value,
    pub(super) headers: HeaderMap,
    id: Value,
    answer: oneshot::Sender<Response<FakeA2aBody>>,
}

impl FakeA2aServer {
    pub(super) async fn start() -> Self {
        Self::with(None).await
    }

    pub(super) async fn with(tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let pages = Arc::<Mutex<HashMap<String, A2aTestPage>>>::default();
        let (sender, calls) = mpsc::channel(WINDOW);
        let shared_pages = Arc::clone(&pages);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (pages, sender, tls) = (Arc::clone(&shared_pages), sender.clone(), tls.clone());
                connections.spawn(async move {
                    match tls {
                        Some(tls) => {
                            // A client that does not trust us closes the connection.
                            if let Ok(stream) = tls.accept(stream).await {
                                serve_connection(stream, pages, sender).await;
                            }
                        }
                        None => serve_connection(stream, pages, sender).await,
                    }
                });
            }
        });
        Self { port, pages, calls, task: task.abort_handle() }
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    pub(super) fn set_page(&self, path: &str, status: u16, header: &str, body: impl ToString) {
        self.pages.lock().insert(path.to_owned(), (status, header.to_owned(), body.to_string()));
    }

    /// Serves a card at the usual path.
    pub(super) fn set_card(&self, card: &Value) {
        self.set_page("/.well-known/agent-card.json", 200, "application/json", card);
    }

    pub(super) async fn next_call(&mut self) -> FakeA2aCall {
        with_timeout("a call", self.calls.recv()).await.expect("it runs")
    }

    /// Expects a call of this method.
    pub(super) async fn expect(&mut self, method: &str) -> FakeA2aCall {
        let call = self.next_call().await;
        assert_eq!(call.method, method, "{}", call.params);
        call
    }

    /// Answers the next call with a stream that ends after this event.
    pub(super) async fn stream_one_event(&mut self, event: Value) {
        self.next_call().await.start_stream().send_event(event).await;
    }

    /// Whether no call is waiting.
    pub(super) fn has_no_calls(&mut self) -> bool {
        self.calls.try_recv().is_err()
    }
}

impl FakeA2aCall {
    pub(super) fn send_result(self, result: Value) {
        let body = json!({"jsonrpc": "2.0", "id": self.id, "result": result});
        self.send_http(200, &body);
    }

    pub(super) fn send_error(self, code: i64, message: &str) {
        let body = json!({"jsonrpc": "2.0", "id": self.id, "error": {"code": code, "message": message}});
        self.send_http(200, &body);
    }

    pub(super) fn send_http(self, status: u16, body: &Value) {
        let pieces = FakeA2aBody::Whole(Some(Bytes::from(body.to_string())));
        let response = Response::builder().status(status).header("content-type", "application/json");
        let _sent = self.answer.send(response.body(pieces).unwrap());
    }

    /// Answers with a stream, which stays open until it is dropped.
    pub(super) fn start_stream(self) -> FakeA2aStream {
        let (pieces, receiver) = mpsc::channel(WINDOW);
        let response = Response::builder().header("content-type", "text/event-stream; charset=utf-8");
        let _sent = self.answer.send(response.body(FakeA2aBody::Stream(receiver)).unwrap());
        FakeA2aStream { pieces, id: self.id }
    }
}

pub(super) struct FakeA2aStream {
    pieces: mpsc::Sender<io::Result<Bytes>>,
    id: Value,
}

impl FakeA2aStream {
    pub(super) async fn send_event(&self, result: Value) {
        let event = json!({"jsonrpc": "2.0", "id": self.id, "result": result});
        self.send_raw(format!("data: {event}\n\n").as_bytes()).await;
    }

    pub(super) async fn send_raw(&self, bytes: &[u8]) {
        self.pieces.send(Ok(Bytes::copy_from_slice(bytes))).await.unwrap();
    }

    /// Breaks the connection.
    pub(super) async fn break_off(self) {
        self.pieces.send(Err(io::ErrorKind::ConnectionReset.into())).await.unwrap();
    }

    /// Waits until the client has closed the connection.
    pub(super) async fn wait_closed(&self) {
        with_timeout("the client to close the connection", self.pieces.closed()).await;
    }
}

pub(super) enum FakeA2aBody {
    Whole(Option<Bytes>),
    Stream(mpsc::Receiver<io::Result<Bytes>>),
}

impl Body for FakeA2aBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self.get_mut() {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Stream(pieces) => {
                pieces.poll_recv(cx).map(|piece| piece.map(|piece| piece.map(Frame::data)))
            }
        }
    }
}

async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    pages: Arc<Mutex<HashMap<String, A2aTestPage>>>,
    calls: mpsc::Sender<FakeA2aCall>,
) {
    let service = service_fn(move |request| {
        let (pages, calls) = (Arc::clone(&pages), calls.clone());
        async move { Ok::<_, Infallible>(answer_request(request, &pages, &calls).await) }
    });
    let _ended =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

async fn answer_request(
    request: Request<Incoming>,
    pages: &Mutex<HashMap<String, A2aTestPage>>,
    calls: &mpsc::Sender<FakeA2aCall>,
) -> Response<FakeA2aBody> {
    let (head, body) = request.into_parts();
    let path = head.uri.path_and_query().map_or_else(String::new, ToString::to_string);
    let page = pages.lock().get(&path).cloned();
    if let Some((status, header, body)) = page {
        let name = if (300..400).contains(&status) { "location" } else { "content-type" };
        let has_credential = status == 401 && head.headers.contains_key("authorization");
        let response =
            Response::builder().status(if has_credential { 200 } else { status }).header(name, header);
        return response.body(FakeA2aBody::Whole(Some(body.into()))).unwrap();
    }
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let mut body: Value = serde_json::from_slice(&body).unwrap_or_default();
    if head.method == Method::GET && path.contains(".well-known") {
        return Response::builder().status(404).body(FakeA2aBody::Whole(None)).unwrap();
    }
    let (method, params) = match body["method"].as_str() {
        Some(method) => (method.to_owned(), body["params"].take()),
        None => (format!("{} {path}", head.method), body.clone()),
    };
    let (answer, response) = oneshot::channel();
    let call = FakeA2aCall { method, params, headers: head.headers, id: body["id"].take(), answer };
    let server_error = || Response::builder().status(500).body(FakeA2aBody::Whole(None)).unwrap();
    if calls.send(call).await.is_err() {
        return server_error();
    }
    response.await.unwrap_or_else(|_| server_error())
}
