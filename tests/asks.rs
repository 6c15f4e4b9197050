//! The life of an ask: who may answer it, what an answer does, and what withdraws it. Policies are in
//! `ask_policies.rs`.

use qd_testkit::{TestDaemon, TestSession, journal_rules, script::*, session::ask_id};
use serde_json::{Value, json};

fn allow() -> Value {
    json!({ "decision": "allow_once" })
}

/// A session with a run that waits for a permission: the session, the run and the ask.
async fn waiting(daemon: &TestDaemon) -> (TestSession, String, String) {
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[ask_bash("make install"), say("!")]).await;
    let ask = session.wait_for_ask(&run).await;
    (session, run, ask)
}

#[tokio::test]
async fn an_ask_shows_who_wants_what() {
    let daemon = TestDaemon::start().await;
    let (session, run, id) = waiting(&daemon).await;
    let asks = daemon.client().pending_asks().await;
    let [ask] = &asks[..] else { panic!("{asks:?}") };
    assert_eq!(&daemon.client().get(&format!("/v1/asks/{id}")).await.expect(200), ask);
    assert!(id.starts_with("ask_") && id.len() >= 20, "{id} cannot be guessed");
    for (field, value) in [
        ("id", json!(id)),
        ("session_id", json!(session.id)),
        ("run_id", json!(run)),
        ("kind", json!("permission")),
        ("tool", json!("Bash")),
        ("input", json!({ "command": "make install" })),
        ("state", json!("pending")),
        ("answer", json!(null)),
    ] {
        assert_eq!(ask[field], value, "{field}");
    }
    assert!(["low", "medium", "high"].contains(&ask["risk"].as_str().unwrap()), "{ask}");
    assert!(ask["prompt"].is_string() && ask["options"].is_array() && ask["opened_at"].is_string(), "{ask}");
}

#[tokio::test]
async fn an_allowed_ask_goes_on_and_a_denied_one_hears_the_reason() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let allowed = session.run_with_answer(ask_bash("make"), allow()).await;
    assert_eq!(allowed["text"], "allowed");
    let deny = json!({ "decision": "deny", "reason": "not on a Friday" });
    let denied = session.run_with_answer(ask_bash("make"), deny).await;
    assert_eq!(
        (&denied["text"], &denied["finish_reason"]),
        (&json!("denied: not on a Friday"), &json!("end_turn"))
    );
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn an_answer_says_resolved_and_is_journalled_and_delivered_exactly_once() {
    let daemon = TestDaemon::start().await;
    let (session, run, id) = waiting(&daemon).await;
    let answer = daemon.client().answer_ask(&id, &allow()).await.expect(200);
    assert_eq!(
        (&answer["resolved"], &answer["ask"]["id"], &answer["ask"]["state"]),
        (&json!(true), &json!(id), &json!("answered"))
    );
    assert_eq!(answer["ask"]["answer"]["decision"], "allow_once");
    session.wait(&run).await;
    let events = session.events_of(&run).await;
    let of =
        |kind: &str| events.iter().filter(|e| e.kind == kind).map(|e| (ask_id(e), e.seq)).collect::<Vec<_>>();
    let (opened, resolved, delivered) = (of("ask.opened"), of("ask.resolved"), of("ask.delivered"));
    assert_eq!((opened.len(), resolved.len(), delivered.len()), (1, 1, 1));
    assert!(opened[0].1 < resolved[0].1 && resolved[0].1 < delivered[0].1);
    assert!(opened[0].0 == id && resolved[0].0 == id && delivered[0].0 == id);
    let resolved = events.iter().find(|e| e.kind == "ask.resolved").unwrap();
    assert_eq!(resolved.data["by"], "user");
    assert!(daemon.client().pending_asks().await.is_empty());
    assert_eq!(daemon.client().get(&format!("/v1/asks/{id}")).await.expect(200)["state"], "answered");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_of_twenty_racing_answers_wins_and_the_others_are_told_which() {
    let daemon = TestDaemon::start().await;
    let (session, run, id) = waiting(&daemon).await;
    let mut racers = tokio::task::JoinSet::new();
    for n in 0..20 {
        let (client, id) = (daemon.client(), id.clone());
        let answer = json!({ "decision": "deny", "reason": format!("racer {n}") });
        racers.spawn(async move { client.answer_ask(&id, &answer).await });
    }
    let answers = racers.join_all().await;
    let (won, lost): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| answer.status == 200);
    let [won] = won[..] else { panic!("{} won", won.len()) };
    let winner = won.json()["ask"]["answer"]["reason"].as_str().unwrap().to_owned();
    for answer in lost {
        let details = answer.expect_refusal(409, "already_resolved");
        assert!(details.to_string().contains(&winner), "{answer} names the winning answer");
    }
    assert_eq!(session.wait(&run).await["text"], format!("denied: {winner}!"));
    assert_eq!(session.events().await.iter().filter(|event| event.kind == "ask.delivered").count(), 1);
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_second_answer_is_already_resolved_also_after_the_run_has_ended() {
    let daemon = TestDaemon::start().await;
    let (session, run, id) = waiting(&daemon).await;
    daemon.client().answer_ask(&id, &allow()).await.expect(200);
    session.wait(&run).await;
    let details = daemon
        .client()
        .answer_ask(&id, &json!({ "decision": "deny" }))
        .await
        .expect_refusal(409, "already_resolved");
    assert!(details.to_string().contains("allow_once"), "{details}");
}

#[tokio::test]
async fn an_invalid_answer_leaves_the_ask_open() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let permission = session.prompt_script(&[ask_bash("make")]).await;
    let id = session.wait_for_ask(&permission).await;
    for bad in
        [json!({}), json!({ "decision": "maybe" }), json!({ "value": "yes" }), json!({ "reason": "because" })]
    {
        session.client.answer_ask(&id, &bad).await.expect_refusal(400, "invalid_answer");
    }
    assert_eq!(session.client.pending_asks().await.len(), 1);
    session.client.answer_ask(&id, &allow()).await.expect(200);
    assert_eq!(session.wait(&permission).await["text"], "allowed");
    let choice = session.prompt_script(&[question("which?", &["red", "blue"])]).await;
    let id = session.wait_for_ask(&choice).await;
    for bad in [json!({}), json!({ "value": "green" }), json!({ "decision": "allow_once" })] {
        session.client.answer_ask(&id, &bad).await.expect_refusal(400, "invalid_answer");
    }
    session.client.answer_ask(&id, &json!({ "value": "blue" })).await.expect(200);
    assert_eq!(session.wait(&choice).await["text"], "blue");
}

