//! Merging of streamed text: no reader can tell a merged journal from one that was never merged, whatever its cursor,
//! filter or page size, while the merging goes on and after a kill in the middle of it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use qd_journal::{
    AppendRequest, EventFilter, EventTopic, Journal, MergePosition, MergeSavings, NewEvent, PublishedEvent,
    RowChange, RunRow, SessionKey, StoredEvent, WorkspaceKey,
};
use qd_protocol::link::UpdateNumber;
use qd_protocol::{EventNumber, Millis, Seq};

use crate::fixture::*;

const SESSIONS: i64 = 4;
/// Everything in the tests is older than this.
const NOW: Millis = Millis(u64::MAX / 4);

/// Random numbers from a seed, by SplitMix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    #[expect(clippy::print_stdout, reason = "the seed of a failing test is needed to repeat it")]
    fn chosen_seed() -> u64 {
        let given = std::env::var("QD_SEED").ok().map(|text| text.parse().expect("QD_SEED is a number"));
        let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
        let seed = given.unwrap_or_else(|| now() as u64);
        println!("QD_SEED={seed}");
        seed
    }
}

/// One session of a random workload.
#[derive(Default)]
struct SessionWriter {
    number: u64,
    runs: u64,
    in_run: bool,
    update: u64,
}

/// Appends random events of several sessions in two workspaces: runs with streamed text and thoughts, other events
/// between them, late text without a run, and events of no session. The last run of a session may be unfinished.
async fn append_workload(journal: &Journal, dice: &mut Dice, appends: u64) {
    let mut writers: BTreeMap<i64, SessionWriter> = BTreeMap::new();
    for time in 0..appends {
        let key = 1 + dice.below(SESSIONS as u64) as i64;
        let scope = scope_in(1 + key % 2, key);
        let writer = writers.entry(key).or_default();
        let (mut events, mut rows) = (Vec::new(), Vec::new());
        for _ in 0..1 + dice.below(6) {
            writer.number += 1;
            let name = format!("{key}_{}", writer.runs);
            let mut event = NewEvent {
                number: Some(EventNumber(writer.number)),
                ts: Millis(1_000_000 + time * 7 + dice.below(5)).into(),
                kind: "notice.shown",
                data: br#"{"text":"x"}"#.to_vec(),
                ..event(&scope, 1)
            };
            let finished = |finished: bool| RunRow {
                accepted_event: (!finished).then_some(events.len()),
                finished,
                ..run_row(&name, key)
            };
            match dice.below(40) {
                0 | 1 if writer.in_run => {
                    (event.kind, event.run, event.data) =
                        ("run.finished", Some(run_id(&name)), b"{}".to_vec());
                    rows.push(RowChange::Run(finished(true)));
                    let (number, state) = (EventNumber(writer.number), b"{}".to_vec());
                    rows.push(RowChange::Snapshot { session: SessionKey(key), number, state });
                    writer.in_run = false;
                    writer.runs += 1;
                }
                _ if !writer.in_run && dice.below(3) > 0 => {
                    (event.kind, event.run) = ("run.accepted", Some(run_id(&name)));
                    rows.push(RowChange::Run(finished(false)));
                    writer.in_run = true;
                }
                2 => (event.scope, event.number) = (Arc::default(), None),
                3 => event.run = writer.in_run.then(|| run_id(&name)),
                4 => {
                    event.kind = "text.delta";
                    event.data = br#"{"text":"late","after_run":"run_old"}"#.to_vec();
                }
                _ if writer.in_run => {
                    let texts =
                        ["word ", "", "\"quote\"\n", "ünï", "\\", "\u{1}", "a longer piece of text, "];
                    let text =
                        texts[dice.below(texts.len() as u64) as usize].repeat(1 + dice.below(3) as usize);
                    let message = if dice.below(50) == 0 { "msg_b" } else { "msg_a" };
                    event.kind = if dice.below(8) == 0 { "thought.delta" } else { "text.delta" };
                    event.run = Some(run_id(&name));
                    event.data =
                        serde_json::json!({ "message_id": message, "text": text }).to_string().into_bytes();
                    writer.update += dice.below(3);
                    event.update_number = (dice.below(9) > 0).then_some(UpdateNumber(writer.update));
                }
                _ => {}
            }
            if event.number.is_none() {
                writer.number -= 1;
            }
            events.push(event);
        }
        // A run that is accepted and finished in one append needs the row of its acceptance first.
        journal.append(AppendRequest { events, rows, ..AppendRequest::default() }).await.unwrap();
    }
}

