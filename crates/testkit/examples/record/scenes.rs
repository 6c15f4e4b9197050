//! What an agent is put through, each scene in a session of its own. The markers in the prompts are for the scripted
//! model.

use std::time::Duration;

use qd_testkit::{ObservedProcess, TestSession};
use serde_json::{Value, json};

use super::Stage;

/// How long a run may take: one agent waits for the next minute before it goes on with a conversation.
const RUN: Duration = Duration::from_secs(120);

/// A scene, which gives its recording the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scene {
    /// Two prompts.
    Hello,
    /// A tool that wants a permission and gets it.
    Allowed,
    /// One that does not get it, and the prompt after that.
    Denied,
    /// A cancel in the middle of words, and the prompt after that.
    Cancel,
    /// A cancel while a permission is wanted, and the prompt after that.
    CancelAsk,
    /// A model that fails, and the prompt after that.
    Error,
    /// The second process of a conversation.
    Resume,
    /// A word on the way, while a tool runs.
    Steer,
    /// The tool that asks people.
    Question,
}

impl Scene {
    pub(crate) const ALL: [Self; 9] = [
        Self::Hello,
        Self::Allowed,
        Self::Denied,
        Self::Cancel,
        Self::CancelAsk,
        Self::Error,
        Self::Resume,
        Self::Steer,
        Self::Question,
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
        }
    }

    /// What the list of agents must say of an agent that it is for.
    pub(crate) fn needs(self) -> Option<&'static str> {
        match self {
            Self::Steer => Some("steers"),
            Self::Question => Some("questions"),
            _ => None,
        }
    }

    /// Plays it to its end.
    pub(crate) async fn play(self, stage: &Stage, session: &TestSession) {
        let act = Act { stage, session };
        match self {
            Self::Hello => {
                act.say("hello").await;
                act.say("and again").await;
            }
            Self::Allowed => {
                let run = act.prompt("TOOL:write:made.txt").await;
                act.answer(&run, json!({ "allow": true }), json!({ "decision": "allow_once" })).await;
                act.ended(&run).await;
            }
            Self::Denied => {
                let run = act.prompt("TOOL:write:denied.txt").await;
                let (noted, why) = (json!({ "deny": "not on a Friday" }), "not on a Friday");
                act.answer(&run, noted, json!({ "decision": "deny", "reason": why })).await;
                act.ended(&run).await;
                act.say("after").await;
            }
            Self::Cancel => {
                let run = act.prompt("SLOW:60").await;
                session.wait_for_event("its words", |event| event.is_of_run(&run, "text.delta")).await;
                act.cancel(&run).await;
                act.say("after").await;
            }
            Self::CancelAsk => {
                let run = act.prompt("TOOL:write:never.txt").await;
                session.wait_for_run_event(&run, "ask.opened").await;
                act.cancel(&run).await;
                act.say("after").await;
            }
            Self::Error => {
                act.say("ERR:400").await;
                act.say("well again").await;
            }
            Self::Resume => {
                act.say("the first").await;
                for pid in stage.daemon.home.worker_pids() {
                    ObservedProcess::find(pid).expect("a listed worker lives").kill9().await;
                }
                session.wait_for_event("its end", |event| event.kind == "worker.exited").await;
                stage.daemon.home.wait_for_no_agents().await;
                act.say("RECALL").await;
            }
            Self::Steer => {
                let run = act.prompt("TOOL:sleep:3").await;
                // All of them ask before they do that.
                act.answer(&run, json!({ "allow": true }), json!({ "decision": "allow_once" })).await;
                session.wait_for_run_event(&run, "ask.delivered").await;
                stage.note(&json!({ "steer": "turn left" }));
                session.steer("turn left").await;
                act.ended(&run).await;
            }
            Self::Question => {
                let run = act.prompt("TOOL:ask").await;
                act.answer(&run, json!({ "choose": "Blue" }), json!({ "value": "Blue" })).await;
                act.ended(&run).await;
            }
        }
    }
}

/// What the session does, noted.
struct Act<'a> {
    stage: &'a Stage,
    session: &'a TestSession,
}

impl Act<'_> {
    async fn prompt(&self, prompt: &str) -> String {
        self.stage.note(&json!({ "prompt": prompt }));
        self.session.prompt(prompt).await
    }

    async fn say(&self, prompt: &str) {
        let run = self.prompt(prompt).await;
        self.ended(&run).await;
    }

    async fn answer(&self, run: &str, noted: Value, answer: Value) {
        let ask = self.session.wait_for_ask(run).await;
        self.stage.note(&noted);
        self.session.client.answer_ask(&ask, &answer).await.expect(200);
    }

    async fn cancel(&self, run: &str) {
        self.stage.note(&json!({ "cancel": true }));
        self.session.cancel().await;
        self.ended(run).await;
    }

    async fn ended(&self, run: &str) {
        let path = self.session.workspace_path(&format!("/runs/{run}/wait?timeout_s=20"));
        let wait = async { while self.session.client.get(&path).await.status == 408 {} };
        tokio::time::timeout(RUN, wait).await.expect("a run of a real agent ends");
    }
}
