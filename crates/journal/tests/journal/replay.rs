//! Reading a session back: from its snapshot, by cursor, by run; and the rows rebuilt from the events.

use qd_journal::{
    AppendRequest, EventFilter, EventTopic, Journal, JournalOpenError, NewEvent, RebuildError, RowChange,
    RunFilter, RunRow, SessionFilter, SessionKey, SessionRow, StoredEvent, rebuild,
};
use qd_protocol::link::UpdateNumber;
use qd_protocol::{EventNumber, Millis, Seq};

use crate::fixture::*;

/// Three sessions speak in turn, one of them rarely, for long enough that most of it is indexed and some is not.
async fn conversation(journal: &Journal) -> u64 {
    let mut numbers = [0; 3];
    let mut total = 0;
    for turn in 0..50u64 {
        let mut events = Vec::new();
        for step in 0..100u64 {
            let session = if step == turn { 2 } else { usize::from(step % 3 == 0) };
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
    let world = JournalFixture::new();
    let total = conversation(&world.journal).await;
    let everything = all(&world.journal, &everything()).await;
    assert_eq!(everything.len() as u64, total);
    for session in 1..=3 {
        let filter = EventFilter::of(EventTopic::Session(SessionKey(session)));
        let own: Vec<u64> = everything
            .iter()
            .filter(|event| event.session == Some(SessionKey(session)))
            .map(|e| e.seq.0)
            .collect();
        assert_eq!(seqs(&all(&world.journal, &filter).await), own);
        for after in (0..=total).step_by(97).chain([total - 1, total]) {
            let page = world.journal.page(&filter, Seq(after), 3).await.unwrap();
            let expected: Vec<u64> = own.iter().copied().filter(|seq| *seq > after).take(3).collect();
            assert_eq!(seqs(&page.events), expected, "session {session} after {after}");
        }
    }
    let nobody =
        world.journal.page(&EventFilter::of(EventTopic::Session(SessionKey(9))), Seq(0), 3).await.unwrap();
    assert!(nobody.events.is_empty() && nobody.end);
}

#[tokio::test]
async fn a_page_says_where_to_go_on_and_when_there_is_no_more() {
    let world = JournalFixture::new();
    for number in 1..=5 {
        append(&world.journal, &scope(1), number).await.unwrap();
    }
    let first = world.journal.page(&everything(), Seq(0), 3).await.unwrap();
    assert_eq!((seqs(&first.events), first.scanned, first.end), (vec![1, 2, 3], Seq(3), false));
    let rest = world.journal.page(&everything(), first.scanned, 3).await.unwrap();
    assert_eq!((seqs(&rest.events), rest.scanned, rest.end), (vec![4, 5], Seq(5), true));
    let none = world.journal.page(&everything(), rest.scanned, 3).await.unwrap();
    assert_eq!((none.events.len(), none.scanned, none.end), (0, Seq(5), true));
}

#[tokio::test]
async fn a_session_is_loaded_from_its_last_snapshot_on() {
    let world = JournalFixture::new();
    let one = SessionKey(1);
    assert!(world.journal.load(one).await.unwrap().events.is_empty());
    for number in 1..=6 {
        let snapshot =
            |state: u8| RowChange::Snapshot { session: one, number: EventNumber(number), state: vec![state] };
        let rows = if number % 2 == 0 { vec![snapshot(number as u8)] } else { Vec::new() };
        let said = NewEvent { update_number: Some(UpdateNumber(number * 10)), ..event(&scope(1), number) };
        let events = vec![said, event(&scope(2), number)];
        world.journal.append(AppendRequest { events, rows, ..AppendRequest::default() }).await.unwrap();
    }
    append(&world.journal, &scope(1), 7).await.unwrap();
    let world = world.reopen().await;
    let loaded = world.journal.load(one).await.unwrap();
    assert_eq!(loaded.snapshot, Some((EventNumber(6), vec![6])));
    let numbers: Vec<_> = loaded.events.iter().map(|event| event.number).collect();
    assert_eq!(numbers, [Some(EventNumber(7))]);
    let two = world.journal.load(SessionKey(2)).await.unwrap();
    assert_eq!((two.snapshot, two.events.len()), (None, 6));
    let all = world.journal.session_events(one, None, &[], EventNumber(0), 100).await.unwrap();
    assert_eq!(all.events[2].update_number, Some(UpdateNumber(30)));
    assert_eq!(all.events[2].scope, scope(1));
}

#[tokio::test]
async fn the_events_of_one_run_are_found_without_reading_what_came_before() {
    let world = JournalFixture::new();
    let mut number = 0;
    for name in ["a", "b", "c"] {
        let mut events = Vec::new();
        for kind in ["run.accepted", "text.delta", "tool.output", "text.delta", "run.finished"] {
            number += 1;
            events.push(NewEvent { run: Some(run_id(name)), kind, ..event(&scope(1), number) });
        }
        let rows = vec![RowChange::Run(run_row(name, 1))];
        world.journal.append(AppendRequest { events, rows, ..AppendRequest::default() }).await.unwrap();
    }
    let numbers =
        |events: &[StoredEvent]| events.iter().filter_map(|e| e.number).map(|n| n.0).collect::<Vec<_>>();
    let read = |run, kinds: &'static [&'static str], after, limit| {
        let journal = world.journal.clone();
        async move { journal.session_events(SessionKey(1), run, kinds, EventNumber(after), limit).await.unwrap() }
    };
    let (b, unknown) = (run_id("b"), run_id("x"));
    let page = read(Some(&b), &["text.delta"], 0, 10).await;
    assert_eq!((numbers(&page.events), page.end), (vec![7, 9], true));
    let page = read(Some(&b), &[], 0, 2).await;
    assert_eq!((numbers(&page.events), page.scanned, page.end), (vec![6, 7], EventNumber(7), false));
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
        updated_at: event.ts,
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
        rows.push(RowChange::Meta { key: "last", value: Some(event.data.clone()) });
    }
    rows
}

