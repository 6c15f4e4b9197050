//! Fleets with the real binary; the agents are `script` and `echo`.

use qd_testkit::{TestDaemon, TestFleet, script::*};
use serde_json::{Value, json};

/// A fleet file with these sessions. Their agent is `script`, unless the entry is `NAME=AGENT`.
fn file(task: &str, sessions: &[&str], rest: &str) -> String {
    let sessions: Vec<String> = sessions
        .iter()
        .map(|session| {
            let (name, agent) = session.split_once('=').unwrap_or((session, "script"));
            format!("    {name}: {{ agent: {agent} }}")
        })
        .collect();
    format!("fleet:\n  task: {}\n  sessions:\n{}\n{rest}", json!(task), sessions.join("\n"))
}

async fn start(daemon: &TestDaemon, file: &str) -> TestFleet {
    daemon.workspace().await.fleet(file).await
}

/// The routes that fired, as `from → to`.
async fn routes(fleet: &TestFleet) -> Vec<String> {
    let events = fleet.events_until("fleet.finished").await;
    let names = |list: &Value, key: &str| -> Vec<String> {
        list.as_array().unwrap().iter().map(|one| one[key].as_str().unwrap().to_owned()).collect()
    };
    let routed = events.iter().filter(|event| event.kind == "fleet.routed");
    routed
        .map(|event| {
            let from = names(&event.data["from"], "session").join("+");
            format!("{from}→{}", names(&event.data["to"], "session").join(","))
        })
        .collect()
}

fn block(entries: &[String]) -> Value {
    say(&format!("I split it.\n```cap-subtasks\n{}\n```\n", json!(entries)))
}

#[tokio::test]
async fn a_pipeline_passes_the_task_and_the_last_message_on() {
    let daemon = TestDaemon::start().await;
    let rest = "  start: a\n  routes: [{ when: a.done, route_to: b }]\n";
    let fleet = start(&daemon, &file("build it", &["a=echo", "b=echo"], rest)).await;
    let ended = fleet.wait_for_end().await;
    assert_eq!(ended["state"], "done", "{ended}");
    assert_eq!(fleet.prompts_of("a").await, ["build it"]);
    let prompts = fleet.prompts_of("b").await;
    assert_eq!(prompts.len(), 1);
    assert!(prompts[0].contains("build it") && prompts[0].contains("echo: build it"), "{prompts:?}");
    assert_eq!(ended["result"], format!("echo: {}", prompts[0]));
    assert_eq!(ended["sessions"]["b"]["state"], "idle");
}

#[tokio::test]
async fn a_fan_out_goes_to_each_and_a_join_waits_for_all() {
    let daemon = TestDaemon::start().await;
    let rest = "  start: lead\n  routes:\n    - { when: lead.done, fan_out: { to: [a, b], split: broadcast } }\n    - { when: [a.done, b.done], route_to: review }\n";
    let fleet = start(&daemon, &file("x", &["lead=echo", "a=echo", "b=echo", "review=echo"], rest)).await;
    assert_eq!(fleet.wait_for_end().await["state"], "done");
    assert_eq!(routes(&fleet).await, ["lead→a,b", "a+b→review"]);
    let prompts = fleet.prompts_of("review").await;
    assert_eq!(prompts.len(), 1, "once");
    assert!(prompts[0].contains("from a") && prompts[0].contains("from b"), "{prompts:?}");
}

