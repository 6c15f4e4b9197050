//! The report of `qd status`: what needs the user, what is working, and what has finished, each with the command that
//! comes next. It is made of what the daemon lists, and is printed as it is with `--json`. Nothing here asks the daemon.

use std::collections::{HashMap, HashSet};

use qd_protocol::api::{HaltStatus, LastRun, Session};
use qd_protocol::event::{Ask, AskKind, ContextUsage};
use qd_protocol::fleet::{Fleet, FleetStatus};
use qd_protocol::policy::Risk;
use qd_protocol::{FinishReason, FleetId, Millis, SessionId};
use serde::Serialize;

use super::ask;
use super::session_cells::{self, ChangedLines, ShownIds, TITLE_CHARS, UnmergedWork};
use super::style::{CellColour, TextStyle};
use super::table::TextTable;
use super::text;

/// The most lines of one section, so that all three fit on a screen of 24 lines.
const LINES_MAX: usize = 5;
/// Before each line of a section.
const INDENT: &str = "  ";

/// What the daemon lists.
#[derive(Debug, Default)]
pub(crate) struct StatusFacts {
    pub(crate) ids: ShownIds,
    pub(crate) sessions: Vec<Session>,
    pub(crate) fleets: Vec<Fleet>,
    /// Open asks, oldest first.
    pub(crate) asks: Vec<Ask>,
    /// Absent if no halt is set.
    pub(crate) halt: Option<HaltStatus>,
    pub(crate) unmerged_work: UnmergedWork,
}

/// From when on what has finished is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReportPeriod {
    /// The time as the report gives it.
    pub(crate) since: Millis,
    /// What ended after this is new, unless it was seen. It is `since`, or a little earlier.
    pub(crate) after: Millis,
    /// Runs and fleets that ended after that and were seen.
    pub(crate) seen: HashSet<String>,
    /// What `since` is, as the heading says it: `since your last look, 2h05m ago`.
    pub(crate) description: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct StatusReport {
    #[serde(skip_serializing_if = "Option::is_none")]
    halt: Option<HaltStatus>,
    needs_you: Vec<NeedsYouEntry>,
    working: Vec<WorkEntry>,
    finished: Vec<WorkEntry>,
    /// What has finished since then is in `finished`.
    since: Millis,
    #[serde(skip)]
    period: String,
}

/// An open ask.
#[derive(Debug, Serialize)]
struct NeedsYouEntry {
    ask_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<SessionId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fleet_id: Option<FleetId>,
    title: String,
    risk: Risk,
    /// What the agent asks for, in one line.
    wants: String,
    opened_at: Millis,
    /// The command that comes next.
    next: String,
}

/// A session or fleet that is working or has finished.
#[derive(Debug, Serialize)]
struct WorkEntry {
    /// A session or a fleet, by the prefix of the id.
    id: String,
    title: String,
    /// Absent for a fleet.
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<String>,
    /// The agent's mode, if it is not the one in which it starts.
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<String>,
    /// How full the agent's context is, if the agent reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<ContextUsage>,
    /// What it is doing, or how it ended.
    state: String,
    /// When it began, or ended.
    at: Millis,
    cost_usd: f64,
    /// Lines of unmerged work.
    #[serde(skip_serializing_if = "Option::is_none")]
    added: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    removed: Option<u64>,
    /// The command that comes next.
    next: String,
    #[serde(skip)]
    changes: String,
    #[serde(skip)]
    colour: CellColour,
}

impl StatusReport {
    pub(crate) fn new(facts: &StatusFacts, period: &ReportPeriod) -> Self {
        let shown: Vec<&Session> = facts.sessions.iter().filter(|session| !facts.is_part(session)).collect();
        let asking: HashSet<&SessionId> =
            facts.asks.iter().filter_map(|ask| ask.session_id.as_ref()).collect();
        let queue_reason = if facts.halt.is_some() { "halted" } else { "no free slot" };

        let mut working: Vec<WorkEntry> = facts
            .fleets
            .iter()
            .filter(|fleet| fleet.state == FleetStatus::Running)
            .map(|fleet| facts.fleet_entry(fleet, fleet.created_at))
            .collect();
        let busy = shown.iter().filter(|session| session.busy && !asking.contains(&session.id));
        working.extend(busy.map(|session| facts.working_entry(session, queue_reason)));
        working.sort_by_key(|entry| std::cmp::Reverse(entry.at));

        let is_new = |at: Millis, id: &str| at > period.after && !period.seen.contains(id);
        let mut finished: Vec<WorkEntry> = facts
            .fleets
            .iter()
            .filter(|fleet| fleet.state.is_final() && is_new(fleet.updated_at, fleet.id.as_str()))
            .map(|fleet| facts.fleet_entry(fleet, fleet.updated_at))
            .collect();
        for session in shown.iter().filter(|session| !session.busy) {
            let last = session.last_run.as_ref().filter(|last| is_new(last.finished_at, last.id.as_str()));
            finished.extend(last.map(|last| facts.finished_entry(session, last)));
        }
        finished.sort_by_key(|entry| std::cmp::Reverse(entry.at));

        Self {
            halt: facts.halt.clone(),
            needs_you: facts.asks.iter().map(|ask| facts.needs_you_entry(ask)).collect(),
            working,
            finished,
            since: period.since,
            period: period.description.clone(),
        }
    }

