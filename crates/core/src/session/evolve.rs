//! What an event does to a session. The only place where a [`State`] changes, live and on replay alike.

use qd_protocol::event::{
    AskResolved, AskState, Body, Decision, ExitReason, QueueReason, SessionUpdated, StopCause,
    WorkerReattached,
};
use qd_protocol::limits::INLINE_MAX;
use qd_protocol::link::Reply;
use qd_protocol::mail::Deliver;
use qd_protocol::{AskId, MailId, Number};

use super::Recorded;
use super::state::{AskEntry, Letter, Mark, Run, Stands, Started, State, Steer, Suspended};
use super::worker::Restarts;

/// Applies one event. Events come in order and each once; what a later version added is passed over.
pub fn evolve(state: &mut State, event: &Recorded) {
    debug_assert_eq!(event.number.0, state.number.0 + 1, "events of a session come in order");
    state.number = event.number;
    state.updated_at = event.ts;
    if let Some(up) = event.up {
        state.taken = state.taken.max(up);
    }
    let ours = event.run.as_ref();
    match &event.body {
        Body::SessionUpdated(change) => update(state, event, change),
        Body::SessionClosed(_) => state.closed = true,
        Body::RunAccepted(accepted) => {
            let Some(id) = ours else { return };
            let run = Run {
                id: id.clone(),
                accepted_at: event.ts,
                position: accepted.position,
                fingerprint: accepted.fingerprint.clone(),
                was_steer: accepted.steer.is_some(),
                mail: accepted.mail.clone(),
                lacks_room: false,
                steers: Vec::new(),
                started: None,
            };
            // A missed steer runs next: behind the run it was meant for and the steers missed before it.
            let at = match accepted.steer {
                Some(_) => state
                    .runs
                    .iter()
                    .skip(1)
                    .position(|run| !run.was_steer)
                    .map_or(state.runs.len(), |i| i + 1),
                None => state.runs.len(),
            };
            if let Some(mail) = &accepted.mail {
                stand(state, mail, Stands::Run(id.clone()));
            }
            state.runs.insert(at.min(state.runs.len()), run);
        }
        Body::RunQueued(queued) => {
            let waits = state.runs.iter_mut().find(|run| Some(&run.id) == ours);
            if let (Some(run), QueueReason::Capacity) = (waits, queued.reason) {
                run.lacks_room = true;
            }
        }
        Body::RunStarted(_) => {
            if let Some(run) = state.runs.front_mut().filter(|run| Some(&run.id) == ours) {
                run.lacks_room = false;
                run.started = Some(Started {
                    at: event.ts,
                    number: event.number,
                    resumed: false,
                    stop: None,
                    kill: None,
                    waited_ms: 0,
                    waiting_since: None,
                    children: Default::default(),
                    suspended: None,
                    turns: 0,
                    reports_turns: false,
                    text: String::new(),
                    text_len: 0,
                    usage: Default::default(),
                });
            }
        }
        Body::RunSuspended(suspended) => {
            // The turn that asked is over, and with it whoever waited for an answer.
            state.asks.retain(|_, entry| entry.run() != ours);
            if let Some(started) = started(state, event) {
                started.children.clear();
                let waits_for = suspended.children.iter().cloned().collect();
                started.suspended = Some(Suspended { waits_for, ended: Vec::new() });
            }
            settle_waiting(state, event);
        }
        Body::RunResumed(_) => {
            if let Some(run) = state.runs.front_mut().filter(|run| Some(&run.id) == ours) {
                run.lacks_room = false;
            }
            if let Some(started) = started(state, event) {
                started.number = event.number;
                started.resumed = true;
                started.suspended = None;
            }
            settle_waiting(state, event);
        }
        Body::RunFinished(_) => {
            state.last_finished = Some(event.ts);
            state.runs.retain(|run| Some(&run.id) != ours);
            state.asks.retain(|_, entry| entry.run() != ours);
        }
        Body::RunCancelRequested(request) => {
            let mark = Mark { number: event.number, at: event.ts, by: request.by };
            if let Some(started) = started(state, event) {
                started.stop = Some(match started.stop {
                    // A cancel on top of a timeout changes what the run ends as, not when it is killed.
                    Some(first) => Mark { at: first.at, ..mark },
                    None => mark,
                });
            }
        }
        Body::RunKillRequested(_) => {
            if let Some(started) = started(state, event) {
                let by = started.stop.map_or(StopCause::User, |stop| stop.by);
                started.kill = Some(Mark { number: event.number, at: event.ts, by });
            }
        }
        Body::TextDelta(delta) => {
            if let Some(started) = started(state, event) {
                let whole = started.text.len() as u64 == started.text_len;
                started.text_len += delta.text.len() as u64;
                if whole && started.text.len() < INLINE_MAX {
                    let room = INLINE_MAX - started.text.len();
                    started.text.push_str(&delta.text[..delta.text.floor_char_boundary(room)]);
                }
            }
        }
        Body::ToolStarted(_) => {
            if let Some(started) = started(state, event).filter(|started| !started.reports_turns) {
                started.turns += 1;
            }
        }
        Body::TurnStarted(_) => {
            if let Some(started) = started(state, event) {
                started.turns = if started.reports_turns { started.turns + 1 } else { 1 };
                started.reports_turns = true;
            }
        }
        Body::UsageReported(report) => {
            state.usage += report.usage();
            if let Some(started) = started(state, event) {
                started.usage += report.usage();
            }
        }
        Body::AskOpened(opened) => {
            state.asks.insert(opened.ask_id.clone(), AskEntry::Pending(opened.ask.clone()));
            settle_waiting(state, event);
        }
        Body::AskResolved(resolved) => {
            resolve(state, &resolved.ask_id, event.number, resolved);
            settle_waiting(state, event);
        }
        Body::AskDelivered(delivered) => {
            state.asks.remove(&delivered.ask_id);
        }
        Body::SteerAccepted(steer) => {
            if let Some(run) = state.runs.front_mut().filter(|run| Some(&run.id) == ours) {
                run.steers.push(Steer {
                    accepted: event.number,
                    sent: run.started.is_some().then_some(event.number),
                    text: steer.text.clone(),
                    blob: steer.blob.clone(),
                    mail: steer.mail.clone(),
                });
            }
        }
        Body::SteerSent(sent) => {
            let steers = state.runs.front_mut().into_iter().flat_map(|run| &mut run.steers);
            for steer in steers.filter(|steer| steer.accepted == sent.steer) {
                steer.sent = Some(event.number);
            }
        }
        Body::SteerTaken(taken) => forget_steer(state, taken.steer),
        Body::SteerMissed(missed) => forget_steer(state, missed.steer),
        Body::WorkerStarted(worker) => {
            state.worker = Some(worker.worker_id.clone());
            state.worker_since = event.ts;
            if let Some(run) = state.runs.front_mut() {
                run.lacks_room = false;
            }
        }
        Body::WorkerReattached(WorkerReattached { run_time_ms, .. }) => {
            if let (Some(ran), Some(started)) = (run_time_ms, turn(state)) {
                // Whatever else has passed since its start was no run time: only the worker saw it.
                let passed = started.waiting_since.unwrap_or(event.ts).since(started.at);
                // But for what was asked by a call, of which the worker knows nothing.
                started.waited_ms = started.waited_ms.max(passed.saturating_sub(*ran));
            }
        }
        Body::WorkerExited(exited) => {
            state.worker = None;
            // However one ends that we are ending, it is no crash.
            if state.stopping.take().is_none() && exited.reason != ExitReason::Stopped {
                Restarts::of(&state.settings.limits).count(&mut state.crashes, event.ts);
            }
        }
        Body::MailSent(sent) => {
            let stands = match (sent.deliver, &sent.run_id, &sent.else_run_id) {
                (Deliver::Prompt, Some(run), _) => Stands::Run(run.clone()),
                (Deliver::Steer, Some(told), Some(otherwise)) => {
                    Stands::Steer { told: told.clone(), otherwise: otherwise.clone() }
                }
                _ => Stands::Held,
            };
            state.mail.push_back(Letter { id: sent.mail.id.clone(), returns: 0, stands });
        }
        Body::MailDelivered(delivered) => {
            forget_letter(state, &delivered.id);
            for run in &mut state.runs {
                // Once the agent has it, how the run ends is no matter of the message any more.
                run.mail.take_if(|mail| *mail == delivered.id);
            }
        }
        Body::MailClaimed(claimed) => {
            let stands = Stands::Claimed { claim: claimed.claim, until: claimed.claim_expires_at };
            stand(state, &claimed.id, stands);
        }
        Body::MailReturned(returned) => {
            if let Some(letter) = state.mail.iter_mut().find(|letter| letter.id == returned.id) {
                letter.returns = returned.returns;
                letter.stands = Stands::Held;
            }
        }
        Body::MailAcknowledged(acknowledged) => forget_letter(state, &acknowledged.id),
        Body::MailQuarantined(quarantined) => forget_letter(state, &quarantined.id),
        Body::SessionCreated(_)
        | Body::MessageCreated(_)
        | Body::MessageFinished(_)
        | Body::ThoughtDelta(_)
        | Body::ToolOutput(_)
        | Body::ToolFinished(_)
        | Body::PlanUpdated(_)
        | Body::NoticeShown(_)
        | Body::ErrorRaised(_)
        | Body::WorkspaceCreated(_)
        | Body::WorkspaceRemoved(_)
        | Body::FleetStarted(_)
        | Body::FleetUpdated(_)
        | Body::FleetRouted(_)
        | Body::FleetMentioned(_)
        | Body::FleetFinished(_)
        | Body::HaltSet(_)
        | Body::HaltLifted(_) => {}
    }
    // A session that closes has no use for its agent once its last run has ended.
    if state.closing.is_some() && state.runs.is_empty() && state.worker.is_some() {
        state.stopping.get_or_insert(event.ts);
    }
}

