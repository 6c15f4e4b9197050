//! How a daemon starts and stops: by hand, by a command that needs one, by signals, and on a failing disk.

use std::process::Stdio;

use qd_testkit::{TestCommand, TestDaemon, TestHome, journal_rules, poll_until, script::*};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use serde_json::json;

#[tokio::test]
async fn sigterm_ends_streams_cleanly_and_exits_0_whatever_runs() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "cancel_grace_s": 600 })).await;
    let run = session.prompt_script(&[ignore_cancel(), say("x"), ask_bash("make")]).await;
    let mut stream = session.stream("&after=0").await;
    let mut seen = stream.until_run(&run, "text.delta").await;
    assert_eq!(daemon.terminate().await, Some(0));
    seen.extend(stream.to_end().await);
    journal_rules::check_order(&seen);
    daemon.start_again().await;
    let ask = session.wait_for_ask(&run).await;
    daemon.client().answer_ask(&ask, &json!({ "decision": "allow_once" })).await.expect(200);
    assert_eq!(session.wait(&run).await["finish_reason"], "end_turn", "its agent kept working");
    let all = session.events().await;
    journal_rules::check(&all);
    assert_eq!(all[..seen.len()], seen, "the stream equals the journal");
}

#[tokio::test]
async fn an_idle_daemon_ends_on_sigterm_and_leaves_no_socket_to_trip_over() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    assert_eq!(daemon.terminate().await, Some(0));
    assert!(!daemon.home.socket().exists());
    daemon.start_again().await;
    assert_eq!(session.show().await["state"], "idle");
}

#[tokio::test]
async fn a_stale_socket_of_a_killed_daemon_does_not_keep_the_next_from_starting() {
    let mut daemon = TestDaemon::start().await;
    daemon.kill9().await;
    assert!(daemon.home.socket().exists());
    daemon.start_again().await;
    assert_eq!(daemon.client().get("/healthz").await.status, 200);
}

#[tokio::test]
async fn eight_commands_at_once_give_one_daemon() {
    let home = TestHome::new();
    let started: Vec<_> = (0..8).map(|_| home.start(&["ps"])).collect();
    for command in started {
        command.wait().await.ok();
    }
    let pid = home.daemon_pid().expect("a daemon answers");
    let daemons = poll_until("one daemon to be left", async || {
        let found = processes_of_home(&home);
        (found.len() == 1).then_some(found)
    });
    assert_eq!(daemons.await, [pid]);
    assert_eq!(home.daemon_pid(), Some(pid));
}

/// All processes with this home in their environment.
fn processes_of_home(home: &TestHome) -> Vec<u32> {
    let mark = format!("QD_HOME={}", home.path().display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let environ = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        if environ.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes()) {
            found.push(pid);
        }
    }
    found
}

#[tokio::test]
async fn a_daemon_that_a_command_started_holds_none_of_its_descriptors() {
    let home = TestHome::new();
    // Each of these returns only once no process holds the pipe open that the shell reads.
    assert_eq!(home.shell("x=$($QD ps 2>&1); echo returned").await.ok(), "returned\n");
    let pid = home.daemon_pid().expect("a daemon was started and stays");
    let others = TestHome::new();
    let line = "exec 9>&1 8>&2; $QD ps >/dev/null 2>/dev/null </dev/null; exec 9>&- 8>&-; echo returned";
    assert_eq!(others.shell(line).await.ok(), "returned\n");
    for (home, pid) in [(&home, pid), (&others, others.daemon_pid().expect("a daemon was started and stays"))]
    {
        for fd in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten() {
            let target = std::fs::read_link(fd.path()).unwrap_or_default();
            let held = target.to_str().unwrap_or_default();
            let fine = ["/dev/null", "/proc", "socket:", "anon_inode:", "pipe:"]
                .iter()
                .any(|fine| held.starts_with(fine));
            assert!(fine || target.starts_with(home.path()), "{} -> {held}", fd.path().display());
        }
        let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap();
        assert!(
            !cwd.starts_with(home.project_dir()),
            "it holds no directory of the caller: {}",
            cwd.display()
        );
    }
}

#[tokio::test]
async fn a_daemon_that_a_command_started_outlives_its_terminal() {
    let home = TestHome::new();
    let mut command = home.program("setsid");
    command.args(["bash", "-c", "$QD ps >/dev/null; kill -HUP 0"]).stdout(Stdio::null());
    TestCommand::spawn(command).wait().await;
    let pid = home.daemon_pid().expect("the daemon is in a session of its own");
    home.qd(&["ps"]).await.ok();
    assert_eq!(home.daemon_pid(), Some(pid));
}

