//! Things that are being said while other things happen. A driver's loop holds one at a time and does not listen to its
//! agent meanwhile, which is how a slow journal slows the agent down.

use futures_util::future::BoxFuture;
use qd_link::{AgentOutput, LinkClosed};
use qd_protocol::RunId;
use qd_protocol::link::{AgentUpdate, TurnUpdate};

use crate::turn::DriverTurn;

/// Something that is being said.
pub(crate) type EmitFuture<'a> = BoxFuture<'a, Result<(), LinkClosed>>;

/// Waits for something to be said; for ever if nothing is.
pub(crate) async fn wait_for_emit(telling: &mut Option<EmitFuture<'_>>) -> Result<(), LinkClosed> {
    match telling {
        Some(telling) => telling.await,
        None => std::future::pending().await,
    }
}

/// Says something of a turn.
pub(crate) async fn emit_all(turn: &DriverTurn<'_>, said: Vec<TurnUpdate>) -> Result<(), LinkClosed> {
    emit_all_for_run(turn, turn.run.clone(), said).await
}

/// The same of any run, in this turn.
pub(crate) async fn emit_all_for_run(
    turn: &DriverTurn<'_>,
    run: RunId,
    said: Vec<TurnUpdate>,
) -> Result<(), LinkClosed> {
    for what in said {
        turn.emit_for_run(run.clone(), what).await?;
    }
    Ok(())
}

/// Late words of the turn before, then notices.
pub(crate) async fn emit_late_and_notices(
    turn: &DriverTurn<'_>,
    late: Option<EmitFuture<'static>>,
    notices: Vec<String>,
) -> Result<(), LinkClosed> {
    if let Some(late) = late {
        late.await?;
    }
    emit_all(turn, notices.into_iter().map(|text| TurnUpdate::Notice { text }).collect()).await
}

/// Says something of a turn that is over.
pub(crate) async fn emit_late(
    voice: AgentOutput,
    run: RunId,
    said: Vec<TurnUpdate>,
) -> Result<(), LinkClosed> {
    for what in said {
        voice.send(AgentUpdate::Turn { run: run.clone(), update: what }).await?;
    }
    Ok(())
}
