//! Turns an agent's session updates into what a session hears. It keeps what updates only hint at: which tool calls
//! are open, and the totals of which the session wants the increments. Nothing is cut here: that comes last, in `fit`.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use agent_client_protocol::v1::schema::{
    ContentBlock, EmbeddedResourceResource, Meta, Notice, Plan, SessionUpdate, ToolCallContent, ToolCallId,
    ToolCallStatus, ToolCallUpdate, ToolCallUpdateFields, ToolKind, Usage as TurnUsage, UsageUpdate,
};
use qd_protocol::event::{PlanEntry, Usage};
use qd_protocol::limits::INLINE_MAX;
use qd_protocol::link::Said;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Tool calls that are remembered at once. When there are more, those that ended longest ago are forgotten, and only if
/// all are open the oldest of them.
const CALLS_MAX: usize = 4096;
/// Costs are counted in billionths of a dollar, so that the difference of two totals is a figure that people know.
const COST_UNIT: f64 = 1e9;
/// The greatest total that is believed, in dollars.
const COST_MAX: f64 = 1e9;
/// The same in tokens; whoever reads JSON as floating point can still count them.
const TOKENS_MAX: u64 = 1 << 50;

/// Our corner of a `_meta`, if there is one and it is as expected.
pub(super) fn ours<T: DeserializeOwned>(meta: Option<&Meta>) -> Option<T> {
    T::deserialize(meta?.get(OURS)?).ok()
}

/// The key under which we put what the protocol has no field for.
pub(crate) const OURS: &str = "quarterdeck";

/// What is known of a conversation beyond its text.
#[derive(Debug, Default)]
pub(super) struct Ear {
    calls: HashMap<ToolCallId, Call>,
    /// The calls in the order in which they are forgotten: first those that ended, then those that did not.
    ended: VecDeque<ToolCallId>,
    begun: VecDeque<ToolCallId>,
    totals: Totals,
}

/// A tool call that the agent asks about.
#[derive(Debug, PartialEq)]
pub(super) struct Asking {
    /// What is to be told first.
    pub(super) said: Vec<Said>,
    pub(super) tool: String,
    pub(super) title: Option<String>,
    pub(super) input: Value,
}

/// One tool call.
#[derive(Debug, Default)]
struct Call {
    name: String,
    kind: Option<ToolKind>,
    input: Option<Value>,
    shown: Shown,
    stage: Stage,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Announced, without its arguments.
    #[default]
    Announced,
    Started,
    Finished,
}

#[derive(Debug, Default, Clone, Copy)]
struct Totals {
    input_tokens: u64,
    output_tokens: u64,
    cost_usd: f64,
}

impl Ear {
    /// Forgets the calls of the turn before.
    pub(super) fn begin_turn(&mut self) {
        self.calls.clear();
        self.ended.clear();
        self.begun.clear();
    }

    /// What an update says. Kinds that mean nothing to a session say nothing.
    pub(super) fn hear(&mut self, update: SessionUpdate) -> Vec<Said> {
        match update {
            SessionUpdate::AgentMessageChunk(chunk) => vec![Said::Text { text: text_of(chunk.content) }],
            SessionUpdate::AgentThoughtChunk(chunk) => vec![Said::Thought { text: text_of(chunk.content) }],
            SessionUpdate::ToolCall(call) => self.tool(ToolCallUpdate::from(call)),
            SessionUpdate::ToolCallUpdate(update) => self.tool(update),
            SessionUpdate::Plan(plan) => vec![Said::Plan { entries: entries(plan) }],
            SessionUpdate::UsageUpdate(update) => self.usage(&update).into_iter().collect(),
            SessionUpdate::Notice(notice) => vec![Said::Notice { text: notice_text(notice) }],
            _ => Vec::new(),
        }
    }

    /// What the answer to a prompt says of its tokens.
    pub(super) fn hear_usage(&mut self, usage: &TurnUsage) -> Option<Said> {
        self.count(Totals {
            input_tokens: usage.input_tokens,
            output_tokens: usage.output_tokens,
            cost_usd: self.totals.cost_usd,
        })
    }

