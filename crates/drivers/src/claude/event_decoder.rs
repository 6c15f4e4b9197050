//! Turns the agent's messages into turn updates. It keeps the state that single lines leave out: which message was
//! streamed, so that it is not emitted again when it arrives whole, and which tool calls are open. Nothing is truncated
//! here.

use std::collections::VecDeque;

use qd_protocol::link::TurnUpdate;
use serde_json::{Map, Value};

use super::context::ClaudeContextMeter;
use super::messages::{ClaudeMessage, ClaudeTurnResult};
use super::task_list::ClaudeTaskList;
use super::usage::ClaudeUsageCounter;

/// The most open tool calls remembered; beyond that, the oldest is forgotten.
const CALLS_MAX: usize = 1024;
/// The most whole messages remembered. The agent may repeat some after it has compacted its conversation.
const EMITTED_MESSAGES_MAX: usize = 64;
/// The name of a tool whose call is unknown.
const UNNAMED_TOOL: &str = "tool";
/// The model name in messages that no model wrote: output of the program's own commands, and its errors.
const SYNTHETIC_MODEL: &str = "<synthetic>";
/// The tool that asks for approval of a plan. The plan is in its tool call and not in the permission request.
const PLAN_TOOL: &str = "ExitPlanMode";

/// Decodes the messages of one conversation.
#[derive(Debug, Default)]
pub(super) struct ClaudeEventDecoder {
    usage: ClaudeUsageCounter,
    context: ClaudeContextMeter,
    /// The message that is being streamed, or was last.
    streamed: ClaudeStreamedMessage,
    /// The line UUIDs of whole messages that were emitted, newest last.
    emitted_messages: VecDeque<String>,
    /// Ids and tool names of unfinished calls, newest last.
    open_calls: VecDeque<(String, String)>,
    tasks: ClaudeTaskList,
    /// The plan that waits for approval.
    plan: Option<String>,
}

/// Which parts of a message were already streamed.
#[derive(Debug, Default)]
struct ClaudeStreamedMessage {
    id: String,
    text: bool,
    thought: bool,
}

impl ClaudeEventDecoder {
    pub(super) fn new(usage: ClaudeUsageCounter) -> Self {
        Self { usage, ..Self::default() }
    }

    /// Decodes one message. Most yield no update.
    pub(super) fn decode(&mut self, message: ClaudeMessage) -> Vec<TurnUpdate> {
        match message {
            ClaudeMessage::StreamEvent { event, by_subagent: false } => self.decode_stream_event(&event),
            ClaudeMessage::Assistant { line, by_subagent } => self.decode_message(line, by_subagent),
            ClaudeMessage::User { content: Value::Array(blocks) } => {
                blocks.into_iter().flat_map(|block| self.tool_finished(block)).collect()
            }
            ClaudeMessage::System { subtype, line } if subtype == "compact_boundary" => {
                vec![TurnUpdate::Compacted { used_before: line["compact_metadata"]["pre_tokens"].as_u64() }]
            }
            ClaudeMessage::System { subtype, line } => system_notice(&subtype, &line).into_iter().collect(),
            _ => Vec::new(),
        }
    }

    /// Decodes a message between turns. Nobody waits for pieces then, so every message is emitted whole.
    pub(super) fn decode_between_turns(&mut self, message: ClaudeMessage) -> Vec<TurnUpdate> {
        match message {
            ClaudeMessage::StreamEvent { event, .. } if event["type"] == "content_block_delta" => Vec::new(),
            message => self.decode(message),
        }
    }

    /// The usage that the result adds to what was counted, and how full the context is.
    pub(super) fn count_result(&mut self, result: &ClaudeTurnResult) -> Vec<TurnUpdate> {
        let usage = self.usage.count_result(result);
        let context = self.context.apply_result(result).map(TurnUpdate::Context);
        usage.into_iter().chain(context).collect()
    }

    /// The plan to approve, if `tool` is the one that asks for it.
    pub(super) fn plan_for(&self, tool: &str) -> Option<&str> {
        self.plan.as_deref().filter(|_| tool == PLAN_TOOL)
    }

    fn decode_stream_event(&mut self, event: &Value) -> Vec<TurnUpdate> {
        match event["type"].as_str() {
            Some("message_start") => {
                let message = &event["message"];
                let id = message["id"].as_str().unwrap_or_default().to_owned();
                self.streamed = ClaudeStreamedMessage { id, text: false, thought: false };
                [TurnUpdate::ModelCall].into_iter().chain(self.start_call(message)).collect()
            }
            Some("message_delta") => self.update_call(&event["usage"]),
            Some("content_block_delta") => self.decode_delta(&event["delta"]).into_iter().collect(),
            _ => Vec::new(),
        }
    }

