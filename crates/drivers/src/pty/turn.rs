//! The state of one turn at a terminal, without the terminal: what was typed, what has been seen since, and what that
//! means for the turn. It judges a screen that has settled; the loop in `conversation` waits, types and sends updates.

use std::time::Duration;

use qd_protocol::event::{AskAnswer, PermissionDecision};
use qd_protocol::link::AskRequest;
use serde_json::json;
use tokio::time::Instant;

use super::keys::KeystrokeQueue;
use super::output_decoder::PtyOutputDecoder;
use super::screen::TerminalScreen;
use super::screen_rules::{PtyAnswerForm, PtyQuestion, ScreenRules};
use super::transcript::ScreenTranscript;
use crate::asks::{permission_request, question_request};

/// How long a screen has to be unchanged before it is judged. Programs write a screen in several pieces, which rarely
/// come this far apart.
pub(super) const SETTLE_TIME: Duration = Duration::from_millis(150);
/// The same if the screen could mean something else than the end of a turn.
const UNSURE_SETTLE_TIME: Duration = Duration::from_secs(2);
/// How long an interrupted program may go on before it is interrupted again: it may have been about to start something
/// and have missed the interrupt.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(1500);
/// How long a program may show nothing new, with no other program running in its terminal and no sign of work, before
/// the turn is given up.
const STILL_MAX: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub(super) struct PtyTurn {
    pub(super) transcript: ScreenTranscript,
    pub(super) decoder: PtyOutputDecoder,
    /// Keystrokes to type when the program has reacted to the previous piece.
    pub(super) keystrokes: KeystrokeQueue,
    /// When the screen last changed, or something was typed.
    last_activity: Instant,
    /// Whether the screen has changed since something was last typed.
    screen_changed: bool,
    /// Whether the program has been seen away from its prompt since something was last typed.
    left_prompt: bool,
    /// Whether the screen has matched a `busy` pattern.
    seen_busy: bool,
    /// The row and text of the last question.
    last_question: Option<(u64, String)>,
    /// When the program was last interrupted, and how many times so far.
    last_interrupt: Option<(Instant, u32)>,
}

/// What a settled screen means.
#[derive(Debug, PartialEq)]
pub(super) enum PtyVerdict {
    TypeNext,
    /// Somebody has to answer this question.
    Ask(PtyQuestion),
    /// The turn is over: the program is at its prompt, after this many bytes of something else in the same row.
    TurnOver(usize),
    /// Interrupt the program again. If that was in vain, the processes it started have to be ended as well.
    Interrupt {
        in_vain: bool,
    },
    /// It is unclear whether the turn will ever be over.
    Unclear,
    /// Judge again at this time.
    JudgeAt(Instant),
}

impl PtyTurn {
    /// Begins the turn. `screen` is as it was before anything is typed.
    pub(super) fn begin(screen: &mut TerminalScreen, lines: &[String], keystrokes: KeystrokeQueue) -> Self {
        let mut transcript = ScreenTranscript::begin(screen);
        transcript.add_typed(lines.iter().map(String::as_str));
        Self {
            transcript,
            decoder: PtyOutputDecoder::default(),
            keystrokes,
            last_activity: Instant::now(),
            screen_changed: false,
            left_prompt: false,
            seen_busy: false,
            last_question: None,
            last_interrupt: None,
        }
    }

    /// Called when something was typed that the program should react to.
    pub(super) fn mark_typed(&mut self) {
        (self.last_activity, self.screen_changed, self.left_prompt) = (Instant::now(), false, false);
    }

    /// Called when the program was interrupted. Keystrokes that wait are dropped.
    pub(super) fn mark_interrupted(&mut self) {
        self.keystrokes.clear();
        self.last_activity = Instant::now();
        self.last_interrupt =
            Some((self.last_activity, self.last_interrupt.map_or(0, |(_, times)| times) + 1));
    }

