//! Content over 1 MiB is stored as a file named by its hash; the event has the first part, the size and the hash.

use qd_testkit::{TestDaemon, TestEvent, base64, journal_rules, script::*, sha256};
use serde_json::{Value, json};

/// Checks the truncated text and the stored file of a large text against the whole.
async fn check_blob(daemon: &TestDaemon, head: &Value, blob: &Value, whole: &[u8]) {
    assert_eq!((&blob["sha256"], &blob["size"]), (&json!(sha256(whole)), &json!(whole.len())), "{blob}");
    if let Some(head) = head.as_str() {
        assert!(
            !head.is_empty() && whole.starts_with(head.as_bytes()),
            "the event has the start of the text"
        );
        assert!(head.len() < 1 << 20);
    }
    let served = daemon.client().get(&format!("/v1/blobs/{}", blob["sha256"].as_str().unwrap())).await;
    assert_eq!(served.status, 200);
    assert!(served.body == whole, "the whole content is served");
    let hash = sha256(whole);
    let named = daemon.home.files().into_iter().find(|(path, _)| {
        path.file_name().is_some_and(|name| hash.ends_with(name.to_str().unwrap_or_default()))
    });
    assert!(named.is_some_and(|(_, content)| content == whole), "a file of the home is named by the hash");
}

fn all_small(events: &[TestEvent]) {
    for event in events {
        assert!(event.data.to_string().len() <= 1 << 20, "{} is over 1 MiB", event.kind);
    }
}

#[tokio::test]
async fn a_prompt_over_1_mib_is_kept_as_a_file_and_reaches_the_agent_whole() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let long = "long prompt ".repeat(150_000);
    let prompt = steps(&[sleep(300), write("got.txt", &long), say("ok")]);
    let run = session.prompt(&prompt).await;
    let accepted = session.wait_for_run_event(&run, "run.accepted").await;
    check_blob(&daemon, &accepted.data["prompt"], &accepted.data["blob"], prompt.as_bytes()).await;
    assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
    assert_eq!(std::fs::read_to_string(daemon.home.project_dir().join("got.txt")).unwrap(), long);
    let again = session.try_prompt_as(&run, &prompt).await.expect(202);
    assert_eq!(again["run_id"], run, "a repeated long prompt is recognized");
    session.try_prompt_as(&run, &(prompt.clone() + " ")).await.expect_refusal(409, "run_id_conflict");
    all_small(&session.events().await);
    daemon.restart().await;
    check_blob(&daemon, &json!(null), &accepted.data["blob"], prompt.as_bytes()).await;
}

#[tokio::test]
async fn a_prompt_just_under_the_limit_and_full_of_escapes_is_whole_too() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let prompt = "\u{1}\"\\\n".repeat(200_000);
    let run = session.prompt(&prompt).await;
    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "end_turn");
    let events = session.events().await;
    all_small(&events);
    journal_rules::check(&events);
    let text = journal_rules::run_text(&events, &run);
    assert_eq!(text.trim_end(), prompt.trim_end());
}

#[tokio::test]
async fn an_attachment_over_1_mib_is_kept_as_a_file_and_a_small_one_is_not() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let content: Vec<u8> = (0..2_000_000_u32).map(|n| n.to_le_bytes()[1]).collect();
    let file =
        |name: &str, content: &[u8]| json!({ "name": name, "mime": "image/png", "data": base64(content) });
    let body =
        json!({ "prompt": "look", "attachments": [file("big.png", &content), file("small.png", b"tiny")] });
    let receipt = session.post_run(&body).await.expect(202);
    let run = receipt["run_id"].as_str().unwrap();
    let message = session.wait_for_run_event(run, "message.created").await;
    let files: Vec<_> =
        message.data["parts"].as_array().unwrap().iter().filter(|part| part["type"] == "file").collect();
    assert_eq!(files.len(), 2, "{message:?}");
    let text = message.data.to_string();
    assert!(text.contains("big.png") && text.contains(&sha256(&content)) && text.len() < 1 << 20, "{text}");
    check_blob(
        &daemon,
        &json!(null),
        &json!({ "sha256": sha256(&content), "size": content.len() }),
        &content,
    )
    .await;
    assert_eq!(session.wait(run).await["finish_reason"], "end_turn");
    all_small(&session.events().await);
}

#[tokio::test]
async fn an_attachment_that_is_not_base64_is_refused() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let body = json!({ "prompt": "x", "attachments": [{ "name": "a", "mime": "text/plain", "data": "no base64!" }] });
    let answer = session.post_run(&body).await;
    assert_eq!(answer.status, 400, "{answer}");
    assert!(session.runs().await.is_empty());
}

#[tokio::test]
async fn a_text_over_1_mib_comes_whole_in_pieces_and_its_run_names_the_file() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let piece = "some text, ".repeat(20_000);
    let run = session.prompt_script(&[say_times(&piece, 10, 0)]).await;
    session.wait(&run).await;
    let whole = piece.repeat(10);
    let events = session.events().await;
    all_small(&events);
    assert!(journal_rules::run_text(&events, &run) == whole, "the pieces are the text");
    let finished = events.iter().find(|event| event.is_of_run(&run, "run.finished")).unwrap();
    check_blob(&daemon, &finished.data["text"], &finished.data["blob"], whole.as_bytes()).await;
}

#[tokio::test]
async fn a_tool_output_over_1_mib_is_cut_with_a_note_or_kept_as_a_file() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let output = "line of output\n".repeat(150_000);
    let run = session.run_script(&[tool("Bash", json!({ "command": "yes" }), &output), say("ok")]).await;
    assert_eq!((&run["finish_reason"], &run["text"]), (&json!("end_turn"), &json!("ok")));
    let events = session.events().await;
    all_small(&events);
    let finished = events.iter().find(|event| event.kind == "tool.finished").unwrap();
    let size = output.len().to_string();
    assert!(finished.data.to_string().contains(&size), "the size is noted");
}

#[tokio::test]
async fn a_blob_that_nobody_kept_is_404() {
    let daemon = TestDaemon::start().await;
    daemon.client().get(&format!("/v1/blobs/{}", "0".repeat(64))).await.expect_refusal(404, "not_found");
    let answer = daemon.client().get("/v1/blobs/..%2f..%2ftoken").await;
    assert!(matches!(answer.status, 400 | 404), "{answer}");
}
