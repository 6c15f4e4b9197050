//! Verbs and flags that start, change and wait for sessions: `wait`, `set`, `queue`, the flags of `run` and `ps`, and which
//! program an agent is started from.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use qd_testkit::{TestCommand, TestDaemon, TestHome, script::*};
use serde_json::{Value, json};

#[tokio::test]
async fn wait_fails_if_any_run_that_it_waited_for_did_not_end_well() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let first = session.prompt_script(&[say("one "), await_steer(600_000), fail("no")]).await;
    session.wait_for_run_event(&first, "text.delta").await;
    session.prompt_script(&[say("two")]).await;
    let mut waiting = daemon.home.start(&["wait", &session.id]);
    waiting.wait_for_stderr("waiting for 2 runs").await;
    session.steer("go").await;
    waiting.wait().await.expect_exit(1);
    assert_eq!(session.runs().await[1]["finish_reason"], "end_turn", "the last one ended well");
    daemon.qd(&["wait", &session.id]).await.ok();
}

#[tokio::test]
async fn wait_shows_the_ask_that_holds_it_up_and_leaves_at_it_if_told_to() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[ask_bash("make install")]).await;
    let ask = session.wait_for_ask(&run).await;
    let left = daemon.qd(&["wait", "--on-ask", "fail", &session.id]).await;
    assert!(left.stderr.contains("make install") && left.stderr.contains("qd allow"), "{left:?}");
    left.expect_exit(1);
    let mut waiting = daemon.home.start(&["wait", &run]);
    waiting.wait_for_stderr("qd allow").await;
    daemon.qd(&["allow", &ask]).await.ok();
    waiting.wait().await.ok();
}

#[tokio::test]
async fn wait_attach_and_logs_take_a_fleet() {
    let daemon = TestDaemon::start().await;
    let task = steps(&[say("from a"), await_steer(600_000)]);
    let file = daemon.home.project_dir().join("fleet.yaml");
    let fleet = format!(
        "fleet:\n  task: {}\n  sessions: {{ a: {{ agent: script }}, b: {{ agent: echo }} }}\n  start: a\n  \
         routes: [{{ when: a.done, route_to: b }}]\n",
        json!(task)
    );
    std::fs::write(&file, fleet).unwrap();
    let id = daemon.qd(&["up", file.to_str().unwrap(), "--detach"]).await.ok().trim().to_owned();
    let mut waiting = daemon.home.start(&["wait", &id]);
    waiting.wait_for_stderr(&format!("waiting for {id}")).await;
    let mut attached = daemon.home.start(&["attach", &id]);
    attached.wait_for_stdout("a: works").await;
    let listed = daemon.client().get("/v1/sessions").await.list();
    let a = listed.iter().find(|session| session["title"] == "a").unwrap();
    let a = qd_testkit::TestSession {
        client: daemon.client(),
        workspace: a["workspace_id"].as_str().unwrap().to_owned(),
        id: a["id"].as_str().unwrap().to_owned(),
    };
    let run = a.runs().await[0]["id"].as_str().unwrap().to_owned();
    a.wait_for_run_event(&run, "text.delta").await;
    let following = daemon.home.start(&["logs", "-f", "--since", "2999-01-01", &id]);
    a.steer("go").await;
    assert_eq!(waiting.wait().await.ok().trim(), format!("{id} done"));
    let shown = attached.wait().await.ok();
    assert!(shown.contains("b: done"), "{shown}");
    let followed = following.wait().await.ok();
    let of_a = followed.split("── ").find(|section| section.starts_with("a (")).unwrap_or_default();
    assert!(!of_a.contains("from a"), "what was said before --since is not shown: {followed}");
    let logs = daemon.qd(&["logs", &id]).await.ok();
    let (first, second) = (logs.find("── a (ses_").unwrap(), logs.find("── b (ses_").unwrap());
    assert!(first < second && logs[first..second].contains("from a"), "{logs}");
    let fleets = daemon.qd(&["ps", "--fleet"]).await.ok();
    assert!(!fleets.contains("0/") && !fleets.contains("0 of"), "{fleets}");
}

