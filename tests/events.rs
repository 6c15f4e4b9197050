//! The event streams: what a reader gets, from which position, and that readers do not affect each other.

use hyper::Method;
use qd_protocol::EventBody;
use qd_testkit::stream::TestStreamItem;
use qd_testkit::{TestDaemon, TestEvent, TestSession, journal_rules, script::*, within};
use serde_json::json;

/// All events from the beginning up to the end of `run`.
async fn everything(daemon: &TestDaemon, run: &str) -> Vec<TestEvent> {
    daemon.client().stream("/v1/events?after=0").await.until_run(run, "run.finished").await
}

/// A finished run with events of several kinds.
async fn finished_run(session: &TestSession) -> String {
    let run =
        session.run_script(&[think("hm"), say("a"), tool("Read", json!({}), "x"), cost(0.1), say("b")]).await;
    run["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_stream_says_ready_and_shows_whatever_is_accepted_after_it() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    for _ in 0..20 {
        let mut stream = session.client.stream("/v1/events").await.wait_until_ready().await;
        let receipt = session.try_prompt("hello").await.expect(202);
        let seen = stream.until_run(receipt["run_id"].as_str().unwrap(), "run.finished").await;
        assert_eq!(receipt["seq"], seen[0].seq, "the stream begins with what came after `: ready`");
    }
}

#[tokio::test]
async fn without_a_cursor_a_stream_begins_now() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    finished_run(&session).await;
    let mut stream = session.stream("").await;
    let next = session.prompt("x").await;
    assert_eq!(stream.next().await.run_id, Some(next));
}

#[tokio::test]
async fn a_replay_from_any_cursor_gives_everything_after_it_once() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = finished_run(&session).await;
    let all = everything(&daemon, &run).await;
    journal_rules::check_order(&all);
    for at in 0..all.len() {
        let path = format!("/v1/events?after={}", all[at].seq);
        if at + 1 < all.len() {
            let seen = daemon.client().stream(&path).await.until_run(&run, "run.finished").await;
            assert_eq!(seen, all[at + 1..]);
        } else {
            let mut stream = daemon.client().stream(&path).await.wait_until_ready().await;
            let next = session.prompt("x").await;
            assert_eq!(stream.next().await.run_id, Some(next), "nothing is left to replay");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replay_goes_over_into_live_without_gap_or_repeat() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say_times("word ", 400, 1)]).await;
    let mut readers = tokio::task::JoinSet::new();
    for _ in 0..40 {
        // Each reader attaches at a different moment of the run: when the previous reader has seen its first event.
        let (client, run) = (daemon.client(), run.clone());
        let mut stream = client.stream("/v1/events?after=0").await;
        let first = stream.next().await;
        readers.spawn(async move {
            let mut seen = vec![first];
            seen.extend(stream.until_run(&run, "run.finished").await);
            seen
        });
    }
    let all = everything(&daemon, &run).await;
    journal_rules::check(&all);
    assert_eq!(journal_rules::run_text(&all, &run), "word ".repeat(400));
    for seen in readers.join_all().await {
        assert_eq!(seen, all);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_breaks_off_and_comes_back_with_last_event_id_misses_nothing() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say_times("word ", 300, 1)]).await;
    let mut seen: Vec<TestEvent> = Vec::new();
    while !seen.last().is_some_and(|event| event.is_of_run(&run, "run.finished")) {
        let cursor = seen.last().map_or(0, |event| event.seq).to_string();
        let mut stream = daemon.client().with_header("last-event-id", &cursor).stream("/v1/events").await;
        for _ in 0..7 {
            seen.push(stream.next().await);
            if seen.last().is_some_and(|event| event.is_of_run(&run, "run.finished")) {
                break;
            }
        }
    }
    assert_eq!(seen, everything(&daemon, &run).await);
}

#[tokio::test]
async fn the_last_event_id_header_wins_over_after() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = finished_run(&session).await;
    let all = everything(&daemon, &run).await;
    let cursor = all[3].seq.to_string();
    let mut stream = daemon.client().with_header("last-event-id", &cursor).stream("/v1/events?after=0").await;
    assert_eq!(stream.next().await, all[4]);
}

