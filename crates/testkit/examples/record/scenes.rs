//! The scenarios that an agent is put through, each in a session of its own. The markers in the prompts are for the
//! scripted model.

use std::time::Duration;

use qd_testkit::{ObservedProcess, TestSession};
use serde_json::{Value, json};

use super::SceneSetup;

/// How long a run may take. One agent waits for the next full minute before it resumes a conversation.
const RUN_LIMIT: Duration = Duration::from_secs(120);

/// A scenario. The recording is named after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scene {
    /// Two prompts.
    Hello,
    /// A tool that needs permission and gets it.
    Allowed,
    /// A tool that is denied permission, and the prompt after that.
    Denied,
    /// A cancel while text is streaming, and the prompt after that.
    Cancel,
    /// A cancel while a permission request is open, and the prompt after that.
    CancelAsk,
    /// A model that fails, and the prompt after that.
    Error,
    /// The second process of a conversation.
    Resume,
    /// A steer while a tool runs.
    Steer,
    /// The tool that asks the user a question.
    Question,
    /// A prompt in plan mode, and one in the mode in which the agent starts.
    Modes,
    /// The tool for the agent's to-do list.
    Plan,
}

impl Scene {
    pub(crate) const ALL: [Self; 11] = [
        Self::Hello,
        Self::Allowed,
        Self::Denied,
        Self::Cancel,
        Self::CancelAsk,
        Self::Error,
        Self::Resume,
        Self::Steer,
        Self::Question,
        Self::Modes,
        Self::Plan,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Hello => "hello",
            Self::Allowed => "allowed",
            Self::Denied => "denied",
            Self::Cancel => "cancel",
            Self::CancelAsk => "cancel-ask",
            Self::Error => "error",
            Self::Resume => "resume",
            Self::Steer => "steer",
            Self::Question => "question",
            Self::Modes => "modes",
            Self::Plan => "plan",
        }
    }

    /// The field in the list of agents that must be true for this scenario.
    pub(crate) fn needs(self) -> Option<&'static str> {
        match self {
            Self::Steer => Some("steers"),
            Self::Question => Some("questions"),
            _ => None,
        }
    }

    /// Plays the scenario to its end.
    pub(crate) async fn play(self, setup: &SceneSetup, session: &TestSession) {
        let actions = SceneActions { setup, session };
        match self {
            Self::Hello => {
                actions.prompt_and_wait("hello").await;
                actions.prompt_and_wait("and again").await;
            }
            Self::Allowed => {
                let run = actions.prompt("TOOL:write:made.txt").await;
                actions.answer(&run, json!({ "allow": true }), json!({ "decision": "allow_once" })).await;
                actions.wait_for_end(&run).await;
            }
            Self::Denied => {
                let run = actions.prompt("TOOL:write:denied.txt").await;
                let (action, reason) = (json!({ "deny": "not on a Friday" }), "not on a Friday");
                actions.answer(&run, action, json!({ "decision": "deny", "reason": reason })).await;
                actions.wait_for_end(&run).await;
                actions.prompt_and_wait("after").await;
            }
            Self::Cancel => {
                let run = actions.prompt("SLOW:60").await;
                session.wait_for_event("the run's text", |event| event.is_of_run(&run, "text.delta")).await;
                actions.cancel(&run).await;
                actions.prompt_and_wait("after").await;
            }
            Self::CancelAsk => {
                let run = actions.prompt("TOOL:write:never.txt").await;
                session.wait_for_run_event(&run, "ask.opened").await;
                actions.cancel(&run).await;
                actions.prompt_and_wait("after").await;
            }
            Self::Error => {
                actions.prompt_and_wait("ERR:400").await;
                actions.prompt_and_wait("well again").await;
            }
            Self::Resume => {
                actions.prompt_and_wait("the first").await;
                for pid in setup.daemon.home.worker_pids() {
                    ObservedProcess::find(pid).expect("a listed worker lives").kill9().await;
                }
                session.wait_for_event("the worker's end", |event| event.kind == "worker.exited").await;
                setup.daemon.home.wait_for_no_agents().await;
                actions.prompt_and_wait("RECALL").await;
            }
            Self::Steer => {
                let run = actions.prompt("TOOL:sleep:3").await;
                // All agents ask before they do that.
                actions.answer(&run, json!({ "allow": true }), json!({ "decision": "allow_once" })).await;
                session.wait_for_run_event(&run, "ask.delivered").await;
                setup.log_action(&json!({ "steer": "turn left" }));
                session.steer("turn left").await;
                actions.wait_for_end(&run).await;
            }
            Self::Question => {
                let run = actions.prompt("TOOL:ask").await;
                actions.answer(&run, json!({ "choose": "Blue" }), json!({ "value": "Blue" })).await;
                actions.wait_for_end(&run).await;
            }
            Self::Modes => {
                actions.set_mode("plan").await;
                actions.prompt_and_wait("think about it").await;
                actions.set_mode(setup.usual_mode()).await;
                actions.prompt_and_wait("and now").await;
            }
            Self::Plan => actions.prompt_and_wait("TOOL:todo").await,
        }
    }
}

/// Performs the session's actions, and logs them.
struct SceneActions<'a> {
    setup: &'a SceneSetup,
    session: &'a TestSession,
}

impl SceneActions<'_> {
    async fn prompt(&self, prompt: &str) -> String {
        self.setup.log_action(&json!({ "prompt": prompt }));
        self.session.prompt(prompt).await
    }

    async fn set_mode(&self, mode: &str) {
        self.setup.log_action(&json!({ "mode": mode }));
        self.session.patch(json!({ "mode": mode })).await;
    }

    async fn prompt_and_wait(&self, prompt: &str) {
        let run = self.prompt(prompt).await;
        self.wait_for_end(&run).await;
    }

    async fn answer(&self, run: &str, action: Value, answer: Value) {
        let ask = self.session.wait_for_ask(run).await;
        self.setup.log_action(&action);
        self.session.client.answer_ask(&ask, &answer).await.expect(200);
    }

    async fn cancel(&self, run: &str) {
        self.setup.log_action(&json!({ "cancel": true }));
        self.session.cancel().await;
        self.wait_for_end(run).await;
    }

    async fn wait_for_end(&self, run: &str) {
        let path = self.session.workspace_path(&format!("/runs/{run}/wait?timeout_s=20"));
        let wait = async { while self.session.client.get(&path).await.status == 408 {} };
        tokio::time::timeout(RUN_LIMIT, wait).await.expect("a run of a real agent ends");
    }
}
