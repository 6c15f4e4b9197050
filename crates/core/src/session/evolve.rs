//! How an event changes a session. This is the only code that changes a [`SessionState`], live and on replay alike. The
//! submodules have one family of events each.

mod ask_events;
mod mail_events;
mod run_events;
mod session_events;
mod steer_events;
mod worker_events;

use qd_protocol::ClockReading;
use qd_protocol::event::EventBody;

use super::SessionEvent;
use super::output_size::agent_event_bytes;
use super::state::{MailDeliveryState, RunExecution, SessionState, UnfinishedRun};

/// Applies one event. Events come in order and each exactly once.
pub fn evolve(state: &mut SessionState, event: &SessionEvent) {
    debug_assert_eq!(event.number.0, state.number.0 + 1, "events of a session come in order");
    carry_clocks_over_reboot(state, event.ts);
    state.number = event.number;
    state.updated_at = event.ts.wall;
    if let Some(number) = event.update_number {
        state.last_update_number = state.last_update_number.max(number);
    }
    state.output_bytes = state.output_bytes.saturating_add(agent_event_bytes(&event.body));
    match &event.body {
        EventBody::SessionUpdated(change) => session_events::apply_updated(state, event, change),
        EventBody::ModeChanged(changed) => state.settings.mode = Some(changed.mode.clone()),
        EventBody::SessionClosed(_) => state.closed = true,
        EventBody::RunAccepted(accepted) => run_events::apply_accepted(state, event, accepted),
        EventBody::RunQueued(queued) => run_events::apply_queued(state, event, queued),
        EventBody::RunMoved(moved) => run_events::apply_moved(state, event, moved),
        EventBody::RunStarted(_) => run_events::apply_started(state, event),
        EventBody::RunSuspended(suspended) => run_events::apply_suspended(state, event, suspended),
        EventBody::RunResumed(_) => run_events::apply_resumed(state, event),
        EventBody::RunFinished(finished) => run_events::apply_finished(state, event, finished),
        EventBody::RunCancelRequested(request) => run_events::apply_cancel_requested(state, event, request),
        EventBody::RunKillRequested(_) => run_events::apply_kill_requested(state, event),
        EventBody::TextDelta(delta) => run_events::apply_text_delta(state, event, delta),
        EventBody::ToolStarted(_) => run_events::apply_tool_started(state, event),
        EventBody::TurnStarted(_) => run_events::apply_turn_started(state, event),
        EventBody::UsageReported(report) => run_events::apply_usage(state, event, report),
        EventBody::ContextUpdated(updated) => state.agent_context = Some(updated.context),
        EventBody::AskOpened(opened) => ask_events::apply_opened(state, event, opened),
        EventBody::AskResolved(resolved) => ask_events::apply_resolved(state, event, resolved),
        EventBody::AskDelivered(delivered) => _ = state.asks.remove(&delivered.ask_id),
        EventBody::SteerAccepted(steer) => steer_events::apply_accepted(state, event, steer),
        EventBody::SteerSent(sent) => steer_events::apply_sent(state, event, sent),
        EventBody::SteerTaken(taken) => steer_events::remove_steer(state, taken.steer),
        EventBody::SteerMissed(missed) => steer_events::remove_steer(state, missed.steer),
        EventBody::WorkerStarted(started) => worker_events::apply_started(state, event, started),
        EventBody::WorkerReattached(reattached) => worker_events::apply_reattached(state, event, reattached),
        EventBody::WorkerExited(exited) => worker_events::apply_exited(state, event, exited),
        EventBody::MailSent(sent) => mail_events::apply_sent(state, sent),
        EventBody::MailDelivered(delivered) => mail_events::apply_delivered(state, delivered),
        EventBody::MailClaimed(claimed) => mail_events::apply_claimed(state, event, claimed),
        EventBody::MailReturned(returned) => mail_events::apply_returned(state, returned),
        EventBody::MailAcknowledged(acknowledged) => mail_events::remove_entry(state, &acknowledged.id),
        EventBody::MailQuarantined(quarantined) => mail_events::remove_entry(state, &quarantined.id),
        EventBody::SessionCreated(_)
        | EventBody::MessageCreated(_)
        | EventBody::MessageFinished(_)
        | EventBody::ThoughtDelta(_)
        | EventBody::ToolOutput(_)
        | EventBody::ToolFinished(_)
        | EventBody::PlanUpdated(_)
        | EventBody::ContextCompacted(_)
        | EventBody::NoticeShown(_)
        | EventBody::ErrorRaised(_)
        | EventBody::WorkspaceCreated(_)
        | EventBody::WorkspaceRemoved(_)
        | EventBody::FleetStarted(_)
        | EventBody::FleetUpdated(_)
        | EventBody::FleetRouted(_)
        | EventBody::FleetMentioned(_)
        | EventBody::FleetFinished(_)
        | EventBody::TokenCreated(_)
        | EventBody::TokenRevoked(_)
        | EventBody::QuotaReached(_)
        | EventBody::QuotaReleased(_)
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
            | EventBody::ContextUpdated(_)
            | EventBody::ContextCompacted(_)
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

/// The first run, if the event belongs to it.
fn first_run_of_event<'a>(
    state: &'a mut SessionState,
    event: &SessionEvent,
) -> Option<&'a mut UnfinishedRun> {
    state.runs.front_mut().filter(|run| Some(&run.id) == event.run.as_ref())
}

/// The active run, if the event belongs to it.
fn execution_of_event<'a>(state: &'a mut SessionState, event: &SessionEvent) -> Option<&'a mut RunExecution> {
    first_run_of_event(state, event)?.execution.as_mut()
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
