//! Takes secrets out of all that an agent says, before it is numbered or kept, and then makes it fit its events. A
//! secret that comes in pieces is found as well: the end of a piece that may be the beginning of a secret is held back
//! until more of its stream is there, whatever else is said meanwhile, or the stream is over.

mod secrets;

use std::collections::BTreeMap;

use qd_link::Filter;
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::limits::INLINE_MAX;
use qd_protocol::link::{AskRequest, Gone, Outcome, Said, Up};
use qd_protocol::text::{escaped_len, head};
use serde_json::Value;

use qd_link::fit;
use secrets::Mark;
pub(crate) use secrets::Secrets;

/// What follows the output of a tool that gave out too much.
const CUT: &str = "\n[cut: the rest of the output is left out]";

/// The filter of one agent.
#[derive(Debug)]
pub(crate) struct Redactor {
    secrets: Secrets,
    /// The streams that may go on. Late words make one as well, which is over when anything else is said.
    streams: BTreeMap<Stream, Tail>,
}

impl Redactor {
    /// A filter for these secrets, which may be none.
    pub(crate) fn filter(secrets: Secrets) -> Box<dyn Filter> {
        Box::new(Self { secrets, streams: BTreeMap::new() })
    }

    fn stream(&mut self, stream: Stream, text: String, out: &mut Vec<Up>) {
        let tail = self.streams.entry(stream.clone()).or_default();
        let text = if tail.held.is_empty() { text } else { std::mem::take(&mut tail.held) + &text };
        let found = self.secrets.clean_start(&text, tail.mark.take());
        text[found.rest..].clone_into(&mut tail.held);
        tail.mark = found.mark;
        out.extend(tail.said(stream, found.clean));
    }

    /// Sets free what is held of the streams that are over.
    fn end(&mut self, is_over: impl Fn(&Stream) -> bool, out: &mut Vec<Up>) {
        let over: Vec<Stream> = self.streams.keys().filter(|stream| is_over(stream)).cloned().collect();
        for stream in over {
            if let Some(mut tail) = self.streams.remove(&stream) {
                let text = self.secrets.clean_end(&tail.held, tail.mark.take());
                out.extend(tail.said(stream, text));
            }
        }
    }
}

impl Filter for Redactor {
    fn pass(&mut self, mut up: Up, out: &mut Vec<Up>) {
        match &up {
            Up::Said { run, .. } | Up::Ask { run, .. } | Up::Terminal { run, .. } => {
                self.end(|stream| stream.run != *run, out);
            }
            Up::Ready { .. } | Up::Rested | Up::Gone(_) => self.end(|_| true, out),
            Up::AskWithdrawn { .. }
            | Up::AskDelivered { .. }
            | Up::SteerTaken { .. }
            | Up::SteerMissed { .. } => {}
        }
        match up {
            Up::Said { run, what: Said::Text { text } } => {
                return self.stream(Stream { run, kind: Kind::Text }, text, out);
            }
            Up::Said { run, what: Said::Thought { text } } => {
                return self.stream(Stream { run, kind: Kind::Thought }, text, out);
            }
            Up::Said { run, what: Said::ToolOutput { mut call_id, text } } => {
                self.secrets.hide(&mut call_id);
                return self.stream(Stream { run, kind: Kind::ToolOutput(call_id) }, text, out);
            }
            _ => {}
        }
        self.secrets.hide_in(&mut up);
        match &up {
            Up::Said { what: Said::ToolFinished { call_id, .. }, .. } => {
                self.end(|stream| matches!(&stream.kind, Kind::ToolOutput(of) if of == call_id), out);
            }
            Up::Terminal { .. } => self.end(|_| true, out),
            _ => {}
        }
        fit::up(&mut up);
        out.push(up);
    }
}

/// Text that belongs together.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Stream {
    run: RunId,
    kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Text,
    Thought,
    ToolOutput(String),
}

/// Where a stream has come to.
#[derive(Debug, Default)]
struct Tail {
    /// Its end, which may become a secret.
    held: String,
    /// The mark that it ended with before that.
    mark: Option<Mark>,
    /// Bytes of it, as JSON, that were passed on.
    passed: usize,
}

