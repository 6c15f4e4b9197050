//! Fleets: how one is created, and how its actor is reached. The machine in `qd-core` decides what follows what; here
//! its decisions are journalled and carried out.
//!
//! - `rows`: a fleet as lists show it.
//! - `actor`: the shell around one fleet's machine.
//! - `delivery`: prompts on their way to sessions, and ends on their way back.

mod actor;
mod delivery;
mod rows;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use qd_core::fleet::{FleetCommand, FleetState};
use qd_journal::{
    AppendRequest, EventScope, FleetFilter, FleetRow, IdempotencyRecord, NewEvent, SessionFilter, SessionKey,
    SessionRow, WorkspaceKey,
};
use qd_protocol::api::NewSession;
use qd_protocol::event::{EventActor, EventBody, FleetMembership, FleetStarted};
use qd_protocol::fleet::{Fleet, FleetMember, FleetSpec};
use qd_protocol::limits::EVENT_MAX;
use qd_protocol::{ApiError, ErrorCode, FleetId, RunId, WorkspaceId};
use tokio::sync::oneshot;

pub(crate) use actor::{FleetActorMessage, FleetActorReply, ask_row};
pub(crate) use rows::{fleet_row, new_fleet_row};

use crate::actor::{IdempotencyKey, encode_failed, retry_delivery};
use crate::clock::read_clocks;
use crate::daemon::{Daemon, append_failed, read_failed, stopping_error};
use crate::random;
use crate::registry::ActorMailbox;
use crate::sessions::{UncommittedSession, check_env};
use crate::workspaces::WorkspaceEntry;
use crate::worktrees::WorktreeLayout;

/// The delay before a message to a fleet with a full mailbox is sent again.
const FULL_RETRY_DELAY: Duration = Duration::from_millis(50);

/// An existing fleet, with the keys needed to reach it.
#[derive(Debug)]
pub(crate) struct FleetAddress {
    pub(crate) id: FleetId,
    pub(crate) key: SessionKey,
    pub(crate) workspace: WorkspaceId,
    pub(crate) workspace_key: WorkspaceKey,
    /// The scope of all the fleet's events.
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

/// What a fleet's agents get of whoever starts it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FleetEnvironment<'a> {
    /// Variables, of which each agent gets those that its manifest lists.
    pub(crate) env: &'a BTreeMap<String, String>,
    /// The paths of agents' programs, by the name of the agent.
    pub(crate) programs: &'a BTreeMap<String, String>,
}

