//! The tools of `qd mcp` over HTTP, for agents that take no MCP server on stdio. A gateway listens on a loopback port for
//! one session, as long as the session's agent lives, and passes MCP messages on to the daemon. It serves requests with
//! the session's token alone, and reaches nothing of the daemon but the tools.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use qd_link::socket_path::connect_to_socket;
use qd_protocol::limits::{BODY_MAX, TOOL_AWAY_S};
use qd_protocol::worker::McpAccess;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// The only path that a gateway serves, and the daemon's path for the same.
const MCP_PATH: &str = "/mcp";
/// The most connections at once. An agent needs one or two; beyond the limit, new ones wait.
const CONNECTIONS_MAX: usize = 32;
/// How long a client may take to send the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause before a request is repeated because the daemon is away.
const RETRY_DELAY: Duration = Duration::from_millis(500);
/// Random bytes in the key that identifies repeats of a request.
const KEY_BYTES: usize = 16;
/// Headers of a message that concern the daemon.
const PASSED_HEADERS: [HeaderName; 3] =
    [header::ACCEPT, header::CONTENT_TYPE, HeaderName::from_static("mcp-protocol-version")];

/// An open gateway. Dropping it closes the port and ends its connections.
#[derive(Debug)]
pub(crate) struct ToolGateway {
    pub(crate) url: String,
    /// The value of the header `Authorization` that the agent has to send.
    pub(crate) authorization: String,
    _server: AbortOnDropHandle<()>,
}

impl ToolGateway {
    /// Opens a gateway on a free port.
    pub(crate) async fn open(access: &McpAccess) -> std::io::Result<Self> {
        let daemon = DaemonEndpoint::parse(&access.host)?;
        let token = tokio::fs::read_to_string(&access.token_file).await?;
        let authorization = format!("Bearer {}", token.trim());
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let url = format!("http://{}{MCP_PATH}", listener.local_addr()?);
        let route = Arc::new(GatewayRoute { daemon, authorization: authorization.clone() });
        let server = AbortOnDropHandle::new(tokio::spawn(serve(listener, route)));
        Ok(Self { url, authorization, _server: server })
    }
}

/// Where the daemon listens.
#[derive(Debug)]
enum DaemonEndpoint {
    Unix(PathBuf),
    Tcp(String),
}

impl DaemonEndpoint {
    fn parse(host: &str) -> std::io::Result<Self> {
        if let Some(path) = host.strip_prefix("unix:") {
            return Ok(Self::Unix(path.into()));
        }
        match host.strip_prefix("http://") {
            Some(address) => Ok(Self::Tcp(address.trim_end_matches('/').to_owned())),
            None => Err(std::io::Error::other(format!("the tools cannot be passed on to {host}"))),
        }
    }
}

/// Accepts connections until it is dropped.
async fn serve(listener: TcpListener, route: Arc<GatewayRoute>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < CONNECTIONS_MAX => match accepted {
                Ok((stream, _)) => {
                    let route = Arc::clone(&route);
                    connections.spawn(serve_connection(stream, route));
                }
                // Out of descriptors, perhaps: wait for some to be closed.
                Err(_) => tokio::time::sleep(RETRY_DELAY).await,
            },
            Some(_ended) = connections.join_next() => {}
        }
    }
}

async fn serve_connection(stream: TcpStream, route: Arc<GatewayRoute>) {
    let service = service_fn(move |request| {
        let route = Arc::clone(&route);
        async move { Ok::<_, std::convert::Infallible>(route.respond(request).await) }
    });
    let mut server = hyper::server::conn::http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    // A connection that breaks concerns its client alone.
    let _broken = server.serve_connection(TokioIo::new(stream), service).await;
}

/// Passes messages on to the daemon.
#[derive(Debug)]
struct GatewayRoute {
    daemon: DaemonEndpoint,
    authorization: String,
}

/// A response of the daemon, on its way to the agent.
struct ForwardedResponse {
    status: StatusCode,
    content_type: Option<HeaderValue>,
    body: Bytes,
}

