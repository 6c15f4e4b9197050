//! Creating sessions and changing their settings. Client input is validated here once. A child session is created by
//! its parent's actor, so that spawn and cancel have one order.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use qd_core::policy;
use qd_core::rows::SessionDoc;
use qd_core::session::{SessionCommand, SessionState, SettingsUpdate};
use qd_journal::{
    AppendRequest, EventFilter, EventTopic, IdempotencyRecord, NewEvent, RowChange, SessionFilter, SessionKey,
};
use qd_protocol::api::{Agent, NewSession, Session, SessionPatch};
use qd_protocol::event::{EventActor, EventBody, FleetMembership, SessionCreated, SessionLimits};
use qd_protocol::ids::is_agent_session_id;
use qd_protocol::limits::{
    DEPTH_MAX, ENV_MAX, ENV_VALUE_MAX, INLINE_MAX, JOURNAL_MB_SETTABLE_MAX, RESTARTS_MAX, TITLE_MAX,
};
use qd_protocol::manifest::DriverKind;
use qd_protocol::policy::Policy;
use qd_protocol::text::escaped_len;
use qd_protocol::{ApiError, ErrorCode, SessionId};

use crate::actor::{ChildCreation, IdempotencyKey, encode_failed, session_row};
use crate::clock::read_clocks;
use crate::daemon::{Daemon, SessionAddress, append_failed, read_failed};
use crate::http::unreadable_row;
use crate::invalid_value;
use crate::random;
use crate::workers::SandboxRequest;
use crate::workspaces::WorkspaceEntry;
use crate::worktrees::WorktreeLayout;

/// A session with everything it needs, before it is journalled.
pub(crate) struct UncommittedSession {
    pub(crate) session: SessionAddress,
    pub(crate) state: SessionState,
    pub(crate) event: NewEvent,
    pub(crate) row: RowChange,
}

impl Daemon {
    pub(crate) async fn create_session(
        self: &Arc<Self>,
        workspace: &WorkspaceEntry,
        new: NewSession,
        actor: &Arc<EventActor>,
        key: Option<IdempotencyKey>,
    ) -> Result<Session, ApiError> {
        check_env(&new.env)?;
        // Held until the session is journalled: of two that want the same conversation, the second sees the first.
        let mut _one_at_a_time = None;
        if let Some(conversation) = &new.agent_session_id {
            _one_at_a_time = Some(self.key_locks.lock(format!("conversation {conversation}")).await);
            self.check_conversation_is_free(conversation).await?;
        }
        let parent = match &new.parent {
            Some(parent) => Some(self.find_parent(workspace, parent).await?),
            None => None,
        };
        let env = new.env.clone();
        let layout = match new.worktree {
            Some(true) => {
                self.check_agent(&new, &workspace.path)?;
                Some(self.worktree_layout(workspace, None).await?)
            }
            _ => None,
        };
        let parent_key = parent.as_ref().map(|parent| parent.key);
        let uncommitted = self.build_session(workspace, new, layout.as_ref(), None, parent_key, actor)?;
        let UncommittedSession { session, state, event, row } = uncommitted;
        let rows = vec![row];
        self.store_env(&session.id, &env)?;
        self.make_mail_folders(vec![session.id.clone()]).await;
        let view = self.view_session(SessionDoc::of(&state));
        let answer = serde_json::to_vec(&view).map_err(encode_failed)?;
        let created = match parent {
            Some(parent) => {
                let child = Box::new(ChildCreation { events: vec![event], rows, response: answer });
                let command = SessionCommand::AddChild { child: session.id.clone() };
                self.send_command_with_child(&parent, actor, command, key, Some(child)).await.map(drop)
            }
            None => {
                let record = key.map(|IdempotencyKey { key, fingerprint }| IdempotencyRecord {
                    key,
                    fingerprint,
                    make_response: Box::new(move |_| answer.clone()),
                });
                let append =
                    AppendRequest { events: vec![event], rows, idempotency: record, may_use_reserve: false };
                self.journal.append(append).await.map(drop).map_err(append_failed)
            }
        };
        if let Err(error) = created {
            self.remove_session_secrets(&session.id);
            crate::maildir::remove_empty_folders(&self.home, &session.id);
            return Err(error);
        }
        Ok(view)
    }

