//! Promises of the link over a socket, seen from its two ends: a seat and a session with a pipe in memory between them,
//! which can be cut at any moment. Time stands still but for who waits.

mod pipe_worker;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use qd_link::{
    AgentEndpoint, AgentLink, LifecycleRequest, LinkEvent, LinkOptions, MemorySpool, NumberedUpdate, Spool,
    WorkerEndpoint, WorkerEndpointOptions, host_agent, local_link,
};
use qd_protocol::frame::v1::{self, DaemonLinkFrame, WorkerLinkFrame};
use qd_protocol::limits::{LINK_WINDOW, PING_S};
use qd_protocol::link::{
    AgentCommand, AgentExitReason, AgentUpdate, TurnOutcome, TurnStopReason, UpdateNumber,
};
use qd_protocol::worker::Secret;
use qd_protocol::{EventNumber, WorkerId};
use tokio::time::{Instant, timeout};

use crate::pipe_worker::{
    PipeWorker, WorkerReachability, attached, link_options, notice, notices, numbers, prompt, raw, run, said,
    seat_options, spec, steer, text_of,
};

const READY: AgentUpdate = AgentUpdate::Ready { agent_session_id: None, steers: true };

fn terminal() -> AgentUpdate {
    AgentUpdate::Terminal { run: run(), outcome: TurnOutcome::of(TurnStopReason::EndTurn) }
}

/// A seat with an agent whose mouth and ears the test holds.
fn seated() -> (WorkerEndpoint, AgentEndpoint) {
    let seat = WorkerEndpoint::new(seat_options(), Box::new(MemorySpool::default()));
    let (agent, end) = local_link(UpdateNumber(0));
    seat.set_agent(end);
    (seat, agent)
}

fn open(pier: &PipeWorker, taken: u64) -> AgentLink {
    AgentLink::open(LinkOptions { journalled: UpdateNumber(taken), ..link_options() }, pier.clone())
}

#[tokio::test(start_paused = true)]
async fn every_word_is_heard_once_and_in_order_however_often_the_connection_breaks() {
    const MANY: usize = 20_000;
    let seat = WorkerEndpoint::new(seat_options(), Box::new(MemorySpool::default()));
    seat.set_agent(host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        for number in 0..MANY {
            agent.send(notice(number)).await.expect("the seat hears");
        }
        AgentExitReason::Stopped
    }));
    let pier = PipeWorker::of(&seat);
    let mut link = open(&pier, 0);
    let (mut heard, mut breaks) = (Vec::new(), 0);
    loop {
        match link.next_event().await {
            LinkEvent::Updates(said) => {
                // Some of what is heard is journalled; then the connection breaks.
                link.ack(said[said.len() / 2].number);
                heard.extend(said);
                pier.cut();
            }
            LinkEvent::Disconnected => breaks += 1,
            LinkEvent::Attached { reattached, .. } => assert_eq!(reattached, breaks > 0),
            LinkEvent::Gone(gone) => panic!("the worker lives, but {gone:?}"),
        }
        if heard.last().is_some_and(|last| last.update == AgentUpdate::Gone(AgentExitReason::Stopped)) {
            break;
        }
    }
    assert!(breaks > 5, "{breaks} breaks");
    heard.pop();
    assert!(numbers(&heard).into_iter().eq(1..=MANY as u64));
    assert!(notices(&heard).eq(0..MANY));
}

