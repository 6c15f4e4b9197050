//! Lists made again from the events: what `qd doctor --rebuild` does while no daemon runs.

use std::collections::HashMap;
use std::path::Path;

use qd_core::fleet;
use qd_core::rows::apply;
use qd_core::session::State;
use qd_journal::{RebuildError, RowChange, SessionKey, StoredEvent, WorkspaceRow};
use qd_protocol::api::{Halt, Workspace};
use qd_protocol::event::Body;

use crate::actor::{Begun, recorded, row_change, session_row, snapshot};
use crate::daemon::SessionRef;
use crate::fleets::{self, FleetRef};

/// What a rebuild made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RebuildReport {
    /// Events read.
    pub events: u64,
    /// Workspaces made of them, removed ones too.
    pub workspaces: u64,
    /// Sessions.
    pub sessions: u64,
    /// Fleets.
    pub fleets: u64,
    /// Runs.
    pub runs: u64,
    /// Asks.
    pub asks: u64,
    /// Events that this version cannot read, and so could not use.
    pub unreadable: u64,
}

/// Makes every list anew from the events of a home that no daemon owns.
pub fn rebuild(home: &Path) -> Result<RebuildReport, RebuildError> {
    let mut fold = Fold::default();
    qd_journal::rebuild(home, |event| fold.add(event))?;
    Ok(fold.report)
}

#[derive(Default)]
struct Fold {
    sessions: HashMap<SessionKey, Alive>,
    fleets: HashMap<SessionKey, (FleetRef, fleet::State)>,
    workspaces: HashMap<i64, Workspace>,
    halt: Halt,
    report: RebuildReport,
}

struct Alive {
    session: SessionRef,
    state: State,
    parent: Option<SessionKey>,
}

impl Fold {
    fn add(&mut self, event: &StoredEvent) -> Vec<RowChange> {
        self.report.events += 1;
        let body = match Body::decode(&event.kind, &event.data) {
            Ok(Some(body)) => body,
            Ok(None) | Err(_) => {
                self.report.unreadable += 1;
                return Vec::new();
            }
        };
        if let (Some((workspace_key, workspace)), Some((key, id))) =
            (&event.scope.workspace, &event.scope.fleet)
        {
            let fleet = FleetRef::new(*key, id.clone(), *workspace_key, workspace.clone());
            return self.of_fleet(fleet, event, body);
        }
        match (&event.scope.workspace, &event.scope.session) {
            (Some((workspace_key, workspace)), Some((key, id))) => {
                if let Body::SessionCreated(created) = body {
                    let session = SessionRef::new(*key, id.clone(), *workspace_key, workspace.clone());
                    let above = created.parent.clone();
                    let parent =
                        self.sessions.values().find(|alive| Some(&alive.session.id) == above.as_ref());
                    let parent = parent.map(|alive| alive.session.key);
                    let fleet = created.fleet.as_ref().map(|member| &member.fleet_id);
                    let fleet = self.fleets.values().find(|(known, _)| Some(&known.id) == fleet);
                    let parent = parent.or(fleet.map(|(fleet, _)| fleet.key));
                    let state = State::new(id.clone(), workspace.clone(), created, event.ts);
                    self.report.sessions += 1;
                    let alive = Alive { session, state, parent };
                    let row = alive.row();
                    self.sessions.insert(*key, alive);
                    return row.into_iter().collect();
                }
                self.of_session(*key, event, body)
            }
            (Some((key, id)), None) => {
                let workspace = match body {
                    Body::WorkspaceCreated(created) => {
                        self.report.workspaces += 1;
                        let made = Workspace {
                            id: id.clone(),
                            path: created.path,
                            name: created.name,
                            created_at: event.ts,
                        };
                        self.workspaces.insert(key.0, made.clone());
                        Some((made, false))
                    }
                    Body::WorkspaceRemoved(_) => self.workspaces.remove(&key.0).map(|gone| (gone, true)),
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
                self.halt = match body {
                    Body::HaltSet(set) => crate::halt::after_set(&self.halt, &set, event.ts),
                    Body::HaltLifted(_) => Halt::default(),
                    _ => return Vec::new(),
                };
                crate::halt::row(&self.halt).into_iter().collect()
            }
        }
    }

    fn of_fleet(&mut self, fleet: FleetRef, stored: &StoredEvent, body: Body) -> Vec<RowChange> {
        let number = stored.number.unwrap_or_default();
        let ask = fleets::ask_row(&fleet, &body).ok().flatten();
        self.report.asks += u64::from(matches!(body, Body::AskOpened(_)));
        let row = match body {
            Body::FleetStarted(started) => {
                self.report.fleets += 1;
                let state = fleet::State::new(fleet.workspace.clone(), started, stored.ts);
                let row = fleets::first_row(&fleet, &state);
                self.fleets.insert(fleet.key, (fleet, state));
                row
            }
            body => {
                let Some((fleet, state)) = self.fleets.get_mut(&fleet.key) else {
                    self.report.unreadable += 1;
                    return Vec::new();
                };
                fleet::evolve(state, &fleet::Recorded { number, ts: stored.ts, body });
                fleets::row(fleet, state)
            }
        };
        row.ok().into_iter().chain(ask).collect()
    }

    fn of_session(&mut self, key: SessionKey, stored: &StoredEvent, body: Body) -> Vec<RowChange> {
        let Some(alive) = self.sessions.get_mut(&key) else {
            self.report.unreadable += 1;
            return Vec::new();
        };
        let event = recorded(stored, body);
        let touches = qd_core::rows::touches_session(&event.body);
        let ends = matches!(event.body, Body::RunFinished(_));
        let rows = apply(&mut alive.state, &event);
        self.report.runs += u64::from(matches!(event.body, Body::RunAccepted(_)));
        self.report.asks += u64::from(matches!(event.body, Body::AskOpened(_)));
        let events = [event];
        let begun = Begun::of(&events);
        let mut changes: Vec<RowChange> =
            rows.iter().filter_map(|row| row_change(&alive.session, row, &begun).ok()).collect();
        if touches {
            changes.extend(alive.row());
        }
        if let (true, Some((number, state))) = (ends, ends.then(|| snapshot(&alive.state)).flatten()) {
            changes.push(RowChange::Snapshot { session: key, number, state });
        }
        changes
    }
}

impl Alive {
    fn row(&self) -> Option<RowChange> {
        let line: Vec<SessionKey> = [self.session.key].into_iter().chain(self.parent).collect();
        session_row(&self.session, &self.state, &line).ok()
    }
}
