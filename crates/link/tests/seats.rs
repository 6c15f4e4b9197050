//! An executor behind `quarterdeck.v1`: the same worker that serves anybody is the agent of a session, is left in the
//! middle of a run, and attached to again without a word lost or doubled.
#![expect(clippy::unwrap_used, reason = "a test that fails should say where")]

use std::time::Duration;

use qd_link::socket::{Socket, Upgrade, Wire};
use qd_link::{
    AgentLink, Approval, Heard, Job, LinkOptions, Numbered, Outcome, Route, Serve, Server, Turn, Unreachable,
};
use qd_protocol::event::{Answer, Decision};
use qd_protocol::frame::v1;
use qd_protocol::link::{Down, Gone, Reply, Said, Stop, TurnLimits, Up, UpNumber};
use qd_protocol::worker::{AgentSpec, Secret};
use qd_protocol::{Number, RunId, SessionId, WorkerId};
use tokio::net::TcpStream;

/// The way to a server on this machine.
struct Dial {
    host: String,
}

impl Route for Dial {
    async fn dial(&mut self) -> Result<Socket<Box<dyn Wire>>, Unreachable> {
        let stream = TcpStream::connect(&self.host).await.map_err(|_| Unreachable::Later)?;
        let upgrade = Upgrade {
            host: self.host.clone(),
            path: "/".to_owned(),
            subprotocol: Some(v1::SUBPROTOCOL.to_owned()),
            token: None,
        };
        let (socket, chosen) = Socket::client(Box::new(stream) as Box<dyn Wire>, &upgrade)
            .await
            .map_err(|_| Unreachable::Later)?;
        assert!(chosen, "the subprotocol is spoken");
        Ok(socket)
    }

    async fn remains(&mut self, _: UpNumber) -> Vec<Numbered> {
        Vec::new()
    }
}

/// What the prompt's first word says.
async fn worker(job: Job, turn: Turn) -> Outcome {
    match job.assignment.as_str() {
        "count" => {
            // Half of it, then a word from outside, then the rest.
            for number in 0..500 {
                turn.say(format!("{number} ")).await.unwrap();
            }
            let told = turn.steer().await.unwrap();
            for number in 500..1000 {
                turn.say(format!("{number} ")).await.unwrap();
            }
            Outcome::completed(told)
        }
        "ask" => Outcome::completed(turn.approve(Approval::default()).await.to_string()),
        _ => {
            turn.cancelled().await;
            Outcome::completed("too late")
        }
    }
}

async fn serve() -> String {
    let server = Server::bind("127.0.0.1:0").await.unwrap();
    let host = server.address().to_string();
    tokio::spawn(server.serve(worker, Serve::Many));
    host
}

fn open(host: &str, taken: u64) -> AgentLink {
    let (session, worker) = (SessionId::from_random(&[1; 8]), WorkerId::from_random(&[2; 8]));
    let spec =
        AgentSpec { after: UpNumber(taken), ..AgentSpec::new(session.clone(), worker.clone(), "test", "/") };
    let options = LinkOptions {
        session,
        worker,
        secret: Secret::default(),
        taken: UpNumber(taken),
        software: "test".to_owned(),
        start: (taken == 0).then(|| Box::new(spec)),
    };
    AgentLink::open(options, Dial { host: host.to_owned() })
}

fn run() -> RunId {
    RunId::parse("run_1").unwrap()
}

fn prompt(number: u64, prompt: &str) -> Down {
    Down::Prompt {
        number: Number(number),
        run: run(),
        prompt: prompt.to_owned(),
        files: Vec::new(),
        messages: Vec::new(),
        limits: TurnLimits::default(),
    }
}

/// Everything that is said until `last` comes, which is part of it; all of it is acknowledged.
async fn until(link: &mut AgentLink, last: impl Fn(&Up) -> bool) -> Vec<Numbered> {
    let mut heard = Vec::new();
    let wait = async {
        loop {
            if let Heard::Said(said) = link.hear().await {
                link.ack(said.last().unwrap().number);
                heard.extend(said);
            }
            if heard.iter().any(|thing| last(&thing.up)) {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(30), wait).await.expect("it comes");
    heard
}

fn text(heard: &[Numbered]) -> String {
    let words = heard.iter().filter_map(|thing| match &thing.up {
        Up::Said { what: Said::Text { text }, .. } => Some(text.as_str()),
        _ => None,
    });
    words.collect()
}

fn is_terminal(up: &Up) -> bool {
    matches!(up, Up::Terminal { .. })
}

fn outcome(heard: &[Numbered]) -> &Outcome {
    match &heard.last().unwrap().up {
        Up::Terminal { outcome, .. } => outcome,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_run_that_its_daemon_left_is_whole_when_another_one_comes() {
    let host = serve().await;
    let mut first = open(&host, 0);
    let mut heard = until(&mut first, |up| matches!(up, Up::Ready { .. })).await;
    first.send(prompt(1, "count"));
    heard.extend(until(&mut first, |up| matches!(up, Up::Said { .. })).await);
    drop(first);
    let mut second = open(&host, heard.last().unwrap().number.0);
    second.send(Down::Steer { number: Number(2), run: run(), text: "go on".to_owned() });
    heard.extend(until(&mut second, is_terminal).await);
    assert_eq!(text(&heard), (0..1000).map(|number| format!("{number} ")).collect::<String>());
    assert!(heard.iter().any(|thing| thing.up == Up::SteerTaken { steer: Number(2) }));
    assert!(heard.iter().map(|thing| thing.number.0).eq(1..=heard.len() as u64));
    assert_eq!(outcome(&heard).text.as_deref(), Some("go on"));
}

#[tokio::test]
async fn an_ask_is_answered_over_another_connection_than_it_was_asked() {
    let host = serve().await;
    let mut first = open(&host, 0);
    until(&mut first, |up| matches!(up, Up::Ready { .. })).await;
    first.send(prompt(1, "ask"));
    let heard = until(&mut first, |up| matches!(up, Up::Ask { .. })).await;
    let Up::Ask { ask, .. } = &heard.last().unwrap().up else { panic!("it asks") };
    drop(first);
    let mut second = open(&host, heard.last().unwrap().number.0);
    let allow = Answer { decision: Some(Decision::AllowOnce), value: None, reason: None };
    second.send(Down::Answer { number: Number(2), ask: ask.id.clone(), answer: Reply::Answered(allow) });
    let heard = until(&mut second, is_terminal).await;
    assert_eq!(heard[0].up, Up::AskDelivered { ask: ask.id.clone() });
    assert_eq!(outcome(&heard).text.as_deref(), Some("true"));
}

#[tokio::test]
async fn a_cancel_ends_the_run_and_a_steer_that_nobody_took_is_told() {
    let host = serve().await;
    let mut link = open(&host, 0);
    link.send(prompt(1, "wait"));
    link.send(Down::Steer { number: Number(2), run: run(), text: "unheard".to_owned() });
    link.send(Down::Cancel { number: Number(3), run: run() });
    let heard = until(&mut link, is_terminal).await;
    assert_eq!(outcome(&heard).stop, Stop::Cancelled);
    assert!(heard.iter().any(|thing| thing.up == Up::SteerMissed { steer: Number(2) }));
}

#[tokio::test]
async fn a_session_that_is_closed_is_gone() {
    let host = serve().await;
    let mut link = open(&host, 0);
    until(&mut link, |up| matches!(up, Up::Ready { .. })).await;
    link.close();
    let heard = until(&mut link, |up| matches!(up, Up::Gone(_))).await;
    assert_eq!(heard.last().unwrap().up, Up::Gone(Gone::Stopped));
}
