//! What a program's screen means, by the patterns of its manifest, and by what is learnt of it where those say nothing.
//! It looks at a screen and judges; it waits for nothing and types nothing.

use qd_protocol::event::RunError;
use qd_protocol::manifest::{Manifest, Parse};
use regex::Regex;

use super::prompt_line::{Fit, PromptLine};
use super::screen::Screen;

/// The answers of one question that are looked for.
const OPTIONS_MAX: usize = 32;

/// The patterns of one program.
#[derive(Debug)]
pub(super) struct Rules {
    ready: Option<Regex>,
    idle: Vec<Regex>,
    /// Whether somebody has said what an idle one looks like. If not, the patterns are only a guess.
    described: bool,
    learnt: Option<PromptLine>,
    busy: Vec<Regex>,
    yes_no: Vec<Regex>,
    options: Vec<Regex>,
    errors: Vec<Regex>,
    tool_start: Vec<Regex>,
    tool_end: Vec<Regex>,
}

/// That a program waits for a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Waits {
    /// Whether nothing else could look like this.
    pub(super) sure: bool,
    /// Bytes that stand before its line in the same row.
    pub(super) after: usize,
}

/// Something that a program asks in the middle of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Question {
    /// The number of its row.
    pub(super) row: u64,
    pub(super) text: String,
    pub(super) takes: Takes,
}

/// What an answer to it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Takes {
    YesOrNo,
    /// One of these, each with what is typed for it; anything if there are none.
    OneOf(Vec<(String, String)>),
}

/// What one line of an answer is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LineKind {
    Text,
    /// The beginning of a tool call, by the tool's name.
    ToolStart(String),
    ToolEnd,
}

impl Rules {
    /// As a manifest says.
    pub(super) fn of(manifest: &Manifest) -> Result<Self, RunError> {
        let Parse {
            idle, busy, ask_yes_no, ask_options, error_lines, tool_call_start, tool_call_end, ..
        } = &manifest.parse;
        let ready = manifest.startup.ready_when.as_ref().map(|ready| pattern(&ready.pattern)).transpose()?;
        Ok(Self {
            ready,
            idle: patterns(idle)?,
            described: !idle.is_empty() && *idle != Parse::default().idle,
            learnt: None,
            busy: patterns(busy)?,
            yes_no: patterns(ask_yes_no)?,
            options: patterns(ask_options)?,
            errors: patterns(error_lines)?,
            tool_start: patterns(tool_call_start)?,
            tool_end: patterns(tool_call_end)?,
        })
    }

    /// Whether the program may be ready, as far as its manifest says how that looks. To be asked while the screen is
    /// still.
    pub(super) fn may_be_ready(&self, screen: &Screen) -> bool {
        match &self.ready {
            Some(ready) => screen.rows().iter().any(|row| ready.is_match(&row.text)),
            None => !self.described || self.waits(screen).is_some(),
        }
    }

    /// Whether it can be told when the program waits for a prompt: somebody has said so, or it can be learnt from a
    /// screen on which it does.
    pub(super) fn learn(&mut self, screen: &Screen) -> bool {
        if !self.described && self.learnt.is_none() {
            self.learnt = PromptLine::learn(&screen.before_cursor());
            self.described = self.learnt.is_none() && self.waits(screen).is_some();
        }
        self.described || self.learnt.is_some()
    }

    /// Whether somebody has said what an idle one looks like.
    pub(super) fn is_described(&self) -> bool {
        self.described
    }

    /// Whether the program waits for a prompt.
    pub(super) fn waits(&self, screen: &Screen) -> Option<Waits> {
        if self.is_busy(screen) {
            return None;
        }
        if let Some(learnt) = &self.learnt {
            return match learnt.fit(&screen.before_cursor()) {
                Fit::Whole => Some(Waits { sure: true, after: 0 }),
                Fit::End(after) => Some(Waits { sure: false, after }),
                Fit::Not => None,
            };
        }
        let is_idle = |text: &str| self.idle.iter().any(|idle| idle.is_match(text));
        let found = match screen.is_drawn() {
            true => self.is_idle_at_cursor(screen) || screen.rows().iter().any(|row| is_idle(&row.text)),
            false => {
                // Some leave the cursor below what they have drawn.
                let last = || screen.last_lines(1).pop().unwrap_or_default();
                self.is_idle_at_cursor(screen)
                    || (screen.before_cursor().trim().is_empty() && is_idle(&last()))
            }
        };
        found.then_some(Waits { sure: true, after: 0 })
    }

