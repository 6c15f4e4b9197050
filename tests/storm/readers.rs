//! Readers of event streams: one that keeps everything for the checker, others that stay, come and go, read slowly, or
//! read through a network that breaks. Each remembers what it saw; a reader that reconnects does so from its cursor.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use qd_testkit::home::start_ticks;
use qd_testkit::{SeededRandom, TestEvent, TestEventStream, processes};

use super::deck::StormDeck;
use super::prompts::sleeper_argument;
use super::record::{EventTrace, StormAgent, StormSession, trace};

/// How long a stream may take to open.
const OPEN_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StormReaderKind {
    /// Reads everything from the beginning over the socket.
    Steady,
    /// The same, through the proxy.
    Remote,
    /// The same, and slowly.
    Slow,
    /// Attaches without a cursor, reads a while and leaves, again and again.
    Visitor,
    /// Reads one workspace, and leaves and comes back all the time.
    Restless,
    /// Reads only the ends of runs.
    Filtered,
}

impl StormReaderKind {
    pub(crate) const ALL: [Self; 6] =
        [Self::Steady, Self::Remote, Self::Slow, Self::Visitor, Self::Restless, Self::Filtered];

    fn path(self, deck: &StormDeck) -> String {
        match self {
            Self::Steady | Self::Remote | Self::Slow | Self::Visitor => "/v1/events".to_owned(),
            Self::Restless => format!("/v1/workspaces/{}/events", deck.plain_workspace),
            Self::Filtered => "/v1/events?kinds=run.finished,run.accepted".to_owned(),
        }
    }

    /// Whether this reader's stream has an event.
    pub(crate) fn reads(self, deck: &StormDeck, event: &TestEvent) -> bool {
        match self {
            Self::Steady | Self::Remote | Self::Slow | Self::Visitor => true,
            Self::Restless => event.workspace_id.as_deref() == Some(&deck.plain_workspace),
            Self::Filtered => ["run.finished", "run.accepted"].contains(&event.kind.as_str()),
        }
    }
}

/// What a reader saw: for each time that it began anew, the events in order.
#[derive(Debug)]
pub(crate) struct StormReading {
    pub(crate) kind: Option<StormReaderKind>,
    pub(crate) visits: Vec<Vec<EventTrace>>,
}

/// Reads everything and keeps it, and looks at the processes of each run that was cancelled.
pub(crate) async fn watch(deck: Arc<StormDeck>) -> StormReading {
    let mut cursor = 0;
    while !is_complete(&deck, None, cursor) {
        let client = deck.unix.with_header("last-event-id", &cursor.to_string());
        let Some(mut stream) = open(&client, "/v1/events").await else {
            if is_over(&deck) {
                break;
            }
            continue;
        };
        while let Some(event) = next(&deck, &mut stream, None, cursor).await {
            cursor = event.seq;
            notice(&deck, &event).await;
            deck.last_seq.fetch_max(event.seq, Ordering::Relaxed);
            deck.record(|record| {
                record.note_parent(&event);
                record.watched.push(event);
            });
        }
    }
    StormReading { kind: None, visits: Vec::new() }
}

/// What must hold at the moment of an event, and what clients can use.
async fn notice(deck: &StormDeck, event: &TestEvent) {
    if let Some(session) = &event.session_id {
        deck.record(|record| match event.kind.as_str() {
            "run.started" => _ = record.running.insert(session.clone()),
            "run.finished" => _ = record.running.remove(session),
            "session.created"
                if event.data["agent"].as_str().is_some_and(|agent| agent.starts_with("worker:")) =>
            {
                _ = record.foreign.insert(session.clone());
            }
            _ => {}
        });
    }
    match event.kind.as_str() {
        "run.finished"
            if event.data["finish_reason"] == "cancelled" && event.data["processes"]["survivors"] == 0 =>
        {
            let Some(number) = event.run_id.as_deref().and_then(|run| run.strip_prefix('r')?.parse().ok())
            else {
                return;
            };
            // A worker that somebody else runs ends its processes in its own time, after we have closed the connection.
            if event.session_id.as_ref().is_some_and(|id| deck.record(|record| record.foreign.contains(id))) {
                return;
            }
            let argument = sleeper_argument(number);
            let all = tokio::task::spawn_blocking(processes::all_processes).await.unwrap_or_default();
            for process in all.iter().filter(|process| process.args.get(1) == Some(&argument)) {
                if process.is_alive() && start_ticks(process.pid) == Some(process.start_ticks) {
                    let what = format!(
                        "{} ended as cancelled with no survivors, but its process {} lives",
                        event.run_id.as_deref().unwrap_or_default(),
                        process.pid
                    );
                    deck.violation(event.session_id.as_deref(), what);
                }
            }
        }
        // Clients also use the sessions that agents started.
        "session.created" if event.data["parent"].is_string() && event.data["fleet"].is_null() => {
            let (Some(id), Some(workspace)) = (&event.session_id, &event.workspace_id) else { return };
            if deck.open_sessions().len() < deck.options.sessions {
                deck.add_session(StormSession {
                    id: id.clone(),
                    workspace: workspace.clone(),
                    agent: StormAgent::from_name(event.data["agent"].as_str().unwrap_or_default()),
                    has_worktree: false,
                });
            }
        }
        _ => {}
    }
}