#[tokio::test]
async fn subtasks_are_dealt_round_and_round_and_who_is_dealt_nothing_holds_up_no_join() {
    let daemon = TestDaemon::start().await;
    let subtasks: Vec<String> = ["one", "two", "three"].map(|word| steps(&[say(word)])).into();
    let rest = "  start: lead\n  routes:\n    - { when: lead.done, fan_out: { to: [a, b], split: by_subtask } }\n    - { when: [a.done, b.done], route_to: review }\n";
    let sessions = ["lead", "a", "b", "review=echo"];
    let fleet = start(&daemon, &file(&steps(&[block(&subtasks)]), &sessions, rest)).await;
    let ended = fleet.wait_for_end().await;
    assert_eq!(ended["state"], "done", "{ended}");
    assert_eq!(fleet.prompts_of("a").await, [subtasks[0].clone(), subtasks[2].clone()]);
    assert_eq!(fleet.prompts_of("b").await, [subtasks[1].clone()]);
    let prompts = fleet.prompts_of("review").await;
    assert_eq!(prompts.len(), 1, "once all subtasks have ended");
    for word in ["one", "two", "three"] {
        assert!(prompts[0].contains(word), "{prompts:?}");
    }

    let fleet = start(&daemon, &file(&steps(&[block(&subtasks[..1])]), &sessions, rest)).await;
    assert_eq!(fleet.wait_for_end().await["state"], "done");
    assert!(fleet.prompts_of("b").await.is_empty());
    assert_eq!(fleet.prompts_of("review").await.len(), 1);
}

#[tokio::test]
async fn a_missing_or_bad_block_fails_its_route_and_the_fleet() {
    let daemon = TestDaemon::start().await;
    let rest = "  start: lead\n  routes: [{ when: lead.done, fan_out: { to: a, split: by_subtask } }]\n";
    for text in ["no block at all", "```cap-subtasks\n[1, 2]\n```", "```cap-subtasks\n[]\n```"] {
        let fleet = start(&daemon, &file(&steps(&[say(text)]), &["lead", "a"], rest)).await;
        let ended = fleet.wait_for_end().await;
        assert_eq!(ended["state"], "failed", "{ended}");
        let problem = ended["problems"][0].as_str().unwrap();
        assert!(problem.contains("route 1") && problem.contains("lead"), "{problem}");
        assert!(fleet.prompts_of("a").await.is_empty());
    }
}

#[tokio::test]
async fn a_matching_route_goes_first_and_past_its_max_it_is_absent() {
    let daemon = TestDaemon::start().await;
    let rest = "  start: review\n  routes:\n    - { when: review.done, match: '(?i)NEEDS WORK', route_to: lead, max: 2 }\n    - { when: review.done, route_to: end }\n    - { when: lead.done, route_to: review }\n";
    let fleet =
        start(&daemon, &file("this needs work", &["lead=echo", "review=echo", "end=echo"], rest)).await;
    assert_eq!(fleet.wait_for_end().await["state"], "done");
    let fired = routes(&fleet).await;
    assert_eq!(fired, ["review→lead", "lead→review", "review→lead", "lead→review", "review→end"]);
    assert_eq!(fleet.prompts_of("lead").await.len(), 2, "in the same conversation");
}

#[tokio::test]
async fn a_failure_is_routed_on_or_is_the_fleets() {
    let daemon = TestDaemon::start().await;
    let task = steps(&[fail("the model is on fire")]);
    let rest = "  start: a\n  routes: [{ when: a.failed, route_to: b }, { when: a.done, route_to: c }]\n";
    let fleet = start(&daemon, &file(&task, &["a", "b=echo", "c=echo"], rest)).await;
    assert_eq!(fleet.wait_for_end().await["state"], "done", "a route handled its failure");
    assert_eq!(routes(&fleet).await, ["a→b"]);
    assert!(fleet.prompts_of("b").await[0].contains("the model is on fire"));

    let fleet =
        start(&daemon, &file(&task, &["a", "b"], "  start: a\n  routes: [{ when: a.done, route_to: b }]\n"))
            .await;
    assert_eq!(fleet.wait_for_end().await["state"], "failed");
    // A crashed agent is a failure, even with exit status 0.
    let fleet = start(&daemon, &file(&steps(&[exit(0)]), &["a"], "  start: a\n")).await;
    assert_eq!(fleet.wait_for_end().await["state"], "failed");
}

#[tokio::test]
async fn an_agent_that_is_gone_in_mid_turn_has_failed_whatever_its_exit_code() {
    let daemon = TestDaemon::start().await;
    let rest = "  start: a\n  routes: [{ when: a.done, route_to: b }]\n";
    for code in [0, 1] {
        let fleet = start(&daemon, &file(&steps(&[say("half"), exit(code)]), &["a", "b=echo"], rest)).await;
        assert_eq!(fleet.wait_for_end().await["state"], "failed");
        assert!(fleet.prompts_of("b").await.is_empty());
    }
}

