//! Which requests are admitted. This is the outermost layer, before any route, and it denies by default: a request
//! passes only if every check does. It reads the head of a request and changes nothing. No CORS header is ever sent.

use std::collections::HashSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use qd_home::{SecretToken, UrlHost};
use qd_protocol::{ApiError, ErrorCode, SessionId, TokenId};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::listen::{BoundListener, is_wildcard};
use crate::client_tokens::{ClientBearer, ClientTokenStore};
use crate::workers::{SessionTokens, WorkerTokenStore};

/// The only path without a token, so that clients without one can check that the daemon is alive.
pub(super) const UNAUTHENTICATED_PATH: &str = "/healthz";
/// The only paths that a worker token opens.
const WORKER_PATHS: [&str; 2] = ["/v1/workers/join", "/v1/workers/link"];

/// The only paths that a session token opens, with everything below them.
const TOOL_PATHS: [&str; 2] = ["/mcp", "/v1/tools"];

/// Whether a session token opens this path.
fn is_tool_path(path: &str) -> bool {
    TOOL_PATHS
        .iter()
        .any(|root| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
}

/// The identity that a token proves.
#[derive(Debug, Clone)]
pub(super) enum BearerIdentity {
    /// A process on another machine, by its worker token.
    Worker(TokenId),
    /// The agent of a session, by its session token.
    Session(SessionId),
    /// A client, by its token or the one in the file of the home.
    Client(ClientBearer),
}

/// The session whose token a request carries; a request extension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BearerSession(pub(crate) SessionId);

/// The other end of a connection; a request extension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConnectionPeer {
    /// A process on this machine, as the kernel knew it when it connected.
    Unix {
        /// The process, by pid and start time, unless it exited before we could look.
        process: Option<(u32, u64)>,
        uid: u32,
    },
    /// A process on this machine that has connected to the socket of a session.
    Session { session: SessionId, uid: u32 },
    /// A client over TCP.
    Tcp {
        /// The client's address.
        addr: SocketAddr,
        /// The address of ours that it connected to.
        local: SocketAddr,
        tls: bool,
    },
}

/// An `--allow-host` that is not a host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a host name or address; write it as in a URL, without a scheme or path")]
pub struct BadHost(String);

/// Parses the hosts of `--allow-host`. A port is ignored, because ports are not compared.
pub(super) fn allowed_hosts(texts: &[String]) -> Result<Vec<UrlHost>, BadHost> {
    let host = |text: &String| {
        UrlHost::parse_host_port(text).map(|(host, _)| host).ok_or_else(|| BadHost(text.clone()))
    };
    texts.iter().map(host).collect()
}

/// The checks, and the values they compare with.
pub(super) struct RequestGuard {
    /// The digest of the token. Comparing digests takes the same time for any length.
    token: [u8; 32],
    /// The tokens of processes on other machines, which may change at any time.
    worker_tokens: Option<Arc<WorkerTokenStore>>,
    /// The tokens of clients, which may change at any time.
    client_tokens: Option<Arc<ClientTokenStore>>,
    /// The tokens of sessions, which end with their sessions.
    session_tokens: Option<SessionTokens>,
    hosts: HashSet<UrlHost>,
    /// Whether we listen on every address of the machine.
    wildcard: bool,
    owner_uid: u32,
}

impl fmt::Debug for RequestGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("hosts", &self.hosts)
            .field("owner", &self.owner_uid)
            .finish_non_exhaustive()
    }
}

impl RequestGuard {
    pub(super) fn new(token: &SecretToken, listeners: &[BoundListener], allowed: Vec<UrlHost>) -> Self {
        let listened = listeners.iter().filter_map(|listener| match listener {
            BoundListener::Tcp(listener) => Some((&listener.host, listener.local.ip().to_canonical())),
            BoundListener::Unix(_) => None,
        });
        Self::from_listened(token, listened, allowed)
    }

