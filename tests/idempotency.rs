//! `Idempotency-Key` works on every POST: the same request with the same key takes effect once and gets the first
//! response again; a different request with that key is refused.

use qd_testkit::{TestDaemon, script::*};
use serde_json::json;

#[tokio::test]
async fn a_repeated_post_gets_the_first_answer_and_has_its_effect_once() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let live =
        session.prompt_script(&[say("x"), await_steer(20_000), ask_bash("make"), sleep_forever()]).await;
    session.wait_for_run_event(&live, "text.delta").await;
    let twice = async |path: &str, body: serde_json::Value| {
        let client = daemon.client().with_key(&format!("key of {path}"));
        let (first, second) = (client.post(path, &body).await, client.post(path, &body).await);
        assert!(first.status < 300, "{first}");
        assert_eq!((first.status, &first.body), (second.status, &second.body), "{path}");
        first.json()
    };
    let usr = twice("/v1/workspaces", json!({ "path": "/usr" })).await;
    assert!(usr["id"].is_string());
    let made = twice(&session.workspace_path("/sessions"), json!({ "agent": "echo" })).await;
    let sessions = daemon.client().get(&session.workspace_path("/sessions")).await.list();
    assert_eq!(sessions.iter().filter(|session| session["agent"] == "echo").count(), 1, "{made}");
    twice(&session.agent_path("/steer"), json!({ "text": "left" })).await;
    let ask = session.wait_for_ask(&live).await;
    twice(&format!("/v1/asks/{ask}/answer"), json!({ "decision": "allow_once" })).await;
    twice(&session.workspace_path("/agent"), json!({ "session_id": session.id, "prompt": "waits" })).await;
    assert_eq!(session.queue().await.len(), 1);
    let hit = twice(&session.agent_path("/cancel"), json!({})).await;
    assert_eq!(
        hit["cancelled"].as_array().unwrap().len(),
        2,
        "the repeat tells what the first one hit: {hit}"
    );
    twice("/v1/halt", json!({ "reason": "x" })).await;
    let events = session.events().await;
    for (kind, times) in [("steer.accepted", 1), ("ask.delivered", 1), ("run.accepted", 2)] {
        assert_eq!(events.iter().filter(|event| event.kind == kind).count(), times, "{kind}");
    }
}

#[tokio::test]
async fn a_workspace_is_201_again_under_its_key_and_200_without() {
    let daemon = TestDaemon::start().await;
    let body = json!({ "path": "/usr" });
    let keyed = daemon.client().with_key("k");
    let first = keyed.post("/v1/workspaces", &body).await.expect(201);
    assert_eq!(keyed.post("/v1/workspaces", &body).await.expect(201), first);
    assert_eq!(daemon.client().post("/v1/workspaces", &body).await.expect(200), first);
}

#[tokio::test]
async fn another_request_under_a_known_key_is_refused() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let keyed = session.with_client(daemon.client().with_key("k"));
    keyed.try_prompt("a").await.expect(202);
    keyed.try_prompt("b").await.expect_refusal(409, "idempotency_conflict");
    assert_eq!(session.runs().await.len(), 1);
}

#[tokio::test]
async fn a_key_is_remembered_across_a_crash() {
    let mut daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let keyed = daemon.client().with_key("once");
    let path = workspace.path("/sessions");
    let first = keyed.post(&path, &json!({ "agent": "echo" })).await.expect(201);
    let body = json!({ "session_id": first["id"], "prompt": "hi" });
    let prompt = daemon.client().with_key("prompt");
    let receipt = prompt.post(&workspace.path("/agent"), &body).await.expect(202);
    daemon.restart().await;
    assert_eq!(keyed.post(&path, &json!({ "agent": "echo" })).await.expect(201), first);
    assert_eq!(prompt.post(&workspace.path("/agent"), &body).await.expect(202), receipt);
    assert_eq!(daemon.client().get(&path).await.list().len(), 1);
    assert_eq!(daemon.client().get(&workspace.path("/runs")).await.list().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_twenty_clients_race_with_has_its_effect_once() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let mut racers = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let (client, path) = (daemon.client().with_key("race"), workspace.path("/sessions"));
        racers.spawn(async move { client.post(&path, &json!({ "agent": "echo" })).await.expect(201) });
    }
    let made = racers.join_all().await;
    assert!(made.windows(2).all(|pair| pair[0]["id"] == pair[1]["id"]), "{made:?}");
    assert_eq!(daemon.client().get(&workspace.path("/sessions")).await.list().len(), 1);
}

#[tokio::test]
async fn a_refused_post_does_not_use_up_its_key() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let keyed = session.with_client(daemon.client().with_key("k"));
    keyed.try_steer("left").await.expect_refusal(409, "not_running");
    let run = session.prompt_script(&[say("x"), await_steer(20_000)]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    keyed.try_steer("left").await.expect(202);
    assert_eq!(session.wait(&run).await["text"], "xsteered: left");
}

#[tokio::test]
async fn a_key_that_is_none_is_refused() {
    let daemon = TestDaemon::start().await;
    let long = "k".repeat(256);
    for key in ["", long.as_str()] {
        let answer = daemon.client().with_key(key).post("/v1/workspaces", &json!({ "path": "/usr" })).await;
        assert_eq!(answer.status, 400, "{key:?}: {answer}");
    }
}