    /// A tool call that the agent asks about. It is judged by what the request itself says; what is known of the call
    /// only fills the gaps, and not even that if the call has ended and its id is merely used again.
    pub(super) fn asked(&mut self, update: ToolCallUpdate) -> Asking {
        let ToolCallUpdateFields { name, kind, title, raw_input, .. } = update.fields.clone();
        let id = update.tool_call_id.clone();
        let before = self.calls.get(&id).map(|call| (call.stage, call.kind.and_then(tool_of)));
        let own_kind = kind.and_then(tool_of);
        let said = self.tool(update);
        let known = self.calls.get(&id).filter(|_| !matches!(before, Some((Stage::Finished, _))));
        let is_another = matches!((own_kind, before), (Some(own), Some((_, Some(kind)))) if own != kind);
        let known_name = known.filter(|_| !is_another).map(|call| call.name.clone());
        let tool = name
            .or_else(|| known_name.filter(|name| !name.is_empty()))
            .or_else(|| own_kind.map(str::to_owned))
            .or_else(|| title.clone())
            .unwrap_or_else(|| UNNAMED.to_owned());
        let input = raw_input.filter(|input| !is_empty(input));
        let input = input.or_else(|| known.and_then(|call| call.input.clone())).unwrap_or_else(nothing);
        Asking { said, tool, title, input }
    }

    fn tool(&mut self, update: ToolCallUpdate) -> Vec<Said> {
        let ToolCallUpdate { tool_call_id: id, fields, .. } = update;
        if !self.calls.contains_key(&id) {
            if self.calls.len() >= CALLS_MAX {
                self.forget_one();
            }
            self.begun.push_back(id.clone());
        }
        let call = self.calls.entry(id.clone()).or_default();
        let was_finished = call.stage == Stage::Finished;
        let said = call.update(&id, fields);
        if call.stage == Stage::Finished && !was_finished {
            self.ended.push_back(id);
        }
        said
    }

    fn forget_one(&mut self) {
        // What has ended is in both lists, so that the second may name what is forgotten already.
        while let Some(id) = self.ended.pop_front().or_else(|| self.begun.pop_front()) {
            if self.calls.remove(&id).is_some() {
                break;
            }
        }
        if self.begun.len() > 2 * CALLS_MAX {
            self.begun.retain(|id| self.calls.contains_key(id));
        }
    }

    fn usage(&mut self, update: &UsageUpdate) -> Option<Said> {
        #[derive(Deserialize)]
        struct Tokens {
            input_tokens: u64,
            output_tokens: u64,
        }
        let mut totals = self.totals;
        if let Some(Tokens { input_tokens, output_tokens }) = ours(update.meta.as_ref()) {
            totals = Totals { input_tokens, output_tokens, ..totals };
        }
        if let Some(cost) = update.cost.as_ref().filter(|cost| cost.currency.eq_ignore_ascii_case("USD")) {
            totals.cost_usd = cost.amount;
        }
        self.count(totals)
    }

    /// What was used since the last report. A total that fell has been counted anew from nothing; one that no agent can
    /// have used counts as the most that one could.
    fn count(&mut self, now: Totals) -> Option<Said> {
        let now = Totals {
            input_tokens: now.input_tokens.min(TOKENS_MAX),
            output_tokens: now.output_tokens.min(TOKENS_MAX),
            cost_usd: if now.cost_usd.is_nan() { 0.0 } else { now.cost_usd.clamp(0.0, COST_MAX) },
        };
        let tokens = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        let before = std::mem::replace(&mut self.totals, now);
        let more = if now.cost_usd < before.cost_usd { now.cost_usd } else { now.cost_usd - before.cost_usd };
        let usage = Usage {
            input_tokens: tokens(now.input_tokens, before.input_tokens),
            output_tokens: tokens(now.output_tokens, before.output_tokens),
            cost_usd: (more * COST_UNIT).round() / COST_UNIT,
        };
        (usage != Usage::default()).then_some(Said::Usage { usage })
    }
}

