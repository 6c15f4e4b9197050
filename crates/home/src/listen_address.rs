//! The addresses that a daemon listens on, as people write them. Nothing is resolved or bound here: the daemon's edge
//! does that.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// An address to listen on: `unix:PATH` or `HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddress {
    Unix(PathBuf),
    /// A TCP port; 0 means any free one.
    Tcp {
        host: UrlHost,
        port: u16,
    },
}

/// A text that is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an address; write unix:PATH or HOST:PORT, an IPv6 host in brackets")]
pub struct BadListenAddress(String);

impl FromStr for ListenAddress {
    type Err = BadListenAddress;

    fn from_str(text: &str) -> Result<Self, BadListenAddress> {
        let bad = || BadListenAddress(text.to_owned());
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() || path.contains('\0') {
                Err(bad())
            } else {
                Ok(Self::Unix(path.into()))
            };
        }
        let (host, port) = UrlHost::parse_host_port(text).ok_or_else(bad)?;
        Ok(Self::Tcp { host, port: port.ok_or_else(bad)? })
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

impl Serialize for ListenAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A host as in a URL: a lower-case name, or an address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum UrlHost {
    Name(String),
    Ip(IpAddr),
}

impl UrlHost {
    /// Parses `HOST` or `HOST:PORT`. A name with a trailing dot is refused: no client of ours sends one, and to a
    /// browser it is another site.
    pub fn parse_host_port(text: &str) -> Option<(Self, Option<u16>)> {
        let (host, rest) = if let Some(inner) = text.strip_prefix('[') {
            let (inside, rest) = inner.split_once(']')?;
            (Self::Ip(inside.parse::<Ipv6Addr>().ok()?.into()), rest)
        } else {
            let end = text.find(':').unwrap_or(text.len());
            (Self::parse_name_or_ipv4(&text[..end])?, &text[end..])
        };
        match rest.strip_prefix(':') {
            None if rest.is_empty() => Some((host, None)),
            // `parse` alone would accept a sign.
            Some(port) if port.bytes().all(|b| b.is_ascii_digit()) => Some((host, Some(port.parse().ok()?))),
            _ => None,
        }
    }

    fn parse_name_or_ipv4(text: &str) -> Option<Self> {
        if let Ok(ip) = text.parse::<Ipv4Addr>() {
            return Some(Self::Ip(ip.into()));
        }
        let label = |label: &str| {
            !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
        };
        (text.len() <= 253 && text.split('.').all(label)).then(|| Self::Name(text.to_ascii_lowercase()))
    }
}

impl fmt::Display for UrlHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Ip(IpAddr::V4(ip)) => write!(f, "{ip}"),
            Self::Ip(IpAddr::V6(ip)) => write!(f, "[{ip}]"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_socket_path_or_a_host_with_a_port() {
        for text in
            ["unix:/run/qd.sock", "unix:rel", "127.0.0.1:0", "[::1]:8080", "localhost:65535", "0.0.0.0:1"]
        {
            assert_eq!(text.parse::<ListenAddress>().unwrap().to_string(), text);
        }
        for text in
            ["", "unix:", "8080", ":8080", "localhost", "::1:8080", "[::1]", "h:65536", "h:x", "a b:1", "h:"]
        {
            let error = text.parse::<ListenAddress>().unwrap_err();
            assert!(error.to_string().contains("unix:PATH or HOST:PORT"), "{text}");
        }
    }
}
