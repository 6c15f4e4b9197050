//! From the lines of a turn to what is said of it: text, and tool calls where the manifest shows how those look. Pieces
//! of text are made so that together they are the answer, without a break at its end.

use qd_protocol::link::TurnUpdate;
use serde_json::{Value, json};

use super::screen_rules::{ScreenLineKind, ScreenRules};

/// What was said of one turn so far.
#[derive(Debug, Default)]
pub(super) struct PtyOutputDecoder {
    /// Whether there is any text.
    has_text: bool,
    /// Breaks that are owed before the next words.
    pending_breaks: usize,
    /// Tool calls so far.
    call_count: u32,
    open_call: Option<PtyToolCall>,
    /// The first line that means failure.
    error: Option<String>,
}

/// A tool call that has not ended.
#[derive(Debug)]
struct PtyToolCall {
    id: String,
    name: String,
}

impl PtyOutputDecoder {
    /// What these lines say.
    pub(super) fn decode_lines(&mut self, lines: Vec<String>, rules: &ScreenRules) -> Vec<TurnUpdate> {
        let mut said = Vec::new();
        for line in lines {
            if self.error.is_none() && rules.is_error_line(&line) {
                self.error = Some(line.trim().to_owned());
            }
            match rules.line_kind(&line) {
                ScreenLineKind::ToolStart(name) => self.start_call(name, &line, &mut said),
                ScreenLineKind::ToolEnd if self.open_call.is_some() => self.end_call(&mut said),
                _ => self.push_line(line, rules, &mut said),
            }
        }
        said
    }

    /// The turn is over; gives the line that means that it failed.
    pub(super) fn finish(mut self, said: &mut Vec<TurnUpdate>) -> Option<String> {
        self.end_call(said);
        self.error
    }

    fn push_line(&mut self, line: String, rules: &ScreenRules, said: &mut Vec<TurnUpdate>) {
        if let Some(call) = self.open_call.as_ref().filter(|_| rules.has_tool_end_patterns()) {
            said.push(TurnUpdate::ToolOutput { call_id: call.id.clone(), text: format!("{line}\n") });
            return;
        }
        if line.trim().is_empty() {
            self.pending_breaks += usize::from(self.has_text);
            return;
        }
        let mut text = "\n".repeat(self.pending_breaks);
        text.push_str(&line);
        self.pending_breaks = 1;
        self.has_text = true;
        // Neighbours are one piece.
        match said.last_mut() {
            Some(TurnUpdate::Text { text: before }) => before.push_str(&text),
            _ => said.push(TurnUpdate::Text { text }),
        }
    }

    fn start_call(&mut self, name: String, line: &str, said: &mut Vec<TurnUpdate>) {
        self.end_call(said);
        self.call_count += 1;
        let id = format!("call-{}", self.call_count);
        let input = json!({ "line": line.trim() });
        said.push(TurnUpdate::ToolStarted { call_id: id.clone(), name: name.clone(), input });
        self.open_call = Some(PtyToolCall { id, name });
    }

    fn end_call(&mut self, said: &mut Vec<TurnUpdate>) {
        if let Some(PtyToolCall { id, name }) = self.open_call.take() {
            // What it gave was said line by line, and whether it failed cannot be seen.
            let output = Value::Null;
            said.push(TurnUpdate::ToolFinished { call_id: id, name, output, is_error: false });
        }
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::manifest::{Manifest, OutputPatterns};

    use super::*;

    fn to_strings(lines: &[&str]) -> Vec<String> {
        lines.iter().map(|line| (*line).to_owned()).collect()
    }

    #[test]
    fn pieces_are_the_answer_without_breaks_at_its_ends() {
        let rules = ScreenRules::from_manifest(&Manifest::default()).unwrap();
        let mut teller = PtyOutputDecoder::default();
        let mut text = String::new();
        for piece in [to_strings(&["", "a"]), to_strings(&["", "", "b", "c"]), to_strings(&["", ""])] {
            for said in teller.decode_lines(piece, &rules) {
                let TurnUpdate::Text { text: more } = said else { panic!("{said:?}") };
                text.push_str(&more);
            }
        }
        assert_eq!(text, "a\n\n\nb\nc");
        assert_eq!(teller.finish(&mut Vec::new()), None);
    }

    #[test]
    fn tools_and_failures_are_told_as_the_manifest_shows_them() {
        let parse = OutputPatterns {
            tool_call_start: to_strings(&[r"^● (\w+)\("]),
            tool_call_end: to_strings(&["^  ⎿ done"]),
            error_lines: to_strings(&["^API Error"]),
            ..OutputPatterns::default()
        };
        let rules = ScreenRules::from_manifest(&Manifest { parse, ..Manifest::default() }).unwrap();
        let mut teller = PtyOutputDecoder::default();
        let mut said = teller
            .decode_lines(to_strings(&["first", "● Bash(ls)", "a.rs", "  ⎿ done", "API Error: 500"]), &rules);
        let error = teller.finish(&mut said);
        assert_eq!(error.as_deref(), Some("API Error: 500"));
        let id = || "call-1".to_owned();
        let text = |text: &str| TurnUpdate::Text { text: text.to_owned() };
        assert_eq!(
            said,
            [
                text("first"),
                TurnUpdate::ToolStarted {
                    call_id: id(),
                    name: "Bash".into(),
                    input: json!({"line": "● Bash(ls)"})
                },
                TurnUpdate::ToolOutput { call_id: id(), text: "a.rs\n".into() },
                TurnUpdate::ToolFinished {
                    call_id: id(),
                    name: "Bash".into(),
                    output: Value::Null,
                    is_error: false
                },
                text("\nAPI Error: 500"),
            ]
        );
    }
}