#[tokio::test]
async fn a_question_takes_a_value_one_of_its_options_if_it_has_any() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[question("your name?", &[])]).await;
    let opened = session.wait_for_run_event(&run, "ask.opened").await;
    assert_eq!((&opened.data["kind"], &opened.data["prompt"]), (&json!("question"), &json!("your name?")));
    session.client.answer_ask(&ask_id(&opened), &json!({ "value": "anything at all" })).await.expect(200);
    assert_eq!(session.wait(&run).await["text"], "anything at all");
    let chosen =
        session.run_with_answer(question("which?", &["red", "blue"]), json!({ "value": "red" })).await;
    assert_eq!(chosen["text"], "red");
}

#[tokio::test]
async fn a_wrong_id_never_answers() {
    let daemon = TestDaemon::start().await;
    let (session, run, id) = waiting(&daemon).await;
    for wrong in ["ask_nobody", &id[..id.len() - 1], &run, &session.id] {
        daemon.client().answer_ask(wrong, &allow()).await.expect_refusal(404, "not_found");
    }
    assert_eq!(daemon.client().pending_asks().await.len(), 1);
    assert_eq!(session.run(&run).await["state"], "waiting");
}

#[tokio::test]
async fn a_steer_never_answers_an_ask() {
    let daemon = TestDaemon::start().await;
    let (session, run, id) = waiting(&daemon).await;
    for words in ["yes", "allow_once", &id] {
        let answer = session.try_steer(words).await;
        assert!(matches!(answer.status, 202 | 409), "{answer}");
    }
    assert_eq!(daemon.client().get(&format!("/v1/asks/{id}")).await.expect(200)["state"], "pending");
    assert_eq!(session.run(&run).await["state"], "waiting");
}

