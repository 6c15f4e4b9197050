//! `qd serve` and `qd doctor --rebuild`: the only two calls into the daemon's crate that do its work. Everything that
//! is to be wired to it is in this file.

use qd_daemon::home::Home;
use serde::Serialize;

use crate::args::Serve;
use crate::daemon;
use crate::failure::{Exit, Failure, Result};
use crate::verbs::Context;

/// Runs the daemon until it is told to end.
pub(crate) fn serve(context: &Context, flags: Serve) -> Result<Exit> {
    if flags.background {
        daemon::leave_the_caller();
    }
    let _ = context;
    Err(Failure::Other(anyhow::anyhow!("the daemon is not wired in yet")))
}

/// What a rebuild made.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Rebuilt {
    /// Events read.
    pub(crate) events: u64,
    /// Sessions made of them.
    pub(crate) sessions: u64,
    /// Runs.
    pub(crate) runs: u64,
    /// Asks.
    pub(crate) asks: u64,
    /// Workspaces.
    pub(crate) workspaces: u64,
}

/// Makes the lists anew from the events.
pub(crate) fn rebuild(home: &Home) -> Result<Rebuilt> {
    let _ = home;
    Err(Failure::Other(anyhow::anyhow!("the rebuild is not wired in yet")))
}
