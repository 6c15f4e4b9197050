//! What the clients of a storm were told, and the violations found so far. It is plain data behind one lock, which is
//! never held while anything is waited for.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use qd_testkit::TestEvent;
use serde_json::Value;

/// What a reader keeps of an event: its seq, a hash of its content, and a hash of its session's id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EventTrace {
    pub(crate) seq: u64,
    pub(crate) content: u64,
    pub(crate) session: u64,
}

pub(crate) fn trace(event: &TestEvent) -> EventTrace {
    let content = hash(&(&event.ts, &event.kind, &event.session_id, &event.run_id, event.data.to_string()));
    EventTrace { seq: event.seq, content, session: hash(&event.session_id.as_deref()) }
}

/// The hash of a session's id, as in [`EventTrace`].
pub(crate) fn session_hash(session: &str) -> u64 {
    hash(&Some(session))
}

fn hash(value: &impl std::hash::Hash) -> u64 {
    use std::hash::Hasher;
    let mut hasher = std::hash::DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The agent of a session, as far as clients care.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StormAgent {
    Echo,
    Script,
    /// `script` on the joined machine, or behind the worker with a URL.
    ScriptElsewhere,
}

impl StormAgent {
    pub(crate) fn from_name(name: &str) -> Self {
        match name {
            "echo" => Self::Echo,
            "script" => Self::Script,
            _ => Self::ScriptElsewhere,
        }
    }
}

/// A session that clients may use.
#[derive(Debug, Clone)]
pub(crate) struct StormSession {
    pub(crate) id: String,
    pub(crate) workspace: String,
    pub(crate) agent: StormAgent,
    pub(crate) has_worktree: bool,
}

impl StormSession {
    /// Whether its prompts are steps; the others are echoed.
    pub(crate) fn is_script(&self) -> bool {
        self.agent != StormAgent::Echo
    }

    pub(crate) fn path(&self, rest: &str) -> String {
        format!("/v1/workspaces/{}/sessions/{}{rest}", self.workspace, self.id)
    }

    pub(crate) fn agent_path(&self, rest: &str) -> String {
        format!("/v1/workspaces/{}/agent/sessions/{}{rest}", self.workspace, self.id)
    }

    pub(crate) fn workspace_path(&self, rest: &str) -> String {
        format!("/v1/workspaces/{}{rest}", self.workspace)
    }
}

#[derive(Debug, Default)]
pub(crate) struct StormRecord {
    /// Runs that were accepted, with session and receipt.
    pub(crate) runs: BTreeMap<String, (String, Value)>,
    /// Runs that an answer listed as cancelled or removed, with their session.
    pub(crate) cancelled: BTreeMap<String, String>,
    /// Answers to asks that were told to have won.
    pub(crate) answers: BTreeMap<String, Vec<Value>>,
    /// Asks that the bearer of a token answered, with the token's name.
    pub(crate) answers_by_token: BTreeMap<String, String>,
    /// Runs that ask more often at once than a session may have open asks, with how often.
    pub(crate) ask_floods: BTreeMap<String, u64>,
    /// Steers that were accepted: session and receipt.
    pub(crate) steers: Vec<(String, Value)>,
    /// Mail that was accepted over HTTP: its id, session and receipt.
    pub(crate) mail: BTreeMap<String, (String, Value)>,
    /// Mail that was dropped into a folder: its id and session.
    pub(crate) dropped_mail: BTreeMap<String, String>,
    pub(crate) acknowledged_mail: BTreeSet<String>,
    /// Fleets that were started, with their workspace.
    pub(crate) fleets: BTreeMap<String, String>,
    /// Sessions that a client wanted to purge. Their events may be gone.
    pub(crate) purged: BTreeSet<String>,
    /// The parent of each child session that a client or a reader knows of. A purge takes child sessions along, and a
    /// reader that was cut off meanwhile never sees them.
    pub(crate) parents: BTreeMap<String, String>,
    /// Sessions with a run that has started and not ended, as far as the watcher knows.
    pub(crate) running: BTreeSet<String>,
    /// Sessions whose agent is behind a worker that somebody else runs.
    pub(crate) foreign: BTreeSet<String>,
    /// The session to which each marked prompt, steer or message was sent.
    pub(crate) markers: BTreeMap<u64, String>,
    /// Everything that the watcher saw, in order.
    pub(crate) watched: Vec<TestEvent>,
    pub(crate) counts: BTreeMap<&'static str, u64>,
    /// When what was broken and healed, as lines of text. It is kept with the home.
    pub(crate) faults: Vec<String>,
    pub(crate) violations: Vec<StormViolation>,
}

impl StormRecord {
    /// Remembers whose child session an event creates.
    pub(crate) fn note_parent(&mut self, event: &TestEvent) {
        if event.kind == "session.created"
            && let (Some(child), Some(parent)) = (&event.session_id, event.data["parent"].as_str())
        {
            self.parents.insert(child.clone(), parent.to_owned());
        }
    }

    pub(crate) fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }
}

/// Something that must never be.
#[derive(Debug, Clone)]
pub(crate) struct StormViolation {
    pub(crate) session: Option<String>,
    pub(crate) what: String,
}

/// What a storm did and found.
#[derive(Debug)]
pub(crate) struct StormReport {
    pub(crate) seed: u64,
    pub(crate) runs: usize,
    pub(crate) events: usize,
    pub(crate) counts: BTreeMap<&'static str, u64>,
    pub(crate) violations: Vec<StormViolation>,
    /// The last events of each session with a violation.
    pub(crate) traces: BTreeMap<String, String>,
    /// Where the home was kept, if there are violations.
    pub(crate) kept: Option<String>,
}

impl StormReport {
    /// One line: how much was tried, and how much went wrong.
    pub(crate) fn summary(&self) -> String {
        let kills: u64 =
            self.counts.iter().filter(|(what, _)| what.starts_with("kill")).map(|(_, count)| count).sum();
        let counts: Vec<String> = self.counts.iter().map(|(what, count)| format!("{what} {count}")).collect();
        format!(
            "storm: seed {}, {} runs, {kills} kills, {} events, {} violations ({})",
            self.seed,
            self.runs,
            self.events,
            self.violations.len(),
            counts.join(", ")
        )
    }
}

impl fmt::Display for StormReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 30;
        writeln!(f, "{}", self.summary())?;
        for violation in self.violations.iter().take(SHOWN) {
            writeln!(f, "- {} [{}]", violation.what, violation.session.as_deref().unwrap_or("-"))?;
        }
        if self.violations.len() > SHOWN {
            writeln!(f, "- and {} more", self.violations.len() - SHOWN)?;
        }
        for (session, trace) in self.traces.iter().take(5) {
            writeln!(f, "--- {session} {trace}")?;
        }
        match &self.kept {
            Some(path) => writeln!(f, "the home is kept in {path}"),
            None => Ok(()),
        }
    }
}
