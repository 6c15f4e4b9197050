//! Builds a long journal quickly: the session machine itself plays one short run per session, and its events go
//! straight into the journal, many sessions per append. No daemon is needed, and the result is the same as if one had
//! written it.

use std::collections::HashMap;
use std::sync::Arc;

use qd_core::rows::{SessionDoc, UpdatedRow};
use qd_core::session::{
    AgentAvailability, PromptSubmission, SessionCommand, SessionContext, SessionInput, SessionState,
    SessionStep, step,
};
use qd_journal::{
    AppendRequest, EventScope, Journal, JournalOptions, NewEvent, RowChange, RunRow, SessionRow,
    WorkspaceKey, WorkspaceRow,
};
use qd_protocol::event::{EventActor, EventBody, SessionCreated, WorkspaceCreated};
use qd_protocol::link::{AgentUpdate, TurnOutcome, TurnStopReason, TurnUpdate, UpdateNumber};
use qd_protocol::{ClockReading, LongText, Millis, RunId, Seq, SessionId, WorkspaceId};
use qd_testkit::TestHome;
use serde::Serialize;

const SESSIONS: u32 = 100_000;
/// Texts that each agent sends. With the other events of a run, a session then has ten events.
const TEXTS: u64 = 3;
/// Sessions per append.
const SESSIONS_PER_APPEND: u32 = 100;

/// The size of the journal that was built.
pub(crate) struct BuiltJournal {
    pub(crate) sessions: u32,
    pub(crate) events: u64,
}

/// Fills the journal of a home that no daemon has used.
pub(crate) fn build(home: &TestHome) -> BuiltJournal {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.expect("a runtime starts").block_on(async {
        let journal = Journal::open(&home.path(), JournalOptions::default()).expect("a fresh journal opens");
        let workspace =
            BenchWorkspace { key: journal.new_workspace_key(), id: WorkspaceId::from_random(&[1; 16]) };
        let path = home.project_dir().to_string_lossy().into_owned();
        journal.append(workspace.creation(path)).await.expect("the journal accepts a workspace");
        for batch in 0..SESSIONS / SESSIONS_PER_APPEND {
            let mut append = AppendRequest::default();
            for session in batch * SESSIONS_PER_APPEND..(batch + 1) * SESSIONS_PER_APPEND {
                play(&journal, &workspace, session, &mut append);
            }
            journal.append(append).await.expect("the journal accepts sessions");
        }
        let events = journal.head().0;
        journal.close().await;
        BuiltJournal { sessions: SESSIONS, events }
    })
}

struct BenchWorkspace {
    key: WorkspaceKey,
    id: WorkspaceId,
}

impl BenchWorkspace {
    fn creation(&self, path: String) -> AppendRequest {
        let now = ClockReading::from(Millis::now());
        let body =
            EventBody::WorkspaceCreated(WorkspaceCreated { path: path.clone(), name: "work".to_owned() });
        let event = NewEvent {
            scope: Arc::new(EventScope {
                workspace: Some((self.key, self.id.clone())),
                session: None,
                fleet: None,
            }),
            number: None,
            ts: now,
            run: None,
            kind: body.kind(),
            data: body.encode(None).expect("our own types have a JSON form"),
            update_number: None,
        };
        let row = WorkspaceRow {
            key: self.key,
            id: self.id.clone(),
            path,
            name: Some("work".to_owned()),
            removed: false,
            created_at: now.wall,
            doc: Vec::new(),
        };
        AppendRequest {
            events: vec![event],
            rows: vec![RowChange::Workspace(row)],
            ..AppendRequest::default()
        }
    }
}

