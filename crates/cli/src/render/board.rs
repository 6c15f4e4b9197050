//! A fleet at work, as people see it: who does what since when, for how much, and what was said last. It is fed events
//! and gives lines; where they go is not its business.

use std::collections::{BTreeMap, HashMap};

use qd_protocol::event::{Body, FinishReason};
use qd_protocol::fleet::{Ending, Fleet, FleetState, Spec};
use qd_protocol::{Event, Millis, SessionId};

use super::style::Style;
use super::{text, tool};

/// How much of a last line is kept; a terminal shows less.
const LAST: usize = 200;

/// All of it.
#[derive(Debug)]
pub(crate) struct Board {
    seats: Vec<Seat>,
    by_session: HashMap<SessionId, usize>,
    since: Millis,
    /// How it stands.
    pub(crate) state: FleetState,
    /// What came of it.
    pub(crate) result: Option<String>,
}

/// One session.
#[derive(Debug)]
struct Seat {
    name: String,
    agent: String,
    /// Where it stands in the tree: what is drawn before its name.
    branch: String,
    does: Does,
    /// Since when it does that.
    since: Millis,
    /// How long its runs have taken.
    took_ms: u64,
    runs: u32,
    cost_usd: f64,
    /// The line that it is in the middle of saying.
    line: String,
    last: String,
}

/// What a session does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Does {
    Nothing,
    Waits,
    Starts,
    Works,
    Asks,
    Ended(Ending),
}

/// Something that happened, for those who read lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct News {
    /// In one line.
    pub(crate) line: String,
}

impl Board {
    /// Of a fleet that has just been started.
    pub(crate) fn new(fleet: &Fleet, spec: &Spec) -> Self {
        let order = super::plan::tree(spec);
        let seats: Vec<Seat> = order
            .into_iter()
            .map(|(name, branch)| Seat {
                agent: spec.sessions.get(&name).map(|member| member.agent.clone()).unwrap_or_default(),
                name,
                branch,
                does: Does::Nothing,
                since: fleet.created_at,
                took_ms: 0,
                runs: 0,
                cost_usd: 0.0,
                line: String::new(),
                last: String::new(),
            })
            .collect();
        let by_session = seats
            .iter()
            .enumerate()
            .filter_map(|(at, seat)| Some((fleet.sessions.get(&seat.name)?.session_id.clone(), at)))
            .collect();
        Self { seats, by_session, since: fleet.created_at, state: fleet.state, result: None }
    }

    /// Whether an event is about this fleet.
    pub(crate) fn concerns(&self, fleet: &Fleet, event: &Event) -> bool {
        match &event.session_id {
            Some(session) => self.by_session.contains_key(session),
            None => event.data.get("fleet_id").and_then(|id| id.as_str()) == Some(fleet.id.as_str()),
        }
    }

    /// The name of a session.
    pub(crate) fn name(&self, session: &SessionId) -> Option<&str> {
        self.by_session.get(session).and_then(|at| self.seats.get(*at)).map(|seat| seat.name.as_str())
    }

    /// Takes an event in; gives what there is to say of it in a line.
    pub(crate) fn take(&mut self, event: &Event, body: &Body) -> Option<News> {
        let at = event.session_id.as_ref().and_then(|session| self.by_session.get(session)).copied();
        let said = match at.and_then(|at| self.seats.get_mut(at)) {
            Some(seat) => seat.take(event.ts, body).map(|said| format!("{}: {said}", seat.name)),
            None => self.take_own(body),
        };
        said.map(|line| News { line })
    }

    fn take_own(&mut self, body: &Body) -> Option<String> {
        match body {
            Body::FleetRouted(routed) => {
                let from: Vec<&str> = routed.from.iter().map(|source| source.session.as_str()).collect();
                let to: Vec<&str> = routed.to.iter().map(|given| given.session.as_str()).collect();
                let from = from.join(" + ");
                match (&routed.error, &routed.ask_id) {
                    (Some(error), _) => Some(format!("{from}: {error}")),
                    (None, Some(_)) => Some(format!("{from} → you")),
                    (None, None) => Some(format!("{from} → {}", to.join(", "))),
                }
            }
            Body::FleetMentioned(mentioned) => {
                let to: Vec<&str> = mentioned.to.iter().map(|given| given.session.as_str()).collect();
                let from = &mentioned.from.session;
                match &mentioned.error {
                    Some(error) => Some(format!("{from}: {error}")),
                    None => Some(format!("{from} @ {}", to.join(", "))),
                }
            }
            Body::AskOpened(_) => {
                self.state = FleetState::Waiting;
                None
            }
            Body::FleetFinished(finished) => {
                self.state = finished.state;
                self.result.clone_from(&finished.result);
                None
            }
            _ => None,
        }
    }

