//! Fleets: how one comes to be, and the way to its actor. What follows on what is decided by the machine in
//! `qd-core`; here it is journalled and carried out.
//!
//! - `rows`: a fleet as lists have it.
//! - `actor`: the shell around one fleet's machine.
//! - `give`: prompts on their way to sessions, and ends on their way back.

mod actor;
mod delivery;
mod rows;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use qd_core::fleet::{FleetCommand, FleetState};
use qd_journal::{
    AppendRequest, EventScope, FleetFilter, FleetRow, IdempotencyRecord, NewEvent, SessionFilter, SessionKey,
    WorkspaceKey,
};
use qd_protocol::api::NewSession;
use qd_protocol::event::{EventBody, FleetMembership, FleetStarted};
use qd_protocol::fleet::{Fleet, FleetMember, FleetSpec};
use qd_protocol::limits::EVENT_MAX;
use qd_protocol::{ApiError, ErrorCode, FleetId, Millis, RunId, WorkspaceId};
use tokio::sync::oneshot;

pub(crate) use actor::{FleetActorMessage, FleetActorReply, ask_row};
pub(crate) use rows::{fleet_row, new_fleet_row};

use crate::actor::{IdempotencyKey, encode_failed};
use crate::daemon::{Daemon, append_failed, read_failed, stopping_error};
use crate::random;
use crate::registry::ActorMailbox;
use crate::sessions::{UncommittedSession, check_env};
use crate::workspaces::WorkspaceEntry;
use crate::worktrees::WorktreeLayout;

/// How long a message to a fleet whose mailbox is full waits before it is tried again.
const FULL_RETRY_DELAY: Duration = Duration::from_millis(50);

/// A fleet that exists, with what is needed to reach it.
#[derive(Debug)]
pub(crate) struct FleetAddress {
    pub(crate) id: FleetId,
    pub(crate) key: SessionKey,
    pub(crate) workspace: WorkspaceId,
    pub(crate) workspace_key: WorkspaceKey,
    /// What its events bear.
    pub(crate) scope: Arc<EventScope>,
}

impl FleetAddress {
    pub(crate) fn new(
        key: SessionKey,
        id: FleetId,
        workspace_key: WorkspaceKey,
        workspace: WorkspaceId,
    ) -> Self {
        let scope = Arc::new(EventScope {
            workspace: Some((workspace_key, workspace.clone())),
            session: None,
            fleet: Some((key, id.clone())),
        });
        Self { id, key, workspace, workspace_key, scope }
    }
}

impl Daemon {
    /// Starts a fleet: it and all of its sessions are in the journal, or nothing is.
    pub(crate) async fn start_fleet(
        self: &Arc<Self>,
        place: &WorkspaceEntry,
        spec: FleetSpec,
        env: &BTreeMap<String, String>,
        key: Option<IdempotencyKey>,
    ) -> Result<Fleet, ApiError> {
        let id = FleetId::from_random(&random::bytes::<16>());
        let fleet = FleetAddress::new(self.journal.new_session_key(), id, place.key, place.id.clone());
        check_env(env)?;
        let ground = match spec.sessions.values().any(|member| member.worktree) {
            true => Some(self.worktree_layout(place, spec.base_branch.as_deref()).await?),
            false => None,
        };
        let mut unborn: Vec<(UncommittedSession, BTreeMap<String, String>)> =
            Vec::with_capacity(spec.sessions.len());
        let mut sessions = BTreeMap::new();
        for (name, member) in &spec.sessions {
            let one = self
                .build_member(place, &fleet, (name, member), ground.as_ref(), env)
                .map_err(|error| member_error(name, error))?;
            sessions.insert(name.clone(), one.0.session.id.clone());
            unborn.push(one);
        }
        let started = FleetStarted { fleet_id: fleet.id.clone(), spec, sessions };
        let now = Millis::now();
        let body = EventBody::FleetStarted(started.clone());
        let state = FleetState::new(place.id.clone(), started, now);
        let data = body.encode().map_err(encode_failed)?;
        if data.len() > EVENT_MAX {
            let message =
                format!("a fleet is at most {EVENT_MAX} bytes as JSON; move what is long into files");
            return Err(ApiError::new(ErrorCode::InvalidValue, message));
        }
        let event = NewEvent {
            scope: fleet.scope.clone(),
            number: Some(state.number),
            ts: now,
            run: None,
            kind: body.kind(),
            data,
            update_number: None,
        };
        let view = rows::new_fleet_view(&state);
        let answer = serde_json::to_vec(&view).map_err(encode_failed)?;
        let (mut events, mut changes) = (vec![event], vec![new_fleet_row(&fleet, &state)?]);
        let mut made = Vec::with_capacity(unborn.len());
        for (UncommittedSession { session, event, row, .. }, env) in unborn {
            self.store_env(&session.id, &env)?;
            made.push(session.id);
            events.push(event);
            changes.push(row);
        }
        self.make_mail_folders(made.clone()).await;
        let remember = key.map(|IdempotencyKey { key, fingerprint }| IdempotencyRecord {
            key,
            fingerprint,
            make_response: Box::new(move |_| answer.clone()),
        });
        let append = AppendRequest { events, rows: changes, idempotency: remember, may_use_reserve: false };
        if let Err(error) = self.journal.append(append).await {
            for session in &made {
                self.forget_env(session);
                crate::maildir::remove_empty_folders(&self.home, session);
            }
            return Err(append_failed(error));
        }
        self.send_fleet_message(&Arc::new(fleet), FleetActorMessage::Wake);
        Ok(view)
    }