    /// Refuses a conversation that an open session already has. Two agents would write to it without knowing of each
    /// other. A session that is closing counts, because its agent may still write. One in a workspace that was removed
    /// does not, because nobody can reach it.
    async fn check_conversation_is_free(&self, conversation: &str) -> Result<(), ApiError> {
        let open = SessionFilter { open_only: true, ..SessionFilter::default() };
        let rows = self.journal.sessions(open, None, usize::MAX).await.map_err(read_failed)?;
        for row in rows.into_iter().filter(|row| self.workspaces.by_key(row.workspace).is_some()) {
            let doc: SessionDoc =
                serde_json::from_slice(&row.doc).map_err(unreadable_row("session", &row.id))?;
            if doc.session.agent_session_id.as_deref() != Some(conversation) {
                continue;
            }
            let id = &row.id;
            let next = match doc.session.closing {
                true => "it is closing; try again when it is closed".to_owned(),
                false => format!("continue it with `qd run --session {id} PROMPT`, or close it"),
            };
            let message = format!("session {id} has this conversation already; {next}");
            return Err(
                ApiError::new(ErrorCode::ConversationInUse, message).with_detail("session_id", id.as_str())
            );
        }
        Ok(())
    }

    /// Stores the environment variables of a session that is about to be created, for its agent to start with.
    pub(crate) fn store_env(&self, id: &SessionId, env: &BTreeMap<String, String>) -> Result<(), ApiError> {
        if env.is_empty() {
            return Ok(());
        }
        self.home.store_session_env(id, env).map_err(|error| {
            let message = format!("could not store the session's variables: {error}");
            ApiError::new(ErrorCode::StorageFailed, message).with_source(error)
        })
    }

    /// Removes the stored variables of a session that was not created after all.
    pub(crate) fn remove_session_secrets(&self, id: &SessionId) {
        if let Err(error) = self.home.remove_session_secrets(id) {
            tracing::warn!(%error, "could not remove the variables of a session that was not created");
        }
    }

    /// Validates the settings of a new session and builds its address, state, first event and row. Nothing is written.
    pub(crate) fn build_session(
        &self,
        workspace: &WorkspaceEntry,
        new: NewSession,
        layout: Option<&WorktreeLayout>,
        fleet: Option<FleetMembership>,
        parent_key: Option<SessionKey>,
        actor: &EventActor,
    ) -> Result<UncommittedSession, ApiError> {
        self.check_agent(&new, &workspace.path)?;
        let limits = SessionLimits {
            budget_usd: new.budget_usd,
            max_turns: new.max_turns,
            run_timeout_s: new.run_timeout_s,
            cancel_grace_s: new.cancel_grace_s,
            restarts: new.restarts,
            restart_window_s: new.restart_window_s,
            max_journal_mb: new.max_journal_mb,
        };
        check_limits(&limits)?;
        check_texts(new.title.as_deref(), new.model.as_deref(), new.system_prompt.as_deref())?;
        let policy = new.policy.unwrap_or_else(|| self.default_policy.clone());
        check_policy(&policy)?;
        new.agent_session_id.as_deref().map_or(Ok(()), check_agent_session_id)?;
        let id = SessionId::from_random(&random::bytes::<16>());
        let worktree = layout.filter(|_| new.worktree == Some(true)).map(|layout| layout.worktree(&id));
        let directory = match &worktree {
            Some((_, directory)) => Some(directory.clone()),
            // On another machine the directory may differ, and only its worker knows it.
            None => self.workers.is_local(&new.agent).then(|| workspace.doc.path.clone()),
        };
        let account = self.account_of_login(&new.agent, &workspace.path, &new.env)?;
        let created = SessionCreated {
            agent: new.agent,
            program: new.program,
            title: new.title,
            model: new.model,
            mode: new.mode,
            system_prompt: new.system_prompt,
            policy,
            parent: new.parent,
            fleet,
            directory,
            worktree: worktree.map(|(worktree, _)| worktree),
            limits,
            mcp: new.mcp,
            sandbox: new.sandbox,
            network: new.network,
            env: new.env.into_keys().collect(),
            mail: new.mail.unwrap_or_default(),
            agent_session_id: new.agent_session_id,
            account,
        };
        let session =
            SessionAddress::new(self.journal.new_session_key(), id, workspace.key, workspace.id.clone());
        let now = read_clocks();
        let body = EventBody::SessionCreated(created.clone());
        let state = SessionState::new(session.id.clone(), workspace.id.clone(), created, now);
        let event = NewEvent {
            scope: session.scope.clone(),
            number: Some(state.number),
            ts: now,
            run: None,
            kind: body.kind(),
            data: body.encode(Some(actor)).map_err(encode_failed)?,
            update_number: None,
        };
        let lineage: Vec<SessionKey> = [session.key].into_iter().chain(parent_key).collect();
        let row = session_row(&session, &state, &lineage)?;
        Ok(UncommittedSession { session, state, event, row })
    }

