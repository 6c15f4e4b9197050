//! Turns an agent's session updates into what a session hears. It keeps what updates only hint at: which tool calls
//! are open, and the totals of which the session wants the increments.

use std::collections::HashMap;

use agent_client_protocol::v1::schema::{
    ContentBlock, EmbeddedResourceResource, Meta, Notice, Plan, SessionUpdate, ToolCallContent, ToolCallId,
    ToolCallStatus, ToolCallUpdate, ToolCallUpdateFields, Usage as TurnUsage, UsageUpdate,
};
use qd_protocol::event::{PlanEntry, Usage};
use qd_protocol::limits::INLINE_MAX;
use qd_protocol::link::Said;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::fit;

/// Tool calls that are remembered at once; an agent that opens more has its oldest forgotten with the turn.
const CALLS_MAX: usize = 4096;
/// Costs are counted in billionths of a dollar, so that the difference of two totals is a figure that people know.
const COST_UNIT: f64 = 1e9;

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
    totals: Totals,
}

/// One tool call.
#[derive(Debug, Default)]
struct Call {
    name: String,
    input: Option<Value>,
    /// What has been told as its output: agents repeat all of it each time.
    shown: String,
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

    /// A tool call that the agent asks about: what is to be told first, its name and its arguments.
    pub(super) fn asked(&mut self, update: ToolCallUpdate) -> (Vec<Said>, String, Value) {
        let id = update.tool_call_id.clone();
        let said = self.tool(update);
        match self.calls.get(&id) {
            Some(call) => (said, call.name.clone(), call.input.clone().unwrap_or_else(fit::nothing)),
            None => (said, UNNAMED.to_owned(), fit::nothing()),
        }
    }

    fn tool(&mut self, update: ToolCallUpdate) -> Vec<Said> {
        let ToolCallUpdate { tool_call_id, fields, .. } = update;
        if self.calls.len() >= CALLS_MAX && !self.calls.contains_key(&tool_call_id) {
            return Vec::new();
        }
        let call_id = fit::name(tool_call_id.to_string());
        self.calls.entry(tool_call_id).or_default().update(call_id, fields)
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
            totals.cost_usd = cost.amount.max(0.0);
        }
        self.count(totals)
    }

    /// What was used since the last report. A total that fell has been counted anew from nothing.
    fn count(&mut self, now: Totals) -> Option<Said> {
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

impl Call {
    fn update(&mut self, call_id: String, fields: ToolCallUpdateFields) -> Vec<Said> {
        if self.stage == Stage::Finished {
            return Vec::new();
        }
        let ToolCallUpdateFields { status, title, name, content, raw_input, raw_output, .. } = fields;
        if let Some(name) = name.or_else(|| title.filter(|_| self.name.is_empty())) {
            self.name = fit::name(name);
        }
        if let Some(input) = raw_input.filter(|input| !is_empty(input)) {
            self.input = Some(fit::value(input));
        }
        let output: String = content.unwrap_or_default().into_iter().map(output_of).collect();
        let goes_on = status.is_some_and(|status| status != ToolCallStatus::Pending);

        let mut said = Vec::new();
        // Some agents announce a call first and give its arguments later; then it starts when they are known.
        if self.stage == Stage::Announced && (self.input.is_some() || goes_on || !output.is_empty()) {
            self.stage = Stage::Started;
            if self.name.is_empty() {
                self.name = UNNAMED.to_owned();
            }
            let input = self.input.clone().unwrap_or_else(fit::nothing);
            said.push(Said::ToolStarted { call_id: call_id.clone(), name: self.name.clone(), input });
        }
        if let Some(text) = self.more(output) {
            said.push(Said::ToolOutput { call_id: call_id.clone(), text });
        }
        if let Some(status @ (ToolCallStatus::Completed | ToolCallStatus::Failed)) = status {
            self.stage = Stage::Finished;
            let shown = std::mem::take(&mut self.shown);
            let output = raw_output.or_else(|| (!shown.is_empty()).then_some(Value::String(shown)));
            said.push(Said::ToolFinished {
                call_id,
                name: self.name.clone(),
                output: fit::value(output.unwrap_or_default()),
                is_error: status == ToolCallStatus::Failed,
            });
        }
        said
    }

    /// What of the output is new.
    fn more(&mut self, output: String) -> Option<String> {
        let output = fit::text(output);
        let new = output.strip_prefix(self.shown.as_str()).unwrap_or(&output).to_owned();
        if new.is_empty() {
            return None;
        }
        self.shown = output;
        Some(new)
    }
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

/// As much of a plan as one event holds.
fn entries(plan: Plan) -> Vec<PlanEntry> {
    #[derive(Deserialize)]
    struct Status {
        status: String,
    }
    let mut left = INLINE_MAX;
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
    entries
        .take_while(|entry| {
            let size = serde_json::to_string(entry).map_or(usize::MAX, |json| json.len() + 1);
            let fits = size <= left;
            left = left.saturating_sub(size);
            fits
        })
        .collect()
}

fn notice_text(notice: Notice) -> String {
    fit::text(match notice.description {
        Some(description) => format!("{}: {description}", notice.title),
        None => notice.title,
    })
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
}
