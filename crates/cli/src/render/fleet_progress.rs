//! The progress of a running fleet: state, time, cost and last line of each session. It takes events and returns lines;
//! the caller prints them.

use std::collections::{BTreeMap, HashMap};

use qd_protocol::event::EventBody;
use qd_protocol::fleet::{Fleet, FleetSpec, FleetStatus, TriggerOutcome};
use qd_protocol::{Event, Millis, SessionId};

use super::style::TextStyle;
use super::{session_cells, text, tool};

/// How much of a session's last line is kept. The terminal's width cuts it further.
const LAST_LINE_CHARS: usize = 200;

/// The progress of all sessions of a fleet.
#[derive(Debug)]
pub(crate) struct FleetProgress {
    sessions: Vec<SessionProgress>,
    /// Index into `sessions`.
    by_session: HashMap<SessionId, usize>,
    since: Millis,
    ended_at: Option<Millis>,
    pub(crate) state: FleetStatus,
    pub(crate) result: Option<String>,
}

#[derive(Debug)]
struct SessionProgress {
    name: String,
    agent: String,
    /// The tree lines that are drawn before the name.
    branch: String,
    state: ProgressState,
    /// When the session entered `state`.
    since: Millis,
    /// Total duration of its runs, up to `since`.
    took_ms: u64,
    runs: u32,
    cost_usd: f64,
    /// The line that the agent is still writing.
    open_line: String,
    /// The line that is shown: the last one that is not blank.
    last_line: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProgressState {
    Idle,
    Queued,
    Starting,
    Working,
    Asking,
    Ended(TriggerOutcome),
}

/// One line about an event, for output that is not a terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProgressLine {
    pub(crate) line: String,
}

impl FleetProgress {
    /// For a fleet that has just been started.
    pub(crate) fn new(fleet: &Fleet, spec: &FleetSpec) -> Self {
        let order = super::plan::session_tree(spec);
        let sessions: Vec<SessionProgress> = order
            .into_iter()
            .map(|(name, branch)| SessionProgress {
                agent: spec.sessions.get(&name).map(|member| member.agent.clone()).unwrap_or_default(),
                name,
                branch,
                state: ProgressState::Idle,
                since: fleet.created_at,
                took_ms: 0,
                runs: 0,
                cost_usd: 0.0,
                open_line: String::new(),
                last_line: String::new(),
            })
            .collect();
        let by_session = sessions
            .iter()
            .enumerate()
            .filter_map(|(index, session)| {
                Some((fleet.sessions.get(&session.name)?.session_id.clone(), index))
            })
            .collect();
        Self {
            sessions,
            by_session,
            since: fleet.created_at,
            ended_at: None,
            state: fleet.state,
            result: None,
        }
    }

    /// Whether an event is about this fleet.
    pub(crate) fn concerns(&self, fleet: &Fleet, event: &Event) -> bool {
        match &event.session_id {
            Some(session) => self.by_session.contains_key(session),
            None => event.data.get("fleet_id").and_then(|id| id.as_str()) == Some(fleet.id.as_str()),
        }
    }

    /// The name of a session in the fleet file.
    pub(crate) fn session_name(&self, session: &SessionId) -> Option<&str> {
        let index = *self.by_session.get(session)?;
        self.sessions.get(index).map(|session| session.name.as_str())
    }

    /// Applies an event and returns a line about it, if it deserves one.
    pub(crate) fn apply_event(&mut self, event: &Event, body: &EventBody) -> Option<ProgressLine> {
        let index = event.session_id.as_ref().and_then(|session| self.by_session.get(session)).copied();
        let line = match index.and_then(|index| self.sessions.get_mut(index)) {
            Some(session) => {
                session.apply_event(event.ts, body).map(|line| format!("{}: {line}", session.name))
            }
            None => self.apply_fleet_event(event.ts, body),
        };
        line.map(|line| ProgressLine { line })
    }