#[tokio::test]
async fn run_takes_limits_a_system_prompt_variables_and_files() {
    let daemon = TestDaemon::start().await;
    let file = daemon.home.project_dir().join("notes.txt");
    std::fs::write(&file, "remember").unwrap();
    let output = daemon
        .qd(&[
            "run",
            "--agent",
            "script",
            "--budget",
            "2.50",
            "--max-turns",
            "7",
            "--system-prompt",
            "be brief",
            "--env",
            "COLOUR=green",
            "--env",
            "QD_HOME",
            "--file",
            "notes.txt",
            "--title",
            "t",
            &steps(&[say("x"), config()]),
        ])
        .await;
    output.ok();
    let session = &daemon.client().get("/v1/sessions").await.list()[0];
    assert_eq!(
        (&session["budget_usd"], &session["max_turns"], &session["system_prompt"]),
        (&json!(2.5), &json!(7), &json!("be brief"))
    );
    assert_eq!(session["env"], json!(["COLOUR", "QD_HOME"]));
    let events = daemon.qd(&["logs", "--json", "t"]).await.ok();
    assert!(events.contains("notes.txt"), "{events}");
    daemon.qd(&["run", "-a", "echo", "--env", "NOT_SET_ANYWHERE", "x"]).await.expect_exit(2);
    daemon.qd(&["run", "-a", "echo", "--budget", "0", "x"]).await.expect_exit(2);
    daemon.qd(&["run", "-a", "echo", "--file", "missing.txt", "x"]).await.expect_exit(2);
}

#[tokio::test]
async fn set_changes_a_session_and_none_removes_a_limit() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "budget_usd": 1 })).await;
    let changes = ["title=new name", "policy=allow", "model=m2", "max_turns=3", "budget=none"];
    daemon.qd(&[&["set", &session.id][..], &changes].concat()).await.ok();
    let shown = session.show().await;
    let expected =
        json!({ "title": "new name", "policy": "allow", "model": "m2", "max_turns": 3, "budget_usd": null });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(shown[key], *value, "{key}");
    }
    daemon.qd(&["set", "new name", "colour=red"]).await.expect_exit(2);
}

#[tokio::test]
async fn queue_lists_and_removes() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let active = session.prompt_script(&[sleep_forever()]).await;
    session.wait_for_start(&active).await;
    let mut queued = Vec::new();
    for text in ["one", "two", "three"] {
        queued.push(session.prompt_script(&[say(text)]).await);
    }
    let listed = daemon.qd(&["queue", &session.id]).await.ok();
    assert!(queued.iter().all(|run| listed.contains(run)) && !listed.contains(&active), "{listed}");
    daemon.qd(&["queue", &session.id, "--remove", &queued[1]]).await.ok();
    assert_eq!(session.wait(&queued[1]).await["finish_reason"], "cancelled");
    daemon.qd(&["queue", &session.id, "--remove", &active]).await.expect_exit(1);
    let cleared = daemon.qd(&["--json", "queue", &session.id, "--clear"]).await.json();
    assert_eq!(cleared["removed"], json!([queued[0], queued[2]]));
    assert_eq!(daemon.qd(&["--json", "queue", &session.id]).await.json(), json!([]));
}

#[tokio::test]
async fn ps_filters_and_prints_ids_alone() {
    let daemon = TestDaemon::start().await;
    let one = daemon.session_with(json!({ "agent": "script", "title": "Fix the parser" })).await;
    let two = daemon.session_with(json!({ "agent": "echo", "title": "docs" })).await;
    let ids = |output: String| output.lines().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(ids(daemon.qd(&["ps", "-q", "--filter", "agent=echo"]).await.ok()), [two.id.as_str()]);
    assert_eq!(ids(daemon.qd(&["ps", "-q", "--filter", "title=PARSER"]).await.ok()), [one.id.as_str()]);
    let both = ["ps", "-q", "--filter", "agent=echo", "--filter", "state=running"];
    assert_eq!(daemon.qd(&both).await.ok(), "");
    assert_eq!(daemon.qd(&["--json", "ps", "--filter", "agent=echo"]).await.json()[0]["id"], two.id);
    daemon.qd(&["ps", "--filter", "colour=red"]).await.expect_exit(2);
}