#[tokio::test]
async fn stop_ends_the_daemon_and_the_next_command_starts_another() {
    let home = TestHome::new();
    home.qd(&["ps"]).await.ok();
    let first = home.daemon_pid().expect("a daemon was started");
    home.qd(&["stop"]).await.ok();
    poll_until("its end", async || (!processes_of_home(&home).contains(&first)).then_some(())).await;
    home.qd(&["ps"]).await.ok();
    assert_ne!(home.daemon_pid(), Some(first));
}

#[tokio::test]
async fn a_socket_path_too_long_for_the_kernel_is_a_clear_error() {
    let home = TestHome::new();
    let long = home.sibling_path(&"x".repeat(120));
    let output = home.qd(&["serve", "--home", long.to_str().unwrap()]).await;
    assert!(output.stderr.contains("107") && output.stderr.contains("socket"), "{output:?}");
    output.expect_exit(1);
    let socket = format!("unix:{}", home.sibling_path(&"y".repeat(120)).display());
    let output = home.qd(&["serve", "--listen", &socket]).await;
    assert!(output.stderr.contains("107") && output.stderr.contains("socket"), "{output:?}");
    output.expect_exit(1);
}

#[tokio::test]
async fn the_home_is_the_flag_then_the_variable_then_the_data_directory() {
    let home = TestHome::new();
    let flagged = home.sibling_path("flag");
    let mut serve = home.start(&["serve", "--home", flagged.to_str().unwrap()]);
    serve.wait_for_stdout(&format!("listening on unix:{}/qd.sock", flagged.display())).await;
    drop(serve);
    let mut command = home.command(&["serve"]);
    command.env_remove("QD_HOME");
    let mut serve = TestCommand::spawn(command);
    serve
        .wait_for_stdout(&format!(
            "listening on unix:{}/quarterdeck/qd.sock",
            home.sibling_path("user/data").display()
        ))
        .await;
}

#[tokio::test]
async fn failed_storage_is_503_and_heals() {
    // A file size limit of zero makes every write fail without privileges.
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let before = session.prompt("before").await;
    session.wait(&before).await;
    let pid = Pid::from_raw(i32::try_from(daemon.pid()).unwrap());
    let limit = |bytes| prlimit(pid, Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
    limit(Some(0));
    for _ in 0..3 {
        session.try_prompt_as("lost", "during").await.expect_refusal(503, "storage_failed");
        daemon
            .client()
            .post("/v1/workspaces", &json!({ "path": "/usr" }))
            .await
            .expect_refusal(503, "storage_failed");
    }
    assert_eq!(session.run(&before).await["finish_reason"], "end_turn", "reading still works");
    limit(None);
    let healed = poll_until("the storage to heal", async || {
        let answer = session.try_prompt_as("after", "after").await;
        (answer.status == 202).then_some(())
    });
    healed.await;
    assert_eq!(session.wait("after").await["finish_reason"], "end_turn");
    let events = session.events().await;
    journal_rules::check(&events);
    assert!(
        events.iter().all(|event| event.run_id.as_deref() != Some("lost")),
        "what was refused did not happen"
    );
    assert_eq!(session.runs().await.len(), 2);
}

#[tokio::test]
async fn a_live_run_survives_a_failure_of_the_storage() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[question("go on?", &[]), say(" and on")]).await;
    let ask = session.wait_for_ask(&run).await;
    let pid = Pid::from_raw(i32::try_from(daemon.pid()).unwrap());
    let limit = |bytes| prlimit(pid, Resource::Fsize, Rlimit { current: bytes, maximum: None }).unwrap();
    limit(Some(0));
    session.client.answer_ask(&ask, &json!({ "value": "yes" })).await.expect_refusal(503, "storage_failed");
    limit(None);
    poll_until("the storage to heal", async || {
        let answer = session.client.answer_ask(&ask, &json!({ "value": "yes" })).await;
        (answer.status == 200).then_some(())
    })
    .await;
    let ended = session.wait(&run).await;
    assert_eq!((&ended["finish_reason"], &ended["text"]), (&json!("end_turn"), &json!("yes and on")));
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn an_agent_gets_the_usual_handling_of_the_signal_for_large_files() {
    // Even if the daemon was started with the signal ignored, as some shells and supervisors do.
    let daemon =
        TestDaemon::start_with(|options| _ = options.wrapped_in(&["env", "--ignore-signal=XFSZ"])).await;
    let session = daemon.session("script").await;
    let file = daemon.home.sibling_path("signals");
    let line = format!("grep SigIgn /proc/self/status > {0}.new && mv {0}.new {0}", file.display());
    session.run_script(&[spawn(&["sh", "-c", &line])]).await;
    let ignored =
        poll_until("the signals of the agent's process", async || std::fs::read_to_string(&file).ok()).await;
    let mask = u64::from_str_radix(ignored.trim().trim_start_matches("SigIgn:").trim(), 16).unwrap();
    let bit = 1 << (Signal::XFSZ.as_raw() - 1);
    assert_eq!(mask & bit, 0, "{ignored}");
}
