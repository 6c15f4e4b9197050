//! The scripted agent, which does in a test what a model would do by itself. `steps` reads a script, `interpreter`
//! plays it against a turn; neither knows what lies between the turn and its session.

mod interpreter;
mod steps;

use std::collections::BTreeMap;
use std::time::Duration;

use qd_link::Closed;
use qd_protocol::event::RunError;
use qd_protocol::link::Stop;

use crate::drivers::echo;
use crate::turn::{End, Turn, error, failed, outcome};

/// The variable that delays readiness.
const READY_MS: &str = "SCRIPT_READY_MS";

/// Waits as long as the environment says.
pub(crate) async fn prepare(env: &BTreeMap<String, String>) -> Result<(), RunError> {
    if let Some(ms) = env.get(READY_MS) {
        let ms = ms.trim().parse().map_err(|_| {
            // The value is not shown: none of the environment's ever is.
            error("agent_failed_to_start", &format!("{READY_MS} must be a whole number of milliseconds"))
        })?;
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }
    Ok(())
}

/// One turn: plays the prompt if it is a script, echoes it if not. A script with a bad step is not begun.
pub(crate) async fn turn(turn: &Turn<'_>, prompt: &str) -> Result<End, Closed> {
    match steps::parse(prompt) {
        Ok(Some(steps)) => interpreter::play(turn, steps).await,
        Ok(None) => {
            echo::stream(turn, prompt).await?;
            Ok(End::Stopped(outcome(Stop::EndTurn)))
        }
        Err(bad) => Ok(End::Stopped(failed(error("invalid_script", &bad.to_string())))),
    }
}
