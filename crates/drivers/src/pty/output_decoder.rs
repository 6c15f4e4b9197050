//! Turns the lines of a turn into updates: text, and tool calls if the manifest has patterns for them. The pieces of
//! text joined together are the answer, without newlines at its end.

use qd_protocol::link::TurnUpdate;
use serde_json::{Value, json};

use super::screen_rules::{ScreenLineKind, ScreenRules};

/// The state of one turn's output.
#[derive(Debug, Default)]
pub(super) struct PtyOutputDecoder {
    /// Whether any text has been emitted.
    has_text: bool,
    /// Newlines to emit before the next text.
    pending_breaks: usize,
    /// The number of tool calls so far.
    call_count: u32,
    open_call: Option<PtyToolCall>,
    /// The first line that matches an error pattern.
    error: Option<String>,
}

/// A tool call that has not ended.
#[derive(Debug)]
struct PtyToolCall {
    id: String,
    name: String,
}

impl PtyOutputDecoder {
    pub(super) fn decode_lines(&mut self, lines: Vec<String>, rules: &ScreenRules) -> Vec<TurnUpdate> {
        let mut updates = Vec::new();
        for line in lines {
            if self.error.is_none() && rules.is_error_line(&line) {
                self.error = Some(line.trim().to_owned());
            }
            match rules.line_kind(&line) {
                ScreenLineKind::ToolStart(name) => self.start_call(name, &line, &mut updates),
                ScreenLineKind::ToolEnd if self.open_call.is_some() => self.end_call(&mut updates),
                _ => self.push_line(line, rules, &mut updates),
            }
        }
        updates
    }

    /// Ends the turn; returns the line that means that it failed.
    pub(super) fn finish(mut self, updates: &mut Vec<TurnUpdate>) -> Option<String> {
        self.end_call(updates);
        self.error
    }

    fn push_line(&mut self, line: String, rules: &ScreenRules, updates: &mut Vec<TurnUpdate>) {
        if let Some(call) = self.open_call.as_ref().filter(|_| rules.has_tool_end_patterns()) {
            updates.push(TurnUpdate::ToolOutput { call_id: call.id.clone(), text: format!("{line}\n") });
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
        // Adjacent lines become one piece.
        match updates.last_mut() {
            Some(TurnUpdate::Text { text: previous }) => previous.push_str(&text),
            _ => updates.push(TurnUpdate::Text { text }),
        }
    }

    fn start_call(&mut self, name: String, line: &str, updates: &mut Vec<TurnUpdate>) {
        self.end_call(updates);
        self.call_count += 1;
        let id = format!("call-{}", self.call_count);
        let input = json!({ "line": line.trim() });
        updates.push(TurnUpdate::ToolStarted { call_id: id.clone(), name: name.clone(), input });
        self.open_call = Some(PtyToolCall { id, name });
    }

    fn end_call(&mut self, updates: &mut Vec<TurnUpdate>) {
        if let Some(PtyToolCall { id, name }) = self.open_call.take() {
            // Its output was emitted line by line, and whether it failed cannot be seen.
            let output = Value::Null;
            updates.push(TurnUpdate::ToolFinished { call_id: id, name, output, is_error: false });
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
    fn the_pieces_make_up_the_answer_without_newlines_at_its_ends() {
        let rules = ScreenRules::from_manifest(&Manifest::default()).unwrap();
        let mut decoder = PtyOutputDecoder::default();
        let mut text = String::new();
        for piece in [to_strings(&["", "a"]), to_strings(&["", "", "b", "c"]), to_strings(&["", ""])] {
            for update in decoder.decode_lines(piece, &rules) {
                let TurnUpdate::Text { text: more } = update else { panic!("{update:?}") };
                text.push_str(&more);
            }
        }
        assert_eq!(text, "a\n\n\nb\nc");
        assert_eq!(decoder.finish(&mut Vec::new()), None);
    }

    #[test]
    fn tool_calls_and_failures_are_found_by_the_manifests_patterns() {
        let parse = OutputPatterns {
            tool_call_start: to_strings(&[r"^● (\w+)\("]),
            tool_call_end: to_strings(&["^  ⎿ done"]),
            error_lines: to_strings(&["^API Error"]),
            ..OutputPatterns::default()
        };
        let rules = ScreenRules::from_manifest(&Manifest { parse, ..Manifest::default() }).unwrap();
        let mut decoder = PtyOutputDecoder::default();
        let mut updates = decoder
            .decode_lines(to_strings(&["first", "● Bash(ls)", "a.rs", "  ⎿ done", "API Error: 500"]), &rules);
        let error = decoder.finish(&mut updates);
        assert_eq!(error.as_deref(), Some("API Error: 500"));
        let id = || "call-1".to_owned();
        let text = |text: &str| TurnUpdate::Text { text: text.to_owned() };
        assert_eq!(
            updates,
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
