//! Addresses of remote agents: parsed from user input and cards, joined, and compared. Nothing is dialled here.

use std::fmt;

use hyper::Uri;
use hyper::http::uri::Scheme;

/// The paths of cards below an agent's base address. The second is the older one.
const CARD_PATHS: [&str; 2] = [".well-known/agent-card.json", ".well-known/agent.json"];

/// An HTTP address, with or without TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct A2aAddress {
    pub(super) tls: bool,
    /// A host name or an IP address; IPv6 in brackets.
    host: String,
    pub(super) port: u16,
    /// Path and query; starts with a slash.
    pub(super) path: String,
}

impl A2aAddress {
    /// Parses an absolute address.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let invalid = |why: &str| format!("`{}` cannot be used as an address: {why}", without_secrets(text));
        let uri: Uri = text.parse().map_err(|cause| invalid(&format!("{cause}")))?;
        let tls = match uri.scheme() {
            Some(scheme) if *scheme == Scheme::HTTPS => true,
            Some(scheme) if *scheme == Scheme::HTTP => false,
            _ => return Err(invalid("it begins with neither http:// nor https://")),
        };
        let authority = uri.authority().ok_or_else(|| invalid("it names no host"))?;
        if authority.as_str().contains('@') {
            return Err(invalid(
                "a name or a password in it would be shown everywhere; put the token into A2A_TOKEN",
            ));
        }
        if authority.host().is_empty() {
            return Err(invalid("it names no host"));
        }
        Ok(Self {
            tls,
            host: authority.host().to_owned(),
            port: authority.port_u16().unwrap_or(if tls { 443 } else { 80 }),
            path: uri.path_and_query().map_or_else(|| "/".to_owned(), |path| path.as_str().to_owned()),
        })
    }

    /// Resolves a reference that was found at this address.
    pub(super) fn join(&self, reference: &str) -> Result<Self, String> {
        let reference = reference.trim();
        let scheme = if self.tls { "https" } else { "http" };
        if reference.contains("://") {
            return Self::parse(reference);
        }
        if reference.starts_with("//") {
            return Self::parse(&format!("{scheme}:{reference}"));
        }
        let folder = || {
            let path = self.path_without_query();
            path[..=path.rfind('/').unwrap_or(0)].to_owned()
        };
        let path = match reference {
            "" => self.path.clone(),
            absolute if absolute.starts_with('/') => absolute.to_owned(),
            relative => folder() + relative.trim_start_matches("./"),
        };
        Self::parse(&format!("{scheme}://{}{path}", self.authority()))
    }

    /// This address with a path appended.
    pub(super) fn with_subpath(&self, path: &str) -> Self {
        let base = self.path_without_query().trim_end_matches('/');
        Self { path: format!("{base}/{path}"), ..self.clone() }
    }

    /// The addresses at which the agent's card may be. An address that ends with `.json` is the card's own.
    pub(super) fn card_addresses(&self) -> Vec<Self> {
        if self.path_without_query().ends_with(".json") {
            return vec![self.clone()];
        }
        CARD_PATHS.iter().map(|path| self.with_subpath(path)).collect()
    }

    pub(super) fn is_same_server(&self, other: &Self) -> bool {
        (self.tls, self.port) == (other.tls, other.port) && self.host.eq_ignore_ascii_case(&other.host)
    }

    /// Whether the address is on this machine, whose connections nobody else can read.
    pub(super) fn is_loopback(&self) -> bool {
        let number = self.dial_host().parse::<std::net::IpAddr>();
        self.host.eq_ignore_ascii_case("localhost") || number.is_ok_and(|number| number.is_loopback())
    }

    /// The host as it is dialled and as certificates name it.
    pub(super) fn dial_host(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }

    /// The value of the `Host` header.
    pub(super) fn authority(&self) -> String {
        match (self.tls, self.port) {
            (true, 443) | (false, 80) => self.host.clone(),
            (_, port) => format!("{}:{port}", self.host),
        }
    }

    fn path_without_query(&self) -> &str {
        self.path.split_once('?').map_or(&self.path, |(path, _)| path)
    }
}

impl fmt::Display for A2aAddress {
    /// Leaves out the query, which may contain a key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority(), self.path_without_query())
    }
}

/// An address that could not be parsed, without parts that may be secret.
fn without_secrets(text: &str) -> &str {
    let text = text.split_once('?').map_or(text, |(text, _)| text);
    text.rsplit_once('@').map_or(text, |(_, host)| host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> A2aAddress {
        A2aAddress::parse(text).unwrap()
    }

    #[test]
    fn an_address_reads_back_as_it_was_written() {
        for text in ["http://h:1/", "https://h/a/b", "http://127.0.0.1:41241/x", "https://[::1]:8443/x"] {
            assert_eq!(address(text).to_string(), text);
        }
        assert_eq!(address(" http://h:80 ").to_string(), "http://h/");
        assert_eq!(address("https://h:443/?key=s3cret").to_string(), "https://h/", "a query may be a secret");
        assert_eq!(address("https://[::1]/").dial_host(), "::1");
        assert!(address("http://[::1]:1/").is_loopback() && address("http://LOCALHOST/").is_loopback());
        assert!(address("http://127.9.9.9/").is_loopback() && !address("http://10.0.0.1/").is_loopback());
    }

    #[test]
    fn an_invalid_address_is_refused_without_showing_its_password() {
        for text in ["", "h:1", "ftp://h", "http://", "http:///x", "http://a b"] {
            assert!(A2aAddress::parse(text).is_err(), "{text}");
        }
        let refused = A2aAddress::parse("http://me:s3cret@h/").unwrap_err();
        assert!(refused.contains("A2A_TOKEN") && !refused.contains("s3cret"), "{refused}");
    }

    #[test]
    fn a_card_is_below_the_base_or_is_the_address_itself() {
        let addresses =
            |text: &str| address(text).card_addresses().iter().map(A2aAddress::to_string).collect::<Vec<_>>();
        assert_eq!(
            addresses("http://h:1"),
            ["http://h:1/.well-known/agent-card.json", "http://h:1/.well-known/agent.json"]
        );
        assert_eq!(addresses("http://h/agents/a/")[0], "http://h/agents/a/.well-known/agent-card.json");
        assert_eq!(addresses("http://h/cards/a.json"), ["http://h/cards/a.json"]);
    }

    #[test]
    fn references_are_resolved_from_the_address_of_the_card() {
        let card = address("https://h:1/x/.well-known/agent-card.json");
        let joined = |reference: &str| card.join(reference).unwrap().to_string();
        assert_eq!(joined("http://other/y"), "http://other/y");
        assert_eq!(joined("//other/y"), "https://other/y");
        assert_eq!(joined("/rpc"), "https://h:1/rpc");
        assert_eq!(joined("rpc"), "https://h:1/x/.well-known/rpc");
        assert_eq!(joined(""), card.to_string());
        assert!(
            card.is_same_server(&address("https://H:1/z")) && !card.is_same_server(&address("http://h:1/z"))
        );
    }
}