#[tokio::test(start_paused = true)]
async fn another_daemon_goes_on_where_the_journal_of_the_last_one_ends() {
    let (seat, agent) = seated();
    let pier = PipeWorker::of(&seat);
    for number in 0..10 {
        agent.send(notice(number)).await.unwrap();
    }
    let mut first = open(&pier, 0);
    attached(&mut first).await;
    assert_eq!(said(&mut first).await.len(), 10);
    assert_eq!(first.unacked().count(), 10);
    first.ack(UpdateNumber(4));
    assert_eq!(numbers(first.unacked()), [5, 6, 7, 8, 9, 10]);
    // Killed before the acknowledgement is out.
    drop(first);
    let mut second = open(&pier, 4);
    attached(&mut second).await;
    assert_eq!(numbers(&said(&mut second).await), [5, 6, 7, 8, 9, 10]);
    second.ack(UpdateNumber(10));
    let mut state = seat.watch_status();
    state.wait_for(|state| !state.has_unacked).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn commands_are_applied_once_and_in_order_though_the_session_says_them_again() {
    let (seat, mut agent) = seated();
    let pier = PipeWorker::of(&seat);
    let mut link = open(&pier, 0);
    let applied = tokio::spawn(async move {
        let mut applied = Vec::new();
        while applied.len() < 30 {
            applied.push(agent.next_command().await.expect("the seat is there").number().0);
        }
        applied
    });
    let mut sent = 0;
    while !applied.is_finished() {
        match timeout(Duration::from_millis(5), link.next_event()).await {
            Ok(LinkEvent::Attached { applied, .. }) => {
                (applied.0 + 1..=sent).for_each(|owed| link.send(steer(owed)));
            }
            // Nothing more will happen: a few more commands, some of which are on their way when it breaks.
            Err(_) if sent < 30 => {
                (sent + 1..=sent + 3).for_each(|number| link.send(steer(number)));
                sent += 3;
                for _ in 0..sent {
                    tokio::task::yield_now().await;
                }
                pier.cut();
            }
            Ok(_) | Err(_) => {}
        }
    }
    assert_eq!(applied.await.unwrap(), (1..=30).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn a_cancel_arrives_while_the_session_hears_nothing_and_the_socket_is_full() {
    let seat = WorkerEndpoint::new(seat_options(), Box::new(MemorySpool::default()));
    let (cancelled, cancel) = tokio::sync::oneshot::channel();
    seat.set_agent(host_agent(UpdateNumber(0), |mut agent: AgentEndpoint| async move {
        let voice = agent.output();
        let talk = async {
            for number in 0.. {
                voice.send(notice(format!("{number} {}", "x".repeat(10_000)))).await.expect("the seat hears");
            }
        };
        tokio::select! {
            () = talk => {}
            command = agent.next_command() => cancelled.send(command).expect("the test waits"),
        }
        AgentExitReason::Stopped
    }));
    let mut link = open(&PipeWorker::of(&seat), 0);
    attached(&mut link).await;
    said(&mut link).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    link.send(AgentCommand::Cancel { number: EventNumber(1), run: run() });
    assert_eq!(cancel.await.unwrap(), Some(AgentCommand::Cancel { number: EventNumber(1), run: run() }));
}

#[tokio::test(start_paused = true)]
async fn a_session_that_does_not_hear_costs_bounded_memory_and_then_the_agent_waits() {
    const LARGE: usize = 10_000;
    const SPOOL: usize = 3 << 20;
    let spool = ObservedSpool::default();
    let options = WorkerEndpointOptions { spool_max: SPOOL as u64, ..seat_options() };
    let seat = WorkerEndpoint::new(options, Box::new(spool.clone()));
    let spoken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&spoken);
    seat.set_agent(host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        loop {
            agent.send(notice("x".repeat(LARGE))).await.expect("the seat hears");
            count.fetch_add(1, Ordering::Relaxed);
        }
    }));
    let mut link = open(&PipeWorker::of(&seat), 0);
    attached(&mut link).await;
    // As long as nobody acknowledges, the spool grows; then the window of the agent's own link fills.
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let most = SPOOL / LARGE + 2 * LINK_WINDOW + 2;
    assert!((SPOOL / LARGE..most).contains(&spoken.load(Ordering::Relaxed)), "{spoken:?}");
    let waiting = said(&mut link).await;
    let frame = 2 * (64 << 10) / LARGE;
    assert!(waiting.len() <= LINK_WINDOW + frame, "{} things wait for the session", waiting.len());

    // Room in the spool lets it go on.
    let before = spoken.load(Ordering::Relaxed);
    link.ack(waiting.last().unwrap().number);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(spoken.load(Ordering::Relaxed) > before);
    assert!(spool.look(|spool| spool.bytes()) as usize <= SPOOL + (LINK_WINDOW + 1) * (LARGE + 200));
}