impl Tail {
    /// The next piece of the stream. Of a tool's output only as much as one event could hold: an agent that gives it
    /// out whole would be cut there as well.
    fn said(&mut self, stream: Stream, mut text: String) -> Option<Up> {
        if matches!(stream.kind, Kind::ToolOutput(_)) {
            let left = INLINE_MAX.checked_sub(self.passed)?;
            self.passed += escaped_len(&text);
            if self.passed > INLINE_MAX {
                text = head(&text, left).to_owned() + CUT;
            }
        }
        if text.is_empty() {
            return None;
        }
        let what = match stream.kind {
            Kind::Text => Said::Text { text },
            Kind::Thought => Said::Thought { text },
            Kind::ToolOutput(call_id) => Said::ToolOutput { call_id, text },
        };
        let mut up = Up::Said { run: stream.run, what };
        fit::up(&mut up);
        Some(up)
    }
}

impl Secrets {
    /// Its stderr is the agent's own words.
    fn hide_in_error(&self, error: &mut RunError) {
        self.hide(&mut error.message);
        error.stderr.iter_mut().for_each(|line| self.hide(line));
    }

    fn hide(&self, text: &mut String) {
        if let Some(clean) = self.clean(text) {
            *text = clean;
        }
    }

    /// Everything but the agent's own name for its conversation, which is of no use with a hole in it.
    fn hide_in(&self, up: &mut Up) {
        match up {
            Up::Said { what, .. } => self.hide_in_said(what),
            Up::Ask { ask, .. } => self.hide_in_ask(ask),
            Up::Terminal { outcome, .. } => self.hide_in_outcome(outcome),
            Up::Gone(Gone::Failed(error)) => self.hide_in_error(error),
            Up::Ready { .. }
            | Up::AskWithdrawn { .. }
            | Up::AskDelivered { .. }
            | Up::SteerTaken { .. }
            | Up::SteerMissed { .. }
            | Up::Rested
            | Up::Gone(Gone::Lost | Gone::Stopped) => {}
        }
    }

    fn hide_in_said(&self, said: &mut Said) {
        match said {
            Said::Text { text } | Said::Thought { text } | Said::Notice { text } => self.hide(text),
            Said::ToolOutput { call_id, text } => {
                self.hide(call_id);
                self.hide(text);
            }
            Said::ToolStarted { call_id, name, input: value }
            | Said::ToolFinished { call_id, name, output: value, .. } => {
                self.hide(call_id);
                self.hide(name);
                self.hide_in_value(value);
            }
            Said::Plan { entries } => entries.iter_mut().for_each(|entry| {
                self.hide(&mut entry.content);
                self.hide(&mut entry.status);
            }),
            Said::Usage { .. } | Said::Turn => {}
        }
    }

    fn hide_in_ask(&self, ask: &mut AskRequest) {
        ask.tool.iter_mut().for_each(|tool| self.hide(tool));
        self.hide_in_value(&mut ask.input);
        self.hide(&mut ask.prompt);
        ask.options.iter_mut().for_each(|option| self.hide(option));
    }

    fn hide_in_outcome(&self, outcome: &mut Outcome) {
        outcome.text.iter_mut().for_each(|text| self.hide(text));
        outcome.error.iter_mut().for_each(|error| self.hide_in_error(error));
        outcome.transcript.iter_mut().for_each(|message| self.hide_in_value(message));
    }