/// The name of a tool whose agent gives none.
const UNNAMED: &str = "tool";

/// The name under which rules know the tools of a kind, for agents that give a title and no name.
fn tool_of(kind: ToolKind) -> Option<&'static str> {
    match kind {
        ToolKind::Execute => Some("Bash"),
        ToolKind::Read => Some("Read"),
        ToolKind::Edit => Some("Edit"),
        ToolKind::Delete => Some("Delete"),
        ToolKind::Move => Some("Move"),
        ToolKind::Search => Some("Search"),
        ToolKind::Fetch => Some("WebFetch"),
        ToolKind::Think => Some("Think"),
        _ => None,
    }
}

impl Call {
    fn update(&mut self, id: &ToolCallId, fields: ToolCallUpdateFields) -> Vec<Said> {
        if self.stage == Stage::Finished {
            return Vec::new();
        }
        let ToolCallUpdateFields { kind, status, title, name, content, raw_input, raw_output, .. } = fields;
        self.kind = kind.filter(|kind| tool_of(*kind).is_some()).or(self.kind);
        let named_by_kind = self.kind.and_then(tool_of).map(str::to_owned);
        if let Some(name) = name.or_else(|| named_by_kind.or(title).filter(|_| self.name.is_empty())) {
            self.name = name;
        }
        let mut input = raw_input.filter(|input| !is_empty(input));
        let output: String = content.unwrap_or_default().into_iter().map(output_of).collect();
        let goes_on = status.is_some_and(|status| status != ToolCallStatus::Pending);

        let call_id = id.to_string();
        let mut said = Vec::new();
        // Some agents announce a call first and give its arguments later; then it starts when they are known.
        if self.stage == Stage::Announced && (input.is_some() || goes_on || !output.is_empty()) {
            self.stage = Stage::Started;
            if self.name.is_empty() {
                self.name = UNNAMED.to_owned();
            }
            let input = input.clone().unwrap_or_else(nothing);
            said.push(Said::ToolStarted { call_id: call_id.clone(), name: self.name.clone(), input });
        }
        if let Some(input) = input.take() {
            self.input = Some(short(input));
        }
        if let Some(text) = self.shown.more(output) {
            said.push(Said::ToolOutput { call_id: call_id.clone(), text });
        }
        if let Some(status @ (ToolCallStatus::Completed | ToolCallStatus::Failed)) = status {
            self.stage = Stage::Finished;
            self.input = None;
            let shown = std::mem::take(&mut self.shown).whole();
            said.push(Said::ToolFinished {
                call_id,
                name: self.name.clone(),
                output: raw_output.or(shown).unwrap_or_default(),
                is_error: status == ToolCallStatus::Failed,
            });
        }
        said
    }
}

/// What has been told as a call's output: agents repeat all of it each time.
#[derive(Debug, Default)]
struct Shown {
    bytes: usize,
    hash: u64,
    /// All of it while that fits an event: it is what the call gave if the agent does not say so itself.
    text: String,
}

impl Shown {
    /// What of the output is new.
    fn more(&mut self, output: String) -> Option<String> {
        let known = output.get(..self.bytes).is_some_and(|start| hash(start) == self.hash);
        let new = if known { &output[self.bytes..] } else { &output };
        if new.is_empty() {
            return None;
        }
        let new = new.to_owned();
        (self.bytes, self.hash) = (output.len(), hash(&output));
        self.text = if output.len() <= INLINE_MAX { output } else { String::new() };
        Some(new)
    }

    /// All of it, or that it was too much: then it was told piece by piece, and not again.
    fn whole(self) -> Option<Value> {
        match self.bytes {
            0 => None,
            bytes if self.text.is_empty() => Some(format!("[{bytes} bytes, as told before]").into()),
            _ => Some(self.text.into()),
        }
    }
}

