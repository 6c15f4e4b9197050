//! Promises of the link over a socket, seen from its two ends: a worker endpoint and a session, with a pipe in memory
//! between them that can be cut at any moment. The clock is paused and advances only while every task waits.

mod pipe_worker;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use qd_link::{
    AgentEndpoint, AgentLink, LifecycleRequest, LinkEvent, LinkOptions, MemorySpool, NumberedUpdate, Spool,
    WorkerEnding, WorkerEndpoint, WorkerEndpointOptions, host_agent, local_link,
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
    PipeWorker, REACH_TIMEOUT, WorkerReachability, endpoint_options, link_options, next_updates, notice,
    notices, numbers, prompt, raw_daemon, run, spec, steer, text_of, wait_attached,
};

const READY: AgentUpdate = AgentUpdate::Ready { agent_session_id: None, steers: true };

fn terminal() -> AgentUpdate {
    AgentUpdate::TurnEnded { run: run(), outcome: TurnOutcome::of(TurnStopReason::EndTurn) }
}

/// An endpoint with an agent that the test plays.
fn endpoint_with_agent() -> (WorkerEndpoint, AgentEndpoint) {
    let endpoint = WorkerEndpoint::new(endpoint_options(), Box::new(MemorySpool::default()));
    let (agent, session_end) = local_link(UpdateNumber(0));
    endpoint.set_agent(session_end);
    (endpoint, agent)
}

fn open(worker: &PipeWorker, journalled: u64) -> AgentLink {
    AgentLink::open(LinkOptions { journalled: UpdateNumber(journalled), ..link_options() }, worker.clone())
}

#[tokio::test(start_paused = true)]
async fn every_word_is_heard_once_and_in_order_however_often_the_connection_breaks() {
    const MANY: usize = 20_000;
    let endpoint = WorkerEndpoint::new(endpoint_options(), Box::new(MemorySpool::default()));
    endpoint.set_agent(host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        for number in 0..MANY {
            agent.send(notice(number)).await.expect("the endpoint accepts updates");
        }
        AgentExitReason::Stopped
    }));
    let worker = PipeWorker::of(&endpoint);
    let mut link = open(&worker, 0);
    let (mut received, mut breaks) = (Vec::new(), 0);
    loop {
        match link.next_event().await {
            LinkEvent::Updates(updates) => {
                // Some of the updates are journalled; then the connection breaks.
                link.ack(updates[updates.len() / 2].number);
                received.extend(updates);
                worker.cut();
            }
            LinkEvent::Disconnected => breaks += 1,
            LinkEvent::Attached { reattached, .. } => assert_eq!(reattached, breaks > 0),
            LinkEvent::Gone(gone) => panic!("the worker lives, but {gone:?}"),
        }
        if received.last().is_some_and(|last| last.update == AgentUpdate::Gone(AgentExitReason::Stopped)) {
            break;
        }
    }
    assert!(breaks > 5, "{breaks} breaks");
    received.pop();
    assert!(numbers(&received).into_iter().eq(1..=MANY as u64));
    assert!(notices(&received).eq(0..MANY));
}

