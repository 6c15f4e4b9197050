//! One HTTP request at a time, each on a connection of its own, over the socket or TCP. It knows paths and JSON and
//! nothing of the product. A transport error fails the test, unless the caller uses a method that returns it.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{HeaderMap, Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;

use crate::session::TestWorkspace;
use crate::stream::TestEventStream;
use crate::within;

/// Where requests go, and the headers that each of them has.
#[derive(Debug, Clone)]
pub struct TestClient {
    address: TestClientAddress,
    headers: Vec<(String, String)>,
}

#[derive(Debug, Clone)]
enum TestClientAddress {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl TestClient {
    /// A client over a unix socket.
    pub fn unix(path: impl Into<PathBuf>) -> Self {
        Self {
            address: TestClientAddress::Unix(path.into()),
            headers: vec![("host".into(), "localhost".into())],
        }
    }

    /// A client over TCP.
    pub fn tcp(address: SocketAddr) -> Self {
        Self { address: TestClientAddress::Tcp(address), headers: vec![("host".into(), address.to_string())] }
    }

    /// A copy with this header in every request. It replaces a header of the same name.
    #[must_use]
    pub fn with_header(&self, name: &str, value: &str) -> Self {
        let mut client = self.clone();
        client.headers.retain(|(existing, _)| existing != name);
        client.headers.push((name.to_owned(), value.to_owned()));
        client
    }

    /// A copy with a bearer token.
    #[must_use]
    pub fn with_token(&self, token: &str) -> Self {
        self.with_header("authorization", &format!("Bearer {token}"))
    }

    /// A copy with an `Idempotency-Key`.
    #[must_use]
    pub fn with_key(&self, key: &str) -> Self {
        self.with_header("idempotency-key", key)
    }

    pub async fn get(&self, path: &str) -> TestResponse {
        self.request(Method::GET, path, None).await
    }

