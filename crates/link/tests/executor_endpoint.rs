//! An executor behind `quarterdeck.v1`: the same worker that serves plain peers becomes the agent of a session. A
//! daemon detaches in the middle of a run, and another attaches without losing or repeating an update.
#![expect(clippy::unwrap_used, reason = "a test that fails should say where")]

use std::time::Duration;

use qd_link::{
    AgentLink, LinkEvent, LinkOptions, LinkSubprotocol, NumberedUpdate, WorkerConnector, WorkerUnreachable,
};
use qd_protocol::event::{AskAnswer, PermissionDecision};
use qd_protocol::frame::v1;
use qd_protocol::link::{
    AgentCommand, AgentExitReason, AgentUpdate, AskResolution, TurnLimits, TurnStopReason, TurnUpdate,
    UpdateNumber,
};
use qd_protocol::worker::{AgentSpec, Secret};
use qd_protocol::{EventNumber, RunId, SessionId, WorkerId};
use qd_worker_sdk::socket::{ByteStream, ClientUpgrade, Socket};
use qd_worker_sdk::{PlainApproval, RunAssignment, RunHandle, ServeMode, TurnOutcome, WorkerServer};
use tokio::net::TcpStream;

/// Connects to a server on this machine.
struct LocalServerRoute {
    host: String,
}

impl WorkerConnector for LocalServerRoute {
    async fn dial(&mut self) -> Result<Socket<Box<dyn ByteStream>>, WorkerUnreachable> {
        let stream = TcpStream::connect(&self.host)
            .await
            .map_err(|error| WorkerUnreachable::RetryLater(error.to_string()))?;
        let upgrade = ClientUpgrade {
            host: self.host.clone(),
            path: "/".to_owned(),
            subprotocol: Some(v1::SUBPROTOCOL.to_owned()),
            token: None,
        };
        let (socket, chosen) = Socket::connect(Box::new(stream) as Box<dyn ByteStream>, &upgrade)
            .await
            .map_err(|error| WorkerUnreachable::RetryLater(error.to_string()))?;
        assert!(chosen, "the server chose the subprotocol");
        Ok(socket)
    }

    async fn read_undelivered(&mut self, _: UpdateNumber) -> Vec<NumberedUpdate> {
        Vec::new()
    }
}

/// Does what the prompt says.
async fn worker(assignment: RunAssignment, run: RunHandle) -> TurnOutcome {
    match assignment.prompt.as_str() {
        "count" => {
            // Half of the numbers, then a steer, then the rest.
            for number in 0..500 {
                run.send_text(format!("{number} ")).await.unwrap();
            }
            let steer = run.next_steer().await.unwrap();
            for number in 500..1000 {
                run.send_text(format!("{number} ")).await.unwrap();
            }
            TurnOutcome::completed(steer)
        }
        "ask" => TurnOutcome::completed(run.request_approval(PlainApproval::default()).await.to_string()),
        _ => {
            run.cancelled().await;
            TurnOutcome::completed("too late")
        }
    }
}

async fn serve() -> String {
    let server = WorkerServer::bind("127.0.0.1:0").await.unwrap();
    let host = server.address().to_string();
    tokio::spawn(server.with_subprotocol(LinkSubprotocol::default()).serve(worker, ServeMode::Many));
    host
}

fn open(host: &str, journalled: u64) -> AgentLink {
    let (session, worker) = (SessionId::from_random(&[1; 8]), WorkerId::from_random(&[2; 8]));
    let spec = AgentSpec {
        after: UpdateNumber(journalled),
        ..AgentSpec::new(session.clone(), worker.clone(), "test", "/")
    };
    let options = LinkOptions {
        session,
        worker,
        secret: Secret::default(),
        journalled: UpdateNumber(journalled),
        reach_timeout: Duration::from_secs(60),
        software: "test".to_owned(),
        start: (journalled == 0).then(|| Box::new(spec)),
    };
    AgentLink::open(options, LocalServerRoute { host: host.to_owned() })
}

fn run() -> RunId {
    RunId::parse("run_1").unwrap()
}

fn prompt(number: u64, prompt: &str) -> AgentCommand {
    AgentCommand::Prompt {
        number: EventNumber(number),
        run: run(),
        prompt: prompt.to_owned(),
        mode: None,
        files: Vec::new(),
        messages: Vec::new(),
        limits: TurnLimits::default(),
    }
}