#[tokio::test]
async fn a_cursor_ahead_of_the_journal_is_400_bad_cursor() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let last = session.events().await.last().unwrap().seq;
    for path in ["/v1/events", &session.workspace_path("/events")] {
        for cursor in [&(last + 1_000).to_string(), "9223372036854775807", "-1", "soon"] {
            daemon.client().get(&format!("{path}?after={cursor}")).await.expect_refusal(400, "bad_cursor");
            daemon
                .client()
                .with_header("last-event-id", cursor)
                .get(path)
                .await
                .expect_refusal(400, "bad_cursor");
        }
    }
    drop(daemon.client().stream(&format!("/v1/events?after={last}")).await.wait_until_ready().await);
}

#[tokio::test]
async fn a_stream_of_one_workspace_does_not_show_another() {
    let daemon = TestDaemon::start().await;
    let here = daemon.workspace().await;
    let there = daemon.client().workspace(std::path::Path::new("/usr")).await;
    let (mine, other) = (here.session("echo").await, there.session("echo").await);
    let mut stream = here.stream("?after=0").await;
    for session in [&other, &mine, &other, &mine] {
        let run = session.prompt("hello").await;
        session.wait(&run).await;
    }
    let last = mine.prompt("last").await;
    let seen = stream.until_run(&last, "run.finished").await;
    assert!(seen.iter().all(|event| event.workspace_id.as_deref() == Some(&here.id)), "{seen:?}");
    assert_eq!(seen[0].kind, "workspace.created");
    assert_eq!(seen.iter().filter(|event| event.kind == "run.finished").count(), 3);
    let mut of_all: Vec<_> = everything(&daemon, &last).await;
    journal_rules::check(&of_all);
    of_all.retain(|event| event.workspace_id.as_deref() == Some(&here.id));
    assert_eq!(seen, of_all);
}

#[tokio::test]
async fn session_and_kinds_filter() {
    let daemon = TestDaemon::start().await;
    let (one, two) = (daemon.session("script").await, daemon.session("script").await);
    finished_run(&two).await;
    let run = finished_run(&one).await;
    let all = everything(&daemon, &run).await;
    let last = all.last().unwrap();
    let filtered = async |query: &str| {
        let path = format!("/v1/events?after=0&{query}");
        daemon.client().stream(&path).await.until_run(&run, "run.finished").await
    };
    let of_one: Vec<_> = all.iter().filter(|e| e.session_id.as_deref() == Some(&one.id)).cloned().collect();
    assert_eq!(filtered(&format!("session={}", one.id)).await, of_one);
    let two_kinds = |event: &&TestEvent| ["run.finished", "text.delta"].contains(&event.kind.as_str());
    let expected: Vec<_> = all.iter().filter(two_kinds).cloned().collect();
    assert_eq!(filtered("kinds=run.finished,text.delta").await, expected);
    let both = filtered(&format!("kinds=run.finished&session={}", one.id)).await;
    assert_eq!(both, std::slice::from_ref(last));
    let mut live = one.stream("&kinds=run.finished").await;
    let next = finished_run(&one).await;
    assert!(live.next().await.is_of_run(&next, "run.finished"), "filters also apply to live events");
}

#[tokio::test]
async fn every_kind_is_known_and_workspace_and_session_events_bear_no_run_id() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    finished_run(&session).await;
    session.patch(json!({ "title": "renamed" })).await;
    session.run_with_answer(ask_bash("make"), json!({ "decision": "allow_once" })).await;
    daemon.client().post("/v1/halt", &json!({})).await.expect(200);
    daemon.client().delete("/v1/halt").await;
    session.run_script(&[fail("no")]).await;
    session.close().await;
    let mut stream = daemon.client().stream("/v1/events?after=0").await;
    let all = stream.until("session.closed", |event| event.kind == "session.closed").await;
    for event in &all {
        assert!(EventBody::KINDS.contains(&event.kind.as_str()), "{event:?}");
        assert!(event.data.is_object() && event.ts.ends_with('Z'), "{event:?}");
    }
    for kind in ["workspace.created", "session.created", "session.updated", "halt.set", "halt.lifted"] {
        let event = all.iter().find(|event| event.kind == kind).unwrap_or_else(|| panic!("no {kind}"));
        assert_eq!(event.run_id, None, "{event:?}");
    }
    journal_rules::check(&all);
}

