//! Runs: from their acceptance to their end, and what the agent reports of a turn.

use qd_protocol::api::LastRun;
use qd_protocol::event::{
    MessageDelta, QueueReason, RunAccepted, RunCancelRequested, RunFinished, RunMoved, RunQueued,
    RunStopCause, RunSuspended, UsageReported,
};
use qd_protocol::limits::{AUTO_TITLE_CHARS_MAX, INLINE_MAX};

use super::mail_events::set_delivery;
use super::{execution_of_event, first_run_of_event, update_waiting_time};
use crate::session::SessionEvent;
use crate::session::state::{
    MailDeliveryState, RunExecution, RunStopRequest, RunSuspension, SessionState, UnfinishedRun,
};

pub(super) fn apply_accepted(state: &mut SessionState, event: &SessionEvent, accepted: &RunAccepted) {
    let Some(id) = &event.run else { return };
    let run = UnfinishedRun {
        id: id.clone(),
        accepted_at: event.ts.wall,
        position: accepted.position,
        fingerprint: accepted.fingerprint.clone(),
        was_steer: accepted.steer.is_some(),
        mail: accepted.mail.clone(),
        waits_for_slot: false,
        quota_until: None,
        steers: Vec::new(),
        execution: None,
    };
    // A missed steer runs next: after the run it was meant for and any steers missed before it.
    let next = || state.runs.iter().skip(1).position(|run| !run.was_steer).map(|position| position + 1);
    let at = accepted.steer.and_then(|_| next()).unwrap_or(state.runs.len());
    if let Some(mail) = &accepted.mail {
        set_delivery(state, mail, MailDeliveryState::Run(id.clone()));
    }
    state.runs.insert(at, run);
    if state.auto_title.is_none() && state.settings.title.is_none() {
        state.auto_title = title_from_prompt(&accepted.prompt);
    }
}

/// The beginning of the first line that is not blank, without control characters. `None` if all lines are blank.
fn title_from_prompt(prompt: &str) -> Option<String> {
    let printable = |line: &str| -> String {
        let text: String =
            line.chars().map(|c| if c == '\t' { ' ' } else { c }).filter(|c| !c.is_control()).collect();
        text.trim().to_owned()
    };
    let line = prompt.lines().map(printable).find(|line| !line.is_empty())?;
    let end = line.char_indices().nth(AUTO_TITLE_CHARS_MAX).map_or(line.len(), |(at, _)| at);
    Some(line[..end].trim_end().to_owned())
}

pub(super) fn apply_queued(state: &mut SessionState, event: &SessionEvent, queued: &RunQueued) {
    let Some(run) = state.runs.iter_mut().find(|run| Some(&run.id) == event.run.as_ref()) else { return };
    match queued.reason {
        QueueReason::Capacity => (run.waits_for_slot, run.quota_until) = (true, None),
        // It waits for the reset instead. Whether there is a slot is seen then.
        QueueReason::Quota => (run.waits_for_slot, run.quota_until) = (false, queued.until),
        QueueReason::Busy | QueueReason::Halted => {}
    }
}

pub(super) fn apply_moved(state: &mut SessionState, event: &SessionEvent, moved: &RunMoved) {
    let index_of = |state: &SessionState, id| state.runs.iter().position(|run| Some(&run.id) == id);
    let Some(run) = index_of(state, event.run.as_ref()).and_then(|from| state.runs.remove(from)) else {
        return;
    };
    let at = moved.before.as_ref().and_then(|next| index_of(state, Some(next)));
    state.runs.insert(at.unwrap_or(state.runs.len()), run);
    // Only the first run waits for a slot; the others wait for it.
    state.runs.iter_mut().skip(1).for_each(|run| run.waits_for_slot = false);
}

pub(super) fn apply_started(state: &mut SessionState, event: &SessionEvent) {
    if let Some(run) = first_run_of_event(state, event) {
        (run.waits_for_slot, run.quota_until) = (false, None);
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

pub(super) fn apply_suspended(state: &mut SessionState, event: &SessionEvent, suspended: &RunSuspended) {
    // The turn that opened these asks is over, so nothing waits for an answer any more.
    state.asks.retain(|_, entry| entry.run() != event.run.as_ref());
    if let Some(started) = execution_of_event(state, event) {
        started.children.clear();
        let waits_for = suspended.children.iter().cloned().collect();
        started.suspended = Some(RunSuspension { waits_for, results: Vec::new() });
    }
    update_waiting_time(state, event);
}

pub(super) fn apply_resumed(state: &mut SessionState, event: &SessionEvent) {
    if let Some(run) = first_run_of_event(state, event) {
        (run.waits_for_slot, run.quota_until) = (false, None);
    }
    if let Some(started) = execution_of_event(state, event) {
        started.number = event.number;
        started.resumed = true;
        started.suspended = None;
    }
    update_waiting_time(state, event);
}

pub(super) fn apply_finished(state: &mut SessionState, event: &SessionEvent, finished: &RunFinished) {
    let run = event.run.as_ref();
    state.last_finished = Some(event.ts.wall);
    state.last_run = run.map(|id| LastRun {
        id: id.clone(),
        finish_reason: finished.finish_reason,
        finished_at: event.ts.wall,
    });
    state.runs.retain(|unfinished| Some(&unfinished.id) != run);
    state.asks.retain(|_, entry| entry.run() != run);
}

pub(super) fn apply_cancel_requested(
    state: &mut SessionState,
    event: &SessionEvent,
    request: &RunCancelRequested,
) {
    let stop = RunStopRequest { number: event.number, at: event.ts, by: request.by };
    if let Some(started) = execution_of_event(state, event) {
        started.stop = Some(match started.stop {
            // A cancel after a timeout changes the finish reason, not the time of the kill.
            Some(first) => RunStopRequest { at: first.at, ..stop },
            None => stop,
        });
    }
}

pub(super) fn apply_kill_requested(state: &mut SessionState, event: &SessionEvent) {
    if let Some(started) = execution_of_event(state, event) {
        let by = started.stop.map_or(RunStopCause::User, |stop| stop.by);
        started.kill = Some(RunStopRequest { number: event.number, at: event.ts, by });
    }
}

pub(super) fn apply_text_delta(state: &mut SessionState, event: &SessionEvent, delta: &MessageDelta) {
    if let Some(started) = execution_of_event(state, event) {
        let is_complete = started.text.len() as u64 == started.text_len;
        started.text_len += delta.text.len() as u64;
        if is_complete && started.text.len() < INLINE_MAX {
            let remaining = INLINE_MAX - started.text.len();
            started.text.push_str(&delta.text[..delta.text.floor_char_boundary(remaining)]);
        }
    }
}

/// A tool call begins a turn, unless the agent reports its model calls itself.
pub(super) fn apply_tool_started(state: &mut SessionState, event: &SessionEvent) {
    if let Some(started) = execution_of_event(state, event).filter(|started| !started.reports_turns) {
        started.turns = started.turns.saturating_add(1);
    }
}

pub(super) fn apply_turn_started(state: &mut SessionState, event: &SessionEvent) {
    if let Some(started) = execution_of_event(state, event) {
        started.turns = if started.reports_turns { started.turns.saturating_add(1) } else { 1 };
        started.reports_turns = true;
    }
}

pub(super) fn apply_usage(state: &mut SessionState, event: &SessionEvent, report: &UsageReported) {
    state.usage += report.usage();
    state.conversation_cost_usd = report.conversation_cost_usd.or(state.conversation_cost_usd);
    if let Some(started) = execution_of_event(state, event) {
        started.usage += report.usage();
    }
}