    /// The parent session. It must be in the same workspace and not too deep in its tree.
    async fn find_parent(
        &self,
        workspace: &WorkspaceEntry,
        id: &SessionId,
    ) -> Result<Arc<SessionAddress>, ApiError> {
        let parent = self.session_in_workspace(&workspace.id, id).await?;
        let depth = self.journal.lineage(parent.key).await.map_err(read_failed)?.len();
        if depth >= DEPTH_MAX {
            let message =
                format!("sessions can be nested at most {DEPTH_MAX} deep; choose a parent higher up");
            return Err(ApiError::new(ErrorCode::InvalidValue, message));
        }
        Ok(parent)
    }

    /// Waits until a session is closed or no longer exists.
    pub(crate) async fn wait_closed(self: &Arc<Self>, id: &SessionId) {
        let Ok(session) = self.find_session(id).await else { return };
        let mut events = self.journal.subscribe(EventFilter::of(EventTopic::Session(session.key)), None);
        // The subscription comes before the query, so the close cannot fall between the two.
        while let Ok(Some(row)) = self.journal.session(id).await
            && row.closed_at.is_none()
        {
            if events.next().await.is_err() {
                return;
            }
        }
    }

    fn check_agent(&self, new: &NewSession, project: &Path) -> Result<(), ApiError> {
        let agent = self.workers.agent(&new.agent, project)?;
        if let Some(program) = &new.program {
            check_program(program, agent.command.is_some() && self.workers.is_local(&new.agent))?;
        } else if !agent.available {
            let how = agent.install.as_deref().unwrap_or("put its program on the PATH");
            let places = self.workers.agents().searched_places(&new.agent, project);
            let looked = places.map(|places| format!("; looked for {places}")).unwrap_or_default();
            let message = format!("{} cannot start here{looked}; to install it: {how}", agent.name);
            return Err(ApiError::new(ErrorCode::AgentUnavailable, message).with_detail("install", how));
        }
        if self.workers.is_local(&new.agent)
            && let Some(setting) = self.workers.agents().overriding_setting(&new.agent, project, &new.env)
        {
            let message = format!(
                "{} would act without asking because of {setting}, so no policy could hold; remove this setting, or \
                 choose another agent",
                agent.name
            );
            return Err(
                ApiError::new(ErrorCode::AgentOverridesPolicy, message).with_detail("setting", setting)
            );
        }
        let unsupported = |setting: &str, message: String| {
            Err(ApiError::new(ErrorCode::UnsupportedSetting, message).with_detail("setting", setting))
        };
        let settings = [
            ("model", new.model.is_some()),
            ("mode", new.mode.is_some()),
            ("system_prompt", new.system_prompt.is_some()),
            ("mcp", new.mcp == Some(true)),
        ];
        for (setting, given) in settings {
            // On another machine the tools cannot reach a daemon.
            let is_elsewhere = setting == "mcp" && !self.workers.is_local(&new.agent);
            let supported = agent.settings.iter().any(|known| known == setting);
            if given && (is_elsewhere || !supported) {
                return unsupported(
                    setting,
                    format!("{} does not support `{setting}`; leave it out", agent.name),
                );
            }
        }
        if let Some(message) = new.mode.as_deref().and_then(|mode| mode_refusal(&agent, mode)) {
            return unsupported("mode", message);
        }
        if new.agent_session_id.is_some() && !agent.resumes {
            let message = format!(
                "{} cannot resume a conversation; leave `agent_session_id` out or choose another agent",
                agent.name
            );
            return unsupported("agent_session_id", message);
        }
        if new.agent_session_id.is_some() && new.worktree == Some(true) {
            let message = "a conversation continues in the directory in which it began; leave `worktree` out"
                .to_owned();
            return unsupported("worktree", message);
        }
        self.workers.plan_sandbox(
            &new.agent,
            project,
            SandboxRequest { level: new.sandbox, network: new.network },
        )?;
        // An agent that works elsewhere has no use for a directory here.
        let elsewhere = !self.workers.is_local(&new.agent) || agent.driver == DriverKind::A2a.name();
        if elsewhere && new.worktree == Some(true) {
            let name = &new.agent;
            let message =
                format!("{name} works on another machine, where no worktree is made; leave `worktree` out");
            return unsupported("worktree", message);
        }
        Ok(())
    }

