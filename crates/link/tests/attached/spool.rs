//! What a worker keeps for a daemon that is not there: when it is read, synced and full.

use std::sync::atomic::Ordering;
use std::time::Duration;

use qd_link::{
    AgentEndpoint, LinkEvent, MemorySpool, NumberedUpdate, WorkerEndpoint, WorkerEndpointOptions, host_agent,
};
use qd_protocol::limits::LINK_WINDOW;
use qd_protocol::link::{AgentExitReason, AgentUpdate, UpdateNumber};
use tokio::time::timeout;

use crate::observed_spool::ObservedSpool;
use crate::pipe_worker::{PipeWorker, endpoint_options, next_updates, notice, notices, text_of};
use crate::setup::{attach, endpoint_with_agent, open, play_agent, terminal};

#[tokio::test(start_paused = true)]
async fn a_full_spool_keeps_the_agent_from_talking_but_not_from_ending_its_turn() {
    let options = WorkerEndpointOptions { spool_max: 1, ..endpoint_options() };
    let endpoint = WorkerEndpoint::new(options, Box::new(MemorySpool::default()));
    let agent = play_agent(&endpoint);
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

    let mut link = attach(&PipeWorker::of(&endpoint)).await;
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
    let mut link = attach(&PipeWorker::of(&endpoint)).await;
    let mut received = Vec::new();
    while received.len() < 2000 {
        received.extend(next_updates(&mut link).await);
    }
    assert!(
        received.iter().zip(0..).all(|(numbered, number)| text_of(numbered) == format!("{number} {long}"))
    );
}

#[tokio::test(start_paused = true)]
async fn a_spool_is_synced_when_the_daemon_leaves_and_every_second_without_one() {
    let spool = ObservedSpool::default();
    let endpoint = WorkerEndpoint::new(endpoint_options(), Box::new(spool.clone()));
    let agent = play_agent(&endpoint);
    let mut link = attach(&PipeWorker::of(&endpoint)).await;
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

#[tokio::test]
async fn an_endpoint_that_loses_a_task_says_so_and_still_delivers_what_it_has() {
    let spool = ObservedSpool::default();
    spool.sync_panics.store(true, Ordering::Relaxed);
    let endpoint = WorkerEndpoint::new(endpoint_options(), Box::new(spool));
    let agent = play_agent(&endpoint);
    let mut deaths = endpoint.watch_task_deaths();
    assert_eq!(*deaths.borrow(), None);
    // No daemon is attached, so the spool is synced.
    agent.send(notice(1)).await.unwrap();
    let death = deaths.wait_for(Option::is_some).await.unwrap().clone().unwrap();
    assert!(death.code == "worker_panicked" && death.message.contains("spool sync"), "{death:?}");
    let gone = AgentUpdate::Gone(AgentExitReason::Failed(death));
    endpoint.remove_agent().await;
    endpoint.send(gone.clone()).await;
    let mut link = attach(&PipeWorker::of(&endpoint)).await;
    let received = next_updates(&mut link).await;
    let updates: Vec<_> = received.iter().map(|numbered| numbered.update.clone()).collect();
    assert_eq!(updates, [notice(1), gone]);
}
