//! Clients that answer asks.

use std::sync::Arc;
use std::time::Duration;

use hyper::Method;
use qd_testkit::{SeededRandom, TestClient};
use serde_json::{Value, json};

use super::super::deck::StormDeck;

/// The statuses of an answer by somebody who may answer: it won, or the ask is over or gone.
pub(crate) const ANSWERED: [u16; 3] = [200, 404, 409];

/// Answers asks until the storm ends: two clients at once, and some asks never.
pub(crate) async fn answer_asks(deck: Arc<StormDeck>, mut random: SeededRandom) {
    while !deck.is_ending() {
        let pending = deck.request(&deck.unix, Method::GET, "/v1/asks?state=pending", None, &[200]).await;
        for ask in pending.iter().flat_map(|(_, asks)| asks.as_array().into_iter().flatten()) {
            let id = ask["id"].as_str().unwrap_or_default();
            // Some asks are left to be withdrawn, or to the end.
            if id.ends_with(['0', '1', '2', 'a', 'b']) || random.below(2) == 0 {
                continue;
            }
            let (one, two) = (random_answer(ask, &mut random), random_answer(ask, &mut random));
            tokio::join!(
                answer(&deck, &deck.unix, id, &one, &ANSWERED),
                answer(&deck, &deck.tcp, id, &two, &ANSWERED)
            );
        }
        tokio::time::sleep(Duration::from_millis(50 + random.below(300))).await;
    }
}

pub(super) fn random_answer(ask: &Value, random: &mut SeededRandom) -> Value {
    if ask["kind"] == "question" {
        return json!({ "value": ask["options"][0].as_str().unwrap_or("fine") });
    }
    match random.below(4) {
        0 => json!({ "decision": "deny", "reason": format!("no {}", random.below(1000)) }),
        1 if ask["risk"] != "high" => json!({ "decision": "allow_always" }),
        _ => json!({ "decision": "allow_once" }),
    }
}

/// Answers one ask, and remembers an answer that won. Returns the status.
pub(crate) async fn answer(
    deck: &StormDeck,
    client: &TestClient,
    ask: &str,
    answer: &Value,
    allowed: &[u16],
) -> Option<u16> {
    let path = format!("/v1/asks/{ask}/answer");
    let (status, receipt) = deck.request(client, Method::POST, &path, Some(answer), allowed).await?;
    if status == 200 {
        deck.record(|record| {
            record.count("answers");
            record.answers.entry(ask.to_owned()).or_default().push(receipt["ask"]["answer"].clone());
        });
    }
    Some(status)
}
