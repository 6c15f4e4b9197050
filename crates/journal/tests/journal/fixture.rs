//! Minimal events and rows, and a journal in a temporary home.

use std::path::Path;
use std::sync::Arc;

use qd_journal::faults::FaultInjector;
use qd_journal::{
    AppendError, AppendReceipt, AppendRequest, AskRow, EventFilter, EventScope, EventTopic, Journal,
    JournalOptions, NewEvent, PublishedEvent, RowChange, RunRow, SessionKey, SessionRow, WorkspaceKey,
    WorkspaceRow,
};
use qd_protocol::{AskId, EventNumber, Millis, RunId, Seq, SessionId, WorkspaceId};
use tempfile::TempDir;

pub(crate) struct JournalFixture {
    pub(crate) home: TempDir,
    pub(crate) journal: Journal,
    pub(crate) faults: Arc<FaultInjector>,
}

pub(crate) fn options(faults: &Arc<FaultInjector>) -> JournalOptions {
    JournalOptions {
        reserve_retry: std::time::Duration::ZERO,
        faults: Some(faults.clone()),
        ..JournalOptions::default()
    }
}

impl JournalFixture {
    pub(crate) fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        let faults = Arc::new(FaultInjector::default());
        let journal = Journal::open(home.path(), options(&faults)).unwrap();
        Self { home, journal, faults }
    }

    /// Closes the journal and opens it again.
    pub(crate) async fn reopen(self) -> Self {
        let Self { home, journal, faults } = self;
        journal.close().await;
        let journal = Journal::open(home.path(), options(&faults)).unwrap();
        Self { home, journal, faults }
    }
}

pub(crate) fn open(home: &Path) -> Journal {
    Journal::open(home, JournalOptions::default()).unwrap()
}

pub(crate) fn session_id(key: i64) -> SessionId {
    SessionId::parse(&format!("ses_{key:04}")).unwrap()
}

pub(crate) fn workspace_id(key: i64) -> WorkspaceId {
    WorkspaceId::parse(&format!("ws_{key:04}")).unwrap()
}

pub(crate) fn run_id(name: &str) -> RunId {
    RunId::parse(&format!("run_{name}")).unwrap()
}

/// A session in a workspace.
pub(crate) fn scope_in(workspace: i64, session: i64) -> Arc<EventScope> {
    Arc::new(EventScope {
        workspace: Some((WorkspaceKey(workspace), workspace_id(workspace))),
        session: Some((SessionKey(session), session_id(session))),
        fleet: None,
    })
}

/// A session in the first workspace.
pub(crate) fn scope(session: i64) -> Arc<EventScope> {
    scope_in(1, session)
}

pub(crate) fn event(scope: &Arc<EventScope>, number: u64) -> NewEvent {
    NewEvent {
        scope: scope.clone(),
        number: Some(EventNumber(number)),
        ts: Millis(1_794_774_645_000 + number).into(),
        run: None,
        kind: "text.delta",
        data: format!(r#"{{"text":"{number}"}}"#).into_bytes(),
        update_number: None,
    }
}

/// Appends a single event.
pub(crate) async fn append(
    journal: &Journal,
    scope: &Arc<EventScope>,
    number: u64,
) -> Result<AppendReceipt, AppendError> {
    journal.append(AppendRequest { events: vec![event(scope, number)], ..AppendRequest::default() }).await
}

/// Appends row changes without events.
pub(crate) async fn change(journal: &Journal, rows: Vec<RowChange>) -> Result<AppendReceipt, AppendError> {
    journal.append(AppendRequest { rows, ..AppendRequest::default() }).await
}

pub(crate) fn workspace_row(key: i64, path: &str) -> WorkspaceRow {
    WorkspaceRow {
        key: WorkspaceKey(key),
        id: workspace_id(key),
        path: path.to_owned(),
        name: None,
        removed: false,
        created_at: Millis(5),
        doc: b"{}".to_vec(),
    }
}

pub(crate) fn session_row(key: i64) -> SessionRow {
    SessionRow {
        key: SessionKey(key),
        id: session_id(key),
        workspace: WorkspaceKey(1),
        parent: None,
        title: None,
        closed_at: None,
        live: false,
        has_open_work: false,
        cost_usd: 0.0,
        budget_usd: None,
        updated_at: Millis(5),
        doc: b"{}".to_vec(),
    }
}

/// A run accepted by the first event of its append.
pub(crate) fn run_row(name: &str, session: i64) -> RunRow {
    RunRow {
        id: run_id(name),
        session: SessionKey(session),
        workspace: WorkspaceKey(1),
        accepted_event: Some(0),
        seq: Seq(0),
        finished: false,
        fingerprint: "f".to_owned(),
        prompt: Some(b"hello".to_vec()),
        doc: b"{}".to_vec(),
    }
}

pub(crate) fn ask_row(name: &str, session: i64, pending: bool) -> AskRow {
    let id = AskId::parse(&format!("ask_{name}")).unwrap();
    AskRow { id, session: SessionKey(session), pending, doc: b"{}".to_vec() }
}

pub(crate) fn everything() -> EventFilter {
    EventFilter::of(EventTopic::All)
}

/// All events in the journal that match a filter.
pub(crate) async fn all(journal: &Journal, filter: &EventFilter) -> Vec<Arc<PublishedEvent>> {
    let (mut events, mut after) = (Vec::new(), Seq(0));
    loop {
        let page = journal.page(filter, after, 100).await.unwrap();
        events.extend(page.events);
        after = page.scanned_through;
        if page.end {
            return events;
        }
    }
}

pub(crate) fn seqs(events: &[Arc<PublishedEvent>]) -> Vec<u64> {
    events.iter().map(|event| event.seq.0).collect()
}
