//! A fake worker that a test drives frame by frame over a WebSocket on loopback.

use std::time::Duration;

use qd_link::socket::{ByteStream, IncomingFrame, Socket, SocketProgress};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};

/// How long a test waits for anything. A safety net, not an expectation.
const LIMIT: Duration = Duration::from_secs(30);

pub(super) async fn within<F: Future>(what: &str, future: F) -> F::Output {
    match tokio::time::timeout(LIMIT, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {LIMIT:?} in vain for {what}"),
    }
}

pub(super) struct FakePeerListener {
    listener: TcpListener,
    pub(super) port: u16,
}

impl FakePeerListener {
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        Self { listener, port }
    }

    /// The name of the agent that dials this listener.
    pub(super) fn agent_name(&self) -> String {
        format!("worker:ws://127.0.0.1:{}", self.port)
    }

    /// The next connection, before its upgrade.
    pub(super) async fn accept_stream(&self) -> TcpStream {
        within("a connection", self.listener.accept()).await.unwrap().0
    }

    pub(super) async fn accept(&self) -> FakePeerWorker {
        FakePeerWorker::upgrade(self.accept_stream().await).await
    }
}

pub(super) struct FakePeerWorker<W = TcpStream> {
    socket: Socket<W>,
    /// The `Authorization` header.
    pub(super) token: Option<String>,
    /// The path of the upgrade request.
    pub(super) path: String,
}

impl<W: ByteStream> FakePeerWorker<W> {
    pub(super) async fn upgrade(stream: W) -> Self {
        let (mut token, mut path) = (None, String::new());
        let (socket, _) = Socket::accept(stream, |request| {
            let header = |name: &str| Some(request.headers().get(name)?.to_str().unwrap().to_owned());
            assert_eq!(header("sec-websocket-protocol"), None, "the plain frames have no name");
            token = header("authorization");
            path = request.uri().to_string();
            Ok(None)
        })
        .await
        .unwrap();
        Self { socket, token, path }
    }

    /// The next frame of the driver; `None` if it has hung up.
    pub(super) async fn try_next_frame(&mut self) -> Option<Value> {
        loop {
            match within("a frame", self.socket.next()).await {
                Ok(IncomingFrame::Text(text)) => return Some(serde_json::from_str(text.as_str()).unwrap()),
                Ok(_) => {}
                Err(_) => return None,
            }
        }
    }

    pub(super) async fn next_frame(&mut self) -> Value {
        self.try_next_frame().await.expect("it is open")
    }

    pub(super) async fn expect_run(&mut self) -> Value {
        let frame = self.next_frame().await;
        assert_eq!(frame["kind"], "run", "{frame}");
        frame
    }

    /// Expects that the driver hangs up without another frame.
    pub(super) async fn expect_hang_up(mut self) {
        assert_eq!(self.try_next_frame().await, None);
    }

    pub(super) async fn send(&mut self, frame: Value) {
        within("room on the wire", self.socket.send(&frame)).await.unwrap();
    }

    /// Sends frames that arrive together.
    pub(super) async fn send_at_once(&mut self, frames: &[Value]) {
        for frame in frames {
            self.socket.feed(frame).await.unwrap();
        }
        self.socket.flush().await.unwrap();
    }

    pub(super) async fn send_event(&mut self, event: Value) {
        self.send(json!({ "kind": "event", "event": event })).await;
    }

    pub(super) async fn send_text(&mut self, text: &str) {
        self.send_event(json!({ "type": "token", "content": text })).await;
    }

    pub(super) async fn request_approval(&mut self, id: &str, tool: &str, resource: &str) {
        let body = json!({ "tool_name": tool, "permission_type": "tool", "resource": resource, "question": "May I?" });
        self.send(json!({ "kind": "approval_request", "id": id, "body": body })).await;
    }

    /// Ends a run successfully.
    pub(super) async fn complete_run(&mut self, result: &str) {
        self.send_event(json!({ "type": "complete" })).await;
        self.send(json!({ "kind": "terminal", "status": "completed", "result": result })).await;
    }

    pub(super) async fn send_terminal(&mut self, status: &str) {
        self.send(json!({ "kind": "terminal", "status": status })).await;
    }

    /// Closes the connection, and waits until the driver has noticed.
    pub(super) async fn close(mut self) {
        self.socket.close().await;
        self.expect_hang_up().await;
    }

    /// Sends text without end until a frame arrives.
    pub(super) async fn send_until_frame(&mut self) -> Value {
        let token = json!({ "kind": "event", "event": { "type": "token", "content": "x".repeat(10_000) } });
        let mut writing = false;
        loop {
            if !writing {
                self.socket.queue_text(token.to_string()).unwrap();
                writing = true;
            }
            match within("a frame", self.socket.progress(true, writing)).await.unwrap() {
                SocketProgress::Written => writing = false,
                SocketProgress::Read(IncomingFrame::Text(text)) => {
                    return serde_json::from_str(text.as_str()).unwrap();
                }
                SocketProgress::Read(_) => {}
            }
        }
    }
}