#[tokio::test]
async fn only_runs_that_the_fleet_started_trigger_routes() {
    let daemon = TestDaemon::start().await;
    let rest = "  start: a\n  routes: [{ when: [a.done, b.done], route_to: c }]\n";
    let fleet =
        start(&daemon, &file(&steps(&[question("go on?", &[])]), &["a", "b=echo", "c=echo"], rest)).await;
    let b = fleet.session("b").await;
    b.wait(&b.prompt("by hand").await).await;
    let a = fleet.session("a").await;
    let runs = a.runs().await;
    let ask = a.wait_for_ask(runs[0]["id"].as_str().unwrap()).await;
    fleet.client.answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
    assert_eq!(fleet.wait_for_end().await["state"], "done");
    assert!(routes(&fleet).await.is_empty());
}

#[tokio::test]
async fn a_person_is_asked_for_the_result() {
    let daemon = TestDaemon::start().await;
    let rest = "  start: [a, b]\n  routes: [{ when: [a.done, b.done], collect: human }]\n";
    let fleet = start(&daemon, &file("choose me", &["a=echo", "b=echo"], rest)).await;
    let ask = fleet.wait_for_ask().await;
    assert_eq!(fleet.show().await["state"], "waiting");
    let shown = daemon.client().get(&format!("/v1/asks/{ask}")).await.expect(200);
    assert_eq!((&shown["kind"], &shown["session_id"]), (&json!("question"), &Value::Null));
    assert_eq!(shown["fleet_id"], fleet.id.as_str());
    assert!(shown["prompt"].as_str().unwrap().contains("echo: choose me"), "{shown}");
    let listed = daemon.client().pending_asks().await;
    assert!(listed.iter().any(|one| one["id"] == ask.as_str()), "{listed:?}");
    daemon
        .client()
        .answer_ask(&ask, &json!({ "decision": "deny" }))
        .await
        .expect_refusal(400, "invalid_answer");
    let answer = daemon.client().answer_ask(&ask, &json!({ "value": "take b" })).await.expect(200);
    assert_eq!(answer["resolved"], true);
    let ended = fleet.wait_for_end().await;
    assert_eq!((&ended["state"], &ended["result"]), (&json!("done"), &json!("take b")));
    daemon
        .client()
        .answer_ask(&ask, &json!({ "value": "take a" }))
        .await
        .expect_refusal(409, "already_resolved");
}

#[tokio::test]
async fn a_cancel_stops_all_of_it_and_routes_nothing() {
    let daemon = TestDaemon::start().await;
    let rest = "  start: [a, b]\n  routes: [{ when: a.cancelled, route_to: c }]\n";
    let fleet = start(&daemon, &file(&steps(&[say("x"), sleep_forever()]), &["a", "b", "c"], rest)).await;
    for name in ["a", "b"] {
        let session = fleet.session(name).await;
        session.wait_for_event("its words", |event| event.kind == "text.delta").await;
    }
    let hit = fleet.cancel().await;
    assert_eq!(hit["cancelled"].as_array().unwrap().len(), 2, "{hit}");
    let ended = fleet.wait_for_end().await;
    assert_eq!(ended["state"], "cancelled", "{ended}");
    assert!(routes(&fleet).await.is_empty());
    for name in ["a", "b"] {
        let runs = fleet.session(name).await.runs().await;
        assert_eq!(runs[0]["finish_reason"], "cancelled");
    }
    assert_eq!(fleet.cancel().await["idle"], true);
}

#[tokio::test]
async fn a_failed_prompt_is_given_again_as_often_as_the_file_says() {
    let daemon = TestDaemon::start().await;
    let text = format!(
        "fleet:\n  task: {}\n  sessions: {{ a: {{ agent: script, retry: 2 }} }}\n  start: a\n",
        json!(steps(&[fail("no")]))
    );
    let fleet = start(&daemon, &text).await;
    assert_eq!(fleet.wait_for_end().await["state"], "failed");
    assert_eq!(fleet.prompts_of("a").await.len(), 3);
}

