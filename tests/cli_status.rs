//! `qd ps` and `qd status`: how sessions ended, what they changed, and what happened since the user last looked.

use std::os::unix::fs::PermissionsExt;

use qd_testkit::faulty_libc::FaultyLibc;
use qd_testkit::git::make_repository;
use qd_testkit::{TestDaemon, TestHome, TestTerminal, poll_until, script::*};
use serde_json::{Value, json};

const TWO_DAYS_MS: i64 = 2 * 24 * 60 * 60 * 1000;

/// The row of a session in `qd ps`.
async fn row(daemon: &TestDaemon, id: &str) -> String {
    let shown = daemon.qd(&["ps"]).await.ok();
    let row = shown.lines().find(|line| line.starts_with(id));
    row.unwrap_or_else(|| panic!("no {id} in {shown}")).to_owned()
}

async fn status(daemon: &TestDaemon) -> Value {
    daemon.qd(&["status", "--json"]).await.json()
}

fn ids(entries: &Value) -> Vec<&str> {
    entries.as_array().unwrap().iter().map(|entry| entry["id"].as_str().unwrap()).collect()
}

/// What `qd status` prints on a terminal.
async fn look(daemon: &TestDaemon) -> String {
    let terminal = TestTerminal::start_qd(&daemon.home, &["status"]).await;
    terminal.wait_for_text("exit 0").await
}

#[tokio::test]
async fn ps_shows_how_the_last_run_ended_and_the_first_prompt_as_title() {
    let daemon = TestDaemon::start().await;
    let new = daemon.session("script").await;
    assert!(row(&daemon, &new.id).await.contains(" new "));
    let failed = daemon.session("script").await;
    failed.run_script(&[fail("the model is on fire")]).await;
    let shown = row(&daemon, &failed.id).await;
    assert!(shown.contains(" failed ") && shown.contains(r#"[{"fail":"#), "{shown}");
    let limited = daemon.session_with(json!({ "agent": "script", "run_timeout_s": 1 })).await;
    limited.run_script(&[sleep_forever()]).await;
    assert!(row(&daemon, &limited.id).await.contains(" timed out "));
    let done = daemon.session_with(json!({ "agent": "script", "title": "titled" })).await;
    let run = done.run_script(&[say("x")]).await;
    let shown = row(&daemon, &done.id).await;
    assert!(shown.contains(" done ") && shown.contains("titled") && !shown.contains("say"), "{shown}");

    let session = done.show().await;
    assert_eq!(session["last_run"]["id"], run["id"]);
    assert_eq!(session["last_run"]["finish_reason"], "end_turn");
    assert_eq!(session["last_run"]["finished_at"], run["finished_at"]);
    assert_eq!((session.get("auto_title"), session.get("active_run")), (None, None));
    assert!(failed.show().await["auto_title"].as_str().unwrap().starts_with(r#"[{"fail":"#));
}

#[tokio::test]
async fn on_a_terminal_ids_are_short_and_other_commands_take_them() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "title": "busy" })).await;
    let run = session.prompt_script(&[sleep_forever()]).await;
    session.wait_for_start(&run).await;
    let terminal = TestTerminal::start_qd(&daemon.home, &["ps"]).await;
    let screen = terminal.wait_for_text("exit 0").await;
    let line = screen.lines().find(|line| line.contains(" busy")).unwrap_or_else(|| panic!("{screen}"));
    let short = line.split_whitespace().next().unwrap();
    assert!(session.id.contains(short) && short.len() < 10, "{screen}");
    assert_eq!(daemon.qd(&["ps", "-q"]).await.ok().trim(), session.id, "programs get whole ids");
    assert!(daemon.qd(&["ps"]).await.ok().contains(&session.id), "and pipes too");
    let screen = look(&daemon).await;
    assert!(screen.contains(&format!("qd attach {short}")) && !screen.contains(&session.id), "{screen}");
    assert_eq!(status(&daemon).await["working"][0]["next"], format!("qd attach {}", session.id));
    assert_eq!(daemon.qd(&["cancel", short]).await.code, Some(0));
    session.wait(&run).await;
}

#[tokio::test]
async fn how_a_run_ended_is_still_known_after_a_restart() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_script(&[stop("refused")]).await;
    let before = session.show().await;
    daemon.kill9().await;
    daemon.start_again().await;
    let after = daemon.client().get("/v1/sessions").await.list();
    assert_eq!(after[0]["last_run"], before["last_run"]);
    assert_eq!(after[0]["auto_title"], before["auto_title"]);
    assert!(row(&daemon, &session.id).await.contains(" refused "));
}

