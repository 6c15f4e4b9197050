//! Workers on other machines. The other machine is a process with another home on loopback, behind a proxy that breaks
//! connections on demand. Nothing is lost or doubled, and a worker token allows nothing but joining.

use std::net::SocketAddr;
use std::time::Duration;

use qd_testkit::{
    TestClient, TestCommand, TestDaemon, TestEvent, TestHome, TestProxy, TestSession, journal_rules,
    poll_until, processes, script::*,
};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::openapi::{filled, operations};
use crate::workers_loss::worker_of;

/// A daemon that other machines can join over TLS.
pub(crate) async fn daemon_with_tls() -> TestDaemon {
    TestDaemon::start_with(|options| _ = options.tcp().arg("--tls").arg("self")).await
}

/// The same, with this `remote_lease_s`: how long it waits for a disconnected worker.
async fn daemon_with_lease(seconds: u64) -> TestDaemon {
    let home = TestHome::new();
    std::fs::create_dir(home.path()).unwrap();
    std::fs::write(home.path().join("config.toml"), format!("remote_lease_s = {seconds}\n")).unwrap();
    TestDaemon::start_in(home, |options| _ = options.tcp().arg("--tls").arg("self")).await
}

/// The TCP address of the daemon.
pub(crate) fn address(daemon: &TestDaemon) -> SocketAddr {
    let line = daemon.listening().iter().find_map(|line| line.strip_prefix("listening on https://"));
    line.unwrap().parse().unwrap()
}

/// Creates a token for these labels with `qd workers token`.
pub(crate) async fn token(daemon: &TestDaemon, labels: &[&str]) -> Value {
    let labels = labels.iter().flat_map(|label| ["--label", label]);
    daemon.qd(&["workers", "token", "--json"].into_iter().chain(labels).collect::<Vec<_>>()).await.json()
}

fn text<'a>(made: &'a Value, field: &str) -> &'a str {
    made[field].as_str().unwrap()
}

/// Another machine: a worker with its own home that has joined the daemon.
struct JoinedTestMachine {
    worker: TestCommand,
    home: TestHome,
}

impl JoinedTestMachine {
    /// Joins the daemon directly.
    async fn join(daemon: &TestDaemon, label: &str) -> Self {
        Self::join_through(daemon, address(daemon), &["--label", label]).await
    }

    /// Joins the daemon through a proxy at this address.
    async fn join_through(daemon: &TestDaemon, address: SocketAddr, args: &[&str]) -> Self {
        let labels: Vec<&str> =
            args.chunks(2).filter(|flag| flag[0] == "--label").map(|flag| flag[1]).collect();
        let made = token(daemon, &labels).await;
        let home = TestHome::new();
        let url = format!("https://{address}");
        let line = ["worker", "join", &url, "--token", text(&made, "token")];
        let pin = ["--fingerprint", text(&made, "fingerprint")];
        let mut worker = home.start(&[&line[..], &pin, args].concat());
        worker.wait_for_stdout(&format!("joined {url} as ")).await;
        Self { worker, home }
    }

    fn kill9(&self) {
        self.worker.signal(Signal::KILL);
    }
}

/// Waits until a machine with this label is connected, or with `wanted` false, until none is.
async fn connected(daemon: &TestDaemon, label: &str, wanted: bool) {
    poll_until(&format!("{label} to be connected: {wanted}"), async || {
        let joined = daemon.client().get("/v1/workers/joined").await.list();
        let is_there = joined.iter().any(|machine| {
            machine["connected"] == true && machine["labels"].as_array().unwrap().contains(&json!(label))
        });
        (is_there == wanted).then_some(())
    })
    .await;
}

/// Waits until a run with the steps of [`count`] has counted to `number`.
async fn wait_until_counted(session: &TestSession, run: &str, number: u64) {
    let mut so_far = String::new();
    let enough = counted_text(number);
    session
        .wait_for_event(&format!("{number} of {run}"), |event| {
            if event.is_of_run(run, "text.delta") {
                so_far.push_str(event.data["text"].as_str().unwrap());
            }
            so_far.len() >= enough.len()
        })
        .await;
}

