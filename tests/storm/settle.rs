//! The end of a storm: every fault is healed, the halt is lifted, asks are answered, and then all work must come to an
//! end without any further help. A session that still has work and makes no progress is stuck.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::{Value, json};

use super::StormFaultLevel;
use super::clients::{ANSWERED, answer};
use super::deck::StormDeck;

/// No event for so long means that nothing happens any more. It is longer than every limit of the product that work
/// may wait for: an agent has 60 s to start.
const STUCK_AFTER: Duration = Duration::from_secs(75);
/// How long all work may take to come to an end. Work that goes on for ever is not progress.
const SETTLE_LIMIT: Duration = Duration::from_secs(180);

/// How long a quota may take to reset at the end. Those of a storm reset within seconds, unless the clock jumped between an
/// agent's report and the daemon that read it; then a person releases them.
const QUOTAS_LIMIT: Duration = Duration::from_secs(20);

pub(crate) async fn settle(deck: &StormDeck) {
    deck.heal().await;
    lift_halt(deck).await;
    let began = Instant::now();
    let (mut last_seq, mut last_progress) = (0, Instant::now());
    loop {
        answer_everything(deck).await;
        let unfinished = unfinished_work(deck).await;
        if unfinished.as_ref().is_some_and(Vec::is_empty) {
            return;
        }
        let seq = deck.last_seq.load(Ordering::Relaxed);
        if seq != last_seq {
            (last_seq, last_progress) = (seq, Instant::now());
        }
        if last_progress.elapsed() > QUOTAS_LIMIT && deck.options.faults == StormFaultLevel::All {
            release_quotas(deck).await;
        }
        if last_progress.elapsed() > STUCK_AFTER || began.elapsed() > SETTLE_LIMIT {
            for (session, what) in unfinished.unwrap_or_else(|| vec![(None, "no answer".to_owned())]) {
                deck.violation(session.as_deref(), format!("stuck at the end: {what}"));
            }
            return;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn lift_halt(deck: &StormDeck) {
    for _ in 0..50 {
        if let Some((200, _)) = deck.request(&deck.unix, Method::DELETE, "/v1/halt", None, &[200]).await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    deck.violation(None, "the halt cannot be lifted".to_owned());
}

async fn release_quotas(deck: &StormDeck) {
    for quota in list(deck, "/v1/quotas").await.unwrap_or_default() {
        let path = format!("/v1/quotas/{}", quota["account"].as_str().unwrap_or_default());
        deck.request(&deck.unix, Method::DELETE, &path, None, &[200, 404]).await;
        deck.record(|record| record.count("quotas released at the end"));
    }
}

/// Answers all asks, so that whoever waits for one goes on.
async fn answer_everything(deck: &StormDeck) {
    let pending = deck.request(&deck.unix, Method::GET, "/v1/asks?state=pending", None, &[200]).await;
    for ask in pending.iter().flat_map(|(_, asks)| asks.as_array().into_iter().flatten()) {
        let id = ask["id"].as_str().unwrap_or_default();
        let value = if ask["kind"] == "question" {
            json!({ "value": ask["options"][0].as_str().unwrap_or("fine") })
        } else {
            json!({ "decision": "allow_once" })
        };
        answer(deck, &deck.unix, id, &value, &ANSWERED).await;
    }
}

/// Sessions that are busy and fleets that have not ended. `None` if they could not be listed.
async fn unfinished_work(deck: &StormDeck) -> Option<Vec<(Option<String>, String)>> {
    let mut unfinished = Vec::new();
    for session in list(deck, "/v1/sessions").await? {
        if session["busy"] == true || session["closing"] == true && session["state"] != "closed" {
            let id = session["id"].as_str().unwrap_or_default().to_owned();
            let what = format!(
                "the session's state is {}, busy {}, queued {}, closing {}",
                session["state"], session["busy"], session["queued"], session["closing"]
            );
            unfinished.push((Some(id), what));
        }
    }
    for workspace in [&deck.plain_workspace, &deck.git_workspace] {
        for fleet in list(deck, &format!("/v1/workspaces/{workspace}/fleets")).await? {
            if fleet["state"] == "running" || fleet["state"] == "waiting" {
                let id = fleet["id"].as_str().unwrap_or_default().to_owned();
                unfinished.push((Some(id), format!("the fleet is {}", fleet["state"])));
            }
        }
    }
    Some(unfinished)
}

/// A whole list, page by page.
pub(crate) async fn list(deck: &StormDeck, path: &str) -> Option<Vec<Value>> {
    const PAGE: usize = 1000;
    let (mut all, mut after) = (Vec::new(), None::<String>);
    loop {
        let separator = if path.contains('?') { '&' } else { '?' };
        let cursor = after.as_ref().map(|after| format!("&after={after}")).unwrap_or_default();
        let page = format!("{path}{separator}limit={PAGE}{cursor}");
        let response =
            tokio::time::timeout(Duration::from_secs(120), deck.unix.send(Method::GET, &page, None))
                .await
                .ok()?
                .ok()?;
        if response.status != 200 {
            return None;
        }
        let items: Vec<Value> = serde_json::from_slice(&response.body).ok()?;
        all.extend(items);
        after = response.header("next-after").map(str::to_owned);
        if after.is_none() {
            return Some(all);
        }
    }
}