    fn from_listened<'a>(
        token: &SecretToken,
        listened: impl Iterator<Item = (&'a UrlHost, IpAddr)>,
        allowed: Vec<UrlHost>,
    ) -> Self {
        let mut hosts = HashSet::from([UrlHost::Name("localhost".to_owned())]);
        let mut wildcard = false;
        for (host, ip) in listened {
            if is_wildcard(ip) {
                // A wildcard stands for all addresses; no client can be at it.
                wildcard = true;
            } else {
                hosts.extend([host.clone(), UrlHost::Ip(ip)]);
            }
            if is_wildcard(ip) || ip.is_loopback() {
                hosts.extend([
                    UrlHost::Ip(Ipv4Addr::LOCALHOST.into()),
                    UrlHost::Ip(Ipv6Addr::LOCALHOST.into()),
                ]);
            }
        }
        hosts.extend(allowed);
        let owner_uid = rustix::process::geteuid().as_raw();
        Self {
            token: digest(token.expose()),
            worker_tokens: None,
            client_tokens: None,
            session_tokens: None,
            hosts,
            wildcard,
            owner_uid,
        }
    }

    /// Also admits worker tokens to the routes for workers.
    pub(super) fn with_worker_tokens(self, tokens: Arc<WorkerTokenStore>) -> Self {
        Self { worker_tokens: Some(tokens), ..self }
    }

    /// Also admits the tokens of clients.
    pub(super) fn with_client_tokens(self, tokens: Arc<ClientTokenStore>) -> Self {
        Self { client_tokens: Some(tokens), ..self }
    }

    /// Also admits session tokens to the tools.
    pub(super) fn with_session_tokens(self, tokens: SessionTokens) -> Self {
        Self { session_tokens: Some(tokens), ..self }
    }

    /// Admits a request, with the identity that its token proves, or returns the reason for the refusal. Host and
    /// Origin are checked before the token, so that a web page cannot learn whether a token is right.
    pub(super) fn admit(
        &self,
        peer: &ConnectionPeer,
        head: &Parts,
    ) -> Result<Option<BearerIdentity>, ApiError> {
        match peer {
            ConnectionPeer::Unix { uid, .. } | ConnectionPeer::Session { uid, .. } => {
                if *uid != self.owner_uid {
                    return Err(ApiError::new(
                        ErrorCode::PeerNotAllowed,
                        "this socket serves only the user who started the daemon",
                    ));
                }
                if is_from_browser(&head.headers) {
                    return Err(origin_not_allowed("web pages may not use this socket"));
                }
                // A socket needs no token, but the token of a session or a client still limits its bearer.
                match bearer_token(head) {
                    Some(token) if SessionTokens::is_session_token(token) => {
                        self.check_session_token(head, token).map(Some)
                    }
                    Some(token) if ClientTokenStore::is_client_token(token) => {
                        self.check_client_token(&digest(token)).map(Some)
                    }
                    _ => Ok(None),
                }
            }
            ConnectionPeer::Tcp { local, tls, .. } => {
                let host = self.check_host(head, local.ip().to_canonical())?;
                check_origin(&head.headers, &host, *tls)?;
                if head.headers.contains_key(header::UPGRADE) && is_from_browser(&head.headers) {
                    return Err(origin_not_allowed("only workers may upgrade a connection, not web pages"));
                }
                if head.uri.path() == UNAUTHENTICATED_PATH { Ok(None) } else { self.check_token(head) }
            }
        }
    }

