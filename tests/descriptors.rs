//! A daemon that may open few files: clients cannot use up the descriptors that commands, workers and the journal need,
//! and everything works again when they leave.

use qd_testkit::stream::TestEventStream;
use qd_testkit::{TestClient, TestDaemon, TestSession, journal_rules, poll_until, script::*, within};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// A daemon that may have 96 descriptors.
async fn limited_daemon() -> TestDaemon {
    let wrapper = ["bash", "-c", "ulimit -n 96 && exec \"$@\"", "bash"];
    TestDaemon::start_with(|options| _ = options.wrapped_in(&wrapper)).await
}

/// Opens many more streams than fit. Every one is opened or refused at once.
async fn open_150_streams(client: &TestClient) -> Vec<TestEventStream> {
    let (mut streams, mut refused) = (Vec::new(), 0);
    for _ in 0..150 {
        match within("a stream or its refusal", client.try_stream("/v1/events")).await {
            Ok(stream) => streams.push(stream.wait_until_ready().await),
            Err(error) => {
                let text = error.to_string();
                assert!(text.starts_with("429") && text.contains("\"overloaded\""), "{text}");
                refused += 1;
            }
        }
    }
    assert!(streams.len() > 10 && refused > 10, "{} were opened, {refused} refused", streams.len());
    streams
}

/// Waits for the end of a run without a stream and without the route that waits.
async fn poll_run(session: &TestSession, run: &str) -> Value {
    poll_until("the end of a run", async || {
        let run = session.run(run).await;
        (run["state"] == "finished").then_some(run)
    })
    .await
}

#[tokio::test]
async fn commands_work_while_streams_have_taken_all_that_they_may() {
    let daemon = limited_daemon().await;
    let (session, other) = (daemon.session("script").await, daemon.session("script").await);
    let run = session.prompt_script(&[ask_bash("make"), sleep_forever()]).await;
    let ask = session.wait_for_ask(&run).await;
    let client = daemon.client();
    let streams = open_150_streams(&client).await;

    let wait = client.get(&session.workspace_path(&format!("/runs/{run}/wait"))).await;
    wait.expect_refusal(429, "overloaded");
    assert_eq!(wait.header("retry-after"), Some("1"));

    client.answer_ask(&ask, &json!({ "decision": "allow_once" })).await.expect(200);
    let next = other.prompt_script(&[say("still here")]).await;
    assert_eq!(poll_run(&other, &next).await["text"], "still here", "an agent is started");
    client.post("/v1/halt", &json!({})).await.expect(200);
    client.delete("/v1/halt").await.expect(200);
    session.cancel().await;
    assert_eq!(poll_run(&session, &run).await["finish_reason"], "cancelled");

    drop(streams);
    poll_until("a stream after the others left", async || client.try_stream("/v1/events").await.ok()).await;
    assert_eq!(session.run_script(&[say("as before")]).await["text"], "as before");
    journal_rules::check(&session.events().await);
    journal_rules::check(&other.events().await);
}

/// A connection that stays open after its request.
async fn open_idle_connection(daemon: &TestDaemon) -> UnixStream {
    let mut connection = UnixStream::connect(daemon.home.socket()).await.unwrap();
    connection.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    let mut head = [0; 12];
    within("a response", connection.read_exact(&mut head)).await.unwrap();
    assert_eq!(&head, b"HTTP/1.1 200");
    connection
}

#[tokio::test]
async fn idle_connections_make_way_for_new_ones() {
    let daemon = limited_daemon().await;
    let mut idle = Vec::new();
    for _ in 0..100 {
        idle.push(open_idle_connection(&daemon).await);
    }
    let session = daemon.session("script").await;
    assert_eq!(session.run_script(&[say("in time")]).await["text"], "in time");
}

#[tokio::test]
async fn connections_that_never_send_a_request_make_way_too() {
    let daemon = limited_daemon().await;
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(UnixStream::connect(daemon.home.socket()).await.unwrap());
    }
    poll_until("a place among the connections", async || {
        let response = daemon.client().send(hyper::Method::GET, "/v1/sessions", None).await;
        response.is_ok_and(|response| response.status == 200).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_run_whose_worker_finds_no_descriptors_waits_and_starts_when_another_ends() {
    let daemon = limited_daemon().await;
    let mut busy = Vec::new();
    let (waiting, run) = loop {
        let session = daemon.session("script").await;
        let run = session.prompt_script(&[say("at work"), sleep_forever()]).await;
        let events = session
            .wait_for_event("the start or the queue", |event| {
                ["run.started", "run.queued"].contains(&event.kind.as_str())
            })
            .await;
        if events.kind == "run.queued" {
            assert_eq!(events.data["reason"], "capacity");
            break (session, run);
        }
        busy.push(session);
        assert!(busy.len() < 40, "the number of workers is limited");
    };
    busy[0].cancel().await;
    waiting.wait_for_run_event(&run, "text.delta").await;
    waiting.cancel().await;
    assert_eq!(waiting.wait(&run).await["finish_reason"], "cancelled");
}

#[tokio::test]
async fn a_daemon_without_any_descriptor_refuses_connections_and_recovers() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let before = session.prompt("before").await;
    session.wait(&before).await;
    let pid = Pid::from_raw(i32::try_from(daemon.pid()).unwrap());
    let limit = |files| {
        prlimit(pid, Resource::Nofile, Rlimit { current: Some(files), maximum: Some(1024) }).unwrap();
    };
    let take_all = || {
        let open = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap();
        let open: Vec<u64> =
            open.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
        limit((0..).find(|number| !open.contains(number)).unwrap());
    };
    take_all();
    for _ in 0..5 {
        poll_until("a refusal", async || {
            // On a busy machine the connection may be closed before the request is sent.
            let response = daemon.client().send(hyper::Method::GET, "/v1/sessions", None).await.ok()?;
            if response.status == 200 {
                // The daemon has closed one of its own files since.
                take_all();
                return None;
            }
            response.expect_refusal(429, "overloaded");
            Some(())
        })
        .await;
    }
    limit(1024);
    let prompt = hyper::body::Bytes::from(json!({ "prompt": "after", "session_id": session.id }).to_string());
    let after = poll_until("an accepted prompt", async || {
        let agent = session.workspace_path("/agent");
        let response = daemon.client().send(hyper::Method::POST, &agent, Some(prompt.clone())).await.ok()?;
        (response.status == 202).then(|| response.json()["run_id"].as_str().unwrap().to_owned())
    })
    .await;
    assert_eq!(session.wait(&after).await["finish_reason"], "end_turn");
}
