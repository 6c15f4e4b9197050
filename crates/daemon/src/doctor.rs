//! Rebuilds the list rows from the events, for `qd doctor --rebuild`, while no daemon runs.

use std::collections::HashMap;
use std::path::Path;

use qd_core::fleet;
use qd_core::rows::apply_event;
use qd_core::session::SessionState;
pub use qd_journal::inspect_journal;
use qd_journal::{RebuildError, RowChange, SessionKey, StoredEvent, WorkspaceRow};
use qd_protocol::api::{HaltStatus, Workspace};
use qd_protocol::event::EventBody;

use crate::actor::{FirstEventIndex, encode_snapshot, recorded_event, row_change, session_row};
use crate::daemon::SessionAddress;
use crate::fleets::{self, FleetAddress};

/// What a rebuild has processed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RebuildReport {
    pub events: u64,
    /// Workspaces, including removed ones.
    pub workspaces: u64,
    pub sessions: u64,
    pub fleets: u64,
    pub runs: u64,
    pub asks: u64,
    /// Events that this version cannot decode, and so could not use.
    pub unreadable: u64,
}

/// Rebuilds every list row from the events of a home that no daemon holds.
pub fn rebuild_lists(home: &Path) -> Result<RebuildReport, RebuildError> {
    let mut rebuilder = RowRebuilder::default();
    qd_journal::rebuild(home, |event| rebuilder.apply_event(event))?;
    Ok(rebuilder.report)
}

#[derive(Default)]
struct RowRebuilder {
    sessions: HashMap<SessionKey, RebuiltSession>,
    fleets: HashMap<SessionKey, (FleetAddress, fleet::FleetState)>,
    workspaces: HashMap<i64, Workspace>,
    halt: HaltStatus,
    report: RebuildReport,
}

struct RebuiltSession {
    session: SessionAddress,
    state: SessionState,
    parent: Option<SessionKey>,
}

impl RowRebuilder {
    fn apply_event(&mut self, event: &StoredEvent) -> Vec<RowChange> {
        self.report.events += 1;
        let body = match EventBody::decode(&event.kind, &event.data) {
            Ok(Some(body)) => body,
            Ok(None) | Err(_) => {
                self.report.unreadable += 1;
                return Vec::new();
            }
        };
        if let (Some((workspace_key, workspace)), Some((key, id))) =
            (&event.scope.workspace, &event.scope.fleet)
        {
            let fleet = FleetAddress::new(*key, id.clone(), *workspace_key, workspace.clone());
            return self.apply_fleet_event(fleet, event, body);
        }
        match (&event.scope.workspace, &event.scope.session) {
            (Some((workspace_key, workspace)), Some((key, id))) => {
                if let EventBody::SessionCreated(created) = body {
                    let session = SessionAddress::new(*key, id.clone(), *workspace_key, workspace.clone());
                    let parent_id = created.parent.clone();
                    let parent = self
                        .sessions
                        .values()
                        .find(|rebuilt| Some(&rebuilt.session.id) == parent_id.as_ref());
                    let parent = parent.map(|rebuilt| rebuilt.session.key);
                    let fleet = created.fleet.as_ref().map(|member| &member.fleet_id);
                    let fleet = self.fleets.values().find(|(known, _)| Some(&known.id) == fleet);
                    let parent = parent.or(fleet.map(|(fleet, _)| fleet.key));
                    let state = SessionState::new(id.clone(), workspace.clone(), created, event.ts);
                    self.report.sessions += 1;
                    let rebuilt = RebuiltSession { session, state, parent };
                    let row = rebuilt.row();
                    self.sessions.insert(*key, rebuilt);
                    return row.into_iter().collect();
                }
                self.apply_session_event(*key, event, body)
            }
            (Some((key, id)), None) => {
                let workspace = match body {
                    EventBody::WorkspaceCreated(created) => {
                        self.report.workspaces += 1;
                        let workspace = Workspace {
                            id: id.clone(),
                            path: created.path,
                            name: created.name,
                            created_at: event.ts.wall,
                        };
                        self.workspaces.insert(key.0, workspace.clone());
                        Some((workspace, false))
                    }
                    EventBody::WorkspaceRemoved(_) => self.workspaces.remove(&key.0).map(|gone| (gone, true)),
                    _ => None,
                };
                let row = workspace.map(|(workspace, removed)| {
                    RowChange::Workspace(WorkspaceRow {
                        key: *key,
                        id: workspace.id.clone(),
                        path: workspace.path.clone(),
                        name: Some(workspace.name.clone()),
                        removed,
                        created_at: workspace.created_at,
                        doc: serde_json::to_vec(&workspace).unwrap_or_default(),
                    })
                });
                row.into_iter().collect()
            }
            _ => {
                if let EventBody::QuotaReleased(released) = &body {
                    return vec![crate::quotas::released_quota_row(&released.account)];
                }
                self.halt = match body {
                    EventBody::HaltSet(set) => crate::halt::halt_after_set(&self.halt, &set, event.ts.wall),
                    EventBody::HaltLifted(_) => HaltStatus::default(),
                    _ => return Vec::new(),
                };
                crate::halt::halt_row(&self.halt).into_iter().collect()
            }
        }
    }

