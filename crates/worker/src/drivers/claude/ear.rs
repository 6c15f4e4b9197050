//! Turns what the agent writes into what a session hears. It keeps what lines only hint at: which message is being
//! streamed, so that the whole of it is not told again, and which tool calls are open. Nothing is cut here.

use std::collections::VecDeque;

use qd_protocol::event::PlanEntry;
use qd_protocol::link::Said;
use serde_json::{Map, Value};

use super::tally::Tally;
use super::words::{TurnResult, Word};

/// Tool calls that are remembered at once; when there are more, the oldest is forgotten.
const CALLS_MAX: usize = 1024;
/// Whole messages that are remembered, since the agent may repeat some after it has shortened its conversation.
const WHOLE_MAX: usize = 64;
/// The name of a tool whose call nobody has heard of.
const UNNAMED: &str = "tool";
/// The model of messages that no model has made: of the program's own commands, and of its errors.
const NO_MODEL: &str = "<synthetic>";
/// The tool whose arguments are the agent's plan, all of it each time.
const TODO: &str = "TodoWrite";
/// The tool that asks for a plan to be allowed. What it asks for is in its call, and not in the request.
const PLAN: &str = "ExitPlanMode";

/// What is known of a conversation beyond its text.
#[derive(Debug, Default)]
pub(super) struct Ear {
    tally: Tally,
    /// The message that is streamed, or was last.
    streamed: Streamed,
    /// The lines of whole messages that were told, newest last.
    whole: VecDeque<String>,
    /// Calls of which the end has not been heard, and their tools; newest last.
    calls: VecDeque<(String, String)>,
    /// The plan that the agent asks to be allowed.
    plan: Option<String>,
}

/// A message that comes in pieces.
#[derive(Debug, Default)]
struct Streamed {
    id: String,
    text: bool,
    thought: bool,
}

impl Ear {
    /// With what has been counted so far.
    pub(super) fn new(tally: Tally) -> Self {
        Self { tally, ..Self::default() }
    }

    /// What a word says to a session; most say nothing.
    pub(super) fn hear(&mut self, word: Word) -> Vec<Said> {
        match word {
            Word::Stream { event, by_helper: false } => self.event(&event),
            Word::Message { line, by_helper } => self.message(line, by_helper),
            Word::ToModel { content: Value::Array(blocks) } => {
                blocks.into_iter().filter_map(|block| self.tool_ended(block)).collect()
            }
            Word::System { subtype, line } => notice(&subtype, &line).into_iter().collect(),
            _ => Vec::new(),
        }
    }

    /// The same while no turn runs: nobody waits for pieces, so every message is told whole.
    pub(super) fn hear_late(&mut self, word: Word) -> Vec<Said> {
        match word {
            Word::Stream { event, .. } if event["type"] == "content_block_delta" => Vec::new(),
            word => self.hear(word),
        }
    }

    /// What a turn's end adds to what was counted.
    pub(super) fn settle(&mut self, result: &TurnResult) -> Option<Said> {
        self.tally.settle(result)
    }

    /// The plan that this tool asks to be allowed, if it is the one that does.
    pub(super) fn plan_for(&self, tool: &str) -> Option<&str> {
        self.plan.as_deref().filter(|_| tool == PLAN)
    }

    fn event(&mut self, event: &Value) -> Vec<Said> {
        match event["type"].as_str() {
            Some("message_start") => {
                let message = &event["message"];
                let id = message["id"].as_str().unwrap_or_default().to_owned();
                self.streamed = Streamed { id, text: false, thought: false };
                [Said::Turn].into_iter().chain(self.tally.call(message)).collect()
            }
            Some("message_delta") => self.tally.more(&event["usage"]).into_iter().collect(),
            Some("content_block_delta") => self.piece(&event["delta"]).into_iter().collect(),
            _ => Vec::new(),
        }
    }