    /// Counts a new model call.
    fn start_call(&mut self, message: &Value) -> Vec<TurnUpdate> {
        self.context.set_model(message["model"].as_str().unwrap_or_default());
        self.usage.start_call(message).into_iter().collect()
    }

    /// Counts a later report of the same call.
    fn update_call(&mut self, usage: &Value) -> Vec<TurnUpdate> {
        let usage = self.usage.update_call(usage);
        let context = self.context.record_used(self.usage.current_call_tokens()).map(TurnUpdate::Context);
        usage.into_iter().chain(context).collect()
    }

    fn decode_delta(&mut self, delta: &Value) -> Option<TurnUpdate> {
        let text_of = |name: &str| delta[name].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        match delta["type"].as_str()? {
            "text_delta" => {
                self.streamed.text = true;
                Some(TurnUpdate::Text { text: text_of("text")? })
            }
            "thinking_delta" => {
                self.streamed.thought = true;
                Some(TurnUpdate::Thought { text: text_of("thinking")? })
            }
            _ => None,
        }
    }

    /// Decodes a whole message, and emits only the parts that were not streamed. Tool calls of subagents are shown;
    /// their text is not part of the answer.
    fn decode_message(&mut self, mut line: Value, by_subagent: bool) -> Vec<TurnUpdate> {
        let mut message = line["message"].take();
        let (mut text, mut thought) = (!by_subagent, !by_subagent);
        let mut updates = Vec::new();
        // The error is reported by the result.
        if line["is_api_error_message"] == true || line["error"].is_string() {
            return updates;
        }
        let id = message["id"].as_str().unwrap_or_default();
        if !by_subagent && id == self.streamed.id {
            (text, thought) = (!self.streamed.text, !self.streamed.thought);
        } else if !by_subagent {
            if !self.is_new_message(&line["uuid"]) {
                return updates;
            }
            // No part of this message was streamed, so its usage was not counted.
            self.streamed = ClaudeStreamedMessage { id: id.to_owned(), text: false, thought: false };
            if message["model"] != SYNTHETIC_MODEL {
                updates.push(TurnUpdate::ModelCall);
                updates.extend(self.start_call(&message));
            }
        }
        let Value::Array(blocks) = message["content"].take() else { return updates };
        for mut block in blocks {
            let kind = block["type"].as_str().unwrap_or_default().to_owned();
            match kind.as_str() {
                "text" if text => {
                    updates.extend(non_empty_text(&block["text"]).map(|text| TurnUpdate::Text { text }))
                }
                "thinking" if thought => {
                    updates
                        .extend(non_empty_text(&block["thinking"]).map(|text| TurnUpdate::Thought { text }));
                }
                kind if kind.ends_with("tool_use") => updates.extend(self.tool_started(&mut block)),
                _ => updates.extend(self.tool_finished(block)),
            }
        }
        updates
    }

    fn is_new_message(&mut self, uuid: &Value) -> bool {
        let Some(uuid) = uuid.as_str() else { return true };
        if self.emitted_messages.iter().any(|known| known == uuid) {
            return false;
        }
        if self.emitted_messages.len() >= EMITTED_MESSAGES_MAX {
            self.emitted_messages.pop_front();
        }
        self.emitted_messages.push_back(uuid.to_owned());
        true
    }

    fn tool_started(&mut self, block: &mut Value) -> Vec<TurnUpdate> {
        let Some(call_id) = non_empty_text(&block["id"]) else { return Vec::new() };
        let name = non_empty_text(&block["name"]).unwrap_or_else(|| UNNAMED_TOOL.to_owned());
        let input = match block["input"].take() {
            Value::Null => Value::Object(Map::new()),
            input => input,
        };
        if self.open_calls.len() >= CALLS_MAX {
            self.open_calls.pop_front();
        }
        self.open_calls.push_back((call_id.clone(), name.clone()));
        let plan = self.tasks.start_call(&call_id, &name, &input);
        if name == PLAN_TOOL {
            self.plan = non_empty_text(&input["plan"]);
        }
        let started = TurnUpdate::ToolStarted { call_id, name, input };
        [started].into_iter().chain(plan.map(|entries| TurnUpdate::Plan { entries })).collect()
    }

    fn tool_finished(&mut self, mut block: Value) -> Vec<TurnUpdate> {
        let is_result = block["type"].as_str().is_some_and(|kind| kind.ends_with("tool_result"));
        let Some(call_id) = non_empty_text(&block["tool_use_id"]).filter(|_| is_result) else {
            return Vec::new();
        };
        let index = self.open_calls.iter().position(|(id, _)| *id == call_id);
        let name = index
            .and_then(|at| self.open_calls.remove(at))
            .map_or_else(|| UNNAMED_TOOL.to_owned(), |call| call.1);
        let is_error = block["is_error"] == true;
        let output = tool_output(block["content"].take());
        let plan = self.tasks.finish_call(&call_id, &output, is_error);
        let finished = TurnUpdate::ToolFinished { call_id, name, output, is_error };
        [finished].into_iter().chain(plan.map(|entries| TurnUpdate::Plan { entries })).collect()
    }
}

