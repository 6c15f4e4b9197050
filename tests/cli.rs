//! The verbs of `qd` end to end, with their exit codes. Tests with a real terminal are in `cli_terminal.rs`.

use qd_testkit::{TestCommand, TestCommandOutput, TestDaemon, TestHome, home::signal, script::*};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Runs a script with `qd run`, with `args` before the prompt.
async fn run_script(daemon: &TestDaemon, args: &[&str], script: &[Value]) -> TestCommandOutput {
    let prompt = steps(script);
    daemon.qd(&[&["run", "--agent", "script"], args, &[&prompt]].concat()).await
}

/// The only session that exists.
async fn only_session(daemon: &TestDaemon) -> qd_testkit::TestSession {
    let sessions = daemon.client().get("/v1/sessions").await.list();
    let [session] = &sessions[..] else { panic!("{sessions:?}") };
    qd_testkit::TestSession {
        client: daemon.client(),
        workspace: session["workspace_id"].as_str().unwrap().to_owned(),
        id: session["id"].as_str().unwrap().to_owned(),
    }
}

#[tokio::test]
async fn run_needs_no_earlier_step_and_prints_the_answer() {
    let home = TestHome::new();
    let output = home.qd(&["run", "--agent", "echo", "hello there"]).await;
    assert!(output.stdout.contains("hello there"), "{output:?}");
    output.ok();
    assert!(home.daemon_pid().is_some(), "the daemon keeps running");
}

#[tokio::test]
async fn run_without_an_agent_takes_echo_with_a_note_where_there_is_no_other() {
    let daemon = TestDaemon::start().await;
    let output = daemon.qd(&["run", "hello"]).await;
    assert!(output.stdout.contains("hello"), "{output:?}");
    assert!(output.stderr.contains("echo"), "a note says so: {output:?}");
    output.ok();
}

#[tokio::test]
async fn run_reads_its_prompt_from_stdin() {
    let daemon = TestDaemon::start().await;
    let output = daemon.home.qd_with_input(&["run", "--agent", "echo", "-"], "from afar").await;
    assert!(output.ok().contains("from afar"));
}

#[tokio::test]
async fn run_exits_by_how_the_run_ended() {
    let daemon = TestDaemon::start().await;
    assert!(run_script(&daemon, &[], &[say("fine")]).await.ok().contains("fine"));
    let failed = run_script(&daemon, &[], &[fail("the model is on fire")]).await;
    assert!(failed.stderr.contains("the model is on fire"), "{failed:?}");
    failed.expect_exit(1);
    run_script(&daemon, &[], &[exit(3)]).await.expect_exit(1);
    run_script(&daemon, &[], &[stop("refused")]).await.expect_exit(1);
    run_script(&daemon, &["--timeout", "1"], &[sleep_forever()]).await.expect_exit(124);
}

#[tokio::test]
async fn run_of_a_run_that_somebody_cancels_exits_130() {
    let daemon = TestDaemon::start().await;
    let mut running =
        daemon.home.start(&["run", "--agent", "script", &steps(&[say("here"), sleep_forever()])]);
    running.wait_for_stdout("here").await;
    only_session(&daemon).await.cancel().await;
    running.wait().await.expect_exit(130);
}

#[tokio::test]
async fn ctrl_c_cancels_the_run_waits_for_its_end_and_exits_130() {
    let daemon = TestDaemon::start().await;
    let mut running =
        daemon.home.start(&["run", "--agent", "script", &steps(&[say("here"), sleep_forever()])]);
    running.wait_for_stdout("here").await;
    running.signal(Signal::INT);
    running.wait().await.expect_exit(130);
    let runs = only_session(&daemon).await.runs().await;
    assert_eq!(runs[0]["finish_reason"], "cancelled", "the run had ended when the command returned");
}

