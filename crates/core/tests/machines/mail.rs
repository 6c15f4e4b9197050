//! The mailbox: what happens to a message through busy turns, cancels, claims, missing acknowledgements and crashes.

use std::collections::BTreeMap;

use proptest::prelude::*;
use qd_core::rows::{MailDoc, UpdatedRow};
use qd_core::session::{
    AgentAvailability, CommandRefusal, CommandReply, MailDeliveryState, MailSubmission, SessionCommand,
    SessionEffect, SessionEvent, SessionInput, SessionState, SessionStep, evolve, step,
};
use qd_protocol::event::{EventBody, RunStopCause};
use qd_protocol::limits::{MAIL_OPEN_MAX, MAIL_RETURNS_MAX, QUEUE_MAX};
use qd_protocol::link::{AgentUpdate, TurnOutcome, TurnStopReason, UpdateNumber};
use qd_protocol::mail::{MailDelivery, MailKind, MailStatus};
use qd_protocol::{EventNumber, MailId, RunId};

use crate::harness::{SessionHarness, clocks_at, command_input, finishes, kinds, started};

fn id(text: &str) -> MailId {
    MailId::parse(text).unwrap()
}

fn submission(name: &str, deliver: MailDelivery) -> MailSubmission {
    MailSubmission {
        id: id(name),
        from: "user".to_owned(),
        from_session: None,
        kind: MailKind::Task,
        text: format!("words of {name}"),
        in_reply_to: None,
        correlation_id: None,
        deliver: Some(deliver),
        run: None,
        fingerprint: name.to_owned(),
    }
}

fn send_mail(harness: &mut SessionHarness, name: &str, deliver: MailDelivery) -> SessionStep {
    harness.command(SessionCommand::AcceptMail(submission(name, deliver)))
}

fn claim(harness: &mut SessionHarness, max: usize) -> Vec<(MailId, EventNumber)> {
    match harness.command(SessionCommand::ClaimMail { max, lease_ms: 60_000 }).reply {
        Some(CommandReply::MailClaimed { mail, .. }) => mail,
        other => panic!("{other:?}"),
    }
}

fn ack(harness: &mut SessionHarness, name: &str, claim: Option<EventNumber>) -> bool {
    let step = harness.command(SessionCommand::AcknowledgeMail { id: id(name), claim });
    match step.reply {
        Some(CommandReply::Done) => true,
        Some(CommandReply::Refused(CommandRefusal::NotClaimed)) => false,
        other => panic!("{other:?}"),
    }
}

/// The prompts that a step accepted.
fn prompts(step: &SessionStep) -> Vec<String> {
    let prompt = |event: &SessionEvent| match &event.body {
        EventBody::RunAccepted(accepted) => Some(accepted.prompt.clone()),
        _ => None,
    };
    step.events.iter().filter_map(prompt).collect()
}

/// The mail rows that a step updated.
fn docs(step: &SessionStep) -> Vec<&MailDoc> {
    let mail = step.rows.iter().filter_map(|row| match row {
        UpdatedRow::Mail { doc, .. } => Some(doc),
        _ => None,
    });
    mail.collect()
}

#[test]
fn an_idle_session_is_woken_and_a_message_is_delivered_when_its_agent_gets_it() {
    let mut harness = SessionHarness::without_worker();
    let step = send_mail(&mut harness, "a", MailDelivery::Prompt);
    assert_eq!(kinds(&step), ["mail.sent", "run.accepted", "message.created", "worker.started"]);
    assert_eq!(prompts(&step), ["words of a"], "a task from a person is passed on unchanged");
    assert_eq!(docs(&step).last().unwrap().state, MailStatus::Delivering);
    harness.context.agent = AgentAvailability::Ready { steerable: true };
    let step = harness.input(SessionInput::Wake);
    assert_eq!(kinds(&step), ["run.started", "message.created", "mail.delivered"]);
    assert_eq!(docs(&step).last().unwrap().state, MailStatus::Delivered);
    assert!(harness.state.mail.is_empty());
}

