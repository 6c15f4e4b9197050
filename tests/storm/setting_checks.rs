//! Compares the modes of agents with the journal: each prompt was run in the mode that the session had when it started.

use std::collections::{BTreeMap, BTreeSet};

use qd_testkit::TestEvent;

use super::checker::by_session;
use super::deck::StormDeck;
use super::prompts::{MODE_WORD, marker};
use super::settle::list;

/// The mode that an agent said at the beginning of its turn, if it was asked to.
fn reported_mode(run: &str, text: &str) -> Option<&'static str> {
    let number = run.strip_prefix('r')?.parse().ok()?;
    let settings = text.strip_prefix(&marker(number))?.strip_prefix(MODE_WORD)?;
    let (_, rest) = settings.split_once("system_prompt=-")?;
    let known = [" mode=plan", " mode=yolo"].into_iter().find(|mode| rest.starts_with(mode));
    Some(known.map_or("default", |mode| &mode[" mode=".len()..]))
}

/// Each run that said its mode was in the mode that the session had. The session's row has the last one.
pub(crate) async fn check_modes(deck: &StormDeck, journal: &[TestEvent], unjudged: &BTreeSet<String>) {
    let mut modes: BTreeMap<String, String> = BTreeMap::new();
    for (session, events) in by_session(journal, unjudged) {
        // A worker that somebody else runs takes no mode, and may start another agent for every run.
        if deck.record(|record| record.foreign.contains(session)) {
            continue;
        }
        let mut mode = "default".to_owned();
        // The modes that the session had since each run was started, and what the run has said.
        let mut running: BTreeMap<String, (Vec<String>, String)> = BTreeMap::new();
        for event in &events {
            match (event.kind.as_str(), &event.run_id) {
                ("session.created", _) => mode = event.data["mode"].as_str().unwrap_or("default").to_owned(),
                ("mode.changed", _) => {
                    mode = event.data["mode"].as_str().unwrap_or_default().to_owned();
                    running.values_mut().for_each(|(since, _)| since.push(mode.clone()));
                }
                ("run.started", Some(run)) => {
                    running.insert(run.clone(), (vec![mode.clone()], String::new()));
                }
                ("text.delta", Some(run)) => {
                    if let Some((_, text)) = running.get_mut(run) {
                        text.push_str(event.data["text"].as_str().unwrap_or_default());
                    }
                }
                ("run.finished", Some(run)) => {
                    let Some((since, text)) = running.remove(run) else { continue };
                    if let Some(reported) = reported_mode(run, &text)
                        && !since.iter().any(|mode| mode == reported)
                    {
                        let what = format!("{run} was run in mode {reported} and not in one of {since:?}");
                        deck.violation(Some(session), what);
                    }
                }
                _ => {}
            }
        }
        modes.insert(session.to_owned(), mode);
    }
    for row in list(deck, "/v1/sessions").await.unwrap_or_default() {
        let Some(mode) = row["id"].as_str().and_then(|id| modes.get(id)) else { continue };
        if row["mode"].as_str().unwrap_or("default") != mode {
            let what = format!("the list shows the mode {} and the journal has {mode}", row["mode"]);
            deck.violation(row["id"].as_str(), what);
        }
    }
}
