//! What a program's screen means, by the patterns of its manifest, and by what is learnt of it where those say nothing.
//! It looks at a screen and judges; it waits for nothing and types nothing.

use qd_protocol::event::RunError;
use qd_protocol::manifest::{Manifest, OutputPatterns};
use regex::Regex;

use super::prompt_line::{PromptLine, PromptLineMatch};
use super::screen::TerminalScreen;

/// The answers of one question that are looked for.
const OPTIONS_MAX: usize = 32;

/// The patterns of one program.
#[derive(Debug)]
pub(super) struct ScreenRules {
    ready: Option<Regex>,
    idle: Vec<Regex>,
    /// Whether somebody has said what an idle one looks like. If not, the patterns are only a guess.
    is_described: bool,
    learnt_prompt: Option<PromptLine>,
    busy: Vec<Regex>,
    yes_no: Vec<Regex>,
    options: Vec<Regex>,
    errors: Vec<Regex>,
    tool_start: Vec<Regex>,
    tool_end: Vec<Regex>,
}

/// That a program waits for a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IdleMatch {
    /// Whether nothing else could look like this.
    pub(super) sure: bool,
    /// Bytes that stand before its line in the same row.
    pub(super) bytes_before: usize,
}

/// Something that a program asks in the middle of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PtyQuestion {
    /// The number of its row.
    pub(super) row: u64,
    pub(super) text: String,
    pub(super) answer_form: PtyAnswerForm,
}

/// What an answer to it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PtyAnswerForm {
    YesOrNo,
    /// One of these, each with what is typed for it; anything if there are none.
    OneOf(Vec<(String, String)>),
}

/// What one line of an answer is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ScreenLineKind {
    Text,
    /// The beginning of a tool call, by the tool's name.
    ToolStart(String),
    ToolEnd,
}

impl ScreenRules {
    /// As a manifest says.
    pub(super) fn from_manifest(manifest: &Manifest) -> Result<Self, RunError> {
        let OutputPatterns {
            idle,
            busy,
            ask_yes_no,
            ask_options,
            error_lines,
            tool_call_start,
            tool_call_end,
            ..
        } = &manifest.parse;
        let ready =
            manifest.startup.ready_when.as_ref().map(|ready| compile_pattern(&ready.pattern)).transpose()?;
        Ok(Self {
            ready,
            idle: compile_patterns(idle)?,
            is_described: !idle.is_empty() && *idle != OutputPatterns::default().idle,
            learnt_prompt: None,
            busy: compile_patterns(busy)?,
            yes_no: compile_patterns(ask_yes_no)?,
            options: compile_patterns(ask_options)?,
            errors: compile_patterns(error_lines)?,
            tool_start: compile_patterns(tool_call_start)?,
            tool_end: compile_patterns(tool_call_end)?,
        })
    }

    /// Whether the program may be ready, as far as its manifest says how that looks. To be asked while the screen is
    /// still.
    pub(super) fn may_be_ready(&self, screen: &TerminalScreen) -> bool {
        match &self.ready {
            Some(ready) => screen.rows().iter().any(|row| ready.is_match(&row.text)),
            None => !self.is_described || self.idle_match(screen).is_some(),
        }
    }

    /// Whether it can be told when the program waits for a prompt: somebody has said so, or it can be learnt from a
    /// screen on which it does.
    pub(super) fn learn_prompt(&mut self, screen: &TerminalScreen) -> bool {
        if !self.is_described && self.learnt_prompt.is_none() {
            self.learnt_prompt = PromptLine::learn(&screen.before_cursor());
            self.is_described = self.learnt_prompt.is_none() && self.idle_match(screen).is_some();
        }
        self.is_described || self.learnt_prompt.is_some()
    }

    /// Whether somebody has said what an idle one looks like.
    pub(super) fn is_described(&self) -> bool {
        self.is_described
    }

