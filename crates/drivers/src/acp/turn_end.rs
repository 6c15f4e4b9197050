//! How a turn of the agent ended: its response to the prompt as an outcome, and its errors as run errors.

use agent_client_protocol::v1::schema::{Meta, PromptResponse, StopReason};
use agent_client_protocol::{Error, ErrorCode, JsonRpcResponse, RawJsonRpcResponse};
use qd_link::LinkClosed;
use qd_protocol::event::RunError;
use qd_protocol::link::{TurnOutcome, TurnStopReason};
use serde::Deserialize;
use serde_json::Value;

use super::event_decoder::{AcpEventDecoder, quarterdeck_meta};
use super::handshake::error_text;
use crate::turn::DriverTurn;

/// The outcome that the response to a prompt stands for. `by_refusal`: a tool was refused in this turn.
pub(super) async fn turn_outcome(
    decoder: &mut AcpEventDecoder,
    turn: &DriverTurn<'_>,
    by_refusal: bool,
    response: RawJsonRpcResponse,
) -> Result<TurnOutcome, LinkClosed> {
    let result = match response {
        RawJsonRpcResponse::Result { result, .. } => PromptResponse::from_json("session/prompt", result),
        RawJsonRpcResponse::Error { error, .. } => Err(error.into_acp_error()),
    };
    let response = match result {
        Ok(response) => response,
        Err(error) => return Ok(TurnOutcome::failed(run_error(&error))),
    };
    if let Some(usage) = decoder.decode_prompt_response(response.usage.as_ref(), response.meta.as_ref()) {
        turn.emit(usage).await?;
    }
    if let Some(transcript) = suspended_transcript(response.meta.as_ref()) {
        return Ok(TurnOutcome { transcript, ..TurnOutcome::of(TurnStopReason::Suspended) });
    }
    Ok(match response.stop_reason {
        StopReason::EndTurn => match decoder.turn_failure() {
            Some(why) => TurnOutcome::failed(RunError::new("agent_error", why)),
            None => TurnOutcome::of(TurnStopReason::EndTurn),
        },
        // Some agents end their turn when a tool is refused, and report that as a cancel.
        StopReason::Cancelled if by_refusal => TurnOutcome::of(TurnStopReason::EndTurn),
        StopReason::MaxTokens => TurnOutcome::of(TurnStopReason::MaxTokens),
        StopReason::MaxTurnRequests => TurnOutcome::of(TurnStopReason::MaxTurns),
        StopReason::Refusal => TurnOutcome::of(TurnStopReason::Refused),
        StopReason::Cancelled => TurnOutcome::cancelled(),
        other => {
            let message = format!("the agent reported an unknown stop reason: {other:?}");
            TurnOutcome::failed(RunError::new("agent_error", message))
        }
    })
}

/// The transcript of a suspended turn, with which it is to be resumed later.
fn suspended_transcript(meta: Option<&Meta>) -> Option<Vec<Value>> {
    #[derive(Deserialize)]
    struct AcpSuspensionMeta {
        suspended: AcpSuspension,
    }
    #[derive(Deserialize)]
    struct AcpSuspension {
        #[serde(default)]
        transcript: Vec<Value>,
    }
    quarterdeck_meta(meta).map(|AcpSuspensionMeta { suspended }| suspended.transcript)
}

/// Turns an agent's error into a run error. Our own scripted agent may put an error code into `data`.
pub(super) fn run_error(error: &Error) -> RunError {
    #[derive(Deserialize)]
    struct AcpErrorData {
        quarterdeck: AcpErrorCode,
    }
    #[derive(Deserialize)]
    struct AcpErrorCode {
        code: String,
    }
    let code = error
        .data
        .as_ref()
        .and_then(|data| AcpErrorData::deserialize(data).ok())
        .map(|data| data.quarterdeck.code);
    let code =
        code.filter(|code| code.len() <= 64 && code.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'));
    let code = match &code {
        Some(code) => code,
        None if error.code == ErrorCode::AUTH_REQUIRED => "agent_not_signed_in",
        None => "agent_error",
    };
    RunError::new(code, error_text(error))
}