    pub async fn delete(&self, path: &str) -> TestResponse {
        self.request(Method::DELETE, path, None).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> TestResponse {
        self.request(Method::POST, path, Some(body.to_string().into())).await
    }

    /// A POST without a body.
    pub async fn post_empty(&self, path: &str) -> TestResponse {
        self.request(Method::POST, path, None).await
    }

    pub async fn patch(&self, path: &str, body: &Value) -> TestResponse {
        self.request(Method::PATCH, path, Some(body.to_string().into())).await
    }

    /// Sends a request with a body that need not be JSON.
    pub async fn request(&self, method: Method, path: &str, body: Option<Bytes>) -> TestResponse {
        let description = format!("a response to {method} {path}");
        let response = within(&description, self.send(method, path, body)).await;
        response.unwrap_or_else(|error| panic!("{description}: {error}"))
    }

    /// Sends a request that may meet a dying daemon.
    pub async fn send(&self, method: Method, path: &str, body: Option<Bytes>) -> io::Result<TestResponse> {
        let request_line = format!("{method} {path}");
        let (_connection, response) = self.open(method, path, body).await?;
        let (head, body) = response.into_parts();
        let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
        Ok(TestResponse { request_line, status: head.status.as_u16(), headers: head.headers, body })
    }

    /// The status of a response whose body may never end.
    pub async fn status(&self, method: Method, path: &str, body: Option<Bytes>) -> u16 {
        let description = format!("the status of {method} {path}");
        let opened = within(&description, self.open(method, path, body)).await;
        opened.unwrap_or_else(|error| panic!("{description}: {error}")).1.status().as_u16()
    }

    /// Opens an event stream.
    pub async fn stream(&self, path: &str) -> TestEventStream {
        let opened = within(&format!("the stream {path}"), self.try_stream(path)).await;
        opened.unwrap_or_else(|error| panic!("the stream {path}: {error}"))
    }

    /// Opens an event stream on a daemon that may be dying.
    pub async fn try_stream(&self, path: &str) -> io::Result<TestEventStream> {
        let (connection, response) =
            self.with_header("accept", "text/event-stream").open(Method::GET, path, None).await?;
        if response.status() != 200 {
            let (head, body) = response.into_parts();
            let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
            return Err(io::Error::other(format!("{}: {}", head.status, String::from_utf8_lossy(&body))));
        }
        Ok(TestEventStream::new(connection, response))
    }

    /// Writes bytes and reads to the end, for requests that no client library would send.
    pub async fn exchange_raw(&self, request: &[u8]) -> String {
        within("the end of a raw exchange", async {
            match &self.address {
                TestClientAddress::Unix(path) => exchange(UnixStream::connect(path).await, request).await,
                TestClientAddress::Tcp(address) => exchange(TcpStream::connect(address).await, request).await,
            }
        })
        .await
    }

    /// The workspace of a directory, created if it is new.
    pub async fn workspace(&self, path: &Path) -> TestWorkspace {
        let response = self.post("/v1/workspaces", &serde_json::json!({ "path": path })).await;
        assert!(matches!(response.status, 200 | 201), "{response:?}");
        let id = response.json()["id"].as_str().expect("a workspace has an id").to_owned();
        TestWorkspace { client: self.clone(), id }
    }

    /// The pending asks of all sessions.
    pub async fn pending_asks(&self) -> Vec<Value> {
        self.get("/v1/asks?state=pending").await.list()
    }

    pub async fn answer_ask(&self, ask: &str, answer: &Value) -> TestResponse {
        self.post(&format!("/v1/asks/{ask}/answer"), answer).await
    }

    async fn open(
        &self,
        method: Method,
        path: &str,
        body: Option<Bytes>,
    ) -> io::Result<(TestConnection, Response<Incoming>)> {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        if body.is_some() {
            request = request.header("content-type", "application/json");
        }
        let request =
            request.body(Full::new(body.unwrap_or_default())).expect("the test wrote a valid request");
        let (mut sender, connection) = match &self.address {
            TestClientAddress::Unix(path) => connect(UnixStream::connect(path).await?).await?,
            TestClientAddress::Tcp(address) => connect(TcpStream::connect(address).await?).await?,
        };
        let response = sender.send_request(request).await.map_err(io::Error::other)?;
        Ok((connection, response))
    }
}

/// Drives one connection, and closes it when dropped.
#[derive(Debug)]
pub(crate) struct TestConnection(JoinHandle<()>);

impl Drop for TestConnection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn connect<T>(stream: T) -> io::Result<(SendRequest<Full<Bytes>>, TestConnection)>
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    let drive = async move {
        // Errors here reach the caller through its response.
        let _ended = connection.await;
    };
    Ok((sender, TestConnection(tokio::spawn(drive))))
}

async fn exchange<T: AsyncRead + AsyncWrite>(stream: io::Result<T>, request: &[u8]) -> String {
    let (mut read, mut write) = tokio::io::split(stream.expect("the daemon takes connections"));
    let mut response = Vec::new();
    // The daemon may response and close before it has read everything, so either half may end with an error.
    let _either = tokio::join!(write.write_all(request), read.read_to_end(&mut response));
    String::from_utf8_lossy(&response).into_owned()
}

#[derive(Debug)]
pub struct TestResponse {
    /// Method and path, for messages.
    pub request_line: String,
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl TestResponse {
    /// The body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{self}: no JSON: {error}"))
    }

    /// The body as JSON. Fails unless the status is this one.
    #[track_caller]
    pub fn expect(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self}");
        self.json()
    }

    /// The body as a list. Fails unless the status is 200.
    #[track_caller]
    pub fn list(&self) -> Vec<Value> {
        match self.expect(200) {
            Value::Array(list) => list,
            other => panic!("{}: not a list: {other}", self.request_line),
        }
    }

    /// Checks that this is a well-formed error with this status and code, and returns its details.
    #[track_caller]
    pub fn expect_refusal(&self, status: u16, code: &str) -> Value {
        let body = self.expect(status);
        let error = body["error"].as_object().unwrap_or_else(|| panic!("{self}: no error"));
        assert_eq!(error.get("code"), Some(&Value::from(code)), "{self}");
        let message = error.get("message").and_then(Value::as_str).unwrap_or_default();
        assert!(!message.is_empty(), "{self}: an error has a message");
        assert!(error.get("details").is_some_and(Value::is_object), "{self}: an error has details");
        error["details"].clone()
    }

    /// A header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}

impl std::fmt::Display for TestResponse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let body = String::from_utf8_lossy(&self.body);
        let shown: String = body.chars().take(2000).collect();
        write!(f, "{} gave {} {shown}", self.request_line, self.status)
    }
}