fn hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// Arguments as they are remembered: whole or not at all, since a cut could go through a secret.
fn short(input: Value) -> Value {
    let size = input.to_string().len();
    if size <= INLINE_MAX { input } else { format!("[{size} bytes, as told before]").into() }
}

/// Arguments that nobody gave.
fn nothing() -> Value {
    Value::Object(Map::new())
}

fn is_empty(input: &Value) -> bool {
    input.is_null() || input.as_object().is_some_and(serde_json::Map::is_empty)
}

/// The text of a piece of content; what is no text is named.
fn text_of(content: ContentBlock) -> String {
    match content {
        ContentBlock::Text(text) => text.text,
        ContentBlock::ResourceLink(link) => format!("[{}]({})", link.name, link.uri),
        ContentBlock::Resource(resource) => match resource.resource {
            EmbeddedResourceResource::TextResourceContents(text) => text.text,
            EmbeddedResourceResource::BlobResourceContents(blob) => format!("[{}]", blob.uri),
            _ => String::new(),
        },
        ContentBlock::Image(image) => format!("[{}]", image.mime_type),
        ContentBlock::Audio(audio) => format!("[{}]", audio.mime_type),
        _ => String::new(),
    }
}

fn output_of(content: ToolCallContent) -> String {
    match content {
        ToolCallContent::Content(content) => text_of(content.content),
        ToolCallContent::Diff(diff) => format!("[changes {}]", diff.path.display()),
        _ => String::new(),
    }
}

fn entries(plan: Plan) -> Vec<PlanEntry> {
    #[derive(Deserialize)]
    struct Status {
        status: String,
    }
    let entries = plan.entries.into_iter().map(|entry| {
        let status = match ours(entry.meta.as_ref()) {
            Some(Status { status }) => status,
            None => serde_json::to_value(&entry.status)
                .ok()
                .and_then(|word| word.as_str().map(str::to_owned))
                .unwrap_or_default(),
        };
        PlanEntry { content: entry.content, status }
    });
    entries.collect()
}

fn notice_text(notice: Notice) -> String {
    match notice.description {
        Some(description) => format!("{}: {description}", notice.title),
        None => notice.title,
    }
}

#[cfg(test)]
mod tests {
    use agent_client_protocol::v1::schema::{Content, Cost, TextContent, ToolCall};
    use serde_json::json;

    use super::*;

    fn started(call_id: &str, name: &str, input: Value) -> Said {
        Said::ToolStarted { call_id: call_id.to_owned(), name: name.to_owned(), input }
    }

    fn update(fields: ToolCallUpdateFields) -> SessionUpdate {
        SessionUpdate::ToolCallUpdate(ToolCallUpdate::new("c", fields))
    }

    fn content(text: &str) -> Vec<ToolCallContent> {
        vec![ToolCallContent::Content(Content::new(ContentBlock::Text(TextContent::new(text))))]
    }

    #[test]
    fn a_call_that_is_announced_without_arguments_starts_when_they_come() {
        let mut ear = Ear::default();
        assert_eq!(ear.hear(SessionUpdate::ToolCall(ToolCall::new("c", "Bash").raw_input(json!({})))), []);
        let said =
            ear.hear(update(ToolCallUpdateFields::new().title("ls -l").raw_input(json!({"command": "ls"}))));
        assert_eq!(said, [started("c", "Bash", json!({"command": "ls"}))]);
    }

    #[test]
    fn output_that_is_repeated_whole_is_told_piece_by_piece() {
        let mut ear = Ear::default();
        let call = ToolCall::new("c", "run").name("Bash".to_owned()).status(ToolCallStatus::InProgress);
        assert_eq!(ear.hear(SessionUpdate::ToolCall(call)), [started("c", "Bash", json!({}))]);
        let output = |text: &str| Said::ToolOutput { call_id: "c".to_owned(), text: text.to_owned() };
        let shows = |text| update(ToolCallUpdateFields::new().content(content(text)));
        assert_eq!(ear.hear(shows("one\n")), [output("one\n")]);
        assert_eq!(ear.hear(shows("one\ntwo\n")), [output("two\n")]);
        assert_eq!(ear.hear(shows("one\ntwo\n")), []);
        let fails = ToolCallUpdateFields::new().status(ToolCallStatus::Failed);
        let finished = Said::ToolFinished {
            call_id: "c".to_owned(),
            name: "Bash".to_owned(),
            output: json!("one\ntwo\n"),
            is_error: true,
        };
        assert_eq!(ear.hear(update(fails.clone())), [finished]);
        assert_eq!(ear.hear(update(fails)), [], "a call ends once");
    }

