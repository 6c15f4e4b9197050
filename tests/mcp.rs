//! The MCP tools on stdio (`qd mcp`), called by the test and by the `script` agent. An agent starts other agents, waits
//! for them, reaches only sessions below it, and asks people.

use qd_testkit::mcp::{session_token, tool_directory};
use qd_testkit::{TestDaemon, TestHome, TestMcpClient, TestSession, journal_rules, poll_until, script::*};
use serde_json::{Value, json};

/// A session whose agent has the tools and is in a long turn.
async fn at_work(daemon: &TestDaemon) -> (TestSession, String) {
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("at work"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    (session, run)
}

/// The result of a tool call that a `script` agent printed as its answer.
fn tool_result(run: &Value) -> Value {
    serde_json::from_str(run["text"].as_str().unwrap()).unwrap_or_else(|error| panic!("{error}: {run}"))
}

async fn session_of(daemon: &TestDaemon, id: &Value) -> TestSession {
    let workspace = daemon.workspace().await;
    TestSession { client: daemon.client(), workspace: workspace.id, id: id.as_str().unwrap().to_owned() }
}

#[tokio::test]
async fn a_client_on_stdio_is_shown_the_tools_and_what_each_takes() {
    let daemon = TestDaemon::start().await;
    let mut mcp = TestMcpClient::as_user(&daemon.home).await;
    let tools = mcp.request("tools/list", json!({})).await;
    let tools = tools["result"]["tools"].as_array().unwrap().clone();
    let names: Vec<&str> = tools.iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["spawn_agent", "send_message", "wait", "status", "cancel", "ask_human", "list"]);
    for tool in &tools {
        assert_eq!(tool["inputSchema"]["type"], "object", "{tool}");
        assert!(tool["description"].as_str().unwrap().len() > 50, "{tool}");
    }
    let unknown = mcp.request("tools/call", json!({ "name": "rm", "arguments": {} })).await;
    assert!(unknown["error"]["message"].as_str().unwrap().contains("spawn_agent"), "{unknown}");
    mcp.call_refused("status", json!({ "sesion": "x" }), "invalid_request").await;
    mcp.call_refused("wait", json!({ "sessions": [], "timeout_s": 1 }), "invalid_value").await;
    mcp.call_refused("wait", json!({ "sessions": ["ses_1"], "timeout_s": -1 }), "invalid_value").await;
    assert_eq!(mcp.close().await, Some(0));
}

#[tokio::test]
async fn a_person_starts_agents_that_stand_alone_and_reaches_every_session() {
    let daemon = TestDaemon::start().await;
    let (other, _) = at_work(&daemon).await;
    let mut mcp = TestMcpClient::as_user(&daemon.home).await;
    let listed = mcp.call("list", json!({})).await;
    assert!(listed["agents"].as_array().unwrap().iter().any(|agent| agent["name"] == "echo"), "{listed}");
    assert_eq!(listed["sessions"][0]["session"], other.id);
    let made = mcp
        .call(
            "spawn_agent",
            json!({ "agent": "echo", "prompt": "hello there", "title": "greeter", "wait": true }),
        )
        .await;
    assert_eq!((&made["finished"], &made["parent"]), (&json!(true), &Value::Null), "{made}");
    assert_eq!(made["result"]["text"], "echo: hello there");
    assert_eq!(made["result"]["finish_reason"], "end_turn");
    let status = mcp.call("status", json!({ "session": "greeter" })).await;
    assert_eq!((&status["session"], &status["busy"]), (&made["session"], &json!(false)));
    let stopped = mcp.call("cancel", json!({ "session": other.id })).await;
    assert_eq!(stopped["cancelled"].as_array().unwrap().len(), 1, "{stopped}");
    let message = mcp.call_refused("ask_human", json!({ "question": "why?" }), "invalid_value").await;
    assert!(message.contains("agents in a session"), "{message}");
    mcp.call_refused("spawn_agent", json!({ "agent": "nobody", "prompt": "x" }), "unknown_agent").await;
    mcp.call_refused("spawn_agent", json!({ "agent": "echo", "prompt": " " }), "invalid_value").await;
}

#[tokio::test]
async fn the_first_call_starts_a_daemon_if_there_is_none() {
    let home = TestHome::new();
    let mut mcp = TestMcpClient::as_user(&home).await;
    let made = mcp.call("spawn_agent", json!({ "agent": "echo", "prompt": "up", "wait": true })).await;
    assert_eq!(made["result"]["text"], "echo: up");
    home.qd(&["stop", "--workers"]).await.ok();
}

