//! New sessions. What an agent makes is below its own session, in its project, under its policy and with no more than
//! it has itself; what a user makes stands alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use qd_journal::SessionFilter;
use qd_protocol::api::{NewRun, NewSession, NewWorkspace, Session};
use qd_protocol::limits::{CHILDREN_MAX, TREE_SESSIONS_MAX};
use qd_protocol::policy::{Policy, PolicyVerdict};
use qd_protocol::{ApiError, ErrorCode, RunId};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::super::idempotency::{ResponseRecording, run_once};
use super::super::internal_error;
use super::super::runs::{accept_prompt, run_id_from_key, run_receipt};
use super::caller::ToolCaller;
use super::json_object;
use crate::actor::{ActorReply, IdempotencyKey};
use crate::daemon::{Daemon, SessionAddress, read_failed};
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
    directory: Option<String>,
}

/// Makes a session and gives it its first prompt. Each of the two is done once, whatever ends in between.
pub(super) async fn spawn_agent(
    daemon: &Arc<Daemon>,
    caller: &ToolCaller,
    wanted: SpawnAgentArguments,
    key: Option<IdempotencyKey>,
) -> Result<Map<String, Value>, ApiError> {
    if wanted.prompt.trim().is_empty() {
        return Err(invalid_value("`prompt` is empty; say what the agent is to do"));
    }
    let SpawnAgentArguments { agent, prompt, title, model, policy, worktree, budget_usd, directory } = wanted;
    let mut new = NewSession { agent, title, model, policy, worktree, budget_usd, ..NewSession::default() };
    let place = match caller {
        ToolCaller::User => user_workspace(daemon, directory).await?,
        ToolCaller::Session(own) => {
            let place = daemon.workspaces.get(&own.workspace)?;
            inherit_from_parent(daemon, caller, own, &place, directory, &mut new).await?;
            place
        }
    };
    let born = key.as_ref().map(|key| key_for_step(key, "session"));
    let made: Session = {
        // One at a time in a tree, so that what is counted is still so when the session is made.
        let _one_at_a_time = match caller {
            ToolCaller::User => None,
            ToolCaller::Session(own) => {
                Some(daemon.key_locks.lock(format!("tree {}", tree_root(daemon, own).await?.0)).await)
            }
        };
        run_once(daemon, born, |key| async {
            if let ToolCaller::Session(own) = caller {
                check_session_limits(daemon, own).await?;
            }
            Ok((
                Box::pin(daemon.create_session(&place, new, key)).await?,
                ResponseRecording::WrittenWithEffect,
            ))
        })
        .await?
    };
    let session = daemon.session_in_workspace(&place.id, &made.id).await?;
    let told = key.as_ref().map(|key| key_for_step(key, "prompt"));
    let named = told.as_ref().map(run_id_from_key);
    let run = named.clone().unwrap_or_else(|| RunId::from_random(&random::bytes::<16>()));
    let first = NewRun { session_id: made.id.clone(), prompt, run_id: None, attachments: Vec::new() };
    let deed = |key| accept_prompt(daemon, &session, first, run.clone(), named.is_some(), key);
    let receipt = match run_once(daemon, told, deed).await? {
        ActorReply::Accepted(receipt) => receipt,
        ActorReply::AlreadyAccepted => {
            let row = daemon.journal.run(&run).await.map_err(read_failed)?;
            run_receipt(&row.ok_or_else(|| ApiError::not_found("run", &run))?)?
        }
        _ => return Err(internal_error()),
    };
    Ok(json_object(json!({
        "session": made.id, "run": receipt.run_id, "agent": made.agent, "title": made.title,
        "parent": made.parent,
    })))
}

/// One deed of a call that has several, under a key of its own.
pub(super) fn key_for_step(key: &IdempotencyKey, name: &str) -> IdempotencyKey {
    IdempotencyKey { key: format!("{} {name}", key.key), fingerprint: key.fingerprint }
}

/// The project of a session that a user makes.
async fn user_workspace(daemon: &Daemon, directory: Option<String>) -> Result<Arc<WorkspaceEntry>, ApiError> {
    let path = directory
        .ok_or_else(|| invalid_value("say in which project directory, as an absolute path: `directory`"))?;
    let (workspace, _) = daemon.create_workspace(NewWorkspace { path, name: None }, None).await?;
    daemon.workspaces.get(&workspace.id)
}

