//! The address of an agent's model, which the agent reaches even if its network is off.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

/// The port of an address that names none.
const HTTPS_PORT: u16 = 443;
const HTTP_PORT: u16 = 80;

/// A host and a port of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelHost {
    /// A name or an address, in lower case; an IPv6 address without brackets.
    pub name: String,
    pub port: u16,
}

/// How manifests and settings name a [`ModelHost`]: as `HOST`, `HOST:PORT`, or `$NAME` for the host of the URL in an
/// environment variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelHostSetting {
    Host(ModelHost),
    Variable(String),
}

/// The text names no host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no host; write `HOST`, `HOST:PORT`, or `$NAME` for the host of the URL in a variable")]
pub struct InvalidModelHost(String);

impl ModelHost {
    /// The host of a URL.
    pub fn of_url(url: &str) -> Option<Self> {
        let (default_port, rest) = match url.split_once("://") {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => (HTTP_PORT, rest),
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("https") => (HTTPS_PORT, rest),
            _ => return None,
        };
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        Self::parse(host, default_port)
    }

    fn parse(text: &str, default_port: u16) -> Option<Self> {
        let (name, port) = match text.rsplit_once(':') {
            Some((name, port)) if !port.ends_with(']') => (name, port.parse().ok()?),
            _ => (text, default_port),
        };
        let is_name = |name: &str| {
            !name.is_empty()
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
        };
        let name = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
            Some(address) => address.parse::<Ipv6Addr>().ok()?.to_string(),
            None if is_name(name) => name.to_ascii_lowercase(),
            None => return None,
        };
        (port > 0).then_some(Self { name, port })
    }
}

impl FromStr for ModelHost {
    type Err = InvalidModelHost;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text, HTTPS_PORT).ok_or_else(|| InvalidModelHost(text.to_owned()))
    }
}

impl fmt::Display for ModelHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, port } = self;
        if name.contains(':') { write!(f, "[{name}]:{port}") } else { write!(f, "{name}:{port}") }
    }
}

impl FromStr for ModelHostSetting {
    type Err = InvalidModelHost;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let Some(name) = text.strip_prefix('$') else { return text.parse().map(Self::Host) };
        let is_variable = !name.is_empty()
            && !name.starts_with(|first: char| first.is_ascii_digit())
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if is_variable { Ok(Self::Variable(name.to_owned())) } else { Err(InvalidModelHost(text.to_owned())) }
    }
}

impl ModelHostSetting {
    /// The host itself. `None` if its variable is unset or holds no URL.
    pub fn resolve(&self, variable: impl Fn(&str) -> Option<String>) -> Option<ModelHost> {
        match self {
            Self::Host(host) => Some(host.clone()),
            Self::Variable(name) => ModelHost::of_url(&variable(name)?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, port: u16) -> ModelHost {
        ModelHost { name: name.to_owned(), port }
    }

    #[test]
    fn hosts_may_name_a_port_and_are_the_same_in_any_case() {
        assert_eq!("API.Example.com".parse(), Ok(host("api.example.com", 443)));
        assert_eq!("localhost:8080".parse(), Ok(host("localhost", 8080)));
        assert_eq!("[0:0::1]:8080".parse(), Ok(host("::1", 8080)));
        assert_eq!("[::1]".parse(), Ok(host("::1", 443)));
        for shown in ["localhost:8080", "[::1]:443"] {
            assert_eq!(shown.parse::<ModelHost>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn what_is_no_host_is_refused() {
        for text in [
            "",
            ":80",
            "a b",
            "https://a",
            "a/b",
            "a:0",
            "a:99999",
            "a:",
            "::1",
            "[::1",
            "*.a",
            "$",
            "$1A",
            "$A-B",
        ] {
            assert!(text.parse::<ModelHostSetting>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_variable_stands_for_the_host_of_its_url() {
        let setting: ModelHostSetting = "$BASE_URL".parse().unwrap();
        let resolve = |url: &str| setting.resolve(|name| (name == "BASE_URL").then(|| url.to_owned()));
        assert_eq!(resolve("https://gateway.example/v1?x=1"), Some(host("gateway.example", 443)));
        assert_eq!(resolve("http://127.0.0.1"), Some(host("127.0.0.1", 80)));
        assert_eq!(resolve("HTTP://me:secret@Gateway:8443/"), Some(host("gateway", 8443)));
        assert_eq!(resolve("gateway:8443"), None, "not a URL");
        assert_eq!(setting.resolve(|_| None), None);
    }
}
