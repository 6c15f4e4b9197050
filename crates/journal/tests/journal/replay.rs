//! Reading a session back: from its snapshot, by cursor, by run; and rows rebuilt from the events.

use qd_journal::{
    AppendRequest, EventFilter, EventTopic, Journal, JournalOpenError, NewEvent, RebuildError, RowChange,
    RunFilter, RunRow, SessionFilter, SessionKey, SessionRow, StoredEvent, rebuild,
};
use qd_protocol::link::UpdateNumber;
use qd_protocol::{EventNumber, Millis, Seq};

use crate::fixture::*;

/// Appends interleaved events of three sessions, one of them rare, enough that most are indexed and some are not.
async fn append_interleaved(journal: &Journal) -> u64 {
    let mut numbers = [0; 3];
    let mut total = 0;
    for round in 0..50u64 {
        let mut events = Vec::new();
        for step in 0..100u64 {
            let session = if step == round { 2 } else { usize::from(step % 3 == 0) };
            numbers[session] += 1;
            events.push(event(&scope(session as i64 + 1), numbers[session]));
        }
        total += events.len() as u64;
        journal.append(AppendRequest { events, ..AppendRequest::default() }).await.unwrap();
    }
    total
}

#[tokio::test]
async fn a_session_cursor_finds_its_place_among_all_others() {
    let fixture = JournalFixture::new();
    let total = append_interleaved(&fixture.journal).await;
    let everything = all(&fixture.journal, &everything()).await;
    assert_eq!(everything.len() as u64, total);
    for session in 1..=3 {
        let filter = EventFilter::of(EventTopic::Session(SessionKey(session)));
        let own: Vec<u64> = everything
            .iter()
            .filter(|event| event.session == Some(SessionKey(session)))
            .map(|e| e.seq.0)
            .collect();
        assert_eq!(seqs(&all(&fixture.journal, &filter).await), own);
        for after in (0..=total).step_by(97).chain([total - 1, total]) {
            let page = fixture.journal.page(&filter, Seq(after), 3).await.unwrap();
            let expected: Vec<u64> = own.iter().copied().filter(|seq| *seq > after).take(3).collect();
            assert_eq!(seqs(&page.events), expected, "session {session} after {after}");
        }
    }
    let unknown =
        fixture.journal.page(&EventFilter::of(EventTopic::Session(SessionKey(9))), Seq(0), 3).await.unwrap();
    assert!(unknown.events.is_empty() && unknown.end);
}

#[tokio::test]
async fn a_page_says_where_to_go_on_and_when_there_is_no_more() {
    let fixture = JournalFixture::new();
    for number in 1..=5 {
        append(&fixture.journal, &scope(1), number).await.unwrap();
    }
    let first = fixture.journal.page(&everything(), Seq(0), 3).await.unwrap();
    assert_eq!((seqs(&first.events), first.scanned_through, first.end), (vec![1, 2, 3], Seq(3), false));
    let rest = fixture.journal.page(&everything(), first.scanned_through, 3).await.unwrap();
    assert_eq!((seqs(&rest.events), rest.scanned_through, rest.end), (vec![4, 5], Seq(5), true));
    let none = fixture.journal.page(&everything(), rest.scanned_through, 3).await.unwrap();
    assert_eq!((none.events.len(), none.scanned_through, none.end), (0, Seq(5), true));
}

#[tokio::test]
async fn a_session_is_loaded_from_its_last_snapshot_on() {
    let fixture = JournalFixture::new();
    let first = SessionKey(1);
    assert!(fixture.journal.load(first).await.unwrap().events.is_empty());
    for number in 1..=6 {
        let snapshot = |state: u8| RowChange::Snapshot {
            session: first,
            number: EventNumber(number),
            state: vec![state],
        };
        let rows = if number % 2 == 0 { vec![snapshot(number as u8)] } else { Vec::new() };
        let with_update =
            NewEvent { update_number: Some(UpdateNumber(number * 10)), ..event(&scope(1), number) };
        let events = vec![with_update, event(&scope(2), number)];
        fixture.journal.append(AppendRequest { events, rows, ..AppendRequest::default() }).await.unwrap();
    }
    append(&fixture.journal, &scope(1), 7).await.unwrap();
    let fixture = fixture.reopen().await;
    let loaded = fixture.journal.load(first).await.unwrap();
    assert_eq!(loaded.snapshot, Some((EventNumber(6), vec![6])));
    let numbers: Vec<_> = loaded.events.iter().map(|event| event.number).collect();
    assert_eq!(numbers, [Some(EventNumber(7))]);
    let second = fixture.journal.load(SessionKey(2)).await.unwrap();
    assert_eq!((second.snapshot, second.events.len()), (None, 6));
    let all = fixture.journal.session_events(first, None, &[], EventNumber(0), 100).await.unwrap();
    assert_eq!(all.events[2].update_number, Some(UpdateNumber(30)));
    assert_eq!(all.events[2].scope, scope(1));
}