#[tokio::test]
async fn an_agent_starts_a_child_and_awaits_it() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "policy": "allow" })).await;
    let child = steps(&[cost(0.25), say("forty-two")]);
    let ended = session
        .run_script(&[mcp(
            "spawn_agent",
            json!({ "agent": "script", "prompt": child, "title": "sum", "wait": true }),
        )])
        .await;
    let made = tool_result(&ended);
    assert_eq!((&made["finished"], &made["parent"]), (&json!(true), &json!(session.id)), "{made}");
    assert_eq!(made["result"]["text"], "forty-two");
    assert_eq!(made["result"]["cost_usd"], 0.25);
    let child = session_of(&daemon, &made["session"]).await;
    let shown = child.show().await;
    assert_eq!((&shown["parent"], &shown["policy"]), (&json!(session.id), &json!("allow")));
    journal_rules::check(&session.events().await);

    let again = session
        .run_script(&[
            mcp("send_message", json!({ "to": "sum", "text": steps(&[say("once more")]) })),
            mcp("wait", json!({ "sessions": ["sum"] })),
        ])
        .await;
    let text = again["text"].as_str().unwrap();
    assert!(text.contains("once more") && text.contains("\"finished\":true"), "{text}");
    assert_eq!(child.runs().await.len(), 2);
    let listed = tool_result(&session.run_script(&[mcp("list", json!({}))]).await);
    assert_eq!(listed["sessions"].as_array().unwrap().len(), 1);
    let own = tool_result(&session.run_script(&[mcp("status", json!({}))]).await);
    assert_eq!((&own["session"], &own["tree_cost_usd"]), (&json!(session.id), &json!(0.25)), "{own}");
}

#[tokio::test]
async fn an_agent_hears_of_a_child_that_is_not_done_in_time_and_can_steer_it() {
    let daemon = TestDaemon::start().await;
    let (session, _) = at_work(&daemon).await;
    let mut mcp = TestMcpClient::as_session(&daemon.home, &session).await;
    let prompt = steps(&[say("on it"), await_steer(600_000)]);
    let made = mcp.call("spawn_agent", json!({ "agent": "script", "prompt": prompt })).await;
    let child = session_of(&daemon, &made["session"]).await;
    child.wait_for_run_event(made["run"].as_str().unwrap(), "text.delta").await;
    let waited = mcp.call("wait", json!({ "sessions": [child.id], "timeout_s": 0.05 })).await;
    assert_eq!(
        (&waited["finished"], &waited["sessions"][0]["busy"]),
        (&json!(false), &json!(true)),
        "{waited}"
    );
    mcp.call("send_message", json!({ "to": child.id, "text": "enough", "steer": true })).await;
    let waited = mcp.call("wait", json!({ "sessions": [child.id], "timeout_s": 25 })).await;
    let text = waited["sessions"][0]["text"].as_str().unwrap();
    assert!(text.starts_with("on itsteered: ") && text.ends_with("enough"), "{waited}");
    let more = mcp.call("send_message", json!({ "to": child.id, "text": "more", "steer": true })).await;
    assert_eq!(more["steered"], false, "without a turn it is the next prompt: {more}");
    let waited = mcp.call("wait", json!({ "sessions": [child.id], "timeout_s": 25 })).await;
    let text = waited["sessions"][0]["text"].as_str().unwrap();
    assert!(text.contains(&session.id) && text.ends_with("more"), "the prompt names the sender: {text}");
    assert_eq!(child.client.get("/v1/mail").await.list().len(), 2);
}

