//! One request of an agent to its proxy: a tunnel (`CONNECT`, for TLS) or a plain HTTP request with a whole URL. Only the
//! hosts of the model are reached.

use std::io;
use std::sync::Arc;

use http_body_util::{Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONNECTION, HOST, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHORIZATION};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use qd_protocol::model_host::ModelHost;
use tokio::sync::OwnedSemaphorePermit;

use super::ModelProxy;
use super::upstream::PlainHttpRoute;

/// What the agent gets: what the model sent, or a text of ours.
type ProxyResponse = Response<Either<Incoming, Full<Bytes>>>;

const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Why a request was not forwarded.
#[derive(Debug, thiserror::Error)]
enum NotForwarded {
    #[error("this is a proxy; send it `CONNECT`, or a request for a URL that begins with `http://`")]
    NotForProxies,
    #[error("this session has no network: it reaches only its model ({reachable}), and not {host}")]
    NotTheModel { host: ModelHost, reachable: String },
    #[error("{host} cannot be reached: {cause}")]
    Unreachable { host: ModelHost, cause: io::Error },
    #[error("{host} did not answer: {cause}")]
    NoAnswer { host: ModelHost, cause: hyper::Error },
}

impl NotForwarded {
    fn status(&self) -> StatusCode {
        match self {
            Self::NotForProxies => StatusCode::BAD_REQUEST,
            Self::NotTheModel { .. } => StatusCode::FORBIDDEN,
            Self::Unreachable { .. } | Self::NoAnswer { .. } => StatusCode::BAD_GATEWAY,
        }
    }
}

impl ModelProxy {
    /// Answers one request. A tunnel keeps the permit for as long as it is open.
    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
        permit: Arc<OwnedSemaphorePermit>,
    ) -> ProxyResponse {
        let forwarded = if request.method() == Method::CONNECT {
            self.open_tunnel(request, permit).await
        } else {
            self.forward_plain(request).await
        };
        forwarded.unwrap_or_else(|error| {
            tracing::info!(%error, "a request of an agent without network was not forwarded");
            let mut response = Response::new(Either::Right(Full::from(format!("qd: {error}\n"))));
            *response.status_mut() = error.status();
            response
        })
    }

    async fn open_tunnel(
        &self,
        request: Request<Incoming>,
        permit: Arc<OwnedSemaphorePermit>,
    ) -> Result<ProxyResponse, NotForwarded> {
        let host = self.check_host(request.uri(), None)?;
        let opened = self.upstream.open_tunnel(&host).await;
        let mut model = opened.map_err(|cause| NotForwarded::Unreachable { host, cause })?;
        tokio::spawn(async move {
            // It ends with either of its ends; how is their business.
            if let Ok(agent) = hyper::upgrade::on(request).await {
                let _ended = tokio::io::copy_bidirectional(&mut TokioIo::new(agent), &mut model).await;
            }
            drop(permit);
        });
        Ok(Response::new(Either::Right(Full::default())))
    }

    async fn forward_plain(&self, mut request: Request<Incoming>) -> Result<ProxyResponse, NotForwarded> {
        if request.uri().scheme_str() != Some("http") {
            return Err(NotForwarded::NotForProxies);
        }
        let host = self.check_host(request.uri(), Some(80))?;
        let opened = self.upstream.open_plain(&host).await;
        let PlainHttpRoute { stream, user_proxy } =
            opened.map_err(|cause| NotForwarded::Unreachable { host: host.clone(), cause })?;
        remove_proxy_headers(request.headers_mut());
        match user_proxy {
            Some(proxy) => {
                let authorization = proxy.authorization.map(|value| (PROXY_AUTHORIZATION, value));
                request.headers_mut().extend(authorization);
            }
            None => make_plain(&mut request),
        }
        let no_answer = |cause| NotForwarded::NoAnswer { host, cause };
        let handshake = hyper::client::conn::http1::Builder::new()
            .preserve_header_case(true)
            .handshake(TokioIo::new(stream))
            .await;
        let (mut sender, connection) = match handshake {
            Ok(connected) => connected,
            Err(cause) => return Err(no_answer(cause)),
        };
        // It ends with the response.
        tokio::spawn(connection);
        let mut response = sender.send_request(request).await.map_err(no_answer)?;
        remove_proxy_headers(response.headers_mut());
        Ok(response.map(Either::Left))
    }

    /// The host of a request, if it is the model's.
    fn check_host(&self, uri: &Uri, default_port: Option<u16>) -> Result<ModelHost, NotForwarded> {
        let port = uri.port_u16().or(default_port);
        let (Some(name), Some(port)) = (uri.host(), port) else { return Err(NotForwarded::NotForProxies) };
        let host = format!("{name}:{port}").parse::<ModelHost>().map_err(|_| NotForwarded::NotForProxies)?;
        if self.hosts.contains(&host) {
            return Ok(host);
        }
        let reachable: Vec<String> = self.hosts.iter().map(ModelHost::to_string).collect();
        Err(NotForwarded::NotTheModel { host, reachable: reachable.join(", ") })
    }
}

/// Removes what is meant for the other end of one connection only.
fn remove_proxy_headers(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|names| names.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named.into_iter().chain([CONNECTION, PROXY_AUTHORIZATION, PROXY_CONNECTION]) {
        headers.remove(name);
    }
}

/// Makes a request with a whole URL into one for the server itself.
fn make_plain(request: &mut Request<Incoming>) {
    let authority = request.uri().authority().and_then(|name| HeaderValue::from_str(name.as_str()).ok());
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    if let Ok(path) = path.parse() {
        *request.uri_mut() = path;
    }
    if let Some(authority) = authority {
        request.headers_mut().insert(HOST, authority);
    }
}