    /// Validates a change of settings.
    pub(crate) fn check_patch(&self, now: &Session, patch: SessionPatch) -> Result<SettingsUpdate, ApiError> {
        check_texts(patch.title.as_deref(), patch.model.as_deref(), None)?;
        let project = &self.workspaces.get(&now.workspace_id)?.path;
        if patch.model.is_some() || patch.mode.is_some() {
            let (agent, model, mode) = (now.agent.clone(), patch.model.clone(), patch.mode.clone());
            let new = NewSession { agent, model, mode, ..NewSession::default() };
            self.check_agent(&new, project)?;
        }
        if patch.sandbox.is_some() || patch.network.is_some() {
            let in_force = now.sandbox.clone().unwrap_or_default();
            let request = SandboxRequest {
                level: patch.sandbox.or(Some(in_force.asked)),
                network: patch.network.or(in_force.network_asked).or(Some(in_force.network)),
            };
            self.workers.plan_sandbox(&now.agent, project, request)?;
        }
        if let Some(policy) = &patch.policy {
            check_policy(policy)?;
        }
        let SessionPatch {
            title,
            model,
            mode,
            policy,
            sandbox,
            network,
            budget_usd,
            max_turns,
            run_timeout_s,
            cancel_grace_s,
            restarts,
            restart_window_s,
            max_journal_mb,
        } = patch;
        let limits_changed = budget_usd.is_some()
            || max_turns.is_some()
            || run_timeout_s.is_some()
            || cancel_grace_s.is_some()
            || restarts.is_some()
            || restart_window_s.is_some()
            || max_journal_mb.is_some();
        let limits = SessionLimits {
            budget_usd: budget_usd.unwrap_or(now.budget_usd),
            max_turns: max_turns.unwrap_or(now.max_turns),
            run_timeout_s: run_timeout_s.unwrap_or(now.run_timeout_s),
            cancel_grace_s: cancel_grace_s.unwrap_or(now.cancel_grace_s),
            restarts: restarts.unwrap_or(now.restarts),
            restart_window_s: restart_window_s.unwrap_or(now.restart_window_s),
            max_journal_mb: max_journal_mb.unwrap_or(now.max_journal_mb),
        };
        check_limits(&limits)?;
        let limits = limits_changed.then_some(limits);
        Ok(SettingsUpdate { title, model, mode, policy, sandbox, network, limits })
    }
}

/// Why the agent cannot be given this mode; `None` if it can.
fn mode_refusal(agent: &Agent, mode: &str) -> Option<String> {
    let Agent { name, modes, refused_modes, .. } = agent;
    if modes.iter().any(|known| known == mode) {
        return None;
    }
    let choice = modes.join(", ");
    Some(match refused_modes.iter().any(|refused| refused == mode) {
        true => format!(
            "{name} acts without asking in mode `{mode}`, so the session's policy could not hold; choose one of \
             {choice}, and change the policy if the agent should ask less"
        ),
        false => format!("{name} has no mode `{mode}`; choose one of {choice}"),
    })
}

