//! New sessions. A session that an agent creates is a child of its own session, in the same project, under its policy
//! and with no more rights than it has; a session that a user creates has no parent.

use std::collections::BTreeMap;
use std::sync::Arc;

use qd_core::sandbox::setting_of_level;
use qd_journal::SessionFilter;
use qd_protocol::api::{NewRun, NewSession, NewWorkspace, Session};
use qd_protocol::event::EventActor;
use qd_protocol::limits::{CHILDREN_MAX, TREE_SESSIONS_MAX};
use qd_protocol::policy::{Policy, PolicyVerdict};
use qd_protocol::sandbox::{NetworkSetting, SandboxSetting};
use qd_protocol::{ApiError, ErrorCode, RunId};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::super::idempotency::{ResponseRecording, run_once};
use super::super::runs::{SubmittedPrompt, accept_prompt, run_id_from_key, run_receipt};
use super::caller::ToolCaller;
use super::json_object;
use crate::actor::{ActorReply, IdempotencyKey};
use crate::daemon::{Daemon, SessionAddress, read_failed};
use crate::edge::internal_error;
use crate::workers::SandboxRequest;
use crate::workspaces::WorkspaceEntry;
use crate::{invalid_value, random};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SpawnAgentArguments {
    agent: String,
    prompt: String,
    title: Option<String>,
    model: Option<String>,
    policy: Option<Policy>,
    worktree: Option<bool>,
    budget_usd: Option<f64>,
    sandbox: Option<SandboxSetting>,
    network: Option<NetworkSetting>,
    directory: Option<String>,
}

/// Creates a session and sends its first prompt. Each of the two happens once, even if a crash separates them.
pub(super) async fn spawn_agent(
    daemon: &Arc<Daemon>,
    caller: &ToolCaller,
    arguments: SpawnAgentArguments,
    key: Option<IdempotencyKey>,
) -> Result<Map<String, Value>, ApiError> {
    if arguments.prompt.trim().is_empty() {
        return Err(invalid_value("`prompt` is empty; describe the agent's task"));
    }
    let SpawnAgentArguments { agent, prompt, title, model, policy, worktree, budget_usd, .. } = arguments;
    let SpawnAgentArguments { sandbox, network, directory, .. } = arguments;
    let mut new = NewSession {
        agent,
        title,
        model,
        policy,
        worktree,
        budget_usd,
        sandbox,
        network,
        ..NewSession::default()
    };
    let workspace = match caller {
        ToolCaller::User(actor) => user_workspace(daemon, actor, directory).await?,
        ToolCaller::Session(own) => {
            let workspace = daemon.workspaces.get(&own.workspace)?;
            inherit_from_parent(daemon, caller, own, &workspace, directory, &mut new).await?;
            workspace
        }
    };
    let session_key = key.as_ref().map(|key| key_for_step(key, "session"));
    let created: Session = {
        // One at a time per tree, so that the counts still hold when the session is created.
        let _one_at_a_time = match caller {
            ToolCaller::User(_) => None,
            ToolCaller::Session(own) => {
                Some(daemon.key_locks.lock(format!("tree {}", tree_root(daemon, own).await?.0)).await)
            }
        };
        run_once(daemon, session_key, |key| async {
            if let ToolCaller::Session(own) = caller {
                check_session_limits(daemon, own).await?;
            }
            Ok((
                Box::pin(daemon.create_session(&workspace, new, &caller.actor(), key)).await?,
                ResponseRecording::WrittenWithEffect,
            ))
        })
        .await?
    };
    let session = daemon.session_in_workspace(&workspace.id, &created.id).await?;
    let prompt_key = key.as_ref().map(|key| key_for_step(key, "prompt"));
    let given_id = prompt_key.as_ref().map(run_id_from_key);
    let run = given_id.clone().unwrap_or_else(|| RunId::from_random(&random::bytes::<16>()));
    let new_run = NewRun { session_id: created.id.clone(), prompt, run_id: None, attachments: Vec::new() };
    let actor = caller.actor();
    let prompt = SubmittedPrompt { new: new_run, run: run.clone(), is_named: given_id.is_some() };
    let accept = |key| accept_prompt(daemon, &session, &actor, prompt, key);
    let receipt = match run_once(daemon, prompt_key, accept).await? {
        ActorReply::Accepted(receipt) => receipt,
        ActorReply::AlreadyAccepted => {
            let row = daemon.journal.run(&run).await.map_err(read_failed)?;
            run_receipt(&row.ok_or_else(|| ApiError::not_found("run", &run))?)?
        }
        _ => return Err(internal_error()),
    };
    Ok(json_object(json!({
        "session": created.id, "run": receipt.run_id, "agent": created.agent, "title": created.title,
        "parent": created.parent,
    })))
}