#[tokio::test]
async fn a_cancel_withdraws_the_asks_of_its_run_before_the_run_ends() {
    let daemon = TestDaemon::start().await;
    let (session, run, id) = waiting(&daemon).await;
    session.cancel().await;
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    let resolved = session.wait_for_run_event(&run, "ask.resolved").await;
    assert_eq!((&resolved.data["state"], &resolved.data["by"]), (&json!("withdrawn"), &json!("cancel")));
    daemon.client().answer_ask(&id, &allow()).await.expect_refusal(409, "withdrawn");
    assert_eq!(daemon.client().get(&format!("/v1/asks/{id}")).await.expect(200)["state"], "withdrawn");
    assert!(daemon.client().pending_asks().await.is_empty());
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn closing_a_session_withdraws_its_asks() {
    let daemon = TestDaemon::start().await;
    let (session, run, id) = waiting(&daemon).await;
    session.close().await;
    session.wait_for_event("session.closed", |event| event.kind == "session.closed").await;
    assert_eq!(session.run(&run).await["finish_reason"], "cancelled");
    daemon.client().answer_ask(&id, &allow()).await.expect_refusal(409, "withdrawn");
}

#[tokio::test]
async fn the_loss_of_the_agent_withdraws_its_asks_and_interrupts_its_run() {
    let daemon = TestDaemon::start().await;
    let (session, run, id) = waiting(&daemon).await;
    daemon.home.kill_workers();
    assert_eq!(session.wait(&run).await["finish_reason"], "interrupted");
    let resolved = session.wait_for_run_event(&run, "ask.resolved").await;
    assert_eq!((&resolved.data["state"], &resolved.data["by"]), (&json!("withdrawn"), &json!("agent")));
    daemon.client().answer_ask(&id, &allow()).await.expect_refusal(409, "withdrawn");
    assert!(daemon.client().pending_asks().await.is_empty());
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn an_answer_that_was_given_is_known_after_a_crash() {
    let mut daemon = TestDaemon::start().await;
    let (session, run, id) = waiting(&daemon).await;
    daemon.client().answer_ask(&id, &allow()).await.expect(200);
    daemon.restart().await;
    daemon
        .client()
        .answer_ask(&id, &json!({ "decision": "deny" }))
        .await
        .expect_refusal(409, "already_resolved");
    session.wait(&run).await;
    let delivered = session.events().await.iter().filter(|event| event.kind == "ask.delivered").count();
    assert!(delivered <= 1);
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn asks_of_two_sessions_do_not_wait_for_each_other_and_are_listed_oldest_first() {
    let daemon = TestDaemon::start().await;
    let (first, first_run, first_ask) = waiting(&daemon).await;
    let (second, second_run, second_ask) = waiting(&daemon).await;
    let ids: Vec<_> = daemon.client().pending_asks().await.iter().map(|ask| ask["id"].clone()).collect();
    assert_eq!(ids, [json!(first_ask), json!(second_ask)]);
    daemon.client().answer_ask(&second_ask, &allow()).await.expect(200);
    assert_eq!(second.wait(&second_run).await["text"], "allowed!");
    assert_eq!(first.run(&first_run).await["state"], "waiting");
    daemon.client().answer_ask(&first_ask, &allow()).await.expect(200);
    assert_eq!(first.wait(&first_run).await["text"], "allowed!");
}

#[tokio::test]
async fn an_answer_to_one_ask_of_a_run_does_not_answer_its_next() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[ask_bash("one"), say(" "), ask_bash("two")]).await;
    let first = session.wait_for_ask(&run).await;
    session.client.answer_ask(&first, &allow()).await.expect(200);
    let second = session
        .wait_for_event("the second ask", |event| {
            event.is_of_run(&run, "ask.opened") && ask_id(event) != first
        })
        .await;
    session.client.answer_ask(&first, &allow()).await.expect_refusal(409, "already_resolved");
    let deny = json!({ "decision": "deny", "reason": "no" });
    session.client.answer_ask(&ask_id(&second), &deny).await.expect(200);
    assert_eq!(session.wait(&run).await["text"], "allowed denied: no");
    assert_eq!(session.events().await.iter().filter(|event| event.kind == "ask.delivered").count(), 2);
}

#[tokio::test]
async fn an_answer_to_something_else_than_the_ask_leaves_it_open() {
    let daemon = TestDaemon::start().await;
    let (session, run, id) = waiting(&daemon).await;
    let ask = daemon.client().get(&format!("/v1/asks/{id}")).await.expect(200);
    // printf '{"command":"make install"}' | sha256sum
    let digest = "d22fa347f9bb77e0753363cb7fb08a414b874dbae88ccb14db892cc77dba5846";
    assert_eq!(ask["input_sha256"], digest);
    let opened = session.wait_for_run_event(&run, "ask.opened").await;
    assert_eq!(opened.data["input_sha256"], digest);
    for wrong in ["", "0", &digest.to_uppercase(), &"0".repeat(64)] {
        for decision in ["allow_once", "allow_always", "deny"] {
            let answer = json!({ "decision": decision, "input_sha256": wrong });
            daemon.client().answer_ask(&id, &answer).await.expect_refusal(409, "ask_changed");
        }
    }
    assert_eq!(daemon.client().pending_asks().await, [ask]);
    assert_eq!(session.run(&run).await["state"], "waiting");
    let answer = json!({ "decision": "allow_once", "input_sha256": digest });
    let answered = daemon.client().answer_ask(&id, &answer).await.expect(200);
    assert_eq!(answered["ask"]["input_sha256"], digest);
    assert_eq!(session.wait(&run).await["text"], "allowed!");
    daemon.client().answer_ask(&id, &answer).await.expect_refusal(409, "already_resolved");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn allow_always_for_high_risk_is_refused_and_leaves_the_ask_open() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[ask_bash("sudo rm -rf /")]).await;
    let id = session.wait_for_ask(&run).await;
    let always = json!({ "decision": "allow_always" });
    daemon.client().answer_ask(&id, &always).await.expect_refusal(400, "invalid_answer");
    assert_eq!(daemon.client().pending_asks().await.len(), 1);
    daemon.client().answer_ask(&id, &json!({ "decision": "deny" })).await.expect(200);
    assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
}

