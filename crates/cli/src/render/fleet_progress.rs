//! A fleet at work, as people see it: who does what since when, for how much, and what was said last. It is fed events
//! and gives lines; where they go is not its business.

use std::collections::{BTreeMap, HashMap};

use qd_protocol::event::{EventBody, FinishReason};
use qd_protocol::fleet::{Fleet, FleetSpec, FleetStatus, TriggerOutcome};
use qd_protocol::{Event, Millis, SessionId};

use super::style::TextStyle;
use super::{text, tool};

/// How much of a last line is kept; a terminal shows less.
const LAST_LINE_CHARS: usize = 200;

/// All of it.
#[derive(Debug)]
pub(crate) struct FleetProgress {
    sessions: Vec<SessionProgress>,
    by_session: HashMap<SessionId, usize>,
    since: Millis,
    /// How it stands.
    pub(crate) state: FleetStatus,
    /// What came of it.
    pub(crate) result: Option<String>,
}

/// One session.
#[derive(Debug)]
struct SessionProgress {
    name: String,
    agent: String,
    /// Where it stands in the tree: what is drawn before its name.
    branch: String,
    state: ProgressState,
    /// Since when it does that.
    since: Millis,
    /// How long its runs have taken.
    took_ms: u64,
    runs: u32,
    cost_usd: f64,
    /// The line that it is in the middle of saying.
    open_line: String,
    last_line: String,
}

/// What a session does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProgressState {
    Idle,
    Queued,
    Starting,
    Working,
    Asking,
    Ended(TriggerOutcome),
}

/// Something that happened, for those who read lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProgressLine {
    /// In one line.
    pub(crate) line: String,
}

