//! The judgement: what the clients were told, compared with the journal, the lists, the logs, the processes and the
//! files of a storm that has settled. It changes nothing until the journal was read; then it closes every session.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use hyper::Method;
use qd_testkit::{TestEvent, journal_rules};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::deck::StormDeck;
use super::prompts::marker;
use super::readers::{StormReaderKind, StormReading};
use super::settle::list;
use super::{
    ask_checks, file_checks, process_checks, quota_checks, sandbox_checks, setting_checks, stream_checks,
};

/// How long readers may take to come to the end of the journal.
const READERS_LIMIT: Duration = Duration::from_secs(60);

pub(crate) async fn check(deck: &StormDeck, readers: JoinSet<StormReading>) {
    // A stuck session is reported once; that its runs have not ended and its states are busy follows from it.
    let stuck: BTreeSet<String> = deck.record(|record| {
        record.violations.iter().filter_map(|violation| violation.session.clone()).collect()
    });
    check_lists_are_quiet(deck, &stuck).await;
    process_checks::check_workers_have_sessions(deck).await;
    process_checks::check_closed_sessions_left_nothing(deck).await;
    let Some(journal) = read_journal(deck).await else {
        deck.violation(None, "the journal cannot be read to its end".to_owned());
        return;
    };
    let purged = purged_sessions(deck, &journal);
    let unjudged_runs = purged.union(&stuck).cloned().collect();
    check_rules(deck, &journal, &unjudged_runs);
    check_receipts(deck, &journal, &unjudged_runs);
    check_cancels(deck, &journal, &purged);
    check_markers(deck, &journal);
    ask_checks::check_asks(deck, &journal, &purged);
    ask_checks::check_limit(deck, &journal);
    ask_checks::check_floods(deck, &journal, &unjudged_runs);
    check_steers(deck, &journal, &unjudged_runs);
    check_mail(deck, &journal, &purged);
    check_fleets(deck, &journal, &purged);
    check_run_list(deck, &journal, &purged).await;
    for reading in read_to_end(deck, &journal, readers).await {
        stream_checks::check_reading(deck, &journal, &purged, &reading);
    }
    sandbox_checks::check_confinement(deck, &journal, &unjudged_runs);
    sandbox_checks::check_namespaces(deck).await;
    setting_checks::check_modes(deck, &journal, &unjudged_runs).await;
    quota_checks::check_quotas(deck, &journal).await;
    check_metrics(deck).await;
    file_checks::check_worktrees(deck).await;
    process_checks::close_everything(deck).await;
    process_checks::check_nothing_is_left(deck).await;
    process_checks::check_logs(deck).await;
}

/// A halt is the last event; everything before it is the journal.
async fn read_journal(deck: &StormDeck) -> Option<Vec<TestEvent>> {
    let halt = json!({ "reason": "the end of the storm" });
    let (status, _) = deck.request(&deck.unix, Method::POST, "/v1/halt", Some(&halt), &[200]).await?;
    if status != 200 {
        return None;
    }
    let mut stream = deck.unix.try_stream("/v1/events?after=0").await.ok()?;
    let mut journal = Vec::new();
    let is_end =
        |event: &TestEvent| event.kind == "halt.set" && event.data["reason"] == "the end of the storm";
    while !journal.last().is_some_and(is_end) {
        let next = tokio::time::timeout(Duration::from_secs(30), stream.try_next()).await;
        journal.push(next.ok()?.ok()??);
    }
    Some(journal)
}

async fn read_to_end(
    deck: &StormDeck,
    journal: &[TestEvent],
    readers: JoinSet<StormReading>,
) -> Vec<StormReading> {
    let end = journal.last().map_or(0, |event| event.seq);
    let mut ends = vec![(None, end)];
    for kind in StormReaderKind::ALL {
        let last = journal.iter().rfind(|event| kind.reads(deck, event)).map_or(0, |event| event.seq);
        ends.push((Some(kind), last));
    }
    let _set_once = deck.end_seqs.set(ends);
    let waited = super::join(deck, "a reader", readers);
    tokio::pin!(waited);
    if let Ok(readings) = tokio::time::timeout(READERS_LIMIT, &mut waited).await {
        return readings;
    }
    deck.is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    waited.await
}

/// The sessions that were purged, and all below them.
fn purged_sessions(deck: &StormDeck, journal: &[TestEvent]) -> BTreeSet<String> {
    let (mut purged, parents) = deck.record(|record| {
        journal.iter().for_each(|event| record.note_parent(event));
        (record.purged.clone(), record.parents.clone())
    });
    loop {
        let below = parents.iter().filter(|(_, parent)| purged.contains(*parent));
        let below: Vec<String> = below.map(|(child, _)| child.clone()).collect();
        let before = purged.len();
        purged.extend(below);
        if purged.len() == before {
            return purged;
        }
    }
}

