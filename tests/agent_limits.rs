//! What one agent or one address may use: asks, text, processes, connections. Beyond it others go on undisturbed, nothing
//! is lost, and an event says what happened.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};

use qd_testkit::{TestDaemon, journal_rules, poll_until, script::*, within};
use rustix::process::{Resource, getrlimit};
use serde_json::json;
use tokio::net::TcpSocket;

const ASKS: usize = 300;
const ASKS_OPEN_MAX: usize = 100;

#[tokio::test]
async fn asks_beyond_the_limit_wait_and_all_are_answered() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[ask_at_once("Bash", ASKS)]).await;
    let client = daemon.client();
    let open = poll_until("as many open asks as may be", async || {
        let open = client.pending_asks().await;
        assert!(open.len() <= ASKS_OPEN_MAX, "{} are open", open.len());
        (open.len() == ASKS_OPEN_MAX).then_some(open)
    })
    .await;
    let notice = session.wait_for_event("the notice", |event| event.data["limit"] == "ASKS_OPEN_MAX").await;
    assert_eq!(notice.kind, "notice.shown");

    // The worker holds the others, also while there is no daemon.
    daemon.restart().await;
    let client = daemon.client();
    let session = session.with_client(client.clone());
    assert_eq!(client.pending_asks().await.len(), open.len());

    let mut answered = 0;
    while answered < ASKS {
        let open = poll_until("the next asks", async || {
            let open = client.pending_asks().await;
            assert!(open.len() <= ASKS_OPEN_MAX, "{} are open", open.len());
            (!open.is_empty()).then_some(open)
        })
        .await;
        for ask in open {
            let id = ask["id"].as_str().unwrap();
            client.answer_ask(id, &json!({ "decision": "allow_once" })).await.expect(200);
            answered += 1;
        }
    }
    assert_eq!(session.wait(&run).await["text"], format!("{ASKS} allowed, 0 denied"));
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_cancel_withdraws_the_asks_that_are_open_and_those_that_wait() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[ask_at_once("Bash", ASKS)]).await;
    session.wait_for_event("the notice", |event| event.data["limit"] == "ASKS_OPEN_MAX").await;
    session.cancel().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    let events = session.events().await;
    let count = |kind: &str| events.iter().filter(|event| event.kind == kind).count();
    assert_eq!(count("ask.opened"), count("ask.resolved"));
    assert_eq!(daemon.client().pending_asks().await, Vec::<serde_json::Value>::new());
    journal_rules::check(&events);
    assert_eq!(session.run_script(&[say("as before")]).await["text"], "as before");
}

#[tokio::test]
async fn a_flood_of_text_is_slowed_and_complete() {
    let daemon = TestDaemon::start_with_settings("max_output_mb_per_min = 6").await;
    let session = daemon.session("script").await;
    // A minute's worth passes at once; the rest takes a few seconds.
    let line = "0123456789abcdef".repeat(4096);
    session.run_script(&[say_times(&line, 100, 0)]).await;
    let events = session.events().await;
    let deltas: String = events
        .iter()
        .filter(|event| event.kind == "text.delta")
        .map(|event| event.data["text"].as_str().unwrap())
        .collect();
    assert!(deltas == line.repeat(100), "{} bytes came", deltas.len());
    let notices = events.iter().filter(|event| event.data["limit"] == "AGENT_OUTPUT_MB_PER_MIN").count();
    assert_eq!(notices, 1);
    journal_rules::check(&events);
}

#[tokio::test]
async fn a_session_that_has_said_as_much_as_it_may_takes_no_prompts_until_it_may_say_more() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let session = workspace.session_with(json!({ "agent": "script", "max_journal_mb": 1 })).await;
    let line = "0123456789abcdef".repeat(4096);
    let flood = [say_times(&line, 1000, 0), sleep_forever()];
    let run = session.prompt_script(&flood).await;
    let ended = session.wait(&run).await;
    assert_eq!(
        (&ended["finish_reason"], &ended["error"]["code"]),
        (&json!("error"), &json!("journal_limit"))
    );
    session.try_prompt("[]").await.expect_refusal(409, "journal_limit");
    session.patch(json!({ "max_journal_mb": 64 })).await;
    assert_eq!(session.run_script(&[say("as before")]).await["text"], "as before");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_turn_that_starts_too_many_processes_is_ended_with_all_of_them() {
    let daemon = TestDaemon::start_with_settings("max_processes = 50").await;
    let session = daemon.session("script").await;
    let many = "for i in $(seq 200); do sleep 1000 & done; wait";
    let run = session.prompt_script(&[spawn(&["sh", "-c", many]), sleep_forever()]).await;
    let ended = session.wait(&run).await;
    assert_eq!(
        (&ended["finish_reason"], &ended["error"]["code"]),
        (&json!("error"), &json!("process_limit"))
    );
    let processes = &session.wait_for_run_event(&run, "run.finished").await.data["processes"];
    assert!(processes["killed"].as_u64().is_some_and(|killed| killed > 50), "{processes}");
    assert_eq!(processes["survivors"], 0);
    assert_eq!(session.run_script(&[say("as before")]).await["text"], "as before");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_turn_that_uses_too_much_memory_is_ended() {
    let daemon = TestDaemon::start_with_settings("max_memory_mb = 200").await;
    let session = daemon.session("script").await;
    let hungry = "x=$(head -c 300000000 /dev/zero | tr '\\0' x); sleep 1000";
    let run = session.prompt_script(&[spawn(&["bash", "-c", hungry]), sleep_forever()]).await;
    let ended = session.wait(&run).await;
    assert_eq!((&ended["finish_reason"], &ended["error"]["code"]), (&json!("error"), &json!("memory_limit")));
}

#[tokio::test]
async fn half_open_connections_from_one_address_lock_out_nobody() {
    let daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let listening = daemon.listening().iter().find_map(|line| line.strip_prefix("listening on http://"));
    let address: SocketAddr = listening.unwrap().parse().unwrap();
    // All are held at once, as far as this process may open so many.
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let held_max = usize::try_from(files).unwrap_or(usize::MAX).saturating_sub(100);
    let mut half_open = VecDeque::new();
    for _ in 0..5000 {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((Ipv4Addr::new(127, 0, 0, 2), 0).into()).unwrap();
        half_open.extend(within("a connection", socket.connect(address)).await.ok());
        if half_open.len() > held_max {
            half_open.pop_front();
        }
    }
    daemon.tcp().get("/v1/sessions").await.expect(200);
    let mut stream = daemon.tcp().stream("/v1/events").await;
    let session = daemon.session("script").await;
    assert_eq!(session.run_script(&[say("undisturbed")]).await["text"], "undisturbed");
    stream.until("the end of a run", |event| event.kind == "run.finished").await;
    drop(half_open);
}
