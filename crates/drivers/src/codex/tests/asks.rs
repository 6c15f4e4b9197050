//! Asks from the server and the responses that it gets.

use qd_protocol::event::{AskAnswer, AskKind, PermissionDecision};
use qd_protocol::link::{AgentUpdate, AskResolution, TurnStopReason, TurnUpdate};
use qd_protocol::policy::Risk;
use serde_json::{Value, json};

use super::agent_in_turn;
use crate::harness::decision_reply;

fn command_approval(decisions: Value) -> Value {
    json!({"kind": "command", "threadId": "t", "turnId": "u", "itemId": "c", "reason": "to be sure",
        "command": "/bin/bash -lc 'make it'", "cwd": "/w", "availableDecisions": decisions})
}

const COMMAND_METHOD: &str = "item/commandExecution/requestApproval";

#[tokio::test(start_paused = true)]
async fn permission_is_given_once_and_a_denial_is_preceded_by_its_reason() {
    let (mut harness, mut fake) = agent_in_turn().await;
    let decisions =
        json!(["accept", {"acceptWithExecpolicyAmendment": {"execpolicy_amendment": ["make"]}}, "cancel"]);
    fake.send_request(json!(0), COMMAND_METHOD, command_approval(decisions)).await;
    let ask = harness.wait_for_ask().await;
    assert_eq!((ask.kind, ask.tool.as_deref()), (AskKind::Permission, Some("Bash")));
    assert_eq!(ask.input, json!({"command": "make it", "cwd": "/w", "reason": "to be sure"}));
    harness.answer(&ask, decision_reply(PermissionDecision::AllowAlways, None));
    assert_eq!(fake.expect_answer(json!(0)).await, json!({"decision": "accept"}));

    fake.send_request(json!(1), COMMAND_METHOD, command_approval(Value::Null)).await;
    let ask = harness.wait_for_ask().await;
    harness.answer(&ask, decision_reply(PermissionDecision::Deny, Some("not on a Friday")));
    let (_, params) = fake.expect_method("turn/steer").await;
    assert_eq!((&params["threadId"], &params["expectedTurnId"]), (&json!("t"), &json!("u")));
    assert!(params["input"][0]["text"].as_str().unwrap().contains("not on a Friday"));
    assert_eq!(fake.expect_answer(json!(1)).await, json!({"decision": "decline"}));

    fake.send_request(json!(2), COMMAND_METHOD, command_approval(Value::Null)).await;
    let ask = harness.wait_for_ask().await;
    harness.answer(&ask, decision_reply(PermissionDecision::Deny, None));
    assert_eq!(fake.expect_answer(json!(2)).await, json!({"decision": "decline"}));
    fake.complete_turn("u", "completed").await;
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::EndTurn);
}