#[tokio::test]
async fn a_second_ctrl_c_detaches() {
    let daemon = TestDaemon::start().await;
    let script = steps(&[ignore_cancel(), say("here"), sleep_forever()]);
    let mut running = daemon.home.start(&["run", "--agent", "script", &script]);
    running.wait_for_stdout("here").await;
    let session = only_session(&daemon).await;
    session.patch(json!({ "cancel_grace_s": 600 })).await;
    running.signal(Signal::INT);
    session.wait_for_event("the cancel", |event| event.kind == "run.cancel_requested").await;
    running.signal(Signal::INT);
    running.wait().await.expect_exit(130);
    assert_eq!(session.runs().await[0]["finish_reason"], json!(null), "it exited before the run ended");
}

#[tokio::test]
async fn detach_prints_the_id_and_how_to_look_at_it() {
    let daemon = TestDaemon::start().await;
    let output = run_script(&daemon, &["--detach"], &[sleep_forever()]).await;
    let session = only_session(&daemon).await;
    assert!(output.stdout.contains(&session.id), "{output:?}");
    let all = format!("{}{}", output.stdout, output.stderr);
    assert!(all.contains("qd attach") || all.contains("qd logs"), "{all}");
    output.ok();
    assert_eq!(session.show().await["busy"], true);
}

#[tokio::test]
async fn run_takes_directory_title_session_and_policy() {
    let daemon = TestDaemon::start().await;
    run_script(&daemon, &["-C", "/usr", "--title", "mine"], &[say("x")]).await.ok();
    let session = only_session(&daemon).await;
    let workspace = daemon.client().get(&session.workspace_path("")).await.expect(200);
    assert_eq!((&workspace["path"], &session.show().await["title"]), (&json!("/usr"), &json!("mine")));
    let prompt = steps(&[say("again")]);
    assert!(daemon.qd(&["run", "--session", "mine", &prompt]).await.ok().contains("again"));
    assert_eq!(session.runs().await.len(), 2, "the same session");
    let denied = run_script(&daemon, &["--policy", "deny"], &[ask_bash("make")]).await;
    assert!(denied.ok().contains("denied"));
    let allowed =
        run_script(&daemon, &["--policy", "allow", "--model", "m1"], &[ask_bash("make"), config()]).await;
    let allowed = allowed.ok();
    assert!(allowed.contains("allowed") && allowed.contains("m1"), "{allowed}");
}

#[tokio::test]
async fn an_open_ask_and_the_command_that_answers_it_are_printed_to_stderr_off_a_terminal() {
    let daemon = TestDaemon::start().await;
    let script = steps(&[ask_bash("make install"), say("!")]);
    let running = daemon.home.start(&["run", "--agent", "script", "--on-ask", "wait", &script]);
    let ask = poll_ask(&daemon).await;
    daemon.qd(&["allow", &ask]).await.ok();
    let output = running.wait().await;
    assert!(output.stderr.contains("make install") && output.stderr.contains("qd allow"), "{output:?}");
    assert!(output.stderr.contains(&ask[..10]), "{output:?}");
    assert!(output.ok().contains("allowed"));
}

/// Waits for the first ask and returns its id.
async fn poll_ask(daemon: &TestDaemon) -> String {
    let mut stream = daemon.client().stream("/v1/events?after=0&kinds=ask.opened").await;
    qd_testkit::session::ask_id(&stream.next().await)
}

#[tokio::test]
async fn off_a_terminal_run_exits_at_an_ask_and_the_run_goes_on_when_it_is_answered() {
    let daemon = TestDaemon::start().await;
    let output = run_script(&daemon, &[], &[ask_bash("make install"), say("!")]).await;
    assert!(output.stderr.contains("make install") && output.stderr.contains("qd allow"), "{output:?}");
    assert!(output.stderr.contains("--on-ask wait"), "{output:?}");
    output.expect_exit(1);
    let ask = poll_ask(&daemon).await;
    daemon.qd(&["allow", &ask]).await.ok();
    let session = only_session(&daemon).await;
    let waited = daemon.qd(&["wait", &session.id]).await;
    assert_eq!(waited.ok(), format!("{} end_turn\n", session.id));
    assert!(session.runs().await[0]["text"].as_str().unwrap().contains("allowed"));
}

