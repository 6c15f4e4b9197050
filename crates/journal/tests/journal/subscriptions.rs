//! What a subscription guarantees: no gaps and no repeats, however slow a reader is, and the same bytes live and later.

use std::sync::Arc;

use qd_journal::{
    AppendRequest, EventFilter, EventTopic, JournalActivity, JournalReadError, RowChange, SessionKey,
    WorkspaceKey,
};
use qd_protocol::Seq;

use crate::fixture::*;

/// Appends `each` events for each of `writers` sessions, spread over two workspaces.
async fn fill(journal: &qd_journal::Journal, writers: i64, each: u64) {
    let mut tasks = tokio::task::JoinSet::new();
    for session in 1..=writers {
        let journal = journal.clone();
        tasks.spawn(async move {
            let scope = scope_in(session % 2, session);
            for number in 1..=each {
                append(&journal, &scope, number).await.unwrap();
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn fast_and_slow_readers_under_load_miss_nothing_and_see_nothing_twice() {
    const WRITERS: i64 = 40;
    const EACH: u64 = 250;
    let fixture = JournalFixture::new();
    let mut readers = tokio::task::JoinSet::new();
    let topics = [
        (EventTopic::All, WRITERS as u64 * EACH),
        (EventTopic::Workspace(WorkspaceKey(1)), WRITERS as u64 / 2 * EACH),
        (EventTopic::Session(SessionKey(3)), EACH),
    ];
    for (topic, expected) in topics {
        for slowness in [0, 1, 20] {
            let mut reader = fixture.journal.subscribe(EventFilter::of(topic), None);
            readers.spawn(async move {
                let (mut seen, mut last) = (0, Seq(0));
                let mut rounds = 0;
                while seen < expected {
                    for event in reader.next().await.unwrap() {
                        assert!(event.seq > last, "{} after {last}", event.seq);
                        last = event.seq;
                        seen += 1;
                    }
                    // The cursor is further on if the events came from the journal and nothing after them matched.
                    assert!(reader.cursor() >= last);
                    // A slow reader lets the others run ahead until it has fallen out of every ring.
                    rounds += 1;
                    for _ in 0..slowness * 200 * (rounds % 3) {
                        tokio::task::yield_now().await;
                    }
                }
                assert_eq!(seen, expected);
            });
        }
    }
    fill(&fixture.journal, WRITERS, EACH).await;
    while let Some(done) = readers.join_next().await {
        done.unwrap();
    }
    let table = all(&fixture.journal, &everything()).await;
    assert_eq!(seqs(&table), (1..=WRITERS as u64 * EACH).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn readers_that_come_in_the_middle_replay_and_go_live_without_a_gap() {
    const WRITERS: i64 = 40;
    const EACH: u64 = 200;
    let fixture = JournalFixture::new();
    let mut readers = tokio::task::JoinSet::new();
    let filling = tokio::spawn({
        let journal = fixture.journal.clone();
        async move { fill(&journal, WRITERS, EACH).await }
    });
    let all = WRITERS as u64 * EACH;
    let mut watcher = fixture.journal.subscribe(everything(), None);
    let mut started = 0;
    while started < 20 {
        watcher.next().await.unwrap();
        let head = fixture.journal.head();
        if head.0 >= all {
            break;
        }
        started += 1;
        let after = Seq(head.0 * (started % 4) / 4);
        let mut reader = fixture.journal.subscribe(everything(), Some(after));
        readers.spawn(async move {
            let mut next = after.0 + 1;
            while next <= all {
                for event in reader.next().await.unwrap() {
                    assert_eq!(event.seq.0, next);
                    next += 1;
                }
            }
        });
    }
    filling.await.unwrap();
    while let Some(done) = readers.join_next().await {
        done.unwrap();
    }
}

#[tokio::test]
async fn an_event_reads_back_byte_for_byte_as_it_was_published() {
    let fixture = JournalFixture::new();
    let mut live = fixture.journal.subscribe(everything(), None);
    let halt = qd_journal::NewEvent {
        scope: Arc::default(),
        number: None,
        run: None,
        kind: "halt.set",
        data: r#"{"reason":"ä\n€😀","cancel":true}"#.into(),
        ..event(&scope(1), 1)
    };
    let known_kind = qd_journal::NewEvent { run: Some(run_id("x")), ..event(&scope(1), 1) };
    let newer_kind = qd_journal::NewEvent { kind: "some.newer_kind", ..event(&scope(1), 2) };
    let created = qd_journal::NewEvent {
        scope: Arc::new(qd_journal::EventScope { session: None, ..(*scope(5)).clone() }),
        number: None,
        kind: "workspace.created",
        ..event(&scope(1), 3)
    };
    let events = vec![halt, known_kind, newer_kind, created];
    fixture.journal.append(AppendRequest { events, ..AppendRequest::default() }).await.unwrap();
    let live = live.next().await.unwrap();
    let fixture = fixture.reopen().await;
    let stored = all(&fixture.journal, &everything()).await;
    assert_eq!(live.len(), 4);
    for (live, stored) in live.iter().zip(&stored) {
        assert_eq!(live.frame, stored.frame);
        assert_eq!(live.json(), stored.json());
        let parts = |event: &qd_journal::PublishedEvent| {
            (event.seq, event.ts, event.workspace, event.session, event.kind.clone())
        };
        assert_eq!(parts(live), parts(stored));
    }
    let mut again = fixture.journal.subscribe(everything(), Some(Seq(0)));
    let again: Vec<_> = again.next().await.unwrap().iter().map(|event| event.frame.clone()).collect();
    assert_eq!(again, live.iter().map(|event| event.frame.clone()).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_filter_by_kind_passes_only_those_and_moves_on_past_the_others() {
    let fixture = JournalFixture::new();
    let filter = EventFilter { topic: EventTopic::All, kinds: Some(Arc::new(["run.finished".to_owned()])) };
    let mut live = fixture.journal.subscribe(filter.clone(), None);
    for number in 1..=10 {
        append(&fixture.journal, &scope(1), number).await.unwrap();
    }
    let end = qd_journal::NewEvent { kind: "run.finished", ..event(&scope(1), 11) };
    fixture.journal.append(AppendRequest { events: vec![end], ..AppendRequest::default() }).await.unwrap();
    assert_eq!(seqs(&live.next().await.unwrap()), [11]);
    assert_eq!(seqs(&all(&fixture.journal, &filter).await), [11]);
    let mut replay = fixture.journal.subscribe(filter, Some(Seq(0)));
    assert_eq!(seqs(&replay.next().await.unwrap()), [11]);
}

#[tokio::test]
async fn a_batch_is_bounded() {
    let fixture = JournalFixture::new();
    let mut reader = fixture.journal.subscribe(everything(), None);
    let large = |number| qd_journal::NewEvent {
        data: format!(r#"{{"text":"{}"}}"#, "x".repeat(100_000)).into_bytes(),
        ..event(&scope(1), number)
    };
    let events = (1..=9).map(large).collect();
    fixture.journal.append(AppendRequest { events, ..AppendRequest::default() }).await.unwrap();
    let events = (10..=1009).map(|number| event(&scope(1), number)).collect();
    fixture.journal.append(AppendRequest { events, ..AppendRequest::default() }).await.unwrap();
    let mut seen = 0;
    while seen < 1009 {
        let batch = reader.next().await.unwrap();
        assert!(batch.len() <= qd_journal::subscription::BATCH_EVENTS);
        assert!(
            batch.iter().map(|event| event.frame.len()).sum::<usize>()
                <= qd_journal::subscription::BATCH_BYTES
        );
        seen += batch.len();
    }
}

#[tokio::test]
async fn a_purged_event_is_not_replayed_to_those_who_come_later_but_is_shown_to_those_who_were_there() {
    let fixture = JournalFixture::new();
    let mut earlier = fixture.journal.subscribe(everything(), None);
    append(&fixture.journal, &scope(1), 1).await.unwrap();
    append(&fixture.journal, &scope(2), 1).await.unwrap();
    let purge = AppendRequest {
        events: vec![event(&scope(1), 2)],
        rows: vec![RowChange::Purge { session: SessionKey(1) }],
        ..AppendRequest::default()
    };
    fixture.journal.append(purge).await.unwrap();
    assert_eq!(seqs(&earlier.next().await.unwrap()), [1, 2, 3]);
    let mut later = fixture.journal.subscribe(everything(), Some(Seq(0)));
    assert_eq!(seqs(&later.next().await.unwrap()), [2]);
    append(&fixture.journal, &scope(2), 2).await.unwrap();
    assert_eq!(seqs(&later.next().await.unwrap()), [4]);
}

#[tokio::test]
async fn a_subscription_ends_when_the_journal_closes_and_not_before_it_gave_all() {
    let fixture = JournalFixture::new();
    let mut reader = fixture.journal.subscribe(everything(), None);
    let mut idle = fixture.journal.subscribe(EventFilter::of(EventTopic::Session(SessionKey(4))), None);
    assert_eq!(fixture.journal.stats().subscriptions.load(std::sync::atomic::Ordering::Relaxed), 2);
    let waiting = tokio::spawn(async move { idle.next().await.map(|events| events.len()) });
    append(&fixture.journal, &scope(1), 1).await.unwrap();
    fixture.journal.close().await;
    assert_eq!(seqs(&reader.next().await.unwrap()), [1]);
    assert_eq!(reader.next().await.unwrap_err(), JournalReadError::Stopped);
    assert_eq!(waiting.await.unwrap(), Err(JournalReadError::Stopped));
    drop(reader);
    assert_eq!(fixture.journal.stats().subscriptions.load(std::sync::atomic::Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_dropped_wait_loses_nothing() {
    let fixture = JournalFixture::new();
    let mut reader = fixture.journal.subscribe(everything(), None);
    // Start waiting before there is an event, and give up again.
    for _ in 0..3 {
        tokio::select! {
            biased;
            seen = reader.next() => panic!("{seen:?}"),
            () = std::future::ready(()) => {}
        }
    }
    for number in 1..=20 {
        append(&fixture.journal, &scope(1), number).await.unwrap();
    }
    assert_eq!(reader.cursor(), Seq(0));
    assert_eq!(seqs(&reader.next().await.unwrap()), (1..=20).collect::<Vec<_>>());
}

#[tokio::test]
async fn every_batch_and_every_purge_is_reported_to_those_who_follow_the_journal() {
    let JournalFixture { journal, .. } = &JournalFixture::new();
    let mut activity = journal.activity();
    assert_eq!(*activity.borrow_and_update(), JournalActivity::default());
    let rows = vec![RowChange::Session(session_row(1)), RowChange::Session(session_row(2))];
    change(journal, rows).await.unwrap();
    append(journal, &scope(1), 1).await.unwrap();
    append(journal, &scope(2), 1).await.unwrap();
    assert!(activity.has_changed().unwrap());
    assert_eq!(*activity.borrow_and_update(), JournalActivity { head: Seq(2), purges: 0 });
    let mut keys = journal.session_keys().await.unwrap();
    keys.sort_unstable();
    assert_eq!(keys, [SessionKey(1), SessionKey(2)]);
    change(journal, vec![RowChange::Purge { session: SessionKey(2) }]).await.unwrap();
    assert!(activity.has_changed().unwrap(), "a purge without an event is reported too");
    assert_eq!(*activity.borrow_and_update(), JournalActivity { head: Seq(2), purges: 1 });
    assert_eq!(journal.session_keys().await.unwrap(), [SessionKey(1)]);
    let page = journal.stored_events(&["text.delta"], Seq(0), 1000).await.unwrap();
    assert_eq!((page.events.len(), page.scanned_through), (1, Seq(2)));
}
