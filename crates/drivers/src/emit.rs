//! Futures that send updates while a driver's loop goes on. The loop holds one at a time and does not read from its
//! agent meanwhile: this is how a slow journal slows the agent down.

use futures_util::future::BoxFuture;
use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::RunId;
use qd_protocol::link::{AgentUpdate, TurnUpdate};

use crate::turn::DriverTurn;

/// Updates that are being sent.
pub(crate) type EmitFuture<'a> = BoxFuture<'a, Result<(), LinkClosed>>;

/// Waits for updates to be sent; for ever if there are none.
pub(crate) async fn wait_for_emit(emitting: &mut Option<EmitFuture<'_>>) -> Result<(), LinkClosed> {
    match emitting {
        Some(emitting) => emitting.await,
        None => std::future::pending().await,
    }
}

/// Sends updates of this turn's run.
pub(crate) async fn emit_all(turn: &DriverTurn<'_>, updates: Vec<TurnUpdate>) -> Result<(), LinkClosed> {
    emit_all_for_run(turn, turn.run.clone(), updates).await
}

/// Sends updates of any run during this turn.
pub(crate) async fn emit_all_for_run(
    turn: &DriverTurn<'_>,
    run: RunId,
    updates: Vec<TurnUpdate>,
) -> Result<(), LinkClosed> {
    for update in updates {
        turn.emit_for_run(run.clone(), update).await?;
    }
    Ok(())
}

/// Sends the late updates of the turn before, then notices.
pub(crate) async fn emit_late_and_notices(
    turn: &DriverTurn<'_>,
    late: Option<EmitFuture<'static>>,
    notices: Vec<String>,
) -> Result<(), LinkClosed> {
    if let Some(late) = late {
        late.await?;
    }
    emit_all(turn, notices.into_iter().map(TurnUpdate::notice).collect()).await
}

/// The notice about a file of the prompt that the agent cannot take.
pub(crate) fn left_out_notice(name: impl std::fmt::Display) -> String {
    format!("the agent cannot take the file {name}, which was left out")
}

/// The notice about a conversation that could not be resumed.
pub(crate) fn new_conversation_notice(reason: impl std::fmt::Display) -> String {
    format!("the agent could not resume its old conversation and started a new one: {reason}")
}

/// Sends updates of a turn that is over.
pub(crate) async fn emit_late(
    output: AgentOutput,
    run: RunId,
    updates: Vec<TurnUpdate>,
) -> Result<(), LinkClosed> {
    for update in updates {
        output.send(AgentUpdate::Turn { run: run.clone(), update }).await?;
    }
    Ok(())
}
