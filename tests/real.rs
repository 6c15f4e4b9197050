//! Real agents, installed from their packages and driven through `qd` against the scripted model: each is put through
//! the same scenes, whatever its own habits. What a scene expects of an agent is what `GET /v1/agents` says of it, so a
//! manifest that promises too much fails here.
//!
//! A cancel counts only if the model saw its stream dropped, or was never asked.

mod cancels;
mod cost;
mod fleet;
mod lasts;
mod talks;
mod trees;

use std::time::Duration;

use qd_testkit::clis::isolated;
use qd_testkit::model::{Outcome, Seen};
use qd_testkit::{Cli, Clis, Daemon, Event, Model, Session};
use serde_json::{Value, json};

/// How long a run of a real agent may take: one of them may have to wait for the next minute before it goes on with a
/// conversation.
const RUN: Duration = Duration::from_secs(120);

/// Every agent in every scene.
macro_rules! agents {
    ($($name:ident: $cli:ident),* $(,)?) => {$(
        mod $name {
            use qd_testkit::Cli;

            #[tokio::test]
            async fn it_talks_asks_and_tells_its_failures() {
                super::talks::scene(Cli::$cli).await;
            }

            #[tokio::test]
            async fn a_cancel_stops_it_wherever_it_is() {
                super::cancels::scene(Cli::$cli).await;
            }

            #[tokio::test]
            async fn a_cancel_at_once_is_never_missed() {
                super::cancels::at_once(Cli::$cli).await;
            }

            #[tokio::test]
            async fn it_is_steered_and_outlives_the_daemon_and_its_worker() {
                super::lasts::scene(Cli::$cli).await;
            }

            #[tokio::test]
            async fn it_stops_at_its_budget() {
                super::cost::scene(Cli::$cli).await;
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

#[tokio::test]
async fn claude_starts_and_awaits_another_by_its_tools() {
    trees::scene(Cli::Claude).await;
}

#[tokio::test]
async fn codex_starts_and_awaits_another_by_its_tools() {
    trees::scene(Cli::Codex).await;
}

#[tokio::test]
async fn an_agent_by_acp_starts_and_awaits_another_by_its_tools() {
    trees::scene(Cli::ClaudeAcp).await;
}

#[tokio::test]
async fn a_team_of_them_plans_works_in_worktrees_and_reviews() {
    fleet::scene().await;
}

/// One agent in a home of its own, with the model that it talks to.
struct Stage {
    cli: Cli,
    model: Model,
    daemon: Daemon,
    /// What the list of agents says of it.
    about: Value,
}

/// The name of an agent's manifest.
fn agent(cli: Cli) -> &'static str {
    match cli {
        Cli::Claude => "claude",
        Cli::Codex => "codex",
        Cli::ClaudeAcp => "claude-acp",
        Cli::CodexAcp => "codex-acp",
        Cli::Gemini => "gemini",
        Cli::Copilot => "copilot",
        Cli::Opencode => "opencode",
        Cli::Qwen => "qwen",
    }
}

impl Stage {
    async fn new(cli: Cli) -> Self {
        Self::with(cli, "").await
    }

    /// With settings of the daemon.
    async fn with(cli: Cli, settings: &str) -> Self {
        let model = Model::start();
        let home = qd_testkit::Home::new();
        home.configure(settings);
        let bin = Clis::installed().bin();
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
        let daemon = Daemon::start_in(home, |options| {
            options.env("PATH", &path);
        })
        .await;
        let list = daemon.client().get("/v1/agents").await.list();
        let about = list.into_iter().find(|one| one["name"] == agent(cli)).unwrap();
        assert_eq!(about["available"], true, "{about}");
        Self { cli, model, daemon, about }
    }

    /// A session that knows nobody but the scripted model.
    async fn session(&self, more: Value) -> Session {
        let env = isolated(self.cli, &self.daemon.home.beside("agent"), &self.model);
        let mut settings = json!({ "agent": agent(self.cli), "env": env });
        for (key, value) in more.as_object().into_iter().flatten() {
            settings[key] = value.clone();
        }
        self.daemon.session_with(settings).await
    }

    fn can(&self, what: &str) -> bool {
        self.about[what] == true
    }

    /// The requests in which the user's last words contain these.
    fn asked_for(&self, words: &str) -> Vec<Seen> {
        self.model.turns().into_iter().filter(|seen| seen.text().contains(words)).collect()
    }

    /// Fails unless what was said to the model under these words was dropped, if it was said at all.
    async fn was_dropped(&self, words: &str) {
        for seen in self.asked_for(words) {
            // A request that was cut off in its middle is known as such a moment later.
            let ended = match seen.outcome {
                Outcome::Streaming => {
                    let (words, at) = (words.to_owned(), seen.at);
                    let is_it = move |one: &Seen| {
                        one.at == at && one.text().contains(&words) && one.outcome != Outcome::Streaming
                    };
                    self.model.wait_for("the stream to be dropped", is_it).await
                }
                _ => seen,
            };
            assert!(
                matches!(ended.outcome, Outcome::ClientGone { .. }),
                "{words}: the model was heard to its end: {ended:?}"
            );
        }
    }
}

/// A prompt, and its run as it ended.
async fn say(session: &Session, prompt: &str) -> Value {
    let run = session.prompt(prompt).await;
    ended(session, &run).await
}

/// A run as it ended.
async fn ended(session: &Session, run: &str) -> Value {
    let path = session.project(&format!("/runs/{run}/wait?timeout_s=20"));
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
        Err(_) => panic!("the run does not end; its events:\n{}", tell(&session.events_of(run).await)),
    }
}

/// Says of a run that ended otherwise what it did.
#[track_caller]
fn assert_ended(run: &Value, reason: &str) {
    assert_eq!(run["finish_reason"], reason, "{run:#}");
}

fn tell(events: &[Event]) -> String {
    events.iter().map(|event| format!("{} {}\n", event.kind, event.data)).collect()
}

/// Waits for a permission of this run.
async fn permission(session: &Session, run: &str) -> Value {
    let ask = session.seen_of(run, "ask.opened").await.data;
    assert_eq!(ask["kind"], "permission", "{ask}");
    ask
}

/// Answers an ask.
async fn answer(session: &Session, ask: &Value, answer: Value) {
    session.client.answer(ask["id"].as_str().unwrap(), &answer).await.expect(200);
}
