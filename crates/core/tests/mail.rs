//! The mailbox: what becomes of a message whoever is busy, cancels, claims, forgets to acknowledge or crashes meanwhile.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod harness;

use std::collections::BTreeMap;

use harness::{SessionHarness, finishes, kinds, started};
use proptest::prelude::*;
use qd_core::rows::{MailDoc, UpdatedRow};
use qd_core::session::{
    AgentAvailability, CommandRefusal, CommandReply, MailDeliveryState, MailSubmission, SessionCommand,
    SessionEffect, SessionEvent, SessionInput, SessionState, SessionStep, deadline, evolve, step,
};
use qd_protocol::event::{EventBody, RunStopCause};
use qd_protocol::limits::{MAIL_OPEN_MAX, MAIL_RETURNS_MAX, QUEUE_MAX};
use qd_protocol::link::{AgentUpdate, TurnOutcome, TurnStopReason, UpdateNumber};
use qd_protocol::mail::{MailDelivery, MailKind, MailStatus};
use qd_protocol::{EventNumber, MailId, Millis, RunId};

fn id(text: &str) -> MailId {
    MailId::parse(text).unwrap()
}

fn letter(name: &str, deliver: MailDelivery) -> MailSubmission {
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

fn put(bench: &mut SessionHarness, name: &str, deliver: MailDelivery) -> SessionStep {
    bench.command(SessionCommand::AcceptMail(letter(name, deliver)))
}

fn claim(bench: &mut SessionHarness, max: usize) -> Vec<(MailId, EventNumber)> {
    match bench.command(SessionCommand::ClaimMail { max, lease_ms: 60_000 }).reply {
        Some(CommandReply::MailClaimed { mail, .. }) => mail,
        other => panic!("{other:?}"),
    }
}

fn ack(bench: &mut SessionHarness, name: &str, claim: Option<EventNumber>) -> bool {
    let step = bench.command(SessionCommand::AcknowledgeMail { id: id(name), claim });
    match step.reply {
        Some(CommandReply::Done) => true,
        Some(CommandReply::Refused(CommandRefusal::NotClaimed)) => false,
        other => panic!("{other:?}"),
    }
}

/// The prompts that were accepted in a step.
fn prompts(step: &SessionStep) -> Vec<String> {
    let prompt = |event: &SessionEvent| match &event.body {
        EventBody::RunAccepted(accepted) => Some(accepted.prompt.clone()),
        _ => None,
    };
    step.events.iter().filter_map(prompt).collect()
}

/// Where the messages of a step stand after it.
fn docs(step: &SessionStep) -> Vec<&MailDoc> {
    let mail = step.rows.iter().filter_map(|row| match row {
        UpdatedRow::Mail { doc, .. } => Some(doc),
        _ => None,
    });
    mail.collect()
}

#[test]
fn an_idle_session_is_woken_and_a_message_is_delivered_when_its_agent_gets_it() {
    let mut bench = SessionHarness::without_worker();
    let step = put(&mut bench, "a", MailDelivery::Prompt);
    assert_eq!(kinds(&step), ["mail.sent", "run.accepted", "message.created", "worker.started"]);
    assert_eq!(prompts(&step), ["words of a"], "a person's task is told as it is");
    assert_eq!(docs(&step).last().unwrap().state, MailStatus::Delivering);
    bench.world.agent = AgentAvailability::Ready { steerable: true };
    let step = bench.input(SessionInput::Wake);
    assert_eq!(kinds(&step), ["run.started", "message.created", "mail.delivered"]);
    assert_eq!(docs(&step).last().unwrap().state, MailStatus::Delivered);
    assert!(bench.state.mail.is_empty());
}

#[test]
fn a_busy_session_gets_its_mail_after_its_turn_and_in_the_order_of_arrival() {
    let mut bench = SessionHarness::new();
    bench.prompt("r");
    let mut runs = Vec::new();
    for name in ["a", "b"] {
        let step = put(&mut bench, name, MailDelivery::Prompt);
        assert_eq!(kinds(&step), ["mail.sent", "run.accepted", "message.created", "run.queued"]);
        runs.push(step.events[1].run.clone().unwrap());
    }
    let step = bench.end("r", TurnStopReason::EndTurn);
    assert_eq!(started(&step), Some(runs[0].to_string()));
    let step = bench.end(runs[0].as_str(), TurnStopReason::EndTurn);
    assert_eq!(started(&step), Some(runs[1].to_string()));
}

#[test]
fn a_steer_reaches_the_turn_and_is_delivered_when_the_turn_takes_it() {
    let mut bench = SessionHarness::new();
    bench.prompt("r");
    let step = put(&mut bench, "a", MailDelivery::Steer);
    assert_eq!(kinds(&step), ["mail.sent", "steer.accepted"]);
    let Some(SessionEffect::SendSteer { number, .. }) = step.effects.last() else {
        panic!("{:?}", step.effects)
    };
    let step = bench.hear(AgentUpdate::SteerTaken { steer: *number });
    assert_eq!(kinds(&step), ["steer.taken", "mail.delivered"]);
    let doc = docs(&step)[0];
    assert_eq!((doc.state, doc.delivered_as), (MailStatus::Delivered, Some(MailDelivery::Steer)));
    assert_eq!(doc.run_id.as_ref().unwrap().as_str(), "r");
    assert!(bench.state.mail.is_empty());
}

#[test]
fn a_steer_that_the_turn_misses_is_its_own_run_and_the_run_that_was_asked_for() {
    let mut bench = SessionHarness::new();
    bench.prompt("r");
    let wanted = RunId::parse("wanted").unwrap();
    let mail = MailSubmission { run: Some(wanted.clone()), ..letter("a", MailDelivery::Steer) };
    bench.command(SessionCommand::AcceptMail(mail));
    let step = bench.end("r", TurnStopReason::EndTurn);
    assert_eq!(started(&step), Some(wanted.to_string()));
    assert!(kinds(&step).contains(&"mail.delivered"), "{:?}", kinds(&step));
    assert!(bench.state.mail.is_empty());
}

#[test]
fn who_cannot_be_steered_gets_it_after_its_turn() {
    for link in [AgentAvailability::Ready { steerable: false }, AgentAvailability::Ready { steerable: true }]
    {
        let mut bench = SessionHarness::new();
        bench.world.agent = link;
        if link == (AgentAvailability::Ready { steerable: false }) {
            bench.prompt("r");
        }
        let step = put(&mut bench, "a", MailDelivery::Steer);
        assert_eq!(prompts(&step).len(), 1, "{link:?}: {:?}", kinds(&step));
        let EventBody::MailSent(sent) = &step.events[0].body else { panic!("{:?}", kinds(&step)) };
        assert_eq!(sent.deliver, MailDelivery::Prompt);
    }
}

#[test]
fn how_it_is_delivered_is_the_sessions_to_say_if_nobody_else_does() {
    let mut bench = SessionHarness::new();
    bench.state.settings.mail = MailDelivery::Hold;
    let step = bench.command(SessionCommand::AcceptMail(MailSubmission {
        deliver: None,
        ..letter("a", MailDelivery::Prompt)
    }));
    assert_eq!(kinds(&step), ["mail.sent"]);
    assert_eq!(bench.state.mail[0].delivery, MailDeliveryState::Held);
}

#[test]
fn whose_words_these_are_is_told_unless_they_are_a_persons_task() {
    let mut bench = SessionHarness::new();
    let mail = MailSubmission {
        from: "lead".to_owned(),
        kind: MailKind::Handoff,
        ..letter("a", MailDelivery::Prompt)
    };
    let step = bench.command(SessionCommand::AcceptMail(mail));
    assert_eq!(prompts(&step), ["--- handoff from lead (a) ---\nwords of a"]);
    let mail = MailSubmission {
        in_reply_to: Some(id("a")),
        kind: MailKind::Reply,
        ..letter("b", MailDelivery::Prompt)
    };
    let step = bench.command(SessionCommand::AcceptMail(mail));
    assert_eq!(prompts(&step), ["--- reply from user (b) in reply to a ---\nwords of b"]);
}

#[test]
fn a_cancel_leaves_what_the_agent_never_got_in_the_mailbox() {
    let mut bench = SessionHarness::new();
    bench.prompt("r");
    put(&mut bench, "queued", MailDelivery::Prompt);
    put(&mut bench, "steered", MailDelivery::Steer);
    bench.cancel();
    let step = bench.end("r", TurnStopReason::Cancelled);
    assert!(!finishes(&step).is_empty());
    assert!(bench.state.runs.is_empty(), "nothing starts behind the back of whoever cancelled");
    let held: Vec<_> = bench.state.mail.iter().map(|letter| (letter.id.as_str(), letter.returns)).collect();
    assert_eq!(held, [("queued", 1), ("steered", 1)]);
    assert_eq!(claim(&mut bench, 9).len(), 2);
}

#[test]
fn a_message_that_is_claimed_is_nobody_elses_until_it_comes_back() {
    let mut bench = SessionHarness::new();
    for name in ["a", "b"] {
        assert_eq!(kinds(&put(&mut bench, name, MailDelivery::Hold)), ["mail.sent"]);
    }
    let first = claim(&mut bench, 1);
    assert_eq!(first[0].0, id("a"), "the oldest first");
    assert_eq!(claim(&mut bench, 9)[0].0, id("b"));
    assert!(claim(&mut bench, 9).is_empty());
    assert!(ack(&mut bench, "a", Some(first[0].1)));
    assert!(!ack(&mut bench, "a", Some(first[0].1)), "the row says that it was");
    assert_eq!(deadline(&bench.state, bench.world.agent), Some(Millis(60_000)));
    bench.world.now = Millis(60_000);
    assert_eq!(kinds(&bench.input(SessionInput::Tick)), ["mail.returned"]);
    assert_eq!(deadline(&bench.state, bench.world.agent), None);
}

#[test]
fn a_late_acknowledgement_does_not_take_a_message_from_its_next_claimer() {
    let mut bench = SessionHarness::new();
    put(&mut bench, "a", MailDelivery::Hold);
    let first = claim(&mut bench, 1)[0].1;
    bench.world.now = Millis(60_001);
    assert!(!ack(&mut bench, "a", Some(first)), "its time is over, whether or not anybody has noticed");
    let second = claim(&mut bench, 1)[0].1;
    assert!(!ack(&mut bench, "a", Some(first)));
    assert!(ack(&mut bench, "a", Some(second)));
}

#[test]
fn what_comes_back_too_often_is_kept_from_everybody_with_the_reason() {
    let mut bench = SessionHarness::new();
    put(&mut bench, "a", MailDelivery::Hold);
    for round in 1..=MAIL_RETURNS_MAX {
        assert_eq!(claim(&mut bench, 1).len(), 1, "{round}");
        bench.world.now = bench.world.now.plus(60_000);
        let step = bench.input(SessionInput::Tick);
        let last = round == MAIL_RETURNS_MAX;
        assert_eq!(kinds(&step), [if last { "mail.quarantined" } else { "mail.returned" }]);
        if last {
            let doc = docs(&step)[0];
            assert_eq!(doc.state, MailStatus::Quarantined);
            assert!(doc.reason.as_ref().unwrap().contains("5 times"), "{doc:?}");
        }
    }
    assert!(claim(&mut bench, 1).is_empty());
}

#[test]
fn a_full_mailbox_and_a_full_queue_say_so() {
    let mut bench = SessionHarness::new();
    for n in 0..MAIL_OPEN_MAX {
        put(&mut bench, &format!("m{n}"), MailDelivery::Hold);
    }
    let refused = |step: SessionStep| match step.reply {
        Some(CommandReply::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(put(&mut bench, "more", MailDelivery::Hold)), CommandRefusal::MailboxFull);
    let mut bench = SessionHarness::new();
    for n in 0..=QUEUE_MAX {
        bench.prompt(&format!("r{n}"));
    }
    assert_eq!(refused(put(&mut bench, "p", MailDelivery::Prompt)), CommandRefusal::QueueFull);
    assert_eq!(refused(put(&mut bench, "s", MailDelivery::Steer)), CommandRefusal::QueueFull);
    assert_eq!(kinds(&put(&mut bench, "h", MailDelivery::Hold)), ["mail.sent"]);
}

#[test]
fn nothing_is_left_open_when_a_session_ends() {
    let mut bench = SessionHarness::new();
    put(&mut bench, "held", MailDelivery::Hold);
    put(&mut bench, "claimed", MailDelivery::Hold);
    claim(&mut bench, 1);
    bench.command(SessionCommand::Close { purge: false });
    let step = bench.hear(AgentUpdate::Gone(qd_protocol::link::AgentExitReason::Stopped));
    assert_eq!(kinds(&step), ["worker.exited", "mail.quarantined", "mail.quarantined", "session.closed"]);
    let closed = put(&mut bench, "late", MailDelivery::Hold);
    assert_eq!(closed.reply, Some(CommandReply::Refused(CommandRefusal::Closed)));
    assert_eq!(deadline(&bench.state, bench.world.agent), None);
}

/// What may happen.
#[derive(Debug, Clone)]
enum MailAction {
    Put(u8, MailDelivery),
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

fn act() -> impl Strategy<Value = MailAction> {
    let deliver =
        prop_oneof![Just(MailDelivery::Prompt), Just(MailDelivery::Steer), Just(MailDelivery::Hold)];
    prop_oneof![
        6 => (0..12_u8, deliver).prop_map(|(name, deliver)| MailAction::Put(name, deliver)),
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

/// A session, what its journal and its rows say, and what must hold of every message.
struct MailSimulation {
    bench: SessionHarness,
    begun: SessionState,
    journal: Vec<SessionEvent>,
    /// As lists have them: what the edge looks an id up in.
    rows: BTreeMap<MailId, MailDoc>,
    delivered: BTreeMap<MailId, u32>,
    ended: BTreeMap<MailId, u32>,
    claims: BTreeMap<MailId, EventNumber>,
    order: Vec<MailId>,
    heard: u64,
    prompts: u32,
}

impl MailSimulation {
    fn new() -> Self {
        let bench = SessionHarness::new();
        Self {
            begun: bench.state.clone(),
            bench,
            journal: Vec::new(),
            rows: BTreeMap::new(),
            delivered: BTreeMap::new(),
            ended: BTreeMap::new(),
            claims: BTreeMap::new(),
            order: Vec::new(),
            heard: 0,
            prompts: 0,
        }
    }

    fn input(&mut self, input: SessionInput) -> SessionStep {
        let decided = step(&mut self.bench.state, input, &self.bench.world);
        for event in &decided.events {
            self.see(event);
        }
        self.journal.extend(decided.events.iter().cloned());
        for row in &decided.rows {
            if let UpdatedRow::Mail { id, doc, .. } = row {
                self.rows.insert(id.clone(), doc.clone());
            }
        }
        self.check();
        decided
    }

    fn hear(&mut self, up: AgentUpdate) {
        self.heard += 1;
        self.input(SessionInput::LinkMessage(UpdateNumber(self.heard), up));
    }

    fn see(&mut self, event: &SessionEvent) {
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
                assert_ne!(state(&mail.id), Some(MailStatus::Claimed), "claimed by one at a time");
                assert_eq!(mail.claim, event.number);
                self.claims.insert(mail.id.clone(), mail.claim);
            }
            EventBody::MailAcknowledged(mail) => {
                assert_eq!(self.claims.get(&mail.id), Some(&mail.claim), "by the last who claimed it");
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
        let kept: Vec<&MailId> = self.bench.state.mail.iter().map(|letter| &letter.id).collect();
        assert_eq!(kept, open, "the mailbox is what its rows say, in the order of arrival");
        for letter in &self.bench.state.mail {
            let on_its_way = match &letter.delivery {
                MailDeliveryState::Run(run) => {
                    self.bench.state.run(run).is_some_and(|run| run.started.is_none())
                }
                MailDeliveryState::Steer { target_run: told, .. } => {
                    self.bench.state.run(told).is_some_and(|run| {
                        run.steers.iter().any(|steer| steer.mail.as_ref() == Some(&letter.id))
                    })
                }
                MailDeliveryState::Held | MailDeliveryState::Claimed { .. } => true,
            };
            assert!(on_its_way, "{letter:?} waits for nothing");
        }
    }

    /// The daemon dies: what it knew is read again, and what it owes is done again.
    fn crash(&mut self) {
        let mut state = self.begun.clone();
        for event in &self.journal {
            evolve(&mut state, event);
        }
        assert_eq!(state, self.bench.state, "a session read from the journal is the same session");
        let kept = serde_json::to_vec(&state).unwrap();
        self.bench.state = serde_json::from_slice(&kept).unwrap();
        self.input(SessionInput::Wake);
    }

    fn act(&mut self, act: MailAction) {
        let active = self.bench.state.current_turn().map(|(run, _)| run.id.clone());
        match act {
            MailAction::Put(name, deliver) => {
                let name = format!("m{name}");
                // As the edge does it: an id that has a row is answered from there.
                if !self.rows.contains_key(&id(&name)) {
                    self.input(SessionInput::Command(SessionCommand::AcceptMail(letter(&name, deliver))));
                    let again = SessionInput::Command(SessionCommand::AcceptMail(letter(&name, deliver)));
                    if self.bench.state.mailbox_entry(&id(&name)).is_some() {
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
                self.input(SessionInput::Command(SessionCommand::AcceptPrompt(accept)));
            }
            MailAction::Claim(max) => {
                let held: Vec<MailId> = {
                    let now = self.bench.world.now;
                    let free = |stands: &MailDeliveryState| match stands {
                        MailDeliveryState::Held => true,
                        MailDeliveryState::Claimed { until, .. } => *until <= now,
                        _ => false,
                    };
                    let held = self.bench.state.mail.iter().filter(|letter| free(&letter.delivery));
                    held.map(|letter| letter.id.clone()).collect()
                };
                let step =
                    self.input(SessionInput::Command(SessionCommand::ClaimMail { max, lease_ms: 60_000 }));
                let Some(CommandReply::MailClaimed { mail, .. }) = step.reply else {
                    panic!("{:?}", step.reply)
                };
                let given: Vec<MailId> = mail.into_iter().map(|(id, _)| id).collect();
                let left: Vec<_> = held.into_iter().filter(|id| self.rows[id].state.is_open()).collect();
                assert_eq!(given, left[..max.min(left.len())], "the oldest first");
            }
            MailAction::Ack(name, late) => {
                let id = id(&format!("m{name}"));
                let claim = self.claims.get(&id).map(|claim| EventNumber(claim.0 - u64::from(late)));
                self.input(SessionInput::Command(SessionCommand::AcknowledgeMail { id, claim }));
            }
            MailAction::Pass(ms) => {
                self.bench.world.now = self.bench.world.now.plus(ms);
                self.input(SessionInput::Tick);
            }
            MailAction::End(stop) => {
                if let Some(run) = active {
                    let error = (stop == TurnStopReason::Error)
                        .then(|| qd_protocol::event::RunError::new("agent_error", "it failed"));
                    self.hear(AgentUpdate::Terminal {
                        run,
                        outcome: TurnOutcome { error, ..TurnOutcome::of(stop) },
                    });
                }
            }
            MailAction::Steer(taken) => {
                let steers =
                    self.bench.state.current_turn().map(|(run, _)| run.steers.clone()).unwrap_or_default();
                if let Some(steer) = steers.iter().find_map(|steer| steer.sent) {
                    self.hear(if taken {
                        AgentUpdate::SteerTaken { steer }
                    } else {
                        AgentUpdate::SteerMissed { steer }
                    });
                }
            }
            MailAction::Cancel => {
                let command = SessionCommand::Cancel { run: None, by: RunStopCause::User, reason: None };
                self.input(SessionInput::Command(command));
            }
            MailAction::Link(steers) => {
                if self.bench.state.worker.is_some() {
                    self.bench.world.agent = AgentAvailability::Ready { steerable: steers };
                    self.input(SessionInput::Wake);
                }
            }
            MailAction::Lose => {
                self.bench.world.agent = AgentAvailability::Absent;
                self.input(SessionInput::WorkerGone(qd_protocol::link::AgentExitReason::Lost));
                if self.bench.state.worker.is_some() {
                    self.bench.world.agent = AgentAvailability::Ready { steerable: true };
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
    fn a_message_is_never_lost_and_never_delivered_twice(acts in prop::collection::vec(act(), 1..60)) {
        let mut world = MailSimulation::new();
        for act in acts {
            world.act(act);
        }
        world.crash();
    }
}
