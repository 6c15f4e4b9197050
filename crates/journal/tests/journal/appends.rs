//! What an append guarantees: it is synced before it is published, published before it is answered, written as a whole
//! or not at all, and not affected by another caller's mistake.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use qd_journal::faults::WriterStep;
use qd_journal::{
    AppendError, AppendRequest, EventScope, IdempotencyRecord, NewEvent, RowChange, RunRow, SessionKey,
};
use qd_protocol::{EventNumber, MachineUptime, Millis, Seq};
use tokio::task::JoinSet;

use crate::fixture::*;

#[tokio::test]
async fn an_append_is_answered_with_its_place() {
    let fixture = JournalFixture::new();
    let session = scope(1);
    let first = append(&fixture.journal, &session, 1).await.unwrap();
    assert_eq!((first.first, first.last), (Seq(1), Seq(1)));
    let events = (2..=4).map(|number| event(&session, number)).collect();
    let next = fixture.journal.append(AppendRequest { events, ..AppendRequest::default() }).await.unwrap();
    assert_eq!((next.first, next.last), (Seq(2), Seq(4)));
    let rows = change(&fixture.journal, vec![RowChange::Session(session_row(1))]).await.unwrap();
    assert_eq!((rows.first, rows.last), (Seq(4), Seq(4)), "without events, both are the head");
    assert_eq!(fixture.journal.head(), Seq(4));
}

#[tokio::test]
async fn an_event_keeps_the_uptime_that_it_was_appended_with_or_none() {
    let fixture = JournalFixture::new();
    let session = scope(1);
    let mut watcher = fixture.journal.subscribe(everything(), None);
    let uptimes = [
        None,
        Some(MachineUptime { boot: 0x0123_4567, awake_ms: 5, total_ms: 5 }),
        Some(MachineUptime { boot: u32::MAX, awake_ms: 3_000_000_000, total_ms: 4_000_000_000 }),
    ];
    for (number, uptime) in (1..).zip(uptimes) {
        let mut event = event(&session, number);
        event.ts.uptime = uptime;
        let events = vec![event];
        fixture.journal.append(AppendRequest { events, ..AppendRequest::default() }).await.unwrap();
    }
    let stored = fixture.journal.session_events(SessionKey(1), None, &[], EventNumber(0), 9).await.unwrap();
    let read: Vec<_> = stored.events.iter().map(|event| event.ts.uptime).collect();
    assert_eq!(read, uptimes);
    let published = watcher.next().await.unwrap();
    assert!(
        !String::from_utf8_lossy(&published[0].json()).contains("uptime"),
        "clients see the wall clock only"
    );
}

/// The writer is stopped between its steps, so that what others see in between does not depend on timing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_shown_before_its_sync_or_answered_before_it_is_shown() {
    let fixture = JournalFixture::new();
    let (reached, steps) = mpsc::channel();
    let (go, gate) = mpsc::channel();
    fixture.faults.on_step(move |step| {
        reached.send(step).unwrap();
        gate.recv().unwrap();
    });
    let journal = fixture.journal.clone();
    let mut watcher = journal.subscribe(everything(), None);
    let mut appending = tokio::spawn({
        let journal = journal.clone();
        async move { append(&journal, &scope(1), 1).await }
    });
    let steps = Arc::new(Mutex::new(steps));
    let next_step = || {
        let steps = steps.clone();
        async move { tokio::task::spawn_blocking(move || steps.lock().recv().unwrap()).await.unwrap() }
    };
    for expected in
        [WriterStep::Committing, WriterStep::Committed, WriterStep::Published, WriterStep::Answered]
    {
        assert_eq!(next_step().await, expected);
        let published = matches!(expected, WriterStep::Published | WriterStep::Answered);
        assert_eq!(journal.head(), Seq(u64::from(published)), "{expected:?}");
        let stored = rows_on_disk(fixture.home.path());
        assert_eq!(stored, u64::from(expected != WriterStep::Committing), "{expected:?}");
        let seen = tokio::select! {
            biased;
            seen = watcher.next() => seen.unwrap().len(),
            () = std::future::ready(()) => 0,
        };
        assert_eq!(seen, usize::from(expected == WriterStep::Published), "{expected:?}");
        if expected != WriterStep::Answered {
            assert!(!appending.is_finished(), "{expected:?}");
            go.send(()).unwrap();
        }
    }
    (&mut appending).await.unwrap().unwrap();
    go.send(()).unwrap();
}

