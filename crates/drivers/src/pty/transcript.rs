//! The output of one turn, read from the screen: every line once, without the typed prompt and without the program's
//! own prompt.
//!
//! There are two kinds of programs. Some write line by line, as a shell does: a line is taken when the cursor has left
//! it, and later changes to it are ignored. Others draw their screen as a whole: rows are taken when they scroll off,
//! and at the end of the turn the rows that the screen did not show before.

use std::collections::VecDeque;

use super::screen::{ScreenRow, TerminalScreen};
use super::screen_rules::{ScreenRules, is_box_drawing};

/// The most typed lines that are remembered to recognise their echo. Nobody looks at the echo of more.
const TYPED_MAX: usize = 1000;
/// The longest line, in bytes. A longer line is split.
const LINE_MAX: usize = 256 << 10;

#[derive(Debug)]
pub(super) struct ScreenTranscript {
    /// The number of the row in which the turn began.
    start_row: u64,
    /// The number of the next row to take.
    next_row: u64,
    /// A line whose end has not come yet.
    partial: String,
    /// The text before the cursor when the first line was typed, until that line has been echoed.
    before_cursor: Option<String>,
    /// Typed lines whose echo has not come yet.
    awaited_echoes: VecDeque<String>,
    all_typed: Vec<String>,
    /// For a drawn screen: the rows it showed before the turn that have not scrolled off.
    drawn_before: Option<VecDeque<String>>,
}

impl ScreenTranscript {
    /// Begins the turn. `screen` is as it was before anything is typed.
    pub(super) fn begin(screen: &mut TerminalScreen) -> Self {
        screen.take_scrolled_rows();
        let is_drawn = screen.is_drawn();
        let start_row = if is_drawn { screen.first_row() } else { screen.cursor_row() };
        Self {
            start_row,
            next_row: start_row,
            partial: String::new(),
            before_cursor: Some(screen.before_cursor()).filter(|_| !is_drawn),
            awaited_echoes: VecDeque::new(),
            all_typed: Vec::new(),
            drawn_before: is_drawn.then(|| screen.rows().into_iter().map(|row| row.text).collect()),
        }
    }