    #[test]
    fn a_call_of_which_only_the_end_is_heard_has_started_too() {
        let mut ear = Ear::default();
        let fields = ToolCallUpdateFields::new().status(ToolCallStatus::Completed).raw_output(json!(1));
        let said = ear.hear(update(fields));
        assert_eq!(said[0], started("c", UNNAMED, json!({})));
        assert!(
            matches!(&said[1], Said::ToolFinished { output, is_error: false, .. } if *output == json!(1))
        );
    }

    #[test]
    fn totals_become_increments_without_the_dust_of_floating_point() {
        let mut ear = Ear::default();
        let mut report = |input: u64, cost: f64| {
            let meta = json!({OURS: {"input_tokens": input, "output_tokens": 1}});
            let update = UsageUpdate::new(0, 0).cost(Cost::new(cost, "USD"));
            ear.hear(SessionUpdate::UsageUpdate(update.meta(meta.as_object().cloned())))
        };
        let usage = |input_tokens, output_tokens, cost_usd| Said::Usage {
            usage: Usage { input_tokens, output_tokens, cost_usd },
        };
        assert_eq!(report(10, 0.1), [usage(10, 1, 0.1)]);
        assert_eq!(report(30, 0.1 + 0.2), [usage(20, 0, 0.2)]);
        assert_eq!(report(30, 0.1 + 0.2), []);
        assert_eq!(report(5, 0.05), [usage(5, 0, 0.05)], "a total that fell has begun again");
    }

    #[test]
    fn a_cost_in_another_currency_is_no_dollars() {
        let mut ear = Ear::default();
        let update = UsageUpdate::new(0, 0).cost(Cost::new(3.0, "credits"));
        assert_eq!(ear.hear(SessionUpdate::UsageUpdate(update)), []);
    }

    #[test]
    fn a_cost_that_nobody_can_have_is_finite_and_so_are_the_tokens() {
        let mut ear = Ear::default();
        let mut report = |tokens: u64, cost: f64| {
            let meta = json!({OURS: {"input_tokens": tokens, "output_tokens": 0}});
            let update = UsageUpdate::new(0, 0).cost(Cost::new(cost, "USD"));
            let said = ear.hear(SessionUpdate::UsageUpdate(update.meta(meta.as_object().cloned())));
            let [Said::Usage { usage }] = said[..] else { return None };
            Some((usage.input_tokens, usage.cost_usd))
        };
        assert_eq!(report(u64::MAX, 1e300), Some((TOKENS_MAX, COST_MAX)));
        assert_eq!(report(u64::MAX, f64::INFINITY), None);
        assert_eq!(report(u64::MAX, f64::NAN), None);
        assert_eq!(report(u64::MAX, -1e300), None);
    }

    #[test]
    fn past_the_bound_every_call_is_told_and_the_oldest_that_ended_is_forgotten() {
        let mut ear = Ear::default();
        let call = |n: usize, status| {
            let call = ToolCall::new(format!("c{n}"), "t").name("Bash".to_owned()).status(status);
            SessionUpdate::ToolCall(call.raw_input(json!({"command": n})))
        };
        assert_eq!(ear.hear(call(0, ToolCallStatus::InProgress)).len(), 1);
        for n in 1..3 * CALLS_MAX {
            assert_eq!(ear.hear(call(n, ToolCallStatus::Completed)).len(), 2, "{n}");
        }
        assert!(ear.calls.len() <= CALLS_MAX && ear.begun.len() <= 2 * CALLS_MAX + 1);
        let open = ear.asked(ToolCallUpdate::new("c0", ToolCallUpdateFields::new()));
        assert_eq!((open.tool.as_str(), open.input), ("Bash", json!({"command": 0})), "it is still open");
        for n in 0..2 * CALLS_MAX {
            let said = ear.hear(call(100_000 + n, ToolCallStatus::InProgress));
            assert_eq!(
                said,
                [started(&format!("c{}", 100_000 + n), "Bash", json!({"command": 100_000 + n}))]
            );
        }
        assert_eq!(ear.calls.len(), CALLS_MAX);
    }

