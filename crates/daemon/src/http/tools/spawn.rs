//! New sessions. What an agent makes is below its own session, in its project, under its policy and with no more than
//! it has itself; what a user makes stands alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use qd_journal::SessionFilter;
use qd_protocol::api::{NewRun, NewSession, NewWorkspace, Session};
use qd_protocol::limits::{CHILDREN_MAX, TREE_SESSIONS_MAX};
use qd_protocol::policy::{Policy, Verdict};
use qd_protocol::{ApiError, Code, RunId};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::super::fault;
use super::super::once::{Kept, once};
use super::super::runs::{accept, receipt, run_of_key};
use super::caller::Caller;
use super::object;
use crate::actor::{Answer, IdempotencyKey};
use crate::daemon::{Daemon, SessionRef, read_failed};
use crate::places::Place;
use crate::{invalid, random};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Spawn {
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
pub(super) async fn spawn(
    daemon: &Arc<Daemon>,
    caller: &Caller,
    wanted: Spawn,
    key: Option<IdempotencyKey>,
) -> Result<Map<String, Value>, ApiError> {
    if wanted.prompt.trim().is_empty() {
        return Err(invalid("`prompt` is empty; say what the agent is to do"));
    }
    let Spawn { agent, prompt, title, model, policy, worktree, budget_usd, directory } = wanted;
    let mut new = NewSession { agent, title, model, policy, worktree, budget_usd, ..NewSession::default() };
    let place = match caller {
        Caller::User => place(daemon, directory).await?,
        Caller::Session(own) => {
            let place = daemon.places.get(&own.workspace)?;
            inherit(daemon, caller, own, &place, directory, &mut new).await?;
            place
        }
    };
    let born = key.as_ref().map(|key| step(key, "session"));
    let made: Session = {
        // One at a time in a tree, so that what is counted is still so when the session is made.
        let _one_at_a_time = match caller {
            Caller::User => None,
            Caller::Session(own) => {
                Some(daemon.keys.lock(format!("tree {}", root(daemon, own).await?.0)).await)
            }
        };
        once(daemon, born, |key| async {
            if let Caller::Session(own) = caller {
                check_counts(daemon, own).await?;
            }
            Ok((Box::pin(daemon.create_session(&place, new, key)).await?, Kept::WithEffect))
        })
        .await?
    };
    let session = daemon.session(&place.id, &made.id).await?;
    let told = key.as_ref().map(|key| step(key, "prompt"));
    let named = told.as_ref().map(run_of_key);
    let run = named.clone().unwrap_or_else(|| RunId::from_random(&random::bytes::<16>()));
    let first = NewRun { session_id: made.id.clone(), prompt, run_id: None, attachments: Vec::new() };
    let deed = |key| accept(daemon, &session, first, run.clone(), named.is_some(), key);
    let receipt = match once(daemon, told, deed).await? {
        Answer::Accepted(receipt) => receipt,
        Answer::Known => {
            let row = daemon.journal.run(&run).await.map_err(read_failed)?;
            receipt(&row.ok_or_else(|| ApiError::not_found("run", &run))?)?
        }
        _ => return Err(fault()),
    };
    Ok(object(json!({
        "session": made.id, "run": receipt.run_id, "agent": made.agent, "title": made.title,
        "parent": made.parent,
    })))
}

/// One deed of a call that has several, under a key of its own.
pub(super) fn step(key: &IdempotencyKey, name: &str) -> IdempotencyKey {
    IdempotencyKey { key: format!("{} {name}", key.key), fingerprint: key.fingerprint }
}

/// The project of a session that a user makes.
async fn place(daemon: &Daemon, directory: Option<String>) -> Result<Arc<Place>, ApiError> {
    let path = directory
        .ok_or_else(|| invalid("say in which project directory, as an absolute path: `directory`"))?;
    let (workspace, _) = daemon.create_workspace(NewWorkspace { path, name: None }, None).await?;
    daemon.places.get(&workspace.id)
}

/// What a session that an agent makes has from its own.
async fn inherit(
    daemon: &Daemon,
    caller: &Caller,
    own: &SessionRef,
    place: &Place,
    directory: Option<String>,
    new: &mut NewSession,
) -> Result<(), ApiError> {
    if directory.is_some_and(|directory| directory != place.doc.path) {
        return Err(invalid(format!(
            "an agent starts others in its own project, {}; leave `directory` out",
            place.doc.path
        )));
    }
    // A command in the place of a name would be run without anybody being asked.
    if qd_catalog::is_described(&new.agent) {
        return Err(ApiError::new(
            Code::UnknownAgent,
            format!(
                "an agent starts others by the names that `list` shows, and {} is a command or an address",
                new.agent
            ),
        ));
    }
    let parent = caller.own(daemon).await?.ok_or_else(fault)?;
    new.policy = Some(no_laxer(&parent.policy, new.policy.take())?);
    new.parent = Some(own.id.clone());
    let env = daemon.home.env(&own.id).map_err(|error| {
        ApiError::new(Code::StorageFailed, format!("the variables of {} cannot be read: {error}", own.id))
    })?;
    new.env = match new.agent == parent.agent {
        true => env,
        false => {
            let agent = daemon.workers.agent(&new.agent, &place.path)?;
            let passed: BTreeMap<String, String> = qd_catalog::passed(&agent.env, env.into_iter());
            passed
        }
    };
    Ok(())
}

/// The policy of a session below one with this: its own unless another is wanted that lets nothing more through.
fn no_laxer(parent: &Policy, wanted: Option<Policy>) -> Result<Policy, ApiError> {
    use Verdict::{Allow, Ask, Deny};
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
    Err(invalid("`policy` may not be laxer than your own; leave it out to pass yours on, or say \"deny\""))
}

/// How many sessions there may be.
async fn check_counts(daemon: &Daemon, own: &SessionRef) -> Result<(), ApiError> {
    let below = SessionFilter { parent: Some(own.key), open_only: true, ..SessionFilter::default() };
    let children = daemon.journal.sessions(below, None, CHILDREN_MAX).await.map_err(read_failed)?.len();
    let tree = daemon.journal.tree_size(root(daemon, own).await?).await.map_err(read_failed)?;
    let (most, where_) = match (children >= CHILDREN_MAX, tree >= TREE_SESSIONS_MAX) {
        (true, _) => (CHILDREN_MAX, "right below yours"),
        (false, true) => (TREE_SESSIONS_MAX, "in the whole tree that yours is part of"),
        (false, false) => return Ok(()),
    };
    let message = format!(
        "there are {most} open sessions {where_}, and no more can be made; give one that has finished something new with \
         send_message"
    );
    Err(ApiError::new(Code::TooManySessions, message).with("limit", most))
}

/// The highest session above one, or itself.
async fn root(daemon: &Daemon, own: &SessionRef) -> Result<qd_journal::SessionKey, ApiError> {
    let line = daemon.journal.line(own.key).await.map_err(read_failed)?;
    Ok(line.last().map_or(own.key, |row| row.key))
}

#[cfg(test)]
mod tests {
    use qd_protocol::policy::Rule;

    use super::*;

    #[test]
    fn a_policy_is_passed_on_or_made_stricter_and_never_laxer() {
        let all = |verdict| Policy::Always(verdict);
        let rule = |decision| Rule { tool: "Bash".to_owned(), pattern: None, decision, risk: None };
        let rules = Policy::Rules(vec![rule(Verdict::Allow)]);
        let others = Policy::Rules(vec![rule(Verdict::Deny)]);
        for parent in [all(Verdict::Ask), all(Verdict::Allow), all(Verdict::Deny), rules.clone()] {
            assert_eq!(no_laxer(&parent, None).unwrap(), parent);
            assert_eq!(no_laxer(&parent, Some(all(Verdict::Deny))).unwrap(), all(Verdict::Deny));
            assert_eq!(no_laxer(&parent, Some(parent.clone())).unwrap(), parent);
        }
        assert!(no_laxer(&all(Verdict::Allow), Some(all(Verdict::Ask))).is_ok());
        assert!(no_laxer(&all(Verdict::Allow), Some(rules.clone())).is_ok());
        for (parent, wanted) in [
            (all(Verdict::Ask), all(Verdict::Allow)),
            (all(Verdict::Ask), rules.clone()),
            (all(Verdict::Deny), all(Verdict::Ask)),
            (rules.clone(), all(Verdict::Ask)),
            (rules.clone(), all(Verdict::Allow)),
            (rules, others),
        ] {
            assert!(no_laxer(&parent, Some(wanted.clone())).is_err(), "{parent:?} {wanted:?}");
        }
    }
}