pub(crate) fn by_session<'a>(
    journal: &'a [TestEvent],
    purged: &BTreeSet<String>,
) -> BTreeMap<&'a str, Vec<TestEvent>> {
    let mut sessions: BTreeMap<&str, Vec<TestEvent>> = BTreeMap::new();
    for event in journal {
        if let Some(session) = event.session_id.as_deref().filter(|session| !purged.contains(*session)) {
            sessions.entry(session).or_default().push(event.clone());
        }
    }
    sessions
}

/// The rules of every journal, session by session.
fn check_rules(deck: &StormDeck, journal: &[TestEvent], purged: &BTreeSet<String>) {
    for pair in journal.windows(2).filter(|pair| pair[0].seq >= pair[1].seq) {
        deck.violation(None, format!("seq {} follows {}", pair[1].seq, pair[0].seq));
    }
    let mut owners: BTreeMap<&str, &str> = BTreeMap::new();
    for event in journal.iter().filter(|event| event.kind == "run.accepted") {
        let (Some(run), Some(session)) = (event.run_id.as_deref(), event.session_id.as_deref()) else {
            continue;
        };
        if owners.insert(run, session).is_some() {
            deck.violation(Some(session), format!("{run} was accepted twice"));
        }
    }
    for (session, events) in by_session(journal, purged) {
        if let Err(what) = quietly(|| journal_rules::check(&events)) {
            let what: String = what.lines().next().unwrap_or_default().to_owned();
            deck.violation(Some(session), format!("a rule of journals is broken: {what}"));
        }
    }
}

/// Calls something that panics with what is wrong, without the usual report of a panic.
fn quietly(check: impl FnOnce() + std::panic::UnwindSafe) -> Result<(), String> {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let result = std::panic::catch_unwind(check);
    std::panic::set_hook(hook);
    result.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned())).unwrap_or_default()
    })
}

/// How each run ended.
pub(crate) fn ends(journal: &[TestEvent]) -> BTreeMap<&str, &TestEvent> {
    let finished = journal.iter().filter(|event| event.kind == "run.finished");
    finished.filter_map(|event| Some((event.run_id.as_deref()?, event))).collect()
}

/// Every accepted run is in the journal where its receipt says, and has ended.
fn check_receipts(deck: &StormDeck, journal: &[TestEvent], purged: &BTreeSet<String>) {
    let ends = ends(journal);
    for (run, (session, receipt)) in deck.record(|record| record.runs.clone()) {
        if purged.contains(&session) {
            continue;
        }
        let seq = receipt["seq"].as_u64().unwrap_or_default();
        let found = journal.binary_search_by_key(&seq, |event| event.seq).ok().map(|at| &journal[at]);
        if !found.is_some_and(|event| event.is_of_run(&run, "run.accepted")) {
            deck.violation(
                Some(&session),
                format!("{run} has the receipt {receipt} and is not in the journal"),
            );
        }
        if !ends.contains_key(run.as_str()) {
            deck.violation(Some(&session), format!("{run} was accepted and has not ended"));
        }
    }
    let accepted = journal.iter().filter(|event| event.kind == "run.accepted");
    let known = deck.record(|record| record.runs.keys().cloned().collect::<BTreeSet<_>>());
    for event in accepted {
        let (Some(run), Some(session)) = (event.run_id.as_deref(), event.session_id.as_deref()) else {
            continue;
        };
        if ends.contains_key(run) || known.contains(run) || purged.contains(session) {
            continue;
        }
        deck.violation(Some(session), format!("{run} was accepted and has not ended"));
    }
}

fn check_cancels(deck: &StormDeck, journal: &[TestEvent], purged: &BTreeSet<String>) {
    let ends = ends(journal);
    for (run, session) in deck.record(|record| record.cancelled.clone()) {
        let Some(end) = ends.get(run.as_str()) else { continue };
        if end.data["finish_reason"] != "cancelled" && !purged.contains(&session) {
            let what = format!("{run} was listed as cancelled and ended as {}", end.data["finish_reason"]);
            deck.violation(end.session_id.as_deref(), what);
        }
    }
}

