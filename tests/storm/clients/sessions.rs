//! Clients that create sessions, change them, merge their work and close them.

use hyper::Method;
use qd_testkit::SeededRandom;
use serde_json::{Value, json};

use super::super::deck::LABEL;
use super::super::prompts;
use super::super::record::{StormAgent, StormSession};
use super::StormClient;

const SANDBOXES: [&str; 4] = ["auto", "off", "deck", "workspace"];
/// The modes that `script` offers.
const MODES: [&str; 2] = ["default", "plan"];

impl StormClient {
    pub(super) async fn create_session(&mut self) {
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
        let mut settings = self.random_settings(&agent);
        if has_worktree {
            settings["worktree"] = json!(true);
        }
        self.create(settings, has_worktree).await;
    }

    fn random_settings(&mut self, agent: &str) -> Value {
        let features = self.deck.options.features;
        let is_script = agent == "script";
        let mut settings = json!({ "agent": agent, "cancel_grace_s": 1 });
        match self.random.below(8) {
            0 => settings["policy"] = json!("allow"),
            1 => settings["policy"] = json!("deny"),
            2 => {
                settings["policy"] = json!([{ "tool": "Bash", "match": "make*", "decision": "allow" }]);
            }
            _ => {}
        }
        match self.random.below(9) {
            0 => settings["budget_usd"] = json!(0.5),
            1 => settings["run_timeout_s"] = json!(1.5),
            2 if is_script => settings["max_turns"] = json!(3),
            3 if is_script && features.session_limits => settings["max_journal_mb"] = json!(1),
            _ => {}
        }
        if is_script && self.random.below(4) == 0 {
            settings["env"] = json!({ "SCRIPT_READY_MS": self.random.below(600).to_string() });
        }
        if is_script && features.quotas && self.random.below(3) == 0 {
            settings["env"]["SCRIPT_LOGIN"] = json!(*self.random.pick(&["one", "two"]));
        }
        if is_script && features.modes && self.random.below(3) == 0 {
            settings["mode"] = json!(*self.random.pick(&MODES));
        }
        if features.sandboxes {
            self.add_random_sandbox(&mut settings);
        }
        settings
    }

    fn add_random_sandbox(&mut self, settings: &mut Value) {
        if self.random.below(2) == 0 {
            settings["sandbox"] = json!(*self.random.pick(&SANDBOXES));
        }
        if self.random.below(4) == 0 {
            settings["network"] = json!(*self.random.pick(&["on", "off"]));
        }
    }

    pub(super) async fn create(&mut self, settings: Value, has_worktree: bool) -> Option<StormSession> {
        let workspace =
            if has_worktree { self.deck.git_workspace.clone() } else { self.deck.plain_workspace.clone() };
        let path = format!("/v1/workspaces/{workspace}/sessions");
        let agent = StormAgent::from_name(settings["agent"].as_str().unwrap_or_default());
        let (status, made) = self.post_keyed(&path, &settings, &[201, 404, 409]).await?;
        if status != 201 {
            self.judge_refused_sandbox(agent, None, &made);
            return None;
        }
        let session = StormSession { id: made["id"].as_str()?.to_owned(), workspace, agent, has_worktree };
        self.deck.record(|record| record.count("sessions"));
        if has_worktree && self.deck.options.features.first_prompts_together {
            let mut twin =
                StormClient { deck: self.deck.clone(), random: SeededRandom::new(self.random.next_number()) };
            tokio::join!(Box::pin(self.prompt(&session)), Box::pin(twin.prompt(&session)));
        }
        self.deck.add_session(session.clone());
        Some(session)
    }

    /// A confinement is refused only if the machine cannot give it, or if it contradicts itself.
    fn judge_refused_sandbox(&self, agent: StormAgent, session: Option<&str>, refusal: &Value) {
        let error = &refusal["error"];
        if error["code"] != "sandbox_unavailable" {
            return;
        }
        self.deck.record(|record| record.count("refused sandboxes"));
        let missing = error["details"]["missing"].as_str().unwrap_or_default();
        let contradicts_itself = missing.starts_with("it needs `sandbox`");
        let is_possible = match error["details"]["wanted"].as_str().unwrap_or_default() {
            "sandbox: deck" => self.deck.support.deck,
            "sandbox: workspace" => self.deck.support.workspace,
            _ => self.deck.support.network_off,
        };
        if agent != StormAgent::ScriptElsewhere && is_possible && !contradicts_itself {
            self.deck.violation(session, format!("this machine can do what was refused: {refusal}"));
        }
    }

    pub(super) async fn patch(&mut self, session: &StormSession) {
        let features = self.deck.options.features;
        let is_local_script = session.agent == StormAgent::Script;
        let mut change = json!({});
        match self.random.below(12) {
            0..=3 if features.sandboxes => self.add_random_sandbox(&mut change),
            4 | 5 if features.modes && is_local_script => change["mode"] = json!(*self.random.pick(&MODES)),
            6 => change["title"] = json!(format!("t{}", self.deck.number())),
            7 => change["policy"] = json!(*self.random.pick(&["ask", "allow", "deny"])),
            8 => change["budget_usd"] = json!(100.0),
            9 => change["run_timeout_s"] = json!(30.0),
            10 => change["max_journal_mb"] = json!(64),
            _ => change["cancel_grace_s"] = json!(0.5),
        }
        let sent = self.send(Method::PATCH, &session.path(""), &change, &[200, 400, 404, 409]).await;
        let Some((status, answer)) = sent else { return };
        match status {
            200 if change.get("sandbox").is_some() || change.get("network").is_some() => {
                self.deck.record(|record| record.count("changed sandboxes"));
            }
            200 if change.get("mode").is_some() => self.deck.record(|record| record.count("changed modes")),
            409 => self.judge_refused_sandbox(session.agent, Some(&session.id), &answer),
            _ => {}
        }
    }

    pub(super) async fn close(&mut self, session: &StormSession) {
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

    pub(super) async fn merge(&mut self, session: &StormSession) {
        self.get(&session.path("/diff?stat=true"), &[200, 404, 409]).await;
        let body = json!({ "squash": self.random.below(2) == 0 });
        let sent = self.send(Method::POST, &session.path("/merge"), &body, &[200, 404, 409]).await;
        if let Some((200, _)) = sent {
            self.deck.record(|record| record.count("merges"));
        }
    }

    /// Children of a running session, by `parent`, which then suspends itself.
    pub(super) async fn start_tree(&mut self, session: &StormSession) {
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
                agent: StormAgent::from_name(agent),
                has_worktree: false,
            };
            self.prompt(&child).await;
        }
        self.steer(session).await;
        self.deck.record(|record| record.count("trees"));
    }
}
