//! Bugs of crush's server that show only with the whole binary. The others are in
//! `crates/core/tests/machines/predecessor_bugs.rs`.

use qd_testkit::{TestDaemon, script::*};
use rustix::process::Signal;
use serde_json::json;

#[tokio::test]
async fn h10_ctrl_c_on_run_cancels_its_run_although_others_are_attached() {
    let daemon = TestDaemon::start().await;
    let mut running = daemon.home.start(&[
        "run",
        "--agent",
        "script",
        "--title",
        "mine",
        &steps(&[say("here"), sleep_forever()]),
    ]);
    running.wait_for_stdout("here").await;
    let workspace = daemon.client().get("/v1/workspaces").await.list()[0]["id"].as_str().unwrap().to_owned();
    let mut watcher = daemon.client().stream(&format!("/v1/workspaces/{workspace}/events?after=0")).await;
    watcher.until("the run's words", |event| event.kind == "text.delta").await;
    running.signal(Signal::INT);
    running.wait().await.expect_exit(130);
    let seen = watcher.until("the run's end", |event| event.kind == "run.finished").await;
    assert_eq!(seen.last().unwrap().data["finish_reason"], "cancelled");
}

#[tokio::test]
async fn h12_what_ends_in_one_workspace_touches_nothing_in_another() {
    let daemon = TestDaemon::start().await;
    let client = daemon.client();
    let here = daemon.session("script").await;
    let elsewhere = client.workspace(std::path::Path::new("/usr")).await.session("script").await;
    let ours = here.prompt_script(&[question("go on?", &[]), say(" done")]).await;
    let theirs = elsewhere.prompt_script(&[say("x"), sleep_forever()]).await;
    let ask = here.wait_for_ask(&ours).await;
    elsewhere.wait_for_start(&theirs).await;
    client.delete(&format!("{}?force=true", elsewhere.workspace_path(""))).await.expect(200);
    client.answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
    assert_eq!(here.wait(&ours).await["text"], "yes done");
}
