//! Removes secrets from everything an agent reports, before it is numbered or stored, and then makes each update fit
//! its event. A secret that arrives in pieces is found as well: the end of a piece that may be the beginning of a
//! secret is held back until more of its stream arrives, whatever comes in between, or until the stream is over. What an
//! agent said before it asks a person is over.
//!
//! Design: docs/design/redact-then-fit.md

mod dumped_bytes;
mod escaped_text;
mod secret_forms;
mod secret_variables;
mod secrets;
mod wrapped_base64;

use std::collections::BTreeMap;

use qd_link::AgentOutputFilter;
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::limits::INLINE_MAX;
use qd_protocol::link::{AgentExitReason, AgentUpdate, AskRequest, TurnOutcome, TurnUpdate};
use qd_protocol::text::{escaped_head, escaped_len};
use serde_json::Value;

use qd_link::event_size;
use secrets::RedactionMark;
pub use secrets::SecretMatcher;

/// Appended to the output of a tool that printed too much.
const CUT_NOTICE: &str = "\n[cut: the rest of the output is left out]";

/// The output filter of one agent.
#[derive(Debug)]
pub struct Redactor {
    secrets: SecretMatcher,
    /// The streams that may go on. Text that arrives after a turn is a stream too, which the next turn ends.
    streams: BTreeMap<TextStreamKey, TextStreamTail>,
}

impl Redactor {
    /// A filter that removes these secrets.
    pub fn new_filter(secrets: SecretMatcher) -> Box<dyn AgentOutputFilter> {
        Box::new(Self { secrets, streams: BTreeMap::new() })
    }

    fn redact_piece(&mut self, stream: TextStreamKey, text: String, out: &mut Vec<AgentUpdate>) {
        let tail = self.streams.entry(stream.clone()).or_default();
        let text = if tail.held.is_empty() { text } else { std::mem::take(&mut tail.held) + &text };
        let found = self.secrets.redact_start(&text, tail.mark.take());
        text[found.undecided_from..].clone_into(&mut tail.held);
        tail.mark = found.mark;
        out.extend(tail.next_update(stream, found.text));
    }

    /// Releases the held text of the streams that are over.
    fn flush_streams(&mut self, is_over: impl Fn(&TextStreamKey) -> bool, out: &mut Vec<AgentUpdate>) {
        let over: Vec<TextStreamKey> =
            self.streams.keys().filter(|stream| is_over(stream)).cloned().collect();
        for stream in over {
            if let Some(mut tail) = self.streams.remove(&stream) {
                let text = self.secrets.redact_end(&tail.held, tail.mark.take());
                out.extend(tail.next_update(stream, text));
            }
        }
    }
}

impl AgentOutputFilter for Redactor {
    fn filter_update(&mut self, mut update: AgentUpdate, out: &mut Vec<AgentUpdate>) {
        match &update {
            AgentUpdate::Turn { run, .. }
            | AgentUpdate::Ask { run, .. }
            | AgentUpdate::TurnEnded { run, .. } => {
                self.flush_streams(|stream| stream.run != *run, out);
            }
            AgentUpdate::Ready { .. }
            | AgentUpdate::Confined(_)
            | AgentUpdate::IdleStopped
            | AgentUpdate::Gone(_) => self.flush_streams(|_| true, out),
            AgentUpdate::AskWithdrawn { .. }
            | AgentUpdate::AskDelivered { .. }
            | AgentUpdate::SteerTaken { .. }
            | AgentUpdate::SteerMissed { .. } => {}
        }
        match update {
            AgentUpdate::Turn { run, update: TurnUpdate::Text { text } } => {
                return self.redact_piece(TextStreamKey { run, kind: TextStreamKind::Text }, text, out);
            }
            AgentUpdate::Turn { run, update: TurnUpdate::Thought { text } } => {
                return self.redact_piece(TextStreamKey { run, kind: TextStreamKind::Thought }, text, out);
            }
            AgentUpdate::Turn { run, update: TurnUpdate::ToolOutput { mut call_id, text } } => {
                self.secrets.redact_in_place(&mut call_id);
                return self.redact_piece(
                    TextStreamKey { run, kind: TextStreamKind::ToolOutput(call_id) },
                    text,
                    out,
                );
            }
            _ => {}
        }
        self.secrets.redact_update(&mut update);
        match &update {
            // The agent now waits for a person, who has to see the whole of what it said before.
            AgentUpdate::Ask { .. } => self.flush_streams(TextStreamKey::is_said, out),
            AgentUpdate::Turn { update: TurnUpdate::ToolFinished { call_id, .. }, .. } => {
                self.flush_streams(
                    |stream| matches!(&stream.kind, TextStreamKind::ToolOutput(id) if id == call_id),
                    out,
                );
            }
            AgentUpdate::TurnEnded { .. } => self.flush_streams(|_| true, out),
            _ => {}
        }
        event_size::fit_update(&mut update);
        out.push(update);
    }
}

