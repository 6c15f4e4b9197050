//! What lists say about a session: its state or how its last run ended, its title, and its unmerged work. Pure functions
//! over what the daemon lists.

use std::collections::HashMap;

use qd_protocol::api::{Session, SessionSandbox, SessionStatus};
use qd_protocol::event::{ContextUsage, FinishReason};
use qd_protocol::sandbox::{NetworkSetting, SandboxSetting};
use qd_protocol::worktree::{Worktree, WorktreeStatus};
use qd_protocol::{Millis, SessionId};

use super::style::CellColour;
use super::text;
use crate::local_time::format_local_time;

/// Titles are truncated to this length, so the columns after them stay on the screen.
pub(crate) const TITLE_CHARS: usize = 40;
/// From here on people are told how full the context of an agent is.
const FULL_CONTEXT_PERCENT: u64 = 80;
/// Stands for unmerged work that could not be determined in time.
const UNKNOWN_CHANGES: &str = "…";

/// How lists show ids: short for people at a terminal, whole for programs. Commands accept both.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ShownIds {
    /// Whole ids with their short forms. Every other id is shown whole.
    short: HashMap<String, String>,
}

impl ShownIds {
    /// Shows these ids by their short forms.
    pub(crate) fn shortened(short: HashMap<String, String>) -> Self {
        Self { short }
    }

    #[cfg(test)]
    pub(crate) fn from_pairs(pairs: &[(&str, &str)]) -> Self {
        Self::shortened(pairs.iter().map(|(id, short)| ((*id).to_owned(), (*short).to_owned())).collect())
    }

    /// Shows the ids of both by their short forms.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.short.extend(other.short);
        self
    }

    pub(crate) fn shown(&self, id: &impl ToString) -> String {
        let id = id.to_string();
        self.short.get(&id).cloned().unwrap_or(id)
    }
}

/// The title, else the beginning of the first prompt.
pub(crate) fn shown_title(session: &Session) -> String {
    let title = session.title.as_deref().or(session.auto_title.as_deref()).unwrap_or("-");
    text::truncate(title, TITLE_CHARS)
}

/// When something last happened: the end of the last run, or while a run is active, the last change. An idle agent that
/// is stopped later, for example, is nothing that people need to know.
pub(crate) fn last_activity(session: &Session) -> Millis {
    match &session.last_run {
        Some(last) if !session.busy => last.finished_at,
        _ => session.updated_at,
    }
}

/// How a run ended, in the words of people.
pub(crate) fn outcome_word(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::EndTurn => "done",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Error => "failed",
        FinishReason::MaxTokens => "out of tokens",
        FinishReason::MaxTurns => "out of turns",
        FinishReason::BudgetExceeded => "over budget",
        FinishReason::Timeout => "timed out",
        FinishReason::Refused => "refused",
        FinishReason::Interrupted => "interrupted",
    }
}

/// All words of [`outcome_word`].
pub(crate) const OUTCOME_WORDS: [&str; 9] = [
    "done",
    "failed",
    "cancelled",
    "interrupted",
    "timed out",
    "over budget",
    "out of turns",
    "out of tokens",
    "refused",
];

/// The state, or how the last run ended, with the numbers of open asks and queued prompts. `queue_reason` says why the
/// prompts of an idle session wait, unless they wait for the reset of a quota.
pub(crate) fn describe_state(session: &Session, asks: usize, queue_reason: &str) -> String {
    let mut parts: Vec<String> = Vec::new();
    match session.state {
        SessionStatus::Idle if session.queued > 0 => {}
        SessionStatus::Idle => parts.push(idle_word(session).to_owned()),
        SessionStatus::Starting => parts.push("starting".to_owned()),
        SessionStatus::Running => parts.push("running".to_owned()),
        SessionStatus::Waiting => parts.push("waiting".to_owned()),
        SessionStatus::Closed => parts.push("closed".to_owned()),
    }
    if asks > 0 {
        parts.push(format!("{asks} ask{}", if asks == 1 { "" } else { "s" }));
    }
    if session.queued > 0 {
        let reason = match session.quota_until {
            _ if !is_waiting_to_start(session) => String::new(),
            Some(until) => format!(" (quota until {})", format_local_time(until)),
            None => format!(" ({queue_reason})"),
        };
        parts.push(format!("{} queued{reason}", session.queued));
    }
    if session.busy {
        parts.extend(session.mode.as_ref().map(|mode| format!("mode {}", text::truncate(mode, TITLE_CHARS))));
        parts.extend(describe_full_context(session.context));
    }
    if session.closing && session.state != SessionStatus::Closed {
        parts.push("closing".to_owned());
    }
    parts.join(", ")
}

/// How full the context is, once little of it is left: the agent will soon forget details.
pub(crate) fn describe_full_context(context: Option<ContextUsage>) -> Option<String> {
    let ContextUsage { used, size } = context.filter(|context| context.size > 0)?;
    let percent = used.saturating_mul(100) / size;
    (percent >= FULL_CONTEXT_PERCENT).then(|| format!("context {percent} % full"))
}

