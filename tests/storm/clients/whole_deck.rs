//! Clients that use what concerns more than one session: fleets, halts, quotas, lists, garbage.

use std::time::Duration;

use hyper::Method;
use serde_json::{Value, json};

use super::super::deck::empty;
use super::super::fleet_files::random_fleet;
use super::super::record::StormSession;
use super::StormClient;

impl StormClient {
    pub(super) async fn start_fleet(&mut self) {
        let features = self.deck.options.features;
        let (file, needs_git) = random_fleet(self.deck.number(), &mut self.random, &features);
        let workspace =
            if needs_git { self.deck.git_workspace.clone() } else { self.deck.plain_workspace.clone() };
        let path = format!("/v1/workspaces/{workspace}/fleets");
        let sent = self.post_keyed(&path, &Value::String(file), &[201]).await;
        if let Some((201, fleet)) = sent
            && let Some(id) = fleet["id"].as_str()
        {
            self.deck.record(|record| {
                record.count("fleets");
                record.fleets.insert(id.to_owned(), workspace);
            });
        }
    }

    pub(super) async fn cancel_fleet(&mut self) {
        let fleets: Vec<_> = self.deck.record(|record| record.fleets.clone().into_iter().collect::<Vec<_>>());
        if fleets.is_empty() {
            return;
        }
        let (id, workspace) = self.random.pick(&fleets).clone();
        let path = format!("/v1/workspaces/{workspace}/fleets/{id}/cancel");
        self.send(Method::POST, &path, &empty(), &[200]).await;
    }

    pub(super) async fn halt(&mut self) {
        let body = json!({ "reason": "a storm", "cancel": self.random.below(3) == 0 });
        self.send(Method::POST, "/v1/halt", &body, &[200]).await;
        self.deck.record(|record| record.count("halts"));
        tokio::time::sleep(Duration::from_millis(100 + self.random.below(900))).await;
        let client = self.any_client();
        self.deck.request(&client, Method::DELETE, "/v1/halt", None, &[200]).await;
    }

    /// Releases an account whose quota is exhausted, as a person would who knows better.
    pub(super) async fn release_quota(&mut self) {
        let Some((200, quotas)) = self.get("/v1/quotas", &[200]).await else { return };
        let quotas: Vec<&Value> = quotas.as_array().into_iter().flatten().collect();
        if quotas.is_empty() {
            return;
        }
        let account = self.random.pick(&quotas)["account"].as_str().unwrap_or_default();
        let client = self.any_client();
        let path = format!("/v1/quotas/{account}");
        if let Some((200, _)) = self.deck.request(&client, Method::DELETE, &path, None, &[200, 404]).await {
            self.deck.record(|record| record.count("released quotas"));
        }
    }

    /// Lists and single items, which must answer in every state.
    pub(super) async fn look_around(&mut self, session: &StormSession) {
        let run = self.some_run(session).unwrap_or("r1".into());
        let paths = [
            session.path(""),
            session.path("?tree=true"),
            session.path("/messages"),
            session.path("/mail"),
            session.path("/events?after=0&limit=50"),
            session.agent_path("/queue"),
            session.workspace_path("/runs?limit=20"),
            session.workspace_path(&format!("/runs/{run}")),
            session.workspace_path(&format!("/runs/{run}/wait?timeout_s=1")),
            session.workspace_path("/fleets"),
            "/v1/sessions?open=true".to_owned(),
            "/v1/workers".to_owned(),
            "/v1/workers/joined".to_owned(),
            "/v1/worktrees".to_owned(),
            "/v1/mail?state=waiting".to_owned(),
            "/metrics".to_owned(),
            "/v1/halt".to_owned(),
            "/v1/quotas".to_owned(),
            "/v1/tokens".to_owned(),
            "/healthz".to_owned(),
        ];
        let path = self.random.pick(&paths).clone();
        self.get(&path, &[200, 404, 408, 409]).await;
    }

    pub(super) async fn collect_garbage(&mut self) {
        self.get("/v1/gc", &[200]).await;
        // Nothing is a year old, however far the clock jumps.
        self.send(Method::POST, "/v1/gc", &json!({ "older_than_days": 3650 }), &[200]).await;
    }
}
