//! Messages to a session within reach, and cancels.

use std::sync::Arc;

use qd_protocol::ApiError;
use qd_protocol::mail::{MailDelivery, MailKind};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::super::idempotency::run_once;
use super::super::mail::{mail_id_from_key, post_mail};
use super::super::runs::cancel_runs;
use super::caller::{SessionReach, ToolCaller};
use super::json_object;
use crate::actor::{ActorReply, IdempotencyKey};
use crate::daemon::Daemon;
use crate::edge::internal_error;
use crate::invalid_value;
use crate::mail::{MailSender, OutgoingMail};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SendMessageArguments {
    to: String,
    text: String,
    #[serde(default)]
    steer: Option<bool>,
}

/// Puts a message into a session's mailbox. The receiving session decides what becomes of it.
pub(super) async fn send_message(
    daemon: &Arc<Daemon>,
    caller: &ToolCaller,
    arguments: SendMessageArguments,
    key: Option<IdempotencyKey>,
) -> Result<Map<String, Value>, ApiError> {
    let SendMessageArguments { to, text, steer } = arguments;
    if text.trim().is_empty() {
        return Err(invalid_value("`text` is empty"));
    }
    let row = caller.find_session(daemon, &to, SessionReach::Descendants).await?;
    let session = daemon.session_address(&row)?;
    let mail = OutgoingMail {
        from: match caller {
            ToolCaller::User(_) => MailSender::User,
            ToolCaller::Session(own) => MailSender::Session { id: own.id.clone(), name: None },
        },
        id: key.as_ref().map(mail_id_from_key),
        kind: MailKind::Task,
        text,
        in_reply_to: None,
        correlation_id: None,
        deliver: steer.unwrap_or(false).then_some(MailDelivery::Steer),
        run: None,
    };
    let receipt = post_mail(daemon, &session, &caller.actor(), mail, key).await?;
    Ok(json_object(json!({
        "session": row.id,
        "message": receipt.id,
        "run": receipt.run_id,
        "steered": receipt.deliver == MailDelivery::Steer,
    })))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CancelToolArguments {
    session: String,
}

/// Cancels the runs of a session and of its descendants.
pub(super) async fn cancel(
    daemon: &Arc<Daemon>,
    caller: &ToolCaller,
    arguments: CancelToolArguments,
    key: Option<IdempotencyKey>,
) -> Result<Map<String, Value>, ApiError> {
    let row = caller.find_session(daemon, &arguments.session, SessionReach::Descendants).await?;
    let session = daemon.session_address(&row)?;
    let reason = match caller {
        ToolCaller::User(_) => None,
        ToolCaller::Session(own) => Some(format!("by the agent of {}", own.id)),
    };
    let actor = caller.actor();
    match run_once(daemon, key, |key| cancel_runs(daemon, &session, &actor, None, reason, key)).await? {
        ActorReply::Cancelled(response) => Ok(json_object(
            json!({ "session": row.id, "cancelled": response.cancelled, "idle": response.idle }),
        )),
        _ => Err(internal_error()),
    }
}
