//! `qd allow`, `qd deny` and `qd answer`, and the request with which every verb answers an ask.

use qd_protocol::api::{AnswerRequest, AnswerResponse};
use qd_protocol::event::{Ask, AskKind, AskStatus};
use qd_protocol::policy::Risk;

use super::VerbContext;
use super::stdin_lines::StdinLines;
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::refs;
use crate::render::ask;

/// The path that lists open asks.
pub(super) const PENDING_PATH: &str = "/v1/asks?state=pending";

/// Allows permission requests, once or for the rest of the session.
pub(crate) async fn allow(context: &VerbContext, ids: &[String], always: bool) -> Result<CliExitCode> {
    let client = context.client().await?;
    // Everything is looked up first, so that a mistyped id allows nothing.
    let mut asks: Vec<Ask> = Vec::new();
    for id in ids {
        let ask = get_ask(&client, id).await?;
        if !asks.iter().any(|other| other.id == ask.id) {
            asks.push(ask);
        }
    }
    if let [ask] = &asks[..] {
        return answer_one(context, &client, ask, allow_request(always)).await;
    }
    allow_each(context, &client, &asks, always).await
}

/// Allows all open permission requests up to a risk, or whatever their risk if a person confirms it.
pub(crate) async fn allow_all(
    context: &VerbContext,
    max_risk: Option<Risk>,
    always: bool,
) -> Result<CliExitCode> {
    let client = context.client().await?;
    let open: Vec<Ask> = client.list(PENDING_PATH).await?;
    let (asks, others): (Vec<Ask>, Vec<Ask>) = open.into_iter().partition(|ask| {
        ask.kind == AskKind::Permission && max_risk.is_none_or(|max_risk| ask.risk <= max_risk)
    });
    if max_risk.is_none() && !asks.is_empty() {
        confirm_all(context, &asks).await?;
    }
    let exit = allow_each(context, &client, &asks, always).await?;
    if context.out.json {
        return Ok(exit);
    }
    if asks.is_empty() {
        context.out.print_note("there was nothing to allow");
    }
    if !others.is_empty() {
        context.out.print_note(&describe_others(&others));
    }
    Ok(exit)
}

/// What `qd allow --all` leaves open.
fn describe_others(others: &[Ask]) -> String {
    let questions = others.iter().filter(|ask| ask.kind == AskKind::Question).count();
    let riskier = others.len() - questions;
    let mut parts = Vec::new();
    match questions {
        0 => {}
        1 => parts.push("1 question".to_owned()),
        _ => parts.push(format!("{questions} questions")),
    }
    if riskier > 0 {
        parts.push(format!("{riskier} of a higher risk"));
    }
    format!("still open: {}; see `qd asks`", parts.join(", "))
}

/// Denies a permission request; the agent gets the reason.
pub(crate) async fn deny(context: &VerbContext, id: &str, reason: &str) -> Result<CliExitCode> {
    let client = context.client().await?;
    let ask = get_ask(&client, id).await?;
    answer_one(context, &client, &ask, deny_request(reason)).await
}

/// Answers a question, with an option by number or in full, or with any text if it has no options.
pub(crate) async fn answer(context: &VerbContext, id: &str, value: String) -> Result<CliExitCode> {
    let client = context.client().await?;
    let ask = get_ask(&client, id).await?;
    // The daemon refuses a value that is no option, and says which there are.
    let value = ask::choose_option(&ask.options, value.trim()).unwrap_or(value);
    answer_one(context, &client, &ask, AnswerRequest { value: Some(value), ..AnswerRequest::default() }).await
}

pub(super) fn allow_request(always: bool) -> AnswerRequest {
    let decision = if always { "allow_always" } else { "allow_once" };
    AnswerRequest { decision: Some(decision.to_owned()), ..AnswerRequest::default() }
}

pub(super) fn deny_request(reason: &str) -> AnswerRequest {
    let reason = (!reason.is_empty()).then(|| reason.to_owned());
    AnswerRequest { decision: Some("deny".to_owned()), reason, ..AnswerRequest::default() }
}

/// Answers this ask and no other: the answer carries the digest of the ask's input. An error says what helps.
pub(super) async fn post_answer(
    client: &DaemonClient,
    ask: &Ask,
    request: AnswerRequest,
) -> Result<AnswerResponse> {
    // A daemon that serves no digest would not accept one either.
    let request = AnswerRequest { input_sha256: ask.input_sha256.clone(), ..request };
    let mut response = client.post(&format!("/v1/asks/{}/answer", ask.id), &request).await;
    if let Err(CliFailure::Refused(refusal)) = &mut response {
        let error = &mut refusal.error;
        let hint = match error.code.as_str() {
            "already_resolved" => describe_winner(error.details.get("ask")),
            "invalid_answer" => hint_for_invalid(ask, &request),
            "ask_changed" => Some(format!(
                "the ask has changed since it was shown; `qd asks {}` shows it as it is now",
                ask.id
            )),
            _ => None,
        };
        error.message = hint.unwrap_or_else(|| std::mem::take(&mut error.message));
    }
    response
}