#[tokio::test]
async fn a_fleet_over_its_time_is_stopped() {
    let daemon = TestDaemon::start().await;
    let text = format!(
        "fleet:\n  timeout: 1s\n  task: {}\n  sessions: {{ a: {{ agent: script }} }}\n  start: a\n",
        json!(steps(&[sleep_forever()]))
    );
    let fleet = start(&daemon, &text).await;
    assert_eq!(fleet.wait_for_end().await["state"], "failed");
    assert_eq!(fleet.session("a").await.runs().await[0]["finish_reason"], "cancelled");
}

#[tokio::test]
async fn a_budget_counts_all_of_its_sessions_and_trips_in_mid_turn() {
    let daemon = TestDaemon::start().await;
    let text = format!(
        "fleet:\n  budget_usd: 1.0\n  task: {}\n  sessions: {{ a: {{ agent: script }}, b: {{ agent: script }} }}\n  start: [a, b]\n",
        json!(steps(&[cost(0.6), sleep_forever()]))
    );
    let fleet = start(&daemon, &text).await;
    let ended = fleet.wait_for_end().await;
    assert_eq!(ended["state"], "failed", "{ended}");
    for name in ["a", "b"] {
        let run = &fleet.session(name).await.runs().await[0];
        assert_eq!(run["finish_reason"], "budget_exceeded", "{run}");
    }
}

#[tokio::test]
async fn a_halt_holds_a_fleet_across_a_restart() {
    let mut daemon = TestDaemon::start().await;
    daemon.client().post_empty("/v1/halt").await.expect(200);
    let rest = "  start: a\n  routes: [{ when: a.done, route_to: b }]\n";
    let fleet = start(&daemon, &file("x", &["a=echo", "b=echo"], rest)).await;
    let a = fleet.session("a").await;
    a.wait_for_event("a queued run", |event| event.kind == "run.queued" && event.data["reason"] == "halted")
        .await;
    daemon.restart().await;
    assert_eq!(fleet.show().await["state"], "running");
    daemon.client().delete("/v1/halt").await.expect(200);
    assert_eq!(fleet.wait_for_end().await["state"], "done");
    assert_eq!(fleet.prompts_of("a").await.len(), 1);
}

#[tokio::test]
async fn a_fleet_goes_on_after_a_kill_and_starts_nothing_twice() {
    let mut daemon = TestDaemon::start().await;
    let rest = "  start: lead\n  routes:\n    - { when: lead.done, fan_out: { to: [a, b] } }\n    - { when: [a.done, b.done], route_to: c }\n    - { when: c.done, collect: human }\n";
    let fleet = start(
        &daemon,
        &file(&steps(&[question("go?", &[]), say("!")]), &["lead", "a=echo", "b=echo", "c=echo"], rest),
    )
    .await;
    let lead = fleet.session("lead").await;
    let run = loop {
        if let Some(run) = lead.runs().await.first() {
            break run["id"].as_str().unwrap().to_owned();
        }
    };
    let ask = lead.wait_for_ask(&run).await;
    daemon.kill9().await;
    daemon.start_again().await;
    daemon.client().answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
    let question = fleet.wait_for_ask().await;
    daemon.kill9().await;
    daemon.start_again().await;
    daemon.client().answer_ask(&question, &json!({ "value": "good" })).await.expect(200);
    let ended = fleet.wait_for_end().await;
    assert_eq!((&ended["state"], &ended["result"]), (&json!("done"), &json!("good")));
    for name in ["lead", "a", "b", "c"] {
        assert_eq!(fleet.prompts_of(name).await.len(), 1, "{name}");
    }
}

