//! Compares how agents are confined with what their sessions ask for: in the journal at every start, and by the
//! namespaces of the processes that are left.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use qd_testkit::{ObservedProcess, TestEvent, processes};
use serde_json::{Value, json};

use super::deck::StormDeck;
use super::settle::list;

/// The confinement of one session, as the journal tells it.
#[derive(Debug, Clone, Default)]
struct SessionConfinement {
    agent: String,
    /// What the session asks for.
    sandbox: Option<Value>,
    network: Option<Value>,
    /// What was reported for the last start.
    report: Option<Value>,
    /// The report of the session whose agent started this one, at that moment, until somebody asks for something else.
    least: Option<Value>,
}

impl SessionConfinement {
    fn is_local_script(&self) -> bool {
        self.agent == "script"
    }
}

/// The levels and settings, the laxest first.
fn strictness(level: &Value) -> usize {
    ["off", "deck", "workspace"].iter().position(|known| level == known).unwrap_or_default()
}

/// Every agent was started with what its session asked for, and every run was given to such an agent.
pub(crate) fn check_confinement(deck: &StormDeck, journal: &[TestEvent], unjudged: &BTreeSet<String>) {
    let mut sessions: BTreeMap<&str, SessionConfinement> = BTreeMap::new();
    for event in journal {
        let Some(id) = event.session_id.as_deref() else { continue };
        if event.kind == "session.created" {
            let parent = event.data["parent"].as_str().filter(|_| event.data["actor"]["kind"] == "agent");
            let least = parent.and_then(|parent| sessions.get(parent)?.report.clone());
            let agent = event.data["agent"].as_str().unwrap_or_default().to_owned();
            sessions.insert(id, SessionConfinement { agent, least, ..SessionConfinement::default() });
        }
        let session = sessions.entry(id).or_default();
        match event.kind.as_str() {
            "session.created" | "session.updated" => {
                for (name, asked) in [("sandbox", &mut session.sandbox), ("network", &mut session.network)] {
                    *asked = event.data.get(name).filter(|value| value.is_string()).cloned().or(asked.take());
                }
                let is_changed = event.data["sandbox"].is_string() || event.data["network"].is_string();
                if event.kind == "session.updated" && is_changed {
                    session.least = None;
                }
                if let Some(confined) = event.data.get("confined").filter(|confined| confined.is_object()) {
                    session.report = Some(confined.clone());
                }
            }
            "worker.started" => session.report = event.data.get("sandbox").cloned(),
            _ => {}
        }
        let is_judged = event.kind == "run.started" || event.kind == "worker.started";
        if is_judged
            && !unjudged.contains(id)
            && let Some(report) = &session.report
        {
            for what in find_lax_start(deck, session, report) {
                deck.violation(Some(id), format!("{} at {}: {what}, {report}", event.kind, event.seq));
            }
        }
        if event.kind == "run.finished"
            && event.data["error"]["code"] == "sandbox_unavailable"
            && deck.support.workspace
            && deck.support.network_off
        {
            deck.violation(Some(id), format!("a run ended with {}", event.data["error"]));
        }
    }
}

/// In which ways an agent that is started so is confined less, or otherwise, than its session asks for.
fn find_lax_start(deck: &StormDeck, session: &SessionConfinement, report: &Value) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, asked, reported) in
        [("sandbox", &session.sandbox, &report["asked"]), ("network", &session.network, &report["network"])]
    {
        if asked.as_ref().is_some_and(|asked| asked != reported) {
            wrong.push(format!("the session asks for {name} {asked:?}"));
        }
    }
    let level = &report["level"];
    if report["asked"] != "auto" && level != &report["asked"] {
        wrong.push("it gets another level than it asks for by name".to_owned());
    }
    if report["network"] == "off" && level == "off" {
        wrong.push("it is not confined, and cannot be without network".to_owned());
    }
    if session.is_local_script() && report["asked"] == "auto" {
        let possible = if deck.support.deck { "deck" } else { "off" };
        if level != possible {
            wrong.push(format!("auto gives {possible} here"));
        }
    }
    if let Some(least) = session.least.as_ref().filter(|_| session.is_local_script()) {
        let reaches_more = least["network"] == "off" && report["network"] != "off";
        if reaches_more || strictness(level) < strictness(&least["level"]) {
            wrong.push(format!("it was started by an agent with {least}"));
        }
    }
    wrong
}

/// The agents that live, and what they left, are in the namespaces that their level promises.
pub(crate) async fn check_namespaces(deck: &StormDeck) {
    let namespace = |pid: u32, kind: &str| -> Option<PathBuf> {
        std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok()
    };
    let own = std::process::id();
    let sessions = list(deck, "/v1/sessions?open=true").await.unwrap_or_default();
    let confinements: BTreeMap<&str, &Value> =
        sessions.iter().filter_map(|session| Some((session["id"].as_str()?, &session["sandbox"]))).collect();
    let workers = list(deck, "/v1/workers").await.unwrap_or_default();
    // One process may hold the agents of many sessions, for example on a joined machine.
    let mut hosts: BTreeMap<u32, Vec<(&str, &Value)>> = BTreeMap::new();
    for worker in &workers {
        let Some(pid) = worker["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()) else { continue };
        let Some(id) = worker["session_id"].as_str() else { continue };
        hosts.entry(pid).or_default().push((id, confinements.get(id).copied().unwrap_or(&Value::Null)));
    }
    let all = processes::all_processes();
    for (pid, held) in hosts {
        // Whose agent a process is cannot be seen here, so only what all of them promise counts; and of that only what
        // is in force, because a change may have been asked for meanwhile.
        if held.iter().any(|(_, sandbox)| strictness(&sandbox["level"]) == 0) {
            continue;
        }
        let is_network_off = held.iter().all(|(_, sandbox)| sandbox["network"] == json!("off"));
        for process in agent_processes(&all, pid) {
            for (kind, is_promised) in [("pid", true), ("mnt", true), ("net", is_network_off)] {
                let is_shared =
                    namespace(process.pid, kind).is_some_and(|one| Some(one) == namespace(own, kind));
                if is_promised && is_shared && process.is_alive() {
                    let what = format!(
                        "process {} ({}) shares its {kind} namespace with us although it is confined: {held:?}",
                        process.pid,
                        process.args.join(" ")
                    );
                    deck.violation(held.first().map(|(session, _)| *session), what);
                }
            }
        }
    }
}

/// The agents below a worker, and what they started.
fn agent_processes(all: &[ObservedProcess], worker: u32) -> Vec<&ObservedProcess> {
    let mut family = vec![worker];
    let mut found = Vec::new();
    while let Some(parent) = family.pop() {
        for process in all.iter().filter(|process| process.parent == parent) {
            family.push(process.pid);
            let is_ours = ["__worker", "__keeper", "__sandbox"].iter().any(|role| process.has_role(role));
            if !is_ours {
                found.push(process);
            }
        }
    }
    found
}