    /// Money that all of them have spent.
    pub(crate) fn cost(&self) -> f64 {
        self.seats.iter().map(|seat| seat.cost_usd).sum()
    }

    /// All of it as lines, at most `height` of them, each at most `width` wide.
    pub(crate) fn lines(&self, now: Millis, style: Style, width: usize, height: usize) -> Vec<String> {
        let mut lines = vec![self.title(now, style)];
        let room = height.saturating_sub(2).max(1);
        let names = self.seats.iter().map(|seat| seat.label().chars().count()).max().unwrap_or(0);
        let agents = self.seats.iter().map(|seat| seat.agent.chars().count()).max().unwrap_or(0).min(20);
        // Where there are more than fit, those that do something are shown.
        let mut shown: Vec<usize> = (0..self.seats.len()).collect();
        if shown.len() > room {
            shown.sort_by_key(|at| (self.seats[*at].does.rank(), *at));
            shown.truncate(room);
            shown.sort_unstable();
        }
        for at in &shown {
            lines.push(self.seats[*at].line(now, style, names, agents, width));
        }
        if shown.len() < self.seats.len() {
            lines.push(style.dim(&format!("  … and {} more", self.seats.len() - shown.len())));
        }
        lines
    }

    fn title(&self, now: Millis, style: Style) -> String {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for seat in &self.seats {
            if let Some(word) = seat.does.counted() {
                *counts.entry(word).or_default() += 1;
            }
        }
        let counts: Vec<String> = counts.iter().map(|(word, count)| format!("{count} {word}")).collect();
        let state = state(self.state, style);
        let cost = self.cost();
        let money = if cost > 0.0 { format!("  {}", text::dollars(cost)) } else { String::new() };
        let counts = if counts.is_empty() { String::new() } else { format!("  {}", counts.join(", ")) };
        format!("{state}  {}{money}{counts}", clock(now.since(self.since)))
    }

    /// What it came to, for the end: one line for each session that ran.
    pub(crate) fn summary(&self, style: Style) -> String {
        let mut out = String::new();
        let names = self.seats.iter().map(|seat| seat.name.chars().count()).max().unwrap_or(0);
        for seat in self.seats.iter().filter(|seat| seat.runs > 0) {
            let runs = if seat.runs == 1 { String::new() } else { format!(", {} runs", seat.runs) };
            let money = if seat.cost_usd > 0.0 {
                format!(", {}", text::dollars(seat.cost_usd))
            } else {
                String::new()
            };
            let pad = " ".repeat(names.saturating_sub(seat.name.chars().count()));
            let word = seat.does.painted(style);
            out.push_str(&format!("{}{pad}  {word} ({}{runs}{money})\n", seat.name, clock(seat.took_ms)));
        }
        out
    }
}

impl Seat {
    fn take(&mut self, ts: Millis, body: &Body) -> Option<String> {
        match body {
            Body::RunAccepted(_) if !matches!(self.does, Does::Works | Does::Asks | Does::Starts) => {
                self.now(Does::Starts, ts)
            }
            Body::RunQueued(_) if self.does == Does::Starts => self.now(Does::Waits, ts),
            Body::RunStarted(_) => {
                self.now(Does::Works, ts);
                self.runs += 1;
                return Some("works".to_owned());
            }
            Body::TextDelta(delta) => self.say(&delta.text),
            Body::ToolStarted(call) => {
                let input = call.input.as_ref().unwrap_or(&serde_json::Value::Null);
                self.last = text::cut(&tool::call(call.name.as_deref().unwrap_or("tool"), input), LAST);
            }
            Body::UsageReported(report) => self.cost_usd += report.cost_usd,
            Body::AskOpened(_) => self.now(Does::Asks, ts),
            Body::AskResolved(_) if self.does == Does::Asks => self.now(Does::Works, ts),
            Body::RunFinished(finished) => {
                if let Does::Works | Does::Asks = self.does {
                    self.took_ms += ts.since(self.since);
                }
                let ending = Ending::from(finished.finish_reason);
                self.now(Does::Ended(ending), ts);
                self.line.clear();
                let head = text::head(&finished.text, LAST);
                let why = finished.error.as_ref().map(|error| text::head(&error.message, LAST));
                self.last = why.filter(|_| ending == Ending::Failed).unwrap_or(head);
                let reason = reason(finished.finish_reason);
                let last = if self.last.is_empty() { String::new() } else { format!(": {}", self.last) };
                return Some(format!("{reason}{last}"));
            }
            _ => {}
        }
        None
    }

