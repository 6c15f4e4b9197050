//! Fleets: how one comes to be, and the way to its actor. What follows on what is decided by the machine in
//! `qd-core`; here it is journalled and carried out.
//!
//! - `rows`: a fleet as lists have it.
//! - `actor`: the shell around one fleet's machine.
//! - `give`: prompts on their way to sessions, and ends on their way back.

mod actor;
mod give;
mod rows;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use qd_core::fleet::{Command, State};
use qd_journal::{
    Append, FleetFilter, FleetRow, NewEvent, Remember, Scope, SessionFilter, SessionKey, WorkspaceKey,
};
use qd_protocol::api::NewSession;
use qd_protocol::event::{Body, FleetStarted, Membership};
use qd_protocol::fleet::{Fleet, Member, Spec};
use qd_protocol::limits::EVENT_MAX;
use qd_protocol::{ApiError, Code, FleetId, Millis, RunId, WorkspaceId};
use tokio::sync::oneshot;

pub(crate) use actor::{Answer, FleetMail, ask_row};
pub(crate) use rows::{first_row, row};

use crate::actor::{IdempotencyKey, unwritable};
use crate::daemon::{Daemon, append_failed, read_failed, stopping};
use crate::places::Place;
use crate::random;
use crate::registry::Mailbox;
use crate::sessions::{Unborn, check_env};
use crate::worktrees::Ground;

/// How long a message to a fleet whose mailbox is full waits before it is tried again.
const FULL: Duration = Duration::from_millis(50);

/// A fleet that exists, with what is needed to reach it.
#[derive(Debug)]
pub(crate) struct FleetRef {
    pub(crate) id: FleetId,
    pub(crate) key: SessionKey,
    pub(crate) workspace: WorkspaceId,
    pub(crate) workspace_key: WorkspaceKey,
    /// What its events bear.
    pub(crate) scope: Arc<Scope>,
}