    /// Observes the screen after each piece of a line. See [`TerminalScreen::feed`].
    pub(super) fn observe_piece(&mut self, screen: &TerminalScreen, rules: &ScreenRules) {
        self.left_prompt = self.left_prompt || rules.has_left_prompt(screen);
        if screen.is_cleared() {
            self.transcript.restart_after_clear(screen);
        }
    }

    /// Observes the screen after a whole chunk of output.
    pub(super) fn observe_screen(&mut self, screen: &TerminalScreen, rules: &ScreenRules) {
        (self.last_activity, self.screen_changed) = (Instant::now(), true);
        self.seen_busy = self.seen_busy || rules.is_busy(screen);
        self.left_prompt = self.left_prompt || rules.idle_match(screen).is_none();
    }

    /// When to judge the screen if nothing is written before.
    pub(super) fn judge_at(&self) -> Instant {
        self.last_activity + SETTLE_TIME
    }

    /// Judges a screen that has not changed for a while. `asking`: a question of the program waits for its answer.
    /// `alone`: no other program runs in the terminal.
    pub(super) fn judge(
        &mut self,
        screen: &TerminalScreen,
        rules: &ScreenRules,
        asking: bool,
        alone: bool,
    ) -> PtyVerdict {
        let now = Instant::now();
        let still = now - self.last_activity;
        if still < SETTLE_TIME {
            return PtyVerdict::JudgeAt(self.judge_at());
        }
        if !self.keystrokes.is_empty() {
            return PtyVerdict::TypeNext;
        }
        if self.last_interrupt.is_none()
            && let Some(question) = self.find_new_question(screen, rules)
        {
            return PtyVerdict::Ask(question);
        }
        if asking && self.last_question.is_some() && screen.is_drawn() {
            // Whatever else the screen shows belongs to the background of the question.
            return PtyVerdict::JudgeAt(now + STILL_MAX);
        }
        if let Some(idle) = rules.idle_match(screen).filter(|_| self.screen_changed) {
            let sure = idle.sure && self.left_prompt && (self.seen_busy || !rules.has_busy_patterns());
            let settle_time = if sure { SETTLE_TIME } else { UNSURE_SETTLE_TIME };
            return match still >= settle_time {
                true => PtyVerdict::TurnOver(idle.bytes_before),
                false => PtyVerdict::JudgeAt(self.last_activity + settle_time),
            };
        }
        match self.last_interrupt {
            Some((last, _)) if now - last < INTERRUPT_INTERVAL => {
                PtyVerdict::JudgeAt(last + INTERRUPT_INTERVAL)
            }
            Some((_, times)) => PtyVerdict::Interrupt { in_vain: times > 1 },
            // People may take as long as they like to answer.
            None if still >= STILL_MAX && alone && !asking && !rules.is_busy(screen) => PtyVerdict::Unclear,
            None if still >= STILL_MAX => PtyVerdict::JudgeAt(now + STILL_MAX),
            None => PtyVerdict::JudgeAt(self.last_activity + STILL_MAX),
        }
    }

    /// A question on the screen that was not there before. A question that has disappeared may come again.
    fn find_new_question(&mut self, screen: &TerminalScreen, rules: &ScreenRules) -> Option<PtyQuestion> {
        let question = rules.find_question(&self.transcript.turn_rows(screen));
        let current = question.as_ref().map(|question| (question.row, question.text.clone()));
        let is_new = current.is_some() && current != self.last_question;
        self.last_question = current;
        question.filter(|_| is_new)
    }
}

impl PtyQuestion {
    /// The ask for people; `None` if the system provides no random numbers for its id.
    pub(super) fn ask_request(&self) -> Option<AskRequest> {
        let request = match &self.answer_form {
            PtyAnswerForm::YesOrNo => {
                let input = json!({ "question": self.text });
                permission_request(TERMINAL_TOOL.to_owned(), input, Some(self.text.clone()))
            }
            PtyAnswerForm::OneOf(options) => {
                let labels = options.iter().map(|(label, _)| label.clone()).collect();
                question_request(self.text.clone(), labels)
            }
        };
        request.ok()
    }