    fn now(&mut self, does: Does, ts: Millis) {
        if matches!((self.does, does), (Does::Works | Does::Asks, Does::Works | Does::Asks)) {
            self.took_ms += ts.since(self.since);
        }
        self.does = does;
        self.since = ts;
    }

    /// The last line that is not blank is what is shown; the one under way counts as soon as it says something.
    fn say(&mut self, words: &str) {
        self.line.push_str(words);
        if let Some(end) = self.line.rfind('\n') {
            let whole = self.line[..end].lines().map(str::trim).rfind(|line| !line.is_empty());
            if let Some(line) = whole {
                self.last = text::cut(&text::clean(line), LAST);
            }
            self.line.drain(..=end);
        }
        if !self.line.trim().is_empty() {
            self.last = text::cut(&text::clean(self.line.trim()), LAST);
        }
        if self.line.len() > 4 * LAST {
            self.line.clear();
        }
    }

    fn label(&self) -> String {
        format!("{}{}", self.branch, self.name)
    }

    fn line(&self, now: Millis, style: Style, names: usize, agents: usize, width: usize) -> String {
        let running = matches!(self.does, Does::Works | Does::Asks);
        let took = self.took_ms + if running { now.since(self.since) } else { 0 };
        let time = if self.runs > 0 { clock(took) } else { String::new() };
        let money = if self.cost_usd > 0.0 { text::dollars(self.cost_usd) } else { String::new() };
        let label = self.label();
        let pad = " ".repeat(names.saturating_sub(label.chars().count()));
        let agent = text::cut(&self.agent, agents);
        let plain = format!(
            "{label}{pad}  {agent:agents$}  {:9}  {time:>5}  {money:>7}  {}",
            self.does.word(),
            self.last
        );
        // Cut first, paint then: colours have no width.
        let cut = text::cut(plain.trim_end(), width.saturating_sub(1).max(20));
        let word = self.does.word();
        let painted = cut.replacen(&format!("  {word} "), &format!("  {} ", self.does.painted(style)), 1);
        if painted == cut { cut } else { painted }
    }
}

impl Does {
    fn word(self) -> &'static str {
        match self {
            Self::Nothing => "·",
            Self::Waits => "queued",
            Self::Starts => "starts",
            Self::Works => "works",
            Self::Asks => "asks",
            Self::Ended(Ending::Done) => "done",
            Self::Ended(Ending::Failed) => "failed",
            Self::Ended(Ending::Cancelled) => "cancelled",
        }
    }

    fn counted(self) -> Option<&'static str> {
        match self {
            Self::Nothing => None,
            Self::Starts | Self::Waits => Some("starting"),
            Self::Works => Some("working"),
            Self::Asks => Some("asking"),
            Self::Ended(_) => Some(self.word()),
        }
    }

    /// Who is shown first where not all are.
    fn rank(self) -> u8 {
        match self {
            Self::Asks => 0,
            Self::Works => 1,
            Self::Starts | Self::Waits => 2,
            Self::Ended(Ending::Failed) => 3,
            Self::Ended(_) => 4,
            Self::Nothing => 5,
        }
    }

    fn painted(self, style: Style) -> String {
        match self {
            Self::Nothing | Self::Waits | Self::Starts => style.dim(self.word()),
            Self::Works => style.cyan(self.word()),
            Self::Asks => style.yellow(self.word()),
            Self::Ended(Ending::Done) => style.green(self.word()),
            Self::Ended(Ending::Failed) => style.red(self.word()),
            Self::Ended(Ending::Cancelled) => style.dim(self.word()),
        }
    }
}

/// A fleet's state, painted.
pub(crate) fn state(state: FleetState, style: Style) -> String {
    match state {
        FleetState::Running => style.bold("running"),
        FleetState::Waiting => style.yellow("waiting"),
        FleetState::Done => style.green("done"),
        FleetState::Failed => style.red("failed"),
        FleetState::Cancelled => style.dim("cancelled"),
    }
}

fn reason(reason: FinishReason) -> String {
    match reason {
        FinishReason::EndTurn => "done".to_owned(),
        other => serde_json::to_value(other)
            .ok()
            .and_then(|word| word.as_str().map(|word| word.replace('_', " ")))
            .unwrap_or_else(|| "failed".to_owned()),
    }
}

/// Minutes and seconds.
fn clock(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0..3600 => format!("{}:{:02}", s / 60, s % 60),
        _ => format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60),
    }
}
