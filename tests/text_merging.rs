//! Old streamed text is merged by `qd gc`, and nothing that a client can read changes by it.

use qd_testkit::script::{say, say_times};
use qd_testkit::{TestDaemon, TestEvent, TestSession, TestWorkspace, poll_until};
use serde_json::Value;

/// Everything that clients read of two sessions.
#[derive(Debug, PartialEq)]
struct ClientView {
    stream: Vec<TestEvent>,
    text_after_a_cursor: Vec<TestEvent>,
    events: Vec<Vec<TestEvent>>,
    messages: Vec<Vec<Value>>,
    runs: Vec<Vec<Value>>,
}

async fn client_view(workspace: &TestWorkspace, sessions: &[TestSession], head: u64) -> ClientView {
    let (mut events, mut messages, mut runs) = (Vec::new(), Vec::new(), Vec::new());
    let until_head = |mut events: Vec<TestEvent>| {
        events.retain(|event| event.seq <= head);
        events
    };
    for session in sessions {
        events.push(until_head(session.events().await));
        messages.push(session.messages().await);
        runs.push(session.runs().await);
    }
    let middle = format!("?after={}", head / 2);
    let stream = workspace.stream("?after=0").await.until_seq(head).await;
    let text_after_a_cursor = workspace.stream(&middle).await.until_seq(head).await;
    ClientView { stream, text_after_a_cursor, events, messages, runs }
}

#[tokio::test]
async fn merged_text_reads_as_it_did_before_also_after_a_rebuild() {
    let mut daemon = TestDaemon::start_with_settings("merge_after_s = 1\n").await;
    let workspace = daemon.workspace().await;
    let sessions = [workspace.session("script").await, workspace.session("script").await];
    // The texts of the two sessions take turns, so their pieces are not neighbours in the journal.
    for round in 0..3 {
        let script = [say_times(&format!("piece of {round} "), 40, 1), say("end")];
        let runs = [sessions[0].prompt_script(&script).await, sessions[1].prompt_script(&script).await];
        sessions[0].wait(&runs[0]).await;
        sessions[1].wait(&runs[1]).await;
    }
    for session in &sessions {
        session.close().await;
        session.wait_for_event("the end", |event| event.kind == "session.closed").await;
    }
    // Only events that are in the index are merged, which they all are after a clean stop.
    daemon.terminate().await;
    daemon.start_again().await;
    let head =
        sessions[0].events().await.last().unwrap().seq.max(sessions[1].events().await.last().unwrap().seq);
    let before = client_view(&workspace, &sessions, head).await;
    let deltas = before.stream.iter().filter(|event| event.kind == "text.delta").count();
    assert!(deltas > 20, "{deltas}");
    let journal_file = daemon.home.path().join("journal.db");
    let count = |sql: &str| {
        let journal = rusqlite::Connection::open(&journal_file).unwrap();
        journal.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap()
    };
    // A message is merged once it is a second old, so the first call may find only some of them.
    poll_until("two merged messages", async || {
        let mergeable = daemon.qd(&["gc", "--json"]).await.json()["mergeable_events"].as_u64().unwrap();
        let shown = daemon.qd(&["gc", "--yes"]).await.ok();
        assert!(mergeable == 0 || shown.contains("would merge "), "{shown}");
        (count("SELECT count(*) FROM events WHERE parts IS NOT NULL") >= 2).then_some(())
    })
    .await;
    assert_eq!(client_view(&workspace, &sessions, head).await, before);
    daemon.terminate().await;
    let rows = count("SELECT count(*) FROM events WHERE kind = 'text.delta'");
    assert!(rows < deltas as i64, "{rows} rows of {deltas} events");
    daemon.qd(&["doctor", "--rebuild"]).await.ok();
    daemon.start_again().await;
    assert_eq!(client_view(&workspace, &sessions, head).await, before);
}
