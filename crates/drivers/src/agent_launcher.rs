//! Which driver an agent has, and how it is started. `registered_driver` is the only place that knows all drivers.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use qd_catalog::Catalog;
use qd_protocol::event::RunError;
use qd_protocol::manifest::{DriverKind, Manifest};
use qd_protocol::worker::AgentSpec;
use regex::Regex;

use crate::a2a::A2aAgent;
use crate::acp::start_acp_agent;
use crate::agent_driver::{AgentDriver, AgentStart, AgentSupervision};
use crate::claude::start_claude_agent;
use crate::codex::start_codex_agent;
use crate::echo::EchoAgent;
use crate::exec::ExecAgent;
use crate::peer::PeerWorkerAgent;
use crate::pty::PtyAgent;
use crate::quota_lines::find_quota_line;
use crate::tool_server;

/// The code of an error that means that the agent is not signed in.
pub(crate) const NOT_SIGNED_IN: &str = "agent_not_signed_in";

/// The code of an error of an agent that never became ready.
const FAILED_TO_START: &str = "agent_failed_to_start";

/// Where an agent runs, which decides what its worker needs for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentLocation {
    /// In the worker's own process.
    InWorker,
    /// Elsewhere: nothing is started here.
    Remote,
    /// In processes of its own, which a keeper supervises.
    BelowKeeper,
}

/// A driver that agents can have.
struct RegisteredDriver {
    location: AgentLocation,
    start: StartFunction,
}

/// How a driver starts its agent.
pub(crate) type StartFunction =
    for<'a> fn(AgentStart<'a>) -> BoxFuture<'a, Result<Box<dyn AgentDriver>, RunError>>;

/// The driver of each kind. A new driver adds one line.
fn registered_driver(kind: DriverKind) -> RegisteredDriver {
    use AgentLocation::{BelowKeeper, InWorker, Remote};
    let (location, start): (AgentLocation, StartFunction) = match kind {
        DriverKind::Echo => (InWorker, |start| boxed(EchoAgent::start(start))),
        DriverKind::Exec => (BelowKeeper, |start| boxed(ExecAgent::start(start))),
        DriverKind::Acp => (BelowKeeper, |start| boxed(start_acp_agent(start))),
        DriverKind::Claude => (BelowKeeper, |start| boxed(start_claude_agent(start))),
        DriverKind::Codex => (BelowKeeper, |start| boxed(start_codex_agent(start))),
        DriverKind::Pty => (BelowKeeper, |start| boxed(PtyAgent::start(start))),
        DriverKind::A2a => (Remote, |start| boxed(A2aAgent::start(start))),
        DriverKind::Worker => (Remote, |start| boxed(PeerWorkerAgent::start(start))),
    };
    RegisteredDriver { location, start }
}

/// The start of any driver as a [`StartFunction`] returns it.
pub(crate) fn boxed<'a, T: AgentDriver + 'static>(
    starting: impl Future<Output = Result<T, RunError>> + Send + 'a,
) -> BoxFuture<'a, Result<Box<dyn AgentDriver>, RunError>> {
    Box::pin(async move { starting.await.map(|agent| Box::new(agent) as Box<dyn AgentDriver>) })
}

/// Starts the agent of one session, as often as needed.
#[derive(Debug, Clone)]
pub struct AgentLauncher {
    driver: DriverKind,
    /// `None` for an agent in the worker's process: it has nothing to set, and there may be ten thousand of them.
    manifest: Option<Arc<Manifest>>,
}

impl AgentLauncher {
    /// Uses the manifest of the specification, or else the built-in agent of that name.
    pub fn from_spec(spec: &AgentSpec) -> Result<Self, RunError> {
        let manifest = match &spec.manifest {
            Some(manifest) => manifest.as_ref().clone(),
            None => Catalog::built_in().get(&spec.agent).ok_or_else(|| {
                RunError::new("unknown_agent", format!("this worker has no agent `{}`", spec.agent))
            })?,
        };
        let driver = manifest.driver();
        let is_needed = registered_driver(driver).location != AgentLocation::InWorker;
        Ok(Self { driver, manifest: is_needed.then(|| Arc::new(manifest)) })
    }

    pub fn location(&self) -> AgentLocation {
        registered_driver(self.driver).location
    }

    /// Whether the agent's silence in a turn means something.
    pub fn reports_progress(&self) -> bool {
        self.driver.reports_progress()
    }

    /// Whether a turn without any answer is an error.
    pub fn always_answers(&self) -> bool {
        self.manifest.as_ref().is_some_and(|manifest| manifest.turn.always_answers)
    }

    /// Whether a new process of the agent can continue its conversation.
    pub fn can_resume(&self) -> bool {
        self.manifest.as_ref().is_some_and(|manifest| manifest.can_resume())
    }

    /// Adds to an error of the agent what a person needs to act on it: how to sign in, which model was asked for, and
    /// when an exhausted quota resets.
    pub fn explain_error(&self, spec: &AgentSpec, error: RunError) -> RunError {
        let Some(manifest) = &self.manifest else { return error };
        let RunError { mut code, mut message, mut resets_at, .. } = error.clone();
        if let Some(line) = find_quota_line(&manifest.parse.quota_lines, &message) {
            RunError::QUOTA_EXHAUSTED.clone_into(&mut code);
            // What the driver knows is more exact than the text.
            resets_at = resets_at.or(line.resets_at);
        }
        // The manifest's patterns were validated when it was read.
        let patterns = manifest.parse.sign_in_lines.iter().filter_map(|pattern| Regex::new(pattern).ok());
        if patterns.into_iter().any(|pattern| message.lines().any(|line| pattern.is_match(line))) {
            NOT_SIGNED_IN.clone_into(&mut code);
        }
        if let Some(sign_in) = manifest.agent.sign_in.as_ref().filter(|_| code == NOT_SIGNED_IN) {
            message = format!("{message}; {sign_in}");
        }
        // Some servers only say that something was not found, and some agents that a setting was refused at the start.
        let may_concern_model = code == FAILED_TO_START
            || ["model", "404", "not found"].iter().any(|words| message.to_lowercase().contains(words));
        if let Some(model) = spec.model.as_ref().filter(|model| !message.contains(model.as_str()))
            && may_concern_model
        {
            message = format!("{message} (the session's model is `{model}`)");
        }
        RunError { code, message, resets_at, ..error }
    }