impl FleetProgress {
    /// Of a fleet that has just been started.
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
            .filter_map(|(at, seat)| Some((fleet.sessions.get(&seat.name)?.session_id.clone(), at)))
            .collect();
        Self { sessions, by_session, since: fleet.created_at, state: fleet.state, result: None }
    }

    /// Whether an event is about this fleet.
    pub(crate) fn concerns(&self, fleet: &Fleet, event: &Event) -> bool {
        match &event.session_id {
            Some(session) => self.by_session.contains_key(session),
            None => event.data.get("fleet_id").and_then(|id| id.as_str()) == Some(fleet.id.as_str()),
        }
    }

    /// The name of a session.
    pub(crate) fn session_name(&self, session: &SessionId) -> Option<&str> {
        self.by_session.get(session).and_then(|at| self.sessions.get(*at)).map(|seat| seat.name.as_str())
    }

    /// Takes an event in; gives what there is to say of it in a line.
    pub(crate) fn apply_event(&mut self, event: &Event, body: &EventBody) -> Option<ProgressLine> {
        let at = event.session_id.as_ref().and_then(|session| self.by_session.get(session)).copied();
        let said = match at.and_then(|at| self.sessions.get_mut(at)) {
            Some(seat) => seat.apply_event(event.ts, body).map(|said| format!("{}: {said}", seat.name)),
            None => self.apply_fleet_event(body),
        };
        said.map(|line| ProgressLine { line })
    }

    fn apply_fleet_event(&mut self, body: &EventBody) -> Option<String> {
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
                self.result.clone_from(&finished.result);
                None
            }
            _ => None,
        }
    }

    /// Money that all of them have spent.
    pub(crate) fn cost(&self) -> f64 {
        self.sessions.iter().map(|seat| seat.cost_usd).sum()
    }

    /// All of it as lines, at most `height` of them, each at most `width` wide.
    pub(crate) fn lines(&self, now: Millis, style: TextStyle, width: usize, height: usize) -> Vec<String> {
        let mut lines = vec![self.title(now, style)];
        let room = height.saturating_sub(2).max(1);
        let names = self.sessions.iter().map(|seat| seat.label().chars().count()).max().unwrap_or(0);
        let agents = self.sessions.iter().map(|seat| seat.agent.chars().count()).max().unwrap_or(0).min(20);
        // Where there are more than fit, those that do something are shown.
        let mut shown: Vec<usize> = (0..self.sessions.len()).collect();
        if shown.len() > room {
            shown.sort_by_key(|at| (self.sessions[*at].state.rank(), *at));
            shown.truncate(room);
            shown.sort_unstable();
        }
        for at in &shown {
            lines.push(self.sessions[*at].render_line(now, style, names, agents, width));
        }
        if shown.len() < self.sessions.len() {
            lines.push(style.dim(&format!("  … and {} more", self.sessions.len() - shown.len())));
        }
        lines
    }

    fn title(&self, now: Millis, style: TextStyle) -> String {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for seat in &self.sessions {
            if let Some(word) = seat.state.count_word() {
                *counts.entry(word).or_default() += 1;
            }
        }
        let counts: Vec<String> = counts.iter().map(|(word, count)| format!("{count} {word}")).collect();
        let state = styled_fleet_state(self.state, style);
        let cost = self.cost();
        let money = if cost > 0.0 { format!("  {}", text::format_dollars(cost)) } else { String::new() };
        let counts = if counts.is_empty() { String::new() } else { format!("  {}", counts.join(", ")) };
        format!("{state}  {}{money}{counts}", format_clock(now.since(self.since)))
    }

    /// What it came to, for the end: one line for each session that ran.
    pub(crate) fn summary(&self, style: TextStyle) -> String {
        let mut out = String::new();
        let names = self.sessions.iter().map(|seat| seat.name.chars().count()).max().unwrap_or(0);
        for seat in self.sessions.iter().filter(|seat| seat.runs > 0) {
            let runs = if seat.runs == 1 { String::new() } else { format!(", {} runs", seat.runs) };
            let money = if seat.cost_usd > 0.0 {
                format!(", {}", text::format_dollars(seat.cost_usd))
            } else {
                String::new()
            };
            let pad = " ".repeat(names.saturating_sub(seat.name.chars().count()));
            let word = seat.state.styled_word(style);
            out.push_str(&format!(
                "{}{pad}  {word} ({}{runs}{money})\n",
                seat.name,
                format_clock(seat.took_ms)
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
                let ending = TriggerOutcome::from(finished.finish_reason);
                self.set_state(ProgressState::Ended(ending), ts);
                self.open_line.clear();
                let head = text::first_line(&finished.text, LAST_LINE_CHARS);
                let why =
                    finished.error.as_ref().map(|error| text::first_line(&error.message, LAST_LINE_CHARS));
                self.last_line = why.filter(|_| ending == TriggerOutcome::Failed).unwrap_or(head);
                let reason = finish_word(finished.finish_reason);
                let last =
                    if self.last_line.is_empty() { String::new() } else { format!(": {}", self.last_line) };
                return Some(format!("{reason}{last}"));
            }
            _ => {}
        }
        None
    }

    fn set_state(&mut self, does: ProgressState, ts: Millis) {
        if matches!(
            (self.state, does),
            (ProgressState::Working | ProgressState::Asking, ProgressState::Working | ProgressState::Asking)
        ) {
            self.took_ms += ts.since(self.since);
        }
        self.state = does;
        self.since = ts;
    }

    /// The last line that is not blank is what is shown; the one under way counts as soon as it says something.
    fn append_text(&mut self, words: &str) {
        self.open_line.push_str(words);
        if let Some(end) = self.open_line.rfind('\n') {
            let whole = self.open_line[..end].lines().map(str::trim).rfind(|line| !line.is_empty());
            if let Some(line) = whole {
                self.last_line = text::truncate(&text::strip_controls(line), LAST_LINE_CHARS);
            }
            self.open_line.drain(..=end);
        }
        if !self.open_line.trim().is_empty() {
            self.last_line = text::truncate(&text::strip_controls(self.open_line.trim()), LAST_LINE_CHARS);
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
        // Cut first, paint then: colours have no width.
        let cut = text::truncate(plain.trim_end(), width.saturating_sub(1).max(20));
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

    /// Who is shown first where not all are.
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

/// A fleet's state, painted.
pub(crate) fn styled_fleet_state(state: FleetStatus, style: TextStyle) -> String {
    match state {
        FleetStatus::Running => style.bold("running"),
        FleetStatus::Waiting => style.yellow("waiting"),
        FleetStatus::Done => style.green("done"),
        FleetStatus::Failed => style.red("failed"),
        FleetStatus::Cancelled => style.dim("cancelled"),
    }
}

fn finish_word(reason: FinishReason) -> String {
    match reason {
        FinishReason::EndTurn => "done".to_owned(),
        other => serde_json::to_value(other)
            .ok()
            .and_then(|word| word.as_str().map(|word| word.replace('_', " ")))
            .unwrap_or_else(|| "failed".to_owned()),
    }
}

/// Minutes and seconds.
fn format_clock(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0..3600 => format!("{}:{:02}", s / 60, s % 60),
        _ => format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60),
    }
}
