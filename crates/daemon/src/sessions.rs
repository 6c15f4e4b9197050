//! How a session comes to be and how its settings change: what a client wants is checked here, once, into values
//! that cannot be wrong. A session below another is created by that one's actor, so that spawn and cancel have one
//! order.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use qd_core::policy;
use qd_core::rows::SessionDoc;
use qd_core::session::{Command, State, Update};
use qd_journal::{Append, Filter, NewEvent, Remember, RowChange, SessionKey, Topic};
use qd_protocol::api::{NewSession, Session, SessionPatch};
use qd_protocol::event::{Body, Limits, Membership, SessionCreated};
use qd_protocol::limits::{DEPTH_MAX, ENV_MAX, ENV_VALUE_MAX, INLINE_MAX, RESTARTS_MAX, TITLE_MAX};
use qd_protocol::manifest::Driver;
use qd_protocol::policy::Policy;
use qd_protocol::text::escaped_len;
use qd_protocol::{ApiError, Code, Millis, SessionId};

use crate::actor::{Birth, IdempotencyKey, session_row, unwritable};
use crate::daemon::{Daemon, SessionRef, append_failed, read_failed};
use crate::invalid;
use crate::places::Place;
use crate::random;
use crate::worktrees::Ground;

/// A session that could be made, before it is in the journal.
pub(crate) struct Unborn {
    pub(crate) session: SessionRef,
    pub(crate) state: State,
    pub(crate) event: NewEvent,
    pub(crate) row: RowChange,
}

impl Daemon {
    /// Makes a session.
    pub(crate) async fn create_session(
        self: &Arc<Self>,
        place: &Place,
        new: NewSession,
        key: Option<IdempotencyKey>,
    ) -> Result<Session, ApiError> {
        check_env(&new.env)?;
        let parent = match &new.parent {
            Some(parent) => Some(self.parent(place, parent).await?),
            None => None,
        };
        let env = new.env.clone();
        let ground = match new.worktree {
            Some(true) => {
                self.check_agent(&new, &place.path)?;
                Some(self.ground(place, None).await?)
            }
            _ => None,
        };
        let above = parent.as_ref().map(|parent| parent.key);
        let unborn = self.conceive(place, new, ground.as_ref(), None, above)?;
        let Unborn { session, state, event, row } = unborn;
        let rows = vec![row];
        self.keep_env(&session.id, &env)?;
        self.make_mail_folders(vec![session.id.clone()]).await;
        let view = SessionDoc::of(&state).view(self.halted());
        let answer = serde_json::to_vec(&view).map_err(unwritable)?;
        let born = match parent {
            Some(parent) => {
                let birth = Box::new(Birth { events: vec![event], rows, answer });
                let command = Command::AddChild { child: session.id.clone() };
                self.request(&parent, command, key, Some(birth)).await.map(drop)
            }
            None => {
                let remember = key.map(|IdempotencyKey { key, fingerprint }| Remember {
                    key,
                    fingerprint,
                    answer: Box::new(move |_| answer.clone()),
                });
                let append = Append { events: vec![event], rows, remember, reserve: false };
                self.journal.append(append).await.map(drop).map_err(append_failed)
            }
        };
        if let Err(error) = born {
            self.forget_env(&session.id);
            crate::maildir::tidy(&self.home, &session.id);
            return Err(error);
        }
        Ok(view)
    }

    /// Puts the variables of a session that is about to be made where its agent will find them.
    pub(crate) fn keep_env(&self, id: &SessionId, env: &BTreeMap<String, String>) -> Result<(), ApiError> {
        if env.is_empty() {
            return Ok(());
        }
        self.home.put_env(id, env).map_err(|error| {
            let message = format!("the session's variables could not be kept: {error}");
            ApiError::new(Code::StorageFailed, message)
        })
    }

    /// The session was not made after all.
    pub(crate) fn forget_env(&self, id: &SessionId) {
        if let Err(error) = self.home.drop_env(id) {
            tracing::warn!(%error, "the variables of a session that was not made are left over");
        }
    }