#[tokio::test]
async fn the_events_of_one_run_are_found_without_reading_what_came_before() {
    let fixture = JournalFixture::new();
    let mut number = 0;
    for name in ["a", "b", "c"] {
        let mut events = Vec::new();
        for kind in ["run.accepted", "text.delta", "tool.output", "text.delta", "run.finished"] {
            number += 1;
            events.push(NewEvent { run: Some(run_id(name)), kind, ..event(&scope(1), number) });
        }
        let rows = vec![RowChange::Run(run_row(name, 1))];
        fixture.journal.append(AppendRequest { events, rows, ..AppendRequest::default() }).await.unwrap();
    }
    let numbers =
        |events: &[StoredEvent]| events.iter().filter_map(|e| e.number).map(|n| n.0).collect::<Vec<_>>();
    let read = |run, kinds: &'static [&'static str], after, limit| {
        let journal = fixture.journal.clone();
        async move { journal.session_events(SessionKey(1), run, kinds, EventNumber(after), limit).await.unwrap() }
    };
    let (b, unknown) = (run_id("b"), run_id("x"));
    let page = read(Some(&b), &["text.delta"], 0, 10).await;
    assert_eq!((numbers(&page.events), page.end), (vec![7, 9], true));
    let page = read(Some(&b), &[], 0, 2).await;
    assert_eq!((numbers(&page.events), page.scanned_through, page.end), (vec![6, 7], EventNumber(7), false));
    let page = read(Some(&b), &[], 7, 10).await;
    assert_eq!((numbers(&page.events), page.end), (vec![8, 9, 10], true));
    let page = read(None, &["run.accepted"], 0, 10).await;
    assert_eq!(numbers(&page.events), [1, 6, 11]);
    assert!(read(Some(&unknown), &[], 0, 10).await.events.is_empty());
}

/// Rows as a simple machine would derive them: one session row per event, a run for every `run.accepted`.
fn fold(event: &StoredEvent) -> Vec<RowChange> {
    let Some((key, _)) = event.scope.session else { return Vec::new() };
    let number = event.number.unwrap();
    let row = SessionRow {
        updated_at: event.ts.wall,
        live: number.0 % 2 == 1,
        doc: event.data.clone(),
        ..session_row(key.0)
    };
    let mut rows = vec![RowChange::Session(row)];
    if let (Some(run), "run.accepted") = (&event.run, event.kind.as_ref()) {
        rows.push(RowChange::Run(RunRow { id: run.clone(), ..run_row("", key.0) }));
        rows.push(RowChange::Ask(ask_row(run.as_str(), key.0, true)));
    }
    if number.0.is_multiple_of(10) {
        rows.push(RowChange::Snapshot { session: key, number, state: event.data.clone() });
        rows.push(RowChange::Meta { key: "last".into(), value: Some(event.data.clone()) });
    }
    rows
}

async fn read_everything(journal: &Journal) -> impl PartialEq + std::fmt::Debug + use<> {
    let sessions = journal.sessions(SessionFilter::default(), None, 1000).await.unwrap();
    let runs = journal.runs(RunFilter::default(), None, 1000).await.unwrap();
    let asks = journal.asks(qd_journal::AskFilter::default(), None, 1000).await.unwrap();
    let first = journal.load(SessionKey(1)).await.unwrap();
    let meta = (journal.meta("last").await.unwrap(), journal.meta("keep.me").await.unwrap());
    (sessions, runs, asks, first.snapshot, first.events, meta)
}

#[tokio::test]
async fn rows_rebuilt_from_the_events_are_the_rows_that_were_there() {
    let fixture = JournalFixture::new();
    change(&fixture.journal, vec![RowChange::Meta { key: "keep.me".into(), value: Some(vec![1]) }])
        .await
        .unwrap();
    for number in 1..=45 {
        for session in 1..=3 {
            let kind = if number % 7 == 1 { "run.accepted" } else { "text.delta" };
            let run = Some(run_id(&format!("{session}_{number}")));
            let new = NewEvent { kind, run, ..event(&scope(session), number) };
            // The seq is not known yet, but the rows do not use it.
            let stored = StoredEvent {
                seq: Seq(0),
                number: new.number,
                ts: new.ts,
                scope: new.scope.clone(),
                run: new.run.clone(),
                kind: new.kind.into(),
                data: new.data.clone(),
                update_number: None,
            };
            let append = AppendRequest { events: vec![new], rows: fold(&stored), ..AppendRequest::default() };
            fixture.journal.append(append).await.unwrap();
        }
    }
    let before = read_everything(&fixture.journal).await;
    assert!(matches!(
        rebuild(fixture.home.path(), fold),
        Err(RebuildError::Open(JournalOpenError::HomeLocked { .. }))
    ));
    let JournalFixture { home, journal, .. } = fixture;
    // A row that no event explains must disappear, and a lost one must come back.
    let wrong = RowChange::Session(SessionRow { updated_at: Millis(1), ..session_row(77) });
    let lost = RowChange::Meta { key: "last".into(), value: None };
    change(&journal, vec![wrong, lost]).await.unwrap();
    journal.close().await;
    assert_eq!(rebuild(home.path(), fold).unwrap(), 135);
    let journal = open(home.path());
    assert_eq!(read_everything(&journal).await, before);
    let live =
        journal.sessions(SessionFilter { live_only: true, ..Default::default() }, None, 10).await.unwrap();
    assert_eq!(live.len(), 3);
    assert_eq!(seqs(&all(&journal, &everything()).await), (1..=135).collect::<Vec<_>>());
    assert!(append(&journal, &scope(1), 45).await.is_err());
    append(&journal, &scope(1), 46).await.unwrap();
}
