//! What an agent says and what it is told arrive once and in order, whatever happens to the connections between, and at
//! bounded cost.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use qd_link::{AgentEndpoint, LinkEvent, Spool, WorkerEndpoint, WorkerEndpointOptions, host_agent};
use qd_protocol::EventNumber;
use qd_protocol::limits::LINK_WINDOW;
use qd_protocol::link::{AgentCommand, AgentExitReason, AgentUpdate, UpdateNumber};
use tokio::time::timeout;

use crate::observed_spool::ObservedSpool;
use crate::pipe_worker::{
    PipeWorker, endpoint_options, next_updates, notice, notices, numbers, run, steer, wait_attached,
};
use crate::setup::{attach, endpoint_with_agent, endpoint_without_agent, open};

#[tokio::test(start_paused = true)]
async fn every_word_is_heard_once_and_in_order_however_often_the_connection_breaks() {
    const MANY: usize = 20_000;
    let endpoint = endpoint_without_agent();
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
    let mut first = attach(&worker).await;
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
    let endpoint = endpoint_without_agent();
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
    let mut link = attach(&PipeWorker::of(&endpoint)).await;
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
    let mut link = attach(&PipeWorker::of(&endpoint)).await;
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
async fn the_last_acknowledgement_goes_out_before_a_link_is_let_go() {
    let (endpoint, agent) = endpoint_with_agent();
    let mut link = attach(&PipeWorker::of(&endpoint)).await;
    agent.send(notice(1)).await.unwrap();
    next_updates(&mut link).await;
    link.ack(UpdateNumber(1));
    link.detach().await;
    let mut state = endpoint.watch_status();
    state.wait_for(|state| !state.attached).await.unwrap();
    assert!(!state.borrow().has_unacked);
}