#[tokio::test(start_paused = true)]
async fn a_request_without_an_option_for_once_is_refused_with_a_notice() {
    let (mut harness, mut fake) = agent_in_turn().await;
    fake.send_request(json!(0), COMMAND_METHOD, command_approval(json!(["acceptForSession", "cancel"])))
        .await;
    assert_eq!(fake.expect_answer(json!(0)).await, json!({"decision": "decline"}));
    fake.complete_turn("u", "completed").await;
    let updates = harness.wait_for_end("a").await.updates_without_model_calls();
    assert!(
        matches!(&updates[..], [TurnUpdate::Notice { text, .. }] if text.contains("no way to allow it just once")),
        "{updates:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_cancel_answers_all_open_asks_and_later_ones() {
    let (mut harness, mut fake) = agent_in_turn().await;
    fake.send_request(json!(0), COMMAND_METHOD, command_approval(Value::Null)).await;
    let questions = json!([{"id": "q", "header": "", "question": "Why?", "options": null}]);
    let question =
        json!({"threadId": "t", "turnId": "u", "itemId": "i", "questions": questions, "isBlocking": true});
    fake.send_request(json!(1), "item/tool/requestUserInput", question).await;
    harness.wait_for_ask().await;
    harness.wait_for_ask().await;
    harness.cancel("a");
    assert_eq!(fake.expect_answer(json!(0)).await, json!({"decision": "cancel"}));
    assert_eq!(fake.expect_answer(json!(1)).await, json!({"answers": {}}));
    fake.expect_interrupt("u").await;
    fake.send_request(json!(2), COMMAND_METHOD, command_approval(Value::Null)).await;
    assert_eq!(fake.expect_answer(json!(2)).await, json!({"decision": "cancel"}));
    fake.stop_turn("u").await;
    assert_eq!(harness.wait_for_end("a").await.stop(), TurnStopReason::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn an_ask_that_the_server_resolved_itself_is_withdrawn_and_never_answered() {
    let (mut harness, mut fake) = agent_in_turn().await;
    fake.send_request(json!(7), COMMAND_METHOD, command_approval(Value::Null)).await;
    let ask = harness.wait_for_ask().await;
    fake.notify("serverRequest/resolved", json!({"threadId": "t", "requestId": 7})).await;
    assert_eq!(harness.next_update().await, AgentUpdate::AskWithdrawn { ask: ask.id.clone() });
    harness.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    fake.expect_silence().await;
    fake.complete_turn("u", "completed").await;
    harness.wait_for_end("a").await;
}

#[tokio::test(start_paused = true)]
async fn changes_are_judged_by_their_paths_and_unknown_ones_are_high_risk() {
    let (mut harness, mut fake) = agent_in_turn().await;
    let change = |path: &str| json!({"path": path, "kind": {"type": "add"}, "diff": "x\n"});
    let patch = json!({"type": "fileChange", "id": "p", "status": "inProgress", "changes": [change("/w/a"), change("/w/b")]});
    fake.send_item("item/started", "u", patch).await;
    let request = |item: &str| json!({"threadId": "t", "turnId": "u", "itemId": item, "reason": null, "grantRoot": null});
    fake.send_request(json!(0), "item/fileChange/requestApproval", request("p")).await;
    let ask = harness.wait_for_ask().await;
    assert_eq!((ask.tool.as_deref(), ask.risk), (Some("Edit"), None));
    assert_eq!(ask.input["path"], json!(["/w/a", "/w/b"]));
    harness.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    assert_eq!(fake.expect_answer(json!(0)).await, json!({"decision": "accept"}));

    fake.send_request(json!(1), "item/fileChange/requestApproval", request("never seen")).await;
    let ask = harness.wait_for_ask().await;
    assert_eq!(ask.risk, Some(Risk::High));
    harness.answer(&ask, decision_reply(PermissionDecision::Deny, None));
    assert_eq!(fake.expect_answer(json!(1)).await, json!({"decision": "decline"}));
    fake.complete_turn("u", "completed").await;
    harness.wait_for_end("a").await;
}

#[tokio::test(start_paused = true)]
async fn permissions_older_methods_and_hosts_are_answered_in_their_own_formats() {
    let (mut harness, mut fake) = agent_in_turn().await;
    let permissions = json!({"network": {"enabled": true}});
    let request = json!({"threadId": "t", "turnId": "u", "itemId": "i", "cwd": "/w", "reason": "x", "permissions": permissions});
    for (id, decision, granted) in
        [(0, PermissionDecision::AllowOnce, permissions.clone()), (1, PermissionDecision::Deny, json!({}))]
    {
        fake.send_request(json!(id), "item/permissions/requestApproval", request.clone()).await;
        let ask = harness.wait_for_ask().await;
        assert_eq!((ask.tool.as_deref(), ask.risk), (Some("Permissions"), Some(Risk::High)));
        harness.answer(&ask, decision_reply(decision, None));
        assert_eq!(fake.expect_answer(json!(id)).await, json!({"permissions": granted, "scope": "turn"}));
    }
    let old = json!({"conversationId": "t", "callId": "c", "command": ["bash", "-lc", "ls"], "cwd": "/w", "parsedCmd": []});
    fake.send_request(json!(2), "execCommandApproval", old).await;
    let ask = harness.wait_for_ask().await;
    assert_eq!(ask.input["command"], json!(["bash", "-lc", "ls"]));
    harness.answer(&ask, decision_reply(PermissionDecision::Deny, Some("no")));
    assert_eq!(fake.expect_answer(json!(2)).await, json!({"decision": {"denied": {"rejection": "no"}}}));
    let old = json!({"conversationId": "t", "callId": "c", "fileChanges": {"/w/a": {"type": "add", "content": "x"}}});
    fake.send_request(json!(3), "applyPatchApproval", old).await;
    let ask = harness.wait_for_ask().await;
    assert_eq!((&ask.input["path"], ask.risk), (&json!(["/w/a"]), None));
    harness.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    assert_eq!(fake.expect_answer(json!(3)).await, json!({"decision": "approved"}));

    let mut host = command_approval(Value::Null);
    host["networkApprovalContext"] = json!({"host": "example.org", "protocol": "https"});
    fake.send_request(json!(4), COMMAND_METHOD, host).await;
    let ask = harness.wait_for_ask().await;
    assert_eq!((ask.tool.as_deref(), &ask.input["url"]), (Some("Network"), &json!("https://example.org")));
    harness.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    assert_eq!(fake.expect_answer(json!(4)).await, json!({"decision": "accept"}));
    fake.complete_turn("u", "completed").await;
    harness.wait_for_end("a").await;
}

#[tokio::test(start_paused = true)]
async fn questions_are_asked_one_after_the_other_and_answered_together() {
    let (mut harness, mut fake) = agent_in_turn().await;
    let options = json!([{"label": "Red", "description": "like fire"}, {"label": "Blue", "description": ""}]);
    let questions = json!([
        {"id": "pick", "header": "Colour", "question": "Which?", "isOther": true, "isSecret": false, "options": options},
        {"id": "why", "header": "", "question": "Why?", "isSecret": true, "options": null},
    ]);
    let request =
        json!({"threadId": "t", "turnId": "u", "itemId": "i", "questions": questions, "isBlocking": true});
    fake.send_request(json!(0), "item/tool/requestUserInput", request).await;
    let value_reply = |value: &str| {
        AskResolution::Answered(AskAnswer { decision: None, value: Some(value.to_owned()), reason: None })
    };
    let ask = harness.wait_for_ask().await;
    assert_eq!((ask.kind, &ask.options[..]), (AskKind::Question, &["Red".to_owned(), "Blue".to_owned()][..]));
    assert_eq!(ask.prompt, "Colour: Which?\nRed: like fire");
    harness.answer(&ask, value_reply("Blue"));
    let ask = harness.wait_for_ask().await;
    assert!(ask.options.is_empty() && ask.prompt.contains("journalled"));
    harness.answer(&ask, value_reply("it is calm"));
    let answers = json!({"pick": {"answers": ["Blue"]}, "why": {"answers": ["it is calm"]}});
    assert_eq!(fake.expect_answer(json!(0)).await, json!({"answers": answers}));
    fake.complete_turn("u", "completed").await;
    harness.wait_for_end("a").await;
}

#[tokio::test(start_paused = true)]
async fn mcp_servers_ask_permission_for_tools_and_send_forms() {
    let (mut harness, mut fake) = agent_in_turn().await;
    let call = json!({"type": "mcpToolCall", "id": "c", "server": "s", "tool": "poke", "arguments": {"what": "it"}, "status": "inProgress"});
    fake.send_item("item/started", "u", call).await;
    let meta = json!({"codex_approval_kind": "mcp_tool_call", "persist": ["session", "always"], "tool_params": {"what": "it"}});
    let schema = json!({"type": "object", "properties": {}});
    let request = json!({"threadId": "t", "turnId": "u", "serverName": "s", "mode": "form", "_meta": meta, "message": "Allow?", "requestedSchema": schema});
    fake.send_request(json!(0), "mcpServer/elicitation/request", request).await;
    let ask = harness.wait_for_ask().await;
    assert_eq!((ask.tool.as_deref(), &ask.input), (Some("mcp__s__poke"), &json!({"what": "it"})));
    harness.answer(&ask, decision_reply(PermissionDecision::AllowOnce, None));
    assert_eq!(fake.expect_answer(json!(0)).await, json!({"action": "accept", "content": {}}));

    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}});
    let request = json!({"threadId": "t", "turnId": "u", "serverName": "s", "mode": "form", "_meta": null, "message": "Fill in", "requestedSchema": schema});
    fake.send_request(json!(1), "mcpServer/elicitation/request", request).await;
    let ask = harness.wait_for_ask().await;
    assert_eq!(ask.kind, AskKind::Question);
    let seven =
        AskResolution::Answered(AskAnswer { decision: None, value: Some("7".to_owned()), reason: None });
    harness.answer(&ask, seven);
    assert_eq!(fake.expect_answer(json!(1)).await, json!({"action": "accept", "content": {"n": 7}}));
    let unsupported =
        json!({"threadId": "t", "serverName": "s", "mode": "openai/userVerification", "title": "x"});
    fake.send_request(json!(2), "mcpServer/elicitation/request", unsupported).await;
    assert_eq!(fake.expect_answer(json!(2)).await, json!({"error": -32602}));
    fake.complete_turn("u", "completed").await;
    harness.wait_for_end("a").await;
}

#[tokio::test(start_paused = true)]
async fn asks_between_turns_are_denied() {
    let (mut harness, mut fake) = agent_in_turn().await;
    fake.complete_turn("u", "completed").await;
    harness.wait_for_end("a").await;
    fake.send_request(json!(0), COMMAND_METHOD, command_approval(Value::Null)).await;
    assert_eq!(fake.expect_answer(json!(0)).await, json!({"decision": "decline"}));
    fake.send_request(json!(1), "no/such/thing", json!({})).await;
    assert_eq!(fake.expect_answer(json!(1)).await, json!({"error": -32601}));
}