/// What a session without runs has come to. One whose runs ended before the daemon recorded how is just idle.
fn idle_word(session: &Session) -> &'static str {
    match &session.last_run {
        Some(last) => outcome_word(last.finish_reason),
        None if session.updated_at == session.created_at => "new",
        None => "idle",
    }
}

/// Whether an idle session has queued prompts: they wait for the end of a halt, the reset of a quota or a free slot.
pub(crate) fn is_waiting_to_start(session: &Session) -> bool {
    session.state == SessionStatus::Idle && session.queued > 0
}

/// The colour of a session's state.
pub(crate) fn state_colour(session: &Session, asks: usize) -> CellColour {
    match (session.state, &session.last_run) {
        _ if asks > 0 => CellColour::NeedsAttention,
        (SessionStatus::Closed, _) => CellColour::Secondary,
        (SessionStatus::Idle, Some(last)) if session.queued == 0 => outcome_colour(last.finish_reason),
        (SessionStatus::Idle, None) if session.queued == 0 => CellColour::Secondary,
        _ => CellColour::Active,
    }
}

pub(crate) fn outcome_colour(reason: FinishReason) -> CellColour {
    match reason {
        FinishReason::EndTurn => CellColour::Success,
        FinishReason::Cancelled => CellColour::Secondary,
        _ => CellColour::Failure,
    }
}

/// The level in force, and what was asked for if it differs, as after a change that waits for the agent's next start.
pub(crate) fn describe_sandbox(session: &Session) -> String {
    let Some(SessionSandbox { asked, level, network, .. }) = &session.sandbox else { return "-".to_owned() };
    let asked_name = text::wire_name(asked);
    let mut cell = match level {
        None => return format!("({asked_name})"),
        Some(level) => text::wire_name(level),
    };
    if *network == NetworkSetting::Off {
        cell.push_str(", no network");
    }
    if *asked != SandboxSetting::Auto && !cell.starts_with(&asked_name) {
        cell.push_str(&format!(" ({asked_name} next)"));
    }
    cell
}

/// The lines that unmerged work adds and removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ChangedLines {
    pub(crate) added: u64,
    pub(crate) removed: u64,
}

/// The unmerged work of sessions.
#[derive(Debug, Default)]
pub(crate) struct UnmergedWork {
    /// The sessions whose worktrees have unmerged work. `None` if that could not be determined in time.
    by_session: Option<HashMap<SessionId, ChangedLines>>,
}

impl UnmergedWork {
    pub(crate) fn of(worktrees: &[Worktree]) -> Self {
        let unmerged = worktrees
            .iter()
            .filter(|worktree| matches!(worktree.state, WorktreeStatus::Dirty | WorktreeStatus::Ahead));
        let lines = |worktree: &Worktree| ChangedLines {
            added: worktree.added.unwrap_or(0),
            removed: worktree.removed.unwrap_or(0),
        };
        let by_session = unmerged.map(|worktree| (worktree.session_id.clone(), lines(worktree))).collect();
        Self { by_session: Some(by_session) }
    }

    /// Nothing is known: it would have taken too long.
    pub(crate) fn unknown() -> Self {
        Self::default()
    }

    /// The unmerged work of a session. `None` if it has none, or if nothing is known.
    pub(crate) fn of_session(&self, id: &SessionId) -> Option<ChangedLines> {
        self.by_session.as_ref()?.get(id).copied()
    }

    /// The cell of a list: `+12 -3`, or `-` for a session without unmerged work.
    pub(crate) fn cell(&self, session: &Session) -> String {
        if session.worktree.is_some() && self.by_session.is_none() {
            return UNKNOWN_CHANGES.to_owned();
        }
        format_changes(self.of_session(&session.id))
    }
}

