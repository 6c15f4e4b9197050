//! Mail inside a fleet: if the fleet file allows mentions, a mentioned session gets a message, as a run of the fleet.

use qd_testkit::{TestDaemon, TestFleet, script::*};
use serde_json::{Value, json};

/// A fleet file with sessions `a`, `b` and `c`. The answer of `c` mentions nobody, because it has its own prompt.
fn file(task: &str, rest: &str, b: &str) -> String {
    format!(
        "fleet:\n  task: {}\n  sessions:\n    a: {{ agent: script }}\n    b: {{ agent: {b} }}\n    c: {{ agent: echo, prompt: next }}\n  start: a\n{rest}",
        json!(task)
    )
}

async fn start(daemon: &TestDaemon, file: &str) -> TestFleet {
    daemon.workspace().await.fleet(file).await
}

async fn mail(fleet: &TestFleet, name: &str) -> Vec<Value> {
    let session = fleet.session(name).await;
    session.client.get(&session.path("/mail")).await.list()
}

#[tokio::test]
async fn who_is_mentioned_gets_the_message_and_its_end_counts() {
    let daemon = TestDaemon::start().await;
    let task = steps(&[say("done.\n@b please look\n@nobody and @c not here")]);
    let rest = "  mentions: true\n  routes: [{ when: b.done, route_to: c }]\n";
    let fleet = start(&daemon, &file(&task, rest, "echo")).await;
    let ended = fleet.wait_for_end().await;
    assert_eq!(ended["state"], "done", "{ended}");
    let got = mail(&fleet, "b").await;
    assert_eq!(got.len(), 1);
    assert_eq!(
        (&got[0]["from"], &got[0]["kind"], &got[0]["state"]),
        (&json!("a"), &json!("task"), &json!("delivered"))
    );
    assert_eq!(got[0]["from_session_id"], ended["sessions"]["a"]["session_id"]);
    assert!(got[0]["text"].as_str().unwrap().contains("@b please look"));
    let prompts = fleet.prompts_of("b").await;
    assert!(prompts[0].starts_with("--- task from a (mail_"), "{prompts:?}");
    assert_eq!(fleet.prompts_of("c").await.len(), 1, "the run that the mention started triggers a route");
    let events = fleet.events_until("fleet.finished").await;
    let mentioned: Vec<_> = events.iter().filter(|event| event.kind == "fleet.mentioned").collect();
    assert_eq!(mentioned.len(), 1);
    assert_eq!(mentioned[0].data["to"][0]["session"], "b");
}

#[tokio::test]
async fn without_the_key_a_mention_is_only_a_word() {
    let daemon = TestDaemon::start().await;
    let fleet = start(&daemon, &file(&steps(&[say("@b look")]), "", "echo")).await;
    assert_eq!(fleet.wait_for_end().await["state"], "done");
    assert!(mail(&fleet, "b").await.is_empty());
}

#[tokio::test]
async fn a_mention_of_a_busy_session_is_a_steer_where_the_file_says_so() {
    let daemon = TestDaemon::start().await;
    let task = steps(&[say("@b to the left")]);
    let rest = "  mentions: true\n  routes: [{ when: b.done, route_to: c }]\n";
    let file = file(&task, rest, "script, mail: steer, prompt: unused").replace("start: a", "start: [a, b]");
    let wait = steps(&[await_steer(300_000)]).replace('"', "\\\"");
    let file = file.replace("prompt: unused", &format!("prompt: \"{wait}\""));
    let fleet = start(&daemon, &file).await;
    let ended = fleet.wait_for_end().await;
    assert_eq!(ended["state"], "done", "{ended}");
    let got = mail(&fleet, "b").await;
    assert_eq!(
        (&got[0]["state"], &got[0]["delivered_as"]),
        (&json!("delivered"), &json!("steer")),
        "{got:?}"
    );
    let runs = fleet.session("b").await.runs().await;
    assert_eq!(runs.len(), 1, "the message went to the active run");
    assert!(runs[0]["text"].as_str().unwrap().contains("to the left"), "{runs:?}");
    assert_eq!(fleet.prompts_of("c").await.len(), 1, "once");
}

#[tokio::test]
async fn a_mention_is_delivered_once_across_a_crash() {
    let mut daemon = TestDaemon::start().await;
    let task = steps(&[sleep(300), say("@b look")]);
    let fleet = start(&daemon, &file(&task, "  mentions: true\n", "echo")).await;
    fleet.session("a").await.wait_for_event("it runs", |event| event.kind == "run.started").await;
    daemon.kill9().await;
    daemon.start_again().await;
    let fleet = TestFleet { client: daemon.client(), ..fleet };
    assert_eq!(fleet.wait_for_end().await["state"], "done");
    assert_eq!(mail(&fleet, "b").await.len(), 1);
    assert_eq!(fleet.session("b").await.runs().await.len(), 1);
}

#[tokio::test]
async fn a_circle_of_mentions_comes_to_an_end_and_says_so() {
    let daemon = TestDaemon::start().await;
    // Echo repeats its prompt, so the two mention each other forever.
    let file = "fleet:\n  task: \"\\n@a x\\n@b y\"\n  mentions: true\n  sessions: { a: { agent: echo }, b: { agent: echo } }\n  start: a\n";
    let fleet = start(&daemon, file).await;
    let ended = fleet.wait_for_end().await;
    assert_eq!(ended["state"], "failed", "{ended}");
    assert!(ended["problems"][0].as_str().unwrap().contains("100 messages"), "{ended}");
    let sent = mail(&fleet, "a").await.len() + mail(&fleet, "b").await.len();
    assert_eq!(sent, 100);
}

#[tokio::test]
async fn a_bad_value_is_refused_with_its_place() {
    let daemon = TestDaemon::start().await;
    let file = file("t", "", "echo, mail: hold");
    let details = daemon.workspace().await.try_fleet(&file).await.expect_refusal(400, "invalid_fleet");
    assert_eq!(details["line"], 5, "{details}");
}