#[tokio::test]
async fn a_session_neither_sees_nor_stops_one_that_is_not_below_it() {
    let daemon = TestDaemon::start().await;
    let (session, _) = at_work(&daemon).await;
    let (stranger, run) = at_work(&daemon).await;
    let above = daemon.session("script").await;
    let sibling = above.create_child(json!({ "agent": "echo", "title": "sibling" })).await;
    let mut mcp = TestMcpClient::as_session(&daemon.home, &session).await;
    assert_eq!(mcp.call("list", json!({})).await["sessions"], json!([]));
    for other in [&stranger.id, &above.id, &sibling.id, "sibling", "ses_nobody"] {
        mcp.call_refused("status", json!({ "session": other }), "not_found").await;
        mcp.call_refused("cancel", json!({ "session": other }), "not_found").await;
        mcp.call_refused("wait", json!({ "sessions": [other], "timeout_s": 0 }), "not_found").await;
        mcp.call_refused("send_message", json!({ "to": other, "text": "psst" }), "not_found").await;
        mcp.call_refused("send_message", json!({ "to": other, "text": "psst", "steer": true }), "not_found")
            .await;
    }
    mcp.call_refused("cancel", json!({ "session": session.id }), "not_found").await;
    let own = mcp.call("status", json!({ "session": "ses_" })).await;
    assert_eq!(own["session"], session.id, "only one of the matches is within reach");
    assert_eq!(stranger.run(&run).await["state"], "running");

    let ask = stranger.create_child(json!({ "agent": "script" })).await;
    let asking = ask.prompt_script(&[question("mine?", &[])]).await;
    let ask = ask.wait_for_ask(&asking).await;
    mcp.call_refused("ask_human", json!({ "question": "?", "ask_id": ask }), "not_found").await;
    assert_eq!(daemon.client().pending_asks().await.len(), 1, "it is still open");

    // Its token gives access to nothing else.
    let with_token = daemon.client().with_token(&session_token(&daemon.home, &session.id));
    for path in ["/v1/sessions".to_owned(), session.path(""), "/v1/asks".to_owned(), "/v1/workers".to_owned()]
    {
        with_token.get(&path).await.expect_refusal(403, "agent_not_allowed");
    }
    with_token.post_empty("/v1/halt").await.expect_refusal(403, "agent_not_allowed");
}

#[tokio::test]
async fn a_process_below_an_agent_has_the_tools_of_its_own_session_alone() {
    let daemon = TestDaemon::start().await;
    let (stranger, _) = at_work(&daemon).await;
    let foreign = session_token(&daemon.home, &stranger.id);
    let session = daemon.session("script").await;
    let (socket, work) = (daemon.home.socket(), daemon.home.project_dir());
    let at = |token: &str, out: &str| {
        format!(
            "curl -s -o /dev/null -w '%{{http_code}}' --unix-socket {} -X POST -H \"authorization: Bearer {token}\" \
             http://localhost/v1/tools/list >{out}.part; mv {out}.part {out}",
            socket.display()
        )
    };
    let tried = format!(
        "{}; {}; {}",
        at("$(cat ${QD_SESSION_TOKEN#file:})", "own"),
        at(&foreign, "foreign"),
        at("nothing", "none")
    );
    let path = std::env::var("PATH").unwrap();
    session
        .prompt_script(&[spawn(&["env", &format!("PATH={path}"), "sh", "-c", &tried]), sleep_forever()])
        .await;
    for (out, status) in [("own", "200"), ("foreign", "403"), ("none", "403")] {
        let found = poll_until("an attempt", async || std::fs::read_to_string(work.join(out)).ok()).await;
        assert_eq!(found, status, "{out}");
    }
}

#[tokio::test]
async fn a_token_is_given_to_the_agent_and_written_down_nowhere_else() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    session.run_script(&[mcp("status", json!({}))]).await;
    let token = session_token(&daemon.home, &session.id);
    let secret = token.split_once('.').unwrap().1.to_owned();
    let leak = session
        .run_script(&[write("out", "x"), spawn(&["sh", "-c", "cat ${QD_SESSION_TOKEN#file:} >&2"])])
        .await;
    assert_eq!(leak["finish_reason"], "end_turn");
    let token_file = tool_directory(&daemon.home, &session.id).join("token");
    for (path, content) in daemon.home.files() {
        let is_there = String::from_utf8_lossy(&content).contains(&secret);
        assert_eq!(is_there, path == token_file, "{}", path.display());
    }
    let mut mcp = TestMcpClient::as_session(&daemon.home, &session).await;
    mcp.call("list", json!({})).await;
    session.close().await;
    session.wait_for_event("its end", |event| event.kind == "session.closed").await;
    mcp.call_refused("list", json!({}), "unauthorized").await;
    poll_until("the end of its token", async || (!token_file.exists()).then_some(())).await;
}