#[tokio::test]
async fn what_was_decided_is_listed_newest_first_with_who_decided() {
    let daemon = TestDaemon::start().await;
    let session = daemon
        .session_with(json!({ "agent": "script", "policy": [
        { "tool": "Bash", "match": "ls*", "decision": "allow" },
    ] }))
        .await;
    session.run_script(&[ask_bash("ls")]).await;
    session.run_with_answer(ask_bash("make"), json!({ "decision": "deny" })).await;
    session.run_with_answer(question("why?", &[]), json!({ "value": "so" })).await;
    let open = session.prompt_script(&[ask_bash("make install")]).await;
    let open = session.wait_for_ask(&open).await;
    let list = async |query: &str| {
        let answer = daemon.client().get(&format!("/v1/asks?{query}")).await;
        answer.expect(200).as_array().unwrap().clone()
    };
    let newest = list("before=&state=answered").await;
    let who: Vec<_> = newest.iter().map(|ask| ask["by"].as_str().unwrap()).collect();
    assert_eq!(who, ["user", "user", "policy"]);
    assert_eq!(newest[0]["answer"]["value"], "so");
    assert_eq!(newest[2]["rule"]["match"], "ls*");
    assert!(newest.iter().all(|ask| ask["resolved_at"].is_string() && ask["input_sha256"].is_string()));
    let first = newest[0]["id"].as_str().unwrap();
    assert_eq!(list(&format!("before={first}&state=answered&limit=1")).await, newest[1..2]);
    assert_eq!(list("before=&limit=1").await[0]["id"], open);
    assert_eq!(list("before=").await.into_iter().rev().collect::<Vec<_>>(), list("").await);
    let both = daemon.client().get(&format!("/v1/asks?before={first}&after={first}")).await;
    both.expect_refusal(400, "invalid_value");
    daemon.client().get("/v1/asks?before=ask_none").await.expect_refusal(400, "bad_cursor");
}

#[tokio::test]
async fn a_short_id_means_one_ask_only() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let mut ids = Vec::new();
    for n in 0..3 {
        let run = session.prompt_script(&[ask_bash(&format!("make {n}"))]).await;
        let id = session.wait_for_ask(&run).await;
        daemon.client().answer_ask(&id, &allow()).await.expect(200);
        session.wait(&run).await;
        ids.push(id);
    }
    // A session whose title is the beginning of an id: by that name, only the session is found.
    let shadowed = ids[0]["ask_".len()..][..4].to_owned();
    daemon.session_with(json!({ "agent": "script", "title": shadowed })).await;
    let path = format!("/v1/short-ids?kinds=ask&ids={},ask_unknown", ids.join(","));
    let short = daemon.client().get(&path).await.expect(200)["ids"].clone();
    assert_eq!(short["ask_unknown"], "ask_unknown");
    for id in &ids {
        let reference = short[id].as_str().unwrap();
        assert!(reference.len() >= 4 && id["ask_".len()..].starts_with(reference), "{id}: {reference}");
        let found = daemon.client().get(&format!("/v1/resolve?ref={reference}")).await.expect(200);
        let asks: Vec<_> =
            found.as_array().unwrap().iter().filter(|found| found["kind"] == "ask").cloned().collect();
        assert_eq!(asks.len(), 1, "{found}");
        assert_eq!(asks[0]["id"], *id);
    }
    assert_eq!(short[&ids[0]].as_str().unwrap().len(), 5, "four characters are the title");
    for bad in ["kinds=asks&ids=a", "kinds=&ids=a", "kinds=ask", "ids=a"] {
        let answer = daemon.client().get(&format!("/v1/short-ids?{bad}")).await;
        assert_eq!(answer.status, 400, "{answer}");
    }
    let many = vec!["a"; 101].join(",");
    let answer = daemon.client().get(&format!("/v1/short-ids?kinds=ask&ids={many}")).await;
    answer.expect_refusal(400, "invalid_value");
}
