//! Exhausted quotas: when an agent names the reset, the queue of every session of its account waits until then, across
//! restarts, and nothing fails one after the other.

use qd_testkit::faulty_libc::FaultyLibc;
use qd_testkit::{TestDaemon, TestEvent, TestHome, TestSession, journal_rules, poll_until, script::*};
use serde_json::{Value, json};

const HOUR_MS: i64 = 3_600_000;

/// A daemon whose wall clock can be set: a quota that resets in an hour need not be waited for.
async fn daemon_with_clock() -> (TestDaemon, FaultyLibc) {
    let faults = FaultyLibc::new();
    let daemon = TestDaemon::start_in(TestHome::new(), |options| {
        options.faulty_libc(&faults);
    })
    .await;
    (daemon, faults)
}

/// Has a new run of the session fail because its quota is exhausted for an hour.
async fn exhaust(session: &TestSession) -> Value {
    let failed = session.run_script(&[fail("quota exhausted, resets in 1h")]).await;
    assert_eq!(
        (&failed["finish_reason"], &failed["error"]["code"]),
        (&json!("error"), &json!("quota_exhausted"))
    );
    failed
}

/// Waits until the run waits for the reset of a quota. Returns the reset.
async fn wait_until_parked(session: &TestSession, run: &str) -> Value {
    let is_parked = |event: &TestEvent| {
        event.kind == "run.queued" && event.run_id.as_deref() == Some(run) && event.data["reason"] == "quota"
    };
    session.wait_for_event("the wait for the quota", is_parked).await.data["until"].clone()
}

async fn quotas(daemon: &TestDaemon) -> Vec<Value> {
    daemon.client().get("/v1/quotas").await.list()
}

async fn release(daemon: &TestDaemon, quota: &Value) -> Value {
    let path = format!("/v1/quotas/{}", quota["account"].as_str().unwrap());
    daemon.client().delete(&path).await.expect(200)
}

async fn wait_for_end(session: &TestSession, run: &str, text: &str) {
    let ended = session.wait(run).await;
    assert_eq!((&ended["finish_reason"], &ended["text"]), (&json!("end_turn"), &json!(text)), "{ended:#}");
}

#[tokio::test]
async fn queued_runs_wait_for_the_reset_and_then_start_by_themselves() {
    let (daemon, faults) = daemon_with_clock().await;
    let session = daemon.session("script").await;
    let first = session.prompt_script(&[await_steer(600_000), fail("quota exhausted, resets in 1h")]).await;
    session.wait_for_start(&first).await;
    let queued = [session.prompt_script(&[say("b")]).await, session.prompt_script(&[say("c")]).await];
    session.steer("go").await;
    let failed = session.wait(&first).await;
    let resets_at = &failed["error"]["resets_at"];
    assert_eq!(failed["error"]["code"], "quota_exhausted", "{failed:#}");
    for run in &queued {
        assert_eq!(wait_until_parked(&session, run).await, *resets_at);
        assert_eq!(session.run(run).await["state"], "queued");
    }
    let shown = session.show().await;
    assert_eq!(
        (&shown["state"], &shown["busy"], &shown["queued"]),
        (&json!("idle"), &json!(true), &json!(2))
    );
    assert_eq!(&shown["quota_until"], resets_at);
    let listed = quotas(&daemon).await;
    assert_eq!(listed.len(), 1);
    assert_eq!((&listed[0]["agent"], &listed[0]["session_id"]), (&json!("script"), &json!(session.id)));
    assert_eq!((&listed[0]["account"], &listed[0]["until"]), (&shown["account"], resets_at));
    faults.shift_clock(2 * HOUR_MS);
    wait_for_end(&session, &queued[0], "b").await;
    wait_for_end(&session, &queued[1], "c").await;
    assert_eq!((quotas(&daemon).await.len(), &session.show().await["quota_until"]), (0, &Value::Null));
    journal_rules::check(&session.events().await);
    let mut stream = daemon.client().stream("/v1/events?after=0").await;
    let until_release = stream.until("the release", |event| event.kind == "quota.released").await;
    let released = until_release.last().unwrap();
    assert_eq!((&released.data["by"], &released.data["account"]), (&json!("reset"), &listed[0]["account"]));
    let starts = until_release.iter().filter(|event| event.kind == "run.started").count();
    assert_eq!(starts, 1, "nothing starts before the release");
}

