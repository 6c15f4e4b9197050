//! The driver for any command: one process for each prompt, which gets the prompt on stdin or among its arguments and
//! whose words are its answer. Its exit status decides how the turn ended. It has no conversation, asks nothing, and is
//! stopped by a signal.

use std::sync::Arc;

use qd_keeper::KeeperHandle;
use qd_link::LinkClosed;
use qd_protocol::link::{TurnOutcome, TurnStopReason, TurnUpdate};
use qd_protocol::manifest::{ExecOutputFormat, Manifest, PromptTransport};
use qd_protocol::worker::AgentSpec;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::process::{AgentProcess, AgentProgram};
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// What stands for the prompt among the arguments.
const PROMPT_PLACEHOLDER: &str = "{prompt}";
/// How much is read at once.
const READ_SIZE: usize = 16 << 10;
/// The longest line of JSON; a longer one is text.
const LINE_MAX: usize = 8 << 20;

/// A command, ready to be run.
pub(crate) struct ExecAgent {
    manifest: Arc<Manifest>,
    spec: Box<AgentSpec>,
    keeper: Arc<KeeperHandle>,
}

impl ExecAgent {
    /// Nothing is started before there is a prompt.
    pub(crate) fn new(spec: &AgentSpec, manifest: Arc<Manifest>, keeper: Arc<KeeperHandle>) -> Self {
        Self { manifest, spec: Box::new(spec.clone()), keeper }
    }

    /// One turn: the command from its start to its end. A cancel is a signal, which the caller sends.
    pub(crate) async fn turn(
        &mut self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<DriverTurnEnd, LinkClosed> {
        if turn.is_cancelled() {
            return Ok(DriverTurnEnd::Stopped(TurnOutcome::of(TurnStopReason::Cancelled)));
        }
        let mut program = AgentProgram::from_manifest(&self.manifest, &self.spec);
        let on_stdin = self.manifest.turn.prompt == PromptTransport::Stdin && !has_placeholder(&program.argv);
        if !on_stdin {
            insert_prompt(&mut program.argv, &prompt.text);
        }
        let started = AgentProcess::start_in_turn(&self.keeper, &self.spec, program).await;
        let (mut process, mut stdin, mut stdout) = match started {
            Ok(started) => started,
            Err(error) => return Ok(DriverTurnEnd::Stopped(TurnOutcome::failed(error))),
        };
        let text = if on_stdin { prompt.text.as_bytes() } else { &[] };
        let feed = async {
            // A command that does not read its prompt has no need of it.
            let _taken = stdin.write_all(text).await;
            drop(stdin);
        };
        let mut words = ExecOutputDecoder::new(self.manifest.turn.output);
        let mut buffer = vec![0; READ_SIZE];
        let hear = async {
            loop {
                let read = stdout.read(&mut buffer).await.unwrap_or_default();
                if read == 0 {
                    break;
                }
                for said in words.decode(&buffer[..read]) {
                    turn.emit(said).await?;
                }
            }
            Ok::<(), LinkClosed>(())
        };
        let heard = async {
            let ((), heard) = tokio::join!(feed, hear);
            heard
        };
        tokio::select! {
            // The cancel first. The command is a process of the turn, all of which our caller ends then.
            biased;
            () = turn.cancelled() => return Ok(DriverTurnEnd::Stopped(TurnOutcome::of(TurnStopReason::Cancelled))),
            heard = heard => heard?,
        }
        for said in words.finish() {
            turn.emit(said).await?;
        }
        Ok(DriverTurnEnd::Stopped(match process.exit_status().await {
            Some(0) => TurnOutcome { text: words.result, ..TurnOutcome::of(TurnStopReason::EndTurn) },
            _ => TurnOutcome::failed(process.exit_error("and so its turn failed").await),
        }))
    }
}

fn has_placeholder(argv: &[String]) -> bool {
    argv.iter().any(|argument| argument.contains(PROMPT_PLACEHOLDER))
}

/// Puts the prompt where it is named, or else at the end.
fn insert_prompt(argv: &mut Vec<String>, prompt: &str) {
    if !has_placeholder(argv) {
        argv.push(prompt.to_owned());
        return;
    }
    for argument in argv {
        if argument.contains(PROMPT_PLACEHOLDER) {
            *argument = argument.replace(PROMPT_PLACEHOLDER, prompt);
        }
    }
}

/// What a command has said, piece by piece, cut where characters and lines end.
struct ExecOutputDecoder {
    output: ExecOutputFormat,
    undecoded: Vec<u8>,
    /// The result, if a line of JSON gave one.
    result: Option<String>,
}

impl ExecOutputDecoder {
    fn new(output: ExecOutputFormat) -> Self {
        Self { output, undecoded: Vec::new(), result: None }
    }

