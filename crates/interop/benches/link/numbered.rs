//! The daemon's side of `quarterdeck.v1`, as far as a long run needs it. It shows the cost of losing nothing when a
//! connection breaks. Adjacent pieces of text are merged before they are numbered, so the text is counted in bytes.

use std::time::{Duration, Instant};

use qd_link::{AgentLink, LinkEvent, LinkOptions, NumberedUpdate, WorkerConnector, WorkerUnreachable};
use qd_protocol::frame::v1;
use qd_protocol::link::{AgentCommand, AgentUpdate, TurnLimits, TurnUpdate, UpdateNumber};
use qd_protocol::worker::{AgentSpec, Secret};
use qd_protocol::{EventNumber, RunId, SessionId, WorkerId};
use qd_worker_sdk::socket::{ByteStream, ClientUpgrade, Socket};
use tokio::net::TcpStream;

use crate::served::WORD;

/// A session with an agent on our worker.
pub(crate) struct Session {
    link: AgentLink,
    runs: u64,
}

impl Session {
    pub(crate) async fn open(endpoint: &str) -> Self {
        let (session, worker) = (SessionId::from_random(&[1; 16]), WorkerId::from_random(&[2; 16]));
        let spec = AgentSpec::new(session.clone(), worker.clone(), "words", "/");
        let options = LinkOptions {
            session,
            worker,
            secret: Secret::default(),
            journalled: UpdateNumber(0),
            reach_timeout: Duration::from_secs(60),
            software: "bench".to_owned(),
            start: Some(Box::new(spec)),
        };
        let host = endpoint.trim_start_matches("ws://").to_owned();
        let mut opened = Self { link: AgentLink::open(options, TcpConnector { host }), runs: 0 };
        while !opened.next_updates().await.iter().any(|up| matches!(up.update, AgentUpdate::Ready { .. })) {}
        opened
    }

    /// Duration of a run of `words` words, all of which arrive and are acknowledged.
    pub(crate) async fn run(&mut self, words: u64) -> Duration {
        let started_at = Instant::now();
        self.runs += 1;
        self.link.send(AgentCommand::Prompt {
            number: EventNumber(self.runs),
            run: RunId::parse(&format!("run_{}", self.runs)).expect("a good id"),
            prompt: words.to_string(),
            mode: None,
            files: Vec::new(),
            messages: Vec::new(),
            limits: TurnLimits::default(),
        });
        let mut bytes = 0;
        loop {
            for numbered in self.next_updates().await {
                match numbered.update {
                    AgentUpdate::Turn { update: TurnUpdate::Text { text }, .. } => bytes += text.len() as u64,
                    AgentUpdate::TurnEnded { .. } => {
                        assert_eq!(bytes, words * WORD.len() as u64, "words were lost");
                        return started_at.elapsed();
                    }
                    _ => {}
                }
            }
        }
    }

    async fn next_updates(&mut self) -> Vec<NumberedUpdate> {
        loop {
            match self.link.next_event().await {
                LinkEvent::Updates(updates) => {
                    if let Some(last) = updates.last() {
                        self.link.ack(last.number);
                    }
                    return updates;
                }
                LinkEvent::Attached { .. } => {}
                other => panic!("the worker is gone: {other:?}"),
            }
        }
    }
}

struct TcpConnector {
    host: String,
}

impl WorkerConnector for TcpConnector {
    async fn dial(&mut self) -> Result<Socket<Box<dyn ByteStream>>, WorkerUnreachable> {
        let stream = TcpStream::connect(&self.host)
            .await
            .map_err(|error| WorkerUnreachable::RetryLater(error.to_string()))?;
        stream.set_nodelay(true).map_err(|error| WorkerUnreachable::RetryLater(error.to_string()))?;
        let upgrade = ClientUpgrade {
            host: self.host.clone(),
            path: "/".to_owned(),
            subprotocol: Some(v1::SUBPROTOCOL.to_owned()),
            token: None,
        };
        let wire: Box<dyn ByteStream> = Box::new(stream);
        let (socket, _) = Socket::connect(wire, &upgrade)
            .await
            .map_err(|error| WorkerUnreachable::RetryLater(error.to_string()))?;
        Ok(socket)
    }

    async fn read_undelivered(&mut self, _: UpdateNumber) -> Vec<NumberedUpdate> {
        Vec::new()
    }
}