#[tokio::test]
async fn a_clock_that_is_set_back_does_not_make_runs_wait_longer() {
    let (daemon, faults) = daemon_with_clock().await;
    let session = daemon.session("script").await;
    let first = session.prompt_script(&[await_steer(600_000), fail("quota exhausted, resets in 8s")]).await;
    session.wait_for_start(&first).await;
    let next = session.prompt_script(&[say("b")]).await;
    session.steer("go").await;
    wait_until_parked(&session, &next).await;
    faults.shift_clock(-3 * HOUR_MS);
    wait_for_end(&session, &next, "b").await;
}

#[tokio::test]
async fn all_sessions_of_the_account_wait_and_no_others_and_a_person_releases_them() {
    let daemon = TestDaemon::start().await;
    let reporter = daemon.session("script").await;
    let busy = daemon.session("script").await;
    let going_on = busy.prompt_script(&[await_steer(600_000), say("!")]).await;
    busy.wait_for_start(&going_on).await;
    exhaust(&reporter).await;
    let behind = busy.prompt_script(&[say("behind")]).await;
    let later = daemon.session("script").await;
    let first = later.prompt_script(&[say("first")]).await;
    let until = wait_until_parked(&later, &first).await;
    assert_eq!(wait_until_parked(&busy, &behind).await, until);
    busy.steer("go").await;
    assert_eq!(busy.wait(&going_on).await["finish_reason"], "end_turn", "a turn that is under way goes on");
    assert_eq!(busy.run(&behind).await["state"], "queued");
    for other in [json!({ "agent": "echo" }), json!({ "agent": "script", "env": { "SCRIPT_LOGIN": "mine" } })]
    {
        let other = daemon.session_with(other).await;
        let run = other.prompt("hello").await;
        assert_eq!(other.wait(&run).await["finish_reason"], "end_turn", "another account");
    }
    let quota = &quotas(&daemon).await[0];
    assert_eq!(release(&daemon, quota).await, *quota);
    wait_for_end(&later, &first, "first").await;
    wait_for_end(&busy, &behind, "behind").await;
    journal_rules::check(&busy.events().await);
    let path = format!("/v1/quotas/{}", quota["account"].as_str().unwrap());
    daemon.client().delete(&path).await.expect_refusal(404, "not_found");
}

#[tokio::test]
async fn sessions_with_the_same_login_share_a_quota_and_its_values_are_nowhere() {
    let daemon = TestDaemon::start().await;
    let login = |value: &str| json!({ "agent": "script", "env": { "SCRIPT_LOGIN": value, "OTHER": "x" } });
    let one = daemon.session_with(login("hunter2hunter2")).await;
    let same = daemon.session_with(login("hunter2hunter2")).await;
    exhaust(&one).await;
    let run = same.prompt_script(&[say("x")]).await;
    wait_until_parked(&same, &run).await;
    assert_eq!(one.show().await["account"], same.show().await["account"]);
    let usual = daemon.session("script").await.show().await["account"].clone();
    assert_ne!(one.show().await["account"], usual);
    let events =
        serde_json::to_string(&one.events().await.iter().map(|event| &event.data).collect::<Vec<_>>());
    assert!(!events.unwrap().contains("hunter2"));
}

#[tokio::test]
async fn the_wait_survives_a_kill_of_the_daemon_and_the_purge_of_the_session_that_reported_it() {
    let (mut daemon, faults) = daemon_with_clock().await;
    let (reporter, waiting) = (daemon.session("script").await, daemon.session("script").await);
    exhaust(&reporter).await;
    let run = waiting.prompt_script(&[say("at last")]).await;
    let until = wait_until_parked(&waiting, &run).await;
    daemon.client().delete(&reporter.path("?purge=true")).await;
    poll_until("the purge", async || {
        (daemon.client().get(&reporter.path("")).await.status == 404).then_some(())
    })
    .await;
    daemon.restart().await;
    let later = waiting.prompt_script(&[say("later")]).await;
    assert_eq!(wait_until_parked(&waiting, &later).await, until);
    assert_eq!(waiting.run(&run).await["state"], "queued");
    daemon.kill9().await;
    faults.shift_clock(2 * HOUR_MS);
    daemon.start_again().await;
    wait_for_end(&waiting, &run, "at last").await;
    wait_for_end(&waiting, &later, "later").await;
    journal_rules::check(&waiting.events().await);
    assert_eq!(quotas(&daemon).await.len(), 0);
}

