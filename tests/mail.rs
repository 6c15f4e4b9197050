//! Mail to sessions over HTTP and the command line: delivered once and in order, visible to people, claimed,
//! acknowledged and returned, also across `kill -9`.

use qd_testkit::{TestDaemon, TestSession, journal_rules, script::*};
use serde_json::{Value, json};

async fn post(session: &TestSession, mail: Value) -> Value {
    session.client.post(&session.path("/mail"), &mail).await.expect(202)
}

async fn list(session: &TestSession, query: &str) -> Vec<Value> {
    session.client.get(&session.path(&format!("/mail{query}"))).await.list()
}

async fn claim(session: &TestSession, request: Value) -> Vec<Value> {
    session.client.post(&session.path("/mail/claim"), &request).await.list()
}

fn field_of_each<'a>(list: &'a [Value], key: &str) -> Vec<&'a str> {
    list.iter().map(|one| one[key].as_str().unwrap()).collect()
}

#[tokio::test]
async fn an_idle_session_is_woken_with_a_prompt() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let receipt = post(&session, json!({ "text": "hello", "correlation_id": "c1" })).await;
    assert_eq!(receipt["deliver"], "prompt", "{receipt}");
    let run = session.wait(receipt["run_id"].as_str().unwrap()).await;
    assert_eq!((&run["text"], &run["finish_reason"]), (&json!("echo: hello"), &json!("end_turn")));
    let mail = list(&session, "").await;
    assert_eq!(mail.len(), 1);
    let one = &mail[0];
    assert_eq!(
        (&one["from"], &one["to"], &one["kind"], &one["state"], &one["delivered_as"]),
        (&json!("user"), &json!(session.id), &json!("task"), &json!("delivered"), &json!("prompt")),
    );
    assert_eq!((&one["correlation_id"], &one["sent_at"]), (&json!("c1"), &receipt["sent_at"]));
    let sent = session.wait_for_event("mail.sent", |event| event.kind == "mail.sent").await;
    assert_eq!((&sent.data["id"], &receipt["seq"]), (&receipt["id"], &json!(sent.seq)));
    let delivered = session.wait_for_event("mail.delivered", |event| event.kind == "mail.delivered").await;
    assert_eq!(delivered.run_id.as_deref(), receipt["run_id"].as_str());
    assert_eq!(
        session
            .client
            .get(&session.path(&format!("/mail/{}", one["id"].as_str().unwrap())))
            .await
            .expect(200),
        *one
    );
    assert_eq!(daemon.client().get("/v1/mail?state=delivered").await.list(), mail);
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_busy_session_gets_its_mail_after_its_turn_in_the_order_of_arrival() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let first = session.prompt_script(&[say("busy"), await_steer(300_000)]).await;
    session.wait_for_run_event(&first, "text.delta").await;
    let mut runs = Vec::new();
    for word in ["one", "two", "three"] {
        let receipt = post(&session, json!({ "text": steps(&[say(word)]) })).await;
        runs.push(receipt["run_id"].as_str().unwrap().to_owned());
    }
    assert!(field_of_each(&list(&session, "").await, "state").iter().all(|state| *state == "delivering"));
    session.steer("go on").await;
    for (run, word) in runs.iter().zip(["one", "two", "three"]) {
        assert_eq!(session.wait(run).await["text"], word);
    }
    let events = session.events().await;
    let order: Vec<_> = events.iter().filter(|event| event.kind == "mail.delivered").collect();
    let order: Vec<_> = order.iter().map(|event| event.run_id.clone().unwrap()).collect();
    assert_eq!(order, runs);
    journal_rules::check(&events);
}