    /// The ids of the sessions and fleets that have a line.
    pub(crate) fn listed_work(&self) -> Vec<String> {
        let listed = [&self.working, &self.finished].map(|entries| entries.iter().take(LINES_MAX));
        listed.into_iter().flatten().map(|entry| entry.id.clone()).collect()
    }

    /// The ids of the asks that have a line.
    pub(crate) fn listed_asks(&self) -> Vec<String> {
        self.needs_you.iter().take(LINES_MAX).map(|entry| entry.ask_id.clone()).collect()
    }

    /// The report as text. Each section has a heading with its count.
    pub(crate) fn render(&self, style: TextStyle, width: Option<usize>, now: Millis) -> String {
        let mut out = String::new();
        if let Some(halt) = &self.halt {
            let reason =
                halt.reason.as_deref().map(|why| format!(": {}", text::first_line(why, TITLE_CHARS)));
            let line = format!("HALTED{}", reason.unwrap_or_default());
            out.push_str(&format!("{}  nothing starts until `qd unhalt`\n\n", style.red(&line)));
        }
        let mut needs_you = TextTable::untitled(5);
        for entry in self.needs_you.iter().take(LINES_MAX) {
            needs_you.add_row([
                entry.title.clone(),
                ask::risk_name(entry.risk).to_owned(),
                entry.wants.clone(),
                text::format_age(entry.opened_at, now),
                entry.next.clone(),
            ]);
            needs_you.colour_cell(1, risk_colour(entry.risk));
        }
        push_heading(&mut out, style.yellow("NEEDS YOU"), self.needs_you.len(), "");
        push_section(&mut out, &needs_you, style, width, self.needs_you.len(), "qd asks");

        let mut working = TextTable::untitled(5);
        for entry in self.working.iter().take(LINES_MAX) {
            let agent = entry.agent.clone().unwrap_or_else(|| "fleet".to_owned());
            let cells = [entry.title.clone(), agent, entry.state.clone()];
            working.add_row(cells.into_iter().chain([text::format_age(entry.at, now), entry.next.clone()]));
            working.colour_cell(2, entry.colour);
        }
        out.push('\n');
        push_heading(&mut out, style.cyan("WORKING"), self.working.len(), "");
        push_section(&mut out, &working, style, width, self.working.len(), "qd ps");

        let mut finished = TextTable::untitled(6);
        for entry in self.finished.iter().take(LINES_MAX) {
            finished.add_row([
                entry.title.clone(),
                entry.state.clone(),
                entry.changes.clone(),
                text::format_dollars(entry.cost_usd),
                text::format_age(entry.at, now),
                entry.next.clone(),
            ]);
            finished.colour_cell(1, entry.colour);
        }
        out.push('\n');
        push_heading(&mut out, style.bold("FINISHED"), self.finished.len(), &style.dim(&self.period));
        push_section(&mut out, &finished, style, width, self.finished.len(), "qd ps");
        out
    }
}

impl StatusFacts {
    /// Whether a session is shown with something else: its fleet, or the session that started it.
    fn is_part(&self, session: &Session) -> bool {
        let parent_listed = session
            .parent
            .as_ref()
            .is_some_and(|parent| self.sessions.iter().any(|other| other.id == *parent));
        parent_listed || session.fleet.is_some()
    }

    fn session(&self, id: &SessionId) -> Option<&Session> {
        self.sessions.iter().find(|session| session.id == *id)
    }

    fn needs_you_entry(&self, ask: &Ask) -> NeedsYouEntry {
        let session = ask.session_id.as_ref().and_then(|id| self.session(id));
        let fleet = ask.fleet_id.as_ref().and_then(|id| self.fleets.iter().find(|fleet| fleet.id == *id));
        let title = session.map(session_cells::shown_title).or_else(|| fleet.map(fleet_title));
        let id = self.ids.shown(&ask.id);
        let next = match (ask.kind, ask.risk) {
            // It shows the request whole, so nobody approves what a line has cut off.
            (AskKind::Permission, Risk::Medium | Risk::High) => format!("qd asks {id}"),
            (AskKind::Permission, Risk::Low) => format!("qd allow {id}"),
            (AskKind::Question, _) => format!("qd answer {id} VALUE"),
        };
        NeedsYouEntry {
            ask_id: ask.id.to_string(),
            session_id: ask.session_id.clone(),
            fleet_id: ask.fleet_id.clone(),
            title: title.unwrap_or_else(|| "-".to_owned()),
            risk: ask.risk,
            wants: ask::summarize(ask).fit(None),
            opened_at: ask.opened_at,
            next,
        }
    }

