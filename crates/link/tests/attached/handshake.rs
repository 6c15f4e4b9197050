//! Who may attach: both ends prove that they know the secret, and what cannot be served is refused with a reason.

use std::time::Duration;

use qd_link::{MemorySpool, WorkerEndpoint, WorkerEndpointOptions};
use qd_protocol::frame::v1::{self, DaemonLinkFrame, WorkerLinkFrame};
use qd_protocol::link::{AgentCommand, UpdateNumber};
use qd_protocol::worker::Secret;
use qd_protocol::{EventNumber, WorkerId};
use tokio::time::{Instant, timeout};

use crate::pipe_worker::{PipeWorker, endpoint_options, next_updates, notice, raw_daemon, run};
use crate::setup::{attach, endpoint_with_agent, is_in_time, open, play_agent, wait_given_up};

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
    let mut link = attach(&worker).await;
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
    let mut link = attach(&worker).await;
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
    let mut agent = play_agent(&endpoint);
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
