//! Turns what the server tells into what a session hears. It keeps what single notifications only hint at: which items
//! have been said already, which calls are open, whose turn is whose. Nothing is cut here: that comes last, in `fit`.

use std::collections::{HashSet, VecDeque};

use qd_protocol::RunId;
use qd_protocol::event::PlanEntry;
use qd_protocol::link::Said;
use serde::Deserialize;
use serde_json::Value;

use super::calls::{Call, Calls};
use super::ends::{Ended, TurnError};
use super::items::{Item, Tool};
use super::usage::{Meter, Report};
use super::wire::Params;
use crate::drivers::price::Pricing;

/// Turns of which it is remembered whose they were: a command that a turn left behind goes on speaking.
const TURNS_MAX: usize = 64;
/// Warnings that are remembered so as not to be repeated with every turn.
const WARNINGS_MAX: usize = 64;

/// What is known of a conversation beyond its text.
#[derive(Debug)]
pub(super) struct Words {
    thread: String,
    meter: Meter,
    calls: Calls,
    /// The latest turns, of any thread, and the runs that they belong to.
    turns: VecDeque<(String, RunId)>,
    /// Items of which something was said piece by piece.
    begun: HashSet<String>,
    /// Whether the turn has said something, so that the next message needs a gap before it.
    spoke: bool,
    /// The last message of the turn, whole.
    last_message: Option<String>,
    /// Threads whose model has used tools since it was called: it will be called again with what they gave.
    tooled: HashSet<String>,
    /// Threads whose model has told what its call used, and whose next item shows another.
    between: HashSet<String>,
    warnings: VecDeque<String>,
}

/// What a notification says, and which turn it is of, if of one.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Heard {
    pub(super) turn: Option<String>,
    pub(super) said: Vec<Said>,
}

/// What a notification means beyond its words.
#[derive(Debug, PartialEq)]
pub(super) enum News {
    /// A turn of this thread has begun.
    Started { thread: String, turn: String },
    /// One has ended.
    Completed { thread: String, turn: Ended },
    /// An item of this turn of ours has begun.
    Item { turn: String },
    /// Why a turn of ours will fail.
    Failing { turn: String, why: TurnError },
    /// Nobody waits any more for the answer to what was asked under this id.
    Resolved(Value),
}

/// The fields of all notifications together; each method has some of them.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Told {
    thread_id: Option<String>,
    turn_id: Option<String>,
    item_id: String,
    delta: String,
    message: String,
    summary_index: u64,
    will_retry: bool,
    to_model: String,
    request_id: Value,
}

impl Words {
    /// Of a thread with this model.
    pub(super) fn new(thread: String, model: &str, pricing: Pricing) -> Self {
        let mut meter = Meter::new(pricing);
        meter.set_model(model);
        Self {
            thread,
            meter,
            calls: Calls::default(),
            turns: VecDeque::new(),
            begun: HashSet::new(),
            spoke: false,
            last_message: None,
            tooled: HashSet::new(),
            between: HashSet::new(),
            warnings: VecDeque::new(),
        }
    }

    /// Forgets what was said in the turn before. Its commands may go on, and are not forgotten.
    pub(super) fn begin_turn(&mut self) {
        self.begun.clear();
        self.spoke = false;
        self.last_message = None;
    }

    /// The agent's result: its last message.
    pub(super) fn result(&mut self) -> Option<String> {
        self.last_message.take()
    }

    /// A turn that has begun belongs to this run.
    pub(super) fn belongs(&mut self, turn: &str, run: &RunId) {
        if self.run_of(turn).is_none() {
            if self.turns.len() == TURNS_MAX {
                self.turns.pop_front();
            }
            self.turns.push_back((turn.to_owned(), run.clone()));
        }
    }

    /// The run that a turn belongs to, if it has begun under our eyes.
    pub(super) fn run_of(&self, turn: &str) -> Option<&RunId> {
        self.turns.iter().find(|(id, _)| id == turn).map(|(_, run)| run)
    }

    /// The calls that are open.
    pub(super) fn calls(&self) -> &Calls {
        &self.calls
    }