    /// Checks what a session is to be made with, and makes everything of it but its place in the journal.
    pub(crate) fn conceive(
        &self,
        place: &Place,
        new: NewSession,
        ground: Option<&Ground>,
        fleet: Option<Membership>,
        above: Option<SessionKey>,
    ) -> Result<Unborn, ApiError> {
        self.check_agent(&new, &place.path)?;
        let limits = Limits {
            budget_usd: new.budget_usd,
            max_turns: new.max_turns,
            run_timeout_s: new.run_timeout_s,
            cancel_grace_s: new.cancel_grace_s,
            restarts: new.restarts,
            restart_window_s: new.restart_window_s,
        };
        check_limits(&limits)?;
        check_words(new.title.as_deref(), new.model.as_deref(), new.system_prompt.as_deref())?;
        let policy = new.policy.unwrap_or_else(|| self.policy.clone());
        check_policy(&policy)?;
        let id = SessionId::from_random(&random::bytes::<16>());
        let worktree = ground.filter(|_| new.worktree == Some(true)).map(|ground| ground.worktree(&id));
        let directory = match &worktree {
            Some((_, directory)) => Some(directory.clone()),
            // On another machine the directory may be another one, and only its worker knows which.
            None => self.workers.is_here(&new.agent).then(|| place.doc.path.clone()),
        };
        let created = SessionCreated {
            agent: new.agent,
            title: new.title,
            model: new.model,
            system_prompt: new.system_prompt,
            policy,
            parent: new.parent,
            fleet,
            directory,
            worktree: worktree.map(|(worktree, _)| worktree),
            limits,
            mcp: new.mcp,
            env: new.env.into_keys().collect(),
            mail: new.mail.unwrap_or_default(),
        };
        let session = SessionRef::new(self.journal.new_session_key(), id, place.key, place.id.clone());
        let now = Millis::now();
        let body = Body::SessionCreated(created.clone());
        let state = State::new(session.id.clone(), place.id.clone(), created, now);
        let event = NewEvent {
            scope: session.scope.clone(),
            number: Some(state.number),
            ts: now,
            run: None,
            kind: body.kind(),
            data: body.encode().map_err(unwritable)?,
            up: None,
        };
        let line: Vec<SessionKey> = [session.key].into_iter().chain(above).collect();
        let row = session_row(&session, &state, &line)?;
        Ok(Unborn { session, state, event, row })
    }

    /// The session above, which must be of the same workspace and not too deep.
    async fn parent(&self, place: &Place, id: &SessionId) -> Result<Arc<SessionRef>, ApiError> {
        let parent = self.session(&place.id, id).await?;
        let depth = self.journal.line(parent.key).await.map_err(read_failed)?.len();
        if depth >= DEPTH_MAX {
            let message =
                format!("sessions can be {DEPTH_MAX} deep at most; give it a parent that is higher up");
            return Err(ApiError::new(Code::InvalidValue, message));
        }
        Ok(parent)
    }

    /// Waits until a session is closed, or gone altogether.
    pub(crate) async fn wait_closed(self: &Arc<Self>, id: &SessionId) {
        let Ok(session) = self.find_session(id).await else { return };
        let mut news = self.journal.subscribe(Filter::of(Topic::Session(session.key)), None);
        // Subscribed first, then looked: the close cannot fall between the two.
        while let Ok(Some(row)) = self.journal.session(id).await
            && row.closed_at.is_none()
        {
            if news.next().await.is_err() {
                return;
            }
        }
    }

    fn check_agent(&self, new: &NewSession, project: &Path) -> Result<(), ApiError> {
        let agent = self.workers.agent(&new.agent, project)?;
        if !agent.available {
            let how = agent.install.as_deref().unwrap_or("put its program on the PATH");
            let message = format!("{} cannot start here; to install it: {how}", agent.name);
            return Err(ApiError::new(Code::AgentUnavailable, message).with("install", how));
        }
        let unsupported = |setting: &str, message: String| {
            Err(ApiError::new(Code::UnsupportedSetting, message).with("setting", setting))
        };
        let wanted = [
            ("model", new.model.is_some()),
            ("system_prompt", new.system_prompt.is_some()),
            ("mcp", new.mcp == Some(true)),
        ];
        for (setting, given) in wanted {
            // On another machine there is no daemon for the tools to reach.
            let is_elsewhere = setting == "mcp" && !self.workers.is_here(&new.agent);
            let takes = agent.settings.iter().any(|known| known == setting);
            if given && (is_elsewhere || !takes) {
                return unsupported(setting, format!("{} cannot take `{setting}`; leave it out", agent.name));
            }
        }
        // Whoever works elsewhere has no use for a directory here.
        let elsewhere = !self.workers.is_here(&new.agent) || agent.driver == Driver::A2a.name();
        if elsewhere && new.worktree == Some(true) {
            let name = &new.agent;
            let message =
                format!("{name} works on another machine, where no worktree is made; leave `worktree` out");
            return unsupported("worktree", message);
        }
        Ok(())
    }

