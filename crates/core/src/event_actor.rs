//! Who caused an event. Both machines stamp every event that they decide with the result, so no kind of event can be
//! forgotten: whatever is decided while a command is handled has the command's actor, and what a policy, a limit or a
//! route decided says so. What an agent reports has none, because its events are many and its session is known.

use std::sync::Arc;

use qd_protocol::event::{AskResolved, EventActor, EventBody, FleetStopReason, ResolvedBy, RunStopCause};
use qd_protocol::limits::ACTOR_TEXT_MAX;
use qd_protocol::policy::{PolicyRule, PolicyVerdict};

/// Who caused an event that was decided while `command`'s command was handled, or none.
pub(crate) fn actor_of_event(body: &EventBody, command: Option<&Arc<EventActor>>) -> Option<Arc<EventActor>> {
    match body {
        EventBody::AskResolved(AskResolved { by: ResolvedBy::Policy, rule, .. }) => {
            Some(Arc::new(EventActor::Policy { rule: rule.as_ref().map(describe_rule) }))
        }
        EventBody::RunCancelRequested(requested)
            if matches!(
                requested.by,
                RunStopCause::Timeout | RunStopCause::MaxTurns | RunStopCause::Budget
            ) =>
        {
            Some(Arc::new(EventActor::DAEMON))
        }
        EventBody::RunKillRequested(_) => Some(Arc::new(EventActor::DAEMON)),
        EventBody::FleetUpdated(updated) if updated.stops == Some(FleetStopReason::Timeout) => {
            Some(Arc::new(EventActor::DAEMON))
        }
        EventBody::FleetRouted(routed) if command.is_none() => {
            Some(Arc::new(EventActor::Fleet { fleet_id: routed.fleet_id.clone() }))
        }
        EventBody::FleetMentioned(mentioned) if command.is_none() => {
            Some(Arc::new(EventActor::Fleet { fleet_id: mentioned.fleet_id.clone() }))
        }
        _ => command.cloned(),
    }
}

/// A rule on one line, such as `allow Bash git status*`.
fn describe_rule(rule: &PolicyRule) -> String {
    let decision = match rule.decision {
        PolicyVerdict::Ask => "ask",
        PolicyVerdict::Allow => "allow",
        PolicyVerdict::Deny => "deny",
    };
    let mut text = format!("{decision} {}", rule.tool);
    if let Some(pattern) = &rule.pattern {
        text.push(' ');
        text.push_str(pattern);
    }
    text.truncate(text.floor_char_boundary(ACTOR_TEXT_MAX));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_described_by_its_decision_tool_and_pattern_within_a_limit() {
        let rule = |pattern: Option<String>| PolicyRule {
            tool: "Bash".to_owned(),
            pattern,
            decision: PolicyVerdict::Allow,
            risk: None,
        };
        assert_eq!(describe_rule(&rule(None)), "allow Bash");
        assert_eq!(describe_rule(&rule(Some("git status*".to_owned()))), "allow Bash git status*");
        assert!(describe_rule(&rule(Some("\u{e4}".repeat(1000)))).len() <= ACTOR_TEXT_MAX);
    }
}