    fn hide_in_value(&self, value: &mut Value) {
        match value {
            Value::String(text) => self.hide(text),
            Value::Array(items) => items.iter_mut().for_each(|item| self.hide_in_value(item)),
            Value::Object(fields) => {
                if fields.keys().any(|key| self.clean(key).is_some()) {
                    let old = std::mem::take(fields);
                    fields
                        .extend(old.into_iter().map(|(key, field)| (self.clean(&key).unwrap_or(key), field)));
                }
                fields.values_mut().for_each(|field| self.hide_in_value(field));
            }
            Value::Number(number) => {
                if let Some(clean) = self.clean(&number.to_string()) {
                    *value = Value::String(clean);
                }
            }
            Value::Null | Value::Bool(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use qd_protocol::event::{PlanEntry, Usage};
    use qd_protocol::limits::{EVENT_MAX, HEAD_MAX};
    use qd_protocol::link::Stop;
    use serde_json::json;

    use super::*;

    fn secrets(values: &[(&str, &str)]) -> Secrets {
        let env: BTreeMap<String, String> =
            values.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Secrets::of(&env)
    }

    fn run(name: &str) -> RunId {
        RunId::parse(name).unwrap()
    }

    fn said(what: Said) -> Up {
        Up::Said { run: run("r"), what }
    }

    fn text(text: &str) -> Up {
        said(Said::Text { text: text.to_owned() })
    }

    fn terminal() -> Up {
        Up::Terminal { run: run("r"), outcome: Outcome::of(Stop::EndTurn) }
    }

    fn passed(values: &[(&str, &str)], ups: impl IntoIterator<Item = Up>) -> Vec<Up> {
        let mut filter = Redactor::filter(secrets(values));
        let mut out = Vec::new();
        ups.into_iter().for_each(|up| filter.pass(up, &mut out));
        out
    }

    fn joined(ups: &[Up]) -> String {
        ups.iter()
            .filter_map(|up| match up {
                Up::Said { what: Said::Text { text }, .. } => Some(text.as_str()),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn without_a_secret_everything_passes_at_once() {
        assert_eq!(passed(&[("PORT", "8080")], [text("80"), terminal()]), [text("80"), terminal()]);
    }

    #[test]
    fn a_secret_in_pieces_is_found_also_with_a_count_between_them() {
        let values = &[("KEY", "hunter2")];
        let usage = said(Said::Usage { usage: Usage::default() });
        let out = passed(values, [text("a hun"), usage.clone(), text("ter"), text("2 b"), terminal()]);
        assert_eq!(out, [text("a "), usage, text("[KEY redacted] b"), terminal()]);
    }

    #[test]
    fn what_is_held_back_is_said_when_its_stream_is_over() {
        let values = &[("KEY", "hunter2")];
        let thought = said(Said::Thought { text: "t".to_owned() });
        assert_eq!(
            passed(values, [text("hunt"), thought.clone(), terminal()]),
            [thought, text("hunt"), terminal()]
        );
        assert_eq!(passed(values, [text("hunt"), terminal()]), [text("hunt"), terminal()]);
        assert_eq!(passed(values, [text("hunt")]), []);
        let gone = Up::Gone(Gone::Stopped);
        assert_eq!(passed(values, [text("hunt"), gone.clone()]), [text("hunt"), gone]);
    }

    #[test]
    fn a_secret_in_pieces_is_found_whatever_is_said_between_them() {
        let values = &[("KEY", "hunter2")];
        let output = |text: &str| said(Said::ToolOutput { call_id: "c".into(), text: text.into() });
        let thought = |text: &str| said(Said::Thought { text: text.into() });
        let tool = said(Said::ToolStarted { call_id: "c".into(), name: "T".into(), input: json!({}) });
        let pieces = [
            text("hun"),
            thought("hunt"),
            tool,
            output("hu"),
            text("ter"),
            thought("er"),
            output("nter"),
            text("2"),
            thought("2"),
            output("2"),
            terminal(),
        ];
        let out = passed(values, pieces);
        assert_eq!(out.len(), 5, "{out:?}");
        let shown = format!("{out:?}");
        assert_eq!(shown.matches("[KEY redacted]").count(), 3, "{shown}");
        assert!(!shown.contains("hun") && !shown.contains("ter"), "{shown}");
    }

    #[test]
    fn late_words_are_joined_and_set_free_by_the_next_turn() {
        let values = &[("KEY", "hunter2")];
        let late = passed(values, [terminal(), text("late hun"), text("ter2")]);
        assert_eq!(late, [terminal(), text("late "), text("[KEY redacted]")]);
        let next = Up::Said { run: run("s"), what: Said::Turn };
        assert_eq!(
            passed(values, [terminal(), text("late hunt"), next.clone()]),
            [terminal(), text("late "), text("hunt"), next]
        );
    }

    #[test]
    fn a_secret_is_taken_out_before_anything_is_cut() {
        let values = &[("KEY", "hunter2hunter2")];
        let value = json!("x".repeat(INLINE_MAX - 80) + "hunter2hunter2" + &"y".repeat(200));
        let message = "m".repeat(HEAD_MAX - 70) + "hunter2hunter2" + &"y".repeat(200);
        let error = RunError { stderr: vec![message.clone()], ..RunError::new("code", message) };
        let ups = [
            said(Said::ToolStarted { call_id: "1".into(), name: "T".into(), input: value.clone() }),
            said(Said::Notice { text: value.as_str().unwrap().to_owned() }),
            Up::Gone(Gone::Failed(error)),
        ];
        for up in ups {
            let shown = format!("{:?}", passed(values, [up]));
            assert!(
                !shown.contains("hun") && shown.contains("bytes in all]"),
                "{}",
                &shown[shown.len() - 200..]
            );
        }
    }

    #[test]
    fn what_grows_by_its_marks_still_fits_its_events() {
        let values = &[("K", "aaaaaa"), ("L", "bcbcbc")];
        let much = "aaaaaabcbcbc".repeat(100_000);
        let ups = [
            said(Said::ToolStarted {
                call_id: "1".into(),
                name: "T".into(),
                input: json!({"command": much}),
            }),
            said(Said::Plan { entries: vec![PlanEntry { content: much.clone(), status: String::new() }] }),
            said(Said::Notice { text: much }),
        ];
        for up in ups {
            let out = passed(values, [up, terminal()]);
            assert!(serde_json::to_string(&out[0]).unwrap().len() < EVENT_MAX);
        }
        let one = passed(values, [text(&"a".repeat(600_000)), text("aaaaaa"), terminal()]);
        assert_eq!(one, [text("[K redacted]"), terminal()], "neighbours are one");
    }

    #[test]
    fn the_output_of_a_tool_is_cut_once_and_its_rest_is_left_out() {
        let output = |text: String| said(Said::ToolOutput { call_id: "c".into(), text });
        let piece = "\n".repeat(INLINE_MAX / 4);
        let out = passed(&[], (0..5).map(|_| output(piece.clone())));
        let [_, _, Up::Said { what: Said::ToolOutput { text, .. }, .. }] = &out[..] else {
            panic!("{}", out.len())
        };
        assert_eq!(text, CUT);
    }

    #[test]
    fn secrets_are_found_in_everything_an_agent_can_say() {
        let values = &[("KEY", "hunter2"), ("PIN", "12345678")];
        let hidden = |up: Up| format!("{:?}", passed(values, [up, terminal()]));
        let value = json!({"hunter2": ["x hunter2", {"deep": 12345678}], "n": 1});
        let error = RunError { stderr: vec!["hunter2".to_owned()], ..RunError::new("code", "hunter2") };
        for up in [
            said(Said::ToolStarted { call_id: "1".into(), name: "T".into(), input: value.clone() }),
            said(Said::ToolFinished {
                call_id: "1".into(),
                name: "T".into(),
                output: value.clone(),
                is_error: false,
            }),
            said(Said::ToolOutput { call_id: "1".into(), text: "hunter2".into() }),
            said(Said::Notice { text: "hunter2".into() }),
            Up::Terminal {
                run: run("r"),
                outcome: Outcome {
                    text: Some("hunter2".into()),
                    error: Some(error.clone()),
                    transcript: vec![value],
                    ..Outcome::of(Stop::Error)
                },
            },
            Up::Gone(Gone::Failed(error)),
        ] {
            let shown = hidden(up);
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
            let pieces = borders.windows(2).map(|pair| text(&whole[pair[0]..pair[1]]));
            let out = passed(values, pieces.chain([terminal()]));
            prop_assert_eq!(joined(&out), secrets(values).clean(&whole).unwrap_or(whole));
        }
    }
}
