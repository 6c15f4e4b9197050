//! This build's agents behind the public worker SDK, driven with plain frames.

use std::process::Stdio;

use qd_keeper::{ProcessIdentity, Signal, procfs};
use qd_protocol::frame::plain::{PlainApproval, PlainRunStatus, PlainWorkerFrame};
use qd_worker_sdk::{PlainClient, RunAssignment};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::harness::kill;

/// Leaves processes that try not to be found, then waits and ignores cancels.
const STUBBORN: &str = r#"[{"ignore_cancel":true},
    {"spawn":{"argv":["sh","-c","trap '' TERM; while :; do sleep 1; done"],"setsid":true,"double_fork":true}},
    {"say":" begun"},{"sleep_ms":600000}]"#;

/// A process that serves one agent, and our connection to it.
struct ServedAgent {
    client: PlainClient,
    child: Child,
}

#[derive(Debug, PartialEq)]
struct PlainRunEnd {
    status: PlainRunStatus,
    text: String,
    result: Option<String>,
    error: Option<String>,
}

impl ServedAgent {
    async fn start(agent: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_worker-under-test"))
            .args(["serve", agent])
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let endpoint = lines.next_line().await.unwrap().unwrap();
        Self { client: PlainClient::connect(&endpoint, None).await.unwrap(), child }
    }

    async fn run(&mut self, assignment: &str) {
        self.client
            .start_run(RunAssignment { prompt: assignment.to_owned(), ..RunAssignment::default() })
            .await
            .unwrap();
    }

    async fn wait_for_approval(&mut self) -> (String, PlainApproval) {
        loop {
            if let PlainWorkerFrame::ApprovalRequest { id, body } = self.client.next_frame().await.unwrap() {
                return (id, body);
            }
        }
    }

    /// The keeper, and all processes below it.
    fn family(&self) -> (u32, Vec<ProcessIdentity>) {
        let keeper = procfs::children(self.child.id().unwrap())[0];
        (keeper, procfs::descendants(keeper))
    }

    async fn wait_for_text(&mut self, expected: &str) {
        let mut text = String::new();
        while !text.contains(expected) {
            if let PlainWorkerFrame::Event { event } = self.client.next_frame().await.unwrap()
                && event["type"] == "token"
            {
                text.push_str(event["content"].as_str().unwrap());
            }
        }
    }

    async fn wait_for_end(&mut self) -> PlainRunEnd {
        let mut text = String::new();
        loop {
            match self.client.next_frame().await.unwrap() {
                PlainWorkerFrame::Event { event } if event["type"] == "token" => {
                    text.push_str(event["content"].as_str().unwrap());
                }
                PlainWorkerFrame::Terminal { status, result, error, .. } => {
                    return PlainRunEnd { status, text, result, error };
                }
                _ => {}
            }
        }
    }
}

#[tokio::test]
async fn echo_serves_one_run_after_another() {
    let mut served = ServedAgent::start("echo").await;
    for word in ["one", "two"] {
        served.run(word).await;
        let (text, result) = (word.to_owned(), Some(format!("echo: {word}")));
        assert_eq!(
            served.wait_for_end().await,
            PlainRunEnd { status: PlainRunStatus::Completed, text, result, error: None }
        );
    }
}

#[tokio::test]
async fn a_cancel_ends_the_run_also_before_its_agent_is_there() {
    for agent in ["echo", "script"] {
        let mut served = ServedAgent::start(agent).await;
        served.run("__sleep_ms:600000 never").await;
        served.client.cancel().await.unwrap();
        assert_eq!(served.wait_for_end().await.status, PlainRunStatus::Cancelled, "{agent}");
    }
}

#[tokio::test]
async fn asks_become_approvals_and_messages_become_steers() {
    let mut served = ServedAgent::start("script").await;
    served.run(r#"[{"ask":{"tool":"Bash","input":{"command":"ls"}}},{"await_steer":20000}]"#).await;
    let (id, body) = served.wait_for_approval().await;
    assert_eq!((body.tool_name.as_str(), body.permission_type.as_str()), ("Bash", "tool"));
    assert_eq!(body.resource, "ls");
    served.client.reply_to_approval("not this", false).await.unwrap();
    served.client.reply_to_approval(id, true).await.unwrap();
    served.client.send_message("to the left").await.unwrap();
    let ended = served.wait_for_end().await;
    assert_eq!(
        (ended.status, ended.text.as_str()),
        (PlainRunStatus::Completed, "allowedsteered: to the left")
    );
}

#[tokio::test]
async fn a_server_ends_with_its_connection_and_leaves_no_agent() {
    let mut served = ServedAgent::start("script").await;
    served.run(r#"[{"say":"x"},{"question":{"prompt":"q"}}]"#).await;
    served.wait_for_approval().await;
    served.client.close().await;
    assert!(served.child.wait().await.unwrap().success());
}

#[tokio::test]
async fn a_question_is_put_as_an_approval_and_a_no_leaves_it_unanswered() {
    let mut served = ServedAgent::start("script").await;
    for (question, approved, expected) in [
        (r#"{"prompt":"which?","options":["left","right"]}"#, true, "left"),
        (r#"{"prompt":"which?"}"#, true, "yes"),
        (r#"{"prompt":"which?","options":["left","right"]}"#, false, "denied: no answer given"),
    ] {
        served.run(&format!(r#"[{{"question":{question}}},{{"say":"."}}]"#)).await;
        let (id, body) = served.wait_for_approval().await;
        assert_eq!((body.permission_type.as_str(), body.question.as_str()), ("question", "which?"));
        served.client.reply_to_approval(id, approved).await.unwrap();
        let ended = served.wait_for_end().await;
        assert_eq!((ended.status, ended.text), (PlainRunStatus::Completed, format!("{expected}.")));
    }
}

#[tokio::test]
async fn a_keeper_that_is_killed_is_an_error_of_the_run_and_leaves_nothing() {
    let mut served = ServedAgent::start("script").await;
    served.run(STUBBORN).await;
    served.wait_for_text("begun").await;
    let (keeper, family) = served.family();
    assert!(family.len() > 1, "{family:?}");
    kill(keeper, Signal::KILL);
    let ended = served.wait_for_end().await;
    assert_eq!(ended.status, PlainRunStatus::Error);
    assert!(ended.error.unwrap().contains("was lost"));
    assert!(!family.iter().any(procfs::is_alive), "{family:?}");

    served.run(r#"[{"say":"fine"}]"#).await;
    assert_eq!(served.wait_for_end().await.text, "fine");
}

#[tokio::test]
async fn a_cancelled_run_that_does_not_stop_ends_when_nothing_of_it_is_left() {
    let mut served = ServedAgent::start("script").await;
    served.run(STUBBORN).await;
    served.wait_for_text("begun").await;
    let (_, family) = served.family();
    served.client.cancel().await.unwrap();
    assert_eq!(served.wait_for_end().await.status, PlainRunStatus::Cancelled);
    assert!(!family.iter().any(procfs::is_alive), "{family:?}");
    assert_eq!(procfs::children(served.child.id().unwrap()), [0; 0], "its keeper is gone as well");
}