/// No prompt, steer or mail was given to an agent twice: no answer has its marker twice.
fn check_markers(deck: &StormDeck, journal: &[TestEvent]) {
    let mut texts: BTreeMap<&str, String> = BTreeMap::new();
    for event in journal.iter().filter(|event| event.kind == "text.delta") {
        let text = texts.entry(event.session_id.as_deref().unwrap_or_default()).or_default();
        text.push_str(event.data["text"].as_str().unwrap_or_default());
    }
    let markers = deck.record(|record| record.markers.clone());
    for (session, text) in texts {
        let mut seen = BTreeSet::new();
        for number in text.split('<').filter_map(|piece| piece.split_once('>')?.0.parse::<u64>().ok()) {
            // The answers of children, with their markers, may be quoted any number of times.
            let is_own = markers.get(&number).is_some_and(|owner| owner == session);
            if is_own && !seen.insert(number) {
                deck.violation(Some(session), format!("{} reached the agent twice", marker(number)));
            }
        }
    }
}

/// A steer that was accepted was either taken or missed, and a missed one runs next.
fn check_steers(deck: &StormDeck, journal: &[TestEvent], purged: &BTreeSet<String>) {
    let accepted_runs: BTreeSet<&str> = journal
        .iter()
        .filter(|event| event.kind == "run.accepted")
        .filter_map(|event| event.run_id.as_deref())
        .collect();
    for (session, receipt) in deck.record(|record| record.steers.clone()) {
        let seq = receipt["seq"].as_u64().unwrap_or_default();
        let found = journal.binary_search_by_key(&seq, |event| event.seq).ok().map(|at| &journal[at]);
        if !purged.contains(&session) && found.is_none_or(|event| event.kind != "steer.accepted") {
            deck.violation(
                Some(&session),
                format!("a steer has the receipt {receipt} and is not in the journal"),
            );
        }
    }
    for (session, events) in by_session(journal, purged) {
        let of = |kind: &str| events.iter().filter(|event| event.kind == kind).count();
        let (accepted, taken, missed) = (of("steer.accepted"), of("steer.taken"), of("steer.missed"));
        if accepted != taken + missed {
            let what = format!("{accepted} steers were accepted, {taken} taken and {missed} missed");
            deck.violation(Some(session), what);
        }
        for event in events.iter().filter(|event| event.kind == "steer.missed") {
            let next = event.data["next_run_id"].as_str();
            let since = |seq| events.iter().filter(move |one| (seq..event.seq).contains(&one.seq));
            // A steer is named by its number in its session, and the events of a session are numbered from 1.
            let steer = usize::try_from(event.data["steer"].as_u64().unwrap_or_default()).unwrap_or_default();
            let accepted =
                steer.checked_sub(1).and_then(|at| events.get(at)).map_or(u64::MAX, |event| event.seq);
            // A run that reaches a limit is stopped by the same event, and its steers are not lost.
            let is_cancel = |one: &TestEvent| {
                let by = one.data["by"].as_str().unwrap_or_default();
                one.kind == "run.cancel_requested" && !["timeout", "max_turns", "budget"].contains(&by)
            };
            let is_cancelled = since(accepted).any(|one| is_cancel(one) && one.run_id == event.run_id);
            if is_cancelled && next.is_some() {
                let what = format!(
                    "a steer of {:?} was accepted before its cancel and starts {next:?}",
                    event.run_id
                );
                deck.violation(Some(session), what);
            }
            if next.is_some_and(|next| !accepted_runs.contains(next)) {
                deck.violation(Some(session), format!("a missed steer did not become {next:?}"));
            }
        }
    }
}

/// Every message is in the journal once, was delivered at most once, and waits for nobody who will never come.
fn check_mail(deck: &StormDeck, journal: &[TestEvent], purged: &BTreeSet<String>) {
    let (mut sent, mut delivered): (BTreeMap<&str, usize>, BTreeMap<&str, usize>) = Default::default();
    for event in journal {
        let id = event.data["id"].as_str().unwrap_or_default();
        match event.kind.as_str() {
            "mail.sent" => *sent.entry(id).or_default() += 1,
            "mail.delivered" => *delivered.entry(id).or_default() += 1,
            _ => {}
        }
    }
    for (id, count) in sent.iter().chain(&delivered).filter(|(_, count)| **count > 1) {
        deck.violation(None, format!("the mail {id} was sent or delivered {count} times"));
    }
    let (mail, dropped) = deck.record(|record| (record.mail.clone(), record.dropped_mail.clone()));
    for (id, (session, receipt)) in mail.iter().filter(|(_, (session, _))| !purged.contains(session)) {
        if !sent.contains_key(id.as_str()) {
            deck.violation(Some(session), format!("the mail {id} has the receipt {receipt} and is lost"));
        }
    }
    for (id, session) in dropped.iter().filter(|(_, session)| !purged.contains(*session)) {
        let folder = deck.home.join("mail").join(session);
        let is_kept = ["new", "corrupt"].iter().any(|part| folder.join(part).join(id).exists());
        if !sent.contains_key(id.as_str()) && !is_kept {
            deck.violation(Some(session), format!("the mail {id} was dropped into a folder and is lost"));
        }
    }
}