/// Reads in its own way until the end of the journal.
pub(crate) async fn read(
    deck: Arc<StormDeck>,
    kind: StormReaderKind,
    mut random: SeededRandom,
) -> StormReading {
    let mut visits: Vec<Vec<EventTrace>> = vec![Vec::new()];
    let path = kind.path(&deck);
    loop {
        let cursor = visits.last().and_then(|visit| visit.last()).map_or(0, |event| event.seq);
        if is_complete(&deck, Some(kind), cursor) || (kind == StormReaderKind::Visitor && deck.is_ending()) {
            break;
        }
        let client = if matches!(kind, StormReaderKind::Remote | StormReaderKind::Slow) {
            &deck.tcp
        } else {
            &deck.unix
        };
        let client = if kind == StormReaderKind::Visitor {
            visits.push(Vec::new());
            client.clone()
        } else {
            client.with_header("last-event-id", &cursor.to_string())
        };
        let Some(mut stream) = open(&client, &path).await else {
            if is_over(&deck) {
                break;
            }
            continue;
        };
        let visit = visits.last_mut().expect("there is always one");
        // Restless readers and visitors leave after a while, in the middle of whatever comes.
        let leaves = matches!(kind, StormReaderKind::Restless | StormReaderKind::Visitor);
        let mut left = if leaves { 1 + random.below(120) } else { u64::MAX };
        let mut cursor = cursor;
        while left > 0
            && let Some(event) = next(&deck, &mut stream, Some(kind), cursor).await
        {
            cursor = event.seq;
            visit.push(trace(&event));
            deck.record(|record| record.note_parent(&event));
            left -= 1;
            if kind == StormReaderKind::Slow && !deck.is_ending() {
                tokio::time::sleep(Duration::from_millis(random.below(25))).await;
            }
        }
    }
    StormReading { kind: Some(kind), visits }
}

async fn open(client: &qd_testkit::TestClient, path: &str) -> Option<TestEventStream> {
    let opened = tokio::time::timeout(OPEN_LIMIT, client.try_stream(path)).await;
    if let Ok(Ok(stream)) = opened {
        return Some(stream);
    }
    // No daemon answers.
    tokio::time::sleep(Duration::from_millis(30)).await;
    None
}

/// The next event. `None` if the stream ended or broke, or if there is nothing more to read.
async fn next(
    deck: &StormDeck,
    stream: &mut TestEventStream,
    kind: Option<StormReaderKind>,
    cursor: u64,
) -> Option<TestEvent> {
    tokio::select! {
        next = stream.try_next() => next.ok().flatten(),
        () = wait_until_complete(deck, kind, cursor) => None,
    }
}

/// Whether the checker has said where the journal ends for this reader, and the reader is there.
fn is_complete(deck: &StormDeck, kind: Option<StormReaderKind>, cursor: u64) -> bool {
    let ends = deck.end_seqs.get().into_iter().flatten();
    ends.into_iter().any(|(reader, end)| *reader == kind && cursor >= *end)
}

/// Whether the checker no longer waits for readers.
fn is_over(deck: &StormDeck) -> bool {
    deck.is_over.load(Ordering::Relaxed)
}

async fn wait_until_complete(deck: &StormDeck, kind: Option<StormReaderKind>, cursor: u64) {
    while !is_complete(deck, kind, cursor) && !is_over(deck) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
