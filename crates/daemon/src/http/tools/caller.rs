//! The caller of a tool, and the sessions it can reach: with a session token its descendants, otherwise all of the
//! user's. A session out of reach looks like one that does not exist.

use std::sync::Arc;

use qd_journal::{SessionFilter, SessionRow};
use qd_protocol::api::ReferenceKind;
use qd_protocol::event::EventActor;
use qd_protocol::limits::PAGE_MAX;
use qd_protocol::{ApiError, ErrorCode, SessionId};

use super::super::caller::Caller;
use super::super::sessions::session_view;
use crate::daemon::{Daemon, SessionAddress, read_failed};
use crate::invalid_value;

#[derive(Debug)]
pub(super) enum ToolCaller {
    /// A person, or a program that acts for one.
    User(Arc<EventActor>),
    /// The agent of a session.
    Session(Arc<SessionAddress>),
}

/// Which sessions a tool may be used on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SessionReach {
    /// The descendants of the caller's session.
    Descendants,
    /// The caller's session and its descendants.
    OwnAndDescendants,
}

impl ToolCaller {
    pub(super) async fn from_caller(daemon: &Daemon, caller: &Caller) -> Result<Self, ApiError> {
        match &caller.session {
            Some(session) => Ok(Self::Session(daemon.find_session(session).await?)),
            None => Ok(Self::User(Arc::clone(&caller.actor))),
        }
    }

    /// Who causes what the tool does.
    pub(super) fn actor(&self) -> Arc<EventActor> {
        match self {
            Self::User(actor) => Arc::clone(actor),
            Self::Session(session) => agent_actor(session),
        }
    }

    /// Distinguishes callers in idempotency keys.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::User(_) => "-",
            Self::Session(session) => session.id.as_str(),
        }
    }

    /// The single session within reach that this id, beginning of an id, or title refers to.
    pub(super) async fn find_session(
        &self,
        daemon: &Daemon,
        reference: &str,
        reach: SessionReach,
    ) -> Result<SessionRow, ApiError> {
        let mut found = Vec::new();
        let exact = match SessionId::parse(reference) {
            Ok(id) => daemon.journal.session(&id).await.map_err(read_failed)?,
            Err(_) => None,
        };
        match exact {
            Some(row) => found.extend(self.can_reach(daemon, &row, reach).await?.then_some(row)),
            None => {
                for reference_match in
                    daemon.journal.resolve(reference, PAGE_MAX).await.map_err(read_failed)?
                {
                    let id = SessionId::parse(&reference_match.id)
                        .ok()
                        .filter(|_| reference_match.kind == ReferenceKind::Session);
                    let Some(id) = id else { continue };
                    if let Some(row) = daemon.journal.session(&id).await.map_err(read_failed)?
                        && self.can_reach(daemon, &row, reach).await?
                    {
                        found.push(row);
                    }
                }
            }
        }
        let mut found = found.into_iter();
        match (found.next(), found.next()) {
            (Some(row), None) => Ok(row),
            (Some(first), Some(second)) => Err(invalid_value(format!(
                "`{reference}` may refer to {} or {}; use its id",
                first.id, second.id
            ))),
            (None, _) => {
                let message = format!(
                    "there is no session {reference} within your reach; `list` shows the sessions you can reach"
                );
                Err(ApiError::new(ErrorCode::NotFound, message))
            }
        }
    }

    async fn can_reach(
        &self,
        daemon: &Daemon,
        row: &SessionRow,
        reach: SessionReach,
    ) -> Result<bool, ApiError> {
        let own = match self {
            // The sessions of a removed workspace cannot be reached.
            Self::User(_) => return Ok(daemon.workspaces.by_key(row.workspace).is_some()),
            Self::Session(own) => own,
        };
        if row.key == own.key {
            return Ok(reach == SessionReach::OwnAndDescendants);
        }
        let lineage = daemon.journal.lineage(row.key).await.map_err(read_failed)?;
        Ok(lineage.iter().any(|ancestor| ancestor.key == own.key))
    }

    /// The open sessions within reach, oldest first, without the caller's own.
    pub(super) async fn reachable(&self, daemon: &Daemon, limit: usize) -> Result<Vec<SessionRow>, ApiError> {
        let open = SessionFilter { open_only: true, ..SessionFilter::default() };
        let mut found = Vec::new();
        match self {
            Self::User(_) => {
                let rows = daemon.journal.sessions(open, None, usize::MAX).await.map_err(read_failed)?;
                found
                    .extend(rows.into_iter().filter(|row| daemon.workspaces.by_key(row.workspace).is_some()));
            }
            Self::Session(own) => {
                let mut parents = vec![own.key];
                while let Some(parent) = parents.pop() {
                    let children = SessionFilter { parent: Some(parent), ..SessionFilter::default() };
                    let rows =
                        daemon.journal.sessions(children, None, usize::MAX).await.map_err(read_failed)?;
                    parents.extend(rows.iter().map(|row| row.key));
                    found.extend(rows.into_iter().filter(|row| row.closed_at.is_none()));
                }
                found.sort_by_key(|row| row.key);
            }
        }
        found.truncate(limit);
        Ok(found)
    }

    /// The caller's session. A user has none, so tools that need one refuse.
    pub(super) fn require_session(&self, what: &str) -> Result<&Arc<SessionAddress>, ApiError> {
        match self {
            Self::Session(session) => Ok(session),
            Self::User(_) => Err(invalid_value(format!(
                "{what} is for agents in a session; ask your user directly instead"
            ))),
        }
    }

    /// The caller's own session; `None` for a user.
    pub(super) async fn own_session(
        &self,
        daemon: &Daemon,
    ) -> Result<Option<qd_protocol::api::Session>, ApiError> {
        let Self::Session(own) = self else { return Ok(None) };
        let row = daemon.journal.session(&own.id).await.map_err(read_failed)?;
        let row = row.ok_or_else(|| ApiError::not_found("session", &own.id))?;
        session_view(daemon, &row).map(Some)
    }
}

/// The agent of a session, as the actor of events.
pub(super) fn agent_actor(session: &SessionAddress) -> Arc<EventActor> {
    Arc::new(EventActor::Agent { session_id: session.id.clone() })
}