    /// What a notification says and means. Methods that mean nothing to a session say nothing.
    pub(super) fn hear(&mut self, method: &str, params: &Params) -> (Heard, Option<News>) {
        let nothing = (Heard::default(), None);
        let Some(told) = params.read::<Told>() else { return nothing };
        // What is said by the agents that ours has started is theirs; what they use is ours.
        let ours = told.thread_id.as_deref().is_none_or(|thread| thread == self.thread);
        let turn = told.turn_id.clone().filter(|_| ours);
        let heard = |said: Vec<Said>| (Heard { turn: turn.clone(), said }, None);
        match method {
            "turn/started" | "turn/completed" => self.turned(method, params, told),
            "thread/tokenUsage/updated" => (self.used(params, told), None),
            "serverRequest/resolved" => (Heard::default(), Some(News::Resolved(told.request_id))),
            "item/started" | "item/completed" => self.item(method, params, told, ours),
            _ if !ours => nothing,
            "item/agentMessage/delta" | "item/plan/delta" => {
                heard(self.message_piece(&told.item_id, told.delta))
            }
            "item/reasoning/summaryTextDelta" | "item/reasoning/textDelta" => {
                self.begun.insert(told.item_id);
                heard(vec![Said::Thought { text: told.delta }])
            }
            "item/reasoning/summaryPartAdded" if told.summary_index > 0 => {
                heard(vec![Said::Thought { text: GAP.to_owned() }])
            }
            "item/commandExecution/outputDelta" => heard(self.output(told.item_id, told.delta)),
            "item/mcpToolCall/progress" => heard(self.output(told.item_id, told.message + "\n")),
            "turn/plan/updated" => heard(plan(params).into_iter().collect()),
            "error" => error(params, told, turn.as_deref()),
            "warning" | "guardianWarning" => heard(self.warn(told.message)),
            "model/rerouted" => {
                self.meter.set_model(&told.to_model);
                heard(vec![Said::Notice { text: format!("the model is now {}", told.to_model) }])
            }
            _ => nothing,
        }
    }

    fn turned(&mut self, method: &str, params: &Params, told: Told) -> (Heard, Option<News>) {
        #[derive(Deserialize)]
        struct Turned {
            turn: Ended,
        }
        let (Some(Turned { turn }), Some(thread)) = (params.read(), told.thread_id) else {
            return (Heard::default(), None);
        };
        if method == "turn/completed" {
            self.between.remove(&thread);
            self.tooled.remove(&thread);
            return (Heard::default(), Some(News::Completed { thread, turn }));
        }
        // A turn begins with a call of the model.
        let heard = Heard { turn: Some(turn.id.clone()), said: vec![Said::Turn] };
        (heard, Some(News::Started { thread, turn: turn.id }))
    }

    fn used(&mut self, params: &Params, told: Told) -> Heard {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Used {
            token_usage: Report,
        }
        let (Some(Used { token_usage }), Some(thread), Some(turn)) =
            (params.read(), told.thread_id, told.turn_id)
        else {
            return Heard::default();
        };
        let live = self.run_of(&turn).is_some();
        let usage = self.meter.count(&thread, live, token_usage);
        let mut said: Vec<Said> = usage.map(|usage| Said::Usage { usage }).into_iter().collect();
        if self.tooled.remove(&thread) {
            said.push(Said::Turn);
        } else if live {
            self.between.insert(thread);
        }
        Heard { turn: Some(turn), said }
    }

    fn item(&mut self, method: &str, params: &Params, told: Told, ours: bool) -> (Heard, Option<News>) {
        #[derive(Deserialize)]
        struct Lives {
            item: Item,
        }
        let (Some(Lives { item }), Some(turn)) = (params.read(), told.turn_id) else {
            return (Heard::default(), None);
        };
        let mut said = Vec::new();
        let started = method == "item/started";
        if let Some(thread) = told.thread_id.filter(|_| started) {
            if item.kind != "userMessage" && self.between.remove(&thread) {
                said.push(Said::Turn);
            }
            if item.is_answered() {
                self.tooled.insert(thread);
            }
        }
        if !ours {
            return (Heard { turn: Some(turn), said }, None);
        }
        if started {
            said.extend(self.start(&item, &turn));
        } else {
            self.finish(&item, &turn, &mut said);
        }
        let news = started.then(|| News::Item { turn: turn.clone() });
        (Heard { turn: Some(turn), said }, news)
    }

