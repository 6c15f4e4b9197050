//! Compares asks with what clients were told: who answered them, that none is lost or opened twice, and that no session has
//! more open asks than it may.

use std::collections::{BTreeMap, BTreeSet};

use qd_testkit::TestEvent;

use super::checker::ends;
use super::deck::StormDeck;
use super::prompts::ASKS_OPEN_MAX;

/// Who answered an ask and was told so is who answered it.
pub(crate) fn check_asks(deck: &StormDeck, journal: &[TestEvent], purged: &BTreeSet<String>) {
    let mut resolved: BTreeMap<&str, Vec<&TestEvent>> = BTreeMap::new();
    let mut delivered: BTreeMap<&str, usize> = BTreeMap::new();
    for event in journal {
        let id = event.data["ask_id"].as_str().or(event.data["id"].as_str()).unwrap_or_default();
        match event.kind.as_str() {
            "ask.resolved" => resolved.entry(id).or_default().push(event),
            "ask.delivered" => *delivered.entry(id).or_default() += 1,
            _ => {}
        }
    }
    for (ask, events) in &resolved {
        if events.len() > 1 {
            deck.violation(
                events[0].session_id.as_deref(),
                format!("{ask} was resolved {} times", events.len()),
            );
        }
        if delivered.get(ask).is_some_and(|count| *count > 1) {
            deck.violation(events[0].session_id.as_deref(), format!("{ask} was delivered more than once"));
        }
    }
    for (ask, answers) in deck.record(|record| record.answers.clone()) {
        if answers.len() > 1 {
            deck.violation(None, format!("{ask}: {} answers were told to have won", answers.len()));
        }
        let Some(event) = resolved.get(ask.as_str()).and_then(|events| events.first()) else {
            let is_purged = !purged.is_empty();
            if !is_purged {
                deck.violation(None, format!("{ask} was answered, which is not in the journal"));
            }
            continue;
        };
        if event.data["by"] != "user" || event.data["answer"] != answers[0] {
            let what = format!("{ask} was answered with {} and is resolved as {}", answers[0], event.data);
            deck.violation(event.session_id.as_deref(), what);
        }
    }
    for (ask, token) in deck.record(|record| record.answers_by_token.clone()) {
        let Some(event) = resolved.get(ask.as_str()).and_then(|events| events.first()) else { continue };
        if event.data["actor"]["name"] != token.as_str() {
            let what = format!("{ask} was answered by {token}, and the journal says {}", event.data["actor"]);
            deck.violation(event.session_id.as_deref(), what);
        }
    }
}

/// An ask is opened at most once, and a session never has more open asks than it may.
pub(crate) fn check_limit(deck: &StormDeck, journal: &[TestEvent]) {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    let mut open: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for event in journal {
        let Some(session) = event.session_id.as_deref() else { continue };
        let id = event.data["ask_id"].as_str().unwrap_or_default();
        match event.kind.as_str() {
            "ask.opened" => {
                if !seen.insert(id) {
                    deck.violation(Some(session), format!("{id} was opened twice"));
                }
                let own = open.entry(session).or_default();
                own.insert(id);
                if own.len() as u64 > ASKS_OPEN_MAX {
                    deck.violation(Some(session), format!("{} asks are open at {}", own.len(), event.seq));
                }
            }
            "ask.resolved" => _ = open.entry(session).or_default().remove(id),
            _ => {}
        }
    }
}

/// A run that asked more often than it may at once, and came to its end, got an answer for every single ask.
pub(crate) fn check_floods(deck: &StormDeck, journal: &[TestEvent], unjudged: &BTreeSet<String>) {
    let ends = ends(journal);
    for (run, times) in deck.record(|record| record.ask_floods.clone()) {
        let Some(end) = ends.get(run.as_str()).filter(|end| end.data["finish_reason"] == "end_turn") else {
            continue;
        };
        if end.session_id.as_ref().is_none_or(|session| unjudged.contains(session)) {
            continue;
        }
        let answered = journal
            .iter()
            .filter(|event| event.is_of_run(&run, "ask.resolved") && event.data["state"] == "answered");
        let answered = answered.count() as u64;
        let counts = end.data["text"].as_str().unwrap_or_default();
        let numbers: u64 = counts.split([' ', '>']).filter_map(|word| word.parse::<u64>().ok()).sum();
        if answered != times || numbers != times {
            let what =
                format!("{run} asked {times} times, {answered} asks were answered, it says {counts:?}");
            deck.violation(end.session_id.as_deref(), what);
        }
    }
}