fn filters() -> Vec<EventFilter> {
    let mut filters = Vec::new();
    let topics =
        [EventTopic::All, EventTopic::Workspace(WorkspaceKey(1)), EventTopic::Workspace(WorkspaceKey(2))];
    let sessions = (1..=SESSIONS).map(|key| EventTopic::Session(SessionKey(key)));
    for topic in topics.into_iter().chain(sessions) {
        for kinds in [None, Some(vec!["text.delta"]), Some(vec!["thought.delta", "run.finished"])] {
            let kinds = kinds.map(|kinds| kinds.into_iter().map(str::to_owned).collect());
            filters.push(EventFilter { topic, kinds });
        }
    }
    filters
}

fn frames(events: &[Arc<PublishedEvent>]) -> Vec<(u64, Millis, String)> {
    events
        .iter()
        .map(|event| (event.seq.0, event.ts, String::from_utf8(event.frame.to_vec()).unwrap()))
        .collect()
}

/// Everything that a reader with this filter and cursor gets, in pages of this length.
async fn read_all(
    journal: &Journal,
    filter: &EventFilter,
    after: u64,
    limit: usize,
) -> Vec<Arc<PublishedEvent>> {
    let (mut events, mut cursor) = (Vec::new(), Seq(after));
    loop {
        let page = journal.page(filter, cursor, limit).await.unwrap();
        assert!(page.events.len() <= limit);
        events.extend(page.events);
        cursor = page.scanned_through;
        if page.end {
            return events;
        }
    }
}

/// All events of a session after a number, in pages of this length.
async fn session_events(journal: &Journal, session: i64, after: u64, limit: usize) -> Vec<StoredEvent> {
    let (mut events, mut cursor) = (Vec::new(), EventNumber(after));
    loop {
        let page = journal.session_events(SessionKey(session), None, &[], cursor, limit).await.unwrap();
        events.extend(page.events);
        cursor = page.scanned_through;
        if page.end {
            return events;
        }
    }
}

/// What every reader sees.
#[derive(PartialEq)]
struct JournalView {
    streams: Vec<Vec<(u64, Millis, String)>>,
    sessions: Vec<Vec<StoredEvent>>,
    loaded: Vec<Vec<StoredEvent>>,
    followed: Vec<StoredEvent>,
}

/// All events of some kinds, in pages of about this many bytes.
async fn follow_all(journal: &Journal, bytes: usize) -> Vec<StoredEvent> {
    let (mut events, mut cursor) = (Vec::new(), Seq(0));
    while cursor < journal.head() {
        let page = journal.stored_events(&["text.delta", "run.accepted"], cursor, bytes).await.unwrap();
        assert!(page.scanned_through > cursor, "every page gets further");
        assert!(page.events.iter().all(|event| event.seq > cursor && event.seq <= page.scanned_through));
        events.extend(page.events);
        cursor = page.scanned_through;
    }
    events
}

async fn view(journal: &Journal) -> JournalView {
    let followed = follow_all(journal, 4096).await;
    let mut view = JournalView { streams: Vec::new(), sessions: Vec::new(), loaded: Vec::new(), followed };
    for filter in filters() {
        view.streams.push(frames(&read_all(journal, &filter, 0, 1000).await));
    }
    for session in 1..=SESSIONS {
        view.sessions.push(session_events(journal, session, 0, 1000).await);
        view.loaded.push(journal.load(SessionKey(session)).await.unwrap().events);
    }
    view
}

/// Merges everything, and calls `between` after each transaction.
async fn merge_all(journal: &Journal, mut between: impl AsyncFnMut(&Journal)) -> MergeSavings {
    let mut total = MergeSavings::default();
    let mut next = Some(MergePosition::default());
    while let Some(position) = next {
        let (savings, rest) = journal.merge_some(position, NOW).await.unwrap();
        total.events += savings.events;
        total.bytes += savings.bytes;
        next = rest;
        between(journal).await;
    }
    total
}

fn rows_of(home: &Path) -> i64 {
    let db = rusqlite::Connection::open(home.join("journal.db")).unwrap();
    db.query_row("SELECT count(*) FROM events", [], |row| row.get(0)).unwrap()
}

/// A journal with a random workload, all of it in the index.
async fn workload(seed: u64, appends: u64) -> JournalFixture {
    let fixture = JournalFixture::new();
    append_workload(&fixture.journal, &mut Dice(seed), appends).await;
    fixture.reopen().await
}