#[test]
fn a_busy_session_gets_its_mail_after_its_turn_and_in_the_order_of_arrival() {
    let mut harness = SessionHarness::new();
    harness.prompt("r");
    let mut runs = Vec::new();
    for name in ["a", "b"] {
        let step = send_mail(&mut harness, name, MailDelivery::Prompt);
        assert_eq!(kinds(&step), ["mail.sent", "run.accepted", "message.created", "run.queued"]);
        runs.push(step.events[1].run.clone().unwrap());
    }
    let step = harness.end("r", TurnStopReason::EndTurn);
    assert_eq!(started(&step), Some(runs[0].to_string()));
    let step = harness.end(runs[0].as_str(), TurnStopReason::EndTurn);
    assert_eq!(started(&step), Some(runs[1].to_string()));
}

#[test]
fn a_steer_reaches_the_turn_and_is_delivered_when_the_turn_takes_it() {
    let mut harness = SessionHarness::new();
    harness.prompt("r");
    let step = send_mail(&mut harness, "a", MailDelivery::Steer);
    assert_eq!(kinds(&step), ["mail.sent", "steer.accepted"]);
    let Some(SessionEffect::SendSteer { number, .. }) = step.effects.last() else {
        panic!("{:?}", step.effects)
    };
    let step = harness.receive(AgentUpdate::SteerTaken { steer: *number });
    assert_eq!(kinds(&step), ["steer.taken", "mail.delivered"]);
    let doc = docs(&step)[0];
    assert_eq!((doc.state, doc.delivered_as), (MailStatus::Delivered, Some(MailDelivery::Steer)));
    assert_eq!(doc.run_id.as_ref().unwrap().as_str(), "r");
    assert!(harness.state.mail.is_empty());
}

#[test]
fn a_steer_that_the_turn_misses_becomes_a_run_under_the_requested_id() {
    let mut harness = SessionHarness::new();
    harness.prompt("r");
    let wanted = RunId::parse("wanted").unwrap();
    let mail = MailSubmission { run: Some(wanted.clone()), ..submission("a", MailDelivery::Steer) };
    harness.command(SessionCommand::AcceptMail(mail));
    let step = harness.end("r", TurnStopReason::EndTurn);
    assert_eq!(started(&step), Some(wanted.to_string()));
    assert!(kinds(&step).contains(&"mail.delivered"), "{:?}", kinds(&step));
    assert!(harness.state.mail.is_empty());
}

#[test]
fn a_session_that_cannot_be_steered_gets_it_after_its_turn() {
    for link in [AgentAvailability::Ready { steerable: false }, AgentAvailability::Ready { steerable: true }]
    {
        let mut harness = SessionHarness::new();
        harness.context.agent = link;
        if link == (AgentAvailability::Ready { steerable: false }) {
            harness.prompt("r");
        }
        let step = send_mail(&mut harness, "a", MailDelivery::Steer);
        assert_eq!(prompts(&step).len(), 1, "{link:?}: {:?}", kinds(&step));
        let EventBody::MailSent(sent) = &step.events[0].body else { panic!("{:?}", kinds(&step)) };
        assert_eq!(sent.deliver, MailDelivery::Prompt);
    }
}

#[test]
fn without_a_delivery_mode_the_session_setting_decides() {
    let mut harness = SessionHarness::new();
    harness.state.settings.mail = MailDelivery::Hold;
    let step = harness.command(SessionCommand::AcceptMail(MailSubmission {
        deliver: None,
        ..submission("a", MailDelivery::Prompt)
    }));
    assert_eq!(kinds(&step), ["mail.sent"]);
    assert_eq!(harness.state.mail[0].delivery, MailDeliveryState::Held);
}