    fn start(&mut self, item: &Item, turn: &str) -> Option<Said> {
        let tool = item.tool()?;
        // A call that needs leave is begun twice.
        if self.calls.get(&item.id).is_some() {
            return None;
        }
        let Tool { name, input } = tool.clone();
        self.calls.open(&item.id, Call { tool, is_command: item.is_command(), turn: turn.to_owned() });
        Some(Said::ToolStarted { call_id: item.id.clone(), name, input })
    }

    fn finish(&mut self, item: &Item, turn: &str, said: &mut Vec<Said>) {
        if let Some(text) = item.text() {
            if !self.begun.contains(&item.id) {
                said.extend(self.message_piece(&item.id, text.to_owned()));
            }
            self.last_message = Some(text.to_owned());
        } else if let Some(text) = item.thought() {
            if self.begun.insert(item.id.clone()) {
                said.push(Said::Thought { text });
            }
        } else if item.kind == "contextCompaction" {
            said.push(Said::Notice { text: "the agent shortened its memory of the conversation".to_owned() });
        } else if let Some(tool) = item.tool() {
            // Some are only told when they have ended.
            said.extend(self.start(item, turn));
            self.calls.close(&item.id);
            let ending = item.ending();
            said.push(Said::ToolFinished {
                call_id: item.id.clone(),
                name: tool.name,
                output: ending.output,
                is_error: ending.is_error,
            });
        }
    }

    /// A piece of a message; the first has a gap before it if it is not the turn's first message.
    fn message_piece(&mut self, item: &str, text: String) -> Vec<Said> {
        if text.is_empty() {
            return Vec::new();
        }
        let is_next = !self.begun.contains(item);
        if is_next {
            self.begun.insert(item.to_owned());
        }
        let text = if is_next && self.spoke { format!("{GAP}{text}") } else { text };
        self.spoke = true;
        vec![Said::Text { text }]
    }

    fn output(&self, call_id: String, text: String) -> Vec<Said> {
        if self.calls.get(&call_id).is_some() { vec![Said::ToolOutput { call_id, text }] } else { Vec::new() }
    }

    /// A warning, once.
    fn warn(&mut self, text: String) -> Vec<Said> {
        if text.is_empty() || self.warnings.contains(&text) {
            return Vec::new();
        }
        if self.warnings.len() == WARNINGS_MAX {
            self.warnings.pop_front();
        }
        self.warnings.push_back(text.clone());
        vec![Said::Notice { text }]
    }
}

/// Between two messages, or two parts of a thought.
const GAP: &str = "\n\n";

fn plan(params: &Params) -> Option<Said> {
    #[derive(Deserialize)]
    struct Plan {
        plan: Vec<Step>,
    }
    #[derive(Deserialize)]
    struct Step {
        step: String,
        status: String,
    }
    let entry = |Step { step, status }| {
        let status = if status == "inProgress" { "in_progress".to_owned() } else { status };
        PlanEntry { content: step, status }
    };
    let Plan { plan } = params.read()?;
    Some(Said::Plan { entries: plan.into_iter().map(entry).collect() })
}

/// What went wrong: something that will be tried again is told, and the rest is the turn's end.
fn error(params: &Params, told: Told, turn: Option<&str>) -> (Heard, Option<News>) {
    #[derive(Deserialize)]
    struct Failed {
        error: TurnError,
    }
    let Some(Failed { error }) = params.read() else { return (Heard::default(), None) };
    if told.will_retry {
        let said = vec![Said::Notice { text: error.words() }];
        return (Heard { turn: turn.map(str::to_owned), said }, None);
    }
    let news = turn.map(|turn| News::Failing { turn: turn.to_owned(), why: error });
    (Heard::default(), news)
}
