//! Agents cannot control the daemon. Every process that descends from an agent has only its session's rights on the
//! socket: it may read its own session, and may not answer, prompt, change or see anything else.

use qd_testkit::home::signal;
use qd_testkit::{TestDaemon, TestHome, TestSession, journal_rules, poll_until, script::*};
use rustix::process::Signal;
use serde_json::json;

use crate::workers_loss::process_of;

/// A program for a process below an agent: once it knows the ask, it makes requests and writes a line `NAME STATUS` for
/// each to `/answers`. For `qd`, the status is its exit code.
fn attempts(home: &TestHome, own: &TestSession, other: &TestSession) -> String {
    let socket = home.socket();
    let (socket, qd) = (socket.display(), qd_testkit::home::binary());
    let (own_path, other_path, prompt) = (own.path(""), other.path(""), own.workspace_path("/agent"));
    let (steer, close) = (own.agent_path("/steer"), own.path(""));
    let own_prompt = json!({ "session_id": own.id, "prompt": "more" });
    format!(
        r#"
        at() {{ printf '%s ' "$1" >>"$OUT"; shift
            curl -s -o "$OUT.last" -w '%{{http_code}} ' --unix-socket {socket} "$@" >>"$OUT"
            grep -o '"code":"[a-z_]*"' "$OUT.last" >>"$OUT" || echo >>"$OUT"; }}
        while ! [ -s ask ]; do sleep 0.02; done
        ask=$(cat ask)
        at answer -X POST -H 'content-type: application/json' -d '{{"decision":"allow_once"}}' "http://localhost/v1/asks/$ask/answer"
        at asks 'http://localhost/v1/asks?state=pending'
        at search 'http://localhost/v1/search?q=a'
        at usage 'http://localhost/v1/usage'
        at own 'http://localhost{own_path}'
        at diff 'http://localhost{own_path}/diff'
        at found 'http://localhost/v1/resolve?ref={own_id}'
        at other 'http://localhost{other_path}'
        at prompt -X POST -H 'content-type: application/json' -d '{own_prompt}' 'http://localhost{prompt}'
        at steer -X POST -H 'content-type: application/json' -d '{{"text":"x"}}' 'http://localhost{steer}'
        at close -X DELETE 'http://localhost{close}'
        at halt -X POST 'http://localhost/v1/halt'
        at quota -X DELETE 'http://localhost/v1/quotas/acc_1'
        at policy -X POST -H 'content-type: application/json' -d '{{"policy":"allow"}}' 'http://localhost/v1/policy/test'
        at patch -X PATCH -H 'content-type: application/json' -d '{{"policy":"allow"}}' 'http://localhost{own_path}'
        QD_HOME={home} {qd} allow "$ask" >"$OUT.qd" 2>&1; echo "qd $?" >>"$OUT"
        mv "$OUT" "$OUT.done"
        "#,
        own_id = own.id,
        home = home.path().display(),
        qd = qd.display(),
    )
}

#[tokio::test]
async fn nothing_below_an_agent_can_answer_its_ask() {
    let daemon = TestDaemon::start().await;
    let (session, other) = (daemon.session("script").await, daemon.session("script").await);
    let work = daemon.home.project_dir();
    std::fs::write(work.join("try.sh"), attempts(&daemon.home, &session, &other)).unwrap();
    let path = std::env::var("PATH").unwrap();
    let with = |out: &str| [format!("OUT={out}"), format!("PATH={path}"), "bash".into(), "try.sh".into()];
    let plain = with("child");
    let away = with("away");
    let bare = with("bare");
    let words = |words: &[String]| words.iter().map(String::as_str).collect::<Vec<_>>().join(" ");
    let run = session
        .prompt_script(&[
            spawn(&["sh", "-c", &format!("exec env {}", words(&plain))]),
            spawn_detached(&["sh", "-c", &format!("exec env {}", words(&away))]),
            // No variable in its environment tells to which session it belongs.
            spawn_detached(&["sh", "-c", &format!("exec env -i {}", words(&bare))]),
            ask_bash("make"),
        ])
        .await;
    let ask = session.wait_for_ask(&run).await;
    std::fs::write(work.join("ask"), &ask).unwrap();
    for out in ["child", "away", "bare"] {
        let done = work.join(format!("{out}.done"));
        let tried = poll_until("the attempts", async || std::fs::read_to_string(&done).ok()).await;
        for line in tried.lines() {
            let expected = match line.split(' ').next().unwrap() {
                own @ ("own" | "found") => format!("{own} 200 "),
                "qd" => "qd 1".to_owned(),
                name => format!(r#"{name} 403 "code":"agent_not_allowed""#),
            };
            assert_eq!(line, expected, "{out}: {tried}");
        }
        assert_eq!(tried.lines().count(), 16, "{out}: {tried}");
        let output = std::fs::read_to_string(work.join(format!("{out}.qd"))).unwrap();
        assert!(output.contains("agent"), "`qd` says why: {output}");
    }
    let open = daemon.client().pending_asks().await;
    assert_eq!(open.iter().map(|ask| &ask["id"]).collect::<Vec<_>>(), [&json!(ask)], "it is still open");
    daemon.qd(&["allow", &ask]).await.ok();
    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "end_turn");
    assert!(ended["text"].as_str().unwrap().ends_with("allowed"), "{ended}");
    assert_eq!(other.events().await.len(), 1, "and the other session was never touched");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn what_a_finished_turn_left_has_no_more_rights_and_a_dead_session_s_none() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let (home, work) = (daemon.home.path(), daemon.home.project_dir());
    // It sends requests in a loop, whichever daemon runs, and keeps the last status.
    let line = format!(
        "while :; do curl -s -o body -w '%{{http_code}}' --unix-socket {}/qd.sock http://localhost/v1/asks >status.new && mv status.new status; sleep 0.02; done",
        home.display()
    );
    let ended = session.run_script(&[spawn_detached(&["bash", "-c", &line])]).await;
    assert_eq!(ended["finish_reason"], "end_turn");
    for _ in 0..2 {
        let _absent = std::fs::remove_file(work.join("status"));
        let status =
            poll_until("its attempt", async || std::fs::read_to_string(work.join("status")).ok()).await;
        assert_eq!(status, "403");
        daemon.restart().await;
    }
    assert_eq!(daemon.client().get("/v1/asks").await.status, 200, "a person is not affected");
    daemon.qd(&["asks"]).await.ok();
}

