//! The driver for any command: one process per prompt, which gets the prompt on stdin or in its arguments and whose
//! output is the answer. The exit status decides how the turn ended. The command has no conversation, asks nothing, and
//! is stopped by a signal.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use qd_keeper::KeeperHandle;
use qd_link::LinkClosed;
use qd_protocol::event::RunError;
use qd_protocol::link::{AgentUpdate, TurnOutcome, TurnStopReason, TurnUpdate};
use qd_protocol::manifest::{ExecOutputFormat, Manifest, PromptTransport};
use qd_protocol::worker::AgentSpec;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::agent_driver::{AgentDriver, AgentStart};
use crate::process::{AgentProcess, AgentProgram};
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// Stands for the prompt in the command's arguments.
const PROMPT_PLACEHOLDER: &str = "{prompt}";
/// The most bytes read at a time.
const READ_SIZE: usize = 16 << 10;
/// The longest line that is parsed as JSON; a longer one is text.
const LINE_MAX: usize = 8 << 20;

/// A command that is started for each prompt.
pub(crate) struct ExecAgent {
    manifest: Arc<Manifest>,
    spec: Box<AgentSpec>,
    keeper: Arc<KeeperHandle>,
}

impl ExecAgent {
    /// Starts nothing; the command runs when there is a prompt.
    pub(crate) async fn start(start: AgentStart<'_>) -> Result<Self, RunError> {
        let keeper = Arc::clone(start.supervision()?.keeper);
        Ok(Self { spec: Box::new(start.spec.clone()), manifest: start.manifest, keeper })
    }

    /// Runs the command from its start to its end. On a cancel this returns, and the caller ends the command with a
    /// signal.
    async fn run_command(
        &self,
        turn: &DriverTurn<'_>,
        prompt: &DriverPrompt,
    ) -> Result<DriverTurnEnd, LinkClosed> {
        if turn.is_cancelled() {
            return Ok(DriverTurnEnd::Stopped(TurnOutcome::cancelled()));
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
            // A command that does not read its prompt does not need it.
            let _written = stdin.write_all(text).await;
            drop(stdin);
        };
        let mut decoder = ExecOutputDecoder::new(self.manifest.turn.output);
        let mut buffer = vec![0; READ_SIZE];
        let read_output = async {
            loop {
                let read = stdout.read(&mut buffer).await.unwrap_or_default();
                if read == 0 {
                    break;
                }
                for update in decoder.decode(&buffer[..read]) {
                    turn.emit(update).await?;
                }
            }
            Ok::<(), LinkClosed>(())
        };
        let exchange = async {
            let ((), result) = tokio::join!(feed, read_output);
            result
        };
        tokio::select! {
            // The cancel first. The command is a process of the turn, and the caller ends all of those.
            biased;
            () = turn.cancelled() => return Ok(DriverTurnEnd::Stopped(TurnOutcome::cancelled())),
            result = exchange => result?,
        }
        for update in decoder.finish() {
            turn.emit(update).await?;
        }
        Ok(DriverTurnEnd::Stopped(match process.exit_status().await {
            Some(0) => TurnOutcome { text: decoder.result, ..TurnOutcome::of(TurnStopReason::EndTurn) },
            _ => TurnOutcome::failed(process.exit_error("and so its turn failed").await),
        }))
    }
}

impl AgentDriver for ExecAgent {
    fn ready_update(&self, spec: &AgentSpec) -> AgentUpdate {
        AgentUpdate::Ready { agent_session_id: spec.agent_session_id.clone(), steers: false }
    }

    fn turn<'a>(
        &'a mut self,
        turn: &'a DriverTurn<'a>,
        prompt: &'a DriverPrompt,
    ) -> BoxFuture<'a, Result<DriverTurnEnd, LinkClosed>> {
        Box::pin(self.run_command(turn, prompt))
    }
}

fn has_placeholder(argv: &[String]) -> bool {
    argv.iter().any(|argument| argument.contains(PROMPT_PLACEHOLDER))
}

/// Replaces the placeholder with the prompt, or else appends the prompt.
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