/// `+12 -3`; `-` if there is no unmerged work, and `changed` if git counts no lines of it, as in binary files.
pub(crate) fn format_changes(lines: Option<ChangedLines>) -> String {
    match lines {
        None => "-".to_owned(),
        Some(ChangedLines { added: 0, removed: 0 }) => "changed".to_owned(),
        Some(ChangedLines { added, removed }) => format!("+{added} -{removed}"),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use qd_protocol::RunId;
    use qd_protocol::api::LastRun;
    use serde_json::json;

    #[test]
    fn every_outcome_can_be_filtered_by() {
        use FinishReason::{
            BudgetExceeded, Cancelled, EndTurn, Error, Interrupted, MaxTokens, MaxTurns, Refused, Timeout,
        };
        let reasons =
            [EndTurn, Error, Cancelled, Interrupted, Timeout, BudgetExceeded, MaxTurns, MaxTokens, Refused];
        assert_eq!(reasons.map(outcome_word), OUTCOME_WORDS);
    }

    /// A session that waits for an answer and has two more prompts.
    pub(crate) fn waiting_session(id: &str) -> Session {
        serde_json::from_value(json!({
            "id": id, "workspace_id": "ws_1", "agent": "echo", "title": "nightly", "state": "waiting",
            "busy": true, "parent": null, "model": null, "system_prompt": null, "policy": "ask", "queued": 2,
            "usage": {"input_tokens": 1, "output_tokens": 2, "cost_usd": 0.25}, "agent_session_id": null,
            "worktree": null, "budget_usd": null, "max_turns": null, "run_timeout_s": null,
            "cancel_grace_s": null, "restarts": null, "restart_window_s": null, "env": [], "closing": false,
            "created_at": "1970-01-01T00:00:00.000Z", "updated_at": "1970-01-01T00:00:00.000Z"
        }))
        .unwrap()
    }

    /// A session whose last run ended like this.
    pub(crate) fn ended_session(id: &str, finish_reason: FinishReason, finished_at: u64) -> Session {
        let run = RunId::parse(&format!("run_of_{id}")).unwrap();
        Session {
            state: SessionStatus::Idle,
            busy: false,
            queued: 0,
            last_run: Some(LastRun { id: run, finish_reason, finished_at: Millis(finished_at) }),
            ..waiting_session(id)
        }
    }

    /// The worktree of a session, with so many lines added and three removed.
    pub(crate) fn worktree(id: &str, state: &str, added: Option<u64>) -> Worktree {
        serde_json::from_value(json!({
            "session_id": id, "workspace_id": null, "title": null, "session_state": null, "path": "/w",
            "repository": null, "branch": "b", "base": null, "target": null, "state": state,
            "changed_files": 1, "ahead": 0, "added": added, "removed": added.map(|_| 3), "size_bytes": 0,
            "overlaps": []
        }))
        .unwrap()
    }

    #[test]
    fn an_idle_session_shows_how_its_last_run_ended() {
        for (reason, word) in [
            (FinishReason::EndTurn, "done"),
            (FinishReason::Error, "failed"),
            (FinishReason::Timeout, "timed out"),
            (FinishReason::BudgetExceeded, "over budget"),
        ] {
            assert_eq!(describe_state(&ended_session("ses_1", reason, 0), 0, ""), word);
        }
        let unknown = Session { last_run: None, ..ended_session("ses_1", FinishReason::EndTurn, 0) };
        assert_eq!(describe_state(&unknown, 0, ""), "new");
        let older = Session { updated_at: Millis(5), ..unknown };
        assert_eq!(describe_state(&older, 0, ""), "idle", "its runs ended before outcomes were recorded");
    }

    #[test]
    fn open_asks_and_queued_prompts_are_counted_with_their_reason() {
        let waiting = waiting_session("ses_1");
        assert_eq!(describe_state(&waiting, 1, "halted"), "waiting, 1 ask, 2 queued");
        let idle = Session { state: SessionStatus::Idle, ..waiting };
        assert_eq!(describe_state(&idle, 0, "no free slot"), "2 queued (no free slot)");
        let until = Millis(5_000_000);
        let parked = Session { quota_until: Some(until), ..idle.clone() };
        let shown = format!("2 queued (quota until {})", format_local_time(until));
        assert_eq!(describe_state(&parked, 0, "no free slot"), shown);
        let running = Session { state: SessionStatus::Running, ..idle };
        assert_eq!(describe_state(&running, 0, "no free slot"), "running, 2 queued");
        let closing = Session { closing: true, queued: 0, ..running };
        assert_eq!(describe_state(&closing, 0, ""), "running, closing");
    }

    #[test]
    fn the_first_prompt_stands_for_a_missing_title() {
        let titled = Session { auto_title: Some("prompt".to_owned()), ..waiting_session("ses_1") };
        assert_eq!(shown_title(&titled), "nightly");
        let untitled = Session { title: None, ..titled };
        assert_eq!(shown_title(&untitled), "prompt");
        assert_eq!(shown_title(&Session { auto_title: None, ..untitled }), "-");
    }

    #[test]
    fn stopping_an_idle_agent_is_no_activity() {
        let idle = Session { updated_at: Millis(900), ..ended_session("ses_1", FinishReason::EndTurn, 100) };
        assert_eq!(last_activity(&idle), Millis(100));
        assert_eq!(last_activity(&Session { busy: true, ..idle }), Millis(900));
    }

    #[test]
    fn unmerged_work_is_counted_in_lines_and_never_guessed() {
        let work = UnmergedWork::of(&[
            worktree("ses_1", "dirty", Some(12)),
            worktree("ses_2", "merged", None),
            worktree("ses_3", "ahead", None),
        ]);
        let cell = |work: &UnmergedWork, id: &str| {
            work.cell(&Session { worktree: Some("/w".to_owned()), ..waiting_session(id) })
        };
        assert_eq!(cell(&work, "ses_1"), "+12 -3");
        assert_eq!(cell(&work, "ses_2"), "-");
        assert_eq!(cell(&work, "ses_3"), "changed");
        assert_eq!(cell(&UnmergedWork::unknown(), "ses_1"), "…");
        assert_eq!(UnmergedWork::unknown().cell(&waiting_session("ses_1")), "-", "it has no worktree");
    }
}