impl Daemon {
    /// Starts a fleet. The fleet and all its sessions are journalled in one transaction, or not at all.
    pub(crate) async fn start_fleet(
        self: &Arc<Self>,
        workspace: &WorkspaceEntry,
        spec: FleetSpec,
        given: FleetEnvironment<'_>,
        actor: &EventActor,
        key: Option<IdempotencyKey>,
    ) -> Result<Fleet, ApiError> {
        let id = FleetId::from_random(&random::bytes::<16>());
        let fleet =
            FleetAddress::new(self.journal.new_session_key(), id, workspace.key, workspace.id.clone());
        let uncommitted = self.build_members(workspace, &fleet, &spec, given, actor).await?;
        let names = spec.sessions.keys().cloned();
        let ids = uncommitted.iter().map(|(member, _)| member.session.id.clone());
        let sessions = names.zip(ids).collect();
        let started = FleetStarted { fleet_id: fleet.id.clone(), spec, sessions };
        let now = read_clocks();
        let body = EventBody::FleetStarted(started.clone());
        let state = FleetState::new(workspace.id.clone(), started, now);
        let data = body.encode(Some(actor)).map_err(encode_failed)?;
        if data.len() > EVENT_MAX {
            let message =
                format!("a fleet must be at most {EVENT_MAX} bytes as JSON; move long texts into files");
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
        let mut session_ids = Vec::with_capacity(uncommitted.len());
        for (UncommittedSession { session, event, row, .. }, env) in uncommitted {
            self.store_env(&session.id, &env)?;
            session_ids.push(session.id);
            events.push(event);
            changes.push(row);
        }
        self.make_mail_folders(session_ids.clone()).await;
        let record = key.map(|IdempotencyKey { key, fingerprint }| IdempotencyRecord {
            key,
            fingerprint,
            make_response: Box::new(move |_| answer.clone()),
        });
        let append = AppendRequest { events, rows: changes, idempotency: record, may_use_reserve: false };
        if let Err(error) = self.journal.append(append).await {
            for session in &session_ids {
                self.remove_session_secrets(session);
                crate::maildir::remove_empty_folders(&self.home, session);
            }
            return Err(append_failed(error));
        }
        self.send_fleet_message(&Arc::new(fleet), FleetActorMessage::Wake);
        Ok(view)
    }

    /// Checks everything that starting this fleet would check, and starts nothing.
    pub(crate) async fn check_fleet(
        self: &Arc<Self>,
        workspace: &WorkspaceEntry,
        spec: &FleetSpec,
        given: FleetEnvironment<'_>,
    ) -> Result<(), ApiError> {
        let id = FleetId::from_random(&random::bytes::<16>());
        let fleet =
            FleetAddress::new(self.journal.new_session_key(), id, workspace.key, workspace.id.clone());
        // Nothing of it is written, so nobody is its actor.
        self.build_members(workspace, &fleet, spec, given, &EventActor::DAEMON).await.map(drop)
    }

    /// Builds all member sessions in the order of their names, each with the variables that its agent gets. A problem
    /// names the session and the setting that it is about.
    async fn build_members(
        self: &Arc<Self>,
        workspace: &WorkspaceEntry,
        fleet: &FleetAddress,
        spec: &FleetSpec,
        given: FleetEnvironment<'_>,
        actor: &EventActor,
    ) -> Result<Vec<(UncommittedSession, BTreeMap<String, String>)>, ApiError> {
        check_env(given.env)?;
        let with_worktree = spec.sessions.iter().find(|(_, member)| member.worktree);
        let layout = match with_worktree {
            Some((name, _)) => {
                let layout = self.worktree_layout(workspace, spec.base_branch.as_deref()).await;
                let setting = if spec.base_branch.is_some() { "base_branch" } else { "worktree" };
                Some(layout.map_err(|error| {
                    error.with_detail("session", name.as_str()).with_detail("setting", setting)
                })?)
            }
            None => None,
        };
        let members = spec.sessions.iter().map(|(name, member)| {
            self.build_member(workspace, fleet, (name, member), layout.as_ref(), given, actor)
                .map_err(|error| member_error(name, error))
        });
        members.collect()
    }

    /// Builds a member session, with the variables that its agent gets.
    fn build_member(
        &self,
        workspace: &WorkspaceEntry,
        fleet: &FleetAddress,
        (name, member): (&str, &FleetMember),
        layout: Option<&WorktreeLayout>,
        given: FleetEnvironment<'_>,
        actor: &EventActor,
    ) -> Result<(UncommittedSession, BTreeMap<String, String>), ApiError> {
        let allowed = self.workers.agent(&member.agent, &workspace.path)?.env;
        let env = qd_catalog::select_variables(&allowed, given.env.clone().into_iter());
        let membership = FleetMembership { fleet_id: fleet.id.clone(), name: name.to_owned() };
        let program = given.programs.get(&member.agent).cloned();
        let new = NewSession { program, ..member_settings(name, member, env.clone()) };
        Ok((self.build_session(workspace, new, layout, Some(membership), Some(fleet.key), actor)?, env))
    }

    pub(crate) async fn fleet_in_workspace(
        &self,
        workspace: &WorkspaceId,
        id: &FleetId,
    ) -> Result<Arc<FleetAddress>, ApiError> {
        let row = self.journal.fleet(id).await.map_err(read_failed)?;
        let entry = self.workspaces.get(workspace)?;
        let row = row.filter(|row| row.workspace == entry.key);
        self.fleet_address(&row.ok_or_else(|| ApiError::not_found("fleet", id))?)
    }

    pub(crate) fn fleet_address(&self, row: &FleetRow) -> Result<Arc<FleetAddress>, ApiError> {
        let workspace =
            self.workspaces.by_key(row.workspace).ok_or_else(|| ApiError::not_found("fleet", &row.id))?;
        Ok(Arc::new(FleetAddress::new(row.key, row.id.clone(), workspace.key, workspace.id.clone())))
    }

    /// A fleet as clients see it now, with the current states of its sessions.
    pub(crate) async fn view_fleet(&self, row: &FleetRow) -> Result<Fleet, ApiError> {
        let members = SessionFilter { parent: Some(row.key), ..SessionFilter::default() };
        let sessions = self.journal.sessions(members, None, usize::MAX).await.map_err(read_failed)?;
        let state = |session: &SessionRow| {
            let doc = serde_json::from_slice(&session.doc).ok()?;
            Some(self.view_session(doc).state)
        };
        let states: BTreeMap<_, _> =
            sessions.iter().filter_map(|session| Some((&session.id, state(session)?))).collect();
        rows::fleet_view(row, |session| states.get(session).copied())
    }

    /// Sends a command to a fleet and waits until its result is in the journal.
    pub(crate) async fn send_fleet_command(
        self: &Arc<Self>,
        fleet: &Arc<FleetAddress>,
        actor: &Arc<EventActor>,
        command: FleetCommand,
    ) -> Result<FleetActorReply, ApiError> {
        if self.is_stopping() {
            return Err(stopping_error());
        }
        let (reply, answer) = oneshot::channel();
        self.send_fleet_message(
            fleet,
            FleetActorMessage::Request { actor: Arc::clone(actor), command, reply },
        );
        answer.await.unwrap_or_else(|_| Err(stopping_error()))
    }

    /// Reports that a run of a member session has ended, whoever started it.
    pub(crate) fn notify_fleet(self: &Arc<Self>, id: FleetId, run: RunId) {
        let daemon = Arc::clone(self);
        self.spawn(async move {
            let find = || async { daemon.journal.fleet(&id).await.map_err(read_failed) };
            // If the daemon stops, the next one finds the end when it loads the fleet.
            if let Some(Some(row)) = retry_delivery(&daemon, find).await
                && row.live
                && let Ok(fleet) = daemon.fleet_address(&row)
            {
                daemon.send_fleet_message(&fleet, FleetActorMessage::RunEnded(run));
            }
        });
    }

    /// Wakes every fleet that has not ended.
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

    /// Puts a message into a fleet's mailbox, and wakes the fleet if it sleeps. If the mailbox is full, the message
    /// is sent again later; there is at most one for each of the fleet's runs.
    fn send_fleet_message(self: &Arc<Self>, fleet: &Arc<FleetAddress>, message: FleetActorMessage) {
        let wake = |mailbox: Arc<ActorMailbox<FleetActorMessage>>| {
            let (daemon, fleet) = (Arc::clone(self), Arc::clone(fleet));
            self.spawn(async move { actor::run_fleet_actor(daemon, fleet, mailbox).await });
        };
        if let Err(message) = self.fleets.send(&fleet.id, message, wake) {
            let (daemon, fleet) = (Arc::clone(self), Arc::clone(fleet));
            self.spawn(async move {
                tokio::time::sleep(FULL_RETRY_DELAY).await;
                if !daemon.is_stopping() {
                    daemon.send_fleet_message(&fleet, message);
                }
            });
        }
    }
}

/// The settings of a member session.
fn member_settings(name: &str, member: &FleetMember, env: BTreeMap<String, String>) -> NewSession {
    NewSession {
        agent: member.agent.clone(),
        title: Some(name.to_owned()),
        model: member.model.clone(),
        mode: member.mode.clone(),
        system_prompt: member.system_prompt.clone(),
        policy: Some(member.policy.clone()),
        worktree: member.worktree.then_some(true),
        budget_usd: member.limits.budget_usd,
        max_turns: member.limits.max_turns,
        run_timeout_s: member.limits.run_timeout_s,
        env,
        mail: Some(member.mail),
        sandbox: member.sandbox,
        network: member.network,
        ..NewSession::default()
    }
}

/// Names the member session that was refused.
fn member_error(name: &str, mut error: ApiError) -> ApiError {
    error.message = format!("session `{name}`: {}", error.message);
    error.with_detail("session", name)
}