#[tokio::test]
async fn a_daemon_that_has_not_met_the_worker_yet_knows_whose_a_process_is() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let (socket, work) = (daemon.home.socket(), daemon.home.project_dir());
    let path = std::env::var("PATH").unwrap();
    let line = format!(
        "while :; do curl -s -o body -w '%{{http_code}}' --unix-socket {} http://localhost/v1/asks >status.new && mv status.new status; sleep 0.02; done",
        socket.display()
    );
    // No variable in its environment tells to which session it belongs.
    let run = session
        .prompt_script(&[
            spawn_detached(&["env", "-i", &format!("PATH={path}"), "bash", "-c", &line]),
            sleep_forever(),
        ])
        .await;
    session.wait_for_run_event(&run, "text.delta").await;
    let status = async || {
        let _absent = std::fs::remove_file(work.join("status"));
        poll_until("its attempt", async || std::fs::read_to_string(work.join("status")).ok()).await
    };
    assert_eq!(status().await, "403");
    let worker = process_of(&session).await;
    signal(worker.pid, Signal::STOP);
    daemon.restart().await;
    assert_eq!(status().await, "403", "also while its worker is stopped");
    signal(worker.pid, Signal::CONT);
    session.wait_for_event("the worker", |event| event.kind == "worker.reattached").await;
    assert_eq!(status().await, "403");
}

#[tokio::test]
async fn neither_distance_nor_a_kept_connection_makes_a_stranger_of_an_agent_s_process() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let work = daemon.home.project_dir();
    let socket = daemon.home.socket().display().to_string();
    std::fs::write(work.join("far.py"), FAR).unwrap();
    let path = std::env::var("PATH").unwrap();
    let command = ["env", "-i", &format!("PATH={path}"), "python3", "far.py", &socket];
    let run = session.prompt_script(&[spawn_detached(&command), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    for attempt in ["far", "kept"] {
        let status =
            poll_until("its attempt", async || std::fs::read_to_string(work.join(attempt)).ok()).await;
        assert_eq!(status, "403", "{attempt}");
    }
}

/// Two callers: a process thirty generations below the agent, and one whose parent opened the connection and exited.
const FAR: &str = r#"
import os, socket, sys, time

def connect():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    return connection

def attempt(connection, name):
    connection.sendall(b"GET /v1/asks HTTP/1.1\r\nHost: localhost\r\n\r\n")
    status = connection.recv(4096).split()[1].decode()
    with open(name + ".new", "w") as file:
        file.write(status)
    os.rename(name + ".new", name)

if os.fork() == 0:
    for _ in range(30):
        if os.fork() != 0:
            os.wait()
            os._exit(0)
    attempt(connect(), "far")
    os._exit(0)
if os.fork() == 0:
    connection = connect()
    maker = os.getpid()
    time.sleep(0.2)
    if os.fork() == 0:
        while os.getppid() == maker:
            time.sleep(0.01)
        attempt(connection, "kept")
    os._exit(0)
os.wait()
os.wait()
time.sleep(600)
"#;
