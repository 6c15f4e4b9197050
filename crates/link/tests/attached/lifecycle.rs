//! Agents start, rest and end, and sessions begin and close, each once, though it is said again after breaks.

use std::time::Duration;

use qd_link::{AgentLink, LifecycleRequest, LinkEvent, LinkOptions, NumberedUpdate};
use qd_protocol::frame::v1;
use qd_protocol::link::{AgentExitReason, AgentUpdate, UpdateNumber};
use tokio::time::timeout;

use crate::pipe_worker::{
    PipeWorker, link_options, next_updates, notice, notices, prompt, run, spec, wait_attached,
};
use crate::setup::{
    READY, attach, break_connection, endpoint_with_agent, endpoint_without_agent, open, play_agent, terminal,
};

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
    let mut link = attach(&worker).await;
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
    let mut link = attach(&PipeWorker::of(&endpoint)).await;
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
    let mut link = attach(&worker).await;
    next_updates(&mut link).await;

    link.stop_idle_agent();
    assert_eq!(endpoint.next_request().await, LifecycleRequest::StopIdleAgent);
    break_connection(&worker, &mut link).await;
    wait_attached(&mut link).await;
    endpoint.remove_agent().await;
    assert!(agent.send(notice("too late")).await.is_err());
    endpoint.send(AgentUpdate::IdleStopped).await;
    let received = next_updates(&mut link).await;
    assert_eq!(received[0].update, AgentUpdate::IdleStopped);

    link.start_agent(spec());
    assert_eq!(endpoint.next_request().await, LifecycleRequest::Start(spec()));
    break_connection(&worker, &mut link).await;
    assert_eq!(
        wait_attached(&mut link).await,
        v1::AgentPresence::Starting,
        "so that the daemon does not start it twice"
    );
    let agent = play_agent(&endpoint);
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
    let endpoint = endpoint_without_agent();
    let mut link = attach(&PipeWorker::of(&endpoint)).await;
    link.send(prompt(1));
    assert!(timeout(Duration::from_secs(1), link.next_event()).await.is_err());
    let mut agent = play_agent(&endpoint);
    assert_eq!(agent.next_command().await, Some(prompt(1)));
    assert_eq!(endpoint.watch_status().borrow().run, Some(run()));
}

#[tokio::test(start_paused = true)]
async fn a_newer_connection_ends_an_older_one() {
    let (endpoint, agent) = endpoint_with_agent();
    let worker = PipeWorker::of(&endpoint);
    let mut older = attach(&worker).await;
    let mut newer = attach(&worker).await;
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
    let agent = play_agent(&endpoint);
    agent.send(READY).await.unwrap();
    let received = next_updates(&mut link).await;
    assert_eq!(received[0].update, READY);
    link.ack(received[0].number);
    break_connection(&worker, &mut link).await;
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