#[tokio::test]
async fn a_frame_is_one_line_of_data_whatever_the_agent_says() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let nasty = "line\nline\r\n\n\ndata: {}\n\nid: 7\u{2028}\u{85}\0 ä😀";
    let run = session.run_script(&[say(nasty)]).await;
    assert_eq!(run["text"], nasty);
    // The testkit's reader rejects a frame with more than one line per field.
    let seen = everything(&daemon, run["id"].as_str().unwrap()).await;
    assert_eq!(journal_rules::run_text(&seen, run["id"].as_str().unwrap()), nasty);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_reader_gets_everything_and_delays_neither_the_agent_nor_another_reader() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let mut slow = daemon.client().stream("/v1/events?after=0").await;
    slow.next().await;
    // Far more than a socket buffer holds.
    let run = session.run_script(&[say_times(&"x".repeat(32 << 10), 300, 0)]).await;
    assert_eq!(run["finish_reason"], "end_turn");
    let id = run["id"].as_str().unwrap();
    let all = everything(&daemon, id).await;
    assert_eq!(journal_rules::run_text(&all, id).len(), 300 * (32 << 10));
    let seen = slow.until_run(id, "run.finished").await;
    assert_eq!(seen, all[1..]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_number_of_readers_may_attach_and_leave() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let mut readers = tokio::task::JoinSet::new();
    let mut leaving = Vec::new();
    for _ in 0..100 {
        let mut stream = session.stream("").await;
        leaving.push(session.stream("").await);
        readers.spawn(async move { stream.until("the end", |event| event.kind == "run.finished").await });
    }
    let run = session.prompt_script(&[say_times("word ", 50, 2)]).await;
    session.wait_for_start(&run).await;
    leaving.clear();
    let seen = readers.join_all().await;
    let of_the_run: Vec<_> =
        seen[0].iter().filter(|event| event.run_id.as_ref() == Some(&run)).cloned().collect();
    assert_eq!(of_the_run, session.events_of(&run).await);
    assert!(seen.windows(2).all(|pair| pair[0] == pair[1]));
}

#[tokio::test]
async fn a_comment_comes_after_15_s_of_silence() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let mut stream = session.stream("").await;
    let item = within("a comment", stream.next_item()).await.unwrap();
    assert!(matches!(item, Some(TestStreamItem::Comment(_))), "{item:?}");
}

#[tokio::test]
async fn a_stream_of_what_does_not_exist_is_404() {
    let daemon = TestDaemon::start().await;
    daemon.client().get("/v1/workspaces/ws_nobody/events").await.expect_refusal(404, "not_found");
    assert_eq!(daemon.client().status(Method::GET, "/v1/events", None).await, 200);
}

#[tokio::test]
async fn the_events_of_a_session_come_in_pages_too() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = finished_run(&session).await;
    let streamed = session.stream("&after=0").await.until_run(&run, "run.finished").await;
    assert_eq!(session.events().await, streamed, "the page and the stream show the same");
    let page = session.client.get(&session.path("/events?after=0&limit=3")).await.expect(200);
    let seqs: Vec<_> =
        page["events"].as_array().unwrap().iter().map(|event| event["seq"].as_u64().unwrap()).collect();
    assert_eq!(seqs, streamed[..3].iter().map(|event| event.seq).collect::<Vec<_>>());
    assert_eq!(page["next_after"], seqs[2]);
    let last = streamed.last().unwrap().seq;
    let rest = session.client.get(&session.path(&format!("/events?after={last}"))).await.expect(200);
    assert_eq!(rest["events"], json!([]));
}
