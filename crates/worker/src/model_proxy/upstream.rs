//! The way from the proxy to the model: straight, or through the proxy that the user has set for the agent.

use std::fmt;
use std::io;
use std::time::Duration;

use hyper::header::HeaderValue;
use hyper::{Request, Uri};
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use qd_protocol::model_host::ModelHost;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// The limit on opening a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// A connection to the model, whatever lies between.
pub(super) trait ModelStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ModelStream for T {}

/// A connection on which a plain HTTP request is sent.
pub(super) struct PlainHttpRoute {
    pub(super) stream: TcpStream,
    /// The user's proxy at its other end, if any, which wants whole URLs.
    pub(super) user_proxy: Option<UserProxy>,
}

/// A proxy of the user's.
pub(super) struct UserProxy {
    /// What it wants to hear before it serves us.
    pub(super) authorization: Option<HeaderValue>,
}

/// How the model is reached.
pub(super) struct ModelUpstream {
    user_proxies: Matcher,
}

impl ModelUpstream {
    /// Takes the proxies that the agent would have used. `variable` returns what its environment has.
    pub(super) fn new(variable: impl Fn(&str) -> Option<String>) -> Self {
        let either = |name: &str| {
            let value = variable(name).or_else(|| variable(&name.to_ascii_lowercase()));
            value.unwrap_or_default()
        };
        let user_proxies = Matcher::builder()
            .http(either("HTTP_PROXY"))
            .https(either("HTTPS_PROXY"))
            .no(either("NO_PROXY"))
            .build();
        Self { user_proxies }
    }

    /// Opens a connection for the agent to use as it likes.
    pub(super) async fn open_tunnel(&self, host: &ModelHost) -> io::Result<Box<dyn ModelStream>> {
        let Some(user_proxy) = self.user_proxy("https", host) else {
            return Ok(Box::new(connect(&host.name, host.port).await?));
        };
        let stream = connect_to_proxy(&user_proxy).await?;
        let tunnel = open_tunnel_through(stream, host, user_proxy.basic_auth().cloned());
        Ok(Box::new(within_limit(tunnel).await?))
    }

    /// Opens a connection for one plain HTTP request.
    pub(super) async fn open_plain(&self, host: &ModelHost) -> io::Result<PlainHttpRoute> {
        match self.user_proxy("http", host) {
            None => Ok(PlainHttpRoute { stream: connect(&host.name, host.port).await?, user_proxy: None }),
            Some(proxy) => {
                let user_proxy = Some(UserProxy { authorization: proxy.basic_auth().cloned() });
                Ok(PlainHttpRoute { stream: connect_to_proxy(&proxy).await?, user_proxy })
            }
        }
    }

    fn user_proxy(&self, scheme: &str, host: &ModelHost) -> Option<Intercept> {
        self.user_proxies.intercept(&format!("{scheme}://{host}/").parse::<Uri>().ok()?)
    }
}

impl fmt::Debug for ModelUpstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelUpstream").finish_non_exhaustive()
    }
}

async fn connect_to_proxy(proxy: &Intercept) -> io::Result<TcpStream> {
    let uri = proxy.uri();
    let host = uri.host().unwrap_or_default();
    if uri.scheme_str() != Some("http") {
        let message =
            format!("the user's proxy {host} is not reached over plain HTTP, which is all that we speak");
        return Err(io::Error::other(message));
    }
    connect(host.trim_matches(['[', ']']), uri.port_u16().unwrap_or(80)).await
}

/// Asks the proxy at the other end for a connection to the host.
async fn open_tunnel_through(
    stream: TcpStream,
    host: &ModelHost,
    authorization: Option<HeaderValue>,
) -> io::Result<TokioIo<hyper::upgrade::Upgraded>> {
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    // It ends with the tunnel.
    tokio::spawn(connection.with_upgrades());
    let mut request = Request::connect(host.to_string())
        .header(hyper::header::HOST, host.to_string())
        .body(String::new())
        .map_err(io::Error::other)?;
    if let Some(authorization) = authorization {
        request.headers_mut().insert(hyper::header::PROXY_AUTHORIZATION, authorization);
    }
    let response = sender.send_request(request).await.map_err(io::Error::other)?;
    if !response.status().is_success() {
        return Err(io::Error::other(format!("the user's proxy answered {}", response.status())));
    }
    Ok(TokioIo::new(hyper::upgrade::on(response).await.map_err(io::Error::other)?))
}

async fn connect(name: &str, port: u16) -> io::Result<TcpStream> {
    let stream = within_limit(TcpStream::connect((name, port))).await?;
    // Without it, data only arrives later.
    let _undelayed = stream.set_nodelay(true);
    Ok(stream)
}

async fn within_limit<T>(opening: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let opened = tokio::time::timeout(CONNECT_TIMEOUT, opening).await;
    opened.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}