#[test]
fn the_sender_is_named_unless_it_is_a_task_from_a_person() {
    let mut harness = SessionHarness::new();
    let mail = MailSubmission {
        from: "lead".to_owned(),
        kind: MailKind::Handoff,
        ..submission("a", MailDelivery::Prompt)
    };
    let step = harness.command(SessionCommand::AcceptMail(mail));
    assert_eq!(prompts(&step), ["--- handoff from lead (a) ---\nwords of a"]);
    let mail = MailSubmission {
        in_reply_to: Some(id("a")),
        kind: MailKind::Reply,
        ..submission("b", MailDelivery::Prompt)
    };
    let step = harness.command(SessionCommand::AcceptMail(mail));
    assert_eq!(prompts(&step), ["--- reply from user (b) in reply to a ---\nwords of b"]);
}

#[test]
fn a_cancel_leaves_undelivered_messages_in_the_mailbox() {
    let mut harness = SessionHarness::new();
    harness.prompt("r");
    send_mail(&mut harness, "queued", MailDelivery::Prompt);
    send_mail(&mut harness, "steered", MailDelivery::Steer);
    harness.cancel();
    let step = harness.end("r", TurnStopReason::Cancelled);
    assert!(!finishes(&step).is_empty());
    assert!(harness.state.runs.is_empty(), "a cancel is not followed by a new start");
    let held: Vec<_> = harness.state.mail.iter().map(|entry| (entry.id.as_str(), entry.returns)).collect();
    assert_eq!(held, [("queued", 1), ("steered", 1)]);
    assert_eq!(claim(&mut harness, 9).len(), 2);
}

#[test]
fn a_claimed_message_belongs_to_nobody_else_until_it_is_returned() {
    let mut harness = SessionHarness::new();
    for name in ["a", "b"] {
        assert_eq!(kinds(&send_mail(&mut harness, name, MailDelivery::Hold)), ["mail.sent"]);
    }
    let first = claim(&mut harness, 1);
    assert_eq!(first[0].0, id("a"), "the oldest first");
    assert_eq!(claim(&mut harness, 9)[0].0, id("b"));
    assert!(claim(&mut harness, 9).is_empty());
    assert!(ack(&mut harness, "a", Some(first[0].1)));
    assert!(!ack(&mut harness, "a", Some(first[0].1)), "it is already acknowledged");
    assert_eq!(harness.deadline(), Some(60_000));
    harness.context.now = clocks_at(60_000);
    assert_eq!(kinds(&harness.input(SessionInput::Tick)), ["mail.returned"]);
    assert_eq!(harness.deadline(), None);
}

#[test]
fn a_late_acknowledgement_does_not_take_a_message_from_its_next_claimer() {
    let mut harness = SessionHarness::new();
    send_mail(&mut harness, "a", MailDelivery::Hold);
    let first = claim(&mut harness, 1)[0].1;
    harness.context.now = clocks_at(60_001);
    assert!(!ack(&mut harness, "a", Some(first)), "the claim has expired, even if no tick has noticed");
    let second = claim(&mut harness, 1)[0].1;
    assert!(!ack(&mut harness, "a", Some(first)));
    assert!(ack(&mut harness, "a", Some(second)));
}

#[test]
fn a_message_that_is_returned_too_often_is_quarantined_with_the_reason() {
    let mut harness = SessionHarness::new();
    send_mail(&mut harness, "a", MailDelivery::Hold);
    for round in 1..=MAIL_RETURNS_MAX {
        assert_eq!(claim(&mut harness, 1).len(), 1, "{round}");
        harness.context.now = harness.context.now.plus(60_000);
        let step = harness.input(SessionInput::Tick);
        let last = round == MAIL_RETURNS_MAX;
        assert_eq!(kinds(&step), [if last { "mail.quarantined" } else { "mail.returned" }]);
        if last {
            let doc = docs(&step)[0];
            assert_eq!(doc.state, MailStatus::Quarantined);
            assert!(doc.reason.as_ref().unwrap().contains("5 times"), "{doc:?}");
        }
    }
    assert!(claim(&mut harness, 1).is_empty());
}