/// A row can be read between the commit and the publication of its event.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_has_the_events_of_every_row_that_was_read_before() {
    let fixture = JournalFixture::new();
    let (reached, steps) = mpsc::channel();
    let (go, gate) = mpsc::channel::<()>();
    fixture.faults.on_step(move |step| {
        if step == WriterStep::Committed && reached.send(()).is_ok() {
            let _ = gate.recv();
        }
    });
    let journal = fixture.journal.clone();
    let appending = tokio::spawn({
        let journal = journal.clone();
        async move { append(&journal, &scope(1), 1).await }
    });
    tokio::task::spawn_blocking(move || steps.recv().unwrap()).await.unwrap();
    assert_eq!(rows_on_disk(fixture.home.path()), 1);
    assert_eq!(journal.head(), Seq(0));

    let filter = everything();
    let paging = journal.page(&filter, Seq(0), 10);
    tokio::pin!(paging);
    let early = tokio::time::timeout(std::time::Duration::from_millis(50), &mut paging).await;
    assert!(early.is_err(), "a page shows nothing before it is published");
    drop(go);
    let page = paging.await.unwrap();
    assert_eq!(page.events.len(), 1);
    assert!(journal.head() >= page.scanned_through, "the page's cursor is valid");
    appending.await.unwrap().unwrap();
}

fn rows_on_disk(home: &std::path::Path) -> u64 {
    let db = rusqlite::Connection::open(home.join("journal.db")).unwrap();
    let count: i64 = db.query_row("SELECT count(*) FROM events", [], |row| row.get(0)).unwrap();
    u64::try_from(count).unwrap()
}

