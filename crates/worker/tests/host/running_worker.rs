//! While a worker runs: turns, broken connections, processes, and stopping idle agents.

use std::os::fd::AsRawFd;

use qd_keeper::{Signal, procfs};
use qd_protocol::link::{AgentExitReason, AgentUpdate, TurnLimits, TurnStopReason, TurnUpdate};
use qd_protocol::worker::AgentSpec;

use crate::harness::{
    WorkerUnderTest, agent_spec, all_text, eventually, host_spec, kill, wait_until_all_exited,
};

/// Starts a process that ignores SIGTERM.
const STUBBORN: &str = r#"{"spawn":{"argv":["sh","-c","trap '' TERM; while :; do sleep 1; done"],"setsid":true,"double_fork":true}}"#;

#[tokio::test]
async fn every_chunk_is_heard_once_however_often_the_daemon_goes_away() {
    const CHUNKS: usize = 400;
    let (worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let steps: Vec<String> = (0..CHUNKS).map(|n| format!(r#"{{"say":"{n};"}},{{"sleep_ms":1}}"#)).collect();
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", &format!("[{}]", steps.join(",")));
    let mut text = String::new();
    for stop_at in (50..CHUNKS).step_by(50) {
        text.push_str(&daemon.wait_for_text(&format!("{stop_at};")).await);
        daemon = worker.attach_again(&spec, daemon);
    }
    let ended = daemon.wait_for_end("a").await;
    text.push_str(&ended.text);
    assert_eq!(ended.outcome.stop, TurnStopReason::EndTurn);
    assert_eq!(text, (0..CHUNKS).map(|n| format!("{n};")).collect::<String>());
}

#[tokio::test]
async fn a_cancelled_turn_ends_when_all_that_it_started_is_gone_and_says_how_many() {
    let (worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", &format!(r#"[{STUBBORN},{STUBBORN},{{"say":" begun"}},{{"sleep_ms":600000}}]"#));
    daemon.wait_for_text("begun").await;
    assert!(procfs::find_marked(&spec.mark).len() >= 3);
    daemon.cancel("a");
    let ended = daemon.wait_for_end("a").await;
    assert_eq!(ended.outcome.stop, TurnStopReason::Cancelled);
    assert!(ended.outcome.processes.killed >= 2, "{:?}", ended.outcome.processes);
    assert_eq!(ended.outcome.processes.survivors, 0);
    assert_eq!(procfs::find_marked(&spec.mark).len(), 1, "only the agent is left");
    daemon.prompt("b", r#"[{"say":"fine"}]"#);
    assert_eq!(daemon.wait_for_end("b").await.text, "fine");
}

#[tokio::test]
async fn a_kill_ends_a_turn_that_ignores_its_cancel_and_the_agent_with_it() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt(
        "a",
        &format!(r#"[{{"ignore_cancel":true}},{STUBBORN},{{"say":" begun"}},{{"sleep_ms":600000}}]"#),
    );
    daemon.wait_for_text("begun").await;
    daemon.cancel("a");
    daemon.kill("a");
    let ended = daemon.wait_for_end("a").await;
    assert_eq!((ended.outcome.stop, ended.outcome.processes.survivors), (TurnStopReason::Cancelled, 0));
    // The shell. Whether it has just started another `sleep` is up to the machine.
    assert!(ended.outcome.processes.killed >= 1);
    assert!(procfs::find_marked(&spec.mark).is_empty());
    assert_eq!(daemon.wait_for_gone().await, AgentExitReason::Stopped);
    assert!(worker.wait_for_exit().await.success());
    assert!(!worker.home.path().join("spool").exists());
}

#[tokio::test]
async fn an_agent_that_exits_in_its_turn_is_gone_with_its_status_and_its_processes() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", &format!(r#"[{STUBBORN},{{"say":"bye"}},{{"exit":3}}]"#));
    let AgentExitReason::Failed(error) = daemon.wait_for_gone().await else { panic!("it failed") };
    assert_eq!((error.code.as_str(), error.exit_status), ("agent_exited", Some(3)));
    assert!(procfs::find_marked(&spec.mark).is_empty());
    assert!(worker.wait_for_exit().await.success());
}

#[tokio::test]
async fn an_idle_agent_rests_and_leaves_nothing_if_its_turns_left_nothing() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    daemon.prompt("a", r#"[{"say":"x"}]"#);
    daemon.wait_for_end("a").await;
    daemon.link.stop_idle_agent();
    assert_eq!(daemon.wait_for_gone().await, AgentExitReason::Stopped);
    assert!(worker.wait_for_exit().await.success());
    assert_eq!(std::fs::read_dir(worker.home.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn what_a_turn_left_on_purpose_outlives_the_agents_rest_and_dies_with_the_session() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", r#"[{"spawn":{"argv":["sleep","600"],"setsid":true}}]"#);
    let text = daemon.wait_for_end("a").await.text;
    let leftover: u32 = text.trim().strip_prefix("pid ").unwrap().parse().unwrap();
    daemon.link.stop_idle_agent();
    daemon.wait_for(|update| *update == AgentUpdate::IdleStopped).await;
    let alive: Vec<u32> = procfs::find_marked(&spec.mark).into_iter().map(|process| process.pid).collect();
    assert_eq!(alive, [leftover]);

    daemon.link.start_agent(Box::new(spec.clone()));
    daemon.wait_for(|update| matches!(update, AgentUpdate::Ready { .. })).await;
    daemon.prompt("b", r#"[{"say":"awake"}]"#);
    assert_eq!(daemon.wait_for_end("b").await.text, "awake");
    assert!(procfs::find_marked(&spec.mark).iter().any(|process| process.pid == leftover));

    daemon.link.close();
    assert_eq!(daemon.wait_for_gone().await, AgentExitReason::Stopped);
    assert!(procfs::find_marked(&spec.mark).is_empty());
    assert!(worker.wait_for_exit().await.success());
}

#[tokio::test]
async fn a_cancel_that_comes_after_the_end_of_its_turn_ends_what_the_turn_left() {
    let (worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    let alive = || procfs::find_marked(&spec.mark).into_iter().map(|process| process.pid).collect::<Vec<_>>();
    daemon.prompt("kept", r#"[{"spawn":{"argv":["sleep","600"],"setsid":true}}]"#);
    let kept = daemon.wait_for_end("kept").await;
    assert!(kept.outcome.leaves_processes);
    let kept: u32 = kept.text.trim().strip_prefix("pid ").unwrap().parse().unwrap();

    daemon.prompt("plain", r#"[{"say":"nothing is left"}]"#);
    assert!(!daemon.wait_for_end("plain").await.outcome.leaves_processes);
    let before = alive();

    for (round, is_killed) in [(0, false), (1, false), (2, true)] {
        let name = format!("left-{round}");
        daemon.prompt(&name, &format!("[{STUBBORN},{STUBBORN}]"));
        let ended = daemon.wait_for_end(&name).await.outcome;
        assert!(ended.leaves_processes && alive().len() > before.len());
        if round == 1 {
            daemon = worker.attach_again(&spec, daemon);
        }
        match is_killed {
            true => daemon.kill(&name),
            false => daemon.cancel(&name),
        }
        let again = daemon.wait_for_end(&name).await.outcome;
        assert_eq!((again.stop, again.leaves_processes, again.agent_ends), (ended.stop, false, false));
        assert!(again.processes.killed >= 2 && again.processes.survivors == 0, "{again:?}");
        assert_eq!(alive(), before, "and nothing that earlier turns left");
    }
    daemon.cancel("kept");
    daemon.prompt("last", r#"[{"say":"fine"}]"#);
    assert_eq!(daemon.wait_for_end("last").await.text, "fine");
    assert!(alive().contains(&kept), "a turn that others have followed cannot be cancelled any more");
}

#[tokio::test]
async fn a_late_cancel_ends_what_a_turn_left_even_if_its_agent_has_exited_since() {
    let (worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    let alive = || procfs::find_marked(&spec.mark).into_iter().map(|process| process.pid).collect::<Vec<_>>();
    daemon.prompt("a", r#"[{"spawn":{"argv":["sleep","600"],"setsid":true}}]"#);
    let ended = daemon.wait_for_end("a").await;
    let left: u32 = ended.text.trim().strip_prefix("pid ").unwrap().parse().unwrap();
    kill(alive().into_iter().find(|pid| *pid != left).unwrap(), Signal::KILL);
    daemon
        .wait_for(|update| matches!(update, AgentUpdate::Turn { update: TurnUpdate::Notice { .. }, .. }))
        .await;
    daemon.cancel("a");
    let again = daemon.wait_for_end("a").await.outcome;
    assert_eq!((again.processes.killed, again.processes.survivors, again.leaves_processes), (1, 0, false));
    assert_eq!(alive(), [0; 0]);
    daemon.prompt("b", r#"[{"say":"awake"}]"#);
    assert_eq!(daemon.wait_for_end("b").await.text, "awake");
}

#[tokio::test]
async fn what_an_earlier_turn_left_outlives_a_killed_turn_a_crash_and_an_agent_that_dies_idle() {
    let (mut worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    daemon.prompt("a", r#"[{"spawn":{"argv":["sleep","600"],"setsid":true}}]"#);
    let text = daemon.wait_for_end("a").await.text;
    let leftover: u32 = text.trim().strip_prefix("pid ").unwrap().parse().unwrap();
    let alive = || procfs::find_marked(&spec.mark).into_iter().map(|process| process.pid).collect::<Vec<_>>();

    let busy = r#"[{"ignore_cancel":true},{"spawn":{"argv":["sleep","601"],"setsid":true}},{"say":" begun"},{"sleep_ms":600000}]"#;
    daemon.prompt("killed", busy);
    daemon.wait_for_text("begun").await;
    daemon.cancel("killed");
    daemon.kill("killed");
    let outcome = daemon.wait_for_end("killed").await.outcome;
    assert_eq!((outcome.stop, outcome.agent_ends), (TurnStopReason::Cancelled, true));
    assert_eq!((outcome.processes.killed, outcome.processes.survivors), (1, 0), "what the turn started");
    daemon.wait_for(|update| *update == AgentUpdate::IdleStopped).await;
    assert_eq!(alive(), [leftover]);

    daemon.link.start_agent(Box::new(spec.clone()));
    daemon.wait_for(|update| matches!(update, AgentUpdate::Ready { .. })).await;
    daemon.prompt("crashes", r#"[{"spawn":{"argv":["sleep","601"],"setsid":true}},{"exit":3}]"#);
    let outcome = daemon.wait_for_end("crashes").await.outcome;
    assert_eq!((outcome.stop, outcome.processes.killed), (TurnStopReason::Error, 1));
    assert_eq!(outcome.error.unwrap().exit_status, Some(3));
    daemon.wait_for(|update| *update == AgentUpdate::IdleStopped).await;
    assert_eq!(alive(), [leftover]);

    daemon.link.start_agent(Box::new(spec.clone()));
    daemon.wait_for(|update| matches!(update, AgentUpdate::Ready { .. })).await;
    daemon.prompt("b", r#"[{"say":"awake"}]"#);
    daemon.wait_for_end("b").await;
    let agent = alive().into_iter().find(|pid| *pid != leftover).unwrap();
    kill(agent, Signal::KILL);
    daemon
        .wait_for(|update| matches!(update, AgentUpdate::Turn { update: TurnUpdate::Notice { .. }, .. }))
        .await;
    assert_eq!(alive(), [leftover]);
    daemon.prompt("c", r#"[{"say":"again"}]"#);
    assert_eq!(daemon.wait_for_end("c").await.text, "again");
    assert!(alive().contains(&leftover));

    daemon.link.close();
    assert_eq!(daemon.wait_for_gone().await, AgentExitReason::Stopped);
    assert_eq!(alive(), [0; 0]);
    assert!(worker.wait_for_exit().await.success());
}

#[tokio::test]
async fn after_a_failed_resume_the_new_conversation_is_the_one_that_goes_on() {
    let memory = tempfile::tempdir().unwrap();
    let set_conversation = |spec: &mut AgentSpec, id: Option<String>| {
        spec.env.insert("QD_SCRIPT_STATE".to_owned(), memory.path().to_str().unwrap().to_owned());
        spec.agent_session_id = id;
    };
    let mut id = Some("forgotten".to_owned());
    for (round, notices) in [(0, 1), (1, 0), (2, 0)] {
        let (worker, spec) =
            WorkerUnderTest::with("script", |host| set_conversation(&mut host.agents[0], id.clone())).await;
        let mut daemon = worker.attach(&spec, 0, None);
        let ready = daemon.wait_for(|update| matches!(update, AgentUpdate::Ready { .. })).await.pop();
        let Some(AgentUpdate::Ready { agent_session_id, .. }) = ready else { panic!("ready") };
        assert_eq!(agent_session_id == id, round > 0, "{round}");
        id = agent_session_id;
        daemon.prompt("a", r#"[{"say":"x"}]"#);
        let updates = daemon.wait_for(|update| matches!(update, AgentUpdate::TurnEnded { .. })).await;
        let noticed = updates
            .iter()
            .filter(|update| matches!(update, AgentUpdate::Turn { update: TurnUpdate::Notice { .. }, .. }));
        assert_eq!(noticed.count(), notices, "{round}");
    }
}

#[tokio::test]
async fn a_secret_reaches_neither_the_daemon_nor_the_spool() {
    const CANARY: &str = "canary-5ecret/value";
    let (worker, mut daemon) = WorkerUnderTest::attached("script", |host| {
        host.agents[0].env.insert("API_KEY".to_owned(), CANARY.to_owned());
    })
    .await;
    let spec = agent_spec(&worker.home, "script", "one");
    let (head, tail) = CANARY.split_at(8);
    let script = format!(
        r#"[{{"say":"<{head}"}},{{"sleep_ms":5}},{{"say":"{tail}>"}},{{"think":"{CANARY}"}},
        {{"tool":{{"name":"T","input":{{"key":"{CANARY}"}},"output":"{CANARY}"}}}},{{"question":{{"prompt":"{CANARY}?"}}}}]"#
    );
    daemon.prompt("a", &script);
    let journalled = daemon.journalled;
    daemon.link.detach().await;
    eventually(|| {
        worker
            .spooled_updates(&spec, journalled)
            .iter()
            .any(|update| matches!(update, AgentUpdate::Ask { .. }))
    })
    .await;
    let spooled = all_text(&worker.spool(&spec));
    assert!(!spooled.contains(CANARY) && !spooled.contains(tail), "{spooled}");
    let mut daemon = worker.attach(&spec, journalled, None);
    assert!(daemon.wait_for_text(">").await.ends_with("<[API_KEY redacted]>"));
    let received = format!("{:?}", daemon.wait_for(|update| matches!(update, AgentUpdate::Ask { .. })).await);
    assert!(received.contains("[API_KEY redacted]") && !received.contains(tail), "{received}");
}

#[tokio::test]
async fn a_run_over_its_time_is_stopped_while_no_daemon_lives() {
    let (worker, mut daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let spec = agent_spec(&worker.home, "script", "one");
    let limits = TurnLimits { timeout_ms: Some(200), grace_ms: Some(100), ..TurnLimits::default() };
    let script = format!(r#"[{{"ignore_cancel":true}},{STUBBORN},{{"say":" begun"}},{{"sleep_ms":600000}}]"#);
    daemon.prompt_within("a", &script, limits);
    daemon.wait_for_text("begun").await;
    let journalled = daemon.journalled;
    drop(daemon);
    wait_until_all_exited(&spec).await;
    let mut daemon = worker.attach(&spec, journalled, None);
    let ended = daemon.wait_for_end("a").await;
    assert_eq!((ended.outcome.stop, ended.outcome.processes.survivors), (TurnStopReason::Timeout, 0));
    assert_eq!(daemon.wait_for_gone().await, AgentExitReason::Stopped);
}

#[tokio::test]
async fn a_worker_inherits_no_descriptors_and_every_process_is_named_by_its_role() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty()).unwrap();
    let socket = std::fs::read_link(format!("/proc/self/fd/{}", listener.as_raw_fd())).unwrap();
    let (worker, _daemon) = WorkerUnderTest::attached("script", |_| {}).await;
    let family =
        [vec![worker.pid()], procfs::descendants(worker.pid()).iter().map(|process| process.pid).collect()];
    for (pid, name) in family.concat().into_iter().zip(["qd-worker", "qd-keeper", "qd-script"]) {
        let open_files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        let open_files: Vec<_> =
            open_files.map(|fd| std::fs::read_link(fd.unwrap().path()).unwrap_or_default()).collect();
        assert!(!open_files.contains(&socket), "{name}: {open_files:?}");
        assert_eq!(procfs::name(pid).as_deref(), Some(name));
        let command_line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
        assert!(pid == worker.pid() || command_line.starts_with("qd\0__"), "{command_line}");
    }
}

#[tokio::test]
async fn sessions_that_share_a_worker_come_and_go_by_themselves() {
    let home = tempfile::tempdir().unwrap();
    let host = host_spec(&home, "shared-1", Vec::new());
    let specs = ["one", "two"].map(|name| agent_spec(&home, "echo", name));
    let worker = WorkerUnderTest::start(home, &host).await;
    let [mut first, mut second] =
        [0, 1].map(|at| worker.attach(&specs[at], 0, Some(Box::new(specs[at].clone()))));
    for daemon in [&mut first, &mut second] {
        daemon.prompt("a", "hello you");
        let ended = daemon.wait_for_end("a").await;
        assert_eq!(
            (ended.text.as_str(), ended.outcome.text.as_deref()),
            ("hello you", Some("echo: hello you"))
        );
    }
    first.link.close();
    assert_eq!(first.wait_for_gone().await, AgentExitReason::Stopped);
    second.prompt("b", "still here");
    assert_eq!(second.wait_for_end("b").await.text, "still here");
}

#[tokio::test]
async fn an_agent_that_refuses_to_begin_is_quoted_from_its_stderr() {
    let (worker, spec) = WorkerUnderTest::with("script", |host| {
        host.agents[0].env.insert("SCRIPT_READY_MS".to_owned(), "never".to_owned());
    })
    .await;
    let mut daemon = worker.attach(&spec, 0, None);
    let AgentExitReason::Failed(error) = daemon.wait_for_gone().await else { panic!("it failed") };
    assert_eq!(error.code, "agent_failed_to_start");
    assert_eq!(error.stderr, ["SCRIPT_READY_MS must be a whole number of milliseconds"], "{error:?}");
}

#[tokio::test]
async fn an_agent_that_nobody_knows_is_gone_at_once() {
    let (mut worker, spec) = WorkerUnderTest::with("nobody", |_| {}).await;
    let mut daemon = worker.attach(&spec, 0, None);
    let AgentExitReason::Failed(error) = daemon.wait_for_gone().await else { panic!("it failed") };
    assert_eq!(error.code, "unknown_agent");
    assert!(worker.wait_for_exit().await.success());
}