    /// Adds lines that are typed, so that their echo is recognised.
    pub(super) fn add_typed<'a>(&mut self, lines: impl Iterator<Item = &'a str>) {
        let lines = lines.map(|line| line.trim_end().to_owned());
        let lines: Vec<String> = lines.take(TYPED_MAX.saturating_sub(self.all_typed.len())).collect();
        self.all_typed.extend(lines.iter().cloned());
        self.awaited_echoes.extend(lines);
    }

    /// Starts over after the screen was cleared: everything it shows from now on is new.
    pub(super) fn restart_after_clear(&mut self, screen: &TerminalScreen) {
        if self.drawn_before.is_none() && !screen.emulator().alternate_screen() {
            self.start_row = screen.first_row();
            self.next_row = self.start_row;
            self.partial.clear();
            self.before_cursor = None;
        }
    }

    /// Takes the lines that have come since the last call.
    pub(super) fn take_lines(&mut self, screen: &mut TerminalScreen, rules: &ScreenRules) -> Vec<String> {
        let mut lines = Vec::new();
        for (number, row) in screen.take_scrolled_rows() {
            self.push_scrolled_row(number, row, rules, &mut lines);
        }
        if self.drawn_before.is_none() && !screen.is_drawn() {
            self.advance(screen, screen.cursor_row(), rules, &mut lines);
        }
        lines
    }

    /// Takes the remaining lines at the end of the turn. If the program is at its prompt in the cursor's row, `idle_at`
    /// is the number of bytes before the prompt.
    pub(super) fn finish(
        mut self,
        screen: &mut TerminalScreen,
        idle_at: Option<usize>,
        rules: &ScreenRules,
    ) -> Vec<String> {
        let mut lines = self.take_lines(screen, rules);
        if let Some(before) = self.drawn_before.take() {
            let now: Vec<String> = screen.rows().into_iter().map(|row| row.text).collect();
            lines.extend(
                added_lines(&Vec::from(before), &now)
                    .into_iter()
                    .filter_map(|line| self.strip_frame(line, rules)),
            );
            return lines;
        }
        let end = screen.first_row() + u64::from(screen.height());
        match idle_at {
            // The program may have drawn something, and a line without an end may be left.
            Some(bytes_before) if !screen.is_drawn() => {
                self.advance(screen, screen.cursor_row(), rules, &mut lines);
                self.partial.push_str(screen.before_cursor().get(..bytes_before).unwrap_or_default());
            }
            _ => self.advance(screen, end, rules, &mut lines),
        }
        if !self.partial.is_empty() {
            self.end_line(rules, &mut lines);
        }
        lines
    }

    /// The rows on the screen that belong to this turn, each with its number.
    pub(super) fn turn_rows(&self, screen: &TerminalScreen) -> Vec<(u64, String)> {
        let rows = (screen.first_row()..).zip(screen.rows().into_iter().map(|row| row.text));
        match &self.drawn_before {
            None => {
                rows.filter(|(number, text)| *number >= self.start_row && !self.was_typed(text)).collect()
            }
            Some(before) => rows.filter(|(_, text)| !before.contains(text)).collect(),
        }
    }

    /// Takes a row that has scrolled off and is final.
    fn push_scrolled_row(
        &mut self,
        number: u64,
        row: ScreenRow,
        rules: &ScreenRules,
        lines: &mut Vec<String>,
    ) {
        if let Some(before) = &mut self.drawn_before {
            let was_there = before.pop_front().is_some_and(|text| text == row.text);
            if !was_there && let Some(line) = self.strip_frame(row.text, rules) {
                lines.push(line);
            }
        } else if number >= self.next_row {
            self.push_row(row, rules, lines);
            self.next_row = number + 1;
        }
    }

    /// Takes the rows before `until`.
    fn advance(&mut self, screen: &TerminalScreen, until: u64, rules: &ScreenRules, lines: &mut Vec<String>) {
        let first = screen.first_row();
        for number in self.next_row.max(first)..until {
            let Ok(row) = u16::try_from(number - first) else { break };
            self.push_row(screen.row(row), rules, lines);
        }
        self.next_row = self.next_row.max(until);
    }

    fn push_row(&mut self, row: ScreenRow, rules: &ScreenRules, lines: &mut Vec<String>) {
        self.partial.push_str(&row.text);
        if !row.wrapped || self.partial.len() > LINE_MAX {
            self.end_line(rules, lines);
        }
    }

    fn end_line(&mut self, rules: &ScreenRules, lines: &mut Vec<String>) {
        let mut line = std::mem::take(&mut self.partial);
        if let Some(before) = self.before_cursor.take() {
            // The text before the cursor is not part of the turn.
            let rest = line.strip_prefix(before.trim_end()).map(|rest| rest.trim_start().to_owned());
            line = rest.unwrap_or(line);
            if line.is_empty() {
                return;
            }
        }
        if !self.is_echo(&line, rules) {
            lines.push(line);
        }
    }

    /// Whether a line is the echo of a typed line: after the program's prompt, or alone.
    fn is_echo(&mut self, line: &str, rules: &ScreenRules) -> bool {
        let shown = line.trim_end();
        let is_echo_of = |typed: &String| match typed.is_empty() {
            true => !shown.chars().any(char::is_alphanumeric),
            false => shown
                .strip_suffix(typed.as_str())
                .is_some_and(|head| head.is_empty() || looks_like_prompt(head)),
        };
        // An empty typed line may leave nothing to see.
        let candidates = self
            .awaited_echoes
            .iter()
            .position(|typed| !typed.is_empty())
            .map_or(self.awaited_echoes.len(), |at| at + 1);
        if let Some(at) = self.awaited_echoes.iter().take(candidates).position(is_echo_of) {
            self.awaited_echoes.drain(..=at);
            return true;
        }
        // Input that is typed ahead is echoed once by the terminal and once by the program.
        let after_prompt = rules.prompt_line().and_then(|prompt| shown.strip_prefix(prompt));
        after_prompt.is_some_and(|rest| rest.is_empty() || self.all_typed.iter().any(|typed| typed == rest))
    }

    /// Whether a row shows a part of what was typed.
    fn was_typed(&self, row: &str) -> bool {
        let row = row.trim();
        let is_shown = |typed: &&String| row.ends_with(typed.as_str()) || typed.contains(row);
        !row.is_empty()
            && self.all_typed.iter().filter(|typed| !typed.is_empty()).any(|typed| is_shown(&typed))
    }

    /// A line of a drawn screen without the box around it; `None` if it is not part of an answer.
    fn strip_frame(&mut self, line: String, rules: &ScreenRules) -> Option<String> {
        let text = line.trim_end_matches(|c: char| c.is_whitespace() || is_box_drawing(c));
        let text = text.trim_start_matches(is_box_drawing);
        let words = text.trim_start_matches(|c: char| !c.is_alphanumeric());
        let is_echo = |typed: &String| typed.as_str() == text.trim() || typed.as_str() == words;
        let drops =
            rules.is_decoration(&line) || rules.is_decoration(text) || self.all_typed.iter().any(is_echo);
        (!drops).then(|| text.to_owned())
    }
}

