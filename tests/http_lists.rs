//! Lists over HTTP: arrays, `limit` and `after`, `Next-After` while there are more pages, and filters.

use qd_testkit::{TestClient, TestDaemon, script::*};
use serde_json::{Value, json};

/// Reads a whole list in pages of `limit`, checking each page.
async fn walk(client: &TestClient, path: &str, limit: usize) -> Vec<Value> {
    let (mut all, mut after) = (Vec::new(), String::new());
    loop {
        let mark = if path.contains('?') { '&' } else { '?' };
        let answer = client.get(&format!("{path}{mark}limit={limit}{after}")).await;
        let page = answer.list();
        assert!(page.len() <= limit, "{answer}");
        let more = answer.header("next-after").map(str::to_owned);
        assert!(more.is_none() || page.len() == limit, "a page with more behind it is full: {answer}");
        all.extend(page);
        match more {
            Some(next) => after = format!("&after={next}"),
            None => return all,
        }
    }
}

#[tokio::test]
async fn every_list_can_be_walked_in_pages_that_give_everything_once() {
    let daemon = TestDaemon::start().await;
    let client = daemon.client();
    let session = daemon.session("script").await;
    let mut sessions = vec![session.id.clone()];
    for n in 0..6 {
        let dir = daemon.home.sibling_path(&format!("dir{n}"));
        std::fs::create_dir(&dir).unwrap();
        client.workspace(&dir).await;
        let asking = daemon.session("script").await;
        let run = asking.prompt_script(&[ask_bash("make")]).await;
        asking.wait_for_ask(&run).await;
        sessions.push(asking.id);
        session.run_script(&[say("x")]).await;
    }
    for (path, count) in [
        ("/v1/workspaces".to_owned(), 7),
        (session.workspace_path("/sessions"), 7),
        (session.workspace_path(&format!("/runs?session={}", session.id)), 6),
        (session.workspace_path("/runs"), 12),
        ("/v1/asks?state=pending".to_owned(), 6),
        (session.path("/messages"), 12),
    ] {
        let whole = client.get(&path).await;
        assert_eq!(whole.header("next-after"), None, "{path}: nothing is left");
        let whole = whole.list();
        assert_eq!(whole.len(), count, "{path}");
        for limit in [1, 4, count, 1000] {
            assert_eq!(walk(&client, &path, limit).await, whole, "{path} by {limit}");
        }
    }
    let listed: Vec<_> = walk(&client, &session.workspace_path("/sessions"), 2).await;
    let mut ids: Vec<_> = listed.iter().map(|session| session["id"].as_str().unwrap().to_owned()).collect();
    ids.sort_unstable();
    sessions.sort_unstable();
    assert_eq!(ids, sessions);
}

#[tokio::test]
async fn a_list_of_nothing_is_an_empty_array() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    for path in [
        "/v1/asks".to_owned(),
        workspace.path("/sessions"),
        workspace.path("/runs"),
        "/v1/sessions".to_owned(),
    ] {
        assert_eq!(daemon.client().get(&path).await.expect(200), json!([]));
    }
}

#[tokio::test]
async fn asks_can_be_listed_by_state_or_all() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_with_answer(ask_bash("make"), json!({ "decision": "allow_once" })).await;
    let run = session.prompt_script(&[ask_bash("make")]).await;
    session.wait_for_ask(&run).await;
    let states = async |path: &str| -> Vec<Value> {
        daemon.client().get(path).await.list().iter().map(|ask| ask["state"].clone()).collect()
    };
    assert_eq!(states("/v1/asks?state=pending").await, ["pending"]);
    assert_eq!(states("/v1/asks?state=answered").await, ["answered"]);
    assert_eq!(states("/v1/asks").await, ["answered", "pending"]);
    assert!(states("/v1/asks?state=withdrawn").await.is_empty());
}

#[tokio::test]
async fn sessions_of_every_workspace_can_be_listed_and_narrowed() {
    let daemon = TestDaemon::start().await;
    let here = daemon.session_with(json!({ "agent": "echo", "title": "left" })).await;
    let there = daemon.client().workspace(std::path::Path::new("/usr")).await.session("echo").await;
    let list = async |query: &str| -> Vec<String> {
        let sessions = daemon.client().get(&format!("/v1/sessions{query}")).await.list();
        sessions.iter().map(|session| session["id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(list("").await.len(), 2);
    assert_eq!(list("?ref=left").await, std::slice::from_ref(&here.id));
    here.close().await;
    here.wait_for_event("session.closed", |event| event.kind == "session.closed").await;
    assert_eq!(list("?open=true").await, std::slice::from_ref(&there.id));
    assert_eq!(list("").await.len(), 2);
}

#[tokio::test]
async fn runs_are_listed_of_one_session_or_of_the_workspace() {
    let daemon = TestDaemon::start().await;
    let (one, two) = (daemon.session("echo").await, daemon.session("echo").await);
    let runs = [one.prompt("a").await, two.prompt("b").await, one.prompt("c").await];
    for run in &runs {
        one.wait(run).await;
    }
    let ids =
        |runs: Vec<Value>| runs.iter().map(|run| run["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(ids(one.runs().await), [runs[0].clone(), runs[2].clone()]);
    assert_eq!(ids(daemon.client().get(&one.workspace_path("/runs")).await.list()), runs);
}
