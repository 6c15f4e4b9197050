//! The address of a daemon, as `--host` and `QD_HOST` give it.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The address of a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DaemonHost {
    /// A socket file on this machine.
    Unix(PathBuf),
    Tcp {
        /// `HOST:PORT`, with an IPv6 address in brackets.
        authority: String,
        tls: bool,
    },
}

impl DaemonHost {
    /// The value of the `Host` header.
    pub(crate) fn host_header(&self) -> &str {
        match self {
            Self::Unix(_) => "localhost",
            Self::Tcp { authority, .. } => authority,
        }
    }

    /// The host name without the port, as certificates contain it.
    pub(crate) fn server_name(&self) -> &str {
        let name = self.host_header();
        let name = name.rsplit_once(':').map_or(name, |(name, _)| name);
        name.trim_start_matches('[').trim_end_matches(']')
    }
}

impl FromStr for DaemonHost {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const FORMS: &str = "expected unix:PATH, http://HOST:PORT or https://HOST:PORT";
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.is_empty() { Err(FORMS.to_owned()) } else { Ok(Self::Unix(path.into())) };
        }
        let (rest, tls) = match (text.strip_prefix("http://"), text.strip_prefix("https://")) {
            (Some(rest), _) => (rest, false),
            (_, Some(rest)) => (rest, true),
            (None, None) => return Err(FORMS.to_owned()),
        };
        let authority = rest.trim_end_matches('/');
        if authority.contains('/') {
            return Err(format!("{FORMS}, with no path after the port"));
        }
        let port = authority.rsplit_once(':').filter(|(name, _)| !name.is_empty()).map(|(_, port)| port);
        match port {
            Some(port) if port.parse::<u16>().is_ok_and(|port| port > 0) => {
                Ok(Self::Tcp { authority: authority.to_owned(), tls })
            }
            _ => Err(FORMS.to_owned()),
        }
    }
}

impl fmt::Display for DaemonHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp { authority, tls: false } => write!(f, "http://{authority}"),
            Self::Tcp { authority, tls: true } => write!(f, "https://{authority}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_reads_back_as_it_was_written() {
        for text in
            ["unix:/run/qd.sock", "http://127.0.0.1:7777", "https://box.example:443", "http://[::1]:80"]
        {
            assert_eq!(text.parse::<DaemonHost>().unwrap().to_string(), text);
        }
        assert_eq!("http://a:1/".parse::<DaemonHost>().unwrap().to_string(), "http://a:1");
        assert_eq!("unix:///a".parse::<DaemonHost>().unwrap(), DaemonHost::Unix("/a".into()));
    }

    #[test]
    fn an_invalid_host_is_refused_with_the_valid_forms() {
        for text in [
            "",
            "unix:",
            "/run/qd.sock",
            "http://",
            "http://a",
            "http://a:0",
            "http://a:x",
            "http://a:1/b",
            "http://:1",
        ] {
            assert!(text.parse::<DaemonHost>().unwrap_err().contains("unix:PATH"), "{text}");
        }
    }

    #[test]
    fn a_path_after_the_port_is_named() {
        let refused = "http://localhost:7821/foo".parse::<DaemonHost>().unwrap_err();
        assert!(refused.ends_with("no path after the port"), "{refused}");
    }

    #[test]
    fn a_certificate_is_checked_against_the_name_without_port() {
        assert_eq!("https://box.example:443".parse::<DaemonHost>().unwrap().server_name(), "box.example");
        assert_eq!("https://[::1]:443".parse::<DaemonHost>().unwrap().server_name(), "::1");
    }
}
