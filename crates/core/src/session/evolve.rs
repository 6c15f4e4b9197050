//! How an event changes a session. This is the only code that changes a [`SessionState`], live and on replay alike.

use qd_protocol::event::{
    AskResolved, AskStatus, EventBody, PermissionDecision, QueueReason, RunStopCause, SessionUpdated,
    WorkerExitReason, WorkerReattached,
};
use qd_protocol::limits::INLINE_MAX;
use qd_protocol::link::AskResolution;
use qd_protocol::mail::MailDelivery;
use qd_protocol::{AskId, ClockReading, EventNumber, MailId};

use super::SessionEvent;
use super::state::{
    AskEntry, MailDeliveryState, MailboxEntry, PendingSteer, RunExecution, RunStopRequest, RunSuspension,
    SessionState, UnfinishedRun,
};
use super::worker::RestartLimit;

/// Applies one event. Events come in order and each exactly once.
pub fn evolve(state: &mut SessionState, event: &SessionEvent) {
    debug_assert_eq!(event.number.0, state.number.0 + 1, "events of a session come in order");
    carry_clocks_over_reboot(state, event.ts);
    state.number = event.number;
    state.updated_at = event.ts.wall;
    if let Some(number) = event.update_number {
        state.last_update_number = state.last_update_number.max(number);
    }
    let run_id = event.run.as_ref();
    match &event.body {
        EventBody::SessionUpdated(change) => apply_session_updated(state, event, change),
        EventBody::SessionClosed(_) => state.closed = true,
        EventBody::RunAccepted(accepted) => {
            let Some(id) = run_id else { return };
            let run = UnfinishedRun {
                id: id.clone(),
                accepted_at: event.ts.wall,
                position: accepted.position,
                fingerprint: accepted.fingerprint.clone(),
                was_steer: accepted.steer.is_some(),
                mail: accepted.mail.clone(),
                waits_for_slot: false,
                steers: Vec::new(),
                execution: None,
            };
            // A missed steer runs next: after the run it was meant for and any steers missed before it.
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
            let queued_run = state.runs.iter_mut().find(|run| Some(&run.id) == run_id);
            if let (Some(run), QueueReason::Capacity) = (queued_run, queued.reason) {
                run.waits_for_slot = true;
            }
        }
        EventBody::RunStarted(_) => {
            if let Some(run) = state.runs.front_mut().filter(|run| Some(&run.id) == run_id) {
                run.waits_for_slot = false;
                run.execution = Some(RunExecution {
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
            // The turn that opened these asks is over, so nothing waits for an answer any more.
            state.asks.retain(|_, entry| entry.run() != run_id);
            if let Some(started) = execution_of_event(state, event) {
                started.children.clear();
                let waits_for = suspended.children.iter().cloned().collect();
                started.suspended = Some(RunSuspension { waits_for, results: Vec::new() });
            }
            update_waiting_time(state, event);
        }
        EventBody::RunResumed(_) => {
            if let Some(run) = state.runs.front_mut().filter(|run| Some(&run.id) == run_id) {
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
            state.last_finished = Some(event.ts.wall);
            state.runs.retain(|run| Some(&run.id) != run_id);
            state.asks.retain(|_, entry| entry.run() != run_id);
        }
        EventBody::RunCancelRequested(request) => {
            let stop = RunStopRequest { number: event.number, at: event.ts, by: request.by };
            if let Some(started) = execution_of_event(state, event) {
                started.stop = Some(match started.stop {
                    // A cancel after a timeout changes the finish reason, not the time of the kill.
                    Some(first) => RunStopRequest { at: first.at, ..stop },
                    None => stop,
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
                let is_complete = started.text.len() as u64 == started.text_len;
                started.text_len += delta.text.len() as u64;
                if is_complete && started.text.len() < INLINE_MAX {
                    let remaining = INLINE_MAX - started.text.len();
                    started.text.push_str(&delta.text[..delta.text.floor_char_boundary(remaining)]);
                }
            }
        }
        EventBody::ToolStarted(_) => {
            if let Some(started) = execution_of_event(state, event).filter(|started| !started.reports_turns) {
                started.turns = started.turns.saturating_add(1);
            }
        }
        EventBody::TurnStarted(_) => {
            if let Some(started) = execution_of_event(state, event) {
                started.turns = if started.reports_turns { started.turns.saturating_add(1) } else { 1 };
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
            if let Some(run) = state.runs.front_mut().filter(|run| Some(&run.id) == run_id) {
                run.steers.push(PendingSteer {
                    accepted: event.number,
                    sent: run.execution.is_some().then_some(event.number),
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
            state.worker_since = event.ts.wall;
            if let Some(run) = state.runs.front_mut() {
                run.waits_for_slot = false;
            }
        }
        EventBody::WorkerReattached(WorkerReattached { run_time_ms, .. }) => {
            if let (Some(run_time), Some(started)) = (run_time_ms, current_turn_mut(state)) {
                // Only the worker saw this turn, so any other time since its start was not run time.
                let passed = started.waiting_since.unwrap_or(event.ts).elapsed_since(started.started_at);
                // Keep a longer wait that is known here: the worker does not see questions asked by tool calls.
                started.waited_ms = started.waited_ms.max(passed.saturating_sub(*run_time));
                // A worker on another machine saw the time that a reboot of this one hid.
                if let Some(uptime) = &mut started.started_at.uptime {
                    let hidden = run_time.saturating_sub(passed);
                    uptime.awake_ms = uptime.awake_ms.saturating_sub_unsigned(hidden);
                }
            }
        }
        EventBody::WorkerExited(exited) => {
            state.worker = None;
            // A worker that is being stopped has not crashed, however it exits.
            if state.worker_stopping_since.take().is_none() && exited.reason != WorkerExitReason::Stopped {
                RestartLimit::from_limits(&state.settings.limits).record_crash(&mut state.crashes, event.ts);
            }
        }
        EventBody::MailSent(sent) => {
            let delivery = match (sent.deliver, &sent.run_id, &sent.else_run_id) {
                (MailDelivery::Prompt, Some(run), _) => MailDeliveryState::Run(run.clone()),
                (MailDelivery::Steer, Some(target_run), Some(fallback_run)) => MailDeliveryState::Steer {
                    target_run: target_run.clone(),
                    fallback_run: fallback_run.clone(),
                },
                _ => MailDeliveryState::Held,
            };
            state.mail.push_back(MailboxEntry { id: sent.mail.id.clone(), returns: 0, delivery });
        }
        EventBody::MailDelivered(delivered) => {
            remove_mailbox_entry(state, &delivered.id);
            for run in &mut state.runs {
                // Once the agent has the message, the end of the run no longer affects it.
                run.mail.take_if(|mail| *mail == delivered.id);
            }
        }
        EventBody::MailClaimed(claimed) => {
            let (claim, until) = (claimed.claim, claimed.claim_expires_at);
            let since = event.ts.uptime.map(|_| event.ts);
            set_delivery(state, &claimed.id, MailDeliveryState::Claimed { claim, until, since });
        }
        EventBody::MailReturned(returned) => {
            if let Some(entry) = state.mail.iter_mut().find(|entry| entry.id == returned.id) {
                entry.returns = returned.returns;
                entry.delivery = MailDeliveryState::Held;
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
    // A closing session needs no agent once its last run has ended.
    if state.closing.is_some() && state.runs.is_empty() && state.worker.is_some() {
        state.worker_stopping_since.get_or_insert(event.ts);
    }
}

/// Whether the uptime is stored with an event of this kind. The kinds that make up an agent's output are left out:
/// they are most of a journal, and `evolve` uses none of their times except as a wall-clock time.
pub(super) fn records_uptime(body: &EventBody) -> bool {
    !matches!(
        body,
        EventBody::TextDelta(_)
            | EventBody::ThoughtDelta(_)
            | EventBody::ToolStarted(_)
            | EventBody::ToolOutput(_)
            | EventBody::ToolFinished(_)
            | EventBody::TurnStarted(_)
            | EventBody::PlanUpdated(_)
            | EventBody::UsageReported(_)
            | EventBody::NoticeShown(_)
            | EventBody::MessageCreated(_)
            | EventBody::MessageFinished(_)
    )
}

/// Brings all readings to the clocks of the boot that the event is from. So durations within one state never span a
/// reboot, and the wall clock, which may be wrong after one, decides nothing.
fn carry_clocks_over_reboot(state: &mut SessionState, now: ClockReading) {
    let Some(uptime) = now.uptime else { return };
    let last = state.last_uptime.replace(uptime);
    if last.is_some_and(|last| last.boot == uptime.boot) {
        return;
    }
    let carry = |reading: &mut ClockReading| *reading = reading.carried_over_reboot(last, now);
    state.worker_stopping_since.iter_mut().for_each(carry);
    state.crashes.iter_mut().for_each(carry);
    for started in state.runs.iter_mut().filter_map(|run| run.execution.as_mut()) {
        carry(&mut started.started_at);
        started.waiting_since.iter_mut().for_each(carry);
        started.stop.iter_mut().chain(&mut started.kill).for_each(|request| carry(&mut request.at));
    }
    for entry in &mut state.mail {
        if let MailDeliveryState::Claimed { since: Some(since), .. } = &mut entry.delivery {
            carry(since);
        }
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
        let active = state.runs.front_mut().and_then(|run| run.execution.as_mut());
        if let Some(suspended) = active.and_then(|started| started.suspended.as_mut())
            && suspended.waits_for.remove(&result.session_id)
        {
            suspended.results.push(result.clone());
        }
    }
    state.last_parent_cancel = change.parent_cancel.unwrap_or(state.last_parent_cancel);
    if change.cancels_children {
        state.pending_child_cancel = Some(event.number);
    }
    if change.children_cancelled.is_some() && change.children_cancelled == state.pending_child_cancel {
        state.pending_child_cancel = None;
    }
    state.closing = change.closing.or(state.closing);
    state.children_closed |= change.children_closed;
    if change.stops_agent && state.worker.is_some() {
        state.worker_stopping_since.get_or_insert(event.ts);
    }
    if let (true, Some(run)) = (change.takes_slot, state.runs.front_mut()) {
        run.waits_for_slot = false;
    }
}

/// The active run, if the event belongs to it.
fn execution_of_event<'a>(state: &'a mut SessionState, event: &SessionEvent) -> Option<&'a mut RunExecution> {
    let run = state.runs.front_mut().filter(|run| Some(&run.id) == event.run.as_ref())?;
    run.execution.as_mut()
}

fn apply_ask_resolved(state: &mut SessionState, id: &AskId, number: EventNumber, resolved: &AskResolved) {
    let ask = &resolved.ask;
    match (&ask.state, &ask.answer) {
        (AskStatus::Answered, Some(answer)) => {
            let always = answer.decision == Some(PermissionDecision::AllowAlways);
            if let (true, Some(tool)) = (always, &ask.tool) {
                state.grants.insert(tool.clone());
            }
            let mut reply = answer.clone();
            if always {
                reply.decision = Some(PermissionDecision::AllowOnce);
            }
            let (run, asked_by_tool) = (ask.run_id.clone(), ask.asked_by_tool);
            let entry =
                AskEntry::Answered { run, number, reply: AskResolution::Answered(reply), asked_by_tool };
            state.asks.insert(id.clone(), entry);
        }
        _ => {
            state.asks.remove(id);
        }
    }
}

/// The active run, unless it is suspended.
fn current_turn_mut(state: &mut SessionState) -> Option<&mut RunExecution> {
    state.runs.front_mut()?.execution.as_mut().filter(|started| started.suspended.is_none())
}

/// Starts or stops the waiting clock. A run waits for a person while any ask is pending, and for child sessions while
/// it is suspended.
fn update_waiting_time(state: &mut SessionState, event: &SessionEvent) {
    let is_waiting = state.pending_asks().next().is_some() || state.suspension().is_some();
    let Some(started) = state.runs.front_mut().and_then(|run| run.execution.as_mut()) else { return };
    match (is_waiting, started.waiting_since) {
        (true, None) => started.waiting_since = Some(event.ts),
        (false, Some(since)) => {
            started.waited_ms += event.ts.elapsed_since(since);
            started.waiting_since = None;
        }
        _ => {}
    }
}

fn set_delivery(state: &mut SessionState, id: &MailId, delivery: MailDeliveryState) {
    if let Some(entry) = state.mail.iter_mut().find(|entry| entry.id == *id) {
        entry.delivery = delivery;
    }
}

fn remove_mailbox_entry(state: &mut SessionState, id: &MailId) {
    state.mail.retain(|entry| entry.id != *id);
}

fn remove_steer(state: &mut SessionState, accepted: EventNumber) {
    for run in &mut state.runs {
        run.steers.retain(|steer| steer.accepted != accepted);
    }
}