#[tokio::test(start_paused = true)]
async fn a_full_spool_keeps_the_agent_from_talking_but_not_from_ending_its_turn() {
    let options = WorkerEndpointOptions { spool_max: 1, ..seat_options() };
    let seat = WorkerEndpoint::new(options, Box::new(MemorySpool::default()));
    let (agent, end) = local_link(UpdateNumber(0));
    seat.set_agent(end);
    agent.send(notice(0)).await.unwrap();
    seat.watch_status().wait_for(|state| state.has_unacked).await.unwrap();
    for number in 1..=LINK_WINDOW {
        agent.send(notice(number)).await.unwrap();
    }
    let voice = agent.output();
    assert!(timeout(Duration::from_secs(3600), voice.send(notice("more"))).await.is_err(), "it waits");
    agent.send(terminal()).await.unwrap();

    let mut link = open(&PipeWorker::of(&seat), 0);
    attached(&mut link).await;
    let mut heard = Vec::new();
    while heard.last().is_none_or(|last: &NumberedUpdate| last.update != terminal()) {
        heard.extend(said(&mut link).await);
        link.ack(heard.last().unwrap().number);
    }
    heard.pop();
    assert!(notices(&heard).eq(0..=LINK_WINDOW));
}

#[tokio::test(start_paused = true)]
async fn what_lies_in_the_spool_is_read_back_for_a_daemon_that_comes_late() {
    let (seat, agent) = seated();
    let long = "x".repeat(1000);
    for number in 0..2000 {
        agent.send(notice(format!("{number} {long}"))).await.unwrap();
    }
    let mut link = open(&PipeWorker::of(&seat), 0);
    attached(&mut link).await;
    let mut heard = Vec::new();
    while heard.len() < 2000 {
        heard.extend(said(&mut link).await);
    }
    assert!(heard.iter().zip(0..).all(|(thing, number)| text_of(thing) == format!("{number} {long}")));
}

