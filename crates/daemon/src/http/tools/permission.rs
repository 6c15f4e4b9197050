//! Whether a call of a tool is allowed, for agents that use the tools of MCP servers without asking. The session's policy
//! judges the call; if it says so, a person is asked, and the call waits. Agents that ask by themselves are not judged
//! again.

use std::sync::Arc;

use qd_core::session::{SessionCommand, ToolCallVerdict};
use qd_journal::AskRow;
use qd_link::event_size::fit_ask;
use qd_mcp::ToolName;
use qd_protocol::event::{Ask, AskKind, AskStatus};
use qd_protocol::link::AskRequest;
use qd_protocol::manifest::UnaskedMcpTools;
use qd_protocol::{ApiError, AskId, ErrorCode};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::super::unreadable_row;
use super::ask_limit::send_asking_command;
use super::caller::{ToolCaller, agent_actor};
use super::resolved_asks::{AskWait, ResolvedAsks};
use crate::actor::{ActorReply, IdempotencyKey};
use crate::daemon::{Daemon, SessionAddress, read_failed};
use crate::edge::internal_error;
use crate::random;

/// The beginning of the names of our tools in events, asks and rules.
const NAME_PREFIX: &str = "mcp__quarterdeck__";

/// Fails unless this call may be performed. All requests of one call have keys that differ only after the last `#`, and
/// need permission once. A request whose permission a person has not decided in time fails with `permission_pending`.
pub(super) async fn require_permission(
    daemon: &Arc<Daemon>,
    caller: &ToolCaller,
    tool: ToolName,
    arguments: &Map<String, Value>,
    key: Option<&IdempotencyKey>,
) -> Result<(), ApiError> {
    let ToolCaller::Session(session) = caller else { return Ok(()) };
    // Whoever goes on waiting for a question has asked it before.
    let goes_on = tool == ToolName::AskHuman && arguments.contains_key("ask_id");
    let unasked = unasked_tools(daemon, caller, session).await?;
    let is_judged = match unasked {
        UnaskedMcpTools::None => false,
        // The agent has asked for the call that started what is now waited for.
        UnaskedMcpTools::ReadOnly => tool.is_read_only() && !is_later_request(key),
        UnaskedMcpTools::All => true,
    };
    if goes_on || !is_judged {
        return Ok(());
    }
    let mut request = AskRequest {
        id: ask_id(session, key),
        kind: AskKind::Permission,
        tool: Some(format!("{NAME_PREFIX}{}", tool.as_str())),
        input: Value::Object(arguments.clone()),
        risk: None,
        prompt: format!("May the agent use {NAME_PREFIX}{}?", tool.as_str()),
        options: Vec::new(),
        implicit: false,
    };
    fit_ask(&mut request);
    let verdict = match find_ask(daemon, session, &request.id).await? {
        Some(ask) => {
            check_same_call(&ask, &request, tool)?;
            // A request may come back after the answer, for example because the daemon was restarted.
            wait_for_decision(daemon, session, &request.id).await?
        }
        None => match judge(daemon, session, request.clone()).await? {
            ToolCallVerdict::Pending => wait_for_decision(daemon, session, &request.id).await?,
            decided => decided,
        },
    };
    verdict_result(verdict, &request)
}

/// The tools whose calls are judged here, because this session's agent does not ask by itself.
async fn unasked_tools(
    daemon: &Arc<Daemon>,
    caller: &ToolCaller,
    session: &SessionAddress,
) -> Result<UnaskedMcpTools, ApiError> {
    let own = caller.own_session(daemon).await?;
    let workspace = daemon.workspaces.by_key(session.workspace_key);
    let Some((own, workspace)) = own.zip(workspace) else { return Ok(UnaskedMcpTools::None) };
    Ok(daemon.workers.agents().unasked_mcp_tools(&own.agent, &workspace.path))
}

/// Whether the request is not the first one of its call.
fn is_later_request(key: Option<&IdempotencyKey>) -> bool {
    let number = key.and_then(|key| key.key.rsplit_once('#')).map(|(_, number)| number);
    number.is_some_and(|number| number != "0")
}