#[tokio::test]
async fn the_wait_survives_a_rebuild_of_the_lists() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    exhaust(&session).await;
    let before = quotas(&daemon).await;
    daemon.terminate().await;
    daemon.qd(&["doctor", "--rebuild"]).await.ok();
    daemon.start_again().await;
    assert_eq!(quotas(&daemon).await, before);
    release(&daemon, &before[0]).await;
    daemon.terminate().await;
    daemon.qd(&["doctor", "--rebuild"]).await.ok();
    daemon.start_again().await;
    assert_eq!(quotas(&daemon).await.len(), 0);
}

#[tokio::test]
async fn a_reset_that_nobody_can_mean_is_not_waited_for() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    for text in [
        "quota exhausted",
        "quota exhausted, resets in 300 days",
        "quota exhausted, resets at 1999-01-01T00:00:00Z",
    ] {
        let failed = session.run_script(&[fail(text)]).await;
        assert_eq!(failed["error"]["code"], "quota_exhausted", "{text}: {failed:#}");
        assert_eq!(failed["error"]["resets_at"], Value::Null, "{text}");
        assert_eq!(session.run_script(&[say("on")]).await["text"], "on", "{text}");
    }
    assert_eq!(quotas(&daemon).await.len(), 0);
}

#[tokio::test]
async fn waiting_runs_can_be_moved_removed_and_cancelled() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    exhaust(&session).await;
    let mut runs = Vec::new();
    for text in ["a", "b", "c", "d"] {
        runs.push(session.prompt_script(&[say(text)]).await);
    }
    let queue = |run: &str| session.agent_path(&format!("/queue/{run}"));
    let client = daemon.client();
    client.patch(&queue(&runs[3]), &json!({ "before": runs[0] })).await.expect(200);
    client.delete(&queue(&runs[0])).await.expect(200);
    assert_eq!(session.wait(&runs[0]).await["finish_reason"], "cancelled");
    session.cancel_run(&runs[1]).await;
    assert_eq!(session.wait(&runs[1]).await["finish_reason"], "cancelled");
    let listed: Vec<Value> = session.queue().await.iter().map(|entry| entry["run_id"].clone()).collect();
    assert_eq!(listed, [json!(runs[3]), json!(runs[2])]);
    session.try_steer("x").await.expect_refusal(409, "not_running");
    release(&daemon, &quotas(&daemon).await[0]).await;
    wait_for_end(&session, &runs[2], "c").await;
    journal_rules::check(&session.events().await);
    let starts: Vec<_> = session
        .events()
        .await
        .into_iter()
        .filter(|event| event.kind == "run.started")
        .filter_map(|event| event.run_id)
        .collect();
    assert_eq!(starts[1..], [runs[3].clone(), runs[2].clone()]);
}

