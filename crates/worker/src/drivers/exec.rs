//! The driver for any command: one process for each prompt, which gets the prompt on stdin or among its arguments and
//! whose words are its answer. Its exit status decides how the turn ended. It has no conversation, asks nothing, and is
//! stopped by a signal.

use std::sync::Arc;

use qd_keeper::Keeper;
use qd_link::Closed;
use qd_protocol::link::{Outcome, Said, Stop};
use qd_protocol::manifest::{Manifest, Output, PromptBy};
use qd_protocol::worker::AgentSpec;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::process::{Process, Program};
use crate::turn::{End, Prompt, Turn};

/// What stands for the prompt among the arguments.
const PROMPT: &str = "{prompt}";
/// How much is read at once.
const READ_SIZE: usize = 16 << 10;
/// The longest line of JSON; a longer one is text.
const LINE_MAX: usize = 8 << 20;

/// A command, ready to be run.
pub(crate) struct Exec {
    manifest: Arc<Manifest>,
    spec: Box<AgentSpec>,
    keeper: Arc<Keeper>,
}

impl Exec {
    /// Nothing is started before there is a prompt.
    pub(crate) fn new(spec: &AgentSpec, manifest: Arc<Manifest>, keeper: Arc<Keeper>) -> Self {
        Self { manifest, spec: Box::new(spec.clone()), keeper }
    }

    /// One turn: the command from its start to its end. A cancel is a signal, which the caller sends.
    pub(crate) async fn turn(&mut self, turn: &Turn<'_>, prompt: &Prompt) -> Result<End, Closed> {
        if turn.is_cancelled() {
            return Ok(End::Stopped(Outcome::of(Stop::Cancelled)));
        }
        let mut program = Program::of(&self.manifest, &self.spec);
        let on_stdin = self.manifest.turn.prompt == PromptBy::Stdin && !names_prompt(&program.argv);
        if !on_stdin {
            put(&mut program.argv, &prompt.text);
        }
        let started = Process::start_in_turn(&self.keeper, &self.spec, program).await;
        let (mut process, mut stdin, mut stdout) = match started {
            Ok(started) => started,
            Err(error) => return Ok(End::Stopped(Outcome::failed(error))),
        };
        let text = if on_stdin { prompt.text.as_bytes() } else { &[] };
        let feed = async {
            // A command that does not read its prompt has no need of it.
            let _taken = stdin.write_all(text).await;
            drop(stdin);
        };
        let mut words = Words::new(self.manifest.turn.output);
        let mut buffer = vec![0; READ_SIZE];
        let hear = async {
            loop {
                let read = stdout.read(&mut buffer).await.unwrap_or_default();
                if read == 0 {
                    break;
                }
                for said in words.hear(&buffer[..read]) {
                    turn.tell(said).await?;
                }
            }
            Ok::<(), Closed>(())
        };
        let heard = async {
            let ((), heard) = tokio::join!(feed, hear);
            heard
        };
        tokio::select! {
            // The cancel first. The command is a process of the turn, all of which our caller ends then.
            biased;
            () = turn.cancelled() => return Ok(End::Stopped(Outcome::of(Stop::Cancelled))),
            heard = heard => heard?,
        }
        for said in words.rest() {
            turn.tell(said).await?;
        }
        Ok(End::Stopped(match process.status().await {
            Some(0) => Outcome { text: words.result, ..Outcome::of(Stop::EndTurn) },
            _ => Outcome::failed(process.why("and so its turn failed").await),
        }))
    }
}

fn names_prompt(argv: &[String]) -> bool {
    argv.iter().any(|argument| argument.contains(PROMPT))
}

/// Puts the prompt where it is named, or else at the end.
fn put(argv: &mut Vec<String>, prompt: &str) {
    if !names_prompt(argv) {
        argv.push(prompt.to_owned());
        return;
    }
    for argument in argv {
        if argument.contains(PROMPT) {
            *argument = argument.replace(PROMPT, prompt);
        }
    }
}

/// What a command has said, piece by piece, cut where characters and lines end.
struct Words {
    output: Output,
    waiting: Vec<u8>,
    /// The result, if a line of JSON gave one.
    result: Option<String>,
}

impl Words {
    fn new(output: Output) -> Self {
        Self { output, waiting: Vec::new(), result: None }
    }