#[tokio::test]
async fn config_set_chooses_the_agent_of_run() {
    let home = TestHome::new();
    home.qd(&["config", "set", "agent", "echo"]).await.ok();
    let output = home.qd(&["run", "hello"]).await;
    assert!(!output.stderr.contains("no agent is installed"), "{output:?}");
    assert!(output.ok().contains("hello"));
    let shown = home.qd(&["config", "set", "idle_s", "60"]).await;
    assert!(shown.stderr.contains("qd stop"), "a daemon runs: {shown:?}");
    assert!(shown.ok().contains("idle_s = 60"));
    home.qd(&["config", "set", "idel_s", "60"]).await.expect_exit(2);
    home.qd(&["config", "unset", "agent"]).await.ok();
    assert!(home.qd(&["run", "hello"]).await.stderr.contains("no agent is installed"));
}

#[tokio::test]
async fn run_does_not_choose_among_several_agents() {
    let daemon = TestDaemon::start().await;
    let programs = fake_agents(&daemon.home, &["claude", "codex"]);
    let output = with_path(&daemon, &programs, &["run", "hello"]).await;
    assert!(output.stderr.contains("claude, codex"), "{output:?}");
    assert!(output.stderr.contains("qd config set agent claude"), "{output:?}");
    output.expect_exit(2);
    assert!(daemon.client().get("/v1/sessions").await.list().is_empty(), "nothing was started");
}

/// Programs with these names that print how they were called.
fn fake_agents(home: &TestHome, names: &[&str]) -> PathBuf {
    let folder = home.sibling_path("programs");
    std::fs::create_dir_all(&folder).unwrap();
    for name in names {
        let path = folder.join(name);
        std::fs::write(&path, "#!/bin/sh\necho \"$0 finds $(command -v beside)\"\n").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    }
    folder
}

/// Runs `qd` with this folder first in its `PATH`.
async fn with_path(daemon: &TestDaemon, folder: &Path, args: &[&str]) -> qd_testkit::TestCommandOutput {
    let usual = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(folder.to_owned()).chain(std::env::split_paths(&usual));
    let mut command = daemon.home.command(args);
    command.env("PATH", std::env::join_paths(folders).unwrap());
    TestCommand::spawn(command).wait().await
}

#[tokio::test]
async fn an_agent_is_found_in_the_callers_path_and_the_session_keeps_it() {
    let daemon = TestDaemon::start().await;
    let programs = fake_agents(&daemon.home, &["own-agent", "beside"]);
    let refused = daemon.qd(&["run", "-a", "exec:own-agent", "hello"]).await;
    assert!(refused.stderr.contains("own-agent") && refused.stderr.contains("PATH"), "{refused:?}");
    assert_ne!(refused.code, Some(0));
    let output =
        with_path(&daemon, &programs, &["run", "-a", "exec:own-agent", "--title", "mine", "hello"]).await;
    let program = programs.join("own-agent");
    let expected = format!("{} finds {}", program.display(), programs.join("beside").display());
    assert!(output.ok().contains(&expected));
    // Later runs find it too, also from a caller with another PATH.
    let again = daemon.qd(&["run", "--session", "mine", "again"]).await.ok();
    assert!(again.contains(&expected), "{again}");
}

