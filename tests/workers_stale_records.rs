//! Records in `workers/` are only hints. A stale record, a pid that has been reused, and a program that answers on a
//! worker's socket without knowing its secret are never trusted.

use std::fs::File;
use std::path::Path;

use futures_util::{SinkExt, StreamExt};
use qd_testkit::{ObservedProcess, TestCommand, TestDaemon, journal_rules, poll_until, script::*};
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_tungstenite::accept_hdr_async;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};

use crate::workers_loss::{process_of, worker_of};

fn record(id: &str, process: &ObservedProcess, socket: &Path) -> String {
    json!({
        "agent_id": id,
        "role": "worker",
        "labels": [],
        "endpoint": format!("unix:{}", socket.display()),
        "pid": process.pid,
        "start_ticks": process.start_ticks,
        "version": "0.1.0",
        "started_at": "2026-01-01T00:00:00.000Z",
        "lease_expires_at": "2036-01-01T00:00:00.000Z",
    })
    .to_string()
}

#[tokio::test]
async fn a_record_that_names_somebody_else_does_them_no_harm() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_script(&[say("x")]).await;
    let mut sleep = daemon.home.program("sleep");
    sleep.arg("600");
    let bystander = TestCommand::spawn(sleep);
    let bystander = (ObservedProcess::find(bystander.pid()).unwrap(), bystander);
    let dir = daemon.home.path().join("workers");
    // A record that no session knows, and the session's own record with a reused pid.
    let known = worker_of(&session).await["id"].as_str().unwrap().to_owned();
    let worker = process_of(&session).await;
    daemon.kill9().await;
    worker.kill9().await;
    for id in ["wrk_nobody", &known] {
        std::fs::write(dir.join(format!("{id}.json")), record(id, &bystander.0, &dir.join("none.sock")))
            .unwrap();
        File::create(dir.join(format!("{id}.lock"))).unwrap();
    }
    // And a record locked by a process that is neither the worker nor the process in the record.
    std::fs::write(dir.join("wrk_held.json"), record("wrk_held", &bystander.0, &dir.join("none.sock")))
        .unwrap();
    let held = File::create(dir.join("wrk_held.lock")).unwrap();
    held.lock().unwrap();
    std::fs::write(dir.join("wrk_torn.json"), "{\"agent_id\":").unwrap();
    std::fs::write(dir.join("..json"), "[]").unwrap();
    daemon.start_again().await;
    assert_eq!(session.run_script(&[say("again")]).await["text"], "again");
    session.close().await;
    session.wait_for_event("its end", |event| event.kind == "session.closed").await;
    assert!(bystander.0.is_alive(), "no process was killed because of a record");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn the_spool_of_a_worker_whose_end_is_journalled_is_removed_by_the_next_daemon() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_script(&[say("x")]).await;
    let living = worker_of(&session).await["id"].as_str().unwrap().to_owned();
    daemon.kill9().await;
    let spools = daemon.home.path().join("workers").join("spool");
    let left = spools.join(format!("{living}9"));
    std::fs::create_dir_all(&left).unwrap();
    std::fs::write(left.join("00000000000000000001.jsonl"), "").unwrap();
    daemon.start_again().await;
    poll_until("the spool to be removed", async || (!left.exists()).then_some(())).await;
    assert!(spools.join(&living).exists(), "and that of a living worker stays");
    assert_eq!(session.run_script(&[say("again")]).await["text"], "again");
}

/// Answers like a worker, but does not know the secret.
async fn impostor(socket: UnixListener, session: String, met: mpsc::Sender<()>) {
    while let Ok((stream, _)) = socket.accept().await {
        #[expect(clippy::result_large_err, reason = "the callback's type is the library's")]
        let choose = |_: &Request, mut response: Response| {
            response.headers_mut().insert("sec-websocket-protocol", "quarterdeck.v1".parse().unwrap());
            Ok(response)
        };
        let Ok(mut peer) = accept_hdr_async(stream, choose).await else { continue };
        let Some(Ok(hello)) = peer.next().await else { continue };
        let hello: Value = serde_json::from_str(hello.to_text().unwrap()).unwrap();
        assert_eq!(hello["hello"]["session"], session);
        let taken = hello["hello"]["taken"].as_u64().unwrap();
        let lie = json!({ "hello": {
            "version": 1, "software": "0.1.0", "nonce": "00", "proof": "00".repeat(32),
            "seat": { "ready": { "steers": true } }, "last": taken + 2, "applied": 0, "pid": std::process::id(),
        }});
        let run = "stolen";
        let updates = json!({ "said": { "first": taken + 1, "ups": [
            { "said": { "run": run, "what": { "text": { "text": "believe me" } } } },
            { "gone": "stopped" },
        ]}});
        for frame in [lie, updates] {
            let _it_may_hang_up = peer.send(Message::text(frame.to_string())).await;
        }
        let reading = tokio::time::timeout(std::time::Duration::from_secs(5), async {
            while let Some(Ok(frame)) = peer.next().await {
                let text = frame.to_text().unwrap_or_default().to_owned();
                assert!(
                    !text.contains("\"start\"") && !text.contains("\"do\""),
                    "it was sent a command: {text}"
                );
            }
        });
        let _either_way = reading.await;
        if met.send(()).await.is_err() {
            return;
        }
    }
}