/// Each fleet ended once, fired no route twice in a round, and started every run that its routes name.
fn check_fleets(deck: &StormDeck, journal: &[TestEvent], purged: &BTreeSet<String>) {
    let accepted: BTreeSet<&str> = journal
        .iter()
        .filter(|event| event.kind == "run.accepted")
        .filter_map(|event| event.run_id.as_deref())
        .collect();
    for (fleet, _) in deck.record(|record| record.fleets.clone()) {
        let own: Vec<&TestEvent> =
            journal.iter().filter(|event| event.data["fleet_id"] == fleet.as_str()).collect();
        let count = |kind: &str| own.iter().filter(|event| event.kind == kind).count();
        if count("fleet.started") != 1 || count("fleet.finished") != 1 {
            let what = format!(
                "the fleet was started {} times and ended {} times",
                count("fleet.started"),
                count("fleet.finished")
            );
            deck.violation(Some(&fleet), what);
        }
        let mut fired = BTreeSet::new();
        for event in own.iter().filter(|event| event.kind == "fleet.routed") {
            if !fired.insert((event.data["route"].as_u64(), event.data["round"].as_u64())) {
                deck.violation(Some(&fleet), format!("a route fired twice in its round: {}", event.data));
            }
        }
        let is_done = own.iter().any(|event| event.kind == "fleet.finished" && event.data["state"] == "done");
        let runs = own
            .iter()
            .filter(|event| event.kind == "fleet.routed")
            .flat_map(|event| event.data["to"].as_array().into_iter().flatten())
            .flat_map(|to| to["runs"].as_array().into_iter().flatten())
            .filter_map(Value::as_str);
        for run in runs.filter(|run| is_done && purged.is_empty() && !accepted.contains(run)) {
            deck.violation(Some(&fleet), format!("the fleet is done and never started {run}"));
        }
    }
}

/// After everything has ended, no list says that something is going on.
async fn check_lists_are_quiet(deck: &StormDeck, stuck: &BTreeSet<String>) {
    for session in list(deck, "/v1/sessions").await.unwrap_or_default() {
        let is_quiet = session["busy"] == false
            && session["queued"] == 0
            && ["idle", "closed"].iter().any(|state| session["state"] == *state);
        if !is_quiet && !session["id"].as_str().is_some_and(|id| stuck.contains(id)) {
            let what = format!(
                "nothing is unfinished, but the session says {} busy {} queued {}",
                session["state"], session["busy"], session["queued"]
            );
            deck.violation(session["id"].as_str(), what);
        }
    }
    for mail in list(deck, "/v1/mail?state=delivering").await.unwrap_or_default() {
        deck.violation(mail["to"].as_str(), format!("the mail {} is still being delivered", mail["id"]));
    }
    for ask in list(deck, "/v1/asks?state=pending").await.unwrap_or_default() {
        deck.violation(ask["session_id"].as_str(), format!("{} is still open", ask["id"]));
    }
}

/// The list of runs tells the same as the journal.
async fn check_run_list(deck: &StormDeck, journal: &[TestEvent], purged: &BTreeSet<String>) {
    let ends = ends(journal);
    for workspace in [&deck.plain_workspace, &deck.git_workspace] {
        let runs = list(deck, &format!("/v1/workspaces/{workspace}/runs")).await.unwrap_or_default();
        for run in runs.iter().filter(|run| !purged.contains(run["session_id"].as_str().unwrap_or_default()))
        {
            let end = ends.get(run["id"].as_str().unwrap_or_default());
            let agrees = match end {
                Some(end) => run["state"] == "finished" && run["finish_reason"] == end.data["finish_reason"],
                None => run["state"] != "finished",
            };
            if !agrees {
                let what =
                    format!("the list shows {} and the journal has {:?}", run, end.map(|end| &end.data));
                deck.violation(run["session_id"].as_str(), what);
            }
        }
    }
}

async fn check_metrics(deck: &StormDeck) {
    let Ok(response) = deck.unix.send(Method::GET, "/metrics", None).await else { return };
    let text = String::from_utf8_lossy(&response.body).into_owned();
    let stuck = text.lines().find_map(|line| line.strip_prefix("quarterdeck_stuck_sessions_total "));
    if stuck.is_some_and(|count| count.trim() != "0") {
        deck.violation(
            None,
            format!("the watchdog woke sessions: quarterdeck_stuck_sessions_total is {stuck:?}"),
        );
    }
}