    fn apply_fleet_event(&mut self, ts: Millis, body: &EventBody) -> Option<String> {
        match body {
            EventBody::FleetRouted(routed) => {
                let from: Vec<&str> = routed.from.iter().map(|source| source.session.as_str()).collect();
                let to: Vec<&str> = routed.to.iter().map(|given| given.session.as_str()).collect();
                let from = from.join(" + ");
                match (&routed.error, &routed.ask_id) {
                    (Some(error), _) => Some(format!("{from}: {error}")),
                    (None, Some(_)) => Some(format!("{from} → you")),
                    (None, None) => Some(format!("{from} → {}", to.join(", "))),
                }
            }
            EventBody::FleetMentioned(mentioned) => {
                let to: Vec<&str> = mentioned.to.iter().map(|given| given.session.as_str()).collect();
                let from = &mentioned.from.session;
                match &mentioned.error {
                    Some(error) => Some(format!("{from}: {error}")),
                    None => Some(format!("{from} @ {}", to.join(", "))),
                }
            }
            EventBody::AskOpened(_) => {
                self.state = FleetStatus::Waiting;
                None
            }
            EventBody::FleetFinished(finished) => {
                self.state = finished.state;
                self.ended_at = Some(ts);
                self.result.clone_from(&finished.result);
                None
            }
            _ => None,
        }
    }

    /// Cost of all sessions in dollars.
    pub(crate) fn cost(&self) -> f64 {
        self.sessions.iter().map(|session| session.cost_usd).sum()
    }

    /// The fleet as lines for a terminal of this size. They are narrower than the terminal and leave one row for the
    /// cursor, so that drawing them neither wraps nor scrolls.
    pub(crate) fn lines(&self, now: Millis, style: TextStyle, width: usize, height: usize) -> Vec<String> {
        let width = width.saturating_sub(1);
        let mut lines = vec![self.title(now, style, width)];
        let all_fit = self.sessions.len() + 2 <= height;
        // Beside the title and the cursor, a row for how many are left out.
        let max_sessions = if all_fit { self.sessions.len() } else { height.saturating_sub(3) };
        let names = self.sessions.iter().map(|session| session.label().chars().count()).max().unwrap_or(0);
        let agents = self.sessions.iter().map(|session| session.agent.chars().count()).max();
        let agents = agents.unwrap_or(0).min(20);
        // If not all sessions fit, the active ones are shown.
        let mut shown: Vec<usize> = (0..self.sessions.len()).collect();
        if shown.len() > max_sessions {
            shown.sort_by_key(|index| (self.sessions[*index].state.rank(), *index));
            shown.truncate(max_sessions);
            shown.sort_unstable();
        }
        for index in &shown {
            lines.push(self.sessions[*index].render_line(now, style, names, agents, width));
        }
        if shown.len() < self.sessions.len() {
            let rest = format!("  … and {} more", self.sessions.len() - shown.len());
            lines.push(style.dim(&text::truncate(&rest, width)));
        }
        lines.truncate(height.saturating_sub(1));
        lines
    }

    fn title(&self, now: Millis, style: TextStyle, width: usize) -> String {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for session in &self.sessions {
            if let Some(word) = session.state.count_word() {
                *counts.entry(word).or_default() += 1;
            }
        }
        let counts: Vec<String> = counts.iter().map(|(word, count)| format!("{count} {word}")).collect();
        let state = text::wire_name(&self.state);
        let cost = self.cost();
        let money = if cost > 0.0 { format!("  {}", text::format_dollars(cost)) } else { String::new() };
        let counts = if counts.is_empty() { String::new() } else { format!("  {}", counts.join(", ")) };
        let took = self.ended_at.unwrap_or(now).since(self.since);
        let plain = format!("{state}  {}{money}{counts}", format_clock(took));
        // Truncate before adding colours: escape sequences have no width.
        text::truncate(&plain, width).replacen(&state, &styled_fleet_state(self.state, style), 1)
    }

