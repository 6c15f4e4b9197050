//! One turn at a terminal, without the terminal: what was typed, what has been seen since, and what that makes of the
//! turn. It judges a screen that is still; the loop in `talk` waits, types and tells.

use std::time::Duration;

use qd_protocol::event::{Answer, AskKind, Decision};
use qd_protocol::link::AskRequest;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::keys::Pieces;
use super::rules::{Question, Rules, Takes};
use super::screen::Screen;
use super::teller::Teller;
use super::transcript::Transcript;
use crate::turn::ask_id;

/// How long a screen has to be still before it is judged. Programs write a screen in several pieces, and the last
/// rarely comes so much later than the one before.
pub(super) const SETTLE: Duration = Duration::from_millis(150);
/// The same where something else than the end of a turn could look like this.
const UNSURE: Duration = Duration::from_secs(2);
/// How long a program that was interrupted may do nothing before it is interrupted again: it may have been about to
/// start something, and have missed it.
const INTERRUPT_AGAIN: Duration = Duration::from_millis(1500);
/// How long a program may show nothing new, with no other program running in its terminal and nothing that says that it
/// works, before nobody believes any more that its turn will end.
const STILL_MAX: Duration = Duration::from_secs(600);

/// One turn.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) transcript: Transcript,
    pub(super) teller: Teller,
    /// What is to be typed when the program has shown what it made of the piece before.
    pub(super) pieces: Pieces,
    /// When the screen last changed, or something was typed.
    moved: Instant,
    /// Whether it has changed since.
    heard: bool,
    /// Whether the program has been seen to do something else than wait since.
    left: bool,
    /// Whether it has shown that it works.
    worked: bool,
    /// The question that was last asked.
    asked: Option<(u64, String)>,
    /// When it was last interrupted, and how often it was.
    interrupted: Option<(Instant, u32)>,
}

/// What a still screen means.
#[derive(Debug, PartialEq)]
pub(super) enum Verdict {
    /// Type the next piece.
    Type,
    /// Somebody has to answer this.
    Ask(Question),
    /// The turn is over: the program waits, after so many bytes of something else in the same row.
    Over(usize),
    /// Interrupt it again; if that was in vain, what it has started has to be ended for it.
    Interrupt { in_vain: bool },
    /// Nobody can tell whether it will ever be over.
    Lost,
    /// Look again then.
    Later(Instant),
}

impl Round {
    /// Begins, with the screen as it is before anything is typed.
    pub(super) fn begin(screen: &mut Screen, lines: &[String], pieces: Pieces) -> Self {
        let mut transcript = Transcript::begin(screen);
        transcript.typed(lines.iter().map(String::as_str));
        Self {
            transcript,
            teller: Teller::default(),
            pieces,
            moved: Instant::now(),
            heard: false,
            left: false,
            worked: false,
            asked: None,
            interrupted: None,
        }
    }

    /// Something was typed that the program is to do something about.
    pub(super) fn typed(&mut self) {
        (self.moved, self.heard, self.left) = (Instant::now(), false, false);
    }

    /// It was interrupted, and is to do nothing more of what was typed.
    pub(super) fn interrupted(&mut self) {
        self.pieces.clear();
        self.moved = Instant::now();
        self.interrupted = Some((self.moved, self.interrupted.map_or(0, |(_, times)| times) + 1));
    }

    /// A piece of a line was written. See [`Screen::feed`].
    pub(super) fn glance(&mut self, screen: &Screen, rules: &Rules) {
        self.left = self.left || rules.has_left(screen);
        if screen.is_cleared() {
            self.transcript.cleared(screen);
        }
    }

    /// All that came at once was written.
    pub(super) fn look(&mut self, screen: &Screen, rules: &Rules) {
        (self.moved, self.heard) = (Instant::now(), true);
        self.worked = self.worked || rules.is_busy(screen);
        self.left = self.left || rules.waits(screen).is_none();
    }

    /// When the screen is to be judged, if nothing is written before.
    pub(super) fn due(&self) -> Instant {
        self.moved + SETTLE
    }