    fn decode(&mut self, more: &[u8]) -> Vec<TurnUpdate> {
        self.undecoded.extend_from_slice(more);
        match self.output {
            ExecOutputFormat::Text => {
                let whole = whole_characters_len(&self.undecoded);
                let text: Vec<u8> = self.undecoded.drain(..whole).collect();
                text_update(&text).into_iter().collect()
            }
            ExecOutputFormat::Json => {
                let mut said = Vec::new();
                while let Some(end) = self.undecoded.iter().position(|byte| *byte == b'\n') {
                    let line: Vec<u8> = self.undecoded.drain(..=end).collect();
                    said.extend(self.decode_line(&line));
                }
                if self.undecoded.len() > LINE_MAX {
                    let line = std::mem::take(&mut self.undecoded);
                    said.extend(text_update(&line));
                }
                said
            }
        }
    }

    /// What is left when there is no more to come.
    fn finish(&mut self) -> Vec<TurnUpdate> {
        let rest = std::mem::take(&mut self.undecoded);
        match self.output {
            ExecOutputFormat::Text => text_update(&rest).into_iter().collect(),
            ExecOutputFormat::Json => self.decode_line(&rest).into_iter().collect(),
        }
    }

    /// A line of JSON: `text`, `delta`, `content` or `message` of it are words, `result` is the result, `error` a notice.
    /// All else, and what is no JSON, is told as it is.
    fn decode_line(&mut self, line: &[u8]) -> Option<TurnUpdate> {
        let Ok(value) = serde_json::from_slice::<Value>(line) else { return text_update(line) };
        if let Some(result) = value["result"].as_str() {
            self.result = Some(result.to_owned());
            return None;
        }
        let words = ["text", "delta", "content", "message"].into_iter().find_map(|key| value[key].as_str());
        match (words, value["error"].as_str()) {
            (Some(words), _) => Some(TurnUpdate::Text { text: words.to_owned() }),
            (None, Some(error)) => Some(TurnUpdate::Notice { text: error.to_owned() }),
            (None, None) => None,
        }
    }
}

fn text_update(bytes: &[u8]) -> Option<TurnUpdate> {
    (!bytes.is_empty()).then(|| TurnUpdate::Text { text: String::from_utf8_lossy(bytes).into_owned() })
}

/// How many bytes are whole characters: what may be the beginning of one waits for the rest of it.
fn whole_characters_len(bytes: &[u8]) -> usize {
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

    fn text_update_of(text: &str) -> TurnUpdate {
        TurnUpdate::Text { text: text.to_owned() }
    }

    #[test]
    fn a_character_is_told_when_it_is_whole() {
        let mut words = ExecOutputDecoder::new(ExecOutputFormat::Text);
        let euro = "€".as_bytes();
        assert_eq!(words.decode(b"1 "), [text_update_of("1 ")]);
        assert_eq!(words.decode(&euro[..2]), []);
        assert_eq!(words.decode(&euro[2..]), [text_update_of("€")]);
        assert_eq!(words.decode(b"\xff!"), [text_update_of("\u{fffd}!")]);
        assert_eq!(words.finish(), []);
    }

    #[test]
    fn lines_of_json_are_words_results_and_notices() {
        let mut words = ExecOutputDecoder::new(ExecOutputFormat::Json);
        assert_eq!(
            words.decode(b"{\"text\":\"a\"}\n{\"type\":\"thread.started\"}\n{\"del"),
            [text_update_of("a")]
        );
        assert_eq!(words.decode(b"ta\":\"b\"}\nplain\n"), [text_update_of("b"), text_update_of("plain\n")]);
        assert_eq!(words.decode(b"{\"error\":\"hm\"}\n"), [TurnUpdate::Notice { text: "hm".to_owned() }]);
        assert_eq!(words.decode(b"{\"result\":\"done\"}"), []);
        assert_eq!(words.finish(), []);
        assert_eq!(words.result.as_deref(), Some("done"));
    }

    #[test]
    fn a_prompt_stands_where_it_is_named_and_else_at_the_end() {
        let argv = |argv: &[&str]| argv.iter().map(|&it| it.to_owned()).collect::<Vec<String>>();
        let mut named = argv(&["a", "--say={prompt}", "-x"]);
        insert_prompt(&mut named, "hi");
        assert_eq!(named, argv(&["a", "--say=hi", "-x"]));
        let mut last = argv(&["a", "-x"]);
        insert_prompt(&mut last, "hi");
        assert_eq!(last, argv(&["a", "-x", "hi"]));
    }
}