    /// The summary at the end: one line for each session that ran.
    pub(crate) fn summary(&self, style: TextStyle) -> String {
        let mut out = String::new();
        let names = self.sessions.iter().map(|session| session.name.chars().count()).max().unwrap_or(0);
        for session in self.sessions.iter().filter(|session| session.runs > 0) {
            let runs = if session.runs == 1 { String::new() } else { format!(", {} runs", session.runs) };
            let money = if session.cost_usd > 0.0 {
                format!(", {}", text::format_dollars(session.cost_usd))
            } else {
                String::new()
            };
            let pad = " ".repeat(names.saturating_sub(session.name.chars().count()));
            let word = session.state.styled_word(style);
            out.push_str(&format!(
                "{}{pad}  {word} ({}{runs}{money})\n",
                session.name,
                format_clock(session.took_ms)
            ));
        }
        out
    }
}

impl SessionProgress {
    fn apply_event(&mut self, ts: Millis, body: &EventBody) -> Option<String> {
        match body {
            EventBody::RunAccepted(_)
                if !matches!(
                    self.state,
                    ProgressState::Working | ProgressState::Asking | ProgressState::Starting
                ) =>
            {
                self.set_state(ProgressState::Starting, ts)
            }
            EventBody::RunQueued(_) if self.state == ProgressState::Starting => {
                self.set_state(ProgressState::Queued, ts)
            }
            EventBody::RunStarted(_) => {
                self.set_state(ProgressState::Working, ts);
                self.runs += 1;
                return Some("works".to_owned());
            }
            EventBody::TextDelta(delta) => self.append_text(&delta.text),
            EventBody::ToolStarted(call) => {
                let input = call.input.as_ref().unwrap_or(&serde_json::Value::Null);
                self.last_line = text::truncate(
                    &tool::summarize_call(call.name.as_deref().unwrap_or("tool"), input),
                    LAST_LINE_CHARS,
                );
            }
            EventBody::UsageReported(report) => self.cost_usd += report.cost_usd,
            EventBody::AskOpened(_) => self.set_state(ProgressState::Asking, ts),
            EventBody::AskResolved(_) if self.state == ProgressState::Asking => {
                self.set_state(ProgressState::Working, ts)
            }
            EventBody::RunFinished(finished) => {
                if let ProgressState::Working | ProgressState::Asking = self.state {
                    self.took_ms += ts.since(self.since);
                }
                let outcome = TriggerOutcome::from(finished.finish_reason);
                self.set_state(ProgressState::Ended(outcome), ts);
                self.open_line.clear();
                let head = text::first_line(&finished.text, LAST_LINE_CHARS);
                let why =
                    finished.error.as_ref().map(|error| text::first_line(&error.message, LAST_LINE_CHARS));
                self.last_line = why.filter(|_| outcome == TriggerOutcome::Failed).unwrap_or(head);
                let outcome = session_cells::outcome_word(finished.finish_reason);
                let last =
                    if self.last_line.is_empty() { String::new() } else { format!(": {}", self.last_line) };
                return Some(format!("{outcome}{last}"));
            }
            _ => {}
        }
        None
    }

    fn set_state(&mut self, state: ProgressState, ts: Millis) {
        if matches!(
            (self.state, state),
            (ProgressState::Working | ProgressState::Asking, ProgressState::Working | ProgressState::Asking)
        ) {
            self.took_ms += ts.since(self.since);
        }
        self.state = state;
        self.since = ts;
    }