#[tokio::test]
async fn on_ask_deny_and_fail_decide_without_a_person() {
    let daemon = TestDaemon::start().await;
    let denied = run_script(&daemon, &["--on-ask", "deny"], &[ask_bash("make")]).await;
    assert!(denied.ok().contains("denied"));
    run_script(&daemon, &["--on-ask", "fail"], &[ask_bash("make")]).await.expect_exit(1);
    assert!(daemon.client().pending_asks().await.is_empty(), "nothing is left waiting");
}

#[tokio::test]
async fn ps_lists_what_is_open_and_with_a_what_is_closed_too() {
    let daemon = TestDaemon::start().await;
    let open = daemon.session_with(json!({ "agent": "script", "title": "open one" })).await;
    let closed = daemon.session_with(json!({ "agent": "script", "title": "closed one" })).await;
    closed.close().await;
    closed.wait_for_event("its end", |event| event.kind == "session.closed").await;
    let shown = daemon.qd(&["ps"]).await.ok();
    assert!(shown.contains("open one") && !shown.contains("closed one"), "{shown}");
    let all = daemon.qd(&["ps", "-a"]).await.ok();
    assert!(all.contains("open one") && all.contains("closed one"), "{all}");
    let listed = daemon.qd(&["ps", "--json"]).await.json();
    assert_eq!(listed[0]["id"], open.id, "{listed}");
    assert_eq!(listed.as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn an_id_may_be_any_unambiguous_prefix_or_a_title() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "title": "the one" })).await;
    session.run_script(&[say("spoken")]).await;
    for name in [session.id.as_str(), &session.id[..9], "the one"] {
        let logs = daemon.qd(&["logs", name]).await.ok();
        assert!(logs.contains("spoken"), "{name}: {logs}");
    }
    daemon.session("echo").await;
    let ambiguous = daemon.qd(&["logs", "ses_"]).await;
    assert!(ambiguous.stderr.contains(&session.id), "the matches are listed: {ambiguous:?}");
    assert_ne!(ambiguous.code, Some(0));
    daemon.qd(&["logs", "ses_zzzzzz"]).await.expect_exit(3);
    daemon.qd(&["logs", "no such title"]).await.expect_exit(3);
}

#[tokio::test]
async fn send_prompts_and_steers_and_wait_waits() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    daemon.qd(&["send", &session.id, &steps(&[say("x"), await_steer(20_000)])]).await.ok();
    let run = session.runs().await[0]["id"].as_str().unwrap().to_owned();
    session.wait_for_run_event(&run, "text.delta").await;
    daemon.qd(&["send", &session.id, "--steer", "left"]).await.ok();
    daemon.qd(&["wait", &session.id]).await.ok();
    assert_eq!(session.run(&run).await["text"], "xsteered: left");
    daemon.qd(&["wait", &run]).await.ok();
    daemon.qd(&["send", &session.id, "--steer", "nobody listens"]).await.expect_exit(1);
    let failed = session.run_script(&[fail("no")]).await["id"].as_str().unwrap().to_owned();
    daemon.qd(&["wait", &failed]).await.expect_exit(1);
    let two = [session.prompt_script(&[sleep(50)]).await, session.prompt_script(&[say("b")]).await];
    daemon.qd(&["wait", &two[0], &two[1]]).await.ok();
}

#[tokio::test]
async fn cancel_and_rm_do_what_they_say() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[sleep_forever()]).await;
    session.wait_for_start(&run).await;
    daemon.qd(&["cancel", &session.id]).await.ok();
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    daemon.qd(&["cancel", &session.id]).await.ok();
    let two =
        [session.prompt_script(&[sleep_forever()]).await, session.prompt_script(&[say("spared")]).await];
    daemon.qd(&["cancel", &two[0]]).await.ok();
    assert_eq!(session.wait(&two[1]).await["finish_reason"], "end_turn");
    daemon.qd(&["wait", &two[0]]).await.expect_exit(130);
    daemon.qd(&["rm", &session.id]).await.ok();
    session.wait_for_event("its end", |event| event.kind == "session.closed").await;
    daemon.qd(&["send", &session.id, "x"]).await.expect_exit(1);
    let purged = daemon.session("script").await;
    purged.run_script(&[say("x")]).await;
    daemon.qd(&["rm", &purged.id, "--purge"]).await.ok();
    daemon.qd(&["rm", "ses_zzzz"]).await.expect_exit(3);
}