#[tokio::test]
async fn merging_is_invisible_to_every_cursor_filter_and_page_size() {
    let seed = Dice::chosen_seed();
    let mut dice = Dice(seed);
    let fixture = workload(seed, 900).await;
    let (journal, head) = (&fixture.journal, fixture.journal.head().0);
    let before = view(journal).await;
    let rows_before = rows_of(fixture.home.path());
    let mergeable = journal.mergeable(NOW).await.unwrap();
    let savings = merge_all(journal, async |_| {}).await;
    assert_eq!(savings, mergeable, "the preview is what happens");
    assert_eq!(rows_before - rows_of(fixture.home.path()), savings.events as i64);
    assert!(savings.events > head / 4 && savings.bytes > 0, "{savings:?} of {head}");
    assert!(view(journal).await == before, "QD_SEED={seed}");
    assert_eq!(follow_all(journal, 50).await, before.followed, "QD_SEED={seed}");
    // Every cursor, with every filter, leads to exactly what comes after it.
    for after in 0..=head {
        let (at, filter) = {
            let filters = filters();
            let at = dice.below(filters.len() as u64) as usize;
            (at, filters[at].clone())
        };
        let limit = 1 + dice.below(40) as usize;
        let page = journal.page(&filter, Seq(after), limit).await.unwrap();
        let expected: Vec<_> = before.streams[at]
            .iter()
            .filter(|(seq, ..)| *seq > after)
            .take(page.events.len())
            .cloned()
            .collect();
        assert_eq!(frames(&page.events), expected, "QD_SEED={seed} after {after} {filter:?}");
        let rest = before.streams[at].iter().filter(|(seq, ..)| *seq > after).count();
        assert!(page.events.len() == limit || page.end && page.events.len() == rest, "QD_SEED={seed}");
        assert!(page.end || page.events.last().is_none_or(|last| last.seq <= page.scanned_through));
    }
    for (session, all) in (1..).zip(&before.sessions) {
        for after in (0..=all.len() as u64).step_by(3) {
            let limit = 1 + dice.below(30) as usize;
            let read = session_events(journal, session, after, limit).await;
            let expected: Vec<_> =
                all.iter().filter(|event| event.number.unwrap().0 > after).cloned().collect();
            assert_eq!(read, expected, "QD_SEED={seed} session {session} after {after}");
        }
        let runs: std::collections::BTreeSet<_> = all.iter().filter_map(|event| event.run.clone()).collect();
        for run in runs {
            let page = journal.session_events(
                SessionKey(session),
                Some(&run),
                &["text.delta"],
                EventNumber(0),
                10_000,
            );
            let expected: Vec<_> = all
                .iter()
                .filter(|event| event.run.as_ref() == Some(&run) && event.kind == "text.delta")
                .cloned()
                .collect();
            assert_eq!(page.await.unwrap().events, expected);
        }
    }
    // A second pass finds nothing, and new events are numbered as before.
    assert_eq!(merge_all(journal, async |_| {}).await, MergeSavings::default());
    let fixture = fixture.reopen().await;
    assert_eq!(fixture.journal.head(), Seq(head));
    for (session, all) in (1..).zip(&before.sessions) {
        let last = all.last().unwrap().number.unwrap().0;
        let scope = scope_in(1 + session % 2, session);
        append(&fixture.journal, &scope, last).await.unwrap_err();
        append(&fixture.journal, &scope, last + 1).await.unwrap();
    }
    assert_eq!(fixture.journal.quick_check().await.unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn readers_see_the_same_after_every_transaction_and_after_a_rebuild() {
    let seed = Dice::chosen_seed();
    let fixture = workload(seed, 500).await;
    let before = view(&fixture.journal).await;
    merge_all(&fixture.journal, async |journal| assert!(view(journal).await == before, "QD_SEED={seed}"))
        .await;
    let JournalFixture { home, journal, .. } = fixture;
    journal.close().await;
    let mut rebuilt = Vec::new();
    qd_journal::rebuild(home.path(), |event| {
        rebuilt.push(event.clone());
        Vec::new()
    })
    .unwrap();
    assert!(rebuilt.is_sorted_by_key(|event| event.seq), "events are folded in their order");
    let journal = open(home.path());
    let after = view(&journal).await;
    assert!(after.streams == before.streams && after.sessions == before.sessions, "QD_SEED={seed}");
    let folded = |session: i64| -> Vec<StoredEvent> {
        let of_session = |event: &&StoredEvent| {
            event.scope.session.as_ref().is_some_and(|(key, _)| *key == SessionKey(session))
        };
        rebuilt.iter().filter(of_session).cloned().collect()
    };
    for (session, all) in (1..).zip(&before.sessions) {
        assert!(folded(session) == *all, "QD_SEED={seed} session {session}");
    }
}

#[tokio::test]
async fn subscriptions_that_fall_behind_while_events_are_merged_get_every_event_once() {
    let seed = Dice::chosen_seed();
    let mut dice = Dice(seed);
    let fixture = workload(seed, 600).await;
    let journal = &fixture.journal;
    let expected = view(journal).await.streams;
    let head = journal.head().0;
    let mut readers: Vec<_> = filters()
        .into_iter()
        .zip(expected)
        .map(|(filter, expected)| {
            let after = dice.below(head / 2);
            let expected: Vec<_> = expected.into_iter().filter(|(seq, ..)| *seq > after).collect();
            (journal.subscribe(filter, Some(Seq(after))), expected, Vec::new())
        })
        .collect();
    // Each reader reads a little after some of the transactions, and the rest at the end.
    let mut next = Some(MergePosition::default());
    while let Some(position) = next {
        next = journal.merge_some(position, NOW).await.unwrap().1;
        for (subscription, expected, got) in &mut readers {
            if dice.below(3) == 0 && got.len() < expected.len() {
                got.extend(frames(&subscription.next().await.unwrap()));
            }
        }
    }
    for (subscription, expected, got) in &mut readers {
        while got.len() < expected.len() {
            got.extend(frames(&subscription.next().await.unwrap()));
        }
        assert!(got == expected, "QD_SEED={seed}");
    }
}

#[tokio::test]
async fn only_old_text_of_finished_runs_is_merged_and_a_purge_wins() {
    let fixture = JournalFixture::new();
    let journal = &fixture.journal;
    let delta = |number: u64, run: &str| NewEvent {
        ts: Millis(number).into(),
        run: Some(run_id(run)),
        data: br#"{"message_id":"msg_a","text":"t"}"#.to_vec(),
        ..event(&scope(1), number)
    };
    let events = (1..=20).map(|number| delta(number, if number <= 10 { "a" } else { "b" })).collect();
    let row = |name: &str, finished| RowChange::Run(RunRow { finished, ..run_row(name, 1) });
    let snapshot = |number| RowChange::Snapshot {
        session: SessionKey(1),
        number: EventNumber(number),
        state: b"{}".to_vec(),
    };
    let rows = vec![row("a", true), snapshot(10)];
    journal.append(AppendRequest { events, rows, ..AppendRequest::default() }).await.unwrap();
    // The second run's row refers to another event, so it comes with an append of its own.
    let events = vec![NewEvent { kind: "notice.shown", ..delta(21, "b") }];
    let append_b = AppendRequest { events, rows: vec![row("b", false)], ..AppendRequest::default() };
    journal.append(append_b).await.unwrap();
    let fixture = fixture.reopen().await;
    let journal = &fixture.journal;
    let merge = async |before: u64| {
        let (mut events, mut next) = (0, Some(MergePosition::default()));
        while let Some(position) = next {
            let (savings, rest) = journal.merge_some(position, Millis(before)).await.unwrap();
            events += savings.events;
            next = rest;
        }
        events
    };
    assert_eq!(merge(1).await, 0, "too young");
    assert_eq!(merge(6).await, 4, "events 1 to 5");
    assert_eq!(merge(100).await, 4, "events 6 to 10, up to the snapshot");
    change(journal, vec![snapshot(20)]).await.unwrap();
    assert_eq!(merge(100).await, 0, "run b is not finished");
    change(journal, vec![RowChange::Run(RunRow { accepted_event: None, finished: true, ..run_row("b", 1) })])
        .await
        .unwrap();
    assert_eq!(merge(100).await, 9);
    change(journal, vec![RowChange::Purge { session: SessionKey(1) }]).await.unwrap();
    assert_eq!(rows_of(fixture.home.path()), 0, "a purge deletes merged events too");
    assert_eq!(merge(100).await, 0);
}

#[tokio::test]
async fn a_kill_while_events_are_merged_changes_nothing() {
    if let Some(home) = std::env::var_os("CRASH_HOME") {
        let journal = open(Path::new(&home));
        println!("merging");
        merge_all(&journal, async |_| println!("merged")).await;
        println!("finished");
        return;
    }
    let seed = Dice::chosen_seed();
    let fixture = workload(seed, 1500).await;
    let before = view(&fixture.journal).await;
    let JournalFixture { home, journal, .. } = fixture;
    journal.close().await;
    let rows_before = rows_of(home.path());
    for kill in 0.. {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "merging::a_kill_while_events_are_merged_changes_nothing", "--nocapture"])
            .env("CRASH_HOME", home.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let is_end = |line: &String| line.ends_with("finished");
        let first =
            lines.map_while(Result::ok).find(|line| is_end(line) || line.ends_with("merged")).unwrap();
        // A different moment of the next transaction each time.
        std::thread::sleep(std::time::Duration::from_micros(150 * kill % 3000));
        child.kill().unwrap();
        let finished = is_end(&first);
        child.wait().unwrap();
        let journal = open(home.path());
        assert!(view(&journal).await == before, "QD_SEED={seed} after kill {kill}");
        assert_eq!(journal.quick_check().await.unwrap(), Vec::<String>::new());
        journal.close().await;
        if finished || kill > 60 {
            break;
        }
    }
    assert!(rows_of(home.path()) < rows_before);
}
