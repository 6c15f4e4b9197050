//! Promises of the driver, seen from the session's end of a link. At the other end of a pipe in memory is a server whose
//! every line the test writes itself, or one that was recorded. Time stands still: it moves on when everybody waits.

mod asks;
mod cancels;
mod hand;
mod opening;
mod recorded;
mod turns;

use std::future::pending;

use qd_protocol::link::{Gone, Said, Up};
use qd_protocol::worker::AgentSpec;
use tokio::io::{DuplexStream, ReadHalf, WriteHalf};

use self::hand::Hand;
use super::opening::{Opening, Unopened, open};
use super::talk::{Talk, run_error};
use super::wire::Peer;
use crate::drivers::price::Pricing;
use crate::drivers::stage::{Stage, hung_up, rest, talks};

type Pipe = Talk<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>>;

talks!(Pipe);

/// An agent that is ready, and its far end.
async fn ready() -> (Stage, Hand) {
    let (mut stage, mut hand) = with(|_| {});
    hand.open().await;
    assert!(matches!(stage.hear().await, Up::Ready { steers: true, .. }));
    (stage, hand)
}

/// One that has a turn, which has begun.
async fn begun() -> (Stage, Hand) {
    let (mut stage, mut hand) = ready().await;
    stage.prompt("a", "x");
    hand.take("u").await;
    hand.started("u").await;
    rest().await;
    (stage, hand)
}

/// One that has been started, and nothing more.
fn with(change: impl FnOnce(&mut AgentSpec)) -> (Stage, Hand) {
    let change = |spec: &mut AgentSpec| {
        spec.cwd = "/w".into();
        change(spec);
    };
    let (stage, far) = Stage::new("codex", change, opened);
    (stage, Hand::new(far))
}

/// A conversation, after its opening.
async fn opened(spec: AgentSpec, near: DuplexStream) -> Result<(Pipe, Up), Gone> {
    let (from, to) = tokio::io::split(near);
    let mut peer = Peer::new(from, to, Box::pin(pending()));
    let opened = match open(&mut peer, &Opening::of(&spec)).await {
        Ok(opened) => opened,
        Err(Unopened::HungUp) => return Err(hung_up()),
        Err(Unopened::Refused(told)) => return Err(Gone::Failed(run_error(&told))),
    };
    let talk = Talk::new(peer, opened, Pricing::of(&spec));
    let hello = Up::Ready { agent_session_id: Some(talk.thread().to_owned()), steers: true };
    Ok((talk, hello))
}

fn text(text: &str) -> Said {
    Said::Text { text: text.to_owned() }
}