#[tokio::test]
async fn asks_are_listed_and_answered() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    for (step, verb, args, expected) in [
        (ask_bash("make"), "allow", vec![], "allowed"),
        (ask_bash("make"), "deny", vec!["not now"], "denied: not now"),
        (question("which?", &["red", "blue"]), "answer", vec!["blue"], "blue"),
    ] {
        let run = session.prompt_script(&[step]).await;
        let ask = session.wait_for_ask(&run).await;
        let shown = daemon.qd(&["asks"]).await.ok();
        assert!(shown.contains(&ask[..10]), "{shown}");
        assert_eq!(daemon.qd(&["asks", "--json"]).await.json()[0]["id"], ask);
        daemon.qd(&[&[verb, &ask], &args[..]].concat()).await.ok();
        assert_eq!(session.wait(&run).await["text"], expected);
        daemon.qd(&["allow", &ask]).await.expect_exit(1);
    }
    daemon.qd(&["allow", "ask_zzzz"]).await.expect_exit(3);
    let run = session.prompt_script(&[question("which?", &["red"])]).await;
    let ask = session.wait_for_ask(&run).await;
    daemon.qd(&["answer", &ask, "green"]).await.expect_exit(1);
    assert_eq!(session.run(&run).await["state"], "waiting");
}

#[tokio::test]
async fn logs_shows_what_happened_and_follows() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_script(&[say("first words"), tool("Read", json!({ "path": "a.txt" }), "x")]).await;
    let shown = daemon.qd(&["logs", &session.id]).await.ok();
    assert!(shown.contains("first words") && shown.contains("Read"), "{shown}");
    let events = daemon.qd(&["logs", &session.id, "--json"]).await.json_lines();
    assert!(events.iter().any(|event| event["kind"] == "run.finished"), "{events:?}");
    let mut follow = daemon.home.start(&["logs", "-f", &session.id]);
    follow.wait_for_stdout("first words").await;
    session.run_script(&[say("later words")]).await;
    follow.wait_for_stdout("later words").await;
}

#[tokio::test]
async fn halt_and_unhalt_and_agents_and_doctor_and_gc_and_config_answer() {
    let daemon = TestDaemon::start().await;
    daemon.qd(&["halt"]).await.ok();
    assert_eq!(daemon.client().get("/v1/halt").await.expect(200)["halted"], true);
    daemon.qd(&["unhalt"]).await.ok();
    assert_eq!(daemon.client().get("/v1/halt").await.expect(200)["halted"], false);
    let agents = daemon.qd(&["agents"]).await.ok();
    assert!(agents.contains("echo") && agents.contains("script"), "{agents}");
    assert!(daemon.qd(&["agents", "--json"]).await.json().is_array());
    for verb in [&["doctor"][..], &["gc"], &["config"], &["completions", "bash"], &["man"]] {
        assert!(!daemon.qd(verb).await.ok().is_empty(), "{verb:?}");
    }
    let pages = daemon.home.sibling_path("man1");
    daemon.qd(&["man", pages.to_str().unwrap()]).await.ok();
    for page in ["qd.1", "qd-run.1", "qd-worker-join.1"] {
        let page = std::fs::read_to_string(pages.join(page)).unwrap();
        assert!(page.contains(".SH SYNOPSIS") && page.contains(".SH OPTIONS"), "{page}");
    }
    for verb in [&["gc", "--json"][..], &["config", "--json"], &["doctor", "--json"]] {
        assert!(!daemon.qd(verb).await.json().is_null());
    }
}

