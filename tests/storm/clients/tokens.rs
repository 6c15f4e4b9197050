//! Bearers of tokens with roles. Each token is used for what its role allows and for what it does not, and then it is
//! revoked or expires, in the middle of a stream or of other requests.

use std::sync::Arc;
use std::time::Duration;

use hyper::Method;
use qd_testkit::{SeededRandom, TestClient};
use serde_json::{Value, json};

use super::super::StormFaultLevel;
use super::super::deck::{StormDeck, empty};
use super::answers::{answer, random_answer};
use super::{ANSWERED, StormClient};

/// How long a stream may stay open after its token was revoked. The proxy may hold the connection for a while.
const STREAM_END_LIMIT: Duration = Duration::from_secs(60);

/// A token, and how it is used.
#[derive(Debug)]
struct TokenBearer {
    client: TestClient,
    id: String,
    name: String,
    role: &'static str,
    /// Whether it may be refused at any moment: it expires, or it is being revoked.
    may_be_over: bool,
}

impl TokenBearer {
    /// These statuses, and 401 if the token may be over.
    fn or_over(&self, statuses: &[u16]) -> Vec<u16> {
        let over = self.may_be_over.then_some(401);
        statuses.iter().copied().chain(over).collect()
    }
}

/// Uses one token after another until the storm ends.
pub(crate) async fn use_tokens(deck: Arc<StormDeck>, random: SeededRandom) {
    let mut client = StormClient { deck, random };
    while !client.deck.is_ending() {
        if let Some(mut bearer) = client.create_token().await {
            client.deck.record(|record| record.count("tokens"));
            for _ in 0..1 + client.random.below(6) {
                client.use_token(&bearer).await;
                client.pause().await;
            }
            client.end_token(&mut bearer).await;
        }
        client.pause().await;
    }
}

impl StormClient {
    async fn create_token(&mut self) -> Option<TokenBearer> {
        let role = *self.random.pick(&["viewer", "viewer", "approver", "approver", "operator", "admin"]);
        let name = format!("token-{}", self.deck.number());
        let mut body = json!({ "name": name, "role": role });
        let expires = self.random.below(3) == 0;
        if expires {
            let end = std::time::SystemTime::now() + Duration::from_millis(500 + self.random.below(2500));
            body["expires_at"] = json!(jiff::Timestamp::try_from(end).ok()?.to_string());
        }
        // Where the clock jumps or the daemon is away, the end may have passed already.
        let allowed: &[u16] =
            if expires && self.deck.options.faults != StormFaultLevel::None { &[201, 400] } else { &[201] };
        let (201, made) = self.post_keyed("/v1/tokens", &body, allowed).await? else { return None };
        let client = self.deck.tcp.with_token(made["token"].as_str()?);
        Some(TokenBearer { client, id: made["id"].as_str()?.to_owned(), name, role, may_be_over: expires })
    }

    async fn request_as(
        &self,
        bearer: &TokenBearer,
        method: Method,
        path: &str,
        body: Option<&Value>,
        allowed: &[u16],
    ) -> Option<(u16, Value)> {
        self.deck.request(&bearer.client, method, path, body, &bearer.or_over(allowed)).await
    }

    /// One request that the role allows, or one that it does not.
    async fn use_token(&mut self, bearer: &TokenBearer) {
        let role = bearer.role;
        let open = self.deck.open_sessions();
        match self.random.below(4) {
            0 => {
                self.request_as(bearer, Method::GET, "/v1/sessions?limit=5", None, &[200]).await;
            }
            1 if role != "operator" && role != "admin" && !open.is_empty() => {
                let session = self.random.pick(&open);
                let path = session.agent_path("/cancel");
                self.request_as(bearer, Method::POST, &path, Some(&empty()), &[403]).await;
                let prompt = json!({ "session_id": session.id, "prompt": "not allowed" });
                let path = session.workspace_path("/agent");
                self.request_as(bearer, Method::POST, &path, Some(&prompt), &[403]).await;
            }
            2 if role != "admin" => {
                let body = json!({ "name": format!("{}-more", bearer.name), "role": "admin" });
                self.request_as(bearer, Method::POST, "/v1/tokens", Some(&body), &[403]).await;
                self.request_as(bearer, Method::GET, "/v1/tokens", None, &[403]).await;
            }
            _ => self.answer_one_as(bearer).await,
        }
    }

    /// Answers the newest ask, which everybody but a viewer may.
    async fn answer_one_as(&mut self, bearer: &TokenBearer) {
        let asks = self.request_as(bearer, Method::GET, "/v1/asks?state=pending", None, &[200]).await;
        let Some((200, asks)) = asks else { return };
        let Some(ask) = asks.as_array().and_then(|asks| asks.last()) else { return };
        let id = ask["id"].as_str().unwrap_or_default();
        let allowed =
            if bearer.role == "viewer" { bearer.or_over(&[403]) } else { bearer.or_over(&ANSWERED) };
        let with = random_answer(ask, &mut self.random);
        if answer(&self.deck, &bearer.client, id, &with, &allowed).await == Some(200) {
            self.deck.record(|record| {
                record.count("answers by token");
                record.answers_by_token.insert(id.to_owned(), bearer.name.clone());
            });
        }
    }

    /// Revokes a token while it is used. From then on it opens nothing, and its stream ends.
    async fn end_token(&mut self, bearer: &mut TokenBearer) {
        let stream = if self.random.below(2) == 0 {
            let opened = bearer.client.try_stream("/v1/events?kinds=run.finished");
            tokio::time::timeout(Duration::from_secs(5), opened).await.ok().and_then(Result::ok)
        } else {
            None
        };
        let path = format!("/v1/tokens/{}", bearer.id);
        bearer.may_be_over = true;
        let (deck, unix) = (self.deck.clone(), self.deck.unix.clone());
        let revoke = deck.request(&unix, Method::DELETE, &path, None, &[204, 404]);
        let (revoked, ()) = tokio::join!(revoke, self.use_token(bearer));
        if !matches!(revoked, Some((204 | 404, _))) {
            return;
        }
        self.deck.request(&bearer.client, Method::GET, "/v1/sessions?limit=5", None, &[401]).await;
        if let Some(mut stream) = stream {
            let to_end = async { while let Ok(Some(_)) = stream.try_next().await {} };
            if tokio::time::timeout(STREAM_END_LIMIT, to_end).await.is_err() {
                let what = format!("the stream of {} goes on although its token is revoked", bearer.name);
                self.deck.violation(None, what);
            }
        }
    }
}
