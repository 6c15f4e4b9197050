//! A value of `env` reaches only the agent. However the agent repeats it, it appears in no file of the home, no event
//! and no command line; a placeholder replaces it.

use std::os::unix::fs::PermissionsExt;

use qd_testkit::{TestDaemon, base64, poll_until, processes, script::*};
use serde_json::{Value, json};

const CANARY: &str = "s3cr3t-c4n4ry-7f2e9a/+=";
const MARK: &str = "[API_KEY redacted]";

/// The prompt for these steps, with the canary written as JSON escapes, so a plain text search does not find it.
fn escaped_prompt(script: &[Value]) -> String {
    let hide = |word: &str| word.chars().map(|c| format!("\\u{:04x}", u32::from(c))).collect::<String>();
    let encoded = base64(CANARY.as_bytes());
    steps(script).replace(CANARY, &hide(CANARY)).replace(&encoded, &hide(&encoded))
}

fn contains_bytes(content: &[u8], word: &str) -> bool {
    content.windows(word.len()).any(|window| window == word.as_bytes())
}

/// Checks that neither the daemon's files nor any command line contains the secret.
#[track_caller]
fn assert_not_leaked(daemon: &TestDaemon) {
    let encoded = base64(CANARY.as_bytes());
    for (path, content) in daemon.home.files() {
        let kept_apart = path.starts_with(daemon.home.path().join("secrets"));
        if kept_apart {
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{}", path.display());
            continue;
        }
        assert!(!contains_bytes(&content, CANARY), "{} holds it", path.display());
        assert!(
            !contains_bytes(&content, encoded.trim_end_matches('=')),
            "{} holds it in base64",
            path.display()
        );
    }
    for process in processes::all_processes() {
        assert!(!process.args.iter().any(|arg| arg.contains(CANARY)), "{process:?}");
    }
}

#[tokio::test]
async fn a_secret_that_the_agent_repeats_is_kept_nowhere() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "env": { "API_KEY": CANARY } })).await;
    let leak = session.run_script(&[spawn(&["sh", "-c", "printf %s \"$API_KEY\" >leak"])]).await;
    assert_eq!(leak["finish_reason"], "end_turn");
    let leaked = poll_until("the agent to know it", async || {
        std::fs::read_to_string(daemon.home.project_dir().join("leak")).ok().filter(|text| !text.is_empty())
    });
    assert_eq!(leaked.await, CANARY);

    let (head, tail) = CANARY.split_at(9);
    let encoded = base64(CANARY.as_bytes());
    let (encoded_head, encoded_tail) = encoded.split_at(13);
    let script = [
        say(&format!("plain {CANARY} ")),
        say(head),
        say(tail),
        say(" read "),
        read("leak"),
        say(" encoded "),
        say(encoded_head),
        say(encoded_tail),
        say(" end"),
        think(CANARY),
        tool("Bash", json!({ "command": format!("echo {CANARY}") }), CANARY),
        tool("Bash", json!({ CANARY: [CANARY] }), &encoded),
        plan(CANARY, "pending"),
        question(&format!("is it {CANARY}?"), &["yes", "no"]),
        fail(CANARY),
    ];
    let run = session.prompt(&escaped_prompt(&script)).await;
    let ask = session.wait_for_ask(&run).await;
    assert_not_leaked(&daemon);
    let open = daemon.client().get(&format!("/v1/asks/{ask}")).await.expect(200);
    assert!(!open.to_string().contains(CANARY) && open["prompt"].as_str().unwrap().contains(MARK), "{open}");
    daemon.client().answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "error");
    assert!(ended["error"]["message"].as_str().unwrap().contains(MARK), "{ended}");
    let expected = format!("plain {MARK} {MARK} read {MARK} encoded {MARK} end");
    assert!(ended["text"].as_str().unwrap().starts_with(&expected), "{ended}");
    let events = serde_json::to_string(&session.messages().await).unwrap();
    assert!(!events.contains(CANARY));
    assert!(session.events().await.iter().all(|event| !event.data.to_string().contains(CANARY)));
    assert_eq!(session.show().await["env"], json!(["API_KEY"]));
    assert_not_leaked(&daemon);

    // The spool, which has updates that no daemon has taken, must not contain it either.
    let run = session
        .prompt(&escaped_prompt(&[
            say("x "),
            sleep(300),
            say(head),
            say(tail),
            write("said", "x"),
            sleep_forever(),
        ]))
        .await;
    session.wait_for_run_event(&run, "text.delta").await;
    daemon.kill9().await;
    poll_until("its last step", async || daemon.home.project_dir().join("said").exists().then_some(())).await;
    poll_until("its last text in the spool", async || {
        daemon
            .home
            .files()
            .iter()
            .any(|(path, content)| {
                path.components().any(|part| part.as_os_str() == "spool") && contains_bytes(content, MARK)
            })
            .then_some(())
    })
    .await;
    assert_not_leaked(&daemon);
    daemon.start_again().await;
    session.cancel().await;
    assert_eq!(session.wait(&run).await["text"], format!("x {MARK}"));
    assert_not_leaked(&daemon);
}