#[tokio::test]
async fn doctor_rebuild_makes_the_same_lists_from_the_events() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "title": "t", "policy": "deny" })).await;
    session.run_script(&[say("a"), cost(0.25), ask_bash("make")]).await;
    session.patch(json!({ "policy": "ask", "title": "u" })).await;
    session.run_with_answer(ask_bash("make"), json!({ "decision": "deny", "reason": "no" })).await;
    let child = session.create_child(json!({ "agent": "echo" })).await;
    child.close().await;
    child.wait_for_event("session.closed", |event| event.kind == "session.closed").await;
    let workspace = daemon.workspace().await;
    let file = "fleet: { task: t, sessions: { a: { agent: echo } }, start: a, routes: [{ when: a.done, collect: human }] }";
    workspace.fleet(file).await.wait_for_ask().await;
    daemon.client().post("/v1/halt", &json!({ "reason": "kept" })).await.expect(200);
    session.prompt_script(&[say("queued")]).await;
    let lists = async |daemon: &TestDaemon| {
        let mut lists = Vec::new();
        for path in [
            "/v1/workspaces",
            "/v1/sessions",
            "/v1/asks",
            "/v1/halt",
            &workspace.path("/fleets"),
            &session.workspace_path("/runs"),
            &session.agent_path("/queue"),
        ] {
            lists.push(daemon.client().get(path).await.expect(200));
        }
        // The next daemon reattaches the session's worker, which is an event and changes this field.
        for listed in lists[1].as_array_mut().unwrap() {
            listed.as_object_mut().unwrap().remove("updated_at");
        }
        lists
    };
    let before = lists(&daemon).await;
    assert_ne!(
        daemon.qd(&["doctor", "--rebuild"]).await.code,
        Some(0),
        "refused while the daemon is running"
    );
    assert_eq!(daemon.terminate().await, Some(0));
    daemon.qd(&["doctor", "--rebuild"]).await.ok();
    daemon.start_again().await;
    assert_eq!(lists(&daemon).await, before);
}

#[tokio::test]
async fn json_prints_one_value_or_one_for_each_line() {
    let daemon = TestDaemon::start().await;
    let lines = run_script(&daemon, &["--json"], &[say("a"), say("b")]).await.json_lines();
    assert!(!lines.is_empty());
    let detached = run_script(&daemon, &["--json", "--detach"], &[say("a")]).await.json();
    assert!(detached["run_id"].is_string(), "{detached}");
}

#[tokio::test]
async fn exit_codes_tell_wrong_usage_not_found_and_unreachable_apart() {
    let daemon = TestDaemon::start().await;
    for args in
        [&["nonsense"][..], &["run"], &["ps", "--nonsense"], &["logs"], &["run", "--on-ask", "pray", "x"]]
    {
        daemon.qd(args).await.expect_exit(2);
    }
    daemon.qd(&["logs", "ses_zzzz"]).await.expect_exit(3);
    daemon.qd(&["run", "--agent", "nobody", "x"]).await.expect_exit(1);
    for host in ["http://127.0.0.1:1", "unix:/no/such/socket"] {
        daemon.qd(&["ps", "--host", host]).await.expect_exit(4);
        let mut command = daemon.home.command(&["ps"]);
        command.env("QD_HOST", host);
        TestCommand::spawn(command).wait().await.expect_exit(4);
    }
}

#[tokio::test]
async fn a_host_may_be_given_as_flag_or_variable() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let elsewhere = TestHome::new();
    let host = format!("unix:{}", daemon.home.socket().display());
    assert!(elsewhere.qd(&["ps", "--host", &host]).await.ok().contains(&session.id[..9]));
    let mut command = elsewhere.command(&["ps"]);
    command.env("QD_HOST", &host);
    assert!(TestCommand::spawn(command).wait().await.ok().contains(&session.id[..9]));
    assert_eq!(elsewhere.daemon_pid(), None, "and no daemon was started for it");
}