#[tokio::test]
async fn agents_have_the_tools_unless_somebody_says_otherwise() {
    let daemon = TestDaemon::start_with_settings("mcp = false\n").await;
    let uses = [mcp("list", json!({}))];
    let without = daemon.session("script").await.run_script(&uses).await;
    assert_eq!(without["finish_reason"], "error", "{without}");
    assert!(without["error"]["message"].as_str().unwrap().contains("no MCP server"), "{without}");
    let with = daemon.session_with(json!({ "agent": "script", "mcp": true })).await;
    assert_eq!(with.show().await["mcp"], true);
    assert_eq!(with.run_script(&uses).await["finish_reason"], "end_turn");

    let daemon = TestDaemon::start().await;
    assert_eq!(daemon.session("script").await.run_script(&uses).await["finish_reason"], "end_turn");
    for settings in
        [json!({ "agent": "script", "mcp": false }), json!({ "agent": "script", "policy": "deny" })]
    {
        let session = daemon.session_with(settings.clone()).await;
        assert_eq!(session.run_script(&uses).await["finish_reason"], "error", "{settings}");
    }
    let workspace = daemon.workspace().await;
    let asked = workspace.try_session(json!({ "agent": "echo", "mcp": true })).await;
    asked.expect_refusal(400, "unsupported_setting");
}

#[tokio::test]
async fn a_person_answers_what_an_agent_asks_by_a_call() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session
        .prompt_script(&[mcp("ask_human", json!({ "question": "Which?", "options": ["red", "blue"] }))])
        .await;
    let ask = session.wait_for_ask(&run).await;
    assert_eq!(session.run(&run).await["state"], "waiting");
    let shown = daemon.qd(&["asks"]).await.ok();
    assert!(shown.contains("Which?"), "{shown}");
    daemon.qd(&["answer", &ask, "green"]).await.expect_exit(1);
    daemon.qd(&["answer", &ask, "blue"]).await.ok();
    let ended = session.wait(&run).await;
    let result = tool_result(&ended);
    assert_eq!((&result["state"], &result["answer"]), (&json!("answered"), &json!("blue")), "{result}");
    let events = session.events().await;
    let delivered = events.iter().filter(|event| event.is_of_run(&run, "ask.delivered")).count();
    assert_eq!(delivered, 1);
    journal_rules::check(&events);
}

#[tokio::test]
async fn a_question_outlives_the_daemon_and_its_answer_reaches_the_agent_once() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[mcp("ask_human", json!({ "question": "Still there?" }))]).await;
    let ask = session.wait_for_ask(&run).await;
    daemon.restart().await;
    assert_eq!(daemon.client().pending_asks().await.len(), 1);
    daemon.client().answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
    daemon.restart().await;
    let result = tool_result(&session.wait(&run).await);
    assert_eq!(result["answer"], "yes");
    let events = session.events().await;
    assert_eq!(events.iter().filter(|event| event.is_of_run(&run, "ask.opened")).count(), 1, "asked once");
    assert_eq!(events.iter().filter(|event| event.is_of_run(&run, "ask.delivered")).count(), 1);
    journal_rules::check(&events);
}

