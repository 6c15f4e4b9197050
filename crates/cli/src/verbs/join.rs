//! `qd worker join`: holds agents on this machine for a daemon on another. How the daemon is dialled, and whose
//! certificate is taken, is decided here; the work itself is in `qd-worker`.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use qd_catalog::Catalog;
use qd_catalog::find::{self, Versions};
use qd_daemon::home::Home;
use qd_protocol::worker::Secret;
use qd_worker::join::{Dial, DialError, JoinOptions, News, Offer, Wire};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::signal::unix::{SignalKind, signal};

use super::Context;
use crate::args::Join;
use crate::client::host::Host;
use crate::client::tls::{Trust, Unshaken};
use crate::failure::{Exit, Failure, Result, whole};

/// How long a connection may take to be made.
const DIAL: Duration = Duration::from_secs(10);

/// Works for a daemon until it is told to end.
pub(crate) async fn join(context: &Context, flags: Join) -> Result<Exit> {
    let Join { url, token, label, root, fingerprint, agent } = flags;
    let host = daemon(&url)?;
    let trust = Trust::of(fingerprint.as_deref(), "--fingerprint");
    let trust = trust.map_err(|error| Failure::Usage(whole(&error)))?;
    let home = &context.whereabouts.home;
    home.prepare().map_err(anyhow::Error::from)?;
    crate::serve::start_log(&home.log().join("joined.log"), "warn")?;
    let offers = offered(home, &agent)?;
    let choices = choices(&label, &offers);
    let options = JoinOptions {
        token: Secret(token),
        name: machine(),
        labels: label,
        offers,
        root: root.as_deref().map(directory).transpose()?,
        dir: home.joined(),
    };
    let mut terminate = signal(SignalKind::terminate()).map_err(anyhow::Error::from)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(anyhow::Error::from)?;
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    let mut joined = false;
    let tell = |news| {
        let first = !joined;
        joined |= matches!(news, News::Joined(_));
        report(context, &url, news, first);
        if first && joined {
            context.out.note(&choices);
        }
    };
    let line = Line { host, trust: Arc::new(trust) };
    qd_worker::join::join(options, line, stop, tell).await.map_err(anyhow::Error::from)?;
    Ok(Exit::Well)
}

/// Says what a person may want to know. That nobody reads it is no reason to end.
fn report(context: &Context, url: &str, news: News, first: bool) {
    let out = &context.out;
    match news {
        News::Joined(name) if first && out.json => drop(out.value(&json!({ "joined": url, "name": name }))),
        News::Joined(name) if first => drop(out.line(&format!("joined {url} as {name}"))),
        News::Joined(name) => out.note(&format!("back at {url} as {name}")),
        News::Away(why) if first => out.note(&format!("{url} is not there yet: {why}; trying again")),
        News::Away(why) => out.note(&format!("lost {url}: {why}; trying again")),
    }
}

/// What a session has to name to run here.
fn choices(labels: &[String], offers: &[Offer]) -> String {
    let each = labels
        .iter()
        .flat_map(|label| offers.iter().map(move |offer| format!("{}@{label}", offer.about.name)));
    match labels.is_empty() {
        true => "no session can choose this machine: it has no --label".to_owned(),
        false => format!("sessions run here by: {}", each.collect::<Vec<_>>().join(", ")),
    }
}

/// Where to join. What goes over the network goes over TLS.
fn daemon(url: &str) -> Result<Host> {
    const FORMS: &str = "a daemon to join is https://HOST:PORT or wss://HOST:PORT; http:// and ws:// are for this \
                         machine alone";
    let (rest, tls) = match url.split_once("://") {
        Some(("https" | "wss", rest)) => (rest, true),
        Some(("http" | "ws", rest)) => (rest, false),
        _ => return Err(Failure::Usage(FORMS.to_owned())),
    };
    let authority = rest.trim_end_matches('/');
    let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let port = match (has_port, tls) {
        (true, _) => "",
        (false, true) => ":443",
        (false, false) => ":80",
    };
    let scheme = if tls { "https" } else { "http" };
    let host: Host =
        format!("{scheme}://{authority}{port}").parse().map_err(|_| Failure::Usage(FORMS.to_owned()))?;
    let name = host.server_name();
    let is_here = name == "localhost" || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if tls || is_here { Ok(host) } else { Err(Failure::Usage(FORMS.to_owned())) }
}