async fn picture(journal: &Journal) -> impl PartialEq + std::fmt::Debug + use<> {
    let sessions = journal.sessions(SessionFilter::default(), None, 1000).await.unwrap();
    let runs = journal.runs(RunFilter::default(), None, 1000).await.unwrap();
    let asks = journal.asks(qd_journal::AskFilter::default(), None, 1000).await.unwrap();
    let one = journal.load(SessionKey(1)).await.unwrap();
    let meta = (journal.meta("last").await.unwrap(), journal.meta("keep.me").await.unwrap());
    (sessions, runs, asks, one.snapshot, one.events, meta)
}

#[tokio::test]
async fn rows_rebuilt_from_the_events_are_the_rows_that_were_there() {
    let world = JournalFixture::new();
    change(&world.journal, vec![RowChange::Meta { key: "keep.me", value: Some(vec![1]) }]).await.unwrap();
    for number in 1..=45 {
        for session in 1..=3 {
            let kind = if number % 7 == 1 { "run.accepted" } else { "text.delta" };
            let run = Some(run_id(&format!("{session}_{number}")));
            let new = NewEvent { kind, run, ..event(&scope(session), number) };
            // Its seq is not known yet, but no row is made of it but through the append.
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
            world.journal.append(append).await.unwrap();
        }
    }
    let before = picture(&world.journal).await;
    assert!(matches!(
        rebuild(world.home.path(), fold),
        Err(RebuildError::Open(JournalOpenError::HomeLocked { .. }))
    ));
    let JournalFixture { home, journal, .. } = world;
    // Something that no event tells of must go, and what was lost must come back.
    let wrong = RowChange::Session(SessionRow { updated_at: Millis(1), ..session_row(77) });
    let lost = RowChange::Meta { key: "last", value: None };
    change(&journal, vec![wrong, lost]).await.unwrap();
    journal.close().await;
    assert_eq!(rebuild(home.path(), fold).unwrap(), 135);
    let journal = open(home.path());
    assert_eq!(picture(&journal).await, before);
    let live =
        journal.sessions(SessionFilter { live_only: true, ..Default::default() }, None, 10).await.unwrap();
    assert_eq!(live.len(), 3);
    assert_eq!(seqs(&all(&journal, &everything()).await), (1..=135).collect::<Vec<_>>());
    assert!(append(&journal, &scope(1), 45).await.is_err());
    append(&journal, &scope(1), 46).await.unwrap();
}