    /// Whether the cursor has left the line in which the program waits, as far as a glance at that row tells. Of a screen
    /// that is drawn it tells nothing.
    pub(super) fn has_left(&self, screen: &Screen) -> bool {
        let shown = screen.shown();
        if shown.alternate_screen() || shown.hide_cursor() {
            return false;
        }
        match &self.learnt {
            Some(learnt) => learnt.fit(&screen.before_cursor()) == Fit::Not,
            None => !self.is_idle_at_cursor(screen),
        }
    }

    /// Whether the cursor's row is one in which the program waits, with or without the spaces before the cursor.
    fn is_idle_at_cursor(&self, screen: &Screen) -> bool {
        let row = screen.row(screen.shown().cursor_position().0).text;
        let before = screen.before_cursor();
        self.idle.iter().any(|idle| idle.is_match(&row) || idle.is_match(&before))
    }

    /// Whether the screen shows what is only there while the program works.
    pub(super) fn is_busy(&self, screen: &Screen) -> bool {
        let is_busy = |text: &str| self.busy.iter().any(|busy| busy.is_match(text));
        !self.busy.is_empty() && screen.rows().iter().any(|row| is_busy(&row.text))
    }

    /// Whether the program shows that it works.
    pub(super) fn shows_work(&self) -> bool {
        !self.busy.is_empty()
    }

    /// Whether a line is one that the program shows while it waits or works, and no part of an answer.
    pub(super) fn is_furniture(&self, line: &str) -> bool {
        let by_pattern = self.idle.iter().chain(&self.busy).any(|pattern| pattern.is_match(line));
        by_pattern || !line.chars().any(char::is_alphanumeric)
    }

    /// The line in which it waits, if that was learnt.
    pub(super) fn prompt_line(&self) -> Option<&str> {
        self.learnt.as_ref().map(PromptLine::text)
    }

    /// The last question among these rows.
    pub(super) fn question(&self, rows: &[(u64, String)]) -> Option<Question> {
        let asks = |patterns: &[Regex], text: &str| patterns.iter().any(|pattern| pattern.is_match(text));
        let at = rows.iter().rposition(|(_, text)| asks(&self.yes_no, text) || asks(&self.options, text))?;
        let (row, text) = rows[at].clone();
        let takes = match asks(&self.yes_no, &text) {
            true => Takes::YesOrNo,
            false => Takes::OneOf(options(rows[at + 1..].iter().map(|(_, text)| text.as_str()))),
        };
        Some(Question { row, text: text.trim().to_owned(), takes })
    }

    /// Whether a line means that the turn failed.
    pub(super) fn is_error(&self, line: &str) -> bool {
        self.errors.iter().any(|error| error.is_match(line))
    }

    /// What a line of the answer is.
    pub(super) fn kind(&self, line: &str) -> LineKind {
        if let Some(found) = self.tool_start.iter().find_map(|start| start.captures(line)) {
            let name = found.get(1).or_else(|| found.get(0)).map_or(line, |name| name.as_str());
            return LineKind::ToolStart(name.trim().to_owned());
        }
        match self.tool_end.iter().any(|end| end.is_match(line)) {
            true => LineKind::ToolEnd,
            false => LineKind::Text,
        }
    }

    /// Whether it can be seen where a tool call ends.
    pub(super) fn ends_tools(&self) -> bool {
        !self.tool_end.is_empty()
    }
}

fn patterns(texts: &[String]) -> Result<Vec<Regex>, RunError> {
    texts.iter().map(|text| pattern(text)).collect()
}

fn pattern(text: &str) -> Result<Regex, RunError> {
    Regex::new(text).map_err(|error| {
        RunError::new(
            "agent_failed_to_start",
            format!("the manifest's pattern `{text}` cannot be used: {error}"),
        )
    })
}