/// Waits for the end of a counting run and checks that it counted to `to` without a gap or repeat.
async fn check_counted(session: &TestSession, run: &str, to: u64) {
    session.wait_for_run_event(run, "run.finished").await;
    let events = session.events().await;
    journal_rules::check(&events);
    let deltas = events.iter().filter(|event| event.is_of_run(run, "text.delta"));
    let text: String = deltas.map(|event| event.data["text"].as_str().unwrap()).collect();
    assert_eq!(text, counted_text(to), "every chunk once and in order");
    assert_eq!(session.run(run).await["finish_reason"], "end_turn");
}

#[tokio::test]
async fn a_session_runs_on_a_machine_that_has_joined() {
    let daemon = daemon_with_tls().await;
    let machine = JoinedTestMachine::join(&daemon, "box").await;
    let session = daemon.session("script@box").await;
    let ended = session.run_script(&[config()]).await;
    assert_eq!(ended["finish_reason"], "end_turn", "{ended}");
    let work = daemon.home.project_dir();
    assert!(ended["text"].as_str().unwrap().contains(work.to_str().unwrap()), "the same path: {ended}");
    let worker = worker_of(&session).await;
    assert_eq!(worker["pid"], machine.worker.pid(), "the process that has joined");
    assert!(worker["host"].is_string() && worker["processes"] == json!([]), "{worker}");
    let below = processes::descendants(machine.worker.pid());
    assert!(below.iter().any(|one| one.has_role("__script")), "the agent is there: {below:#?}");
    let shown = daemon.qd(&["workers"]).await.ok();
    assert!(shown.contains(worker["host"].as_str().unwrap()) && shown.contains("connected"), "{shown}");

    // Asks, answers and cancels work the same way.
    let asked = session.run_with_answer(ask_bash("make"), json!({ "decision": "allow_once" })).await;
    assert_eq!(asked["text"], "allowed");
    let run = session.prompt_script(&[spawn_detached(&["sleep", "600"]), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    session.cancel().await;
    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "cancelled");
    let finished = session.wait_for_run_event(&run, "run.finished").await;
    assert_eq!(finished.data["processes"]["survivors"], 0, "{finished:?}");
    session.close().await;
    session.wait_for_event("its end", |event| event.kind == "session.closed").await;
    poll_until("the end of the agent", async || {
        processes::descendants(machine.worker.pid()).is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_line_that_a_token_comes_with_joins_a_machine_that_sessions_can_choose() {
    let daemon = daemon_with_tls().await;
    for (args, agent) in
        [(&["my box"][..], Some("script@my-box")), (&["--name", "old"], Some("script@old")), (&[], None)]
    {
        let line = daemon.qd(&[&["workers", "token"], args].concat()).await.ok();
        let words: Vec<&str> = line.trim().strip_prefix("qd ").unwrap().split(' ').collect();
        let label = words[words.iter().position(|word| *word == "--label").unwrap() + 1];
        let agent = agent.map_or_else(|| format!("script@{label}"), str::to_owned);
        let home = TestHome::new();
        let mut worker = home.start(&words);
        worker.wait_for_stdout("joined ").await;
        connected(&daemon, label, true).await;
        let listed = daemon.qd(&["agents"]).await.ok();
        assert!(listed.contains(&agent), "{listed}");
        assert_eq!(daemon.session(&agent).await.run_script(&[say("hi")]).await["text"], "hi");
        let machines = daemon.qd(&["workers", "machines", "--json"]).await.json();
        let ours = machines.as_array().unwrap().iter().find(|one| one["labels"] == json!([label]));
        assert!(ours.is_some_and(|one| one["connected"] == true), "{machines}");
        let shown = daemon.qd(&["workers", "machines"]).await.ok();
        assert!(shown.contains(label), "{shown}");
        assert!(daemon.qd(&["workers", "--json"]).await.json()[0]["pid"].is_number(), "workers, as before");
        worker.signal(Signal::TERM);
        let ended = worker.wait().await;
        assert!(ended.stderr.contains(&agent), "it says how it is chosen: {ended:?}");
    }
}

#[tokio::test]
async fn whoever_mistakes_tls_is_told() {
    let daemon = daemon_with_tls().await;
    let host = format!("http://{}", address(&daemon));
    let plain = daemon.qd(&["ps", "--host", &host]).await;
    assert!(plain.stderr.contains(&host.replace("http:", "https:")), "{plain:?}");
    plain.expect_exit(4);
    let bare = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let line = bare.listening().iter().find_map(|line| line.strip_prefix("listening on http://")).unwrap();
    let secure = bare.qd(&["ps", "--host", &format!("https://{line}")]).await;
    assert!(secure.stderr.contains("does not speak TLS: use http://"), "{secure:?}");
    secure.expect_exit(4);
}

#[tokio::test]
async fn only_the_certificate_of_the_fingerprint_is_accepted() {
    let daemon = daemon_with_tls().await;
    let made = token(&daemon, &[]).await;
    let home = TestHome::new();
    let url = format!("https://{}", address(&daemon));
    let line = ["worker", "join", &url, "--token", text(&made, "token")];
    let wrong = text(&made, "fingerprint").replace(|c: char| c != ':', "0");
    for (args, expected) in [(vec!["--fingerprint", &wrong], "does not match"), (vec![], "does not trust")] {
        let output = home.qd(&[&line[..], &args].concat()).await;
        assert!(output.stderr.contains(expected) && output.stderr.contains("--fingerprint"), "{output:?}");
        assert_eq!(output.expect_exit(1), "", "it has not joined");
    }
    assert!(daemon.client().get("/v1/workers/joined").await.list().is_empty());
    for bad in ["http://192.0.2.1:80", "unix:/run/qd.sock", "nonsense"] {
        home.qd(&["worker", "join", bad, "--token", "t"]).await.expect_exit(2);
    }
}

#[tokio::test]
async fn a_revoked_token_cuts_its_machine_off_and_lets_nobody_in() {
    let daemon = daemon_with_tls().await;
    let made = token(&daemon, &[]).await;
    let machine = JoinedTestMachine::join(&daemon, "box").await;
    let session = daemon.session("script@box").await;
    let run = session.prompt_script(&[say("hi"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let tokens = daemon.client().get("/v1/workers/tokens").await.list();
    let used = tokens.iter().find(|token| token["last_used_at"].is_string()).expect("one was used");
    assert!(!tokens.iter().any(|token| token.get("token").is_some()), "{tokens:?}");

    daemon.qd(&["workers", "revoke", used["id"].as_str().unwrap()]).await.ok();
    let output = machine.worker.wait().await;
    assert!(output.stderr.contains("token"), "{output:?}");
    output.expect_exit(1);
    assert_eq!(session.wait(&run).await["finish_reason"], "interrupted", "at once, without a lease");
    machine.home.wait_for_no_agents().await;

    let id = made["id"].as_str().unwrap();
    assert_eq!(daemon.client().delete(&format!("/v1/workers/tokens/{id}")).await.status, 204);
    daemon.client().delete(&format!("/v1/workers/tokens/{id}")).await.expect_refusal(404, "not_found");
    let url = format!("https://{}", address(&daemon));
    let pin = text(&made, "fingerprint");
    let args = ["worker", "join", &url, "--token", text(&made, "token"), "--fingerprint", pin];
    let output = machine.home.qd(&args).await;
    assert!(output.stderr.contains("token"), "{output:?}");
    output.expect_exit(1);
    assert!(daemon.client().get("/v1/workers/tokens").await.list().is_empty());
}

#[tokio::test]
async fn a_worker_token_can_do_nothing_but_work() {
    let daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let made = token(&daemon, &[]).await;
    assert!(made["url"].as_str().unwrap().starts_with("http://127.0.0.1:") && made["fingerprint"].is_null());
    let client = daemon.tcp_without_token().with_token(text(&made, "token"));
    for (method, path) in operations(&daemon.client()).await {
        let path = filled(&path, "nobody");
        let status = client.status(method.clone(), &path, None).await;
        let expected = match path.as_str() {
            "/healthz" => 200,
            // Authorized, but refused because the request is not a WebSocket upgrade.
            "/v1/workers/join" | "/v1/workers/link" => 400,
            _ => 403,
        };
        assert_eq!(status, expected, "{method} {path}");
    }
    client.get("/v1/workers").await.expect_refusal(403, "worker_not_allowed");
    client.get("/v1/nothing").await.expect_refusal(403, "worker_not_allowed");
    let token = text(&made, "token");
    for (path, content) in daemon.home.files() {
        assert!(!String::from_utf8_lossy(&content).contains(token), "{} holds the token", path.display());
    }
}

#[tokio::test]
async fn a_machine_gets_no_sessions_that_its_token_was_not_made_for() {
    let daemon = daemon_with_tls().await;
    let made = daemon.qd(&["workers", "token", "lab", "--agent", "script", "--json"]).await.json();
    assert_eq!((&made["labels"], &made["agents"]), (&json!(["lab"]), &json!(["script"])));
    let home = TestHome::new();
    let url = format!("https://{}", address(&daemon));
    let pin = text(&made, "fingerprint");
    let line = ["worker", "join", &url, "--token", text(&made, "token"), "--fingerprint", pin];
    for (args, refused) in [
        (&["--agent", "script", "--label", "prod"][..], "prod"),
        (&["--agent", "script", "--label", "lab", "--label", "prod"], "prod"),
        (&["--agent", "echo", "--label", "lab"], "echo"),
        (&["--label", "lab"], "echo"),
    ] {
        let output = home.qd(&[&line[..], args].concat()).await;
        assert!(output.stderr.contains("token") && output.stderr.contains(refused), "{args:?}: {output:?}");
        output.expect_exit(1);
    }
    assert!(daemon.client().get("/v1/workers/joined").await.list().is_empty());
    let mut worker = home.start(&[&line[..], &["--agent", "script", "--label", "lab"]].concat());
    worker.wait_for_stdout("joined ").await;
    assert_eq!(daemon.session("script@lab").await.run_script(&[say("hi")]).await["text"], "hi");
    let shown = daemon.qd(&["workers", "tokens"]).await.ok();
    assert!(shown.contains("lab") && shown.contains("script"), "{shown}");
}

#[tokio::test]
async fn a_token_of_an_earlier_release_joins_as_before_and_doctor_says_that_it_is_not_bound() {
    let mut daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let made = token(&daemon, &["lab"]).await;
    daemon.terminate().await;
    let path = daemon.home.path().join("worker_tokens.json");
    let mut stored: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    stored[0].as_object_mut().unwrap().retain(|field, _| !["labels", "agents"].contains(&field.as_str()));
    std::fs::write(&path, stored.to_string()).unwrap();
    daemon.start_again().await;
    let home = TestHome::new();
    let line = daemon.listening().iter().find_map(|line| line.strip_prefix("listening on "));
    let url = line.unwrap().to_owned();
    let mut worker =
        home.start(&["worker", "join", &url, "--token", text(&made, "token"), "--label", "prod"]);
    worker.wait_for_stdout("joined ").await;
    let shown = daemon.qd(&["workers", "tokens"]).await.ok();
    assert!(shown.contains("any"), "{shown}");
    let advice = daemon.qd(&["doctor"]).await.stdout;
    assert!(advice.contains(text(&made, "id")) && advice.contains("any label"), "{advice}");
}

#[tokio::test]
async fn only_a_worker_token_joins_and_no_web_page_does() {
    let daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let made = token(&daemon, &[]).await;
    let upgrade = |client: TestClient| {
        client
            .with_header("connection", "Upgrade")
            .with_header("upgrade", "websocket")
            .with_header("sec-websocket-version", "13")
            .with_header("sec-websocket-key", "AAAAAAAAAAAAAAAAAAAAAA==")
            .with_header("sec-websocket-protocol", "quarterdeck.v1")
    };
    let join = "/v1/workers/join";
    upgrade(daemon.tcp()).get(join).await.expect_refusal(401, "unauthorized");
    upgrade(daemon.client()).get(join).await.expect_refusal(401, "unauthorized");
    let worker = upgrade(daemon.tcp_without_token().with_token(text(&made, "token")));
    let host = text(&made, "url").to_owned();
    for origin in [host.as_str(), "https://evil.example", "null"] {
        worker.with_header("origin", origin).get(join).await.expect_refusal(403, "origin_not_allowed");
    }
    worker.with_header("host", "evil.example").get(join).await.expect_refusal(403, "host_not_allowed");
    worker
        .with_header("sec-websocket-protocol", "chat")
        .get(join)
        .await
        .expect_refusal(400, "invalid_request");
    let link = "/v1/workers/link?session=ses_1&worker=wrk_1";
    worker.get(link).await.expect_refusal(404, "not_found");
    assert_eq!(worker.status(hyper::Method::GET, join, None).await, 101);
}

#[tokio::test]
async fn a_repeated_request_for_a_token_makes_one() {
    let daemon = TestDaemon::start().await;
    let client = daemon.client().with_key("k");
    let first = client.post("/v1/workers/tokens", &json!({ "name": "box" })).await.expect(201);
    let again = client.post("/v1/workers/tokens", &json!({ "name": "box" })).await.expect(201);
    assert_eq!(first, again);
    assert!(first["url"].is_null(), "it listens on no port");
    let shown = daemon.qd(&["workers", "tokens"]).await.ok();
    assert!(shown.contains("box") && shown.contains("never"), "{shown}");
    assert_eq!(shown.lines().count(), 2, "{shown}");
    client.post("/v1/workers/tokens", &json!({ "name": "" })).await.expect_refusal(400, "invalid_value");
}

#[tokio::test]
async fn a_session_works_below_the_root_where_its_path_is_not_there_or_not_at_all() {
    let daemon = daemon_with_tls().await;
    let root = daemon.home.sibling_path("elsewhere");
    std::fs::create_dir_all(root.join("shop")).unwrap();
    let flags = ["--label", "rooted", "--root", root.to_str().unwrap()];
    let _rooted = JoinedTestMachine::join_through(&daemon, address(&daemon), &flags).await;
    let _bare = JoinedTestMachine::join(&daemon, "bare").await;
    let there = daemon.home.sibling_path("shop");
    std::fs::create_dir(&there).unwrap();
    let workspace = daemon.client().workspace(&there).await;
    // From here on only the other machine has this directory.
    std::fs::remove_dir(&there).unwrap();

    let ended = workspace.session("script@rooted").await.run_script(&[config()]).await;
    assert_eq!(ended["finish_reason"], "end_turn", "{ended}");
    assert!(ended["text"].as_str().unwrap().contains(root.join("shop").to_str().unwrap()), "{ended}");
    let refused = workspace.session("script@bare").await.run_script(&[config()]).await;
    assert_eq!(
        (&refused["finish_reason"], &refused["error"]["code"]),
        (&json!("error"), &json!("path_not_found"))
    );
    assert!(refused["error"]["message"].as_str().unwrap().contains(there.to_str().unwrap()), "{refused}");

    std::fs::remove_dir(root.join("shop")).unwrap();
    let refused = workspace.session("script@rooted").await.run_script(&[config()]).await;
    let message = refused["error"]["message"].as_str().unwrap();
    for tried in [&there, &root.join("shop"), &root.join(there.strip_prefix("/").unwrap())] {
        assert!(message.contains(tried.to_str().unwrap()), "{message}");
    }
}

#[tokio::test]
async fn a_label_chooses_the_machine_and_the_least_busy_one_comes_first() {
    let daemon = daemon_with_tls().await;
    let made = token(&daemon, &[]).await;
    assert!(made["token"].is_string());
    let workspace = daemon.workspace().await;
    let refused = workspace.try_session(json!({ "agent": "script@fast" })).await;
    let how = refused.expect_refusal(409, "agent_unavailable");
    assert!(how["install"].as_str().unwrap().contains("qd worker join"), "{how}");
    let fast =
        JoinedTestMachine::join_through(&daemon, address(&daemon), &["--label", "fast", "--label", "all"])
            .await;
    let slow = JoinedTestMachine::join_through(
        &daemon,
        address(&daemon),
        &["--label", "slow", "--label", "all", "--agent", "script"],
    )
    .await;
    for (label, machine) in [("fast", &fast), ("slow", &slow)] {
        let session = workspace.session(&format!("script@{label}")).await;
        assert_eq!(session.run_script(&[say("hi")]).await["text"], "hi");
        assert_eq!(worker_of(&session).await["pid"], machine.worker.pid(), "{label}");
    }
    workspace.try_session(json!({ "agent": "echo@slow" })).await.expect_refusal(409, "agent_unavailable");
    workspace.try_session(json!({ "agent": "nobody@fast" })).await.expect_refusal(409, "agent_unavailable");
    workspace
        .try_session(json!({ "agent": "echo@fast", "model": "m" }))
        .await
        .expect_refusal(400, "unsupported_setting");
    let mut pids = Vec::new();
    for _ in 0..4 {
        let session = workspace.session("script@all").await;
        assert_eq!(session.run_script(&[say("hi")]).await["text"], "hi");
        pids.push(worker_of(&session).await["pid"].clone());
    }
    let on_fast = pids.iter().filter(|pid| **pid == json!(fast.worker.pid())).count();
    assert_eq!(on_fast, 2, "they share: {pids:?}");
    let joined = daemon.client().get("/v1/workers/joined").await.list();
    let names: Vec<_> = joined.iter().map(|machine| machine["name"].as_str().unwrap()).collect();
    assert_ne!(names[0], names[1], "two workers of one machine have different names");
}

#[tokio::test]
async fn a_connection_that_is_gone_for_20_s_loses_and_doubles_nothing() {
    let daemon = daemon_with_tls().await;
    let proxy = TestProxy::start(address(&daemon)).await;
    let _machine = JoinedTestMachine::join_through(&daemon, proxy.address(), &["--label", "far"]).await;
    let session = daemon.session("script@far").await;
    let run = session.prompt_script(&count(260, 100)).await;
    wait_until_counted(&session, &run, 20).await;
    proxy.hold();
    // A network outage of this length, without any closed connection.
    tokio::time::sleep(Duration::from_secs(20)).await;
    proxy.cut();
    proxy.pass();
    check_counted(&session, &run, 260).await;
    let events = session.events().await;
    assert!(events.iter().any(|event| event.kind == "worker.reattached"), "it was away");
    assert!(!events.iter().any(|event| event.kind == "worker.exited"), "and was not given up");
}

#[tokio::test]
async fn a_connection_that_breaks_again_and_again_loses_and_doubles_nothing() {
    let daemon = daemon_with_tls().await;
    let proxy = TestProxy::start(address(&daemon)).await;
    let _machine = JoinedTestMachine::join_through(&daemon, proxy.address(), &["--label", "far"]).await;
    let session = daemon.session("script@far").await;
    let run = session.prompt_script(&count(300, 10)).await;
    for number in [10, 40, 70, 100, 150] {
        wait_until_counted(&session, &run, number).await;
        proxy.cut();
        connected(&daemon, "far", false).await;
        proxy.pass();
    }
    check_counted(&session, &run, 300).await;
}

#[tokio::test]
async fn a_daemon_that_is_killed_finds_its_joined_worker_again() {
    let mut daemon = daemon_with_tls().await;
    let proxy = TestProxy::start(address(&daemon)).await;
    let machine = JoinedTestMachine::join_through(&daemon, proxy.address(), &["--label", "far"]).await;
    let session = daemon.session("script@far").await;
    let run = session.prompt_script(&count(200, 20)).await;
    let queued = session.prompt_script(&[say("after")]).await;
    for number in [10, 60] {
        wait_until_counted(&session, &run, number).await;
        daemon.kill9().await;
        daemon.start_again().await;
        proxy.set_target(address(&daemon));
    }
    assert_eq!(session.wait(&queued).await["text"], "after");
    check_counted(&session, &run, 200).await;
    assert_eq!(worker_of(&session).await["pid"], machine.worker.pid());
    assert_eq!(daemon.terminate().await, Some(0));
    daemon.start_again().await;
    proxy.set_target(address(&daemon));
    assert_eq!(session.run_script(&[say("again")]).await["text"], "again");
}

#[tokio::test]
async fn a_change_of_the_sandbox_counts_on_another_machine_although_the_daemon_is_killed() {
    let mut daemon = daemon_with_tls().await;
    let proxy = TestProxy::start(address(&daemon)).await;
    let _machine = JoinedTestMachine::join_through(&daemon, proxy.address(), &["--label", "far"]).await;
    let session = daemon.session("script@far").await;
    let first = session.prompt_script(&[await_steer(600_000)]).await;
    session.wait_for_start(&first).await;
    assert_eq!(session.show().await["sandbox"]["asked"], "auto");
    session.patch(json!({"sandbox": "off"})).await;
    daemon.kill9().await;
    daemon.start_again().await;
    proxy.set_target(address(&daemon));
    session.wait_for_event("its worker is back", |event| event.kind == "worker.reattached").await;
    session.steer("go").await;
    session.wait(&first).await;
    session.run_script(&[say("y")]).await;
    let confined = |event: &TestEvent| event.data.get("confined").cloned();
    let reports: Vec<Value> = session.events().await.iter().filter_map(confined).collect();
    assert_eq!(reports.last().expect("the machine says how it confines")["asked"], "off");
}

#[tokio::test]
async fn a_worker_that_does_not_come_back_is_lost_after_its_lease_and_another_takes_over() {
    let daemon = daemon_with_lease(2).await;
    let machine = JoinedTestMachine::join(&daemon, "box").await;
    let session = daemon.session("script@box").await;
    let run = session.prompt_script(&[say("hi"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    machine.kill9();
    assert_eq!(session.wait(&run).await["finish_reason"], "interrupted");
    machine.home.wait_for_no_agents().await;

    let ended = session.run_script(&[say("alone")]).await;
    assert_eq!((&ended["finish_reason"], &ended["error"]["code"]), (&json!("error"), &json!("worker_away")));
    assert!(ended["error"]["message"].as_str().unwrap().contains("box"), "{ended}");

    let run = session.prompt_script(&[say("back")]).await;
    let _other = JoinedTestMachine::join(&daemon, "box").await;
    assert_eq!(session.wait(&run).await["text"], "back", "the waiting run goes to the machine that joins");
}

#[tokio::test]
async fn a_worker_that_comes_back_too_late_is_told_to_end_what_nobody_wants() {
    let daemon = daemon_with_lease(2).await;
    let proxy = TestProxy::start(address(&daemon)).await;
    let machine = JoinedTestMachine::join_through(&daemon, proxy.address(), &["--label", "far"]).await;
    let session = daemon.session("script@far").await;
    let run = session.prompt_script(&[say("hi"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    assert!(!processes::descendants(machine.worker.pid()).is_empty());
    proxy.cut();
    assert_eq!(session.wait(&run).await["finish_reason"], "interrupted");
    assert!(!processes::descendants(machine.worker.pid()).is_empty(), "the worker cannot know yet");
    proxy.pass();
    poll_until("the end of the unwanted session", async || {
        processes::descendants(machine.worker.pid()).is_empty().then_some(())
    })
    .await;
    assert_eq!(session.run_script(&[say("again")]).await["text"], "again");
}

#[tokio::test]
async fn a_worker_that_is_told_to_end_ends_its_agents_and_says_so() {
    let daemon = daemon_with_tls().await;
    let machine = JoinedTestMachine::join(&daemon, "box").await;
    let session = daemon.session("script@box").await;
    let run = session.prompt_script(&[spawn_detached(&["sleep", "600"]), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    machine.worker.signal(Signal::TERM);
    machine.worker.wait().await.ok();
    assert_eq!(session.wait(&run).await["finish_reason"], "interrupted");
    let exited = session.wait_for_event("its end", |event| event.kind == "worker.exited").await;
    assert_eq!(exited.data["reason"], "stopped", "{exited:?}");
    machine.home.wait_for_no_agents().await;
    let kept = machine.home.path().join("joined");
    assert_eq!(std::fs::read_dir(kept).unwrap().count(), 0, "and leaves nothing");
}