#[tokio::test]
async fn a_program_on_a_worker_s_socket_that_does_not_know_the_secret_is_not_believed() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script_as("stolen", &[say("mine"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let id = worker_of(&session).await["id"].as_str().unwrap().to_owned();
    let worker = process_of(&session).await;
    daemon.kill9().await;
    worker.kill9().await;
    daemon.home.wait_for_no_agents().await;
    let dir = daemon.home.path().join("workers");
    let file = |end: &str| dir.join(format!("{id}.{end}"));
    std::fs::remove_file(file("sock")).unwrap();
    let socket = UnixListener::bind(file("sock")).unwrap();
    // As long as the lock is held, the daemon must assume that the worker is alive.
    let lock = File::create(file("lock")).unwrap();
    lock.lock().unwrap();
    let (met, mut meetings) = mpsc::channel(1);
    let impostor = tokio::spawn(impostor(socket, session.id.clone(), met));
    daemon.start_again().await;
    for _ in 0..2 {
        qd_testkit::within("the daemon to try it", meetings.recv()).await.unwrap();
    }
    assert_eq!(session.run(&run).await["state"], "running", "its updates are ignored");
    let events = session.events().await;
    assert!(!events.iter().any(|event| event.data.to_string().contains("believe me")), "{events:#?}");
    impostor.abort();
    std::fs::remove_file(file("sock")).unwrap();
    drop(lock);
    let ended = session.wait(&run).await;
    assert_eq!((&ended["finish_reason"], &ended["text"]), (&json!("interrupted"), &json!("mine")));
    assert_eq!(session.run_script(&[say("again")]).await["text"], "again");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_worker_tells_nobody_anything_who_does_not_know_its_secret() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("mine"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let id = worker_of(&session).await["id"].as_str().unwrap().to_owned();
    let socket = daemon.home.path().join("workers").join(format!("{id}.sock"));
    for (hello, proof) in [(true, true), (true, false), (false, false)] {
        let stream = tokio::net::UnixStream::connect(&socket).await.unwrap();
        let mut request =
            tokio_tungstenite::tungstenite::client::IntoClientRequest::into_client_request("ws://worker/")
                .unwrap();
        request.headers_mut().insert("sec-websocket-protocol", "quarterdeck.v1".parse().unwrap());
        let (mut peer, _) = tokio_tungstenite::client_async(request, stream).await.unwrap();
        let greeting = json!({ "hello": {
            "versions": { "min": 1, "max": 1 }, "software": "x", "session": session.id, "worker": id,
            "nonce": "00", "taken": 0,
        }});
        let mut frames = Vec::new();
        if hello {
            frames.push(greeting);
        }
        if proof {
            frames.push(json!({ "proof": "00".repeat(32) }));
        }
        frames.push(json!({ "ack": 1000 }));
        frames.push(json!("close"));
        for frame in frames {
            let _it_may_hang_up = peer.send(Message::text(frame.to_string())).await;
        }
        let mut received = String::new();
        while let Ok(Some(Ok(frame))) =
            tokio::time::timeout(std::time::Duration::from_millis(300), peer.next()).await
        {
            received.push_str(frame.to_text().unwrap_or_default());
        }
        assert!(!received.contains("mine") && !received.contains("said"), "{received}");
    }
    assert_eq!(session.run(&run).await["state"], "running", "and the run is not affected");
    session.cancel().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_worker_s_files_are_for_its_user_alone_and_go_with_it() {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_script(&[say("x")]).await;
    let id = worker_of(&session).await["id"].as_str().unwrap().to_owned();
    let dir = daemon.home.path().join("workers");
    let own = || -> Vec<_> {
        let entries = std::fs::read_dir(&dir).unwrap().flatten();
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&id)).collect()
    };
    let mut sockets = 0;
    for entry in own() {
        let about = entry.metadata().unwrap();
        assert_eq!(about.permissions().mode() & 0o077, 0, "{}", entry.path().display());
        sockets += usize::from(about.file_type().is_socket());
    }
    assert_eq!(sockets, 1);
    session.close().await;
    session.wait_for_event("its end", |event| event.kind == "session.closed").await;
    poll_until("its files to go", async || own().is_empty().then_some(())).await;
    assert!(!dir.join("spool").join(&id).exists());
}