    fn piece(&mut self, delta: &Value) -> Option<Said> {
        let words = |name: &str| delta[name].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        match delta["type"].as_str()? {
            "text_delta" => {
                self.streamed.text = true;
                Some(Said::Text { text: words("text")? })
            }
            "thinking_delta" => {
                self.streamed.thought = true;
                Some(Said::Thought { text: words("thinking")? })
            }
            _ => None,
        }
    }

    /// A whole message, of which only what did not come in pieces is news. Tools are shown whoever uses them; the words
    /// of a helper are no part of the answer.
    fn message(&mut self, mut line: Value, by_helper: bool) -> Vec<Said> {
        let mut message = line["message"].take();
        let (mut text, mut thought) = (!by_helper, !by_helper);
        let mut said = Vec::new();
        // An error is told by the result.
        if line["is_api_error_message"] == true || line["error"].is_string() {
            return said;
        }
        let id = message["id"].as_str().unwrap_or_default();
        if !by_helper && id == self.streamed.id {
            (text, thought) = (!self.streamed.text, !self.streamed.thought);
        } else if !by_helper {
            if !self.is_new(&line["uuid"]) {
                return said;
            }
            // No part of this was streamed, and so nobody has counted it.
            self.streamed = Streamed { id: id.to_owned(), text: false, thought: false };
            if message["model"] != NO_MODEL {
                said.push(Said::Turn);
                said.extend(self.tally.call(&message));
            }
        }
        let Value::Array(blocks) = message["content"].take() else { return said };
        for mut block in blocks {
            let kind = block["type"].as_str().unwrap_or_default().to_owned();
            match kind.as_str() {
                "text" if text => said.extend(words(&block["text"]).map(|text| Said::Text { text })),
                "thinking" if thought => {
                    said.extend(words(&block["thinking"]).map(|text| Said::Thought { text }));
                }
                kind if kind.ends_with("tool_use") => said.extend(self.tool_began(&mut block)),
                _ => said.extend(self.tool_ended(block)),
            }
        }
        said
    }

    fn is_new(&mut self, uuid: &Value) -> bool {
        let Some(uuid) = uuid.as_str() else { return true };
        if self.whole.iter().any(|known| known == uuid) {
            return false;
        }
        if self.whole.len() >= WHOLE_MAX {
            self.whole.pop_front();
        }
        self.whole.push_back(uuid.to_owned());
        true
    }

    fn tool_began(&mut self, block: &mut Value) -> Vec<Said> {
        let Some(call_id) = words(&block["id"]) else { return Vec::new() };
        let name = words(&block["name"]).unwrap_or_else(|| UNNAMED.to_owned());
        let input = match block["input"].take() {
            Value::Null => Value::Object(Map::new()),
            input => input,
        };
        if self.calls.len() >= CALLS_MAX {
            self.calls.pop_front();
        }
        self.calls.push_back((call_id.clone(), name.clone()));
        let plan = (name == TODO).then(|| entries(&input)).flatten();
        if name == PLAN {
            self.plan = words(&input["plan"]);
        }
        let started = Said::ToolStarted { call_id, name, input };
        [started].into_iter().chain(plan.map(|entries| Said::Plan { entries })).collect()
    }

    fn tool_ended(&mut self, mut block: Value) -> Option<Said> {
        if !block["type"].as_str()?.ends_with("tool_result") {
            return None;
        }
        let call_id = words(&block["tool_use_id"])?;
        let known = self.calls.iter().position(|(id, _)| *id == call_id);
        let name =
            known.and_then(|at| self.calls.remove(at)).map_or_else(|| UNNAMED.to_owned(), |call| call.1);
        let is_error = block["is_error"] == true;
        Some(Said::ToolFinished { call_id, name, output: output(block["content"].take()), is_error })
    }
}

/// What the program itself tells people.
fn notice(subtype: &str, line: &Value) -> Option<Said> {
    let text = match subtype {
        "api_retry" => {
            let why = words(&line["error"]).unwrap_or_else(|| "an error".to_owned());
            let status =
                line["error_status"].as_u64().map(|status| format!(" ({status})")).unwrap_or_default();
            let (attempt, most) =
                (line["attempt"].as_u64()?, line["max_retries"].as_u64().unwrap_or_default());
            format!(
                "the model could not be reached: {why}{status}; the agent tries again, {attempt} of {most}"
            )
        }
        "informational" => words(&line["content"])?,
        "compact_boundary" => "the agent has shortened its conversation".to_owned(),
        _ => return None,
    };
    Some(Said::Notice { text })
}

