//! Real agents, installed from their packages and driven through `qd` against the scripted model. Every agent plays
//! the same scenes. What a scene expects of an agent is what `GET /v1/agents` says about it, so a manifest that
//! promises too much fails here.
//!
//! A cancel counts only if the model's stream was dropped, or the model was never called.

mod adoption;
mod cancels;
mod conditions;
mod confined;
mod continuity;
mod conversations;
mod cost;
mod failures;
mod fleet;
mod modes;
mod own_settings;
mod quota;
mod shown;
mod subsessions;
mod tools;

use std::path::Path;
use std::time::Duration;

use qd_testkit::model::{ModelRequestOutcome, ModelRequestRecord};
use qd_testkit::real_agents::isolated_environment;
use qd_testkit::{FakeModel, InstalledAgents, RealAgent, TestDaemon, TestEvent, TestSession};
use serde_json::{Value, json};

use conditions::SceneConditions;

/// Time limit for a run of a real agent. One agent may have to wait for the next minute before it resumes a
/// conversation.
const RUN: Duration = Duration::from_secs(120);

/// Generates a test for every agent and scene.
macro_rules! agents {
    ($($name:ident: $cli:ident),* $(,)?) => {$(
        mod $name {
            use qd_testkit::RealAgent;

            #[tokio::test]
            async fn it_talks_asks_and_tells_its_failures() {
                super::conversations::scene(RealAgent::$cli).await;
            }

            #[tokio::test]
            async fn a_cancel_stops_it_wherever_it_is() {
                super::cancels::scene(RealAgent::$cli).await;
            }

            #[tokio::test]
            async fn it_is_steered_and_outlives_the_daemon_and_its_worker() {
                super::continuity::scene(RealAgent::$cli).await;
            }

            #[tokio::test]
            async fn its_own_settings_do_not_outvote_the_policy() {
                super::own_settings::scene(RealAgent::$cli).await;
            }

            #[tokio::test]
            async fn its_silence_is_shown_and_ended() {
                super::failures::silence(RealAgent::$cli).await;
            }

            #[tokio::test]
            async fn it_says_how_to_sign_in_and_which_model_is_unknown() {
                super::failures::explanations(RealAgent::$cli).await;
            }

            #[tokio::test]
            async fn it_stops_at_its_budget() {
                super::cost::scene(RealAgent::$cli).await;
            }

            #[tokio::test]
            async fn its_mode_is_set_and_survives_it() {
                super::modes::scene(RealAgent::$cli).await;
            }

            #[tokio::test]
            async fn its_context_is_shown() {
                super::modes::context(RealAgent::$cli).await;
            }

            #[tokio::test]
            async fn at_workspace_it_works_resumes_and_writes_nothing_outside() {
                super::confined::at_workspace(RealAgent::$cli).await;
            }

            #[tokio::test]
            async fn at_workspace_it_works_for_an_ordinary_user_too() {
                super::confined::at_workspace_of_user(RealAgent::$cli).await;
            }
        }
    )*};
}

agents! {
    claude: Claude,
    codex: Codex,
    gemini: Gemini,
    copilot: Copilot,
    claude_acp: ClaudeAcp,
    codex_acp: CodexAcp,
    opencode: Opencode,
    qwen: Qwen,
}

/// Generates a test for every agent whose conversations can be adopted.
macro_rules! adoptable_agents {
    ($($name:ident: $cli:ident),* $(,)?) => {$(
        #[tokio::test]
        async fn $name() {
            adoption::scene(RealAgent::$cli).await;
        }
    )*};
}

adoptable_agents! {
    claude_goes_on_with_an_adopted_conversation: Claude,
    codex_goes_on_with_an_adopted_conversation: Codex,
    gemini_goes_on_with_an_adopted_conversation: Gemini,
    copilot_goes_on_with_an_adopted_conversation: Copilot,
    qwen_goes_on_with_an_adopted_conversation: Qwen,
}

/// Generates a test for every agent that names the reset of an exhausted quota at once. The others retry for a long time
/// first.
macro_rules! agents_with_quotas {
    ($($name:ident: $cli:ident),* $(,)?) => {$(
        #[tokio::test]
        async fn $name() {
            quota::scene(RealAgent::$cli).await;
        }
    )*};
}

