//! Parses the address of a third-party worker: `ws://HOST:PORT`, `wss://HOST:PORT` or `unix:PATH`. Nothing is
//! connected here.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

/// The variable that holds the token for a third-party worker.
pub const WORKER_TOKEN: &str = "WORKER_TOKEN";

/// Why a text is not the address of a worker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{shown}` is not the address of a worker: {why}")]
pub struct PeerAddressError {
    /// The text, without parts that may be secret.
    shown: String,
    why: &'static str,
}

/// Where a third-party worker listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerAddress {
    /// A TCP port.
    Port {
        tls: bool,
        /// A host name or IP address; an IPv6 address is without its brackets.
        host: String,
        port: u16,
        /// The path and the query; begins with a slash.
        path: String,
    },
    /// A unix socket on this machine.
    Socket(PathBuf),
}

impl PeerAddress {
    pub fn parse(text: &str) -> Result<Self, PeerAddressError> {
        let text = text.trim();
        let bad = |why| PeerAddressError { shown: redacted(text).to_owned(), why };
        if let Some(path) = text.strip_prefix("unix:") {
            // The worker process that connects runs in another directory, so a relative path would not work.
            return match Path::new(path) {
                path if path.is_absolute() => Ok(Self::Socket(path.to_owned())),
                _ => Err(bad("the path of its socket must begin with `/`")),
            };
        }
        let (tls, rest) = match (strip_scheme(text, "wss://"), strip_scheme(text, "ws://")) {
            (Some(rest), _) => (true, rest),
            (None, Some(rest)) => (false, rest),
            (None, None) => {
                return Err(bad(
                    "it must begin with ws://, as in `ws://127.0.0.1:7778`, with wss:// or with unix:",
                ));
            }
        };
        let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        if authority.contains('@') {
            return Err(bad(
                "a name or password in it would be visible everywhere; put the token into WORKER_TOKEN",
            ));
        }
        if path.contains('#') || !path.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(bad("its path has a character that is not allowed"));
        }
        let (host, port) = split_authority(authority, if tls { 443 } else { 80 }).ok_or_else(|| {
            bad("after `://` it needs a host and a port, as in `127.0.0.1:7778` or `[::1]:7778`")
        })?;
        if !tls && !is_local(host) {
            return Err(bad(
                "the connection to another machine would not be encrypted: use wss://, or forward a local port \
                 to it",
            ));
        }
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        Ok(Self::Port { tls, host: host.to_owned(), port, path })
    }

    /// Whether it is on this machine, so that nobody else can read the connection.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Port { host, .. } => is_local(host),
            Self::Socket(_) => true,
        }
    }

    /// The value of the `Host` header.
    pub fn authority(&self) -> String {
        match self {
            Self::Port { tls: true, host, port: 443, .. } | Self::Port { tls: false, host, port: 80, .. } => {
                bracketed(host)
            }
            Self::Port { host, port, .. } => format!("{}:{port}", bracketed(host)),
            Self::Socket(_) => "localhost".to_owned(),
        }
    }

    /// The path and query to request.
    pub fn path(&self) -> &str {
        match self {
            Self::Port { path, .. } => path,
            Self::Socket(_) => "/",
        }
    }
}

impl fmt::Display for PeerAddress {
    /// Leaves out the query, which may contain a key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port { tls, path, .. } => {
                let scheme = if *tls { "wss" } else { "ws" };
                let path = path.split_once('?').map_or(path.as_str(), |(path, _)| path);
                write!(f, "{scheme}://{}{}", self.authority(), path.trim_end_matches('/'))
            }
            Self::Socket(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

fn strip_scheme<'t>(text: &'t str, scheme: &str) -> Option<&'t str> {
    let (head, rest) = text.split_at_checked(scheme.len())?;
    head.eq_ignore_ascii_case(scheme).then_some(rest)
}

/// Splits host and port; without a port, `default_port` is used.
fn split_authority(authority: &str, default_port: u16) -> Option<(&str, u16)> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            host.parse::<Ipv6Addr>().ok()?;
            (host, port)
        }
        None => {
            let (host, port) = authority.split_at(authority.find(':').unwrap_or(authority.len()));
            let is_name_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
            if host.is_empty() || !host.chars().all(is_name_char) {
                return None;
            }
            (host, port)
        }
    };
    let port = match port {
        "" => default_port,
        port => port.strip_prefix(':')?.parse().ok().filter(|port| *port != 0)?,
    };
    Some((host, port))
}

fn is_local(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn bracketed(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

/// The text of an invalid address, without parts that may be secret.
fn redacted(text: &str) -> &str {
    let text = text.split_once('?').map_or(text, |(text, _)| text);
    text.rsplit_once('@').map_or(text, |(_, host)| host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> PeerAddress {
        PeerAddress::parse(text).unwrap()
    }

    #[test]
    fn an_address_reads_back_as_it_was_written() {
        for text in [
            "ws://127.0.0.1:7778",
            "ws://localhost:1",
            "ws://[::1]:7778",
            "wss://workers.example/a/b",
            "wss://10.0.0.1:8443",
            "unix:/run/w.sock",
        ] {
            assert_eq!(address(text).to_string(), text);
        }
        assert_eq!(address(" WS://LOCALHOST:80/ ").to_string(), "ws://LOCALHOST");
        assert_eq!(address("ws://[::1]:1").authority(), "[::1]:1");
        assert_eq!(address("unix:/run/w.sock").authority(), "localhost");
        let secret = address("wss://h?key=s3cret");
        assert_eq!((secret.path(), secret.to_string()), ("/?key=s3cret", "wss://h".to_owned()));
    }

    #[test]
    fn this_machine_is_recognised_and_others_need_tls() {
        for here in ["ws://127.9.9.9:1", "ws://[::1]:1", "ws://localhost:1", "unix:/w", "wss://127.0.0.1:1"] {
            assert!(address(here).is_local(), "{here}");
        }
        for away in ["wss://10.0.0.1:1", "wss://localhost.example:1"] {
            assert!(!address(away).is_local(), "{away}");
        }
        for clear in ["ws://10.0.0.1:1", "ws://workers.example:1", "ws://127.0.0.1.example:1"] {
            assert!(PeerAddress::parse(clear).unwrap_err().to_string().contains("wss://"), "{clear}");
        }
    }

    #[test]
    fn an_invalid_address_is_refused_and_shows_no_password() {
        for text in [
            "",
            "127.0.0.1:1",
            "http://127.0.0.1:1",
            "ws://",
            "ws://:1",
            "ws:///x",
            "ws://127.0.0.1:0",
            "ws://127.0.0.1:99999",
            "ws://127.0.0.1:",
            "ws://127.0.0.1:1:2",
            "ws://::1:1",
            "ws://[x]:1",
            "ws://[::1]x",
            "ws://a b:1",
            "ws://localhost:1/a b",
            "ws://localhost:1/#x",
            "unix:",
            "unix:w.sock",
        ] {
            assert!(PeerAddress::parse(text).is_err(), "{text}");
        }
        let refused = PeerAddress::parse("wss://me:s3cret@h/").unwrap_err().to_string();
        assert!(refused.contains("WORKER_TOKEN") && !refused.contains("s3cret"), "{refused}");
    }
}
