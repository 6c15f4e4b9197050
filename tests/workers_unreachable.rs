//! A worker lives but cannot be reached any more: its socket, record or key is gone, the journal is older than it, it is
//! stopped, or somebody else answers in its place. Within `reach_timeout_s` the daemon ends it with everything that its
//! agent started, the run ends as `interrupted` and says why, and the session goes on with a new worker.

use std::path::{Path, PathBuf};

use qd_testkit::home::signal;
use qd_testkit::{
    ObservedProcess, TestDaemon, TestHome, TestSession, journal_rules, poll_until, processes, script::*,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::net::{UnixListener, UnixStream};

use crate::workers_loss::{process_of, worker_of};

/// A daemon that gives a worker up after two seconds.
async fn impatient_daemon() -> TestDaemon {
    TestDaemon::start_with_settings("reach_timeout_s = 2\n").await
}

/// A run in the middle of its turn.
struct BusyWorker {
    session: TestSession,
    run: String,
    /// The id of the worker.
    id: String,
    process: ObservedProcess,
    /// The worker and everything below it: keeper, agent, and a process that left the agent's process group.
    family: Vec<ObservedProcess>,
}

impl BusyWorker {
    async fn start(daemon: &TestDaemon) -> Self {
        Self::start_with(daemon, &[spawn_detached(&["sleep", "600"]), say("so far"), sleep_forever()]).await
    }

    async fn start_with(daemon: &TestDaemon, script: &[Value]) -> Self {
        let session = daemon.session("script").await;
        let run = session.prompt_script(script).await;
        session
            .wait_for_event("its words", |event| {
                event.is_of_run(&run, "text.delta")
                    && event.data["text"].as_str().unwrap().ends_with("so far")
            })
            .await;
        Self::observe(session, run).await
    }

    async fn observe(session: TestSession, run: String) -> Self {
        let (id, process) =
            (worker_of(&session).await["id"].as_str().unwrap().to_owned(), process_of(&session).await);
        let mut family = processes::descendants(process.pid);
        for role in ["__keeper", "__script"] {
            assert!(family.iter().any(|one| one.has_role(role)), "{role}: {family:#?}");
        }
        family.push(process.clone());
        Self { session, run, id, process, family }
    }

    fn file(&self, home: &TestHome, suffix: &str) -> PathBuf {
        home.path().join("workers").join(format!("{}.{suffix}", self.id))
    }

    fn living(&self) -> Vec<&ObservedProcess> {
        self.family.iter().filter(|one| one.is_alive()).collect()
    }

    /// The daemon gives the worker up for this reason, and the session goes on.
    async fn expect_given_up(&self, reason: &str) {
        let next = self.session.prompt_script(&[say("next")]).await;
        let ended = self.session.wait(&self.run).await;
        assert_eq!(ended["finish_reason"], "interrupted", "{ended}");
        let text = ended["text"].as_str().unwrap();
        assert!(text.ends_with("so far"), "what it said is journalled: {ended}");
        assert_eq!(ended["error"]["code"], "worker_unreachable", "{ended}");
        let message = ended["error"]["message"].as_str().unwrap();
        assert!(message.contains(reason) && message.contains("it was ended"), "{message}");
        assert!(self.living().is_empty(), "once the run has ended: {:#?}", self.living());
        assert_eq!(processes::marked_processes(&self.id), []);
        self.expect_next(&next).await;
        let events = self.session.events().await;
        let exited = events.iter().find(|event| event.kind == "worker.exited").expect("it is an event");
        assert_eq!((&exited.data["worker_id"], &exited.data["reason"]), (&json!(self.id), &json!("lost")));
    }

    /// A prompt that was accepted meanwhile runs, in a new worker.
    async fn expect_next(&self, next: &str) {
        let ended = self.session.wait(next).await;
        assert_eq!(
            (&ended["finish_reason"], &ended["text"]),
            (&json!("end_turn"), &json!("next")),
            "{ended}"
        );
        let worker = process_of(&self.session).await;
        assert_ne!((worker.pid, worker.start_ticks), (self.process.pid, self.process.start_ticks));
        journal_rules::check(&self.session.events().await);
    }
}

/// Copies the journal, or puts a copy back, while no daemon runs.
fn copy_journal(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for name in ["journal.db", "journal.db-wal", "journal.db-shm"] {
        let _absent = std::fs::remove_file(to.join(name));
        if from.join(name).exists() {
            std::fs::copy(from.join(name), to.join(name)).unwrap();
        }
    }
}

#[tokio::test]
async fn a_worker_without_its_socket_is_ended_and_its_session_goes_on() {
    let mut daemon = impatient_daemon().await;
    let busy = BusyWorker::start(&daemon).await;
    daemon.kill9().await;
    std::fs::remove_file(busy.file(&daemon.home, "sock")).unwrap();
    daemon.start_again().await;
    busy.expect_given_up("connecting to its socket failed").await;
}

#[tokio::test]
async fn a_worker_without_socket_and_record_is_found_by_what_it_holds() {
    let mut daemon = impatient_daemon().await;
    let (busy, damaged) = (BusyWorker::start(&daemon).await, BusyWorker::start(&daemon).await);
    daemon.kill9().await;
    std::fs::remove_file(busy.file(&daemon.home, "sock")).unwrap();
    std::fs::remove_file(busy.file(&daemon.home, "json")).unwrap();
    std::fs::remove_file(damaged.file(&daemon.home, "sock")).unwrap();
    std::fs::write(damaged.file(&daemon.home, "json"), "{\"agent_id\":").unwrap();
    daemon.start_again().await;
    busy.expect_given_up("connecting to its socket failed").await;
    damaged.expect_given_up("connecting to its socket failed").await;
}

#[tokio::test]
async fn a_worker_that_was_started_under_another_key_is_ended_with_its_agent() {
    let mut daemon = impatient_daemon().await;
    for new_key in [None, Some("ab".repeat(32))] {
        let busy = BusyWorker::start(&daemon).await;
        daemon.kill9().await;
        let key = daemon.home.path().join("workers/key");
        std::fs::remove_file(&key).unwrap();
        if let Some(new_key) = new_key {
            std::fs::write(&key, new_key).unwrap();
        }
        daemon.start_again().await;
        busy.expect_given_up("does not know its secret").await;
    }
}

#[tokio::test]
async fn a_worker_that_is_stopped_for_good_is_ended() {
    let mut daemon = impatient_daemon().await;
    let busy = BusyWorker::start(&daemon).await;
    daemon.kill9().await;
    // A stopped keeper cannot end what its killed worker leaves.
    let keeper = busy.family.iter().find(|one| one.has_role("__keeper")).unwrap();
    signal(busy.process.pid, Signal::STOP);
    signal(keeper.pid, Signal::STOP);
    daemon.start_again().await;
    busy.expect_given_up("did not answer in time").await;
}

#[tokio::test]
async fn a_socket_that_accepts_and_never_answers_holds_no_session_up() {
    let mut daemon = impatient_daemon().await;
    let busy = BusyWorker::start(&daemon).await;
    daemon.kill9().await;
    let socket = busy.file(&daemon.home, "sock");
    std::fs::remove_file(&socket).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let silent = tokio::spawn(async move {
        let mut accepted = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            accepted.push(stream);
        }
    });
    daemon.start_again().await;
    busy.expect_given_up("did not answer in time").await;
    silent.abort();
}

