//! What a program's screen means, by the patterns of its manifest, or by its learnt prompt if the manifest has none.
//! The rules only judge a screen; they do not wait or type.

use qd_protocol::event::RunError;
use qd_protocol::manifest::{Manifest, OutputPatterns};
use regex::Regex;

use super::prompt_line::{PromptLine, PromptLineMatch};
use super::screen::TerminalScreen;

/// The most options of one question.
const OPTIONS_MAX: usize = 32;

/// The patterns of one program, and its learnt prompt.
#[derive(Debug)]
pub(super) struct ScreenRules {
    ready: Option<Regex>,
    idle: Vec<Regex>,
    /// Whether the manifest describes the idle screen. If not, the `idle` patterns are only defaults.
    is_described: bool,
    learnt_prompt: Option<PromptLine>,
    busy: Vec<Regex>,
    yes_no: Vec<Regex>,
    options: Vec<Regex>,
    errors: Vec<Regex>,
    tool_start: Vec<Regex>,
    tool_end: Vec<Regex>,
}

/// The program is at its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IdleMatch {
    /// Whether nothing else could look like this.
    pub(super) sure: bool,
    /// The number of bytes before the prompt in the same row.
    pub(super) bytes_before: usize,
}

/// A question that a program asks in the middle of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PtyQuestion {
    pub(super) row: u64,
    pub(super) text: String,
    pub(super) answer_form: PtyAnswerForm,
}

/// The kind of answer that a question takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PtyAnswerForm {
    YesOrNo,
    /// One of these options, each with the key to type for it; any text if there are none.
    OneOf(Vec<(String, String)>),
}

/// The meaning of one line of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ScreenLineKind {
    Text,
    /// The beginning of a call of this tool.
    ToolStart(String),
    ToolEnd,
}

impl ScreenRules {
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

    /// Whether the program may be ready, as far as the manifest describes that. Called while the screen is unchanged.
    pub(super) fn may_be_ready(&self, screen: &TerminalScreen) -> bool {
        match &self.ready {
            Some(ready) => screen.rows().iter().any(|row| ready.is_match(&row.text)),
            None => !self.is_described || self.idle_match(screen).is_some(),
        }
    }

    /// Whether it is known how the program's prompt looks: the manifest describes it, or it can be learnt from this
    /// screen.
    pub(super) fn learn_prompt(&mut self, screen: &TerminalScreen) -> bool {
        if !self.is_described && self.learnt_prompt.is_none() {
            self.learnt_prompt = PromptLine::learn(&screen.before_cursor());
            self.is_described = self.learnt_prompt.is_none() && self.idle_match(screen).is_some();
        }
        self.is_described || self.learnt_prompt.is_some()
    }

    /// Whether the manifest describes the idle screen.
    pub(super) fn is_described(&self) -> bool {
        self.is_described
    }

    /// Whether the program is at its prompt.
    pub(super) fn idle_match(&self, screen: &TerminalScreen) -> Option<IdleMatch> {
        if self.is_busy(screen) {
            return None;
        }
        if let Some(learnt) = &self.learnt_prompt {
            return match learnt.match_line(&screen.before_cursor()) {
                PromptLineMatch::Whole => Some(IdleMatch { sure: true, bytes_before: 0 }),
                PromptLineMatch::Suffix(bytes_before) => Some(IdleMatch { sure: false, bytes_before }),
                PromptLineMatch::Different => None,
            };
        }
        let is_idle = |text: &str| self.idle.iter().any(|idle| idle.is_match(text));
        let found = match screen.is_drawn() {
            true => self.is_idle_at_cursor(screen) || screen.rows().iter().any(|row| is_idle(&row.text)),
            false => {
                // Some programs leave the cursor below what they have drawn.
                let last = || screen.last_lines(1).pop().unwrap_or_default();
                self.is_idle_at_cursor(screen)
                    || (screen.before_cursor().trim().is_empty() && is_idle(&last()))
            }
        };
        found.then_some(IdleMatch { sure: true, bytes_before: 0 })
    }

    /// Whether the cursor has left the prompt, judged by the cursor's row alone. Always false for a screen that is
    /// drawn as a whole.
    pub(super) fn has_left_prompt(&self, screen: &TerminalScreen) -> bool {
        let emulator = screen.emulator();
        if emulator.alternate_screen() || emulator.hide_cursor() {
            return false;
        }
        match &self.learnt_prompt {
            Some(learnt) => learnt.match_line(&screen.before_cursor()) == PromptLineMatch::Different,
            None => !self.is_idle_at_cursor(screen),
        }
    }

