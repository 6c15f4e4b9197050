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
use qd_daemon::home::DaemonHome;

use args::{CliVerb, CommandLine};
use daemon::DaemonLocator;
use failure::{CliExitCode, Result};
use output::CliOutput;
use verbs::VerbContext;

fn main() -> ExitCode {
    if let Some(ended) = run_internal_process() {
        return ended;
    }
    let CommandLine { global, verb } = CommandLine::parse();
    let out = CliOutput::new(global.json);
    let whereabouts = DaemonLocator { home: DaemonHome::resolve(global.home), explicit_host: global.host };
    let mut context = VerbContext { out, locator: whereabouts };
    let ended = match verb {
        // The daemon brings its own runtime.
        CliVerb::Serve(flags) => serve::serve(&context, flags),
        verb => context.locator.apply_environment().and_then(|()| run_verb_in_runtime(&context, verb)),
    };
    let exit = ended.unwrap_or_else(|failure| {
        context.out.print_failure(&failure);
        failure.exit_code()
    });
    context.out.clear_spinner();
    exit.into()
}

/// The binary is also its own worker, keeper, scripted agent, and the step before a program that wants a terminal. They
/// are started by each other and by the daemon, not by people, and must be quick: nothing is parsed for them.
fn run_internal_process() -> Option<ExitCode> {
    match std::env::args_os().nth(1)?.to_str()? {
        "__worker" => Some(qd_worker::host::main()),
        "__keeper" => Some(qd_keeper::keeper_process::main()),
        "__script" => Some(qd_worker::script::main()),
        qd_worker::tty::TTY_COMMAND => Some(qd_worker::tty::main()),
        _ => None,
    }
}

fn run_verb_in_runtime(context: &VerbContext, verb: CliVerb) -> Result<CliExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(anyhow::Error::from)?;
    let ended = runtime.block_on(verbs::run_verb(context, verb));
    // A thread may still wait for a line on stdin; nobody waits for it.
    runtime.shutdown_background();
    ended
}