/// What a session that an agent makes has from its own.
async fn inherit_from_parent(
    daemon: &Daemon,
    caller: &ToolCaller,
    own: &SessionAddress,
    place: &WorkspaceEntry,
    directory: Option<String>,
    new: &mut NewSession,
) -> Result<(), ApiError> {
    if directory.is_some_and(|directory| directory != place.doc.path) {
        return Err(invalid_value(format!(
            "an agent starts others in its own project, {}; leave `directory` out",
            place.doc.path
        )));
    }
    // A command in the place of a name would be run without anybody being asked.
    if qd_catalog::is_self_describing(&new.agent) {
        return Err(ApiError::new(
            ErrorCode::UnknownAgent,
            format!(
                "an agent starts others by the names that `list` shows, and {} is a command or an address",
                new.agent
            ),
        ));
    }
    let parent = caller.own_session(daemon).await?.ok_or_else(internal_error)?;
    new.policy = Some(restrict_policy(&parent.policy, new.policy.take())?);
    new.parent = Some(own.id.clone());
    let env = daemon.home.session_env(&own.id).map_err(|error| {
        ApiError::new(
            ErrorCode::StorageFailed,
            format!("the variables of {} cannot be read: {error}", own.id),
        )
    })?;
    new.env = match new.agent == parent.agent {
        true => env,
        false => {
            let agent = daemon.workers.agent(&new.agent, &place.path)?;
            let passed: BTreeMap<String, String> = qd_catalog::select_variables(&agent.env, env.into_iter());
            passed
        }
    };
    Ok(())
}

/// The policy of a session below one with this: its own unless another is wanted that lets nothing more through.
fn restrict_policy(parent: &Policy, wanted: Option<Policy>) -> Result<Policy, ApiError> {
    use PolicyVerdict::{Allow, Ask, Deny};
    let Some(wanted) = wanted else { return Ok(parent.clone()) };
    let fits = match (parent, &wanted) {
        (_, Policy::Always(Deny)) => true,
        (Policy::Always(Allow), _) => true,
        (Policy::Always(Ask), Policy::Always(Ask)) => true,
        (parent, wanted) => parent == wanted,
    };
    if fits {
        return Ok(wanted);
    }
    Err(invalid_value(
        "`policy` may not be laxer than your own; leave it out to pass yours on, or say \"deny\"",
    ))
}

/// How many sessions there may be.
async fn check_session_limits(daemon: &Daemon, own: &SessionAddress) -> Result<(), ApiError> {
    let below = SessionFilter { parent: Some(own.key), open_only: true, ..SessionFilter::default() };
    let children = daemon.journal.sessions(below, None, CHILDREN_MAX).await.map_err(read_failed)?.len();
    let tree = daemon.journal.tree_size(tree_root(daemon, own).await?).await.map_err(read_failed)?;
    let (most, where_) = match (children >= CHILDREN_MAX, tree >= TREE_SESSIONS_MAX) {
        (true, _) => (CHILDREN_MAX, "right below yours"),
        (false, true) => (TREE_SESSIONS_MAX, "in the whole tree that yours is part of"),
        (false, false) => return Ok(()),
    };
    let message = format!(
        "there are {most} open sessions {where_}, and no more can be made; give one that has finished something new with \
         send_message"
    );
    Err(ApiError::new(ErrorCode::TooManySessions, message).with_detail("limit", most))
}

/// The highest session above one, or itself.
async fn tree_root(daemon: &Daemon, own: &SessionAddress) -> Result<qd_journal::SessionKey, ApiError> {
    let line = daemon.journal.lineage(own.key).await.map_err(read_failed)?;
    Ok(line.last().map_or(own.key, |row| row.key))
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
        for (parent, wanted) in [
            (all(PolicyVerdict::Ask), all(PolicyVerdict::Allow)),
            (all(PolicyVerdict::Ask), rules.clone()),
            (all(PolicyVerdict::Deny), all(PolicyVerdict::Ask)),
            (rules.clone(), all(PolicyVerdict::Ask)),
            (rules.clone(), all(PolicyVerdict::Allow)),
            (rules, others),
        ] {
            assert!(restrict_policy(&parent, Some(wanted.clone())).is_err(), "{parent:?} {wanted:?}");
        }
    }
}
