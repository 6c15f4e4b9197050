//! The agents that this build knows, by name: how each is reached, and what is said of it in the list of agents. Adding
//! an agent begins here.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qd_protocol::api;

use crate::drivers::acp::Profile;

/// How an agent is reached.
#[derive(Debug, Clone)]
pub(crate) enum Kind {
    /// In this process.
    Echo,
    /// A process that speaks the Agent Client Protocol.
    Acp(Arc<Profile>),
}

impl Kind {
    pub(crate) fn named(agent: &str) -> Option<Self> {
        match agent {
            "echo" => Some(Self::Echo),
            "script" => Some(Self::Acp(Arc::new(Profile::script(&own_program())))),
            _ => None,
        }
    }
}

/// This very program, also when another version has been put in its place.
pub(crate) fn own_program() -> PathBuf {
    let link = Path::new("/proc/self/exe");
    match link.exists() {
        true => link.to_owned(),
        false => std::env::current_exe().unwrap_or_else(|_| PathBuf::from("qd")),
    }
}

/// The agents that can be started here.
pub fn agents() -> Vec<api::Agent> {
    vec![
        api::Agent {
            name: "echo".to_owned(),
            description: "Says the prompt again, word by word.".to_owned(),
            driver: "built-in".to_owned(),
            available: true,
            install: None,
            steers: false,
            settings: Vec::new(),
            env: Vec::new(),
        },
        api::Agent {
            name: "script".to_owned(),
            description: "Does the steps that its prompt lists, for tests.".to_owned(),
            driver: "acp".to_owned(),
            available: true,
            install: None,
            steers: true,
            settings: vec!["model".to_owned(), "system_prompt".to_owned()],
            env: Vec::new(),
        },
    ]
}

/// Whether the sessions of this agent live in one worker process: it needs no process of its own, and starts none.
pub fn shares_worker(agent: &str) -> bool {
    matches!(Kind::named(agent), Some(Kind::Echo))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_agent_that_is_listed_can_be_started() {
        for agent in agents() {
            assert!(Kind::named(&agent.name).is_some(), "{}", agent.name);
        }
        assert!(Kind::named("nobody").is_none());
        assert!(shares_worker("echo") && !shares_worker("script") && !shares_worker("nobody"));
    }
}