/// Checks the program that a caller found for an agent.
fn check_program(program: &str, is_searched: bool) -> Result<(), ApiError> {
    if !is_searched {
        return Err(invalid_value(
            "`program` is only for an agent of this machine whose program is searched in the PATH",
        ));
    }
    let path = Path::new(program);
    match path.is_absolute() && qd_catalog::programs::is_program(path) {
        true => Ok(()),
        false => Err(invalid_value("`program` must be the absolute path of a program")),
    }
}

fn check_limits(limits: &SessionLimits) -> Result<(), ApiError> {
    let SessionLimits { budget_usd, max_turns, run_timeout_s, cancel_grace_s, .. } = limits;
    let SessionLimits { restarts, restart_window_s, max_journal_mb, .. } = limits;
    if budget_usd.is_some_and(|value| !value.is_finite() || value < 0.0) {
        return Err(invalid_value("`budget_usd` must be a number of dollars, 0 or more"));
    }
    if *max_turns == Some(0) {
        return Err(invalid_value("`max_turns` must be at least 1"));
    }
    if run_timeout_s.is_some_and(|value| !value.is_finite() || value <= 0.0) {
        return Err(invalid_value("`run_timeout_s` must be a number of seconds above 0"));
    }
    if cancel_grace_s.is_some_and(|value| !value.is_finite() || !(0.0..=3600.0).contains(&value)) {
        return Err(invalid_value("`cancel_grace_s` must be a number of seconds from 0 to 3600"));
    }
    if restarts.is_some_and(|value| value > RESTARTS_MAX) {
        return Err(invalid_value(format!("`restarts` must be at most {RESTARTS_MAX}")));
    }
    if restart_window_s.is_some_and(|value| !value.is_finite() || value <= 0.0) {
        return Err(invalid_value("`restart_window_s` must be a number of seconds above 0"));
    }
    if max_journal_mb.is_some_and(|value| !(1..=JOURNAL_MB_SETTABLE_MAX).contains(&value)) {
        return Err(invalid_value(format!(
            "`max_journal_mb` must be a number of MiB from 1 to {JOURNAL_MB_SETTABLE_MAX}"
        )));
    }
    Ok(())
}

fn check_texts(
    title: Option<&str>,
    model: Option<&str>,
    system_prompt: Option<&str>,
) -> Result<(), ApiError> {
    for (name, value) in [("title", title), ("model", model)] {
        if value.is_some_and(|value| {
            value.is_empty() || value.len() > TITLE_MAX || value.chars().any(char::is_control)
        }) {
            return Err(invalid_value(format!("`{name}` must be 1 to {TITLE_MAX} bytes on one line")));
        }
    }
    if system_prompt.is_some_and(|value| escaped_len(value) > INLINE_MAX / 2) {
        return Err(invalid_value(format!("`system_prompt` must be at most {} bytes", INLINE_MAX / 2)));
    }
    Ok(())
}

/// Checks an agent's own id of a conversation.
fn check_agent_session_id(id: &str) -> Result<(), ApiError> {
    match is_agent_session_id(id) {
        true => Ok(()),
        false => Err(invalid_value(
            "`agent_session_id` must have 1 to 128 characters from A-Za-z0-9_.:- and start with a letter or digit",
        )),
    }
}

/// Checks that a policy is valid and fits into an event.
pub(crate) fn check_policy(policy: &Policy) -> Result<(), ApiError> {
    policy::validate_policy(policy).map_err(invalid_value)?;
    let size = serde_json::to_vec(policy).map_err(encode_failed)?.len();
    if size > INLINE_MAX / 4 {
        return Err(invalid_value(format!("a policy must be at most {} bytes as JSON", INLINE_MAX / 4)));
    }
    Ok(())
}

pub(crate) fn check_env(env: &BTreeMap<String, String>) -> Result<(), ApiError> {
    if env.len() > ENV_MAX {
        return Err(invalid_value(format!("`env` may have at most {ENV_MAX} variables")));
    }
    for (name, value) in env {
        let valid_name = name.len() <= 256 && !name.is_empty() && !name.contains(['=', '\0']);
        if !valid_name || value.len() > ENV_VALUE_MAX || value.contains('\0') {
            return Err(invalid_value(format!(
                "a variable of `env` needs a name without `=` and a value of at most {ENV_VALUE_MAX} bytes without NUL"
            )));
        }
    }
    Ok(())
}