/// Whether the text before a typed line looks like a prompt.
fn looks_like_prompt(head: &str) -> bool {
    head.ends_with(' ') && head.trim_end().chars().next_back().is_some_and(|mark| !mark.is_alphanumeric())
}

/// The lines of `now` that `before` does not have, in order: `now` without the longest common subsequence of both.
fn added_lines(before: &[String], now: &[String]) -> Vec<String> {
    let width = now.len() + 1;
    // The length of the longest common subsequence of the rests that begin at each pair of positions.
    let mut common = vec![0u32; (before.len() + 1) * width];
    for (b, old_line) in before.iter().enumerate().rev() {
        for (n, new_line) in now.iter().enumerate().rev() {
            common[b * width + n] = match old_line == new_line {
                true => common[(b + 1) * width + n + 1] + 1,
                false => common[(b + 1) * width + n].max(common[b * width + n + 1]),
            };
        }
    }
    let (mut b, mut n, mut added) = (0, 0, Vec::new());
    while n < now.len() {
        if b < before.len() && before[b] == now[n] {
            (b, n) = (b + 1, n + 1);
        } else if b < before.len() && common[(b + 1) * width + n] >= common[b * width + n + 1] {
            b += 1;
        } else {
            added.push(now[n].clone());
            n += 1;
        }
    }
    added
}

#[cfg(test)]
mod tests {
    use qd_protocol::manifest::{Manifest, OutputPatterns};

    use super::*;
    use crate::pty::screen::TerminalSize;

    /// Runs one turn over recorded output: what the screen showed before, what was typed, the output in pieces, and
    /// where the program waits at the end.
    fn transcribe_turn(
        parse: OutputPatterns,
        before: &str,
        typed: &str,
        pieces: &[&str],
        idle_at: Option<usize>,
    ) -> Vec<Vec<String>> {
        let mut rules = ScreenRules::from_manifest(&Manifest { parse, ..Manifest::default() }).unwrap();
        let mut screen = TerminalScreen::new(TerminalSize::clamped(20, 4));
        screen.feed(before.as_bytes(), |_| {});
        rules.learn_prompt(&screen);
        let mut transcript = ScreenTranscript::begin(&mut screen);
        transcript.add_typed(typed.lines());
        let mut lines = Vec::new();
        for piece in pieces {
            screen.feed(piece.as_bytes(), |screen| {
                if screen.is_cleared() {
                    transcript.restart_after_clear(screen);
                }
            });
            lines.push(transcript.take_lines(&mut screen, &rules));
        }
        lines.push(transcript.finish(&mut screen, idle_at, &rules));
        lines
    }

    fn transcribe_shell(typed: &str, pieces: &[&str], idle_at: Option<usize>) -> Vec<String> {
        transcribe_turn(OutputPatterns::default(), "hello\r\nsh-5.2$ ", typed, pieces, idle_at).concat()
    }

    #[test]
    fn the_lines_of_a_shell_are_taken_as_they_come_without_echo_and_prompt() {
        let lines = transcribe_turn(
            OutputPatterns::default(),
            "sh-5.2$ ",
            "seq 2",
            &["seq 2\r\n", "1\r\n2", "\r\n", "sh-5.2$ "],
            Some(0),
        );
        assert_eq!(lines, [vec![], vec!["1"], vec!["2"], vec![], vec![]]);
    }