#[tokio::test]
async fn a_halt_outlasts_the_reset_and_a_budget_ends_what_waits() {
    let (daemon, faults) = daemon_with_clock().await;
    let session = daemon.session("script").await;
    exhaust(&session).await;
    let client = daemon.client();
    client.post_empty("/v1/halt").await.expect(200);
    let run = session.prompt_script(&[usage(1, 1, 1.0), say("x")]).await;
    assert_eq!(session.wait_for_run_event(&run, "run.queued").await.data["reason"], "halted");
    client.delete("/v1/halt").await.expect(200);
    wait_until_parked(&session, &run).await;
    client.post_empty("/v1/halt").await.expect(200);
    faults.shift_clock(2 * HOUR_MS);
    poll_until("the release", async || quotas(&daemon).await.is_empty().then_some(())).await;
    assert_eq!(session.run(&run).await["state"], "queued", "the halt is still set");
    client.delete("/v1/halt").await.expect(200);
    assert_eq!(session.wait(&run).await["text"], "x");

    exhaust(&session).await;
    let run = session.prompt_script(&[say("y")]).await;
    wait_until_parked(&session, &run).await;
    session.patch(json!({ "budget_usd": 0.5 })).await;
    assert_eq!(session.wait(&run).await["finish_reason"], "budget_exceeded");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_session_that_waits_leaves_its_slot_to_others() {
    let daemon = TestDaemon::start_with_settings("max_agents = 1\n").await;
    let parked = daemon.session("script").await;
    exhaust(&parked).await;
    let run = parked.prompt_script(&[say("later")]).await;
    wait_until_parked(&parked, &run).await;
    let other = daemon.session_with(json!({ "agent": "script", "env": { "SCRIPT_LOGIN": "mine" } })).await;
    assert_eq!(other.run_script(&[say("now")]).await["text"], "now");

    // One that stood in the line for a slot leaves it too.
    let working = other.prompt_script(&[await_steer(600_000)]).await;
    other.wait_for_start(&working).await;
    release(&daemon, &quotas(&daemon).await[0]).await;
    let in_line = |event: &TestEvent| event.kind == "run.queued" && event.data["reason"] == "capacity";
    parked.wait_for_event("its place in the line", in_line).await;
    other.steer("go").await;
    wait_for_end(&parked, &run, "later").await;
    journal_rules::check(&parked.events().await);
}

#[tokio::test]
async fn a_suspended_run_goes_on_when_its_child_has_waited_for_the_reset() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("before "), await_steer(600_000), suspend(), say("after")]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let child = session.create_child(json!({ "agent": "script" })).await;
    let told = child.prompt_script(&[await_steer(600_000), fail("quota exhausted, resets in 1h")]).await;
    child.wait_for_start(&told).await;
    let waiting = child.prompt_script(&[say("done")]).await;
    session.steer("go").await;
    session.wait_for_run_event(&run, "run.suspended").await;
    child.steer("go").await;
    wait_until_parked(&child, &waiting).await;
    assert_eq!(session.show().await["state"], "waiting");
    release(&daemon, &quotas(&daemon).await[0]).await;
    wait_for_end(&child, &waiting, "done").await;
    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "end_turn", "{ended:#}");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_suspended_run_is_not_resumed_before_the_reset() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("before "), await_steer(600_000), suspend(), say("after")]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let child = session.create_child(json!({ "agent": "script" })).await;
    let told = child.prompt_script(&[await_steer(600_000), fail("quota exhausted, resets in 1h")]).await;
    child.wait_for_start(&told).await;
    session.steer("go").await;
    session.wait_for_run_event(&run, "run.suspended").await;
    child.steer("go").await;
    wait_until_parked(&session, &run).await;
    release(&daemon, &quotas(&daemon).await[0]).await;
    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "end_turn", "{ended:#}");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_fleet_goes_on_when_the_quota_of_its_sessions_has_reset() {
    let (daemon, faults) = daemon_with_clock().await;
    exhaust(&daemon.session("script").await).await;
    let file = "fleet:\n  task: build\n  sessions: { a: { agent: script }, b: { agent: echo } }\n  start: a\n  \
                routes: [{ when: a.done, route_to: b }]\n";
    let fleet = daemon.workspace().await.fleet(file).await;
    let a = fleet.session("a").await;
    a.wait_for_event("its wait", |event| event.kind == "run.queued" && event.data["reason"] == "quota").await;
    assert_eq!(fleet.show().await["state"], "running");
    faults.shift_clock(2 * HOUR_MS);
    assert_eq!(fleet.wait_for_end().await["state"], "done");
}

#[tokio::test]
async fn verbs_show_what_waits_until_when_and_release_it() {
    let daemon = TestDaemon::start().await;
    assert!(!daemon.qd(&["quota"]).await.ok().contains("script"));
    let session = daemon.session("script").await;
    exhaust(&session).await;
    let run = session.prompt_script(&[say("x")]).await;
    wait_until_parked(&session, &run).await;
    for verb in ["ps", "status"] {
        let shown = daemon.qd(&[verb]).await.ok();
        assert!(shown.contains("1 queued (quota until "), "{verb}: {shown}");
    }
    let listed = daemon.qd(&["quota"]).await.ok();
    assert!(listed.contains("script") && listed.contains(&session.id), "{listed}");
    assert_eq!(daemon.qd(&["quota", "--json"]).await.json()[0]["agent"], "script");
    let log = daemon.qd(&["logs", &session.id]).await.ok();
    assert!(log.contains("queued at 1: the quota is exhausted until"), "{log}");
    let mut waiting = daemon.home.start(&["wait", &session.id]);
    waiting.wait_for_stderr("waits for the quota of script").await;
    daemon.qd(&["quota", "release", "nobody"]).await.expect_exit(3);
    assert!(daemon.qd(&["quota", "release", "script"]).await.ok().contains("released script"));
    waiting.wait().await.ok();

    exhaust(&session).await;
    daemon.qd(&["quota", "release", &session.id]).await.ok();
    assert_eq!(session.run_script(&[say("on")]).await["text"], "on");
    daemon.qd(&["quota", "release", &session.id]).await.expect_exit(3);
}
