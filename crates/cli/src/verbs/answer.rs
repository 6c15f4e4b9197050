//! `qd allow`, `qd deny` and `qd answer`, and the one call by which anything here answers an ask.

use qd_protocol::api::{AnswerRequest, Resolved};
use qd_protocol::event::Ask;

use super::Context;
use crate::client::Client;
use crate::failure::{Exit, Failure, Result};
use crate::refs;
use crate::render::ask;

/// Lets the agent do it, this time or always.
pub(crate) async fn allow(context: &Context, id: &str, always: bool) -> Result<Exit> {
    let decision = if always { "allow_always" } else { "allow_once" };
    settle(context, id, AnswerRequest { decision: Some(decision.to_owned()), ..AnswerRequest::default() })
        .await
}

/// Refuses it; the agent is told why.
pub(crate) async fn deny(context: &Context, id: &str, reason: &str) -> Result<Exit> {
    let reason = (!reason.is_empty()).then(|| reason.to_owned());
    settle(context, id, AnswerRequest { decision: Some("deny".to_owned()), value: None, reason }).await
}

/// Answers a question.
pub(crate) async fn answer(context: &Context, id: &str, value: String) -> Result<Exit> {
    settle(context, id, AnswerRequest { value: Some(value), ..AnswerRequest::default() }).await
}

/// Answers an ask by its whole id. Whoever is too late is told what the answer was.
pub(super) async fn post(client: &Client, id: &str, request: &AnswerRequest) -> Result<Resolved> {
    let mut answered = client.post(&format!("/v1/asks/{id}/answer"), request).await;
    if let Err(Failure::Refused(refusal)) = &mut answered
        && refusal.error.code == "already_resolved"
        && let Some(ask) = refusal.error.details.get("ask")
        && let Ok(ask) = serde_json::from_value::<Ask>(ask.clone())
    {
        let outcome = ask::outcome(ask.state, ask.answer.as_ref());
        refusal.error.message = format!("it was answered before: {outcome}");
    }
    answered
}

async fn settle(context: &Context, id: &str, request: AnswerRequest) -> Result<Exit> {
    let client = context.client().await?;
    let id = refs::ask(&client, id).await?;
    let resolved = post(&client, &id, &request).await?;
    if context.out.json {
        context.out.value(&resolved)?;
    } else {
        let outcome = ask::outcome(resolved.ask.state, resolved.ask.answer.as_ref());
        context.out.line(&format!("{id} {outcome} ({})", ask::summary(&resolved.ask)))?;
    }
    Ok(Exit::Well)
}
