//! Somebody who reads every event and knows the contract. What it remembers of a run is little, so that the walk can
//! tell when two pasts lead to the same future.

use std::collections::BTreeMap;

use qd_core::session::{Command, Effect, Input, Reply, State, Step, World};
use qd_protocol::event::{AskState, Body, ResolvedBy, Role, StopCause};
use qd_protocol::{AskId, FinishReason, RunId};

use super::went_well;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Observer {
    runs: BTreeMap<RunId, Seen>,
    asks: BTreeMap<AskId, (RunId, Asked)>,
    closed: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Seen {
    asked_for: bool,
    started: bool,
    answering: bool,
    answered: bool,
    /// A cancel hit it: it must end so.
    hit: bool,
    ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    Open,
    Answered,
    Delivered,
    Over,
}

impl Observer {
    /// Reads one step and checks it against the contract.
    pub(crate) fn see(
        &mut self,
        before: &State,
        input: &Input,
        decided: &Step,
        after: &State,
        world: &World,
    ) {
        let hit = match input {
            Input::Command(Command::Cancel { run: None, .. } | Command::Close { .. }) => {
                before.runs.iter().map(|run| run.id.clone()).collect()
            }
            Input::Command(Command::Cancel { run: Some(run), .. }) => {
                before.run(run).map(|run| run.id.clone()).into_iter().collect()
            }
            _ => Vec::new(),
        };
        if went_well(&decided.reply) {
            for run in &hit {
                self.runs.get_mut(run).expect("accepted before").hit = true;
            }
            if let (Input::Command(Command::Cancel { .. }), Some(Reply::Cancelled(said))) =
                (input, &decided.reply)
            {
                assert_eq!(*said, hit, "the receipt of a cancel");
                if hit.is_empty() {
                    assert!(decided.events.is_empty(), "a cancel that hits nothing changes nothing");
                }
            }
            if let Some(Reply::Removed(runs)) = &decided.reply {
                for run in runs {
                    self.runs.get_mut(run).expect("accepted before").hit = true;
                }
            }
        } else {
            assert!(decided.events.is_empty(), "a refused command changes nothing");
        }
        for event in &decided.events {
            assert!(!self.closed, "nothing comes after session.closed");
            self.event(event.run.as_ref(), &event.body, world);
        }
        let started = after.runs.iter().filter(|run| run.started.is_some()).count();
        assert!(started <= 1, "one run of a session is active at a time");
        assert_eq!(after.busy(), self.runs.values().any(|run| !run.ended), "busy is what it says");
        for effect in &decided.effects {
            if let Effect::Prompt { run, .. } = effect {
                assert!(self.runs[run].started, "a prompt goes down only after run.started");
            }
        }
        self.no_run_waits_for_nothing(after, world, decided);
    }

    /// The next run starts whatever ended the last: whenever one could start, it has, or an agent is on its way.
    fn no_run_waits_for_nothing(&self, after: &State, world: &World, decided: &Step) {
        let idle_head = after.runs.front().is_some_and(|run| run.started.is_none());
        if idle_head && !world.halted {
            let launched = decided.effects.contains(&Effect::Launch);
            let coming =
                matches!(world.link, qd_core::session::Link::Starting | qd_core::session::Link::Lost);
            assert!(launched || coming, "a run waits and nothing is on its way");
        }
    }

    fn event(&mut self, run: Option<&RunId>, body: &Body, world: &World) {
        if let Some(run) = run {
            if let Body::RunAccepted(_) = body {
                assert!(self.runs.insert(run.clone(), Seen::default()).is_none(), "{run} was accepted twice");
                return;
            }
            let active = self.runs.values().filter(|run| run.started && !run.ended).count();
            let seen = self.runs.get_mut(run).expect("run.accepted comes first");
            assert!(!seen.ended, "{} of {run} after its run.finished", body.kind());
            match body {
                Body::MessageCreated(message) if message.role == Role::User => {
                    assert!(!std::mem::replace(&mut seen.asked_for, true), "one user message");
                }
                Body::MessageCreated(_) => {
                    assert!(
                        seen.asked_for && !std::mem::replace(&mut seen.answering, true),
                        "one assistant message"
                    );
                }
                Body::RunStarted(_) => {
                    assert!(!std::mem::replace(&mut seen.started, true), "at most one run.started");
                    assert_eq!(active, 0, "{run} started while another was active");
                    assert!(!world.halted, "nothing starts under a halt");
                    assert!(!seen.hit, "a cancelled run does not start");
                }
                Body::MessageFinished(finished) => {
                    assert!(
                        seen.answering && !std::mem::replace(&mut seen.answered, true),
                        "one message.finished"
                    );
                    assert_eq!(finished.finish.reason == FinishReason::Cancelled, seen.hit);
                }
                Body::RunFinished(finished) => {
                    assert!(seen.answered, "message.finished comes before run.finished");
                    seen.ended = true;
                    let reason = finished.finish_reason;
                    assert_eq!(reason == FinishReason::Cancelled, seen.hit, "{run} ended as {reason:?}");
                    let open = self.asks.values().any(|(of, ask)| of == run && *ask == Asked::Open);
                    assert!(!open, "the asks of {run} are withdrawn before its end");
                }
                Body::ErrorRaised(_) => assert!(!seen.hit, "no error comes of a cancel"),
                Body::RunCancelRequested(request) => {
                    let asked = matches!(request.by, StopCause::User | StopCause::Close);
                    assert_eq!(asked, seen.hit, "a run is asked to stop only if something hit it");
                }
                Body::TextDelta(_) => assert!(seen.started, "words of a run that has not started"),
                _ => {}
            }
        }
        match body {
            Body::AskOpened(opened) => {
                let asked = (opened.ask.run_id.clone(), Asked::Open);
                assert!(self.asks.insert(opened.ask_id.clone(), asked).is_none(), "opened twice");
            }
            Body::AskResolved(resolved) => {
                let before = self.asks.get(&resolved.ask_id).map(|(_, asked)| *asked);
                let by_user = resolved.by == ResolvedBy::User;
                assert!(
                    matches!(before, Some(Asked::Open)) || (before.is_none() && !by_user),
                    "resolved twice"
                );
                let now =
                    if resolved.ask.state == AskState::Answered { Asked::Answered } else { Asked::Over };
                self.asks.insert(resolved.ask_id.clone(), (resolved.ask.run_id.clone(), now));
            }
            Body::AskDelivered(delivered) => {
                let (_, asked) = self.asks.get_mut(&delivered.ask_id).expect("resolved before");
                let before = std::mem::replace(asked, Asked::Delivered);
                assert_eq!(before, Asked::Answered, "delivered once, after its answer");
            }
            Body::TextDelta(delta) => {
                assert_eq!(delta.after_run.is_some(), run.is_none(), "late words are kept apart")
            }
            Body::SessionClosed(_) => {
                assert!(
                    self.runs.values().all(|run| run.ended),
                    "session.closed comes after the last run.finished"
                );
                self.closed = true;
            }
            _ => {}
        }
    }

    /// What must hold when nothing can happen any more.
    pub(crate) fn check_end(&self) {
        for (run, seen) in &self.runs {
            assert!(seen.ended, "{run} never ended");
        }
        assert!(self.asks.values().all(|(_, ask)| *ask != Asked::Open), "an ask was left open");
    }
}