#[tokio::test]
async fn ps_shows_unmerged_work_until_it_is_merged() {
    let daemon = TestDaemon::start().await;
    make_repository(&daemon.home.project_dir().canonicalize().unwrap());
    let session = daemon.session_with(json!({ "agent": "script", "worktree": true })).await;
    session.run_script(&[write("new.txt", "one\ntwo\n")]).await;
    // On a busy machine git may take longer than the list waits for it.
    let counted = async || Some(row(&daemon, &session.id).await).filter(|row| row.contains(" +2 -0 "));
    poll_until("the lines to be counted", counted).await;
    let listed = daemon.client().get("/v1/worktrees?overlaps=false&sizes=false&lines=true").await.list();
    assert_eq!((&listed[0]["added"], &listed[0]["removed"]), (&json!(2), &json!(0)));
    assert_eq!((&listed[0]["size_bytes"], &listed[0]["overlaps"]), (&json!(0), &json!([])));
    let report = status(&daemon).await;
    assert_eq!(ids(&report["finished"]), [session.id.as_str()]);

    daemon.qd(&["merge", &session.id]).await.ok();
    assert!(!row(&daemon, &session.id).await.contains("+2"));
    let listed = daemon.client().get("/v1/worktrees").await.list();
    assert_eq!((listed[0]["state"].as_str(), listed[0].get("added")), (Some("merged"), None));
    assert!(listed[0]["size_bytes"].as_u64().unwrap() > 0, "{listed:?}");
    daemon.client().get("/v1/worktrees?lines=maybe").await.expect(400);
}