    fn working_entry(&self, session: &Session, queue_reason: &str) -> WorkEntry {
        let active = session.active_run.as_ref();
        let since = active.map(|run| run.started_at.unwrap_or(run.accepted_at));
        let lines = self.unmerged_work.of_session(&session.id);
        WorkEntry {
            id: session.id.to_string(),
            title: session_cells::shown_title(session),
            agent: Some(session.agent.clone()),
            mode: session.mode.clone(),
            context: session.context,
            state: session_cells::describe_state(session, 0, queue_reason),
            at: since.unwrap_or(session.updated_at),
            cost_usd: session.usage.cost_usd,
            added: lines.map(|lines| lines.added),
            removed: lines.map(|lines| lines.removed),
            next: format!("qd attach {}", self.ids.shown(&session.id)),
            changes: self.unmerged_work.cell(session),
            colour: session_cells::state_colour(session, 0),
        }
    }

    fn finished_entry(&self, session: &Session, last: &LastRun) -> WorkEntry {
        let lines = self.unmerged_work.of_session(&session.id);
        let verb = match (last.finish_reason, lines) {
            (FinishReason::EndTurn, Some(_)) => "diff",
            (FinishReason::EndTurn, None) => "attach",
            _ => "logs",
        };
        WorkEntry {
            state: session_cells::outcome_word(last.finish_reason).to_owned(),
            at: last.finished_at,
            next: format!("qd {verb} {}", self.ids.shown(&session.id)),
            colour: session_cells::outcome_colour(last.finish_reason),
            ..self.working_entry(session, "")
        }
    }

    /// A fleet, with the cost and the unmerged work of all its sessions.
    fn fleet_entry(&self, fleet: &Fleet, at: Millis) -> WorkEntry {
        let ids: Vec<&SessionId> = fleet.sessions.values().map(|member| &member.session_id).collect();
        let cost_usd =
            ids.iter().filter_map(|id| self.session(id)).map(|session| session.usage.cost_usd).sum();
        let mut lines: Option<ChangedLines> = None;
        for work in ids.iter().filter_map(|id| self.unmerged_work.of_session(id)) {
            let sum = lines.get_or_insert_default();
            sum.added += work.added;
            sum.removed += work.removed;
        }
        let id = self.ids.shown(&fleet.id);
        let (next, colour) = match (fleet.state, lines) {
            (FleetStatus::Running | FleetStatus::Waiting, _) => {
                (format!("qd attach {id}"), CellColour::Active)
            }
            (FleetStatus::Done, Some(_)) => ("qd worktrees".to_owned(), CellColour::Success),
            (FleetStatus::Done, None) => (format!("qd attach {id}"), CellColour::Success),
            (FleetStatus::Failed, _) => (format!("qd logs {id}"), CellColour::Failure),
            (FleetStatus::Cancelled, _) => (format!("qd logs {id}"), CellColour::Secondary),
        };
        WorkEntry {
            id: fleet.id.to_string(),
            title: fleet_title(fleet),
            agent: None,
            mode: None,
            context: None,
            state: text::wire_name(&fleet.state),
            at,
            cost_usd,
            added: lines.map(|lines| lines.added),
            removed: lines.map(|lines| lines.removed),
            next,
            changes: session_cells::format_changes(lines),
            colour,
        }
    }

    /// Ids of runs and fleets that have ended since then, with the time of each.
    pub(crate) fn ended_since(&self, since: Millis) -> HashMap<String, Millis> {
        let runs = self.sessions.iter().filter_map(|session| session.last_run.as_ref());
        let runs = runs.map(|run| (run.id.to_string(), run.finished_at));
        let fleets = self.fleets.iter().filter(|fleet| fleet.state.is_final());
        let fleets = fleets.map(|fleet| (fleet.id.to_string(), fleet.updated_at));
        runs.chain(fleets).filter(|(_, at)| *at > since).collect()
    }
}

fn fleet_title(fleet: &Fleet) -> String {
    text::first_line(&fleet.task, TITLE_CHARS)
}

fn risk_colour(risk: Risk) -> CellColour {
    match risk {
        Risk::Low => CellColour::Secondary,
        Risk::Medium => CellColour::NeedsAttention,
        Risk::High => CellColour::Failure,
    }
}

fn push_heading(out: &mut String, name: String, count: usize, remark: &str) {
    out.push_str(format!("{name} ({count}) {remark}").trim_end());
    out.push('\n');
}

fn push_section(
    out: &mut String,
    table: &TextTable,
    style: TextStyle,
    width: Option<usize>,
    count: usize,
    command: &str,
) {
    out.push_str(&table.render_rows(style, width, INDENT));
    if count > LINES_MAX {
        out.push_str(&format!("{INDENT}and {} more: {command}\n", count - LINES_MAX));
    }
}

#[cfg(test)]
mod tests;