/// The key for one step of a call that has several.
pub(super) fn key_for_step(key: &IdempotencyKey, name: &str) -> IdempotencyKey {
    IdempotencyKey { key: format!("{} {name}", key.key), fingerprint: key.fingerprint }
}

/// The workspace of a session that a user creates.
async fn user_workspace(
    daemon: &Daemon,
    actor: &EventActor,
    directory: Option<String>,
) -> Result<Arc<WorkspaceEntry>, ApiError> {
    let path =
        directory.ok_or_else(|| invalid_value("`directory` is missing: the absolute path of the project"))?;
    let (workspace, _) = daemon.create_workspace(NewWorkspace { path, name: None }, actor, None).await?;
    daemon.workspaces.get(&workspace.id)
}

/// Gives a session that an agent creates the parent, policy and variables of the agent's own session.
async fn inherit_from_parent(
    daemon: &Daemon,
    caller: &ToolCaller,
    own: &SessionAddress,
    workspace: &WorkspaceEntry,
    directory: Option<String>,
    new: &mut NewSession,
) -> Result<(), ApiError> {
    if directory.is_some_and(|directory| directory != workspace.doc.path) {
        return Err(invalid_value(format!(
            "an agent starts others in its own project, {}; leave `directory` out",
            workspace.doc.path
        )));
    }
    // A command in place of an agent name would run without any approval.
    if qd_catalog::is_self_describing(&new.agent) {
        return Err(ApiError::new(
            ErrorCode::UnknownAgent,
            format!(
                "agents can only start agents that `list` shows, but {} is a command or an address",
                new.agent
            ),
        ));
    }
    let parent = caller.own_session(daemon).await?.ok_or_else(internal_error)?;
    new.policy = Some(restrict_policy(&parent.policy, new.policy.take())?);
    new.parent = Some(own.id.clone());
    restrict_sandbox(daemon, &parent, workspace, new);
    let env = daemon.home.session_env(&own.id).map_err(|error| {
        let message = format!("could not read the variables of {}: {error}", own.id);
        ApiError::new(ErrorCode::StorageFailed, message).with_source(error)
    })?;
    new.env = match new.agent == parent.agent {
        true => env,
        false => {
            let agent = daemon.workers.agent(&new.agent, &workspace.path)?;
            let passed: BTreeMap<String, String> = qd_catalog::select_variables(&agent.env, env.into_iter());
            passed
        }
    };
    Ok(())
}

/// Confines a child session at least as strictly as its parent and as the manifest and the settings say, so that an agent
/// cannot have another do what it cannot. What the call asks for can only make it stricter.
fn restrict_sandbox(daemon: &Daemon, parent: &Session, workspace: &WorkspaceEntry, new: &mut NewSession) {
    let usual = SandboxRequest::default();
    let (level, network) = daemon.workers.sandbox_settings(&new.agent, &workspace.path, usual);
    let usual = SandboxRequest { level: Some(level), network: Some(network) };
    let call = SandboxRequest { level: new.sandbox, network: new.network };
    let parent = parent.sandbox.clone().unwrap_or_default();
    let asked = SandboxRequest { level: Some(parent.asked), network: parent.network_asked };
    // A change counts from the next start, so the agent that calls may be confined more strictly than is asked for now.
    let on_same_machine = daemon.workers.is_local(&new.agent);
    let in_force = SandboxRequest {
        level: parent.level.map(|level| setting_of_level(level, on_same_machine)),
        network: Some(parent.network),
    };
    let strictest = usual.stricter(call).stricter(asked).stricter(in_force);
    // What the settings give anyway is left to them, so that a later change of them counts.
    new.sandbox = strictest.level.filter(|strictest| *strictest != level);
    new.network = strictest.network.filter(|strictest| *strictest != network);
}