    /// Judges the screen, which has not changed for a while. `asking`: somebody is being asked what it asked. `alone`: no
    /// other program runs in the terminal.
    pub(super) fn judge(&mut self, screen: &Screen, rules: &Rules, asking: bool, alone: bool) -> Verdict {
        let now = Instant::now();
        let still = now - self.moved;
        if still < SETTLE {
            return Verdict::Later(self.due());
        }
        if !self.pieces.is_empty() {
            return Verdict::Type;
        }
        if self.interrupted.is_none()
            && let Some(question) = self.question(screen, rules)
        {
            return Verdict::Ask(question);
        }
        if asking && self.asked.is_some() && screen.is_drawn() {
            // What else the screen shows is behind the question.
            return Verdict::Later(now + STILL_MAX);
        }
        if let Some(waits) = rules.waits(screen).filter(|_| self.heard) {
            let sure = waits.sure && self.left && (self.worked || !rules.shows_work());
            let enough = if sure { SETTLE } else { UNSURE };
            return match still >= enough {
                true => Verdict::Over(waits.after),
                false => Verdict::Later(self.moved + enough),
            };
        }
        match self.interrupted {
            Some((last, _)) if now - last < INTERRUPT_AGAIN => Verdict::Later(last + INTERRUPT_AGAIN),
            Some((_, times)) => Verdict::Interrupt { in_vain: times > 1 },
            // Somebody who is asked has all the time in the world.
            None if still >= STILL_MAX && alone && !asking && !rules.is_busy(screen) => Verdict::Lost,
            None if still >= STILL_MAX => Verdict::Later(now + STILL_MAX),
            None => Verdict::Later(self.moved + STILL_MAX),
        }
    }

    /// A question that the screen asks and that was not asked yet. One that has gone may come again.
    fn question(&mut self, screen: &Screen, rules: &Rules) -> Option<Question> {
        let question = rules.question(&self.transcript.fresh(screen));
        let asked = question.as_ref().map(|question| (question.row, question.text.clone()));
        let is_new = asked.is_some() && asked != self.asked;
        self.asked = asked;
        question.filter(|_| is_new)
    }
}

impl Question {
    /// As people are asked; `None` if the system gives no random numbers, and so nobody can be.
    pub(super) fn request(&self) -> Option<AskRequest> {
        let id = ask_id().ok()?;
        let (kind, tool, input, options) = match &self.takes {
            Takes::YesOrNo => {
                (AskKind::Permission, Some(TOOL.to_owned()), json!({ "question": self.text }), Vec::new())
            }
            Takes::OneOf(options) => {
                let words = options.iter().map(|(words, _)| words.clone()).collect();
                (AskKind::Question, None, Value::Null, words)
            }
        };
        Some(AskRequest {
            id,
            kind,
            tool,
            input,
            risk: None,
            prompt: self.text.clone(),
            options,
            unasked: false,
        })
    }

    /// What is typed for an answer.
    pub(super) fn reply(&self, answer: &Answer) -> String {
        let value = answer.value.clone().unwrap_or_default();
        match &self.takes {
            Takes::YesOrNo => match answer.decision {
                Some(Decision::AllowOnce | Decision::AllowAlways) => "y".to_owned(),
                Some(Decision::Deny) | None => "n".to_owned(),
            },
            Takes::OneOf(options) => {
                let chosen = options.iter().find(|(words, _)| *words == value);
                chosen.map_or(value, |(_, key)| key.clone())
            }
        }
    }
}

/// What a yes or no of a program is called among the tools, which policies know by name.
const TOOL: &str = "terminal";

#[cfg(test)]
mod tests {
    use qd_protocol::manifest::{Manifest, Parse};

    use super::*;
    use crate::drivers::pty::keys;
    use crate::drivers::pty::screen::Size;

    struct Bench {
        screen: Screen,
        rules: Rules,
        round: Round,
    }

    impl Bench {
        /// A prompt of one line was typed at this screen.
        fn typed(parse: Parse, before: &str) -> Self {
            let mut rules = Rules::of(&Manifest { parse, ..Manifest::default() }).unwrap();
            let mut screen = Screen::new(Size::near(40, 6));
            screen.feed(before.as_bytes(), |_| {});
            assert!(rules.learn(&screen));
            let lines = keys::lines("go");
            let mut round = Round::begin(&mut screen, &lines, Pieces::new());
            round.typed();
            Self { screen, rules, round }
        }

        fn writes(&mut self, output: &str) {
            let Self { screen, rules, round } = self;
            screen.feed(output.as_bytes(), |screen| round.glance(screen, rules));
            round.look(screen, rules);
        }

        /// What is judged after the screen was still for so long.
        async fn after(&mut self, still: Duration) -> Verdict {
            tokio::time::advance(still).await;
            self.round.judge(&self.screen, &self.rules, false, true)
        }
    }