    /// The single host that the request names, if it is one of ours. Any port is accepted: a tunnel changes it, and a
    /// web page that reaches us by DNS rebinding cannot choose the name.
    fn check_host(&self, head: &Parts, local: IpAddr) -> Result<(UrlHost, Option<u16>), ApiError> {
        let refused = |message: String| ApiError::new(ErrorCode::HostNotAllowed, message);
        let text = single_header(&head.headers, header::HOST)
            .ok_or_else(|| refused("a request needs exactly one Host header".to_owned()))?;
        let host_header = UrlHost::parse_host_port(text)
            .ok_or_else(|| refused("the Host header is not a host".to_owned()))?;
        let is_allowed = |host: &UrlHost| match host {
            UrlHost::Ip(ip) if self.wildcard && !is_wildcard(*ip) && ip.to_canonical() == local => true,
            host => self.hosts.contains(host),
        };
        // The request target may name a host too (`GET http://host/path`); then that one is used.
        let target = match head.uri.authority() {
            None => host_header.clone(),
            Some(authority) => UrlHost::parse_host_port(authority.as_str())
                .ok_or_else(|| refused("the request target does not name a valid host".to_owned()))?,
        };
        if !is_allowed(&host_header.0) || target != host_header {
            let refused_host = if target == host_header { host_header.0 } else { target.0 };
            return Err(refused(format!(
                "{refused_host} is not a host of this daemon; to allow it, use --allow-host {refused_host}"
            )));
        }
        Ok(host_header)
    }

    /// Checks a session token, which opens only the tools.
    fn check_session_token(&self, head: &Parts, token: &str) -> Result<BearerIdentity, ApiError> {
        match self.session_tokens.as_ref().and_then(|sessions| sessions.session_of_token(token)) {
            Some(session) if is_tool_path(head.uri.path()) => Ok(BearerIdentity::Session(session)),
            Some(session) => {
                let message =
                    format!("this is the token of session {session}, which only allows using its tools");
                Err(ApiError::new(ErrorCode::AgentNotAllowed, message)
                    .with_detail("session_id", session.as_str()))
            }
            None => Err(ApiError::new(
                ErrorCode::Unauthorized,
                "this is not the token of an open session; a session's token ends when it is closed",
            )),
        }
    }

    /// Checks the token of a client. What its role allows is decided by the routes.
    fn check_client_token(&self, sha256: &[u8; 32]) -> Result<BearerIdentity, ApiError> {
        match self.client_tokens.as_ref().and_then(|tokens| tokens.bearer_of_hash(sha256)) {
            Some(bearer) if bearer.is_expired() => Err(bearer.ended_error()),
            Some(bearer) => Ok(BearerIdentity::Client(bearer)),
            None => Err(ApiError::new(
                ErrorCode::Unauthorized,
                "the token is wrong, or was revoked; `qd tokens` lists the tokens",
            )),
        }
    }

    fn check_token(&self, head: &Parts) -> Result<Option<BearerIdentity>, ApiError> {
        let given = bearer_token(head);
        let worker =
            |given: &[u8; 32]| self.worker_tokens.as_ref().and_then(|tokens| tokens.token_of_hash(given));
        match given.map(|given| (given, digest(given))) {
            Some((_, given)) if bool::from(given.ct_eq(&self.token)) => {
                Ok(Some(BearerIdentity::Client(ClientBearer::of_file())))
            }
            Some((token, given)) if ClientTokenStore::is_client_token(token) => {
                self.check_client_token(&given).map(Some)
            }
            Some((token, _)) if SessionTokens::is_session_token(token) => {
                self.check_session_token(head, token).map(Some)
            }
            Some((_, given)) => match worker(&given) {
                Some(token) if WORKER_PATHS.contains(&head.uri.path()) => {
                    Ok(Some(BearerIdentity::Worker(token)))
                }
                Some(_) => Err(ApiError::new(
                    ErrorCode::WorkerNotAllowed,
                    "this is a worker token, which only allows `qd worker join`",
                )),
                None => Err(ApiError::new(
                    ErrorCode::Unauthorized,
                    "the token is wrong, or was revoked; a client's token is in the file `token` of the home, \
                         a worker's is created with `qd workers token`",
                )),
            },
            None => Err(ApiError::new(
                ErrorCode::Unauthorized,
                "TCP needs the header `Authorization: Bearer TOKEN`; the token is in the file `token` of the home",
            )),
        }
    }
}