/// The policy of a child session: the parent's, or the requested one if it allows nothing more.
fn restrict_policy(parent: &Policy, requested: Option<Policy>) -> Result<Policy, ApiError> {
    use PolicyVerdict::{Allow, Ask, Deny};
    let Some(requested) = requested else { return Ok(parent.clone()) };
    let is_stricter = match (parent, &requested) {
        (_, Policy::Always(Deny)) => true,
        (Policy::Always(Allow), _) => true,
        (Policy::Always(Ask), Policy::Always(Ask)) => true,
        (parent, requested) => parent == requested,
    };
    if is_stricter {
        return Ok(requested);
    }
    Err(invalid_value(
        "`policy` may not be laxer than your own; leave it out to inherit yours, or use \"deny\"",
    ))
}

/// Checks the limits on open sessions, per parent and per tree.
async fn check_session_limits(daemon: &Daemon, own: &SessionAddress) -> Result<(), ApiError> {
    let open_children = SessionFilter { parent: Some(own.key), open_only: true, ..SessionFilter::default() };
    let children =
        daemon.journal.sessions(open_children, None, CHILDREN_MAX).await.map_err(read_failed)?.len();
    let tree = daemon.journal.tree_size(tree_root(daemon, own).await?).await.map_err(read_failed)?;
    let (limit, scope) = match (children >= CHILDREN_MAX, tree >= TREE_SESSIONS_MAX) {
        (true, _) => (CHILDREN_MAX, "directly below yours"),
        (false, true) => (TREE_SESSIONS_MAX, "in the whole tree of yours"),
        (false, false) => return Ok(()),
    };
    let message = format!(
        "there are already {limit} open sessions {scope}; give new work to one that has finished with \
         send_message"
    );
    Err(ApiError::new(ErrorCode::TooManySessions, message).with_detail("limit", limit))
}

/// The topmost ancestor of a session, or the session itself.
async fn tree_root(daemon: &Daemon, own: &SessionAddress) -> Result<qd_journal::SessionKey, ApiError> {
    let lineage = daemon.journal.lineage(own.key).await.map_err(read_failed)?;
    Ok(lineage.last().map_or(own.key, |row| row.key))
}

#[cfg(test)]
mod tests {
    use qd_protocol::policy::PolicyRule;

    use super::*;

    #[test]
    fn a_policy_is_passed_on_or_made_stricter_and_never_laxer() {
        let all = |verdict| Policy::Always(verdict);
        let rule = |decision| PolicyRule { tool: "Bash".to_owned(), pattern: None, decision, risk: None };
        let rules = Policy::Rules(vec![rule(PolicyVerdict::Allow)]);
        let others = Policy::Rules(vec![rule(PolicyVerdict::Deny)]);
        for parent in
            [all(PolicyVerdict::Ask), all(PolicyVerdict::Allow), all(PolicyVerdict::Deny), rules.clone()]
        {
            assert_eq!(restrict_policy(&parent, None).unwrap(), parent);
            assert_eq!(
                restrict_policy(&parent, Some(all(PolicyVerdict::Deny))).unwrap(),
                all(PolicyVerdict::Deny)
            );
            assert_eq!(restrict_policy(&parent, Some(parent.clone())).unwrap(), parent);
        }
        assert!(restrict_policy(&all(PolicyVerdict::Allow), Some(all(PolicyVerdict::Ask))).is_ok());
        assert!(restrict_policy(&all(PolicyVerdict::Allow), Some(rules.clone())).is_ok());
        for (parent, requested) in [
            (all(PolicyVerdict::Ask), all(PolicyVerdict::Allow)),
            (all(PolicyVerdict::Ask), rules.clone()),
            (all(PolicyVerdict::Deny), all(PolicyVerdict::Ask)),
            (rules.clone(), all(PolicyVerdict::Ask)),
            (rules.clone(), all(PolicyVerdict::Allow)),
            (rules, others),
        ] {
            assert!(restrict_policy(&parent, Some(requested.clone())).is_err(), "{parent:?} {requested:?}");
        }
    }
}