#[tokio::test]
async fn a_question_ends_with_its_turn_and_with_its_call() {
    let daemon = TestDaemon::start().await;
    let (session, run) = at_work(&daemon).await;
    let mut mcp = TestMcpClient::as_session(&daemon.home, &session).await;
    let first = mcp.begin_call("ask_human", json!({ "question": "one?" })).await;
    session.wait_for_event("the first", |event| event.kind == "ask.opened").await;
    let given_up = json!({ "requestId": first, "reason": "changed my mind" });
    mcp.send(&json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": given_up })).await;
    let resolved = session.wait_for_event("its withdrawal", |event| event.kind == "ask.resolved").await;
    assert_eq!((&resolved.data["state"], &resolved.data["by"]), (&json!("withdrawn"), &json!("agent")));
    let second = mcp.begin_call("ask_human", json!({ "question": "two?" })).await;
    session
        .wait_for_event("the second", |event| event.kind == "ask.opened" && event.data["prompt"] == "two?")
        .await;
    session.cancel().await;
    assert_eq!(mcp.wait_for_result(second).await["state"], "withdrawn");
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    mcp.call_refused("ask_human", json!({ "question": "three?" }), "not_running").await;
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_wait_goes_on_although_the_daemon_is_killed() {
    let mut daemon = TestDaemon::start().await;
    let (session, _) = at_work(&daemon).await;
    let mut mcp = TestMcpClient::as_session(&daemon.home, &session).await;
    let prompt = steps(&[question("go on?", &[]), say(" done")]);
    let made = mcp.call("spawn_agent", json!({ "agent": "script", "prompt": prompt })).await;
    let child = session_of(&daemon, &made["session"]).await;
    let ask = child.wait_for_ask(made["run"].as_str().unwrap()).await;
    let waiting = mcp.begin_call("wait", json!({ "sessions": [child.id], "timeout_s": 3600 })).await;
    // Another call on the same connection is answered meanwhile, so the wait is in progress.
    assert_eq!(mcp.call("status", json!({ "session": child.id })).await["waiting_for_people"], true);
    daemon.kill9().await;
    daemon.start_again().await;
    daemon.client().answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
    let waited = mcp.wait_for_result(waiting).await;
    assert_eq!(
        (&waited["finished"], &waited["sessions"][0]["text"]),
        (&json!(true), &json!("yes done")),
        "{waited}"
    );
}

#[tokio::test]
async fn a_run_is_resumed_with_what_became_of_the_agents_that_it_started_by_its_tools() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let child = steps(&[question("done?", &[]), say(" indeed")]);
    let spawn = || mcp("spawn_agent", json!({ "agent": "script", "prompt": child }));
    let run = session.prompt_script(&[spawn(), spawn(), suspend(), say("resumed")]).await;
    session.wait_for_run_event(&run, "run.suspended").await;
    let mut asked = 0;
    let mut stream = daemon.workspace().await.stream("?after=0&kinds=ask.opened").await;
    let both = |event: &qd_testkit::TestEvent| {
        asked += usize::from(event.kind == "ask.opened");
        asked == 2
    };
    stream.until("both to ask", both).await;
    daemon.restart().await;
    let asks = daemon.client().pending_asks().await;
    assert_eq!(asks.len(), 2);
    for (at, ask) in asks.iter().enumerate() {
        daemon.client().answer_ask(ask["id"].as_str().unwrap(), &json!({ "value": "yes" })).await.expect(200);
        if at == 0 {
            daemon.restart().await;
        }
    }
    let ended = session.wait(&run).await;
    assert_eq!(ended["finish_reason"], "end_turn", "{ended}");
    let events = session.events().await;
    let resumed: Vec<_> = events.iter().filter(|event| event.is_of_run(&run, "run.resumed")).collect();
    assert_eq!(resumed.len(), 1, "once");
    let results = resumed[0].data["children"].as_array().unwrap();
    assert_eq!(
        results.iter().map(|result| &result["text"]).collect::<Vec<_>>(),
        ["yes indeed", "yes indeed"]
    );
    journal_rules::check(&events);
}

#[tokio::test]
async fn a_tree_is_shown_with_what_it_costs_and_is_cancelled_with_one_receipt() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "title": "root", "policy": "allow" })).await;
    let leaf = steps(&[cost(0.5), say("leaf"), sleep_forever()]);
    let twig = steps(&[
        cost(0.25),
        mcp("spawn_agent", json!({ "agent": "script", "prompt": leaf, "title": "leaf" })),
        sleep_forever(),
    ]);
    let spawn = mcp("spawn_agent", json!({ "agent": "script", "prompt": twig, "title": "twig" }));
    let run = session.prompt_script(&[cost(1.0), spawn, sleep_forever()]).await;
    let mut stream = daemon.workspace().await.stream("?after=0").await;
    stream.until("the leaf", |event| event.kind == "text.delta" && event.data["text"] == "leaf").await;
    let rows = daemon.qd(&["ps", "--tree", "--json"]).await.json();
    let shown = |row: &Value| (row["title"].clone(), row["depth"].clone(), row["tree_cost_usd"].clone());
    let shown: Vec<_> = rows.as_array().unwrap().iter().map(shown).collect();
    assert_eq!(
        shown,
        [
            (json!("root"), json!(0), json!(1.75)),
            (json!("twig"), json!(1), json!(0.75)),
            (json!("leaf"), json!(2), json!(0.5))
        ]
    );
    let table = daemon.qd(&["ps", "--tree"]).await.ok();
    assert!(table.contains("└─ ses_") && table.contains("   └─ ses_") && table.contains("$1.75"), "{table}");

    let receipt = session.cancel().await;
    let hit = receipt["cancelled"].as_array().unwrap();
    assert_eq!((hit.len(), &hit[0]), (3, &json!(run)), "{receipt}");
    for row in rows.as_array().unwrap() {
        let session = session_of(&daemon, &row["id"]).await;
        let runs = session.runs().await;
        assert_eq!(session.wait(runs[0]["id"].as_str().unwrap()).await["finish_reason"], "cancelled");
        journal_rules::check(&session.events().await);
    }
}