#[tokio::test]
async fn a_violation_in_a_shared_commit_fails_nobody_else() {
    let fixture = JournalFixture::new();
    append(&fixture.journal, &scope(9), 1).await.unwrap();
    // Hold the writer in one commit, so that all following appends share the next one.
    let (reached, steps) = mpsc::channel();
    let (go, gate) = mpsc::channel::<()>();
    fixture.faults.on_step(move |step| {
        if step == WriterStep::Committing && reached.send(()).is_ok() {
            let _ = gate.recv();
        }
    });
    let mut appends = JoinSet::new();
    let journal = fixture.journal.clone();
    appends.spawn(async move { (0, append(&journal, &scope(100), 1).await) });
    tokio::task::spawn_blocking(move || steps.recv().unwrap()).await.unwrap();
    for session in 1..=20 {
        let journal = fixture.journal.clone();
        appends.spawn(async move {
            // Every third append writes an event number that session 9 already has.
            let target = if session % 3 == 0 { scope(9) } else { scope(session) };
            (session, append(&journal, &target, 1).await)
        });
    }
    tokio::task::yield_now().await;
    drop(go);
    let mut good = 0;
    while let Some(result) = appends.join_next().await {
        match result.unwrap() {
            (session, Err(AppendError::Violation(_))) => assert_eq!(session % 3, 0),
            (session, Ok(_)) => {
                good += 1;
                assert!(session == 0 || session % 3 != 0);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(good, 15);
    assert_eq!(fixture.journal.stats().violations.load(Relaxed), 6);
    let events = all(&fixture.journal, &everything()).await;
    assert_eq!(seqs(&events), (1..=16).collect::<Vec<_>>(), "a rolled back append uses no seq");
}

#[tokio::test]
async fn all_of_an_append_is_undone_with_its_violation() {
    let fixture = JournalFixture::new();
    let rows = vec![
        RowChange::Session(session_row(1)),
        RowChange::Workspace(workspace_row(1, "/a")),
        RowChange::Workspace(workspace_row(2, "/a")),
    ];
    let events = vec![event(&scope(1), 1)];
    let refused = fixture.journal.append(AppendRequest { events, rows, ..AppendRequest::default() }).await;
    assert!(matches!(refused, Err(AppendError::Violation(_))), "{refused:?}");
    assert!(!refused.unwrap_err().retryable());
    assert!(fixture.journal.session(&session_id(1)).await.unwrap().is_none());
    assert!(fixture.journal.workspace_by_path("/a").await.unwrap().is_none());
    assert_eq!(append(&fixture.journal, &scope(1), 1).await.unwrap().first, Seq(1));
}

#[tokio::test]
async fn a_sessions_history_cannot_be_written_twice() {
    let fixture = JournalFixture::new();
    for number in 1..=3 {
        append(&fixture.journal, &scope(1), number).await.unwrap();
    }
    for number in [1, 2, 3] {
        let again = append(&fixture.journal, &scope(1), number).await;
        assert!(matches!(again, Err(AppendError::Violation(_))), "{again:?}");
    }
    let fixture = fixture.reopen().await;
    let again = append(&fixture.journal, &scope(1), 3).await;
    assert!(matches!(again, Err(AppendError::Violation(_))), "{again:?}");
    let twice = vec![event(&scope(1), 4), event(&scope(1), 4)];
    let twice = fixture.journal.append(AppendRequest { events: twice, ..AppendRequest::default() }).await;
    assert!(matches!(twice, Err(AppendError::Violation(_))), "{twice:?}");
    append(&fixture.journal, &scope(1), 4).await.unwrap();
}

#[tokio::test]
async fn an_event_that_would_break_its_frame_is_refused() {
    let fixture = JournalFixture::new();
    let good = event(&scope(1), 1);
    let without_session = Arc::new(EventScope::default());
    for bad in [
        NewEvent { data: b"{\n}".to_vec(), ..good.clone() },
        NewEvent { data: b"[]".to_vec(), ..good.clone() },
        NewEvent { data: Vec::new(), ..good.clone() },
        NewEvent { number: None, ..good.clone() },
        NewEvent { number: Some(EventNumber(0)), ..good.clone() },
        NewEvent { scope: without_session, ..good.clone() },
        NewEvent { data: format!(r#"{{"text":"{}"}}"#, "x".repeat(1 << 20)).into_bytes(), ..good.clone() },
    ] {
        let refused =
            fixture.journal.append(AppendRequest { events: vec![bad], ..AppendRequest::default() }).await;
        assert!(matches!(refused, Err(AppendError::Violation(_))), "{refused:?}");
    }
    assert_eq!(fixture.journal.head(), Seq(0));
}

#[tokio::test]
async fn an_idempotency_key_is_written_with_what_it_answers_and_once() {
    let fixture = JournalFixture::new();
    append(&fixture.journal, &scope(1), 1).await.unwrap();
    let record = |fingerprint: u8| {
        let make_response = Box::new(|seq: Seq| format!("seq {seq}").into_bytes());
        Some(IdempotencyRecord { key: "k".to_owned(), fingerprint: [fingerprint; 32], make_response })
    };
    let request = |number, fingerprint| AppendRequest {
        events: vec![event(&scope(1), number)],
        idempotency: record(fingerprint),
        ..AppendRequest::default()
    };
    fixture.journal.append(request(2, 7)).await.unwrap();
    let again = fixture.journal.append(request(3, 8)).await;
    assert!(matches!(again, Err(AppendError::Violation(_))), "{again:?}");
    let found = fixture.journal.idempotent_response("k").await.unwrap();
    assert_eq!(found, Some(([7; 32], b"seq 2".to_vec())));
    assert_eq!(fixture.journal.idempotent_response("other").await.unwrap(), None);
    assert_eq!(fixture.journal.head(), Seq(2));
    let rows = AppendRequest {
        idempotency: Some(IdempotencyRecord { key: "rows".to_owned(), ..record(1).unwrap() }),
        ..AppendRequest::default()
    };
    fixture.journal.append(rows).await.unwrap();
    assert_eq!(fixture.journal.idempotent_response("rows").await.unwrap().unwrap().1, b"seq 2");
}

#[tokio::test]
async fn an_old_idempotency_key_is_forgotten() {
    let fixture = JournalFixture::new();
    let request = || {
        let make_response = Box::new(|_| b"a".to_vec());
        let idempotency =
            Some(IdempotencyRecord { key: "k".to_owned(), fingerprint: [1; 32], make_response });
        AppendRequest { idempotency, ..AppendRequest::default() }
    };
    fixture.journal.append(request()).await.unwrap();
    let JournalFixture { home, journal, .. } = fixture;
    journal.close().await;
    let db = rusqlite::Connection::open(home.path().join("journal.db")).unwrap();
    let day = i64::try_from(qd_protocol::limits::IDEMPOTENCY_S * 1000).unwrap();
    db.execute("UPDATE remembered SET at = at - ?1 - 1", [day]).unwrap();
    let journal = open(home.path());
    assert_eq!(journal.idempotent_response("k").await.unwrap(), None);
    journal.append(request()).await.unwrap();
    assert!(journal.idempotent_response("k").await.unwrap().is_some(), "an expired key can be used again");
    db.execute("UPDATE remembered SET at = at - ?1 - 1", [day]).unwrap();
    append(&journal, &scope(1), 1).await.unwrap();
    journal.close().await;
    let left: i64 = db.query_row("SELECT count(*) FROM remembered", [], |row| row.get(0)).unwrap();
    assert_eq!(left, 0, "expired keys are deleted");
}

#[tokio::test]
async fn a_run_is_one_run_of_the_whole_daemon() {
    let fixture = JournalFixture::new();
    append(&fixture.journal, &scope(2), 1).await.unwrap();
    let accept = |session, number| AppendRequest {
        events: vec![event(&scope(session), number), event(&scope(session), number + 1)],
        rows: vec![RowChange::Run(RunRow { accepted_event: Some(1), ..run_row("a", session) })],
        ..AppendRequest::default()
    };
    fixture.journal.append(accept(1, 1)).await.unwrap();
    let again = fixture.journal.append(accept(2, 2)).await;
    assert!(matches!(again, Err(AppendError::Violation(_))), "{again:?}");
    let row = fixture.journal.run(&run_id("a")).await.unwrap().unwrap();
    assert_eq!((row.seq, row.session.0, row.finished), (Seq(3), 1, false));
    let end = RunRow { accepted_event: None, finished: true, prompt: None, ..run_row("a", 1) };
    change(&fixture.journal, vec![RowChange::Run(end)]).await.unwrap();
    let row = fixture.journal.run(&run_id("a")).await.unwrap().unwrap();
    assert_eq!((row.seq, row.finished), (Seq(3), true));
    assert_eq!(row.prompt.as_deref(), Some(&b"hello"[..]), "the prompt stays");
    let unknown = RunRow { accepted_event: None, ..run_row("b", 1) };
    assert!(change(&fixture.journal, vec![RowChange::Run(unknown)]).await.is_err());
    let nowhere = RunRow { accepted_event: Some(0), ..run_row("b", 1) };
    assert!(change(&fixture.journal, vec![RowChange::Run(nowhere)]).await.is_err());
}

#[tokio::test]
async fn a_purge_leaves_nothing_and_its_seqs_are_never_used_again() {
    let fixture = JournalFixture::new();
    let at = Millis(9);
    for session in [1, 2] {
        let rows = vec![
            RowChange::Session(qd_journal::SessionRow { closed_at: Some(at), ..session_row(session) }),
            RowChange::Run(run_row(&format!("r{session}"), session)),
            RowChange::Ask(ask_row(&format!("a{session}"), session, true)),
            RowChange::Snapshot {
                session: qd_journal::SessionKey(session),
                number: EventNumber(1),
                state: vec![1],
            },
        ];
        let events = vec![event(&scope(session), 1)];
        fixture.journal.append(AppendRequest { events, rows, ..AppendRequest::default() }).await.unwrap();
    }
    // Enough events that some of them are indexed and some are not.
    for first in (2..=3000).step_by(500) {
        let events = (first..first + 500).map(|number| event(&scope(2), number)).collect();
        fixture.journal.append(AppendRequest { events, ..AppendRequest::default() }).await.unwrap();
    }
    let closed = fixture.journal.closed_before(Millis(10), 100).await.unwrap();
    let head = fixture.journal.head();
    assert_eq!(closed.sessions.len(), 2);
    assert_eq!(closed.events, head.0);
    // The purged session's last event is the newest of the journal, and is deleted too.
    let last = fixture.journal.append(AppendRequest {
        events: vec![event(&scope(2), 9000)],
        rows: vec![RowChange::Purge { session: qd_journal::SessionKey(2) }],
        ..AppendRequest::default()
    });
    let last = last.await.unwrap().last;
    assert_eq!(last.0, head.0 + 1);
    let fixture = fixture.reopen().await;
    assert_eq!(seqs(&all(&fixture.journal, &everything()).await), [1]);
    assert!(fixture.journal.session(&session_id(2)).await.unwrap().is_none());
    assert!(fixture.journal.run(&run_id("r2")).await.unwrap().is_none());
    assert!(fixture.journal.ask(&ask_row("a2", 2, true).id).await.unwrap().is_none());
    let loaded = fixture.journal.load(qd_journal::SessionKey(2)).await.unwrap();
    assert!(loaded.snapshot.is_none() && loaded.events.is_empty());
    assert!(fixture.journal.session(&session_id(1)).await.unwrap().is_some());
    assert_eq!(fixture.journal.head(), last);
    assert_eq!(append(&fixture.journal, &scope(3), 1).await.unwrap().first.0, last.0 + 1);
    assert!(fixture.journal.new_session_key().0 > 2, "a purged key is not reused");
    let freed = fixture.journal.vacuum(10_000).await.unwrap();
    assert!(freed > 10, "{freed} pages");
    assert_eq!(fixture.journal.quick_check().await.unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn keys_are_above_every_key_ever_used() {
    let fixture = JournalFixture::new();
    let (session, workspace) = (fixture.journal.new_session_key(), fixture.journal.new_workspace_key());
    assert_eq!((session.0, workspace.0), (1, 1));
    append(&fixture.journal, &scope_in(7, 41), 1).await.unwrap();
    let fixture = fixture.reopen().await;
    assert_eq!(fixture.journal.new_session_key().0, 42);
    assert_eq!(fixture.journal.new_session_key().0, 43);
    assert_eq!(fixture.journal.new_workspace_key().0, 8);
}

#[tokio::test]
async fn after_close_nothing_is_taken_and_the_home_is_free() {
    let fixture = JournalFixture::new();
    append(&fixture.journal, &scope(1), 1).await.unwrap();
    fixture.journal.close().await;
    assert_eq!(append(&fixture.journal, &scope(1), 2).await, Err(AppendError::Stopped));
    assert!(fixture.journal.session(&session_id(1)).await.is_err());
    let log = fixture.home.path().join("journal.db-wal");
    assert!(!log.exists() || log.metadata().unwrap().len() == 0);
    let again = open(fixture.home.path());
    assert_eq!(again.head(), Seq(1));
    fixture.journal.close().await;
}

#[tokio::test]
async fn many_appends_share_a_sync_and_keep_their_callers_order() {
    let fixture = JournalFixture::new();
    let mut callers = JoinSet::new();
    for session in 1..=32 {
        let journal = fixture.journal.clone();
        callers.spawn(async move {
            let mut last = Seq(0);
            for number in 1..=50 {
                let next = append(&journal, &scope(session), number).await.unwrap();
                assert!(next.first > last);
                last = next.last;
            }
        });
    }
    while let Some(done) = callers.join_next().await {
        done.unwrap();
    }
    let stats = fixture.journal.stats();
    assert_eq!(stats.events.load(Relaxed), 1600);
    assert!(stats.commits.load(Relaxed) < 1600, "{} commits", stats.commits.load(Relaxed));
    assert_eq!(stats.batch_events.count(), stats.commits.load(Relaxed));
    assert_eq!(stats.batch_events.sum(), 1600);
    assert_eq!(seqs(&all(&fixture.journal, &everything()).await), (1..=1600).collect::<Vec<_>>());
}
