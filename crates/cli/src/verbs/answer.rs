//! `qd allow`, `qd deny` and `qd answer`, and the request with which every verb answers an ask.

use qd_protocol::api::{AnswerRequest, AnswerResponse};
use qd_protocol::event::Ask;

use super::VerbContext;
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::refs;
use crate::render::ask;

/// Allows a permission request, once or for the rest of the session.
pub(crate) async fn allow(context: &VerbContext, id: &str, always: bool) -> Result<CliExitCode> {
    let decision = if always { "allow_always" } else { "allow_once" };
    answer_ask(context, id, AnswerRequest { decision: Some(decision.to_owned()), ..AnswerRequest::default() })
        .await
}

/// Denies a permission request; the agent gets the reason.
pub(crate) async fn deny(context: &VerbContext, id: &str, reason: &str) -> Result<CliExitCode> {
    let reason = (!reason.is_empty()).then(|| reason.to_owned());
    answer_ask(context, id, AnswerRequest { decision: Some("deny".to_owned()), reason, ..AnswerRequest::default() }).await
}

/// Answers a question.
pub(crate) async fn answer(context: &VerbContext, id: &str, value: String) -> Result<CliExitCode> {
    answer_ask(context, id, AnswerRequest { value: Some(value), ..AnswerRequest::default() }).await
}

/// Answers an ask by its full id. If it was answered before, the error says how.
pub(super) async fn post_answer(
    client: &DaemonClient,
    id: &str,
    request: &AnswerRequest,
) -> Result<AnswerResponse> {
    let mut response = client.post(&format!("/v1/asks/{id}/answer"), request).await;
    if let Err(CliFailure::Refused(refusal)) = &mut response
        && refusal.error.code == "already_resolved"
        && let Some(ask) = refusal.error.details.get("ask")
        && let Ok(ask) = serde_json::from_value::<Ask>(ask.clone())
    {
        let outcome = ask::describe_outcome(ask.state, ask.answer.as_ref());
        refusal.error.message = format!("already resolved: {outcome}");
    }
    response
}

async fn answer_ask(context: &VerbContext, id: &str, request: AnswerRequest) -> Result<CliExitCode> {
    let client = context.client().await?;
    let id = refs::resolve_ask(&client, id).await?;
    let resolved = post_answer(&client, &id, &request).await?;
    if context.out.json {
        context.out.print_json(&resolved)?;
    } else {
        let outcome = ask::describe_outcome(resolved.ask.state, resolved.ask.answer.as_ref());
        context.out.print_line(&format!("{id} {outcome} ({})", ask::summary(&resolved.ask)))?;
    }
    Ok(CliExitCode::Success)
}