#[tokio::test(start_paused = true)]
async fn another_daemon_goes_on_where_the_journal_of_the_last_one_ends() {
    let (endpoint, agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    for number in 0..10 {
        agent.send(notice(number)).await.unwrap();
    }
    let mut first = open(&worker, 0);
    wait_attached(&mut first).await;
    assert_eq!(next_updates(&mut first).await.len(), 10);
    assert_eq!(first.unacked().count(), 10);
    first.ack(UpdateNumber(4));
    assert_eq!(numbers(first.unacked()), [5, 6, 7, 8, 9, 10]);
    // The first daemon dies before it has sent the acknowledgement.
    drop(first);
    let mut second = open(&worker, 4);
    wait_attached(&mut second).await;
    assert_eq!(numbers(&next_updates(&mut second).await), [5, 6, 7, 8, 9, 10]);
    second.ack(UpdateNumber(10));
    let mut state = endpoint.watch_status();
    state.wait_for(|state| !state.has_unacked).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn commands_are_applied_once_and_in_order_though_the_session_says_them_again() {
    let (endpoint, mut agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    let mut link = open(&worker, 0);
    let applied = tokio::spawn(async move {
        let mut applied = Vec::new();
        while applied.len() < 30 {
            applied.push(agent.next_command().await.expect("the endpoint is there").number().0);
        }
        applied
    });
    let mut sent = 0;
    while !applied.is_finished() {
        match timeout(Duration::from_millis(5), link.next_event()).await {
            Ok(LinkEvent::Attached { applied, .. }) => {
                (applied.0 + 1..=sent).for_each(|number| link.send(steer(number)));
            }
            // Nothing else is pending: send a few more commands, some of which are on their way when the connection
            // breaks.
            Err(_) if sent < 30 => {
                (sent + 1..=sent + 3).for_each(|number| link.send(steer(number)));
                sent += 3;
                for _ in 0..sent {
                    tokio::task::yield_now().await;
                }
                worker.cut();
            }
            Ok(_) | Err(_) => {}
        }
    }
    assert_eq!(applied.await.unwrap(), (1..=30).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn a_cancel_arrives_while_the_session_hears_nothing_and_the_socket_is_full() {
    let endpoint = WorkerEndpoint::new(endpoint_options(), Box::new(MemorySpool::default()));
    let (cancelled, cancel) = tokio::sync::oneshot::channel();
    endpoint.set_agent(host_agent(UpdateNumber(0), |mut agent: AgentEndpoint| async move {
        let output = agent.output();
        let talking = async {
            for number in 0.. {
                output
                    .send(notice(format!("{number} {}", "x".repeat(10_000))))
                    .await
                    .expect("the endpoint accepts updates");
            }
        };
        tokio::select! {
            () = talking => {}
            command = agent.next_command() => cancelled.send(command).expect("the test waits"),
        }
        AgentExitReason::Stopped
    }));
    let mut link = open(&PipeWorker::of(&endpoint), 0);
    wait_attached(&mut link).await;
    next_updates(&mut link).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    link.send(AgentCommand::Cancel { number: EventNumber(1), run: run() });
    assert_eq!(cancel.await.unwrap(), Some(AgentCommand::Cancel { number: EventNumber(1), run: run() }));
}

#[tokio::test(start_paused = true)]
async fn a_session_that_does_not_hear_costs_bounded_memory_and_then_the_agent_waits() {
    const LARGE: usize = 10_000;
    const SPOOL: usize = 3 << 20;
    let spool = ObservedSpool::default();
    let options = WorkerEndpointOptions { spool_max: SPOOL as u64, ..endpoint_options() };
    let endpoint = WorkerEndpoint::new(options, Box::new(spool.clone()));
    let sent_count = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&sent_count);
    endpoint.set_agent(host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        loop {
            agent.send(notice("x".repeat(LARGE))).await.expect("the endpoint accepts updates");
            count.fetch_add(1, Ordering::Relaxed);
        }
    }));
    let mut link = open(&PipeWorker::of(&endpoint), 0);
    wait_attached(&mut link).await;
    // Without acknowledgements the spool grows; then the window of the agent's own link fills.
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let most = SPOOL / LARGE + 2 * LINK_WINDOW + 2;
    assert!((SPOOL / LARGE..most).contains(&sent_count.load(Ordering::Relaxed)), "{sent_count:?}");
    let waiting = next_updates(&mut link).await;
    let frame = 2 * (64 << 10) / LARGE;
    assert!(waiting.len() <= LINK_WINDOW + frame, "{} updates wait for the session", waiting.len());

    // Space in the spool lets the agent continue.
    let before = sent_count.load(Ordering::Relaxed);
    link.ack(waiting.last().unwrap().number);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(sent_count.load(Ordering::Relaxed) > before);
    assert!(spool.inspect(|spool| spool.bytes()) as usize <= SPOOL + (LINK_WINDOW + 1) * (LARGE + 200));
}

#[tokio::test(start_paused = true)]
async fn a_full_spool_keeps_the_agent_from_talking_but_not_from_ending_its_turn() {
    let options = WorkerEndpointOptions { spool_max: 1, ..endpoint_options() };
    let endpoint = WorkerEndpoint::new(options, Box::new(MemorySpool::default()));
    let (agent, session_end) = local_link(UpdateNumber(0));
    endpoint.set_agent(session_end);
    agent.send(notice(0)).await.unwrap();
    endpoint.watch_status().wait_for(|state| state.has_unacked).await.unwrap();
    for number in 1..=LINK_WINDOW {
        agent.send(notice(number)).await.unwrap();
    }
    let output = agent.output();
    assert!(
        timeout(Duration::from_secs(3600), output.send(notice("more"))).await.is_err(),
        "the agent has to wait"
    );
    agent.send(terminal()).await.unwrap();

    let mut link = open(&PipeWorker::of(&endpoint), 0);
    wait_attached(&mut link).await;
    let mut received = Vec::new();
    while received.last().is_none_or(|last: &NumberedUpdate| last.update != terminal()) {
        received.extend(next_updates(&mut link).await);
        link.ack(received.last().unwrap().number);
    }
    received.pop();
    assert!(notices(&received).eq(0..=LINK_WINDOW));
}

#[tokio::test(start_paused = true)]
async fn what_lies_in_the_spool_is_read_back_for_a_daemon_that_comes_late() {
    let (endpoint, agent) = endpoint_with_agent();
    let long = "x".repeat(1000);
    for number in 0..2000 {
        agent.send(notice(format!("{number} {long}"))).await.unwrap();
    }
    let mut link = open(&PipeWorker::of(&endpoint), 0);
    wait_attached(&mut link).await;
    let mut received = Vec::new();
    while received.len() < 2000 {
        received.extend(next_updates(&mut link).await);
    }
    assert!(
        received.iter().zip(0..).all(|(numbered, number)| text_of(numbered) == format!("{number} {long}"))
    );
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_publishes_its_status() {
    let (endpoint, agent) = endpoint_with_agent();
    let mut state = endpoint.watch_status();
    let now = state.borrow().clone();
    assert_eq!(
        (now.attached, now.presence, now.run, now.has_unacked),
        (false, v1::AgentPresence::Starting, None, false)
    );
    agent.send(READY).await.unwrap();
    state.wait_for(|state| state.has_unacked).await.unwrap();
    assert_eq!(state.borrow().presence, v1::AgentPresence::Ready { steers: true });

    let worker = PipeWorker::of(&endpoint);
    let mut link = open(&worker, 0);
    wait_attached(&mut link).await;
    link.send(prompt(1));
    let received = next_updates(&mut link).await;
    link.ack(received[0].number);
    state.wait_for(|state| state.attached && state.run == Some(run()) && !state.has_unacked).await.unwrap();
    agent.send(terminal()).await.unwrap();
    state.wait_for(|state| state.run.is_none()).await.unwrap();
    drop(link);
    let detached = state.wait_for(|state| !state.attached).await.unwrap().clone();
    assert!(detached.attachment_changed_at >= now.attachment_changed_at);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_ends_says_so_once_and_nothing_after_it() {
    let (endpoint, agent) = endpoint_with_agent();
    let mut link = open(&PipeWorker::of(&endpoint), 0);
    wait_attached(&mut link).await;
    agent.send(notice(1)).await.unwrap();
    drop(agent);
    let mut received = next_updates(&mut link).await;
    if received.len() < 2 {
        received.extend(next_updates(&mut link).await);
    }
    assert!(
        matches!(&received[1].update, AgentUpdate::Gone(AgentExitReason::Failed(error)) if error.code == "agent_ended")
    );
    endpoint.send(AgentUpdate::Gone(AgentExitReason::Stopped)).await;
    assert!(timeout(Duration::from_secs(60), link.next_event()).await.is_err());
    assert_eq!(endpoint.watch_status().borrow().presence, v1::AgentPresence::Gone);
}

#[tokio::test(start_paused = true)]
async fn an_agent_rests_and_is_started_again_once_though_both_are_said_again_after_breaks() {
    let (endpoint, agent) = endpoint_with_agent();
    agent.send(READY).await.unwrap();
    let worker = PipeWorker::of(&endpoint);
    let mut link = open(&worker, 0);
    wait_attached(&mut link).await;
    next_updates(&mut link).await;

    link.stop_idle_agent();
    assert_eq!(endpoint.next_request().await, LifecycleRequest::StopIdleAgent);
    worker.cut();
    assert_eq!(link.next_event().await, LinkEvent::Disconnected);
    wait_attached(&mut link).await;
    endpoint.remove_agent().await;
    assert!(agent.send(notice("too late")).await.is_err());
    endpoint.send(AgentUpdate::IdleStopped).await;
    let received = next_updates(&mut link).await;
    assert_eq!(received[0].update, AgentUpdate::IdleStopped);

    link.start_agent(spec());
    assert_eq!(endpoint.next_request().await, LifecycleRequest::Start(spec()));
    worker.cut();
    assert_eq!(link.next_event().await, LinkEvent::Disconnected);
    assert_eq!(
        wait_attached(&mut link).await,
        v1::AgentPresence::Starting,
        "so that the daemon does not start it twice"
    );
    let (agent, session_end) = local_link(UpdateNumber(0));
    endpoint.set_agent(session_end);
    agent.send(READY).await.unwrap();
    assert_eq!(next_updates(&mut link).await[0], NumberedUpdate { number: UpdateNumber(3), update: READY });

    link.close();
    assert_eq!(endpoint.next_request().await, LifecycleRequest::Close);
    assert!(
        timeout(Duration::from_secs(60), endpoint.next_request()).await.is_err(),
        "each request arrives once"
    );
}

#[tokio::test(start_paused = true)]
async fn a_command_that_finds_no_agent_waits_for_the_next() {
    let endpoint = WorkerEndpoint::new(endpoint_options(), Box::new(MemorySpool::default()));
    let mut link = open(&PipeWorker::of(&endpoint), 0);
    wait_attached(&mut link).await;
    link.send(prompt(1));
    assert!(timeout(Duration::from_secs(1), link.next_event()).await.is_err());
    let (mut agent, session_end) = local_link(UpdateNumber(0));
    endpoint.set_agent(session_end);
    assert_eq!(agent.next_command().await, Some(prompt(1)));
    assert_eq!(endpoint.watch_status().borrow().run, Some(run()));
}

#[tokio::test(start_paused = true)]
async fn a_newer_connection_ends_an_older_one() {
    let (endpoint, agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    let mut older = open(&worker, 0);
    wait_attached(&mut older).await;
    let mut newer = open(&worker, 0);
    wait_attached(&mut newer).await;
    agent.send(notice(1)).await.unwrap();
    assert_eq!(notices(&next_updates(&mut newer).await).collect::<Vec<_>>(), [1]);
    assert_eq!(older.next_event().await, LinkEvent::Disconnected);
}

#[tokio::test(start_paused = true)]
async fn a_session_that_is_new_to_a_worker_is_started_on_the_connection_that_brings_it() {
    let worker = PipeWorker::empty();
    let mut link = AgentLink::open(LinkOptions { start: Some(spec()), ..link_options() }, worker.clone());
    assert_eq!(wait_attached(&mut link).await, v1::AgentPresence::Empty);
    let endpoint = worker.started().await;
    let (agent, session_end) = local_link(UpdateNumber(0));
    endpoint.set_agent(session_end);
    agent.send(READY).await.unwrap();
    let received = next_updates(&mut link).await;
    assert_eq!(received[0].update, READY);
    link.ack(received[0].number);
    worker.cut();
    assert_eq!(link.next_event().await, LinkEvent::Disconnected);
    assert_eq!(wait_attached(&mut link).await, v1::AgentPresence::Ready { steers: true });
}

#[tokio::test(start_paused = true)]
async fn a_session_that_is_closed_before_its_start_arrived_ends_at_once() {
    let worker = PipeWorker::empty();
    let mut link = AgentLink::open(LinkOptions { start: Some(spec()), ..link_options() }, worker.clone());
    link.close();
    assert_eq!(wait_attached(&mut link).await, v1::AgentPresence::Empty);
    let ended = timeout(Duration::from_secs(1), link.next_event()).await;
    assert_eq!(ended, Ok(LinkEvent::Gone(AgentExitReason::Stopped)));
}

#[tokio::test(start_paused = true)]
async fn a_worker_without_the_expected_agent_means_that_it_is_lost() {
    let worker = PipeWorker::empty();
    worker.leave([notice(1)]);
    let mut link = open(&worker, 0);
    assert_eq!(notices(&next_updates(&mut link).await).collect::<Vec<_>>(), [1]);
    assert_eq!(link.next_event().await, LinkEvent::Gone(AgentExitReason::Lost));
}

#[tokio::test(start_paused = true)]
async fn what_a_dead_worker_left_is_heard_before_its_end() {
    let (endpoint, agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    let mut link = open(&worker, 0);
    wait_attached(&mut link).await;
    for number in 0..3 {
        agent.send(notice(number)).await.unwrap();
    }
    let mut received = next_updates(&mut link).await;
    while received.len() < 3 {
        received.extend(next_updates(&mut link).await);
    }
    worker.leave((0..10 * LINK_WINDOW).map(notice));
    worker.set(WorkerReachability::Dead);
    worker.cut();
    assert_eq!(link.next_event().await, LinkEvent::Disconnected);
    loop {
        match link.next_event().await {
            LinkEvent::Updates(updates) => received.extend(updates),
            LinkEvent::Gone(gone) => break assert_eq!(gone, AgentExitReason::Lost),
            other => panic!("got {other:?}"),
        }
    }
    assert!(notices(&received).eq(0..10 * LINK_WINDOW));
    assert_eq!(link.next_event().await, LinkEvent::Gone(AgentExitReason::Lost));
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_cannot_be_reached_is_tried_again_soon_and_then_less_often() {
    let (endpoint, _agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    worker.set(WorkerReachability::Later);
    let mut link = open(&worker, 0);
    assert!(timeout(Duration::from_secs(60), link.next_event()).await.is_err());
    let tries = worker.dials();
    assert!((60..80).contains(&tries), "{tries} tries in a minute");
    worker.set(WorkerReachability::Open);
    wait_attached(&mut link).await;
}

/// The message with which a link reports that it has given the worker up, and how long that took.
async fn wait_given_up(link: &mut AgentLink, since: Instant) -> (String, Duration) {
    match link.next_event().await {
        LinkEvent::Gone(AgentExitReason::Unreachable(error)) => {
            assert_eq!(error.code, "worker_unreachable");
            (error.message, since.elapsed())
        }
        other => panic!("got {other:?}"),
    }
}

/// One attempt and a pause may follow after the limit.
fn is_in_time(given_up_after: Duration) -> bool {
    (REACH_TIMEOUT..REACH_TIMEOUT + Duration::from_secs(20)).contains(&given_up_after)
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_cannot_be_reached_is_given_up_after_a_limit_with_all_that_it_left() {
    let (endpoint, agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    let mut link = open(&worker, 0);
    wait_attached(&mut link).await;
    agent.send(notice(1)).await.unwrap();
    next_updates(&mut link).await;
    worker.leave([notice(1), notice(2), notice(3)]);
    worker.set(WorkerReachability::Later);
    worker.cut();
    assert_eq!(link.next_event().await, LinkEvent::Disconnected);
    let since = Instant::now();
    assert_eq!(numbers(&next_updates(&mut link).await), [2, 3]);
    assert!(worker.is_ended(), "it is ended before its spool is read");
    let (message, after) = wait_given_up(&mut link, since).await;
    assert!(is_in_time(after), "{after:?}");
    assert!(message.contains("600 s (nobody answers)") && message.contains("it was ended"), "{message}");
    worker.set(WorkerReachability::Open);
    let dials = worker.dials();
    let again = link.next_event().await;
    assert!(matches!(again, LinkEvent::Gone(AgentExitReason::Unreachable(_))), "{again:?}");
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(worker.dials(), dials, "a worker that was given up is not tried again");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_survives_its_end_is_named() {
    let worker = PipeWorker::of(&endpoint_with_agent().0);
    worker.set(WorkerReachability::Later);
    worker.set_ending(WorkerEnding::Survived(vec![17, 18]));
    let mut link = open(&worker, 0);
    let (message, _) = wait_given_up(&mut link, Instant::now()).await;
    assert!(message.contains("kill -9 17 18"), "{message}");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_lived_although_it_counted_as_dead_is_told_from_one_that_died() {
    let worker = PipeWorker::of(&endpoint_with_agent().0);
    worker.set(WorkerReachability::Dead);
    worker.set_ending(WorkerEnding::Ended);
    let (message, _) = wait_given_up(&mut open(&worker, 0), Instant::now()).await;
    assert!(message.contains("removed while it was running"), "{message}");
    worker.set_ending(WorkerEnding::NotFound);
    assert_eq!(open(&worker, 0).next_event().await, LinkEvent::Gone(AgentExitReason::Lost));
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_accepts_and_never_answers_is_given_up() {
    let (endpoint, _agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    worker.freeze();
    worker.set(WorkerReachability::Open);
    let since = Instant::now();
    let mut link = open(&worker, 0);
    let (message, after) = wait_given_up(&mut link, since).await;
    assert!(is_in_time(after), "{after:?}");
    assert!(message.contains("did not answer in time"), "{message}");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_is_ahead_of_the_journal_is_given_up() {
    let (endpoint, agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    let mut link = open(&worker, 0);
    wait_attached(&mut link).await;
    agent.send(notice(1)).await.unwrap();
    next_updates(&mut link).await;
    link.ack(UpdateNumber(1));
    link.detach().await;
    // An older journal was restored. The worker no longer has what is missing in it.
    worker.leave([]);
    let since = Instant::now();
    let (message, after) = wait_given_up(&mut open(&worker, 0), since).await;
    assert!(is_in_time(after), "{after:?}");
    assert!(message.contains("bad_number"), "{message}");
}

#[tokio::test(start_paused = true)]
async fn connections_that_never_hold_do_not_count_as_reaching_the_worker() {
    let (endpoint, _agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    let since = Instant::now();
    let mut link = open(&worker, 0);
    let message = loop {
        match link.next_event().await {
            LinkEvent::Attached { .. } => worker.cut(),
            LinkEvent::Disconnected => {}
            LinkEvent::Gone(AgentExitReason::Unreachable(error)) => break error.message,
            other => panic!("got {other:?}"),
        }
    };
    assert!(is_in_time(since.elapsed()), "{:?}", since.elapsed());
    assert!(message.contains("the connection broke"), "{message}");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_is_reached_now_and_then_is_kept() {
    let (endpoint, _agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    let mut link = open(&worker, 0);
    for _ in 0..3 {
        wait_attached(&mut link).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        worker.set(WorkerReachability::Later);
        worker.cut();
        assert_eq!(link.next_event().await, LinkEvent::Disconnected);
        assert!(timeout(REACH_TIMEOUT - Duration::from_secs(5), link.next_event()).await.is_err());
        worker.set(WorkerReachability::Open);
    }
    wait_attached(&mut link).await;
    assert!(!worker.is_ended());
}

#[tokio::test(start_paused = true)]
async fn the_time_in_which_a_machine_is_away_does_not_count() {
    let (endpoint, _agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    worker.set(WorkerReachability::Away);
    let mut link = open(&worker, 0);
    assert!(timeout(10 * REACH_TIMEOUT, link.next_event()).await.is_err());
    worker.set(WorkerReachability::Later);
    assert!(timeout(REACH_TIMEOUT / 2, link.next_event()).await.is_err());
    worker.set(WorkerReachability::Open);
    wait_attached(&mut link).await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_does_not_know_the_secret_is_never_listened_to() {
    let options = WorkerEndpointOptions { secret: Secret("other".to_owned()), ..endpoint_options() };
    let endpoint = WorkerEndpoint::new(options, Box::new(MemorySpool::default()));
    endpoint.send(notice("trust me")).await;
    let since = Instant::now();
    let mut link = open(&PipeWorker::of(&endpoint), 0);
    assert!(timeout(Duration::from_secs(60), link.next_event()).await.is_err());
    let (message, after) = wait_given_up(&mut link, since).await;
    assert!(is_in_time(after), "{after:?}");
    assert!(message.contains("does not know its secret"), "{message}");
}

#[tokio::test(start_paused = true)]
async fn a_daemon_that_does_not_know_the_secret_hears_nothing_of_the_session() {
    let (endpoint, agent) = endpoint_with_agent();
    agent.send(notice("secret")).await.unwrap();
    let mut daemon = raw_daemon(&PipeWorker::of(&endpoint)).await;
    daemon.hello(|_| {}).await;
    assert!(matches!(daemon.next().await, Some(WorkerLinkFrame::Hello(_))));
    daemon.send(&DaemonLinkFrame::Proof("00".to_owned())).await;
    let Some(WorkerLinkFrame::Refused { code, .. }) = daemon.next().await else { panic!("not refused") };
    assert_eq!(code, "unauthorized");
    assert_eq!(daemon.next().await, None);
    assert!(!endpoint.watch_status().borrow().attached);
}

#[tokio::test(start_paused = true)]
async fn a_daemon_that_proves_nothing_does_not_take_the_place_of_another() {
    let (endpoint, agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    let mut link = open(&worker, 0);
    wait_attached(&mut link).await;
    let mut stranger = raw_daemon(&worker).await;
    stranger.hello(|_| {}).await;
    assert!(matches!(stranger.next().await, Some(WorkerLinkFrame::Hello(_))));
    agent.send(notice(1)).await.unwrap();
    assert_eq!(next_updates(&mut link).await.len(), 1);
    assert_eq!(stranger.next().await, None, "the connection is closed after a timeout");
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_is_refused_with_a_reason() {
    let (endpoint, agent) = endpoint_with_agent();
    for number in 0..3 {
        agent.send(notice(number)).await.unwrap();
    }
    let worker = PipeWorker::of(&endpoint);
    let mut link = open(&worker, 0);
    wait_attached(&mut link).await;
    next_updates(&mut link).await;
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
        let mut daemon = raw_daemon(&worker).await;
        daemon.hello(change).await;
        let Some(WorkerLinkFrame::Refused { code, message }) = daemon.next().await else {
            panic!("not refused")
        };
        assert_eq!(code, expected, "{message}");
    }
}

#[tokio::test(start_paused = true)]
async fn frames_and_fields_that_nobody_knows_are_ignored() {
    let options = WorkerEndpointOptions { secret: Secret::default(), ..endpoint_options() };
    let endpoint = WorkerEndpoint::new(options, Box::new(MemorySpool::default()));
    let (mut agent, session_end) = local_link(UpdateNumber(0));
    endpoint.set_agent(session_end);
    let mut daemon = raw_daemon(&PipeWorker::of(&endpoint)).await;
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
    let (endpoint, _agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    let mut link = open(&worker, 0);
    wait_attached(&mut link).await;
    let hour = Duration::from_secs(3600);
    assert!(timeout(hour, link.next_event()).await.is_err(), "nothing is sent, and the connection stays");

    worker.freeze();
    let before = Instant::now();
    assert_eq!(link.next_event().await, LinkEvent::Disconnected);
    let silence = before.elapsed().as_secs();
    assert!((2 * PING_S..=3 * PING_S).contains(&silence), "{silence} s");
    endpoint.watch_status().wait_for(|state| !state.attached).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_last_acknowledgement_goes_out_before_a_link_is_let_go() {
    let (endpoint, agent) = endpoint_with_agent();
    let mut link = open(&PipeWorker::of(&endpoint), 0);
    wait_attached(&mut link).await;
    agent.send(notice(1)).await.unwrap();
    next_updates(&mut link).await;
    link.ack(UpdateNumber(1));
    link.detach().await;
    let mut state = endpoint.watch_status();
    state.wait_for(|state| !state.attached).await.unwrap();
    assert!(!state.borrow().has_unacked);
}

#[tokio::test(start_paused = true)]
async fn a_link_that_reaches_nobody_is_let_go_at_once() {
    let (endpoint, _agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    worker.set(WorkerReachability::Later);
    let link = open(&worker, 0);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = Instant::now();
    link.detach().await;
    assert_eq!(before.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_spool_is_synced_when_the_daemon_leaves_and_every_second_without_one() {
    let spool = ObservedSpool::default();
    let endpoint = WorkerEndpoint::new(endpoint_options(), Box::new(spool.clone()));
    let (agent, session_end) = local_link(UpdateNumber(0));
    endpoint.set_agent(session_end);
    let mut link = open(&PipeWorker::of(&endpoint), 0);
    wait_attached(&mut link).await;
    for number in 0..10 {
        agent.send(notice(number)).await.unwrap();
        next_updates(&mut link).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(spool.syncs(), 0, "while a daemon is attached its journal keeps the updates");
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
    assert_eq!(spool.syncs(), syncs, "nothing was appended, so nothing is synced");
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_costs_nothing_that_was_said() {
    let spool = ObservedSpool::default();
    let endpoint = WorkerEndpoint::new(endpoint_options(), Box::new(spool.clone()));
    endpoint.set_agent(host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        for number in 0..1000 {
            agent.send(notice(number)).await.expect("the endpoint accepts updates");
        }
        AgentExitReason::Stopped
    }));
    spool.broken.store(true, Ordering::Relaxed);
    let worker = PipeWorker::of(&endpoint);
    let mut link = open(&worker, 0);
    let mut received = Vec::new();
    while received.len() < 1001 {
        match link.next_event().await {
            LinkEvent::Updates(updates) => {
                link.ack(updates[0].number);
                received.extend(updates);
                spool.broken.fetch_not(Ordering::Relaxed);
                worker.cut();
            }
            LinkEvent::Disconnected | LinkEvent::Attached { .. } => {}
            LinkEvent::Gone(gone) => panic!("{gone:?}"),
        }
    }
    received.pop();
    assert!(notices(&received).eq(0..1000));
}

#[tokio::test(start_paused = true)]
async fn dropping_the_last_clone_of_an_endpoint_ends_its_agent() {
    let (endpoint, mut agent) = endpoint_with_agent();
    let other = endpoint.clone();
    drop(endpoint);
    agent.send(notice(1)).await.unwrap();
    drop(other);
    assert_eq!(agent.next_command().await, None);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_was_taken_out_is_not_heard_of_again() {
    let (endpoint, agent) = endpoint_with_agent();
    agent.send(notice(1)).await.unwrap();
    endpoint.watch_status().wait_for(|state| state.has_unacked).await.unwrap();
    endpoint.remove_agent().await;
    drop(agent);
    endpoint.send(AgentUpdate::IdleStopped).await;
    let mut link = open(&PipeWorker::of(&endpoint), 0);
    assert_eq!(wait_attached(&mut link).await, v1::AgentPresence::IdleStopped);
    let received = next_updates(&mut link).await;
    assert_eq!(
        received.iter().map(|numbered| numbered.update.clone()).collect::<Vec<_>>(),
        [notice(1), AgentUpdate::IdleStopped]
    );
}

#[tokio::test]
async fn an_endpoint_that_loses_a_task_says_so_and_still_delivers_what_it_has() {
    let spool = ObservedSpool::default();
    spool.sync_panics.store(true, Ordering::Relaxed);
    let endpoint = WorkerEndpoint::new(endpoint_options(), Box::new(spool));
    let (agent, session_end) = local_link(UpdateNumber(0));
    endpoint.set_agent(session_end);
    let mut deaths = endpoint.watch_task_deaths();
    assert_eq!(*deaths.borrow(), None);
    // No daemon is attached, so the spool is synced.
    agent.send(notice(1)).await.unwrap();
    let death = deaths.wait_for(Option::is_some).await.unwrap().clone().unwrap();
    assert!(death.code == "worker_panicked" && death.message.contains("spool sync"), "{death:?}");
    let gone = AgentUpdate::Gone(AgentExitReason::Failed(death));
    endpoint.remove_agent().await;
    endpoint.send(gone.clone()).await;
    let mut link = open(&PipeWorker::of(&endpoint), 0);
    wait_attached(&mut link).await;
    let received = next_updates(&mut link).await;
    let updates: Vec<_> = received.iter().map(|numbered| numbered.update.clone()).collect();
    assert_eq!(updates, [notice(1), gone]);
}

/// A spool that counts syncs, and can be made to refuse appends or to panic.
#[derive(Clone, Default)]
struct ObservedSpool {
    spool: Arc<Mutex<MemorySpool>>,
    syncs: Arc<AtomicUsize>,
    broken: Arc<AtomicBool>,
    sync_panics: Arc<AtomicBool>,
}

impl ObservedSpool {
    fn inspect<T>(&self, inspector: impl FnOnce(&mut MemorySpool) -> T) -> T {
        inspector(&mut self.spool.lock().expect("no test panics while it holds the lock"))
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
        self.inspect(|spool| {
            let held = spool.read(UpdateNumber(0), usize::MAX)?;
            if let Some((last, _)) = held.last() {
                assert_eq!(first.0, last.0 + 1, "numbers without a gap");
            }
            spool.append(first, lines)
        })
    }

    fn sync(&mut self) -> io::Result<()> {
        self.syncs.fetch_add(1, Ordering::Relaxed);
        assert!(!self.sync_panics.load(Ordering::Relaxed), "a sync that panics");
        Ok(())
    }

    fn trim(&mut self, upto: UpdateNumber) -> io::Result<()> {
        self.inspect(|spool| spool.trim(upto))
    }

    fn read(&mut self, after: UpdateNumber, max_bytes: usize) -> io::Result<Vec<(UpdateNumber, Bytes)>> {
        self.inspect(|spool| spool.read(after, max_bytes))
    }

    fn bytes(&self) -> u64 {
        self.inspect(|spool| spool.bytes())
    }
}