    fn hear(&mut self, more: &[u8]) -> Vec<Said> {
        self.waiting.extend_from_slice(more);
        match self.output {
            Output::Text => {
                let whole = whole_characters(&self.waiting);
                let text: Vec<u8> = self.waiting.drain(..whole).collect();
                text_of(&text).into_iter().collect()
            }
            Output::Json => {
                let mut said = Vec::new();
                while let Some(end) = self.waiting.iter().position(|byte| *byte == b'\n') {
                    let line: Vec<u8> = self.waiting.drain(..=end).collect();
                    said.extend(self.line(&line));
                }
                if self.waiting.len() > LINE_MAX {
                    let line = std::mem::take(&mut self.waiting);
                    said.extend(text_of(&line));
                }
                said
            }
        }
    }

    /// What is left when there is no more to come.
    fn rest(&mut self) -> Vec<Said> {
        let rest = std::mem::take(&mut self.waiting);
        match self.output {
            Output::Text => text_of(&rest).into_iter().collect(),
            Output::Json => self.line(&rest).into_iter().collect(),
        }
    }

    /// A line of JSON: `text`, `delta`, `content` or `message` of it are words, `result` is the result, `error` a notice.
    /// All else, and what is no JSON, is told as it is.
    fn line(&mut self, line: &[u8]) -> Option<Said> {
        let Ok(value) = serde_json::from_slice::<Value>(line) else { return text_of(line) };
        if let Some(result) = value["result"].as_str() {
            self.result = Some(result.to_owned());
            return None;
        }
        let words = ["text", "delta", "content", "message"].into_iter().find_map(|key| value[key].as_str());
        match (words, value["error"].as_str()) {
            (Some(words), _) => Some(Said::Text { text: words.to_owned() }),
            (None, Some(error)) => Some(Said::Notice { text: error.to_owned() }),
            (None, None) => None,
        }
    }
}

fn text_of(bytes: &[u8]) -> Option<Said> {
    (!bytes.is_empty()).then(|| Said::Text { text: String::from_utf8_lossy(bytes).into_owned() })
}

/// How many bytes are whole characters: what may be the beginning of one waits for the rest of it.
fn whole_characters(bytes: &[u8]) -> usize {
    match std::str::from_utf8(bytes) {
        Ok(_) => bytes.len(),
        // Broken in the middle, it is told as it is.
        Err(error) if error.error_len().is_some() => bytes.len(),
        Err(error) => error.valid_up_to(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Said {
        Said::Text { text: text.to_owned() }
    }

    #[test]
    fn a_character_is_told_when_it_is_whole() {
        let mut words = Words::new(Output::Text);
        let euro = "€".as_bytes();
        assert_eq!(words.hear(b"1 "), [text("1 ")]);
        assert_eq!(words.hear(&euro[..2]), []);
        assert_eq!(words.hear(&euro[2..]), [text("€")]);
        assert_eq!(words.hear(b"\xff!"), [text("\u{fffd}!")]);
        assert_eq!(words.rest(), []);
    }

    #[test]
    fn lines_of_json_are_words_results_and_notices() {
        let mut words = Words::new(Output::Json);
        assert_eq!(words.hear(b"{\"text\":\"a\"}\n{\"type\":\"thread.started\"}\n{\"del"), [text("a")]);
        assert_eq!(words.hear(b"ta\":\"b\"}\nplain\n"), [text("b"), text("plain\n")]);
        assert_eq!(words.hear(b"{\"error\":\"hm\"}\n"), [Said::Notice { text: "hm".to_owned() }]);
        assert_eq!(words.hear(b"{\"result\":\"done\"}"), []);
        assert_eq!(words.rest(), []);
        assert_eq!(words.result.as_deref(), Some("done"));
    }

    #[test]
    fn a_prompt_stands_where_it_is_named_and_else_at_the_end() {
        let argv = |argv: &[&str]| argv.iter().map(|&it| it.to_owned()).collect::<Vec<String>>();
        let mut named = argv(&["a", "--say={prompt}", "-x"]);
        put(&mut named, "hi");
        assert_eq!(named, argv(&["a", "--say=hi", "-x"]));
        let mut last = argv(&["a", "-x"]);
        put(&mut last, "hi");
        assert_eq!(last, argv(&["a", "-x", "hi"]));
    }
}
