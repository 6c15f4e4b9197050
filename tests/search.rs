//! `qd search`: what is found, in which order and pages, and that the index follows the journal through purges, kills,
//! damage and rebuilds.

use std::collections::BTreeSet;
use std::io::{Seek, SeekFrom, Write};

use hyper::Method;
use qd_testkit::mcp::session_token;
use qd_testkit::script::{late, say, say_times, sleep, tool};
use qd_testkit::{TestClient, TestDaemon, TestHome, TestSession, poll_until};
use serde_json::{Value, json};

/// The file that holds the index.
const INDEX: &str = "derived.db";

/// Searches over HTTP until the answer is complete: on a busy machine, the index may take longer than a request waits.
async fn search(client: &TestClient, query: &str) -> Value {
    let page = poll_until("a complete search", async || {
        let page = client.get(&format!("/v1/search?{query}")).await.expect(200);
        (page["complete"] == true).then_some(page)
    })
    .await;
    assert!(page["index"]["indexed_seq"].as_u64() >= page["index"]["journal_seq"].as_u64(), "{page}");
    page
}

/// The kinds and runs of the hits.
fn places(page: &Value) -> Vec<(String, String)> {
    let text = |hit: &Value, field: &str| hit[field].as_str().unwrap_or_default().to_owned();
    let hits = page["hits"].as_array().unwrap().iter();
    hits.map(|hit| (text(hit, "kind"), text(hit, "run_id"))).collect()
}

fn kinds(page: &Value) -> Vec<String> {
    places(page).into_iter().map(|(kind, _)| kind).collect()
}

/// The text that is marked in a hit.
fn marked(hit: &Value) -> Vec<&str> {
    let parts = hit["snippet"].as_array().unwrap().iter();
    parts.filter(|part| part["match"] == true).map(|part| part["text"].as_str().unwrap()).collect()
}

/// Purges a session, and waits until it is gone.
async fn purge(daemon: &TestDaemon, session: &TestSession) {
    daemon.qd(&["rm", "--purge", &session.id]).await.ok();
    let client = daemon.client();
    let is_gone = async || (client.get(&session.path("")).await.status == 404).then_some(());
    poll_until("the end of the session", is_gone).await;
}

#[tokio::test]
async fn prompts_answers_tools_and_changed_paths_are_found_newest_first_with_the_command_that_opens_them() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let session = workspace.session_with(json!({ "agent": "script", "title": "nightly" })).await;
    let write = tool("Write", json!({ "file_path": "src/walrus.rs", "content": "x" }), "done");
    let bash = tool("Bash", json!({ "command": "cargo test walrus" }), "ok");
    let script = [say("the wal"), say("rus "), write, bash, say("is grey")];
    let run = session.prompt_script(&script).await;
    session.wait(&run).await;
    let client = daemon.client();
    let page = search(&client, "q=walrus").await;
    // The prompt of this agent holds the steps, so it has the word too.
    assert_eq!(kinds(&page), ["answer", "tool", "path", "tool", "prompt"], "{page}");
    for hit in page["hits"].as_array().unwrap() {
        assert_eq!(hit["session_id"], json!(session.id));
        assert_eq!((&hit["title"], &hit["agent"]), (&json!("nightly"), &json!("script")));
        assert_eq!(hit["run_id"], json!(run));
        assert_eq!(hit["open"], json!(format!("qd logs {run}")));
        assert!(marked(hit).iter().all(|text| *text == "walrus"), "{hit}");
    }
    assert_eq!(
        kinds(&search(&client, "q=%22walrus+is+grey%22").await),
        ["answer"],
        "its pieces are one text"
    );
    let opened = daemon.qd(&["logs", &run]).await.ok();
    assert!(opened.contains("is grey"), "{opened}");
    let other = session.prompt_script(&[say("another walrus")]).await;
    session.wait(&other).await;
    assert_eq!(places(&search(&client, "q=walrus&limit=1").await), [("answer".to_owned(), other)]);
}

