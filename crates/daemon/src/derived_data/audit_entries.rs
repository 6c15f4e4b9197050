//! Which events say that somebody did something, and how that is shown. Pure: a stored event in, an entry out. Every
//! kind of event is named here, so a new one has to be decided about.

use qd_journal::StoredEvent;
use qd_protocol::audit::{AuditAction, AuditEntry};
use qd_protocol::event::{Ask, AskResolved, AskStatus, EventActor, EventBody, SessionUpdated, TokenCreated};
use serde::Deserialize;

/// The most bytes of a text that an entry shows.
const DETAIL_MAX: usize = 200;

/// The kinds of events that may become entries.
pub(super) const AUDITED_KINDS: &[&str] = &[
    "workspace.created",
    "workspace.removed",
    "session.created",
    "session.updated",
    "run.accepted",
    "run.moved",
    "run.cancel_requested",
    "run.kill_requested",
    "steer.accepted",
    "ask.opened",
    "ask.resolved",
    "fleet.started",
    "fleet.updated",
    "fleet.routed",
    "fleet.mentioned",
    "mail.sent",
    "mail.claimed",
    "mail.acknowledged",
    "token.created",
    "token.revoked",
    "halt.set",
    "halt.lifted",
];

/// The field that every event with an actor has.
#[derive(Deserialize)]
struct EventWithActor {
    #[serde(default)]
    actor: Option<EventActor>,
}

/// What an event did, besides whom it concerns.
struct AuditedChange {
    action: AuditAction,
    object: Option<String>,
    detail: Option<String>,
}

impl AuditedChange {
    fn new(action: AuditAction) -> Self {
        Self { action, object: None, detail: None }
    }

    fn with_object(self, object: impl ToString) -> Self {
        Self { object: Some(object.to_string()), ..self }
    }

    fn with_detail(self, detail: impl Into<Option<String>>) -> Self {
        Self { detail: detail.into().map(|text| one_line(&text)), ..self }
    }
}

/// The entry of an event, if somebody did something by it.
pub(super) fn audit_entry(event: &StoredEvent, body: &EventBody) -> Option<AuditEntry> {
    let AuditedChange { action, object, detail } = audited_change(body)?;
    let EventWithActor { actor } = serde_json::from_slice(&event.data).ok()?;
    Some(AuditEntry {
        seq: event.seq,
        at: event.ts.wall,
        actor: actor?,
        action,
        kind: event.kind.to_string(),
        workspace_id: event.scope.workspace.as_ref().map(|(_, id)| id.clone()),
        session_id: event.scope.session.as_ref().map(|(_, id)| id.clone()),
        run_id: event.run.clone(),
        object,
        detail,
    })
}

fn audited_change(body: &EventBody) -> Option<AuditedChange> {
    use AuditAction as Action;
    let change = AuditedChange::new;
    Some(match body {
        EventBody::WorkspaceCreated(created) => {
            change(Action::AddWorkspace).with_detail(created.path.clone())
        }
        EventBody::WorkspaceRemoved(_) => change(Action::RemoveWorkspace),
        EventBody::SessionCreated(created) => {
            change(Action::CreateSession).with_detail(created.agent.clone())
        }
        EventBody::SessionUpdated(updated) if updated.closing.is_some() => change(Action::CloseSession),
        EventBody::SessionUpdated(updated) => {
            change(Action::ChangeSession).with_detail(changed_settings(updated)?)
        }
        EventBody::RunAccepted(accepted) => change(Action::Prompt).with_detail(accepted.prompt.clone()),
        EventBody::RunMoved(_) => change(Action::MoveRun),
        EventBody::RunCancelRequested(requested) => {
            change(Action::Cancel).with_detail(requested.reason.clone())
        }
        EventBody::RunKillRequested(_) => change(Action::Kill),
        EventBody::SteerAccepted(steer) => change(Action::Steer).with_detail(steer.text.clone()),
        EventBody::AskOpened(opened) => {
            change(Action::Ask).with_object(&opened.ask_id).with_detail(opened.ask.prompt.clone())
        }
        EventBody::AskResolved(resolved) => resolved_ask(resolved),
        EventBody::FleetStarted(started) => {
            change(Action::StartFleet).with_object(&started.fleet_id).with_detail(started.spec.task.clone())
        }
        EventBody::FleetUpdated(updated) => {
            updated.stops?;
            change(Action::StopFleet).with_object(&updated.fleet_id)
        }
        EventBody::FleetRouted(routed) => change(Action::Route).with_object(&routed.fleet_id),
        EventBody::FleetMentioned(mentioned) => change(Action::Route).with_object(&mentioned.fleet_id),
        EventBody::MailSent(sent) => {
            change(Action::SendMail).with_object(&sent.mail.id).with_detail(sent.mail.text.clone())
        }
        EventBody::MailClaimed(claimed) => change(Action::ClaimMail).with_object(&claimed.id),
        EventBody::MailAcknowledged(done) => change(Action::AcknowledgeMail).with_object(&done.id),
        EventBody::TokenCreated(created) => created_token(created),
        EventBody::TokenRevoked(revoked) => {
            change(Action::RevokeToken).with_object(&revoked.token_id).with_detail(revoked.name.clone())
        }
        EventBody::HaltSet(set) => change(Action::Halt).with_detail(set.reason.clone()),
        EventBody::HaltLifted(_) => change(Action::LiftHalt),
        EventBody::QuotaReleased(released) => {
            change(Action::ReleaseQuota).with_object(&released.account).with_detail(released.agent.clone())
        }
        EventBody::ModeChanged(changed) => {
            change(Action::ChangeSession).with_detail(format!("mode {}", changed.mode))
        }
        EventBody::SessionClosed(_)
        | EventBody::RunQueued(_)
        | EventBody::RunStarted(_)
        | EventBody::RunSuspended(_)
        | EventBody::RunResumed(_)
        | EventBody::RunFinished(_)
        | EventBody::MessageCreated(_)
        | EventBody::MessageFinished(_)
        | EventBody::TextDelta(_)
        | EventBody::ThoughtDelta(_)
        | EventBody::ToolStarted(_)
        | EventBody::ToolOutput(_)
        | EventBody::ToolFinished(_)
        | EventBody::PlanUpdated(_)
        | EventBody::NoticeShown(_)
        | EventBody::UsageReported(_)
        | EventBody::ContextUpdated(_)
        | EventBody::ContextCompacted(_)
        | EventBody::QuotaReached(_)
        | EventBody::TurnStarted(_)
        | EventBody::AskDelivered(_)
        | EventBody::SteerSent(_)
        | EventBody::SteerTaken(_)
        | EventBody::SteerMissed(_)
        | EventBody::WorkerStarted(_)
        | EventBody::WorkerReattached(_)
        | EventBody::WorkerExited(_)
        | EventBody::FleetFinished(_)
        | EventBody::MailDelivered(_)
        | EventBody::MailReturned(_)
        | EventBody::MailQuarantined(_)
        | EventBody::ErrorRaised(_) => return None,
    })
}

