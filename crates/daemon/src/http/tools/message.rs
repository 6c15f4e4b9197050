//! Words to a session within reach, and an end to what it does.

use std::sync::Arc;

use qd_protocol::ApiError;
use qd_protocol::mail::{Deliver, MailKind};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::super::fault;
use super::super::mail::{mail_of_key, post};
use super::super::once::once;
use super::super::runs::stop;
use super::caller::{Caller, Reach};
use super::object;
use crate::actor::{Answer, IdempotencyKey};
use crate::daemon::Daemon;
use crate::invalid;
use crate::mail::{Outgoing, Sender};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Send {
    to: String,
    text: String,
    #[serde(default)]
    steer: Option<bool>,
}

/// Puts a message into a session's mailbox, which decides what becomes of it.
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
    let session = daemon.session_ref(&row)?;
    let mail = Outgoing {
        from: match caller {
            Caller::User => Sender::User,
            Caller::Session(own) => Sender::Session { id: own.id.clone(), name: None },
        },
        id: key.as_ref().map(mail_of_key),
        kind: MailKind::Task,
        text,
        in_reply_to: None,
        correlation_id: None,
        deliver: steer.unwrap_or(false).then_some(Deliver::Steer),
        run: None,
    };
    let receipt = post(daemon, &session, mail, key).await?;
    Ok(object(json!({
        "session": row.id,
        "message": receipt.id,
        "run": receipt.run_id,
        "steered": receipt.deliver == Deliver::Steer,
    })))
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