#[tokio::test]
async fn a_wrong_file_is_refused_with_its_place_before_anything_starts() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let refused = |text: &str| {
        let (workspace, text) = (workspace.clone(), text.to_owned());
        async move { workspace.try_fleet(&text).await.expect_refusal(400, "invalid_fleet") }
    };
    let details =
        refused("fleet:\n  task: t\n  sessions:\n    a: { agent: echo, modle: x }\n  start: a\n").await;
    assert_eq!((&details["line"], &details["column"]), (&json!(4), &json!(23)), "{details}");
    assert_eq!((&details["key"], &details["nearest"]), (&json!("modle"), &json!("model")));
    for text in [
        "fleet:\n  task: t\n  sessions: { a: { agent: echo } }\n  start: b\n",
        "fleet:\n  task: t\n  sessions: { a: { agent: echo } }\n  start: a\n  routes: [{ when: a.done, route_to: a }]\n",
        "fleet:\n  task: t\n  mode: llm\n  sessions: { a: { agent: echo } }\n  start: a\n",
        "fleet:\n  task: t\n  sessions: { a: { driver: 'grpc:localhost:1' } }\n  start: a\n",
        "not: a fleet\n",
    ] {
        refused(text).await;
    }
    let unknown = "fleet:\n  task: t\n  sessions: { a: { agent: echo }, b: { agent: nobody } }\n  start: a\n";
    let details = workspace.try_fleet(unknown).await.expect_refusal(400, "unknown_agent");
    assert_eq!(details["session"], "b");
    assert!(daemon.client().get("/v1/sessions").await.list().is_empty(), "no fleet was created");
    assert!(daemon.client().get(&workspace.path("/fleets")).await.list().is_empty());
}

#[tokio::test]
async fn json_takes_the_file_or_its_content_and_another_task() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let spec = json!({ "fleet": { "sessions": { "a": { "agent": "echo" } }, "start": "a" } });
    for body in [
        json!({ "spec": spec, "task": "mine" }),
        json!({ "spec": "fleet: { task: theirs, sessions: { a: { agent: echo } }, start: a }", "task": "mine" }),
    ] {
        let made = workspace.client.post(&workspace.path("/fleets"), &body).await.expect(201);
        assert_eq!(made["task"], "mine");
    }
    let fleets = daemon.client().get(&workspace.path("/fleets")).await.list();
    assert_eq!(fleets.len(), 2);
    let twice = workspace.client.with_key("k");
    let first =
        twice.post(&workspace.path("/fleets"), &json!({ "spec": spec, "task": "once" })).await.expect(201);
    let again =
        twice.post(&workspace.path("/fleets"), &json!({ "spec": spec, "task": "once" })).await.expect(201);
    assert_eq!(first["id"], again["id"]);
}

#[tokio::test]
async fn a_session_may_be_described_in_a_file_of_the_project() {
    let daemon = TestDaemon::start().await;
    let manifest = "[agent]\nname = \"mine\"\nbinary = \"cat\"\ndriver = \"exec\"\n";
    std::fs::write(daemon.home.project_dir().join("mine.toml"), manifest).unwrap();
    let text = "fleet: { task: through cat, mode: static, sessions: { a: { manifest: FILE } }, start: a }";
    let fleet = start(&daemon, &text.replace("FILE", "mine.toml")).await;
    let ended = fleet.wait_for_end().await;
    assert_eq!((&ended["state"], &ended["result"]), (&json!("done"), &json!("through cat")), "{ended}");
    let refused = daemon.workspace().await.try_fleet(&text.replace("FILE", "none.toml")).await;
    refused.expect_refusal(400, "unknown_agent");
}

#[tokio::test]
async fn every_example_runs_as_it_is() {
    let daemon = TestDaemon::start().await;
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/fleets");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let fleet = start(&daemon, &std::fs::read_to_string(&path).unwrap()).await;
        let mut stream = fleet.stream().await;
        loop {
            let event = stream.next().await;
            if event.kind == "ask.opened" && event.data["state"] == "pending" {
                let answer = match event.data["kind"].as_str().unwrap() {
                    "permission" => json!({ "decision": "allow_once" }),
                    _ => json!({ "value": "so be it" }),
                };
                // The stream also has asks of earlier fleets, which are already answered.
                let _answered_before =
                    daemon.client().answer_ask(event.data["id"].as_str().unwrap(), &answer).await;
            }
            if event.kind == "fleet.finished" && fleet.owns(&event) {
                assert_eq!(event.data["state"], "done", "{}: {event:?}", path.display());
                break;
            }
        }
        count += 1;
    }
    assert!(count >= 5, "{count} examples");
}
