//! `qd`: the command line of Quarterdeck. Parses, does the verb, and turns how that ended into an exit code. Verbs talk
//! to the daemon by HTTP alone; only `serve`, `config` and `doctor --rebuild` touch its crate.

mod args;
mod client;
mod daemon;
mod failure;
mod output;
mod refs;
mod render;
mod serve;
mod verbs;

use std::process::ExitCode;

use clap::Parser;
use qd_daemon::home::Home;

use args::{Line, Verb};
use daemon::Whereabouts;
use failure::{Exit, Result};
use output::Output;
use verbs::Context;

fn main() -> ExitCode {
    let Line { global, verb } = Line::parse();
    let out = Output::new(global.json);
    let whereabouts = Whereabouts { home: Home::resolve(global.home), explicit: global.host };
    let mut context = Context { out, whereabouts };
    let ended = match verb {
        // The daemon brings its own runtime.
        Verb::Serve(flags) => serve::serve(&context, flags),
        verb => context.whereabouts.ask_environment().and_then(|()| in_runtime(&context, verb)),
    };
    let exit = ended.unwrap_or_else(|failure| {
        context.out.failure(&failure);
        failure.exit()
    });
    context.out.clear_spinner();
    exit.into()
}

fn in_runtime(context: &Context, verb: Verb) -> Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(anyhow::Error::from)?;
    let ended = runtime.block_on(verbs::perform(context, verb));
    // A thread may still wait for a line on stdin; nobody waits for it.
    runtime.shutdown_background();
    ended
}