#[tokio::test]
async fn the_command_line_shows_hits_and_prints_what_the_route_answers() {
    let daemon = TestDaemon::start().await;
    let session =
        daemon.workspace().await.session_with(json!({ "agent": "echo", "title": "greeting" })).await;
    let run = session.prompt("hello brave new world").await;
    session.wait(&run).await;
    search(&daemon.client(), "q=brave").await;
    let shown = daemon.qd(&["search", "brave", "world"]).await.ok();
    assert!(shown.contains(&session.id) && shown.contains("greeting"), "{shown}");
    assert!(shown.contains("hello «brave» new «world»"), "{shown}");
    assert!(shown.contains(&format!("qd logs {run}")), "{shown}");
    assert!(
        daemon.qd(&["search", "new brave"]).await.ok().is_empty(),
        "an argument of two words is a phrase"
    );
    let printed = daemon.qd(&["search", "--json", "brave new"]).await.json();
    assert_eq!(printed, search(&daemon.client(), "q=%22brave+new%22&limit=20").await);
    let one = daemon.qd(&["search", "brave", "-n", "1", "--json"]).await.json();
    let before = one["next_before"].as_str().unwrap();
    let next = daemon.qd(&["search", "brave", "--before", before, "--json"]).await.json();
    assert_eq!(kinds(&next), ["prompt"]);
    for bad in [&["search"][..], &["search", "x", "--since", "soon"], &["search", "x", "-n", "0"]] {
        daemon.qd(bad).await.expect_exit(2);
    }
    daemon.qd(&["search", "***"]).await.expect_exit(1);
}

#[tokio::test]
async fn filters_select_by_agent_and_time() {
    let daemon = TestDaemon::start().await;
    let (echo, script) = (daemon.session("echo").await, daemon.session("script").await);
    let run = echo.prompt("marmot").await;
    echo.wait(&run).await;
    script.run_script(&[say("marmot")]).await;
    let client = daemon.client();
    let agents = async |query: &str| -> BTreeSet<String> {
        let page = search(&client, query).await;
        page["hits"].as_array().unwrap().iter().map(|hit| hit["agent"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(agents("q=marmot").await.len(), 2);
    assert_eq!(agents("q=marmot&agent=echo").await, BTreeSet::from(["echo".to_owned()]));
    assert!(agents("q=marmot&agent=nobody").await.is_empty());
    assert_eq!(agents("q=marmot&since=2026-01-01T00:00:00Z").await.len(), 2);
    assert!(agents("q=marmot&since=2999-01-01T00:00:00Z").await.is_empty());
    assert!(!daemon.qd(&["search", "marmot", "--since", "1h", "--agent", "echo"]).await.ok().is_empty());
}

#[tokio::test]
async fn hostile_queries_are_no_errors_and_bad_ones_say_what_to_do() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let run = session.prompt("a needle, or not").await;
    session.wait(&run).await;
    let client = daemon.client();
    for text in [
        "a%20AND",
        "NOT%20a",
        "%22a",
        "a%22%22b",
        "(a",
        "NEAR(a",
        "text:a",
        "a*b*",
        "^a",
        "-a",
        "a%00b",
        "%02a%03",
        "a';DROP%20TABLE%20entries;--",
        "a%5C",
        "%F0%9F%A6%80%20a",
        "%7Btext%7D:a",
        "a%20%2B%20b",
    ] {
        search(&client, &format!("q={text}")).await;
    }
    for (query, code) in [
        ("q=", "invalid_value"),
        ("q=***", "invalid_value"),
        ("", "invalid_value"),
        ("q=a&limit=0", "invalid_value"),
        ("q=a&limit=1001", "invalid_value"),
        ("q=a&since=yesterday", "invalid_value"),
        ("q=a&what=b", "invalid_value"),
        ("q=a&before=x", "bad_cursor"),
        ("q=a&before=-1", "bad_cursor"),
    ] {
        client.get(&format!("/v1/search?{query}")).await.expect_refusal(400, code);
    }
    let long = "x".repeat(1001);
    client.get(&format!("/v1/search?q={long}")).await.expect_refusal(400, "invalid_value");
    assert_eq!(search(&client, "q=needle").await["hits"].as_array().unwrap().len(), 2, "nothing was harmed");
}

#[tokio::test]
async fn pages_are_exact_while_sessions_write() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    for n in 0..12 {
        let run = session.prompt(&format!("needle {n}")).await;
        session.wait(&run).await;
    }
    let client = daemon.client();
    let whole = search(&client, "q=needle").await;
    let whole: Vec<Value> = whole["hits"].as_array().unwrap().clone();
    assert_eq!(whole.len(), 24);
    let (mut seen, mut before) = (Vec::new(), String::new());
    loop {
        let page = search(&client, &format!("q=needle&limit=5{before}")).await;
        seen.extend(page["hits"].as_array().unwrap().iter().cloned());
        let run = session.prompt("needle again").await;
        session.wait(&run).await;
        match page["next_before"].as_str() {
            Some(next) => before = format!("&before={next}"),
            None => break,
        }
    }
    assert_eq!(seen, whole);
}

#[tokio::test]
async fn purging_a_session_removes_it_at_once_and_for_good() {
    let mut daemon = TestDaemon::start().await;
    let (kept, purged) = (daemon.session("echo").await, daemon.session("echo").await);
    for session in [&kept, &purged] {
        let run = session.prompt("platypus").await;
        session.wait(&run).await;
    }
    let client = daemon.client();
    assert_eq!(search(&client, "q=platypus").await["hits"].as_array().unwrap().len(), 4);
    purge(&daemon, &purged).await;
    let check = async |client: TestClient| {
        let page = search(&client, "q=platypus").await;
        let hits = page["hits"].as_array().unwrap();
        assert_eq!(hits.len(), 2, "{page}");
        assert!(hits.iter().all(|hit| hit["session_id"] == json!(kept.id)), "{page}");
    };
    check(daemon.client()).await;
    daemon.terminate().await;
    daemon.start_again().await;
    check(daemon.client()).await;
}

#[tokio::test]
async fn a_purge_that_the_index_missed_is_made_up_for_at_the_next_start() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let run = session.prompt("platypus").await;
    session.wait(&run).await;
    search(&daemon.client(), "q=platypus").await;
    daemon.terminate().await;
    let index = daemon.home.path().join(INDEX);
    let old_index = std::fs::read(&index).unwrap();
    daemon.start_again().await;
    purge(&daemon, &session).await;
    daemon.terminate().await;
    // As if the daemon had been killed between the purge and its removal from the index.
    std::fs::write(&index, old_index).unwrap();
    daemon.start_again().await;
    let page = search(&daemon.client(), "q=platypus").await;
    assert_eq!(page["hits"], json!([]));
}