#[tokio::test]
async fn a_run_that_is_refused_leaves_no_session_behind() {
    let daemon = TestDaemon::start().await;
    for empty in ["", "  \n"] {
        let refused = daemon.qd(&["run", "--agent", "echo", empty]).await;
        assert!(refused.stderr.contains("empty"), "{refused:?}");
        refused.expect_exit(2);
        daemon.qd(&["send", "whatever", empty]).await.expect_exit(2);
    }
    daemon.qd(&["run", "--agent", "nobody", "x"]).await.expect_exit(1);
    let too_large = "x".repeat(9 << 20);
    daemon.home.qd_with_input(&["run", "--agent", "echo", "-"], &too_large).await.expect_exit(1);
    assert_eq!(daemon.qd(&["ps", "-a", "--json"]).await.json(), json!([]));
}

#[tokio::test]
async fn a_title_means_the_open_session_that_bears_it() {
    let daemon = TestDaemon::start().await;
    let settings = json!({ "agent": "script", "title": "par" });
    let old = daemon.session_with(settings.clone()).await;
    old.run_script(&[say("of old")]).await;
    daemon.qd(&["rm", "par"]).await.ok();
    old.wait_for_event("its end", |event| event.kind == "session.closed").await;
    assert!(daemon.qd(&["logs", "par"]).await.ok().contains("of old"), "no other session has this title");
    let new = daemon.session_with(settings.clone()).await;
    new.run_script(&[say("of now")]).await;
    assert!(daemon.qd(&["logs", "par"]).await.ok().contains("of now"));
    let third = daemon.session_with(settings).await;
    let several = daemon.qd(&["logs", "par"]).await;
    assert!(several.stderr.contains(&new.id) && several.stderr.contains(&third.id), "{several:?}");
    assert!(!several.stderr.contains(&old.id), "{several:?}");
    several.expect_exit(2);
}

#[tokio::test]
async fn what_fails_says_what_to_do_about_it() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[ask_bash("make"), fail("no luck")]).await;
    let ask = session.wait_for_ask(&run).await;
    daemon.qd(&["deny", &ask, "not now"]).await.ok();
    let late = daemon.qd(&["allow", &ask]).await;
    assert!(late.stderr.contains("denied: not now"), "{late:?}");
    late.expect_exit(1);
    let unknown = daemon.qd(&["allow", "ask_zzzz"]).await;
    assert!(unknown.stderr.contains("`qd asks`"), "{unknown:?}");
    session.wait(&run).await;
    let logs = daemon.qd(&["logs", &run]).await.ok();
    assert_eq!(logs.matches("no luck").count(), 1 + 1, "in the prompt and at the end: {logs}");
    let path = daemon.qd(&["ps", "--host", "http://localhost:1/foo"]).await;
    assert!(path.stderr.contains("no path after the port"), "{path:?}");
    path.expect_exit(2);
    daemon.qd(&["help"]).await.ok();
    assert!(daemon.qd(&["help", "run"]).await.ok().contains("--detach"));
    assert!(daemon.qd(&["worker"]).await.stderr.contains("qd worker join"));
}

#[tokio::test]
async fn ps_says_what_a_prompt_of_an_idle_session_waits_for() {
    let daemon = TestDaemon::start_with_settings("max_agents = 1\n").await;
    let first = daemon.session("script").await;
    let run = first.prompt_script(&[say("x"), sleep_forever()]).await;
    first.wait_for_run_event(&run, "text.delta").await;
    let second = daemon.session("script").await;
    second.prompt_script(&[say("x")]).await;
    let shown = daemon.qd(&["ps"]).await.ok();
    assert!(shown.contains("1 queued (no free slot)"), "{shown}");
    let halted = TestDaemon::start().await;
    halted.qd(&["halt"]).await.ok();
    halted.session("script").await.prompt_script(&[say("x")]).await;
    let shown = halted.qd(&["ps"]).await.ok();
    assert!(shown.contains("1 queued (halted)"), "{shown}");
}