    #[test]
    fn a_permission_is_judged_by_its_own_words() {
        let mut ear = Ear::default();
        let asks = |ear: &mut Ear, fields| {
            let Asking { tool, input, .. } = ear.asked(ToolCallUpdate::new("c", fields));
            (tool, input)
        };
        let fields = ToolCallUpdateFields::new;
        ear.hear(update(
            fields().name("Read".to_owned()).kind(ToolKind::Read).raw_input(json!({"path": "a"})),
        ));
        let own = fields().name("Bash".to_owned()).raw_input(json!({"command": "rm"}));
        assert_eq!(asks(&mut ear, own), ("Bash".to_owned(), json!({"command": "rm"})));

        ear.begin_turn();
        ear.hear(update(
            fields().name("Read".to_owned()).kind(ToolKind::Read).raw_input(json!({"path": "a"})),
        ));
        assert_eq!(asks(&mut ear, fields().title("Reading")), ("Read".to_owned(), json!({"path": "a"})));
        let kind = fields().kind(ToolKind::Execute).raw_input(json!({"command": "rm"}));
        assert_eq!(asks(&mut ear, kind), ("Bash".to_owned(), json!({"command": "rm"})));

        ear.hear(update(fields().status(ToolCallStatus::Completed)));
        let again = fields().title("rm").raw_input(json!({"command": "rm"}));
        assert_eq!(
            asks(&mut ear, again),
            ("rm".to_owned(), json!({"command": "rm"})),
            "its id is used again"
        );
        assert_eq!(asks(&mut ear, fields()), (UNNAMED.to_owned(), json!({})));
    }

    #[test]
    fn a_tool_without_a_name_is_called_by_its_kind_and_only_then_by_its_title() {
        let mut ear = Ear::default();
        let call =
            |id: &'static str, kind| ToolCall::new(id, "Run `ls`").kind(kind).raw_input(json!({"a": 1}));
        let said = ear.hear(SessionUpdate::ToolCall(call("c", ToolKind::Execute)));
        assert_eq!(said, [started("c", "Bash", json!({"a": 1}))]);
        let said = ear.hear(SessionUpdate::ToolCall(call("d", ToolKind::Other)));
        assert_eq!(said, [started("d", "Run `ls`", json!({"a": 1}))]);
        let asking = ear.asked(ToolCallUpdate::new("c", ToolCallUpdateFields::new().title("Run `ls`")));
        assert_eq!((asking.tool.as_str(), asking.title.as_deref()), ("Bash", Some("Run `ls`")));
    }

    #[test]
    fn output_beyond_the_bound_is_told_once_however_often_it_is_repeated() {
        let mut ear = Ear::default();
        let (mut all, mut told) = ("x".repeat(INLINE_MAX), 0);
        for _ in 0..5 {
            all.push_str("more");
            for said in ear.hear(update(ToolCallUpdateFields::new().content(content(&all)))) {
                if let Said::ToolOutput { text, .. } = said {
                    told += text.len();
                }
            }
        }
        assert_eq!(told, all.len());
        let said = ear.hear(update(ToolCallUpdateFields::new().status(ToolCallStatus::Completed)));
        let note = json!(format!("[{} bytes, as told before]", all.len()));
        assert!(matches!(&said[..], [Said::ToolFinished { output, .. }] if *output == note), "{said:?}");
    }
}