fn update(state: &mut State, event: &Recorded, change: &SessionUpdated) {
    let settings = &mut state.settings;
    settings.title = change.title.clone().or(settings.title.take());
    settings.model = change.model.clone().or(settings.model.take());
    if let Some(policy) = &change.policy {
        settings.policy = policy.clone();
    }
    if let Some(limits) = &change.limits {
        settings.limits = limits.clone();
    }
    state.agent_session_id = change.agent_session_id.clone().or(state.agent_session_id.take());
    if let Some(child) = &change.child {
        state.children.insert(child.clone());
        if let Some(started) = turn(state) {
            started.children.insert(child.clone());
        }
    }
    if let Some(result) = &change.child_ended {
        let front = state.runs.front_mut().and_then(|run| run.started.as_mut());
        if let Some(suspended) = front.and_then(|started| started.suspended.as_mut())
            && suspended.waits_for.remove(&result.session_id)
        {
            suspended.ended.push(result.clone());
        }
    }
    state.parent_cancel = change.parent_cancel.unwrap_or(state.parent_cancel);
    if change.cancels_below {
        state.owed_cancel = Some(event.number);
    }
    if change.below_cancelled.is_some() && change.below_cancelled == state.owed_cancel {
        state.owed_cancel = None;
    }
    state.closing = change.closing.or(state.closing);
    state.below_closed |= change.below_closed;
    if change.stops_agent && state.worker.is_some() {
        state.stopping.get_or_insert(event.ts);
    }
}