    fn apply_fleet_event(
        &mut self,
        fleet: FleetAddress,
        stored: &StoredEvent,
        body: EventBody,
    ) -> Vec<RowChange> {
        let number = stored.number.unwrap_or_default();
        let ask = fleets::ask_row(&fleet, &body, stored.ts.wall).ok().flatten();
        self.report.asks += u64::from(matches!(body, EventBody::AskOpened(_)));
        let row = match body {
            EventBody::FleetStarted(started) => {
                self.report.fleets += 1;
                let state = fleet::FleetState::new(fleet.workspace.clone(), started, stored.ts);
                let row = fleets::new_fleet_row(&fleet, &state);
                self.fleets.insert(fleet.key, (fleet, state));
                row
            }
            body => {
                let Some((fleet, state)) = self.fleets.get_mut(&fleet.key) else {
                    self.report.unreadable += 1;
                    return Vec::new();
                };
                fleet::evolve(state, &fleet::FleetEvent { number, ts: stored.ts, actor: None, body });
                fleets::fleet_row(fleet, state)
            }
        };
        row.ok().into_iter().chain(ask).collect()
    }

    fn apply_session_event(
        &mut self,
        key: SessionKey,
        stored: &StoredEvent,
        body: EventBody,
    ) -> Vec<RowChange> {
        let Some(rebuilt) = self.sessions.get_mut(&key) else {
            self.report.unreadable += 1;
            return Vec::new();
        };
        let event = recorded_event(stored, body);
        let changes_session = qd_core::rows::changes_session_row(&event.body);
        let run_ended = matches!(event.body, EventBody::RunFinished(_));
        let rows = apply_event(&mut rebuilt.state, &event);
        self.report.runs += u64::from(matches!(event.body, EventBody::RunAccepted(_)));
        self.report.asks += u64::from(matches!(event.body, EventBody::AskOpened(_)));
        let events = [event];
        let first_events = FirstEventIndex::of_events(&events);
        let mut changes: Vec<RowChange> =
            rows.iter().filter_map(|row| row_change(&rebuilt.session, row, &first_events).ok()).collect();
        if changes_session {
            changes.extend(rebuilt.row());
        }
        if let (true, Some((number, state))) =
            (run_ended, run_ended.then(|| encode_snapshot(&rebuilt.state)).flatten())
        {
            changes.push(RowChange::Snapshot { session: key, number, state });
        }
        changes
    }
}

impl RebuiltSession {
    fn row(&self) -> Option<RowChange> {
        let lineage: Vec<SessionKey> = [self.session.key].into_iter().chain(self.parent).collect();
        session_row(&self.session, &self.state, &lineage).ok()
    }
}