#[tokio::test]
async fn a_worker_that_is_ahead_of_a_restored_journal_is_ended() {
    let mut daemon = impatient_daemon().await;
    let saved = daemon.home.sibling_path("saved");
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[&count(2000, 5)[..], &[sleep_forever()]].concat()).await;
    session.wait_for_run_event(&run, "text.delta").await;
    daemon.terminate().await;
    copy_journal(&daemon.home.path(), &saved);
    daemon.start_again().await;
    let busy = BusyWorker::observe(session, run).await;
    // These updates are acknowledged, so the worker no longer has them.
    let known = busy.session.events().await.len();
    poll_until("more of its words", async || (busy.session.events().await.len() > known + 20).then_some(()))
        .await;
    daemon.kill9().await;
    copy_journal(&saved, &daemon.home.path());
    daemon.start_again().await;
    let next = busy.session.prompt_script(&[say("next")]).await;
    let ended = busy.session.wait(&busy.run).await;
    assert_eq!(ended["finish_reason"], "interrupted", "{ended}");
    assert_eq!(ended["error"]["code"], "worker_unreachable", "{ended}");
    assert!(ended["error"]["message"].as_str().unwrap().contains("bad_number"), "{ended}");
    assert!(busy.living().is_empty(), "{:#?}", busy.living());
    busy.expect_next(&next).await;
}

#[tokio::test]
async fn workers_that_a_restored_journal_does_not_know_are_ended_even_without_a_record() {
    let mut daemon = impatient_daemon().await;
    let saved = daemon.home.sibling_path("saved");
    let known = daemon.session("script").await;
    daemon.terminate().await;
    copy_journal(&daemon.home.path(), &saved);
    daemon.start_again().await;
    let run = known.prompt_script(&[say("so far"), sleep_forever()]).await;
    known.wait_for_run_event(&run, "text.delta").await;
    let known = BusyWorker::observe(known, run).await;
    let unknown = BusyWorker::start(&daemon).await;
    daemon.kill9().await;
    copy_journal(&saved, &daemon.home.path());
    std::fs::remove_file(unknown.file(&daemon.home, "json")).unwrap();
    daemon.start_again().await;
    // The session is known without its worker, and the id of its first worker is used again.
    let next = known.session.prompt_script(&[say("next")]).await;
    known.expect_next(&next).await;
    assert!(known.living().is_empty(), "before the new worker started: {:#?}", known.living());
    poll_until("the stray worker to end", async || unknown.living().is_empty().then_some(())).await;
}