#[tokio::test(start_paused = true)]
async fn a_seat_tells_its_worker_how_it_is() {
    let (seat, agent) = seated();
    let mut state = seat.watch_status();
    let now = state.borrow().clone();
    assert_eq!(
        (now.attached, now.presence, now.run, now.has_unacked),
        (false, v1::AgentPresence::Starting, None, false)
    );
    agent.send(READY).await.unwrap();
    state.wait_for(|state| state.has_unacked).await.unwrap();
    assert_eq!(state.borrow().presence, v1::AgentPresence::Ready { steers: true });

    let pier = PipeWorker::of(&seat);
    let mut link = open(&pier, 0);
    attached(&mut link).await;
    link.send(prompt(1));
    let heard = said(&mut link).await;
    link.ack(heard[0].number);
    state.wait_for(|state| state.attached && state.run == Some(run()) && !state.has_unacked).await.unwrap();
    agent.send(terminal()).await.unwrap();
    state.wait_for(|state| state.run.is_none()).await.unwrap();
    drop(link);
    let left = state.wait_for(|state| !state.attached).await.unwrap().clone();
    assert!(left.attachment_changed_at >= now.attachment_changed_at);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_ends_says_so_once_and_nothing_after_it() {
    let (seat, agent) = seated();
    let mut link = open(&PipeWorker::of(&seat), 0);
    attached(&mut link).await;
    agent.send(notice(1)).await.unwrap();
    drop(agent);
    let mut heard = said(&mut link).await;
    if heard.len() < 2 {
        heard.extend(said(&mut link).await);
    }
    assert!(
        matches!(&heard[1].update, AgentUpdate::Gone(AgentExitReason::Failed(error)) if error.code == "agent_ended")
    );
    seat.send(AgentUpdate::Gone(AgentExitReason::Stopped)).await;
    assert!(timeout(Duration::from_secs(60), link.next_event()).await.is_err());
    assert_eq!(seat.watch_status().borrow().presence, v1::AgentPresence::Gone);
}

#[tokio::test(start_paused = true)]
async fn an_agent_rests_and_is_started_again_once_though_both_are_said_again_after_breaks() {
    let (seat, agent) = seated();
    agent.send(READY).await.unwrap();
    let pier = PipeWorker::of(&seat);
    let mut link = open(&pier, 0);
    attached(&mut link).await;
    said(&mut link).await;

    link.rest_agent();
    assert_eq!(seat.next_request().await, LifecycleRequest::Rest);
    pier.cut();
    assert_eq!(link.next_event().await, LinkEvent::Disconnected);
    attached(&mut link).await;
    seat.remove_agent().await;
    assert!(agent.send(notice("too late")).await.is_err());
    seat.send(AgentUpdate::Rested).await;
    let heard = said(&mut link).await;
    assert_eq!(heard[0].update, AgentUpdate::Rested);

    link.start_agent(spec());
    assert_eq!(seat.next_request().await, LifecycleRequest::Start(spec()));
    pier.cut();
    assert_eq!(link.next_event().await, LinkEvent::Disconnected);
    assert_eq!(attached(&mut link).await, v1::AgentPresence::Starting, "so that nobody starts it twice");
    let (agent, end) = local_link(UpdateNumber(0));
    seat.set_agent(end);
    agent.send(READY).await.unwrap();
    assert_eq!(said(&mut link).await[0], NumberedUpdate { number: UpdateNumber(3), update: READY });

    link.close();
    assert_eq!(seat.next_request().await, LifecycleRequest::Close);
    assert!(timeout(Duration::from_secs(60), seat.next_request()).await.is_err(), "each was wanted once");
}

#[tokio::test(start_paused = true)]
async fn a_command_that_finds_no_agent_waits_for_the_next() {
    let seat = WorkerEndpoint::new(seat_options(), Box::new(MemorySpool::default()));
    let mut link = open(&PipeWorker::of(&seat), 0);
    attached(&mut link).await;
    link.send(prompt(1));
    assert!(timeout(Duration::from_secs(1), link.next_event()).await.is_err());
    let (mut agent, end) = local_link(UpdateNumber(0));
    seat.set_agent(end);
    assert_eq!(agent.next_command().await, Some(prompt(1)));
    assert_eq!(seat.watch_status().borrow().run, Some(run()));
}

#[tokio::test(start_paused = true)]
async fn a_newer_connection_ends_an_older_one() {
    let (seat, agent) = seated();
    let pier = PipeWorker::of(&seat);
    let mut older = open(&pier, 0);
    attached(&mut older).await;
    let mut newer = open(&pier, 0);
    attached(&mut newer).await;
    agent.send(notice(1)).await.unwrap();
    assert_eq!(notices(&said(&mut newer).await).collect::<Vec<_>>(), [1]);
    assert_eq!(older.next_event().await, LinkEvent::Disconnected);
}

#[tokio::test(start_paused = true)]
async fn a_session_that_is_new_to_a_worker_is_started_on_the_connection_that_brings_it() {
    let pier = PipeWorker::empty();
    let mut link = AgentLink::open(LinkOptions { start: Some(spec()), ..link_options() }, pier.clone());
    assert_eq!(attached(&mut link).await, v1::AgentPresence::Empty);
    let seat = pier.started().await;
    let (agent, end) = local_link(UpdateNumber(0));
    seat.set_agent(end);
    agent.send(READY).await.unwrap();
    let heard = said(&mut link).await;
    assert_eq!(heard[0].update, READY);
    link.ack(heard[0].number);
    pier.cut();
    assert_eq!(link.next_event().await, LinkEvent::Disconnected);
    assert_eq!(attached(&mut link).await, v1::AgentPresence::Ready { steers: true });
}

#[tokio::test(start_paused = true)]
async fn an_empty_seat_where_an_agent_was_means_that_it_is_lost() {
    let pier = PipeWorker::empty();
    pier.leave([notice(1)]);
    let mut link = open(&pier, 0);
    assert_eq!(notices(&said(&mut link).await).collect::<Vec<_>>(), [1]);
    assert_eq!(link.next_event().await, LinkEvent::Gone(AgentExitReason::Lost));
}

#[tokio::test(start_paused = true)]
async fn what_a_dead_worker_left_is_heard_before_its_end() {
    let (seat, agent) = seated();
    let pier = PipeWorker::of(&seat);
    let mut link = open(&pier, 0);
    attached(&mut link).await;
    for number in 0..3 {
        agent.send(notice(number)).await.unwrap();
    }
    let mut heard = said(&mut link).await;
    while heard.len() < 3 {
        heard.extend(said(&mut link).await);
    }
    pier.leave((0..10 * LINK_WINDOW).map(notice));
    pier.set(WorkerReachability::Dead);
    pier.cut();
    assert_eq!(link.next_event().await, LinkEvent::Disconnected);
    loop {
        match link.next_event().await {
            LinkEvent::Updates(said) => heard.extend(said),
            LinkEvent::Gone(gone) => break assert_eq!(gone, AgentExitReason::Lost),
            other => panic!("heard {other:?}"),
        }
    }
    assert!(notices(&heard).eq(0..10 * LINK_WINDOW));
    assert_eq!(link.next_event().await, LinkEvent::Gone(AgentExitReason::Lost));
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_cannot_be_reached_is_tried_again_soon_and_then_less_often() {
    let (seat, _agent) = seated();
    let pier = PipeWorker::of(&seat);
    pier.set(WorkerReachability::Later);
    let mut link = open(&pier, 0);
    assert!(timeout(Duration::from_secs(60), link.next_event()).await.is_err());
    let tries = pier.dials();
    assert!((60..80).contains(&tries), "{tries} tries in a minute");
    pier.set(WorkerReachability::Open);
    attached(&mut link).await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_does_not_know_the_secret_is_never_listened_to() {
    let options = WorkerEndpointOptions { secret: Secret("other".to_owned()), ..seat_options() };
    let seat = WorkerEndpoint::new(options, Box::new(MemorySpool::default()));
    seat.send(notice("trust me")).await;
    let mut link = open(&PipeWorker::of(&seat), 0);
    assert!(timeout(Duration::from_secs(60), link.next_event()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_daemon_that_does_not_know_the_secret_hears_nothing_of_the_session() {
    let (seat, agent) = seated();
    agent.send(notice("secret")).await.unwrap();
    let mut daemon = raw(&PipeWorker::of(&seat)).await;
    daemon.hello(|_| {}).await;
    assert!(matches!(daemon.next().await, Some(WorkerLinkFrame::Hello(_))));
    daemon.send(&DaemonLinkFrame::Proof("00".to_owned())).await;
    let Some(WorkerLinkFrame::Refused { code, .. }) = daemon.next().await else { panic!("not refused") };
    assert_eq!(code, "unauthorized");
    assert_eq!(daemon.next().await, None);
    assert!(!seat.watch_status().borrow().attached);
}

#[tokio::test(start_paused = true)]
async fn a_daemon_that_proves_nothing_does_not_take_the_place_of_another() {
    let (seat, agent) = seated();
    let pier = PipeWorker::of(&seat);
    let mut link = open(&pier, 0);
    attached(&mut link).await;
    let mut stranger = raw(&pier).await;
    stranger.hello(|_| {}).await;
    assert!(matches!(stranger.next().await, Some(WorkerLinkFrame::Hello(_))));
    agent.send(notice(1)).await.unwrap();
    assert_eq!(said(&mut link).await.len(), 1);
    assert_eq!(stranger.next().await, None, "it is given up after a while");
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_is_refused_with_a_reason() {
    let (seat, agent) = seated();
    for number in 0..3 {
        agent.send(notice(number)).await.unwrap();
    }
    let pier = PipeWorker::of(&seat);
    let mut link = open(&pier, 0);
    attached(&mut link).await;
    said(&mut link).await;
    link.ack(UpdateNumber(2));
    link.detach().await;

    type Change = fn(&mut v1::DaemonHello);
    let cases: [(&str, Change); 4] = [
        ("unsupported_version", |hello| hello.versions = v1::ProtocolVersions { min: 2, max: 7 }),
        ("wrong_worker", |hello| hello.worker = WorkerId::from_random(&[7])),
        ("bad_number", |hello| hello.journalled = UpdateNumber(1)),
        ("bad_number", |hello| hello.journalled = UpdateNumber(4)),
    ];
    for (expected, change) in cases {
        let mut daemon = raw(&pier).await;
        daemon.hello(change).await;
        let Some(WorkerLinkFrame::Refused { code, message }) = daemon.next().await else {
            panic!("not refused")
        };
        assert_eq!(code, expected, "{message}");
    }
}

#[tokio::test(start_paused = true)]
async fn frames_and_fields_that_nobody_knows_are_ignored() {
    let options = WorkerEndpointOptions { secret: Secret::default(), ..seat_options() };
    let seat = WorkerEndpoint::new(options, Box::new(MemorySpool::default()));
    let (mut agent, end) = local_link(UpdateNumber(0));
    seat.set_agent(end);
    let mut daemon = raw(&PipeWorker::of(&seat)).await;
    daemon.send_text(r#"{"weather":"fine"}"#).await;
    daemon.hello(|_| {}).await;
    assert!(matches!(daemon.next().await, Some(WorkerLinkFrame::Hello(_))));
    daemon.send(&DaemonLinkFrame::Proof(String::new())).await;
    daemon.send_text("not even JSON").await;
    daemon.send_text(r#"{"later":{"than":"us"}}"#).await;
    daemon.send_text(r#"{"do":{"cancel":{"number":5,"run":"run_1","colour":"red"}}}"#).await;
    assert_eq!(agent.next_command().await, Some(AgentCommand::Cancel { number: EventNumber(5), run: run() }));
}

#[tokio::test(start_paused = true)]
async fn a_quiet_connection_stays_and_a_silent_peer_is_given_up() {
    let (seat, _agent) = seated();
    let pier = PipeWorker::of(&seat);
    let mut link = open(&pier, 0);
    attached(&mut link).await;
    let hour = Duration::from_secs(3600);
    assert!(timeout(hour, link.next_event()).await.is_err(), "nobody says anything, and nobody leaves");

    pier.freeze();
    let before = Instant::now();
    assert_eq!(link.next_event().await, LinkEvent::Disconnected);
    let silence = before.elapsed().as_secs();
    assert!((2 * PING_S..=3 * PING_S).contains(&silence), "{silence} s");
    seat.watch_status().wait_for(|state| !state.attached).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_last_acknowledgement_goes_out_before_a_link_is_let_go() {
    let (seat, agent) = seated();
    let mut link = open(&PipeWorker::of(&seat), 0);
    attached(&mut link).await;
    agent.send(notice(1)).await.unwrap();
    said(&mut link).await;
    link.ack(UpdateNumber(1));
    link.detach().await;
    let mut state = seat.watch_status();
    state.wait_for(|state| !state.attached).await.unwrap();
    assert!(!state.borrow().has_unacked);
}

#[tokio::test(start_paused = true)]
async fn a_link_that_reaches_nobody_is_let_go_at_once() {
    let (seat, _agent) = seated();
    let pier = PipeWorker::of(&seat);
    pier.set(WorkerReachability::Later);
    let link = open(&pier, 0);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = Instant::now();
    link.detach().await;
    assert_eq!(before.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_spool_is_synced_when_the_daemon_leaves_and_every_second_without_one() {
    let spool = ObservedSpool::default();
    let seat = WorkerEndpoint::new(seat_options(), Box::new(spool.clone()));
    let (agent, end) = local_link(UpdateNumber(0));
    seat.set_agent(end);
    let mut link = open(&PipeWorker::of(&seat), 0);
    attached(&mut link).await;
    for number in 0..10 {
        agent.send(notice(number)).await.unwrap();
        said(&mut link).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(spool.syncs(), 0, "while a daemon is there its journal is the safe place");
    drop(link);
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(spool.syncs(), 1);
    for number in 0..100 {
        agent.send(notice(number)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!((10..=12).contains(&spool.syncs()), "{} syncs in ten seconds", spool.syncs());
    tokio::time::sleep(Duration::from_secs(2)).await;
    let syncs = spool.syncs();
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(spool.syncs(), syncs, "nothing was said, so nothing is synced");
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_costs_nothing_that_was_said() {
    let spool = ObservedSpool::default();
    let seat = WorkerEndpoint::new(seat_options(), Box::new(spool.clone()));
    seat.set_agent(host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        for number in 0..1000 {
            agent.send(notice(number)).await.expect("the seat hears");
        }
        AgentExitReason::Stopped
    }));
    spool.broken.store(true, Ordering::Relaxed);
    let pier = PipeWorker::of(&seat);
    let mut link = open(&pier, 0);
    let mut heard = Vec::new();
    while heard.len() < 1001 {
        match link.next_event().await {
            LinkEvent::Updates(said) => {
                link.ack(said[0].number);
                heard.extend(said);
                spool.broken.fetch_not(Ordering::Relaxed);
                pier.cut();
            }
            LinkEvent::Disconnected | LinkEvent::Attached { .. } => {}
            LinkEvent::Gone(gone) => panic!("{gone:?}"),
        }
    }
    heard.pop();
    assert!(notices(&heard).eq(0..1000));
}

#[tokio::test(start_paused = true)]
async fn with_the_last_clone_of_a_seat_its_agent_ends() {
    let (seat, mut agent) = seated();
    let other = seat.clone();
    drop(seat);
    agent.send(notice(1)).await.unwrap();
    drop(other);
    assert_eq!(agent.next_command().await, None);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_was_taken_out_is_not_heard_of_again() {
    let (seat, agent) = seated();
    agent.send(notice(1)).await.unwrap();
    seat.watch_status().wait_for(|state| state.has_unacked).await.unwrap();
    seat.remove_agent().await;
    drop(agent);
    seat.send(AgentUpdate::Rested).await;
    let mut link = open(&PipeWorker::of(&seat), 0);
    assert_eq!(attached(&mut link).await, v1::AgentPresence::Resting);
    let heard = said(&mut link).await;
    assert_eq!(
        heard.iter().map(|thing| thing.update.clone()).collect::<Vec<_>>(),
        [notice(1), AgentUpdate::Rested]
    );
}

/// A spool that tells what is done with it, and can be made to take nothing.
#[derive(Clone, Default)]
struct ObservedSpool {
    spool: Arc<Mutex<MemorySpool>>,
    syncs: Arc<AtomicUsize>,
    broken: Arc<AtomicBool>,
}

impl ObservedSpool {
    fn look<T>(&self, look: impl FnOnce(&mut MemorySpool) -> T) -> T {
        look(&mut self.spool.lock().expect("no test panics with it"))
    }

    fn syncs(&self) -> usize {
        self.syncs.load(Ordering::Relaxed)
    }
}

impl Spool for ObservedSpool {
    fn append(&mut self, first: UpdateNumber, lines: &[Bytes]) -> io::Result<()> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.look(|spool| {
            let held = spool.read(UpdateNumber(0), usize::MAX)?;
            if let Some((last, _)) = held.last() {
                assert_eq!(first.0, last.0 + 1, "numbers without a hole");
            }
            spool.append(first, lines)
        })
    }

    fn sync(&mut self) -> io::Result<()> {
        self.syncs.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn trim(&mut self, upto: UpdateNumber) -> io::Result<()> {
        self.look(|spool| spool.trim(upto))
    }

    fn read(&mut self, after: UpdateNumber, max_bytes: usize) -> io::Result<Vec<(UpdateNumber, Bytes)>> {
        self.look(|spool| spool.read(after, max_bytes))
    }

    fn bytes(&self) -> u64 {
        self.look(|spool| spool.bytes())
    }
}