/// The settings that an update changes; `None` if it is bookkeeping.
fn changed_settings(updated: &SessionUpdated) -> Option<String> {
    let SessionUpdated { title, model, policy, sandbox, network, limits, .. } = updated;
    let names = [
        ("title", title.is_some()),
        ("model", model.is_some()),
        ("policy", policy.is_some()),
        ("sandbox", sandbox.is_some()),
        ("network", network.is_some()),
        ("limits", limits.is_some()),
    ];
    let names: Vec<&str> =
        names.into_iter().filter(|(_, is_changed)| *is_changed).map(|(name, _)| name).collect();
    (!names.is_empty()).then(|| names.join(", "))
}

fn resolved_ask(resolved: &AskResolved) -> AuditedChange {
    let AskResolved { ask_id, ask: Ask { state, tool, answer, .. }, .. } = resolved;
    let answer = answer.clone().unwrap_or_default();
    let decision = answer.decision.and_then(|decision| serde_json::to_value(decision).ok());
    let decision = decision.and_then(|name| name.as_str().map(str::to_owned));
    let words = [decision, answer.value, tool.clone(), answer.reason];
    let detail = words.into_iter().flatten().collect::<Vec<_>>().join(" ");
    let action = if *state == AskStatus::Withdrawn { AuditAction::Withdraw } else { AuditAction::Answer };
    AuditedChange::new(action).with_object(ask_id).with_detail(Some(detail).filter(|text| !text.is_empty()))
}

fn created_token(created: &TokenCreated) -> AuditedChange {
    let TokenCreated { token_id, name, role, workspace_id, labels, .. } = created;
    let mut words: Vec<String> = name.iter().cloned().collect();
    words.extend(role.map(|role| role.as_str().to_owned()));
    words.extend(workspace_id.as_ref().map(ToString::to_string));
    words.extend(labels.iter().flatten().cloned());
    AuditedChange::new(AuditAction::CreateToken).with_object(token_id).with_detail(words.join(" "))
}

/// The beginning of a text on one line.
fn one_line(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().take(DETAIL_MAX).collect();
    let mut line = words.join(" ");
    if line.len() > DETAIL_MAX {
        line.truncate(line.floor_char_boundary(DETAIL_MAX - '\u{2026}'.len_utf8()));
        line.push('\u{2026}');
    }
    line
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use qd_journal::EventScope;
    use qd_protocol::event::{EmptyEventData, HaltSet};
    use qd_protocol::{Millis, Seq};

    use super::*;

    fn entry(body: &EventBody, actor: Option<&EventActor>) -> Option<AuditEntry> {
        let event = StoredEvent {
            seq: Seq(7),
            number: None,
            ts: Millis(5).into(),
            scope: Arc::new(EventScope::default()),
            run: None,
            kind: body.kind().into(),
            data: body.encode(actor).unwrap(),
            update_number: None,
        };
        audit_entry(&event, body)
    }

    #[test]
    fn only_what_somebody_did_is_an_entry() {
        let set = EventBody::HaltSet(HaltSet { reason: Some("a\n b".to_owned()), cancel: false });
        assert_eq!(entry(&set, None), None, "nobody knows who did it");
        let shown = entry(&set, Some(&EventActor::DAEMON)).unwrap();
        assert_eq!((shown.seq, shown.action, shown.actor), (Seq(7), AuditAction::Halt, EventActor::DAEMON));
        assert_eq!(shown.detail.as_deref(), Some("a b"));
        let started = EventBody::RunStarted(EmptyEventData {});
        assert_eq!(entry(&started, Some(&EventActor::DAEMON)), None, "it follows from a prompt");
        let bookkeeping = EventBody::SessionUpdated(SessionUpdated::default());
        assert_eq!(entry(&bookkeeping, Some(&EventActor::DAEMON)), None);
    }

    #[test]
    fn a_detail_is_cut_at_a_character() {
        let line = one_line(&"\u{e4}".repeat(500));
        assert!(line.len() <= DETAIL_MAX && line.ends_with('\u{2026}'), "{line}");
    }

    #[test]
    fn every_audited_kind_is_a_kind_of_event() {
        assert!(AUDITED_KINDS.iter().all(|kind| EventBody::KINDS.contains(kind)));
    }
}