    fn list(patterns: &[&str]) -> Vec<String> {
        patterns.iter().map(|pattern| (*pattern).to_owned()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_is_over_when_the_prompt_is_back_and_the_screen_is_still() {
        let mut bench = Bench::typed(Parse::default(), "sh-5.2$ ");
        assert!(matches!(bench.after(SETTLE).await, Verdict::Later(_)), "nothing was taken yet");
        bench.writes("go\r\n");
        assert!(matches!(bench.after(SETTLE).await, Verdict::Later(_)));
        bench.writes("done\r\nsh-5.2$ ");
        assert!(matches!(bench.after(SETTLE / 2).await, Verdict::Later(_)));
        assert_eq!(bench.after(SETTLE).await, Verdict::Over(0));
    }

    #[tokio::test(start_paused = true)]
    async fn what_came_in_one_piece_counts_as_well() {
        let mut bench = Bench::typed(Parse::default(), "sh-5.2$ ");
        bench.writes("go\r\n\x1b[H\x1b[2Jsh-5.2$ ");
        assert_eq!(bench.after(SETTLE).await, Verdict::Over(0), "a screen that was cleared");
    }

    #[tokio::test(start_paused = true)]
    async fn what_could_be_something_else_needs_more_stillness() {
        let mut bench = Bench::typed(Parse::default(), "sh-5.2$ ");
        bench.writes("go\r\nhish-5.2$ ");
        assert!(matches!(bench.after(SETTLE).await, Verdict::Later(_)));
        assert_eq!(bench.after(UNSURE).await, Verdict::Over(2));
        let parse = Parse { idle: list(&["^> "]), busy: list(&["^working"]), ..Parse::default() };
        let mut bench = Bench::typed(parse, "\x1b[?1049h> ");
        bench.writes("go\r\n> ");
        assert!(matches!(bench.after(SETTLE).await, Verdict::Later(_)), "it has not shown that it works");
        bench.writes("\x1b[Hworking");
        assert!(matches!(bench.after(UNSURE).await, Verdict::Later(_)), "now it does");
        bench.writes("\x1b[H\x1b[K> ");
        assert_eq!(bench.after(SETTLE).await, Verdict::Over(0));
    }

    #[tokio::test(start_paused = true)]
    async fn an_interrupt_that_was_missed_is_given_again_and_a_silence_without_end_is_told() {
        let mut bench = Bench::typed(Parse::default(), "sh-5.2$ ");
        bench.writes("go\r\n");
        bench.round.interrupted();
        assert!(matches!(bench.after(SETTLE).await, Verdict::Later(_)));
        assert_eq!(bench.after(INTERRUPT_AGAIN).await, Verdict::Interrupt { in_vain: false });
        bench.round.interrupted();
        assert_eq!(bench.after(INTERRUPT_AGAIN).await, Verdict::Interrupt { in_vain: true });
        bench.writes("^C\r\nsh-5.2$ ");
        assert_eq!(bench.after(SETTLE).await, Verdict::Over(0));

        let mut bench = Bench::typed(Parse::default(), "sh-5.2$ ");
        bench.writes("PS1=new\r\nnew");
        assert_eq!(bench.after(STILL_MAX).await, Verdict::Lost);
        assert!(
            matches!(bench.round.judge(&bench.screen, &bench.rules, false, false), Verdict::Later(_)),
            "what it has started may still work"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_question_is_asked_once_and_its_answer_is_a_key() {
        let parse = Parse { ask_yes_no: list(&[r"\(y/n\)"]), ..Parse::default() };
        let mut bench = Bench::typed(parse, "old (y/n)\r\nsh-5.2$ ");
        bench.writes("go\r\nReally? (y/n) ");
        let Verdict::Ask(question) = bench.after(SETTLE).await else { panic!("a question") };
        assert_eq!(question.text, "Really? (y/n)");
        let request = question.request().unwrap();
        assert_eq!((request.kind, request.prompt.as_str()), (AskKind::Permission, "Really? (y/n)"));
        let decides = |decision| Answer { decision: Some(decision), ..Answer::default() };
        assert_eq!(question.reply(&decides(Decision::AllowOnce)), "y");
        assert_eq!(question.reply(&decides(Decision::Deny)), "n");
        assert!(matches!(bench.after(SETTLE).await, Verdict::Later(_)), "not twice");
        bench.writes("y\r\nReally? (y/n) ");
        assert!(matches!(bench.after(SETTLE).await, Verdict::Ask(_)), "it is another one");
        let options = vec![("Yes".to_owned(), "1".to_owned())];
        let which = Question { row: 0, text: "Which?".into(), takes: Takes::OneOf(options) };
        let says = |value: &str| Answer { value: Some(value.to_owned()), ..Answer::default() };
        assert_eq!((which.reply(&says("Yes")), which.reply(&says("other"))), ("1".into(), "other".into()));
        assert_eq!(which.request().unwrap().options, ["Yes"]);
    }
}
