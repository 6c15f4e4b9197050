//! The `echo` agent: repeats its prompt word by word. It uses nothing but its turn.

use std::time::Duration;

use futures_util::future::BoxFuture;
use qd_link::LinkClosed;
use qd_protocol::event::RunError;
use qd_protocol::link::{AgentUpdate, TurnOutcome, TurnStopReason};
use qd_protocol::text::split_words;
use qd_protocol::worker::AgentSpec;

use crate::agent_driver::{AgentDriver, AgentStart};
use crate::turn::{DriverPrompt, DriverTurn, DriverTurnEnd};

/// Has no state, so it takes no memory.
pub(crate) struct EchoAgent;

impl EchoAgent {
    /// Starts nothing.
    pub(crate) async fn start(_: AgentStart<'_>) -> Result<Self, RunError> {
        Ok(Self)
    }
}

impl AgentDriver for EchoAgent {
    fn ready_update(&self, spec: &AgentSpec) -> AgentUpdate {
        AgentUpdate::Ready { agent_session_id: spec.agent_session_id.clone(), steers: false }
    }

    /// Waits if the prompt says so, then echoes the rest of it. A cancel ends it at any point.
    fn turn<'a>(
        &'a mut self,
        turn: &'a DriverTurn<'a>,
        prompt: &'a DriverPrompt,
    ) -> BoxFuture<'a, Result<DriverTurnEnd, LinkClosed>> {
        Box::pin(async move {
            tokio::select! {
                // The cancel first: a cancel that has arrived when the last word is sent takes precedence.
                biased;
                () = turn.cancelled() => Ok(DriverTurnEnd::Stopped(TurnOutcome::cancelled())),
                end = echo(turn, &prompt.text) => end,
            }
        })
    }
}

async fn echo(turn: &DriverTurn<'_>, prompt: &str) -> Result<DriverTurnEnd, LinkClosed> {
    let (wait, rest) = parse_sleep(prompt).unwrap_or((Duration::ZERO, prompt));
    // Even a sleep of nothing goes through the timer, which ticks once a millisecond.
    if !wait.is_zero() {
        tokio::time::sleep(wait).await;
    }
    for word in split_words(rest) {
        turn.emit_text(word).await?;
    }
    Ok(DriverTurnEnd::Stopped(TurnOutcome {
        text: Some(format!("echo: {rest}")),
        ..TurnOutcome::of(TurnStopReason::EndTurn)
    }))
}

/// Parses `__sleep_ms:N REST`. Anything that only looks similar is an ordinary prompt.
fn parse_sleep(prompt: &str) -> Option<(Duration, &str)> {
    let argument = prompt.strip_prefix("__sleep_ms:")?;
    let (ms, rest) = argument.split_once(char::is_whitespace).unwrap_or((argument, ""));
    let ms = ms.bytes().all(|b| b.is_ascii_digit()).then(|| ms.parse().ok())??;
    Some((Duration::from_millis(ms), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_number_of_milliseconds_is_a_wait() {
        assert_eq!(parse_sleep("__sleep_ms:250 a b"), Some((Duration::from_millis(250), "a b")));
        assert_eq!(parse_sleep("__sleep_ms:250  a"), Some((Duration::from_millis(250), " a")));
        assert_eq!(parse_sleep("__sleep_ms:7"), Some((Duration::from_millis(7), "")));
        for plain in
            ["__sleep_ms:", "__sleep_ms: a", "__sleep_ms:-1 a", "__sleep_ms:+1 a", "__sleep_ms:1s a", "a"]
        {
            assert_eq!(parse_sleep(plain), None, "{plain}");
        }
    }
}
