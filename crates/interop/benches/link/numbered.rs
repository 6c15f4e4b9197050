//! The daemon's side of `quarterdeck.v1`, as far as a long run needs it: nothing is lost when a connection breaks, and
//! this is what that costs. Neighbouring words are merged before they are numbered, so they are counted by their bytes.

use std::time::{Duration, Instant};

use qd_link::socket::{ByteStream, ClientUpgrade, Socket};
use qd_link::{AgentLink, LinkEvent, LinkOptions, NumberedUpdate, WorkerConnector, WorkerUnreachable};
use qd_protocol::frame::v1;
use qd_protocol::link::{AgentCommand, AgentUpdate, TurnLimits, TurnUpdate, UpdateNumber};
use qd_protocol::worker::{AgentSpec, Secret};
use qd_protocol::{EventNumber, RunId, SessionId, WorkerId};
use tokio::net::TcpStream;

use crate::served::WORD;

/// A session with a worker.
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
            software: "bench".to_owned(),
            start: Some(Box::new(spec)),
        };
        let host = endpoint.trim_start_matches("ws://").to_owned();
        let mut opened = Self { link: AgentLink::open(options, Dial { host }), runs: 0 };
        while !opened.hear().await.iter().any(|thing| matches!(thing.update, AgentUpdate::Ready { .. })) {}
        opened
    }

    /// How long a run of so many words takes, every one of which arrives and is acknowledged.
    pub(crate) async fn run(&mut self, words: u64) -> Duration {
        let begun = Instant::now();
        self.runs += 1;
        self.link.send(AgentCommand::Prompt {
            number: EventNumber(self.runs),
            run: RunId::parse(&format!("run_{}", self.runs)).expect("a good id"),
            prompt: words.to_string(),
            files: Vec::new(),
            messages: Vec::new(),
            limits: TurnLimits::default(),
        });
        let mut bytes = 0;
        loop {
            for thing in self.hear().await {
                match thing.update {
                    AgentUpdate::Turn { update: TurnUpdate::Text { text }, .. } => bytes += text.len() as u64,
                    AgentUpdate::Terminal { .. } => {
                        assert_eq!(bytes, words * WORD.len() as u64, "words were lost");
                        return begun.elapsed();
                    }
                    _ => {}
                }
            }
        }
    }

    async fn hear(&mut self) -> Vec<NumberedUpdate> {
        loop {
            match self.link.next_event().await {
                LinkEvent::Updates(said) => {
                    if let Some(last) = said.last() {
                        self.link.ack(last.number);
                    }
                    return said;
                }
                LinkEvent::Attached { .. } => {}
                other => panic!("the worker is gone: {other:?}"),
            }
        }
    }
}

struct Dial {
    host: String,
}

impl WorkerConnector for Dial {
    async fn dial(&mut self) -> Result<Socket<Box<dyn ByteStream>>, WorkerUnreachable> {
        let stream = TcpStream::connect(&self.host).await.map_err(|_| WorkerUnreachable::RetryLater)?;
        stream.set_nodelay(true).map_err(|_| WorkerUnreachable::RetryLater)?;
        let upgrade = ClientUpgrade {
            host: self.host.clone(),
            path: "/".to_owned(),
            subprotocol: Some(v1::SUBPROTOCOL.to_owned()),
            token: None,
        };
        let wire: Box<dyn ByteStream> = Box::new(stream);
        let (socket, _) = Socket::connect(wire, &upgrade).await.map_err(|_| WorkerUnreachable::RetryLater)?;
        Ok(socket)
    }

    async fn read_undelivered(&mut self, _: UpdateNumber) -> Vec<NumberedUpdate> {
        Vec::new()
    }
}
