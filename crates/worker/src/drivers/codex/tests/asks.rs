//! What the server asks of people, and how it hears of the answers.

use qd_protocol::event::{AskAnswer, AskKind, PermissionDecision};
use qd_protocol::link::{AgentUpdate, AskResolution, TurnStopReason, TurnUpdate};
use qd_protocol::policy::Risk;
use serde_json::{Value, json};

use super::agent_in_turn;
use crate::drivers::harness::decision_reply;

fn command_approval(decisions: Value) -> Value {
    json!({"kind": "command", "threadId": "t", "turnId": "u", "itemId": "c", "reason": "to be sure",
        "command": "/bin/bash -lc 'make it'", "cwd": "/w", "availableDecisions": decisions})
}

const COMMAND_METHOD: &str = "item/commandExecution/requestApproval";

#[tokio::test(start_paused = true)]
async fn a_yes_is_for_this_once_and_a_no_goes_on_with_its_reason_told_before_it() {
    let (mut stage, mut hand) = agent_in_turn().await;
    let longer =
        json!(["accept", {"acceptWithExecpolicyAmendment": {"execpolicy_amendment": ["make"]}}, "cancel"]);
    hand.send_request(json!(0), COMMAND_METHOD, command_approval(longer)).await;
    let ask = stage.wait_for_ask().await;
    assert_eq!((ask.kind, ask.tool.as_deref()), (AskKind::Permission, Some("Bash")));
    assert_eq!(ask.input, json!({"command": "make it", "cwd": "/w", "reason": "to be sure"}));
    stage.answer(&ask, decision_reply(PermissionDecision::AllowAlways, None));
    assert_eq!(hand.expect_answer(json!(0)).await, json!({"decision": "accept"}));

    hand.send_request(json!(1), COMMAND_METHOD, command_approval(Value::Null)).await;
    let ask = stage.wait_for_ask().await;
    stage.answer(&ask, decision_reply(PermissionDecision::Deny, Some("not on a Friday")));
    let (_, params) = hand.expect_method("turn/steer").await;
    assert_eq!((&params["threadId"], &params["expectedTurnId"]), (&json!("t"), &json!("u")));
    assert!(params["input"][0]["text"].as_str().unwrap().contains("not on a Friday"));
    assert_eq!(hand.expect_answer(json!(1)).await, json!({"decision": "decline"}));

    hand.send_request(json!(2), COMMAND_METHOD, command_approval(Value::Null)).await;
    let ask = stage.wait_for_ask().await;
    stage.answer(&ask, decision_reply(PermissionDecision::Deny, None));
    assert_eq!(hand.expect_answer(json!(2)).await, json!({"decision": "decline"}));
    hand.complete_turn("u", "completed").await;
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::EndTurn);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_would_only_take_a_yes_for_longer_is_refused_and_people_are_told() {
    let (mut stage, mut hand) = agent_in_turn().await;
    hand.send_request(json!(0), COMMAND_METHOD, command_approval(json!(["acceptForSession", "cancel"])))
        .await;
    assert_eq!(hand.expect_answer(json!(0)).await, json!({"decision": "decline"}));
    hand.complete_turn("u", "completed").await;
    let said = stage.wait_for_end("a").await.updates_without_model_calls();
    assert!(
        matches!(&said[..], [TurnUpdate::Notice { text }] if text.contains("no yes for this once")),
        "{said:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_cancel_answers_all_that_is_open_and_what_is_asked_after_it() {
    let (mut stage, mut hand) = agent_in_turn().await;
    hand.send_request(json!(0), COMMAND_METHOD, command_approval(Value::Null)).await;
    let questions = json!([{"id": "q", "header": "", "question": "Why?", "options": null}]);
    let question =
        json!({"threadId": "t", "turnId": "u", "itemId": "i", "questions": questions, "isBlocking": true});
    hand.send_request(json!(1), "item/tool/requestUserInput", question).await;
    stage.wait_for_ask().await;
    stage.wait_for_ask().await;
    stage.cancel("a");
    assert_eq!(hand.expect_answer(json!(0)).await, json!({"decision": "cancel"}));
    assert_eq!(hand.expect_answer(json!(1)).await, json!({"answers": {}}));
    hand.expect_interrupt("u").await;
    hand.send_request(json!(2), COMMAND_METHOD, command_approval(Value::Null)).await;
    assert_eq!(hand.expect_answer(json!(2)).await, json!({"decision": "cancel"}));
    hand.stop_turn("u").await;
    assert_eq!(stage.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn what_the_server_no_longer_waits_for_is_withdrawn_and_never_answered() {
    let (mut stage, mut hand) = agent_in_turn().await;
    hand.send_request(json!(7), COMMAND_METHOD, command_approval(Value::Null)).await;
    let ask = stage.wait_for_ask().await;
    hand.notify("serverRequest/resolved", json!({"threadId": "t", "requestId": 7})).await;
    assert_eq!(stage.next_update().await, AgentUpdate::AskWithdrawn { ask: ask.id.clone() });
    stage.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    hand.expect_silence().await;
    hand.complete_turn("u", "completed").await;
    stage.wait_for_end("a").await;
}

#[tokio::test(start_paused = true)]
async fn changes_are_judged_by_their_paths_and_those_that_nobody_has_seen_are_of_high_risk() {
    let (mut stage, mut hand) = agent_in_turn().await;
    let change = |path: &str| json!({"path": path, "kind": {"type": "add"}, "diff": "x\n"});
    let patch = json!({"type": "fileChange", "id": "p", "status": "inProgress", "changes": [change("/w/a"), change("/w/b")]});
    hand.send_item("item/started", "u", patch).await;
    let asked = |item: &str| json!({"threadId": "t", "turnId": "u", "itemId": item, "reason": null, "grantRoot": null});
    hand.send_request(json!(0), "item/fileChange/requestApproval", asked("p")).await;
    let ask = stage.wait_for_ask().await;
    assert_eq!((ask.tool.as_deref(), ask.risk), (Some("Edit"), None));
    assert_eq!(ask.input["path"], json!(["/w/a", "/w/b"]));
    stage.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    assert_eq!(hand.expect_answer(json!(0)).await, json!({"decision": "accept"}));

    hand.send_request(json!(1), "item/fileChange/requestApproval", asked("never seen")).await;
    let ask = stage.wait_for_ask().await;
    assert_eq!(ask.risk, Some(Risk::High));
    stage.answer(&ask, decision_reply(PermissionDecision::Deny, None));
    assert_eq!(hand.expect_answer(json!(1)).await, json!({"decision": "decline"}));
    hand.complete_turn("u", "completed").await;
    stage.wait_for_end("a").await;
}

#[tokio::test(start_paused = true)]
async fn wider_permissions_older_words_and_hosts_are_asked_for_and_answered_in_their_own_way() {
    let (mut stage, mut hand) = agent_in_turn().await;
    let wanted = json!({"network": {"enabled": true}});
    let request = json!({"threadId": "t", "turnId": "u", "itemId": "i", "cwd": "/w", "reason": "x", "permissions": wanted});
    for (id, decision, granted) in
        [(0, PermissionDecision::AllowOnce, wanted.clone()), (1, PermissionDecision::Deny, json!({}))]
    {
        hand.send_request(json!(id), "item/permissions/requestApproval", request.clone()).await;
        let ask = stage.wait_for_ask().await;
        assert_eq!((ask.tool.as_deref(), ask.risk), (Some("Permissions"), Some(Risk::High)));
        stage.answer(&ask, decision_reply(decision, None));
        assert_eq!(hand.expect_answer(json!(id)).await, json!({"permissions": granted, "scope": "turn"}));
    }
    let old = json!({"conversationId": "t", "callId": "c", "command": ["bash", "-lc", "ls"], "cwd": "/w", "parsedCmd": []});
    hand.send_request(json!(2), "execCommandApproval", old).await;
    let ask = stage.wait_for_ask().await;
    assert_eq!(ask.input["command"], json!(["bash", "-lc", "ls"]));
    stage.answer(&ask, decision_reply(PermissionDecision::Deny, Some("no")));
    assert_eq!(hand.expect_answer(json!(2)).await, json!({"decision": {"denied": {"rejection": "no"}}}));
    let old = json!({"conversationId": "t", "callId": "c", "fileChanges": {"/w/a": {"type": "add", "content": "x"}}});
    hand.send_request(json!(3), "applyPatchApproval", old).await;
    let ask = stage.wait_for_ask().await;
    assert_eq!((&ask.input["path"], ask.risk), (&json!(["/w/a"]), None));
    stage.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    assert_eq!(hand.expect_answer(json!(3)).await, json!({"decision": "approved"}));

    let mut host = command_approval(Value::Null);
    host["networkApprovalContext"] = json!({"host": "example.org", "protocol": "https"});
    hand.send_request(json!(4), COMMAND_METHOD, host).await;
    let ask = stage.wait_for_ask().await;
    assert_eq!((ask.tool.as_deref(), &ask.input["url"]), (Some("Network"), &json!("https://example.org")));
    stage.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    assert_eq!(hand.expect_answer(json!(4)).await, json!({"decision": "accept"}));
    hand.complete_turn("u", "completed").await;
    stage.wait_for_end("a").await;
}

#[tokio::test(start_paused = true)]
async fn questions_are_asked_one_after_the_other_and_answered_together() {
    let (mut stage, mut hand) = agent_in_turn().await;
    let options = json!([{"label": "Red", "description": "like fire"}, {"label": "Blue", "description": ""}]);
    let questions = json!([
        {"id": "pick", "header": "Colour", "question": "Which?", "isOther": true, "isSecret": false, "options": options},
        {"id": "why", "header": "", "question": "Why?", "isSecret": true, "options": null},
    ]);
    let request =
        json!({"threadId": "t", "turnId": "u", "itemId": "i", "questions": questions, "isBlocking": true});
    hand.send_request(json!(0), "item/tool/requestUserInput", request).await;
    let says = |value: &str| {
        AskResolution::Answered(AskAnswer { decision: None, value: Some(value.to_owned()), reason: None })
    };
    let ask = stage.wait_for_ask().await;
    assert_eq!((ask.kind, &ask.options[..]), (AskKind::Question, &["Red".to_owned(), "Blue".to_owned()][..]));
    assert_eq!(ask.prompt, "Colour: Which?\nRed: like fire");
    stage.answer(&ask, says("Blue"));
    let ask = stage.wait_for_ask().await;
    assert!(ask.options.is_empty() && ask.prompt.contains("journalled"));
    stage.answer(&ask, says("it is calm"));
    let answers = json!({"pick": {"answers": ["Blue"]}, "why": {"answers": ["it is calm"]}});
    assert_eq!(hand.expect_answer(json!(0)).await, json!({"answers": answers}));
    hand.complete_turn("u", "completed").await;
    stage.wait_for_end("a").await;
}

#[tokio::test(start_paused = true)]
async fn mcp_servers_ask_for_their_tools_and_fill_their_forms() {
    let (mut stage, mut hand) = agent_in_turn().await;
    let call = json!({"type": "mcpToolCall", "id": "c", "server": "s", "tool": "poke", "arguments": {"what": "it"}, "status": "inProgress"});
    hand.send_item("item/started", "u", call).await;
    let meta = json!({"codex_approval_kind": "mcp_tool_call", "persist": ["session", "always"], "tool_params": {"what": "it"}});
    let schema = json!({"type": "object", "properties": {}});
    let request = json!({"threadId": "t", "turnId": "u", "serverName": "s", "mode": "form", "_meta": meta, "message": "Allow?", "requestedSchema": schema});
    hand.send_request(json!(0), "mcpServer/elicitation/request", request).await;
    let ask = stage.wait_for_ask().await;
    assert_eq!((ask.tool.as_deref(), &ask.input), (Some("mcp__s__poke"), &json!({"what": "it"})));
    stage.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    assert_eq!(hand.expect_answer(json!(0)).await, json!({"action": "accept", "content": {}}));

    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}});
    let request = json!({"threadId": "t", "turnId": "u", "serverName": "s", "mode": "form", "_meta": null, "message": "Fill in", "requestedSchema": schema});
    hand.send_request(json!(1), "mcpServer/elicitation/request", request).await;
    let ask = stage.wait_for_ask().await;
    assert_eq!(ask.kind, AskKind::Question);
    let seven =
        AskResolution::Answered(AskAnswer { decision: None, value: Some("7".to_owned()), reason: None });
    stage.answer(&ask, seven);
    assert_eq!(hand.expect_answer(json!(1)).await, json!({"action": "accept", "content": {"n": 7}}));
    let proof = json!({"threadId": "t", "serverName": "s", "mode": "openai/userVerification", "title": "x"});
    hand.send_request(json!(2), "mcpServer/elicitation/request", proof).await;
    assert_eq!(hand.expect_answer(json!(2)).await, json!({"error": -32602}));
    hand.complete_turn("u", "completed").await;
    stage.wait_for_end("a").await;
}

#[tokio::test(start_paused = true)]
async fn between_turns_nobody_is_asked_and_the_server_is_told_no() {
    let (mut stage, mut hand) = agent_in_turn().await;
    hand.complete_turn("u", "completed").await;
    stage.wait_for_end("a").await;
    hand.send_request(json!(0), COMMAND_METHOD, command_approval(Value::Null)).await;
    assert_eq!(hand.expect_answer(json!(0)).await, json!({"decision": "decline"}));
    hand.send_request(json!(1), "no/such/thing", json!({})).await;
    assert_eq!(hand.expect_answer(json!(1)).await, json!({"error": -32601}));
}
