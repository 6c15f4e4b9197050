//! Random clients. Each does one thing after another, remembers what it was told, and leaves the judgement to the
//! checker. A request that broke is repeated only if it can be: with a run id, a mail id or an idempotency key.

use std::sync::Arc;
use std::time::Duration;

use hyper::Method;
use qd_testkit::{SeededRandom, TestClient};
use serde_json::{Value, json};

use super::deck::{LABEL, StormDeck, empty};
use super::fleet_files::random_fleet;
use super::prompts;
use super::record::StormSession;

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
            tokio::join!(answer(&deck, &deck.unix, id, &one), answer(&deck, &deck.tcp, id, &two));
        }
        tokio::time::sleep(Duration::from_millis(50 + random.below(300))).await;
    }
}

fn random_answer(ask: &Value, random: &mut SeededRandom) -> Value {
    if ask["kind"] == "question" {
        return json!({ "value": ask["options"][0].as_str().unwrap_or("fine") });
    }
    match random.below(4) {
        0 => json!({ "decision": "deny", "reason": format!("no {}", random.below(1000)) }),
        1 if ask["risk"] != "high" => json!({ "decision": "allow_always" }),
        _ => json!({ "decision": "allow_once" }),
    }
}

/// Answers one ask, and remembers an answer that won.
pub(crate) async fn answer(deck: &StormDeck, client: &TestClient, ask: &str, answer: &Value) {
    let path = format!("/v1/asks/{ask}/answer");
    let sent = deck.request(client, Method::POST, &path, Some(answer), &[200, 404, 409]).await;
    if let Some((200, receipt)) = sent {
        deck.record(|record| {
            record.count("answers");
            record.answers.entry(ask.to_owned()).or_default().push(receipt["ask"]["answer"].clone());
        });
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
            55..=58 => self.patch(&session).await,
            59..=61 if features.closes => self.close(&session).await,
            62..=67 if features.mail => self.send_mail(&session).await,
            68 | 69 if features.mail => self.drop_mail(&session),
            70 | 71 if features.mail => self.claim_mail(&session).await,
            72..=74 if features.fleets => self.start_fleet().await,
            75 if features.fleets => self.cancel_fleet().await,
            76 | 77 if features.halts => self.halt().await,
            78..=81 if features.worktrees && branched.has_worktree => self.merge(&branched).await,
            82..=84 if features.suspend && session.is_script => self.start_tree(&session).await,
            85..=90 => self.look_around(&session).await,
            91 => self.collect_garbage().await,
            92..=94 => self.move_in_queue(&busy).await,
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

    async fn create_session(&mut self) {
        let features = self.deck.options.features;
        let has_worktree = features.worktrees && self.random.below(4) == 0;
        let agent = match self.random.below(10) {
            0..=2 => "echo".to_owned(),
            3 if features.other_machines && !has_worktree => format!("script@{LABEL}"),
            4 if features.other_machines && !has_worktree => {
                self.deck.url_agent.clone().unwrap_or("script".into())
            }
            _ => "script".to_owned(),
        };
        let mut settings = json!({ "agent": agent, "cancel_grace_s": 1 });
        if has_worktree {
            settings["worktree"] = json!(true);
        }
        match self.random.below(8) {
            0 => settings["policy"] = json!("allow"),
            1 => settings["policy"] = json!("deny"),
            2 => {
                settings["policy"] = json!([{ "tool": "Bash", "match": "make*", "decision": "allow" }]);
            }
            _ => {}
        }
        match self.random.below(8) {
            0 => settings["budget_usd"] = json!(0.5),
            1 => settings["run_timeout_s"] = json!(1.5),
            2 if agent == "script" => settings["max_turns"] = json!(3),
            _ => {}
        }
        if agent == "script" && self.random.below(4) == 0 {
            settings["env"] = json!({ "SCRIPT_READY_MS": self.random.below(600).to_string() });
        }
        self.create(settings, has_worktree).await;
    }

    async fn create(&mut self, settings: Value, has_worktree: bool) -> Option<StormSession> {
        let workspace =
            if has_worktree { self.deck.git_workspace.clone() } else { self.deck.plain_workspace.clone() };
        let path = format!("/v1/workspaces/{workspace}/sessions");
        let (status, made) = self.post_keyed(&path, &settings, &[201, 404, 409]).await?;
        if status != 201 {
            return None;
        }
        let agent = settings["agent"].as_str().unwrap_or_default();
        let session = StormSession {
            id: made["id"].as_str()?.to_owned(),
            workspace,
            is_script: agent != "echo",
            has_worktree,
        };
        self.deck.record(|record| record.count("sessions"));
        if has_worktree && self.deck.options.features.first_prompts_together {
            let mut twin =
                StormClient { deck: self.deck.clone(), random: SeededRandom::new(self.random.next_number()) };
            tokio::join!(Box::pin(self.prompt(&session)), Box::pin(twin.prompt(&session)));
        }
        self.deck.add_session(session.clone());
        Some(session)
    }

    fn random_prompt(&mut self, session: &StormSession, number: u64) -> String {
        if session.is_script {
            prompts::script_prompt(number, &mut self.random, &self.deck.options.features)
        } else {
            prompts::echo_prompt(number, &mut self.random)
        }
    }

    async fn prompt(&mut self, session: &StormSession) {
        for _ in 0..=self.random.below(3) {
            let number = self.deck.number();
            let prompt = self.random_prompt(session, number);
            self.prompt_with(session, number, &prompt).await;
        }
    }

    /// Sends a prompt with a run id of its own until it is answered, sometimes twice at once.
    async fn prompt_with(&mut self, session: &StormSession, number: u64, prompt: &str) -> Option<String> {
        let run = format!("r{number}");
        self.mark(session, number);
        let mut body = json!({ "session_id": session.id, "prompt": prompt, "run_id": run });
        if self.random.below(10) == 0 {
            let file =
                json!({ "name": "a.txt", "mime": "text/plain", "data": qd_testkit::base64(b"attached") });
            if session.is_script {
                body["attachments"] = json!([file]);
            }
        }
        let path = session.workspace_path("/agent");
        let allowed = [202, 400, 404, 409];
        loop {
            let (one, two) = (self.any_client(), self.any_client());
            let deck = self.deck.clone();
            let first = deck.request(&one, Method::POST, &path, Some(&body), &allowed);
            let answers = if self.random.below(6) == 0 {
                let second = deck.request(&two, Method::POST, &path, Some(&body), &allowed);
                let (first, second) = tokio::join!(first, second);
                vec![first, second]
            } else {
                vec![first.await]
            };
            for (status, receipt) in answers.into_iter().flatten() {
                match status {
                    202 => {
                        if receipt["run_id"] != run.as_str() {
                            deck.violation(Some(&session.id), format!("{run} was answered with {receipt}"));
                        }
                        self.remember_run(session, &run, receipt);
                        return Some(run);
                    }
                    400 => {
                        // Attachments that this agent cannot take are refused; anything else is our mistake.
                        if receipt["error"]["code"] != "unsupported_setting" {
                            deck.violation(Some(&session.id), format!("a prompt was refused: {receipt}"));
                        }
                        return None;
                    }
                    404 | 409 => return None,
                    _ => {}
                }
            }
            if deck.is_ending() {
                return None;
            }
            self.pause().await;
        }
    }

    /// Remembers to whom a marker was sent.
    fn mark(&self, session: &StormSession, number: u64) {
        self.deck.record(|record| record.markers.insert(number, session.id.clone()));
    }

    fn mark_next(&self, session: &StormSession) -> u64 {
        let number = self.deck.number();
        self.mark(session, number);
        number
    }

    fn remember_run(&self, session: &StormSession, run: &str, receipt: Value) {
        self.deck.record(|record| {
            let known = record.runs.insert(run.to_owned(), (session.id.clone(), receipt.clone()));
            if let Some((_, known)) = known
                && known["seq"] != receipt["seq"]
            {
                record.violations.push(super::record::StormViolation {
                    session: Some(session.id.clone()),
                    what: format!("{run} has two receipts: {known} and {receipt}"),
                });
            }
        });
    }

    fn remember_cancelled(&self, session: &StormSession, runs: &Value) {
        self.deck.record(|record| {
            record.count("cancels");
            for run in runs.as_array().into_iter().flatten().filter_map(Value::as_str) {
                record.cancelled.insert(run.to_owned(), session.id.clone());
            }
        });
    }

    async fn cancel(&mut self, session: &StormSession) {
        let sent = self.send(Method::POST, &session.agent_path("/cancel"), &empty(), &[200, 404]).await;
        if let Some((200, answer)) = sent {
            self.remember_cancelled(session, &answer["cancelled"]);
        }
    }

    /// One of the session's runs, which may have ended long ago.
    fn some_run(&mut self, session: &StormSession) -> Option<String> {
        let runs: Vec<String> = self.deck.record(|record| {
            let own = record.runs.iter().filter(|(_, (owner, _))| *owner == session.id);
            own.map(|(run, _)| run.clone()).collect()
        });
        if runs.is_empty() { None } else { Some(self.random.pick(&runs).clone()) }
    }

    async fn cancel_one(&mut self, session: &StormSession) {
        let Some(run) = self.some_run(session) else { return };
        let body = json!({ "run_id": run, "reason": "one" });
        let sent = self.send(Method::POST, &session.agent_path("/cancel"), &body, &[200, 404]).await;
        if let Some((200, answer)) = sent {
            self.remember_cancelled(session, &answer["cancelled"]);
        }
    }

    async fn remove_from_queue(&mut self, session: &StormSession) {
        let path = match self.some_run(session) {
            Some(run) if self.random.below(3) > 0 => session.agent_path(&format!("/queue/{run}")),
            _ => session.agent_path("/queue"),
        };
        let client = self.any_client();
        let sent = self.deck.request(&client, Method::DELETE, &path, None, &[200, 404, 409]).await;
        if let Some((200, answer)) = sent {
            self.remember_cancelled(session, &answer["removed"]);
        }
    }

    /// Moves a queued run before another one, or to the end. Either may have started or ended meanwhile.
    async fn move_in_queue(&mut self, session: &StormSession) {
        let Some((200, queue)) = self.get(&session.agent_path("/queue"), &[200, 404]).await else { return };
        let queued: Vec<&Value> = queue.as_array().into_iter().flatten().collect();
        if queued.is_empty() {
            return;
        }
        let run = self.random.pick(&queued)["run_id"].as_str().unwrap_or_default().to_owned();
        let before = match self.random.below(3) {
            0 => Value::Null,
            _ => self.random.pick(&queued)["run_id"].clone(),
        };
        let path = session.agent_path(&format!("/queue/{run}"));
        let sent = self.send(Method::PATCH, &path, &json!({ "before": before }), &[200, 404, 409]).await;
        if let Some((200, place)) = sent {
            if place["run_id"] != run.as_str() || place["position"].as_u64().is_none_or(|place| place == 0) {
                self.deck.violation(Some(&session.id), format!("a move of {run} was answered with {place}"));
            }
            self.deck.record(|record| record.count("moves"));
        }
    }

    async fn steer(&mut self, session: &StormSession) {
        let number = self.mark_next(session);
        let body = json!({ "text": format!("steer {}", prompts::marker(number)) });
        let sent = self.send(Method::POST, &session.agent_path("/steer"), &body, &[202, 404, 409]).await;
        if let Some((202, receipt)) = sent {
            self.deck.record(|record| {
                record.count("steers");
                record.steers.push((session.id.clone(), receipt));
            });
        }
    }

    async fn patch(&mut self, session: &StormSession) {
        let change = match self.random.below(5) {
            0 => json!({ "title": format!("t{}", self.deck.number()) }),
            1 => json!({ "policy": *self.random.pick(&["ask", "allow", "deny"]) }),
            2 => json!({ "budget_usd": 100.0 }),
            3 => json!({ "run_timeout_s": 30.0 }),
            _ => json!({ "cancel_grace_s": 0.5 }),
        };
        self.send(Method::PATCH, &session.path(""), &change, &[200, 400, 404, 409]).await;
    }

    async fn close(&mut self, session: &StormSession) {
        self.deck.remove_session(&session.id);
        let purge = self.random.below(3) == 0;
        let path = if purge { session.path("?purge=true") } else { session.path("") };
        if purge {
            self.deck.record(|record| record.purged.insert(session.id.clone()));
        }
        let client = self.any_client();
        self.deck.request(&client, Method::DELETE, &path, None, &[200, 404]).await;
        self.deck.record(|record| record.count("closes"));
    }

    async fn send_mail(&mut self, session: &StormSession) {
        let number = self.mark_next(session);
        let id = format!("m{number}");
        let deliver = *self.random.pick(&["prompt", "steer", "hold"]);
        let body =
            json!({ "id": id, "text": format!("mail {}", prompts::marker(number)), "deliver": deliver });
        for _ in 0..=self.random.below(2) {
            let sent = self.send(Method::POST, &session.path("/mail"), &body, &[202, 404, 409]).await;
            if let Some((202, receipt)) = sent {
                let known = self.deck.record(|record| {
                    record.count("mail");
                    record.mail.insert(id.clone(), (session.id.clone(), receipt.clone()))
                });
                if let Some((_, known)) = known
                    && known["seq"] != receipt["seq"]
                {
                    let what = format!("mail {id} has two receipts: {known} and {receipt}");
                    self.deck.violation(Some(&session.id), what);
                }
            }
        }
    }

    fn drop_mail(&mut self, session: &StormSession) {
        let number = self.mark_next(session);
        let id = format!("m{number}");
        let folder = self.deck.home.join("mail").join(&session.id);
        let text = json!({ "id": id, "text": format!("file {}", prompts::marker(number)) }).to_string();
        let (written, renamed) = (folder.join("tmp").join(&id), folder.join("new").join(&id));
        // The folder is gone if the session was purged meanwhile.
        if std::fs::write(&written, text).is_ok() && std::fs::rename(&written, &renamed).is_ok() {
            self.deck.record(|record| {
                record.count("dropped");
                record.dropped_mail.insert(id, session.id.clone());
            });
        }
    }

    async fn claim_mail(&mut self, session: &StormSession) {
        let claim = json!({ "max": 2, "limit_s": 2 });
        let claimed = self.post_keyed(&session.path("/mail/claim"), &claim, &[200, 404, 409]).await;
        let Some((200, claimed)) = claimed else { return };
        for mail in claimed.as_array().into_iter().flatten() {
            let id = mail["id"].as_str().unwrap_or_default();
            let body = json!({ "claim": mail["claim"] });
            let path = session.path(&format!("/mail/{id}/ack"));
            if self.random.below(3) > 0
                && let Some((200, _)) = self.send(Method::POST, &path, &body, &[200, 404, 409]).await
            {
                self.deck.record(|record| record.acknowledged_mail.insert(id.to_owned()));
            }
        }
    }

    async fn start_fleet(&mut self) {
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

    async fn cancel_fleet(&mut self) {
        let fleets: Vec<_> = self.deck.record(|record| record.fleets.clone().into_iter().collect::<Vec<_>>());
        if fleets.is_empty() {
            return;
        }
        let (id, workspace) = self.random.pick(&fleets).clone();
        let path = format!("/v1/workspaces/{workspace}/fleets/{id}/cancel");
        self.send(Method::POST, &path, &empty(), &[200]).await;
    }

    async fn halt(&mut self) {
        let body = json!({ "reason": "a storm", "cancel": self.random.below(3) == 0 });
        self.send(Method::POST, "/v1/halt", &body, &[200]).await;
        self.deck.record(|record| record.count("halts"));
        tokio::time::sleep(Duration::from_millis(100 + self.random.below(900))).await;
        let client = self.any_client();
        self.deck.request(&client, Method::DELETE, "/v1/halt", None, &[200]).await;
    }

    async fn merge(&mut self, session: &StormSession) {
        self.get(&session.path("/diff?stat=true"), &[200, 404, 409]).await;
        let body = json!({ "squash": self.random.below(2) == 0 });
        let sent = self.send(Method::POST, &session.path("/merge"), &body, &[200, 404, 409]).await;
        if let Some((200, _)) = sent {
            self.deck.record(|record| record.count("merges"));
        }
    }

    /// Children of a running session, by `parent`, which then suspends itself.
    async fn start_tree(&mut self, session: &StormSession) {
        let number = self.deck.number();
        self.prompt_with(session, number, &prompts::parent_prompt(number)).await;
        for _ in 0..=self.random.below(2) {
            let agent = *self.random.pick(&["echo", "script"]);
            let settings = json!({ "agent": agent, "parent": session.id, "cancel_grace_s": 1 });
            let path = session.workspace_path("/sessions");
            let Some((201, made)) = self.post_keyed(&path, &settings, &[201, 400, 404, 409]).await else {
                continue;
            };
            if let Some(child) = made["id"].as_str() {
                self.deck.record(|record| record.parents.insert(child.to_owned(), session.id.clone()));
            }
            let child = StormSession {
                id: made["id"].as_str().unwrap_or_default().to_owned(),
                workspace: session.workspace.clone(),
                is_script: agent == "script",
                has_worktree: false,
            };
            self.prompt(&child).await;
        }
        self.steer(session).await;
        self.deck.record(|record| record.count("trees"));
    }

    /// Lists and single items, which must answer in every state.
    async fn look_around(&mut self, session: &StormSession) {
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
            "/healthz".to_owned(),
        ];
        let path = self.random.pick(&paths).clone();
        self.get(&path, &[200, 404, 408, 409]).await;
    }

    async fn collect_garbage(&mut self) {
        self.get("/v1/gc", &[200]).await;
        // Nothing is a year old, however far the clock jumps.
        self.send(Method::POST, "/v1/gc", &json!({ "older_than_days": 3650 }), &[200]).await;
    }
}
