//! A daemon's edge around a small router, and a client that sends exact bytes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Query;
use axum::routing::{get, post};
use qd_daemon::edge::{self, BoundEdge, ConnectionPeer, EdgeLimits, EdgeOptions, Json, OptionalJson, serve};
use qd_home::DaemonHome;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

/// Limits each wait, so that a hanging test reports where it hangs.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct EdgeHarness {
    _folder: tempfile::TempDir,
    pub(crate) home: DaemonHome,
    pub(crate) token: String,
    pub(crate) lines: Vec<String>,
    pub(crate) fingerprint: Option<edge::CertificateFingerprint>,
    pub(crate) stop: watch::Sender<bool>,
    pub(crate) served: JoinHandle<()>,
    /// Lets one `/slow` request finish.
    pub(crate) go: Arc<Notify>,
    /// Notified when a `/slow` request has begun.
    pub(crate) begun: Arc<Notify>,
}

pub(crate) fn home() -> (tempfile::TempDir, DaemonHome) {
    let folder = tempfile::tempdir().unwrap();
    let home = DaemonHome::resolve(Some(folder.path().join("home")));
    home.prepare().unwrap();
    (folder, home)
}

/// Short enough for a test to wait, long enough for a correct client on a busy machine.
pub(crate) fn short() -> EdgeLimits {
    EdgeLimits { read_timeout: Duration::from_secs(1), ..EdgeLimits::default() }
}

impl EdgeHarness {
    /// Listens on a socket and a port.
    pub(crate) async fn new() -> Self {
        Self::with(|_| {}).await
    }

    pub(crate) async fn with(change: impl FnOnce(&mut EdgeOptions)) -> Self {
        let (folder, home) = home();
        let mut options = EdgeOptions {
            listen: vec![qd_home::ListenAddress::Unix(home.socket()), "127.0.0.1:0".parse().unwrap()],
            ..EdgeOptions::default()
        };
        change(&mut options);
        let bound: BoundEdge = edge::open(&home, options).await.unwrap();
        let token = std::fs::read_to_string(home.token_file()).unwrap();
        let (lines, fingerprint) = (bound.announcements(), bound.fingerprint().copied());
        let (stop, stopping) = watch::channel(false);
        let (go, begun) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let served = tokio::spawn(serve(bound, router(go.clone(), begun.clone()), stopping));
        Self { _folder: folder, home, token, lines, fingerprint, stop, served, go, begun }
    }

    pub(crate) fn port(&self) -> u16 {
        self.lines.iter().rev().find_map(|line| line.rsplit_once(':')?.1.parse().ok()).unwrap()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.home.socket()
    }

    pub(crate) async fn tcp(&self) -> RawHttpConnection<TcpStream> {
        RawHttpConnection(TcpStream::connect(("127.0.0.1", self.port())).await.unwrap())
    }

    pub(crate) async fn unix(&self) -> RawHttpConnection<UnixStream> {
        RawHttpConnection(UnixStream::connect(self.socket()).await.unwrap())
    }

    /// Sends a request over TCP with exactly these header lines.
    pub(crate) async fn over_tcp(&self, target: &str, headers: &[&str]) -> RawHttpResponse {
        let mut wire = self.tcp().await;
        let mut text = format!("GET {target} HTTP/1.1\r\n");
        for line in headers {
            text.push_str(line);
            text.push_str("\r\n");
        }
        wire.send(format!("{text}\r\n")).await;
        wire.answer().await
    }

    pub(crate) fn bearer(&self) -> String {
        format!("Authorization: Bearer {}", self.token)
    }
}

fn router(go: Arc<Notify>, begun: Arc<Notify>) -> Router {
    #[derive(serde::Deserialize)]
    struct LimitQuery {
        limit: u32,
    }
    Router::new()
        .route("/healthz", get(|| async { Json(json!({"status": "ok"})) }))
        .route(
            "/v1/thing",
            get(|| async { Json(json!([])) }).post(|Json(body): Json<Value>| async { Json(body) }),
        )
        .route("/v1/thing/{id}", get(|| async { "one" }).delete(|| async { "gone" }))
        .route("/v1/page", get(|Query(page): Query<LimitQuery>| async move { Json(page.limit) }))
        .route("/optional", post(|OptionalJson(body): OptionalJson<Value>| async { Json(body) }))
        .route("/size", post(|edge::RawBody(body): edge::RawBody| async move { Json(body.len()) }))
        .route("/ignore", post(|| async { "not read" }))
        .route(
            "/peer",
            get(|request: axum::extract::Request| async move {
                format!("{:?}", request.extensions().get::<ConnectionPeer>().unwrap())
            }),
        )
        .route(
            "/panic",
            get(|| async {
                assert!(std::hint::black_box(false), "on purpose");
                "never"
            }),
        )
        .route(
            "/slow",
            get(move || {
                let (go, begun) = (go.clone(), begun.clone());
                async move {
                    begun.notify_one();
                    go.notified().await;
                    "at last"
                }
            }),
        )
}

/// One raw connection.
pub(crate) struct RawHttpConnection<S>(pub(crate) S);

#[derive(Debug)]
pub(crate) struct RawHttpResponse {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl RawHttpResponse {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    /// The code of an error response, which must have the contract's format.
    pub(crate) fn code(&self) -> String {
        let body: Value = serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("not JSON: {self:?}"));
        assert_eq!(self.header("content-type"), Some("application/json"));
        assert!(body["error"]["message"].is_string() && body["error"]["details"].is_object(), "{body}");
        body["error"]["code"].as_str().unwrap().to_owned()
    }

    pub(crate) fn refused(&self) -> (u16, String) {
        (self.status, self.code())
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> RawHttpConnection<S> {
    pub(crate) async fn send(&mut self, text: impl AsRef<[u8]>) {
        patient("send", self.0.write_all(text.as_ref())).await.unwrap();
    }

    /// Sends a chunked body of this length, whether or not the server wants it.
    pub(crate) async fn send_chunked(&mut self, length: usize) {
        let mut left = length;
        while left > 0 {
            let size = left.min(64 << 10);
            self.send(format!("{size:x}\r\n")).await;
            self.send(vec![b'x'; size]).await;
            self.send("\r\n").await;
            left -= size;
        }
        self.send("0\r\n\r\n").await;
    }

    /// Reads one response with a `Content-Length`.
    pub(crate) async fn answer(&mut self) -> RawHttpResponse {
        self.try_answer().await.expect("an answer before the end of the connection")
    }

    pub(crate) async fn try_answer(&mut self) -> Option<RawHttpResponse> {
        patient("answer", async {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(self.0.read_u8().await.ok()?);
            }
            let head = String::from_utf8(head).unwrap();
            let status = head.split(' ').nth(1).unwrap().parse().unwrap();
            let mut answer = RawHttpResponse { status, head, body: String::new() };
            let length = answer.header("content-length").unwrap_or("0").parse().unwrap();
            let mut body = vec![0; length];
            self.0.read_exact(&mut body).await.ok()?;
            answer.body = String::from_utf8(body).unwrap();
            Some(answer)
        })
        .await
    }

    /// Waits until the other side closes, and discards what comes before.
    pub(crate) async fn closed(&mut self) {
        let mut rest = Vec::new();
        // A reset is a close too.
        drop(patient("close", self.0.read_to_end(&mut rest)).await);
    }
}

pub(crate) async fn patient<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(done) => done,
        Err(_) => panic!("waited too long for: {what}"),
    }
}
