//! `qd`: the command line of Quarterdeck. Parses, does the verb, and turns how that ended into an exit code. Verbs talk
//! to the daemon by HTTP alone; only `serve`, `config` and `doctor --rebuild` touch its crate. The same binary, executed
//! again by the daemon, is its own worker.

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
    if let Some(ended) = as_part_of_a_worker() {
        return ended;
    }
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

/// The binary is also its own worker, keeper, scripted agent, and the step before a program that wants a terminal. They
/// are started by each other and by the daemon, not by people, and must be quick: nothing is parsed for them.
fn as_part_of_a_worker() -> Option<ExitCode> {
    match std::env::args_os().nth(1)?.to_str()? {
        "__worker" => Some(qd_worker::host::main()),
        "__keeper" => Some(qd_keeper::process::main()),
        "__script" => Some(qd_worker::script::main()),
        qd_worker::tty::VERB => Some(qd_worker::tty::main()),
        _ => None,
    }
}

fn in_runtime(context: &Context, verb: Verb) -> Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(anyhow::Error::from)?;
    let ended = runtime.block_on(verbs::perform(context, verb));
    // A thread may still wait for a line on stdin; nobody waits for it.
    runtime.shutdown_background();
    ended
}