/// The agents to offer: those that were named, or all that can start here.
fn offered(home: &Home, named: &[String]) -> Result<Vec<Offer>> {
    let catalog = Catalog::of_user(&home.agent_folders());
    let names: Vec<String> =
        catalog.entries().iter().map(|entry| entry.manifest.agent.name.clone()).collect();
    let offer = |name: &String| {
        let manifest = catalog.get(name).ok_or_else(|| {
            Failure::Usage(format!("there is no agent {name}; known are: {}", names.join(", ")))
        })?;
        let about = qd_catalog::agent(&manifest, "", &Versions::default());
        let manifest = find::isolated(find::located(manifest), &home.isolated());
        Ok(Offer { about, manifest })
    };
    let offers: Vec<Offer> =
        if named.is_empty() { &names } else { named }.iter().map(offer).collect::<Result<_>>()?;
    Ok(offers.into_iter().filter(|offer| !named.is_empty() || offer.about.available).collect())
}

fn directory(root: &Path) -> Result<PathBuf> {
    let path = root.canonicalize().with_context(|| format!("--root {} cannot be used", root.display()))?;
    match path.is_dir() {
        true => Ok(path),
        false => Err(Failure::Usage(format!("--root {} is no directory", root.display()))),
    }
}

/// What people call this machine.
fn machine() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { "worker".to_owned() } else { name }
}

/// The way to the daemon.
#[derive(Debug, Clone)]
struct Line {
    host: Host,
    trust: Arc<Trust>,
}

impl Dial for Line {
    fn host(&self) -> String {
        self.host.header().to_owned()
    }

    async fn dial(&self) -> Result<Box<dyn Wire>, DialError> {
        let unreachable = || DialError::Unreachable(format!("no connection within {} s", DIAL.as_secs()));
        tokio::time::timeout(DIAL, self.connect()).await.map_err(|_| unreachable())?
    }
}

impl Line {
    async fn connect(&self) -> Result<Box<dyn Wire>, DialError> {
        let unreachable = |error: anyhow::Error| DialError::Unreachable(whole(&error));
        let Host::Tcp { authority, tls } = &self.host else {
            return Err(DialError::Untrusted("a socket of this machine is no place to join".to_owned()));
        };
        let stream = TcpStream::connect(authority).await.map_err(|error| unreachable(error.into()))?;
        // Else every frame that follows another would wait for the acknowledgement of the one before.
        stream.set_nodelay(true).map_err(|error| unreachable(error.into()))?;
        if !tls {
            return Ok(Box::new(stream));
        }
        match self.trust.shake_hands(&self.host, stream).await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(Unshaken::Untrusted(error)) => Err(DialError::Untrusted(whole(&error))),
            Err(Unshaken::Failed(error)) => Err(unreachable(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One in which nobody has put anything.
    fn home() -> Home {
        Home::resolve(Some(PathBuf::from("/nowhere")))
    }

    #[test]
    fn a_daemon_elsewhere_is_joined_over_tls_alone() {
        for (url, host) in [
            ("https://deck.example:7777", "https://deck.example:7777"),
            ("wss://deck.example/", "https://deck.example:443"),
            ("ws://127.0.0.1:7777", "http://127.0.0.1:7777"),
            ("http://localhost:7777/", "http://localhost:7777"),
            ("http://[::1]:7777", "http://[::1]:7777"),
        ] {
            assert_eq!(daemon(url).unwrap().to_string(), host, "{url}");
        }
        for url in [
            "http://deck.example:7777",
            "ws://10.0.0.1:80",
            "deck.example:7777",
            "unix:/run/qd.sock",
            "https://",
        ] {
            assert_eq!(daemon(url).unwrap_err().exit(), Exit::Usage, "{url}");
        }
    }

    #[test]
    fn a_machine_says_how_it_is_chosen() {
        let script = offered(&home(), &["script".to_owned()]).unwrap();
        let labels = ["gpu".to_owned(), "big".to_owned()];
        assert_eq!(choices(&labels, &script), "sessions run here by: script@gpu, script@big");
        assert!(choices(&[], &script).contains("--label"));
    }

    #[test]
    fn only_agents_that_there_are_can_be_offered() {
        assert!(offered(&home(), &[]).unwrap().iter().any(|offer| offer.about.name == "echo"));
        assert_eq!(offered(&home(), &["script".to_owned()]).unwrap().len(), 1);
        assert_eq!(offered(&home(), &["nobody".to_owned()]).unwrap_err().exit(), Exit::Usage);
    }
}
