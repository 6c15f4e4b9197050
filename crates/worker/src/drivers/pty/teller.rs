//! From the lines of a turn to what is said of it: text, and tool calls where the manifest shows how those look. Pieces
//! of text are made so that together they are the answer, without a break at its end.

use qd_protocol::link::Said;
use serde_json::{Value, json};

use super::rules::{LineKind, Rules};

/// What was said of one turn so far.
#[derive(Debug, Default)]
pub(super) struct Teller {
    /// Whether there is any text.
    begun: bool,
    /// Breaks that are owed before the next words.
    breaks: usize,
    /// Tool calls so far.
    calls: u32,
    open: Option<Call>,
    /// The first line that means failure.
    error: Option<String>,
}

/// A tool call that has not ended.
#[derive(Debug)]
struct Call {
    id: String,
    name: String,
}

impl Teller {
    /// What these lines say.
    pub(super) fn tell(&mut self, lines: Vec<String>, rules: &Rules) -> Vec<Said> {
        let mut said = Vec::new();
        for line in lines {
            if self.error.is_none() && rules.is_error(&line) {
                self.error = Some(line.trim().to_owned());
            }
            match rules.kind(&line) {
                LineKind::ToolStart(name) => self.start(name, &line, &mut said),
                LineKind::ToolEnd if self.open.is_some() => self.end(&mut said),
                _ => self.line(line, rules, &mut said),
            }
        }
        said
    }

    /// The turn is over; gives the line that means that it failed.
    pub(super) fn finish(mut self, said: &mut Vec<Said>) -> Option<String> {
        self.end(said);
        self.error
    }

    fn line(&mut self, line: String, rules: &Rules, said: &mut Vec<Said>) {
        if let Some(call) = self.open.as_ref().filter(|_| rules.ends_tools()) {
            said.push(Said::ToolOutput { call_id: call.id.clone(), text: format!("{line}\n") });
            return;
        }
        if line.trim().is_empty() {
            self.breaks += usize::from(self.begun);
            return;
        }
        let mut text = "\n".repeat(self.breaks);
        text.push_str(&line);
        self.breaks = 1;
        self.begun = true;
        // Neighbours are one piece.
        match said.last_mut() {
            Some(Said::Text { text: before }) => before.push_str(&text),
            _ => said.push(Said::Text { text }),
        }
    }

    fn start(&mut self, name: String, line: &str, said: &mut Vec<Said>) {
        self.end(said);
        self.calls += 1;
        let id = format!("call-{}", self.calls);
        let input = json!({ "line": line.trim() });
        said.push(Said::ToolStarted { call_id: id.clone(), name: name.clone(), input });
        self.open = Some(Call { id, name });
    }

    fn end(&mut self, said: &mut Vec<Said>) {
        if let Some(Call { id, name }) = self.open.take() {
            // What it gave was said line by line, and whether it failed cannot be seen.
            let output = Value::Null;
            said.push(Said::ToolFinished { call_id: id, name, output, is_error: false });
        }
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::manifest::{Manifest, Parse};

    use super::*;

    fn lines(lines: &[&str]) -> Vec<String> {
        lines.iter().map(|line| (*line).to_owned()).collect()
    }

    #[test]
    fn pieces_are_the_answer_without_breaks_at_its_ends() {
        let rules = Rules::of(&Manifest::default()).unwrap();
        let mut teller = Teller::default();
        let mut text = String::new();
        for piece in [lines(&["", "a"]), lines(&["", "", "b", "c"]), lines(&["", ""])] {
            for said in teller.tell(piece, &rules) {
                let Said::Text { text: more } = said else { panic!("{said:?}") };
                text.push_str(&more);
            }
        }
        assert_eq!(text, "a\n\n\nb\nc");
        assert_eq!(teller.finish(&mut Vec::new()), None);
    }

    #[test]
    fn tools_and_failures_are_told_as_the_manifest_shows_them() {
        let parse = Parse {
            tool_call_start: lines(&[r"^● (\w+)\("]),
            tool_call_end: lines(&["^  ⎿ done"]),
            error_lines: lines(&["^API Error"]),
            ..Parse::default()
        };
        let rules = Rules::of(&Manifest { parse, ..Manifest::default() }).unwrap();
        let mut teller = Teller::default();
        let mut said =
            teller.tell(lines(&["first", "● Bash(ls)", "a.rs", "  ⎿ done", "API Error: 500"]), &rules);
        let error = teller.finish(&mut said);
        assert_eq!(error.as_deref(), Some("API Error: 500"));
        let id = || "call-1".to_owned();
        let text = |text: &str| Said::Text { text: text.to_owned() };
        assert_eq!(
            said,
            [
                text("first"),
                Said::ToolStarted {
                    call_id: id(),
                    name: "Bash".into(),
                    input: json!({"line": "● Bash(ls)"})
                },
                Said::ToolOutput { call_id: id(), text: "a.rs\n".into() },
                Said::ToolFinished {
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