    /// The names of processes that the keeper must spare; `None` if the agent needs no keeper.
    pub fn helper_names(&self, spec: &AgentSpec) -> Option<Vec<String>> {
        if self.location() != AgentLocation::BelowKeeper {
            return None;
        }
        let helpers = self.manifest.iter().flat_map(|manifest| manifest.turn.helpers.iter().cloned());
        let ours = spec.mcp.is_some().then(|| tool_server::SERVER_PROCESS_NAME.to_owned());
        Some(helpers.chain(ours).collect())
    }

    /// Starts the agent, and waits until it accepts a prompt. `supervision` is set if the agent needs a keeper.
    pub async fn start(
        &self,
        spec: &AgentSpec,
        supervision: Option<AgentSupervision<'_>>,
    ) -> Result<Box<dyn AgentDriver>, RunError> {
        let manifest = self.manifest.clone().unwrap_or_default();
        (registered_driver(self.driver).start)(AgentStart { spec, manifest, supervision }).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qd_protocol::{SessionId, WorkerId};

    #[test]
    fn exactly_the_agents_with_a_program_run_below_a_keeper() {
        use DriverKind::{A2a, Acp, Claude, Codex, Echo, Exec, Pty, Worker};
        for kind in [Echo, Acp, Claude, Codex, Pty, Exec, A2a, Worker] {
            let below_keeper = registered_driver(kind).location == AgentLocation::BelowKeeper;
            assert_eq!(below_keeper, kind.has_program(), "{kind}");
        }
    }

    #[test]
    fn an_error_says_how_to_sign_in_and_which_model_was_asked_for() {
        let explain = |agent: &str, model: Option<&str>, code: &str, message: &str| {
            let mut spec =
                AgentSpec::new(SessionId::from_random(&[1]), WorkerId::from_random(&[1]), agent, "/");
            spec.model = model.map(str::to_owned);
            let launcher = AgentLauncher::from_spec(&spec).unwrap();
            let RunError { code, message, .. } = launcher.explain_error(&spec, RunError::new(code, message));
            (code, message)
        };
        let (code, message) = explain("claude", None, NOT_SIGNED_IN, "Not logged in");
        let hint = "run `claude` once and sign in, or set ANTHROPIC_API_KEY";
        assert_eq!((code.as_str(), message), (NOT_SIGNED_IN, format!("Not logged in; {hint}")));
        let told = "Error: Authentication failed with provider (HTTP 401).\n  Check your key.";
        let (code, message) = explain("copilot", None, "agent_error", told);
        assert!(code == NOT_SIGNED_IN && message.contains("`/login`, or set GH_TOKEN"), "{message}");
        for (code, told) in [
            ("agent_error", "Model not found"),
            ("agent_error", "unexpected status 404"),
            (FAILED_TO_START, "Invalid params"),
        ] {
            let explained = explain("codex", Some("gpt-9"), code, told);
            assert_eq!(explained, (code.to_owned(), format!("{told} (the session's model is `gpt-9`)")));
        }
        for (agent, told) in [
            ("claude", "Not logged in · Please run /login"),
            ("codex", "unexpected status 401 Unauthorized: no, url: http://127.0.0.1/v1/responses"),
            ("gemini", r#"{"error":{"type":"authentication_error","code":401}}"#),
            ("opencode", "Internal error: You didn't provide an API key."),
        ] {
            assert_eq!(explain(agent, None, "agent_error", told).0, NOT_SIGNED_IN, "{agent}");
        }
        for message in ["no model gpt-9", "disk full"] {
            assert_eq!(explain("codex", Some("gpt-9"), "agent_error", message).1, message);
        }
    }

    #[test]
    fn the_specifications_manifest_decides_or_else_the_built_in_agent() {
        let spec = |agent: &str| {
            AgentSpec::new(SessionId::from_random(&[1]), WorkerId::from_random(&[1]), agent, "/")
        };
        let location = |agent: &str| AgentLauncher::from_spec(&spec(agent)).map(|agent| agent.location());
        assert_eq!(location("echo"), Ok(AgentLocation::InWorker));
        assert_eq!(location("script"), Ok(AgentLocation::BelowKeeper));
        assert_eq!(location("worker:ws://127.0.0.1:1"), Ok(AgentLocation::Remote));
        let remote = AgentLauncher::from_spec(&spec("a2a:http://127.0.0.1:1")).unwrap();
        let none = remote.helper_names(&spec("x")).is_none();
        assert!(remote.location() == AgentLocation::Remote && none, "there is nothing to keep");
        assert_eq!(location("nobody").unwrap_err().code, "unknown_agent");
        let mut named = spec("nobody");
        named.manifest = Catalog::built_in().get("claude").map(Box::new);
        let named = AgentLauncher::from_spec(&named).unwrap();
        assert_eq!((named.driver, named.location()), (DriverKind::Claude, AgentLocation::BelowKeeper));
    }
}