fn entries(input: &Value) -> Option<Vec<PlanEntry>> {
    let entry = |todo: &Value| {
        Some(PlanEntry {
            content: words(&todo["content"])?,
            status: words(&todo["status"]).unwrap_or_default(),
        })
    };
    input["todos"].as_array()?.iter().map(entry).collect()
}

/// What a tool gave: text if it is nothing else, and what is not text by its kind alone.
fn output(content: Value) -> Value {
    let Value::Array(blocks) = content else { return content };
    let shown = blocks.into_iter().map(|mut block| match block["type"].as_str() {
        Some("text") => Ok(words(&block["text"]).unwrap_or_default()),
        Some("image" | "document") => {
            Ok(format!("[{}]", block["source"]["media_type"].as_str().unwrap_or("a file")))
        }
        _ => Err(block.take()),
    });
    let shown: Vec<_> = shown.collect();
    if shown.iter().all(Result::is_ok) {
        let text: Vec<_> = shown.into_iter().filter_map(Result::ok).collect();
        return text.join("\n").into();
    }
    shown.into_iter().map(|block| block.map_or_else(|other| other, Value::from)).collect()
}

fn words(value: &Value) -> Option<String> {
    value.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn hear(ear: &mut Ear, line: Value) -> Vec<Said> {
        ear.hear(Word::read(line.to_string().as_bytes()).expect("a message"))
    }

    fn event(event: Value) -> Value {
        json!({"type": "stream_event", "event": event, "parent_tool_use_id": null})
    }

    fn starts(id: &str) -> Value {
        event(json!({"type": "message_start", "message": {"id": id, "model": "m"}}))
    }

    fn delta(text: &str) -> Value {
        event(json!({"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}))
    }

    fn whole(id: &str, block: Value) -> Value {
        json!({"type": "assistant", "message": {"id": id, "model": "m", "content": [block]}, "uuid": format!("line-{id}")})
    }

    fn text(text: &str) -> Said {
        Said::Text { text: text.to_owned() }
    }

    #[test]
    fn streamed_text_is_not_told_again_and_text_that_was_not_streamed_is_told_once() {
        let mut ear = Ear::default();
        assert_eq!(hear(&mut ear, starts("a")), [Said::Turn]);
        assert_eq!(hear(&mut ear, delta("he")), [text("he")]);
        assert_eq!(hear(&mut ear, delta("llo")), [text("llo")]);
        assert_eq!(hear(&mut ear, whole("a", json!({"type": "text", "text": "hello"}))), []);
        let late = whole("a", json!({"type": "thinking", "thinking": "hm"}));
        assert_eq!(hear(&mut ear, late), [Said::Thought { text: "hm".to_owned() }], "only text was streamed");
        let other = whole("b", json!({"type": "text", "text": "again"}));
        assert_eq!(hear(&mut ear, other.clone()), [Said::Turn, text("again")]);
        hear(&mut ear, starts("c"));
        assert_eq!(hear(&mut ear, other), [], "the same line once more");
    }

    #[test]
    fn what_nobody_waits_for_is_told_whole() {
        let mut ear = Ear::default();
        let mut late =
            |line: Value| ear.hear_late(Word::read(line.to_string().as_bytes()).expect("a message"));
        assert_eq!(late(starts("a")), [Said::Turn]);
        assert_eq!(late(delta("he")), []);
        assert_eq!(late(whole("a", json!({"type": "text", "text": "hello"}))), [text("hello")]);
    }

    #[test]
    fn an_error_of_the_model_is_no_part_of_the_answer() {
        let mut ear = Ear::default();
        let mut line = whole("a", json!({"type": "text", "text": "API Error: 400"}));
        line["is_api_error_message"] = json!(true);
        assert_eq!(hear(&mut ear, line), []);
    }

    #[test]
    fn the_tools_of_a_helper_are_shown_and_its_words_are_not_counted_as_the_answer() {
        let mut ear = Ear::default();
        let mut said = whole("a", json!({"type": "text", "text": "inner"}));
        said["parent_tool_use_id"] = json!("t0");
        assert_eq!(hear(&mut ear, said), []);
        let mut used =
            whole("a", json!({"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}));
        used["parent_tool_use_id"] = json!("t0");
        let started = Said::ToolStarted {
            call_id: "t1".to_owned(),
            name: "Bash".to_owned(),
            input: json!({"command": "ls"}),
        };
        assert_eq!(hear(&mut ear, used), [started]);
        let mut piece = delta("inner");
        piece["parent_tool_use_id"] = json!("t0");
        assert_eq!(hear(&mut ear, piece), []);
    }

    #[test]
    fn a_tool_ends_under_the_name_that_it_began_with() {
        let mut ear = Ear::default();
        hear(&mut ear, whole("a", json!({"type": "tool_use", "id": "t", "name": "Read", "input": {}})));
        let gave = |content: Value, is_error: bool| {
            let block =
                json!({"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": is_error});
            json!({"type": "user", "message": {"content": [{"type": "text", "text": "for the model"}, block]}})
        };
        let ended = |name: &str, output: Value, is_error| Said::ToolFinished {
            call_id: "t".to_owned(),
            name: name.to_owned(),
            output,
            is_error,
        };
        let blocks = json!([{"type": "text", "text": "one"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}]);
        assert_eq!(hear(&mut ear, gave(blocks, false)), [ended("Read", json!("one\n[image/png]"), false)]);
        assert_eq!(
            hear(&mut ear, gave(json!("no"), true)),
            [ended(UNNAMED, json!("no"), true)],
            "it had ended"
        );
        let replay =
            json!({"type": "user", "message": {"content": "<local-command-stdout>"}, "isReplay": true});
        assert_eq!(hear(&mut ear, replay), []);
    }

    #[test]
    fn a_list_of_things_to_do_is_also_the_plan() {
        let mut ear = Ear::default();
        let input = json!({"todos": [{"content": "one", "status": "in_progress", "activeForm": "Doing"}]});
        let said =
            hear(&mut ear, whole("a", json!({"type": "tool_use", "id": "t", "name": TODO, "input": input})));
        let entries = vec![PlanEntry { content: "one".to_owned(), status: "in_progress".to_owned() }];
        assert_eq!(said[2], Said::Plan { entries });
        hear(
            &mut ear,
            whole("b", json!({"type": "tool_use", "id": "u", "name": PLAN, "input": {"plan": "do it"}})),
        );
        assert_eq!((ear.plan_for(PLAN), ear.plan_for("Bash")), (Some("do it"), None));
    }

    #[test]
    fn retries_are_noticed_and_what_is_unknown_is_not() {
        let mut ear = Ear::default();
        let retry = json!({"type": "system", "subtype": "api_retry", "attempt": 1, "max_retries": 10,
            "error_status": 529, "error": "overloaded"});
        let said = hear(&mut ear, retry);
        assert!(
            matches!(&said[..], [Said::Notice { text }] if text.contains("overloaded (529)")),
            "{said:?}"
        );
        assert_eq!(hear(&mut ear, json!({"type": "system", "subtype": "thinking_tokens"})), []);
        assert_eq!(hear(&mut ear, json!({"type": "rate_limit_event"})), []);
    }

    #[test]
    fn calls_without_an_end_are_not_kept_without_bound() {
        let mut ear = Ear::default();
        for n in 0..CALLS_MAX + 5 {
            let call = json!({"type": "tool_use", "id": format!("t{n}"), "name": "Bash", "input": null});
            assert_eq!(
                hear(&mut ear, whole("a", call))
                    .iter()
                    .filter(|said| matches!(said, Said::ToolStarted { .. }))
                    .count(),
                1
            );
        }
        assert_eq!(ear.calls.len(), CALLS_MAX);
    }
}