impl GatewayRoute {
    async fn respond(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let (head, body) = request.into_parts();
        // A web page sends its origin; no agent is one.
        if head.headers.contains_key(header::ORIGIN) {
            return text_response(StatusCode::FORBIDDEN, "web pages cannot use the tools");
        }
        let given = head.headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes).unwrap_or_default();
        if !is_equal(given, self.authorization.as_bytes()) {
            return text_response(StatusCode::UNAUTHORIZED, "the token of the session is missing or wrong");
        }
        if head.uri.path() != MCP_PATH {
            return text_response(StatusCode::NOT_FOUND, "only /mcp is served here");
        }
        if head.method != Method::POST {
            return text_response(StatusCode::METHOD_NOT_ALLOWED, "messages are sent with POST");
        }
        let Ok(body) = Limited::new(body, BODY_MAX).collect().await else {
            return text_response(StatusCode::PAYLOAD_TOO_LARGE, "the message is too long or was cut off");
        };
        match self.forward(&head.headers, body.to_bytes()).await {
            Ok(ForwardedResponse { status, content_type, body }) => {
                let mut response = Response::new(Full::new(body));
                *response.status_mut() = status;
                if let Some(content_type) = content_type {
                    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
                }
                response
            }
            Err(error) => {
                let message = format!("the daemon cannot be reached: {error}; start it with `qd serve`");
                text_response(StatusCode::BAD_GATEWAY, &message)
            }
        }
    }

    /// Sends a message to the daemon, again while the daemon is being restarted. The daemon recognises repeats by their
    /// key and does nothing twice.
    async fn forward(&self, headers: &HeaderMap, body: Bytes) -> std::io::Result<ForwardedResponse> {
        let mut random = [0; KEY_BYTES];
        getrandom::fill(&mut random).map_err(std::io::Error::other)?;
        let key = hex::encode(random);
        let deadline = Instant::now() + Duration::from_secs(TOOL_AWAY_S);
        loop {
            let sent = self.send_once(headers, &key, body.clone()).await;
            let is_away = match &sent {
                Ok(response) => is_stopping(response),
                Err(_) => true,
            };
            if !is_away || Instant::now() > deadline {
                return sent;
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }

    async fn send_once(
        &self,
        headers: &HeaderMap,
        key: &str,
        body: Bytes,
    ) -> std::io::Result<ForwardedResponse> {
        let mut request = Request::post(MCP_PATH)
            .header(header::HOST, "localhost")
            .header(header::AUTHORIZATION, &self.authorization)
            .header("idempotency-key", key);
        for name in PASSED_HEADERS {
            if let Some(value) = headers.get(&name) {
                request = request.header(name, value);
            }
        }
        let request = request.body(Full::new(body)).map_err(std::io::Error::other)?;
        match &self.daemon {
            DaemonEndpoint::Unix(path) => exchange(connect_to_socket(path).await?, request).await,
            DaemonEndpoint::Tcp(address) => exchange(TcpStream::connect(address).await?, request).await,
        }
    }
}

/// Sends one request over a connection of its own.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> std::io::Result<ForwardedResponse> {
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(std::io::Error::other)?;
    let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
    let (head, body) = sender.send_request(request).await.map_err(std::io::Error::other)?.into_parts();
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    let content_type = head.headers.get(header::CONTENT_TYPE).cloned();
    Ok(ForwardedResponse { status: head.status, content_type, body })
}

/// Whether the daemon refuses the message, or a tool call, only because it is being stopped.
fn is_stopping(response: &ForwardedResponse) -> bool {
    if response.status == StatusCode::SERVICE_UNAVAILABLE {
        return true;
    }
    let message: Value = serde_json::from_slice(&response.body).unwrap_or_default();
    message.pointer("/result/structuredContent/error/code").is_some_and(|code| code == "stopping")
}

/// Compares in constant time, so that the response time reveals nothing of the token.
fn is_equal(given: &[u8], expected: &[u8]) -> bool {
    given.len() == expected.len()
        && given.iter().zip(expected).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

fn text_response(status: StatusCode, text: &str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(format!("{text}\n"))));
    *response.status_mut() = status;
    response
}

#[cfg(test)]
mod tests {
    use qd_protocol::worker::Secret;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    use super::*;

    /// A gateway to a daemon that answers every request with the request's own head.
    async fn gateway(home: &std::path::Path) -> ToolGateway {
        let (socket, token_file) = (home.join("qd.sock"), home.join("token"));
        std::fs::write(&token_file, "ses_1.secret\n").unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = vec![0; 4096];
                let length = stream.read(&mut request).await.unwrap();
                let head = String::from_utf8_lossy(&request[..length]).into_owned();
                let response = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{head}", head.len());
                stream.write_all(response.as_bytes()).await.unwrap();
            }
        });
        let access =
            McpAccess { host: format!("unix:{}", socket.display()), token_file, token: Secret::default() };
        ToolGateway::open(&access).await.unwrap()
    }

    async fn send(gateway: &ToolGateway, line: &str, headers: &str) -> String {
        let address = gateway.url.strip_prefix("http://").unwrap().strip_suffix(MCP_PATH).unwrap();
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!(
            "{line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: 2\r\n\r\n{{}}"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        response
    }

    #[tokio::test]
    async fn only_messages_with_the_sessions_token_reach_the_daemon_and_only_its_tools() {
        let home = tempfile::tempdir().unwrap();
        let gateway = gateway(home.path()).await;
        let token = "authorization: Bearer ses_1.secret\r\n";
        let passed = send(&gateway, "POST /mcp", &format!("{token}accept: application/json\r\n")).await;
        assert!(passed.starts_with("HTTP/1.1 200") && passed.contains("POST /mcp HTTP/1.1"), "{passed}");
        assert!(
            passed.contains("idempotency-key: ") && passed.contains("accept: application/json"),
            "{passed}"
        );
        for (line, headers, status) in [
            ("POST /mcp", String::new(), "401"),
            ("POST /mcp", "authorization: Bearer ses_1.secreT\r\n".to_owned(), "401"),
            ("POST /mcp", format!("{token}origin: http://evil\r\n"), "403"),
            ("GET /mcp", token.to_owned(), "405"),
            ("POST /v1/asks", token.to_owned(), "404"),
        ] {
            let refused = send(&gateway, line, &headers).await;
            assert!(refused.starts_with(&format!("HTTP/1.1 {status}")), "{line}: {refused}");
        }
    }

    #[tokio::test]
    async fn the_port_is_closed_with_the_gateway() {
        let home = tempfile::tempdir().unwrap();
        let gateway = gateway(home.path()).await;
        let address = gateway.url.strip_prefix("http://").unwrap().strip_suffix(MCP_PATH).unwrap().to_owned();
        drop(gateway);
        // The task ends when it is next polled.
        while TcpStream::connect(&address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    }
}