    /// Whether the program waits for a prompt.
    pub(super) fn idle_match(&self, screen: &TerminalScreen) -> Option<IdleMatch> {
        if self.is_busy(screen) {
            return None;
        }
        if let Some(learnt) = &self.learnt_prompt {
            return match learnt.match_line(&screen.before_cursor()) {
                PromptLineMatch::Whole => Some(IdleMatch { sure: true, bytes_before: 0 }),
                PromptLineMatch::Suffix(after) => Some(IdleMatch { sure: false, bytes_before: after }),
                PromptLineMatch::Different => None,
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
        found.then_some(IdleMatch { sure: true, bytes_before: 0 })
    }

    /// Whether the cursor has left the line in which the program waits, as far as a glance at that row tells. Of a screen
    /// that is drawn it tells nothing.
    pub(super) fn has_left_prompt(&self, screen: &TerminalScreen) -> bool {
        let shown = screen.emulator();
        if shown.alternate_screen() || shown.hide_cursor() {
            return false;
        }
        match &self.learnt_prompt {
            Some(learnt) => learnt.match_line(&screen.before_cursor()) == PromptLineMatch::Different,
            None => !self.is_idle_at_cursor(screen),
        }
    }

    /// Whether the cursor's row is one in which the program waits, with or without the spaces before the cursor.
    fn is_idle_at_cursor(&self, screen: &TerminalScreen) -> bool {
        let row = screen.row(screen.emulator().cursor_position().0).text;
        let before = screen.before_cursor();
        self.idle.iter().any(|idle| idle.is_match(&row) || idle.is_match(&before))
    }

    /// Whether the screen shows what is only there while the program works.
    pub(super) fn is_busy(&self, screen: &TerminalScreen) -> bool {
        let is_busy = |text: &str| self.busy.iter().any(|busy| busy.is_match(text));
        !self.busy.is_empty() && screen.rows().iter().any(|row| is_busy(&row.text))
    }

    /// Whether the program shows that it works.
    pub(super) fn has_busy_patterns(&self) -> bool {
        !self.busy.is_empty()
    }

    /// Whether a line is one that the program shows while it waits or works, and no part of an answer.
    pub(super) fn is_decoration(&self, line: &str) -> bool {
        let by_pattern = self.idle.iter().chain(&self.busy).any(|pattern| pattern.is_match(line));
        by_pattern || !line.chars().any(char::is_alphanumeric)
    }

    /// The line in which it waits, if that was learnt.
    pub(super) fn prompt_line(&self) -> Option<&str> {
        self.learnt_prompt.as_ref().map(PromptLine::text)
    }

    /// The last question among these rows.
    pub(super) fn find_question(&self, rows: &[(u64, String)]) -> Option<PtyQuestion> {
        let asks = |patterns: &[Regex], text: &str| patterns.iter().any(|pattern| pattern.is_match(text));
        let at = rows.iter().rposition(|(_, text)| asks(&self.yes_no, text) || asks(&self.options, text))?;
        let (row, text) = rows[at].clone();
        let takes = match asks(&self.yes_no, &text) {
            true => PtyAnswerForm::YesOrNo,
            false => {
                PtyAnswerForm::OneOf(numbered_options(rows[at + 1..].iter().map(|(_, text)| text.as_str())))
            }
        };
        Some(PtyQuestion { row, text: text.trim().to_owned(), answer_form: takes })
    }

    /// Whether a line means that the turn failed.
    pub(super) fn is_error_line(&self, line: &str) -> bool {
        self.errors.iter().any(|error| error.is_match(line))
    }

    /// What a line of the answer is.
    pub(super) fn line_kind(&self, line: &str) -> ScreenLineKind {
        if let Some(found) = self.tool_start.iter().find_map(|start| start.captures(line)) {
            let name = found.get(1).or_else(|| found.get(0)).map_or(line, |name| name.as_str());
            return ScreenLineKind::ToolStart(name.trim().to_owned());
        }
        match self.tool_end.iter().any(|end| end.is_match(line)) {
            true => ScreenLineKind::ToolEnd,
            false => ScreenLineKind::Text,
        }
    }

    /// Whether it can be seen where a tool call ends.
    pub(super) fn has_tool_end_patterns(&self) -> bool {
        !self.tool_end.is_empty()
    }
}

fn compile_patterns(texts: &[String]) -> Result<Vec<Regex>, RunError> {
    texts.iter().map(|text| compile_pattern(text)).collect()
}

fn compile_pattern(text: &str) -> Result<Regex, RunError> {
    Regex::new(text).map_err(|error| {
        RunError::new(
            "agent_failed_to_start",
            format!("the manifest's pattern `{text}` cannot be used: {error}"),
        )
    })
}

/// The numbered lines below a question, each with its number. What stands between them is passed over.
fn numbered_options<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<(String, String)> {
    let numbered = lines.filter_map(|line| {
        let line = line.trim_start_matches(|c: char| !c.is_alphanumeric());
        let (number, words) = line.split_once(['.', ')'])?;
        let is_number = !number.is_empty() && number.len() <= 2 && number.bytes().all(|b| b.is_ascii_digit());
        let words = words.trim_matches(|c: char| c.is_whitespace() || is_box_drawing(c));
        (is_number && !words.is_empty()).then(|| (words.to_owned(), number.to_owned()))
    });
    numbered.take(OPTIONS_MAX).collect()
}

/// Whether a character draws the sides of a box.
pub(super) fn is_box_drawing(c: char) -> bool {
    ('\u{2500}'..='\u{257f}').contains(&c)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::pty::screen::TerminalSize;

    fn compile_rules(parse: OutputPatterns) -> ScreenRules {
        ScreenRules::from_manifest(&Manifest { parse, ..Manifest::default() }).unwrap()
    }

    fn screen_of(output: &str) -> TerminalScreen {
        let mut screen = TerminalScreen::new(TerminalSize::clamped(60, 12));
        screen.feed(output.as_bytes(), |_| {});
        screen
    }

    fn to_strings(patterns: &[&str]) -> Vec<String> {
        patterns.iter().map(|pattern| (*pattern).to_owned()).collect()
    }

    #[test]
    fn a_program_that_is_not_described_is_known_by_the_line_at_its_cursor() {
        let mut rules = compile_rules(OutputPatterns::default());
        let shell = screen_of("welcome\r\nbash-5.2$ ");
        assert!(rules.may_be_ready(&shell) && !rules.is_described());
        assert!(rules.learn_prompt(&shell));
        assert_eq!(rules.idle_match(&shell), Some(IdleMatch { sure: true, bytes_before: 0 }));
        assert_eq!(rules.idle_match(&screen_of("bash-5.2$ sleep 9")), None);
        assert_eq!(rules.idle_match(&screen_of("bash-5.2$ sleep 9\r\n")), None);
        assert_eq!(
            rules.idle_match(&screen_of("hibash-5.2$ ")),
            Some(IdleMatch { sure: false, bytes_before: 2 })
        );
    }

    #[test]
    fn a_program_with_no_such_line_cannot_be_told_and_one_with_the_usual_line_can() {
        assert!(!compile_rules(OutputPatterns::default()).learn_prompt(&screen_of("")));
        assert!(!compile_rules(OutputPatterns::default()).learn_prompt(&screen_of("a banner\r\n")));
        let mut usual = compile_rules(OutputPatterns::default());
        let boxed = screen_of("\x1b[?25lan agent\r\n❯\r\n  hints below");
        assert!(usual.learn_prompt(&boxed));
        assert!(usual.idle_match(&boxed).is_some());
    }

    #[test]
    fn a_pattern_counts_at_the_cursor_of_lines_and_anywhere_on_what_is_drawn() {
        let rules = compile_rules(OutputPatterns {
            idle: to_strings(&["^> $|^>$"]),
            busy: to_strings(&["to interrupt"]),
            ..OutputPatterns::default()
        });
        assert!(rules.is_described());
        assert!(rules.idle_match(&screen_of("text\r\n> ")).is_some());
        assert!(rules.idle_match(&screen_of(">\r\nsomething else")).is_none(), "an old line");
        assert!(rules.idle_match(&screen_of("\x1b[?1049h>\r\nsomething else")).is_some());
        assert!(rules.idle_match(&screen_of("\x1b[?1049h>\r\nesc to interrupt")).is_none(), "it works");
    }

    #[test]
    fn the_last_question_is_asked_with_the_answers_that_stand_below_it() {
        let rules = compile_rules(OutputPatterns {
            ask_yes_no: to_strings(&[r"\[y/N\]"]),
            ask_options: to_strings(&["^Which"]),
            ..OutputPatterns::default()
        });
        let rows = |lines: &[&str]| -> Vec<(u64, String)> {
            (7..).zip(lines.iter().map(|line| (*line).to_owned())).collect()
        };
        let yes = rules.find_question(&rows(&["Which?", "1. a", "Overwrite x? [y/N]"])).unwrap();
        assert_eq!((yes.row, yes.answer_form), (9, PtyAnswerForm::YesOrNo));
        let which = rules
            .find_question(&rows(&["Which one?", " ❯ 1. Yes, do │", "   2) No", "Esc to cancel"]))
            .unwrap();
        let one = |words: &str, key: &str| (words.to_owned(), key.to_owned());
        assert_eq!(which.answer_form, PtyAnswerForm::OneOf(vec![one("Yes, do", "1"), one("No", "2")]));
        assert_eq!(rules.find_question(&rows(&["nothing"])), None);
    }
}