#[tokio::test]
async fn a_steer_reaches_a_busy_agent_and_a_missed_one_runs_next() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("x "), await_steer(300_000), say(" "), sleep(100)]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let receipt = post(&session, json!({ "text": "to the left", "deliver": "steer" })).await;
    assert_eq!((&receipt["deliver"], &receipt["run_id"]), (&json!("steer"), &json!(run)));
    session.wait_for_event("it is delivered", |event| event.kind == "mail.delivered").await;
    let late = post(&session, json!({ "text": steps(&[say("not lost")]), "deliver": "steer" })).await;
    assert_eq!(session.wait(&run).await["text"], "x steered: to the left ");
    let delivered = session
        .wait_for_event("the second is delivered", |event| {
            event.kind == "mail.delivered" && event.data["id"] == late["id"]
        })
        .await;
    let became = delivered.run_id.unwrap();
    assert_eq!(session.wait(&became).await["text"], "not lost");
    assert_eq!(field_of_each(&list(&session, "").await, "delivered_as"), ["steer", "prompt"]);
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn who_cannot_be_steered_gets_it_after_its_turn() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let run = session.prompt("__sleep_ms:300 x").await;
    session.wait_for_start(&run).await;
    let receipt = post(&session, json!({ "text": "later", "deliver": "steer" })).await;
    assert_eq!(receipt["deliver"], "prompt");
    assert_eq!(session.wait(receipt["run_id"].as_str().unwrap()).await["text"], "echo: later");
}

#[tokio::test]
async fn an_id_is_one_message_for_ever() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let other = daemon.session("echo").await;
    let mail = json!({ "id": "mine", "text": "once" });
    let first = post(&session, mail.clone()).await;
    assert_eq!(post(&session, mail.clone()).await, first);
    daemon.kill9().await;
    daemon.start_again().await;
    let (session, other) = (session.with_client(daemon.client()), other.with_client(daemon.client()));
    assert_eq!(post(&session, mail.clone()).await, first, "also after a crash");
    let conflict = json!({ "id": "mine", "text": "twice" });
    session.client.post(&session.path("/mail"), &conflict).await.expect_refusal(409, "mail_id_conflict");
    other.client.post(&other.path("/mail"), &mail).await.expect_refusal(409, "mail_id_conflict");
    session.wait(first["run_id"].as_str().unwrap()).await;
    assert_eq!(session.runs().await.len(), 1);
    // The mail id stays taken even after its session is purged.
    session.client.delete(&session.path("?purge=true")).await;
    qd_testkit::poll_until("the purge", async || {
        (session.client.get(&session.path("")).await.status == 404).then_some(())
    })
    .await;
    other.client.post(&other.path("/mail"), &mail).await.expect_refusal(409, "mail_id_conflict");
    assert!(daemon.client().get("/v1/mail").await.list().is_empty());
}

#[tokio::test]
async fn an_idempotency_key_sends_once() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let keyed = session.with_client(daemon.client().with_key("k"));
    let first = post(&keyed, json!({ "text": "once", "deliver": "hold" })).await;
    assert_eq!(post(&keyed, json!({ "text": "once", "deliver": "hold" })).await, first);
    assert_eq!(list(&session, "").await.len(), 1);
    keyed
        .client
        .post(&keyed.path("/mail"), &json!({ "text": "x" }))
        .await
        .expect_refusal(409, "idempotency_conflict");
    let claimed = claim(&keyed, json!({})).await;
    assert_eq!(claim(&keyed, json!({})).await, claimed, "the same claim under the same key");
    assert!(claim(&session, json!({})).await.is_empty());
}