    /// A change of settings, checked.
    pub(crate) fn check_patch(&self, now: &Session, patch: SessionPatch) -> Result<Update, ApiError> {
        check_words(patch.title.as_deref(), patch.model.as_deref(), None)?;
        if let Some(model) = &patch.model {
            let new =
                NewSession { agent: now.agent.clone(), model: Some(model.clone()), ..NewSession::default() };
            self.check_agent(&new, &self.places.get(&now.workspace_id)?.path)?;
        }
        if let Some(policy) = &patch.policy {
            check_policy(policy)?;
        }
        let SessionPatch {
            title,
            model,
            policy,
            budget_usd,
            max_turns,
            run_timeout_s,
            cancel_grace_s,
            restarts,
            restart_window_s,
        } = patch;
        let touched = budget_usd.is_some()
            || max_turns.is_some()
            || run_timeout_s.is_some()
            || cancel_grace_s.is_some()
            || restarts.is_some()
            || restart_window_s.is_some();
        let limits = Limits {
            budget_usd: budget_usd.unwrap_or(now.budget_usd),
            max_turns: max_turns.unwrap_or(now.max_turns),
            run_timeout_s: run_timeout_s.unwrap_or(now.run_timeout_s),
            cancel_grace_s: cancel_grace_s.unwrap_or(now.cancel_grace_s),
            restarts: restarts.unwrap_or(now.restarts),
            restart_window_s: restart_window_s.unwrap_or(now.restart_window_s),
        };
        check_limits(&limits)?;
        Ok(Update { title, model, policy, limits: touched.then_some(limits) })
    }
}

fn check_limits(limits: &Limits) -> Result<(), ApiError> {
    let Limits { budget_usd, max_turns, run_timeout_s, cancel_grace_s, restarts, restart_window_s } = limits;
    if budget_usd.is_some_and(|value| !value.is_finite() || value < 0.0) {
        return Err(invalid("`budget_usd` is a number of dollars that is not negative"));
    }
    if *max_turns == Some(0) {
        return Err(invalid("`max_turns` is at least 1"));
    }
    if run_timeout_s.is_some_and(|value| !value.is_finite() || value <= 0.0) {
        return Err(invalid("`run_timeout_s` is a number of seconds above 0"));
    }
    if cancel_grace_s.is_some_and(|value| !value.is_finite() || !(0.0..=3600.0).contains(&value)) {
        return Err(invalid("`cancel_grace_s` is a number of seconds from 0 to 3600"));
    }
    if restarts.is_some_and(|value| value > RESTARTS_MAX) {
        return Err(invalid(format!("`restarts` is at most {RESTARTS_MAX}")));
    }
    if restart_window_s.is_some_and(|value| !value.is_finite() || value <= 0.0) {
        return Err(invalid("`restart_window_s` is a number of seconds above 0"));
    }
    Ok(())
}

fn check_words(
    title: Option<&str>,
    model: Option<&str>,
    system_prompt: Option<&str>,
) -> Result<(), ApiError> {
    for (name, value) in [("title", title), ("model", model)] {
        if value.is_some_and(|value| {
            value.is_empty() || value.len() > TITLE_MAX || value.chars().any(char::is_control)
        }) {
            return Err(invalid(format!("`{name}` is 1 to {TITLE_MAX} bytes on one line")));
        }
    }
    if system_prompt.is_some_and(|value| escaped_len(value) > INLINE_MAX / 2) {
        return Err(invalid(format!("`system_prompt` is at most {} bytes", INLINE_MAX / 2)));
    }
    Ok(())
}

/// Whether a policy can be used.
pub(crate) fn check_policy(policy: &Policy) -> Result<(), ApiError> {
    policy::validate(policy).map_err(invalid)?;
    let size = serde_json::to_vec(policy).map_err(unwritable)?.len();
    if size > INLINE_MAX / 4 {
        return Err(invalid(format!("a policy is at most {} bytes as JSON", INLINE_MAX / 4)));
    }
    Ok(())
}

pub(crate) fn check_env(env: &BTreeMap<String, String>) -> Result<(), ApiError> {
    if env.len() > ENV_MAX {
        return Err(invalid(format!("`env` has at most {ENV_MAX} variables")));
    }
    for (name, value) in env {
        let good = name.len() <= 256 && !name.is_empty() && !name.contains(['=', '\0']);
        if !good || value.len() > ENV_VALUE_MAX || value.contains('\0') {
            return Err(invalid(format!(
                "a variable of `env` has a name without `=` and a value of at most {ENV_VALUE_MAX} bytes without NUL"
            )));
        }
    }
    Ok(())
}