#[tokio::test]
async fn what_an_agent_writes_to_stderr_before_it_dies_is_redacted_too() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "env": { "API_KEY": CANARY } })).await;
    // The agent itself writes no file there.
    let run = session
        .prompt_script(&[
            spawn(&["sh", "-c", "echo \"the key is $API_KEY\" >/proc/$PPID/fd/2; touch told"]),
            await_steer(600_000),
            exit(7),
        ])
        .await;
    session.wait_for_start(&run).await;
    poll_until("the words", async || daemon.home.project_dir().join("told").exists().then_some(())).await;
    session.steer("go").await;
    let ended = session.wait(&run).await;
    assert_eq!((&ended["finish_reason"], &ended["error"]["exit_status"]), (&json!("error"), &json!(7)));
    assert_eq!(ended["error"]["stderr"], json!([format!("the key is {MARK}")]), "{ended}");
    assert_not_leaked(&daemon);
}

#[tokio::test]
async fn nothing_that_an_agent_says_is_too_large_too_deep_or_too_dear_for_the_journal() {
    let daemon = TestDaemon::start().await;
    let env = json!({ "K_KEY": "aaaaaa", "L_KEY": "bcbcbc" });
    let session = daemon.session_with(json!({ "agent": "script", "env": env })).await;
    let much = "aaaaaabcbcbc".repeat(50_000);
    let deep = (0..100).fold(json!(1), |inner, _| json!([inner]));
    let script = [
        tool("Bash", json!({ "command": much }), &much),
        tool("Bash", json!({ "deep": deep }), "x"),
        plan(&much, "pending"),
        cost(1e300),
        say("done"),
    ];
    let ended = session.run_script(&script).await;
    assert_eq!((&ended["finish_reason"], &ended["text"]), (&json!("end_turn"), &json!("done")));
    assert_eq!(ended["usage"]["cost_usd"], json!(0.0), "what nobody can have spent is refused");
    let events = session.events().await;
    assert!(events.iter().any(|event| event.is_of_run(ended["id"].as_str().unwrap(), "notice.shown")));
    assert!(events.iter().all(|event| event.data.to_string().len() <= 1 << 20));
    assert_eq!(events.iter().filter(|event| event.kind == "tool.finished").count(), 2);
}

#[tokio::test]
async fn a_script_that_remembers_nothing_says_nothing_of_it_when_it_is_woken() {
    let home = qd_testkit::TestHome::new();
    home.configure("idle_s = 1\n");
    let daemon = TestDaemon::start_in(home, |_| {}).await;
    let session = daemon.session("script").await;
    assert_eq!(session.run_script(&[say("first")]).await["text"], "first");
    session.wait_for_event("its rest", |event| event.kind == "worker.exited").await;
    assert_eq!(session.run_script(&[say("second")]).await["text"], "second");
    let events = session.events().await;
    assert!(events.iter().all(|event| event.kind != "notice.shown"), "{events:#?}");
}