/// Plays one session from its creation to the end of its only run.
fn play(journal: &Journal, workspace: &BenchWorkspace, session: u32, append: &mut AppendRequest) {
    let random = session.to_le_bytes().map(|byte| [byte, byte / 32]).concat();
    let (id, run) = (SessionId::from_random(&random), RunId::from_random(&random));
    let key = journal.new_session_key();
    let scope = Arc::new(EventScope {
        workspace: Some((workspace.key, workspace.id.clone())),
        session: Some((key, id.clone())),
        fleet: None,
    });
    let now = ClockReading::from(Millis::now());
    let created = SessionCreated { agent: "echo".to_owned(), ..SessionCreated::default() };
    let body = EventBody::SessionCreated(created.clone());
    let mut state = SessionState::new(id.clone(), workspace.id.clone(), created, now);
    let first = append.events.len();
    append.events.push(NewEvent {
        scope: Arc::clone(&scope),
        number: Some(state.number),
        ts: now,
        run: None,
        kind: body.kind(),
        data: body.encode(None).expect("our own types have a JSON form"),
        update_number: None,
    });
    let mut rows: HashMap<RunId, UpdatedRow> = HashMap::new();
    let context = SessionContext {
        now,
        halted: false,
        quota_until: None,
        over_budget: false,
        slot_available: true,
        sandbox: None,
        agent: AgentAvailability::Ready { steerable: false },
    };
    let (mut accepted, mut prompt_text) = (None, None);
    for input in inputs(&run) {
        let SessionStep { events, rows: changed, .. } = step(&mut state, input, &context);
        for event in events {
            if matches!(event.body, EventBody::RunAccepted(_)) {
                accepted = Some(append.events.len());
            }
            append.events.push(NewEvent {
                scope: Arc::clone(&scope),
                number: Some(event.number),
                ts: event.ts,
                run: event.run,
                kind: event.body.kind(),
                data: event.body.encode(None).expect("our own types have a JSON form"),
                update_number: event.update_number,
            });
        }
        for row in changed {
            if let UpdatedRow::Run { id, prompt, .. } = &row {
                prompt_text = prompt_text.or(prompt.clone());
                rows.insert(id.clone(), row);
            }
        }
    }
    assert!(
        !state.is_busy() && append.events.len() - first == 10,
        "a session has ten events and has ended its run"
    );
    append.rows.push(RowChange::Session(SessionRow {
        key,
        id,
        workspace: workspace.key,
        parent: None,
        title: None,
        closed_at: None,
        live: false,
        has_open_work: false,
        cost_usd: 0.0,
        budget_usd: None,
        updated_at: now.wall,
        doc: json(&SessionDoc::of(&state)),
    }));
    for row in rows.into_values() {
        let UpdatedRow::Run { id, doc, fingerprint, .. } = row else { continue };
        append.rows.push(RowChange::Run(RunRow {
            id,
            session: key,
            workspace: workspace.key,
            accepted_event: accepted,
            seq: Seq(0),
            finished: true,
            fingerprint,
            prompt: prompt_text.as_ref().map(json),
            doc: json(&doc),
        }));
    }
    append.rows.push(RowChange::Snapshot { session: key, number: state.number, state: json(&state) });
}

/// A prompt, an agent that becomes ready, some text, and the end of the turn.
fn inputs(run: &RunId) -> impl Iterator<Item = SessionInput> {
    let prompt = LongText { head: "what is the meaning of this?".to_owned(), blob: None };
    let accept =
        PromptSubmission { run: run.clone(), prompt, attachments: Vec::new(), fingerprint: "f".repeat(64) };
    let ready = AgentUpdate::Ready { agent_session_id: None, steers: false };
    let text_run = run.clone();
    let texts = (0..TEXTS).map(move |_| {
        let text = "a line of an answer that says something and then goes on ".to_owned();
        AgentUpdate::Turn { run: text_run.clone(), update: TurnUpdate::Text { text } }
    });
    let outcome = TurnOutcome::of(TurnStopReason::EndTurn);
    let end = AgentUpdate::TurnEnded { run: run.clone(), outcome };
    let updates = std::iter::once(ready).chain(texts).chain([end]);
    let updates =
        (1..).zip(updates).map(|(number, update)| SessionInput::Update(UpdateNumber(number), update));
    std::iter::once(SessionInput::Command {
        actor: Arc::new(EventActor::DAEMON),
        command: SessionCommand::AcceptPrompt(accept),
    })
    .chain(updates)
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("our own types have a JSON form")
}