/// The id of the permission request. It is the same for all requests of a call, and nobody can guess it who does not
/// know the key of the call.
fn ask_id(session: &SessionAddress, key: Option<&IdempotencyKey>) -> AskId {
    let Some(IdempotencyKey { key, .. }) = key else { return AskId::from_random(&random::bytes::<16>()) };
    // The key begins with its route, which differs between the requests of a call.
    let own = key.rsplit(' ').next().unwrap_or(key);
    let call = own.rsplit_once('#').map_or(own, |(call, _)| call);
    let hash =
        Sha256::new().chain_update(session.id.as_str()).chain_update("\n").chain_update(call).finalize();
    AskId::from_random(&hash[..16])
}

async fn judge(
    daemon: &Arc<Daemon>,
    session: &Arc<SessionAddress>,
    request: AskRequest,
) -> Result<ToolCallVerdict, ApiError> {
    let command = SessionCommand::JudgeToolCall(request);
    let judged = send_asking_command(daemon, session, &agent_actor(session), command, None).await?;
    match judged.reply {
        ActorReply::ToolCallJudged(verdict) => Ok(verdict),
        _ => Err(internal_error()),
    }
}

/// Waits until a person has decided, at most as long as one request may take.
async fn wait_for_decision(
    daemon: &Arc<Daemon>,
    session: &Arc<SessionAddress>,
    id: &AskId,
) -> Result<ToolCallVerdict, ApiError> {
    let mut resolved = ResolvedAsks::of_session(daemon, session);
    loop {
        let ask = find_ask(daemon, session, id).await?.ok_or_else(|| ApiError::not_found("ask", id))?;
        let verdict = verdict_of(&ask)?;
        if verdict != ToolCallVerdict::Pending {
            let delivered = SessionCommand::AnswerDelivered { ask: id.clone() };
            daemon.send_command(session, &agent_actor(session), delivered, None).await?;
            return Ok(verdict);
        }
        if resolved.wait().await? == AskWait::TimeIsOver {
            return Ok(ToolCallVerdict::Pending);
        }
    }
}

async fn find_ask(daemon: &Daemon, session: &SessionAddress, id: &AskId) -> Result<Option<Ask>, ApiError> {
    let row: Option<AskRow> = daemon.journal.ask(id).await.map_err(read_failed)?;
    let Some(row) = row.filter(|row| row.session == session.key) else { return Ok(None) };
    serde_json::from_slice(&row.doc).map(Some).map_err(unreadable_row("ask", &row.id))
}

/// Fails if the permission is for something else. Waiting for what another request of the call has started needs no
/// permission of its own.
fn check_same_call(ask: &Ask, request: &AskRequest, tool: ToolName) -> Result<(), ApiError> {
    let is_same = ask.tool == request.tool && ask.input == request.input;
    match is_same || tool == ToolName::Wait {
        true => Ok(()),
        false => Err(ApiError::new(
            ErrorCode::IdempotencyConflict,
            "the key belongs to another call of a tool; use another one for each call",
        )),
    }
}

fn verdict_of(ask: &Ask) -> Result<ToolCallVerdict, ApiError> {
    match (&ask.state, &ask.answer) {
        (AskStatus::Pending, _) => Ok(ToolCallVerdict::Pending),
        (AskStatus::Answered, Some(answer)) => Ok(ToolCallVerdict::from_answer(answer)),
        _ => Err(ApiError::new(
            ErrorCode::Withdrawn,
            "the permission request for this call ended with its turn, before anybody decided",
        )),
    }
}

fn verdict_result(verdict: ToolCallVerdict, request: &AskRequest) -> Result<(), ApiError> {
    let tool = request.tool.as_deref().unwrap_or_default();
    match verdict {
        ToolCallVerdict::Allowed => Ok(()),
        ToolCallVerdict::Denied { reason } => {
            let reason = reason.unwrap_or_else(|| "it is not allowed".to_owned());
            Err(ApiError::new(ErrorCode::ToolDenied, format!("{tool} was refused: {reason}")))
        }
        ToolCallVerdict::Pending => Err(ApiError::new(
            ErrorCode::PermissionPending,
            format!(
                "{tool} waits for a person's permission; repeat the request with the same Idempotency-Key"
            ),
        )
        .with_detail("ask_id", request.id.as_str())),
    }
}