agents_with_quotas! {
    claude_waits_for_its_quota_to_reset: Claude,
    codex_waits_for_its_quota_to_reset: Codex,
    gemini_waits_for_its_quota_to_reset: Gemini,
    copilot_waits_for_its_quota_to_reset: Copilot,
    claude_acp_waits_for_its_quota_to_reset: ClaudeAcp,
    codex_acp_waits_for_its_quota_to_reset: CodexAcp,
}

#[tokio::test]
async fn copilot_reports_failed_calls_as_errors() {
    failures::errors_as_text().await;
}

#[tokio::test]
async fn opencode_repeats_no_usage() {
    failures::no_repeated_usage().await;
}

#[tokio::test]
async fn claude_has_its_tasks_as_a_plan() {
    modes::plans(RealAgent::Claude).await;
}

#[tokio::test]
async fn claude_acp_has_its_tasks_as_a_plan() {
    modes::plans(RealAgent::ClaudeAcp).await;
}

#[tokio::test]
async fn opencode_has_its_to_do_list_as_a_plan() {
    modes::plans(RealAgent::Opencode).await;
}

/// Generates a test for every agent that switches its mode by itself or by a command, and shows it.
macro_rules! agents_that_switch {
    ($($name:ident: $cli:ident),* $(,)?) => {$(
        #[tokio::test]
        async fn $name() {
            modes::own_switch(RealAgent::$cli).await;
        }
    )*};
}

agents_that_switch! {
    claude_shows_that_it_switched_its_mode: Claude,
    claude_acp_shows_that_it_switched_its_mode: ClaudeAcp,
    gemini_shows_that_it_switched_its_mode: Gemini,
    copilot_shows_that_it_switched_its_mode: Copilot,
    codex_acp_shows_that_it_switched_its_mode: CodexAcp,
    qwen_shows_that_it_switched_its_mode: Qwen,
}

#[tokio::test]
async fn copilot_asks_also_after_its_command_that_allows_everything() {
    modes::copilot_allows_all().await;
}

#[tokio::test]
async fn claude_shows_that_it_compacted_its_conversation() {
    modes::compaction(RealAgent::Claude).await;
}

#[tokio::test]
async fn codex_shows_that_it_compacted_its_conversation() {
    modes::compaction(RealAgent::Codex).await;
}

#[tokio::test]
async fn claude_acp_shows_that_it_compacted_its_conversation() {
    modes::compaction(RealAgent::ClaudeAcp).await;
}

#[tokio::test]
async fn codex_acp_shows_that_it_compacted_its_conversation() {
    modes::compaction(RealAgent::CodexAcp).await;
}

#[tokio::test]
async fn claude_works_at_deck_for_an_ordinary_user_too() {
    confined::at_deck_of_user(RealAgent::Claude).await;
}

#[tokio::test]
async fn codex_works_at_deck_for_an_ordinary_user_too() {
    confined::at_deck_of_user(RealAgent::Codex).await;
}

#[tokio::test]
async fn a_team_of_them_plans_works_in_worktrees_and_reviews() {
    fleet::scene().await;
}

/// One agent with its own daemon and scripted model.
struct RealAgentTest {
    cli: RealAgent,
    model: FakeModel,
    daemon: TestDaemon,
    /// The agent's entry in `GET /v1/agents`.
    about: Value,
}

/// The name of the agent's manifest.
fn agent(cli: RealAgent) -> &'static str {
    match cli {
        RealAgent::Claude => "claude",
        RealAgent::Codex => "codex",
        RealAgent::ClaudeAcp => "claude-acp",
        RealAgent::CodexAcp => "codex-acp",
        RealAgent::Gemini => "gemini",
        RealAgent::Copilot => "copilot",
        RealAgent::Opencode => "opencode",
        RealAgent::Qwen => "qwen",
    }
}

impl RealAgentTest {
    async fn new(cli: RealAgent) -> Self {
        Self::with(cli, "").await
    }

    /// Starts the daemon with these settings.
    async fn with(cli: RealAgent, settings: &str) -> Self {
        Self::under(cli, &SceneConditions::from_environment(), settings).await
    }