/// The active run, if the event belongs to it.
fn started<'a>(state: &'a mut State, event: &Recorded) -> Option<&'a mut Started> {
    let run = state.runs.front_mut().filter(|run| Some(&run.id) == event.run.as_ref())?;
    run.started.as_mut()
}

fn resolve(state: &mut State, id: &AskId, number: Number, resolved: &AskResolved) {
    let ask = &resolved.ask;
    match (&ask.state, &ask.answer) {
        (AskState::Answered, Some(answer)) => {
            let always = answer.decision == Some(Decision::AllowAlways);
            if let (true, Some(tool)) = (always, &ask.tool) {
                state.grants.insert(tool.clone());
            }
            let mut told = answer.clone();
            if always {
                told.decision = Some(Decision::AllowOnce);
            }
            let (run, by_call) = (ask.run_id.clone(), ask.by_call);
            let entry = AskEntry::Answered { run, number, reply: Reply::Answered(told), by_call };
            state.asks.insert(id.clone(), entry);
        }
        _ => {
            state.asks.remove(id);
        }
    }
}

/// The started run at the head, if it is not suspended: what happens to the session happens in a turn of it.
fn turn(state: &mut State) -> Option<&mut Started> {
    state.runs.front_mut()?.started.as_mut().filter(|started| started.suspended.is_none())
}

/// A run waits for a person while any of its asks is pending, and for sessions below while it is suspended.
fn settle_waiting(state: &mut State, event: &Recorded) {
    let pending = state.pending_asks().next().is_some() || state.suspended().is_some();
    let Some(started) = state.runs.front_mut().and_then(|run| run.started.as_mut()) else { return };
    match (pending, started.waiting_since) {
        (true, None) => started.waiting_since = Some(event.ts),
        (false, Some(since)) => {
            started.waited_ms += event.ts.since(since);
            started.waiting_since = None;
        }
        _ => {}
    }
}

fn stand(state: &mut State, id: &MailId, stands: Stands) {
    if let Some(letter) = state.mail.iter_mut().find(|letter| letter.id == *id) {
        letter.stands = stands;
    }
}

fn forget_letter(state: &mut State, id: &MailId) {
    state.mail.retain(|letter| letter.id != *id);
}

fn forget_steer(state: &mut State, accepted: Number) {
    for run in &mut state.runs {
        run.steers.retain(|steer| steer.accepted != accepted);
    }
}