#[tokio::test]
async fn a_slow_git_does_not_hold_up_the_list() {
    let home = TestHome::new();
    let (programs, block) = (home.sibling_path("programs"), home.sibling_path("block"));
    std::fs::create_dir(&programs).unwrap();
    let path = std::env::var("PATH").unwrap();
    let script = format!(
        "#!/bin/sh\nwhile [ -e '{}' ]; do sleep 0.1; done\nPATH='{path}' exec git \"$@\"\n",
        block.display()
    );
    std::fs::write(programs.join("git"), script).unwrap();
    std::fs::set_permissions(programs.join("git"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let daemon = TestDaemon::start_in(home, |options| {
        options.env("PATH", &format!("{}:{path}", programs.display()));
    })
    .await;
    make_repository(&daemon.home.project_dir().canonicalize().unwrap());
    let settings = json!({ "agent": "script", "worktree": true, "title": "apart" });
    let session = daemon.session_with(settings).await;
    session.run_script(&[write("new.txt", "one\n")]).await;
    std::fs::write(&block, "").unwrap();
    let shown = row(&daemon, &session.id).await;
    assert!(shown.contains(" done ") && shown.contains(" … "), "{shown}");
    assert!(daemon.qd(&["status"]).await.ok().contains("apart"));
    std::fs::remove_file(&block).unwrap();
}

#[tokio::test]
async fn sessions_without_activity_for_a_day_leave_the_list_and_a_brings_them_back() {
    let faults = FaultyLibc::new();
    faults.shift_clock(-TWO_DAYS_MS);
    let daemon = TestDaemon::start_in(TestHome::new(), |options| {
        options.faulty_libc(&faults);
    })
    .await;
    let old = daemon.session_with(json!({ "agent": "script", "title": "old" })).await;
    old.run_script(&[say("x")]).await;
    let busy = daemon.session_with(json!({ "agent": "script", "title": "busy" })).await;
    let run = busy.prompt_script(&[say("x"), sleep_forever()]).await;
    busy.wait_for_run_event(&run, "text.delta").await;

    let listed = daemon.qd(&["ps"]).await;
    assert!(listed.stdout.contains(&busy.id) && !listed.stdout.contains(&old.id), "{listed:?}");
    assert!(listed.stderr.contains("1 session without activity for a day"), "{listed:?}");
    assert!(listed.stderr.contains("`qd ps -a`"), "{listed:?}");
    assert_eq!(daemon.qd(&["ps", "-q"]).await.ok().trim(), busy.id);
    assert_eq!(ids(&daemon.qd(&["ps", "--json"]).await.json()), [busy.id.as_str()]);
    let all = daemon.qd(&["ps", "-a"]).await;
    assert!(all.stdout.contains(&old.id) && all.stderr.is_empty(), "{all:?}");
    let report = status(&daemon).await;
    assert_eq!((ids(&report["working"]), ids(&report["finished"])), (vec![busy.id.as_str()], vec![]));
    let report = daemon.qd(&["status", "--json", "--since", "3d"]).await.json();
    assert_eq!(ids(&report["finished"]), [old.id.as_str()]);
}

#[tokio::test]
async fn status_says_what_needs_you_what_works_and_what_has_finished() {
    let daemon = TestDaemon::start().await;
    let failed = daemon.session_with(json!({ "agent": "script", "title": "broken" })).await;
    failed.run_script(&[fail("no")]).await;
    let working = daemon.session_with(json!({ "agent": "script", "title": "busy" })).await;
    let run = working.prompt_script(&[say("x"), sleep_forever()]).await;
    working.wait_for_run_event(&run, "text.delta").await;
    let asking = daemon.session_with(json!({ "agent": "script", "title": "curious" })).await;
    asking.prompt_script(&[question("Which port?", &[])]).await;
    asking.wait_for_event("its question", |event| event.kind == "ask.opened").await;

    let report = status(&daemon).await;
    let ask = daemon.client().pending_asks().await[0]["id"].as_str().unwrap().to_owned();
    let needs_you = &report["needs_you"][0];
    assert_eq!((&needs_you["ask_id"], &needs_you["title"]), (&json!(ask), &json!("curious")));
    assert_eq!(needs_you["next"], format!("qd answer {ask} VALUE"));
    assert_eq!(ids(&report["working"]), [working.id.as_str()]);
    assert_eq!(report["working"][0]["at"], working.show().await["active_run"]["started_at"]);
    assert_eq!(ids(&report["finished"]), [failed.id.as_str()]);
    assert_eq!(report["finished"][0]["next"], format!("qd logs {}", failed.id));

    let shown = daemon.qd(&["status"]).await.ok();
    for part in ["NEEDS YOU (1)", "Which port?", "WORKING (1)", "FINISHED (1) in the last 24 hours", "failed"]
    {
        assert!(shown.contains(part), "{part} is missing: {shown}");
    }
    assert!(!shown.contains("HALTED"), "{shown}");
    daemon.qd(&["halt", "too", "expensive"]).await.ok();
    assert!(daemon.qd(&["status"]).await.ok().starts_with("HALTED: too expensive"));
    let refused = daemon.qd(&["status", "--since", "one day"]).await;
    assert!(refused.stderr.contains("24h or 7d"), "it says how a time is written: {refused:?}");
    refused.expect_exit(2);
}

#[tokio::test]
async fn only_a_look_at_a_terminal_counts_as_the_last_one() {
    let daemon = TestDaemon::start().await;
    let first = daemon.session_with(json!({ "agent": "script", "title": "first" })).await;
    first.run_script(&[say("x")]).await;
    for _ in 0..2 {
        assert_eq!(ids(&status(&daemon).await["finished"]), [first.id.as_str()], "--json leaves it");
        assert!(daemon.qd(&["status"]).await.ok().contains("FINISHED (1)"), "a pipe leaves it");
    }
    let screen = look(&daemon).await;
    assert!(screen.contains("FINISHED (1) in the last 24 hours") && screen.contains("first"), "{screen}");
    let screen = look(&daemon).await;
    assert!(screen.contains("FINISHED (0) since your last look"), "{screen}");

    // The first session finishes again, which is new.
    first.run_script(&[say("y")]).await;
    let second = daemon.session_with(json!({ "agent": "script", "title": "second" })).await;
    second.run_script(&[say("x")]).await;
    let report = status(&daemon).await;
    assert_eq!(ids(&report["finished"]), [second.id.as_str(), first.id.as_str()], "the latest first");
    let since = daemon.qd(&["status", "--json", "--since", "1d"]).await.json();
    assert_eq!(since["finished"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn status_shows_a_fleet_as_one_line() {
    let daemon = TestDaemon::start().await;
    let file = daemon.home.project_dir().join("fleet.yaml");
    let fleet = "fleet:\n  task: Ship it.\n  sessions:\n    one: { agent: echo }\n    two: { agent: echo }\n  \
                 start: one\n  routes:\n    - { when: one.done, route_to: two }\n";
    std::fs::write(&file, fleet).unwrap();
    daemon.qd(&["up", file.to_str().unwrap()]).await.ok();
    let report = status(&daemon).await;
    let finished = report["finished"].as_array().unwrap();
    assert_eq!(finished.len(), 1, "{report}");
    assert!(finished[0]["id"].as_str().unwrap().starts_with("flt_"), "{report}");
    assert_eq!((&finished[0]["title"], &finished[0]["state"]), (&json!("Ship it."), &json!("done")));
}
