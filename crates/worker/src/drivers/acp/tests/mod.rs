//! Promises of the driver and of the scripted agent, seen from the session's end of a link. Between the two is a pipe
//! in memory, and time stands still: it moves on when everybody waits for it.

mod hand;
mod profiles;
mod recorded;
mod resume;
mod script;
mod strangers;
mod turns;

use std::future::pending;

use qd_catalog::Catalog;
use qd_protocol::link::{Gone, Up};
use qd_protocol::worker::AgentSpec;
use tokio::io::{DuplexStream, ReadHalf, WriteHalf};

use self::hand::Hand;
use super::opening::{Opening, Unopened, open};
use super::profile::Profile;
use super::service::Service;
use super::talk::{Talk, run_error};
use super::wire::Peer;
use crate::drivers::stage::{Stage, hung_up, talks};
use crate::script::{Setup, serve};

type Pipe = Talk<ReadHalf<DuplexStream>, WriteHalf<DuplexStream>>;

talks!(Pipe);

/// The scripted agent, ready.
async fn scripted() -> Stage {
    scripted_with(Setup::default(), |_| {}).await
}

/// The same with what its process was given, and what the session was.
async fn scripted_with(setup: Setup, change: impl FnOnce(&mut AgentSpec)) -> Stage {
    let mut stage = with(change, async |far| {
        let (from, to) = tokio::io::split(far);
        serve(from, to, setup).await;
    });
    assert!(matches!(stage.hear().await, Up::Ready { .. }));
    stage
}

/// An agent by hand, of the kind that a manifest describes and after its handshake.
async fn by_hand<A>(agent: &str, play: impl FnOnce(Hand) -> A + Send + 'static) -> Stage
where
    A: Future<Output = ()> + Send + 'static,
{
    let change = |spec: &mut AgentSpec| agent.clone_into(&mut spec.agent);
    let mut stage = with(change, |far| async move {
        let mut hand = Hand::new(far);
        hand.open().await;
        play(hand).await;
    });
    assert!(matches!(stage.hear().await, Up::Ready { .. }));
    stage
}

/// Any agent at the far end of a pipe.
fn with<F, A>(change: impl FnOnce(&mut AgentSpec), far: F) -> Stage
where
    F: FnOnce(DuplexStream) -> A,
    A: Future<Output = ()> + Send + 'static,
{
    let (stage, other) = Stage::new("script", change, |spec, near| opened(spec, near, false));
    stage.played(far(other))
}

/// A conversation, after its opening.
async fn opened(spec: AgentSpec, near: DuplexStream, runs_commands: bool) -> Result<(Pipe, Up), Gone> {
    let (from, to) = tokio::io::split(near);
    let mut peer = Peer::new(from, to, Box::pin(pending()));
    let manifest = Catalog::built_in().get(&spec.agent).expect("it is built in");
    let opening = Opening::of(&spec, Profile::of(&manifest, &spec), runs_commands);
    let opened = match open(&mut peer, &opening).await {
        Ok(opened) => opened,
        Err(Unopened::HungUp) => return Err(hung_up()),
        Err(Unopened::Refused(told)) => return Err(Gone::Failed(run_error(&told))),
    };
    let talk = Talk::new(peer, opened, Service::below(&spec.cwd, None));
    let hello = Up::Ready { agent_session_id: Some(talk.session().to_string()), steers: manifest.steers() };
    Ok((talk, hello))
}
