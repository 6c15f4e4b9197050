//! What an event does to a session. The only place where a [`State`] changes, live and on replay alike.

use qd_protocol::event::{
    AskResolved, AskStatus, EventBody, PermissionDecision, QueueReason, RunStopCause, SessionUpdated,
    WorkerExitReason, WorkerReattached,
};
use qd_protocol::limits::INLINE_MAX;
use qd_protocol::link::AskResolution;
use qd_protocol::mail::MailDelivery;
use qd_protocol::{AskId, EventNumber, MailId};

use super::SessionEvent;
use super::state::{
    AskEntry, MailDeliveryState, MailboxEntry, PendingSteer, RunExecution, RunStopRequest, RunSuspension,
    SessionState, UnfinishedRun,
};
use super::worker::RestartLimit;

/// Applies one event. Events come in order and each once; what a later version added is passed over.
pub fn evolve(state: &mut SessionState, event: &SessionEvent) {
    debug_assert_eq!(event.number.0, state.number.0 + 1, "events of a session come in order");
    state.number = event.number;
    state.updated_at = event.ts;
    if let Some(up) = event.link_number {
        state.last_link_number = state.last_link_number.max(up);
    }
    let ours = event.run.as_ref();
    match &event.body {
        EventBody::SessionUpdated(change) => apply_session_updated(state, event, change),
        EventBody::SessionClosed(_) => state.closed = true,
        EventBody::RunAccepted(accepted) => {
            let Some(id) = ours else { return };
            let run = UnfinishedRun {
                id: id.clone(),
                accepted_at: event.ts,
                position: accepted.position,
                fingerprint: accepted.fingerprint.clone(),
                was_steer: accepted.steer.is_some(),
                mail: accepted.mail.clone(),
                waits_for_slot: false,
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
                set_delivery(state, mail, MailDeliveryState::Run(id.clone()));
            }
            state.runs.insert(at.min(state.runs.len()), run);
        }
        EventBody::RunQueued(queued) => {
            let waits = state.runs.iter_mut().find(|run| Some(&run.id) == ours);
            if let (Some(run), QueueReason::Capacity) = (waits, queued.reason) {
                run.waits_for_slot = true;
            }
        }
        EventBody::RunStarted(_) => {
            if let Some(run) = state.runs.front_mut().filter(|run| Some(&run.id) == ours) {
                run.waits_for_slot = false;
                run.started = Some(RunExecution {
                    started_at: event.ts,
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
        EventBody::RunSuspended(suspended) => {
            // The turn that asked is over, and with it whoever waited for an answer.
            state.asks.retain(|_, entry| entry.run() != ours);
            if let Some(started) = execution_of_event(state, event) {
                started.children.clear();
                let waits_for = suspended.children.iter().cloned().collect();
                started.suspended = Some(RunSuspension { waits_for, results: Vec::new() });
            }
            update_waiting_time(state, event);
        }
        EventBody::RunResumed(_) => {
            if let Some(run) = state.runs.front_mut().filter(|run| Some(&run.id) == ours) {
                run.waits_for_slot = false;
            }
            if let Some(started) = execution_of_event(state, event) {
                started.number = event.number;
                started.resumed = true;
                started.suspended = None;
            }
            update_waiting_time(state, event);
        }
        EventBody::RunFinished(_) => {
            state.last_finished = Some(event.ts);
            state.runs.retain(|run| Some(&run.id) != ours);
            state.asks.retain(|_, entry| entry.run() != ours);
        }
        EventBody::RunCancelRequested(request) => {
            let mark = RunStopRequest { number: event.number, at: event.ts, by: request.by };
            if let Some(started) = execution_of_event(state, event) {
                started.stop = Some(match started.stop {
                    // A cancel on top of a timeout changes what the run ends as, not when it is killed.
                    Some(first) => RunStopRequest { at: first.at, ..mark },
                    None => mark,
                });
            }
        }
        EventBody::RunKillRequested(_) => {
            if let Some(started) = execution_of_event(state, event) {
                let by = started.stop.map_or(RunStopCause::User, |stop| stop.by);
                started.kill = Some(RunStopRequest { number: event.number, at: event.ts, by });
            }
        }
        EventBody::TextDelta(delta) => {
            if let Some(started) = execution_of_event(state, event) {
                let whole = started.text.len() as u64 == started.text_len;
                started.text_len += delta.text.len() as u64;
                if whole && started.text.len() < INLINE_MAX {
                    let room = INLINE_MAX - started.text.len();
                    started.text.push_str(&delta.text[..delta.text.floor_char_boundary(room)]);
                }
            }
        }
        EventBody::ToolStarted(_) => {
            if let Some(started) = execution_of_event(state, event).filter(|started| !started.reports_turns) {
                started.turns += 1;
            }
        }
        EventBody::TurnStarted(_) => {
            if let Some(started) = execution_of_event(state, event) {
                started.turns = if started.reports_turns { started.turns + 1 } else { 1 };
                started.reports_turns = true;
            }
        }
        EventBody::UsageReported(report) => {
            state.usage += report.usage();
            if let Some(started) = execution_of_event(state, event) {
                started.usage += report.usage();
            }
        }
        EventBody::AskOpened(opened) => {
            state.asks.insert(opened.ask_id.clone(), AskEntry::Pending(opened.ask.clone()));
            update_waiting_time(state, event);
        }
        EventBody::AskResolved(resolved) => {
            apply_ask_resolved(state, &resolved.ask_id, event.number, resolved);
            update_waiting_time(state, event);
        }
        EventBody::AskDelivered(delivered) => {
            state.asks.remove(&delivered.ask_id);
        }
        EventBody::SteerAccepted(steer) => {
            if let Some(run) = state.runs.front_mut().filter(|run| Some(&run.id) == ours) {
                run.steers.push(PendingSteer {
                    accepted: event.number,
                    sent: run.started.is_some().then_some(event.number),
                    text: steer.text.clone(),
                    blob: steer.blob.clone(),
                    mail: steer.mail.clone(),
                });
            }
        }
        EventBody::SteerSent(sent) => {
            let steers = state.runs.front_mut().into_iter().flat_map(|run| &mut run.steers);
            for steer in steers.filter(|steer| steer.accepted == sent.steer) {
                steer.sent = Some(event.number);
            }
        }
        EventBody::SteerTaken(taken) => remove_steer(state, taken.steer),
        EventBody::SteerMissed(missed) => remove_steer(state, missed.steer),
        EventBody::WorkerStarted(worker) => {
            state.worker = Some(worker.worker_id.clone());
            state.worker_since = event.ts;
            if let Some(run) = state.runs.front_mut() {
                run.waits_for_slot = false;
            }
        }
        EventBody::WorkerReattached(WorkerReattached { run_time_ms, .. }) => {
            if let (Some(ran), Some(started)) = (run_time_ms, current_turn_mut(state)) {
                // Whatever else has passed since its start was no run time: only the worker saw it.
                let passed = started.waiting_since.unwrap_or(event.ts).since(started.started_at);
                // But for what was asked by a call, of which the worker knows nothing.
                started.waited_ms = started.waited_ms.max(passed.saturating_sub(*ran));
            }
        }
        EventBody::WorkerExited(exited) => {
            state.worker = None;
            // However one ends that we are ending, it is no crash.
            if state.worker_stopping_since.take().is_none() && exited.reason != WorkerExitReason::Stopped {
                RestartLimit::from_limits(&state.settings.limits).record_crash(&mut state.crashes, event.ts);
            }
        }
        EventBody::MailSent(sent) => {
            let stands = match (sent.deliver, &sent.run_id, &sent.else_run_id) {
                (MailDelivery::Prompt, Some(run), _) => MailDeliveryState::Run(run.clone()),
                (MailDelivery::Steer, Some(told), Some(otherwise)) => {
                    MailDeliveryState::Steer { target_run: told.clone(), fallback_run: otherwise.clone() }
                }
                _ => MailDeliveryState::Held,
            };
            state.mail.push_back(MailboxEntry { id: sent.mail.id.clone(), returns: 0, delivery: stands });
        }
        EventBody::MailDelivered(delivered) => {
            remove_mailbox_entry(state, &delivered.id);
            for run in &mut state.runs {
                // Once the agent has it, how the run ends is no matter of the message any more.
                run.mail.take_if(|mail| *mail == delivered.id);
            }
        }
        EventBody::MailClaimed(claimed) => {
            let stands = MailDeliveryState::Claimed { claim: claimed.claim, until: claimed.claim_expires_at };
            set_delivery(state, &claimed.id, stands);
        }
        EventBody::MailReturned(returned) => {
            if let Some(letter) = state.mail.iter_mut().find(|letter| letter.id == returned.id) {
                letter.returns = returned.returns;
                letter.delivery = MailDeliveryState::Held;
            }
        }
        EventBody::MailAcknowledged(acknowledged) => remove_mailbox_entry(state, &acknowledged.id),
        EventBody::MailQuarantined(quarantined) => remove_mailbox_entry(state, &quarantined.id),
        EventBody::SessionCreated(_)
        | EventBody::MessageCreated(_)
        | EventBody::MessageFinished(_)
        | EventBody::ThoughtDelta(_)
        | EventBody::ToolOutput(_)
        | EventBody::ToolFinished(_)
        | EventBody::PlanUpdated(_)
        | EventBody::NoticeShown(_)
        | EventBody::ErrorRaised(_)
        | EventBody::WorkspaceCreated(_)
        | EventBody::WorkspaceRemoved(_)
        | EventBody::FleetStarted(_)
        | EventBody::FleetUpdated(_)
        | EventBody::FleetRouted(_)
        | EventBody::FleetMentioned(_)
        | EventBody::FleetFinished(_)
        | EventBody::HaltSet(_)
        | EventBody::HaltLifted(_) => {}
    }
    // A session that closes has no use for its agent once its last run has ended.
    if state.closing.is_some() && state.runs.is_empty() && state.worker.is_some() {
        state.worker_stopping_since.get_or_insert(event.ts);
    }
}

fn apply_session_updated(state: &mut SessionState, event: &SessionEvent, change: &SessionUpdated) {
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
        if let Some(started) = current_turn_mut(state) {
            started.children.insert(child.clone());
        }
    }
    if let Some(result) = &change.child_ended {
        let front = state.runs.front_mut().and_then(|run| run.started.as_mut());
        if let Some(suspended) = front.and_then(|started| started.suspended.as_mut())
            && suspended.waits_for.remove(&result.session_id)
        {
            suspended.results.push(result.clone());
        }
    }
    state.last_parent_cancel = change.parent_cancel.unwrap_or(state.last_parent_cancel);
    if change.cancels_below {
        state.pending_child_cancel = Some(event.number);
    }
    if change.below_cancelled.is_some() && change.below_cancelled == state.pending_child_cancel {
        state.pending_child_cancel = None;
    }
    state.closing = change.closing.or(state.closing);
    state.children_closed |= change.below_closed;
    if change.stops_agent && state.worker.is_some() {
        state.worker_stopping_since.get_or_insert(event.ts);
    }
}

/// The active run, if the event belongs to it.
fn execution_of_event<'a>(state: &'a mut SessionState, event: &SessionEvent) -> Option<&'a mut RunExecution> {
    let run = state.runs.front_mut().filter(|run| Some(&run.id) == event.run.as_ref())?;
    run.started.as_mut()
}

fn apply_ask_resolved(state: &mut SessionState, id: &AskId, number: EventNumber, resolved: &AskResolved) {
    let ask = &resolved.ask;
    match (&ask.state, &ask.answer) {
        (AskStatus::Answered, Some(answer)) => {
            let always = answer.decision == Some(PermissionDecision::AllowAlways);
            if let (true, Some(tool)) = (always, &ask.tool) {
                state.grants.insert(tool.clone());
            }
            let mut told = answer.clone();
            if always {
                told.decision = Some(PermissionDecision::AllowOnce);
            }
            let (run, by_call) = (ask.run_id.clone(), ask.by_call);
            let entry = AskEntry::Answered { run, number, reply: AskResolution::Answered(told), by_call };
            state.asks.insert(id.clone(), entry);
        }
        _ => {
            state.asks.remove(id);
        }
    }
}

/// The started run at the head, if it is not suspended: what happens to the session happens in a turn of it.
fn current_turn_mut(state: &mut SessionState) -> Option<&mut RunExecution> {
    state.runs.front_mut()?.started.as_mut().filter(|started| started.suspended.is_none())
}

/// A run waits for a person while any of its asks is pending, and for sessions below while it is suspended.
fn update_waiting_time(state: &mut SessionState, event: &SessionEvent) {
    let pending = state.pending_asks().next().is_some() || state.suspension().is_some();
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

fn set_delivery(state: &mut SessionState, id: &MailId, stands: MailDeliveryState) {
    if let Some(letter) = state.mail.iter_mut().find(|letter| letter.id == *id) {
        letter.delivery = stands;
    }
}

fn remove_mailbox_entry(state: &mut SessionState, id: &MailId) {
    state.mail.retain(|letter| letter.id != *id);
}

fn remove_steer(state: &mut SessionState, accepted: EventNumber) {
    for run in &mut state.runs {
        run.steers.retain(|steer| steer.accepted != accepted);
    }
}