/// Identifies pieces of text that belong together.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct TextStreamKey {
    run: RunId,
    kind: TextStreamKind,
}

impl TextStreamKey {
    /// Whether these are the agent's own words.
    fn is_said(&self) -> bool {
        matches!(self.kind, TextStreamKind::Text | TextStreamKind::Thought)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum TextStreamKind {
    Text,
    Thought,
    ToolOutput(String),
}

/// The state of one stream.
#[derive(Debug, Default)]
struct TextStreamTail {
    /// The end of the text so far, which may be the beginning of a secret.
    held: String,
    /// The redaction mark right before `held`, if there is one.
    mark: Option<RedactionMark>,
    /// The number of bytes passed on so far, as JSON.
    passed_bytes: usize,
}

impl TextStreamTail {
    /// The next update of the stream. Output of a tool is cut at what one event can hold, as it would be if the agent
    /// had reported it whole.
    fn next_update(&mut self, stream: TextStreamKey, mut text: String) -> Option<AgentUpdate> {
        if matches!(stream.kind, TextStreamKind::ToolOutput(_)) {
            let left = INLINE_MAX.checked_sub(self.passed_bytes)?;
            self.passed_bytes += escaped_len(&text);
            if self.passed_bytes > INLINE_MAX {
                text = escaped_head(&text, left).to_owned() + CUT_NOTICE;
            }
        }
        if text.is_empty() {
            return None;
        }
        let update = match stream.kind {
            TextStreamKind::Text => TurnUpdate::Text { text },
            TextStreamKind::Thought => TurnUpdate::Thought { text },
            TextStreamKind::ToolOutput(call_id) => TurnUpdate::ToolOutput { call_id, text },
        };
        let mut agent_update = AgentUpdate::Turn { run: stream.run, update };
        event_size::fit_update(&mut agent_update);
        Some(agent_update)
    }
}

impl SecretMatcher {
    /// Redacts the message and stderr, which is the agent's own text.
    fn redact_error(&self, error: &mut RunError) {
        self.redact_in_place(&mut error.message);
        error.stderr.iter_mut().for_each(|line| self.redact_in_place(line));
    }

    fn redact_in_place(&self, text: &mut String) {
        if let Some(clean) = self.redact_whole(text) {
            *text = clean;
        }
    }

    /// Redacts everything but the agent's id for its conversation, which would be useless with a hole in it.
    fn redact_update(&self, update: &mut AgentUpdate) {
        match update {
            AgentUpdate::Turn { update: turn_update, .. } => self.redact_turn_update(turn_update),
            AgentUpdate::Ask { ask, .. } => self.redact_ask(ask),
            AgentUpdate::TurnEnded { outcome, .. } => self.redact_outcome(outcome),
            AgentUpdate::Gone(AgentExitReason::Failed(error) | AgentExitReason::Unreachable(error)) => {
                self.redact_error(error)
            }
            AgentUpdate::Ready { .. }
            | AgentUpdate::Confined(_)
            | AgentUpdate::AskWithdrawn { .. }
            | AgentUpdate::AskDelivered { .. }
            | AgentUpdate::SteerTaken { .. }
            | AgentUpdate::SteerMissed { .. }
            | AgentUpdate::IdleStopped
            | AgentUpdate::Gone(AgentExitReason::Lost | AgentExitReason::Stopped) => {}
        }
    }

    fn redact_turn_update(&self, update: &mut TurnUpdate) {
        match update {
            TurnUpdate::Text { text } | TurnUpdate::Thought { text } | TurnUpdate::Notice { text, .. } => {
                self.redact_in_place(text)
            }
            TurnUpdate::ToolOutput { call_id, text } => {
                self.redact_in_place(call_id);
                self.redact_in_place(text);
            }
            TurnUpdate::ToolStarted { call_id, name, input: value }
            | TurnUpdate::ToolFinished { call_id, name, output: value, .. } => {
                self.redact_in_place(call_id);
                self.redact_in_place(name);
                self.redact_value(value);
            }
            TurnUpdate::Plan { entries } => entries.iter_mut().for_each(|entry| {
                self.redact_in_place(&mut entry.content);
                self.redact_in_place(&mut entry.status);
            }),
            TurnUpdate::Mode { mode } => self.redact_in_place(mode),
            TurnUpdate::Usage { .. }
            | TurnUpdate::ModelCall
            | TurnUpdate::Context(_)
            | TurnUpdate::Compacted { .. } => {}
        }
    }

    fn redact_ask(&self, ask: &mut AskRequest) {
        ask.tool.iter_mut().for_each(|tool| self.redact_in_place(tool));
        self.redact_value(&mut ask.input);
        self.redact_in_place(&mut ask.prompt);
        ask.options.iter_mut().for_each(|option| self.redact_in_place(option));
    }

    fn redact_outcome(&self, outcome: &mut TurnOutcome) {
        outcome.text.iter_mut().for_each(|text| self.redact_in_place(text));
        outcome.error.iter_mut().for_each(|error| self.redact_error(error));
        outcome.transcript.iter_mut().for_each(|message| self.redact_value(message));
    }

    fn redact_value(&self, value: &mut Value) {
        match value {
            Value::String(text) => self.redact_in_place(text),
            Value::Array(items) => items.iter_mut().for_each(|item| self.redact_value(item)),
            Value::Object(fields) => {
                if fields.keys().any(|key| self.redact_whole(key).is_some()) {
                    let old = std::mem::take(fields);
                    fields.extend(
                        old.into_iter().map(|(key, field)| (self.redact_whole(&key).unwrap_or(key), field)),
                    );
                }
                fields.values_mut().for_each(|field| self.redact_value(field));
            }
            Value::Number(number) => {
                if let Some(clean) = self.redact_whole(&number.to_string()) {
                    *value = Value::String(clean);
                }
            }
            Value::Null | Value::Bool(_) => {}
        }
    }
}

#[cfg(test)]
mod encoding_tests;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use qd_protocol::AskId;
    use qd_protocol::event::{AskKind, PlanEntry, TokenUsage};
    use qd_protocol::limits::{EVENT_MAX, HEAD_MAX};
    use qd_protocol::link::TurnStopReason;
    use serde_json::json;

    use super::*;

    fn matcher(values: &[(&str, &str)]) -> SecretMatcher {
        let env: BTreeMap<String, String> =
            values.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        SecretMatcher::new(&env)
    }

    fn run_id(name: &str) -> RunId {
        RunId::parse(name).unwrap()
    }

    fn turn_update(update: TurnUpdate) -> AgentUpdate {
        AgentUpdate::Turn { run: run_id("r"), update }
    }

    fn text_update(text: &str) -> AgentUpdate {
        turn_update(TurnUpdate::Text { text: text.to_owned() })
    }

    fn terminal_update() -> AgentUpdate {
        AgentUpdate::TurnEnded { run: run_id("r"), outcome: TurnOutcome::of(TurnStopReason::EndTurn) }
    }

    fn redact_all(
        values: &[(&str, &str)],
        updates: impl IntoIterator<Item = AgentUpdate>,
    ) -> Vec<AgentUpdate> {
        let mut filter = Redactor::new_filter(matcher(values));
        let mut out = Vec::new();
        updates.into_iter().for_each(|update| filter.filter_update(update, &mut out));
        out
    }

    fn joined_text(updates: &[AgentUpdate]) -> String {
        updates
            .iter()
            .filter_map(|update| match update {
                AgentUpdate::Turn { update: TurnUpdate::Text { text }, .. } => Some(text.as_str()),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn without_a_secret_everything_passes_at_once() {
        assert_eq!(
            redact_all(&[("PORT", "8080")], [text_update("80"), terminal_update()]),
            [text_update("80"), terminal_update()]
        );
    }

    #[test]
    fn a_secret_in_pieces_is_found_also_with_a_count_between_them() {
        let values = &[("KEY", "hunter2")];
        let usage = turn_update(TurnUpdate::usage(TokenUsage::default()));
        let out = redact_all(
            values,
            [text_update("a hun"), usage.clone(), text_update("ter"), text_update("2 b"), terminal_update()],
        );
        assert_eq!(out, [text_update("a "), usage, text_update("[KEY redacted] b"), terminal_update()]);
    }

    #[test]
    fn held_text_is_released_when_its_stream_is_over() {
        let values = &[("KEY", "hunter2")];
        let thought = turn_update(TurnUpdate::Thought { text: "t".to_owned() });
        assert_eq!(
            redact_all(values, [text_update("hunt"), thought.clone(), terminal_update()]),
            [thought, text_update("hunt"), terminal_update()]
        );
        assert_eq!(
            redact_all(values, [text_update("hunt"), terminal_update()]),
            [text_update("hunt"), terminal_update()]
        );
        assert_eq!(redact_all(values, [text_update("hunt")]), []);
        let gone = AgentUpdate::Gone(AgentExitReason::Stopped);
        assert_eq!(redact_all(values, [text_update("hunt"), gone.clone()]), [text_update("hunt"), gone]);
    }

    #[test]
    fn all_that_was_said_before_an_ask_is_shown_with_it() {
        let ask = AskRequest {
            id: AskId::from_random(&[1]),
            kind: AskKind::Question,
            tool: None,
            input: Value::Null,
            risk: None,
            prompt: "Go on?".to_owned(),
            options: Vec::new(),
            implicit: false,
        };
        let ask = AgentUpdate::Ask { run: run_id("r"), ask };
        assert_eq!(
            redact_all(&[("KEY", "hunter2")], [text_update("so much"), ask.clone()]),
            [text_update("so muc"), text_update("h"), ask]
        );
    }

    #[test]
    fn words_that_end_with_the_first_character_of_a_secret_pass_at_once() {
        let text = text_update("The objects in build/ come from an old compiler.\n");
        assert_eq!(redact_all(&[("KEY", "s3cr3t-value")], [text.clone()]), [text]);
    }

    #[test]
    fn a_secret_in_pieces_is_found_whatever_comes_in_between() {
        let values = &[("KEY", "hunter2")];
        let output =
            |text: &str| turn_update(TurnUpdate::ToolOutput { call_id: "c".into(), text: text.into() });
        let thought = |text: &str| turn_update(TurnUpdate::Thought { text: text.into() });
        let tool =
            turn_update(TurnUpdate::ToolStarted { call_id: "c".into(), name: "T".into(), input: json!({}) });
        let pieces = [
            text_update("hun"),
            thought("hunt"),
            tool,
            output("hu"),
            text_update("ter"),
            thought("er"),
            output("nter"),
            text_update("2"),
            thought("2"),
            output("2"),
            terminal_update(),
        ];
        let out = redact_all(values, pieces);
        assert_eq!(out.len(), 5, "{out:?}");
        let shown = format!("{out:?}");
        assert_eq!(shown.matches("[KEY redacted]").count(), 3, "{shown}");
        assert!(!shown.contains("hun") && !shown.contains("ter"), "{shown}");
    }

    #[test]
    fn late_text_is_joined_and_released_by_the_next_turn() {
        let values = &[("KEY", "hunter2")];
        let late = redact_all(values, [terminal_update(), text_update("late hun"), text_update("ter2")]);
        assert_eq!(late, [terminal_update(), text_update("late "), text_update("[KEY redacted]")]);
        let next = AgentUpdate::Turn { run: run_id("s"), update: TurnUpdate::ModelCall };
        assert_eq!(
            redact_all(values, [terminal_update(), text_update("late hunt"), next.clone()]),
            [terminal_update(), text_update("late "), text_update("hunt"), next]
        );
    }

    #[test]
    fn a_secret_is_taken_out_before_anything_is_cut() {
        let values = &[("KEY", "hunter2hunter2")];
        let value = json!("x".repeat(INLINE_MAX - 80) + "hunter2hunter2" + &"y".repeat(200));
        let message = "m".repeat(HEAD_MAX - 70) + "hunter2hunter2" + &"y".repeat(200);
        let error = RunError { stderr: vec![message.clone()], ..RunError::new("code", message) };
        let updates = [
            turn_update(TurnUpdate::ToolStarted {
                call_id: "1".into(),
                name: "T".into(),
                input: value.clone(),
            }),
            turn_update(TurnUpdate::notice(value.as_str().unwrap().to_owned())),
            AgentUpdate::Gone(AgentExitReason::Failed(error)),
        ];
        for update in updates {
            let shown = format!("{:?}", redact_all(values, [update]));
            assert!(
                !shown.contains("hun") && shown.contains("bytes in all]"),
                "{}",
                &shown[shown.len() - 200..]
            );
        }
    }

    #[test]
    fn text_that_grows_by_redaction_still_fits_its_events() {
        let values = &[("K", "aaaaaa"), ("L", "bcbcbc")];
        let long_text = "aaaaaabcbcbc".repeat(100_000);
        let updates = [
            turn_update(TurnUpdate::ToolStarted {
                call_id: "1".into(),
                name: "T".into(),
                input: json!({"command": long_text}),
            }),
            turn_update(TurnUpdate::Plan {
                entries: vec![PlanEntry { content: long_text.clone(), status: String::new() }],
            }),
            turn_update(TurnUpdate::notice(long_text)),
        ];
        for update in updates {
            let out = redact_all(values, [update, terminal_update()]);
            assert!(serde_json::to_string(&out[0]).unwrap().len() < EVENT_MAX);
        }
        let merged =
            redact_all(values, [text_update(&"a".repeat(600_000)), text_update("aaaaaa"), terminal_update()]);
        assert_eq!(merged, [text_update("[K redacted]"), terminal_update()], "neighbours are one");
    }

    #[test]
    fn the_output_of_a_tool_is_cut_once_and_its_rest_is_left_out() {
        let output = |text: String| turn_update(TurnUpdate::ToolOutput { call_id: "c".into(), text });
        let piece = "\n".repeat(INLINE_MAX / 4);
        let out = redact_all(&[], (0..5).map(|_| output(piece.clone())));
        let [_, _, AgentUpdate::Turn { update: TurnUpdate::ToolOutput { text, .. }, .. }] = &out[..] else {
            panic!("{}", out.len())
        };
        assert_eq!(text, CUT_NOTICE);
    }

    #[test]
    fn secrets_are_found_in_everything_an_agent_can_say() {
        let values = &[("KEY", "hunter2"), ("PIN", "12345678")];
        let hidden = |update: AgentUpdate| format!("{:?}", redact_all(values, [update, terminal_update()]));
        let value = json!({"hunter2": ["x hunter2", {"deep": 12345678}], "n": 1});
        let error = RunError { stderr: vec!["hunter2".to_owned()], ..RunError::new("code", "hunter2") };
        for update in [
            turn_update(TurnUpdate::ToolStarted {
                call_id: "1".into(),
                name: "T".into(),
                input: value.clone(),
            }),
            turn_update(TurnUpdate::ToolFinished {
                call_id: "1".into(),
                name: "T".into(),
                output: value.clone(),
                is_error: false,
            }),
            turn_update(TurnUpdate::ToolOutput { call_id: "1".into(), text: "hunter2".into() }),
            turn_update(TurnUpdate::notice("hunter2")),
            AgentUpdate::TurnEnded {
                run: run_id("r"),
                outcome: TurnOutcome {
                    text: Some("hunter2".into()),
                    error: Some(error.clone()),
                    transcript: vec![value],
                    ..TurnOutcome::of(TurnStopReason::Error)
                },
            },
            AgentUpdate::Gone(AgentExitReason::Failed(error)),
        ] {
            let shown = hidden(update);
            assert!(shown.contains("[KEY redacted]"), "{shown}");
            assert!(!shown.contains("hunter2") && !shown.contains("12345678"), "{shown}");
        }
    }

    proptest! {
        #[test]
        fn however_a_text_is_cut_it_is_redacted_as_the_whole(
            parts in proptest::collection::vec(
                prop_oneof![
                    Just("aabaab"), Just("aabaabaac"), Just("baabaa"), Just("YWFiYWFi"), Just("äöüäö"),
                    Just("a"), Just("aab"), Just("b"), Just("ä"), Just("Y"), Just(" "), Just("616162"),
                ],
                0..12,
            ),
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let values = &[("ONE", "aabaab"), ("TWO", "aabaabaac"), ("THREE", "baabaa"), ("FOUR", "äöüäö")];
            let whole: String = parts.concat();
            let mut borders: Vec<usize> =
                cuts.iter().map(|cut| whole.floor_char_boundary(cut.index(whole.len() + 1))).collect();
            borders.extend([0, whole.len()]);
            borders.sort_unstable();
            let pieces = borders.windows(2).map(|pair| text_update(&whole[pair[0]..pair[1]]));
            let out = redact_all(values, pieces.chain([terminal_update()]));
            prop_assert_eq!(joined_text(&out), matcher(values).redact_whole(&whole).unwrap_or(whole));
        }
    }
}