impl FleetRef {
    pub(crate) fn new(
        key: SessionKey,
        id: FleetId,
        workspace_key: WorkspaceKey,
        workspace: WorkspaceId,
    ) -> Self {
        let scope = Arc::new(Scope {
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
        place: &Place,
        spec: Spec,
        env: &BTreeMap<String, String>,
        key: Option<IdempotencyKey>,
    ) -> Result<Fleet, ApiError> {
        let id = FleetId::from_random(&random::bytes::<16>());
        let fleet = FleetRef::new(self.journal.new_session_key(), id, place.key, place.id.clone());
        check_env(env)?;
        let ground = match spec.sessions.values().any(|member| member.worktree) {
            true => Some(self.ground(place, spec.base_branch.as_deref()).await?),
            false => None,
        };
        let mut unborn: Vec<(Unborn, BTreeMap<String, String>)> = Vec::with_capacity(spec.sessions.len());
        let mut sessions = BTreeMap::new();
        for (name, member) in &spec.sessions {
            let one = self
                .member(place, &fleet, (name, member), ground.as_ref(), env)
                .map_err(|error| of_member(name, error))?;
            sessions.insert(name.clone(), one.0.session.id.clone());
            unborn.push(one);
        }
        let started = FleetStarted { fleet_id: fleet.id.clone(), spec, sessions };
        let now = Millis::now();
        let body = Body::FleetStarted(started.clone());
        let state = State::new(place.id.clone(), started, now);
        let data = body.encode().map_err(unwritable)?;
        if data.len() > EVENT_MAX {
            let message =
                format!("a fleet is at most {EVENT_MAX} bytes as JSON; move what is long into files");
            return Err(ApiError::new(Code::InvalidValue, message));
        }
        let event = NewEvent {
            scope: fleet.scope.clone(),
            number: Some(state.number),
            ts: now,
            run: None,
            kind: body.kind(),
            data,
            up: None,
        };
        let view = rows::first_view(&state);
        let answer = serde_json::to_vec(&view).map_err(unwritable)?;
        let (mut events, mut changes) = (vec![event], vec![first_row(&fleet, &state)?]);
        let mut made = Vec::with_capacity(unborn.len());
        for (Unborn { session, event, row, .. }, env) in unborn {
            self.keep_env(&session.id, &env)?;
            made.push(session.id);
            events.push(event);
            changes.push(row);
        }
        self.make_mail_folders(made.clone()).await;
        let remember = key.map(|IdempotencyKey { key, fingerprint }| Remember {
            key,
            fingerprint,
            answer: Box::new(move |_| answer.clone()),
        });
        let append = Append { events, rows: changes, remember, reserve: false };
        if let Err(error) = self.journal.append(append).await {
            for session in &made {
                self.forget_env(session);
                crate::maildir::tidy(&self.home, session);
            }
            return Err(append_failed(error));
        }
        self.send_fleet(&Arc::new(fleet), FleetMail::Wake);
        Ok(view)
    }

    /// One of its sessions, and the variables that its agent is given.
    fn member(
        &self,
        place: &Place,
        fleet: &FleetRef,
        (name, member): (&str, &Member),
        ground: Option<&Ground>,
        env: &BTreeMap<String, String>,
    ) -> Result<(Unborn, BTreeMap<String, String>), ApiError> {
        let listed = self.workers.agent(&member.agent, &place.path)?.env;
        let env = qd_catalog::passed(&listed, env.clone().into_iter());
        let part = Membership { fleet_id: fleet.id.clone(), name: name.to_owned() };
        let new = settings(name, member, env.clone());
        Ok((self.conceive(place, new, ground, Some(part), Some(fleet.key))?, env))
    }

    /// The fleet of this id in this workspace.
    pub(crate) async fn fleet(
        &self,
        workspace: &WorkspaceId,
        id: &FleetId,
    ) -> Result<Arc<FleetRef>, ApiError> {
        let row = self.journal.fleet(id).await.map_err(read_failed)?;
        let place = self.places.get(workspace)?;
        let row = row.filter(|row| row.workspace == place.key);
        self.fleet_ref(&row.ok_or_else(|| ApiError::not_found("fleet", id))?)
    }

    /// The fleet of this row.
    pub(crate) fn fleet_ref(&self, row: &FleetRow) -> Result<Arc<FleetRef>, ApiError> {
        let place = self.places.by_key(row.workspace).ok_or_else(|| ApiError::not_found("fleet", &row.id))?;
        Ok(Arc::new(FleetRef::new(row.key, row.id.clone(), place.key, place.id.clone())))
    }

    /// A fleet as clients see it now: what its sessions do is theirs to say.
    pub(crate) async fn view_fleet(&self, row: &FleetRow) -> Result<Fleet, ApiError> {
        let below = SessionFilter { parent: Some(row.key), ..SessionFilter::default() };
        let sessions = self.journal.sessions(below, None, usize::MAX).await.map_err(read_failed)?;
        let halted = self.halted();
        let states: BTreeMap<_, _> = sessions
            .iter()
            .filter_map(|session| rows::session_state(session, halted).map(|state| (&session.id, state)))
            .collect();
        rows::view(row, |session| states.get(session).copied())
    }

    /// Sends a command to a fleet and waits until what came of it is in the journal.
    pub(crate) async fn command_fleet(
        self: &Arc<Self>,
        fleet: &Arc<FleetRef>,
        command: Command,
    ) -> Result<Answer, ApiError> {
        if self.is_stopping() {
            return Err(stopping());
        }
        let (reply, answer) = oneshot::channel();
        self.send_fleet(fleet, FleetMail::Request { command, reply });
        answer.await.unwrap_or_else(|_| Err(stopping()))
    }

    /// A run of one of its sessions has ended, whoever started it.
    pub(crate) fn tell_fleet(self: &Arc<Self>, id: FleetId, run: RunId) {
        let daemon = Arc::clone(self);
        self.spawn(async move {
            // What cannot be told now, the fleet finds when it is read again.
            if let Ok(Some(row)) = daemon.journal.fleet(&id).await
                && row.live
                && let Ok(fleet) = daemon.fleet_ref(&row)
            {
                daemon.send_fleet(&fleet, FleetMail::Ended(run));
            }
        });
    }

    /// Goes on with every fleet that has not ended.
    pub(crate) async fn wake_fleets(self: &Arc<Self>) -> Result<(), ApiError> {
        let live = FleetFilter { live_only: true, ..FleetFilter::default() };
        for row in self.journal.fleets(live, None, usize::MAX).await.map_err(read_failed)? {
            match self.fleet_ref(&row) {
                Ok(fleet) => self.send_fleet(&fleet, FleetMail::Wake),
                Err(error) => tracing::warn!(fleet = %row.id, %error, "a fleet has no workspace"),
            }
        }
        Ok(())
    }

    /// Puts something into a fleet's mailbox, and wakes it if it sleeps. Nothing is lost when the mailbox is full: there
    /// is at most one message for each of its runs, and those wait.
    fn send_fleet(self: &Arc<Self>, fleet: &Arc<FleetRef>, mail: FleetMail) {
        let wake = |mailbox: Arc<Mailbox<FleetMail>>| {
            let (daemon, fleet) = (Arc::clone(self), Arc::clone(fleet));
            self.spawn(async move { actor::live(daemon, fleet, mailbox).await });
        };
        if let Err(mail) = self.fleets.send(&fleet.id, mail, wake) {
            let (daemon, fleet) = (Arc::clone(self), Arc::clone(fleet));
            self.spawn(async move {
                tokio::time::sleep(FULL).await;
                if !daemon.is_stopping() {
                    daemon.send_fleet(&fleet, mail);
                }
            });
        }
    }
}

/// What a session of a fleet is made with.
fn settings(name: &str, member: &Member, env: BTreeMap<String, String>) -> NewSession {
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
fn of_member(name: &str, error: ApiError) -> ApiError {
    let message = format!("session `{name}`: {}", error.message);
    ApiError { message, ..error }.with("session", name)
}