#[tokio::test]
async fn what_is_held_waits_until_it_is_claimed_and_acknowledged() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    for text in ["one", "two", "three"] {
        let receipt = post(&session, json!({ "text": text, "deliver": "hold" })).await;
        assert_eq!(receipt["run_id"], Value::Null);
    }
    assert!(session.runs().await.is_empty());
    let claimed = claim(&session, json!({ "max": 2 })).await;
    assert_eq!(field_of_each(&claimed, "text"), ["one", "two"]);
    assert_eq!(field_of_each(&list(&session, "?state=waiting").await, "text"), ["three"]);
    let ack = |one: &Value| session.path(&format!("/mail/{}/ack", one["id"].as_str().unwrap()));
    let by = json!({ "claim": claimed[0]["claim"] });
    let acknowledged = session.client.post(&ack(&claimed[0]), &by).await.expect(200);
    assert_eq!(acknowledged["state"], "acknowledged");
    assert_eq!(
        session.client.post(&ack(&claimed[0]), &by).await.expect(200),
        acknowledged,
        "a repeated acknowledgement succeeds"
    );
    let wrong = json!({ "claim": 1 });
    session.client.post(&ack(&claimed[1]), &wrong).await.expect_refusal(409, "not_claimed");
    session.client.post_empty(&ack(&claimed[1])).await.expect(200);
    let third = list(&session, "?state=waiting").await.remove(0);
    session.client.post_empty(&ack(&third)).await.expect_refusal(409, "not_claimed");
    session.client.post_empty(&session.path("/mail/nobody/ack")).await.expect_refusal(404, "not_found");
}

#[tokio::test]
async fn a_claim_that_is_not_acknowledged_comes_back_and_at_last_nobody_gets_it() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let sent = post(&session, json!({ "text": "poison", "deliver": "hold" })).await;
    let short = json!({ "limit_s": 0.05 });
    assert_eq!(claim(&session, short.clone()).await.len(), 1);
    // Also if the daemon dies before the claim expires.
    daemon.kill9().await;
    daemon.start_again().await;
    let session = session.with_client(daemon.client());
    for round in 1..5 {
        session
            .wait_for_event("it comes back", |event| {
                event.kind == "mail.returned" && event.data["returns"] == round
            })
            .await;
        assert_eq!(claim(&session, short.clone()).await.len(), 1, "{round}");
    }
    let kept = session.wait_for_event("quarantine", |event| event.kind == "mail.quarantined").await;
    assert_eq!(kept.data["id"], sent["id"]);
    let mail = list(&session, "?state=quarantined").await;
    assert!(mail[0]["reason"].as_str().unwrap().contains("not acknowledged in time"), "{mail:?}");
    assert!(claim(&session, json!({})).await.is_empty());
}

#[tokio::test]
async fn what_a_cancel_took_from_the_queue_is_still_in_the_mailbox() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[sleep_forever()]).await;
    session.wait_for_start(&run).await;
    post(&session, json!({ "text": "do not lose me" })).await;
    session.cancel().await;
    session.wait_for_event("it comes back", |event| event.kind == "mail.returned").await;
    let mail = list(&session, "?state=waiting").await;
    assert_eq!(field_of_each(&mail, "text"), ["do not lose me"]);
    assert_eq!(claim(&session, json!({})).await.len(), 1);
    session.wait(&run).await;
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn mail_under_way_survives_a_crash_and_is_delivered_once() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.prompt_script(&[say("x "), await_steer(300_000)]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    let queued = post(&session, json!({ "text": steps(&[say("after")]) })).await;
    let steered = post(&session, json!({ "text": "go", "deliver": "steer" })).await;
    daemon.kill9().await;
    daemon.start_again().await;
    let session = session.with_client(daemon.client());
    assert_eq!(session.wait(&run).await["text"], "x steered: go");
    assert_eq!(session.wait(queued["run_id"].as_str().unwrap()).await["text"], "after");
    let events = session.events().await;
    for id in [&queued["id"], &steered["id"]] {
        let delivered =
            events.iter().filter(|event| event.kind == "mail.delivered" && event.data["id"] == *id);
        assert_eq!(delivered.count(), 1, "{id}");
    }
    journal_rules::check(&events);
}

