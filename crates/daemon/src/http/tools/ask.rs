//! Questions that an agent asks people by a tool call. The question belongs to the session and ends with its turn. The
//! call only waits, and can be repeated with the same ask id if the connection was lost.

use std::sync::Arc;

use qd_core::session::SessionCommand;
use qd_journal::{AskRow, EventFilter, EventTopic};
use qd_protocol::event::{Ask, AskStatus};
use qd_protocol::{ApiError, AskId};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::super::idempotency::{ResponseRecording, run_once};
use super::super::unreadable_row;
use super::ask_limit::send_asking_command;
use super::caller::{ToolCaller, agent_actor};
use super::inspect::poll_timeout;
use super::json_object;
use crate::actor::{ActorReply, IdempotencyKey};
use crate::daemon::{Daemon, SessionAddress, read_failed, stopping_error};
use crate::edge::internal_error;
use crate::user_content::check_remark;
use crate::{invalid_value, random};

/// The most answers that a question may offer.
const OPTIONS_MAX: usize = 100;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AskHumanArguments {
    #[serde(default)]
    question: Option<String>,
    #[serde(default)]
    options: Option<Vec<String>>,
    #[serde(default)]
    ask_id: Option<String>,
    #[serde(default)]
    timeout_s: Option<f64>,
    #[serde(default)]
    withdraw: Option<bool>,
}

/// Opens a question, or waits for or withdraws one that is open.
pub(super) async fn ask_human(
    daemon: &Arc<Daemon>,
    caller: &ToolCaller,
    arguments: AskHumanArguments,
    key: Option<IdempotencyKey>,
) -> Result<Map<String, Value>, ApiError> {
    let session = caller.require_session("`ask_human`")?;
    let AskHumanArguments { question, options, ask_id, timeout_s, withdraw } = arguments;
    let Some(ask_id) = ask_id else {
        return open_question(
            daemon,
            session,
            question.unwrap_or_default(),
            options.unwrap_or_default(),
            key,
        )
        .await;
    };
    let ask = AskId::parse(&ask_id).map_err(|_| ApiError::not_found("ask", &ask_id))?;
    let row = find_question(daemon, session, &ask).await?;
    if withdraw == Some(true) {
        let command = SessionCommand::WithdrawQuestion { ask: ask.clone() };
        daemon.send_command(session, &agent_actor(session), command, None).await?;
        return ask_json(&find_question(daemon, session, &ask).await?);
    }
    let deadline = Instant::now() + poll_timeout(timeout_s)?;
    let kinds = Arc::from(["ask.resolved".to_owned()]);
    let mut events = daemon
        .journal
        .subscribe(EventFilter { topic: EventTopic::Session(row.session), kinds: Some(kinds) }, None);
    let mut stop = daemon.stop_signal();
    // The subscription comes before the query, so the answer cannot fall between the two.
    let mut row = find_question(daemon, session, &ask).await?;
    while row.pending {
        tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => return Err(stopping_error()),
            event = events.next() => drop(event.map_err(read_failed)?),
            () = tokio::time::sleep_until(deadline) => break,
        }
        row = find_question(daemon, session, &ask).await?;
    }
    if !row.pending {
        // This response carries the answer. A caller that loses the response asks again.
        let command = SessionCommand::AnswerDelivered { ask };
        daemon.send_command(session, &agent_actor(session), command, None).await?;
    }
    ask_json(&row)
}

async fn open_question(
    daemon: &Arc<Daemon>,
    session: &Arc<SessionAddress>,
    prompt: String,
    options: Vec<String>,
    key: Option<IdempotencyKey>,
) -> Result<Map<String, Value>, ApiError> {
    if prompt.trim().is_empty() {
        return Err(invalid_value("`question` is empty; give the question to ask"));
    }
    check_remark("question", Some(&prompt))?;
    if options.len() > OPTIONS_MAX || options.iter().any(|option| option.trim().is_empty()) {
        return Err(invalid_value(format!(
            "`options` must be at most {OPTIONS_MAX} answers, none of them empty"
        )));
    }
    check_remark("options", Some(&options.concat()))?;
    let ask = AskId::from_random(&random::bytes::<16>());
    let open = |key| async {
        let question = SessionCommand::OpenQuestion { ask, prompt, options };
        let completion = send_asking_command(daemon, session, &agent_actor(session), question, key).await?;
        Ok((completion.reply, ResponseRecording::WrittenWithEffect))
    };
    match run_once(daemon, key, open).await? {
        ActorReply::AskOpened(ask) => Ok(json_object(json!({ "ask_id": ask, "state": AskStatus::Pending }))),
        _ => Err(internal_error()),
    }
}

/// A question that this session asked by a tool call.
async fn find_question(daemon: &Daemon, session: &SessionAddress, id: &AskId) -> Result<AskRow, ApiError> {
    let row = daemon.journal.ask(id).await.map_err(read_failed)?;
    let row = row.filter(|row| row.session == session.key).ok_or_else(|| ApiError::not_found("ask", id))?;
    if decode_ask(&row)?.asked_by_tool { Ok(row) } else { Err(ApiError::not_found("ask", id)) }
}

fn decode_ask(row: &AskRow) -> Result<Ask, ApiError> {
    serde_json::from_slice(&row.doc).map_err(unreadable_row("ask", &row.id))
}

fn ask_json(row: &AskRow) -> Result<Map<String, Value>, ApiError> {
    let ask = decode_ask(row)?;
    let mut result = json!({ "ask_id": ask.id, "state": ask.state });
    if let Some(answer) = ask.answer {
        result["answer"] = json!(answer.value);
    }
    Ok(json_object(result))
}