    #[test]
    fn scrolled_off_rows_and_long_lines_are_taken_whole() {
        let output: String = (0..9).map(|n| format!("line {n}\r\n")).collect();
        let long = "y".repeat(50);
        let lines = transcribe_shell("go", &["go\r\n", &output, &long, "\r\nsh-5.2$ "], Some(0));
        let mut wanted: Vec<String> = (0..9).map(|n| format!("line {n}")).collect();
        wanted.push(long);
        assert_eq!(lines, wanted);
    }

    #[test]
    fn a_long_prompt_and_several_lines_of_it_are_no_part_of_the_answer() {
        let long = format!("echo {}", "z".repeat(30));
        let echoed = format!("{}\r\n", long);
        assert_eq!(transcribe_shell(&long, &[&echoed, "zz\r\nsh-5.2$ "], Some(0)), ["zz"]);
        let lines = transcribe_shell("a=1\necho $a", &["a=1\r\nsh-5.2$ echo $a\r\n1\r\nsh-5.2$ "], Some(0));
        assert_eq!(lines, ["1"]);
        let ahead = &["sleep 1\r\necho a\r\n", "sh-5.2$ echo a\r\na\r\nsh-5.2$ "];
        assert_eq!(transcribe_shell("sleep 1\necho a", ahead, Some(0)), ["a"], "typed ahead");
    }

    #[test]
    fn an_answer_that_repeats_the_prompt_is_taken() {
        assert_eq!(transcribe_shell("x", &["x\r\nx\r\nsh-5.2$ "], Some(0)), ["x"]);
    }

    #[test]
    fn output_right_before_the_prompt_or_before_an_exit_is_taken() {
        assert_eq!(transcribe_shell("printf hi", &["printf hi\r\nhish-5.2$ "], Some(2)), ["hi"]);
        assert_eq!(transcribe_shell("exit", &["exit\r\nbye"], None)[..1], ["bye"]);
    }

    #[test]
    fn a_cleared_screen_starts_the_transcript_over() {
        let lines =
            transcribe_shell("clear; pwd", &["clear; pwd\r\n", "\x1b[H\x1b[2J", "/x\r\nsh-5.2$ "], Some(0));
        assert_eq!(lines, ["/x"]);
        let at_once = "clear; pwd\r\n\x1b[H\x1b[2J/x\r\nsh-5.2$ ";
        assert_eq!(transcribe_shell("clear; pwd", &[at_once], Some(0)), ["/x"]);
    }

    #[test]
    fn the_new_rows_of_a_full_screen_program_are_taken_at_the_end() {
        let parse = OutputPatterns { idle: vec!["^:".to_owned()], ..OutputPatterns::default() };
        let before = "\x1b[?1049h\x1b[Hone\r\ntwo\r\nthree\r\n:";
        let lines = transcribe_turn(
            parse,
            before,
            "/f",
            &["\r/f", "\x1b[H\x1b[2Jthree\r\nfour\r\nfive\r\n:"],
            Some(0),
        );
        assert_eq!(lines, [vec![], vec![], vec!["four".to_owned(), "five".to_owned()]]);
    }

    #[test]
    fn output_above_a_drawn_box_is_taken_without_the_decoration() {
        let parse = OutputPatterns {
            idle: vec!["^│ > +│$".to_owned()],
            busy: vec!["working".to_owned()],
            ..OutputPatterns::default()
        };
        let boxed = "│ >        │\r\n╰──────────╯\x1b[A\r\x1b[4C";
        let lines = transcribe_turn(
            parse,
            &format!("welcome\r\n{boxed}"),
            "hi",
            &[
                "hi",
                "\r\x1b[J> hi\r\n● an answer\r\nworking\r\n",
                &format!("\x1b[A\x1b[J  of two lines\r\n{boxed}"),
            ],
            Some(0),
        );
        assert_eq!(lines.concat(), ["● an answer", "  of two lines"]);
    }
}