#[tokio::test]
async fn kills_in_the_middle_of_indexing_leave_no_gap_and_nothing_twice() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let mut runs = Vec::new();
    for n in 0..6 {
        let script = [say(&format!("heron{n} ")), say_times("stands ", 20, 1), say("still"), sleep(5)];
        runs.push(session.prompt_script(&script).await);
        // The search makes the index work at the moment of the kill.
        let client = daemon.client();
        let searching =
            tokio::spawn(async move { client.send(Method::GET, "/v1/search?q=heron*", None).await });
        // The run ends at any moment between its first text and its last.
        session.wait_for_run_event(runs.last().unwrap(), "text.delta").await;
        daemon.restart().await;
        // Whether it was answered depends on the moment.
        let _answered = searching.await;
    }
    for run in &runs {
        session.wait(run).await;
    }
    let client = daemon.client();
    for (n, run) in runs.iter().enumerate() {
        let page = search(&client, &format!("q=heron{n}")).await;
        let expected = [("answer".to_owned(), run.clone()), ("prompt".to_owned(), run.clone())];
        assert_eq!(places(&page), expected, "{page}");
    }
    let before = search(&client, "q=heron*").await;
    daemon.qd(&["search", "--rebuild"]).await.ok();
    assert_eq!(search(&client, "q=heron*").await["hits"], before["hits"], "a rebuild gives the same");
}

#[tokio::test]
async fn a_missing_or_damaged_index_is_built_anew_by_itself() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_script(&[say("the otter swims"), late("otter again")]).await;
    session.wait_for_event("late text", |event| event.data["after_run"].is_string()).await;
    let before = search(&daemon.client(), "q=otter").await;
    assert_eq!(kinds(&before), ["answer", "answer", "prompt"], "{before}");
    let index = daemon.home.path().join(INDEX);
    for damage in ["missing", "text", "empty", "zeroed"] {
        daemon.terminate().await;
        let mut bytes = std::fs::read(&index).unwrap();
        match damage {
            "missing" => std::fs::remove_file(&index).unwrap(),
            "text" => std::fs::write(&index, "not a database").unwrap(),
            "empty" => std::fs::write(&index, "").unwrap(),
            _ => {
                // All but the header and the first page.
                bytes[4096..].fill(0);
                std::fs::write(&index, bytes).unwrap();
            }
        }
        daemon.start_again().await;
        assert_eq!(search(&daemon.client(), "q=otter").await["hits"], before["hits"], "{damage}");
    }
    let printed = daemon.qd(&["search", "--rebuild"]).await.ok();
    assert!(
        printed.contains("the index is rebuilt: ") || printed.contains("is being rebuilt: "),
        "{printed}"
    );
    assert_eq!(search(&daemon.client(), "q=otter").await["hits"], before["hits"]);
    daemon.terminate().await;
    daemon.qd(&["doctor", "--rebuild"]).await.ok();
    daemon.start_again().await;
    assert_eq!(search(&daemon.client(), "q=otter").await["hits"], before["hits"]);
}