/// The bearer token of a request.
fn bearer_token(head: &Parts) -> Option<&str> {
    let (scheme, token) = single_header(&head.headers, header::AUTHORIZATION)?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// Our own pages may call us. Pages of other sites, and pages whose origin the browser hides, may not.
fn check_origin(headers: &HeaderMap, host: &(UrlHost, Option<u16>), tls: bool) -> Result<(), ApiError> {
    // Browsers send this header with requests that carry no Origin, such as images and links. `none` means that a
    // person typed the address.
    let sites = headers.get_all("sec-fetch-site").into_iter();
    if !sites.into_iter().all(|site| matches!(site.as_bytes(), b"same-origin" | b"none")) {
        return Err(origin_not_allowed("the request comes from a web page of another site"));
    }
    if !headers.contains_key(header::ORIGIN) {
        return Ok(());
    }
    let (scheme, default_port) = if tls { ("https://", 443) } else { ("http://", 80) };
    let origin = single_header(headers, header::ORIGIN)
        .and_then(|text| UrlHost::parse_host_port(text.strip_prefix(scheme)?));
    match origin {
        Some((origin_host, port))
            if origin_host == host.0 && port.unwrap_or(default_port) == host.1.unwrap_or(default_port) =>
        {
            Ok(())
        }
        _ => Err(origin_not_allowed("the request comes from a web page that is not ours")),
    }
}

fn is_from_browser(headers: &HeaderMap) -> bool {
    headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site")
}

fn origin_not_allowed(message: &str) -> ApiError {
    ApiError::new(ErrorCode::OriginNotAllowed, message)
}

/// The value of a header that occurs exactly once.
fn single_header(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    let mut values = headers.get_all(name).into_iter();
    let value = values.next()?;
    if values.next().is_some() { None } else { value.to_str().ok() }
}

fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use axum::http::Request;

    use super::*;
    use crate::temporary_home::temporary_home;

    const TOKEN: &str = "0123456789abcdef0123456789abcdef";

    fn token() -> SecretToken {
        let (_folder, home) = temporary_home();
        std::fs::write(home.token_file(), TOKEN).unwrap();
        home.token().unwrap()
    }

    fn guard(listened: &[&str], allow: &[&str]) -> RequestGuard {
        let listened: Vec<(UrlHost, IpAddr)> = listened
            .iter()
            .map(|text| {
                let (host, _) = UrlHost::parse_host_port(text).unwrap();
                let UrlHost::Ip(ip) = host else { panic!("an address") };
                (host, ip)
            })
            .collect();
        let allow: Vec<String> = allow.iter().map(|text| (*text).to_owned()).collect();
        let allowed = allowed_hosts(&allow).unwrap();
        RequestGuard::from_listened(&token(), listened.iter().map(|(host, ip)| (host, *ip)), allowed)
    }

    fn tcp(local: &str, tls: bool) -> ConnectionPeer {
        ConnectionPeer::Tcp { addr: "127.0.0.1:9".parse().unwrap(), local: local.parse().unwrap(), tls }
    }

    /// The guard's result for a request with the right token, these headers and this target.
    fn check_admission(
        guard: &RequestGuard,
        peer: &ConnectionPeer,
        target: &str,
        headers: &[(&str, &str)],
    ) -> &'static str {
        let mut request = Request::builder().uri(target).header("authorization", format!("Bearer {TOKEN}"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (head, ()) = request.body(()).unwrap().into_parts();
        guard.admit(peer, &head).map_or_else(|error| error.code.as_str(), |_| "in")
    }

    #[test]
    fn only_hosts_that_are_ours_are_let_in() {
        let guard = guard(&["127.0.0.1"], &["deck.test", "192.0.2.9:1"]);
        let peer = tcp("127.0.0.1:80", false);
        let admission = |host: &str| check_admission(&guard, &peer, "/", &[("host", host)]);
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "127.0.0.1",
            "127.0.0.1:8080",
            "[::1]",
            "[::1]:80",
            "[0:0::1]",
            "deck.test",
            "Deck.Test:443",
            "192.0.2.9",
        ] {
            assert_eq!(admission(host), "in", "{host}");
        }
        for host in [
            "",
            "evil.test",
            "localhost.evil.test",
            "evil.localhost",
            "localhost.",
            "localhost.:80",
            "127.0.0.1.",
            "127.0.0.2",
            "127.1",
            "2130706433",
            "0.0.0.0",
            "[::]",
            "::1",
            "[::1",
            "[::1]x",
            "[::1%lo]",
            "127.0.0.1:",
            "127.0.0.1:99999",
            "127.0.0.1:+80",
            "localhost:80:80",
            "user@localhost",
            "localhost/",
            "local host",
            "localhost,evil.test",
            "..",
            "[::ffff:127.0.0.1]",
        ] {
            assert_eq!(admission(host), "host_not_allowed", "{host}");
        }
    }

    #[test]
    fn a_host_that_is_missing_or_doubled_or_contradicted_is_refused() {
        let guard = guard(&["127.0.0.1"], &[]);
        let peer = tcp("127.0.0.1:80", false);
        assert_eq!(check_admission(&guard, &peer, "/", &[]), "host_not_allowed");
        assert_eq!(
            check_admission(&guard, &peer, "/", &[("host", "localhost"), ("host", "localhost")]),
            "host_not_allowed"
        );
        assert_eq!(
            check_admission(&guard, &peer, "http://evil.test/", &[("host", "localhost")]),
            "host_not_allowed"
        );
        assert_eq!(
            check_admission(&guard, &peer, "http://localhost/", &[("host", "evil.test")]),
            "host_not_allowed"
        );
        assert_eq!(
            check_admission(&guard, &peer, "http://u@localhost/", &[("host", "localhost")]),
            "host_not_allowed"
        );
        assert_eq!(check_admission(&guard, &peer, "http://localhost/", &[("host", "localhost")]), "in");
    }

    #[test]
    fn loopback_names_count_only_where_loopback_is_listened_on() {
        let remote = guard(&["192.0.2.7"], &[]);
        let peer = tcp("192.0.2.7:443", true);
        assert_eq!(check_admission(&remote, &peer, "/", &[("host", "192.0.2.7")]), "in");
        assert_eq!(check_admission(&remote, &peer, "/", &[("host", "127.0.0.1")]), "host_not_allowed");
        assert_eq!(check_admission(&remote, &peer, "/", &[("host", "192.0.2.8")]), "host_not_allowed");
    }

    #[test]
    fn a_wildcard_answers_to_the_address_that_was_called_and_never_to_itself() {
        let all = guard(&["[::]"], &[]);
        let peer = tcp("[::ffff:192.0.2.7]:443", true);
        assert_eq!(check_admission(&all, &peer, "/", &[("host", "192.0.2.7")]), "in");
        assert_eq!(check_admission(&all, &peer, "/", &[("host", "127.0.0.1:443")]), "in");
        assert_eq!(check_admission(&all, &peer, "/", &[("host", "192.0.2.8")]), "host_not_allowed");
        assert_eq!(check_admission(&all, &peer, "/", &[("host", "[::]")]), "host_not_allowed");
        assert_eq!(check_admission(&all, &peer, "/", &[("host", "0.0.0.0")]), "host_not_allowed");
    }

    #[test]
    fn only_a_page_of_ours_may_speak_to_us() {
        let guard = guard(&["127.0.0.1"], &[]);
        let (plain, tls) = (tcp("127.0.0.1:80", false), tcp("127.0.0.1:80", true));
        let admission = |peer: &ConnectionPeer, host: &str, origin: &str| {
            check_admission(&guard, peer, "/", &[("host", host), ("origin", origin)])
        };
        assert_eq!(admission(&plain, "localhost:8080", "http://localhost:8080"), "in");
        assert_eq!(admission(&plain, "localhost:80", "http://LOCALHOST"), "in");
        assert_eq!(admission(&plain, "[::1]:8080", "http://[::1]:8080"), "in");
        assert_eq!(admission(&tls, "localhost", "https://localhost:443"), "in");
        for origin in [
            "null",
            "",
            "http://evil.test",
            "http://localhost:3000",
            "http://localhost",
            "https://localhost:8080",
            "http://127.0.0.1:8080",
            "http://localhost:8080/",
            "http://localhost:8080.evil.test",
            "localhost:8080",
            "http://localhost:8080 http://localhost:8080",
            "file://",
            "http://localhost.:8080",
        ] {
            assert_eq!(admission(&plain, "localhost:8080", origin), "origin_not_allowed", "{origin}");
        }
    }

    #[test]
    fn a_browser_that_says_it_comes_from_elsewhere_is_refused_without_an_origin_too() {
        let guard = guard(&["127.0.0.1"], &[]);
        let peer = tcp("127.0.0.1:80", false);
        let admission = |site: &str| {
            check_admission(&guard, &peer, "/", &[("host", "localhost"), ("sec-fetch-site", site)])
        };
        assert_eq!((admission("same-origin"), admission("none")), ("in", "in"));
        assert_eq!(
            (admission("cross-site"), admission("same-site")),
            ("origin_not_allowed", "origin_not_allowed")
        );
    }

    #[test]
    fn a_socket_serves_its_owner_and_no_page() {
        let guard = guard(&[], &[]);
        let ours = ConnectionPeer::Unix { process: Some((1, 1)), uid: guard.owner_uid };
        let other = ConnectionPeer::Unix { process: Some((1, 1)), uid: guard.owner_uid + 1 };
        let admission =
            |peer: &ConnectionPeer, headers: &[(&str, &str)]| check_admission(&guard, peer, "/", headers);
        assert_eq!(admission(&ours, &[]), "in");
        assert_eq!(admission(&ours, &[("host", "anything at all")]), "in");
        assert_eq!(admission(&ours, &[("origin", "http://localhost")]), "origin_not_allowed");
        assert_eq!(admission(&other, &[]), "peer_not_allowed");
    }

    #[test]
    fn a_session_token_opens_its_tools_over_socket_and_tcp_and_nothing_else() {
        let (_folder, home) = temporary_home();
        let sessions = SessionTokens::of(&home);
        let session = SessionId::from_random(&[1; 4]);
        let token = sessions.token(&session).unwrap();
        let guard = guard(&["127.0.0.1"], &[]).with_session_tokens(sessions);
        let socket = ConnectionPeer::Unix { process: Some((1, 1)), uid: guard.owner_uid };
        let admission = |peer: &ConnectionPeer, token: &str, path: &str| {
            let request = Request::builder().uri(path).header("host", "localhost");
            let request = request.header("authorization", format!("Bearer {token}"));
            let (head, ()) = request.body(()).unwrap().into_parts();
            let session = |bearer| match bearer {
                BearerIdentity::Session(session) => session,
                other => panic!("{other:?} is no session"),
            };
            let admitted = guard.admit(peer, &head).map(|bearer| bearer.map(session));
            admitted.map_err(|error| error.code.as_str())
        };
        for peer in [socket.clone(), tcp("127.0.0.1:80", false)] {
            for path in ["/mcp", "/v1/tools/wait"] {
                assert_eq!(admission(&peer, &token, path), Ok(Some(session.clone())), "{path}");
            }
            for path in ["/v1/sessions", "/mcpx", "/v1/toolsx", "/v1/asks", "/", "/v1/workers/join"] {
                assert_eq!(admission(&peer, &token, path), Err("agent_not_allowed"), "{path}");
            }
            assert_eq!(admission(&peer, &format!("{token}0"), "/mcp"), Err("unauthorized"));
            assert_eq!(admission(&peer, &format!("{session}.x"), "/v1/tools/wait"), Err("unauthorized"));
        }
        assert_eq!(admission(&socket, "anything else", "/v1/sessions"), Ok(None), "a socket needs no token");
    }

    #[test]
    fn an_allowed_host_must_be_one() {
        let check = |text: &str| allowed_hosts(&[text.to_owned()]);
        assert!(check("deck.test").is_ok());
        for text in ["https://deck.test", "deck.test/", "*", "deck test", ""] {
            assert!(check(text).unwrap_err().to_string().contains("as in a URL"), "{text}");
        }
    }
}
