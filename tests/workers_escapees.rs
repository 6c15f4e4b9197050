//! A cancel ends every process that the turn started. Ten each of six kinds of processes that try to escape, against a
//! cancel and against the death of daemon, worker and keeper in every combination. And a thousand runs leave nothing
//! behind.

use qd_testkit::{
    ObservedProcess, TestDaemon, TestSession, escapees, journal_rules, poll_until, processes, script::*,
};
use serde_json::{Value, json};

use crate::workers_loss::{process_of, worker_of};

const EACH: usize = 10;

fn everything(home: &qd_testkit::TestHome) -> Vec<Value> {
    escapees::KINDS.iter().map(|kind| escapees::spawn_step(home, kind, EACH)).collect()
}

/// A run that has started all escapees and then waits forever.
async fn let_loose(daemon: &TestDaemon, session: &TestSession) -> String {
    let run = session.prompt_script(&[everything(&daemon.home), vec![sleep_forever()]].concat()).await;
    for kind in escapees::KINDS {
        escapees::wait_until_ready(&daemon.home, kind, EACH).await;
    }
    run
}

#[tokio::test]
async fn a_cancel_ends_six_kinds_of_escapee_and_says_so() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    for kind in escapees::KINDS {
        let run =
            session.prompt_script(&[escapees::spawn_step(&daemon.home, kind, EACH), sleep_forever()]).await;
        escapees::wait_until_ready(&daemon.home, kind, EACH).await;
        session.cancel().await;
        let ended = session.wait_for_run_event(&run, "run.finished").await;
        let left = agents_children(&daemon);
        assert_eq!(left, [], "{kind}: /proc says otherwise than {}", ended.data);
        assert_eq!(ended.data["finish_reason"], "cancelled", "{kind}");
        assert_eq!(ended.data["processes"]["survivors"], 0, "{kind}");
        let killed = ended.data["processes"]["killed"].as_u64().unwrap();
        assert!(killed >= EACH as u64, "{kind}: only {killed} were killed");
    }
    assert_eq!(session.run_script(&[say("fine")]).await["text"], "fine");
    journal_rules::check(&session.events().await);
}

/// The processes that agents have started, without the agents themselves.
fn agents_children(daemon: &TestDaemon) -> Vec<ObservedProcess> {
    daemon.home.agent_processes().into_iter().filter(|one| !one.has_role("__script")).collect()
}

#[tokio::test]
async fn a_cancel_leaves_the_agent_alone_that_stops_when_it_is_asked() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run =
        session.prompt_script(&[escapees::spawn_step(&daemon.home, "setsid", 1), sleep_forever()]).await;
    escapees::wait_until_ready(&daemon.home, "setsid", 1).await;
    let agent = daemon.home.processes_with_role("__script");
    session.cancel().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    assert_eq!(agents_children(&daemon), []);
    assert_eq!(session.run_script(&[say("the same")]).await["text"], "the same");
    let pids = |list: &[ObservedProcess]| list.iter().map(|one| one.pid).collect::<Vec<_>>();
    assert_eq!(pids(&daemon.home.processes_with_role("__script")), pids(&agent));
}

#[tokio::test]
async fn an_agent_that_ignores_the_cancel_dies_with_all_that_it_started() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "cancel_grace_s": 0.2 })).await;
    let steps = [vec![ignore_cancel()], everything(&daemon.home), vec![sleep_forever()]].concat();
    let run = session.prompt_script(&steps).await;
    for kind in escapees::KINDS {
        escapees::wait_until_ready(&daemon.home, kind, EACH).await;
    }
    session.cancel().await;
    let ended = session.wait_for_run_event(&run, "run.finished").await;
    assert_eq!(agents_children(&daemon), [], "{}", ended.data);
    assert_eq!(ended.data["finish_reason"], "cancelled");
    assert_eq!(ended.data["processes"]["survivors"], 0);
    assert!(ended.data["processes"]["killed"].as_u64().unwrap() >= 60, "{}", ended.data);
    assert_eq!(session.run_script(&[say("fine")]).await["text"], "fine");
    journal_rules::check(&session.events().await);
}

/// Kills these processes at once in the middle of a turn and starts a daemon again: no process of the agent may be
/// left, and the session must continue.
async fn nothing_is_left_after_the_death_of(parts: &[&str]) {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = let_loose(&daemon, &session).await;
    let next = session.prompt_script(&[say("next")]).await;
    let worker = process_of(&session).await;
    let mark = worker_of(&session).await["id"].as_str().unwrap().to_owned();
    let family = processes::descendants(worker.pid);
    let keeper = family.iter().find(|one| one.has_role("__keeper")).expect("there is a keeper").clone();
    let signal = |pid| qd_testkit::home::signal(pid, rustix::process::Signal::KILL);
    // Without a pause, so no process has time to clean up after another.
    for part in parts {
        match *part {
            "daemon" => signal(daemon.pid()),
            "worker" => signal(worker.pid),
            _ => signal(keeper.pid),
        }
    }
    if parts.contains(&"daemon") {
        daemon.wait_for_exit().await;
        daemon.start_again().await;
    }
    let ended = session.wait(&run).await["finish_reason"].clone();
    assert!(ended == "interrupted" || ended == "error", "{parts:?}: {ended}");
    assert_eq!(session.wait(&next).await["text"], "next", "{parts:?}");
    poll_until("the end of every escapee", async || agents_children(&daemon).is_empty().then_some(())).await;
    assert_eq!(processes::marked_processes(&mark), [], "{parts:?}");
    assert!(!keeper.is_alive(), "{parts:?}");
    journal_rules::check(&session.events().await);
    session.close().await;
    session.wait_for_event("its end", |event| event.kind == "session.closed").await;
    assert_eq!(daemon.home.agent_processes(), [], "{parts:?}");
    let daemon = ObservedProcess::find(daemon.pid()).unwrap();
    poll_until("the daemon to reap its children", async || daemon.zombies().is_empty().then_some(())).await;
}