/// A proxy in the place of a worker's socket. Dropping it breaks the connections that it has forwarded.
struct SocketProxy {
    accepting: tokio::task::JoinHandle<()>,
}

impl SocketProxy {
    fn start(socket: PathBuf) -> Self {
        let real = socket.with_file_name("real");
        std::fs::rename(&socket, &real).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let accepting = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((mut daemon, _)) = listener.accept().await {
                let mut worker = UnixStream::connect(&real).await.unwrap();
                connections.spawn(async move {
                    let _either_end_closes = tokio::io::copy_bidirectional(&mut daemon, &mut worker).await;
                });
            }
        });
        Self { accepting }
    }
}

impl Drop for SocketProxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

#[tokio::test]
async fn the_folder_of_the_workers_may_be_deleted_under_a_running_daemon() {
    let mut daemon = impatient_daemon().await;
    let busy = BusyWorker::start(&daemon).await;
    let dir = daemon.home.path().join("workers");
    daemon.kill9().await;
    let proxy = SocketProxy::start(busy.file(&daemon.home, "sock"));
    daemon.start_again().await;
    busy.session.wait_for_event("the worker", |event| event.kind == "worker.reattached").await;
    std::fs::remove_dir_all(&dir).unwrap();
    assert_eq!(busy.session.run(&busy.run).await["state"], "running", "as long as the connection holds");
    drop(proxy);
    busy.expect_given_up("removed while it was running").await;
    // The next daemon can reach the workers of this one, because the key was written again.
    let run = busy.session.prompt_script(&[say("x"), sleep_forever()]).await;
    busy.session.wait_for_run_event(&run, "text.delta").await;
    daemon.kill9().await;
    daemon.start_again().await;
    let reattached = |event: &qd_testkit::TestEvent| {
        event.kind == "worker.reattached" && event.data["worker_id"] != busy.id.as_str()
    };
    busy.session.wait_for_event("the new worker", reattached).await;
    busy.session.cancel().await;
    assert_eq!(busy.session.wait(&run).await["finish_reason"], "cancelled");
}

#[tokio::test]
async fn a_shared_worker_that_cannot_be_reached_is_ended_once_no_session_is_left_in_it() {
    let mut daemon = impatient_daemon().await;
    let mut sessions = Vec::new();
    for _ in 0..3 {
        let session = daemon.session("echo").await;
        let run = session.prompt("__sleep_ms:600000 never").await;
        session.wait_for_start(&run).await;
        sessions.push((session, run));
    }
    let shared = process_of(&sessions[0].0).await;
    daemon.kill9().await;
    let dir = daemon.home.path().join("workers");
    for entry in std::fs::read_dir(&dir).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        if name.starts_with("shared-") && name.ends_with(".sock") {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    daemon.start_again().await;
    for (session, run) in &sessions {
        let ended = session.wait(run).await;
        assert_eq!(ended["finish_reason"], "interrupted", "{ended}");
        assert_eq!(ended["error"]["code"], "worker_unreachable", "{ended}");
        let next = session.prompt("next").await;
        assert_eq!(session.wait(&next).await["text"], "echo: next");
        journal_rules::check(&session.events().await);
    }
    assert!(!shared.is_alive());
}

#[tokio::test]
async fn processes_of_an_agent_gain_no_rights_when_the_key_is_gone() {
    let mut daemon = impatient_daemon().await;
    let (socket, work) = (daemon.home.socket(), daemon.home.project_dir());
    let line = format!(
        "while :; do curl -s -o body -w '%{{http_code}}\\n' --unix-socket {} http://localhost/v1/asks >>statuses; sleep 0.02; done",
        socket.display()
    );
    let script = [spawn_detached(&["bash", "-c", &line]), say("so far"), sleep_forever()];
    let busy = BusyWorker::start_with(&daemon, &script).await;
    daemon.kill9().await;
    // Only the mark still tells that the process was started by an agent, and the new daemon cannot verify the mark.
    signal(busy.process.pid, Signal::STOP);
    for role in ["__keeper", "__worker"] {
        busy.family.iter().find(|one| one.has_role(role)).unwrap().kill9().await;
    }
    std::fs::remove_file(daemon.home.path().join("workers/key")).unwrap();
    let before = std::fs::read_to_string(work.join("statuses")).unwrap().len();
    daemon.start_again().await;
    let ended = busy.session.wait(&busy.run).await;
    assert_eq!(ended["finish_reason"], "interrupted", "{ended}");
    assert!(busy.living().is_empty(), "{:#?}", busy.living());
    let statuses = std::fs::read_to_string(work.join("statuses")).unwrap();
    assert!(!statuses[before..].contains("200"), "{statuses}");
    assert_eq!(daemon.client().get("/v1/asks").await.status, 200, "a person is not affected");
}