    /// Whether the cursor's row matches an `idle` pattern, with or without the spaces before the cursor.
    fn is_idle_at_cursor(&self, screen: &TerminalScreen) -> bool {
        let row = screen.row(screen.emulator().cursor_position().0).text;
        let before = screen.before_cursor();
        self.idle.iter().any(|idle| idle.is_match(&row) || idle.is_match(&before))
    }

    /// Whether the screen matches a `busy` pattern, which it does only while the program works.
    pub(super) fn is_busy(&self, screen: &TerminalScreen) -> bool {
        let is_busy = |text: &str| self.busy.iter().any(|busy| busy.is_match(text));
        !self.busy.is_empty() && screen.rows().iter().any(|row| is_busy(&row.text))
    }

    /// Whether the manifest has `busy` patterns.
    pub(super) fn has_busy_patterns(&self) -> bool {
        !self.busy.is_empty()
    }

    /// Whether a line belongs to the idle or busy display of the program and is not part of an answer.
    pub(super) fn is_decoration(&self, line: &str) -> bool {
        let by_pattern = self.idle.iter().chain(&self.busy).any(|pattern| pattern.is_match(line));
        by_pattern || !line.chars().any(char::is_alphanumeric)
    }

    /// The learnt prompt, if there is one.
    pub(super) fn prompt_line(&self) -> Option<&str> {
        self.learnt_prompt.as_ref().map(PromptLine::text)
    }

    /// The last question among these rows.
    pub(super) fn find_question(&self, rows: &[(u64, String)]) -> Option<PtyQuestion> {
        let asks = |patterns: &[Regex], text: &str| patterns.iter().any(|pattern| pattern.is_match(text));
        let at = rows.iter().rposition(|(_, text)| asks(&self.yes_no, text) || asks(&self.options, text))?;
        let (row, text) = rows[at].clone();
        let answer_form = match asks(&self.yes_no, &text) {
            true => PtyAnswerForm::YesOrNo,
            false => {
                PtyAnswerForm::OneOf(numbered_options(rows[at + 1..].iter().map(|(_, text)| text.as_str())))
            }
        };
        Some(PtyQuestion { row, text: text.trim().to_owned(), answer_form })
    }

    /// Whether a line means that the turn failed.
    pub(super) fn is_error_line(&self, line: &str) -> bool {
        self.errors.iter().any(|error| error.is_match(line))
    }

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

    /// Whether the manifest has patterns for the end of a tool call.
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
            format!("the manifest's pattern `{text}` is not a valid regular expression: {error}"),
        )
    })
}

/// The numbered lines below a question, each with its number. Other lines in between are skipped.
fn numbered_options<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<(String, String)> {
    let numbered = lines.filter_map(|line| {
        let line = line.trim_start_matches(|c: char| !c.is_alphanumeric());
        let (number, label) = line.split_once(['.', ')'])?;
        let is_number = !number.is_empty() && number.len() <= 2 && number.bytes().all(|b| b.is_ascii_digit());
        let label = label.trim_matches(|c: char| c.is_whitespace() || is_box_drawing(c));
        (is_number && !label.is_empty()).then(|| (label.to_owned(), number.to_owned()))
    });
    numbered.take(OPTIONS_MAX).collect()
}

/// Whether a character is a box-drawing character.
pub(super) fn is_box_drawing(c: char) -> bool {
    ('\u{2500}'..='\u{257f}').contains(&c)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pty::screen::TerminalSize;

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
    fn a_program_without_a_manifest_is_recognised_by_its_prompt() {
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
    fn a_program_without_a_prompt_is_not_recognised_but_the_default_pattern_is() {
        assert!(!compile_rules(OutputPatterns::default()).learn_prompt(&screen_of("")));
        assert!(!compile_rules(OutputPatterns::default()).learn_prompt(&screen_of("a banner\r\n")));
        let mut usual = compile_rules(OutputPatterns::default());
        let boxed = screen_of("\x1b[?25lan agent\r\n❯\r\n  hints below");
        assert!(usual.learn_prompt(&boxed));
        assert!(usual.idle_match(&boxed).is_some());
    }

    #[test]
    fn an_idle_pattern_counts_at_the_cursor_or_anywhere_on_a_drawn_screen() {
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
        let option = |label: &str, key: &str| (label.to_owned(), key.to_owned());
        assert_eq!(which.answer_form, PtyAnswerForm::OneOf(vec![option("Yes, do", "1"), option("No", "2")]));
        assert_eq!(rules.find_question(&rows(&["nothing"])), None);
    }
}