#[tokio::test]
async fn nothing_is_left_after_the_death_of_the_worker() {
    nothing_is_left_after_the_death_of(&["worker"]).await;
}

#[tokio::test]
async fn nothing_is_left_after_the_death_of_the_keeper() {
    nothing_is_left_after_the_death_of(&["keeper"]).await;
}

#[tokio::test]
async fn nothing_is_left_after_the_death_of_worker_and_keeper() {
    nothing_is_left_after_the_death_of(&["worker", "keeper"]).await;
}

#[tokio::test]
async fn nothing_is_left_after_the_death_of_keeper_and_daemon() {
    nothing_is_left_after_the_death_of(&["keeper", "daemon"]).await;
}

#[tokio::test]
async fn nothing_is_left_after_the_death_of_worker_and_daemon() {
    nothing_is_left_after_the_death_of(&["worker", "daemon"]).await;
}

#[tokio::test]
async fn nothing_is_left_after_the_death_of_all_three() {
    nothing_is_left_after_the_death_of(&["daemon", "keeper", "worker"]).await;
}

#[tokio::test]
async fn the_next_daemon_cancels_what_the_killed_one_left_running() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = let_loose(&daemon, &session).await;
    daemon.restart().await;
    assert_eq!(session.run(&run).await["state"], "running");
    session.cancel().await;
    let ended = session.wait_for_run_event(&run, "run.finished").await;
    assert_eq!(agents_children(&daemon), [], "{}", ended.data);
    assert_eq!(ended.data["processes"]["survivors"], 0);
    journal_rules::check(&session.events().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_runs_leave_no_zombie_and_no_descriptor() {
    /// A pool may still grow by a file or two; a leak would be hundreds.
    const SLACK: usize = 4;
    const RUNS: usize = 1000;
    let daemon = TestDaemon::start().await;
    let (mut echoes, mut scripts) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        echoes.push(daemon.session("echo").await);
    }
    for _ in 0..2 {
        scripts.push(daemon.session("script").await);
    }
    let round = async |runs: usize| {
        let mut lanes = tokio::task::JoinSet::new();
        for session in &echoes {
            let session = session.clone();
            lanes.spawn(async move {
                for n in 0..runs * 9 / 10 / 8 {
                    let run = session.prompt(&format!("word {n}")).await;
                    assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
                }
            });
        }
        for session in &scripts {
            let session = session.clone();
            lanes.spawn(async move {
                for n in 0..runs / 10 / 2 {
                    // In every tenth run the agent exits, and every fifth run leaves a dead child behind.
                    let end = match n % 10 {
                        0 => exit(0),
                        5 => spawn(&["true"]),
                        _ => say("word"),
                    };
                    let ended = session.run_script(&[end]).await;
                    assert_eq!(ended["finish_reason"], if n % 10 == 0 { "error" } else { "end_turn" });
                }
            });
        }
        lanes.join_all().await;
    };
    for session in &scripts {
        session.patch(json!({ "restarts": 1000 })).await;
    }
    round(100).await;
    let ours = || {
        let mut ours = daemon.home.processes_with_role("serve");
        ours.extend(daemon.home.processes_with_role("__worker"));
        ours.extend(daemon.home.processes_with_role("__keeper"));
        ours
    };
    let before = ours();
    // A session's own worker ends with a failed agent, and the next worker is a new process, so maxima per role are
    // compared.
    let most = |part: &str| {
        let held = ours().into_iter().filter(|one| one.has_role(part)).map(|one| one.open_descriptors());
        held.max().unwrap_or_default()
    };
    let held: Vec<_> = ["serve", "__worker", "__keeper"].iter().map(|part| (*part, most(part))).collect();
    round(RUNS).await;
    println!("{RUNS} runs; descriptors before: {held:?}");
    for (part, before) in held {
        poll_until(&format!("{part} to hold no more than {before} descriptors"), async || {
            (most(part) <= before + SLACK).then_some(())
        })
        .await;
    }
    assert_eq!(ours().len(), before.len(), "the number of processes has changed: {:#?}", ours());
    for one in ours() {
        poll_until("no zombie", async || one.zombies().is_empty().then_some(())).await;
    }
}