    /// The text to type for an answer.
    pub(super) fn answer_text(&self, answer: &AskAnswer) -> String {
        let value = answer.value.clone().unwrap_or_default();
        match &self.answer_form {
            PtyAnswerForm::YesOrNo => match answer.decision.is_some_and(PermissionDecision::allows) {
                true => "y".to_owned(),
                false => "n".to_owned(),
            },
            PtyAnswerForm::OneOf(options) => {
                let chosen = options.iter().find(|(label, _)| *label == value);
                chosen.map_or(value, |(_, key)| key.clone())
            }
        }
    }
}

/// The tool name of a program's yes-or-no question, for policies.
const TERMINAL_TOOL: &str = "terminal";

#[cfg(test)]
mod tests {
    use qd_protocol::event::AskKind;
    use qd_protocol::manifest::{Manifest, OutputPatterns};

    use super::*;
    use crate::pty::keys;
    use crate::pty::screen::TerminalSize;

    struct PtyTurnBench {
        screen: TerminalScreen,
        rules: ScreenRules,
        turn: PtyTurn,
    }

    impl PtyTurnBench {
        /// A bench on whose screen a prompt of one line was typed.
        fn after_typing(parse: OutputPatterns, before: &str) -> Self {
            let mut rules = ScreenRules::from_manifest(&Manifest { parse, ..Manifest::default() }).unwrap();
            let mut screen = TerminalScreen::new(TerminalSize::clamped(40, 6));
            screen.feed(before.as_bytes(), |_| {});
            assert!(rules.learn_prompt(&screen));
            let lines = keys::typeable_lines("go");
            let mut turn = PtyTurn::begin(&mut screen, &lines, KeystrokeQueue::new());
            turn.mark_typed();
            Self { screen, rules, turn }
        }

        fn write_output(&mut self, output: &str) {
            let Self { screen, rules, turn } = self;
            screen.feed(output.as_bytes(), |screen| turn.observe_piece(screen, rules));
            turn.observe_screen(screen, rules);
        }

        /// The verdict after the screen was unchanged for this long.
        async fn judge_after(&mut self, still: Duration) -> PtyVerdict {
            tokio::time::advance(still).await;
            self.turn.judge(&self.screen, &self.rules, false, true)
        }
    }

