//! A worker that is dead, away, silent or out of reach: how long it is tried, and what is still heard of it.

use std::time::Duration;

use qd_link::{LinkEvent, WorkerEnding};
use qd_protocol::limits::{LINK_WINDOW, PING_S};
use qd_protocol::link::{AgentExitReason, UpdateNumber};
use tokio::time::{Instant, timeout};

use crate::pipe_worker::{
    PipeWorker, REACH_TIMEOUT, WorkerReachability, next_updates, notice, notices, numbers, wait_attached,
};
use crate::setup::{attach, break_connection, endpoint_with_agent, is_in_time, open, wait_given_up};

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
    let mut link = attach(&worker).await;
    for number in 0..3 {
        agent.send(notice(number)).await.unwrap();
    }
    let mut received = next_updates(&mut link).await;
    while received.len() < 3 {
        received.extend(next_updates(&mut link).await);
    }
    worker.leave((0..10 * LINK_WINDOW).map(notice));
    worker.set(WorkerReachability::Dead);
    break_connection(&worker, &mut link).await;
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

#[tokio::test(start_paused = true)]
async fn a_worker_that_cannot_be_reached_is_given_up_after_a_limit_with_all_that_it_left() {
    let (endpoint, agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    let mut link = attach(&worker).await;
    agent.send(notice(1)).await.unwrap();
    next_updates(&mut link).await;
    worker.leave([notice(1), notice(2), notice(3)]);
    worker.set(WorkerReachability::Later);
    break_connection(&worker, &mut link).await;
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
    let mut link = attach(&worker).await;
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
        break_connection(&worker, &mut link).await;
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
async fn a_quiet_connection_stays_and_a_silent_peer_is_given_up() {
    let (endpoint, _agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    let mut link = attach(&worker).await;
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