    /// One of its sessions, and the variables that its agent is given.
    fn build_member(
        &self,
        place: &WorkspaceEntry,
        fleet: &FleetAddress,
        (name, member): (&str, &FleetMember),
        ground: Option<&WorktreeLayout>,
        env: &BTreeMap<String, String>,
    ) -> Result<(UncommittedSession, BTreeMap<String, String>), ApiError> {
        let listed = self.workers.agent(&member.agent, &place.path)?.env;
        let env = qd_catalog::select_variables(&listed, env.clone().into_iter());
        let part = FleetMembership { fleet_id: fleet.id.clone(), name: name.to_owned() };
        let new = member_settings(name, member, env.clone());
        Ok((self.build_session(place, new, ground, Some(part), Some(fleet.key))?, env))
    }

    /// The fleet of this id in this workspace.
    pub(crate) async fn fleet_in_workspace(
        &self,
        workspace: &WorkspaceId,
        id: &FleetId,
    ) -> Result<Arc<FleetAddress>, ApiError> {
        let row = self.journal.fleet(id).await.map_err(read_failed)?;
        let place = self.workspaces.get(workspace)?;
        let row = row.filter(|row| row.workspace == place.key);
        self.fleet_address(&row.ok_or_else(|| ApiError::not_found("fleet", id))?)
    }

    /// The fleet of this row.
    pub(crate) fn fleet_address(&self, row: &FleetRow) -> Result<Arc<FleetAddress>, ApiError> {
        let place =
            self.workspaces.by_key(row.workspace).ok_or_else(|| ApiError::not_found("fleet", &row.id))?;
        Ok(Arc::new(FleetAddress::new(row.key, row.id.clone(), place.key, place.id.clone())))
    }

    /// A fleet as clients see it now: what its sessions do is theirs to say.
    pub(crate) async fn view_fleet(&self, row: &FleetRow) -> Result<Fleet, ApiError> {
        let below = SessionFilter { parent: Some(row.key), ..SessionFilter::default() };
        let sessions = self.journal.sessions(below, None, usize::MAX).await.map_err(read_failed)?;
        let halted = self.is_halted();
        let states: BTreeMap<_, _> = sessions
            .iter()
            .filter_map(|session| rows::session_state(session, halted).map(|state| (&session.id, state)))
            .collect();
        rows::fleet_view(row, |session| states.get(session).copied())
    }

    /// Sends a command to a fleet and waits until what came of it is in the journal.
    pub(crate) async fn send_fleet_command(
        self: &Arc<Self>,
        fleet: &Arc<FleetAddress>,
        command: FleetCommand,
    ) -> Result<FleetActorReply, ApiError> {
        if self.is_stopping() {
            return Err(stopping_error());
        }
        let (reply, answer) = oneshot::channel();
        self.send_fleet_message(fleet, FleetActorMessage::Request { command, reply });
        answer.await.unwrap_or_else(|_| Err(stopping_error()))
    }

    /// A run of one of its sessions has ended, whoever started it.
    pub(crate) fn notify_fleet(self: &Arc<Self>, id: FleetId, run: RunId) {
        let daemon = Arc::clone(self);
        self.spawn(async move {
            // What cannot be told now, the fleet finds when it is read again.
            if let Ok(Some(row)) = daemon.journal.fleet(&id).await
                && row.live
                && let Ok(fleet) = daemon.fleet_address(&row)
            {
                daemon.send_fleet_message(&fleet, FleetActorMessage::RunEnded(run));
            }
        });
    }

    /// Goes on with every fleet that has not ended.
    pub(crate) async fn wake_fleets(self: &Arc<Self>) -> Result<(), ApiError> {
        let live = FleetFilter { live_only: true, ..FleetFilter::default() };
        for row in self.journal.fleets(live, None, usize::MAX).await.map_err(read_failed)? {
            match self.fleet_address(&row) {
                Ok(fleet) => self.send_fleet_message(&fleet, FleetActorMessage::Wake),
                Err(error) => tracing::warn!(fleet = %row.id, %error, "a fleet has no workspace"),
            }
        }
        Ok(())
    }

    /// Puts something into a fleet's mailbox, and wakes it if it sleeps. Nothing is lost when the mailbox is full: there
    /// is at most one message for each of its runs, and those wait.
    fn send_fleet_message(self: &Arc<Self>, fleet: &Arc<FleetAddress>, mail: FleetActorMessage) {
        let wake = |mailbox: Arc<ActorMailbox<FleetActorMessage>>| {
            let (daemon, fleet) = (Arc::clone(self), Arc::clone(fleet));
            self.spawn(async move { actor::run_fleet_actor(daemon, fleet, mailbox).await });
        };
        if let Err(mail) = self.fleets.send(&fleet.id, mail, wake) {
            let (daemon, fleet) = (Arc::clone(self), Arc::clone(fleet));
            self.spawn(async move {
                tokio::time::sleep(FULL_RETRY_DELAY).await;
                if !daemon.is_stopping() {
                    daemon.send_fleet_message(&fleet, mail);
                }
            });
        }
    }
}

/// What a session of a fleet is made with.
fn member_settings(name: &str, member: &FleetMember, env: BTreeMap<String, String>) -> NewSession {
    NewSession {
        agent: member.agent.clone(),
        title: Some(name.to_owned()),
        model: member.model.clone(),
        system_prompt: member.system_prompt.clone(),
        policy: Some(member.policy.clone()),
        worktree: member.worktree.then_some(true),
        budget_usd: member.limits.budget_usd,
        max_turns: member.limits.max_turns,
        run_timeout_s: member.limits.run_timeout_s,
        env,
        mail: Some(member.mail),
        ..NewSession::default()
    }
}

/// Which of a fleet's sessions was refused.
fn member_error(name: &str, error: ApiError) -> ApiError {
    let message = format!("session `{name}`: {}", error.message);
    ApiError { message, ..error }.with_detail("session", name)
}
