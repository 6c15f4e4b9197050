//! A worker dies: its remaining updates are journalled first, its run is interrupted, no process of its agent is left,
//! and the session resumes the same conversation. Also the same for its keeper and its agent.

use qd_testkit::{
    ObservedProcess, TestDaemon, TestEvent, TestSession, journal_rules, poll_until, processes, script::*,
};
use serde_json::{Value, json};

/// The live worker of a session, as the daemon lists it.
pub(crate) async fn worker_of(session: &TestSession) -> Value {
    poll_until("the session's worker", async || {
        let list = session.client.get("/v1/workers").await.list();
        list.into_iter().find(|worker| worker["session_id"] == session.id)
    })
    .await
}

/// The process of the session's worker.
pub(crate) async fn process_of(session: &TestSession) -> ObservedProcess {
    let pid = worker_of(session).await["pid"].as_u64().unwrap();
    ObservedProcess::find(u32::try_from(pid).unwrap()).expect("a listed worker lives")
}

/// Settings for a `script` agent that remembers its conversations after its process dies.
pub(crate) fn remembering(daemon: &TestDaemon) -> Value {
    let state = daemon.home.sibling_path("memory");
    std::fs::create_dir_all(&state).unwrap();
    json!({ "agent": "script", "env": { "QD_SCRIPT_STATE": state } })
}

#[tokio::test]
async fn a_killed_worker_is_an_interrupted_run_and_nothing_of_its_agent_lives_on() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(remembering(&daemon)).await;
    assert_eq!(session.run_script(&[say("first")]).await["text"], "first");
    let conversation = session.show().await["agent_session_id"].clone();
    assert!(conversation.is_string());
    let run =
        session.prompt_script(&[spawn_detached(&["sleep", "600"]), say(" so far"), sleep_forever()]).await;
    let next = session.prompt_script(&[say("next")]).await;
    session
        .wait_for_event("its words", |event| {
            event.is_of_run(&run, "text.delta") && event.data["text"].as_str().unwrap().ends_with("so far")
        })
        .await;
    let worker = process_of(&session).await;
    let id = worker_of(&session).await["id"].as_str().unwrap().to_owned();
    let family = processes::descendants(worker.pid);
    assert!(family.iter().any(|one| one.has_role("__keeper")), "{family:#?}");
    assert!(family.iter().any(|one| one.has_role("__script")), "{family:#?}");
    assert!(family.iter().any(|one| one.args[0] == "sleep"), "{family:#?}");
    worker.kill9().await;

    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "interrupted");
    assert!(ended["text"].as_str().unwrap().ends_with(" so far"), "{ended}");
    let (keeper, of_agent): (Vec<_>, Vec<_>) = family.iter().partition(|one| one.has_role("__keeper"));
    let left: Vec<_> = of_agent.into_iter().filter(|one| one.is_alive()).collect();
    assert!(left.is_empty(), "once the run has ended: {left:#?}");
    poll_until("the keeper to follow", async || (!keeper[0].is_alive()).then_some(())).await;
    assert_eq!(processes::marked_processes(&id), [], "and no process has the mark");

    assert_eq!(session.wait(&next).await["text"], "next", "the queue goes on");
    let events = session.events().await;
    journal_rules::check(&events);
    assert_eq!(session.show().await["agent_session_id"], conversation, "and so does the conversation");
    let exited =
        events.iter().find(|event| event.kind == "worker.exited").expect("there is a worker.exited event");
    assert_eq!((&exited.data["worker_id"], &exited.data["reason"]), (&json!(id), &json!("lost")));
    assert_ne!(worker_of(&session).await["id"], id.as_str());
}

#[tokio::test]
async fn a_resumed_agent_repeats_nothing_of_its_past_and_keeps_its_conversation() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(remembering(&daemon)).await;
    for n in 0..4 {
        let word = format!("word {n}");
        assert_eq!(session.run_script(&[say(&word)]).await["text"], word);
        process_of(&session).await.kill9().await;
        let mut lost = 0;
        let loss = |event: &TestEvent| {
            lost += usize::from(event.kind == "worker.exited" && event.data["reason"] == "lost");
            lost > n
        };
        session.wait_for_event("its loss", loss).await;
    }
    let events = session.events().await;
    journal_rules::check(&events);
    let deltas = events.iter().filter(|event| event.kind == "text.delta");
    let text: String = deltas.map(|event| event.data["text"].as_str().unwrap()).collect();
    assert_eq!(text, "word 0word 1word 2word 3");
    assert!(events.iter().all(|event| event.kind != "notice.shown"), "each resume succeeds: {events:#?}");
}

