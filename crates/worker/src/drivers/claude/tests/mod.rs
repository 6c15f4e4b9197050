//! Promises of the driver, seen from the session's end of a link. At the other end is an agent whose every line a test
//! writes, or one that was recorded; between the two is a pipe in memory, and time stands still.

mod cancels;
mod hand;
mod recorded;
mod steers;
mod turns;

use std::future::pending;

use qd_protocol::event::RunError;
use qd_protocol::link::{Gone, Up};
use tokio::io::{DuplexStream, ReadHalf, WriteHalf};

use self::hand::Hand;
use super::ear::Ear;
use super::opening::{Unopened, open};
use super::talk::Talk;
use super::tally::Tally;
use crate::drivers::lines::Lines;
use crate::drivers::price::Pricing;
use crate::drivers::stage::{Stage, hung_up, talks};

type Pipe = Talk<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>>;

talks!(Pipe);

/// What the driver is given besides the agent.
#[derive(Default)]
struct Given {
    pricing: Pricing,
    /// The conversation that it goes on with.
    resumed: Option<String>,
    forgot: Option<String>,
}

/// An agent whose lines the test writes, after its handshake.
async fn with<F, A>(play: F) -> Stage
where
    F: FnOnce(Hand) -> A + Send + 'static,
    A: Future<Output = ()> + Send + 'static,
{
    let mut stage = staged(Given::default(), |far| async move {
        let mut hand = Hand::new(far);
        hand.open().await;
        play(hand).await;
    });
    assert!(matches!(stage.hear().await, Up::Ready { steers: true, .. }));
    stage
}

/// Any agent at the far end of a pipe.
fn staged<F, A>(given: Given, far: F) -> Stage
where
    F: FnOnce(DuplexStream) -> A,
    A: Future<Output = ()> + Send + 'static,
{
    let (stage, other) = Stage::new("claude", |_| {}, |_, near| opened(given, near));
    stage.played(far(other))
}

/// A conversation, after its opening.
async fn opened(given: Given, near: DuplexStream) -> Result<(Pipe, Up), Gone> {
    let (from, to) = tokio::io::split(near);
    let mut lines = Lines::new(from, to, Box::pin(pending()));
    match open(&mut lines).await {
        Ok(()) => {}
        Err(Unopened::HungUp) => return Err(hung_up()),
        Err(Unopened::Refused(why)) => return Err(Gone::Failed(RunError::new("refused", why))),
    }
    let Given { pricing, resumed, forgot } = given;
    let ear = Ear::new(Tally::new(pricing, None, resumed.is_some()));
    let talk = Talk::new(lines, resumed.unwrap_or_else(|| "s".to_owned()), ear, true, forgot);
    let hello = Up::Ready { agent_session_id: Some(talk.session().to_owned()), steers: true };
    Ok((talk, hello))
}