#[tokio::test]
async fn a_mistake_is_told_and_sends_nothing() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let try_post = async |mail: Value| session.client.post(&session.path("/mail"), &mail).await;
    try_post(json!({ "text": " " })).await.expect_refusal(400, "invalid_value");
    try_post(json!({ "text": "x".repeat(256 * 1024 + 1) })).await.expect_refusal(400, "invalid_value");
    try_post(json!({ "text": "x", "from": "lead" })).await.expect_refusal(400, "invalid_request");
    try_post(json!({ "text": "x", "kind": "order" })).await.expect_refusal(400, "invalid_request");
    try_post(json!({ "text": "x", "id": "../x" })).await.expect_refusal(400, "invalid_request");
    try_post(json!({ "text": "x", "correlation_id": "a\nb" })).await.expect_refusal(400, "invalid_value");
    for request in
        [json!({ "max": 0 }), json!({ "max": 101 }), json!({ "limit_s": 0 }), json!({ "limit_s": 3601 })]
    {
        session
            .client
            .post(&session.path("/mail/claim"), &request)
            .await
            .expect_refusal(400, "invalid_value");
    }
    session.client.get(&session.path("/mail?state=lost")).await.expect_refusal(400, "invalid_value");
    session.client.get(&session.path("/mail?after=nobody")).await.expect_refusal(400, "bad_cursor");
    assert!(list(&session, "").await.is_empty());
    post(&session, json!({ "text": "held", "deliver": "hold" })).await;
    session.close().await;
    session.wait_for_event("the end", |event| event.kind == "session.closed").await;
    try_post(json!({ "text": "late" })).await.expect_refusal(409, "session_closed");
    assert_eq!(field_of_each(&list(&session, "").await, "state"), ["quarantined"], "nothing is left open");
}

#[tokio::test]
async fn lists_made_again_from_the_events_have_the_same_mail() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let sent = post(&session, json!({ "text": "a" })).await;
    session.wait(sent["run_id"].as_str().unwrap()).await;
    post(&session, json!({ "text": "b", "deliver": "hold", "kind": "ask" })).await;
    claim(&session, json!({ "limit_s": 600 })).await;
    let before = list(&session, "").await;
    daemon.terminate().await;
    daemon.qd(&["doctor", "--rebuild"]).await;
    daemon.start_again().await;
    let session = session.with_client(daemon.client());
    assert_eq!(list(&session, "").await, before);
    assert_eq!(post(&session, json!({ "id": sent["id"], "text": "a" })).await, sent);
}

#[tokio::test]
async fn the_command_line_sends_lists_and_follows() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "echo", "title": "desk" })).await;
    let mut follows = daemon.home.start(&["mail", "-f", "--json"]);
    // `qd mail -f` prints nothing until there is an event, so messages are sent until it prints one.
    let id = daemon
        .qd(&["mail", "send", "desk", "the words", "--hold", "--kind", "ask"])
        .await
        .ok()
        .trim()
        .to_owned();
    assert!(id.starts_with("mail_"), "{id}");
    let listed = daemon.qd(&["mail", "desk"]).await.ok();
    assert!(listed.contains(&id) && listed.contains("waiting") && listed.contains("the words"), "{listed}");
    let reply = daemon.qd(&["mail", "send", "desk", "and back", "--reply-to", &id, "--json"]).await.json();
    session.wait(reply["run_id"].as_str().unwrap()).await;
    let all = daemon.qd(&["mail", "--json"]).await.json();
    assert_eq!(field_of_each(all.as_array().unwrap(), "kind"), ["ask", "reply"]);
    assert_eq!(all[1]["in_reply_to"], id);
    assert!(daemon.qd(&["mail", "--state", "waiting"]).await.ok().contains(&id));
    let sends = async {
        loop {
            daemon.qd(&["mail", "send", "desk", "more", "--hold"]).await.ok();
        }
    };
    tokio::select! {
        () = follows.wait_for_stdout("\"mail.sent\"") => {}
        () = sends => {}
    }
    daemon.qd(&["mail", "nobody"]).await.expect_exit(3);
    daemon.qd(&["mail", "send", "desk", "x", "--reply-to", "a b"]).await.expect_exit(2);
}