#[test]
fn a_full_mailbox_and_a_full_queue_refuse_messages() {
    let mut harness = SessionHarness::new();
    for n in 0..MAIL_OPEN_MAX {
        send_mail(&mut harness, &format!("m{n}"), MailDelivery::Hold);
    }
    let refused = |step: SessionStep| match step.reply {
        Some(CommandReply::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(send_mail(&mut harness, "more", MailDelivery::Hold)), CommandRefusal::MailboxFull);
    let mut harness = SessionHarness::new();
    for n in 0..=QUEUE_MAX {
        harness.prompt(&format!("r{n}"));
    }
    assert_eq!(refused(send_mail(&mut harness, "p", MailDelivery::Prompt)), CommandRefusal::QueueFull);
    assert_eq!(refused(send_mail(&mut harness, "s", MailDelivery::Steer)), CommandRefusal::QueueFull);
    assert_eq!(kinds(&send_mail(&mut harness, "h", MailDelivery::Hold)), ["mail.sent"]);
}

#[test]
fn nothing_is_left_open_when_a_session_ends() {
    let mut harness = SessionHarness::new();
    send_mail(&mut harness, "held", MailDelivery::Hold);
    send_mail(&mut harness, "claimed", MailDelivery::Hold);
    claim(&mut harness, 1);
    harness.command(SessionCommand::Close { purge: false });
    let step = harness.receive(AgentUpdate::Gone(qd_protocol::link::AgentExitReason::Stopped));
    assert_eq!(kinds(&step), ["worker.exited", "mail.quarantined", "mail.quarantined", "session.closed"]);
    let closed = send_mail(&mut harness, "late", MailDelivery::Hold);
    assert_eq!(closed.reply, Some(CommandReply::Refused(CommandRefusal::Closed)));
    assert_eq!(harness.deadline(), None);
}

/// A random action.
#[derive(Debug, Clone)]
enum MailAction {
    Send(u8, MailDelivery),
    Prompt,
    Claim(usize),
    Ack(u8, bool),
    Pass(u64),
    End(TurnStopReason),
    Steer(bool),
    Cancel,
    Link(bool),
    Lose,
    Crash,
}

fn any_action() -> impl Strategy<Value = MailAction> {
    let deliver =
        prop_oneof![Just(MailDelivery::Prompt), Just(MailDelivery::Steer), Just(MailDelivery::Hold)];
    prop_oneof![
        6 => (0..12_u8, deliver).prop_map(|(name, deliver)| MailAction::Send(name, deliver)),
        2 => Just(MailAction::Prompt),
        3 => (1..4_usize).prop_map(MailAction::Claim),
        3 => (0..12_u8, any::<bool>()).prop_map(|(name, late)| MailAction::Ack(name, late)),
        2 => prop_oneof![Just(1_u64), Just(61_000)].prop_map(MailAction::Pass),
        3 => prop_oneof![Just(TurnStopReason::EndTurn), Just(TurnStopReason::Error)].prop_map(MailAction::End),
        2 => any::<bool>().prop_map(MailAction::Steer),
        1 => Just(MailAction::Cancel),
        1 => any::<bool>().prop_map(MailAction::Link),
        1 => Just(MailAction::Lose),
        2 => Just(MailAction::Crash),
    ]
}

/// A session with its journal and mail rows, and the invariants of every message.
struct MailSimulation {
    harness: SessionHarness,
    begun: SessionState,
    journal: Vec<SessionEvent>,
    /// The mail rows, in which the edge looks up an id.
    rows: BTreeMap<MailId, MailDoc>,
    delivered: BTreeMap<MailId, u32>,
    ended: BTreeMap<MailId, u32>,
    claims: BTreeMap<MailId, EventNumber>,
    order: Vec<MailId>,
    update_count: u64,
    prompts: u32,
}

impl MailSimulation {
    fn new() -> Self {
        let harness = SessionHarness::new();
        Self {
            begun: harness.state.clone(),
            harness,
            journal: Vec::new(),
            rows: BTreeMap::new(),
            delivered: BTreeMap::new(),
            ended: BTreeMap::new(),
            claims: BTreeMap::new(),
            order: Vec::new(),
            update_count: 0,
            prompts: 0,
        }
    }

    fn input(&mut self, input: SessionInput) -> SessionStep {
        let step_result = step(&mut self.harness.state, input, &self.harness.context);
        for event in &step_result.events {
            self.observe(event);
        }
        self.journal.extend(step_result.events.iter().cloned());
        for row in &step_result.rows {
            if let UpdatedRow::Mail { id, doc, .. } = row {
                self.rows.insert(id.clone(), doc.clone());
            }
        }
        self.check();
        step_result
    }

    fn receive(&mut self, update: AgentUpdate) {
        self.update_count += 1;
        self.input(SessionInput::Update(UpdateNumber(self.update_count), update));
    }

    fn observe(&mut self, event: &SessionEvent) {
        let state = |id: &MailId| self.rows.get(id).map(|doc| doc.state);
        match &event.body {
            EventBody::MailSent(sent) => {
                assert!(!self.rows.contains_key(&sent.mail.id), "sent once");
                self.order.push(sent.mail.id.clone());
            }
            EventBody::MailDelivered(mail) => {
                *self.delivered.entry(mail.id.clone()).or_default() += 1;
                *self.ended.entry(mail.id.clone()).or_default() += 1;
            }
            EventBody::MailClaimed(mail) => {
                assert_ne!(state(&mail.id), Some(MailStatus::Claimed), "one claim at a time");
                assert_eq!(mail.claim, event.number);
                self.claims.insert(mail.id.clone(), mail.claim);
            }
            EventBody::MailAcknowledged(mail) => {
                assert_eq!(self.claims.get(&mail.id), Some(&mail.claim), "by the last claim");
                *self.ended.entry(mail.id.clone()).or_default() += 1;
            }
            EventBody::MailQuarantined(mail) => *self.ended.entry(mail.id.clone()).or_default() += 1,
            _ => {}
        }
    }

    fn check(&self) {
        assert!(self.ended.values().all(|times| *times == 1), "each ends once: {:?}", self.ended);
        assert!(self.delivered.values().all(|times| *times == 1), "{:?}", self.delivered);
        let open: Vec<&MailId> = self.order.iter().filter(|id| self.rows[id].state.is_open()).collect();
        let kept: Vec<&MailId> = self.harness.state.mail.iter().map(|entry| &entry.id).collect();
        assert_eq!(kept, open, "the mailbox matches its rows, in order of arrival");
        for entry in &self.harness.state.mail {
            let on_its_way = match &entry.delivery {
                MailDeliveryState::Run(run) => {
                    self.harness.state.run(run).is_some_and(|run| run.execution.is_none())
                }
                MailDeliveryState::Steer { target_run, .. } => {
                    self.harness.state.run(target_run).is_some_and(|run| {
                        run.steers.iter().any(|steer| steer.mail.as_ref() == Some(&entry.id))
                    })
                }
                MailDeliveryState::Held | MailDeliveryState::Claimed { .. } => true,
            };
            assert!(on_its_way, "{entry:?} waits for nothing");
        }
    }

    /// The daemon dies: the state is rebuilt from the journal, and unfinished effects are repeated.
    fn crash(&mut self) {
        let mut state = self.begun.clone();
        for event in &self.journal {
            evolve(&mut state, event);
        }
        assert_eq!(state, self.harness.state, "a session read from the journal is the same session");
        let kept = serde_json::to_vec(&state).unwrap();
        self.harness.state = serde_json::from_slice(&kept).unwrap();
        self.input(SessionInput::Wake);
    }

    fn act(&mut self, act: MailAction) {
        let active = self.harness.state.current_turn().map(|(run, _)| run.id.clone());
        match act {
            MailAction::Send(name, deliver) => {
                let name = format!("m{name}");
                // Like the edge: an id that has a row is answered from the row.
                if !self.rows.contains_key(&id(&name)) {
                    self.input(command_input(SessionCommand::AcceptMail(submission(&name, deliver))));
                    let again = command_input(SessionCommand::AcceptMail(submission(&name, deliver)));
                    if self.harness.state.mailbox_entry(&id(&name)).is_some() {
                        let step = self.input(again);
                        assert_eq!(step.reply, Some(CommandReply::MailAccepted { event: None }));
                        assert!(step.events.is_empty() && step.effects.is_empty());
                    }
                }
            }
            MailAction::Prompt => {
                self.prompts += 1;
                let run = RunId::parse(&format!("p{}", self.prompts)).unwrap();
                let fingerprint = run.to_string();
                let accept = qd_core::session::PromptSubmission {
                    prompt: "p".into(),
                    fingerprint,
                    attachments: Vec::new(),
                    run,
                };
                self.input(command_input(SessionCommand::AcceptPrompt(accept)));
            }
            MailAction::Claim(max) => {
                let held: Vec<MailId> = {
                    let now = self.harness.context.now;
                    let free = |delivery: &MailDeliveryState| match delivery {
                        MailDeliveryState::Held => true,
                        MailDeliveryState::Claimed { .. } => delivery.claim_time_left(now) == Some(0),
                        _ => false,
                    };
                    let held = self.harness.state.mail.iter().filter(|entry| free(&entry.delivery));
                    held.map(|entry| entry.id.clone()).collect()
                };
                let step = self.input(command_input(SessionCommand::ClaimMail { max, lease_ms: 60_000 }));
                let Some(CommandReply::MailClaimed { mail, .. }) = step.reply else {
                    panic!("{:?}", step.reply)
                };
                let claimed: Vec<MailId> = mail.into_iter().map(|(id, _)| id).collect();
                let left: Vec<_> = held.into_iter().filter(|id| self.rows[id].state.is_open()).collect();
                assert_eq!(claimed, left[..max.min(left.len())], "the oldest first");
            }
            MailAction::Ack(name, late) => {
                let id = id(&format!("m{name}"));
                let claim = self.claims.get(&id).map(|claim| EventNumber(claim.0 - u64::from(late)));
                self.input(command_input(SessionCommand::AcknowledgeMail { id, claim }));
            }
            MailAction::Pass(ms) => {
                self.harness.context.now = self.harness.context.now.plus(ms);
                self.input(SessionInput::Tick);
            }
            MailAction::End(stop) => {
                if let Some(run) = active {
                    let error = (stop == TurnStopReason::Error)
                        .then(|| qd_protocol::event::RunError::new("agent_error", "it failed"));
                    self.receive(AgentUpdate::TurnEnded {
                        run,
                        outcome: TurnOutcome { error, ..TurnOutcome::of(stop) },
                    });
                }
            }
            MailAction::Steer(taken) => {
                let steers =
                    self.harness.state.current_turn().map(|(run, _)| run.steers.clone()).unwrap_or_default();
                if let Some(steer) = steers.iter().find_map(|steer| steer.sent) {
                    self.receive(if taken {
                        AgentUpdate::SteerTaken { steer }
                    } else {
                        AgentUpdate::SteerMissed { steer }
                    });
                }
            }
            MailAction::Cancel => {
                let command = SessionCommand::Cancel { run: None, by: RunStopCause::User, reason: None };
                self.input(command_input(command));
            }
            MailAction::Link(steers) => {
                if self.harness.state.worker.is_some() {
                    self.harness.context.agent = AgentAvailability::Ready { steerable: steers };
                    self.input(SessionInput::Wake);
                }
            }
            MailAction::Lose => {
                self.harness.context.agent = AgentAvailability::Absent;
                self.input(SessionInput::WorkerGone(qd_protocol::link::AgentExitReason::Lost));
                if self.harness.state.worker.is_some() {
                    self.harness.context.agent = AgentAvailability::Ready { steerable: true };
                }
                self.input(SessionInput::Wake);
            }
            MailAction::Crash => self.crash(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_message_is_never_lost_and_never_delivered_twice(acts in prop::collection::vec(any_action(), 1..60)) {
        let mut context = MailSimulation::new();
        for act in acts {
            context.act(act);
        }
        context.crash();
    }
}