#[tokio::test]
async fn stop_says_how_many_agents_go_on_and_workers_when_there_are_none() {
    let daemon = TestDaemon::start().await;
    let none = daemon.qd(&["workers"]).await;
    assert!(none.stderr.contains("no agents are running"), "{none:?}");
    assert_eq!(none.ok(), "");
    let session = daemon.session("script").await;
    session.run_script(&[say("x")]).await;
    let stopped = daemon.qd(&["stop"]).await;
    assert!(stopped.stderr.contains("1 agent keeps running (`qd stop --workers` stops it)"), "{stopped:?}");
    let ended = daemon.qd(&["stop", "--workers"]).await;
    assert!(ended.stderr.contains("the daemon has stopped\n"), "{ended:?}");
    assert_eq!(daemon.home.worker_pids(), Vec::<u32>::new());
}

#[tokio::test]
async fn verbs_that_watch_outlive_a_daemon_that_is_killed_and_start_the_next() {
    let home = TestHome::new();
    let script = steps(&[say("before "), sleep(3000), ask_bash("make"), say(" after")]);
    let mut run = home.start(&["run", "--agent", "script", "--title", "t", "--on-ask", "wait", &script]);
    run.wait_for_stdout("before").await;
    let mut logs = home.start(&["logs", "-f", "t"]);
    logs.wait_for_stdout("before").await;
    let mut asks = home.start(&["asks", "-f"]);
    let wait = home.start(&["wait", "t"]);
    let killed = home.daemon_pid().unwrap();
    signal(killed, Signal::KILL);
    asks.wait_for_stdout("ask_").await;
    assert!(
        home.daemon_pid().is_some_and(|pid| pid != killed),
        "a watching command has started a new daemon"
    );
    let ask = home.qd(&["asks", "--json"]).await.json()[0]["id"].as_str().unwrap().to_owned();
    home.qd(&["allow", &ask]).await.ok();
    logs.wait_for_stdout(" after").await;
    assert_eq!(run.wait().await.ok(), "before \nallowed after\n");
    assert!(wait.wait().await.ok().ends_with(" end_turn\n"));
}

#[tokio::test]
async fn a_daemon_that_is_stopped_is_not_started_again_by_those_who_watch() {
    let home = TestHome::new();
    let mut run =
        home.start(&["run", "--agent", "script", "--title", "t", &steps(&[say("x"), await_steer(60_000)])]);
    run.wait_for_stdout("x").await;
    let mut logs = home.start(&["logs", "-f", "t"]);
    logs.wait_for_stdout("x").await;
    home.qd(&["stop"]).await.ok();
    // Long enough for a watching command to start a daemon, if it did.
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    assert_eq!(home.daemon_pid(), None);
    home.qd(&["send", "t", "--steer", "on"]).await.ok();
    let run = run.wait().await;
    assert!(run.stderr.contains("the daemon was stopped"), "{run:?}");
    assert_eq!(run.ok(), "xsteered: on\n");
    logs.wait_for_stdout("steered: on").await;
}

#[tokio::test]
async fn there_is_no_colour_off_a_terminal() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_script(&[say("x"), tool("Read", json!({}), "y"), fail("no")]).await;
    for args in [
        &["ps"][..],
        &["logs", &session.id],
        &["agents"],
        &["asks"],
        &["--help"],
        &["run", "--agent", "echo", "x"],
    ] {
        let output = daemon.qd(args).await;
        assert!(
            !output.stdout.contains('\u{1b}') && !output.stderr.contains('\u{1b}'),
            "{args:?}: {output:?}"
        );
    }
}

#[tokio::test]
async fn a_broken_pipe_is_success() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_script(&[say_times("many words ", 500, 0)]).await;
    for args in [&["ps"][..], &["logs", &session.id], &["agents", "--json"], &["--help"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = daemon.home.command(args);
        command.stdout(writer);
        let output = TestCommand::spawn(command).wait().await;
        assert!(output.stderr.is_empty(), "{args:?}: {output:?}");
        output.ok();
    }
    assert_eq!(daemon.home.shell("$QD ps | head -0; echo ${PIPESTATUS[0]}").await.ok(), "0\n");
}