/// The notice for a message from the program itself.
fn system_notice(subtype: &str, line: &Value) -> Option<TurnUpdate> {
    let text = match subtype {
        "api_retry" => {
            let reason = non_empty_text(&line["error"]).unwrap_or_else(|| "an error".to_owned());
            let status =
                line["error_status"].as_u64().map(|status| format!(" ({status})")).unwrap_or_default();
            let (attempt, max_retries) =
                (line["attempt"].as_u64()?, line["max_retries"].as_u64().unwrap_or_default());
            format!(
                "the model could not be reached: {reason}{status}; the agent is retrying ({attempt} of {max_retries})"
            )
        }
        "informational" => non_empty_text(&line["content"])?,
        _ => return None,
    };
    Some(TurnUpdate::notice(text))
}

/// The output of a tool: one text if it has only text and media, otherwise the blocks. Media are replaced by their type
/// in brackets.
fn tool_output(content: Value) -> Value {
    let Value::Array(blocks) = content else { return content };
    let parts = blocks.into_iter().map(|mut block| match block["type"].as_str() {
        Some("text") => Ok(non_empty_text(&block["text"]).unwrap_or_default()),
        Some("image" | "document") => {
            Ok(format!("[{}]", block["source"]["media_type"].as_str().unwrap_or("a file")))
        }
        _ => Err(block.take()),
    });
    let parts: Vec<_> = parts.collect();
    if parts.iter().all(Result::is_ok) {
        let text: Vec<_> = parts.into_iter().filter_map(Result::ok).collect();
        return text.join("\n").into();
    }
    parts.into_iter().map(|block| block.map_or_else(|other| other, Value::from)).collect()
}

