//! Questions that an agent asks people by a tool call. The question is the session's, and ends with its turn; the call
//! only waits, and can be made again under the same id by whoever lost the connection.

use std::sync::Arc;

use qd_core::session::Command;
use qd_journal::{AskRow, Filter, Topic};
use qd_protocol::event::{Ask, AskState};
use qd_protocol::{ApiError, AskId};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::super::once::{Kept, once};
use super::super::{fault, unreadable};
use super::caller::Caller;
use super::look::patience;
use super::object;
use crate::actor::{Answer, IdempotencyKey};
use crate::daemon::{Daemon, SessionRef, read_failed, stopping};
use crate::words::check_remark;
use crate::{invalid, random};

/// Answers that a question may offer.
const OPTIONS_MAX: usize = 100;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Question {
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

/// Asks, or looks after what was asked.
pub(super) async fn ask(
    daemon: &Arc<Daemon>,
    caller: &Caller,
    wanted: Question,
    key: Option<IdempotencyKey>,
) -> Result<Map<String, Value>, ApiError> {
    let session = caller.session("`ask_human`")?;
    let Question { question, options, ask_id, timeout_s, withdraw } = wanted;
    let Some(named) = ask_id else {
        return open(daemon, session, question.unwrap_or_default(), options.unwrap_or_default(), key).await;
    };
    let ask = AskId::parse(&named).map_err(|_| ApiError::not_found("ask", &named))?;
    let row = find(daemon, session, &ask).await?;
    if withdraw == Some(true) {
        daemon.command(session, Command::TakeBack { ask: ask.clone() }, None).await?;
        return shown(&find(daemon, session, &ask).await?);
    }
    let deadline = Instant::now() + patience(timeout_s)?;
    let kinds = Arc::from(["ask.resolved".to_owned()]);
    let mut news =
        daemon.journal.subscribe(Filter { topic: Topic::Session(row.session), kinds: Some(kinds) }, None);
    let mut stop = daemon.stop_signal();
    // Subscribed first, then looked: the answer cannot fall between the two.
    let mut row = find(daemon, session, &ask).await?;
    while row.pending {
        tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => return Err(stopping()),
            heard = news.next() => drop(heard.map_err(read_failed)?),
            () = tokio::time::sleep_until(deadline) => break,
        }
        row = find(daemon, session, &ask).await?;
    }
    if !row.pending {
        // Whoever called has it with this answer, and asks again if the answer is lost.
        daemon.command(session, Command::AnswerTaken { ask }, None).await?;
    }
    shown(&row)
}

async fn open(
    daemon: &Arc<Daemon>,
    session: &Arc<SessionRef>,
    prompt: String,
    options: Vec<String>,
    key: Option<IdempotencyKey>,
) -> Result<Map<String, Value>, ApiError> {
    if prompt.trim().is_empty() {
        return Err(invalid("`question` is empty; say what you want to know"));
    }
    check_remark("question", Some(&prompt))?;
    if options.len() > OPTIONS_MAX || options.iter().any(|option| option.trim().is_empty()) {
        return Err(invalid(format!("`options` are at most {OPTIONS_MAX} answers, none of them empty")));
    }
    check_remark("options", Some(&options.concat()))?;
    let ask = AskId::from_random(&random::bytes::<16>());
    let deed = |key| async {
        let done = daemon.command(session, Command::Question { ask, prompt, options }, key).await?;
        Ok((done.answer, Kept::WithEffect))
    };
    match once(daemon, key, deed).await? {
        Answer::Asked(ask) => Ok(object(json!({ "ask_id": ask, "state": AskState::Pending }))),
        _ => Err(fault()),
    }
}

/// A question that this session asked by a call.
async fn find(daemon: &Daemon, session: &SessionRef, id: &AskId) -> Result<AskRow, ApiError> {
    let row = daemon.journal.ask(id).await.map_err(read_failed)?;
    let row = row.filter(|row| row.session == session.key).ok_or_else(|| ApiError::not_found("ask", id))?;
    if view(&row)?.by_call { Ok(row) } else { Err(ApiError::not_found("ask", id)) }
}

fn view(row: &AskRow) -> Result<Ask, ApiError> {
    serde_json::from_slice(&row.doc).map_err(unreadable("ask", &row.id))
}

fn shown(row: &AskRow) -> Result<Map<String, Value>, ApiError> {
    let ask = view(row)?;
    let mut shown = json!({ "ask_id": ask.id, "state": ask.state });
    if let Some(answer) = ask.answer {
        shown["answer"] = json!(answer.value);
    }
    Ok(object(shown))
}
