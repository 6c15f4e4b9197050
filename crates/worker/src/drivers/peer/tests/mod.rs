//! Promises of the driver, seen from the session's end of a link. At the other end is a worker on loopback whose every
//! frame the test sends itself.

mod asks;
mod breaks;
mod hand;
mod starts;
mod turns;

use qd_protocol::link::Up;

use self::hand::{Hand, Listening};
use crate::drivers::stage::Stage;

/// An agent that is ready, its far end, and where the next connection would come.
async fn ready() -> (Stage, Hand, Listening) {
    let listening = Listening::start().await;
    let mut stage = Stage::remote(&listening.agent(), |_| {});
    let hand = listening.accept().await;
    assert_eq!(stage.hear().await, Up::Ready { agent_session_id: None, steers: true });
    (stage, hand, listening)
}

/// One that has a run `a`, which has begun.
async fn begun() -> (Stage, Hand, Listening) {
    let (mut stage, mut hand, listening) = ready().await;
    stage.prompt("a", "x");
    hand.run().await;
    (stage, hand, listening)
}
