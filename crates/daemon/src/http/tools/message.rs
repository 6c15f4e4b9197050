//! Words to a session within reach, and an end to what it does.

use std::sync::Arc;

use qd_journal::SessionRow;
use qd_protocol::api::NewRun;
use qd_protocol::{ApiError, RunId};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::super::fault;
use super::super::once::once;
use super::super::runs::{accept, receipt, run_of_key, stop, tell};
use super::caller::{Caller, Reach};
use super::object;
use crate::actor::{Answer, IdempotencyKey};
use crate::daemon::{Daemon, read_failed};
use crate::{invalid, random};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Send {
    to: String,
    text: String,
    #[serde(default)]
    steer: Option<bool>,
}

/// Says something to a session.
pub(super) async fn send(
    daemon: &Arc<Daemon>,
    caller: &Caller,
    wanted: Send,
    key: Option<IdempotencyKey>,
) -> Result<Map<String, Value>, ApiError> {
    let Send { to, text, steer } = wanted;
    if text.trim().is_empty() {
        return Err(invalid("`text` is empty; say something"));
    }
    let row = caller.find(daemon, &to, Reach::Below).await?;
    deliver(daemon, &row, text, steer.unwrap_or(false), key).await
}

/// The one way by which a message reaches a session: into its turn, or as its next prompt.
async fn deliver(
    daemon: &Arc<Daemon>,
    row: &SessionRow,
    text: String,
    steer: bool,
    key: Option<IdempotencyKey>,
) -> Result<Map<String, Value>, ApiError> {
    if steer {
        return match once(daemon, key, |key| tell(daemon, row, text, key)).await? {
            Answer::Steered(steered) => {
                Ok(object(json!({ "session": row.id, "run": steered.run_id, "steered": true })))
            }
            _ => Err(fault()),
        };
    }
    let session = daemon.session_ref(row)?;
    let named = key.as_ref().map(run_of_key);
    let run = named.clone().unwrap_or_else(|| RunId::from_random(&random::bytes::<16>()));
    let prompt = NewRun { session_id: row.id.clone(), prompt: text, run_id: None, attachments: Vec::new() };
    let deed = |key| accept(daemon, &session, prompt, run.clone(), named.is_some(), key);
    let receipt = match once(daemon, key, deed).await? {
        Answer::Accepted(receipt) => receipt,
        Answer::Known => {
            let row = daemon.journal.run(&run).await.map_err(read_failed)?;
            receipt(&row.ok_or_else(|| ApiError::not_found("run", &run))?)?
        }
        _ => return Err(fault()),
    };
    Ok(object(
        json!({ "session": row.id, "run": receipt.run_id, "position": receipt.position, "steered": false }),
    ))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Cancel {
    session: String,
}

/// Stops what a session does, and all below it.
pub(super) async fn cancel(
    daemon: &Arc<Daemon>,
    caller: &Caller,
    wanted: Cancel,
    key: Option<IdempotencyKey>,
) -> Result<Map<String, Value>, ApiError> {
    let row = caller.find(daemon, &wanted.session, Reach::Below).await?;
    let session = daemon.session_ref(&row)?;
    let reason = match caller {
        Caller::User => None,
        Caller::Session(own) => Some(format!("by the agent of {}", own.id)),
    };
    match once(daemon, key, |key| stop(daemon, &session, None, reason, key)).await? {
        Answer::Cancelled(hit) => {
            Ok(object(json!({ "session": row.id, "cancelled": hit.cancelled, "idle": hit.idle })))
        }
        _ => Err(fault()),
    }
}