#[tokio::test]
async fn a_fleet_and_the_lists_find_agents_in_the_callers_path() {
    let daemon = TestDaemon::start().await;
    let programs = fake_agents(&daemon.home, &["own-agent", "beside"]);
    let manifest = "[agent]\nname = 'mine'\nbinary = 'own-agent'\ndriver = 'exec'\n";
    std::fs::create_dir_all(daemon.home.path().join("agents")).unwrap();
    std::fs::write(daemon.home.path().join("agents/mine.toml"), manifest).unwrap();
    let fleet = "fleet:\n  task: hello\n  sessions:\n    one: { agent: mine }\n  start: one\n";
    std::fs::write(daemon.home.project_dir().join("fleet.yaml"), fleet).unwrap();
    for args in [&["run", "-a", "mine", "hello"][..], &["up", "fleet.yaml"], &["up", "fleet.yaml", "--plan"]]
    {
        let refused = daemon.qd(args).await;
        assert!(refused.stderr.contains("the daemon's PATH"), "{refused:?}");
        assert!(refused.stderr.contains("your own PATH was searched too: /"), "{refused:?}");
        refused.expect_exit(1);
    }
    with_path(&daemon, &programs, &["up", "fleet.yaml", "--plan"]).await.ok();
    let output = with_path(&daemon, &programs, &["up", "fleet.yaml"]).await.ok();
    assert!(output.contains(&programs.join("own-agent").display().to_string()), "{output}");
    let row = |list: String| list.lines().find(|line| line.starts_with("mine")).unwrap().to_owned();
    assert!(row(daemon.qd(&["agents"]).await.ok()).contains("not installed"));
    assert!(row(with_path(&daemon, &programs, &["agents"]).await.ok()).contains("in your PATH"));
    let doctor = with_path(&daemon, &programs, &["doctor"]).await;
    assert!(doctor.stdout.contains("mine is in your PATH, but not in the daemon's"), "{doctor:?}");
}

#[tokio::test]
async fn a_program_is_accepted_over_the_socket_only() {
    let daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let programs = fake_agents(&daemon.home, &["own-agent"]);
    let workspace = daemon.workspace().await;
    let path = workspace.path("/sessions");
    let session = |program: &Path| json!({ "agent": "exec:own-agent", "program": program });
    let here = session(&programs.join("own-agent"));
    assert_eq!(daemon.tcp().post(&path, &here).await.expect(400)["error"]["code"], "invalid_value");
    daemon.client().post(&path, &here).await.expect(201);
    let fleet = json!({
        "spec": { "fleet": { "task": "x", "sessions": { "a": { "agent": "exec:own-agent" } }, "start": "a" } },
        "programs": { "exec:own-agent": programs.join("own-agent") },
    });
    for path in [workspace.path("/fleets"), workspace.path("/fleets/check")] {
        assert_eq!(daemon.tcp().post(&path, &fleet).await.expect(400)["error"]["code"], "invalid_value");
    }
    daemon.client().post(&workspace.path("/fleets"), &fleet).await.expect(201);
    for bad in [session(&programs.join("missing")), session(Path::new("own-agent"))] {
        assert_eq!(daemon.client().post(&path, &bad).await.expect(400)["error"]["code"], "invalid_value");
    }
    let echo: Value = json!({ "agent": "echo", "program": programs.join("own-agent") });
    assert_eq!(daemon.client().post(&path, &echo).await.expect(400)["error"]["code"], "invalid_value");
}

#[tokio::test]
async fn logs_can_begin_late_and_show_only_the_end() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_script(&[say("one\ntwo\nthree\nfour")]).await;
    let tail = daemon.qd(&["logs", "--tail", "2", &session.id]).await.ok();
    assert_eq!(tail, "three\nfour\n");
    let events = daemon.qd(&["--json", "logs", "-n", "1", &session.id]).await.ok();
    assert_eq!(events.lines().count(), 1);
    assert_eq!(daemon.qd(&["logs", "--since", "2999-01-01", &session.id]).await.ok(), "");
    assert!(daemon.qd(&["logs", "--since", "1h", &session.id]).await.ok().contains("one"));
    daemon.qd(&["logs", "--since", "tomorrow-ish", &session.id]).await.expect_exit(2);
}

#[tokio::test]
async fn a_program_that_is_no_acp_agent_is_told_so() {
    let daemon = TestDaemon::start().await;
    let output = daemon.qd(&["run", "-a", "acp:cat", "hello"]).await;
    assert!(output.stderr.contains("does not speak the Agent Client Protocol"), "{output:?}");
    assert!(output.stderr.contains("exec:COMMAND"), "{output:?}");
    output.expect_exit(1);
}
