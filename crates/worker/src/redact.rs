//! Takes secrets out of all that an agent says, before it is numbered or kept. A secret that comes in pieces is found
//! as well: the end of a piece that may be the beginning of a secret is held back until more of its stream is there.

mod secrets;

use qd_link::Filter;
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::link::{AskRequest, Gone, Outcome, Said, Up};
use serde_json::Value;

pub(crate) use secrets::Secrets;

/// The filter of one agent.
#[derive(Debug)]
pub(crate) struct Redactor {
    secrets: Secrets,
    /// The end of the last stream, and which that is.
    held: Option<(Stream, String)>,
    /// The run that has ended: nothing will come after its late words to set free what would be held of them.
    ended: Option<RunId>,
}

impl Redactor {
    /// A filter for these secrets; `None` if there are none, so that nothing is paid for.
    pub(crate) fn filter(secrets: Secrets) -> Option<Box<dyn Filter>> {
        if secrets.is_empty() {
            return None;
        }
        Some(Box::new(Self { secrets, held: None, ended: None }))
    }

    fn stream(&mut self, stream: Stream, text: String, out: &mut Vec<Up>) {
        let text = match self.held.take() {
            Some((held, before)) if held == stream => before + &text,
            other => {
                self.held = other;
                self.flush(out);
                text
            }
        };
        if self.ended.as_ref() == Some(&stream.run) {
            let text = self.secrets.clean(&text).unwrap_or(text);
            return out.extend(stream.said(text));
        }
        let found = self.secrets.clean_start(&text);
        if found.rest < text.len() {
            self.held = Some((stream.clone(), text[found.rest..].to_owned()));
        }
        out.extend(stream.said(found.clean));
    }

    fn flush(&mut self, out: &mut Vec<Up>) {
        if let Some((stream, text)) = self.held.take() {
            let text = self.secrets.clean(&text).unwrap_or(text);
            out.extend(stream.said(text));
        }
    }
}

impl Filter for Redactor {
    fn pass(&mut self, up: Up, out: &mut Vec<Up>) {
        match up {
            Up::Said { run, what: Said::Text { text } } => {
                self.stream(Stream { run, kind: Kind::Text }, text, out);
            }
            Up::Said { run, what: Said::Thought { text } } => {
                self.stream(Stream { run, kind: Kind::Thought }, text, out);
            }
            Up::Said { run, what: Said::ToolOutput { mut call_id, text } } => {
                self.secrets.hide(&mut call_id);
                self.stream(Stream { run, kind: Kind::ToolOutput(call_id) }, text, out);
            }
            // Counts have no place among the words, so words need not be set free for them.
            Up::Said { what: Said::Usage { .. } | Said::Turn, .. } => out.push(up),
            mut other => {
                self.flush(out);
                if let Up::Terminal { run, .. } = &other {
                    self.ended = Some(run.clone());
                }
                self.secrets.hide_in(&mut other);
                out.push(other);
            }
        }
    }
}

/// Text that belongs together.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stream {
    run: RunId,
    kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Text,
    Thought,
    ToolOutput(String),
}

impl Stream {
    fn said(self, text: String) -> Option<Up> {
        if text.is_empty() {
            return None;
        }
        let what = match self.kind {
            Kind::Text => Said::Text { text },
            Kind::Thought => Said::Thought { text },
            Kind::ToolOutput(call_id) => Said::ToolOutput { call_id, text },
        };
        Some(Up::Said { run: self.run, what })
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
    use qd_protocol::event::Usage;
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
        let mut filter = Redactor::filter(secrets(values)).unwrap();
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
    fn without_a_secret_there_is_no_filter() {
        assert!(Redactor::filter(secrets(&[("PORT", "8080")])).is_none());
    }

    #[test]
    fn a_secret_in_pieces_is_found_also_with_a_count_between_them() {
        let values = &[("KEY", "hunter2")];
        let usage = said(Said::Usage { usage: Usage::default() });
        let out = passed(values, [text("a hun"), usage.clone(), text("ter"), text("2 b"), terminal()]);
        assert_eq!(out, [text("a "), usage, text("[KEY redacted] b"), terminal()]);
    }

    #[test]
    fn what_is_held_back_is_said_before_anything_else() {
        let values = &[("KEY", "hunter2")];
        let thought = said(Said::Thought { text: "t".to_owned() });
        assert_eq!(passed(values, [text("hunt"), thought.clone()]), [text("hunt"), thought]);
        assert_eq!(passed(values, [text("hunt"), terminal()]), [text("hunt"), terminal()]);
        assert_eq!(passed(values, [text("hunt")]), []);
    }

    #[test]
    fn late_words_are_not_held_since_nothing_would_set_them_free() {
        let values = &[("KEY", "hunter2")];
        assert_eq!(passed(values, [terminal(), text("late hunt")]), [terminal(), text("late hunt")]);
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