    fn to_strings(patterns: &[&str]) -> Vec<String> {
        patterns.iter().map(|pattern| (*pattern).to_owned()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_is_over_when_the_prompt_is_back_and_the_screen_is_still() {
        let mut bench = PtyTurnBench::after_typing(OutputPatterns::default(), "sh-5.2$ ");
        assert!(
            matches!(bench.judge_after(SETTLE_TIME).await, PtyVerdict::JudgeAt(_)),
            "nothing was taken yet"
        );
        bench.write_output("go\r\n");
        assert!(matches!(bench.judge_after(SETTLE_TIME).await, PtyVerdict::JudgeAt(_)));
        bench.write_output("done\r\nsh-5.2$ ");
        assert!(matches!(bench.judge_after(SETTLE_TIME / 2).await, PtyVerdict::JudgeAt(_)));
        assert_eq!(bench.judge_after(SETTLE_TIME).await, PtyVerdict::TurnOver(0));
    }

    #[tokio::test(start_paused = true)]
    async fn output_that_comes_in_one_piece_counts_as_well() {
        let mut bench = PtyTurnBench::after_typing(OutputPatterns::default(), "sh-5.2$ ");
        bench.write_output("go\r\n\x1b[H\x1b[2Jsh-5.2$ ");
        assert_eq!(
            bench.judge_after(SETTLE_TIME).await,
            PtyVerdict::TurnOver(0),
            "a screen that was cleared"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn an_uncertain_screen_has_to_settle_for_longer() {
        let mut bench = PtyTurnBench::after_typing(OutputPatterns::default(), "sh-5.2$ ");
        bench.write_output("go\r\nhish-5.2$ ");
        assert!(matches!(bench.judge_after(SETTLE_TIME).await, PtyVerdict::JudgeAt(_)));
        assert_eq!(bench.judge_after(UNSURE_SETTLE_TIME).await, PtyVerdict::TurnOver(2));
        let parse = OutputPatterns {
            idle: to_strings(&["^> "]),
            busy: to_strings(&["^working"]),
            ..OutputPatterns::default()
        };
        let mut bench = PtyTurnBench::after_typing(parse, "\x1b[?1049h> ");
        bench.write_output("go\r\n> ");
        assert!(
            matches!(bench.judge_after(SETTLE_TIME).await, PtyVerdict::JudgeAt(_)),
            "it has not shown that it works"
        );
        bench.write_output("\x1b[Hworking");
        assert!(matches!(bench.judge_after(UNSURE_SETTLE_TIME).await, PtyVerdict::JudgeAt(_)), "now it does");
        bench.write_output("\x1b[H\x1b[K> ");
        assert_eq!(bench.judge_after(SETTLE_TIME).await, PtyVerdict::TurnOver(0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_missed_interrupt_is_repeated_and_endless_silence_is_unclear() {
        let mut bench = PtyTurnBench::after_typing(OutputPatterns::default(), "sh-5.2$ ");
        bench.write_output("go\r\n");
        bench.turn.mark_interrupted();
        assert!(matches!(bench.judge_after(SETTLE_TIME).await, PtyVerdict::JudgeAt(_)));
        assert_eq!(bench.judge_after(INTERRUPT_INTERVAL).await, PtyVerdict::Interrupt { in_vain: false });
        bench.turn.mark_interrupted();
        assert_eq!(bench.judge_after(INTERRUPT_INTERVAL).await, PtyVerdict::Interrupt { in_vain: true });
        bench.write_output("^C\r\nsh-5.2$ ");
        assert_eq!(bench.judge_after(SETTLE_TIME).await, PtyVerdict::TurnOver(0));

        let mut bench = PtyTurnBench::after_typing(OutputPatterns::default(), "sh-5.2$ ");
        bench.write_output("PS1=new\r\nnew");
        assert_eq!(bench.judge_after(STILL_MAX).await, PtyVerdict::Unclear);
        assert!(
            matches!(bench.turn.judge(&bench.screen, &bench.rules, false, false), PtyVerdict::JudgeAt(_)),
            "what it has started may still work"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_question_is_asked_once_and_its_answer_is_a_key() {
        let parse = OutputPatterns { ask_yes_no: to_strings(&[r"\(y/n\)"]), ..OutputPatterns::default() };
        let mut bench = PtyTurnBench::after_typing(parse, "old (y/n)\r\nsh-5.2$ ");
        bench.write_output("go\r\nReally? (y/n) ");
        let PtyVerdict::Ask(question) = bench.judge_after(SETTLE_TIME).await else { panic!("a question") };
        assert_eq!(question.text, "Really? (y/n)");
        let request = question.ask_request().unwrap();
        assert_eq!((request.kind, request.prompt.as_str()), (AskKind::Permission, "Really? (y/n)"));
        let decision_answer = |decision| AskAnswer { decision: Some(decision), ..AskAnswer::default() };
        assert_eq!(question.answer_text(&decision_answer(PermissionDecision::AllowOnce)), "y");
        assert_eq!(question.answer_text(&decision_answer(PermissionDecision::Deny)), "n");
        assert!(matches!(bench.judge_after(SETTLE_TIME).await, PtyVerdict::JudgeAt(_)), "not twice");
        bench.write_output("y\r\nReally? (y/n) ");
        assert!(matches!(bench.judge_after(SETTLE_TIME).await, PtyVerdict::Ask(_)), "it is another one");
        let options = vec![("Yes".to_owned(), "1".to_owned())];
        let which = PtyQuestion { row: 0, text: "Which?".into(), answer_form: PtyAnswerForm::OneOf(options) };
        let value_answer = |value: &str| AskAnswer { value: Some(value.to_owned()), ..AskAnswer::default() };
        assert_eq!(
            (which.answer_text(&value_answer("Yes")), which.answer_text(&value_answer("other"))),
            ("1".into(), "other".into())
        );
        assert_eq!(which.ask_request().unwrap().options, ["Yes"]);
    }
}