/// Acknowledges and collects all updates up to and including the first for which `last` is true.
async fn until(link: &mut AgentLink, last: impl Fn(&AgentUpdate) -> bool) -> Vec<NumberedUpdate> {
    let mut received = Vec::new();
    let wait = async {
        loop {
            if let LinkEvent::Updates(updates) = link.next_event().await {
                link.ack(updates.last().unwrap().number);
                received.extend(updates);
            }
            if received.iter().any(|numbered| last(&numbered.update)) {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(30), wait).await.expect("the update comes in time");
    received
}

fn text(received: &[NumberedUpdate]) -> String {
    let texts = received.iter().filter_map(|numbered| match &numbered.update {
        AgentUpdate::Turn { update: TurnUpdate::Text { text }, .. } => Some(text.as_str()),
        _ => None,
    });
    texts.collect()
}

fn is_terminal(update: &AgentUpdate) -> bool {
    matches!(update, AgentUpdate::TurnEnded { .. })
}

fn outcome(received: &[NumberedUpdate]) -> &TurnOutcome {
    match &received.last().unwrap().update {
        AgentUpdate::TurnEnded { outcome, .. } => outcome,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_run_that_its_daemon_left_is_whole_when_another_one_comes() {
    let host = serve().await;
    let mut first = open(&host, 0);
    let mut received = until(&mut first, |update| matches!(update, AgentUpdate::Ready { .. })).await;
    first.send(prompt(1, "count"));
    received.extend(until(&mut first, |update| matches!(update, AgentUpdate::Turn { .. })).await);
    drop(first);
    let mut second = open(&host, received.last().unwrap().number.0);
    second.send(AgentCommand::Steer { number: EventNumber(2), run: run(), text: "go on".to_owned() });
    received.extend(until(&mut second, is_terminal).await);
    assert_eq!(text(&received), (0..1000).map(|number| format!("{number} ")).collect::<String>());
    assert!(
        received.iter().any(|numbered| numbered.update == AgentUpdate::SteerTaken { steer: EventNumber(2) })
    );
    assert!(received.iter().map(|numbered| numbered.number.0).eq(1..=received.len() as u64));
    assert_eq!(outcome(&received).text.as_deref(), Some("go on"));
}

#[tokio::test]
async fn an_ask_is_answered_over_another_connection_than_it_was_asked() {
    let host = serve().await;
    let mut first = open(&host, 0);
    until(&mut first, |update| matches!(update, AgentUpdate::Ready { .. })).await;
    first.send(prompt(1, "ask"));
    let received = until(&mut first, |update| matches!(update, AgentUpdate::Ask { .. })).await;
    let AgentUpdate::Ask { ask, .. } = &received.last().unwrap().update else { panic!("it asks") };
    drop(first);
    let mut second = open(&host, received.last().unwrap().number.0);
    let allow = AskAnswer { decision: Some(PermissionDecision::AllowOnce), value: None, reason: None };
    second.send(AgentCommand::Answer {
        number: EventNumber(2),
        ask: ask.id.clone(),
        answer: AskResolution::Answered(allow),
    });
    let received = until(&mut second, is_terminal).await;
    assert_eq!(received[0].update, AgentUpdate::AskDelivered { ask: ask.id.clone() });
    assert_eq!(outcome(&received).text.as_deref(), Some("true"));
}

#[tokio::test]
async fn a_cancel_ends_the_run_and_a_steer_that_nobody_took_is_told() {
    let host = serve().await;
    let mut link = open(&host, 0);
    link.send(prompt(1, "wait"));
    link.send(AgentCommand::Steer { number: EventNumber(2), run: run(), text: "unheard".to_owned() });
    link.send(AgentCommand::Cancel { number: EventNumber(3), run: run() });
    let received = until(&mut link, is_terminal).await;
    assert_eq!(outcome(&received).stop, TurnStopReason::Cancelled);
    assert!(
        received.iter().any(|numbered| numbered.update == AgentUpdate::SteerMissed { steer: EventNumber(2) })
    );
}

#[tokio::test]
async fn a_session_that_is_closed_is_gone() {
    let host = serve().await;
    let mut link = open(&host, 0);
    until(&mut link, |update| matches!(update, AgentUpdate::Ready { .. })).await;
    link.close();
    let received = until(&mut link, |update| matches!(update, AgentUpdate::Gone(_))).await;
    assert_eq!(received.last().unwrap().update, AgentUpdate::Gone(AgentExitReason::Stopped));
}