/// Decodes a command's output as it arrives. Incomplete characters and lines wait for the rest.
struct ExecOutputDecoder {
    output: ExecOutputFormat,
    undecoded: Vec<u8>,
    /// The result, if a JSON line had one.
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
                let mut updates = Vec::new();
                while let Some(end) = self.undecoded.iter().position(|byte| *byte == b'\n') {
                    let line: Vec<u8> = self.undecoded.drain(..=end).collect();
                    updates.extend(self.decode_line(&line));
                }
                if self.undecoded.len() > LINE_MAX {
                    let line = std::mem::take(&mut self.undecoded);
                    updates.extend(text_update(&line));
                }
                updates
            }
        }
    }

    /// Decodes the rest when the output is over.
    fn finish(&mut self) -> Vec<TurnUpdate> {
        let rest = std::mem::take(&mut self.undecoded);
        match self.output {
            ExecOutputFormat::Text => text_update(&rest).into_iter().collect(),
            ExecOutputFormat::Json => self.decode_line(&rest).into_iter().collect(),
        }
    }

    /// Decodes a line of JSON: `text`, `delta`, `content` or `message` is text, `result` is the result, and `error`
    /// becomes a notice. Other JSON is ignored. A line that is not JSON is text.
    fn decode_line(&mut self, line: &[u8]) -> Option<TurnUpdate> {
        let Ok(value) = serde_json::from_slice::<Value>(line) else { return text_update(line) };
        if let Some(result) = value["result"].as_str() {
            self.result = Some(result.to_owned());
            return None;
        }
        let text = ["text", "delta", "content", "message"].into_iter().find_map(|key| value[key].as_str());
        match (text, value["error"].as_str()) {
            (Some(text), _) => Some(TurnUpdate::Text { text: text.to_owned() }),
            (None, Some(error)) => Some(TurnUpdate::notice(error.to_owned())),
            (None, None) => None,
        }
    }
}

fn text_update(bytes: &[u8]) -> Option<TurnUpdate> {
    (!bytes.is_empty()).then(|| TurnUpdate::Text { text: String::from_utf8_lossy(bytes).into_owned() })
}

/// The length of the bytes that are complete characters. An incomplete character at the end waits for the rest.
fn whole_characters_len(bytes: &[u8]) -> usize {
    match std::str::from_utf8(bytes) {
        Ok(_) => bytes.len(),
        // Invalid bytes in the middle are passed on and shown as replacement characters.
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
    fn a_character_is_emitted_only_when_it_is_complete() {
        let mut decoder = ExecOutputDecoder::new(ExecOutputFormat::Text);
        let euro = "€".as_bytes();
        assert_eq!(decoder.decode(b"1 "), [text_update_of("1 ")]);
        assert_eq!(decoder.decode(&euro[..2]), []);
        assert_eq!(decoder.decode(&euro[2..]), [text_update_of("€")]);
        assert_eq!(decoder.decode(b"\xff!"), [text_update_of("\u{fffd}!")]);
        assert_eq!(decoder.finish(), []);
    }

    #[test]
    fn lines_of_json_are_text_results_and_notices() {
        let mut decoder = ExecOutputDecoder::new(ExecOutputFormat::Json);
        assert_eq!(
            decoder.decode(b"{\"text\":\"a\"}\n{\"type\":\"thread.started\"}\n{\"del"),
            [text_update_of("a")]
        );
        assert_eq!(decoder.decode(b"ta\":\"b\"}\nplain\n"), [text_update_of("b"), text_update_of("plain\n")]);
        assert_eq!(decoder.decode(b"{\"error\":\"hm\"}\n"), [TurnUpdate::notice("hm".to_owned())]);
        assert_eq!(decoder.decode(b"{\"result\":\"done\"}"), []);
        assert_eq!(decoder.finish(), []);
        assert_eq!(decoder.result.as_deref(), Some("done"));
    }

    #[test]
    fn a_prompt_replaces_its_placeholder_or_is_appended() {
        let argv = |argv: &[&str]| argv.iter().map(|&it| it.to_owned()).collect::<Vec<String>>();
        let mut named = argv(&["a", "--say={prompt}", "-x"]);
        insert_prompt(&mut named, "hi");
        assert_eq!(named, argv(&["a", "--say=hi", "-x"]));
        let mut last = argv(&["a", "-x"]);
        insert_prompt(&mut last, "hi");
        assert_eq!(last, argv(&["a", "-x", "hi"]));
    }
}