#[tokio::test]
async fn an_index_that_is_damaged_under_a_running_daemon_is_built_anew() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let client = daemon.client();
    let index = daemon.home.path().join(INDEX);
    for round in 1..=4 {
        let run = session.prompt(&format!("lapwing {round}")).await;
        session.wait(&run).await;
        let page = search(&client, "q=lapwing").await;
        assert_eq!(page["hits"].as_array().unwrap().len(), 2 * round, "{page}");
        let length = std::fs::metadata(&index).unwrap().len();
        let mut file = std::fs::OpenOptions::new().write(true).open(&index).unwrap();
        file.seek(SeekFrom::Start(4096)).unwrap();
        file.write_all(&vec![0; usize::try_from(length.saturating_sub(4096)).unwrap()]).unwrap();
    }
}

#[tokio::test]
async fn without_an_index_searches_are_refused_with_a_reason_and_all_else_works() {
    let home = TestHome::new();
    let index = home.path().join(INDEX);
    std::fs::create_dir_all(index.join("in_the_way")).unwrap();
    let daemon = TestDaemon::start_in(home, |_| {}).await;
    let session = daemon.session("echo").await;
    let run = session.prompt("avocet").await;
    assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
    let client = daemon.client();
    client.get("/v1/search?q=avocet").await.expect_refusal(503, "storage_failed");
    std::fs::remove_dir_all(&index).unwrap();
    let found = poll_until("the next attempt", async || {
        let response = client.get("/v1/search?q=avocet").await;
        (response.status == 200 && response.json()["complete"] == true).then(|| response.json())
    });
    assert_eq!(kinds(&found.await), ["answer", "prompt"]);
}

#[tokio::test]
async fn the_token_of_a_session_opens_neither_search_nor_usage() {
    let daemon = TestDaemon::start_with(|options| {
        options.tcp();
    })
    .await;
    let session = daemon.session("script").await;
    session.run_script(&[say("secret of another")]).await;
    let token = session_token(&daemon.home, &session.id);
    for client in [daemon.client().with_token(&token), daemon.tcp_without_token().with_token(&token)] {
        for path in ["/v1/search?q=secret", "/v1/usage"] {
            client.get(path).await.expect_refusal(403, "agent_not_allowed");
        }
        client.post_empty("/v1/search/rebuild").await.expect_refusal(403, "agent_not_allowed");
    }
    daemon.tcp_without_token().get("/v1/search?q=secret").await.expect_refusal(401, "unauthorized");
    assert_eq!(kinds(&search(&daemon.tcp(), "q=secret").await), ["answer", "prompt"]);
}

#[tokio::test]
async fn a_long_journal_is_searched_as_a_whole() {
    let daemon = TestDaemon::start().await;
    let sessions = [daemon.session("script").await, daemon.session("script").await];
    for round in 0..3 {
        let script =
            [say(&format!("begin{round} ")), say_times("gannet ", 2000, 0), say(&format!("end{round}"))];
        let runs = [sessions[0].prompt_script(&script).await, sessions[1].prompt_script(&script).await];
        sessions[0].wait(&runs[0]).await;
        sessions[1].wait(&runs[1]).await;
    }
    let client = daemon.client();
    for round in 0..3 {
        let page = search(&client, &format!("q=begin{round}+gannet+end{round}")).await;
        assert_eq!(kinds(&page).iter().filter(|kind| *kind == "answer").count(), 2, "{page}");
    }
    assert_eq!(kinds(&search(&client, "q=gannet").await).len(), 12);
}