#[tokio::test]
async fn the_end_of_a_run_that_only_the_spool_of_a_dead_worker_knows_is_its_end() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[&[say("x "), sleep(400)], &count(50, 2)[..]].concat()).await;
    let next = session.prompt_script(&[say("next")]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let worker = process_of(&session).await;
    daemon.kill9().await;
    poll_until("the end of the run in the spool", async || {
        let files = daemon.home.files();
        let spooled =
            files.iter().filter(|(path, _)| path.components().any(|part| part.as_os_str() == "spool"));
        spooled
            .into_iter()
            .any(|(_, content)| String::from_utf8_lossy(content).contains("end_turn"))
            .then_some(())
    })
    .await;
    worker.kill9().await;
    daemon.home.wait_for_no_agents().await;
    daemon.start_again().await;
    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "end_turn");
    assert_eq!(ended["text"], format!("x {}", counted_text(50)));
    assert_eq!(session.wait(&next).await["finish_reason"], "end_turn");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_run_whose_worker_dies_while_no_daemon_lives_is_interrupted_with_all_that_it_said() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let words = [count(10, 10), vec![write("said", "x"), sleep_forever()]].concat();
    let run = session.prompt_script(&words).await;
    let next = session.prompt_script(&[say("next")]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let worker = process_of(&session).await;
    daemon.kill9().await;
    poll_until("the agent's last step", async || {
        daemon.home.project_dir().join("said").exists().then_some(())
    })
    .await;
    // The agent's last text may still be on its way through the worker.
    poll_until("the last text in the spool", async || {
        let files = daemon.home.files();
        files.iter().any(|(_, content)| String::from_utf8_lossy(content).contains("\"9 ")).then_some(())
    })
    .await;
    worker.kill9().await;
    daemon.start_again().await;
    let ended = session.wait(&run).await;
    assert_eq!((&ended["finish_reason"], &ended["text"]), (&json!("interrupted"), &json!(counted_text(10))));
    assert_eq!(session.wait(&next).await["finish_reason"], "end_turn");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn the_loss_of_the_shared_worker_interrupts_its_sessions_and_all_go_on() {
    let daemon = TestDaemon::start().await;
    let mut sessions = Vec::new();
    for _ in 0..5 {
        let session = daemon.session("echo").await;
        let run = session.prompt("__sleep_ms:600000 never").await;
        let next = session.prompt("next").await;
        session.wait_for_start(&run).await;
        sessions.push((session, run, next));
    }
    let workers = daemon.home.processes_with_role("__worker");
    assert_eq!(workers.len(), 1, "echo sessions share one worker: {workers:#?}");
    workers[0].kill9().await;
    for (session, run, next) in &sessions {
        assert_eq!(session.wait(run).await["finish_reason"], "interrupted");
        assert_eq!(session.wait(next).await["text"], "echo: next");
        journal_rules::check(&session.events().await);
    }
}

#[tokio::test]
async fn a_killed_agent_is_an_error_with_its_signal_and_the_next_run_has_a_new_one() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(remembering(&daemon)).await;
    assert_eq!(session.run_script(&[say("first")]).await["text"], "first");
    let conversation = session.show().await["agent_session_id"].clone();
    let run = session.prompt_script(&[spawn_detached(&["sleep", "600"]), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let family = processes::descendants(process_of(&session).await.pid);
    family.iter().find(|one| one.has_role("__script")).expect("there is an agent").kill9().await;
    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "error");
    assert_eq!(ended["error"]["code"], "agent_exited", "{ended}");
    let left: Vec<_> = family.iter().filter(|one| one.is_alive() && one.args[0] == "sleep").collect();
    assert!(left.is_empty(), "what the agent started is gone with its run: {left:#?}");
    assert_eq!(session.run_script(&[say("again")]).await["text"], "again");
    assert_eq!(session.show().await["agent_session_id"], conversation);
    journal_rules::check(&session.events().await);
}