fn non_empty_text(value: &Value) -> Option<String> {
    value.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use qd_protocol::event::PlanEntry;
    use serde_json::json;

    use super::super::task_list::TODO_TOOL;
    use super::*;

    fn decode_line(decoder: &mut ClaudeEventDecoder, line: Value) -> Vec<TurnUpdate> {
        decoder.decode(ClaudeMessage::parse(line.to_string().as_bytes()).expect("a message"))
    }

    fn stream_event(event: Value) -> Value {
        json!({"type": "stream_event", "event": event, "parent_tool_use_id": null})
    }

    fn message_start(id: &str) -> Value {
        stream_event(json!({"type": "message_start", "message": {"id": id, "model": "m"}}))
    }

    fn text_delta(text: &str) -> Value {
        stream_event(json!({"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}))
    }

    fn assistant_message(id: &str, block: Value) -> Value {
        json!({"type": "assistant", "message": {"id": id, "model": "m", "content": [block]}, "uuid": format!("line-{id}")})
    }

    fn text(text: &str) -> TurnUpdate {
        TurnUpdate::Text { text: text.to_owned() }
    }

    #[test]
    fn streamed_text_is_not_emitted_again_and_other_text_is_emitted_once() {
        let mut decoder = ClaudeEventDecoder::default();
        assert_eq!(decode_line(&mut decoder, message_start("a")), [TurnUpdate::ModelCall]);
        assert_eq!(decode_line(&mut decoder, text_delta("he")), [text("he")]);
        assert_eq!(decode_line(&mut decoder, text_delta("llo")), [text("llo")]);
        assert_eq!(
            decode_line(&mut decoder, assistant_message("a", json!({"type": "text", "text": "hello"}))),
            []
        );
        let late = assistant_message("a", json!({"type": "thinking", "thinking": "hm"}));
        assert_eq!(
            decode_line(&mut decoder, late),
            [TurnUpdate::Thought { text: "hm".to_owned() }],
            "only text was streamed"
        );
        let other = assistant_message("b", json!({"type": "text", "text": "again"}));
        assert_eq!(decode_line(&mut decoder, other.clone()), [TurnUpdate::ModelCall, text("again")]);
        decode_line(&mut decoder, message_start("c"));
        assert_eq!(decode_line(&mut decoder, other), [], "the same line once more");
    }

    #[test]
    fn messages_between_turns_are_emitted_whole() {
        let mut decoder = ClaudeEventDecoder::default();
        let mut decode = |line: Value| {
            decoder
                .decode_between_turns(ClaudeMessage::parse(line.to_string().as_bytes()).expect("a message"))
        };
        assert_eq!(decode(message_start("a")), [TurnUpdate::ModelCall]);
        assert_eq!(decode(text_delta("he")), []);
        assert_eq!(decode(assistant_message("a", json!({"type": "text", "text": "hello"}))), [text("hello")]);
    }

    #[test]
    fn an_error_of_the_model_is_no_part_of_the_answer() {
        let mut decoder = ClaudeEventDecoder::default();
        let mut line = assistant_message("a", json!({"type": "text", "text": "API Error: 400"}));
        line["is_api_error_message"] = json!(true);
        assert_eq!(decode_line(&mut decoder, line), []);
    }

    #[test]
    fn the_tools_of_a_subagent_are_shown_and_its_text_is_not_part_of_the_answer() {
        let mut decoder = ClaudeEventDecoder::default();
        let mut text_line = assistant_message("a", json!({"type": "text", "text": "inner"}));
        text_line["parent_tool_use_id"] = json!("t0");
        assert_eq!(decode_line(&mut decoder, text_line), []);
        let mut tool_line = assistant_message(
            "a",
            json!({"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}),
        );
        tool_line["parent_tool_use_id"] = json!("t0");
        let started = TurnUpdate::ToolStarted {
            call_id: "t1".to_owned(),
            name: "Bash".to_owned(),
            input: json!({"command": "ls"}),
        };
        assert_eq!(decode_line(&mut decoder, tool_line), [started]);
        let mut piece = text_delta("inner");
        piece["parent_tool_use_id"] = json!("t0");
        assert_eq!(decode_line(&mut decoder, piece), []);
    }

    #[test]
    fn a_tool_ends_under_the_name_that_it_began_with() {
        let mut decoder = ClaudeEventDecoder::default();
        decode_line(
            &mut decoder,
            assistant_message("a", json!({"type": "tool_use", "id": "t", "name": "Read", "input": {}})),
        );
        let tool_result = |content: Value, is_error: bool| {
            let block =
                json!({"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": is_error});
            json!({"type": "user", "message": {"content": [{"type": "text", "text": "for the model"}, block]}})
        };
        let finished = |name: &str, output: Value, is_error| TurnUpdate::ToolFinished {
            call_id: "t".to_owned(),
            name: name.to_owned(),
            output,
            is_error,
        };
        let blocks = json!([{"type": "text", "text": "one"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}]);
        assert_eq!(
            decode_line(&mut decoder, tool_result(blocks, false)),
            [finished("Read", json!("one\n[image/png]"), false)]
        );
        assert_eq!(
            decode_line(&mut decoder, tool_result(json!("no"), true)),
            [finished(UNNAMED_TOOL, json!("no"), true)],
            "it had ended"
        );
        let replay =
            json!({"type": "user", "message": {"content": "<local-command-stdout>"}, "isReplay": true});
        assert_eq!(decode_line(&mut decoder, replay), []);
    }

    #[test]
    fn a_todo_list_is_also_the_plan() {
        let mut decoder = ClaudeEventDecoder::default();
        let input = json!({"todos": [{"content": "one", "status": "in_progress", "activeForm": "Doing"}]});
        let updates = decode_line(
            &mut decoder,
            assistant_message("a", json!({"type": "tool_use", "id": "t", "name": TODO_TOOL, "input": input})),
        );
        let entries = vec![PlanEntry { content: "one".to_owned(), status: "in_progress".to_owned() }];
        assert_eq!(updates[2], TurnUpdate::Plan { entries });
        decode_line(
            &mut decoder,
            assistant_message(
                "b",
                json!({"type": "tool_use", "id": "u", "name": PLAN_TOOL, "input": {"plan": "do it"}}),
            ),
        );
        assert_eq!((decoder.plan_for(PLAN_TOOL), decoder.plan_for("Bash")), (Some("do it"), None));
    }

    #[test]
    fn retries_become_notices_and_unknown_messages_are_ignored() {
        let mut decoder = ClaudeEventDecoder::default();
        let retry = json!({"type": "system", "subtype": "api_retry", "attempt": 1, "max_retries": 10,
            "error_status": 529, "error": "overloaded"});
        let updates = decode_line(&mut decoder, retry);
        assert!(
            matches!(&updates[..], [TurnUpdate::Notice { text, .. }] if text.contains("overloaded (529)")),
            "{updates:?}"
        );
        assert_eq!(decode_line(&mut decoder, json!({"type": "system", "subtype": "thinking_tokens"})), []);
        assert_eq!(decode_line(&mut decoder, json!({"type": "rate_limit_event"})), []);
    }

    #[test]
    fn unfinished_calls_are_bounded() {
        let mut decoder = ClaudeEventDecoder::default();
        for n in 0..CALLS_MAX + 5 {
            let call = json!({"type": "tool_use", "id": format!("t{n}"), "name": "Bash", "input": null});
            assert_eq!(
                decode_line(&mut decoder, assistant_message("a", call))
                    .iter()
                    .filter(|update| matches!(update, TurnUpdate::ToolStarted { .. }))
                    .count(),
                1
            );
        }
        assert_eq!(decoder.open_calls.len(), CALLS_MAX);
    }
}