    /// Starts the daemon under these conditions, with these settings.
    async fn under(cli: RealAgent, conditions: &SceneConditions, settings: &str) -> Self {
        let model = FakeModel::start();
        let home = qd_testkit::TestHome::new();
        // Codex and OpenCode have the address of their model in their own settings.
        let settings = format!("model_hosts = [\"{}\"]\n{settings}", model.address());
        conditions.configure(&home, &settings);
        let bin = InstalledAgents::installed().bin();
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
        let daemon = TestDaemon::start_in(home, |options| {
            options.env("PATH", &path);
            if let Some(user) = &conditions.user {
                options.run_by(user.clone());
            }
        })
        .await;
        let list = daemon.client().get("/v1/agents").await.list();
        let about = list.into_iter().find(|one| one["name"] == agent(cli)).unwrap();
        assert_eq!(about["available"], true, "{about}");
        Self { cli, model, daemon, about }
    }

    /// A session whose agent can reach only the scripted model.
    async fn session(&self, more: Value) -> TestSession {
        self.session_with_own_settings(more, |_, _, _| {}).await
    }

    /// The same, after `change` has changed the agent's settings in its home, and its variables.
    async fn session_with_own_settings(
        &self,
        more: Value,
        change: fn(RealAgent, &Path, &mut Value),
    ) -> TestSession {
        let agent_home = self.daemon.home.sibling_path("agent");
        let mut env = json!(isolated_environment(self.cli, &agent_home, &self.model));
        change(self.cli, &agent_home, &mut env);
        self.daemon.give_to_user(&agent_home);
        let mut settings = json!({ "agent": agent(self.cli), "env": env });
        for (key, value) in more.as_object().into_iter().flatten() {
            settings[key] = value.clone();
        }
        self.daemon.session_with(settings).await
    }

    fn can(&self, what: &str) -> bool {
        self.about[what] == true
    }

    /// The model requests whose last user text contains `words`.
    fn requests_with(&self, words: &str) -> Vec<ModelRequestRecord> {
        self.model.turns().into_iter().filter(|seen| seen.last_text().contains(words)).collect()
    }

    /// Checks that every model request with these words was dropped.
    async fn check_dropped(&self, words: &str) {
        for seen in self.requests_with(words) {
            // The model notices a moment later that a request was cut off.
            let ended = match seen.outcome {
                ModelRequestOutcome::Streaming => {
                    let (words, at) = (words.to_owned(), seen.received_at);
                    let is_it = move |one: &ModelRequestRecord| {
                        one.received_at == at
                            && one.last_text().contains(&words)
                            && one.outcome != ModelRequestOutcome::Streaming
                    };
                    self.model.wait_for("the stream to be dropped", is_it).await
                }
                _ => seen,
            };
            assert!(
                matches!(ended.outcome, ModelRequestOutcome::ClientGone { .. }),
                "{words}: the model's stream was not dropped: {ended:?}"
            );
        }
    }
}

/// Sends a prompt and returns its finished run.
async fn say(session: &TestSession, prompt: &str) -> Value {
    let run = session.prompt(prompt).await;
    ended(session, &run).await
}

/// Waits for a run to finish.
async fn ended(session: &TestSession, run: &str) -> Value {
    let path = session.workspace_path(&format!("/runs/{run}/wait?timeout_s=20"));
    let wait = async {
        loop {
            let answer = session.client.get(&path).await;
            if answer.status == 200 {
                return answer.json();
            }
            assert_eq!(answer.status, 408, "{answer}");
        }
    };
    match tokio::time::timeout(RUN, wait).await {
        Ok(run) => run,
        Err(_) => {
            panic!("the run does not end; its events:\n{}", describe_events(&session.events_of(run).await))
        }
    }
}

#[track_caller]
fn assert_ended(run: &Value, reason: &str) {
    assert_eq!(run["finish_reason"], reason, "{run:#}");
}

fn describe_events(events: &[TestEvent]) -> String {
    events.iter().map(|event| format!("{} {}\n", event.kind, event.data)).collect()
}

/// Waits for a permission request of this run.
async fn permission(session: &TestSession, run: &str) -> Value {
    let ask = session.wait_for_run_event(run, "ask.opened").await.data;
    assert_eq!(ask["kind"], "permission", "{ask}");
    ask
}

async fn answer(session: &TestSession, ask: &Value, answer: Value) {
    session.client.answer_ask(ask["id"].as_str().unwrap(), &answer).await.expect(200);
}
