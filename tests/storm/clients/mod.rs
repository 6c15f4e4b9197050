//! Random clients. Each does one thing after another, remembers what it was told, and leaves the judgement to the
//! checker. A request that broke is repeated only if it can be: with a run id, a mail id or an idempotency key.
//!
//! - [`runs`]: prompts, steers, cancels and the queue of one session.
//! - [`sessions`]: sessions are created, changed, merged and closed.
//! - [`mail`]: mail to sessions, over HTTP and by folders.
//! - [`whole_deck`]: fleets, halts, quotas, lists, garbage.
//! - [`answers`]: answers to asks.
//! - [`tokens`]: bearers of tokens with roles.

mod answers;
mod mail;
mod runs;
mod sessions;
mod tokens;
mod whole_deck;

use std::sync::Arc;
use std::time::Duration;

use hyper::Method;
use qd_testkit::{SeededRandom, TestClient};
use serde_json::Value;

pub(crate) use self::answers::{ANSWERED, answer, answer_asks};
pub(crate) use self::tokens::use_tokens;
use super::deck::StormDeck;

/// One client among many.
struct StormClient {
    deck: Arc<StormDeck>,
    random: SeededRandom,
}

/// Acts until the storm ends.
pub(crate) async fn act(deck: Arc<StormDeck>, random: SeededRandom) {
    let mut client = StormClient { deck, random };
    while !client.deck.is_ending() {
        Box::pin(client.act_once()).await;
        let pause = client.random.below(120);
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }
}

impl StormClient {
    async fn act_once(&mut self) {
        let features = self.deck.options.features;
        let open = self.deck.open_sessions();
        if open.is_empty() || (open.len() < self.deck.options.sessions && self.random.below(4) == 0) {
            return self.create_session().await;
        }
        let session = self.random.pick(&open).clone();
        // Steers and cancels mostly go to a session that works, merges to one with a worktree.
        let running = self.deck.record(|record| record.running.clone());
        let busy: Vec<_> = open.iter().filter(|session| running.contains(&session.id)).collect();
        let busy = if busy.is_empty() { session.clone() } else { (*self.random.pick(&busy)).clone() };
        let branched: Vec<_> = open.iter().filter(|session| session.has_worktree).collect();
        let branched =
            if branched.is_empty() { session.clone() } else { (*self.random.pick(&branched)).clone() };
        match self.random.below(100) {
            0..=34 => self.prompt(&session).await,
            35..=37 if features.cancels => self.cancel(&session).await,
            38..=42 if features.cancels => self.cancel(&busy).await,
            43..=45 if features.cancels => self.cancel_one(&busy).await,
            46..=48 if features.cancels => self.remove_from_queue(&busy).await,
            49..=54 => self.steer(&busy).await,
            55..=58 | 96 | 97 => self.patch(&session).await,
            59..=61 if features.closes => self.close(&session).await,
            62..=67 if features.mail => self.send_mail(&session).await,
            68 | 69 if features.mail => self.drop_mail(&session),
            70 | 71 if features.mail => self.claim_mail(&session).await,
            72..=74 if features.fleets => self.start_fleet().await,
            75 if features.fleets => self.cancel_fleet().await,
            76 | 77 if features.halts => self.halt().await,
            78..=81 if features.worktrees && branched.has_worktree => self.merge(&branched).await,
            82..=84 if features.suspend && session.is_script() => self.start_tree(&session).await,
            85..=90 => self.look_around(&session).await,
            91 => self.collect_garbage().await,
            92..=94 => self.move_in_queue(&busy).await,
            95 if features.quotas => self.release_quota().await,
            _ => self.prompt(&session).await,
        }
    }

    /// The socket, or TCP through the proxy.
    fn any_client(&mut self) -> TestClient {
        if self.random.below(3) == 0 { self.deck.tcp.clone() } else { self.deck.unix.clone() }
    }

    async fn send(
        &mut self,
        method: Method,
        path: &str,
        body: &Value,
        allowed: &[u16],
    ) -> Option<(u16, Value)> {
        let client = self.any_client();
        self.deck.request(&client, method, path, Some(body), allowed).await
    }

    async fn get(&mut self, path: &str, allowed: &[u16]) -> Option<(u16, Value)> {
        let client = self.any_client();
        self.deck.request(&client, Method::GET, path, None, allowed).await
    }

    /// A POST with a key. It is repeated until there is an answer; then it is sometimes repeated once more, and must
    /// be answered the same way.
    async fn post_keyed(&mut self, path: &str, body: &Value, allowed: &[u16]) -> Option<(u16, Value)> {
        let key = format!("k{}", self.deck.number());
        loop {
            let mut client = self.any_client().with_key(&key);
            if matches!(body, Value::String(_)) {
                client = client.with_header("content-type", "application/yaml");
            }
            match self.deck.request(&client, Method::POST, path, Some(body), allowed).await {
                Some((429 | 503, _)) | None if !self.deck.is_ending() => self.pause().await,
                Some((status @ 200..300, answer)) => {
                    if self.random.below(4) == 0 {
                        let again = self.deck.request(&client, Method::POST, path, Some(body), allowed).await;
                        if let Some((200..300, repeated)) = again
                            && repeated != answer
                        {
                            let what =
                                format!("POST {path} with key {key} gave {answer} and then {repeated}");
                            self.deck.violation(None, what);
                        }
                    }
                    return Some((status, answer));
                }
                other => return other,
            }
        }
    }

    async fn pause(&mut self) {
        tokio::time::sleep(Duration::from_millis(20 + self.random.below(100))).await;
    }
}