/// The numbered lines below a question, each with its number. What stands between them is passed over.
fn options<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<(String, String)> {
    let numbered = lines.filter_map(|line| {
        let line = line.trim_start_matches(|c: char| !c.is_alphanumeric());
        let (number, words) = line.split_once(['.', ')'])?;
        let is_number = !number.is_empty() && number.len() <= 2 && number.bytes().all(|b| b.is_ascii_digit());
        let words = words.trim_matches(|c: char| c.is_whitespace() || is_frame(c));
        (is_number && !words.is_empty()).then(|| (words.to_owned(), number.to_owned()))
    });
    numbered.take(OPTIONS_MAX).collect()
}

/// Whether a character draws the sides of a box.
pub(super) fn is_frame(c: char) -> bool {
    ('\u{2500}'..='\u{257f}').contains(&c)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::pty::screen::Size;

    fn rules(parse: Parse) -> Rules {
        Rules::of(&Manifest { parse, ..Manifest::default() }).unwrap()
    }

    fn screen(output: &str) -> Screen {
        let mut screen = Screen::new(Size::near(60, 12));
        screen.feed(output.as_bytes(), |_| {});
        screen
    }

    fn list(patterns: &[&str]) -> Vec<String> {
        patterns.iter().map(|pattern| (*pattern).to_owned()).collect()
    }

    #[test]
    fn a_program_that_is_not_described_is_known_by_the_line_at_its_cursor() {
        let mut rules = rules(Parse::default());
        let shell = screen("welcome\r\nbash-5.2$ ");
        assert!(rules.may_be_ready(&shell) && !rules.is_described());
        assert!(rules.learn(&shell));
        assert_eq!(rules.waits(&shell), Some(Waits { sure: true, after: 0 }));
        assert_eq!(rules.waits(&screen("bash-5.2$ sleep 9")), None);
        assert_eq!(rules.waits(&screen("bash-5.2$ sleep 9\r\n")), None);
        assert_eq!(rules.waits(&screen("hibash-5.2$ ")), Some(Waits { sure: false, after: 2 }));
    }

    #[test]
    fn a_program_with_no_such_line_cannot_be_told_and_one_with_the_usual_line_can() {
        assert!(!rules(Parse::default()).learn(&screen("")));
        assert!(!rules(Parse::default()).learn(&screen("a banner\r\n")));
        let mut usual = rules(Parse::default());
        let boxed = screen("\x1b[?25lan agent\r\n❯\r\n  hints below");
        assert!(usual.learn(&boxed));
        assert!(usual.waits(&boxed).is_some());
    }

    #[test]
    fn a_pattern_counts_at_the_cursor_of_lines_and_anywhere_on_what_is_drawn() {
        let rules =
            rules(Parse { idle: list(&["^> $|^>$"]), busy: list(&["to interrupt"]), ..Parse::default() });
        assert!(rules.is_described());
        assert!(rules.waits(&screen("text\r\n> ")).is_some());
        assert!(rules.waits(&screen(">\r\nsomething else")).is_none(), "an old line");
        assert!(rules.waits(&screen("\x1b[?1049h>\r\nsomething else")).is_some());
        assert!(rules.waits(&screen("\x1b[?1049h>\r\nesc to interrupt")).is_none(), "it works");
    }

    #[test]
    fn the_last_question_is_asked_with_the_answers_that_stand_below_it() {
        let rules = rules(Parse {
            ask_yes_no: list(&[r"\[y/N\]"]),
            ask_options: list(&["^Which"]),
            ..Parse::default()
        });
        let rows = |lines: &[&str]| -> Vec<(u64, String)> {
            (7..).zip(lines.iter().map(|line| (*line).to_owned())).collect()
        };
        let yes = rules.question(&rows(&["Which?", "1. a", "Overwrite x? [y/N]"])).unwrap();
        assert_eq!((yes.row, yes.takes), (9, Takes::YesOrNo));
        let which =
            rules.question(&rows(&["Which one?", " ❯ 1. Yes, do │", "   2) No", "Esc to cancel"])).unwrap();
        let one = |words: &str, key: &str| (words.to_owned(), key.to_owned());
        assert_eq!(which.takes, Takes::OneOf(vec![one("Yes, do", "1"), one("No", "2")]));
        assert_eq!(rules.question(&rows(&["nothing"])), None);
    }
}