    /// Appends streamed text and updates `last_line`, also from an unfinished line that is not blank.
    fn append_text(&mut self, delta: &str) {
        self.open_line.push_str(delta);
        if let Some(end) = self.open_line.rfind('\n') {
            let complete = self.open_line[..end].lines().map(str::trim).rfind(|line| !line.is_empty());
            if let Some(line) = complete {
                self.last_line = text::first_line(line, LAST_LINE_CHARS);
            }
            self.open_line.drain(..=end);
        }
        if !self.open_line.trim().is_empty() {
            self.last_line = text::first_line(&self.open_line, LAST_LINE_CHARS);
        }
        if self.open_line.len() > 4 * LAST_LINE_CHARS {
            self.open_line.clear();
        }
    }

    fn label(&self) -> String {
        format!("{}{}", self.branch, self.name)
    }

    fn render_line(
        &self,
        now: Millis,
        style: TextStyle,
        names: usize,
        agents: usize,
        width: usize,
    ) -> String {
        let running = matches!(self.state, ProgressState::Working | ProgressState::Asking);
        let took = self.took_ms + if running { now.since(self.since) } else { 0 };
        let time = if self.runs > 0 { format_clock(took) } else { String::new() };
        let money = if self.cost_usd > 0.0 { text::format_dollars(self.cost_usd) } else { String::new() };
        let label = self.label();
        let pad = " ".repeat(names.saturating_sub(label.chars().count()));
        let agent = text::truncate(&self.agent, agents);
        let plain = format!(
            "{label}{pad}  {agent:agents$}  {:9}  {time:>5}  {money:>7}  {}",
            self.state.word(),
            self.last_line
        );
        // Truncate before adding colours: escape sequences have no width.
        let cut = text::truncate(plain.trim_end(), width);
        let word = self.state.word();
        let painted =
            cut.replacen(&format!("  {word} "), &format!("  {} ", self.state.styled_word(style)), 1);
        if painted == cut { cut } else { painted }
    }
}

impl ProgressState {
    fn word(self) -> &'static str {
        match self {
            Self::Idle => "·",
            Self::Queued => "queued",
            Self::Starting => "starts",
            Self::Working => "works",
            Self::Asking => "asks",
            Self::Ended(TriggerOutcome::Done) => "done",
            Self::Ended(TriggerOutcome::Failed) => "failed",
            Self::Ended(TriggerOutcome::Cancelled) => "cancelled",
        }
    }

    fn count_word(self) -> Option<&'static str> {
        match self {
            Self::Idle => None,
            Self::Starting | Self::Queued => Some("starting"),
            Self::Working => Some("working"),
            Self::Asking => Some("asking"),
            Self::Ended(_) => Some(self.word()),
        }
    }

    /// Which sessions are shown first if not all fit; lower is first.
    fn rank(self) -> u8 {
        match self {
            Self::Asking => 0,
            Self::Working => 1,
            Self::Starting | Self::Queued => 2,
            Self::Ended(TriggerOutcome::Failed) => 3,
            Self::Ended(_) => 4,
            Self::Idle => 5,
        }
    }

    fn styled_word(self, style: TextStyle) -> String {
        match self {
            Self::Idle | Self::Queued | Self::Starting => style.dim(self.word()),
            Self::Working => style.cyan(self.word()),
            Self::Asking => style.yellow(self.word()),
            Self::Ended(TriggerOutcome::Done) => style.green(self.word()),
            Self::Ended(TriggerOutcome::Failed) => style.red(self.word()),
            Self::Ended(TriggerOutcome::Cancelled) => style.dim(self.word()),
        }
    }
}

pub(crate) fn styled_fleet_state(state: FleetStatus, style: TextStyle) -> String {
    match state {
        FleetStatus::Running => style.bold("running"),
        FleetStatus::Waiting => style.yellow("waiting"),
        FleetStatus::Done => style.green("done"),
        FleetStatus::Failed => style.red("failed"),
        FleetStatus::Cancelled => style.dim("cancelled"),
    }
}

/// `M:SS` or `H:MM:SS`.
fn format_clock(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0..3600 => format!("{}:{:02}", s / 60, s % 60),
        _ => format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60),
    }
}

#[cfg(test)]
mod tests;