/// How an ask was answered before.
fn describe_winner(ask: Option<&serde_json::Value>) -> Option<String> {
    let ask: Ask = serde_json::from_value(ask?.clone()).ok()?;
    Some(format!("already resolved: {}", ask::describe_outcome(ask.state, ask.answer.as_ref())))
}

/// What to type instead of an answer that does not fit the ask.
fn hint_for_invalid(ask: &Ask, request: &AnswerRequest) -> Option<String> {
    let id = &ask.id;
    match (ask.kind, &request.decision) {
        (AskKind::Question, Some(_)) => {
            Some(format!("{id} is a question; answer it with `qd answer {id} VALUE`"))
        }
        (AskKind::Permission, None) => Some(format!(
            "{id} is a permission request; decide it with `qd allow {id}` or `qd deny {id} [REASON]`"
        )),
        (AskKind::Permission, Some(decision)) if decision == "allow_always" && ask.risk == Risk::High => {
            Some(format!(
                "high-risk actions can only be allowed one at a time; `qd allow {id}`, without --always, allows this one"
            ))
        }
        (AskKind::Question, None) if !ask.options.is_empty() => {
            Some(format!("answer with one of these, or its number: {}", ask::list_options(&ask.options)))
        }
        _ => None,
    }
}

async fn get_ask(client: &DaemonClient, id: &str) -> Result<Ask> {
    let id = refs::resolve_ask(client, id).await?;
    client.get(&format!("/v1/asks/{id}")).await
}

async fn answer_one(
    context: &VerbContext,
    client: &DaemonClient,
    ask: &Ask,
    request: AnswerRequest,
) -> Result<CliExitCode> {
    let resolved = post_answer(client, ask, request).await?;
    if context.out.json {
        context.out.print_json(&resolved)?;
    } else {
        print_resolved(context, &resolved.ask)?;
    }
    Ok(CliExitCode::Success)
}

/// Allows each of several asks. A refusal is printed, and the others are still allowed.
async fn allow_each(
    context: &VerbContext,
    client: &DaemonClient,
    asks: &[Ask],
    always: bool,
) -> Result<CliExitCode> {
    let mut exit = CliExitCode::Success;
    let mut allowed = Vec::new();
    for ask in asks {
        match post_answer(client, ask, allow_request(always)).await {
            Ok(resolved) if context.out.json => allowed.push(resolved),
            Ok(resolved) => print_resolved(context, &resolved.ask)?,
            Err(failure @ CliFailure::Refused(_)) => {
                context.out.print_failure(&failure);
                exit = exit.max(failure.exit_code());
            }
            Err(failure) => return Err(failure),
        }
    }
    if context.out.json {
        context.out.print_json(&allowed)?;
    }
    Ok(exit)
}

fn print_resolved(context: &VerbContext, ask: &Ask) -> Result<()> {
    Ok(context.out.print_data(&ask::format_resolved(ask, context.out.out_style(), context.out.width()))?)
}

/// Shows the asks and has a person confirm that all are allowed. Fails without a terminal.
async fn confirm_all(context: &VerbContext, asks: &[Ask]) -> Result<()> {
    let mut stdin = StdinLines::new();
    if !stdin.tty || !context.out.err_tty || context.out.json {
        return Err(CliFailure::Usage(
            "`--all` needs a limit: `--risk low`, `--risk medium` or `--risk high`".to_owned(),
        ));
    }
    for ask in asks.iter().filter(|ask| ask.state == AskStatus::Pending) {
        let shown = ask::format_ask(ask, context.out.err_style(), context.out.err_width());
        context.out.print_stderr(&shown);
    }
    let all = if asks.len() == 1 { "it".to_owned() } else { format!("all {}", asks.len()) };
    context.out.print_stderr(&format!("allow {all}? [y/N] "));
    let line = stdin.next_line().await;
    context.out.line_was_typed();
    match line.as_deref().map(str::trim) {
        Some("y" | "Y" | "yes") => Ok(()),
        _ => Err(CliFailure::Usage("nothing was allowed".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::ask::tests::{permission, question};

    #[test]
    fn what_stays_open_is_counted_without_zeros() {
        let riskier = [permission(Risk::High), permission(Risk::High)];
        assert_eq!(describe_others(&riskier), "still open: 2 of a higher risk; see `qd asks`");
        let both = [permission(Risk::High), question(&[])];
        assert_eq!(describe_others(&both), "still open: 1 question, 1 of a higher risk; see `qd asks`");
    }
}
